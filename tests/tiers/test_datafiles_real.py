"""The same store in a real folder: a lock, real files, O_DIRECT where it is taken, a process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.datafile_lives import block, block_of, data_of, fill, key_of, read_bytes
from tests.tiers.plain_engine import PlainEngine
from ucxkv.tiers.base import BlockGone, SetupFailed, WritesFailed
from ucxkv.tiers.datafiles import Datafiles, Hooks, Place, ProblemKind
from ucxkv.tiers.datafiles.memory import AlignedPiece
from ucxkv.tiers.io import IoEngine

FILE_BYTES = 1 << 20
ENGINES = ["plain"]
if importlib.util.find_spec("ucxkv.tiers.engines") is not None:
    ENGINES += ["threads", "io_uring"]


def make_engine(name: str) -> IoEngine:
    """A real engine; skips where the kernel refuses it."""
    if name == "plain":
        return PlainEngine()
    try:
        made: IoEngine = importlib.import_module("ucxkv.tiers.engines").open_engine(name)
    except SetupFailed as exc:
        pytest.skip(str(exc))
    return made


async def _open(folder: Path, engine: IoEngine, **more: Any) -> Any:
    return await Datafiles.open(folder, engine, **{"file_bytes": FILE_BYTES, "files_max": 4, **more})


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_folder_is_filled_used_again_and_opened_again(tmp_path: Path, name: str, durability: str) -> None:
    """Goal: the store on a real file system. Method: blocks of many sizes, three times what fits, some kept hot, some
    forgotten, concurrent readers; then a second opening has exactly the index, and every byte, one by one and all at
    once into memory that the engine was told of and into other."""
    engine = make_engine(name)
    index: dict[bytes, Place] = {}
    values: dict[bytes, bytes] = {}
    reads: list[bytes] = []
    rng = random.Random(4)

    def moved(key: bytes, old: Place, new: Place) -> None:
        if index.get(key) == old:
            index[key] = new

    def dropped(file: int, generation: int) -> None:
        for key, place in list(index.items()):
            if (place.file, place.generation) == (file, generation):
                del index[key]

    hooks = Hooks(lambda key, place: index.get(key) == place and key[0] < 128, moved, dropped)
    store, found, problems = await _open(tmp_path, engine, hooks=hooks, durability=durability, readmit_share=0.2)
    assert len(found) == 0 and [each for each in problems if each.kind is not ProblemKind.NOTICE] == []

    async def write(numbers: range) -> None:
        for number in numbers:
            key, data = key_of(number), data_of(number, rng.choice([100, 4096, 65_536, 100_000]))
            index.pop(key, None)
            (place,) = await store.write([block_of(key, data, version=number)])
            index[key], values[key] = place, data
            if number % 7 == 0:
                index.pop(key, None)
                await store.forget([key])
            elif rng.random() < 0.3 and index:
                other = rng.choice(list(index))
                with contextlib.suppress(BlockGone):  # its file's turn has come
                    assert await read_bytes(store, index[other]) == values[other]
                    reads.append(other)

    await asyncio.gather(*(write(range(at, 150, 3)) for at in range(3)))
    assert len(reads) > 20 and store.stats.files_reclaimed >= 3 and store.stats.blocks_readmitted > 0
    await store.aclose()
    segment = AlignedPiece(8 << 20)
    store, found, problems = await _open(tmp_path, engine, durability=durability, register=[segment.view.data])
    assert {each.key: each.place for each in found} == index
    for key, place in index.items():
        assert await read_bytes(store, place) == values[key]
    slots = [segment.view[at << 17 : (at + 1) << 17] for at in range(64)]
    odd = [np.zeros(place.length + 1, np.uint8)[1:] for place in index.values()]
    into = [each.data for each in [*slots, *odd[len(slots) :]][: len(index)]]
    assert await store.read_many(list(index.values()), into) == [None] * len(index)
    for key, place, buffer in zip(index, index.values(), into, strict=True):
        assert bytes(buffer[: place.length]) == values[key]
    await store.aclose()
    assert engine.register(segment.address, 8 << 20) in (True, False), "the store has taken it back"
    await engine.aclose()


async def test_two_owners_of_a_folder_are_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    """Goal: one process a folder. Method: a second opening, which names the holder and the way out; then it works."""
    first, second = PlainEngine(), PlainEngine()
    store, _, _ = await _open(tmp_path, first)
    with pytest.raises(SetupFailed, match=f"process {os.getpid()} holds"):
        await _open(tmp_path, second)
    await fill(store, range(3))
    await store.aclose()
    other, found, _ = await _open(tmp_path, second)
    assert len(found) == 3
    await other.aclose()


async def test_a_folder_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    """Goal: clear errors at the start. Method: a file where the folder should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(SetupFailed, match="name a folder"):
        await _open(tmp_path / "taken", PlainEngine())


