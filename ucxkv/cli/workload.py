"""The common workload of `ucxkv perf` and the benchmarks: blocks of one size, put and got singly or in batches.

Every block's content follows from its number and differs from every other's; every block that a get delivered is
compared with its content before the row is reported, outside the timed region. What is measured and the limit's copies
alternate in rounds and go to the same places; the working set is larger than the last-level cache, unless the caller
wants it small, so both come from memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ucxkv.cli.measure import Blocks, Copier, Row, Series, anonymous_blocks, last_level_cache_bytes, row, run_ns
from ucxkv.client.results import PutResult
from ucxkv.errors import IntegrityError, Unavailable, UsageError
from ucxkv.perf.peers.blocks import Pattern

__all__ = ["Workload", "working_set"]

ROUNDS = 5
_BLOCKS_MAX = 1 << 15  # of a working set: smaller blocks come from the cache, whatever their number
_EVICTED = "has the node room for the working set?"
ServerCpu = Callable[[], Awaitable[int | None]]


def working_set(nbytes: int, limit_bytes: int) -> int:
    """How many blocks of nbytes make a working set of three last-level caches, within limit_bytes, at least 64."""
    return max(64, min(_BLOCKS_MAX, min(3 * last_level_cache_bytes(), limit_bytes) // nbytes))


class Workload:
    """Blocks of one size on a connected client."""

    def __init__(
        self,
        kv: Any,
        nbytes: int,
        *,
        count: int,
        seed: int = 1,
        pids: Sequence[int] = (),
        server_cpu: ServerCpu | None = None,
        budget_s: float = 0.0,
        copier: Copier | None = None,
        durable: bool = False,
    ) -> None:
        """kv: a connected client; nbytes: size of a block, a multiple of 8; count: blocks in the working set.

        The nodes' CPU time is counted from their processes on this host, or by what server_cpu answers (nanoseconds so
        far, None = unknown). budget_s: about how long the rounds of one row may take, within the calls asked for; 0 =
        no bound. copier: its blocks u8[count, nbytes] are used, and it stays the caller's; None = one of its own.
        durable: of the puts that are measured.
        """
        self.kv, self.nbytes, self.count, self._budget_s = kv, nbytes, count, budget_s
        self._durable = durable
        self._pids = list(pids)
        self._server_cpu = server_cpu or self._pids_cpu
        self._random = random.Random(seed)
        self._pattern = Pattern(nbytes, seed)
        self.keys = np.random.default_rng().integers(1, 255, (count, 16), np.uint8)  # nobody else's on a given node
        self.copier = copier or Copier(anonymous_blocks(count, nbytes))
        self.into: Blocks = self.copier.into

    async def _pids_cpu(self) -> int | None:
        return run_ns(self._pids) if self._pids else None

    def fill(self, index: int, block: Blocks) -> None:
        """Write block `index`'s content."""
        self._pattern.fill(index, block)

    def verify(self, index: int, block: Blocks) -> None:
        """Raise when a block is not block `index`'s content, byte for byte."""
        if not self._pattern.matches(index, block):
            raise IntegrityError(f"block {index} of {self.nbytes} bytes differs from what was put")

    async def load(self) -> None:
        """Put the whole working set (content written into `into`, which is overwritten afterwards)."""
        step = max(1, min(64, (8 << 20) // self.nbytes))
        self._pattern.fill_all(self.into)
        for begin in range(0, self.count, step):
            rows = slice(begin, min(self.count, begin + step))
            (await self.kv.put_many(self.keys[rows], self.into[rows])).raise_for_status()
        self.into.fill(0xAB)

    async def unload(self) -> None:
        """Delete the working set."""
        for begin in range(0, self.count, 1024):
            await self.kv.delete(self.keys[begin : begin + 1024])

    def _draw(self, n: int) -> tuple[list[int], list[int]]:
        """n blocks to read and n destinations, each without repetition, in random order."""
        return self._random.sample(range(self.count), n), self._random.sample(range(self.count), n)

    async def _time(self, measured: Series, calls: Callable[[], Awaitable[None]]) -> None:
        """Await `calls`, which notes its own times, and count both sides' CPU time over it."""
        server_ns = await self._server_cpu()
        own_ns, start = time.process_time_ns(), time.perf_counter_ns()
        await calls()
        wall_ns = time.perf_counter_ns() - start
        own_ns = time.process_time_ns() - own_ns
        after_ns = await self._server_cpu()
        measured.wall_ns += wall_ns
        measured.add_cpu(own_ns, None if after_ns is None or server_ns is None else after_ns - server_ns)

    def _rounds(self, measured: Series, limit: Series, per_round: int, at_once: int) -> Iterator[int]:
        """Calls of each round: a warm-up, which is forgotten and says how long a call takes, then ROUNDS more."""
        bound = self._budget_s / ROUNDS * 1e9
        if not bound:
            yield per_round
        else:
            for warm_up in (at_once, min(per_round, 4 * at_once)):
                if measured.wall_ns < bound:
                    measured.clear()
                    yield warm_up
            per_round = max(1, min(per_round, int(bound * len(measured.rounds[-1]) / max(1, measured.wall_ns))))
        measured.clear()
        limit.clear()
        for _ in range(ROUNDS):
            yield per_round

    def _portions(self, calls: int, batch: int) -> Iterator[int]:
        """A round's calls in portions that touch no block twice, so that each can be verified afterwards."""
        most = self.count // batch
        while calls > 0:
            yield min(calls, most)
            calls -= most

    # ---- gets

    async def get_single(self, per_round: int, *, at_once: int = 1, **fields: object) -> Row:
        """`await kv.get(key, into=block)`, look-up included, by `at_once` tasks that make one call after the other."""
        measured, limit = Series(), Series()
        for calls in self._rounds(measured, limit, per_round, at_once):
            times, copies = measured.start_round(), limit.start_round()
            for n in self._portions(calls, 1):
                await self._get_singly(measured, times, n, at_once)
                copies.extend(map(self.copier.copy_ns, *self._draw(n)))
        return self._row("get", measured, limit, 1, at_once, fields)

    async def _get_singly(self, measured: Series, times: list[int], n: int, at_once: int) -> None:
        sources, targets = self._draw(n)
        wanted = [
            (self.keys[source].tobytes(), self.into[target]) for source, target in zip(sources, targets, strict=True)
        ]
        left = iter(wanted)

        async def caller() -> None:
            for key, view in left:
                start = time.perf_counter_ns()
                got = await self.kv.get(key, into=view)
                times.append(time.perf_counter_ns() - start)
                if got != self.nbytes:
                    raise Unavailable(f"get answered {got}, not {self.nbytes}: {_EVICTED}")

        await self._time(measured, lambda: _together(caller, at_once))
        for source, target in zip(sources, targets, strict=True):
            self.verify(source, self.into[target])

    async def get_batch(self, batch: int, per_round: int, **fields: object) -> Row:
        """`await kv.get_many(keys, into=...)` of `batch` scattered blocks at a time."""
        measured, limit = Series(), Series()
        batch = min(batch, self.count)
        pool = self.kv.register(self.into)
        for calls in self._rounds(measured, limit, per_round, 1):
            times, copies = measured.start_round(), limit.start_round()
            for n in self._portions(calls, batch):
                await self._get_batches(measured, times, pool, n, batch)
                copies.extend(self.copier.copies_ns(*self._draw(batch)) for _ in range(n))
        return self._row("get_many", measured, limit, batch, 1, fields)

    async def _get_batches(self, measured: Series, times: list[int], pool: Any, n: int, batch: int) -> None:
        sources, targets = self._draw(n * batch)
        lows = range(0, n * batch, batch)
        keys = [self.keys[sources[low : low + batch]] for low in lows]
        into = [pool[np.asarray(targets[low : low + batch])] for low in lows]

        async def calls() -> None:
            for some, places in zip(keys, into, strict=True):
                start = time.perf_counter_ns()
                result = await self.kv.get_many(some, into=places)
                times.append(time.perf_counter_ns() - start)
                if result.hits != batch:
                    raise Unavailable(f"{result.hits} hits of {batch} stored blocks: {_EVICTED}")

        await self._time(measured, calls)
        for source, target in zip(sources, targets, strict=True):
            self.verify(source, self.into[target])

    # ---- puts

    async def put_batch(self, batch: int, per_round: int, *, at_once: int = 1, **fields: object) -> Row:
        """`put` (batch 1, by `at_once` tasks) or `put_many` of new blocks from scattered places; read back, then
        deleted.
        """
        measured, limit = Series(), Series()
        batch = min(batch, self.count)
        pool = self.kv.register(self.into)
        back = anonymous_blocks(max(1, min(64, (16 << 20) // self.nbytes)), self.nbytes)
        self._pattern.fill_all(self.into)
        for calls in self._rounds(measured, limit, per_round, at_once):
            times, copies = measured.start_round(), limit.start_round()
            for n in self._portions(calls, batch):
                await self._put(measured, times, pool, back, n, batch, at_once)
                copies.extend(self.copier.backs_ns(*self._draw(batch)) for _ in range(n))
        return self._row("put" if batch == 1 else "put_many", measured, limit, batch, at_once, fields)

    async def _put(
        self, measured: Series, times: list[int], pool: Any, back: Blocks, n: int, batch: int, at_once: int
    ) -> None:
        sources, _ = self._draw(n * batch)
        results: list[PutResult] = []
        left = iter(range(0, n * batch, batch))

        async def caller() -> None:
            for low in left:
                chosen = sources[low : low + batch]
                if batch == 1:
                    key, block = self.keys[chosen[0]].tobytes(), self.into[chosen[0]]
                    start = time.perf_counter_ns()
                    status = await self.kv.put(key, block, durable=self._durable)
                    times.append(time.perf_counter_ns() - start)
                    results.append(PutResult(np.asarray([status], np.uint8)))
                else:
                    keys, blocks = self.keys[chosen], pool[np.asarray(chosen)]
                    start = time.perf_counter_ns()
                    results.append(await self.kv.put_many(keys, blocks, durable=self._durable))
                    times.append(time.perf_counter_ns() - start)

        await self._time(measured, lambda: _together(caller, at_once))
        for result in results:
            if result.raise_for_status().stored != batch:
                raise UsageError("a put moved nothing: its key was there already")
        for low in range(0, len(sources), len(back)):
            chosen = sources[low : low + len(back)]
            result = await self.kv.get_many(self.keys[chosen], into=back[: len(chosen)])
            if result.hits != len(chosen):
                raise Unavailable(f"{result.hits} of {len(chosen)} blocks that were just put are there: {_EVICTED}")
            for source, block in zip(chosen, back, strict=False):
                self.verify(source, block)
            await self.kv.delete(self.keys[chosen])
        back.fill(0)

    # ---- look-ups

    async def look_up(self, batch: int, per_round: int, **fields: object) -> Row:
        """`exists` of one stored key (batch 1), or `exists_many` of `batch` of them, at a time."""
        measured = Series()
        batch = min(batch, self.count)
        for n in self._rounds(measured, Series(), per_round, 1):
            times = measured.start_round()
            chosen = [self.keys[self._random.sample(range(self.count), batch)] for _ in range(n)]

            async def calls(times: list[int] = times, chosen: list[npt.NDArray[np.uint8]] = chosen) -> None:
                for keys in chosen:
                    key = keys[0].tobytes()
                    start = time.perf_counter_ns()
                    found = await (self.kv.exists(key) if batch == 1 else self.kv.exists_many(keys))
                    times.append(time.perf_counter_ns() - start)
                    if not np.all(found):
                        raise Unavailable(f"a stored key was not found: {_EVICTED}")

            await self._time(measured, calls)
        found = self._row("look_up" if batch == 1 else "look_up_many", measured, None, batch, 1, {**fields})
        for name in ("bytes", "gbps", "limit_name", "cpu_s_per_gb", "cpu_client_s_per_gb", "cpu_server_s_per_gb"):
            found.pop(name, None)
        found["keys_s"] = round(batch / measured.p50_us * 1e6)
        return found

    def _row(self, op: str, measured: Series, limit: Series | None, batch: int, at_once: int, fields: Row) -> Row:
        if at_once == 1:
            measured.wall_ns = 0  # it holds the gaps between the calls too
        shape: Row = {"bytes": self.nbytes, "batch": batch, "concurrency": at_once, "verified": True}
        if limit is not None:
            shape["limit_name"] = "memcpy"
        bench = fields.pop("bench", "perf")
        return row(str(bench), op, measured, limit, nbytes=self.nbytes * batch, **shape, **fields)


async def _together(caller: Callable[[], Coroutine[Any, Any, None]], at_once: int) -> None:
    if at_once == 1:
        await caller()
        return
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(caller())
