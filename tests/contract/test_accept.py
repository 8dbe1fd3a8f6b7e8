"""The data service by socket address: sessions that are announced, then connected to (accept.c).

Over tcp here; the RDMA tests connect the same way.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import numpy as np
import pytest

import ucxkv
from tests.harness import wait_until
from tests.transport.native import EPOCH, address_of
from ucxkv.node import Node, NodeConfig
from ucxkv.transport.base import PeerLost, TransportError, UsageError
from ucxkv.transport.data import DataClient
from ucxkv.transport.endpoint import Endpoint
from ucxkv.transport.memory import MemoryRegion
from ucxkv.transport.progress import Worker
from ucxkv.transport.service import DataService
from ucxkv.transport.ucx import Context


@pytest.fixture
def rdma_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts say that they have RDMA, so that node and client choose the socket way."""
    monkeypatch.setattr(Context, "has_rdma", property(lambda self: True))


@pytest.mark.usefixtures("rdma_everywhere")
async def test_a_client_connects_through_the_nodes_listener() -> None:
    """Method: three clients one after the other; put, get, match; the node's sessions are gone afterwards."""
    async with Node(NodeConfig(listen="127.0.0.1:0", host_bytes=32 << 20)) as node:
        assert node.service.port > 0
        for seed in range(3):
            async with ucxkv.connect(node.address, path="network") as kv:
                k = [os.urandom(16) for _ in range(4)]
                b = np.random.default_rng(seed).integers(0, 256, (4, 70_000), np.uint8)
                assert (await kv.put_many(k, b, "chain")).ok
                into = np.zeros_like(b)
                assert (await kv.get_many(k, into)).hits == 4 and (into == b).all()
                assert (await kv.match(k)).blocks == 4
        await wait_until(lambda: node.service.numbers()["message_sessions"] == 0, "sessions end")


async def test_a_node_listens_where_it_has_rdma_and_not_elsewhere() -> None:
    """Method: the port of a node, beside what its UCX has."""
    async with Node(NodeConfig(listen="127.0.0.1:0", host_bytes=32 << 20)) as node:
        with Context(is_shared=False) as context:
            assert (node.service.port > 0) is context.has_rdma


async def test_an_id_that_nobody_announced_is_turned_away() -> None:
    """Method: a stranger connects before and after the announced client; it fails, the announced one is answered."""
    with Context() as served, Context(is_shared=False) as context:
        memory = MemoryRegion.allocate(served, 4096)
        service = DataService(served, *_nothing())
        service.lend(0, memory)
        known, stranger = Worker(context), Worker(context)
        port = await service.listen("127.0.0.1")
        await service.await_session(77, known.client_id, is_peer_mode=True, is_eager_only=True)
        with pytest.raises(UsageError):
            await service.await_session(77, known.client_id, is_peer_mode=True, is_eager_only=True)
        for turn in range(2):
            endpoint = Endpoint.connect_socket(stranger, "127.0.0.1", port)
            with pytest.raises(PeerLost):
                await endpoint.flush()
            await endpoint.aclose(force=True)
            if turn == 0:
                mine = Endpoint.connect_socket(known, "127.0.0.1", port)
                client = DataClient(known, mine, 77, EPOCH)
                found = await client.lookup(bytes(range(1, 17)))
                assert found["status"].tolist() == [1]
        assert service.counters().unknown_session == 2
        await client.aclose()
        assert await service.close_session(77)
        await asyncio.gather(known.aclose(), stranger.aclose())
        service.close()
        memory.close()


async def test_the_newest_session_that_a_client_announced_gets_its_endpoint() -> None:
    """Method: announce two sessions for one client, connect once: the newer one is answered, the older one's end, which
    closes its endpoint by force, leaves it alone.
    """
    with Context() as served, Context(is_shared=False) as context:
        service = DataService(served, *_nothing())
        worker = Worker(context)
        port = await service.listen("127.0.0.1")
        for token in (1, 2):
            await service.await_session(token, worker.client_id, is_peer_mode=True, is_eager_only=True)
        client = DataClient(worker, Endpoint.connect_socket(worker, "127.0.0.1", port), 2, EPOCH)
        assert (await client.lookup(bytes(range(1, 17))))["status"].tolist() == [1]
        assert await service.close_session(1)
        for _ in range(20):
            assert (await client.lookup(bytes(range(1, 17))))["status"].tolist() == [1]
        await client.aclose()
        await worker.aclose()
        service.close()


