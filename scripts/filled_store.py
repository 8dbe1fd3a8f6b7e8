"""A store of datafiles full of numbered blocks, with the index that its owner keeps: what benchmarks read and write."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ucxkv.tiers.copy import sum_bytes
from ucxkv.tiers.datafiles import Block, Datafiles, Hooks, Place
from ucxkv.tiers.engines import open_engine
from ucxkv.tiers.io import IoEngine

__all__ = ["FilledStore", "Index", "key_of"]


def key_of(number: int) -> bytes:
    """The key of block `number`."""
    return number.to_bytes(16, "little")


@dataclass
class Index:
    """Where the blocks are, by number, and by the life of a file which numbers were put there."""

    places: dict[int, Place] = field(default_factory=dict)
    _numbers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def put(self, number: int, place: Place) -> None:
        """A block is there."""
        self.places[number] = place
        self._numbers.setdefault((place.file, place.generation), []).append(number)

    def is_hot(self, key: bytes, place: Place) -> bool:
        """Every second block is."""
        return key[0] % 2 == 0 and self.places.get(int.from_bytes(key, "little")) == place

    def moved(self, key: bytes, old: Place, new: Place) -> None:
        """See Hooks.moved."""
        number = int.from_bytes(key, "little")
        if self.places.get(number) == old:
            self.put(number, new)

    def dropped(self, file: int, generation: int) -> None:
        """See Hooks.dropped."""
        for number in self._numbers.pop((file, generation), []):
            place = self.places.get(number)
            if place is not None and (place.file, place.generation) == (file, generation):
                del self.places[number]


@dataclass
class FilledStore:
    """An open store of blocks of one size. buffers: u8[count, block], which the engine was told of.

    Block i holds the number i in its first and last word. aside_ns: CPU time of making and comparing blocks.
    """

    engine: IoEngine
    datafiles: Datafiles
    index: Index
    buffers: NDArray[np.uint8]
    next_number: int = 0
    aside_ns: int = 0

    @classmethod
    async def open(
        cls, folder: Path, engine_name: str, buffers: NDArray[np.uint8], *, store_bytes: int, file_bytes: int
    ) -> FilledStore:
        """A new store, empty so far."""
        engine = open_engine(engine_name, directory=folder.parent)  # type: ignore[arg-type]
        index = Index()
        datafiles, _, _ = await Datafiles.open(
            folder,
            engine,
            file_bytes=file_bytes,
            files_max=max(3, store_bytes // file_bytes),
            hooks=Hooks(index.is_hot, index.moved, index.dropped),
            register=[buffers.data],
        )
        return cls(engine, datafiles, index, buffers)

    async def write(self, count: int) -> int:
        """Write `count` new blocks, one from each buffer; nanoseconds that the call took."""
        before = time.thread_time_ns()
        numbers = range(self.next_number, self.next_number + count)
        self.next_number += count
        blocks = []
        for number, buffer in zip(numbers, self.buffers, strict=False):
            words = buffer.view(np.uint64)
            words[0] = words[-1] = number
            blocks.append(Block(key_of(number), sum_bytes(buffer.data), number, [buffer.data]))
        self.aside_ns += time.thread_time_ns() - before
        start = time.perf_counter_ns()
        places = await self.datafiles.write(blocks)
        taken = time.perf_counter_ns() - start
        before = time.thread_time_ns()
        for number, place in zip(numbers, places, strict=True):
            self.index.put(number, place)
        self.aside_ns += time.thread_time_ns() - before
        return taken

    async def fill(self, nbytes: int) -> None:
        """Write so many bytes, and wait until no file is being made free: what is there then stays."""
        for _ in range(-(-nbytes // self.buffers.nbytes)):
            await self.write(len(self.buffers))
        await self.rest()

    async def rest(self) -> None:
        """Return when the store has done nothing of its own accord for a while."""
        before, now = -1, self.datafiles.stats.written_bytes
        while before != now:
            await asyncio.sleep(0.3)
            before, now = now, self.datafiles.stats.written_bytes

    def check(self, numbers: list[int], buffers: NDArray[np.uint8]) -> None:
        """Exits unless each buffer holds the block of its number."""
        before = time.thread_time_ns()
        for number, buffer in zip(numbers, buffers, strict=True):
            words = buffer.view(np.uint64)
            if words[0] != number or words[-1] != number:
                raise SystemExit(f"wrong bytes: block {number} reads as {words[0]}")
        self.aside_ns += time.thread_time_ns() - before

    async def close(self) -> None:
        """Close the store and its engine; the folder stays."""
        await self.datafiles.aclose()
        await self.engine.aclose()
