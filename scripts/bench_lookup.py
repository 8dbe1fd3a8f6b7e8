"""How fast are look-ups: keys a second in calls of 1,000, and the latency of one?

    python scripts/bench_lookup.py [--path mapped|message] [--json] [--quick]

Bound: each look-up reads one index line and one slot at random places, two cache misses that overlap between keys; the
limit measured beside is reading the same number of random 64-byte lines from a table of the same size in this process.
Rows: `exists_many` (all there, all absent, half), `match` on one chain of 1,000, one `exists`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from benchlib import Bench, client, main, parser, started

from ucxkv.cli.measure import Row, Series, row
from ucxkv.cli.workload import ROUNDS

CALL = 1000
Keys = npt.NDArray[np.uint8]


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument(
        "--path", choices=("auto", "mapped", "rma", "message", "network"), default="auto", help="how to reach the node"
    )
    options.add_argument("--keys", type=int, default=0, help="blocks stored (default 1,000,000; 200,000 with --quick)")
    arguments = options.parse_args()
    count = arguments.keys or (200_000 if arguments.quick else 1_000_000)
    with started(host_bytes=max(256 << 20, 160 * count), arguments=("--slots-count", str(count * 5 // 4))) as nodes:
        bench = Bench("lookup", f"look-ups among {count:,} blocks", arguments, nodes)

        async def all_rows() -> list[Row]:
            async with client(nodes, arguments.path) as kv:
                return await lookups(kv, count, arguments.quick)

        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = [("all", all_rows)]
        bench.run(steps, node="another process on this host", stored=count)
    return 0


async def lookups(kv: Any, count: int, quick: bool) -> list[Row]:
    random = np.random.default_rng(3)
    keys = random.integers(1, 255, (count, 16), np.uint8)
    absent = random.integers(1, 255, (count, 16), np.uint8)
    await fill(kv, keys)
    chain = random.integers(1, 255, (CALL, 16), np.uint8)
    (await kv.put_many(chain, np.zeros((CALL, 64), np.uint8), parents="chain")).raise_for_status()
    lines = Lines(count)
    path = str(kv.peers()[0].path)
    calls = 20 if quick else 100
    rows = []

    async def there(found: Keys) -> int:
        return int(np.count_nonzero(await kv.exists_many(found)))

    async def matched(_: Keys) -> int:
        return int((await kv.match(chain)).blocks)

    for op, source, call, expected in (
        ("exists_many, all stored", lambda: keys[random.integers(0, count, CALL)], there, CALL),
        ("exists_many, none stored", lambda: absent[random.integers(0, count, CALL)], there, 0),
        ("match, a chain of 1000", lambda: chain, matched, CALL),
    ):
        measured, limit = await rounds(calls, source, call, expected, lambda: lines.read_ns(CALL))
        found = row("lookup", op, measured, limit, path=path, batch=CALL, limit_name="random 64 B lines", verified=True)
        found["keys_s"] = round(CALL / measured.p50_us * 1e6)
        rows.append(found)

    async def one(found: Keys) -> int:
        return int(await kv.exists(found[0].tobytes()))

    measured, _ = await rounds(calls * 10, lambda: keys[random.integers(0, count, 1)], one, 1, lambda: 0)
    rows.append(row("lookup", "exists, one key", measured, path=path, batch=1, verified=True))
    return rows


async def rounds(
    calls: int,
    source: Callable[[], Keys],
    call: Callable[[Keys], Awaitable[int]],
    expected: int,
    limit_ns: Callable[[], int],
) -> tuple[Series, Series]:
    measured, limit = Series(), Series()
    for number in range(ROUNDS + 1):
        times, limits = measured.start_round(), limit.start_round()
        for _ in range(calls):
            keys = source()
            start = time.perf_counter_ns()
            answer = await call(keys)
            times.append(time.perf_counter_ns() - start)
            if answer != expected:
                raise AssertionError(f"the look-up answered {answer}, not {expected}")
            limits.append(limit_ns())
        if number == 0:
            measured.rounds.clear()
            limit.rounds.clear()
    return measured, limit


async def fill(kv: Any, keys: Keys, step: int = 4096) -> None:
    """Store a root block of 64 bytes under each key."""
    blocks = np.zeros((step, 64), np.uint8)
    for begin in range(0, len(keys), step):
        some = keys[begin : begin + step]
        (await kv.put_many(some, blocks[: len(some)])).raise_for_status()


class Lines:
    """The limit: random 64-byte lines of a table as large as the slots."""

    def __init__(self, count: int) -> None:
        self._table = np.ones((count, 8), np.uint64)
        self._random = np.random.default_rng(5)
        self._into = np.empty((CALL, 8), np.uint64)

    def read_ns(self, n: int) -> int:
        """Nanoseconds for n of them."""
        places = self._random.integers(0, len(self._table), n)
        start = time.perf_counter_ns()
        np.take(self._table, places, axis=0, out=self._into[:n], mode="clip")
        return time.perf_counter_ns() - start


if __name__ == "__main__":
    main(run)
