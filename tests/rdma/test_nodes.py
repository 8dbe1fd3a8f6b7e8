"""Two nodes and a client over RDMA: put, get, match, and what is left when a node dies. Every byte is compared."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import wait_until
from tests.rdma.processes import Process, node_main
from ucxkv import PathKind, PutStatus, ReadStatus

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Process]]:
    """Two joined nodes on the peer's device."""
    with Process(node_main, "r1", ()) as one, Process(node_main, "r2", (one.told,)) as two:
        yield [one, two]


@pytest.fixture
async def kv(nodes: list[Process]) -> AsyncIterator[ucxkv.Client]:
    """A client of both, on its own device."""
    async with ucxkv.connect(nodes[0].told, path="network", timeout_s=_TIMEOUT_S) as client:
        await wait_until(lambda: sum(p.alive for p in client.peers()) == 2, "both nodes are reached", 240)
        yield client


async def test_both_nodes_are_reached_by_rdma(nodes: list[Process], kv: ucxkv.Client) -> None:
    """Method: what `peers` says, and that the nodes have a listener for UCX's connections."""
    assert [peer.path for peer in kv.peers()] == [PathKind.RMA] * 2, kv.peers()
    assert all("RDMA" in peer.why for peer in kv.peers())
    for node in nodes:
        assert (await asyncio.to_thread(node.ask, "numbers"))["port"] > 0


async def test_blocks_of_every_size_cross_whole(kv: ucxkv.Client) -> None:
    """Method: chains on both nodes, 1 B to 1 MiB: put, get into the caller's memory and as bytes, match, delete."""
    sources: set[str] = set()
    for seed, nbytes in enumerate((1, 4096, 16 << 10, 100_001, 1 << 20, 16 << 10, 16 << 10, 16 << 10)):
        k, b = keys(4), blocks(4, nbytes, seed)
        assert (await kv.put_many(k, b, "chain")).ok, nbytes
        into = np.full_like(b, 0xAB)
        got = await kv.get_many(k, into)
        assert got.hits == 4 and (into == b).all(), (nbytes, got.status)
        sources |= set(got.sources)
        assert await kv.get(k[1]) == b[1].tobytes()
        assert (await kv.match([*k[:3], *keys(1)])).blocks == 3
        assert (await kv.exists_many([k[0], *keys(1)])).tolist() == [True, False]
        assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.DELETED] * 4
        assert await kv.get(k[0]) is None
    assert sources == {"r1", "r2"}


async def test_reads_are_one_sided(nodes: list[Process], kv: ucxkv.Client) -> None:
    """Method: the nodes' data threads count no block read by message while 32 blocks are got."""
    k, b = keys(32), blocks(32, 32 << 10)
    assert (await kv.put_many(k, b, "chain")).ok
    before = [await asyncio.to_thread(node.ask, "numbers") for node in nodes]
    into = np.zeros_like(b)
    assert (await kv.get_many(k, into)).hits == 32 and (into == b).all()
    after = [await asyncio.to_thread(node.ask, "numbers") for node in nodes]
    assert [n["message_read_keys"] for n in after] == [n["message_read_keys"] for n in before]


async def test_scattered_pieces_cross_whole(kv: ucxkv.Client) -> None:
    """Method: values of 8 pieces each, put from and got into paged memory."""
    pool = blocks(64, 2048, 7)
    k = keys(8)
    assert (await kv.put_many(k, [[pool[8 * i + j] for j in range(8)] for i in range(8)])).ok
    back = np.zeros_like(pool)
    got = await kv.get_many(k, [[back[8 * i + j] for j in range(8)] for i in range(8)])
    assert got.hits == 8 and (back == pool).all()


async def test_many_calls_at_once_mix_nothing_up(kv: ucxkv.Client) -> None:
    """Method: 24 tasks put and get their own blocks together."""

    async def one(seed: int) -> None:
        k, b = keys(2), blocks(2, 20_000, seed)
        assert (await kv.put_many(k, b, "chain")).ok
        into = np.zeros_like(b)
        assert (await kv.get_many(k, into)).hits == 2 and (into == b).all()

    await asyncio.gather(*(one(seed) for seed in range(24)))


async def test_a_killed_node_is_a_miss_and_the_other_goes_on() -> None:
    """Method: two nodes of its own, one killed with gets running; hits are right, the rest UNAVAILABLE or a miss."""
    with Process(node_main, "k1", ()) as one, Process(node_main, "k2", (one.told,)) as two:
        async with ucxkv.connect(one.told, path="network", timeout_s=_TIMEOUT_S) as kv:
            await wait_until(lambda: sum(p.alive for p in kv.peers()) == 2, "both nodes are reached", 240)
            k, b = [os.urandom(16) for _ in range(24)], blocks(24, 64 << 10)
            assert (await kv.put_many(k, b)).ok  # 24 roots: some live on each
            into = np.full_like(b, 0xAB)
            getting = asyncio.create_task(kv.get_many(k, into))
            await asyncio.sleep(0.01)
            two.kill()
            got = await getting
            hit = got.status == ReadStatus.HIT
            assert (into[hit] == b[hit]).all()
            await wait_until(lambda: sum(p.alive for p in kv.peers()) == 1, "the death is seen", 120)
            before = into.copy()
            again = np.zeros_like(b)
            second = await kv.get_many(k, again)
            alive = second.status == ReadStatus.HIT
            assert 0 < second.hits < 24 and (again[alive] == b[alive]).all()
            put = await kv.put_many(keys(16), blocks(16, 1000))
            assert PutStatus.STORED in put.status  # the rest waits for the dead one to be forgotten
            assert set(put.status.tolist()) <= {PutStatus.STORED, PutStatus.UNAVAILABLE}
            assert (into == before).all(), "a buffer was written after its call had ended"
