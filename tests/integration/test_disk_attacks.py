"""More attacks on a disk tier: what it finds at its start, keys that change hands while they are written, and books
that must not take the disk's bytes for memory's."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import bounded, works
from tests.harness import wait_until
from tests.integration.programs import HUNG_DISK
from tests.integration.test_disk import BLOCK, MIB, flip, life, numbers, process, put_all
from tests.integration.test_disk_faults import Valve, is_writing, make_cold, valve, written
from ucxkv import DeleteStatus, PutStatus
from ucxkv.directory import ROOT_KEY, events
from ucxkv.node import Node
from ucxkv.node.disk.coding import Coded, Coder
from ucxkv.tiers.io import OpKind

__all__ = ["valve"]


async def test_blocks_longer_than_memory_of_an_earlier_life_cost_no_other_block_its_memory(tmp_path: Path) -> None:
    """Goal: a node that starts again with less memory serves what fits. Method: short blocks and one that is longer
    than the next life's memory, which goes on below it; the short ones come back in one call with the long one, again
    and again; the long one is a miss, all memory can be used, and in a life with room it is there."""
    short, values, long = keys(8), blocks(8, BLOCK, seed=21), blocks(1, 5 * MIB, seed=22)[0]
    top, below = keys(2)
    async with life(tmp_path) as (_, kv):
        assert (await kv.put_many(short, values)).ok
        assert await kv.put(top, long) is PutStatus.STORED
        assert await kv.put(below, values[0], top) is PutStatus.STORED
    async with life(tmp_path, host_bytes=4 * MIB) as (node, kv):
        for _ in range(6):
            got = await bounded(kv.get_many([*short, top, below]), 20)
            assert got.values == [*(value.tobytes() for value in values), None, None]
        assert node.disk is not None and not node.disk.promoter.in_hand
        assert (await kv.match([top, below])).blocks == 0 and await works(kv)
        assert (await numbers(kv))["disk_blocks"] + (await numbers(kv))["disk_promoted"] >= 8
    async with life(tmp_path) as (_, kv):
        assert (await kv.match([top, below])).blocks == 2 and await kv.get(top) == long.tobytes()


async def test_a_key_put_anew_while_its_deleted_block_is_encoded_keeps_its_new_bytes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: of two blocks of a key the newer one is the later one on disk. Method: a block is deleted while it is
    encoded, which takes its time, and put anew with other bytes, which the other writer could write at once; at the
    next start it has its new bytes."""
    pytest.importorskip("zstandard", reason="needs the extra codec")
    (key,), values = keys(1), blocks(2, BLOCK, seed=23)
    encode, is_slow = Coder.encode, asyncio.Event()
    begun: list[list[int]] = []

    async def slow_at_first(coder: Coder, data: object, sums: list[int], exact: object) -> list[Coded]:
        begun.append(sums)
        if len(begun) == 1:
            await is_slow.wait()
        return await encode(coder, data, sums, exact)  # type: ignore[arg-type]

    monkeypatch.setattr(Coder, "encode", slow_at_first)
    flags = {"disk_codec": "lossless", "disk_dtype": "bfloat16"}
    async with life(tmp_path, **flags) as (node, kv):
        await kv.put(key, values[0])
        await wait_until(lambda: is_writing(node, key), "the write to begin")
        delete = asyncio.create_task(kv.delete([key]))
        await wait_until(lambda: _is_gone(node, key), "the delete to be carried out")
        assert await kv.put(key, values[1]) is PutStatus.STORED
        await asyncio.sleep(0.3)  # the other writer's chance
        is_slow.set()
        assert (await delete).tolist() == [DeleteStatus.DELETED]
        await written(kv)
        assert (await numbers(kv))["disk_copies"] == 1
    async with life(tmp_path, **flags) as (_, kv):
        assert await kv.get(key) == values[1].tobytes()


async def _is_gone(node: Node, key: bytes) -> bool:
    return int(node.store.directory.table.find(key)[0]) < 0


async def test_a_block_that_is_lost_while_it_is_written_is_not_there_at_the_next_start(
    tmp_path: Path, valve: Valve
) -> None:
    """Goal: no copy on disk that nobody knows of. Method: a block is found damaged while it is being written, so that
    its copy is not taken; nothing of it is left on disk."""
    (key,), values = keys(1), blocks(1, BLOCK, seed=24)
    async with life(tmp_path) as (node, kv):
        valve.hold(OpKind.WRITE)
        await kv.put(key, values[0])
        await wait_until(lambda: is_writing(node, key), "the write to begin")
        node.store.handle(events.Drop(key), time.monotonic_ns())
        await valve.let_go()
        await written(kv)
    async with life(tmp_path) as (node, kv):
        assert not (await kv.exists_many([key])).any()
        assert node.disk is not None and node.disk.recovered == 0


