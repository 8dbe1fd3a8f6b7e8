"""Which extents are lent to which connection. Pure, no I/O.

Invariants (`check()` verifies them):
- **A slot that a peer may still write is never given to another.** From `grant` on an extent is held by one connection:
  until that one commits it (`take`), or is closed by a peer that cannot write any more, or, quarantined, until
  `writer_gone` says that its process has ended. While it is held, nobody else can be granted it.
  Who may still write is for the caller to know (ucxkv/node/session.py); that a peer writes nothing but what it holds is
  the data service's to see to (transport/service.h), where it has no mapping of its own.
- A connection holds at most `limit_bytes`. Closed with its writer alive it is granted nothing more; ids are not used
  twice (they are 64-bit and grow).
- A call that raises has changed nothing.

An extent is known by its segment and offset; its granted length is the slot's class. What `take`, `close` and
`writer_gone` return is the caller's to store or to free, the table forgets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .base import Extent, ForeignExtent, GrantLimit
from .ledger import GrantLedger

__all__ = ["ClosedGrants", "GrantTable"]


@dataclass(frozen=True, slots=True)
class ClosedGrants:
    """What became of a closed connection's extents: free now, or held until its writer is gone."""

    freed: list[Extent]
    quarantined: list[Extent]


class GrantTable:
    """The extents lent by one node; see the module's invariants. limit_bytes: the most one connection may hold.

    ledger: told of every extent of segment 0 before it is lent and after it no longer is; see there.
    """

    def __init__(self, *, limit_bytes: int, ledger: GrantLedger | None = None) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes must be positive, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._ledger = ledger
        self._lent: dict[int, dict[int, int]] = {}  # connection -> place -> length
        self._lent_bytes_of: dict[int, int] = {}
        self._quarantined: dict[int, list[Extent]] = {}
        self._holder: dict[int, int] = {}  # place -> connection, lent and quarantined
        self._lent_bytes = self._quarantined_bytes = self._quarantined_count = 0

    def grant(self, connection: int, extents: Sequence[Extent]) -> None:
        """Lend free extents to the connection.

        Raises GrantLimit when it would hold more than limit_bytes, ForeignExtent when one of them is held already (or
        named twice) or the connection was closed.
        """
        places = [_place(extent.segment, extent.offset) for extent in extents]
        self._lend(connection, places, [extent.length for extent in extents])

    def grant_run(self, connection: int, segment: int, offsets: Sequence[int], length: int) -> None:
        """`grant` of equally long extents of one segment, without an object for each."""
        base = _place(segment, 0)
        places = [base + offset for offset in offsets] if base else offsets
        self._lend(connection, places, [length] * len(places))

    def _lend(self, connection: int, places: Sequence[int], lengths: Sequence[int]) -> None:
        if connection in self._quarantined:
            raise ForeignExtent(f"connection {connection:#x} is closed, its writer may still be alive")
        total = sum(lengths)
        held = self._lent_bytes_of.get(connection, 0)
        if held + total > self.limit_bytes:
            raise GrantLimit(f"connection {connection:#x} holds {held} of {self.limit_bytes} bytes, asked for {total}")
        if not places:
            return
        fresh = dict(zip(places, lengths, strict=True))
        if len(fresh) < len(places) or not self._holder.keys().isdisjoint(fresh):
            raise ForeignExtent(f"connection {connection:#x}: an extent is lent already, or named twice")
        if self._ledger is not None:
            for length in dict.fromkeys(lengths):
                self._ledger.add([place for place, size in fresh.items() if size == length], length)
        self._lent.setdefault(connection, {}).update(fresh)
        self._holder.update(dict.fromkeys(fresh, connection))
        self._lent_bytes_of[connection] = held + total
        self._lent_bytes += total

    def take(self, connection: int, extent: Extent) -> int:
        """Commit, or hand back unused: the extent leaves the table. Returns the granted length (the slot's class).

        extent.length is the value's, at most the granted one. Raises ForeignExtent when the connection does not hold
        it, or the value is longer.
        """
        return self.take_run(connection, extent.segment, [extent.offset], [extent.length])[0]

    def take_run(self, connection: int, segment: int, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """`take` of n extents of one segment for values of `sizes` bytes: all or none; returns their granted
        lengths.
        """
        mine = self._lent.get(connection, _NOTHING)
        base = _place(segment, 0)
        places = [base + offset for offset in offsets] if base else offsets
        try:
            lengths = [mine[place] for place in places]
        except KeyError as exc:
            place = exc.args[0]
            raise ForeignExtent(
                f"connection {connection:#x} holds no grant at {place - base} of segment {segment}"
            ) from exc
        for offset, size, length in zip(offsets, sizes, lengths, strict=True):
            if not 0 <= size <= length:
                text = f"{size} bytes at {offset}, {length} granted"
                raise ForeignExtent(f"connection {connection:#x}: a value is longer than its extent: {text}")
        if len(places) > 1 and len(set(places)) < len(places):
            raise ForeignExtent(f"connection {connection:#x} named an extent twice")
        holder = self._holder
        for place in places:
            del mine[place], holder[place]
        if self._ledger is not None:
            for length in dict.fromkeys(lengths):
                self._ledger.remove(
                    [p for p, granted in zip(places, lengths, strict=True) if granted == length], length
                )
        total = sum(lengths)
        self._lent_bytes -= total
        if mine:
            self._lent_bytes_of[connection] -= total
        elif places:
            del self._lent[connection], self._lent_bytes_of[connection]
        return lengths

    def close(self, connection: int, *, may_still_write: bool) -> ClosedGrants:
        """The connection ended; idempotent.

        may_still_write: its process may have mapped the segment, or a one-sided write may be under way: what it holds
        stays held until writer_gone. Otherwise (endpoint force-closed, writes went through this node's own code) it is
        free at once.
        """
        mine = self._lent.pop(connection, {})
        total = self._lent_bytes_of.pop(connection, 0)
        extents = [_extent(place, length) for place, length in mine.items()]
        self._lent_bytes -= total
        if not may_still_write:
            self._forget(extents)
            return ClosedGrants(freed=extents, quarantined=[])
        if extents:
            self._quarantined.setdefault(connection, []).extend(extents)
            self._quarantined_bytes += total
            self._quarantined_count += len(extents)
        return ClosedGrants(freed=[], quarantined=extents)

    def writer_gone(self, connection: int) -> list[Extent]:
        """The process behind a connection has ended: everything it held is free, lent or quarantined. Idempotent."""
        freed = self.close(connection, may_still_write=False).freed
        extents = self._quarantined.pop(connection, [])
        self._forget(extents)
        self._quarantined_bytes -= sum(extent.length for extent in extents)
        self._quarantined_count -= len(extents)
        return freed + extents

    def _forget(self, extents: Iterable[Extent]) -> None:
        offsets_of: dict[int, list[int]] = {}
        for extent in extents:
            del self._holder[_place(extent.segment, extent.offset)]
            offsets_of.setdefault(extent.length, []).append(extent.offset)
        if self._ledger is not None:
            for length, offsets in offsets_of.items():
                self._ledger.remove(offsets, length)

    # ---- what is held, for decisions and metrics

    def room_bytes(self, connection: int) -> int:
        """How much more the connection may be lent now."""
        if connection in self._quarantined:
            return 0
        return self.limit_bytes - self._lent_bytes_of.get(connection, 0)

    def lent_to(self, connection: int) -> list[Extent]:
        """What a live connection holds, oldest first, with the granted lengths."""
        return [_extent(place, length) for place, length in self._lent.get(connection, _NOTHING).items()]

    def holder_of(self, segment: int, offset: int) -> int | None:
        """The connection that holds the extent there, closed ones too; None when nobody does."""
        return self._holder.get(_place(segment, offset))

    @property
    def lent_bytes(self) -> int:
        """Bytes lent to live connections."""
        return self._lent_bytes

    @property
    def lent_count(self) -> int:
        """Extents lent to live connections."""
        return len(self._holder) - self._quarantined_count

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that wait for the end of their writer."""
        return self._quarantined_bytes

    @property
    def quarantined_count(self) -> int:
        """Extents that wait for the end of their writer."""
        return self._quarantined_count

    @property
    def quarantined_connections(self) -> list[int]:
        """Closed connections whose writer has to be watched, oldest first."""
        return list(self._quarantined)

    def check(self) -> None:
        """Assert every invariant; O(extents log extents)."""
        held: list[tuple[int, int, int]] = []
        for connection, mine in self._lent.items():
            assert mine and connection not in self._quarantined, "a connection both live and closed"
            assert sum(mine.values()) == self._lent_bytes_of[connection] <= self.limit_bytes
            held += [(place, length, connection) for place, length in mine.items()]
        assert self._lent.keys() == self._lent_bytes_of.keys()
        assert self._lent_bytes == sum(self._lent_bytes_of.values())
        waiting = [(connection, extent) for connection, extents in self._quarantined.items() for extent in extents]
        assert all(self._quarantined.values()) and len(waiting) == self._quarantined_count
        assert self._quarantined_bytes == sum(extent.length for _, extent in waiting)
        held += [(_place(extent.segment, extent.offset), extent.length, connection) for connection, extent in waiting]
        assert self._holder == {place: connection for place, _, connection in held}
        held.sort()
        for (place, length, _), (following, _, _) in pairwise(held):
            assert place + length <= following, "held extents overlap"


_OFFSET_BITS = 48
_NOTHING: dict[int, int] = {}


def _place(segment: int, offset: int) -> int:
    """An extent's identity as one number: comparing and hashing it costs a fraction of a tuple's."""
    return segment << _OFFSET_BITS | offset


def _extent(place: int, length: int) -> Extent:
    return Extent(place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1), length)
