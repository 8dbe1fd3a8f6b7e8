"""Several nodes of one host: homes, parts, loss of a part's holder and of a home, memory that comes back, rejoining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, wait_until
from tests.integration.durable_nodes import Lives, life
from ucxkv import Part, PutStatus, ReadStatus
from ucxkv.node import Node, NodeConfig
from ucxkv.placement import Members, home, part_nodes

pytestmark = pytest.mark.faults

MIB = 1 << 20
NAMES = ("n1", "n2", "n3")


@pytest.fixture
def trio() -> Iterator[list[NodeProcess]]:
    """Three joined node processes of 32 MiB."""
    with ExitStack() as stack:
        first = stack.enter_context(NodeProcess("n1", host_bytes="32MiB", message_path=False))
        rest = [
            stack.enter_context(NodeProcess(name, join=first.address, host_bytes="32MiB", message_path=False))
            for name in NAMES[1:]
        ]
        yield [first, *rest]


@pytest.fixture
async def inner() -> AsyncIterator[list[Node]]:
    """Three joined nodes in this process, whose stores can be checked."""
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for name in NAMES:
            join = (nodes[0].address,) if nodes else ()
            config = NodeConfig(
                name=name, listen="127.0.0.1:0", host_bytes=16 * MIB, join=join, message_path=False, slots_count=2048
            )
            nodes.append(await stack.enter_async_context(Node(config)))
        yield nodes
        for node in nodes:
            node.store.check()


async def whole(address: str, count: int = 3, **options: float) -> ucxkv.Client:
    """A client that has reached all nodes."""
    kv = await ucxkv.connect(address, **options)  # type: ignore[arg-type]
    await wait_until(lambda: [peer.alive for peer in kv.peers()] == [True] * count, "all nodes are reached")
    return kv


def chain_at(name: str, length: int, members: Members | None = None) -> list[bytes]:
    """Keys of a chain whose home is this node."""
    members = members or Members(NAMES)  # type: ignore[arg-type]
    while True:
        k = keys(length)
        if home(k[0], members) == name:
            return k


async def numbers(kv: ucxkv.Client) -> dict[str, dict[str, float]]:
    return {status.name: status.numbers for status in await kv.status()}


async def is_total(kv: ucxkv.Client, name: str, value: float) -> bool:
    return sum(n[name] for n in (await numbers(kv)).values()) == value


async def put_parts(kv: ucxkv.Client, k: list[bytes], parts: int, put_id: int, nbytes: int = 5000) -> list[np.ndarray]:
    """A chain of blocks, part after part of each; the arrays that were put."""
    arrays = [blocks(len(k), nbytes, seed=put_id * 16 + part) for part in range(parts)]
    parent = ucxkv.ROOT_KEY
    for i, key in enumerate(k):
        for part, array in enumerate(arrays):
            put = await kv.put_many([key], array[i : i + 1], [parent], part=Part(part, parts, put_id))
            wanted = PutStatus.STORED if part == parts - 1 else PutStatus.SEALED
            assert (put.status == wanted).all(), put.status
        parent = key
    return arrays


# ---- homes


async def test_a_client_of_one_address_learns_all_and_finds_chains_anywhere(inner: list[Node]) -> None:
    """Goal: routing. Method: chains homed on each node through one client; another reads them with and without root."""
    kv, other = await whole(inner[0].address), await whole(inner[2].address)
    try:
        for node in inner:
            k, b = chain_at(node.config.name, 20), blocks(20, 3000)
            assert (await kv.put_many(k, b, "chain")).ok
            assert node.store.directory.match(b"".join(k)) == 20, "not at its home"
            into = np.zeros_like(b)
            for options in ({}, {"root": k[0]}):
                got = await other.get_many(k[5:], into[5:], **options)
                assert got.hits == 15 and (into[5:] == b[5:]).all() and got.sources == {node.config.name: 15}
            assert (await other.match(k)).blocks == 20 and (await other.exists_many(k)).all()
            assert await other.get(k[7]) == b[7].tobytes() and await other.get(keys(1)[0]) is None
            assert await kv.put(keys(1)[0], b"tail", parent=k[-1]) is PutStatus.STORED
            assert await kv.put(keys(1)[0], b"orphan", parent=keys(1)[0]) is PutStatus.ORDER
            async with other.lease(k) as lease:
                assert lease.granted.all()
            assert (await other.delete(k)).tolist()[-1] == ucxkv.DeleteStatus.ORDER
    finally:
        await kv.aclose()
        await other.aclose()


async def test_many_roots_in_one_call_go_to_their_homes(inner: list[Node]) -> None:
    """Goal: a batch over all nodes. Method: 300 roots in one put and one get, duplicates and misses among them."""
    kv = await whole(inner[1].address)
    try:
        k, b = keys(300), blocks(300, 500)
        assert (await kv.put_many(k, b)).stored == 300
        shares = [node.store.directory.blocks for node in inner]
        assert sum(shares) == 300 and min(shares) > 50
        asked = [*k, *keys(20), *k[:5]]
        into = np.zeros((325, 500), np.uint8)
        got = await kv.get_many(asked, into)
        assert got.hits == 305 and (into[:300] == b).all() and (into[320:] == b[:5]).all()
        assert got.sources == dict(zip(NAMES, [0] * 3, strict=True)) | got.sources and sum(got.sources.values()) == 305
        listed = {info.key: info.node for info in await kv.list_keys(1000)}
        assert set(k) <= set(listed)
    finally:
        await kv.aclose()


# ---- parts


async def test_parts_spread_over_nodes_and_are_visible_together(inner: list[Node]) -> None:
    """Goal: I2. Method: three parts in any order; before the last nothing is visible; placement decides where."""
    kv, other = await whole(inner[0].address), await whole(inner[1].address)
    try:
        k = keys(30)
        arrays = [blocks(30, 4000, seed) for seed in range(3)]
        for sent, part in enumerate((2, 0, 1)):
            put = await kv.put_many(k, arrays[part], part=Part(part, 3, 7))
            assert (put.status == (PutStatus.STORED if sent == 2 else PutStatus.SEALED)).all()
            assert (await other.exists_many(k)).all() == (sent == 2)
        for part in range(3):
            into = np.zeros((30, 4000), np.uint8)
            got = await other.get_many(k, into, part=Part(part, 3))
            assert got.hits == 30 and (into == arrays[part]).all()
        assert all(part_nodes(key, 3, Members(NAMES)) for key in k)  # type: ignore[arg-type]
        assert sum(node.store.adoption.bytes_count for node in inner) > 0
        again = await kv.put_many(k, arrays[0], part=Part(0, 3, 8))
        assert (again.status == PutStatus.ALREADY).all()
        assert (await other.delete(k)).tolist() == [ucxkv.DeleteStatus.DELETED] * 30
        await wait_until(lambda: is_total(kv, "adopted_bytes", 0), "adopted memory is given back")
    finally:
        await kv.aclose()
        await other.aclose()


async def test_each_rank_puts_its_part_of_a_chain_in_one_call(inner: list[Node]) -> None:
    """Goal: tensor-parallel ranks save whole chains. Method: two ranks put part 0 and 1 of twelve blocks, a call each,
    one after the other and at once; parts lie on all three nodes. Match, then get each rank's part.
    """
    ranks = [await whole(inner[0].address), await whole(inner[1].address)]
    try:
        for put_id in (1, 2):
            k, arrays = keys(12), [blocks(12, 1000, 2 * put_id + rank) for rank in range(2)]
            holders = {node for key in k for node in part_nodes(key, 2, Members(NAMES))}  # type: ignore[arg-type]
            assert holders == set(NAMES)
            calls = [
                kv.put_many(k, arrays[rank], "chain", part=Part(rank, 2, put_id), deadline_s=5)
                for rank, kv in enumerate(ranks)
            ]
            puts = [await call for call in calls] if put_id == 1 else await asyncio.gather(*calls)
            assert all(put.ok for put in puts), [put.status for put in puts]
            if put_id == 1:
                assert [put.stored for put in puts] == [0, 12]
            assert (await ranks[0].match(k)).blocks == 12
            for rank, kv in enumerate(ranks):
                into = np.zeros_like(arrays[rank])
                assert (await kv.get_many(k, into, part=Part(rank, 2))).hits == 12 and (into == arrays[rank]).all()
        assert await is_total(ranks[0], "writing", 0)
    finally:
        for kv in ranks:
            await kv.aclose()


async def test_calls_that_continue_a_chain_find_it_wherever_it_is(inner: list[Node]) -> None:
    """Goal: several calls for one chain, whatever node is its home. Method: a call whose parent is put by another call
    that has not returned; each rank puts its part of a chain by three calls, one after the other and at once; no parent
    of the later calls is visible when they begin.
    """
    ranks = [await whole(inner[0].address), await whole(inner[1].address)]
    try:
        for name in NAMES:
            k, b = chain_at(name, 6), blocks(6, 400_000)
            head, tail = await asyncio.gather(
                ranks[0].put_many(k[:3], b[:3], "chain"), ranks[0].put_many(k[3:], b[3:], parents=k[2:5])
            )
            assert head.ok and tail.ok and (await ranks[1].match(k)).blocks == 6
            for put_id in (1, 2):
                k, arrays = chain_at(name, 9), [blocks(9, 1000, 10 + rank) for rank in range(2)]
                for rank, kv in enumerate(ranks):
                    calls = [
                        kv.put_many(
                            k[at : at + 3],
                            arrays[rank][at : at + 3],
                            parents=[ucxkv.ROOT_KEY if at == 0 else k[at - 1], *k[at : at + 2]],
                            part=Part(rank, 2, put_id),
                            deadline_s=5,
                        )
                        for at in (0, 3, 6)
                    ]
                    puts = [await call for call in calls] if put_id == 1 else await asyncio.gather(*calls)
                    assert all(put.ok for put in puts), (name, rank, [put.status for put in puts])
                assert (await ranks[0].match(k)).blocks == 9
                for rank, kv in enumerate(ranks):
                    into = np.zeros_like(arrays[rank])
                    got = await kv.get_many(k, into, part=Part(rank, 2))
                    assert got.hits == 9 and (into == arrays[rank]).all()
    finally:
        for kv in ranks:
            await kv.aclose()


async def test_parts_of_two_puts_never_mix(inner: list[Node]) -> None:
    """User voice 13. Method: part 0 of one put, part 1 of another: BUSY until the first is given up; then it works."""
    kv = await whole(inner[0].address)
    try:
        k = keys(5)
        first = await kv.put_many(k, blocks(5, 100, 1), part=Part(0, 2, 1), deadline_s=0.5)
        assert (first.status == PutStatus.SEALED).all()
        for part in (Part(1, 2, 2), Part(0, 2, 2), Part(1, 3, 1)):
            put = await kv.put_many(k, blocks(5, 100, 2), part=part)
            assert (put.status == PutStatus.BUSY).all(), part
        assert (await kv.put_many(k, blocks(5, 100, 2), part=Part(0, 2, 1))).status.tolist() == [PutStatus.ALREADY] * 5
        assert (await kv.put_many(k, blocks(5, 100))).status.tolist() == [PutStatus.BUSY] * 5
        assert not (await kv.exists_many(k)).any()
        await wait_until(lambda: is_total(kv, "writing", 0), "the late put is given up")
        arrays = await put_parts(kv, k, 2, 3, 100)
        assert await kv.get(k[2]) == arrays[0][2].tobytes()
    finally:
        await kv.aclose()


async def test_a_dead_holder_of_parts_makes_misses_never_wrong_bytes(trio: list[NodeProcess]) -> None:
    """Study, fault test 9. Goal: I2 on a live incarnation. Method: two-part blocks, kill -9 a holder; what has a part
    there is a miss.
    """
    kv = await whole(trio[0].address, timeout_s=3)
    try:
        stored: list[tuple[list[bytes], list[np.ndarray]]] = []
        for put_id in range(1, 9):
            k = keys(6)
            stored.append((k, await put_parts(kv, k, 2, put_id)))
        for k, arrays in stored:  # regions of the doomed node are mapped and read before
            into = np.zeros_like(arrays[1])
            assert (await kv.get_many(k, into, part=Part(1, 2))).hits == 6 and (into == arrays[1]).all()
        trio[2].kill()
        await wait_until(lambda: sum(peer.alive for peer in kv.peers()) == 2, "the death is seen")
        left = 0
        for _ in range(3):
            left = 0
            for k, arrays in stored:
                for part in range(2):
                    into = np.zeros_like(arrays[part])
                    got = await kv.get_many(k, into, part=Part(part, 2))
                    hit = got.status == ReadStatus.HIT
                    assert (into[hit] == arrays[part][hit]).all()
                    left += int(hit.sum())
                seen = await kv.exists_many(k)
                assert (await kv.match(k)).blocks == (int(np.argmin(seen)) if not seen.all() else 6), "a hole"
            await asyncio.sleep(0.05)
        assert left < 8 * 12
        fresh = keys(6)
        arrays = await put_parts(kv, fresh, 2, 99)
        into = np.zeros_like(arrays[1])
        assert (await kv.get_many(fresh, into, part=Part(1, 2))).hits == 6 and (into == arrays[1]).all()
    finally:
        await kv.aclose()


async def test_memory_adopted_by_a_dead_home_is_free_again_and_it_may_rejoin(trio: list[NodeProcess]) -> None:
    """Goal: nothing is held for the dead. Method: parts of n3's chains on n1 and n2; kill n3; restart; put again."""
    kv = await whole(trio[0].address, timeout_s=3)
    try:
        for put_id in range(1, 6):
            await put_parts(kv, chain_at("n3", 6), 3, put_id, 20_000)
        before = await numbers(kv)
        assert before["n1"]["adopted_bytes"] > 0 and before["n2"]["adopted_bytes"] > 0
        trio[2].kill()
        await wait_until(lambda: sum(peer.alive for peer in kv.peers()) == 2, "the death is seen")
        await wait_until(lambda: is_total(kv, "adopted_bytes", 0), "what the dead had adopted is free")
        trio[2] = await asyncio.to_thread(
            NodeProcess, "n3", join=trio[0].address, host_bytes="32MiB", message_path=False
        )
        try:
            await wait_until(lambda: [peer.alive for peer in kv.peers()] == [True] * 3, "it is back", 20)
            k = chain_at("n3", 6)
            arrays = await put_parts(kv, k, 3, 77)
            into = np.zeros_like(arrays[2])
            assert (await kv.get_many(k, into, part=Part(2, 3))).hits == 6 and (into == arrays[2]).all()
        finally:
            trio[2].kill()
    finally:
        await kv.aclose()


