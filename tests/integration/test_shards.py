"""A client of nodes that lead shards: where puts go, how long they wait, which misses are certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

import pytest

import ucxkv
from tests.conftest import keys
from tests.harness import wait_until
from tests.sharded import ShardedNode, root_in
from ucxkv import DeleteStatus, Part, PutStatus, ReadStatus
from ucxkv.node.session import Session
from ucxkv.transport.base import PeerLost

LOW, HIGH = range(4), range(4, 8)


@pytest.fixture(params=["mapped", "network"])
def path(request: pytest.FixtureRequest) -> str:
    """How the client reaches the nodes; over the network it knows of another epoch from an answer alone."""
    return str(request.param)


@contextlib.asynccontextmanager
async def two(a: range = LOW, b: range = HIGH) -> AsyncIterator[tuple[ShardedNode, ShardedNode]]:
    """Two nodes that know each other."""
    async with ShardedNode("a", a) as one, ShardedNode("b", b, (one.address,)) as other:
        await wait_until(lambda: len(one.peers.members()) == 2, "the nodes know each other")
        yield one, other


async def read(kv: ucxkv.Client, key: bytes, root: bytes | None = None) -> ReadStatus:
    """One key's status."""
    return ReadStatus((await kv.get_many([key], root=root, deadline_s=5)).status[0])


# ---- where blocks go


async def test_a_chain_lives_at_the_leader_of_its_roots_shard(path: str) -> None:
    """Method: a chain of each shard, put whole, block by block and in parts; every block is at its leader alone, and
    all of it is found with the root and without.
    """
    async with two() as (a, b), ucxkv.connect(a.address, path=path) as kv:
        for shard in range(8):
            leader, other = (a, b) if shard in LOW else (b, a)
            root, *rest = chain = [root_in(shard), *keys(5)]
            assert (await kv.put_many(chain[:3], [b"%d" % i for i in range(3)], "chain")).ok
            assert await kv.put(chain[3], b"3", parent=chain[2]) is PutStatus.STORED
            for index in range(2):
                done = await kv.put_many(chain[4:], [b"p"] * 2, chain[3:5], part=Part(index, 2, put_id=7))
                assert done.ok
            assert all(leader.has(key) and not other.has(key) for key in chain)
            for known in (root, None):
                got = await kv.get_many(chain[:4], root=known)
                assert got.values == [b"0", b"1", b"2", b"3"] and got.sources == {leader.config.name: 4}
            match = await kv.match([*chain, *keys(1)])
            assert match.blocks == 6 and match.is_certain
            assert (await kv.exists_many(rest, root=root)).all() and (await kv.exists_many(rest)).all()
            assert (await kv.delete(chain)).tolist() == [DeleteStatus.DELETED] * 6
        assert [(peer.name, peer.leads) for peer in kv.peers()] == [("a", 4), ("b", 4)]


async def test_a_node_alone_is_taken_for_all_only_while_it_leads_all(path: str) -> None:
    """Method: a node that leads all shards, all but one, all again; the absent key of the shard that nobody leads."""
    async with ShardedNode("a", range(8)) as a, ucxkv.connect(a.address, path=path) as kv:
        router = kv._router
        assert router.sole is not None and (router.fast is not None) == (path == "mapped")
        assert await read(kv, root_in(7)) is ReadStatus.MISS
        a.lead(range(7))
        await wait_until(lambda: _is_certain(kv, root_in(0)), "the client is welcomed anew")
        assert router.sole is None and router.fast is None and router.fast_read is None
        key = root_in(0)
        assert await kv.put(key, b"x") is PutStatus.STORED and await kv.get(key) == b"x"
        assert await read(kv, os.urandom(16)) is ReadStatus.UNAVAILABLE
        a.lead(range(8))
        await wait_until(lambda: _is_certain(kv, root_in(7)), "the client is welcomed anew")
        assert router.sole is not None and router.fast_read is not None


