"""Scrubbing a store and striping several: on disks in memory."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.tiers.datafile_lives import block, block_of, data_of, fill, key_of, opened, read_bytes
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine
from ucxkv.tiers.base import BlockDamaged, WritesFailed
from ucxkv.tiers.datafile_format import padded
from ucxkv.tiers.datafiles import Place, StripedDatafiles, scrub
from ucxkv.tiers.io import OpKind


async def test_a_scrub_proves_every_block_and_names_those_that_are_damaged() -> None:
    """Goal: rot is found before it is asked for. Method: sealed files with one changed byte and one forgotten key; the
    scrub's counts against what was written there."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, files_max=8) as (store, _, _):
        places = await fill(store, range(12))
        await store.forget([key_of(3)])
        places.update(await fill(store, range(12, 30)))
        sealed = [place for place in places.values() if place.generation <= store.stats.files_sealed]
        bad = sealed[5]
        disk.content[store.files[bad.file].name][bad.offset + 7999] ^= 1
        found = [each async for each in scrub(store, bytes_per_s=1e12)]
        assert [each.generation for each in found] == list(range(1, store.stats.files_sealed + 1))
        assert sum(each.blocks for each in found) == len(sealed) - 1
        assert sum(each.nbytes for each in found) == 8000 * (len(sealed) - 1)
        assert [each.damaged for each in found if each.damaged] == [((key_of(5), bad),)]
        assert not any(each.error for each in found)
        with pytest.raises(ValueError, match="bytes_per_s"):
            await anext(scrub(store, bytes_per_s=0))


async def test_a_scrub_reads_no_faster_than_it_may() -> None:
    """Goal: a bounded rate. Method: the pauses it asks for, added up, against the bytes read."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk, is_prompt=True)
    async with opened(disk, engine) as (store, _, _):
        await fill(store, range(20))
        pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        found = [each async for each in scrub(store, bytes_per_s=1000.0, pause=sleep)]
        blocks = sum(each.blocks for each in found)
        assert blocks > 10 and sum(pauses) == pytest.approx(blocks * padded(8000) / 1000.0)


async def test_a_scrub_beside_writers_that_use_files_again_ends_and_blames_nobody() -> None:
    """Goal: scrub and reclaim do not hurt each other. Method: writers fill the store several times meanwhile."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk, 5)
    async with opened(disk, engine) as (store, _, _):
        await fill(store, range(40))

        async def go_through() -> list[tuple[int, int]]:
            seen = []
            async for each in scrub(store, bytes_per_s=1e12):
                assert each.damaged == ()
                seen.append((each.file, each.generation))
            return seen

        seen, _ = await asyncio.gather(go_through(), fill(store, range(100, 180)))
        assert len(seen) == len(set(seen)) >= 2 and store.stats.files_reclaimed > 3


@asynccontextmanager
async def _striped(
    disks: list[FaultyDisk], engines: list[FaultyEngine]
) -> AsyncIterator[tuple[StripedDatafiles, dict[bytes, Place]]]:
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(opened(disk, engine, drive=drive, files_max=8))
            for drive, (disk, engine) in enumerate(zip(disks, engines, strict=True))
        ]
        striped = StripedDatafiles([store for store, _, _ in made])
        index = {}
        for each in striped.adopt([found for _, found, _ in made]):
            assert each.key not in index
            index[each.key] = each.place
        yield striped, index


