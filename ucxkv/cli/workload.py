"""The common workload of `ucxkv perf` and the benchmarks: blocks of one size, put and got singly or in batches.

Every block's content follows from its number and differs from every other's; every block that a get delivered is
compared with its content before the row is reported, outside the timed region. Reads and the limit's copies alternate
in rounds and go to the same destinations; the working set is larger than the last-level cache, so both come from
memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ucxkv.cli.measure import Blocks, Copier, Row, Series, anonymous_blocks, last_level_cache_bytes, row, run_ns
from ucxkv.client.results import PutResult
from ucxkv.errors import IntegrityError

__all__ = ["Workload", "working_set"]

ROUNDS = 5


def working_set(nbytes: int, limit_bytes: int) -> int:
    """How many blocks of nbytes make a working set of three last-level caches, within limit_bytes, at least 64."""
    return max(64, min(3 * last_level_cache_bytes(), limit_bytes) // nbytes)


class Workload:
    """Blocks of one size on a connected client."""

    def __init__(self, kv: Any, nbytes: int, *, count: int, seed: int = 1, pids: Sequence[int] = ()) -> None:
        """kv: a connected client; nbytes: size of a block, a multiple of 8; count: blocks in the working set.

        pids: the nodes' processes, whose CPU time is counted in gets.
        """
        assert nbytes % 8 == 0
        self.kv, self.nbytes, self.count, self.seed = kv, nbytes, count, seed
        self._pids = list(pids)
        self._random = random.Random(seed)
        self._content = np.random.default_rng(seed).integers(1, 1 << 63, nbytes // 8, np.uint64)
        self.keys = np.random.default_rng([seed, nbytes]).integers(1, 255, (count, 16), np.uint8)
        self.into: Blocks = anonymous_blocks(count, nbytes)
        self.copier = Copier(self.into)

    def fill(self, index: int, block: Blocks) -> None:
        """Write block `index`'s content."""
        np.add(self._content, np.uint64(index), out=block.view(np.uint64))

    def verify(self, index: int, block: Blocks) -> None:
        """Raise when a block is not block `index`'s content, byte for byte."""
        if not np.array_equal(block.view(np.uint64) - np.uint64(index), self._content):
            raise IntegrityError(f"block {index} of {self.nbytes} bytes differs from what was put")

    async def load(self) -> None:
        """Put the whole working set (content written into `into`, which is overwritten afterwards)."""
        step = max(1, min(64, (8 << 20) // self.nbytes))
        for begin in range(0, self.count, step):
            rows = slice(begin, min(self.count, begin + step))
            for index in range(rows.start, rows.stop):
                self.fill(index, self.into[index])
            (await self.kv.put_many(self.keys[rows], self.into[rows])).raise_for_status()
        self.into.fill(0xAB)

    async def unload(self) -> None:
        """Delete the working set."""
        for begin in range(0, self.count, 1024):
            await self.kv.delete(self.keys[begin : begin + 1024])

    def _draw(self, n: int) -> tuple[list[int], list[int]]:
        """n blocks to read and n destinations, each without repetition, in random order."""
        return self._random.sample(range(self.count), n), self._random.sample(range(self.count), n)

    def _cpu_ns(self) -> int:
        return time.process_time_ns() + run_ns(self._pids)

    async def get_single(self, per_round: int, **fields: object) -> Row:
        """One `await kv.get(key, into=block)` at a time, look-up included."""
        measured, limit = Series(), Series()
        per_round = min(per_round, self.count)
        for number in range(ROUNDS + 1):  # the first warms up
            sources, targets = self._draw(per_round)
            keys = [self.keys[source].tobytes() for source in sources]
            views = [self.into[target] for target in targets]
            times, cpu = measured.start_round(), self._cpu_ns()
            for key, view in zip(keys, views, strict=True):
                start = time.perf_counter_ns()
                got = await self.kv.get(key, into=view)
                times.append(time.perf_counter_ns() - start)
                if got != self.nbytes:
                    raise IntegrityError(f"get answered {got}, not {self.nbytes}")
            measured.cpu_ns += self._cpu_ns() - cpu
            for source, target in zip(sources, targets, strict=True):
                self.verify(source, self.into[target])
            copies = limit.start_round()
            sources, targets = self._draw(per_round)
            copies.extend(map(self.copier.copy_ns, sources, targets))
            if number == 0:
                measured.clear()
                limit.clear()
        return self._row("get", measured, limit, 1, fields)

    async def get_batch(self, batch: int, per_round: int, **fields: object) -> Row:
        """`await kv.get_many(keys, into=...)` of `batch` scattered blocks at a time."""
        measured, limit = Series(), Series()
        batch = min(batch, self.count)
        pool = self.kv.register(self.into)
        for number in range(ROUNDS + 1):
            times, copies = measured.start_round(), limit.start_round()
            for _ in range(per_round):
                sources, targets = self._draw(batch)
                keys, into = self.keys[sources], pool[np.asarray(targets)]
                cpu = self._cpu_ns()
                start = time.perf_counter_ns()
                result = await self.kv.get_many(keys, into=into)
                times.append(time.perf_counter_ns() - start)
                measured.cpu_ns += self._cpu_ns() - cpu
                if result.hits != batch:
                    raise IntegrityError(f"{result.hits} hits of {batch} stored blocks")
                for source, target in zip(sources, targets, strict=True):
                    self.verify(source, self.into[target])
                copies.append(self.copier.copies_ns(*self._draw(batch)))
            if number == 0:
                measured.clear()
                limit.clear()
        return self._row("get_many", measured, limit, batch, fields)

    async def put_batch(self, batch: int, per_round: int, **fields: object) -> Row:
        """`put` (batch 1) or `put_many` of new blocks from scattered places; read back, then deleted."""
        measured, limit = Series(), Series()
        batch = min(batch, self.count)
        pool = self.kv.register(self.into)
        for index in range(self.count):
            self.fill(index, self.into[index])
        for number in range(ROUNDS + 1):
            times, copies = measured.start_round(), limit.start_round()
            for _ in range(per_round):
                sources, targets = self._draw(batch)
                keys = self.keys[sources]
                if batch == 1:
                    key, block = keys[0].tobytes(), self.into[sources[0]]
                    start = time.perf_counter_ns()
                    status = await self.kv.put(key, block)
                    times.append(time.perf_counter_ns() - start)
                    result = PutResult(np.asarray([status], np.uint8))
                else:
                    blocks = pool[np.asarray(sources)]
                    start = time.perf_counter_ns()
                    result = await self.kv.put_many(keys, blocks)
                    times.append(time.perf_counter_ns() - start)
                result.raise_for_status()
                for source, value in zip(sources, (await self.kv.get_many(keys)).values, strict=True):
                    self.verify(source, np.frombuffer(value, np.uint8))
                await self.kv.delete(keys)
                copies.append(self._copy_back(sources, targets))
            if number == 0:
                measured.clear()
                limit.clear()
        return self._row("put" if batch == 1 else "put_many", measured, limit, batch, fields)

    def _copy_back(self, sources: list[int], targets: list[int]) -> int:
        """The limit's copies, without harm to the content in `into`: it is written again afterwards, untimed."""
        taken = self.copier.copies_ns(sources, targets)
        for target in targets:
            self.fill(target, self.into[target])
        return taken

    def _row(self, op: str, measured: Series, limit: Series, batch: int, fields: Row) -> Row:
        shape: Row = {"bytes": self.nbytes, "batch": batch, "concurrency": 1, "limit_name": "memcpy", "verified": True}
        return row(fields.pop("bench", "perf"), op, measured, limit, nbytes=self.nbytes * batch, **shape, **fields)
