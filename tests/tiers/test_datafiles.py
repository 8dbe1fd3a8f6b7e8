"""A store of datafiles: what is written, read and found again; order, faults; on a disk in memory."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import numpy as np
import pytest

from tests.tiers.datafile_lives import FILE_BYTES, block, block_of, data_of, fill, key_of, opened, read_bytes, turns
from tests.tiers.faulty_engine import SYNC, FaultyDisk, FaultyEngine, Op
from ucxkv.tiers.base import BlockDamaged, BlockGone, ValueTooLarge, WritesFailed
from ucxkv.tiers.datafile_format import NO_PARENT
from ucxkv.tiers.datafiles import Datafiles
from ucxkv.tiers.datafiles.memory import AlignedPiece
from ucxkv.tiers.io import EngineClosed, OpKind


async def test_what_was_written_is_read_and_found_again_in_order() -> None:
    """Goal: the plain case. Method: blocks of odd sizes, flags and versions, written together and one by one, read
    back, and found by the next opening in log order with nothing else."""
    disk, engine = FaultyDisk(), FaultyEngine(FaultyDisk())
    engine = FaultyEngine(disk)
    sizes = [1, 4095, 4096, 4097, 20_000, 1]
    blocks = [block_of(key_of(n), data_of(n, size), version=n, flags=n) for n, size in enumerate(sizes)]
    async with opened(disk, engine) as (store, found, problems):
        assert len(found) == 0 and problems == []
        places = await store.write(blocks[:4]) + await store.write(blocks[4:5]) + await store.write(blocks[5:])
        assert [(place.length, place.flags) for place in places] == [(size, n) for n, size in enumerate(sizes)]
        for number, place in enumerate(places):
            assert await read_bytes(store, place) == data_of(number, sizes[number])
        assert store.stats.payload_bytes == sum(sizes) and store.stats.blocks_written == 6
    async with opened(disk, engine) as (store, found, problems):
        assert [tuple(each) for each in found] == [
            (each.key, each.version, place, each.parent, each.original)
            for each, place in zip(blocks, places, strict=True)
        ]
        assert {each.parent == NO_PARENT for each in found} == {True, False}
        assert problems == []
        assert await read_bytes(store, places[4]) == data_of(4, 20_000)


async def test_the_newest_copy_counts_and_a_forgotten_key_stays_away() -> None:
    """Goal: order decides. Method: a key written twice, one forgotten, one forgotten and written again; then the same
    after the files were sealed."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await fill(store, range(3))
        await store.write([block_of(key_of(0), b"newer", version=7)])
        await store.forget([key_of(1), key_of(2)])
        await store.write([block_of(key_of(2), b"again", version=8)])
        assert store.stats.tombstones == 2
    for _ in range(2):
        async with opened(disk, engine, files_max=8) as (store, found, _):
            held = {each.key: (each.version, await read_bytes(store, each.place)) for each in found}
            assert {k: held[k] for k in (key_of(0), key_of(2))} == {key_of(0): (7, b"newer"), key_of(2): (8, b"again")}
            assert key_of(1) not in held
            await fill(store, range(100, 116))
            assert store.stats.files_reclaimed == 0


