"""Leaf-first LRU: the leaf that was used longest ago goes first.

Invariant: an intrusive doubly linked list over slot numbers holds exactly the leaves, ordered by last use up to the
approximation below. A block that becomes a leaf because its last child went is put where its own last use belongs, not
at an end: a shared prefix that every request touches does not age because one of its continuations was dropped.

Exact except in one case: to find that place the list is walked from both ends for `WALK` steps each. A block that
belongs deeper inside than that is placed where the walk from the young end stopped, so it may go later than it should,
not earlier. Among equal times (10 ms) such a block goes first, so that a chain is eaten up from its tail before the
next is begun.

`prev` holds 0 for no leaf, 1 for the youngest, slot + 2 else; `next` holds slot + 1 or 0 for the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ucxkv.policy.base import UNRATED, LeafLinks, Rating

WALK = 64
_FIRST = 1


class LruPolicy:
    """See the module."""

    rule = "used longest ago"
    __slots__ = ("_count", "_last_use", "_next", "_oldest", "_prev", "_youngest")

    def __init__(self, links: LeafLinks) -> None:
        self._prev, self._next, self._last_use = links.prev, links.next, links.last_use
        self._youngest = self._oldest = -1
        self._count = 0

    def add(self, slot: int) -> None:
        """Put a new leaf, used just now, at the young end."""
        assert not self._prev[slot], f"slot {slot} is a leaf already"
        self._link(slot, after=-1)

    def readmit(self, slot: int) -> None:
        """Put a block that is a leaf again where its last use belongs."""
        last_use, oldest = self._last_use, self._oldest
        assert not self._prev[slot], f"slot {slot} is a leaf already"
        if oldest >= 0 and last_use[oldest] >= last_use[slot]:  # what evicting a chain from its tail comes to
            self._next[oldest] = slot + 1
            self._prev[slot] = oldest + 2
            self._next[slot] = 0
            self._oldest = slot
            self._count += 1
        else:
            self._link(slot, after=self._place(last_use[slot]) if oldest >= 0 else -1)

    def remove(self, slot: int) -> None:
        """Take a leaf out; nothing happens when it isn't one."""
        if self._prev[slot]:
            self._unlink(slot)

    def touch(self, slots: Iterable[int]) -> None:
        """Move leaves to the young end."""
        for slot in slots:
            if slot != self._youngest and self._prev[slot]:
                self._unlink(slot)
                self._link(slot, after=-1)

    def pop(self) -> int:
        """Take out the oldest leaf; -1 when there is none."""
        slot = self._oldest
        if slot < 0:
            return -1
        younger = self._prev[slot] - 2
        self._prev[slot] = 0
        if younger < 0:
            self._youngest = self._oldest = -1
        else:
            self._next[younger] = 0
            self._oldest = younger
        self._count -= 1
        return slot

    def put_back(self, slots: Sequence[int]) -> None:
        """To the old end, in their order."""
        for slot in reversed(slots):
            self.readmit(slot)

    def rate(self, slot: int) -> Rating:
        """Nothing: the order is all there is."""
        return UNRATED

    def leaves(self) -> list[int]:
        """All leaves, oldest first."""
        out, slot = [], self._oldest
        while slot >= 0:
            out.append(slot)
            slot = self._prev[slot] - 2
        return out

    def __len__(self) -> int:
        return self._count

    def _place(self, used: int) -> int:
        """The leaf behind which (on its older side) a leaf of this last use belongs; -1: before the youngest."""
        last_use, prev, nxt = self._last_use, self._prev, self._next
        slot = self._oldest
        for _ in range(WALK):
            if last_use[slot] >= used:
                return slot
            slot = prev[slot] - 2
            if slot < 0:
                return -1
        slot = self._youngest
        for _ in range(WALK):
            older = nxt[slot] - 1
            if older < 0 or last_use[older] < used:
                return slot
            slot = older
        return slot

    def _link(self, slot: int, *, after: int) -> None:
        """Insert on the older side of `after`; -1: at the young end."""
        prev, nxt = self._prev, self._next
        if after < 0:
            older = self._youngest
            self._youngest = slot
            prev[slot] = _FIRST
        else:
            older = nxt[after] - 1
            nxt[after] = slot + 1
            prev[slot] = after + 2
        nxt[slot] = older + 1
        if older < 0:
            self._oldest = slot
        else:
            prev[older] = slot + 2
        self._count += 1

    def _unlink(self, slot: int) -> None:
        prev, nxt = self._prev, self._next
        younger, older = prev[slot] - 2, nxt[slot] - 1
        if younger < 0:
            self._youngest = older
        else:
            nxt[younger] = older + 1
        if older < 0:
            self._oldest = younger
        else:
            prev[older] = younger + 2
        prev[slot] = 0
        self._count -= 1
