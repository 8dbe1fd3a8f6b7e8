"""Many reads at once, memory that the engine was told of, and what waits to the end."""

from __future__ import annotations

import asyncio
import errno
import threading

import numpy as np
import pytest

from tests.tiers.datafile_lives import FILE_BYTES, block, block_of, data_of, fill, key_of, opened, turns
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine, Op
from ucxkv.tiers.base import BlockDamaged, BlockGone, SetupFailed
from ucxkv.tiers.datafiles import Datafiles, Place
from ucxkv.tiers.datafiles.memory import AlignedPiece
from ucxkv.tiers.datafiles.waiting import to_the_end
from ucxkv.tiers.io import EngineBusy, EngineClosed, OpKind


def buffers(count: int, nbytes: int = 8000) -> list[bytearray]:
    return [bytearray(nbytes) for _ in range(count)]


async def test_many_blocks_are_read_in_one_batch_into_any_memory() -> None:
    """Goal: one batch, no copy where none is needed, the right bytes. Method: blocks of two files into aligned and odd
    memory; the engine's batches, the addresses that it was given, and what lies beside the odd buffers."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = await fill(store, range(20))
        assert len({place.file for place in places.values()}) > 1
        piece = AlignedPiece(20 * 8192)
        odd = np.full(20 * 8003, 7, np.uint8)
        into = [
            piece.view[n * 8192 : (n + 1) * 8192] if n % 2 else odd[n * 8003 + 3 : n * 8003 + 8003] for n in range(20)
        ]
        engine.batches.clear()
        engine.ops_done.clear()
        outcomes = await store.read_many(list(places.values()), [each.data for each in into])
        assert outcomes == [None] * 20 and engine.batches == [[8192] * 20]
        assert all(bytes(each[:8000]) == data_of(n) for n, each in enumerate(into))
        own = {op.address for op in engine.ops_done}
        assert all((each.ctypes.data in own) == bool(n % 2) for n, each in enumerate(into))
        assert all(odd[n * 8003 + 2] == 7 for n in range(0, 20, 2))
        assert store.stats.blocks_read == 20 and store.stats.read_bytes == 20 * 8000
        assert await store.read_many([], []) == []


async def test_one_blocks_error_keeps_no_other_back() -> None:
    """Goal: errors are values, each where it belongs. Method: among good blocks one of an older life, one of no file,
    one whose disk fails, one that is cut short, one with a flipped bit."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(8))).values())
        disk.content[store.files[places[4].file].name][places[4].offset + 5] ^= 1
        asked = [*places, places[0]._replace(generation=99), places[0]._replace(file=77)]
        faults = {places[1].offset: errno.EIO, places[2].offset: -4096}
        engine.fault = lambda op: faults.get(op.offset) if op.kind == OpKind.READ else None
        into = buffers(len(asked))
        outcomes = await store.read_many(asked, into)
        assert [type(each) for each in outcomes] == [
            *(BlockDamaged if n in (1, 2, 4) else type(None) for n in range(8)),
            BlockGone,
            BlockGone,
        ]
        assert "errno 5" in str(outcomes[1]) and "4096 bytes" in str(outcomes[2]) and "sum" in str(outcomes[4])
        assert all(bytes(into[n]) == data_of(n) for n in (0, 3, 5, 6, 7))
        assert (store.stats.blocks_read, store.stats.blocks_damaged, store.stats.blocks_gone) == (5, 3, 2)
        assert all(file.readers == 0 for file in store.files.values())


