"""Single stories of shards on several nodes, step by step; `test_machine` tells all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.shards.fleet import Fleet
from tests.shards.life import CHAINS, RULE, u32, u64, value_of
from ucxkv.directory import PutStatus
from ucxkv.directory.log import NOTHING
from ucxkv.ids import ROOT_KEY
from ucxkv.node.shards.records import ABSENT_REGION
from ucxkv.node.shards.standby import places_of
from ucxkv.protocol import messages as m
from ucxkv.replication import events as ev


@pytest.fixture
def pair() -> Iterator[Fleet]:
    """a leads shard 0, b shard 1, each in sync with the other."""
    fleet = Fleet(2)
    try:
        fleet.advance(600)
        assert fleet.lives["a"].serves(0) and fleet.lives["b"].serves(1)
        yield fleet
    finally:
        fleet.close()


def left_behind(pair: Fleet) -> None:
    """b is cut off until it is out of sync, and is told of everything again afterwards."""
    pair.lives["b"].is_cut = True
    pair.advance(6000)
    pair.check()


def test_a_block_that_was_put_deleted_and_put_again_is_on_its_follower(pair: Fleet) -> None:
    """Goal: a value that two entries of one message name is taken for both. Method: the follower is away meanwhile,
    and gets the three entries at once; then it alone is left."""
    pair.lives["b"].is_cut = True
    pair.advance(6000)
    for step in range(3):
        if step == 1:
            pair.delete("a", 0, 0)
        else:
            pair.put("a", 0, 0, 1)
        pair.advance(50)
    pair.check()
    assert pair.sure[CHAINS[0][0]] is not None
    pair.heal()
    pair.lives["a"].is_cut = True
    pair.advance(6000)
    pair.check()
    assert pair.lives["b"].serves(0) and CHAINS[0][0] in pair.lives["b"].visible()


def test_a_follower_may_lack_a_value_that_is_gone_at_its_leader_and_has_a_leave_behind_it(pair: Fleet) -> None:
    """Goal: a follower that catches up takes an entry without the value that its leader has no longer, and loses it
    with the Leave; an older Leave of the same block, which it takes only now, changes nothing. Method: the block is
    put, deleted, put and deleted again while it is away, and the last Leave comes in a later message."""
    left_behind(pair)
    root = CHAINS[0][0]
    pair.put("a", 0, 0, 1)
    pair.advance(50)
    pair.delete("a", 0, 0)
    for at in range(4):
        pair.advance(50)
        pair.put("a", 0, at, 1)
    for at in (3, 2, 1, 0):
        pair.advance(50)
        pair.delete("a", 0, at)
    pair.advance(50)
    pair.check()
    assert pair.lives["a"].shards.shards[0].applied.index == 11 and pair.sure[root] is None
    pair.lives["b"].is_cut = False
    lacking = lacks(pair, root)
    assert lacking, "the values came, or all entries at once: the test says nothing"
    pair.heal()
    assert not len(pair.lives["b"].shards.shards[0].standby)


def lacks(pair: Fleet, key: bytes) -> set[int]:
    """Let b catch up a message at a time, and all be checked after each: how far it was applied there whenever it had
    this block without its value.
    """
    shard, out = pair.lives["b"].shards.shards[0], set()
    for _ in range(40):
        pair.advance(50, messages=0)
        for _ in range(len(pair.net)):
            pair.deliver(1)
            pair.check()
            if ABSENT_REGION in [row["region"] for row in shard.standby.rows() if row["key"].tobytes() == key]:
                out.add(shard.applied.index)
    return out


def test_a_block_that_was_put_again_is_on_a_follower_that_is_sent_the_first_put_again(pair: Fleet) -> None:
    """Goal: "gone" is said of one entry's value, and not of the same bytes put again later. Method: a block is put and
    deleted while the follower is away, and put again when both are on their way to it, in a message that is lost; then
    an answer of the follower's from before comes late, and it is sent all three. After that it alone is left."""
    left_behind(pair)
    leader, follower = pair.lives["a"], pair.lives["b"]
    pair.put("a", 0, 0, 1)
    pair.advance(50)
    pair.delete("a", 0, 0)
    pair.advance(50)
    follower.is_cut = False
    answers: list[tuple[str, str, Any]] = []
    while len(answers) < 2:
        pair.advance(50, messages=0)
        pair.net = deque(sorted(pair.net, key=lambda one: one[0]))
        pair.deliver(sum(one[0] == "a" for one in pair.net))
        answers += [one for one in pair.net if one[0] == "b" and one[2].shard == 0]
        pair.net.clear()
    pair.net = deque(answers[1:])
    pair.deliver(1)
    pair.put("a", 0, 0, 1)
    pair.deliver(1)
    assert follower.shards.shards[0].applied.index == 3
    pair.net = deque(answers[:1])
    pair.deliver(2)
    pair.check()
    pair.heal()
    assert pair.sure[CHAINS[0][0]] is not None
    leader.is_cut = True
    pair.advance(6000)
    pair.check()
    assert follower.serves(0) and CHAINS[0][0] in follower.visible()