async def test_drives_share_the_keys_and_each_key_keeps_to_one() -> None:
    """Goal: striping. Method: 60 blocks over three drives; each has its part, a key's copies and tombstone meet in one
    log; all is found again; one drive's failure fails the writes of its keys alone."""
    disks = [FaultyDisk() for _ in range(3)]
    engines = [FaultyEngine(disk, seed) for seed, disk in enumerate(disks)]
    async with _striped(disks, engines) as (striped, index):
        assert index == {}
        places = await striped.write([block(n, 3000) for n in range(60)])
        assert [place.drive for place in places] == [striped.home(key_of(n)) for n in range(60)]
        assert min([place.drive for place in places].count(drive) for drive in range(3)) >= 8
        await striped.write([block_of(key_of(1), b"newer")])
        await striped.forget([key_of(2), key_of(3), key_of(4)])
    async with _striped(disks, engines) as (striped, index):
        assert set(index) == {key_of(n) for n in range(60) if n not in (2, 3, 4)}
        for number in (0, 1, 5, 59):
            into = bytearray(index[key_of(number)].length)
            with striped.pinned(index[key_of(number)]):
                await striped.read(index[key_of(number)], into)
            assert into == (b"newer" if number == 1 else data_of(number, 3000))
        asked = [index[key_of(number)] for number in (9, 20, 1, 40, 59)]
        into = [bytearray(place.length) for place in asked]
        engines[asked[1].drive].fault = lambda op: errno.EIO if op.offset == asked[1].offset else None
        outcomes = await striped.read_many(asked, into)
        assert [type(each) for each in outcomes] == [type(None), BlockDamaged, *[type(None)] * 3]
        read = [bytes(into[n]) for n in (0, 2, 3, 4)]
        assert read == [data_of(9, 3000), b"newer", data_of(40, 3000), data_of(59, 3000)]
        with pytest.raises(ValueError, match="buffers"):
            await striped.read_many(asked, into[1:])
        engines[asked[1].drive].fault = lambda op: None
        assert striped.register(bytearray(8192)) is False
        engines[1].fault = lambda op: errno.EIO if op.kind == OpKind.WRITE else None
        results = await asyncio.gather(*(striped.write([block(n)]) for n in range(60, 90)), return_exceptions=True)
        for number, result in zip(range(60, 90), results, strict=True):
            assert isinstance(result, WritesFailed) == (striped.home(key_of(number)) == 1)
        assert [bool(stats.failure) for stats in striped.stats] == [False, True, False]
        engines[1].fault = lambda op: None


async def test_drives_may_come_and_go() -> None:
    """Goal: other drives, no old bytes. Method: blocks on one drive; a second one comes: all are still read, what is
    written or forgotten now is not shadowed by the old copies, also when the first drive is alone again."""
    disks = [FaultyDisk(), FaultyDisk()]
    engines = [FaultyEngine(disk) for disk in disks]
    async with _striped(disks[:1], engines[:1]) as (striped, _):
        await striped.write([block(n, 1000) for n in range(40)])
    async with _striped(disks, engines) as (striped, index):
        moved = [n for n in range(40) if striped.home(key_of(n)) == 1]
        assert len(index) == 40 and 5 < len(moved) < 35
        assert await read_bytes(striped.stores[0], index[key_of(moved[0])]) == data_of(moved[0], 1000)
        await striped.write([block_of(key_of(n), b"newer") for n in moved[:3]])
        await striped.forget([key_of(moved[3])])
    async with _striped(disks, engines) as (striped, index):
        assert len(index) == 39 and all(index[key_of(n)].drive == 1 for n in moved[:3])
    async with _striped(disks[:1], engines[:1]) as (striped, index):
        assert not {key_of(n) for n in moved[:4]} & set(index) and len(index) == 36


async def test_an_old_drive_that_fails_fails_no_write_of_the_new_one() -> None:
    """Goal: a drive that takes no more writes fails its own keys alone. Method: blocks that a second drive's coming has
    moved are written anew while the first drive fails: they are written, and count; a forget, which the first drive
    would have to keep, is refused; with the first drive whole again the old copies are forgotten by the next one."""
    disks = [FaultyDisk(), FaultyDisk()]
    engines = [FaultyEngine(disk) for disk in disks]
    async with _striped(disks[:1], engines[:1]) as (striped, _):
        await striped.write([block(n, 1000) for n in range(40)])
    async with _striped(disks, engines) as (striped, _):
        moved = [n for n in range(40) if striped.home(key_of(n)) == 1]
        engines[0].fault = lambda op: errno.EIO if op.kind == OpKind.WRITE else None
        for _ in range(2):
            places = await striped.write([block_of(key_of(n), b"newer") for n in moved[:3]])
            assert [place.drive for place in places] == [1] * 3
        with pytest.raises(WritesFailed):
            await striped.forget([key_of(moved[0])])
        assert [bool(stats.failure) for stats in striped.stats] == [True, False]
        engines[0].fault = lambda op: None
    async with _striped(disks, engines) as (striped, index):
        assert all(index[key_of(n)].drive == 1 for n in moved[1:3])
        await striped.forget([key_of(moved[1])])
        await striped.write([block_of(key_of(moved[2]), b"newest")])
    async with _striped(disks[:1], engines[:1]) as (_, index):
        assert not {key_of(n) for n in moved[1:3]} & set(index)


async def test_stores_are_striped_in_their_order() -> None:
    """Goal: a place leads to its drive. Method: a store that was opened as another drive is refused."""
    disk = FaultyDisk()
    async with opened(disk, FaultyEngine(disk), drive=1) as (store, _, _):
        with pytest.raises(ValueError, match="drive=0"):
            StripedDatafiles([store])
