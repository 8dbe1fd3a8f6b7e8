"""Blocks on their way out: hidden already, their memory not yet free.

Invariant (I5): an extent leaves this list only when every lease on its block has ended and `grace_ns` has passed since
the block was hidden, so a reader that found it before still reads what was committed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from ucxkv.directory.cold import DISK_REGION
from ucxkv.directory.events import Extent


@dataclass(slots=True)
class _Held:
    leases: int
    extents: list[Extent]
    free_at_ns: int


@dataclass(slots=True)
class LeavingList:
    """See the module."""

    grace_ns: int
    _held: dict[int, _Held] = field(default_factory=dict)
    _timed: list[tuple[int, int, list[Extent]]] = field(default_factory=list)
    _pushed: int = 0
    busy: dict[Extent, int] = field(default_factory=dict)
    """Extents in other hands that a lease still covers -> when it ends at the latest."""
    _busy_end_ns: int = 0
    extents_count: int = 0
    bytes_count: int = 0
    soon_bytes: int = 0
    """Of memory that the grace alone keeps: neither what leases hold nor what is on disk."""

    def add(self, extents: list[Extent], now_ns: int) -> None:
        """Take in extents that no lease holds."""
        self._count(extents, 1)
        self._push(now_ns + self.grace_ns, extents)

    def add_held(self, generation: int, leases: int, extents: list[Extent], now_ns: int) -> None:
        """Take in a block's extents that `leases` leases hold."""
        assert leases > 0 and generation not in self._held
        self._count(extents, 1)
        self._held[generation] = _Held(leases, extents, now_ns + self.grace_ns)

    def lease_ended(self, generation: int) -> None:
        """One lease on this generation is over."""
        held = self._held[generation]
        held.leases -= 1
        if not held.leases:
            del self._held[generation]
            if held.extents:
                self._push(held.free_at_ns, held.extents)

    def keep_busy(self, extents: Iterable[Extent], until_ns: int, now_ns: int) -> None:
        """Leases cover these until then, and are not renewed: should they leave meanwhile, they stay as long."""
        self.busy = {extent: end_ns for extent, end_ns in self.busy.items() if end_ns > now_ns}
        self.busy |= dict.fromkeys(extents, until_ns)
        self._busy_end_ns = max(self._busy_end_ns, until_ns)

    def busy_until(self, extents: Iterable[Extent]) -> int:
        """When the last lease of before on one of these ends; 0 when there is none."""
        return max((self.busy.get(extent, 0) for extent in extents), default=0)

    def forget(self, regions: set[int]) -> None:
        """Drop what lies in these regions: they are gone, nothing there will be free."""
        gone = [extent for extent in self.extents() if extent[0] in regions]
        if not gone:
            return
        self._timed = [(at, n, [e for e in extents if e[0] not in regions]) for at, n, extents in self._timed]
        self.soon_bytes = sum(_memory(extents) for _, _, extents in self._timed)
        for held in self._held.values():
            held.extents = [e for e in held.extents if e[0] not in regions]
        self._count(gone, -1)

    def is_held(self, generation: int) -> bool:
        """Whether a block of this generation is in here because leases hold it."""
        return generation in self._held

    def due(self, now_ns: int) -> list[Extent]:
        """Take out what is free by now."""
        if self.busy and now_ns >= self._busy_end_ns:
            self.busy.clear()
        out: list[Extent] = []
        while self._timed and self._timed[0][0] <= now_ns:
            out += heapq.heappop(self._timed)[2]
        self._count(out, -1)
        self.soon_bytes -= _memory(out)
        return out

    def next_ns(self) -> int | None:
        """When something is free next by the grace alone."""
        return self._timed[0][0] if self._timed else None

    def extents(self) -> list[Extent]:
        """All extents in here."""
        timed = [extent for _, _, extents in self._timed for extent in extents]
        return timed + [extent for held in self._held.values() for extent in held.extents]

    def held(self) -> dict[int, int]:
        """Leases by generation, of blocks that leases hold."""
        return {generation: held.leases for generation, held in self._held.items()}

    def check(self) -> None:
        """Assert the counts."""
        extents = self.extents()
        assert len(extents) == self.extents_count
        assert sum(length for _, _, length in extents) == self.bytes_count
        assert sum(_memory(some) for _, _, some in self._timed) == self.soon_bytes

    def _count(self, extents: list[Extent], sign: int) -> None:
        self.extents_count += sign * len(extents)
        self.bytes_count += sign * sum([length for _, _, length in extents])

    def _push(self, at_ns: int, extents: list[Extent]) -> None:
        self.soon_bytes += _memory(extents)
        late = [extent for extent in extents if extent in self.busy] if self.busy else []
        if late:
            extents = [extent for extent in extents if extent not in self.busy]
        later = [(max(at_ns, self.busy[extent] + self.grace_ns), [extent]) for extent in late]
        for when_ns, some in [*later, (at_ns, extents)] if extents else later:
            self._pushed += 1
            heapq.heappush(self._timed, (when_ns, self._pushed, some))


def _memory(extents: list[Extent]) -> int:
    """Bytes of those that are in memory."""
    return sum([length for region, _, length in extents if region != DISK_REGION])