def test_a_block_without_its_value_and_without_a_leave_behind_it_is_noticed(pair: Fleet) -> None:
    """Goal: the check of these stories can fail. Method: a follower's value is given up behind its shard's back, once
    with no Leave in the log, once with one that is older than the block."""
    shard = pair.lives["b"].shards.shards[0]
    for turn in range(2):
        pair.put("a", 0, 0, turn)
        pair.advance(500)
        pair.check()
        rows = shard.standby.take().copy()
        pair.lives["b"].store.slabs.free(places_of(rows))
        rows["region"] = ABSENT_REGION
        shard.standby.commit(rows)
        with pytest.raises(AssertionError, match="without its value"):
            pair.check()
        pair.delete("a", 0, 0)
        pair.check()  # a Leave is on its way now
        pair.advance(500)
    pair.heal()


def test_a_value_is_there_while_the_node_may_not_answer(pair: Fleet) -> None:
    """Goal: "gone" is said of what is gone alone, not of what readers can't be shown at this moment. Method: the
    follower catches up while the leader's table is not served, as it is while another of its shards is dormant."""
    left_behind(pair)
    for at in range(3):
        pair.put("a", 0, at, 1)
    pair.advance(100)
    leader, shard = pair.lives["a"], pair.lives["a"].shards.shards[0]
    (row,) = [row for row in shard.rows() if row["key"].tobytes() == CHAINS[0][1]]
    leader.store.serving.until(0)
    assert shard.place(2, CHAINS[0][1], int(row["sum"]), int(row["length"])) is not None
    leader.lease_until = lambda end_ns: leader.store.serving.until(0)  # type: ignore[method-assign]
    pair.lives["b"].is_cut = False
    pair.advance(3000)
    pair.check()
    del leader.lease_until  # type: ignore[misc]
    pair.heal()
    assert len(pair.lives["b"].shards.shards[0].standby) == 3


def test_a_shard_is_shown_again_only_when_what_it_proposed_before_is_applied(pair: Fleet) -> None:
    """Goal: a batch that was abandoned and is committed later is seen, and its memory is in a hand. Method: the lease
    ends and goes on between proposal and confirmation; so for a put, and for a delete of another block."""
    pair.put("a", 0, 0, 1)
    pair.put("a", 0, 1, 1)
    pair.advance(50)
    pair.put("a", 0, 2, 1)
    pair.delete("a", 0, 1)
    life = pair.lives["a"]
    pair.do(lambda: life.shards.on_lease(0))
    pair.check()
    pair.do(life.grant_lease)
    pair.clock.now_ns += 20_000_000
    pair.do(lambda: life.shards.shards[0].handle(ev.Tick()))
    pair.check()
    assert not life.serves(0), "it is shown, and what is on its way is not in it"
    pair.heal()
    assert {*CHAINS[0][:3]} <= life.visible()


def test_a_block_that_went_bad_while_it_became_durable_has_its_memory_once(pair: Fleet) -> None:
    """Goal: what the directory lets go of is nobody else's. Method: a block of class cache becomes durable, is found
    damaged before the log has that, and its leader stops serving before the Leave is applied."""
    pair.put("a", 0, 0, 1, durable=False)
    pair.put("a", 0, 1, 1)
    pair.damage("a", 0, 0)
    life = pair.lives["a"]
    pair.do(lambda: life.shards.on_lease(0))
    pair.check()
    pair.do(life.grant_lease)
    pair.heal()
    assert not life.shards.shards[0].rows().size


