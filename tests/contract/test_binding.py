"""The libucp binding's contract, on shared memory and on TCP, always between two real processes."""

# ruff: noqa: ASYNC222
from __future__ import annotations

import asyncio
import gc
import os
import time

import numpy as np
import psutil
import pytest

from tests.transport.harness import SHM, TCP, Client, NodeProcess
from tests.transport.native import pattern
from ucxkv.transport.base import (
    Closed,
    DeadlineExceeded,
    PeerLost,
    TransportError,
    UcxError,
    UsageError,
    deadline_after,
)
from ucxkv.transport.endpoint import SEND_EAGER, SEND_RENDEZVOUS, Endpoint
from ucxkv.transport.memory import MemoryRegion
from ucxkv.transport.progress import RECORD_DTYPE, Worker
from ucxkv.transport.ucx import Context

POISON = 0xA5


@pytest.fixture
async def client(process):
    await process.connect()
    await process.call("reset")
    made = await Client.start(process)
    yield made
    await made.aclose()
    await process.call("close_session", token=made.token)
    process.control.abort()


class Echo:
    """An endpoint to the node's echo worker; `answers` collects what comes back as (header, payload)."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answers: asyncio.Queue = asyncio.Queue()
        self.tasks: set = set()
        self.endpoint: Endpoint

    @classmethod
    async def start(cls, client: Client) -> Echo:
        echo = cls(client)
        client.worker.on_message(2, echo._answer)
        address = await client.node.call("echo", address=client.worker.address.hex())
        is_peer_mode = "tcp" in client.node.transports
        echo.endpoint = Endpoint.connect(client.worker, bytes.fromhex(address), is_peer_mode=is_peer_mode)
        return echo

    def _answer(self, message) -> None:
        async def receive():
            self.answers.put_nowait((message.header, bytes(await message.receive())))

        task = asyncio.ensure_future(receive())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def roundtrip(self, header, payload, **more):
        await self.endpoint.send(1, header, payload, deadline_ns=deadline_after(20), **more)
        return await asyncio.wait_for(self.answers.get(), 20)


@pytest.mark.parametrize("flags", [0, SEND_EAGER, SEND_RENDEZVOUS])
async def test_messages_of_every_size_come_back_as_they_went(client, flags):
    """Goal: header and payload survive both ways on each protocol. Method: echo in the node, sizes around the
    limits.
    """
    echo = await Echo.start(client)
    for size in (0, 1, 84, 5000, 9000, 70_000, 300_000, 5 << 20):
        header = os.urandom(size % 85)
        payload = pattern(size, size).tobytes()
        if flags == SEND_RENDEZVOUS and size == 0:
            continue
        assert await echo.roundtrip(header, payload or None, flags=flags) == (header, payload)
    assert await echo.roundtrip(b"pieces", [b"a" * 10_000, bytearray(b"b"), b"c" * 50_000]) == (
        b"pieces",
        b"a" * 10_000 + b"b" + b"c" * 50_000,
    )
    await echo.endpoint.aclose()


async def test_a_header_over_84_bytes_is_refused(client):
    """Goal: what does not fit is an error before sending. Method: 85 bytes."""
    with pytest.raises(UcxError):
        await client.endpoint.send(1, bytes(85))


async def test_many_messages_at_once_keep_their_payloads(client):
    """Goal: nothing crosses under concurrency. Method: 300 echoes of mixed sizes in flight together."""
    echo = await Echo.start(client)
    sizes = [17, 3000, 40_000, 200_000]
    sent = {i.to_bytes(4, "little"): pattern(i, sizes[i % 4]).tobytes() for i in range(300)}
    await asyncio.gather(*[echo.endpoint.send(1, h, p, deadline_ns=deadline_after(30)) for h, p in sent.items()])
    got = dict([await asyncio.wait_for(echo.answers.get(), 30) for _ in sent])
    assert got == sent
    await echo.endpoint.aclose()


async def test_one_sided_gets_and_puts_move_the_bytes(client):
    """Goal: get, put, flush on a registered buffer. Method: sizes up to 8 MiB against the node's own view of its
    memory.
    """
    await client.node.call("publish", first=0, offsets=[0], length=8 << 20)
    key = client.endpoint.unpack_key(client.key)
    buffer = np.zeros(8 << 20, np.uint8)
    with MemoryRegion.register(client.context, buffer) as region:
        for size in (1, 100, 20_000, 8 << 20):
            buffer[:] = 0
            await client.endpoint.get(memoryview(buffer)[:size], client.base, key, region=region)
            assert (buffer[:size] == pattern(0, 8 << 20)[:size]).all() and not buffer[size:].any()
        if "tcp" not in client.node.transports:  # over TCP the product never puts
            buffer[:] = pattern(3, 8 << 20)
            await client.endpoint.put(memoryview(buffer)[:300_000], client.base + 1000, key, region=region)
            await client.endpoint.flush(deadline_ns=deadline_after(10))
            assert await client.node.call("peek", offset=1000, length=300_000) == buffer[:300_000].tobytes().hex()


async def test_a_batch_of_gets_is_one_completion(client):
    """Goal: n one-sided reads, one record. Method: 500 gets of 4 KiB in one call; count the records of the ring."""
    n, size = 500, 4096
    await client.node.call("publish", first=0, offsets=[0], length=n * size)
    key = client.endpoint.unpack_key(client.key)
    buffer = np.zeros(n * size, np.uint8)
    order = np.random.default_rng(3).permutation(n).astype("<u8")
    local = buffer.ctypes.data + np.arange(n, dtype="<u8") * np.uint64(size)
    seen = []
    dispatch = client.worker._dispatch
    client.worker._dispatch = lambda *record: (seen.append(record), dispatch(*record))
    await client.endpoint.transfer(
        False, local, np.full(n, size, "<u8"), client.base + order * np.uint64(size), key, keep=buffer,
        deadline_ns=deadline_after(20),
    )  # fmt: skip
    want = pattern(0, n * size).reshape(n, size)[order.astype(int)]
    assert (buffer.reshape(n, size) == want).all()
    assert len(seen) <= 1


async def test_memory_allocated_by_ucx_can_be_mapped_by_a_peer_on_this_host(client):
    """Goal: rkey_ptr. Method: the node allocates through UCX; this process reads it through a pointer, no message."""
    if "tcp" in client.node.transports:
        key = client.endpoint.unpack_key(client.key)
        with pytest.raises(TransportError):
            key.pointer(client.base)
        return
    made = await client.node.call("allocate", length=100_000)
    key = client.endpoint.unpack_key(bytes.fromhex(made["key"]))
    address = key.pointer(made["base"])
    import ctypes

    view = np.frombuffer((ctypes.c_ubyte * 100_000).from_address(address), np.uint8)
    assert (view == np.arange(100_000) % 251).all()
    del view
    key.close()
    key.close()
    with pytest.raises(Closed):
        key.pointer(made["base"])


async def test_user_memory_that_cannot_be_mapped_is_a_typed_error(client):
    """Goal: rkey_ptr of registered user memory is refused, not guessed. Method: the node's anonymous mmap."""
    key = client.endpoint.unpack_key(client.key)
    with pytest.raises(TransportError):
        key.pointer(client.base)