async def test_a_link_that_breaks_one_way_is_forgotten_on_both_sides(inner: list[Node]) -> None:
    """Goal: what one node forgot does not live on at the other. Method: cut one direction of a link between two nodes
    that hold each other's parts; memory and blocks of both are consistent, and parts work after they are linked again.
    """
    kv = await whole(inner[0].address)
    try:
        first, second = inner[0], inner[1]
        for put_id, name in enumerate(("n1", "n2", "n1", "n2"), 1):
            await put_parts(kv, chain_at(name, 6), 3, put_id)
        assert second.store.adoption.bytes_of("n1") and first.store.adoption.bytes_of("n2")
        link = first.peers._links[second.node_id]
        assert link.dialed is not None
        link.dialed.connection.abort()
        await wait_until(
            lambda: not (second.store.adoption.bytes_of("n1") or first.store.adoption.bytes_of("n2")),
            "both have forgotten",
        )
        await wait_until(lambda: len(first.peers.members()) == 3 == len(second.peers.members()), "linked again")
        for put_id, name in enumerate(("n1", "n2"), 10):
            k = chain_at(name, 6)
            arrays = await put_parts(kv, k, 3, put_id)
            for part, array in enumerate(arrays):
                into = np.zeros_like(array)
                assert (await kv.get_many(k, into, part=Part(part, 3))).hits == 6 and (into == array).all()
    finally:
        await kv.aclose()