def test_a_deleted_block_that_was_put_for_the_cache_is_durable_with_the_one_below_it(pair: Fleet) -> None:
    """Goal: the delete of before says nothing of it. Method: put, deleted, put for the cache, then a durable child."""
    pair.put("a", 0, 0, 1)
    pair.advance(500)
    pair.delete("a", 0, 0)
    pair.advance(500)
    pair.check()
    assert pair.sure[CHAINS[0][0]] is None
    pair.put("a", 0, 0, 1, durable=False)
    pair.put("a", 0, 1, 1)
    pair.heal()
    assert pair.sure.keys() == {CHAINS[0][1]} and len(pair.lives["b"].shards.shards[0].standby) == 2


def test_a_block_is_put_again_while_it_is_staged_below_one_that_went_bad(pair: Fleet) -> None:
    """Goal: such a put is refused until the log has the first, and leaves nothing behind that the shard trips over.
    Method: a block is on its way, its parent is found damaged, the block is put again; then both anew."""
    leader = pair.lives["a"]
    pair.put("a", 0, 0, 1)
    pair.advance(500)
    pair.put("a", 0, 1, 1)
    pair.damage("a", 0, 0)
    assert CHAINS[0][1] in leader.store.directory.durable.staged
    pair.put("a", 0, 1, 1)
    pair.check()
    pair.advance(500)
    for at in range(2):
        pair.put("a", 0, at, 2)
        pair.advance(500)
    pair.heal()
    assert not leader.resigned and {*CHAINS[0][:2]} <= leader.visible()


def test_a_block_is_there_once_when_its_leave_was_never_logged(pair: Fleet) -> None:
    """Goal: state and log agree on a block that was lost and put again. Method: damage, when the log takes no more;
    then the same block anew."""
    pair.put("a", 0, 0, 1)
    pair.advance(500)
    shard = pair.lives["a"].shards.shards[0]
    pair.do(lambda: shard.propose(0, [(NOTHING, None)] * 64))
    pair.damage("a", 0, 0)
    assert list(shard.limbo) == [CHAINS[0][0]] and len(shard.rows()) == 1
    pair.advance(500)
    pair.put("a", 0, 0, 2)
    pair.advance(500)
    assert not shard.limbo and len(shard.rows()) == 1
    pair.heal()
    (row,) = pair.lives["b"].shards.shards[0].rows()
    assert row["length"] == len(value_of(CHAINS[0][0], 2))


def test_what_is_durable_goes_into_a_full_table_before_what_is_not(pair: Fleet) -> None:
    """Goal: no acknowledged block is given up for a cached one. Method: the follower's slots are full of the other
    shard's blocks when it takes over."""
    for at in range(5):
        pair.put("a", 0, at, 1)
    pair.advance(500)
    follower = pair.lives["b"]
    roots = [key for n in range(2000) if RULE.own(key := n.to_bytes(2, "big") + b"f" * 14) == 1]
    for key in roots[: follower.store.table.capacity + 1]:
        offset = follower.fill(b"c" * 64)
        assert offset is not None
        request = m.Put(key, ROOT_KEY, bytes(2), u64(offset), u32(64), u64(1))
        status = follower.store.put(follower.session, request, pair.clock.now_ns).status[0]
    assert status == PutStatus.NO_SPACE, "the table is not full: the test says nothing"
    pair.lives["a"].is_cut = True
    pair.advance(6000)
    pair.check()
    assert follower.serves(0) and {*CHAINS[0]} <= follower.visible()


