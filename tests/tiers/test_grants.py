"""The grant table: quarantine, limits, refusals, and a state machine against a plain model of who may write what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ucxkv.tiers.base import Extent, ForeignExtent, GrantLimit
from ucxkv.tiers.grants import GrantTable

A, B = (1 << 63) + 1, 2
CONNECTIONS = st.integers(1, 5)


def _extents(*offsets: int, length: int = 4096, segment: int = 0) -> list[Extent]:
    return [Extent(segment, offset, length) for offset in offsets]


def test_a_committed_extent_leaves_the_table_and_may_be_lent_again() -> None:
    """Goal: the plain course of a put. Method: grant two, take one by its value's length, count what is left."""
    table = GrantTable(limit_bytes=10_000)
    table.grant(A, _extents(0, 4096))
    assert table.lent_to(A) == _extents(0, 4096) and table.room_bytes(A) == 10_000 - 8192
    assert table.take(A, Extent(0, 4096, 1000)) == 4096
    assert table.lent_bytes == 4096 and table.lent_count == 1 and table.holder_of(0, 4096) is None
    table.grant(B, _extents(4096))
    assert table.holder_of(0, 4096) == B and table.holder_of(0, 0) == A
    table.check()


def test_a_slot_that_a_peer_may_still_write_is_never_given_to_another() -> None:
    """Goal: the invariant at the module's top. Method: close with a live writer, try to lend its slots, let it end."""
    table = GrantTable(limit_bytes=1 << 20)
    table.grant(A, _extents(0, 4096))
    closed = table.close(A, may_still_write=True)
    assert closed.freed == [] and closed.quarantined == _extents(0, 4096)
    assert table.quarantined_bytes == 8192 and table.quarantined_count == 2 and table.lent_count == 0
    for connection in (A, B):
        with pytest.raises(ForeignExtent):
            table.grant(connection, _extents(8192, 4096) if connection == B else _extents(8192))
    with pytest.raises(ForeignExtent):
        table.take(A, Extent(0, 0, 10))
    assert table.room_bytes(A) == 0 and table.quarantined_connections == [A]
    table.check()
    assert table.writer_gone(A) == _extents(0, 4096)
    assert table.writer_gone(A) == [] and table.quarantined_bytes == table.quarantined_count == 0
    table.grant(B, _extents(0, 4096, 8192))
    table.check()


def test_a_writer_that_cannot_write_any_more_frees_at_once() -> None:
    """Goal: no quarantine where none is needed. Method: close without a live writer, twice; lend again."""
    table = GrantTable(limit_bytes=1 << 20)
    table.grant(A, _extents(0, segment=3))
    closed = table.close(A, may_still_write=False)
    assert closed.freed == _extents(0, segment=3) and closed.quarantined == []
    again = table.close(A, may_still_write=True)
    assert again.freed == again.quarantined == [] and table.quarantined_connections == []
    table.grant(B, _extents(0, segment=3))
    assert table.writer_gone(B) == _extents(0, segment=3) and table.lent_bytes == 0
    table.check()


def test_bad_calls_change_nothing() -> None:
    """Goal: foreign, doubled, too long and too many are refused whole. Method: a table of each, totals compared."""
    table = GrantTable(limit_bytes=3 * 4096)
    table.grant(A, _extents(0, 4096))
    for connection, extents, error in (
        (B, _extents(8192, 0), ForeignExtent),
        (A, _extents(0), ForeignExtent),
        (B, _extents(8192, 8192), ForeignExtent),
        (A, _extents(8192, 12288), GrantLimit),
        (B, _extents(8192, length=3 * 4096 + 1), GrantLimit),
    ):
        with pytest.raises(error):
            table.grant(connection, extents)
    for connection, extent in (
        (B, Extent(0, 0, 100)),
        (A, Extent(1, 0, 100)),
        (A, Extent(0, 64, 100)),
        (A, Extent(0, 0, 4097)),
        (A, Extent(0, 0, -1)),
    ):
        with pytest.raises(ForeignExtent):
            table.take(connection, extent)
    assert table.lent_bytes == 8192 and table.lent_to(A) == _extents(0, 4096) and table.lent_to(B) == []
    table.check()
    with pytest.raises(ValueError, match="positive"):
        GrantTable(limit_bytes=0)


