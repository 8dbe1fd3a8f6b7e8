"""A cluster's records over every engine: names, incarnations, versions, shards, pictures that keep themselves true."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.control.conftest import Engine
from tests.control.memory import MemoryControl, Outage, Store
from tests.control.test_contract import put
from tests.harness import wait_until
from ucxkv import errors
from ucxkv.control import Conflict, ControlPlane, Entry, Lease, SystemClock
from ucxkv.control.cluster import Cluster, NameTaken
from ucxkv.control.mirror import mirror
from ucxkv.control.records import (
    ClusterRecord,
    Incarnation,
    MemberRecord,
    ShardRecord,
    decode_record,
    encode_record,
)
from ucxkv.protocol.messages import MemberInfo
from ucxkv.replication import Member, ShardConfig
from ucxkv.sharding import ShardRule


def info(name: str, node_id: int = 7) -> MemberInfo:
    return MemberInfo(node_id, name, "127.0.0.1:1", 5, 2.0)


async def test_the_first_makes_the_cluster_and_all_others_find_it(engine: Engine) -> None:
    """Goal: one cluster record. Method: ten open at once with different rules; all end with one id and one rule."""
    planes = [await engine.open() for _ in range(10)]
    opened = await asyncio.gather(
        *(Cluster.open(plane, rule=ShardRule(shards=1 << i)) for i, plane in enumerate(planes))
    )
    assert len({cluster.record for cluster in opened}) == 1
    assert opened[0].rule == ShardRule(shards=opened[0].record.shards)


async def test_a_name_has_one_live_node_and_passes_on_with_its_lease(engine: Engine) -> None:
    """Goal: two nodes of one name (issue 4). Method: the second is refused and named the first; the first dies; the
    second, still asking, takes over as a later incarnation."""
    a, b = await Cluster.open(await engine.open()), await Cluster.open(await engine.open())
    first = await a.register(info("n"), engine.ttl_s)
    assert await b.members() == [first.record] and first.record.info == info("n")
    with pytest.raises(NameTaken, match="--name") as caught:
        await b.register(info("n", 8), engine.ttl_s, wait_s=0)
    assert caught.value.other == first.record and isinstance(caught.value, errors.SetupError)
    assert (await b.members()) == [first.record] and first.lease.is_held
    asking = asyncio.create_task(b.register(info("n", 8), engine.ttl_s, wait_s=60))
    first.lease.abandon("it died")
    async with asyncio.timeout(30):
        second = await asking
    assert second.record.incarnation > first.record.incarnation
    assert await a.members() == [second.record]
    await second.lease.revoke()
    assert await a.members() == []
    third = await a.register(info("n"), engine.ttl_s)
    assert third.record.incarnation > second.record.incarnation


async def test_a_hundred_registrations_of_one_name_give_a_hundred_incarnations(engine: Engine) -> None:
    """Goal: incarnations grow and never repeat. Method: concurrent registrations that undo themselves."""
    cluster = await Cluster.open(await engine.open())
    found = await asyncio.gather(*(cluster._next_incarnation(info("n", 1 + i)) for i in range(25)))
    assert sorted(found) == sorted(set(found)) and min(found) >= 1


async def test_a_shard_changes_by_compare_and_set_only(engine: Engine) -> None:
    """Goal: one leader a shard. Method: two take an empty shard at once, one wins; changes on an old revision fail."""
    cluster = await Cluster.open(await engine.open())
    other = await Cluster.open(await engine.open())
    assert await cluster.shard(3) == (None, 0)
    configs = [
        ShardConfig(epoch=1, leader=Member(name, 1), insync=frozenset((Member(name, 1), Member("x/y", 2))))
        for name in "ab"
    ]
    outcomes = await asyncio.gather(
        cluster.set_shard(3, 0, configs[0]), other.set_shard(3, 0, configs[1]), return_exceptions=True
    )
    won = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(won) == 1 and sum(isinstance(outcome, Conflict) for outcome in outcomes) == 1
    config, revision = await other.shard(3)
    assert revision == won[0] and config == configs[outcomes.index(won[0])]
    assert config is not None
    later = ShardConfig(epoch=2, leader=Member("x/y", 2), insync=frozenset((Member("x/y", 2),)))
    moved = await other.set_shard(3, revision, later)
    with pytest.raises(Conflict):
        await cluster.set_shard(3, revision, config)
    assert (await cluster.view()).shards == {3: (later, moved)} and await other.read_shard(3) == (later, moved)
    nobody, asked_at = await cluster.read_shard(30)
    assert nobody is None and asked_at >= moved
    with pytest.raises(errors.UsageError):
        await cluster.shard(cluster.record.shards)
    with pytest.raises(ValueError, match="in-sync"):
        ShardRecord(epoch=1, leader=Member("a", 1), insync=())


@pytest.mark.parametrize("key", ["cluster", "members/n", "incarnations/n", "shards/0"])
async def test_a_record_of_a_newer_version_is_refused_and_kept(plane: ControlPlane, engine: Engine, key: str) -> None:
    """Goal: an old release does no harm in a newer cluster (issue 4). Method: each record from version 9, with fields
    that we do not know; every call that meets it says so, names both versions, and leaves it as it is."""
    if key != "cluster":
        await Cluster.open(plane)
    newer = await put(plane, key, b'{"version": 9, "shape": {"unknown": [1, 2]}}')
    with pytest.raises(errors.SetupError, match=r"version 9.*version 1 or older.*upgrade"):
        cluster = await Cluster.open(plane)
        await cluster.view()
        await cluster.shard(0)
        await cluster.register(info("n"), engine.ttl_s)
    assert await plane.get(key) == newer


async def test_one_shard_that_cannot_be_read_hides_no_other(plane: ControlPlane) -> None:
    """Goal: leaders of the other shards are seen, those that a hand-over makes among them. Method: a record from
    version 9 over one that was read, and one where none was; another shard changes; the record is put back."""
    cluster = await Cluster.open(plane)
    config = ShardConfig(1, Member("a", 1), frozenset({Member("a", 1)}))
    first, second = await cluster.set_shard(0, 0, config), await cluster.set_shard(1, 0, config)
    async with aclosing(cluster.follow()) as views:
        assert (await anext(views)).shards == {0: (config, first), 1: (config, second)}
        entry = await plane.get("shards/0")
        assert entry is not None
        newer = await plane.compare_and_set("shards/0", entry.revision, b'{"version": 9}')
        await put(plane, "shards/2", b"{}")
        moved = await cluster.set_shard(1, second, replace(config, epoch=2))
        async for view in views:
            if view.revision >= moved:
                break
        assert view.shards == {0: (config, first), 1: (replace(config, epoch=2), moved)}
        assert view.unreadable.keys() == {0, 2} and "version 9" in str(view.unreadable[0])
        with pytest.raises(errors.SetupError):
            await cluster.view()
        assert newer is not None
        back = await plane.compare_and_set("shards/0", newer.revision, entry.value)
        assert back is not None
        async for view in views:
            if view.revision >= back.revision:
                break
        assert view.shards[0] == (config, back.revision) and view.unreadable.keys() == {2}


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": 0}', b'{"version": 1}', b'{"version": "1"}', b"[" * 5000]
)
@pytest.mark.parametrize("kind", [ClusterRecord, MemberRecord, Incarnation, ShardRecord])
def test_what_is_no_record_is_refused_by_its_key(value: bytes, kind: type[ClusterRecord]) -> None:
    """Goal: a damaged value is a SetupError naming the key. Method: values that are nearly records."""
    with pytest.raises(errors.SetupError, match="some/key"):
        decode_record(Entry("some/key", value, 1), kind)


def test_records_pass_over_what_a_later_release_added() -> None:
    """Goal: fields may be appended within a version. Method: an unknown field beside the known ones; round trip."""
    record = Incarnation(number=3, node_id=(1 << 63) - 1)
    value = encode_record(record)
    assert decode_record(Entry("k", value, 1), Incarnation) == record
    assert decode_record(Entry("k", value[:-1] + b',"later":{"x":1}}', 1), Incarnation) == record


async def test_a_picture_follows_the_members_and_outlives_an_outage_and_a_compaction() -> None:
    """Goal: nodes learn each other from the watch. Method: the in-memory plane, cut off while members come and go and
    its history is dropped; the next picture is whole."""
    store = Store(SystemClock())
    near, far = MemoryControl(store, timeout_s=0.2), MemoryControl(store)
    cluster, other = await Cluster.open(near), await Cluster.open(far)
    seen: list[list[str]] = []
    revisions: list[int] = []

    async def follow() -> None:
        async with aclosing(cluster.follow()) as views:
            async for view in views:
                seen.append([member.name for member in view.members])
                revisions.append(view.revision)

    following = asyncio.create_task(follow())
    await wait_until(lambda: seen == [[]], "the first picture")
    a = await other.register(info("a"), 60)
    await other.register(info("b", 8), 60)
    await wait_until(lambda: seen[-1] == ["a", "b"], "both")
    near.outage = Outage.HANG
    await a.lease.revoke()
    await other.register(info("c", 9), 60)
    store.compact()
    await asyncio.sleep(0.1)
    assert seen[-1] == ["a", "b"], "an outage leaves the last picture"
    near.outage = Outage.NONE
    await wait_until(lambda: seen[-1] == ["b", "c"], "what happened meanwhile")
    assert revisions == sorted(revisions) and revisions[-1] == (await other.view()).revision
    await near.aclose()
    with pytest.raises(errors.Unavailable):
        await following
    await far.aclose()
    await store.aclose()


async def test_a_node_is_set_to_drain_and_back(engine: Engine) -> None:
    """Goal: `ucxkv drain` and its undoing. Method: set twice, taken back twice, by two handles; the view says it."""
    cluster, other = await Cluster.open(await engine.open()), await Cluster.open(await engine.open())
    for is_draining in (True, True, False, False):
        await cluster.set_draining("n/1", "a test", is_draining=is_draining)
        assert (await other.view()).draining == ({"n/1"} if is_draining else set())


async def test_a_picture_is_right_after_any_compaction(engine: Engine) -> None:
    """Goal: mirror over each engine. Method: changes, deletions and compactions at random places; the last picture is
    what a list says."""
    plane, writer = await engine.open(), await engine.open()
    latest: dict[str, Entry] = {}

    async def follow() -> None:
        nonlocal latest
        async with aclosing(mirror(plane, "p/")) as pictures:
            async for picture in pictures:
                latest = picture.entries
                await asyncio.sleep(0.001)

    following = asyncio.create_task(follow())
    for i in range(60):
        entry = await put(writer, f"p/{i % 5}", str(i).encode())
        if i % 4 == 0:
            await writer.compare_and_set(entry.key, entry.revision, None)
        if i % 7 == 0:
            await engine.compact()
    wanted = {entry.key: entry for entry in (await writer.list("p/"))[0]}
    await wait_until(lambda: latest == wanted, "the picture", 30)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


class Lossy(MemoryControl):
    """It does what it is told; the answer to change number `lost` does not come."""

    def __init__(self, store: Store, lost: int) -> None:
        super().__init__(store, timeout_s=0.05)
        self._left = lost

    async def compare_and_set(
        self, key: str, expected_revision: int, value: bytes | None, *, lease: Lease | None = None
    ) -> Entry | None:
        self.outage = Outage.LOSE_REPLY if self._left == 0 else Outage.NONE
        self._left -= 1
        try:
            return await super().compare_and_set(key, expected_revision, value, lease=lease)
        finally:
            self.outage = Outage.NONE


@pytest.mark.parametrize("lost", range(3))
async def test_an_answer_that_got_lost_registers_once(lost: int) -> None:
    """Goal: an unknown outcome does not end in a name that is taken by oneself. Method: each of the changes that make
    a cluster and register its first node happens and is not answered, in turn."""
    store = Store(SystemClock())
    plane = Lossy(store, lost)
    cluster = await Cluster.open(plane)
    done = await cluster.register(info("n"), 30)
    assert await cluster.members() == [done.record] and done.record.incarnation == (2 if lost == 1 else 1)
    await plane.aclose()
    await store.aclose()
