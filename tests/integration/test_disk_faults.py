"""Attacks on a disk tier: races between writing, deleting, bringing back and failing, each held open by a disk that
stops at the right moment."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Iterator
from errno import EIO
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import bounded, works
from tests.harness import wait_until
from tests.integration.test_disk import BLOCK, MIB, flip, life, numbers, on_disk, put_all
from ucxkv import DeleteStatus, PutStatus
from ucxkv.directory import events
from ucxkv.node import Node
from ucxkv.node.state import forget
from ucxkv.protocol import messages as m
from ucxkv.tiers.engines.native import NativeEngine
from ucxkv.tiers.io import OpKind

ROOM = 1 << 30


class Valve:
    """The engines' operations of the kinds in `held` wait; those of engines in `broken` fail with EIO."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: set[OpKind] = set()
        self.broken: set[NativeEngine] = set()
        self.waiting: list[tuple[NativeEngine, np.ndarray, asyncio.Future[np.ndarray]]] = []
        self.engines: list[NativeEngine] = []
        self._submit = submit = NativeEngine.submit

        def valved(engine: NativeEngine, ops: np.ndarray) -> asyncio.Future[np.ndarray]:
            if engine not in self.engines:
                self.engines.append(engine)
            done: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
            if engine in self.broken and (ops["kind"] == OpKind.WRITE).any():
                done.set_result(np.full(len(ops), -EIO, np.int64))
            elif any((ops["kind"] == kind).any() for kind in self.held):
                self.waiting.append((engine, ops.copy(), done))
            else:
                return submit(engine, ops)
            return done

        monkeypatch.setattr(NativeEngine, "submit", valved)

    def hold(self, kind: OpKind) -> None:
        """From now on these wait."""
        self.held.add(kind)

    async def let_go(self, *, error: int = 0) -> None:
        """What waits is carried out, or fails; nothing waits any more."""
        self.held.clear()
        waiting, self.waiting = self.waiting, []
        for engine, ops, done in waiting:
            done.set_result(np.full(len(ops), -error, np.int64) if error else await self._submit(engine, ops))


@pytest.fixture
def valve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
    made = Valve(monkeypatch)
    yield made
    assert not made.waiting, "a test left operations waiting"


def make_cold(node: Node) -> None:
    """Everything that has a copy leaves memory."""
    node.store.handle(events.Evict(ROOM, is_hiding=False), time.monotonic_ns())


async def is_writing(node: Node, key: bytes) -> bool:
    assert node.disk is not None
    return node.disk.demoter.is_writing([key])


async def written(kv: ucxkv.Client) -> None:
    await wait_until(lambda: on_disk(kv), "all copies to be written")


async def test_an_empty_value_stays_in_memory_and_the_disk_goes_on(tmp_path: Path) -> None:
    """User voice: empty values. Goal: no value that a client may put ends the tier. Method: an empty value in a chain;
    the disk goes on, what is above comes back after a restart, and a later chain whole."""
    chain, values, other = keys(3), blocks(3, BLOCK, seed=1), keys(4)
    async with life(tmp_path) as (_, kv):
        assert await kv.put(chain[0], values[0]) is PutStatus.STORED
        assert await kv.put(chain[1], b"", chain[0]) is PutStatus.STORED
        assert await kv.put(chain[2], values[2], chain[1]) is PutStatus.STORED
        await put_all(kv, other, blocks(4, BLOCK, seed=2))
        await written(kv)
        found = await numbers(kv)
        assert found["disk_failed"] == 0 and found["disk_too_long"] == 1 and found["disk_copies"] == 6
        assert await kv.get(chain[1]) == b""
    async with life(tmp_path) as (_, kv):
        assert (await kv.match(chain)).blocks == 1 and (await kv.match(other)).blocks == 4


