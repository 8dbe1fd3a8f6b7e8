"""What does a node cost that nobody uses?

    python scripts/bench_idle.py [--json] [--quick]

Bound: nothing has to happen in an idle node but a few timers; the target is under 1 % of a core. Rows: no client, one
idle client, one hundred blocks stored and one idle client. CPU time is the kernel's own count of the node's run time
(schedstat, ns), wake-ups are its context switches.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import numpy as np
from benchlib import Bench, client, main, parser, started

from ucxkv.cli.measure import Row, run_ns


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument("--seconds", type=float, default=0.0, help="length of a row (default 10; 3 with --quick)")
    arguments = options.parse_args()
    seconds = arguments.seconds or (3.0 if arguments.quick else 10.0)
    with started(host_bytes=arguments.host_bytes) as nodes:
        bench = Bench("idle", "an idle node", arguments, nodes)

        async def rows() -> list[Row]:
            await asyncio.sleep(1.0)
            found = [await watch("no client", nodes[0].pid, seconds)]
            async with client(nodes) as kv:
                await asyncio.sleep(0.5)
                found.append(await watch("one idle client", nodes[0].pid, seconds))
                keys = np.random.default_rng(1).integers(1, 255, (100, 16), np.uint8)
                (await kv.put_many(keys, np.zeros((100, 4096), np.uint8))).raise_for_status()
                await asyncio.sleep(0.5)
                found.append(await watch("100 blocks, one idle client", nodes[0].pid, seconds))
            return found

        bench.run([("rows", rows)])
    return 0


async def watch(op: str, pid: int, seconds: float) -> Row:
    before, switches, start = run_ns([pid]), context_switches(pid), time.monotonic()
    await asyncio.sleep(seconds)
    wall = time.monotonic() - start
    return {
        "bench": "idle",
        "op": op,
        "seconds": round(wall, 1),
        "cpu_percent": round((run_ns([pid]) - before) / wall / 1e7, 3),
        "wakeups_s": round((context_switches(pid) - switches) / wall, 1),
        "target_percent": 1.0,
    }


def context_switches(pid: int) -> int:
    """Voluntary context switches of all threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    total += int(line.split()[1])
    return total


if __name__ == "__main__":
    main(run)