async def _is_certain(kv: ucxkv.Client, root: bytes) -> bool:
    return (await kv.match([root])).is_certain


# ---- puts that wait


@pytest.mark.parametrize("way", ["put", "put_many", "parts", "child"])
async def test_a_put_goes_on_to_the_node_that_leads_now(way: str, path: str) -> None:
    """Method: the shard of the chain moves and the client is told nothing: its put is refused, and stored elsewhere."""
    async with two() as (a, b), ucxkv.connect(a.address, path=path) as kv:
        root, child = root_in(2), keys(1)[0]
        assert await kv.put(root_in(0), b"warm") is PutStatus.STORED
        if way == "child":  # its parent is put in between, by a client that the new leader has welcomed
            assert await kv.put(root, b"r") is PutStatus.STORED
        refused = len(a.puts)
        a.lead({0, 1, 3})
        b.lead({2, *HIGH})
        if way == "child":
            async with ucxkv.connect(b.address, path=path) as other:
                assert await other.put(root, b"r") is PutStatus.STORED
        before = time.monotonic()
        match way:
            case "put":
                assert await kv.put(root, b"x") is PutStatus.STORED
            case "put_many":
                assert (await kv.put_many([root, child], [b"x", b"y"], "chain")).stored == 2
                assert b.has(child)
            case "parts":
                for index in range(2):
                    assert (await kv.put_many([root], [b"x"], part=Part(index, 2))).ok
            case _:
                assert await kv.put(child, b"c", parent=root) is PutStatus.STORED
                assert b.has(child)
        assert time.monotonic() - before < 4 and b.has(root) and not a.has(root)
        assert way == "child" or len(a.puts) > refused, "it asked the old leader first"


async def test_a_put_waits_for_a_leader_and_reads_do_not(path: str) -> None:
    """Method: nobody leads shard 2; a put stands, reads answer at once that they cannot know, then a node leads it."""
    async with two(range(2)) as (a, b), ucxkv.connect(a.address, path=path) as kv:
        root = root_in(2)
        put = asyncio.create_task(kv.put(root, b"x", deadline_s=20))
        await asyncio.sleep(0.3)
        before = time.monotonic()
        assert await read(kv, root, root) is ReadStatus.UNAVAILABLE
        assert await kv.get(root) is None and not await kv.exists(root)
        match = await kv.match([root])
        assert match.blocks == 0 and not match.is_certain
        assert time.monotonic() - before < 0.2 and not put.done()
        b.lead({2, *HIGH})
        assert await put is PutStatus.STORED and b.has(root)
        assert (await kv.get_many([root], root=root)).values == [b"x"]


async def test_a_put_that_finds_no_leader_ends_at_its_deadline(path: str) -> None:
    """Goal: bounded waits. Method: a shard without a leader, a leader that refuses for ever; the block is nowhere, and
    what another shard takes is stored all the same.
    """
    async with two(range(2)) as (a, b), ucxkv.connect(a.address, path=path) as kv:
        lost, kept = root_in(2), root_in(1)
        before = time.monotonic()
        done = await kv.put_many([lost, kept], [b"x", b"y"], deadline_s=0.5)
        assert done.status.tolist() == [PutStatus.UNAVAILABLE, PutStatus.STORED]
        assert 0.2 < time.monotonic() - before < 1.5
        a.refusals = 1 << 30
        assert await kv.put(root_in(1), b"x", deadline_s=0.5) is PutStatus.UNAVAILABLE
        assert 3 <= len(a.puts) <= 40, "with pauses between"
        assert not a.has(lost) and not b.has(lost) and a.has(kept)
        a.refusals = 0
        assert await kv.put(root_in(1), b"x") is PutStatus.STORED
        a.store.check()


async def test_a_put_that_waits_for_a_leader_does_not_outlive_its_client(path: str) -> None:
    """Goal: nothing is left running. Method: the client is closed under a put with an hour to go."""
    async with two(range(2)) as (a, _b):
        kv = await ucxkv.connect(a.address, path=path, timeout_s=1)
        put = asyncio.create_task(kv.put(root_in(2), b"x", deadline_s=3600))
        await asyncio.sleep(0.1)
        await kv.aclose()
        async with asyncio.timeout(5):
            assert await put is PutStatus.UNAVAILABLE


