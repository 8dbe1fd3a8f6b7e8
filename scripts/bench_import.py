"""How long from a fresh interpreter to the first get, and what does an installation weigh?

    python scripts/bench_import.py [--json] [--quick]

Bound: starting Python and importing numpy is what every user of arrays pays; both are measured beside. Each sample is
a new process that imports ucxkv, connects, gets one stored block of 16 KiB, checks its bytes and ends; only the file
cache is warm. Sizes are the files that the installed distributions list, ucxkv's and its dependencies', libucx apart.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from benchlib import Bench, client, main, parser, started

from ucxkv.cli.measure import Row, Series, row

FIRST_GET = """
import asyncio, sys
import ucxkv
async def first():
    async with ucxkv.connect(sys.argv[1]) as kv:
        value = await kv.get(bytes.fromhex(sys.argv[2]))
        assert value == bytes(range(256)) * 64
asyncio.run(first())
"""


def run() -> int:
    arguments = parser(__doc__, sizes="").parse_args()
    samples = 5 if arguments.quick else 15
    with started(host_bytes=arguments.host_bytes) as nodes:
        bench = Bench("import", "from a fresh interpreter to the first get", arguments, nodes)
        key = np.arange(1, 17, dtype=np.uint8)

        async def rows() -> list[Row]:
            async with client(nodes) as kv:
                (await kv.put_many(key[None], [bytes(range(256)) * 64])).raise_for_status()
            commands = {
                "python, nothing": ["-c", "pass"],
                "import numpy": ["-c", "import numpy"],
                "import ucxkv": ["-c", "import ucxkv"],
                "import ucxkv, connect, first get": ["-c", FIRST_GET, nodes[0].address, key.tobytes().hex()],
            }
            series = {name: Series() for name in commands}
            for _ in range(samples):
                for name, command in commands.items():
                    start = time.perf_counter_ns()
                    subprocess.run([sys.executable, *command], check=True, timeout=60)  # noqa: ASYNC221
                    series[name].rounds.append([time.perf_counter_ns() - start])
            limit = series["import numpy"]
            return [row("import", name, times, limit, limit_name="import numpy") for name, times in series.items()]

        bench.run([("rows", rows)], **sizes())
    return 0


def sizes() -> dict[str, object]:
    """MiB on disk of ucxkv with its dependencies, and of the libucx wheel in it."""
    todo, seen = ["ucxkv"], dict[str, int]()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        seen[name] = sum(size(Path(str(found.locate_file(file)))) for file in found.files or [])
        for requirement in found.requires or []:
            if "extra ==" not in requirement:
                todo.append(re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0])
    if "ucxkv" in seen:  # an editable install lists only its link: weigh the source itself
        root = Path(__file__).resolve().parent.parent
        files = [file for top in ("ucxkv", "transport", "tiers") for file in (root / top).rglob("*")]
        seen["ucxkv"] = max(seen["ucxkv"], sum(size(file) for file in files if file.suffix != ".pyc"))
    else:
        return {"installed_mib": "ucxkv is not installed, it runs from its source"}
    mib = {name: round(nbytes / (1 << 20), 1) for name, nbytes in sorted(seen.items(), key=lambda item: -item[1])}
    libucx = sum(nbytes for name, nbytes in mib.items() if name.startswith("libucx"))
    return {
        "installed_mib": round(sum(mib.values()), 1),
        "of_it_libucx_mib": libucx,
        "largest_mib": dict(list(mib.items())[:6]),
    }


def size(path: Path) -> int:
    try:
        return path.stat().st_size if not path.is_symlink() and path.is_file() else 0
    except OSError:
        return 0


if __name__ == "__main__":
    main(run)
