"""One cold block at a time: the short way from a get to the disk and back, and what may happen to it on its way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from errno import EIO
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import wait_until
from tests.integration.test_disk import BLOCK, config, life, numbers, on_disk, put_all
from tests.integration.test_disk_faults import Valve, make_cold
from ucxkv import DeleteStatus
from ucxkv.errors import UsageError
from ucxkv.node import Node
from ucxkv.node.session import Session
from ucxkv.protocol import Message
from ucxkv.protocol import messages as m
from ucxkv.tiers.io import OpKind
from ucxkv.transport.control import Message as ControlMessage

PATHS = pytest.mark.parametrize("path", ["mapped", "message"])


@pytest.fixture
def valve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
    made = Valve(monkeypatch)
    yield made
    assert not made.waiting, "a test left operations waiting"


async def cold_chain(node: Node, kv: ucxkv.Client, count: int, seed: int) -> tuple[list[bytes], np.ndarray]:
    """A chain that is on disk only, and its values."""
    chain, values = keys(count), blocks(count, BLOCK, seed=seed)
    await put_all(kv, chain, values)
    await wait_until(lambda: on_disk(kv), "all copies to be written")
    make_cold(node)
    await wait_until(lambda: not node.store.room.leaving_bytes(), "memory to be free")
    return chain, values


async def held(valve: Valve, get: Coroutine[object, object, int | None]) -> asyncio.Task[int | None]:
    """A get whose read stands still."""
    valve.hold(OpKind.READ)
    reading = asyncio.create_task(get)
    await wait_until(lambda: bool(valve.waiting), "the read to begin")
    return reading


@pytest.mark.parametrize("path", ["mapped", "message"])
async def test_a_get_of_one_cold_block_is_one_question_and_holds_nothing(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: what the node is asked, and the tasks that are made, while cold blocks are read one by one; then a wrong
    length."""
    chain, values = keys(60), blocks(60, BLOCK, seed=17)
    async with Node(config(tmp_path)) as node, ucxkv.connect(node.address, path=path) as kv:
        await put_all(kv, chain, values)
        await wait_until(lambda: on_disk(kv), "all copies to be written")
        cold = np.flatnonzero((await kv.match(chain)).tiers == 2)[:5].tolist()
        asked: list[type[Message]] = []
        answer, into = node._requests.answer, np.zeros_like(values[0])

        def listening(session: Session, request: Message, message: ControlMessage) -> Message | None:
            asked.append(type(request))
            return answer(session, request, message)

        monkeypatch.setattr(node._requests, "answer", listening)
        for at in cold:
            await wait_until(lambda: node.store.slabs.free_bytes >= 2 * BLOCK, "room, which is waited for in a task")
            asked.clear()
            with tasks_made() as tasks:
                assert await kv.get(chain[at], into) == BLOCK and (into == values[at]).all()
            assert not tasks and [each for each in asked if each is not m.Touch] == [m.Warm]
        assert (await numbers(kv))["leases"] == 0
        with pytest.raises(UsageError):
            await kv.get(chain[20], into[:-1])
        node.store.check()


@contextlib.contextmanager
def tasks_made() -> Iterator[list[str]]:
    """What the loop is given as tasks meanwhile."""
    loop, made = asyncio.get_running_loop(), list[str]()

    def make(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop)

    loop.set_task_factory(make)
    try:
        yield made
    finally:
        loop.set_task_factory(None)


@PATHS
async def test_a_get_that_is_cancelled_leaves_nothing_and_the_block_comes_all_the_same(
    tmp_path: Path, path: str, valve: Valve
) -> None:
    """Goal: nothing is written into the caller's buffer after its call, and nothing stays in hand. Method: cancel while
    the disk stands still; let it go."""
    async with life(tmp_path) as (node, _), ucxkv.connect(node.address, path=path) as kv:
        chain, values = await cold_chain(node, kv, 2, seed=1)
        into = np.zeros_like(values[0])
        reading = await held(valve, kv.get(chain[0], into))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await valve.let_go()
        assert node.disk is not None
        await wait_until(lambda: not node.disk.promoter.in_hand, "the read to end")
        assert not into.any() and (await kv.match(chain)).tiers.tolist() == [1, 2]
        assert await kv.get(chain[0], into) == BLOCK and (into == values[0]).all()
        assert (await numbers(kv))["disk_reads"] == 1