async def test_operations_over_the_rings_capacity_are_refused_and_the_others_complete(process):
    """Goal: the completion ring cannot overflow. Method: a ring of 16 records, 64 rendezvous sends at once."""
    await process.connect()
    client = await Client.start(process, ring_records=16, inline_wait_us=0)
    echo = await Echo.start(client)
    payload = bytes(200_000)
    results = await asyncio.gather(
        *[echo.endpoint.send(1, bytes([i]), payload, deadline_ns=deadline_after(20)) for i in range(64)],
        return_exceptions=True,
    )
    refused = [r for r in results if r is not None]
    assert refused and all(isinstance(r, UsageError) and "in flight" in str(r) for r in refused)
    assert results.count(None) >= 8
    await client.worker.drain(deadline_after(10))
    assert client.worker.owned_count == 0
    await echo.endpoint.aclose()
    await client.aclose()
    process.control.abort()


async def test_buffers_stay_referenced_until_ucx_is_done_with_them(client):
    """Goal: a cancelled operation's memory is not freed under UCX. Method: cancel sends, drop every reference, look."""
    echo = await Echo.start(client)
    worker = client.worker
    worker.inline_wait_ns = 0
    tasks = [asyncio.create_task(echo.endpoint.send(1, b"", pattern(i, 4 << 20).tobytes())) for i in range(4)]
    await asyncio.sleep(0)
    in_flight = worker.owned_count
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    del tasks
    gc.collect()
    assert worker.owned_count >= 0 and in_flight >= 0
    await worker.drain(deadline_after(20))
    assert worker.owned_count == 0 and worker.inflight_count == 0
    for _ in range(in_flight):  # what was sent arrived whole
        _, payload = await asyncio.wait_for(echo.answers.get(), 20)
        assert len(payload) == 4 << 20
    await echo.endpoint.aclose()


