"""One table that serves two shards with a log each: put, upgraded, deleted, leased, damaged, withdrawn and taken back
in any order, against a plain model; every extent is in exactly one hand after each step.

The shell here is a node in small: an allocator that reuses what was freed first, a line of staged batches a log, and
for each shard that it does not lead the rows it keeps. Nothing is freed that a lease covers, nor within the grace.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.directory.arena import aligned
from tests.directory.two_shards import (
    KEYS,
    NAMES,
    NUMBER,
    OF_SHARD,
    SHARDS,
    Lease,
    Standby,
    Waiting,
    above,
    parent_of,
    roots_of,
    shard_of,
)
from ucxkv.directory import ROOT_KEY, DeleteStatus, Directory, PutStatus, SlotTable, events, table_bytes
from ucxkv.directory.invariants import held_extents
from ucxkv.directory.slots_twin import TwinTable

GRACE = 50
SIZE = 64
CAPACITY = 26
CHOSEN = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6, unique=True).map(sorted)
SHARD = st.integers(0, SHARDS - 1)


class ShardsMachine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()
    table_class: type[Any] = SlotTable

    def __init__(self) -> None:
        super().__init__()
        table = self.table_class(aligned(table_bytes(CAPACITY)), CAPACITY, epoch=1, seed=3)
        self.core = Directory(table, grace_ns=GRACE)
        self.now = 10**9
        self.in_use: set[int] = set()
        self.unused: list[int] = []
        self.top = 0
        self.visible: dict[int, tuple[int, ...]] = {}  # number -> offsets
        self.durable: set[int] = set()
        self.doomed: set[int] = set()
        self.waiting: list[list[Waiting]] = [[] for _ in range(SHARDS)]
        self.standby: dict[int, Standby] = {}
        self.later: list[tuple[int, int]] = []  # (when the shell may free it, offset)
        self.leases: dict[int, Lease] = {}
        self.hidden_at: dict[int, int] = {}

    # ---- the shell

    def handle(self, event: Any) -> Any:
        before = {offset for offsets in self.visible.values() for offset in offsets}
        outcome = self.core.handle(event, self.now)
        self.visible = self._look()
        shown = {offset for offsets in self.visible.values() for offset in offsets}
        self.hidden_at |= dict.fromkeys(before - shown, self.now)
        for effect in outcome.effects:
            for _, offset, length in effect.extents:
                assert length == SIZE
                self._free(offset)
        self.core.check()
        return outcome.reply

    def _look(self) -> dict[int, tuple[int, ...]]:
        core, out = self.core, {}
        for number, slot in enumerate(core.table.find(b"".join(NAMES)).tolist()):
            if slot >= 0:
                out[number] = tuple(offset for _, offset, _ in core.whole(slot)[0])
        return out

    def _free(self, offset: int) -> None:
        """An extent is free: nobody reads it, and it is in nobody's hand."""
        assert not any(offset in lease.offsets and lease.end > self.now for lease in self.leases.values())
        assert self.hidden_at.pop(offset, -GRACE) + GRACE <= self.now, "free within the grace"
        self.in_use.remove(offset)
        self.unused.append(offset)

    def _unused(self, offsets: list[int]) -> None:
        """Extents that nothing was made of, or that were never shown."""
        for offset in offsets:
            self._free(offset)

    def _columns(self, n: int) -> tuple[list[int], tuple[Any, ...]]:
        offsets = []
        for _ in range(n):
            if self.unused:
                offsets.append(self.unused.pop(0))
            else:
                offsets.append(self.top)
                self.top += SIZE
        self.in_use |= set(offsets)
        sums = np.array(offsets, np.uint64) + np.uint64(7)
        return offsets, (np.zeros(n, np.uint16), np.array(offsets, np.uint64), np.full(n, SIZE, np.uint32), sums)

    def _ours(self, numbers: list[int], shard: int | None = None) -> list[int]:
        """Those of shards that are led here."""
        return [n for n in numbers if shard_of(n) not in self.standby and shard in (None, shard_of(n))]

    def _staged(self, shard: int) -> set[int]:
        return {number for one in self.waiting[shard] for number in one.stored}

    def _sync_doomed(self) -> None:
        """What is staged below something that is neither there nor to come will not come."""
        staged = self._staged(0) | self._staged(1)
        for number in sorted(staged):
            up = above(number)
            if up >= 0 and up not in self.visible and (up not in staged or up in self.doomed):
                self.doomed.add(number)
        self.doomed &= staged

    # ---- puts and deletes

    @initialize(lengths=st.tuples(*[st.integers(1, KEYS // SHARDS)] * SHARDS), cached=st.integers(0, 4))
    def begin(self, lengths: tuple[int, ...], cached: int) -> None:
        for shard, length in enumerate(lengths):
            self.stage(shard, OF_SHARD[shard][:length])
            self.settle(shard)
            self.put_cache(OF_SHARD[shard][length : length + cached])

    @rule(shard=SHARD, length=st.integers(1, KEYS // SHARDS), is_settled=st.booleans())
    def stage_a_chain(self, shard: int, length: int, is_settled: bool) -> None:
        """What is not durable of the first blocks of a shard."""
        numbers = [n for n in OF_SHARD[shard][:length] if n not in self.durable]
        self.stage(shard, numbers)
        while is_settled and self.waiting[shard]:
            self.settle(shard)

    @rule(numbers=CHOSEN)
    def put_cache(self, numbers: list[int]) -> None:
        numbers = self._ours(numbers)
        if not numbers:
            return
        offsets, columns = self._columns(len(numbers))
        keys, parents = b"".join(NAMES[n] for n in numbers), b"".join(map(parent_of, numbers))
        waits = self.core.durable.waits(keys, parents, is_durable=False)
        assert not waits or waits in {one.batch for line in self.waiting for one in line}, "waits for what is over"
        status = self.handle(events.Put(keys, parents, *columns)).status.tolist()
        self._unused([offset for offset, one in zip(offsets, status, strict=True) if one])

    @rule(number=st.integers(0, KEYS - 1), part=st.integers(0, 1), last=st.sampled_from([60, 10**6]))
    def put_part(self, number: int, part: int, last: int) -> None:
        if not self._ours([number]):
            return
        offsets, columns = self._columns(1)
        event = events.PutPart(NAMES[number], parent_of(number), part, 2, 5, *columns, deadline_ns=self.now + last)
        (status,) = self.handle(event).status.tolist()
        if status not in (PutStatus.STORED, PutStatus.SEALED):
            self._unused(offsets)

    @rule(shard=SHARD, numbers=CHOSEN)
    def stage(self, shard: int, numbers: list[int]) -> None:
        numbers = self._ours(numbers, shard)
        if not numbers:
            return
        offsets, columns = self._columns(len(numbers))
        keys, parents = b"".join(NAMES[n] for n in numbers), b"".join(map(parent_of, numbers))
        reply = self.handle(events.StagePut(keys, parents, *columns, log=shard))
        status = reply.status.tolist()
        self._unused([offset for offset, one in zip(offsets, status, strict=True) if one])
        stored = {n: offset for n, offset, one in zip(numbers, offsets, status, strict=True) if not one}
        rows = [NUMBER[row["key"].tobytes()] for row in reply.rows]
        assert (not reply.batch) <= (not rows) and all(shard_of(n) == shard for n in rows)
        if reply.batch:
            self.waiting[shard].append(Waiting(reply.batch, rows, stored, status, numbers))
            self.seen["both logs wait"] += all(self.waiting)

    @precondition(lambda self: any(self.waiting))
    @rule(data=st.data())
    def stage_under_a_wrong_log(self, data: st.DataObject) -> None:
        staged = sorted(self._staged(0) | self._staged(1))
        if not staged:
            return
        number = data.draw(st.sampled_from(staged))
        shard = shard_of(number)
        self.seen["wrong log"] += 1
        offsets, columns = self._columns(1)
        with pytest.raises(ValueError, match="hangs on batch"):
            self.core.handle(events.StagePut(NAMES[number], parent_of(number), *columns, log=1 - shard), self.now)
        self._unused(offsets)

    @rule(shard=SHARD, numbers=CHOSEN)
    def delete(self, shard: int, numbers: list[int]) -> None:
        numbers = self._ours(numbers, shard)
        keys = b"".join(NAMES[n] for n in numbers)
        waits = self.core.durable.waits_delete(keys) if numbers else -1
        if waits:
            assert waits < 0 or waits in {one.batch for one in self.waiting[shard]}, "waits for another log"
            return
        durable = set(self.durable)
        reply = self.handle(events.Delete(keys, log=shard))
        gone = [n for n, one in zip(numbers, reply.status.tolist(), strict=True) if one == DeleteStatus.DELETED]
        assert bool(reply.batch) == bool(durable & set(gone))
        if reply.batch:
            assert set(gone) <= self.visible.keys()
            self.waiting[shard].append(Waiting(reply.batch, going=gone))

    @precondition(lambda self: any(self.waiting))
    @rule(shard=SHARD)
    def settle(self, shard: int) -> None:
        if not self.waiting[shard]:
            return
        one, before = self.waiting[shard].pop(0), set(self.visible)
        others = [line[0].batch for line in self.waiting if line]
        self.seen["settled before an older batch of the other log"] += any(other < one.batch for other in others)
        reply = self.handle(events.Settle(one.batch))
        if one.going:
            assert before - self.visible.keys() <= set(one.going)
            self.durable &= self.visible.keys()
            return
        final = dict(zip(one.numbers, reply.status.tolist(), strict=True))
        self._unused([offset for n, offset in one.stored.items() if final[n]])
        for n in one.rows:
            if n in self.visible and (n not in one.stored or not final[n]):
                self.durable.add(n)
        self._sync_doomed()

    @precondition(lambda self: any(len(line) > 1 for line in self.waiting))
    @rule(shard=SHARD)
    def settle_too_early(self, shard: int) -> None:
        line = self.waiting[shard]
        if len(line) > 1:
            for event in (events.Settle(line[-1].batch), events.Abandon(line[0].batch)):
                with pytest.raises(ValueError, match="of its log"):
                    self.core.handle(event, self.now)

    @precondition(lambda self: any(self.waiting))
    @rule(shard=SHARD, all_of_them=st.booleans())
    def abandon(self, shard: int, all_of_them: bool) -> None:
        line = self.waiting[shard]
        while line:
            one = line.pop()
            self.handle(events.Abandon(one.batch))
            self._unused(list(one.stored.values()))
            self._sync_doomed()
            if not all_of_them:
                return

    # ---- what readers and time do

    @rule(data=st.data(), ttl=st.sampled_from([20, 120, 500]))
    def lease(self, data: st.DataObject, ttl: int) -> None:
        here = sorted(self.visible) or [0]
        numbers = data.draw(st.lists(st.sampled_from(here), min_size=1, max_size=4, unique=True))
        reply = self.handle(events.Lease(b"".join(NAMES[n] for n in numbers), ttl, 1))
        held = [n for n in numbers if n in self.visible]
        assert bool(reply.lease) == bool(held)
        if held:
            offsets = {offset for n in held for offset in self.visible[n]}
            self.leases[reply.lease] = Lease(reply.end_ns, held, offsets)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ttl=st.sampled_from([0, 100, 400]))
    def renew_or_release(self, data: st.DataObject, ttl: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[number]
        if ttl:
            assert self.handle(events.Renew(number, ttl)).ok == (lease.end > self.now and not lease.is_fixed)
            if lease.end > self.now and not lease.is_fixed:
                lease.end = max(lease.end, self.now + ttl)
        else:
            del self.leases[number]
            self.handle(events.Release(number))

    @rule(step=st.sampled_from([1, 30, 50, 51, 200]))
    def tick(self, step: int) -> None:
        self.now += step
        self.handle(events.Tick())
        self.leases = {number: lease for number, lease in self.leases.items() if lease.end > self.now}
        due = [offset for at, offset in self.later if at <= self.now]
        self.later = [(at, offset) for at, offset in self.later if at > self.now]
        self._unused(due)

    @rule(nbytes=st.integers(1, 6 * SIZE))
    def evict(self, nbytes: int) -> None:
        self.handle(events.Evict(nbytes))
        assert self.durable <= self.visible.keys()

    @precondition(lambda self: len(self.visible) > 12)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        number, before = data.draw(st.sampled_from(sorted(self.visible))), set(self.visible)
        reply = self.handle(events.Drop(NAMES[number]))
        gone = before - self.visible.keys()
        assert number in gone and {shard_of(n) for n in gone} == {shard_of(number)} and reply.blocks == len(gone)
        self.durable -= gone
        for one in self.waiting[shard_of(number)]:
            one.rows = [n for n in one.rows if n not in gone or n in one.stored]
        self._sync_doomed()

    # ---- leaders change

    @precondition(lambda self: len(self.visible) > 6 and len(self.standby) < SHARDS)
    @rule(
        data=st.data(), shard=SHARD, ttl=st.sampled_from([0, 60, 300]), before=st.sampled_from(["", "stage", "lease"])
    )
    def withdraw(self, data: st.DataObject, shard: int, ttl: int, before: str) -> None:
        """Another node leads it, perhaps just after something was staged or leased."""
        if shard in self.standby:
            shard = 1 - shard
        if before == "stage":
            self.stage_a_chain(shard, KEYS // SHARDS, False)
        elif before == "lease" and ttl:
            reply = self.handle(events.Lease(NAMES[shard], ttl, 2))
            if reply.lease:
                self.leases[reply.lease] = Lease(reply.end_ns, [shard], set(self.visible[shard]))
        cached = sorted(self.visible.keys() - self.durable) or [0]
        keep = data.draw(st.lists(st.sampled_from(cached), max_size=4))
        event = events.Withdraw(roots_of(shard), frozenset(NAMES[n] for n in keep))
        pending = self.waiting[shard]
        if any(set(one.going) & self.visible.keys() or one.stored.keys() - self.doomed for one in pending):
            with pytest.raises(ValueError, match="staged"):
                self.core.handle(event, self.now)
            self.seen["withdrawn too early"] += 1
        self.abandon(shard, True)
        mine = {n: offsets for n, offsets in self.visible.items() if shard_of(n) == shard}
        others = {n: offsets for n, offsets in self.visible.items() if n not in mine}
        drafts = {block.key for block in self.core.parts.writing if shard_of(NUMBER[block.key]) != shard}
        durable = {n for n in mine if n in self.durable}
        held = {offset for n in mine if n in durable or n in keep for offset in mine[n]}
        reply = self.handle(event)
        assert self.visible == others and (reply.blocks, reply.bytes) == (
            len(mine),
            SIZE * sum(map(len, mine.values())),
        )
        assert {block.key for block in self.core.parts.writing} == drafts
        assert {NUMBER[row["key"].tobytes()]: (int(row["offset"]),) for row in reply.rows} == {
            n: mine[n] for n in durable
        }
        self._are_parents_first(reply.rows)
        covering = [lease for lease in self.leases.values() if lease.offsets & held and lease.end > self.now]
        assert reply.busy_until_ns >= max([self.now, *(lease.end for lease in covering)])
        if not any(offsets & held for offsets in (lease.offsets for lease in self.leases.values())):
            self.seen["withdrawn without a lease"] += bool(held)
        for lease in covering:
            lease.is_fixed |= any(n in durable or n in keep for n in lease.numbers if n in mine)
            self.seen["withdrawn under a lease"] += 1
        self.durable -= durable
        self.standby[shard] = Standby(reply.rows, reply.busy_until_ns)
        kept = [offset for n in mine if n in keep and n not in durable for offset in mine[n]]
        self.seen["kept a cached block"] += bool(kept)
        self._free_later(kept, reply.busy_until_ns)

    @precondition(lambda self: self.standby)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """The shard is led here again, with what was kept; some of it may have rotted."""
        shard = data.draw(st.sampled_from(sorted(self.standby)))
        mine = self.standby.pop(shard)
        n = len(mine.rows)
        is_bad = data.draw(st.lists(st.sampled_from([0, 0, 0, 0, 0, int(PutStatus.REFUSED)]), min_size=n, max_size=n))
        before, generation = dict(self.visible), self.core.generation
        out = self.handle(events.Restore(mine.rows, np.array(is_bad, np.uint8))).status.tolist()
        back: dict[int, tuple[int, ...]] = {}
        lost = []
        for row, bad, status in zip(mine.rows, is_bad, out, strict=True):
            number, offset = NUMBER[row["key"].tobytes()], int(row["offset"])
            has_parent = number < SHARDS or above(number) in back
            has_room = status != PutStatus.NO_SPACE
            assert status == (bad or (PutStatus.ORDER if not has_parent else status if not has_room else 0))
            if status:
                lost.append(offset)
            else:
                back[number] = (offset,)
        assert (
            self.visible == before | back
            and self.core.generation == max(generation, int(mine.rows["generation"].max(initial=0))) + n
        )
        self.durable |= back.keys()
        self.seen["restored beside another shard"] += bool(back) and bool(before)
        self._free_later(lost, mine.busy_until)

    @precondition(lambda self: self.standby)
    @rule()
    def forget(self) -> None:
        """What was kept of a shard is out of date: it goes, and the shard is led again from nothing."""
        _, mine = self.standby.popitem()
        self._free_later(mine.rows["offset"].tolist(), mine.busy_until)

    def _free_later(self, offsets: list[int], busy_until: int) -> None:
        self.later += [(max(busy_until, self.now) + GRACE, offset) for offset in offsets]

    @staticmethod
    def _are_parents_first(rows: Any) -> None:
        before = {ROOT_KEY}
        for row in rows:
            assert row["parent"].tobytes() in before and row["parent"].tobytes() == parent_of(
                NUMBER[row["key"].tobytes()]
            )
            before.add(row["key"].tobytes())

    # ---- always

    @invariant()
    def every_extent_is_in_one_hand(self) -> None:
        hands = [offset for _, offset, _ in held_extents(self.core)]
        hands += [offset for one in self.standby.values() for offset in one.rows["offset"].tolist()]
        hands += [offset for _, offset in self.later]
        assert sorted(hands) == sorted(self.in_use)

    @invariant()
    def each_shards_rows_are_its_durable_blocks(self) -> None:
        stats = self.core.stats()
        assert stats.durable_blocks == len(self.durable) and stats.blocks == len(self.visible)
        for shard in range(SHARDS):
            rows = self.core.durable_rows(roots_of(shard))
            assert {NUMBER[row["key"].tobytes()] for row in rows} == {n for n in self.durable if shard_of(n) == shard}
            self._are_parents_first(rows)
        assert len(self.core.durable_rows()) == len(self.durable)

    @invariant()
    def roots_are_found(self) -> None:
        drafts = {NUMBER[block.key] for block in self.core.parts.writing}
        known = self.visible.keys() | self._staged(0) - self.doomed | self._staged(1) - self.doomed | drafts
        for number, key in enumerate(NAMES):
            assert self.core.root_of(key) == (NAMES[shard_of(number)] if number in known else None)


class TwinMachine(ShardsMachine):
    """The same over the twin of the slot table."""

    table_class = TwinTable


_settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
ShardsMachine.TestCase.settings = _settings
TestShards = ShardsMachine.TestCase
TwinMachine.TestCase.settings = settings(_settings, max_examples=20)
TestShardsOverTwin = TwinMachine.TestCase


def test_the_machine_reaches_what_it_is_for() -> None:
    """Goal: the runs above mean something. Method: their own counts of the rare things."""
    seen = ShardsMachine.seen
    if not seen:
        TestShards().runTest()  # this test runs alone
    for what in (
        "both logs wait",
        "wrong log",
        "settled before an older batch of the other log",
        "withdrawn too early",
        "withdrawn under a lease",
        "kept a cached block",
        "restored beside another shard",
    ):
        assert seen[what], (what, seen)
