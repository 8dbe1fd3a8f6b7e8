"""How long does it take to put and get an object under a name, beside a copy of the same bytes?

    python scripts/bench_objects.py [--path mapped|message|network] [--durable] [--json] [--quick]

Bound of a get: the copy, after three look-ups (header, seal, body). Bound of a put: the copy, and three round trips to
the node's Python (four with --durable): body and seal, header, removal of the value before. So small ones cost the
steps and large ones the copy. Rows by size: `put` in the place of another version, from scattered memory; `get` of any
of the objects into scattered memory. Every object is one of a working set; what was put is got, and compared, untimed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchlib import Bench, block_sizes, client, main, operations, parser, started

from ucxkv.cli.measure import Copier, Row, Series, anonymous_blocks, row
from ucxkv.cli.workload import ROUNDS, working_set
from ucxkv.errors import IntegrityError
from ucxkv.node.state import forget
from ucxkv.perf.peers.blocks import Pattern
from ucxkv.sizes import short_size


def run() -> int:
    options = parser(__doc__, sizes="1KiB,64KiB,1MiB,16MiB")
    options.add_argument("--durable", action="store_true", help="objects that survive the node's process")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        try:
            measure(arguments, ("--durability", "process", "--state-dir", str(state)) if arguments.durable else ())
        finally:
            if state.exists():
                forget(state)
    return 0


def measure(arguments: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """All rows, on a node with these flags."""
    sizes = block_sizes(arguments)
    with started(host_bytes=max(arguments.host_bytes, 32 * max(sizes)), arguments=flags) as nodes:
        bench = Bench("objects", f"objects over the {arguments.path} path", arguments, nodes)
        steps: list[tuple[str, Callable[[], Awaitable[list[Row]]]]] = []
        for size in sizes:

            async def step(size: int = size) -> list[Row]:
                async with client(nodes, arguments.path) as kv:
                    count = max(8, min(512, working_set(size, arguments.host_bytes // 4), (256 << 20) // size))
                    work = Objects(kv, size, count, arguments.durable)
                    try:
                        return await work.rows(operations(size, arguments.quick, most=200))
                    finally:
                        work.copier.close()

            steps.append((short_size(size), step))
        bench.run(list(steps), node="another process on this host", durability="process" if flags else "memory")


class Objects:
    """`count` objects of one size; object i holds the content of its number, or of another after it was put again."""

    def __init__(self, kv: Any, nbytes: int, count: int, durable: bool) -> None:
        self._objects, self._nbytes, self._count, self._durable = kv.objects, nbytes, count, durable
        self._path = str(kv.peers()[0].path)
        self._pattern = Pattern(nbytes, 1)
        self._held = list(range(count))
        self._random = random.Random(1)
        self.copier = Copier(anonymous_blocks(count, nbytes))

    async def rows(self, calls: int) -> list[Row]:
        """The put's row and the get's."""
        into = self.copier.into
        self._pattern.fill_all(into)
        for at in range(self._count):
            await self._objects.put(f"bench/{self._nbytes}/{at}", into[at], durable=self._durable)
        found = [await self._measured("put", self._put, calls), await self._measured("get", self._get, calls)]
        for at in range(self._count):
            await self._objects.delete(f"bench/{self._nbytes}/{at}")
        return found

    async def _measured(self, op: str, call: Callable[[int, int], Awaitable[int]], calls: int) -> Row:
        measured, limit = Series(), Series()
        for number in range(ROUNDS + 1):
            times, copies = measured.start_round(), limit.start_round()
            for _ in range(calls):
                at, place = self._random.randrange(self._count), self._random.randrange(self._count)
                times.append(await call(at, place))
                copy = self.copier.back_ns if op == "put" else self.copier.copy_ns
                copies.append(copy(self._random.randrange(self._count), place))
            if not number:  # the warm-up
                measured.clear()
                limit.clear()
        shape: Row = {"path": self._path, "bytes": self._nbytes, "batch": 1, "concurrency": 1, "verified": True}
        return row("objects", op, measured, limit, nbytes=self._nbytes, limit_name="memcpy", **shape)

    async def _put(self, at: int, place: int) -> int:
        """Put content `place` as object `at`; nanoseconds. Then look whether it is there."""
        source = self.copier.into[place]
        self._pattern.fill(place, source)
        start = time.perf_counter_ns()
        await self._objects.put(f"bench/{self._nbytes}/{at}", source, durable=self._durable)
        took = time.perf_counter_ns() - start
        self._held[at] = place
        await self._get(at, place)
        return took

    async def _get(self, at: int, place: int) -> int:
        """Get object `at` into `place`; nanoseconds. Raises IntegrityError where it isn't what was put."""
        target = self.copier.into[place]
        start = time.perf_counter_ns()
        found = await self._objects.get(f"bench/{self._nbytes}/{at}", into=target)
        took = time.perf_counter_ns() - start
        if found is None or not self._pattern.matches(self._held[at], target):
            raise IntegrityError(f"object {at} of {self._nbytes} bytes is not what was put; is the node large enough?")
        return took


if __name__ == "__main__":
    main(run)
