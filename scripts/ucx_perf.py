"""How fast is UCX itself on this machine, or between two, beside a socket and a copy?

    python scripts/ucx_perf.py [--quick] [--json] [--plot out.png] [--server | --connect HOST] ...

For whoever looks at UCX from a source tree: no node is started, and get, put, am and tag of ucx_perftest, ucxx, ucx-py
and NIXL are measured beside a blocking socket and memcpy. It is the command `ucxkv perf` with these defaults; that
command is for whoever runs ucxkv, and measures the product's own calls beside them. Every option of it works here too,
and wins.

Bound: memcpy for get and put on one host; ucx_perftest, which polls on both sides in C, for everything.
"""

from __future__ import annotations

import sys

from ucxkv.cli.app import run

_RAW = {"--backend": "ucx_perftest,ucxx,ucx-py,nixl,socket,memcpy", "--path": "message,network"}


def main() -> int:
    given = sys.argv[1:]
    if {"-h", "--help"} & set(given):
        print(__doc__)
    names = {argument.partition("=")[0] for argument in given}
    added = [] if "--server" in names else [f"{name}={value}" for name, value in _RAW.items() if name not in names]
    return run(["perf", *added, *given])


if __name__ == "__main__":
    sys.exit(main())
