"""Values that other nodes copied into this one's memory, from when they are named until a log entry claims them.

A follower keeps the durable values of a shard in its own memory. The shard's leader is lent extents here as any client
is, writes the values, and names them (`Values`); the log entry that makes a block of each comes by another way, before
or after.

Invariants
  - An extent comes here out of its sender's grants: nobody writes it any more (`ucxkv.node.session` says why). It
    leaves to whoever claims it, or is free.
  - A value is known by shard, key, sum and length, and is here once: what comes twice frees the second extent.
  - What nobody claims goes after LIFE_NS, and the oldest goes first when all of it would be over `limit_bytes`. The
    newest value stays though it is larger than that by itself, or it could never be taken.
  - What is here is in no journal: a restart has lost it, and the leader asks what is missing (`HaveValues`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ucxkv.protocol import messages as m
from ucxkv.tiers.base import ForeignExtent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucxkv.tiers.grants import GrantTable
    from ucxkv.tiers.slabs import SlabAllocator

__all__ = ["LIFE_NS", "Arrived"]

LIFE_NS = 60_000_000_000
"""How long a value waits for its log entry; one that is missed afterwards is copied again."""
_SEGMENT = 0
_KEY_BYTES = 16
_TAKEN, _NOT_HELD = 0, 1
_HAS, _LACKS = 0, 1

Name: TypeAlias = tuple[int, bytes, int, int]
"""(shard, key, sum, length)."""


class _Value(NamedTuple):
    offset: int
    capacity: int
    since_ns: int


class Arrived:
    """See the module. limit_bytes: what unclaimed values may hold together, in bytes of their extents."""

    def __init__(self, slabs: SlabAllocator, grants: GrantTable, limit_bytes: int) -> None:
        self._slabs = slabs
        self._grants = grants
        self._limit_bytes = limit_bytes
        self._values: dict[Name, _Value] = {}
        """The oldest first."""
        self.bytes_count = 0
        """Bytes of the extents of all values here."""
        self.has_value: Callable[[int, bytes, int, int], bool] = lambda *_: False
        """(shard, key, sum, length) -> whether its owner keeps that value already; asked for `HaveValues`."""
        self.on_arrived: Callable[[int], None] = lambda _: None
        """Told the shard after values of it were taken: log entries that waited for them may be confirmed."""

    def __len__(self) -> int:
        return len(self._values)

    # ---- what the sender asks

    def take(self, session: int, values: m.Values, now_ns: int) -> m.Statuses:
        """Take named values out of a session's grants: 0 = taken, 1 = the session does not hold that extent, or it is
        shorter than the value. The caller has made sure that the session writes them no more.
        """
        offsets = memoryview(values.offsets).cast("Q").tolist()
        names = list(_names(values.shard, values.keys, values.sums, values.lengths))
        capacities = self._take_extents(session, offsets, [name[3] for name in names])
        for name, offset, capacity in zip(names, offsets, capacities, strict=True):
            if capacity is not None:
                self._add(name, _Value(offset, capacity, now_ns))
        status = bytes(_NOT_HELD if capacity is None else _TAKEN for capacity in capacities)
        if _TAKEN in status:
            self.on_arrived(values.shard)
        return m.Statuses(status=status)

    def _take_extents(self, session: int, offsets: list[int], lengths: list[int]) -> list[int | None]:
        """Their capacities, None for one that is not the session's."""
        try:
            return list(self._grants.take_run(session, _SEGMENT, offsets, lengths))
        except ForeignExtent:  # some are not: one by one
            return [self._take_extent(session, *each) for each in zip(offsets, lengths, strict=True)]

    def _take_extent(self, session: int, offset: int, length: int) -> int | None:
        try:
            return self._grants.take_run(session, _SEGMENT, [offset], [length])[0]
        except ForeignExtent:
            return None

    def _add(self, name: Name, value: _Value) -> None:
        before = self._values.pop(name, None)
        if before is not None:
            self._slabs.free([value.offset])
            self._values[name] = before._replace(since_ns=value.since_ns)
            return
        self._values[name] = value
        self.bytes_count += value.capacity
        while self.bytes_count > self._limit_bytes and len(self._values) > 1:
            self._drop([next(iter(self._values))])

    def lacking(self, asked: m.HaveValues, now_ns: int) -> m.Statuses:
        """0 = this node has the value, here or where its owner keeps it; 1 = it lacks it. A value that is here waits
        for its log entry from now on, as if it had been copied again.
        """
        status = bytearray()
        for name in _names(asked.shard, asked.keys, asked.sums, asked.lengths):
            value = self._values.pop(name, None)
            if value is not None:
                self._values[name] = value._replace(since_ns=now_ns)
            status.append(_HAS if value is not None or self.has_value(*name) else _LACKS)
        return m.Statuses(status=bytes(status))

    # ---- what the owner of the log does

    def has(self, shard: int, key: bytes, total: int, length: int) -> bool:
        """Whether this value is here, to be claimed."""
        return (shard, key, total, length) in self._values

    def claim(self, shard: int, key: bytes, total: int, length: int) -> int | None:
        """Offset of the value's extent in this node's segment, the caller's from now on (to be freed in the slabs);
        None when it is not here.
        """
        value = self._values.pop((shard, key, total, length), None)
        if value is None:
            return None
        self.bytes_count -= value.capacity
        return value.offset

    def drop_shard(self, shard: int) -> None:
        """This node follows that shard no longer: its unclaimed values are free."""
        self._drop([name for name in self._values if name[0] == shard])

    def expire(self, now_ns: int) -> None:
        """Free what has waited for LIFE_NS."""
        late = []
        for name, value in self._values.items():
            if now_ns - value.since_ns < LIFE_NS:
                break
            late.append(name)
        self._drop(late)

    def _drop(self, names: Iterable[Name]) -> None:
        gone = [self._values.pop(name) for name in names]
        self.bytes_count -= sum(value.capacity for value in gone)
        self._slabs.free([value.offset for value in gone])

    # ---- for tests

    def check(self) -> None:
        """Assert the books: every value in an extent of its own, in nobody's grants, within the limit."""
        values = list(self._values.values())
        assert self.bytes_count == sum(value.capacity for value in values)
        assert self.bytes_count <= self._limit_bytes or len(values) == 1
        assert len({value.offset for value in values}) == len(values)
        assert all(self._slabs.bytes_at(value.offset) == value.capacity for value in values)
        assert all(self._grants.holder_of(_SEGMENT, value.offset) is None for value in values)
        times = [value.since_ns for value in values]
        assert times == sorted(times), "the oldest is first"


def _names(shard: int, keys: bytes, sums: bytes, lengths: bytes) -> Iterator[Name]:
    totals, sizes = memoryview(sums).cast("Q"), memoryview(lengths).cast("I")
    for i, (total, size) in enumerate(zip(totals, sizes, strict=True)):
        yield shard, keys[_KEY_BYTES * i : _KEY_BYTES * (i + 1)], total, size