async def test_a_durable_put_below_a_chain_longer_than_memory_is_refused_and_nothing_waits_behind_it(
    tmp_path: Path,
) -> None:
    """Goal: no request is worked on for ever. Method: a chain of twice the memory; a durable put below its end is
    refused within its deadline; the same session's next put and a durable one elsewhere work; nothing is left of it."""
    chain, values = keys(64), blocks(64, BLOCK, seed=3)
    async with life(tmp_path, durability="process", state_dir=str(tmp_path / "state")) as (node, kv):
        await put_all(kv, chain, values)
        (below,) = keys(1)
        status = await bounded(kv.put(below, values[0], chain[-1], durable=True, deadline_s=20), 20)
        assert status not in (PutStatus.STORED, PutStatus.ALREADY)
        await wait_until(lambda: _is_idle(node), "the request's tasks to end")
        assert await works(kv)
        root = keys(1)[0]
        assert await kv.put(root, values[0], durable=True) is PutStatus.STORED
        assert (await kv.match(chain)).blocks == 64 and (await numbers(kv))["durable_blocks"] == 1
        await wait_until(lambda: _no_leases(kv), "the request's leases to end")
        await kv.delete([root])
    forget(tmp_path / "state")


async def _is_idle(node: Node) -> bool:
    return not node.tasks


async def _no_leases(kv: ucxkv.Client) -> bool:
    return (await numbers(kv))["leases"] == 0


async def test_a_block_put_anew_while_its_delete_is_answered_is_not_buried_by_it(tmp_path: Path, valve: Valve) -> None:
    """Goal: a tombstone never stands behind a newer copy. Method: delete a block with a copy together with one that is
    being written, so that the delete waits; put the first anew with other bytes; both writes end; at the next start it
    is there with its new bytes, and the other is not."""
    (first, second), values = keys(2), blocks(3, BLOCK, seed=4)
    async with life(tmp_path) as (node, kv):
        await kv.put(first, values[0])
        await written(kv)
        valve.hold(OpKind.WRITE)
        await kv.put(second, values[1])
        await wait_until(lambda: is_writing(node, second), "the write to begin")
        delete = asyncio.create_task(kv.delete([first, second]))
        await wait_until(lambda: _is_gone(kv, first), "the delete to be carried out")
        assert await kv.put(first, values[2]) is PutStatus.STORED
        await wait_until(lambda: is_writing(node, first), "the write to begin")
        await valve.let_go()
        assert (await delete).tolist() == [DeleteStatus.DELETED] * 2
        await written(kv)
    async with life(tmp_path) as (_, kv):
        assert await kv.get(first) == values[2].tobytes() and await kv.get(second) is None


async def _is_gone(kv: ucxkv.Client, key: bytes) -> bool:
    return not (await kv.exists_many([key])).any()


async def test_a_block_made_durable_while_it_is_written_does_not_come_back_after_its_delete(
    tmp_path: Path, valve: Valve
) -> None:
    """Goal: no copy on disk that nobody knows of. Method: a block is being written when it becomes durable, so that its
    copy is not taken; it is deleted; at the next start it is not there."""
    (key,), values = keys(1), blocks(1, BLOCK, seed=5)
    flags = {"durability": "process", "state_dir": str(tmp_path / "state")}
    async with life(tmp_path, **flags) as (node, kv):
        valve.hold(OpKind.WRITE)
        await kv.put(key, values[0])
        await wait_until(lambda: is_writing(node, key), "the write to begin")
        assert await kv.put(key, values[0], durable=True) is PutStatus.ALREADY
        await valve.let_go()
        await written(kv)
        assert (await kv.delete([key])).tolist() == [DeleteStatus.DELETED]
    async with life(tmp_path, **flags) as (_, kv):
        assert not (await kv.exists_many([key])).any()
    forget(tmp_path / "state")