async def test_a_node_under_pressure_gets_its_lent_memory_back(inner: list[Node]) -> None:
    """Goal: Reclaim. Method: n1's memory full of parts of n2's and n3's blocks; then plain puts at n1: all stored."""
    kv = await whole(inner[0].address)
    try:
        for put_id in range(1, 13):
            k = chain_at("n2" if put_id % 2 else "n3", 20)
            for part in range(2):
                put = await kv.put_many(k, blocks(20, 100_000, part), part=Part(part, 2, put_id), deadline_s=5)
                assert put.ok, put.status
        adopted = (await numbers(kv))["n1"]["adopted_bytes"]
        assert adopted > 2 * MIB
        mine = [chain_at("n1", 1)[0] for _ in range(120)]
        put = await kv.put_many(mine, blocks(120, 100_000), deadline_s=20)
        assert put.ok, np.bincount(put.status)
        assert (await numbers(kv))["n1"]["adopted_bytes"] < adopted
    finally:
        await kv.aclose()


async def test_a_stopped_node_of_three_delays_nobody_beyond_the_deadline(trio: list[NodeProcess]) -> None:
    """User voice 1. Method: SIGSTOP one of three; puts and gets homed elsewhere work, those at it end by deadline."""
    kv = await whole(trio[0].address)
    try:
        trio[1].freeze()
        for name in ("n1", "n3"):
            k, b = chain_at(name, 5), blocks(5, 1000)
            assert (await kv.put_many(k, b, "chain", deadline_s=2)).ok
            assert (await kv.get_many(k, np.zeros_like(b), root=k[0], deadline_s=2)).hits == 5
        k = chain_at("n2", 5)
        put = await kv.put_many(k, blocks(5, 1000), "chain", deadline_s=0.3)
        assert (put.status == PutStatus.UNAVAILABLE).all()
        trio[1].thaw()
        await wait_until(lambda: _stored(kv, chain_at("n2", 5)), "it serves again")
    finally:
        trio[1].thaw()
        await kv.aclose()


