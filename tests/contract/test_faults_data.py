"""What goes wrong under the data service's requests: peers that die or hang, calls that are given up."""

# ruff: noqa: ASYNC110, ASYNC220
from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import psutil
import pytest

from tests.transport.harness import POISON, one_piece_each, read, said
from tests.transport.native import ROOT, keys_of, pattern
from ucxkv.transport.base import Closed, TransportError, deadline_after
from ucxkv.transport.data import WriteStatus
from ucxkv.transport.memory import MemoryRegion

pytestmark = pytest.mark.faults

HIT, UNAVAILABLE = 0, 6


async def test_kill_9_of_the_node_mid_transfer_is_unavailable_and_touches_nothing_later(lone_client):
    """Goal: a dead node is a status within the deadline; memory is quiet. Method: SIGKILL under 16 MiB of reads."""
    client = lone_client
    length = 1 << 20
    await client.node.call("publish", first=0, offsets=[i * length for i in range(16)], length=length)
    await client.node.call("delay", ns=30_000_000)
    buffer = np.full(16 * length, POISON, np.uint8)
    client.node.control.on_closed(lambda _: client.data.lost())
    args = one_piece_each(buffer, length, 16)
    task = asyncio.create_task(client.data.read(keys_of(range(16)), *args, deadline_ns=deadline_after(20)))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(client.node.kill)
    started = time.monotonic()
    status, _, _ = await task
    assert time.monotonic() - started < 15  # not the deadline: the death was noticed
    assert set(status.tolist()) <= {HIT, UNAVAILABLE} and UNAVAILABLE in status.tolist()
    for i in range(16):
        if status[i] == HIT:
            assert (buffer[i * length : (i + 1) * length] == pattern(i, length)).all()
    buffer[:] = POISON
    for _ in range(20):
        client.worker.progress()
        await asyncio.sleep(0.01)
    assert (buffer == POISON).all()
    assert (await read(client, [0], length, 5))[0] == [UNAVAILABLE]
    assert client.data.counters()["requests"] == 0


async def test_kill_9_of_a_client_mid_write_frees_its_session(client):
    """Goal: the node survives a client's death in the middle of writes. Method: a client process writes and is
    killed.
    """
    code = (
        "import asyncio,sys,numpy as np\n"
        "from tests.transport.harness import *\n"
        "from tests.transport.native import pattern\n"
        "async def main():\n"
        f"    node = NodeProcess(None, {client.node.name!r}, {client.node.transports!r})\n"
        "    await node.connect()\n"
        "    c = await Client.start(node)\n"
        "    n, size = 8, 2 << 20\n"
        "    offsets = np.arange(n, dtype='<u8') * np.uint64(size)\n"
        "    await node.call('grant', token=c.token, offsets=offsets.tolist(), capacity=size)\n"
        "    print('token', c.token, flush=True)\n"
        "    data = np.concatenate([pattern(i, size) for i in range(n)])\n"
        "    while True:\n"
        "        await c.data.write(np.zeros(n, '<u2'), offsets, *one_piece_each(data, size, n))\n"
        "asyncio.run(main())\n"
    )
    call = client.node.call
    await call("publish", first=0, offsets=[32 << 20], length=5000)
    for delay in (0.02, 0.1):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        try:
            token = int(await asyncio.to_thread(said, process, "token "))
            await asyncio.sleep(delay)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)
            process.stdout.close()
        assert await call("close_session", token=token) is True
        counters = await call("counters")
        assert counters["grants"] == 0
        status, _, _ = await read(client, [0], 5000)
        assert status == [HIT]


async def test_a_stopped_node_is_unavailable_at_the_deadline_and_its_late_answer_touches_nothing(client):
    """Goal: a hung peer costs the deadline, not a hang, not memory. Method: SIGSTOP, read, poison, SIGCONT."""
    length = 300_000
    await client.node.call("publish", first=0, offsets=[0, length], length=length)
    assert (await read(client, [0], length))[0] == [HIT]
    buffer = np.zeros(2 * length, np.uint8)
    client.node.process.send_signal(signal.SIGSTOP)
    while psutil.Process(client.node.process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.001)
    args = one_piece_each(buffer, length, 2)
    status, _, _ = await client.data.read(keys_of([0, 1]), *args, deadline_ns=deadline_after(0.3))
    buffer[:] = POISON
    client.node.process.send_signal(signal.SIGCONT)
    assert status.tolist() == [UNAVAILABLE] * 2
    assert (await read(client, [1], length))[0] == [HIT]
    await asyncio.sleep(0.2)
    assert (buffer == POISON).all()
    assert client.data.counters()["requests"] == 0


