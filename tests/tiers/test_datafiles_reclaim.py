"""Using files again, readers in the way, cancels and bounds of a store of datafiles; on a disk in memory."""

from __future__ import annotations

import asyncio

import pytest

from tests.tiers.datafile_lives import FILE_BYTES, block, block_of, data_of, fill, key_of, opened, read_bytes, turns
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine
from ucxkv.tiers.base import BlockGone, NoSpace, TierBusy
from ucxkv.tiers.datafile_format import NO_PARENT
from ucxkv.tiers.datafiles import Hooks, Place
from ucxkv.tiers.datafiles.memory import AlignedPiece
from ucxkv.tiers.io import OpKind


async def test_a_file_is_not_used_again_under_a_reader() -> None:
    """Goal: bytes do not change under a pin. Method: a block of the oldest file is pinned; writers fill all other files
    and wait; its bytes stay; new readers are refused; after the pin everything goes on."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    dropped: list[tuple[int, int]] = []
    hooks = Hooks(dropped=lambda file, generation: dropped.append((file, generation)))
    async with opened(disk, engine, hooks=hooks, readmit_share=0.0) as (store, _, _):
        (place,) = await store.write([block(0)])
        with store.pinned(place):
            writer = asyncio.ensure_future(fill(store, range(1, 80)))
            await turns(6000)
            assert not writer.done() and dropped == []
            name = store.files[place.file].name
            assert bytes(disk.content[name][place.offset : place.offset + place.length]) == data_of(0)
            with pytest.raises(BlockGone):
                await read_bytes(store, place)
        await writer
        assert (place.file, place.generation) in dropped
        with pytest.raises(BlockGone), store.pinned(place):
            pass
        assert store.stats.files_reclaimed >= 1 and store.stats.blocks_gone == 2


async def test_writers_do_not_wait_for_ever_for_a_reader_that_stays() -> None:
    """Goal: no hang. Method: with a wait of nothing, the same gives NoSpace until the pin ends."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, space_wait_s=0.0, readmit_share=0.0) as (store, _, _):
        (place,) = await store.write([block(0)])
        with store.pinned(place):
            with pytest.raises(NoSpace, match="readers hold"):
                await fill(store, range(1, 80))
            with pytest.raises(NoSpace):
                await store.write([block(81)])
        await turns(200)
        await fill(store, range(90, 120))


async def test_hot_blocks_move_and_the_others_are_dropped() -> None:
    """Goal: re-admission within its share. Method: an early block stays hot; its newest place has the bytes, and
    the next opening finds it, older than all files, with the parent that its writer gave."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    index: dict[bytes, Place] = {}
    moved: list[bytes] = []

    def is_hot(key: bytes, place: Place) -> bool:
        return key == key_of(4) and index.get(key) == place

    def move(key: bytes, old: Place, new: Place) -> None:
        if index.get(key) == old:
            index[key] = new
            moved.append(key)

    hooks = Hooks(is_hot, move)
    async with opened(disk, engine, hooks=hooks, readmit_share=0.25) as (store, _, _):
        for number in range(150):
            (index[key_of(number)],) = await store.write([block(number)])
            if number > 100:
                assert await read_bytes(store, index[key_of(4)]) == data_of(4)
        assert moved and set(moved) == {key_of(4)} and store.stats.blocks_readmitted == len(moved)
        assert store.stats.readmitted_bytes == 8000 * len(moved)
    async with opened(disk, engine) as (store, found, _):
        held = {each.key: each for each in found}
        assert held[key_of(4)].place == index[key_of(4)] and key_of(1) not in held
        assert held[key_of(4)].parent == block(4).parent != NO_PARENT


async def test_no_more_than_the_share_is_written_again() -> None:
    """Goal: write amplification has a bound. Method: everything is hot; re-admitted bytes, headers and padding, per
    reclaimed file, against the share; and the owner is asked about little more than was written again."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    asked = 0

    def is_hot(key: bytes, place: Place) -> bool:
        nonlocal asked
        asked += 1
        return True

    async with opened(disk, engine, hooks=Hooks(is_hot), readmit_share=0.2) as (store, _, _):
        await fill(store, range(200), 4000)
        stats = store.stats
        assert asked <= stats.blocks_readmitted + 5 * (stats.files_reclaimed + 1)
        assert stats.files_reclaimed > 5 and stats.blocks_readmitted > 0
        assert stats.blocks_readmitted * 4096 <= 0.2 * FILE_BYTES * (stats.files_reclaimed + 1)