async def test_a_node_that_pauses_for_seconds_is_given_up_by_nobody(trio: list[NodeProcess]) -> None:
    """User voice 31. Method: parts on all nodes, one of them stopped for six seconds; clients and nodes go on counting
    it in, and afterwards its blocks, and those with parts there, are hits: no liveness limit fences a live node.
    """
    kv = await whole(trio[0].address, timeout_s=20)
    try:
        stored = [(k, await put_parts(kv, k, 2, 40 + i)) for i, k in enumerate(chain_at(name, 6) for name in NAMES)]
        before = await numbers(kv)
        trio[1].freeze()
        for _ in range(60):
            assert [peer.alive for peer in kv.peers()] == [True] * 3
            await asyncio.sleep(0.1)
        trio[1].thaw()
        after = await numbers(kv)
        for name in NAMES:
            for what in ("blocks", "adopted_bytes", "lost", "nodes"):
                assert after[name][what] == before[name][what], (name, what)
        for k, arrays in stored:
            for part in range(2):
                into = np.zeros_like(arrays[part])
                assert (await kv.get_many(k, into, part=Part(part, 2))).hits == 6 and (into == arrays[part]).all()
    finally:
        trio[1].thaw()
        await kv.aclose()


async def _stored(kv: ucxkv.Client, k: list[bytes]) -> bool:
    return (await kv.put_many(k, blocks(len(k), 1000), "chain", deadline_s=1)).ok