@pytest.mark.usefixtures("rdma_everywhere")
async def test_a_lost_data_path_is_made_anew() -> None:
    """Method: the node ends the data session alone, the control connection stays; the client notices, works again."""
    async with Node(NodeConfig(listen="127.0.0.1:0", host_bytes=32 << 20)) as node:
        async with ucxkv.connect(node.address, path="network") as kv:
            key = os.urandom(16)
            assert await kv.put(key, b"value") is ucxkv.PutStatus.STORED
            (session,) = [s for s in node.sessions if node.service.serves(s)]
            assert await node.service._data.close_session(session)  # type: ignore[union-attr]

            async def is_back() -> bool:
                return await kv.get(key) == b"value"

            await wait_until(is_back, "the data path is back", 30)


async def test_a_session_that_was_announced_and_never_connected_closes_clean() -> None:
    """Method: announce 100, close half of them by name and the rest with the service; the counter is back to zero."""
    with Context() as served:
        service = DataService(served, *_nothing())
        for token in range(1, 101):
            await service.await_session(token, 1000 + token, is_peer_mode=True, is_eager_only=True)
        for token in range(1, 51):
            assert await service.close_session(token)
        await wait_until(lambda: service.counters().sessions == 50, "the closed half is gone")
        service.close()


async def test_a_write_under_the_token_of_a_session_that_is_awaited_is_dropped() -> None:
    """Goal: the node cannot answer there, and must not try. Method: a client with an endpoint of its own writes under
    the token of an announced session, granted and not; the node counts both, writes nothing and goes on.
    """
    with Context() as served, Context(is_shared=False) as context:
        buffer = np.zeros(4096, np.uint8)
        memory = MemoryRegion.register(served, buffer)
        service = DataService(served, *_nothing())
        service.lend(0, memory)
        worker = Worker(context)
        port = await service.listen("127.0.0.1")
        await service.await_session(1, worker.client_id, is_peer_mode=True, is_eager_only=True)
        mine = DataClient(worker, Endpoint.connect_socket(worker, "127.0.0.1", port), 1, EPOCH)
        assert (await mine.lookup(bytes(range(1, 17))))["status"].tolist() == [1]
        await service.await_session(2, 12345, is_peer_mode=True, is_eager_only=True)
        assert service.grant(2, np.zeros(1, "<u2"), np.zeros(1, "<u8"), np.array([4096], "<u8")).tolist() == [0]
        other = DataClient(worker, mine._endpoint, 2, EPOCH)
        data = np.full(64, 7, np.uint8)
        for offset in (0, 1024):
            status = await other.write(
                np.zeros(1, "<u2"),
                np.array([offset], "<u8"),
                np.array([0, 1], "<u4"),
                np.array([data.ctypes.data], "<u8"),
                np.array([64], "<u8"),
                deadline_ns=time.monotonic_ns() + 300_000_000,
            )
            assert status.tolist() == [6]
        assert service.counters().dropped == 2
        assert not buffer.any()
        assert (await mine.lookup(bytes(range(1, 17))))["status"].tolist() == [1]
        await mine.aclose()
        await worker.aclose()
        service.close()
        memory.close()


async def test_bytes_that_are_no_worker_address_are_refused_and_not_given_to_ucx() -> None:
    """Goal: UCX ends the process on an address of a version that it does not know. Method: the addresses that a client
    sends to a node, and a node to its client: empty, cut, too long, of another version, and hundreds of spoilt ones.
    """
    rng = random.Random(5)
    with Context() as served, Context(is_shared=False) as context:
        service = DataService(served, *_nothing())
        worker = Worker(context)
        good = worker.address
        for bad in (b"", good[:4], bytes([good[0] ^ 2]) + good[1:], b"\xff" * 200, good + bytes(20_000)):
            with pytest.raises(UsageError):
                await service.open_session(9, bad, is_peer_mode=True, is_eager_only=True)
            with pytest.raises(UsageError):
                Endpoint.connect(worker, bad, is_peer_mode=True)
        for token in range(100, 400):
            spoilt = bytearray(good[: rng.randrange(10, len(good) + 1)])
            for _ in range(rng.randrange(3)):
                spoilt[rng.randrange(1, len(spoilt))] = rng.randrange(256)
            try:
                await service.open_session(token, bytes(spoilt), is_peer_mode=True, is_eager_only=True)
            except TransportError:
                continue
            await service.close_session(token)
        await service.open_session(1, good, is_peer_mode=True, is_eager_only=True)
        client = DataClient(worker, Endpoint.connect(worker, service.address, is_peer_mode=True), 1, EPOCH)
        assert (await client.lookup(bytes(range(1, 17))))["status"].tolist() == [1]
        await client.aclose()
        await worker.aclose()
        service.close()


_EMPTY = np.array([0, 0, EPOCH], "<u8")  # a table of tests/native/resolver.c: no blocks, no delay


def _nothing() -> tuple[int, int]:
    """A resolver that finds nothing, and its context."""
    return address_of("test_resolve"), _EMPTY.ctypes.data
