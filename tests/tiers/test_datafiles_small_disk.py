"""The store on a file system of 50 MB that fills, and on one that is mounted read-only. Needs root and loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.datafile_lives import block, data_of, fill, key_of, read_bytes
from tests.tiers.transfers import ENGINES, make_engine, uring_refused
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.datafiles import Datafiles, ProblemKind
from ucxkv.tiers.engines.native import NativeEngine

DISK_BYTES, FILE_BYTES = 50_000_000, 4 << 20


def _run(*words: str | Path) -> str:
    """What a command that failed said, empty when it did not."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stderr or done.stdout or "failed") if done.returncode else ""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 50 MB."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 (e2fsprogs)")
    image, mounted = tmp_path / "image", tmp_path / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    if why := _run("mkfs.ext4", "-q", "-m", "0", image) or _run("mount", "-o", "loop", image, mounted):
        pytest.skip(f"no file system of a file here: {why.strip()}")
    yield mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)


@pytest.fixture(params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    found = str(request.param)
    if found == "io_uring" and (why := uring_refused()):
        pytest.skip(f"no io_uring here: {why}")
    return found


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _fill_disk(folder: Path, *, leave: int) -> None:
    """Take space away until so much is left."""
    with (folder / "others").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _free_bytes(folder) - leave)


async def _open(folder: Path, engine: NativeEngine) -> Datafiles:
    store, _, problems = await Datafiles.open(folder / "store", engine, file_bytes=FILE_BYTES, files_max=64)
    assert [each for each in problems if each.kind is not ProblemKind.NOTICE] == []
    return store


async def test_a_disk_that_fills_ends_the_growth_and_nothing_else(disk: Path, engine_name: str) -> None:
    """Goal: a warning, no error, no hang. Method: a store that may grow beyond the disk, written three times over; the
    files it stays at are used again; the newest blocks are read; the same once more after it was opened again."""
    engine = make_engine(engine_name)
    for start in (0, 4000):
        store = await _open(disk, engine)
        places = await fill(store, range(start, start + 3 * DISK_BYTES // 100_000), 100_000)
        assert "No space left" in store.stats.warning and "free space on that file system" in store.stats.warning
        assert 8 <= store.stats.files < 12 and store.stats.files_reclaimed > 8 and store.failure is None
        newest = list(places.items())[-100:]
        into = [bytearray(place.length) for _, place in newest]
        assert await store.read_many([place for _, place in newest], into) == [None] * 100
        assert [bytes(each) for each in into] == [data_of(number, 100_000) for number, _ in newest]
        await store.aclose()
    await engine.aclose()


async def test_a_disk_that_others_fill_takes_nothing_from_the_files_there_are(disk: Path, engine_name: str) -> None:
    """Goal: space once given stays ours. Method: no byte is left for others after the store's files were made; it goes
    on in them, blocks are forgotten and found."""
    engine = make_engine(engine_name)
    store = await _open(disk, engine)
    _fill_disk(disk, leave=0)
    assert _free_bytes(disk) < FILE_BYTES
    places = await fill(store, range(300), 100_000)
    assert store.stats.files == 3 and store.stats.files_reclaimed > 3 and store.failure is None
    await store.forget([key_of(299)])
    assert await read_bytes(store, places[298]) == data_of(298, 100_000)
    await store.aclose()
    store, found, _ = await Datafiles.open(disk / "store", engine, file_bytes=FILE_BYTES)
    held = {each.key for each in found}
    assert key_of(298) in held and key_of(299) not in held
    await store.aclose()
    await engine.aclose()


async def test_a_disk_without_room_for_a_store_says_so(disk: Path, engine_name: str) -> None:
    """Goal: a clear error at the start, and room enough afterwards. Method: room for two files; then for more."""
    engine = make_engine(engine_name)
    _fill_disk(disk, leave=2 * FILE_BYTES + (1 << 20))
    with pytest.raises(SetupFailed, match=r"found 2 datafiles.*No space left.*needed room for 3.*free space there"):
        await _open(disk, engine)
    (disk / "others").unlink()
    store = await _open(disk, engine)
    await store.write([block(1)])
    await store.aclose()
    await engine.aclose()


async def test_a_folder_that_is_mounted_read_only_says_so(disk: Path, engine_name: str) -> None:
    """Goal: clear words. Method: a store's disk is mounted read-only, then again read-write."""
    engine = make_engine(engine_name)
    store = await _open(disk, engine)
    places = await fill(store, range(3))
    await store.aclose()
    assert not _run("mount", "-o", "remount,ro", disk)
    with pytest.raises(SetupFailed, match="mount that file system read-write"):
        await _open(disk, engine)
    assert not _run("mount", "-o", "remount,rw", disk)
    store = await _open(disk, engine)
    assert await read_bytes(store, places[2]) == data_of(2)
    await store.aclose()
    await engine.aclose()