async def test_a_get_past_its_deadline_or_cancelled_still_owns_its_buffer(client):
    """Goal: the await may end, the ownership does not. Method: cancel gets at several turns, let them complete."""
    await client.node.call("publish", first=0, offsets=[0], length=8 << 20)
    key = client.endpoint.unpack_key(client.key)
    client.worker.inline_wait_ns = 0
    for turns in range(4):
        task = asyncio.create_task(client.endpoint.get(bytearray(8 << 20), client.base, key))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        gc.collect()
    assert await client.worker.drain(deadline_after(20))
    assert client.worker.owned_count == 0


async def test_a_killed_peer_ends_the_operations_over_it(lone_client):
    """Goal: kill -9 mid-transfer. Method: TCP: UCX says PeerLost; shared memory: our deadline, then the worker's
    end.
    """
    client = lone_client
    echo = await Echo.start(client)
    is_tcp = "tcp" in client.node.transports
    failures = []
    echo.endpoint.on_error = failures.append
    await echo.roundtrip(b"", b"warm")

    async def forever():
        while True:
            await echo.endpoint.send(1, b"", bytes(1 << 20), deadline_ns=deadline_after(20 if is_tcp else 1))

    tasks = [asyncio.create_task(forever()) for _ in range(4)]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(client.node.kill)
    done, pending = await asyncio.wait(tasks, timeout=15)
    assert not pending
    wanted = PeerLost if is_tcp else (PeerLost, DeadlineExceeded, UsageError)
    assert all(isinstance(task.exception(), wanted) for task in done)
    if is_tcp:
        assert failures == [echo.endpoint] and not echo.endpoint.is_open
        with pytest.raises(PeerLost):
            await echo.endpoint.send(1, b"")
    await client.worker.aclose(deadline_after(1))
    assert not client.worker.is_open and client.worker.owned_count == 0
    with pytest.raises(Closed):
        await client.endpoint.send(1)


async def test_closing_by_force_ends_what_is_in_flight(client):
    """Goal: nothing stays pending after a close. Method: rendezvous sends in flight, force close, progress to zero."""
    if "tcp" not in client.node.transports:
        pytest.skip("UCX has no forced close in error mode NONE; the worker's end is tested instead")
    echo = await Echo.start(client)
    await echo.roundtrip(b"", b"warm")
    client.worker.inline_wait_ns = 0
    tasks = [asyncio.create_task(echo.endpoint.send(1, b"", bytes(8 << 20))) for _ in range(8)]
    await asyncio.sleep(0)
    assert await echo.endpoint.aclose(force=True)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert all(r is None or isinstance(r, (Closed, PeerLost)) for r in results)
    assert await client.worker.drain(deadline_after(5)) and client.worker.owned_count == 0


async def test_two_hundred_endpoints_leave_no_descriptor_and_no_memory(client):
    """Goal: open and close 200 times. Method: connect on both sides, get, close; descriptors and memory of both."""
    await client.node.call("publish", first=0, offsets=[0], length=4096)
    here, there = psutil.Process(), psutil.Process(client.node.process.pid)
    is_peer_mode = "tcp" in client.node.transports

    async def once():
        here_address = client.worker.address.hex()
        hello = await client.node.call("hello", token=1, address=here_address, eager_only=True)
        endpoint = Endpoint.connect(client.worker, bytes.fromhex(hello["address"]), is_peer_mode=is_peer_mode)
        key = endpoint.unpack_key(client.key)
        data = bytearray(4096)
        await endpoint.get(data, client.base, key, deadline_ns=deadline_after(10))
        assert data == pattern(0, 4096).tobytes()
        await endpoint.aclose(deadline_ns=deadline_after(10), force=True)
        assert await client.node.call("close_session", token=1) is True

    for _ in range(20):
        await once()
    before = here.num_fds(), there.num_fds(), here.memory_info().rss, there.memory_info().rss
    for _ in range(200):
        await once()
    after = here.num_fds(), there.num_fds(), here.memory_info().rss, there.memory_info().rss
    assert after[0] <= before[0] + 4 and after[1] <= before[1] + 4
    assert after[2] - before[2] < 24 << 20 and after[3] - before[3] < 24 << 20


