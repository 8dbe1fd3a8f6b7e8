"""Do gets and look-ups stay as fast from a thousand to ten million blocks, and what does the index cost a block?

    python scripts/bench_growth.py [--most 10000000] [--json] [--quick]

Bound: an index line and a slot, wherever they lie; beyond the cache and the TLB's reach a look-up costs two misses
more, which 64-byte lines and huge pages bound. Each step stores more blocks in the same node and measures a get of 16
KiB among them, `exists_many` of 1,000 random keys and `exists` of one, over the mapped table and by message (answered
by the node's data thread). keys/s counts whole calls of the median; vs first is the time against that among the fewest
blocks: 1 is flat. The index memory is what the node itself reports and what its process grew by.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_lookup import CALL, fill, rounds
from benchlib import Bench, client, main, parser, started

from ucxkv.cli.measure import Row, Series, row
from ucxkv.cli.workload import ROUNDS, Workload

VALUE = 16 << 10


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument("--most", type=int, default=0, help="blocks at the end (default 10^7; 10^5 with --quick)")
    arguments = options.parse_args()
    most = arguments.most or (100_000 if arguments.quick else 10_000_000)
    counts = [count for count in (1_000, 10_000, 100_000, 1_000_000, 10_000_000) if count <= most] or [most]
    slots = most * 5 // 4 + 8192
    with started(host_bytes=(128 << 20) + 80 * most, arguments=("--slots-count", str(slots))) as nodes:
        bench = Bench("growth", "growth of the store", arguments, nodes)
        resident = resident_bytes(nodes[0].pid)
        stored = 0
        fewest: dict[str, float] = {}

        async def grow(count: int) -> list[Row]:
            nonlocal stored
            async with client(nodes) as kv, client(nodes, "message") as by_message:
                random = np.random.default_rng(count)
                keys = random.integers(1, 255, (count - stored, 16), np.uint8)
                await fill(kv, keys)
                stored = count
                rows = await step(kv, keys, count, arguments.quick)
                rows += await look_ups(by_message, keys, count, arguments.quick)
                for found in rows:
                    name = f"{found['op'].partition(' ')[0]} {found['path']}"
                    found["vs_first"] = round(found["p50_us"] / fewest.setdefault(name, found["p50_us"]), 2)
                    found["index_bytes_per_block"] = await index_bytes(kv, slots)
                    found["process_growth_per_block"] = round((resident_bytes(nodes[0].pid) - resident) / count, 1)
                return rows

        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
        for count in counts:
            steps.append((f"{count:,} blocks", functools.partial(grow, count)))
        bench.run(steps, node="another process on this host", slots=slots)
    return 0


async def step(kv: Any, keys: Any, count: int, quick: bool) -> list[Row]:
    """The latency of a get and of look-up calls among `count` blocks."""
    work = Workload(kv, VALUE, count=1024, seed=count)
    await work.load()
    path = str(kv.peers()[0].path)
    get = await work.get_single(100 if quick else 400, path=path, stored=count)
    get["op"] = f"get among {count:,}"
    await work.unload()
    return [get, *await look_ups(kv, keys, count, quick)]


async def look_ups(kv: Any, keys: Any, count: int, quick: bool) -> list[Row]:
    """Look-ups of 1,000 keys and of one, over the client's path."""
    path = str(kv.peers()[0].path)
    random = np.random.default_rng(9)

    async def there(some: Any) -> int:
        return int(np.count_nonzero(await kv.exists_many(some)))

    calls = 20 if quick else 100
    source = lambda: keys[random.integers(0, len(keys), CALL)]  # noqa: E731
    measured, _ = await rounds(calls, source, there, CALL, lambda: 0)
    look = row("growth", f"exists_many among {count:,}", measured, path=path, batch=CALL, stored=count, verified=True)
    look["keys_s"] = round(CALL / measured.p50_us * 1e6)
    single = Series()
    for _ in range(ROUNDS):
        times = single.start_round()
        for index in random.integers(0, len(keys), 200):
            key = keys[index].tobytes()
            start = time.perf_counter_ns()
            there_one = await kv.exists(key)
            times.append(time.perf_counter_ns() - start)
            assert there_one
    one = row("growth", f"exists among {count:,}", single, path=path, batch=1, stored=count, verified=True)
    return [look, one]


async def index_bytes(kv: Any, slots: int) -> float | None:
    """Bytes of the node's index (slot table and side arrays) a slot, as the node reports them; None if it does not."""
    numbers = (await kv.status())[0].numbers
    total = numbers.get("index_bytes")
    return None if total is None else round(total / slots, 1)


def resident_bytes(pid: int) -> int:
    """Private memory that a process has touched: without the segment and the slot table, which are shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main(run)