async def test_a_full_engine_is_each_blocks_error() -> None:
    """Goal: no hang, no partial state. Method: more blocks than the engine takes."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(5))).values())
        engine.max_ops = 4
        outcomes = await store.read_many(places, buffers(5))
        assert all(isinstance(each, EngineBusy) for each in outcomes)
        assert all(file.readers == 0 for file in store.files.values())
        assert await store.read_many(places[:4], buffers(4)) == [None] * 4


async def test_a_read_that_was_begun_says_what_became_of_it_and_is_refused_where_it_is_not_one_transfer() -> None:
    """Goal: `begin_read` is `read_many` of one block, told later. Method: a good block, one with a flipped bit, one
    whose disk fails; then memory that is odd or too short, a life that is over, a full engine, a closed store."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(4))).values())
        disk.content[store.files[places[1].file].name][places[1].offset + 5] ^= 1
        engine.fault = lambda op: errno.EIO if op.offset == places[2].offset and op.kind == OpKind.READ else None
        piece, told = AlignedPiece(8192), list[object]()
        for place in places[:3]:
            assert store.begin_read(place, piece.address, 8192, told.append)
            assert store.files[place.file].readers == 1 and not told[places.index(place) :]
            await turns()
            if place is places[0]:
                assert bytes(piece.view[:8000]) == data_of(0)
        assert [type(each) for each in told] == [type(None), BlockDamaged, BlockDamaged] and "errno 5" in str(told[2])
        assert (store.stats.blocks_read, store.stats.blocks_damaged) == (1, 2)

        def is_begun(place: Place = places[3], address: int = piece.address, room: int = 8192) -> bool:
            return store.begin_read(place, address, room, told.append)

        assert not is_begun(address=piece.address + 512) and not is_begun(room=8000)
        assert not is_begun(places[3]._replace(generation=99)) and not is_begun(places[3]._replace(file=77))
        engine.max_ops = 0
        assert not is_begun()
        assert all(file.readers == 0 for file in store.files.values()) and len(told) == 3
    assert not is_begun()


async def test_a_store_is_closed_after_a_read_that_was_begun() -> None:
    """Goal: memory is nobody's but the engine's until it is told. Method: a held read; close; let it go."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(1))).values())
        engine.is_held = lambda op: op.kind == OpKind.READ
        piece, told = AlignedPiece(8192), list[object]()
        assert store.begin_read(places[0], piece.address, 8192, told.append)
        closing = asyncio.ensure_future(store.aclose())
        await turns()
        assert not closing.done() and not told
        engine.release()
        await closing
        assert told == [None] and bytes(piece.view[:8000]) == data_of(0)


async def test_wrong_buffers_are_refused_before_anything_is_read() -> None:
    """Goal: usage errors are told at the edge. Method: too few, too short, read-only; then after the close."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(3))).values())
        engine.batches.clear()
        good = buffers(2)
        for wrong in ([*good], [*good, bytearray(7999)], [*good, bytes(8000)]):
            with pytest.raises(ValueError, match=r"shorter|has 8000|read-only"):
                await store.read_many(places, wrong)
        assert engine.batches == [] and all(file.readers == 0 for file in store.files.values())
    with pytest.raises(EngineClosed):
        await store.read_many(places, buffers(3))


async def test_a_cancelled_read_of_many_returns_when_their_memory_is_free() -> None:
    """Goal: memory is never the engine's after the call. Method: a held batch is cancelled twice."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(3))).values())
        engine.is_held = lambda op: op.kind == OpKind.READ
        reader = asyncio.ensure_future(store.read_many(places, buffers(3)))
        await turns()
        for _ in range(2):
            reader.cancel()
            await turns()
        assert not reader.done() and sum(file.readers for file in store.files.values()) == 3
        engine.release()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.pending == 0 and all(file.readers == 0 for file in store.files.values())


async def test_a_file_is_not_used_again_under_a_read_of_many() -> None:
    """Goal: readers keep their file. Method: reads are held while writers fill the store; they wait, and the bytes
    that come in the end are the old ones."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        places = list((await fill(store, range(4))).values())
        held: list[Op] = []

        def hold(op: Op) -> bool:
            if op.kind == OpKind.READ and op.offset in {place.offset for place in places} and len(held) < 4:
                held.append(op)
            return op in held

        engine.is_held = hold
        into = buffers(4)
        reader = asyncio.ensure_future(store.read_many(places, into))
        await turns()
        writer = asyncio.ensure_future(fill(store, range(100, 160)))
        await turns(2000)
        assert len(held) == 4 and not writer.done()
        engine.release()
        assert await reader == [None] * 4
        assert [bytes(each) for each in into] == [data_of(n) for n in range(4)]
        await writer