async def test_a_node_that_joins_later_serves_buffers_of_before(inner: list[Node]) -> None:
    """User voice 19. Method: a pool registered before the fourth node joined; put and get at the new node, and one
    from memory never registered.
    """
    kv = await whole(inner[0].address)
    try:
        pool = kv.register(blocks(8, 4096).copy())
        config = NodeConfig(
            name="n4", listen="127.0.0.1:0", host_bytes=8 * MIB, join=(inner[1].address,), message_path=False
        )
        async with Node(config) as fourth:
            await wait_until(lambda: len([p for p in kv.peers() if p.alive]) == 4, "the new node is reached")
            weights = {node.config.name: node.config.host_bytes / (1 << 30) for node in (*inner, fourth)}
            k = chain_at("n4", 8, Members(weights))  # type: ignore[arg-type]
            assert (await kv.put_many(k, pool[0:8], "chain")).ok
            assert fourth.store.directory.match(b"".join(k)) == 8
            assert (await kv.get_many(k, pool[0:8])).hits == 8
            into = np.zeros((8, 4096), np.uint8)
            assert (await kv.get_many(k, into)).hits == 8
            fourth.store.check()
        await wait_until(lambda: len(kv.peers()) == 3, "the node that left is forgotten")
        assert await kv.get(k[0]) is None
    finally:
        await kv.aclose()


async def test_a_key_that_two_nodes_hold_in_two_sizes_is_read_from_one_of_them(again: Lives) -> None:
    """Goal: a read ends whatever the nodes hold. Method: a node keeps durable values; while it is away another is given
    other values of the same keys, by length too; then it joins: each value read is one that was put, at once."""
    k, small, large = keys(24), blocks(24, 100), blocks(24, 5000, 1)
    async with life(again) as (_, kv):
        assert (await kv.put_many(k, small, durable=True)).ok
    async with AsyncExitStack() as stack:
        config = NodeConfig(name="n2", listen="127.0.0.1:0", host_bytes=16 * MIB, message_path=False, slots_count=2048)
        other = await stack.enter_async_context(Node(config))
        async with ucxkv.connect(other.address) as kv:
            assert (await kv.put_many(k, large)).ok
        await stack.enter_async_context(Node(again.config(join=(other.address,))))
        kv = await stack.enter_async_context(await whole(other.address, 2))
        got = await kv.get_many(k, deadline_s=30)
        assert got.hits == 24 and got.values is not None and len(got.sources) == 2
        for i, value in enumerate(got.values):
            assert value in (small[i].tobytes(), large[i].tobytes())
            assert await kv.get(k[i], deadline_s=30) == value
