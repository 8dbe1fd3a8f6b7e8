"""Which extents are lent to which connection. Pure, no I/O.

Invariants (`check()` verifies them):
- **A slot that a peer may still write is never given to another.** From `grant` on an extent is held by one connection:
  until that one commits it (`take`), or is closed by a peer that cannot write any more, or, quarantined, until
  `writer_gone` says that its process has ended. While it is held, nobody else can be granted it.
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

__all__ = ["ClosedGrants", "GrantTable"]


@dataclass(frozen=True, slots=True)
class ClosedGrants:
    """What became of a closed connection's extents: free now, or held until its writer is gone."""

    freed: list[Extent]
    quarantined: list[Extent]


class GrantTable:
    """The extents lent by one node; see the module's invariants. limit_bytes: the most one connection may hold."""

    def __init__(self, *, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes must be positive, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._lent: dict[int, dict[tuple[int, int], int]] = {}  # connection -> (segment, offset) -> length
        self._lent_bytes_of: dict[int, int] = {}
        self._quarantined: dict[int, list[Extent]] = {}
        self._holder: dict[tuple[int, int], int] = {}  # lent and quarantined
        self._lent_bytes = self._quarantined_bytes = self._quarantined_count = 0

    def grant(self, connection: int, extents: Sequence[Extent]) -> None:
        """Lend free extents to the connection.

        Raises GrantLimit when it would hold more than limit_bytes, ForeignExtent when one of them is held already (or
        named twice) or the connection was closed.
        """
        if connection in self._quarantined:
            raise ForeignExtent(f"connection {connection:#x} is closed, its writer may still be alive")
        places = [(extent.segment, extent.offset) for extent in extents]
        total = sum(extent.length for extent in extents)
        held = self._lent_bytes_of.get(connection, 0)
        if held + total > self.limit_bytes:
            raise GrantLimit(f"connection {connection:#x} holds {held} of {self.limit_bytes} bytes, asked for {total}")
        if len(set(places)) < len(places) or not self._holder.keys().isdisjoint(places):
            raise ForeignExtent(f"connection {connection:#x}: an extent is lent already, or named twice")
        if not places:
            return
        self._lent.setdefault(connection, {}).update(zip(places, (extent.length for extent in extents), strict=True))
        self._holder.update(dict.fromkeys(places, connection))
        self._lent_bytes_of[connection] = held + total
        self._lent_bytes += total

    def take(self, connection: int, extent: Extent) -> int:
        """Commit, or hand back unused: the extent leaves the table. Returns the granted length (the slot's class).

        extent.length is the value's, at most the granted one. Raises ForeignExtent when the connection does not hold
        it, or the value is longer.
        """
        place = (extent.segment, extent.offset)
        mine = self._lent.get(connection)
        length = mine.get(place) if mine is not None else None
        if mine is None or length is None:
            raise ForeignExtent(f"connection {connection:#x} holds no grant for {extent}")
        if not 0 <= extent.length <= length:
            raise ForeignExtent(f"connection {connection:#x}: {extent} is longer than the {length} bytes granted")
        del mine[place], self._holder[place]
        self._lent_bytes_of[connection] -= length
        self._lent_bytes -= length
        if not mine:
            del self._lent[connection], self._lent_bytes_of[connection]
        return length

    def close(self, connection: int, *, may_still_write: bool) -> ClosedGrants:
        """The connection ended; idempotent.

        may_still_write: its process may have mapped the segment, or a one-sided write may be under way: what it holds
        stays held until writer_gone. Otherwise (endpoint force-closed, writes went through this node's own code) it is
        free at once.
        """
        mine = self._lent.pop(connection, {})
        total = self._lent_bytes_of.pop(connection, 0)
        extents = [Extent(segment, offset, length) for (segment, offset), length in mine.items()]
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
        for extent in extents:
            del self._holder[extent.segment, extent.offset]

    # ---- what is held, for decisions and metrics

    def room_bytes(self, connection: int) -> int:
        """How much more the connection may be lent now."""
        if connection in self._quarantined:
            return 0
        return self.limit_bytes - self._lent_bytes_of.get(connection, 0)

    def lent_to(self, connection: int) -> list[Extent]:
        """What a live connection holds, oldest first, with the granted lengths."""
        return [Extent(segment, offset, length) for (segment, offset), length in self._lent.get(connection, {}).items()]

    def holder_of(self, segment: int, offset: int) -> int | None:
        """The connection that holds the extent there, closed ones too; None when nobody does."""
        return self._holder.get((segment, offset))

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
        held: list[tuple[int, int, int, int]] = []
        for connection, mine in self._lent.items():
            assert mine and connection not in self._quarantined, "a connection both live and closed"
            assert sum(mine.values()) == self._lent_bytes_of[connection] <= self.limit_bytes
            held += [(segment, offset, length, connection) for (segment, offset), length in mine.items()]
        assert self._lent.keys() == self._lent_bytes_of.keys()
        assert self._lent_bytes == sum(self._lent_bytes_of.values())
        waiting = [(connection, extent) for connection, extents in self._quarantined.items() for extent in extents]
        assert all(self._quarantined.values()) and len(waiting) == self._quarantined_count
        assert self._quarantined_bytes == sum(extent.length for _, extent in waiting)
        held += [(extent.segment, extent.offset, extent.length, connection) for connection, extent in waiting]
        assert self._holder == {(segment, offset): connection for segment, offset, _, connection in held}
        held.sort()
        for (segment, offset, length, _), (next_segment, next_offset, _, _) in pairwise(held):
            assert segment != next_segment or offset + length <= next_offset, "held extents overlap"
