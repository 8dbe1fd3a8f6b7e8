"""When a learning policy is told what, and what is written down of its decisions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.directory.arena import aligned, key_of
from tests.directory.policies import POLICIES, WatchedPolicy
from ucxkv.directory import ROOT_KEY, Directory, PutStatus, SlotTable, events, table_bytes, tiering
from ucxkv.directory.explaining import facts_of
from ucxkv.directory.ranking import BACKLOG, DELAY_NS, SOON
from ucxkv.policy.cost import Verdict
from ucxkv.policy.decisions import DecisionLog

TICK = 10**7
HOUR = 3600 * 10**9


class Shell:
    """A directory of one-block-after-another chains, and the time."""

    def __init__(self, policy: str = "watched", capacity: int = 4 * BACKLOG) -> None:
        table = SlotTable(aligned(table_bytes(capacity)), capacity, epoch=3, seed=17)
        self.log = DecisionLog(64)
        self.core = Directory(table, grace_ns=1, policy=POLICIES[policy], has_disk=True, decisions=self.log)
        self.now, self.offset, self.handles = 10**9, 0, 0

    @property
    def watched(self) -> WatchedPolicy:
        policy = self.core.ranking.policy
        assert isinstance(policy, WatchedPolicy)
        return policy

    def put(self, first: int, count: int, parent: bytes = ROOT_KEY) -> None:
        names = [key_of(first + at) for at in range(count)]
        offsets = np.arange(self.offset, self.offset + 64 * count, 64, dtype=np.uint64)
        self.offset += 64 * count
        columns = (np.zeros(count, np.uint16), offsets, np.full(count, 64, np.uint32), np.zeros(count, np.uint64))
        event = events.Put(b"".join(names), b"".join([parent, *names[:-1]]), *columns)
        assert (self.core.handle(event, self.now).reply.status == PutStatus.STORED).all()

    def touch(self, *numbers: int) -> None:
        self.core.handle(events.Touch(b"".join(map(key_of, numbers))), self.now)

    def evict(self, count: int) -> None:
        self.core.handle(events.Evict(64 * count), self.now)

    def slot(self, number: int) -> int:
        return int(self.core.table.find(key_of(number))[0])

    def copied(self) -> None:
        """Everything has a copy on disk."""
        blocks = self.core.handle(tiering.Fresh(1 << 30, 1 << 20), self.now).reply.blocks
        slots, generations = zip(*blocks, strict=True)
        handles = np.arange(self.handles + 1, self.handles + len(slots) + 1, dtype=np.uint32)
        self.handles += len(slots)
        event = tiering.Copied(np.array(slots, np.int32), np.array(generations, np.uint64), handles)
        assert self.core.handle(event, self.now).reply.taken.all()

    def warm(self, number: int) -> None:
        handle = self.core.cold.handle(self.slot(number))
        sums = np.array([self.core.words.tail(self.slot(number))[2]], np.uint64)
        event = tiering.Warm(key_of(number), np.array([handle], np.uint32), np.array([self.offset], np.uint64), sums)
        self.offset += 64
        assert self.core.handle(event, self.now).reply.taken.all()


def test_a_put_tells_a_learner_nothing_until_it_matters() -> None:
    """Goal: off the hot path, and bounded. Method: puts and touches reach the policy with the Tick that `next_ns` asks
    for, at once after SOON blocks, with the BACKLOG-th block, or with an eviction, and not before."""
    shell = Shell()
    shell.put(0, 8)
    shell.touch(0, 1)
    assert not shell.watched.known and shell.core.next_ns() == shell.now + DELAY_NS
    assert shell.core.stats().leaves == 1
    shell.now += DELAY_NS
    shell.core.handle(events.Tick(), shell.now)
    assert len(shell.watched.known) == 8 and shell.watched.uses == 2 and shell.core.next_ns() is None
    shell.put(100, SOON)
    assert len(shell.watched.known) == 8 and shell.core.next_ns() == shell.now
    shell.put(1000, BACKLOG - SOON - 1)
    assert len(shell.watched.known) == 8
    shell.put(10_000, 1)
    assert len(shell.watched.known) == 8 + BACKLOG
    shell.put(20_000, 4)
    shell.evict(1)
    assert len(shell.watched.known) == 8 + BACKLOG + 4 - 1
    shell.core.check()


def test_uses_in_one_tick_count_once_and_in_two_ticks_twice() -> None:
    """Method: a block is touched three times in a tick, once in the next."""
    shell = Shell()
    shell.put(0, 1)
    for _ in range(3):
        shell.touch(0)
    shell.now += TICK
    shell.touch(0)
    shell.core.handle(events.Tick(), shell.now)
    assert shell.watched.uses == 2


def test_a_promotion_and_the_read_it_was_made_for_are_one_use() -> None:
    """Method: a demoted block is promoted, touched a second later, and again ten seconds later: two uses."""
    shell = Shell()
    shell.put(0, 2)
    shell.copied()
    shell.evict(2)
    assert shell.core.cold.blocks == 2 and len(shell.watched.cold) == 2
    shell.now += HOUR
    shell.warm(0)
    shell.now += 10**9
    shell.touch(0)
    shell.core.handle(events.Tick(), shell.now)
    assert shell.watched.uses == 1
    shell.now += 10 * 10**9
    shell.touch(0)
    shell.core.handle(events.Tick(), shell.now)
    assert shell.watched.uses == 2
    shell.core.check()


def test_depth_counts_blocks_above_across_puts_and_starts() -> None:
    """Method: a chain in two puts; the depth of each block, and of one below a block that was found on disk."""
    shell = Shell("tuc")
    shell.put(0, 3)
    shell.put(3, 2, key_of(2))
    assert [facts_of(shell.core, key_of(n), shell.now).depth for n in range(5)] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    keys = b"".join(map(key_of, (100, 101)))
    sizes, sums = np.full(2, 64, np.uint32), np.zeros(2, np.uint64)
    shell.core.handle(
        tiering.AdoptCold(keys, ROOT_KEY + keys[:16], np.array([5, 6], np.uint32), sizes, sums), shell.now
    )
    shell.put(102, 1, key_of(101))
    found = facts_of(shell.core, key_of(102), shell.now)
    assert found is not None and found.depth == 2 and not found.is_cold
    shell.core.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_befalls_a_block_is_written_down(policy: str) -> None:
    """Goal: each way to go has its line, under each policy. Method: demote, promote, delete, reclaim, evict."""
    shell = Shell(policy)
    shell.put(0, 2)
    shell.put(10, 1)
    shell.copied()
    shell.evict(3)
    shell.now += HOUR
    shell.warm(0)
    last = [shell.log.of(key_of(n))[0] for n in (0, 1)]
    assert [one.verdict for one in last] == [Verdict.PROMOTE, Verdict.DEMOTE]
    assert (last[0].from_tier, last[0].to_tier, last[0].age) == ("nvme", "host", HOUR // TICK)
    lost = tiering.CopiesLost(key_of(1), np.array([shell.core.cold.handle(shell.slot(1))], np.uint32))
    shell.core.handle(lost, shell.now)
    assert shell.log.of(key_of(1))[0].from_tier == "nvme" and "datafile" in shell.log.of(key_of(1))[0].reason
    shell.core.handle(events.Delete(key_of(10)), shell.now)
    assert shell.log.of(key_of(10))[0].reason == "deleted"
    shell.put(20, 1)
    shell.evict(2)
    assert shell.log.of(key_of(20))[0].verdict is Verdict.DROP
    assert shell.core.ranking.policy.rule in shell.log.of(key_of(20))[0].reason
    assert facts_of(shell.core, key_of(20), shell.now) is None
    shell.core.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_trim_takes_a_fork_when_all_below_it_goes(policy: str) -> None:
    """Method: two chains of cold blocks that share their head; as many as there are must go in one call."""
    shell = Shell(policy)
    shell.put(0, 3)
    shell.put(10, 2, key_of(2))
    shell.put(20, 2, key_of(2))
    shell.copied()
    shell.evict(7)
    assert shell.core.cold.blocks == 7
    assert shell.core.handle(tiering.Trim(5), shell.now).reply.blocks == 5
    assert shell.core.handle(tiering.Trim(5), shell.now).reply.blocks == 2
    shell.core.check()


def test_leaves_that_were_passed_by_keep_their_order() -> None:
    """Goal: an eviction that only asks for what has copies changes nothing else. Method: blocks of different ages
    without copies, asked in vain, then evicted one by one: the oldest first."""
    for policy in ("lru", "s3fifo", "tuc"):
        shell = Shell(policy)
        for number in range(6):
            shell.put(10 * number, 1)
            shell.now += 60 * 10**9
        for _ in range(3):
            shell.core.handle(events.Evict(64, is_hiding=False), shell.now)
        for number in range(6):
            shell.evict(1)
            assert shell.slot(10 * number) < 0, (policy, number)