@pytest.mark.parametrize("is_registered", [False, True])
async def test_cancelling_reads_at_any_point_leaves_the_buffers_alone(client, is_registered):
    """Goal: after the await nobody writes the buffer. Method: cancel after k turns of the loop, poison, let all
    run on.
    """
    length, n = 600_000, 6
    await client.node.call("publish", first=0, offsets=[i * length for i in range(n)], length=length)
    buffer = np.full(n * length, POISON, np.uint8)
    region = MemoryRegion.register(client.context, buffer) if is_registered else None
    args = one_piece_each(buffer, length, n)
    outcomes = []
    for turns in [0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 30, 50, 80]:
        task = asyncio.create_task(client.data.read(keys_of(range(n)), *args, region=region))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            outcomes.append("cancelled")
        buffer[:] = POISON
        status, other, _ = await read(client, [turns % n], length)
        assert status == [HIT] and (other == pattern(turns % n, length)).all()
        assert (buffer == POISON).all(), f"written after a cancel at turn {turns}"
    assert "cancelled" in outcomes
    await client.worker.drain(deadline_after(5))
    assert client.data.counters()["requests"] == 0 and client.worker.owned_count == 0
    if region is not None:
        region.close()


async def test_cancelled_writes_block_their_extents_until_they_are_over(client):
    """Goal: an abandoned write cannot spoil the next one to its extent. Method: cancel writes, write again at once (it
    waits), read back; the same after a deadline against a stopped node, where the wait ends at its own deadline.
    """
    length, n = 500_000, 4
    offsets = np.arange(n, dtype="<u8") * np.uint64(1 << 20)
    await client.node.call("grant", token=client.token, offsets=offsets.tolist(), capacity=length)
    old = np.concatenate([pattern(i, length) for i in range(n)])
    new = np.concatenate([pattern(100 + i, length) for i in range(n)])
    zeros = np.zeros(n, "<u2")

    async def written_whole(source):
        status = await client.data.write(
            zeros, offsets, *one_piece_each(source, length, n), keep=source, deadline_ns=deadline_after(20)
        )
        assert status.tolist() == [WriteStatus.WRITTEN] * n
        for i in range(n):
            got = await client.node.call("peek", offset=int(offsets[i]), length=length)
            assert got == source[i * length : (i + 1) * length].tobytes().hex()

    for turns in (0, 1, 2, 5, 10):
        task = asyncio.create_task(client.data.write(zeros, offsets, *one_piece_each(old, length, n), keep=old))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await written_whole(new)
    client.node.process.send_signal(signal.SIGSTOP)
    while psutil.Process(client.node.process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.001)
    try:
        for _ in range(2):
            status = await client.data.write(
                zeros, offsets, *one_piece_each(old, length, n), keep=old, deadline_ns=deadline_after(0.2)
            )
            assert status.tolist() == [WriteStatus.UNAVAILABLE] * n
    finally:
        client.node.process.send_signal(signal.SIGCONT)
    await written_whole(new)
    assert client.data.counters()["kept"] == 0


async def test_a_small_write_after_an_abandoned_large_one_is_not_overwritten_by_it(client):
    """Goal: an abandoned write is over before the next one to its extent begins, also where the two travel differently.
    Method: cancel a write of 8 MiB (rendezvous on shared memory), write 1,000 bytes there at once, look several times.
    """
    large, small = pattern(1, 8 << 20), pattern(2, 1000)
    zero, where = np.zeros(1, "<u2"), np.zeros(1, "<u8")
    await client.node.call("grant", token=client.token, offsets=[0], capacity=8 << 20)
    client.worker.inline_wait_ns = 0
    for turns in (1, 1, 1, 2, 2, 3, 4, 5, 8):
        task = asyncio.create_task(client.data.write(zero, where, *one_piece_each(large, len(large), 1), keep=large))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        status = await client.data.write(
            zero, where, *one_piece_each(small, len(small), 1), keep=small, deadline_ns=deadline_after(20)
        )
        assert status.tolist() == [WriteStatus.WRITTEN]
        for _ in range(3):
            assert await client.node.call("peek", offset=0, length=1000) == small.tobytes().hex(), turns
            await client.worker.drain(deadline_after(1))