async def test_long_blocks_and_more_than_one_batch_are_proved_too() -> None:
    """Goal: every way to sum gives the same answer. Method: a block summed in another thread beside short ones, one of
    each damaged, and more blocks than go into one batch."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk, is_prompt=True)
    async with opened(disk, engine, file_bytes=16 << 20, batch_bytes=4 << 20) as (store, _, _):
        places = [*(await store.write([block(n, 3 << 20) for n in range(2)]))]
        places += await store.write([block(n, 900) for n in range(2, 1200)])
        for bad in (places[1], places[700]):
            disk.content[store.files[bad.file].name][bad.offset + 899] ^= 2
        into = [bytearray(place.length) for place in places]
        engine.batches.clear()
        outcomes = await store.read_many(places, into)
        assert len(engine.batches) == 2 and [at for at, each in enumerate(outcomes) if each] == [1, 700]
        assert bytes(into[0]) == data_of(0, 3 << 20)
        assert all(bytes(into[n]) == data_of(n, 900) for n in range(2, 1200) if n != 700)


async def test_a_cancel_waits_for_the_thread_that_uses_the_memory() -> None:
    """Goal: nobody's memory is used after the call. Method: work in a thread that waits for the test; cancelled twice,
    the waiter ends after the thread did, and the thread was told."""
    go, told = threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        assert go.wait(30)
        ended.append("thread")

    async def waiter() -> None:
        try:
            await to_the_end(asyncio.get_running_loop().run_in_executor(None, work), told.set)
        finally:
            ended.append("waiter")

    task = asyncio.ensure_future(waiter())
    await turns()
    for _ in range(2):
        task.cancel()
        await turns()
    assert not task.done() and told.is_set()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["thread", "waiter"]


async def test_the_engine_is_told_of_memory_until_the_store_is_closed() -> None:
    """Goal: registered memory has an end. Method: what the engine knows before, while, and after a store is open; also
    when it could not be opened."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    segment, more = AlignedPiece(1 << 20), AlignedPiece(4096)
    async with opened(disk, engine, register=[segment.view.data]) as (store, _, _):
        assert engine.registered[segment.address] == 1 << 20
        assert store.register(more.view.data) is False
        (place,) = await store.write([block(1)])
        arenas = set(engine.registered) - {segment.address, more.address}
        assert len(arenas) == 1
        into = bytearray(place.length)
        await store.read(place, into)
        (arena,) = arenas
        assert all(0 <= op.address - arena < engine.registered[arena] for op in engine.ops_done)
    assert engine.registered == {}
    disk.content["store"] = bytearray(4096)
    disk.refuse["create"] = errno.ENOSPC
    with pytest.raises(SetupFailed):
        await Datafiles.open(disk, engine, file_bytes=FILE_BYTES)
    assert engine.registered == {}


async def test_blocks_that_lie_side_by_side_are_written_as_one() -> None:
    """Goal: fewer operations. Method: neighbours in memory, given in order; and the same in another order."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    piece = AlignedPiece(64 << 10)
    piece.view[:] = np.frombuffer(data_of(1, 64 << 10), np.uint8)
    parts = [piece.view[at : at + 8192] for at in range(0, 64 << 10, 8192)]
    blocks = [block_of(key_of(n), part.tobytes())._replace(buffers=[part.data]) for n, part in enumerate(parts)]
    async with opened(disk, engine, file_bytes=1 << 20, batch_bytes=128 << 10) as (store, _, _):
        await store.write([block(100)])
        engine.batches.clear()
        await store.write(blocks)
        assert engine.batches == [[4096, 64 << 10]]
        places: list[Place] = await store.write(blocks[::-1])
        assert engine.batches[1:] == [[4096, *[8192] * 8]]
        assert not engine.changed_memory
        name = store.files[places[0].file].name
        assert disk.content[name][places[0].offset :][:8192] == bytes(parts[7])
    async with opened(disk, engine) as (_, found, _):
        assert {each.key for each in found} == {key_of(n) for n in [*range(8), 100]}
