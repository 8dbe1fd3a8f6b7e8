"""The UCX binding over rc_verbs between two devices: connecting, one-sided transfers, messages, the end of a peer.

The peer is another process with its own device (processes.py). Only contents and errors are checked: the machine that
emulates the devices is slow.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.rdma.processes import PEER, REGION_BYTES, Process, peer_main
from ucxkv.transport.base import PeerLost, TransportError
from ucxkv.transport.endpoint import SEND_EAGER, SEND_RENDEZVOUS, Endpoint
from ucxkv.transport.memory import MemoryRegion, RemoteKey
from ucxkv.transport.progress import ReceivedMessage, Worker
from ucxkv.transport.ucx import Context

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

PATTERN = np.arange(REGION_BYTES, dtype=np.uint32).astype(np.uint8)


def _soon(seconds: float = 120.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


class Wire:
    """A worker of this process, connected to a peer process."""

    def __init__(self) -> None:
        self.context = Context(is_shared=False)
        self.worker = Worker(self.context)
        self.peer = Process(peer_main)
        port, self.remote, self.packed = self.peer.told
        self.endpoint = Endpoint.connect_socket(self.worker, PEER.address, port)
        self.memory = np.zeros(REGION_BYTES, np.uint8)
        self.region = MemoryRegion.register(self.context, self.memory)

    async def key(self) -> RemoteKey:
        """The peer's region, once the connection stands."""
        await self.endpoint.flush(deadline_ns=_soon())
        return self.endpoint.unpack_key(self.packed)

    async def close(self) -> None:
        """Everything, in UCX's order."""
        await self.endpoint.aclose(force=True, deadline_ns=_soon(20))
        self.region.close()
        await self.worker.aclose()
        self.context.close()
        self.peer.close()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """Connected to a peer of its own."""
    wire = Wire()
    yield wire
    await wire.close()


async def test_the_library_with_verbs_is_picked_and_sees_the_device() -> None:
    """The wheel has no verbs. Method: what a context of default making says of its library and devices."""
    with Context(is_shared=False) as context:
        assert context.library.has_verbs and context.has_rdma, context.library


async def test_one_sided_gets_and_puts_arrive_whole(wire: Wire) -> None:
    """Method: get 1 B to 1 MiB and compare; 64 gets of 4 KiB as one batch, shuffled; put, flush, the peer's view."""
    key = await wire.key()
    for nbytes in (1, 8, 100, 4096, 65_537, REGION_BYTES):
        wire.memory[:] = 0
        await wire.endpoint.get(wire.memory[:nbytes], wire.remote, key, region=wire.region, deadline_ns=_soon())
        assert (wire.memory[:nbytes] == PATTERN[:nbytes]).all() and not wire.memory[nbytes:].any(), nbytes
    order = np.random.default_rng(1).permutation(64).astype(np.uint64)
    wire.memory[:] = 0
    await wire.endpoint.transfer(
        False,
        wire.memory.ctypes.data + np.arange(64, dtype=np.uint64) * np.uint64(4096),
        np.full(64, 4096, np.uint64),
        wire.remote + order * np.uint64(4096),
        key,
        region=wire.region,
        keep=wire.memory,
        deadline_ns=_soon(),
    )
    expected = PATTERN.reshape(-1, 4096)[order.astype(np.intp)].reshape(-1)
    assert (wire.memory[: 64 * 4096] == expected).all()
    data = np.random.default_rng(2).integers(0, 256, 300_000, np.uint8)
    wire.memory[: len(data)] = data
    await wire.endpoint.put(wire.memory[: len(data)], wire.remote + 4096, key, region=wire.region, deadline_ns=_soon())
    await wire.endpoint.flush(deadline_ns=_soon())
    seen = np.frombuffer(await asyncio.to_thread(wire.peer.ask, "bytes"), np.uint8)
    assert (seen[4096 : 4096 + len(data)] == data).all()
    assert (seen[:4096] == PATTERN[:4096]).all() and (seen[4096 + len(data) :] == PATTERN[4096 + len(data) :]).all()


@pytest.mark.parametrize("flags", [SEND_EAGER, SEND_RENDEZVOUS])
async def test_active_messages_come_back_as_they_went(wire: Wire, flags: int) -> None:
    """Method: the peer sends each message back; headers and payloads of 0 B to 200 KB are compared."""
    back: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
    wire.worker.on_message(2, back.put_nowait)
    for nbytes in (0, 1, 5000, 200_000) if flags == SEND_EAGER else (1, 200_000):
        header, payload = os.urandom(24), os.urandom(nbytes)
        await wire.endpoint.send(1, header, payload or None, flags=flags, deadline_ns=_soon())
        message = await asyncio.wait_for(back.get(), 120)
        assert message.header == header and message.length == nbytes
        if nbytes:
            assert bytes(await message.receive(deadline_ns=_soon())) == payload


async def test_a_killed_peer_fails_what_waits_for_it(wire: Wire) -> None:
    """Method: kill -9, then gets: they end in PeerLost, later ones at once; the buffer is left alone afterwards."""
    key = await wire.key()
    await wire.endpoint.get(wire.memory, wire.remote, key, region=wire.region, deadline_ns=_soon())
    wire.peer.kill()
    gets = [
        wire.endpoint.get(wire.memory[:4096], wire.remote, key, region=wire.region, deadline_ns=_soon())
        for _ in range(8)
    ]
    ends = await asyncio.gather(*gets, return_exceptions=True)
    assert all(isinstance(end, TransportError) for end in ends), ends
    assert any(isinstance(end, PeerLost) for end in ends), ends
    assert not wire.endpoint.is_open
    with pytest.raises(TransportError):
        await wire.endpoint.get(wire.memory[:8], wire.remote, key, region=wire.region, deadline_ns=_soon(1))
    wire.memory[:] = 0xAB
    await wire.endpoint.aclose(force=True, deadline_ns=_soon(20))
    await asyncio.sleep(0.2)
    assert (wire.memory == 0xAB).all()
