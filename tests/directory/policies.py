"""The policies that the directory's machines run over, and one that asserts what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ucxkv.policy import EvictionPolicy, LeafLinks, LruPolicy, Rating, S3FifoPolicy, TucPolicy
from ucxkv.policy.base import Names, Slots


class WatchedPolicy:
    """LRU that is told everything, and asserts that it is told in order: every block enters once and before anything
    else is said of it, is a leaf only while it is in memory, and leaves once; the time never goes back.
    """

    rule = "watched"
    side_bytes = 0

    def __init__(self, links: LeafLinks) -> None:
        self.lru = LruPolicy(links)
        self._last_use = links.last_use
        self.known: dict[int, int] = {}
        """Slot -> its 64 bits of the key."""
        self.cold: set[int] = set()
        self.now = 0
        self.uses = 0

    def tick(self, now: int) -> None:
        assert now >= self.now, "time goes back"
        self.now = now

    def enter(self, slots: Slots, names: Names, positions: npt.NDArray[np.int64], parents: Slots) -> None:
        for slot, name, position, parent in zip(slots, names, positions, parents, strict=True):
            assert int(slot) not in self.known, "a block enters twice"
            assert parent < 0 or int(parent) in self.known, "a block enters before its parent"
            assert position == 0 or parent >= 0
            assert self._last_use[slot] == self.now
            self.known[int(slot)] = int(name)

    def reuse(self, slots: Slots) -> None:
        assert len(set(slots.tolist())) == len(slots)
        assert set(slots.tolist()) <= self.known.keys(), "a block is used that never entered"
        assert all(self._last_use[slot] <= self.now for slot in slots.tolist())
        self.uses += len(slots)

    def leave(self, slot: int, *, is_evicted: bool) -> None:
        del self.known[slot]
        self.cold.discard(slot)

    def cool(self, slots: Iterable[int]) -> None:
        for slot in slots:
            assert slot in self.known and slot not in self.cold, "a block leaves memory twice"
            self.cold.add(slot)

    def warm(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.cold.remove(slot)

    def add(self, slot: int) -> None:
        self._is_here(slot)
        assert self._last_use[slot] == self.now
        self.lru.add(slot)

    def readmit(self, slot: int) -> None:
        self._is_here(slot)
        self.lru.readmit(slot)

    def touch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._is_here(slot)
            assert self._last_use[slot] == self.now
            self.lru.touch((slot,))

    def _is_here(self, slot: int) -> None:
        assert slot in self.known, "a leaf that never entered"
        assert slot not in self.cold, "a leaf that is not in memory"

    def remove(self, slot: int) -> None:
        self.lru.remove(slot)

    def pop(self) -> int:
        return self.lru.pop()

    def put_back(self, slots: Sequence[int]) -> None:
        self.lru.put_back(slots)

    def rate(self, slot: int) -> Rating:
        assert slot in self.known
        return Rating()

    def leaves(self) -> list[int]:
        return self.lru.leaves()

    def __len__(self) -> int:
        return len(self.lru)


def deep(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Later blocks save more."""
    return 1.0 + positions


POLICIES: dict[str, Callable[[LeafLinks], EvictionPolicy]] = {
    "lru": LruPolicy,
    "s3fifo": S3FifoPolicy,
    "tuc": lambda links: TucPolicy(links, deep, ghosts_max=8),
    "watched": WatchedPolicy,
}
