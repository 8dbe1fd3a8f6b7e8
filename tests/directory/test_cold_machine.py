"""Blocks with copies on disk, against a plain model, under random events of everything else that a directory does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.directory.arena import aligned, key_of
from tests.directory.policies import POLICIES, WatchedPolicy
from ucxkv.directory import ROOT_KEY, Directory, PutStatus, SlotTable, events, table_bytes, tiering
from ucxkv.directory.cold import DISK_REGION
from ucxkv.directory.slots_twin import TwinTable
from ucxkv.policy.decisions import DecisionLog

KEYS = [key_of(i) for i in range(24)]
# Three chains of eight; the last hangs on the first one's third block.
PARENTS = [ROOT_KEY if i in (0, 8) else KEYS[{16: 2}.get(i, i - 1)] for i in range(24)]
CAPACITY, GRACE = 22, 50
HOST = 0

indices = st.integers(0, len(KEYS) - 1)


@dataclass
class Seen:
    """A visible block: where its value is, its sum, and its copy. parts: more than one never leaves memory for the
    disk.
    """

    parent: bytes
    sum: int
    is_cold: bool = False
    copy: int = 0
    parts: int = 1
    is_durable: bool = False


class ColdMachine(RuleBasedStateMachine):
    """What is visible never changes by a copy, a demotion or a promotion, but for the sum that a promotion brings;
    every extent and every handle that was given in comes out once, and only when no block has it any more.
    """

    table_class: type[Any] = SlotTable
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        table = self.table_class(aligned(table_bytes(CAPACITY)), CAPACITY, epoch=3, seed=17)
        self.core = Directory(
            table, grace_ns=GRACE, has_disk=True, policy=POLICIES[self.policy], decisions=DecisionLog(16)
        )
        self.now = 10**9
        self.offset = self.last_sum = 0
        self.handles = 0
        self.seen: dict[bytes, Seen] = {}
        self.given: set[tuple[int, int]] = set()
        """(region, offset) of extents and handles that the directory has in hand."""
        self.named: list[tuple[int, int]] = []
        self.batches: list[int] = []
        self.leases: list[int] = []

    # ---- helpers

    def apply(self, what: Any) -> Any:
        outcome = self.core.handle(what, self.now)
        for effect in outcome.effects:
            for region, offset, _ in effect.extents:
                assert (region, offset) in self.given, "freed twice, or never given"
                self.given.remove((region, offset))
        return outcome.reply

    def columns(self, n: int) -> tuple[Any, ...]:
        offsets = np.arange(self.offset, self.offset + 64 * n, 64, dtype=np.uint64)
        self.offset += 64 * n
        return np.zeros(n, np.uint16), offsets, np.full(n, 64, np.uint32), self.sums(n)

    def sums(self, n: int) -> Any:
        """As no other block has."""
        self.last_sum += n
        return np.arange(self.last_sum - n, self.last_sum, dtype=np.uint64) + np.uint64(1 << 63)

    def take(self, offsets: Any, taken: Any) -> None:
        self.given |= {(HOST, int(offset)) for offset, one in zip(offsets, taken, strict=True) if one}

    def handle(self) -> int:
        self.handles += 1
        return self.handles

    def children(self, key: bytes, *, cold: bool) -> list[bytes]:
        return [child for child, block in self.seen.items() if block.parent == key and block.is_cold == cold]

    def subtree(self, keys: set[bytes]) -> set[bytes]:
        while more := {key for key, block in self.seen.items() if block.parent in keys} - keys:
            keys = keys | more
        return keys

    def look_again(self) -> set[bytes]:
        """After an event that may hide blocks: which went. Every prefix is closed, and nothing came."""
        found = self.core.reader.exists(b"".join(KEYS))
        here = {key for key, one in zip(KEYS, found, strict=True) if one}
        gone = self.seen.keys() - here
        assert here <= self.seen.keys()
        for key in gone:
            del self.seen[key]
        return gone

    def look_at_places(self) -> None:
        """After an event that may demote."""
        for key in self.seen:
            record = self.core.lookup(key)[0][0]
            block = self.seen[key]
            was, block.is_cold = block.is_cold, int(record["region"]) == DISK_REGION
            if block.is_cold and not was:
                assert block.copy == int(record["offset"]), "a block went to a copy that is not its own"
                assert block.parts == 1 and not block.is_durable

    # ---- rules

    @initialize(lengths=st.tuples(*[st.integers(0, 8)] * 3), nbytes=st.integers(0, 2000))
    def begin(self, lengths: tuple[int, ...], nbytes: int) -> None:
        """Some chains, written, and a part of them on disk only."""
        for chain, length in enumerate(lengths):
            if length:
                self.put_chain(chain, length)
        self.write_all()
        if nbytes:
            self.evict(nbytes, False)

    @rule()
    def write_all(self) -> None:
        self.name_fresh(1 << 20)
        while self.named:
            self.copied(len(self.named), False)

    @rule(which=st.lists(indices, min_size=1, max_size=8))
    def put(self, which: list[int]) -> None:
        columns = self.columns(len(which))
        keys, above = b"".join(KEYS[i] for i in which), b"".join(PARENTS[i] for i in which)
        status = self.apply(events.Put(keys, above, *columns)).status
        self.take(columns[1], status == PutStatus.STORED)
        for i, one, total in zip(which, status.tolist(), columns[3].tolist(), strict=True):
            if one == PutStatus.STORED:
                assert KEYS[i] not in self.seen and (PARENTS[i] == ROOT_KEY or PARENTS[i] in self.seen)
                self.seen[KEYS[i]] = Seen(PARENTS[i], total)
            elif PARENTS[i] in self.seen and KEYS[i] not in self.seen:
                assert one in (PutStatus.BUSY, PutStatus.NO_SPACE), "a block below a cold one is refused"

    @rule(chain=st.integers(0, 2), length=st.integers(1, 8))
    def put_chain(self, chain: int, length: int) -> None:
        self.put(list(range(8 * chain, 8 * chain + length)))

    @rule(which=indices)
    def put_in_parts(self, which: int) -> None:
        for part in (1, 0):
            columns = self.columns(1)
            event = events.PutPart(KEYS[which], PARENTS[which], part, 2, 7, *columns, deadline_ns=self.now + 10)
            status = self.apply(event).status
            self.take(columns[1], (status == PutStatus.STORED) | (status == PutStatus.SEALED))
            if status[0] == PutStatus.STORED:
                self.seen[KEYS[which]] = Seen(PARENTS[which], int(columns[3][0]), parts=2)

    @rule(which=st.lists(indices, min_size=1, max_size=3))
    def stage(self, which: list[int]) -> None:
        columns = self.columns(len(which))
        keys, above = b"".join(KEYS[i] for i in which), b"".join(PARENTS[i] for i in which)
        reply = self.apply(events.StagePut(keys, above, *columns))
        self.take(columns[1], reply.status == PutStatus.STORED)
        if reply.batch:
            self.batches.append(reply.batch)
            said = (which, columns[1], columns[3], reply.status.copy())
            self.staged = {**getattr(self, "staged", {}), reply.batch: said}

    @rule(data=st.data())
    def make_durable(self, data: st.DataObject) -> None:
        """A visible block, perhaps with a copy, and all above it."""
        if self.seen:
            self.stage([KEYS.index(data.draw(st.sampled_from(sorted(self.seen))))])
            while self.batches:
                self.settle()

    @rule()
    def settle(self) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(0)
        which, offsets, sums, before = self.staged[batch]
        reply = self.apply(events.Settle(batch))
        for i, offset, total, was, now in zip(which, offsets, sums, before, reply.status, strict=True):
            if was == PutStatus.STORED and now == PutStatus.STORED:
                self.seen[KEYS[i]] = Seen(PARENTS[i], int(total))
            elif was == PutStatus.STORED:
                self.given.discard((HOST, int(offset)))  # the caller's again
        self.look_again()
        for key in self.seen:
            slot = int(self.core.table.find(key)[0])
            self.seen[key].is_durable = self.core.durable.is_durable(slot)
            assert not (self.seen[key].is_durable and self.seen[key].is_cold)

    @rule(nbytes=st.integers(1, 600))
    def name_fresh(self, nbytes: int) -> None:
        reply = self.apply(tiering.Fresh(nbytes, 64))
        words = self.core.words
        for slot, _ in reply.blocks:
            block = self.seen[words.key(slot)]
            assert not block.is_cold and not block.copy and block.parts == 1 and not block.is_durable
        self.named += reply.blocks

    @rule(count=st.integers(1, 8), again=st.booleans())
    def copied(self, count: int, again: bool) -> None:
        """So many of those named are written; or they could not be, and are named again."""
        some, self.named = self.named[:count], self.named[count:]
        if again and some:
            self.apply(tiering.Fresh(0, 0, tuple(some)))
        elif some:
            handles = [self.handle() for _ in some]
            slots, generations = zip(*some, strict=True)
            event = tiering.Copied(
                np.array(slots, np.int32), np.array(generations, np.uint64), np.array(handles, np.uint32)
            )
            for (slot, generation), handle, one in zip(some, handles, self.apply(event).taken.tolist(), strict=True):
                key = self.core.words.key(slot)
                is_it = self.core.words.generation(slot) == generation and int(self.core.table.find(key)[0]) == slot
                assert one == (is_it and not self.seen[key].is_durable and not self.seen[key].copy)
                if one:
                    self.seen[key].copy = handle
                    self.given.add((DISK_REGION, handle))

    @rule(nbytes=st.integers(1, 900), is_hiding=st.booleans(), most=st.sampled_from([1, 2, 1 << 30]))
    def evict(self, nbytes: int, is_hiding: bool, most: int = 1 << 30) -> None:
        before = {key: block.is_cold for key, block in self.seen.items()}
        could = [key for key, block in self.seen.items() if block.copy and not block.is_cold]
        reply = self.apply(events.Evict(nbytes, is_hiding=is_hiding, most=most))
        gone = self.look_again()
        self.look_at_places()
        demoted = [key for key, was in before.items() if key in self.seen and self.seen[key].is_cold and not was]
        assert reply.blocks == len(gone) and reply.demoted >= 64 * len(demoted)
        assert gone or reply.demoted == 64 * len(demoted)
        assert set(demoted) <= set(could)
        assert is_hiding or not gone, "a block was hidden although only memory was asked for"
        assert len(demoted) <= most, "more left memory than were to"
        if reply.is_cut:
            assert gone or demoted, "there is more to evict, and nothing went"
        elif is_hiding and reply.bytes + reply.demoted < nbytes:
            assert not self.core.ranking.policy.leaves(), "there was more to evict"
        for key in demoted:
            assert not self.children(key, cold=False), "a block left memory before one below it did"

    @rule(data=st.data(), lie=st.booleans(), is_lossy=st.booleans())
    def warm(self, data: st.DataObject, lie: bool, is_lossy: bool) -> None:
        """Values come back, as they were put or, from a tier that stores with loss, as others; only then with their
        sums, which a claim of a wrong copy does not change.
        """
        cold = [key for key, block in self.seen.items() if block.is_cold]
        some = data.draw(st.lists(st.sampled_from(cold or KEYS[:1]), min_size=1, max_size=4, unique=True))
        handles = [self.seen[key].copy if key in self.seen else 77 for key in some]
        if lie:
            handles[0] = 10**6
        columns = self.columns(len(some))
        same = [self.seen[key].sum if key in self.seen else 5 for key in some]
        sums = columns[3] if is_lossy else np.array(same, np.uint64)
        event = tiering.Warm(b"".join(some), np.array(handles, np.uint32), columns[1], sums)
        taken = self.apply(event).taken.tolist()
        self.take(columns[1], taken)
        for at, (key, one) in enumerate(zip(some, taken, strict=True)):
            assert one == (key in cold and not (lie and at == 0))
            if one:
                self.seen[key].is_cold, self.seen[key].sum = False, int(sums[at])

    @rule(data=st.data())
    def copies_lost(self, data: st.DataObject) -> None:
        """A file was used again: its copies are gone, those in use and some that nobody has any more."""
        holders = [key for key, block in self.seen.items() if block.copy]
        some = data.draw(st.lists(st.sampled_from(holders or KEYS[:1]), min_size=1, max_size=4, unique=True))
        handles = [self.seen[key].copy if key in self.seen else 77 for key in some]
        dying = self.subtree({key for key in some if key in self.seen and self.seen[key].is_cold})
        self.apply(tiering.CopiesLost(b"".join(some), np.array(handles, np.uint32)))
        for key in some:
            if key in self.seen:
                self.seen[key].copy = 0
        assert self.look_again() == dying

    @rule(which=st.lists(indices, min_size=1, max_size=6, unique=True))
    def adopt(self, which: list[int]) -> None:
        """What a start finds on disk, parents first."""
        which = sorted(which)
        n, handles = len(which), [self.handle() for _ in which]
        keys, above = b"".join(KEYS[i] for i in which), b"".join(PARENTS[i] for i in which)
        if self.core.durable.is_busy or self.core.parts.writing:
            return  # nothing is under way at a start
        sums = self.sums(n)
        event = tiering.AdoptCold(keys, above, np.array(handles, np.uint32), np.full(n, 64, np.uint32), sums)
        for i, handle, total, one in zip(which, handles, sums, self.apply(event).taken.tolist(), strict=True):
            if one:
                self.seen[KEYS[i]] = Seen(PARENTS[i], int(total), is_cold=True, copy=handle)
                self.given.add((DISK_REGION, handle))

    @rule(data=st.data(), ttl=st.sampled_from([20, 200, 2000]))
    def lease(self, data: st.DataObject, ttl: int) -> None:
        some = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
        reply = self.apply(events.Lease(b"".join(some), ttl, 1))
        if reply.lease:
            self.leases.append(reply.lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            self.apply(events.Release(data.draw(st.sampled_from(self.leases))))

    @rule(which=st.lists(indices, min_size=1, max_size=8, unique=True))
    def delete(self, which: list[int]) -> None:
        reply = self.apply(events.Delete(b"".join(KEYS[i] for i in which)))
        if reply.batch:
            self.batches.append(reply.batch)
            self.staged = {
                **getattr(self, "staged", {}),
                reply.batch: ([], np.zeros(0), np.zeros(0), np.zeros(0, np.uint8)),
            }
            return
        gone = self.look_again()
        for i, one in zip(which, reply.status.tolist(), strict=True):
            assert (one == 0) == (KEYS[i] in gone)

    @rule(data=st.data())
    def delete_from_the_tail(self, data: st.DataObject) -> None:
        """A visible block with all below it."""
        if self.seen:
            some = self.subtree({data.draw(st.sampled_from(sorted(self.seen)))})
            self.delete(sorted(KEYS.index(key) for key in some))

    @rule(count=st.integers(1, 6))
    def trim(self, count: int) -> None:
        """Room in the table: cold blocks that nothing holds go, from their tails, and never one too few."""
        cold = {key for key, block in self.seen.items() if block.is_cold}
        reply = self.apply(tiering.Trim(count))
        gone = self.look_again()
        assert gone <= cold and len(gone) == reply.blocks <= count
        if len(gone) < count:
            tails = [key for key in cold - gone if not any(block.parent == key for block in self.seen.values())]
            assert all(self.core.holds[int(self.core.table.find(key)[0])] & 0xFFFF for key in tails)

    @rule(which=st.lists(indices, min_size=1, max_size=2))
    def drop(self, which: list[int]) -> None:
        dying = self.subtree({KEYS[i] for i in which if KEYS[i] in self.seen})
        reply = self.apply(events.Drop(b"".join(KEYS[i] for i in which)))
        assert self.look_again() == dying and reply.blocks == len(dying)

    @rule(which=indices)
    def withdraw(self, which: int) -> None:
        """All chains of one root go, as when another node is to lead their shard."""
        if self.batches:
            return
        root = KEYS[0 if which < 12 else 8]
        dying = self.subtree({root} & self.seen.keys())
        event = events.Withdraw(lambda roots: np.array([row.tobytes() == root for row in roots], np.bool_))
        reply = self.apply(event)
        self.given -= {(HOST, int(offset)) for offset in reply.rows["offset"]}  # durable ones are the caller's
        assert self.look_again() == dying

    @rule(step=st.sampled_from([1, 49, 51, 1000, 2 * 10**7, 3 * 10**9]))
    def tick(self, step: int) -> None:
        self.now += step
        self.apply(events.Tick())

    @rule()
    def time_passes_unseen(self) -> None:
        """Into the next 10 ms, without a Tick: what a learner is to be told waits."""
        self.now += 10**7

    # ---- what must hold after each

    @invariant()
    def everything_agrees(self) -> None:
        self.core.check()
        self.look_again()
        here = {(r["region"], r["offset"]) for r in self.core.table.records if r["state"] == 1}
        in_hand = {(int(region), int(offset)) for region, offset in here}
        in_hand |= {(region, offset) for region, offset, _ in self.core.leaving.extents()}
        in_hand |= {(DISK_REGION, copy) for copy in self.core.cold.copy if copy}
        in_hand |= {extent[:2] for block in self.core.durable.staged.values() for extent in [block.extent]}
        in_hand |= {extent[:2] for block in self.core.parts.writing for extent in block.extents()}
        assert in_hand == self.given, "an extent or a handle was lost"
        for key, block in self.seen.items():
            record, found = self.core.lookup(key)
            assert found[0] and (int(record["region"][0]) == DISK_REGION) == block.is_cold
            assert (int(record["sum"][0]), int(record["length"][0])) == (block.sum, 64), "not what a reader gets"
        assert self.core.cold.blocks == sum(block.is_cold for block in self.seen.values())


class S3FifoMachine(ColdMachine):
    """The same with a policy that is told everything."""

    policy = "s3fifo"


class TucMachine(ColdMachine):
    """The same with the policy that learns."""

    policy = "tuc"


class WatchedMachine(ColdMachine):
    """The same with a policy that asserts what it is told, and in which order."""

    policy = "watched"

    @invariant()
    def it_knows_what_is_visible(self) -> None:
        policy, ranking = self.core.ranking.policy, self.core.ranking
        assert isinstance(policy, WatchedPolicy)
        new = {slot for span in ranking._spans for slot in span.came}
        records = self.core.table.records
        blocks = {
            slot: int.from_bytes(records["key"][slot].tobytes()[:8], "little")
            for slot in np.flatnonzero(records["state"] == 1).tolist()
            if not self.core.words.is_derived(slot)
        }
        assert policy.known == {slot: name for slot, name in blocks.items() if slot not in new}
        assert policy.cold == {slot for slot in policy.known if self.core.cold.is_cold(slot)}


class TwinMachine(ColdMachine):
    """The same over the twin of the slot table."""

    table_class = TwinTable


_settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestColdAgainstModel = ColdMachine.TestCase
TestColdAgainstModel.settings = _settings
TestColdOverTwinAgainstModel = TwinMachine.TestCase
for each in (S3FifoMachine, TucMachine, WatchedMachine):
    each.TestCase.settings = settings(_settings, max_examples=60)
TestColdWithS3FifoAgainstModel = S3FifoMachine.TestCase
TestColdWithTucAgainstModel = TucMachine.TestCase
TestColdWithWatchedPolicyAgainstModel = WatchedMachine.TestCase
TestColdOverTwinAgainstModel.settings = settings(_settings, max_examples=20)
