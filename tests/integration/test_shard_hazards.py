"""Hazards of shards on real nodes, each a case in which an acknowledged block was lost, or two nodes disagreed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ucxkv
from tests.harness import wait_until
from ucxkv import DeleteStatus, PutStatus
from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.node import Node, NodeConfig
from ucxkv.node.shards.records import LoggedEntry, ShardLog
from ucxkv.node.shards.recovery import ShardRecovery, _prove
from ucxkv.node.state import forget
from ucxkv.replication import Kind, Member, ShardConfig
from ucxkv.sharding import ShardRule

pytestmark = pytest.mark.timeout(60)
_SHARDS = 4


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path) -> Iterator[None]:
    """The nodes' memory outlives them, as it should; not the test."""
    yield
    for folder in tmp_path.iterdir():
        if (folder / "node.json").exists():
            forget(folder)


def config(folder: Path, name: str, replicas: int = 2, **more: object) -> NodeConfig:
    """A node of a cluster of four shards, in this process."""
    return NodeConfig(
        name=name, listen="127.0.0.1:0", cluster=f"sqlite://{folder}/cluster.db", cluster_shards=_SHARDS,
        cluster_lease_ms=2000, replicas=replicas, durability="process", state_dir=str(folder / name),
        host_bytes=64 << 20, message_path=False, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def key_in(shard: int, seed: int) -> bytes:
    """A key that would be a root of this shard."""
    rng, rule = random.Random(seed), ShardRule(_SHARDS)
    while rule.own(key := rng.randbytes(16)) != shard:
        pass
    return key


def numbers(node: Node) -> dict[str, float]:
    """Of its shards."""
    assert node.cluster is not None and node.cluster.shards is not None
    return node.cluster.shards.numbers()


async def all_held(*nodes: Node) -> None:
    """Every node holds every shard."""
    await wait_until(
        lambda: all(numbers(n)["shards_led"] + numbers(n)["shards_followed"] == _SHARDS for n in nodes), "held", 20
    )


async def test_a_durable_put_goes_to_the_log_of_the_chain_that_has_the_block(tmp_path: Path) -> None:
    """Goal: a block is durable in the shard of its chain, whatever parent a later put names: in another shard's log it
    would be lost with the next leader. Method: cache class blocks put again, durable, as a root and below a parent that
    is not there; the shard's log alone has them, nothing stays staged, and the shard can be given up.
    """
    async with Node(config(tmp_path, "a", replicas=1)) as node, ucxkv.connect(node.address) as kv:
        await wait_until(lambda: numbers(node)["shards_led"] == _SHARDS, "led")
        root, child, other = key_in(1, 1), key_in(0, 2), key_in(2, 3)
        for key, parent in ((root, None), (child, root), (other, root)):
            assert await kv.put(key, b"v" * 100, parent) is PutStatus.STORED
        assert await kv.put(child, b"v" * 100, durable=True) is PutStatus.ALREADY
        assert await kv.put(other, b"v" * 100, key_in(3, 4), durable=True) is PutStatus.ALREADY
        below = key_in(3, 5)
        assert await kv.put(below, b"v", child, durable=True) is PutStatus.STORED
        assert node.cluster is not None and node.cluster.shards is not None
        shards = node.cluster.shards.shards
        assert [len(shard.rows()) for shard in shards] == [0, 4, 0, 0]
        assert [shard.replica.log.last_index for shard in shards] == [1, 4, 1, 1]
        assert not node.store.directory.durable.is_busy
        node.cluster.shards.lose(shards[1])
        assert len(shards[1].standby) == 4 and not node.store.directory.blocks
        node.store.check()


async def test_a_block_that_went_and_came_again_is_whole_at_a_member_that_catches_up(tmp_path: Path) -> None:
    """Goal: nothing is confirmed without its value. Method: put, delete, put again; a member gets all three entries in
    one message, with one value, and leads afterwards.
    """
    key, value = key_in(1, 1), b"v" * 5000
    async with Node(config(tmp_path, "a")) as a:
        await wait_until(lambda: numbers(a)["shards_led"] == _SHARDS, "led")
        async with ucxkv.connect(a.address) as kv:
            assert await kv.put(key, value, durable=True) is PutStatus.STORED
            assert (await kv.delete([key]))[0] == ucxkv.DeleteStatus.DELETED
            assert await kv.put(key, value, durable=True) is PutStatus.STORED
        async with Node(config(tmp_path, "b")) as b:
            await all_held(a, b)
            b.store.check()
            await a.aclose()
            await wait_until(lambda: numbers(b)["shards_led"] == _SHARDS, "led", 20)
            async with ucxkv.connect(b.address) as kv:
                assert await kv.get(key) == value


@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_put_that_waited_is_not_carried_out_by_a_node_that_leads_no_more(
    tmp_path: Path, is_durable: bool
) -> None:
    """Goal: every block in a node's table is of a shard that it leads. Method: a put waits for a durable one that its
    follower does not confirm; meanwhile the other node becomes the leader. The put goes there.
    """
    async with Node(config(tmp_path, "a")) as a, Node(config(tmp_path, "b")) as b:
        await all_held(a, b)
        assert a.cluster is not None and a.cluster.shards is not None
        assert b.cluster is not None and b.cluster.shards is not None
        shard = next(shard for shard in a.cluster.shards.shards if shard.is_active)
        key, hears = key_in(shard.number, 1), b.cluster.shards.received
        b.cluster.shards.received = lambda *_: None  # type: ignore[method-assign]
        async with ucxkv.connect(a.address) as first, ucxkv.connect(a.address) as second:
            lost = asyncio.create_task(first.put(key, b"v", durable=True, deadline_s=10))
            await wait_until(lambda: len(a.store.directory.durable.staged) == 1, "it is staged")
            late = asyncio.create_task(second.put(key, b"v", durable=False, deadline_s=10))
            if is_durable:  # behind the one that waits, of its session
                late = asyncio.create_task(second.put(key_in(shard.number, 2), b"v", durable=True, deadline_s=10))
            await asyncio.sleep(0.1)
            cell, member = shard.replica.config, b.cluster.shards.me
            assert cell.value is not None
            deposed = ShardConfig(cell.value.epoch + 1, member, frozenset({member}))
            await a.cluster.membership.cluster.set_shard(shard.number, cell.revision, deposed)
            await wait_until(lambda: not shard.is_active, "it is deposed")
            b.cluster.shards.received = hears  # type: ignore[method-assign]
            assert await lost is PutStatus.UNAVAILABLE
            assert await late is PutStatus.STORED
            assert not a.store.directory.match(key) and not shard.is_active
        a.store.check()


@pytest.mark.parametrize("is_delete", [False, True])
async def test_what_every_member_has_is_acknowledged_though_the_lease_ended(tmp_path: Path, is_delete: bool) -> None:
    """Goal: a put or delete that is in the log is not of unknown outcome, as it was when other shards were handed over
    at that moment. Method: the follower does not confirm until the leader has gone over to another epoch, without a
    lease.
    """
    async with Node(config(tmp_path, "a")) as a, Node(config(tmp_path, "b")) as b:
        await all_held(a, b)
        assert a.cluster is not None and a.cluster.shards is not None
        assert b.cluster is not None and b.cluster.shards is not None
        shard = next(shard for shard in a.cluster.shards.shards if shard.is_active)
        key, hears = key_in(shard.number, 1), b.cluster.shards.received
        async with ucxkv.connect(a.address) as kv:
            if is_delete:
                assert await kv.put(key, b"v", durable=True) is PutStatus.STORED
            b.cluster.shards.received = lambda *_: None  # type: ignore[method-assign]
            if is_delete:
                call: asyncio.Task[object] = asyncio.create_task(kv.delete([key], deadline_s=10))
            else:
                call = asyncio.create_task(kv.put(key, b"v", durable=True, deadline_s=10))
            await wait_until(lambda: a.store.directory.durable.is_busy, "it is staged")
            renew = a.store.serving.until
            a.store.serving.until = lambda *_: None  # type: ignore[method-assign]
            a.begin_epoch(a.epoch + 1)
            b.cluster.shards.received = hears  # type: ignore[method-assign]
            if is_delete:
                assert list(await call) == [DeleteStatus.DELETED]  # type: ignore[call-overload]
            else:
                assert await call is PutStatus.STORED
            assert not a.store.serving.is_running
            a.store.serving.until = renew  # type: ignore[method-assign]
        a.store.check()


async def test_a_member_catches_up_with_more_than_may_wait_for_its_entries(tmp_path: Path) -> None:
    """Goal: replication does not stop at the bound of values that wait (a quarter of the memory). Method: more than
    that in one shard's log, small enough in records for one message; then a member begins, and leads.
    """
    chain = [key_in(1, i) for i in range(80)]
    async with Node(config(tmp_path, "a")) as a:
        await wait_until(lambda: numbers(a)["shards_led"] == _SHARDS, "led")
        values = [bytes((i,)) * 250_000 for i in range(len(chain))]
        async with ucxkv.connect(a.address) as kv:
            assert (await kv.put_many(chain, values, "chain", durable=True)).ok
        async with Node(config(tmp_path, "b")) as b:
            assert sum(map(len, values)) > b.store.space.arrived._limit_bytes
            await all_held(a, b)
            await a.aclose()
            await wait_until(lambda: numbers(b)["shards_led"] == _SHARDS, "led", 20)
            async with ucxkv.connect(b.address) as kv:
                assert (await kv.get_many(chain, root=chain[0])).values == values
            b.store.check()


async def test_durable_blocks_of_a_gained_shard_find_room_in_a_full_table(tmp_path: Path) -> None:
    """Goal: a shard that is taken over keeps its durable blocks, however many of class cache are here: those that found
    no room were logged as gone, on all nodes. Method: a shard is hidden, the table filled, the shard shown again.
    """
    async with Node(config(tmp_path, "a", replicas=1, slots_count=256)) as node, ucxkv.connect(node.address) as kv:
        await wait_until(lambda: numbers(node)["shards_led"] == _SHARDS, "led")
        assert node.cluster is not None and node.cluster.shards is not None
        durable = [key_in(0, i) for i in range(50)]
        for key in durable:
            assert await kv.put(key, b"d", durable=True) is PutStatus.STORED
        shards = node.cluster.shards
        gain, shards.gain_soon = shards.gain_soon, lambda shard: None  # type: ignore[method-assign]
        shards.lose(shards.shards[0])
        status = [await kv.put(key_in(1, i), b"c", deadline_s=5) for i in range(300)]
        assert status.count(PutStatus.STORED) == 256
        shards.gain_soon = gain  # type: ignore[method-assign]
        await wait_until(lambda: numbers(node)["shards_led"] == _SHARDS, "led")
        assert all(node.store.directory.match(key) for key in durable)
        assert node.store.directory.blocks == 256 and len(shards.shards[0].rows()) == 50
        node.store.check()


async def test_a_closing_node_does_not_serve_again(tmp_path: Path) -> None:
    """Goal: no answer after the registration was given up. Method: a shard changes hands while the node closes."""
    async with Node(config(tmp_path, "a", replicas=1)) as node:
        await wait_until(lambda: numbers(node)["shards_led"] == _SHARDS, "led")
        assert node.cluster is not None and node.cluster.shards is not None and node.store.serving.is_running
        closing = asyncio.create_task(node.aclose())
        await asyncio.sleep(0)
        node.cluster.shards.lose(node.cluster.shards.shards[0])
        assert not node.store.serving.is_running
        await closing


@pytest.mark.parametrize(("steps", "lacking"), [("C", 1), ("CL", 0), ("CLC", 1), ("CLCL", 0)])
def test_a_journal_whose_values_are_gone_is_whole_only_where_all_has_left(steps: str, lacking: int) -> None:
    """Goal: who has lost the value of a block that was put, deleted and put again does not claim to have it. Method: a
    shard's log of Commits and Leaves of one key, and no memory.
    """
    rows = np.zeros(1, COMMIT_DTYPE)
    rows["key"] = np.frombuffer(key_in(0, 1), "V16")
    log = ShardLog(entries=[])
    for index, step in enumerate(steps, 1):
        said = {"rows": rows.copy()} if step == "C" else {"keys": rows["key"].tobytes()}
        log.entries.append(LoggedEntry(index, 1, Kind.RECORD, **said))
    found = ShardRecovery(journal=None, logs={0: log})  # type: ignore[arg-type]
    _prove(None, SimpleNamespace(why_empty="the machine was started anew"), found, None)  # type: ignore[arg-type]
    assert found.lacking.get(0, 0) == lacking
    assert found.is_whole(0, (ShardConfig(1, Member("b", 1), frozenset({Member("b", 1)})), 1), "a") == (not lacking)