async def test_memory_that_is_aligned_is_written_and_read_without_a_copy() -> None:
    """Goal: no copy where none is needed. Method: the addresses of the engine's operations against the caller's."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    piece = AlignedPiece(16384)
    piece.view[:] = np.frombuffer(data_of(1, 16384), np.uint8)
    mine = block_of(key_of(1), bytes(piece.view))._replace(buffers=[piece.view[:8192].data, piece.view[8192:].data])
    async with opened(disk, engine) as (store, _, _):
        (place,) = await store.write([mine])
        writes = [op for op in engine.ops_done if op.kind == OpKind.WRITE and op.address == piece.address]
        assert [op.length for op in writes] == [16384]
        into = AlignedPiece(16384)
        await store.read(place, into.view.data)
        assert bytes(into.view) == bytes(piece.view)
        assert engine.ops_done[-1].address == into.address


async def test_writes_of_one_turn_share_a_batch_and_full_batches_go_side_by_side() -> None:
    """Goal: group commit without a timer. Method: thirty writers at once while nothing is carried out; the batches
    under way, then all, are counted."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, file_bytes=1 << 20) as (store, _, _):
        await store.write([block(0)])
        before = store.stats.batches
        engine.is_held = lambda op: op.kind == OpKind.WRITE
        first = asyncio.gather(*(store.write([block(n, 100)]) for n in range(1, 31)))
        await turns()
        assert store.stats.batches - before == 3  # 30 of 4 KiB: three full batches of eight; the rest waits for them
        engine.release()
        await first
        assert store.stats.batches - before == 4
        engine.is_held = lambda op: op.kind == OpKind.WRITE
        one, two = asyncio.ensure_future(store.write([block(40)])), asyncio.ensure_future(store.write([block(41)]))
        await turns()
        three = asyncio.ensure_future(store.write([block(42)]))
        await turns()
        assert store.stats.batches - before == 5
        engine.release()
        await asyncio.gather(one, two, three)
        assert store.stats.batches - before == 6


async def test_nothing_is_acknowledged_before_what_stands_ahead_of_it() -> None:
    """Goal: no hole hides what was acknowledged. Method: the first of two full batches is held while the second one
    lands; the second's writer waits until the first has landed."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await store.write([block(0)])
        held: list[Op] = []

        def hold(op: Op) -> bool:
            if op.kind == OpKind.WRITE and not held:
                held.append(op)
            return op in held

        engine.is_held = hold
        first = asyncio.ensure_future(store.write([block(1, 30_000)]))
        second = asyncio.ensure_future(store.write([block(2, 30_000)]))
        await turns(60)
        assert engine.pending == 1 and not first.done() and not second.done()
        engine.release()
        await asyncio.gather(first, second)


async def test_power_is_acknowledged_after_a_sync_and_writers_share_it() -> None:
    """Goal: `power` means synced. Method: syncs are held: nobody is told; then one sync serves all that had landed."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, durability="power") as (store, _, _):
        await store.write([block(0)])
        syncs = store.stats.syncs
        engine.is_held = lambda op: op.kind == SYNC
        first = asyncio.ensure_future(store.write([block(1)]))
        await turns(60)
        others = [asyncio.ensure_future(store.write([block(n)])) for n in range(2, 6)]
        await turns(60)
        assert not first.done() and not any(other.done() for other in others)
        engine.release()
        await asyncio.gather(first, *others)
        assert store.stats.syncs == syncs + 2


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, -512])
async def test_after_a_failed_write_reads_go_on_and_the_reason_is_told(fault: int) -> None:
    """Goal: one clear error, no hang, memory tier goes on. Method: a write fails or is short; its writer, those that
    wait, and later ones get WritesFailed with the reason; old blocks are read; the next opening works and has them."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(3))
        engine.fault = lambda op: fault if op.kind == OpKind.WRITE else None
        writers = [asyncio.ensure_future(store.write([block(n, 30_000)])) for n in range(10, 20)]
        results = await asyncio.gather(*writers, return_exceptions=True)
        assert all(isinstance(result, WritesFailed) for result in results)
        with pytest.raises(WritesFailed, match="then start the node again"):
            await store.write([block(20)])
        assert store.stats.failure and store.failure is not None and store.stats.queued_bytes == 0
        for number, place in places.items():
            assert await read_bytes(store, place) == data_of(number)
    engine.fault = lambda op: None
    async with opened(disk, engine) as (store, found, _):
        held = {each.key: each.place for each in found}
        assert {key_of(n) for n in range(3)} <= set(held)
        await store.write([block(30)])
    assert not engine.changed_memory


async def test_a_failed_sync_is_never_tried_again() -> None:
    """Goal: no acknowledgement on the word of a second sync. Method: one sync fails; nobody is told of success, no
    further sync or write is asked for, reads go on."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, durability="power") as (store, _, _):
        places = await fill(store, range(2))
        engine.fault = lambda op: errno.EIO if op.kind == SYNC else None
        with pytest.raises(WritesFailed):
            await store.write([block(2)])
        engine.fault = lambda op: None
        asked = len([event for event in disk.events if event.kind in ("sync", "submit")])
        with pytest.raises(WritesFailed):
            await store.write([block(3)])
        with pytest.raises(WritesFailed):
            await store.forget([key_of(0)])
        assert len([event for event in disk.events if event.kind in ("sync", "submit")]) == asked
        assert await read_bytes(store, places[1]) == data_of(1)