@pytest.mark.parametrize("single", [True, False])
async def test_a_put_that_is_refused_by_a_node_alone_is_tried_again(single: bool, path: str) -> None:
    """Goal: the short way of a put waits as the long one does. Method: two refusals by a node that leads everything."""
    async with ShardedNode("a", range(8)) as a, ucxkv.connect(a.address, path=path) as kv:
        assert await kv.put(root_in(0), b"w") is PutStatus.STORED
        a.refusals, before = 2, len(a.puts)
        key = root_in(0)
        if single:
            assert await kv.put(key, b"x") is PutStatus.STORED
        else:
            assert (await kv.put_many([key, *keys(2)], [b"x"] * 3, "chain")).stored == 3
        assert len(a.puts) == before + 3 and a.has(key)
        assert kv.stats()["stored"] == (2 if single else 4)


async def test_a_large_batch_is_refused_as_a_whole_and_stored_as_a_whole(path: str) -> None:
    """Goal: several messages of one call on their way at once. Method: a chain of 24 MiB; the first, or the fourth
    message is refused, with those behind it answered ORDER.
    """
    async with ShardedNode("a", range(8)) as a, ucxkv.connect(a.address, path=path) as kv:
        for nth in (1, 4):
            chain = [root_in(0), *keys(23)]
            begun = len(a.puts)

            def refuse(session: Session, begun: int = begun, nth: int = nth) -> None:
                if len(a.puts) - begun == nth:
                    a.refusals = 1
                else:
                    a.at_put = lambda session: refuse(session)

            a.at_put = refuse
            values = [os.urandom(1 << 20) for _ in chain]
            done = await kv.put_many(chain, values, "chain")
            assert done.stored == 24, done.status.tolist()
            assert (await kv.get_many(chain, root=chain[0])).values == values
            await kv.delete(chain)
            a.store.check()


async def test_a_put_whose_answer_is_lost_is_not_sent_again(path: str) -> None:
    """Goal: what may have happened is the caller's to decide. Method: the connection breaks when the put is there; what
    hangs on it in the same call is not put either, what does not is.
    """
    async with two() as (a, b), ucxkv.connect(a.address, path=path) as kv:
        root, child, apart = root_in(1), keys(1)[0], root_in(6)
        a.at_put = lambda session: session.connection.abort(PeerLost("broken by the test"))
        done = await kv.put_many([root, child, apart], [b"r", b"c", b"o"], [ucxkv.ROOT_KEY, root, ucxkv.ROOT_KEY])
        assert done.status.tolist() == [PutStatus.UNAVAILABLE] * 2 + [PutStatus.STORED]
        assert len(a.puts) == 1 and b.has(apart)
        assert await kv.put(root, b"r") in (PutStatus.STORED, PutStatus.ALREADY)


async def test_what_hangs_on_a_lost_put_is_not_put_either(path: str) -> None:
    """Goal: no block is ORDER because nobody knows of its parent. Method: a chain of several messages, of which the
    first breaks the connection; the call ends at once, though the node is there again.
    """
    async with two() as (a, _b), ucxkv.connect(a.address, path=path) as kv:
        a.at_put = lambda session: session.connection.abort(PeerLost("broken by the test"))
        values = [bytes(1 << 20)] * 24
        done = await kv.put_many([root_in(1), *keys(23)], values, "chain", deadline_s=20)
        assert done.status.tolist() == [PutStatus.UNAVAILABLE] * 24 and len(a.puts) == 1


