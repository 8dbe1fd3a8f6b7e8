"""Lives of a store on a disk in memory, with a plain record of what was promised, for tests that end them anywhere.

An Owner keeps the index that the store's caller keeps, and for each key everything that it asked for and when that was
acknowledged, in events of the disk. `check` opens what a crash left and compares: what was acknowledged is there with
its bytes, unless its file's next life had begun; what was forgotten is not; nothing else is ever returned."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine
from ucxkv.tiers.base import BlockGone
from ucxkv.tiers.datafile_format import NO_PARENT, decode_file
from ucxkv.tiers.datafiles import Block, Datafiles, Hooks, Place, Problem, ProblemKind, RecoveredBlocks

FILE_BYTES = 128 << 10
NEVER = 1 << 60


def key_of(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(4, "little"))


def parent_of(key: bytes, version: int) -> bytes:
    """What `block_of` says is the block's parent; every third version is a root."""
    return xxhash.xxh3_128_digest(key + version.to_bytes(8, "little")) if version % 3 else NO_PARENT


def original_of(version: int) -> int:
    """What `block_of` says were the block's bytes before they were encoded; every fourth version was not."""
    return 1000 * (version % 4)


def block_of(key: bytes, data: bytes, version: int = 0, flags: int = 0) -> Block:
    return Block(
        key, xxhash.xxh3_64_intdigest(data), version, [data], flags, parent_of(key, version), original_of(version)
    )


async def read_bytes(store: Datafiles, place: Place) -> bytes:
    into = np.zeros(place.length, np.uint8)
    await store.read(place, into.data)
    return into.tobytes()


@contextlib.asynccontextmanager
async def opened(
    disk: FaultyDisk, engine: FaultyEngine, **more: Any
) -> AsyncIterator[tuple[Datafiles, RecoveredBlocks, list[Problem]]]:
    """A small store, closed at the end."""
    options: dict[str, Any] = {"file_bytes": FILE_BYTES, "files_max": 4, "batch_bytes": 32 << 10}
    store, blocks, problems = await Datafiles.open(disk, engine, **{**options, **more})
    try:
        yield store, blocks, problems
    finally:
        engine.release()
        await store.aclose()


def data_of(number: int, nbytes: int = 8000) -> bytes:
    return random.Random(number).randbytes(nbytes)


def block(number: int, nbytes: int = 8000) -> Block:
    return block_of(key_of(number), data_of(number, nbytes), version=number)


async def fill(store: Datafiles, numbers: range, nbytes: int = 8000) -> dict[int, Place]:
    """Write blocks one by one; their places."""
    places = {}
    for number in numbers:
        (places[number],) = await store.write([block(number, nbytes)])
    return places


async def turns(count: int = 20) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Record:
    """Something that was asked for. data: None = forget. places: (since when, where), the last one counts."""

    data: bytes | None
    version: int
    asked: int
    acked: int = NEVER
    places: list[tuple[int, Place]] = field(default_factory=list)


@dataclass
class Owner:
    """The caller's side. One operation at a time a key."""

    disk: FaultyDisk
    rng: random.Random
    durability: str = "process"
    hot_share: float = 0.6
    history: dict[bytes, list[Record]] = field(default_factory=dict)
    index: dict[bytes, tuple[Place, Record]] = field(default_factory=dict)
    told_hot: set[Place] = field(default_factory=set)
    hot_and_dropped: int = 0
    moves: int = 0
    gone: int = 0
    count: int = 0

    @property
    def now(self) -> int:
        return len(self.disk.events)

    def _is_hot(self, key: bytes, place: Place) -> bool:
        held = self.index.get(key)
        is_hot = held is not None and held[0] == place and self.rng.random() < self.hot_share
        if is_hot:
            self.told_hot.add(place)
        return is_hot

    def _moved(self, key: bytes, old: Place, new: Place) -> None:
        held = self.index.get(key)
        if held is not None and held[0] == old:
            self.moves += 1
            held[1].places.append((self.now, new))
            self.index[key] = (new, held[1])

    def _dropped(self, file: int, generation: int) -> None:
        for key, (place, _) in list(self.index.items()):
            if (place.file, place.generation) == (file, generation):
                del self.index[key]
                self.hot_and_dropped += place in self.told_hot

    async def open(self, engine: FaultyEngine, *, run: int, **more: Any) -> Datafiles:
        options: dict[str, Any] = {
            "file_bytes": FILE_BYTES,
            "files_max": 5,
            "readmit_share": 0.25,
            "batch_bytes": 32 << 10,
            "durability": self.durability,
            "run": run,
        }
        options.update(more)
        hooks = Hooks(self._is_hot, self._moved, self._dropped)
        store, blocks, problems = await Datafiles.open(self.disk, engine, hooks=hooks, **options)
        assert not [each for each in problems if each.kind is not ProblemKind.DAMAGED], problems
        for each in blocks:
            data = await read_bytes(store, each.place)
            record = Record(data, each.version, 0, 0, [(0, each.place)])
            self.history.setdefault(each.key, []).append(record)
            self.index[each.key] = (each.place, record)
        return store

    async def write(self, store: Datafiles, keys: list[bytes]) -> None:
        made = []
        for key in keys:
            self.count += 1
            data = self.rng.randbytes(self.rng.choice([1, 100, 4096, 5000, 9000, 16384]))
            record = Record(data, self.count, self.now)
            self.history.setdefault(key, []).append(record)
            self.index.pop(key, None)
            made.append((key, record))
        blocks = [block_of(key, record.data or b"", record.version) for key, record in made]
        places = await store.write(blocks)
        for (key, record), place in zip(made, places, strict=True):
            record.acked = self.now
            record.places.append((self.now, place))
            self.index[key] = (place, record)

    async def forget(self, store: Datafiles, keys: list[bytes]) -> None:
        made = []
        for key in keys:
            record = Record(None, 0, self.now)
            self.history.setdefault(key, []).append(record)
            self.index.pop(key, None)
            made.append(record)
        await store.forget(keys)
        for record in made:
            record.acked = self.now

    async def read(self, store: Datafiles, key: bytes) -> None:
        held = self.index.get(key)
        if held is None:
            return
        place, record = held
        try:
            assert await read_bytes(store, place) == record.data
        except BlockGone:
            self.gone += 1

    async def work(self, store: Datafiles, mine: list[bytes], steps: int) -> None:
        """One of several workers, each with keys of its own."""
        for _ in range(steps):
            what = self.rng.random()
            some = self.rng.sample(mine, self.rng.randrange(1, 4))
            if what < 0.65:
                await self.write(store, some)
            elif what < 0.8:
                await self.forget(store, some)
            else:
                await self.read(store, some[0])