class GrantMachine(RuleBasedStateMachine):
    """Connections that come, write, commit and die, against a model of which slots each one may still write."""

    LIMIT = 5

    def __init__(self) -> None:
        super().__init__()
        self.table = GrantTable(limit_bytes=self.LIMIT)
        self.free = set(range(40))
        self.lent: dict[int, list[int]] = {}
        self.waiting: dict[int, list[int]] = {}

    @rule(connection=CONNECTIONS, count=st.integers(0, 7))
    def grant(self, connection: int, count: int) -> None:
        slots = sorted(self.free)[:count]
        extents = [Extent(slot % 2, slot, 1) for slot in slots]
        if connection in self.waiting:
            with pytest.raises(ForeignExtent):
                self.table.grant(connection, extents)
        elif len(self.lent.get(connection, [])) + len(slots) > self.LIMIT:
            with pytest.raises(GrantLimit):
                self.table.grant(connection, extents)
        else:
            self.table.grant(connection, extents)
            self.free -= set(slots)
            if slots:
                self.lent.setdefault(connection, []).extend(slots)

    @rule(connection=CONNECTIONS, slot=st.integers(0, 39))
    def grant_what_may_be_held(self, connection: int, slot: int) -> None:
        if slot not in self.free and len(self.lent.get(connection, [])) < self.LIMIT:
            with pytest.raises(ForeignExtent):
                self.table.grant(connection, [Extent(slot % 2, slot, 1)])

    @rule(connection=CONNECTIONS, slot=st.integers(0, 39), length=st.integers(0, 2))
    def take(self, connection: int, slot: int, length: int) -> None:
        extent = Extent(slot % 2, slot, length)
        if slot in self.lent.get(connection, []) and length <= 1:
            assert self.table.take(connection, extent) == 1
            self.lent[connection].remove(slot)
            self.free.add(slot)
        else:
            with pytest.raises(ForeignExtent):
                self.table.take(connection, extent)

    @rule(connection=CONNECTIONS, may_still_write=st.booleans())
    def close(self, connection: int, may_still_write: bool) -> None:
        closed = self.table.close(connection, may_still_write=may_still_write)
        slots = self.lent.pop(connection, [])
        assert [extent.offset for extent in closed.quarantined] == (slots if may_still_write else [])
        assert [extent.offset for extent in closed.freed] == ([] if may_still_write else slots)
        if not may_still_write:
            self.free |= set(slots)
        elif slots:
            self.waiting.setdefault(connection, []).extend(slots)

    @rule(connection=CONNECTIONS)
    def writer_gone(self, connection: int) -> None:
        slots = self.lent.pop(connection, []) + self.waiting.pop(connection, [])
        assert [extent.offset for extent in self.table.writer_gone(connection)] == slots
        self.free |= set(slots)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.check()
        held = {slot: c for who in (self.lent, self.waiting) for c, slots in who.items() for slot in slots}
        assert self.free.isdisjoint(held) and len(self.free) + len(held) == 40
        for slot in range(40):
            assert self.table.holder_of(slot % 2, slot) == held.get(slot)
        assert self.table.lent_bytes == self.table.lent_count == sum(map(len, self.lent.values()))
        assert self.table.quarantined_bytes == self.table.quarantined_count == sum(map(len, self.waiting.values()))
        for connection in range(1, 6):
            used = self.LIMIT if connection in self.waiting else len(self.lent.get(connection, []))
            assert self.table.room_bytes(connection) == self.LIMIT - used


TestGrantMachine = GrantMachine.TestCase
TestGrantMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
