"""A node that dies, hangs, restarts or leaves: reads miss, puts say UNAVAILABLE, by the deadline; then all works again.

Statuses and counts only: a deadline is checked by what a call answers, never by how long this machine took.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, open_files, wait_until
from tests.wire import RawPeer
from ucxkv import PutStatus, ReadStatus

PATHS = ["mapped", "message", "network", "rma"]
POISON = 0xAB

pytestmark = pytest.mark.faults


def _tasks() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("path", PATHS)
async def test_a_killed_node_is_a_miss_and_unavailable(path: str) -> None:
    """User voice 1. Method: put 8 blocks, kill -9 the idle node, then every call; the process goes on."""
    with NodeProcess() as node:
        async with ucxkv.connect(node.address, path=path, timeout_s=2) as kv:
            k, b = keys(8), blocks(8, 10_000)
            assert (await kv.put_many(k, b, "chain")).ok
            node.kill()
            await wait_until(lambda: not kv.peers()[0].alive, "the death is seen")
            into = np.zeros_like(b)
            got = await kv.get_many(k, into)
            assert got.hits == 0 and set(got.status.tolist()) <= {ReadStatus.MISS, ReadStatus.UNAVAILABLE}
            assert await kv.get(k[0]) is None and await kv.get(k[0], into[0]) is None and not into.any()
            assert not (await kv.exists_many(k)).any() and (await kv.match(k)).blocks == 0
            assert await kv.put(k[0], b"v") is PutStatus.UNAVAILABLE
            put = await kv.put_many(k, b, "chain")
            assert (put.status == PutStatus.UNAVAILABLE).all()
            with pytest.raises(ucxkv.Unavailable, match="put again later"):
                put.raise_for_status()
            assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.UNAVAILABLE] * 8
            async with kv.lease(k) as lease:
                assert not lease.granted.any() and not lease.valid
            assert await kv.status() == [] and await kv.list_keys() == [] and await kv.view(k[0]) is None
            assert kv.peers()[0].why


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("when", [0.0, 0.002, 0.02])
async def test_a_node_killed_under_a_transfer_gives_no_wrong_byte(path: str, when: float) -> None:
    """User voices 1, 3. Method: kill -9 while 64 MiB are put and got; what is a HIT is right, the rest is not."""
    with NodeProcess(host_bytes="192MiB") as node:
        async with ucxkv.connect(node.address, path=path, timeout_s=3) as kv:
            k, b = keys(64), blocks(64, 1 << 20)
            assert (await kv.put_many(k, b)).ok
            into = np.full_like(b, 0xAB)
            getting = asyncio.create_task(kv.get_many(k, into))
            putting = asyncio.create_task(kv.put_many(keys(64), b))
            await asyncio.sleep(when)
            node.kill()
            got, put = await getting, await putting
            hit = got.status == ReadStatus.HIT
            assert (into[hit] == b[hit]).all()
            assert set(put.status.tolist()) <= {PutStatus.STORED, PutStatus.UNAVAILABLE}
            await wait_until(lambda: not kv.peers()[0].alive, "the death is seen")
            before = into.copy()
            await asyncio.sleep(0.05)
            assert (into == before).all(), "a buffer was written after its call had ended"
            assert (await kv.get_many(k, into)).hits == 0


@pytest.mark.parametrize("path", ["message", "network", "rma"])
async def test_a_stopped_node_ends_reads_by_message_at_the_deadline(path: str) -> None:
    """User voice 2. Method: SIGSTOP, a get that has no answer to come, SIGKILL; no task is left."""
    with NodeProcess() as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            k, b = keys(8), blocks(8, 10_000)
            assert (await kv.put_many(k, b)).ok
            node.freeze()
            got = await kv.get_many(k, np.zeros_like(b), deadline_s=0.3)
            assert got.hits == 0 and (got.status == ReadStatus.UNAVAILABLE).all()
            waiting = asyncio.create_task(kv.get_many(k, np.zeros_like(b), deadline_s=30))
            await asyncio.sleep(0.05)
            node.kill()
            assert (await waiting).hits == 0
    assert _tasks() == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_stopped_node_ends_puts_at_the_deadline_and_serves_mapped_gets(path: str) -> None:
    """User voice 2. Method: SIGSTOP; puts end UNAVAILABLE, mapped gets go on; SIGCONT: the same client works."""
    with NodeProcess() as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            k, b = keys(8), blocks(8, 10_000)
            assert (await kv.put_many(k, b)).ok
            granted = (await kv.status())[0].numbers["granted_bytes"]
            node.freeze()
            puts = await asyncio.gather(*(kv.put(key, b[0], deadline_s=0.3) for key in keys(20)))
            assert set(puts) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE} and PutStatus.UNAVAILABLE in puts
            many = await kv.put_many(keys(40), blocks(40, 100_000), deadline_s=0.3)
            assert not many.stored
            with pytest.raises(ucxkv.DeadlineExceeded):
                await kv.status(deadline_s=0.1)
            assert (await kv.delete(k[:1], deadline_s=0.1)).tolist() == [ucxkv.DeleteStatus.UNAVAILABLE]
            if path == "mapped":
                into = np.zeros_like(b)
                assert (await kv.get_many(k[1:], into[1:])).hits == 7 and (into[1:] == b[1:]).all()
            node.thaw()
            fresh = keys(8)
            await wait_until(lambda: _all_stored(kv, fresh, b), "puts work again")
            into = np.zeros_like(b)
            assert (await kv.get_many(fresh, into)).hits == 8 and (into == b).all()
            # what was granted in answers that came too late is used or returned, not lost
            for _ in range(20):
                assert (await kv.put_many(keys(8), b)).ok
            assert (await kv.status())[0].numbers["granted_bytes"] <= granted + (8 << 20)


async def _all_stored(kv: ucxkv.Client, fresh: list[bytes], b: np.ndarray) -> bool:
    return (await kv.put_many(fresh, b, deadline_s=1)).ok


async def test_answers_that_come_too_late_lose_no_memory() -> None:
    """Goal: grants and leases of given-up requests come back. Method: give up 30 rounds against a stopped node."""
    with NodeProcess() as node:
        async with ucxkv.connect(node.address) as kv:
            (key,) = keys(1)
            assert await kv.put(key, b"v") is PutStatus.STORED
            for size in range(30):
                node.freeze()
                put = asyncio.create_task(kv.put(keys(1)[0], bytes(300_000 + 20_000 * size), deadline_s=0.02))
                lease = kv.lease([key])
                holding = asyncio.create_task(lease.__aenter__())
                await asyncio.sleep(0.01)
                holding.cancel()
                assert await put is not PutStatus.STORED
                await asyncio.gather(holding, return_exceptions=True)
                node.thaw()
                await kv.status()
            assert (await kv.status())[0].numbers["leases"] == 0
            kv._router.sole.putter.return_grants()
            await wait_until(lambda: _number_is(kv, "granted_bytes", 0), "all grants are back")
            assert (await kv.put_many(keys(30), blocks(30, 500_000))).ok


async def _number_is(kv: ucxkv.Client, name: str, value: float) -> bool:
    return (await kv.status())[0].numbers[name] == value


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_finds_a_restarted_node_by_itself(path: str) -> None:
    """Goal: restart is a miss, then normal. Method: kill -9 and start again on the same port, twice."""
    node = NodeProcess()
    files = 0
    try:
        async with ucxkv.connect(node.address, path=path) as kv:
            for round_ in range(2):
                k, b = keys(8), blocks(8, 50_000, round_)
                assert (await kv.put_many(k, b, "chain")).ok
                files = files or open_files()
                node.kill()
                await wait_until(lambda: not kv.peers()[0].alive, "the death is seen")
                node = await asyncio.to_thread(NodeProcess, listen=node.address)
                await wait_until(lambda: kv.peers()[0].alive, "the client is back", 20)
                assert (await kv.get_many(k, np.empty_like(b))).hits == 0
                assert (await kv.put_many(k, b[::-1].copy(), "chain")).ok
                into = np.empty_like(b)
                assert (await kv.get_many(k, into)).hits == 8 and (into == b[::-1]).all()
            await wait_until(lambda: open_files() <= files, "descriptors are as before")
    finally:
        node.kill()


@pytest.mark.parametrize("path", PATHS)
async def test_a_thousand_pending_operations_end_when_their_node_is_killed(path: str) -> None:
    """User voices 1, 2. Method: 1,000 gets, look-ups and puts wait for a stopped node, which is killed: each ends in
    its status, long before its deadline; no buffer changes afterwards; a new node on the port is used; nothing is left.
    """
    node = NodeProcess()
    files = open_files()
    try:
        kv = await ucxkv.connect(node.address, path=path, timeout_s=60)
        k, b = keys(32), blocks(32, 40_000)
        assert (await kv.put_many(k, b)).ok
        node.freeze()
        into = np.full((600, 40_000), POISON, np.uint8)
        gets = [asyncio.create_task(kv.get_many([k[i % 32]], into[i : i + 1])) for i in range(600)]
        asks = [asyncio.create_task(kv.exists(k[i % 32])) for i in range(200)]
        puts = [asyncio.create_task(kv.put(key, b[0])) for key in keys(200)]
        await asyncio.sleep(0.2)
        assert not all(task.done() for task in puts)
        node.kill()
        got = await asyncio.wait_for(asyncio.gather(*gets), 30)
        hit = np.array([result.status[0] == ReadStatus.HIT for result in got])
        assert path == "mapped" or not hit.any()  # which asks nobody
        assert {int(result.status[0]) for result in got} <= {ReadStatus.HIT, ReadStatus.UNAVAILABLE}
        for i in np.flatnonzero(hit).tolist():
            assert (into[i] == b[i % 32]).all()
        await asyncio.wait_for(asyncio.gather(*asks), 30)
        ends = await asyncio.wait_for(asyncio.gather(*puts), 30)
        assert set(ends) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE}
        await wait_until(lambda: not kv.peers()[0].alive, "the death is seen")
        after = into.copy()
        assert (into[~hit] == POISON).all()
        node = await asyncio.to_thread(NodeProcess, listen=node.address)
        await wait_until(lambda: kv.peers()[0].alive, "the client is back", 20)
        assert (await kv.put_many(k, b)).ok
        fresh = np.zeros_like(b)
        assert (await kv.get_many(k, fresh)).hits == 32 and (fresh == b).all()
        assert (into == after).all(), "a buffer was written after its call had ended"
        await kv.aclose()
        assert _tasks() == 1
        await wait_until(lambda: open_files() <= files + 2, "descriptors of the client")
    finally:
        node.kill()


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_a_hung_node_with_a_thousand_operations_pending_is_not_held(path: str) -> None:
    """Method: the same against a node that stays stopped, short deadlines, then aclose; each call has its status, the
    buffers are left alone also when the node wakes, the node gets everything back.
    """
    with NodeProcess() as node:
        files = open_files()
        kv = await ucxkv.connect(node.address, path=path)
        k, b = keys(32), blocks(32, 40_000)
        assert (await kv.put_many(k, b)).ok
        node.freeze()
        into = np.full((600, 40_000), POISON, np.uint8)
        gets = [kv.get_many([k[i % 32]], into[i : i + 1], deadline_s=1) for i in range(600)]
        asks = [kv.exists_many([k[i % 32]], deadline_s=1) for i in range(200)]
        puts = [kv.put(key, b[0], deadline_s=1) for key in keys(200)]
        ends = await asyncio.wait_for(asyncio.gather(*gets, *asks, *puts), 30)
        assert {int(end.status[0]) for end in ends[:600]} <= {ReadStatus.HIT, ReadStatus.UNAVAILABLE}
        assert set(ends[800:]) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE}
        after = into.copy()
        await asyncio.wait_for(kv.aclose(), 30)
        assert _tasks() == 1
        node.thaw()
        async with ucxkv.connect(node.address) as other:
            for name in ("granted_bytes", "quarantined_bytes", "leases", "message_sessions", "message_grants"):
                await wait_until(lambda name=name: _number_is(other, name, 0), f"{name} is 0")
            await wait_until(lambda: _number_is(other, "connections", 1), "its connection is gone")
        assert (into == after).all(), "a buffer was written after its call had ended"
        await wait_until(lambda: open_files() <= files + 2, "descriptors of the client")


@pytest.mark.parametrize("path", PATHS)
async def test_a_graceful_stop_under_load_ends_every_call(path: str) -> None:
    """Goal: SIGTERM is exit code 0 and no call hangs. Method: stop while four clients put and get all the time."""
    with NodeProcess(host_bytes="128MiB") as node:
        stopped, begun = asyncio.Event(), [asyncio.Event() for _ in range(4)]

        async def work(index: int) -> int:
            calls = 0
            async with ucxkv.connect(node.address, path=path, timeout_s=3) as kv:
                while not stopped.is_set() or calls < 5:
                    k, b = keys(8), blocks(8, 100_000)
                    put = await kv.put_many(k, b)
                    assert set(put.status.tolist()) <= {PutStatus.STORED, PutStatus.UNAVAILABLE}
                    into = np.zeros_like(b)
                    got = await kv.get_many(k, into)
                    hit = got.status == ReadStatus.HIT
                    assert (into[hit] == b[hit]).all()
                    calls += 1
                    begun[index].set()
                    await asyncio.sleep(0)
            return calls

        workers = [asyncio.create_task(work(index)) for index in range(4)]
        for event in begun:
            await asyncio.wait_for(event.wait(), 60)
        assert await asyncio.to_thread(node.stop) == 0
        stopped.set()
        assert min(await asyncio.gather(*workers)) >= 5
    assert _tasks() == 1


async def test_killed_nodes_leave_nothing_on_the_host() -> None:
    """User voice 37. Method: start and kill -9 a node on one port 4 times; nothing of it is in /dev/shm, and none of
    its Unix sockets is left.
    """

    def left() -> list[str]:
        there = Path("/proc/net/unix").read_text()
        return [one for one in sockets if one in there]

    name, listen, sockets = f"killed-{os.getpid()}", "127.0.0.1:0", []
    for _ in range(4):
        node = NodeProcess(name, host_bytes="16MiB", listen=listen, message_path=False)
        listen = node.address
        with RawPeer(node.address) as peer:
            sockets.append((await asyncio.to_thread(peer.open)).local_name)
        async with ucxkv.connect(node.address) as kv:
            assert await kv.put(keys(1)[0], bytes(1000)) is PutStatus.STORED
            assert left() == sockets[-1:]
            node.kill()
    await wait_until(lambda: not left(), "no socket is left")
    assert not [one for one in os.listdir("/dev/shm") if name in one]
