"""What a folder of datafiles may hold: no room, others' files, damage; on a disk in memory."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest
import xxhash

from tests.tiers.datafile_lives import FILE_BYTES, block, data_of, fill, key_of, opened, read_bytes, turns
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine, Op
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.datafile_format import FREE, IN_USE, decode_batch, decode_file, encode_file, encode_store
from ucxkv.tiers.datafiles import Datafiles, ProblemKind
from ucxkv.tiers.io import OpKind


async def test_a_full_disk_means_fewer_files() -> None:
    """Goal: no room for a file is no end. Method: with three files made the fourth is refused: the store says so and
    goes on in three; with two, opening fails and says what to do; nothing stays open."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        disk.refuse["create"] = errno.ENOSPC
        await fill(store, range(100))
        assert store.stats.files == 3 and "stays at 3 datafiles" in store.stats.warning and store.failure is None
    other = FaultyDisk()
    await _make_store(other)
    other.refuse["create"] = errno.ENOSPC
    with pytest.raises(SetupFailed, match="room for 3"):
        await Datafiles.open(other, FaultyEngine(other), file_bytes=FILE_BYTES)
    assert not other.names_by_fd and not other.is_locked


async def _make_store(disk: FaultyDisk) -> None:
    await disk.create("store", nbytes=4096, head=encode_store(bytes(16)))


async def test_files_that_are_not_ours_are_reported_and_left_alone() -> None:
    """Goal: nothing of anybody else is touched. Method: a stray name, another store's file, one that is renamed, one
    of a newer release, one too short, one whose head is damaged, one that cannot be opened, beside good ones."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(3))
        own = store.store_id

    def head(store_id: bytes, file: int, nbytes: int = 8192) -> bytes:
        return encode_file(
            store=store_id, file=file, state=IN_USE, generation=9, sequence=1, file_bytes=nbytes, floor=0
        )[0]

    newer = bytearray(head(own, 12))
    newer[4] = 2
    newer[56:64] = xxhash.xxh3_64_intdigest(bytes(newer[:56]) + own).to_bytes(8, "little")
    strange = {
        "notes.txt": (b"hello", ProblemKind.STRAY),
        "data-10": (b"hello", ProblemKind.STRAY),
        "data-000010": (head(bytes(16), 10), ProblemKind.FOREIGN),
        "data-000011": (head(own, 99), ProblemKind.FOREIGN),
        "data-000012": (bytes(newer), ProblemKind.NEWER),
        "data-000013": (head(own, 13)[:512], ProblemKind.TRUNCATED),
        "data-000014": (head(own, 14, 1 << 20), ProblemKind.TRUNCATED),
        "data-000015": (bytes(8192), ProblemKind.DAMAGED),
    }
    for name, (content, _) in strange.items():
        disk.content[name] = bytearray(content.ljust(8192, b"\0") if len(content) > 512 else content)
    before = {name: bytes(disk.content[name]) for name in strange}
    async with opened(disk, engine) as (store, found, problems):
        assert {each.name: each.kind for each in problems} == {name: kind for name, (_, kind) in strange.items()}
        assert all("left alone" in each.text for each in problems)
        assert {each.key: each.place for each in found} == {key_of(n): place for n, place in places.items()}
        await fill(store, range(10, 100))
        assert max(store.files) < 20
    assert {name: bytes(disk.content[name]) for name in strange} == before


async def test_a_store_without_its_name_is_taken_up_and_two_mixed_ones_are_not() -> None:
    """Goal: the small file `store` is no single point of loss. Method: it is removed; then a file of another store
    lies beside, and opening refuses, changes nothing and closes everything."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await fill(store, range(3))
        own = store.store_id
    del disk.content["store"]
    async with opened(disk, engine) as (store, found, problems):
        assert store.store_id == own and len(found) == 3
        assert [each.kind for each in problems] == [ProblemKind.NOTICE]
    del disk.content["store"]
    other, _ = encode_file(store=b"x" * 16, file=9, state=FREE, generation=1, sequence=1, file_bytes=8192, floor=0)
    disk.content["data-000009"] = bytearray(other.ljust(8192, b"\0"))
    before = {name: bytes(data) for name, data in disk.content.items()}
    with pytest.raises(SetupFailed, match="datafiles of 2 stores"):
        await Datafiles.open(disk, engine, file_bytes=FILE_BYTES)
    assert {name: bytes(data) for name, data in disk.content.items()} == before and not disk.names_by_fd


async def test_lost_indexes_and_headers_cost_no_more_than_they_must() -> None:
    """Goal: an index is a shortcut. Method: each sealed file's index is overwritten: nothing is lost. A batch's header
    is overwritten in a sealed file: nothing, the index has it. Both: what stands behind it."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(25), 8000)
        sealed = [file for file in store.files.values() if store.stats.files_sealed and file.generation == 1]
    name = sealed[0].name
    good = bytes(disk.content[name])
    in_it = {key_of(n) for n, place in places.items() if place.generation == 1}

    async def found_keys() -> set[bytes]:
        async with opened(disk, engine) as (_, found, _):
            return {each.key for each in found}

    disk.content[name][-4096:] = bytes(4096)
    assert await found_keys() == {key_of(n) for n in range(25)}
    disk.content[name][:] = good
    disk.content[name][4096:8192] = bytes(4096)
    assert await found_keys() == {key_of(n) for n in range(25)}
    disk.content[name][-4096:] = bytes(4096)
    assert await found_keys() == {key_of(n) for n in range(25)} - in_it


async def test_a_rotten_block_in_the_open_file_is_left_out_and_reported() -> None:
    """Goal: a walk goes past what is damaged. Method: one payload of three is changed; the others are found."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(3))
        name = store.files[places[1].file].name
    disk.content[name][places[1].offset] ^= 1
    async with opened(disk, engine) as (store, found, problems):
        assert {each.key for each in found} == {key_of(0), key_of(2)}
        assert [(each.kind, each.name) for each in problems] == [(ProblemKind.DAMAGED, name)]
        await store.write([block(9)])
    async with opened(disk, engine) as (_, found, _):
        assert {each.key for each in found} == {key_of(0), key_of(2), key_of(9)}