async def test_a_block_that_could_not_be_reached_at_the_start_does_not_come_back_after_its_delete(
    tmp_path: Path, valve: Valve
) -> None:
    """Goal: a delete covers copies of before this start. Method: a parent whose copy rots, so that its child is not
    shown; both are put anew, the child deleted before its new copy is written; at the next start it is not there."""
    chain, values = keys(2), blocks(3, BLOCK, seed=6)
    async with life(tmp_path) as (_, kv):
        await put_all(kv, chain, values[:2])
    flip(tmp_path / "disk", values[0])
    async with life(tmp_path) as (node, kv):
        assert await kv.get(chain[0]) is None
        await kv.put(chain[0], values[0])
        await written(kv)
        valve.hold(OpKind.WRITE)
        for key in keys(2):  # both writers have something to do
            await kv.put(key, values[2])
            await wait_until(functools.partial(is_writing, node, key), "the write to begin")
        await kv.put(chain[1], values[2], chain[0])
        delete = asyncio.create_task(kv.delete([chain[1]]))
        await wait_until(lambda: _is_gone(kv, chain[1]), "the delete to be carried out")
        await valve.let_go()
        assert (await delete).tolist() == [DeleteStatus.DELETED]
        await written(kv)
    async with life(tmp_path) as (_, kv):
        assert (await kv.match(chain)).blocks == 1 and await kv.get(chain[1]) is None


@pytest.mark.parametrize("error", [0, EIO])
async def test_a_read_of_a_deleted_block_that_lands_late_does_not_touch_the_one_put_anew(
    tmp_path: Path, valve: Valve, error: int
) -> None:
    """Goal: a handle that is used again is not taken for its copy of before. Method: a read is held, its block deleted,
    put anew with other bytes, written and made cold under the same handle; then the old read ends well, or fails; the
    new block has its bytes."""
    (key,), values = keys(1), blocks(2, BLOCK, seed=7)
    async with life(tmp_path) as (node, kv):
        await kv.put(key, values[0])
        await written(kv)
        make_cold(node)
        before = handle_of(node, key)
        valve.hold(OpKind.READ)
        reading = asyncio.create_task(kv.get(key))
        await wait_until(lambda: _is_held(valve), "the read to begin")
        assert (await kv.delete([key])).tolist() == [DeleteStatus.DELETED]
        await wait_until(lambda: _no_copies(kv), "the copy's handle to be free")
        assert await kv.put(key, values[1]) is PutStatus.STORED
        await written(kv)
        make_cold(node)
        assert handle_of(node, key) == before != 0
        await valve.let_go(error=error)
        assert await reading in (None, values[1].tobytes())
        assert await kv.get(key) == values[1].tobytes()
        assert (await numbers(kv))["damaged"] == 0 and (await numbers(kv))["lost"] == 0


def handle_of(node: Node, key: bytes) -> int:
    directory = node.store.directory
    slot = int(directory.table.find(key)[0])
    return directory.cold.handle(slot) if slot >= 0 else 0


async def _is_held(valve: Valve) -> bool:
    return bool(valve.waiting)


async def _no_copies(kv: ucxkv.Client) -> bool:
    return (await numbers(kv))["disk_copies"] == 0