async def test_a_block_forgotten_while_its_file_is_reclaimed_does_not_come_back() -> None:
    """Goal: re-admission never undoes a forget. Method: the key is forgotten at every moment of a reclaim that keeps
    it, counted in reads of the engine."""
    for moment in range(8):
        disk = FaultyDisk()
        engine = FaultyEngine(disk, moment)
        asked = asyncio.Event()

        def is_hot(key: bytes, place: Place, asked: asyncio.Event = asked) -> bool:
            if key == key_of(0):
                asked.set()
            return key == key_of(0)

        async with opened(disk, engine, hooks=Hooks(is_hot), readmit_share=0.25) as (store, _, _):
            await store.write([block(0)])
            writer = asyncio.ensure_future(fill(store, range(1, 60)))
            await asked.wait()
            await turns(moment * 3)
            await store.forget([key_of(0)])
            await writer
        async with opened(disk, engine) as (store, found, _):
            assert key_of(0) not in {each.key for each in found}


async def test_a_cancelled_write_returns_when_its_memory_is_free() -> None:
    """Goal: memory is never the engine's after the call. Method: a write is cancelled while its batch is held (twice),
    one while it waits in the queue; the engine compares the bytes it takes with those it was given."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        await store.write([block(0)])
        engine.is_held = lambda op: op.kind == OpKind.WRITE
        piece = AlignedPiece(8192)
        first = asyncio.ensure_future(
            store.write([block_of(key_of(1), bytes(8192))._replace(buffers=[piece.view.data])])
        )
        await turns()
        second = asyncio.ensure_future(store.write([block(2)]))
        await turns()
        for _ in range(2):
            first.cancel()
            second.cancel()
            await turns()
        assert not first.done() and second.cancelled() and store.stats.queued_bytes == 0
        engine.release()
        with pytest.raises(asyncio.CancelledError):
            await first
        piece.view[:] = 1
        assert not engine.changed_memory
        await store.write([block(3)])
    async with opened(disk, engine) as (_, found, _):
        assert {each.key for each in found} == {key_of(0), key_of(1), key_of(3)}


async def test_a_cancelled_read_returns_when_its_memory_is_free() -> None:
    """Goal: the same for reads, and the reader count. Method: a held read is cancelled; the file is free after it."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine) as (store, _, _):
        (place,) = await store.write([block(0)])
        engine.is_held = lambda op: op.kind == OpKind.READ
        reader = asyncio.ensure_future(read_bytes(store, place))
        await turns()
        reader.cancel()
        await turns()
        assert not reader.done() and store.files[place.file].readers == 1
        engine.release()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert store.files[place.file].readers == 0 and engine.pending == 0


async def test_what_waits_is_bounded() -> None:
    """Goal: no queue without an end. Method: with the disk held, writes beyond the bound are refused and change
    nothing."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, queue_bytes_max=40_000) as (store, _, _):
        await store.write([block(0)])
        engine.is_held = lambda op: op.kind == OpKind.WRITE
        writers = [asyncio.ensure_future(store.write([block(n)])) for n in range(1, 6)]
        await turns()
        more = [asyncio.ensure_future(store.write([block(n)])) for n in range(6, 16)]
        await turns()
        assert [each.done() for each in more] == [False] * 4 + [True] * 6
        assert all(isinstance(each.exception(), TierBusy) for each in more[4:])
        engine.release()
        await asyncio.gather(*writers, *more[:4])
        assert store.stats.queued_bytes == 0


async def test_an_engine_that_is_full_is_asked_again() -> None:
    """Goal: reads that fill the engine delay writes, no more. Method: an engine of 12 operations, ten held reads."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk, max_ops=12)
    async with opened(disk, engine) as (store, _, _):
        (place,) = await store.write([block(0)])
        engine.is_held = lambda op: op.kind == OpKind.READ
        readers = [asyncio.ensure_future(read_bytes(store, place)) for _ in range(12)]
        await turns()
        writer = asyncio.ensure_future(store.write([block(1)]))
        await turns()
        assert not writer.done() and store.failure is None
        engine.release()
        await asyncio.gather(*readers)
        assert await read_bytes(store, (await writer)[0]) == data_of(1)


async def test_files_beyond_the_limit_go_when_their_turn_comes() -> None:
    """Goal: a smaller limit is honoured without losing newer blocks. Method: five files, then a limit of three."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk)
    async with opened(disk, engine, files_max=6) as (store, _, _):
        await fill(store, range(70))
        assert store.stats.files == 6
    async with opened(disk, engine, files_max=3) as (store, _, _):
        await fill(store, range(100, 200))
        assert store.stats.files == 3
    assert len([name for name in disk.content if name.startswith("data-")]) == 3