def test_a_part_of_an_older_leader_disturbs_no_snapshot(pair: Fleet) -> None:
    """Goal: values of a snapshot that is coming stay. Method: between two of its parts one of an older epoch comes."""
    pair.advance(500)
    shard = pair.lives["b"].shards.shards[0]
    taken: list[int] = pair.lives["b"].store.slabs.allocate(64, 1)
    shard._snapshot._of = (7, 30, 7)
    shard._snapshot._offsets[b"k" * 24] = taken[0]
    from ucxkv.replication.messages import SnapshotPart

    stale = SnapshotPart(pair.lives["a"].me, 0, 40, 1, 0, 2, b"")
    assert pair.do(lambda: shard.received(stale, b""))
    assert list(shard._snapshot.offsets()) == taken
    pair.check()


def test_leadership_goes_to_whom_it_was_wished_for_and_stays() -> None:
    """Goal: of three, the best leader is handed the shard, and nobody hands it on. Method: another one leads, whose
    heirs are equally far; the epoch is the same ten seconds later."""
    fleet = Fleet(3)
    try:
        fleet.advance(6000)
        first = next(life for life in fleet.lives.values() if life.serves(0))
        assert first.shards.shards[0].replica.wish == ("a", "b", "c")
        fleet.do(lambda: fleet.lives["a"].shards.shards[0].handle(ev.HandOver()))
        fleet.advance(4000)
        config, _ = fleet.configs[0]
        assert config.leader.name == "a"
        fleet.advance(10_000)
        assert fleet.configs[0][0].epoch == config.epoch
        fleet.heal()
    finally:
        fleet.close()


def test_memory_that_readers_may_look_at_is_not_free_before_its_time(pair: Fleet) -> None:
    """Goal: a withdrawn block's memory waits for leases on it. Method: a lease, the shard is lost, the block is deleted
    by the next leader."""
    pair.put("a", 0, 0, 1)
    pair.advance(500)
    life = pair.lives["a"]
    place = life.store.place_of(CHAINS[0][0])
    assert place is not None
    leased = life.store.lease(1, m.LeaseKeys(CHAINS[0][0], 20_000), pair.clock.now_ns)
    assert leased.lease
    pair.do(lambda: life.shards.shards[0].handle(ev.HandOver()))
    pair.advance(600)
    assert pair.lives["b"].serves(0)
    pair.delete("b", 0, 0)
    pair.advance(1000)
    assert not len(life.shards.shards[0].standby), "the delete did not come"
    assert life.timers.late_offsets() == [place.offset]
    pair.check()
    pair.advance(21_000)
    assert not life.timers.late_offsets()
    assert np.frombuffer(life.store.segment.view, np.uint8).size
    pair.check()


def test_all_machines_lose_their_memory_at_once(pair: Fleet) -> None:
    """Goal: I8 with durability = power. Method: blocks put, deleted and put again in the places of others, then both
    nodes are without memory; the disk has of each block what a killed process would find, and all are shown again."""
    for version in range(3):
        for at in range(3):
            pair.put("a", 0, at, version)
            pair.put("b", 1, at, version)
            pair.advance(100)
        pair.check()
        for at in (2, 1, 0) if version < 2 else ():
            pair.delete("a", 0, at)
            pair.delete("b", 1, at)
            pair.advance(100)
    pair.check()
    assert all(pair.sure[CHAINS[shard][at]] is not None for shard in range(2) for at in range(3))
    for name in ("a", "b"):
        pair.restart(name, is_rebooted=True)
    pair.heal()
    assert {CHAINS[0][2], CHAINS[1][2]} <= {*pair.lives["a"].visible(), *pair.lives["b"].visible()}


def test_a_value_that_is_in_its_old_place_again_is_on_no_disk_before_it_is_in_the_journal(pair: Fleet) -> None:
    """Goal: a reboot brings back what the journal came to. Method: a block goes and comes with other bytes, goes, and
    comes with the first ones in the same place once more, when the machine fails before that is in the journal."""
    staged, places = pair.lives["a"].store.directory.durable.staged, set[int]()
    for version in (0, 1, 0):
        pair.advance(300)
        pair.delete("a", 0, 0)
        pair.advance(300)
        pair.put("a", 0, 0, version)
        places.add(staged[CHAINS[0][0]].extent[1])
    assert len(places) == 1, "another place: the test says nothing"
    pair.restart("a", is_rebooted=True)
    pair.check()
    pair.heal()
    assert CHAINS[0][0] not in pair.lives["a"].visible()