@pytest.mark.parametrize("is_alone", [False, True])
async def test_order_is_the_answer_of_a_node_that_leads_the_parents_shard(is_alone: bool, path: str) -> None:
    """Goal: a node that lost a shard between two messages does not know its parents. Method: it does so when the child
    arrives, and answers ORDER; the put waits until a leader is there, parent and all: another node, or the same one
    again, to which puts go the short way. A parent that is nowhere is still ORDER, at once.
    """
    async with two(range(8) if is_alone else LOW, HIGH) as (a, b):
        if is_alone:
            await b.aclose()
            await wait_until(lambda: len(a.peers.members()) == 1, "it is alone")
        async with ucxkv.connect(a.address, path=path) as kv:
            root, child, orphan = root_in(1), keys(1)[0], keys(1)[0]
            assert await kv.put(root, b"r") is PutStatus.STORED
            assert (kv._router.sole is not None) == is_alone
            a.at_put = lambda session: a.lead(a.led - {1})
            put = asyncio.create_task(kv.put(child, b"c", parent=root, deadline_s=20))
            await asyncio.sleep(0.3)
            assert not put.done() and 1 not in a.led
            new = a if is_alone else b
            new.lead(new.led | {1})
            async with ucxkv.connect(new.address, path=path) as other:
                assert await other.put(root, b"r") is PutStatus.STORED
            assert await put is PutStatus.STORED and new.has(child)
            before = time.monotonic()
            assert await kv.put(orphan, b"x", parent=os.urandom(16)) is PutStatus.ORDER
            assert time.monotonic() - before < 1


async def test_a_put_on_its_way_has_its_answer_when_the_node_is_left_for_its_epoch(path: str) -> None:
    """Goal: a change of leaders elsewhere costs nobody a put. Method: a node holds back the answer and changes epoch; a
    read notices, and the client connects again; then the answer comes.
    """
    async with two() as (a, _b), ucxkv.connect(a.address, path=path) as kv:
        key = root_in(0)
        assert await kv.put(root_in(0), b"warm") is PutStatus.STORED
        a.gate, first = asyncio.Event(), kv._router.links["a"]
        put = asyncio.create_task(kv.put(key, b"x", deadline_s=20))
        await wait_until(lambda: len(a.puts) == 2, "the put is there")
        a.lead({0, 1, 2})
        await wait_until(lambda: _is_certain(kv, root_in(0)), "the client is welcomed anew")
        assert kv._router.links["a"] is not first and not put.done() and first.connection.is_open
        a.gate.set()
        assert await put is PutStatus.STORED and len(a.puts) == 2
        await wait_until(lambda: not first.connection.is_open, "the old link is closed")
        assert first not in kv._router._leaving


# ---- what is certain


async def test_a_miss_is_certain_where_a_leader_says_so(path: str) -> None:
    """Method: shard 7 has no leader: what may be in it is UNAVAILABLE, what is not is a MISS; then it has one."""
    async with two(LOW, range(4, 7)) as (a, b), ucxkv.connect(a.address, path=path) as kv:
        root, elsewhere, absent = root_in(1), root_in(7), os.urandom(16)
        assert await kv.put(root, b"r") is PutStatus.STORED
        assert await read(kv, absent, root) is ReadStatus.MISS
        assert await read(kv, absent) is ReadStatus.UNAVAILABLE
        assert await read(kv, absent, elsewhere) is ReadStatus.UNAVAILABLE
        both = await kv.get_many([root, absent])
        assert both.values == [b"r", None] and both.status.tolist() == [ReadStatus.HIT, ReadStatus.UNAVAILABLE]
        assert (await kv.exists_many([root, absent])).tolist() == [True, False]
        match = await kv.match([root, absent])
        assert match.blocks == 1 and match.is_certain
        assert not (await kv.match([elsewhere])).is_certain
        with pytest.raises(ucxkv.Unavailable, match="no leader"):
            await kv.view(absent)
        assert (await kv.delete([root, absent])).tolist() == [DeleteStatus.DELETED, DeleteStatus.UNAVAILABLE]
        b.lead(HIGH)
        await wait_until(lambda: _is_certain(kv, elsewhere), "the client is welcomed anew")
        assert await read(kv, absent) is ReadStatus.MISS and await kv.view(absent) is None
        assert (await kv.delete([absent])).tolist() == [DeleteStatus.MISS]


