"""Start N ucxkv nodes on this machine, print where they are, and stop them all on Ctrl-C.

    python scripts/start_nodes.py -n 2 --host-bytes 1GiB

The first node starts alone, the others join it. Promises: readiness within --ready-s or an error; when one node dies
the others are stopped and the exit code is 1; on Ctrl-C, SIGTERM or the death of this script (kill -9 included) every
node stops; nothing is left behind. With --json the only line on stdout is one JSON object with all nodes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ucxkv.cli.launch import NodeProcess, start_node, stop_nodes
from ucxkv.errors import SetupError, UsageError
from ucxkv.sizes import parse_size


class Stop(Exception):
    """A signal asked to stop; args[0] is its number."""


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)

    def stop(number: int, _: object) -> None:
        raise Stop(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    nodes: list[NodeProcess] = []
    try:
        start_all(
            nodes,
            arguments.nodes,
            host_bytes=arguments.host_bytes,
            host=arguments.host,
            base_port=arguments.base_port,
            prefix=arguments.name,
            ready_s=arguments.ready_s,
            rest=arguments.rest,
            keep_log=not arguments.logs,
        )
        announce(nodes, arguments.json)
        dead = watch(nodes)
        console.print(f"node {dead.name} (pid {dead.pid}) ended with exit code {dead.process.returncode}", style="red")
        if tail := dead.log_tail():
            console.print(tail, markup=False)
        return 1
    except SetupError as exc:
        console.print(str(exc), style="red", markup=False)
        return 2
    except Stop:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the stop below is bounded; a second Ctrl-C must not cut it short
        killed = stop_nodes(nodes, arguments.stop_s)
        if nodes:
            console.print(f"stopped {len(nodes)} nodes" + (f"; had to kill {', '.join(killed)}" if killed else ""))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--nodes", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--host-bytes", default="1GiB", help="memory for blocks of each node (default 1GiB)")
    parser.add_argument("--base-port", type=int, default=0, help="first port, the others follow (default: free ports)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1; IPv6 unbracketed)"
    )
    parser.add_argument("--name", default="n", help="prefix of the names n1, n2, ... (default n)")
    parser.add_argument("--ready-s", type=float, default=60.0, help="seconds for all to get ready (default 60)")
    parser.add_argument(
        "--stop-s", type=float, default=10.0, help="seconds for all to stop before SIGKILL (default 10)"
    )
    parser.add_argument("--logs", action="store_true", help="let the nodes' logs through to stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("rest", nargs="*", help="after --: further flags of `ucxkv node` for every node")
    arguments = parser.parse_args()
    if not 1 <= arguments.nodes <= 256:
        parser.error("-n must be 1 to 256")
    if arguments.base_port and not 1 <= arguments.base_port <= 65536 - arguments.nodes:
        parser.error("--base-port leaves no room for that many ports")
    try:
        parse_size(arguments.host_bytes)
    except UsageError as exc:
        parser.error(f"--host-bytes: {exc}")
    return arguments


def start_all(
    nodes: list[NodeProcess],
    count: int,
    *,
    host_bytes: str = "1GiB",
    host: str = "127.0.0.1",
    base_port: int = 0,
    prefix: str = "n",
    ready_s: float = 60.0,
    rest: Sequence[str] = (),
    keep_log: bool = True,
) -> None:
    """Start and await all; `nodes` always holds those that run, so that the caller can stop them."""
    deadline_s = time.monotonic() + ready_s
    host = f"[{host}]" if ":" in host else host
    for index in range(count):
        node = start_node(
            f"{prefix}{index + 1}",
            listen=f"{host}:{base_port + index if base_port else 0}",
            host_bytes=host_bytes,
            join=[nodes[0].address] if nodes else [],
            arguments=rest,
            keep_log=keep_log,
        )
        nodes.append(node)
        if index == 0:
            node.wait_ready(deadline_s)
    for node in nodes[1:]:
        node.wait_ready(deadline_s)


def announce(nodes: Sequence[NodeProcess], as_json: bool) -> None:
    if as_json:
        facts = [{"name": node.name, "address": node.address, "pid": node.pid} for node in nodes]
        print(json.dumps({"event": "nodes.ready", "nodes": facts}), flush=True)
        return
    table = Table(title=f"{len(nodes)} nodes; Ctrl-C stops them")
    for heading in ("name", "address", "pid"):
        table.add_column(heading)
    for node in nodes:
        table.add_row(node.name, node.address, str(node.pid))
    Console().print(table)
    addresses = ", ".join(f'"{node.address}"' for node in nodes)
    print(f"async with ucxkv.connect({addresses}) as kv: ...", flush=True)


def watch(nodes: Sequence[NodeProcess]) -> NodeProcess:
    """Return the first node that ends."""
    while True:
        for node in nodes:
            if not node.is_alive:
                return node
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