async def live(owner: Owner, *, seed: int, steps: int, workers: int = 3, keys: int = 60, engine_seed: int = 0) -> None:
    """Open, work, close."""
    engine = FaultyEngine(owner.disk, engine_seed)
    store = await owner.open(engine, run=seed + 1)
    names = [key_of(number) for number in range(keys)]
    await asyncio.gather(*(owner.work(store, names[at::workers], steps) for at in range(workers)))
    await store.aclose()
    await engine.aclose()
    assert not engine.changed_memory, "memory was given back while the engine had it"
    assert not owner.hot_and_dropped, "a block that was worth keeping was not kept"
    assert not owner.disk.names_by_fd and not owner.disk.is_locked


class Freed:
    """When heads said that a file's life had ended."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._times: dict[int, list[tuple[int, int]]] = {}
        for index, event in enumerate(disk.events):
            if event.kind == "submit" and event.op is not None and event.op.offset == 0:
                decoded = decode_file(event.op.data[:4096])
                assert decoded is not None
                head = decoded[0]
                lives_over = head.generation if head.state == 0 else head.generation - 1
                self._times.setdefault(head.file, []).append((index, lives_over))

    def is_over(self, place: Place, at: int) -> bool:
        """Whether the place may be gone after the first `at` events."""
        return any(index < at and over >= place.generation for index, over in self._times.get(place.file, []))


async def check(owner: Owner, disk: FaultyDisk, at: int, freed: Freed) -> int:
    """Open what a crash after `at` events left and compare; how many acknowledged blocks were there."""
    engine = FaultyEngine(disk, is_prompt=True)
    store, blocks, problems = await Datafiles.open(
        disk, engine, file_bytes=FILE_BYTES, files_max=5, batch_bytes=32 << 10, durability=owner.durability
    )
    assert not [each for each in problems if each.kind is not ProblemKind.DAMAGED], problems
    found: dict[bytes, tuple[bytes, int]] = {}
    listed = list(blocks)
    read = await asyncio.gather(*(read_bytes(store, each.place) for each in listed), return_exceptions=True)
    for each, data in zip(listed, read, strict=True):
        assert each.key not in found, "a key came twice"
        assert each.parent == parent_of(each.key, each.version), f"{each.key.hex()} at {at}: another parent"
        assert each.original == original_of(each.version), f"{each.key.hex()} at {at}: another length before encoding"
        assert isinstance(data, bytes), f"{each} at {at}: {data}"
        found[each.key] = (data, each.version)
    there = 0
    for key, records in owner.history.items():
        acked = [record for record in records if record.acked <= at]
        last = acked[-1] if acked else Record(None, 0, 0)
        open_ones = [record for record in records if record.asked <= at < record.acked]
        allowed = [record for record in [last, *open_ones] if record.data is not None]
        held = found.pop(key, None)
        if held is not None:
            assert held in [(record.data, record.version) for record in allowed], f"{key.hex()} at {at}: old or wrong"
        if last.data is None or open_ones:
            continue
        place = next(place for since, place in reversed(last.places) if since <= at)
        if not freed.is_over(place, at):
            assert held is not None, f"{key.hex()} at {at} was acknowledged, and is lost"
            there += 1
    assert not found, "keys that nobody wrote"
    await store.aclose()
    await engine.aclose()
    return there