@pytest.mark.parametrize("way", ["root", "no root", "match", "exists"])
async def test_a_shard_that_moved_is_not_missed_at_its_old_leader(way: str, path: str) -> None:
    """Method: shard 1 and its block go from a to b while the client knows the old epochs alone; a read answers that it
    cannot know, and finds the block once the client has connected again.
    """
    async with two() as (a, b), ucxkv.connect(a.address, path=path) as kv:
        root = root_in(1)
        assert await kv.put(root, b"r") is PutStatus.STORED
        a.lead({0, 2, 3})
        b.lead({1, *HIGH})
        async with ucxkv.connect(b.address, path=path) as other:
            assert await other.put(root, b"r") is PutStatus.STORED

        async def found() -> bool:
            match way:
                case "match":
                    match = await kv.match([root])
                    assert match.blocks == 1 or not match.is_certain
                    return match.blocks == 1
                case "exists":
                    return bool((await kv.exists_many([root], root=root))[0])
            got = await kv.get_many([root], root=root if way == "root" else None)
            assert got.status[0] != ReadStatus.MISS
            return got.values == [b"r"]

        assert not await found()
        await wait_until(found, "the client knows the new leader")


@pytest.mark.parametrize("way", ["delete", "view", "lease"])
async def test_a_miss_on_a_control_connection_counts_in_its_epoch_alone(way: str, path: str) -> None:
    """Goal: such an answer does not say its epoch. Method: shard 1 leaves node a, for nobody; both nodes say that they
    have nothing, and the client, to whom they lead all shards, must not take it for a miss. Before, it is one.
    """
    async with two() as (a, _b), ucxkv.connect(a.address, path=path) as kv:
        for is_certain in (True, False):
            absent = root_in(1)
            if not is_certain:
                a.lead({0, 2, 3})
            match way:
                case "delete":
                    status = DeleteStatus((await kv.delete([absent]))[0])
                    assert status is (DeleteStatus.MISS if is_certain else DeleteStatus.UNAVAILABLE)
                case "view" if is_certain:
                    assert await kv.view(absent) is None
                case "view":
                    with pytest.raises(ucxkv.Unavailable, match="no leader"):
                        await kv.view(absent)
                case _:
                    async with kv.lease([absent]) as lease:
                        assert not lease.granted[0] and (lease.unanswered is None) is is_certain


@pytest.mark.parametrize("way", ["push", "welcome"])
async def test_nodes_tell_their_clients_who_leads(way: str, path: str) -> None:
    """Goal: a client is up to date without asking. Method: shard 3 moves, and its old leader tells who leads it now:
    those that are connected, or the client when it connects again after a read noticed another epoch.
    """
    async with two() as (a, b), ucxkv.connect(a.address, path=path) as kv:
        a.leaders[3] = "b"
        a.lead({0, 1, 2})
        b.lead({3, *HIGH})
        if way == "push":
            a.members_changed()
        else:
            assert await read(kv, root := root_in(0), root) is ReadStatus.UNAVAILABLE
        await wait_until(lambda: {p.name: p.leads for p in kv.peers()} == {"a": 3, "b": 5}, "both are welcomed anew")
        assert await kv.put(root_in(3), b"x") is PutStatus.STORED


async def test_nodes_of_two_clusters_are_not_mixed(path: str) -> None:
    """Goal: a key has one shard. Method: by address, a node of a cluster with another number of shards."""
    async with ShardedNode("a", range(8)) as a, ShardedNode("b", range(4), shards=4) as b:
        async with ucxkv.connect(a.address, b.address, path=path) as kv:
            assert len(kv._router.links) == 1
            (linked,) = kv.peers()
            assert linked.leads == {"a": 8, "b": 4}[linked.name]
        await wait_until(lambda: not a.sessions and not b.sessions, "nothing is left open")
