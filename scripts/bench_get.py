"""How long does a get take, look-up and `await` included, beside a copy of the same bytes?

    python scripts/bench_get.py [--path mapped|message] [--json] [--quick]
    python scripts/bench_get.py --node-blocked       reads while the node's Python holds its GIL for 1 s

Bound: a mapped read is one look-up (a few cache misses, under 1 us) and one pass over the bytes that copies and sums;
so the copy is the limit, and the call's Python (some us) the price on small blocks. Rows: one `get` at a time by
size, and `get_many` of --batch scattered blocks. --node-blocked compares reads in a quiet second with reads in a
blocked one; it needs no limit, the quiet row is it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable

import blockable_node
from benchlib import Bench, block_sizes, client, main, operations, parser, started

from ucxkv.cli.measure import Row, Series, row
from ucxkv.cli.workload import Workload, working_set
from ucxkv.sizes import short_size


def run() -> int:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, default=64, help="keys of a get_many (default 64; 0 = no such rows)")
    options.add_argument("--node-blocked", action="store_true", help="see above; sizes: the first of --sizes")
    options.add_argument("--rounds-s", type=float, default=1.0, help="length of the blocked time (default 1 s)")
    arguments = options.parse_args()
    sizes = block_sizes(arguments)
    if arguments.node_blocked:
        return blocked(arguments, sizes[0])
    with started(host_bytes=max(arguments.host_bytes, 256 * max(sizes))) as nodes:
        bench = Bench("get", f"get over the {arguments.path} path", arguments, nodes)
        pids = [node.pid for node in nodes]
        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
        for size in sizes:

            async def step(size: int = size) -> list[Row]:
                async with client(nodes, arguments.path) as kv:
                    work = Workload(kv, size, count=working_set(size, arguments.host_bytes // 2), pids=pids)
                    await work.load()
                    path = str(kv.peers()[0].path)
                    rows = [await work.get_single(operations(size, arguments.quick), path=path)]
                    if arguments.batch:
                        batches = max(2, operations(size, arguments.quick, most=1600) // arguments.batch)
                        rows.append(await work.get_batch(arguments.batch, batches, path=path))
                    await work.unload()
                    return rows

            steps.append((short_size(size), step))
        bench.run(steps, node="another process on this host")
    return 0


def blocked(arguments: argparse.Namespace, size: int) -> int:
    """Reads of one size in a quiet second and in a second in which the node's Python stands still."""
    with blockable_node.started(arguments.host_bytes) as node:
        bench = Bench("get", "get while the node's Python is blocked", arguments)

        async def compare() -> list[Row]:
            async with client([node], arguments.path) as kv:
                work = Workload(kv, size, count=working_set(size, arguments.host_bytes // 2))
                await work.load()
                path = str(kv.peers()[0].path)
                await reads(work, 0.2)
                quiet, held = Series(), Series()
                for _ in range(2 if arguments.quick else 5):
                    quiet.rounds.append(await reads(work, arguments.rounds_s))
                    node.block(arguments.rounds_s)
                    held.rounds.append(await reads(work, arguments.rounds_s * 0.8))
                    node.wait_unblocked()
                shape: Row = {"path": path, "bytes": size, "batch": 1, "concurrency": 1, "verified": True}
                rows = [row("get", "get, node quiet", quiet, nbytes=size, **shape)]
                rows.append(row("get", "get, node's Python blocked", held, quiet, nbytes=size, **shape))
                rows[1]["limit_name"] = "node quiet"
                for found, series in zip(rows, (quiet, held), strict=True):
                    found["max_us"] = round(max(max(times) for times in series.rounds) / 1e3, 1)
                return rows

        bench.run([("blocked", compare)], blocked_s=arguments.rounds_s, node="another process on this host")
    return 0


async def reads(work: Workload, seconds: float) -> list[int]:
    """Nanoseconds of single gets for so long; every block is verified after its time was taken."""
    times: list[int] = []
    end = time.perf_counter() + seconds
    index = 0
    while time.perf_counter() < end:
        index = (index + 7919) % work.count
        key, view = work.keys[index].tobytes(), work.into[index]
        start = time.perf_counter_ns()
        got = await work.kv.get(key, into=view)
        times.append(time.perf_counter_ns() - start)
        if got != work.nbytes:
            raise AssertionError(f"get answered {got} while it was stored")
        work.verify(index, view)
    return times


if __name__ == "__main__":
    main(run)