async def test_writers_ahead_of_a_failed_batch_are_still_acknowledged() -> None:
    """Goal: a failure behind them takes nothing from them. Method: of two full batches the second fails while the
    first is held."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await store.write([block(0)])
        submitted: list[Op] = []

        def hold(op: Op) -> bool:
            if op.kind == OpKind.WRITE and op not in submitted:
                submitted.append(op)
            return op in submitted[:1]

        engine.is_held = hold
        engine.fault = lambda op: errno.EIO if op.kind == OpKind.WRITE and op not in submitted[:1] else None
        first = asyncio.ensure_future(store.write([block(1, 30_000)]))
        second = asyncio.ensure_future(store.write([block(2, 30_000)]))
        await turns(60)
        assert store.failure is not None and not first.done()
        engine.release()
        (place,) = await first
        with pytest.raises(WritesFailed):
            await second
        assert await read_bytes(store, place) == data_of(1, 30_000)


async def test_a_read_that_fails_or_lies_is_damage_and_never_data() -> None:
    """Goal: no wrong byte. Method: EIO, a short read, and a flipped bit on the disk."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(2))
        for fault in (errno.EIO, -4096):
            engine.fault = lambda op, fault=fault: fault if op.kind == OpKind.READ else None  # type: ignore[misc]
            with pytest.raises(BlockDamaged):
                await read_bytes(store, places[0])
        engine.fault = lambda op: None
        disk.content[store.files[places[0].file].name][places[0].offset + 17] ^= 4
        with pytest.raises(BlockDamaged):
            await read_bytes(store, places[0])
        assert store.stats.blocks_damaged == 3 and store.stats.blocks_read == 0
        assert await read_bytes(store, places[1]) == data_of(1)


async def test_calls_that_cannot_be_are_refused_at_once() -> None:
    """Goal: usage errors are told at the edge. Method: each wrong argument, and every call after aclose."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    for wrong in ({"file_bytes": 5000}, {"files_max": 2}, {"readmit_share": 0.5}, {"batch_bytes": 1}):
        with pytest.raises(ValueError, match="must be"):
            await Datafiles.open(disk, engine, **wrong)
    with pytest.raises(ValueError, match="paper"):
        await Datafiles.open(disk, engine, durability="paper")
    store, _, _ = await Datafiles.open(disk, engine, file_bytes=FILE_BYTES)
    good = block(1)
    assert await store.write([]) == []
    wrong_fields: list[dict[str, Any]] = [{"key": b"short"}, {"parent": b""}, {"buffers": []}, {"flags": 1 << 31}]
    for wrong_block in (good._replace(**fields) for fields in wrong_fields):
        with pytest.raises(ValueError, match=r"must|has"):
            await store.write([wrong_block])
    with pytest.raises(ValueTooLarge):
        await store.write([block(1, FILE_BYTES)])
    (place,) = await store.write([block(1, store.block_bytes_max)])
    with pytest.raises(ValueError, match="buffer"):
        await store.read(place, bytearray(10))
    with pytest.raises(ValueError, match="read-only"):
        await store.read(place, bytes(place.length))
    with pytest.raises(BlockGone):
        await store.read(place._replace(file=77), bytearray(place.length))
    with pytest.raises(BlockGone):
        await store.read(place._replace(offset=1 << 40), bytearray(place.length))
    await store.aclose()
    await store.aclose()
    for call in (store.write([good]), store.forget([good.key]), store.read(place, bytearray(place.length))):
        with pytest.raises(EngineClosed):
            await call