async def test_a_block_in_the_slot_of_one_that_was_to_be_written_is_not_written_in_its_place(
    tmp_path: Path, valve: Valve
) -> None:
    """Goal: what is written is leased. Method: a block goes, and another one comes into its slot, in the turn of the
    loop in which the first one's write begins; what the disk is given is the first one's memory."""
    (first, second), values = keys(2), blocks(2, BLOCK, seed=25)
    async with life(tmp_path) as (node, kv):
        assert node.disk is not None
        await kv.put(keys(1)[0], values[0])  # so that a file is open
        await written(kv)
        valve.hold(OpKind.WRITE)
        places = [place(node, value) for value in values]
        put(node, first, places[0], values[0])
        slot = int(node.store.directory.table.find(first)[0])
        node.disk.poke()  # the writers take their turn before what follows

        def change_hands() -> None:
            assert node.disk is not None and node.disk.demoter.is_writing([first])
            node.store.handle(events.Delete(first), time.monotonic_ns())
            put(node, second, places[1], values[1])
            assert int(node.store.directory.table.find(second)[0]) == slot
            node.disk.poke()

        asyncio.get_running_loop().call_soon(change_hands)
        await wait_until(lambda: _is_held(valve), "the write to begin")
        memory = node.store.segment.address
        given = {int(address) for _, ops, _ in valve.waiting for address in ops["address"]}
        await valve.let_go()
        assert memory + places[0] in given and memory + places[1] not in given
        await written(kv)
        assert await kv.get(second) == values[1].tobytes()


async def _is_held(valve: Valve) -> bool:
    return bool(valve.waiting)


def place(node: Node, value: np.ndarray) -> int:
    """An extent with these bytes."""
    (offset,) = node.store.slabs.allocate(value.nbytes, 1)
    node.store.segment.view[offset : offset + value.nbytes] = value.tobytes()
    return offset


def put(node: Node, key: bytes, offset: int, value: np.ndarray) -> None:
    """Show a root there."""
    total = xxhash.xxh3_64_intdigest(value)
    columns = [np.array([one], kind) for one, kind in ((0, "u2"), (offset, "u8"), (value.nbytes, "u4"), (total, "u8"))]
    assert not node.store.handle(events.Put(key, ROOT_KEY, *columns), time.monotonic_ns()).status.any()


async def test_blocks_on_disk_that_are_on_their_way_out_are_not_taken_for_memory_to_come(tmp_path: Path) -> None:
    """Goal: a put finds the memory that can be had. Method: cold blocks of twice the memory go while leases hold them,
    which have a minute to run; a chain longer than memory is put meanwhile; what was said to be leaving is memory."""
    chain, values = keys(64), blocks(64, BLOCK, seed=26)
    async with life(tmp_path) as (node, kv):
        await put_all(kv, chain, values)
        await written(kv)
        make_cold(node)
        node.store.handle(events.Lease(b"".join(chain), 60 * 10**9, 7), time.monotonic_ns())
        assert (await kv.delete(chain)).tolist() == [DeleteStatus.DELETED] * 64
        assert node.store.room.leaving_bytes() <= 8 * MIB  # some of memory, which became cold just now
        later = keys(64)
        await put_all(kv, later, values)
        assert (await kv.get_many(later)).hits == 64


async def test_memory_of_deleted_blocks_that_a_lease_holds_keeps_no_put_waiting(tmp_path: Path) -> None:
    """Goal: a client that leases blocks takes their memory from others, and no more than that. Method: a third of
    memory is leased and deleted; twice the memory is put meanwhile, with and without a disk."""
    for disk in ((), (str(tmp_path / "disk"),)):
        singles, values = keys(10), blocks(64, BLOCK, seed=27)
        async with life(tmp_path, disk=disk) as (_, kv):
            assert (await kv.put_many(singles, values[:10])).ok
            async with kv.lease(singles) as lease:
                assert lease.granted.all()
                assert (await kv.delete(singles)).tolist() == [DeleteStatus.DELETED] * 10
                for at in range(0, 64, 8):
                    (await kv.put_many(keys(8), values[at : at + 8])).raise_for_status()
                assert await works(kv)


async def test_a_node_whose_drive_answers_nothing_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Goal: no hang at the end. Method: a drive stops to answer while blocks are read and written; the node is told to
    stop: its process ends, says that it could not close its disk, and the next one has what was written before."""
    chain, values = keys(48), blocks(48, BLOCK, seed=28)
    with process(tmp_path, program=HUNG_DISK) as node:
        async with ucxkv.connect(node.address) as kv:
            await put_all(kv, chain, values)
            await written(kv)
            node.block_python()  # it is this node's signal
            await asyncio.sleep(0.2)
            reading = asyncio.create_task(kv.get_many(chain, deadline_s=2))
            await kv.put(keys(1)[0], values[0], deadline_s=2)
            assert (await bounded(reading, 2)).hits < 48
        assert node.stop() != 0
        assert "disk.stuck" in node.log()
    with process(tmp_path) as node:
        async with ucxkv.connect(node.address) as kv:
            assert (await kv.match(chain)).blocks == 48
        assert node.stop() == 0


async def test_a_delete_of_a_block_that_this_start_did_not_show_keeps_it_from_the_next_one(tmp_path: Path) -> None:
    """Goal: what a delete said is not there does not come without a put. Method: a parent's copy rots, so that its
    child is on disk and not shown; the child is deleted, which finds nothing; the parent is put anew; at the next start
    the child is not there."""
    chain, values = keys(2), blocks(2, BLOCK, seed=29)
    async with life(tmp_path) as (_, kv):
        await put_all(kv, chain, values)
    flip(tmp_path / "disk", values[0])
    async with life(tmp_path) as (node, kv):
        assert node.disk is not None and (node.disk.recovered, node.disk.unreachable) == (0, 1)
        assert (await kv.delete(chain[1:])).tolist() == [DeleteStatus.MISS]
        assert await kv.put(chain[0], values[0]) is PutStatus.STORED
        await written(kv)
    async with life(tmp_path) as (_, kv):
        assert (await kv.match(chain)).blocks == 1 and not (await kv.exists_many(chain[1:])).any()
