"""What the clients of a fault run do: chains that grow in token order, lose tails, are matched and read.

A chain is worked on for some seconds, by one client (its own) or by several, then left as it is for the last reading
and followed by the next generation, so that histories stay short enough to be searched. A client that has left too much
unknown in a chain only reads it from then on, for the same reason. Chains that nobody works on any more are mostly
deleted after a while: the memory of a run does not grow with its length."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable

from tests.cluster.calls import Caller, unknown
from tests.cluster.chains import BLOCKS_MAX, Chain
from ucxkv import errors

__all__ = ["Filler", "Load"]

_UNKNOWN_MAX = 5
_SHARED_DURABLE, _SHARED_CACHE = 4, 2
_FILL_BLOCK, _FILL_BATCH = 1 << 20, 4
_ASKED_EVERY = 8
_KEPT_GENERATIONS = 3


class _Slot:
    """A place for chains, one generation after the other. owner: the client that puts, "" = all of them."""

    def __init__(self, name: str, owner: str, shard: int, life_s: float, *, is_durable: bool) -> None:
        self.name = name
        self.owner = owner
        self._shard = shard
        self._life_s = life_s
        self._is_durable = is_durable

    @property
    def generation(self) -> int:
        """The present one; the same for all clients, since their clock is one."""
        return int(time.monotonic() / self._life_s + self._shard / 7)

    def chain(self, prefix: str, generation: int) -> Chain:
        """The chain of one generation."""
        return Chain.of(f"{prefix}.{self.name}.{generation}", self._shard, is_durable=self._is_durable)


class Load:
    """One client at work. is_over: to be set by whoever wants it to end."""

    def __init__(self, caller: Caller, at: int, arguments: argparse.Namespace) -> None:
        self.caller = caller
        self.is_over = False
        self._random = random.Random(f"{arguments.seed} {caller.who}")
        self._pause_s = arguments.pause_ms / 1000
        self._deadline_s = arguments.deadline_s
        shards, life_s = arguments.shards, arguments.life_s
        number = arguments.number * arguments.tasks + at
        own = _Slot(f"own{number}", caller.who, number % shards, life_s, is_durable=True)
        shared = [_Slot(f"all{i}", "", (i + 3) % shards, life_s, is_durable=True) for i in range(_SHARED_DURABLE)]
        cached = [_Slot(f"cache{i}", "", (i + 5) % shards, life_s, is_durable=False) for i in range(_SHARED_CACHE)]
        self._slots = [own, own, *shared, *cached]
        self._swept = own.generation
        self._own = own
        self._length: dict[Chain, int] = {}
        self._unknown: dict[Chain, int] = {}
        self._made = 0

    async def work(self, prefix: str) -> None:
        """One call after the other until it is over."""
        self.is_over = False
        self._length.clear()
        self._unknown.clear()
        self._swept = self._own.generation
        while not self.is_over:
            await asyncio.sleep(self._pause_s * 2 * self._random.random())
            slot = self._random.choice(self._slots)
            chain = slot.chain(prefix, slot.generation)
            if not await self._act(chain):
                await asyncio.sleep(0.2 * self._random.random())
                if self._random.random() < 0.1:
                    await self.caller.again()
            await self._sweep(prefix)

    async def _act(self, chain: Chain) -> bool:
        """One call; whether it was answered."""
        dice = self._random.random()
        may_change = self._unknown.get(chain, 0) < _UNKNOWN_MAX
        if dice < 0.42:
            return not may_change or await self._put(chain)
        if dice < 0.56:
            return not may_change or await self._delete(chain)
        if dice < 0.78:
            found = await self.caller.match(chain, deadline_s=self._deadline_s / 2)
            if found is not None:
                self._length[chain] = found
            return found is not None
        end = min(BLOCKS_MAX, self._length.get(chain, 0) + 1)
        results = await self.caller.get(chain, 0, end, deadline_s=self._deadline_s / 2)
        return None not in results

    async def _put(self, chain: Chain) -> bool:
        at = self._length.get(chain, 0)
        if at and self._random.random() < 0.15:
            at = self._random.randrange(at)  # again what may be there: the first writer won
        count = min(self._random.choice((1, 1, 2, 3)), BLOCKS_MAX - at)
        if not count:
            return True
        contents = []
        for _ in range(count):
            self._made += 1
            contents.append(f"{self.caller.who}-{self._made}")
        results = await self.caller.put(chain, at, contents, deadline_s=self._deadline_s)
        self._note(chain, results)
        for i, result in enumerate(results):
            if result in ("stored", "already"):
                self._length[chain] = max(self._length.get(chain, 0), at + i + 1)
            elif result == "order":
                self._length[chain] = min(self._length.get(chain, 0), max(0, at + i - 1))
                break
        return not unknown(results) and results[0] is not None

    async def _delete(self, chain: Chain) -> bool:
        end = self._length.get(chain, 0)
        if not end:
            return True
        at = self._random.choice((end - 1, end - 1, max(0, end - 3), 0 if self._random.random() < 0.2 else end - 1))
        results = await self.caller.delete(chain, at, end, deadline_s=self._deadline_s)
        self._note(chain, results)
        if "kept" in results:
            self._length[chain] = min(BLOCKS_MAX, end + 1)
        else:
            self._length[chain] = at
        return not unknown(results) and results[0] is not None

    def _note(self, chain: Chain, results: list[str | None]) -> None:
        self._unknown[chain] = self._unknown.get(chain, 0) + unknown(results)

    async def _sweep(self, prefix: str) -> None:
        """Read and mostly delete the client's own chain of some generations ago."""
        if self._own.generation <= self._swept:
            return
        self._swept = self._own.generation
        old = self._own.chain(prefix, self._swept - _KEPT_GENERATIONS)
        self._length = {chain: length for chain, length in self._length.items() if chain != old}
        if self._random.random() < 0.25:
            return
        found = await self.caller.match(old, deadline_s=self._deadline_s / 2)
        if found:
            await self.caller.get(old, 0, found, deadline_s=self._deadline_s / 2)
            await self.caller.delete(old, 0, found, deadline_s=self._deadline_s)


class Filler:
    """A client that fills the nodes' memory with cache blocks that nobody asks for, so that there is eviction: at once
    when it begins, then at a pace. say: told how many blocks nodes have evicted, now and then."""

    def __init__(self, caller: Caller, arguments: argparse.Namespace, say: Callable[..., None]) -> None:
        self.caller = caller
        self.is_over = False
        self._say = say
        self._burst_bytes = arguments.burst_bytes
        self._pause_s = _FILL_BATCH * _FILL_BLOCK / arguments.fill_bytes
        self._value = random.Random(arguments.seed).randbytes(_FILL_BLOCK)

    async def work(self) -> None:
        """Some blocks after the other until it is over."""
        self.is_over = False
        batches = 0
        while not self.is_over:
            kv = await self.caller.client()
            if kv is None:
                await asyncio.sleep(0.2)
                continue
            keys = [os.urandom(16) for _ in range(_FILL_BATCH)]
            try:
                is_in = (await kv.put_many(keys, [self._value] * _FILL_BATCH, deadline_s=2.0)).ok
            except errors.Unavailable:
                is_in = False
            batches += is_in
            if batches * _FILL_BATCH * _FILL_BLOCK < self._burst_bytes and is_in:
                continue
            if not batches % _ASKED_EVERY and is_in:
                self._say(event="evicted", nodes=await self.caller.evicted())
            await asyncio.sleep(self._pause_s)