async def test_a_drive_that_fails_does_not_stop_the_others(tmp_path: Path, valve: Valve) -> None:
    """Goal: a drive's failure costs its own keys their copies and nothing else. Method: two drives, one of which fails
    every write from some moment on; puts of many times the memory go on; the other drive takes its share; what has a
    copy is served and is there after a restart; the status names the drive."""
    drives = (str(tmp_path / "a"), str(tmp_path / "b"))
    singles, values = keys(80), blocks(80, BLOCK, seed=8)
    async with life(tmp_path, disk=drives, disk_wait_ms=5000) as (node, kv):
        assert node.disk is not None
        await kv.put_many(singles[:8], values[:8])
        await written(kv)
        valve.broken.add(node.disk._engines[0])
        for at in range(8, 80):
            assert await kv.put(singles[at], values[at]) is PutStatus.STORED
        home = np.array([node.disk.datafiles.home(key) for key in singles])
        await wait_until(lambda: on_disk(kv), "all copies to be written")
        report = (await kv.status())[0]
        assert report.numbers["disk_failed"] == 1 and drives[0] in report.facts["disk"].partition("failed")[2]
        assert drives[1] not in report.facts["disk"].partition("failed")[2]
        there = await kv.exists_many(singles)
        assert there[home == 1].all() and not there[home == 0].all()
        got = await kv.get_many(singles)
        assert got.values is not None
        for value, was, drive in zip(got.values, values, home.tolist(), strict=True):
            assert value == was.tobytes() or (drive == 0 and value is None)  # memory may have been needed meanwhile
        fresh = keys(1)[0]
        while node.disk.datafiles.home(fresh) != 0:
            fresh = keys(1)[0]
        await kv.put(fresh, values[0])
        assert (await kv.delete([fresh])).tolist() == [DeleteStatus.DELETED]
    async with life(tmp_path, disk=drives) as (_, kv):
        assert (await kv.exists_many(singles))[home == 1].all()


async def test_a_node_that_ends_while_a_block_is_read_back_ends_in_good_order(tmp_path: Path, valve: Valve) -> None:
    """Method: reads are held while the node is closed; it waits for them, nothing is left in hand, and no fault is
    reported to the loop."""
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    chain, values = keys(8), blocks(8, BLOCK, seed=9)
    async with life(tmp_path) as (node, kv):
        await put_all(kv, chain, values)
        await written(kv)
        make_cold(node)
        valve.hold(OpKind.READ)
        reading = asyncio.create_task(kv.get_many(chain))
        await wait_until(lambda: _is_held(valve), "the read to begin")
        closing = asyncio.create_task(node.aclose())
        await asyncio.sleep(0.2)
        assert not closing.done() and node.disk is not None
        await valve.let_go()
        await closing
        assert not node.disk.promoter.in_hand
        assert (await reading).hits == 0
    gc.collect()
    assert not faults
    async with life(tmp_path) as (_, kv):
        assert (await kv.get_many(chain)).hits == 8