async def test_endpoints_through_a_listener_work_too(lone_client):
    """Goal: the sockaddr way. Method: TCP only: connect to the node's listener, echo a message."""
    client = lone_client
    if "tcp" not in client.node.transports:
        pytest.skip("a sockaddr endpoint needs tcp or rdmacm among the transports")
    echo = Echo(client)
    client.worker.on_message(2, echo._answer)
    port = await client.node.call("listen")
    echo.endpoint = Endpoint.connect_socket(client.worker, "127.0.0.1", port)
    assert await echo.roundtrip(b"h", b"x" * 100_000) == (b"h", b"x" * 100_000)
    await echo.endpoint.aclose()


async def test_bad_keys_and_addresses_are_typed_errors(client):
    """Goal: bytes of a peer cannot crash us at connect. Method: too short an address; closed objects."""
    with pytest.raises(UsageError):
        Endpoint.connect(client.worker, b"abc", is_peer_mode=False)
    with pytest.raises(UsageError):
        MemoryRegion.register(client.context, "text")
    with pytest.raises(UsageError):
        MemoryRegion.allocate(client.context, 0)
    region = MemoryRegion.allocate(client.context, 5000)
    region.close()
    region.close()
    with pytest.raises(Closed):
        region.pack_key()


async def test_a_context_in_use_is_not_closed(client):
    """Goal: order of destruction. Method: close the context under a worker."""
    with pytest.raises(UsageError, match="still use"):
        client.context.close()


async def test_a_forked_child_may_not_use_the_worker(client):
    """Goal: fork after connect is refused clearly. Method: fork, use, exit code; the parent goes on."""
    await client.node.call("publish", first=0, offsets=[0], length=64)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            client.worker.native()
        except Closed:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    key = client.endpoint.unpack_key(client.key)
    data = bytearray(64)
    await client.endpoint.get(data, client.base, key, deadline_ns=deadline_after(10))
    assert data == pattern(0, 64).tobytes()


async def test_messages_nobody_handles_are_dropped_and_the_sender_completes(client):
    """Goal: unasked messages do not pile up. Method: the node echoes to an id whose handler was removed."""
    echo = await Echo.start(client)
    client.worker._message_handlers.clear()
    for size in (10, 100_000):
        await echo.endpoint.send(1, b"", bytes(size), deadline_ns=deadline_after(10))
    end = time.monotonic() + 1
    while time.monotonic() < end:
        client.worker.progress()
        await asyncio.sleep(0.01)
    assert await echo.endpoint.aclose(deadline_ns=deadline_after(10)) in (True, False)


def test_records_are_as_wide_as_in_c():
    """Goal: the numpy view and the C struct agree. Method: sizes and offsets from the extension."""
    from ucxkv.transport import library

    ffi, _ = library.binding()
    assert ffi.sizeof("kv_record") == RECORD_DTYPE.itemsize == 128
    for name in RECORD_DTYPE.names:
        assert ffi.offsetof("kv_record", name) == RECORD_DTYPE.fields[name][1]


@pytest.mark.parametrize("transports", [SHM, TCP])
def test_it_all_works_under_uvloop(transports):
    """Goal: uvloop as well as asyncio. Method: echo, get and a data read between two processes under uvloop."""
    uvloop = pytest.importorskip("uvloop")

    async def main():
        node = await NodeProcess.start(transports)
        client = await Client.start(node)
        await node.call("publish", first=0, offsets=[0], length=300_000)
        echo = await Echo.start(client)
        payload = pattern(1, 3 << 20).tobytes()
        assert await echo.roundtrip(b"h", payload) == (b"h", payload)
        key = client.endpoint.unpack_key(client.key)
        data = bytearray(300_000)
        await client.endpoint.get(data, client.base, key, deadline_ns=deadline_after(10))
        assert data == pattern(0, 300_000).tobytes()
        await asyncio.sleep(0.3)  # asleep on the descriptor
        assert await echo.roundtrip(b"i", b"woken") == (b"i", b"woken")
        await echo.endpoint.aclose()
        await client.aclose()
        await node.stop()

    uvloop.run(main())


async def test_a_second_worker_needs_nothing_of_the_first():
    """Goal: several workers in one loop. Method: two workers of one context talk to each other."""
    with Context(transports="tcp,self") as context:
        one, two = Worker(context), Worker(context)
        got: asyncio.Queue = asyncio.Queue()
        two.on_message(3, got.put_nowait)
        endpoint = Endpoint.connect(one, two.address, is_peer_mode=True)
        await endpoint.send(3, b"header", b"x" * 1000, deadline_ns=deadline_after(10))
        message = await asyncio.wait_for(got.get(), 10)
        assert message.header == b"header" and bytes(await message.receive()) == b"x" * 1000
        with pytest.raises(Closed):
            await message.receive()
        await one.aclose()
        await two.aclose()