async def test_an_old_file_that_comes_back_does_not_count() -> None:
    """Goal: blocks whose file was missing at one opening do not return after newer files were all used again. Method:
    a file is taken away, the others are recycled past its generation, and it is put back."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(20))
        name = store.files[places[0].file].name
    away = disk.content.pop(name)
    async with opened(disk, engine) as (store, found, _):
        assert key_of(0) not in {each.key for each in found}
        await fill(store, range(100, 200))
    disk.content[name] = away
    async with opened(disk, engine) as (_, found, _):
        assert key_of(0) not in {each.key for each in found}


async def test_without_o_direct_the_store_goes_on_buffered_and_says_so() -> None:
    """Goal: a file system without O_DIRECT is no error. Method: the folder refuses it; one notice, blocks come back."""
    disk = FaultyDisk(has_direct=False)
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, problems):
        assert [each.kind for each in problems] == [ProblemKind.NOTICE] and "O_DIRECT" in problems[0].text
        places = await fill(store, range(5))
        for number, place in places.items():
            assert await read_bytes(store, place) == data_of(number)
    async with opened(disk, engine, direct=False) as (_, found, problems):
        assert len(found) == 5 and problems == []


async def test_a_batch_of_tombstones_and_blocks_is_what_the_format_says() -> None:
    """Goal: docs and disk agree. Method: the open file's bytes are decoded by the format's own functions."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await asyncio.gather(store.write([block(0, 5000)]), store.forget([key_of(7)]))
        raw = bytes(disk.content["data-000000"])
    decoded = decode_file(raw)
    assert decoded is not None and (decoded[0].state, decoded[0].generation) == (IN_USE, 1)
    batch = decode_batch(raw[4096:8192], file=0, generation=1, previous=decoded[0].sum, offset=4096, end=FILE_BYTES)
    assert batch is not None and batch[0].count == 2 and batch[0].length == 4096 + 8192
    assert [bytes(row["key"]) for row in batch[1]] == [key_of(0), key_of(7)]
    assert raw[8192 : 8192 + 5000] == data_of(0, 5000) and not any(raw[8192 + 5000 : 16384])


async def test_what_stood_behind_a_cut_does_not_come_back() -> None:
    """Goal: a batch that was given up stays so. Method: of two batches under way only the second reached the disk when
    the process ended; the next life puts one of the same size in the first one's place, and is opened again."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await store.write([block(0)])
        first: list[Op] = []

        def hold(op: Op) -> bool:
            if op.kind == OpKind.WRITE and not first:
                first.append(op)
            return op in first

        engine.is_held = hold
        writers = [asyncio.ensure_future(store.write([block(number, 30_000)])) for number in (1, 2)]
        await turns(60)
        left = disk.crash(len(disk.events), random.Random(1), is_power=False, kept=0.0)
        engine.release()
        await asyncio.gather(*writers)
    for numbers in ({0}, {0, 3}, {0, 3}):
        async with opened(left, FaultyEngine(left)) as (store, found, _):
            assert {each.version for each in found} == numbers
            if numbers == {0}:
                (place,) = await store.write([block(3, 30_000)])
                assert place.offset == first[0].offset + 4096


async def test_what_cannot_be_read_costs_no_more_than_itself() -> None:
    """Goal: one bad place in the open file takes nothing else along. Method: the disk fails reads of a place behind the
    log, of one in a payload, of one in the last payload, of one in a header; the next opening's blocks and problems."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await store.write([block(0)])
        places = await store.write([block(number) for number in range(1, 4)])  # one batch
        (last,) = await store.write([block(4)])
    damaged, unreadable = [ProblemKind.DAMAGED], [ProblemKind.UNREADABLE]
    for bad, numbers, kinds in (
        (FILE_BYTES - 8192, [0, 1, 2, 3, 4], []),
        (places[1].offset + 5000, [0, 1, 3, 4], damaged),
        (last.offset, [0, 1, 2, 3], damaged),
        (last.offset - 4096, [], unreadable),
    ):
        engine.fault = lambda op, bad=bad: (  # type: ignore[misc]
            errno.EIO if op.kind == OpKind.READ and op.offset <= bad < op.offset + op.length else None
        )
        async with opened(disk, engine) as (_, found, problems):
            assert [each.version for each in found] == numbers
            assert [each.kind for each in problems] == kinds


async def test_a_walk_goes_through_files_longer_than_it_reads_at_a_time() -> None:
    """Goal: no batch is lost where one read ends and the next begins. Method: batches of odd sizes over 20 MiB, one of
    them longer than a read, and one damaged block."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk, is_prompt=True)
    sizes = [70_000 * (n % 13 + 1) for n in range(40)]
    sizes[20] = 5 << 20
    async with opened(disk, engine, file_bytes=64 << 20, batch_bytes=1 << 20) as (store, _, _):
        for number, size in enumerate(sizes):
            (place,) = await store.write([block(number, size)])
            if number == 11:
                disk.content[store.files[place.file].name][place.offset + 1] ^= 1
    async with opened(disk, engine, file_bytes=64 << 20) as (_, found, problems):
        assert [each.version for each in found] == [n for n in range(40) if n != 11]
        assert [each.kind for each in problems] == [ProblemKind.DAMAGED]