async def test_a_client_that_asks_for_more_than_there_is_room_for_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """Goal: the node's work for one session has a bound. Method: memory is held by a lease; a client asks for all of a
    cold chain, thousands of times over, at once; few of these are worked on, the rest is told to ask later, another
    client's calls work, and all is answered."""
    chain, values = keys(64), blocks(64, BLOCK, seed=10)
    async with life(tmp_path) as (node, kv), ucxkv.connect(node.address) as flood:
        await put_all(kv, chain, values)
        await kv.get_many(chain[:28])
        async with kv.lease(chain[:28]):
            link = flood._router.sole
            asked = b"".join(chain[40:] * 170)
            deadline_ns = time.monotonic_ns() + 60 * 10**9
            asks = [asyncio.ensure_future(link.ask(m.Warm(keys=asked), deadline_ns)) for _ in range(200)]
            await asyncio.sleep(0.3)
            assert len(node.tasks) <= 65_536 * 16 // len(asked) + 4
            into = np.zeros_like(values[:24])
            assert (await kv.get_many(chain[:24], into, deadline_s=10)).hits == 24 and (into == values[:24]).all()
            answers = await asyncio.gather(*asks)
        assert all(len(one.status) == len(asked) // 16 for one in answers)
        assert await works(flood) and await kv.get(chain[-1]) == values[-1].tobytes()


async def test_a_table_full_of_blocks_on_disk_takes_durable_blocks_and_blocks_in_parts(tmp_path: Path) -> None:
    """Goal: cold blocks, which fill the table in the long run, give way to any put. Method: more small blocks than
    slots; then durable puts, alone and as a chain below a cold block, and puts in parts; all are stored."""
    flags = {"durability": "process", "state_dir": str(tmp_path / "state")}
    async with life(tmp_path, slots_count=512, **flags) as (node, kv):
        for n in range(6):
            chain = keys(200)
            await put_all(kv, chain, blocks(200, 16 << 10, seed=n), step=50)
        await written(kv)
        make_cold(node)
        assert (await numbers(kv))["slots_used"] == 512
        durable, values = keys(60), blocks(60, 1000, seed=50)
        parents = [chain[9], *durable[:-1]]
        assert (await kv.put_many(durable, values, parents, durable=True)).ok
        assert await kv.put(keys(1)[0], values[0], durable=True) is PutStatus.STORED
        whole = keys(40)
        for part in range(3):
            assert (await kv.put_many(whole, values[:40], part=ucxkv.Part(part, 3))).ok
        assert (await kv.match([*chain[:10], *durable])).blocks == 70
        assert (await kv.exists_many(whole)).all()
    forget(tmp_path / "state")


async def test_room_in_a_full_table_is_not_made_of_the_block_that_the_new_one_hangs_on(tmp_path: Path) -> None:
    """Goal: a put below a block that is visible is not told that it is not. Method: a table full of cold roots; a block
    below the one that was unused longest, plain and durable, is stored."""
    flags = {"durability": "process", "state_dir": str(tmp_path / "state")}
    async with life(tmp_path, slots_count=512, **flags) as (node, kv):
        roots, values = keys(512), blocks(512, 16 << 10, seed=60)
        for at in range(0, 512, 64):
            await kv.put_many(roots[at : at + 64], values[at : at + 64])
            await asyncio.sleep(0.02)  # two of the units that uses are counted in
        await written(kv)
        make_cold(node)
        plain, durable = keys(2)
        assert await kv.put(plain, values[0], roots[0]) is PutStatus.STORED
        oldest = roots[int(np.flatnonzero((await kv.exists_many(roots))[1:])[0]) + 1]
        await fill(kv, 512)
        assert await kv.put(durable, values[1], oldest, durable=True) is PutStatus.STORED
    forget(tmp_path / "state")


async def fill(kv: ucxkv.Client, slots: int) -> None:
    """Put roots until the table is full."""
    while (free := slots - int((await numbers(kv))["slots_used"])) > 0:
        await kv.put_many(keys(free), blocks(free, 1000, seed=61))


async def test_a_client_that_takes_all_leases_does_not_stop_the_writing(tmp_path: Path) -> None:
    """Goal: the node's own leases are not the clients' to use up. Method: as many leases as there may be; a chain
    longer than memory is put, all of it has copies, and what a client asks for more is refused."""
    chain, values = keys(60), blocks(60, BLOCK, seed=12)
    async with life(tmp_path) as (node, kv):
        await put_all(kv, chain[:1], values[:1])
        await written(kv)
        most = node.store.directory.leases.max_leases
        for _ in range(most):
            node.store.handle(events.Lease(chain[0], 60 * 10**9, 7), time.monotonic_ns())
        async with kv.lease(chain[:1]) as lease:
            assert not lease.granted.any()
        await put_all(kv, chain, values)
        await written(kv)
        found = await numbers(kv)
        assert found["evicted"] == 0 and found["disk_copies"] == 60 and found["leases"] == most


async def test_datafiles_smaller_than_a_batch_lose_no_block_that_is_in_memory(tmp_path: Path) -> None:
    """Goal: a copy that is gone before it was told of is none. Method: three files of 1 MiB, puts of 4 MiB at once; all
    that is visible can be read, and no read fails."""
    async with life(tmp_path, disk_bytes=3 * MIB, host_bytes=16 * MIB) as (_, kv):
        for n in range(12):
            singles, values = keys(64), blocks(64, 64 << 10, seed=n)
            await kv.put_many(singles, values)
            await written(kv)
            there = await kv.exists_many(singles)
            assert (await kv.get_many(singles)).hits == there.sum()
        found = await numbers(kv)
        assert found["disk_read_failed"] == 0 and found["lost"] == 0 and found["disk_failed"] == 0