async def test_gets_of_one_block_at_once_are_one_read(tmp_path: Path, valve: Valve) -> None:
    """Method: single gets of two clients and a batch ask for a block while its read stands still."""
    async with life(tmp_path) as (node, kv), ucxkv.connect(node.address, path="message") as other:
        chain, values = await cold_chain(node, kv, 2, seed=2)
        into = [np.zeros_like(values[0]) for _ in range(3)]
        first = await held(valve, kv.get(chain[0], into[0]))
        rest = [asyncio.create_task(each) for each in (kv.get(chain[0], into[1]), other.get(chain[0], into[2]))]
        batch = asyncio.create_task(other.get_many(chain[:1]))
        await asyncio.sleep(0.05)
        await valve.let_go()
        assert await asyncio.gather(first, *rest) == [BLOCK] * 3 and all((each == values[0]).all() for each in into)
        assert (await batch).values == [values[0].tobytes()]
        assert (await numbers(kv))["disk_reads"] == 1 and len(valve.waiting) == 0


@PATHS
async def test_a_block_that_the_disk_cannot_read_is_a_miss_and_its_memory_comes_back(
    tmp_path: Path, path: str, valve: Valve
) -> None:
    """Method: the read of a chain's tail fails; a miss within the call, gone from then on; its parent is served."""
    async with life(tmp_path) as (node, _), ucxkv.connect(node.address, path=path) as kv:
        chain, values = await cold_chain(node, kv, 2, seed=3)
        into = np.zeros_like(values[0])
        free = node.store.slabs.free_bytes
        reading = await held(valve, kv.get(chain[1], into))
        await valve.let_go(error=EIO)
        assert await reading is None and node.store.slabs.free_bytes == free
        assert not await kv.exists(chain[1]) and (await numbers(kv))["lost"] == 1
        assert await kv.get(chain[0], into) == BLOCK and (into == values[0]).all()


async def test_a_block_deleted_while_it_is_read_is_a_miss(tmp_path: Path, valve: Valve) -> None:
    """Method: delete it while the disk stands still; the get is a miss and the memory free again."""
    async with life(tmp_path) as (node, kv):
        chain, values = await cold_chain(node, kv, 1, seed=4)
        free = node.store.slabs.free_bytes
        reading = await held(valve, kv.get(chain[0], np.zeros_like(values[0])))
        assert (await kv.delete(chain)).tolist() == [DeleteStatus.DELETED]
        await valve.let_go()
        assert await reading is None and node.store.slabs.free_bytes == free


async def test_a_client_that_goes_while_its_block_is_read_leaves_nothing_waiting(tmp_path: Path, valve: Valve) -> None:
    """Method: a connection is cut while the disk stands still; then another client reads the block."""
    async with life(tmp_path) as (node, kv):
        chain, values = await cold_chain(node, kv, 1, seed=5)
        into = np.zeros_like(values[0])
        async with ucxkv.connect(node.address) as gone:
            reading = await held(valve, gone.get(chain[0], into, deadline_s=2))
            assert gone._router.sole is not None
            gone._router.sole.connection.abort()
            assert await reading is None
        assert node._requests._disk._waiting
        await valve.let_go()
        await wait_until(lambda: not node._requests._disk._waiting, "the request to end")
        assert await kv.get(chain[0], into) == BLOCK and (into == values[0]).all()


async def test_a_fault_of_the_node_ends_the_connection_and_hangs_nobody(
    tmp_path: Path, valve: Valve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: what is broken is told, not waited for. Method: what shows a block raises; the get ends long before its
    deadline, since the link does, and the read is nobody's to wait for any more."""
    async with life(tmp_path) as (node, kv):
        chain, values = await cold_chain(node, kv, 1, seed=6)
        promoter, into = node.disk.promoter, np.zeros_like(values[0])  # type: ignore[union-attr]

        def broken(*_: object) -> int:
            raise RuntimeError("broken on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(promoter, "_show", broken)
            assert await kv.get(chain[0], into, deadline_s=30) is None
        assert not promoter._coming and not promoter._works
        node.store.slabs.free(list(promoter.in_hand))  # what the fault left
        promoter.in_hand.clear()
        await wait_until(lambda: kv._router.sole is not None, "the client to come back")
        assert await kv.get(chain[0], into) == BLOCK and (into == values[0]).all()
