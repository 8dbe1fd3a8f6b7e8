"""The process that `crash_datafiles.py` kills: four writers on one store of datafiles, saying what they ask and hear.

    python scripts/crash_datafiles_writer.py FOLDER ENGINE SEED FIRST_VERSION

One JSON array a line on standard output, each written whole by one system call, so that what a killed process knew is
in it:

    ["open", blocks]               the store is open, with so many blocks
    ["ask", n, [[key, version]]]   before a call; version 0: forget
    ["ack", n, [[file, life]]]     it returned
    ["err", n, text]               it raised
    ["hot", key, file, life]       the store was told that this block is worth keeping
    ["moved", key, file, life]     it said that the block is safe there
    ["dropped", file, life]        it said that this life of the file is over
    ["wrong", text]                a read gave other bytes than were written

Values follow from key and version: nobody has to remember them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path

import xxhash

from ucxkv.tiers.base import BlockGone, NoSpace, TierBusy
from ucxkv.tiers.datafile_format import NO_PARENT
from ucxkv.tiers.datafiles import Block, Datafiles, Hooks, Place, Problem, RecoveredBlocks
from ucxkv.tiers.engines import open_engine
from ucxkv.tiers.io import IoEngine

__all__ = ["KEYS", "block_of", "key_of", "number_of", "open_store"]

WRITERS, KEYS = 4, 400
"""Each writer has a fourth of the keys, so that one operation at a time is under way for a key."""
_SIZES = (1, 700, 4096, 9000, 16_384, 50_000)


def key_of(number: int) -> bytes:
    """The key of block `number`."""
    return number.to_bytes(16, "little")


def number_of(key: bytes) -> int:
    """Undo `key_of`."""
    return int.from_bytes(key, "little")


def block_of(number: int, version: int) -> Block:
    """The one block that this version of a key is."""
    rnd = random.Random(number << 64 | version)
    data = rnd.randbytes(rnd.choice(_SIZES))
    parent = rnd.randbytes(16) if rnd.random() < 0.8 else NO_PARENT
    return Block(key_of(number), xxhash.xxh3_64_intdigest(data), version, [data], version % 7, parent)


async def open_store(
    folder: Path, engine: IoEngine, hooks: Hooks | None = None
) -> tuple[Datafiles, RecoveredBlocks, list[Problem]]:
    """A store of small files, which are used again all the time."""
    return await Datafiles.open(
        folder, engine, file_bytes=1 << 20, files_max=6, readmit_share=0.1, batch_bytes=64 << 10, hooks=hooks
    )


def say(*words: object) -> None:
    """One line."""
    line = json.dumps(words).encode() + b"\n"
    assert len(line) <= 4096, "a pipe takes no more in one piece"
    os.write(1, line)


class Owner:
    """The writers' index, and what they do."""

    def __init__(self, seed: int, first_version: int) -> None:
        self._rnd = random.Random(seed)
        self._version = first_version
        self._calls = 0
        self.index: dict[int, tuple[Place, int]] = {}

    def is_hot(self, key: bytes, place: Place) -> bool:
        """A third of the keys; what is being written is not in the index meanwhile."""
        number = number_of(key)
        held = self.index.get(number)
        if held is None or held[0] != place or number % 3:
            return False
        say("hot", number, place.file, place.generation)
        return True

    def moved(self, key: bytes, old: Place, new: Place) -> None:
        """See Hooks.moved."""
        number = number_of(key)
        held = self.index.get(number)
        if held is not None and held[0] == old:
            self.index[number] = (new, held[1])
            say("moved", number, new.file, new.generation)

    def dropped(self, file: int, life: int) -> None:
        """See Hooks.dropped."""
        for number, (place, _) in list(self.index.items()):
            if (place.file, place.generation) == (file, life):
                del self.index[number]
        say("dropped", file, life)

    async def work(self, store: Datafiles, mine: list[int]) -> None:
        """One writer, until the process is killed."""
        while True:
            what = self._rnd.random()
            some = self._rnd.sample(mine, self._rnd.randrange(1, 9))
            if what < 0.7:
                await self._write(store, some)
            elif what < 0.8:
                await self._forget(store, some)
            else:
                await self._read(store, some)

    def _ask(self, asked: list[tuple[int, int]]) -> int:
        self._calls += 1
        for number, _ in asked:
            self.index.pop(number, None)
        say("ask", self._calls, asked)
        return self._calls

    async def _write(self, store: Datafiles, numbers: list[int]) -> None:
        versions = range(self._version, self._version + len(numbers))
        self._version += len(numbers)
        asked = list(zip(numbers, versions, strict=True))
        call = self._ask(asked)
        try:
            places = await store.write([block_of(number, version) for number, version in asked])
        except (TierBusy, NoSpace) as exc:
            say("err", call, str(exc))
            return
        say("ack", call, [(place.file, place.generation) for place in places])
        for (number, version), place in zip(asked, places, strict=True):
            self.index[number] = (place, version)

    async def _forget(self, store: Datafiles, numbers: list[int]) -> None:
        call = self._ask([(number, 0) for number in numbers])
        try:
            await store.forget([key_of(number) for number in numbers])
        except (TierBusy, NoSpace) as exc:
            say("err", call, str(exc))
            return
        say("ack", call, [(0, 0)] * len(numbers))

    async def _read(self, store: Datafiles, numbers: list[int]) -> None:
        held = [(number, *self.index[number]) for number in numbers if number in self.index]
        into = [bytearray(place.length) for _, place, _ in held]
        outcomes = await store.read_many([place for _, place, _ in held], into)
        for (number, place, version), data, outcome in zip(held, into, outcomes, strict=True):
            if outcome is None and data != block_of(number, version).buffers[0]:
                say("wrong", f"key {number}, version {version} at {place} gave other bytes")
            elif outcome is not None and not isinstance(outcome, BlockGone):
                say("wrong", f"key {number}, version {version} at {place}: {outcome}")


async def run(folder: Path, engine_name: str, seed: int, first_version: int) -> None:
    """Open, then write until somebody ends the process."""
    engine = open_engine(engine_name, directory=folder.parent)  # type: ignore[arg-type]
    owner = Owner(seed, first_version)
    store, blocks, _ = await open_store(folder, engine, Hooks(owner.is_hot, owner.moved, owner.dropped))
    for each in blocks:
        owner.index[number_of(each.key)] = (each.place, each.version)
    say("open", len(owner.index))
    await asyncio.gather(*(owner.work(store, list(range(at, KEYS, WRITERS))) for at in range(WRITERS)))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine")
    parser.add_argument("seed", type=int)
    parser.add_argument("first_version", type=int)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.folder, arguments.engine, arguments.seed, arguments.first_version))


if __name__ == "__main__":
    main()
