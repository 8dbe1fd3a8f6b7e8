"""Belady's rule: evict the leaf whose next use is farthest in the future. Nobody knows it; it is the bound.

Of leaves that are used next by the same request, or never, any may go. A parent is never used later than its children,
so evicting leaves only loses nothing. The replay says when each block is used next, through `next_use`.

Invariant: `prev` is 1 for leaves; each leaf has a true entry in the heap; there are never more untrue ones than true
ones, plus a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from ucxkv.policy.base import LeafLinks, Rating, view_of
from ucxkv.simulation.traces import Ids

__all__ = ["BeladyPolicy"]

_SLACK = 1024


class BeladyPolicy:
    """See the module. next_use: by slot, to be written before each use and arrival."""

    rule = "used next in the farthest future"

    def __init__(self, links: LeafLinks) -> None:
        self._leaf = links.prev
        self.next_use: Ids = np.zeros(len(links.prev), np.int64)
        self._next = view_of(self.next_use)
        self._heap: list[tuple[int, int]] = []
        self._count = 0

    def add(self, slot: int) -> None:
        """A new leaf."""
        assert not self._leaf[slot], f"slot {slot} is a leaf already"
        self._leaf[slot] = 1
        self._count += 1
        self._push(slot)

    def readmit(self, slot: int) -> None:
        """A leaf again."""
        self.add(slot)

    def remove(self, slot: int) -> None:
        """No leaf any more; nothing happens when it wasn't one."""
        if self._leaf[slot]:
            self._leaf[slot] = 0
            self._count -= 1

    def touch(self, slots: Iterable[int]) -> None:
        """Their next use is another one now."""
        for slot in slots:
            if self._leaf[slot]:
                self._push(slot)

    def pop(self) -> int:
        """Take out the leaf that is used farthest in the future; -1 when there is none."""
        heap = self._heap
        while heap:
            far, slot = heappop(heap)
            if self._leaf[slot] and self._next[slot] == -far:
                self._leaf[slot] = 0
                self._count -= 1
                return slot
        return -1

    def put_back(self, slots: Sequence[int]) -> None:
        """Leaves again."""
        for slot in slots:
            self.add(slot)

    def rate(self, slot: int) -> Rating:
        """Nothing: the order is all there is."""
        return Rating()

    def leaves(self) -> list[int]:
        """All leaves, the one used farthest in the future first."""
        found = np.flatnonzero(np.frombuffer(self._leaf, np.uint32)).tolist()
        return sorted(found, key=lambda slot: (-self._next[slot], slot))

    def __len__(self) -> int:
        return self._count

    def _push(self, slot: int) -> None:
        heappush(self._heap, (-self._next[slot], slot))
        if len(self._heap) > 2 * self._count + _SLACK:
            leaves = np.flatnonzero(np.frombuffer(self._leaf, np.uint32)).tolist()
            self._heap = [(-self._next[slot], slot) for slot in leaves]
            heapify(self._heap)
