"""The serving lease of a slot table, for the C code and its twin, each also reading what the other wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.directory.arena import Arena, chain
from tests.directory.test_slots_contract import SIDES, Side, make, put
from ucxkv.directory.slots import FOREVER, CancelFlag, NotServed, ReadStatus, Serving, is_native
from ucxkv.errors import Unavailable

HOUR_NS = 3600 * 10**9


@pytest.fixture(params=list(SIDES))
def side(request: pytest.FixtureRequest) -> Side:
    assert is_native(), "build it: python ucxkv/directory/build_slots.py"
    return SIDES[request.param]


class Calls:
    """Every call of a reader on one key that is there and one that is not, with its normal answer."""

    def __init__(self, reader: Any, arena: Arena, key: bytes, other: bytes) -> None:
        self.reader, self.key = reader, key
        reader.map_region(0, arena.address, arena.size)
        self.length = len(b"value of " + key)
        self.out = np.zeros((2, self.length), np.uint8)
        rows = [[self.out[i].ctypes.data, self.length] for i in range(2)]
        self.iov, self.first = np.array(rows, np.uint64), np.arange(3, dtype=np.uint32)
        self.keys = key + other
        found = reader.view(key)
        self.slot, self.generation = found.slot, found.generation
        self.raising: list[Callable[[], Any]] = [
            lambda: reader.lookup(self.keys)[1].tolist(),
            lambda: reader.match(self.keys),
            lambda: reader.exists(self.keys).tolist(),
            lambda: reader.contains(key),
            lambda: reader.contains(other),
            lambda: len(reader.scan(0, 10)[1]),
        ]

    def read(self, cancel: CancelFlag | None = None) -> Any:
        return self.reader.read(self.keys, self.first, self.iov, cancel)

    def statuses(self) -> list[int]:
        one = self.reader.read_one(self.key, int(self.iov[0, 0]), self.length)
        return [*self.read().status.tolist(), one.status, self.reader.view(self.key).status]

    def check_served(self) -> None:
        assert self.reader.serving is Serving.SERVED
        assert [call() for call in self.raising] == [[1, 0], 1, [1, 0], True, False, 1]
        assert self.statuses() == [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT, ReadStatus.HIT]
        assert self.reader.recheck(self.slot, self.generation)

    def check_refused(self, why: Serving) -> None:
        assert self.reader.serving is why
        for call in self.raising:
            with pytest.raises(NotServed) as told:
                call()
            assert isinstance(told.value, Unavailable) and told.value.epoch == self.reader.epoch
        assert set(self.statuses()) == {ReadStatus.UNAVAILABLE}
        result = self.read()
        assert result.hits == 0 and not result.length.any() and not result.generation.any()
        view = self.reader.view(self.key)
        assert (view.address, view.length, view.generation) == (0, 0, 0)
        assert not self.reader.recheck(self.slot, self.generation)


def open_calls(side: Side) -> tuple[Any, Calls]:
    table, reader = make(side)
    arena = Arena(4096)
    key, other = chain(2)
    put(table, [key], arena=arena)
    calls = Calls(reader, arena, key, other)
    calls.arena = arena  # type: ignore[attr-defined]  # kept alive
    return table, calls


def test_a_fresh_table_is_served_for_ever(side: Side) -> None:
    """Goal: without a cluster nothing changes. Method: every call on a table whose lease nobody set."""
    table, calls = open_calls(side)
    assert table.lease_end_ns == FOREVER
    calls.check_served()


def test_nothing_is_answered_without_a_lease(side: Side) -> None:
    """Goal: neither hit nor miss when the lease is over. Method: every call under a lease to come, over, and none."""
    table, calls = open_calls(side)
    for end in (time.monotonic_ns() + HOUR_NS, FOREVER):
        table.set_lease(end)
        assert table.lease_end_ns == end
        calls.check_served()
        for over in (0, 1, time.monotonic_ns() - 1, time.monotonic_ns()):
            table.set_lease(over)
            calls.check_refused(Serving.LEASE_OVER)


def test_a_lease_ends_by_the_clock_alone(side: Side) -> None:
    """Goal: no store ends a lease. Method: a short one that nobody touches; refused once its end has passed."""
    table, calls = open_calls(side)
    end = time.monotonic_ns() + 5_000_000
    table.set_lease(end)
    while time.monotonic_ns() < end:
        time.sleep(0.001)
    calls.check_refused(Serving.LEASE_OVER)
    table.set_lease(end + HOUR_NS)
    calls.check_served()


def test_the_writer_works_on_without_a_lease(side: Side) -> None:
    """Goal: a deposed node can put its table in order. Method: put, find and hide under an ended lease."""
    table, calls = open_calls(side)
    table.set_lease(0)
    (more,) = chain(1, b"more")
    status, slots, _, _ = put(table, [more])
    assert status.tolist() == [0] and table.find(more).tolist() == slots.tolist()
    assert table.hide(slots) == 1
    calls.check_refused(Serving.LEASE_OVER)


def test_a_cancelled_read_stays_cancelled(side: Side) -> None:
    """Goal: what was cancelled is no word of the node. Method: a read that was cancelled beforehand, no lease."""
    table, calls = open_calls(side)
    table.set_lease(0)
    flag = CancelFlag()
    flag.set()
    assert calls.read(flag).status.tolist() == [ReadStatus.CANCELLED] * 2


def test_a_new_epoch_takes_the_blocks_along_and_leaves_old_readers_behind(side: Side) -> None:
    """Goal: old readers get no answer, those of the new epoch all blocks. Method: set_epoch, then a lease."""
    table, calls = open_calls(side)
    keys = chain(20, b"chain")
    slots = put(table, keys)[1]
    table.hide(slots[15:])
    assert table.set_epoch(6) == 16 and table.epoch == 6
    calls.check_refused(Serving.OTHER_EPOCH)
    late = table.reader()
    assert late.epoch == 6 and late.serving is Serving.LEASE_OVER, "a new epoch begins without a lease"
    with pytest.raises(NotServed):
        late.match(b"".join(keys))
    table.set_lease(time.monotonic_ns() + HOUR_NS)
    calls.check_refused(Serving.OTHER_EPOCH)
    assert late.match(b"".join(keys)) == 15
    records, found = late.lookup(b"".join(keys))
    assert found.tolist() == [1] * 15 + [0] * 5 and set(records["epoch"][:15].tolist()) == {6}
    assert records["generation"][:15].tolist() == [100 + i for i in range(15)]
    more = chain(2, b"more")
    assert put(table, more, [keys[14], more[0]])[0].tolist() == [0, 0], "the writer has gone along"
    assert late.match(b"".join([*keys[:15], *more])) == 17
    calls.reader.follow()
    assert calls.reader.epoch == 6 and calls.reader.serving is Serving.SERVED
    assert calls.statuses() == [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT, ReadStatus.HIT]


def test_a_slot_that_stayed_in_an_older_epoch_is_never_trusted(side: Side) -> None:
    """Goal: epochs fence. Method: after set_epoch give one slot back its old bytes, check and all: a miss."""
    table, reader = make(side)
    keys = chain(3)
    slots = put(table, keys)[1]
    raw = table.records.view(np.uint8).reshape(-1, 64)[int(slots[1])]
    old = raw.copy()
    table.set_epoch(9)
    assert raw.tobytes() != old.tobytes()
    raw[:] = old
    table.set_lease(FOREVER)
    reader.follow()
    assert reader.exists(b"".join(keys)).tolist() == [1, 0, 1] and table.find(keys[1]).tolist() == [-1]


def test_a_lease_that_is_no_time_is_refused(side: Side) -> None:
    """Goal: wrong arguments are named before C sees them. Method: below 0 and above 64 bits."""
    table, _ = make(side)
    for wrong in (-1, FOREVER + 1):
        with pytest.raises(ValueError, match="monotonic_ns"):
            table.set_lease(wrong)


def test_the_short_way_says_neither_hit_nor_miss() -> None:
    """Goal: `into_reader` refuses too. Method: a key that is there and one that is not, with and without a lease."""
    table, calls = open_calls(SIDES["c"])
    read_into = calls.reader.into_reader(1000)
    out, other = bytearray(calls.length), calls.keys[16:]
    assert read_into(calls.key, out, 0) == calls.length and read_into(other, out, 0) == -2
    table.set_lease(0)
    assert read_into(calls.key, out, 0) == read_into(other, out, 0) == -1
