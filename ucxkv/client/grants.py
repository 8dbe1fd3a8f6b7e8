"""Extents that a node granted to this client ahead of its puts, so that a put is one round trip.

Invariants: an extent is handed out once; a put that was sent uses its extents up, whatever became of it; one that
was not
sent gives them back. What lies unused for a while goes back to the node.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ucxkv.client.path import U16, U64

__all__ = ["GrantCache", "Taken"]


class Taken:
    """Extents taken for one put: regions u16[n], offsets u64[n], all of `capacity` bytes."""

    __slots__ = ("capacity", "offsets", "regions")

    def __init__(self, capacity: int, regions: U16, offsets: U64) -> None:
        self.capacity = capacity
        self.regions = regions
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets)


class GrantCache:
    """Unused grants by size class. A class is learned from the node's answers: length asked -> capacity given."""

    def __init__(self) -> None:
        self._free: dict[int, deque[tuple[U16, U64]]] = {}
        self._counts: dict[int, int] = {}
        self._capacity_of: dict[int, int] = {}
        self.bytes_held = 0

    def count(self, length: int) -> int:
        """Unused extents that were granted for values of `length` bytes."""
        return self._counts.get(self._capacity_of.get(length, -1), 0)

    def learn(self, length: int, capacity: int) -> None:
        """The node serves values of `length` bytes with extents of `capacity` bytes."""
        if len(self._capacity_of) > 65_536:
            self._capacity_of.clear()
        self._capacity_of[length] = capacity

    def add(self, capacity: int, regions: bytes | U16, offsets: bytes | U64) -> None:
        """Extents the node granted, or that a put did not use."""
        region_array = np.frombuffer(regions, np.uint16) if isinstance(regions, bytes) else regions
        offset_array = np.frombuffer(offsets, np.uint64) if isinstance(offsets, bytes) else offsets
        if not len(offset_array):
            return
        self._free.setdefault(capacity, deque()).append((region_array, offset_array))
        self._counts[capacity] = self._counts.get(capacity, 0) + len(offset_array)
        self.bytes_held += capacity * len(offset_array)

    def take(self, length: int, count: int) -> Taken:
        """Up to `count` extents for values of `length` bytes; fewer, or none, when there are no more."""
        capacity = self._capacity_of.get(length, -1)
        runs = self._free.get(capacity)
        regions: list[U16] = []
        offsets: list[U64] = []
        missing = count
        while runs and missing:
            run_regions, run_offsets = runs.popleft()
            if len(run_offsets) > missing:
                runs.appendleft((run_regions[missing:], run_offsets[missing:]))
                run_regions, run_offsets = run_regions[:missing], run_offsets[:missing]
            regions.append(run_regions)
            offsets.append(run_offsets)
            missing -= len(run_offsets)
        if not offsets:
            return Taken(capacity, np.empty(0, np.uint16), np.empty(0, np.uint64))
        taken = count - missing
        self._counts[capacity] -= taken
        self.bytes_held -= capacity * taken
        if len(offsets) == 1:
            return Taken(capacity, regions[0], offsets[0])
        return Taken(capacity, np.concatenate(regions), np.concatenate(offsets))

    def give_back(self, taken: Taken) -> None:
        """Extents of a put that was never sent."""
        self.add(taken.capacity, taken.regions, taken.offsets)

    def drain(self) -> tuple[bytes, bytes]:
        """Take everything out, to be returned to the node: (regions, offsets) as they travel."""
        runs = [run for free in self._free.values() for run in free]
        self._free.clear()
        self._counts.clear()
        self.bytes_held = 0
        return b"".join(r.tobytes() for r, _ in runs), b"".join(o.tobytes() for _, o in runs)