async def test_a_registration_closed_under_transfers_is_let_go_when_they_are_over(client):
    """Goal: memory region and remote key closed under a transfer. Method: a get, a read, a message and a write of 8 MiB
    each, in one registered buffer; both closed after 0, 1, 2, ... turns of the loop; every call ends, in time, in its
    result or a typed error; the context has the region until then and not longer; nothing is written afterwards.
    """
    size, soon, zero = 8 << 20, deadline_after(60), np.zeros(1, "<u2")
    await client.node.call("publish", first=0, offsets=[0], length=size)
    await client.node.call("grant", token=client.token, offsets=[32 << 20], capacity=size)
    client.worker.inline_wait_ns = 0
    was_pending = False
    for turns in (0, 1, 2, 3, 5, 9):
        buffer = np.full(4 * size, POISON, np.uint8)
        parts = [buffer[i * size : (i + 1) * size] for i in range(4)]
        before = client.context.users_count
        region, key = MemoryRegion.register(client.context, buffer), client.endpoint.unpack_key(client.key)
        tasks = [
            asyncio.create_task(call)
            for call in (
                client.endpoint.get(parts[0], client.base, key, region=region, deadline_ns=soon),
                client.data.read(keys_of([0]), *one_piece_each(parts[1], size, 1), region=region, deadline_ns=soon),
                client.endpoint.send(31, b"", parts[2], region=region, deadline_ns=soon),
                client.data.write(
                    zero, np.array([32 << 20], "<u8"), *one_piece_each(parts[3], size, 1), region=region,
                    deadline_ns=soon,
                ),
            )
        ]  # fmt: skip
        for _ in range(turns):
            await asyncio.sleep(0)
        region.close()
        key.close()
        assert region.handle is None and key.handle is None
        was_pending |= client.context.users_count == before + 1
        with pytest.raises(Closed):
            await client.endpoint.get(parts[0], client.base, key, region=region)
        got, done, sent, written = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(isinstance(end, TransportError) or not isinstance(end, BaseException) for end in (got, done, sent))
        if turns:  # else they began with a closed region, and were refused
            assert got is None and sent is None and done[0].tolist() == [HIT]
            assert (parts[0] == pattern(0, size)).all() and (parts[1] == pattern(0, size)).all()
            assert written.tolist() == [WriteStatus.WRITTEN]
        await client.worker.drain(deadline_after(20))
        client.worker.progress()
        assert client.context.users_count == before, "the region is never let go"
        buffer[:] = POISON
        for _ in range(5):
            client.worker.progress()
            await asyncio.sleep(0.005)
        assert (buffer == POISON).all()
    assert was_pending, "deregistered under a transfer"


async def test_a_region_closed_under_a_cancelled_transfer_outlives_it(client, monkeypatch):
    """Method: gets cancelled at several turns, region and key closed at once, the worker closed under the last one, on
    a machine so busy that its time to end is over at once. (Not over TCP, where the product makes no one-sided reads:
    UCX ends the process that serves one when its reader goes.)
    """
    size = 8 << 20
    await client.node.call("publish", first=0, offsets=[0], length=size)
    client.worker.inline_wait_ns = 0
    for turns in (0, 1, 2, 4):
        before = client.context.users_count
        region = MemoryRegion.register(client.context, np.full(size, POISON, np.uint8))
        key = client.endpoint.unpack_key(client.key)
        task = asyncio.create_task(client.endpoint.get(region.view, client.base, key, region=region))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        region.close()
        key.close()
        assert await client.worker.drain(deadline_after(20))
        client.worker.progress()
        assert client.context.users_count == before and client.worker.owned_count == 0
    if "tcp" in client.node.transports:
        return
    region = MemoryRegion.register(client.context, np.full(size, POISON, np.uint8))
    key = client.endpoint.unpack_key(client.key)
    task = asyncio.create_task(client.endpoint.get(region.view, client.base, key, region=region))
    await asyncio.sleep(0)
    region.close()
    monkeypatch.setattr("ucxkv.transport.progress._LAST_NS", 0)
    client.worker.abort()
    await asyncio.wait([task])
    assert client.context.users_count == 0


async def test_a_failed_call_leaves_no_cycle_that_holds_its_buffer(client):
    """Goal: memory of failed calls is free at once; CPython crashed collecting it (memoryviews that cffi borrowed).
    Method: a read past its deadline, one cancelled, a get (over TCP, where there are none: a read) under which the
    worker ends; without the collector their buffers are gone.
    """
    size = 8 << 20
    await client.node.call("publish", first=0, offsets=[0], length=size)
    client.worker.inline_wait_ns = 0
    gc.collect()
    gc.disable()
    try:
        buffers = [np.full(size, POISON, np.uint8) for _ in range(3)]
        gone = [weakref.ref(buffer) for buffer in buffers]
        late, cancelled, ended = buffers
        await client.data.read(
            keys_of([0]), *one_piece_each(late, size, 1), keep=late, deadline_ns=time.monotonic_ns() - 1
        )
        task = asyncio.create_task(client.data.read(keys_of([0]), *one_piece_each(cancelled, size, 1), keep=cancelled))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert await client.worker.drain(deadline_after(20))
        client.worker.progress()
        if "tcp" in client.node.transports:
            last = client.data.read(keys_of([0]), *one_piece_each(ended, size, 1), keep=ended)
        else:
            key = client.endpoint.unpack_key(client.key)
            last = client.endpoint.get(memoryview(ended), client.base, key)
        task = asyncio.create_task(last)
        await asyncio.sleep(0)
        client.worker.abort()
        await asyncio.wait([task])
        assert task.exception() is None or isinstance(task.exception(), Closed)
        del buffers, late, cancelled, ended, task, last
        assert [ref() is None for ref in gone] == [True] * 3
    finally:
        gc.enable()
