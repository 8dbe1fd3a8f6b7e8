"""Class durable against a plain model, with a crash at any point: what a restart finds is what the log's prefix says,
and every answer that was given is in it.

The shell here is a node in small: a real slab allocator over memory that is a dict from offset to content, a log that
is a list of records, and batches that settle in order, fail together, or are cut off by a crash.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.directory.arena import aligned, key_of
from ucxkv.directory import ROOT_KEY, DeleteStatus, Directory, PutStatus, SlotTable, events, table_bytes
from ucxkv.directory.log import Replay, commits, epoch_record, leaves
from ucxkv.tiers.slabs import SlabAllocator

KEYS = 12
SEGMENT = 1 << 20
VALUE = 48 << 10
SECOND = 10**9
CHOSEN = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5, unique=True).map(sorted)


def name(number: int) -> bytes:
    return key_of(number)


def parent_of(number: int) -> bytes:
    """A fixed tree: two chains that fork, as keys of token sequences form."""
    return ROOT_KEY if number < 2 else name((number - 2) // 2)


NUMBER = {name(i): i for i in range(KEYS)}


@dataclass
class Waiting:
    """A batch that is staged. changes: key -> content or None, as its records say; log: how long the log is with it."""

    batch: int
    keys: list[int]
    offsets: list[int]
    sums: list[int]
    status: list[int]
    changes: list[tuple[int, int | None]]
    log: int
    is_delete: bool = False


@dataclass
class Life:
    """One incarnation."""

    core: Directory
    slabs: SlabAllocator
    waiting: list[Waiting] = field(default_factory=list)
    has_failed: bool = False
    dropped: set[tuple[int, int]] = field(default_factory=set)


class DurableMachine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, int] = {}
        self.log: list[bytes] = []
        self.changes: list[list[tuple[int, int | None]]] = []  # what each record means
        self.settled = 0  # records whose batches were answered
        self.shown: dict[int, int] = {}
        self.now = SECOND
        self.content = 0
        self.lived = 0  # events since the last crash, so that there is something to lose
        self.life = self._born(1)

    @initialize()
    def begin(self) -> None:
        self._append([(epoch_record(1), [])])

    def _born(self, epoch: int) -> Life:
        table = SlotTable(aligned(table_bytes(64)), 64, epoch=epoch, seed=3)
        return Life(Directory(table, grace_ns=0), SlabAllocator(SEGMENT))

    def _handle(self, event: Any) -> Any:
        self.lived += 1
        outcome = self.life.core.handle(event, self.now)
        for effect in outcome.effects:
            self.life.slabs.free([offset for _, offset, _ in effect.extents])
        self.life.core.check()
        return outcome.reply

    def _append(self, records: list[tuple[bytes, list[tuple[int, int | None]]]]) -> None:
        for record, changes in records:
            self.log.append(record)
            self.changes.append(changes)

    def _columns(self, numbers: list[int]) -> tuple[list[int], list[int], tuple[Any, ...]] | None:
        offsets = self.life.slabs.allocate(VALUE, len(numbers))
        if len(offsets) < len(numbers):
            self.life.slabs.free(offsets)
            self._handle(events.Evict(VALUE * len(numbers)))
            return None
        sums = []
        for offset in offsets:
            self.content += 1
            self.memory[offset] = self.content
            sums.append(self.content)
        n = len(numbers)
        keys, parents = b"".join(map(name, numbers)), b"".join(map(parent_of, numbers))
        columns = (np.zeros(n, np.uint16), np.array(offsets, np.uint64), np.full(n, VALUE, np.uint32))
        return offsets, sums, (keys, parents, *columns, np.array(sums, np.uint64))

    # ---- what clients do

    @rule(numbers=CHOSEN)
    def put_cache(self, numbers: list[int]) -> None:
        made = self._columns(numbers)
        if made is None:
            return
        offsets, _, columns = made
        core = self.life.core
        waits = core.durable.waits(columns[0], columns[1], is_durable=False)
        status = self._handle(events.Put(*columns)).status.tolist()
        staged = {key for one in self.life.waiting if not one.is_delete for key in one.keys}
        if not waits:
            assert PutStatus.BUSY not in status, "a put had to wait, and nobody told it"
        if PutStatus.BUSY in status:
            self.seen["cache put beside a staged one"] += 1
            assert staged or any(one.is_delete for one in self.life.waiting)
        self.life.slabs.free([offset for offset, one in zip(offsets, status, strict=True) if one])

    @precondition(lambda self: not self.life.has_failed)
    @rule(numbers=CHOSEN)
    def put_durable_and_wait(self, numbers: list[int]) -> None:
        self.put_durable(numbers, False)
        while self.life.waiting:
            self.settle()

    @precondition(lambda self: not self.life.has_failed)
    @rule(numbers=CHOSEN, is_lost=st.sampled_from([False, False, False, True]))
    def put_durable(self, numbers: list[int], is_lost: bool) -> None:
        made = self._columns(numbers)
        if made is None:
            return
        offsets, sums, columns = made
        visible = set(self._visible())
        reply = self._handle(events.StagePut(*columns))
        status = reply.status.tolist()
        self.life.slabs.free([offset for offset, one in zip(offsets, status, strict=True) if one])
        for number, one in zip(numbers, status, strict=True):
            if one == PutStatus.ALREADY and not reply.batch:
                assert number in self.shown, "ALREADY at once, and not durable"
            if one == PutStatus.ORDER:
                assert parent_of(number) not in map(name, visible)
        if not reply.batch:
            assert not len(reply.rows)
            return
        rows = reply.rows
        if is_lost and len(rows):  # the log takes nothing of it
            self._handle(events.Abandon(reply.batch))
            stored = [offset for offset, one in zip(offsets, status, strict=True) if not one]
            self.life.slabs.free(stored)
            self.seen["abandoned"] += 1
            return
        places = self.life.slabs.places(rows["offset"])
        for column in ("slot_lines", "base_unit", "units"):
            rows[column] = places[column]
        meaning: list[tuple[int, int | None]] = [(NUMBER[row["key"].tobytes()], int(row["sum"])) for row in rows]
        self.seen["upgraded"] += len(rows) > status.count(0)
        if len(rows):
            (record,) = commits(rows)
            self._append([(record, meaning)])
        self.life.waiting.append(Waiting(reply.batch, numbers, offsets, sums, status, meaning, len(self.log)))

    @rule(numbers=CHOSEN)
    def delete(self, numbers: list[int]) -> None:
        keys = b"".join(map(name, numbers))
        if self.life.core.durable.waits_delete(keys):
            self.seen["delete that waits"] += 1
            return
        if self.life.has_failed and any(number in self.shown for number in numbers):
            return  # the shell refuses it
        before = set(self._visible())
        reply = self._handle(events.Delete(keys))
        gone = [n for n, one in zip(numbers, reply.status.tolist(), strict=True) if one == DeleteStatus.DELETED]
        if not reply.batch:
            assert set(self._visible()) == before - set(gone) and not set(gone) & self.shown.keys()
            return
        assert set(self._visible()) == before, "hidden before the log holds it"
        left = [NUMBER[bytes(reply.left[i : i + 16])] for i in range(0, len(reply.left), 16)]
        (record,) = leaves(bytes(reply.left))
        meaning: list[tuple[int, int | None]] = [(number, None) for number in left]
        self._append([(record, meaning)])
        self.seen["durable delete"] += 1
        self.life.waiting.append(Waiting(reply.batch, gone, [], [], [], meaning, len(self.log), is_delete=True))

    @precondition(lambda self: self.life.waiting)
    @rule()
    def settle(self) -> None:
        one = self.life.waiting.pop(0)
        self.settled = max(self.settled, one.log)
        reply = self._handle(events.Settle(one.batch))
        left = [NUMBER[reply.left[i : i + 16]] for i in range(0, len(reply.left), 16)]
        for number, content in one.changes:
            if content is None:
                self.shown.pop(number, None)
            elif number not in left and (number, content) not in self.life.dropped:
                self.shown[number] = content
        if not one.is_delete:
            final = reply.status.tolist()
            for offset, was, now in zip(one.offsets, one.status, final, strict=True):
                assert was == now or (was, now) == (PutStatus.STORED, PutStatus.ORDER)
                if was != now:
                    self.life.slabs.free([offset])
        if left:
            self.seen["lost its parent while staged"] += 1
            (record,) = leaves(reply.left)
            self._append([(record, [(number, None) for number in left])])

    @rule(numbers=CHOSEN)
    def damage(self, numbers: list[int]) -> None:
        before = self._visible()
        hit = [number for number in numbers[:1] if number in before]
        if not hit:
            return
        slot = int(self.life.core.table.find(name(hit[0]))[0])
        self.memory[self.life.core.words.extent(slot)[1]] = -1
        reply = self._handle(events.Drop(name(hit[0])))
        raw = bytes(reply.left)
        gone = set(before) - set(self._visible())
        left = [NUMBER[raw[i : i + 16]] for i in range(0, len(raw), 16)]
        assert set(left) >= gone & self.shown.keys() and set(left) <= gone
        for number in gone:
            self.life.dropped.add((number, before[number]))
            self.shown.pop(number, None)
        if left and not self.life.has_failed:
            self.seen["durable block damaged"] += 1
            (record,) = leaves(raw)
            self._append([(record, [(number, None) for number in left])])

    @rule()
    def evict(self) -> None:
        before = set(self._visible())
        self._handle(events.Evict(4 * VALUE))
        assert not (before - set(self._visible())) & self.shown.keys(), "a durable block was evicted"

    @precondition(lambda self: not self.life.has_failed and self.lived > 8 and self.life.waiting)
    @rule()
    def journal_fails(self) -> None:
        """The log says that it failed: what was appended may be on the disk or not; everything staged is forgotten."""
        for one in reversed(self.life.waiting):
            self._handle(events.Abandon(one.batch))
            self.life.slabs.free([offset for offset, was in zip(one.offsets, one.status, strict=True) if not was])
        self.life.waiting.clear()
        self.life.has_failed = True
        self.seen["journal failed"] += 1

    @precondition(lambda self: self.lived > 12)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.lived = 0
        cut = data.draw(st.integers(self.settled, len(self.log)))
        self.seen["crash"] += 1
        self.seen["crash that cuts"] += cut < len(self.log)
        del self.log[cut:], self.changes[cut:]
        expected: dict[int, int] = {}
        order: list[int] = []
        for changes in self.changes:
            for number, content in changes:
                if number in order:
                    order.remove(number)
                if content is None:
                    expected.pop(number, None)
                else:
                    expected[number] = content
                    order.append(number)
        replay = Replay()
        for record in self.log:
            replay.feed(record)
        rows = replay.rows()
        assert [NUMBER[row["key"].tobytes()] for row in rows] == order
        is_whole = np.array([self.memory.get(int(row["offset"])) == int(row["sum"]) for row in rows], np.bool_)
        status = np.where(is_whole, 0, PutStatus.REFUSED).astype(np.uint8)
        good: dict[int, int] = {}
        for row, whole in zip(rows, is_whole.tolist(), strict=True):
            number = NUMBER[row["key"].tobytes()]
            if whole and (parent_of(number) == ROOT_KEY or NUMBER[parent_of(number)] in good):
                good[number] = int(row["sum"])
        before = dict(self.shown)
        self.life = self._born(replay.epoch + 1)
        answer = self._handle(events.Restore(rows, status)).status
        kept = rows[answer == 0]
        self.life.slabs.restore(_places(kept))
        assert self._visible() == good, "what a restart finds is not what its log says"
        for number, content in before.items():
            is_leaving = number not in expected
            assert is_leaving or good.get(number) == content, "an acknowledged block is gone, or has other bytes"
            if is_leaving:
                assert cut > self.settled, "an acknowledged block is gone"
        self.shown = good
        lost = [number for number in order if number not in good]
        if lost:  # as a node does it: what did not come back is logged as gone
            (record,) = leaves(b"".join(map(name, reversed(lost))))
            self._append([(record, [(number, None) for number in lost])])
        self._append([(epoch_record(replay.epoch + 1), [])])
        self.settled = len(self.log)

    @rule()
    def snapshot(self) -> None:
        """The rows of a snapshot say what is shown, parents first."""
        rows = self.life.core.durable_rows()
        assert {NUMBER[row["key"].tobytes()]: int(row["sum"]) for row in rows} == self.shown
        above = set[bytes]({ROOT_KEY})
        for row in rows:
            assert row["parent"].tobytes() in above and row["parent"].tobytes() == parent_of(
                NUMBER[row["key"].tobytes()]
            )
            above.add(row["key"].tobytes())

    # ---- always

    def _visible(self) -> dict[int, int]:
        core = self.life.core
        slots = core.table.find(b"".join(map(name, range(KEYS)))).tolist()
        return {number: core.words.tail(slot)[2] for number, slot in enumerate(slots) if slot >= 0}

    @invariant()
    def what_is_durable_is_what_the_log_says(self) -> None:
        core = self.life.core
        slots = core.table.find(b"".join(map(name, range(KEYS)))).tolist()
        durable = {n: core.words.tail(s)[2] for n, s in enumerate(slots) if s >= 0 and core.durable.is_durable(s)}
        assert durable == self.shown

    @invariant()
    def every_place_is_in_one_hand(self) -> None:
        self.life.slabs.check()


def _places(rows: Any) -> Any:
    from ucxkv.tiers.slabs import PLACE_DTYPE

    out = np.zeros(len(rows), PLACE_DTYPE)
    for column in ("offset", "slot_lines", "base_unit", "units"):
        out[column] = rows[column]
    return out


DurableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestDurable = DurableMachine.TestCase


def test_the_machine_reaches_what_it_is_for() -> None:
    """Goal: the run above means something. Method: its own counts of the rare things."""
    seen = DurableMachine.seen
    if not seen:
        TestDurable().runTest()  # this test runs alone
    for what in (
        "crash that cuts",
        "upgraded",
        "durable delete",
        "journal failed",
        "durable block damaged",
        "abandoned",
    ):
        assert seen[what], (what, seen)