async def test_what_was_not_finished_is_removed_and_space_is_given_at_once(tmp_path: Path) -> None:
    """Goal: files are made whole or not at all. Method: a left-over temporary file; the blocks that files take."""
    (tmp_path / "data-000000.new").write_bytes(b"half")
    store, _, problems = await _open(tmp_path, PlainEngine())
    assert not (tmp_path / "data-000000.new").exists()
    assert [each for each in problems if each.kind is not ProblemKind.NOTICE] == []
    sizes = [os.stat(tmp_path / name) for name in os.listdir(tmp_path) if name.startswith("data-")]
    assert len(sizes) == 3 and all(each.st_size == FILE_BYTES <= each.st_blocks * 512 for each in sizes)
    await store.aclose()


async def test_a_limit_of_file_sizes_ends_the_opening_with_its_reason(tmp_path: Path) -> None:
    """Goal: a real refusal by the system. Method: RLIMIT_FSIZE below a datafile; afterwards the folder is usable."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES // 2, before[1]))
        with pytest.raises(SetupFailed, match="ulimit -f"):
            await _open(tmp_path, PlainEngine())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    store, _, _ = await _open(tmp_path, PlainEngine())
    await fill(store, range(2))
    await store.aclose()


async def test_a_write_that_the_system_refuses_ends_writing_alone(tmp_path: Path) -> None:
    """Goal: a real error in the middle. Method: the limit of file sizes is lowered under an open store: its next write
    beyond fails with the reason, reads go on."""
    store, _, _ = await _open(tmp_path, PlainEngine())
    places = await fill(store, range(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
        with pytest.raises(WritesFailed, match="ulimit -f"):
            await store.write([block(9, 200_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert await read_bytes(store, places[1]) == data_of(1)
    await store.aclose()


WRITER = """
import asyncio, os, sys
from pathlib import Path
from tests.tiers.datafile_lives import block, key_of
from tests.tiers.plain_engine import PlainEngine
from ucxkv.tiers.datafiles import Datafiles

async def main():
    store, _, _ = await Datafiles.open(Path(sys.argv[1]), PlainEngine(), file_bytes=1 << 20, files_max=8)
    first = int(sys.argv[2])

    async def write(at):
        for number in range(first + at, 1 << 30, 4):
            await store.write([block(number, 20_000)])
            os.write(1, b"%d\\n" % number)

    await asyncio.gather(*(write(at) for at in range(4)))

asyncio.run(main())
"""


def _killed(folder: Path, first: int, end: int) -> list[bytes]:
    """Lines of a writer that was killed after it had printed `end` of them."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(end)]
        process.kill()
        lines += process.stdout.readlines()
        assert all(lines), process.stderr.read().decode()
    return lines


async def test_a_killed_process_loses_nothing_that_it_had_acknowledged(tmp_path: Path) -> None:
    """Goal: kill -9 with `process`. Method: three rounds of a process with four writers that prints what was
    acknowledged and is killed after some of it; all of it that no newer file pushed out is found, byte for byte."""
    first = 0
    for end in (60, 90, 75):
        lines = await asyncio.to_thread(_killed, tmp_path, first, end)
        acknowledged = {key_of(int(line)): int(line) for line in lines if line.endswith(b"\n")}
        assert len(acknowledged) >= end
        engine = PlainEngine()
        store, found, problems = await _open(tmp_path, engine, files_max=8)
        held = {each.key: each for each in found}
        assert [each for each in problems if each.kind not in (ProblemKind.NOTICE, ProblemKind.DAMAGED)] == []
        newest = sorted(acknowledged.values())[-90:]
        for number in newest:
            each = held[key_of(number)]
            assert each.version == number and await read_bytes(store, each.place) == data_of(number, 20_000)
        await store.aclose()
        first = max(acknowledged.values()) // 4 * 4 + 400
