"""Extents that a node granted to this client ahead of its puts, so that a put is one round trip.

Invariants: an extent is handed out once; a put that was sent uses its extents up, whatever became of it; one that
was not
sent gives them back. What lies unused for a while goes back to the node.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ucxkv.client.path import U16, U64

__all__ = ["GrantCache", "Taken"]

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_LENGTHS_MAX = 65_536


class Taken:
    """Extents taken for one put, all of `capacity` bytes. places: region << 48 | offset, one each."""

    __slots__ = ("capacity", "places")

    def __init__(self, capacity: int, places: list[int]) -> None:
        self.capacity = capacity
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @property
    def regions(self) -> U16:
        """u16[n]."""
        return (np.array(self.places, np.uint64) >> np.uint64(_OFFSET_BITS)).astype(np.uint16)

    @property
    def offsets(self) -> U64:
        """u64[n]."""
        return np.array(self.places, np.uint64) & np.uint64(_OFFSET_MASK)


class GrantCache:
    """Unused grants by size class. A class is learned from the node's answers: length asked -> capacity given."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._capacity_of: dict[int, int] = {}

    @property
    def bytes_held(self) -> int:
        """Bytes of all unused extents."""
        return sum(capacity * len(places) for capacity, places in self._free.items())

    def count(self, length: int) -> int:
        """Unused extents that were granted for values of `length` bytes."""
        return len(self._free.get(self._capacity_of.get(length, -1), ()))

    def learn(self, length: int, capacity: int) -> None:
        """The node serves values of `length` bytes with extents of `capacity` bytes."""
        if len(self._capacity_of) >= _LENGTHS_MAX:
            self._capacity_of.clear()
        self._capacity_of[length] = capacity

    def add(self, capacity: int, regions: bytes, offsets: bytes) -> None:
        """Extents the node granted, as they travelled: u16[n], u64[n]."""
        if not offsets:
            return
        places = memoryview(offsets).cast("Q").tolist()
        if any(regions):
            numbers = memoryview(regions).cast("H").tolist()
            places = [number << _OFFSET_BITS | offset for number, offset in zip(numbers, places, strict=True)]
        self._free.setdefault(capacity, []).extend(places)

    def take(self, length: int, count: int) -> Taken:
        """Up to `count` extents for values of `length` bytes; fewer, or none, when there are no more."""
        capacity = self._capacity_of.get(length, -1)
        free = self._free.get(capacity)
        if not free or count <= 0:
            return Taken(capacity, [])
        places = free[-count:]
        del free[-count:]
        return Taken(capacity, places)

    def take_one(self, length: int) -> tuple[int, int] | None:
        """One extent for a value of `length` bytes: (region, offset), or None."""
        free = self._free.get(self._capacity_of.get(length, -1))
        if not free:
            return None
        place = free.pop()
        return place >> _OFFSET_BITS, place & _OFFSET_MASK

    def drain(self) -> tuple[bytes, bytes]:
        """Take everything out, to be returned to the node: (regions, offsets) as they travel."""
        places = [place for free in self._free.values() for place in free]
        self._free.clear()
        regions = array("H", [place >> _OFFSET_BITS for place in places])
        return regions.tobytes(), array("Q", [place & _OFFSET_MASK for place in places]).tobytes()
