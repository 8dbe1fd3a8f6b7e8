"""S3-FIFO, leaf-first: a small queue for what is new, a main queue for what was used again, names of what left small.

After "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023), changed for chains of blocks: queues
hold leaves only. A block that is a leaf again because its last child went was queued before that child, so it goes to
the front of its queue. A block of the small queue that has been used twice moves to main at once, not when its turn
comes: its ancestors, which cannot be queued, are used at least as often and move with it.

For the same reason a block that goes to main, being remembered, takes those above it along.

A block that leaves memory for a slower tier is remembered where it is: on its way back it goes to main, as a ghost
does.

Invariants: a block belongs to small or main from `enter` to `leave`, and counts there while it is in memory; each queue
holds exactly its leaves; there are at most as many ghosts as slots. Every call is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ucxkv.policy.base import LeafLinks, Names, Rating, Slots, view_of

__all__ = ["S3FifoPolicy"]

SMALL_SHARE = 0.1
"""Of all blocks, how many the small queue may have before it is the one to evict from."""
_SMALL, _MAIN = 0, 1
_TWICE, _MOST = 2, 3


class S3FifoPolicy:
    """See the module. ghosts_max: names remembered; default one for each slot."""

    rule = "first in, not used since"

    def __init__(self, links: LeafLinks, ghosts_max: int | None = None) -> None:
        slots = len(links.prev)
        self.ghosts_max = slots if ghosts_max is None else ghosts_max
        self._leaf = links.prev
        self._uses: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._home: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._cools: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._is_cool = view_of(self._cools)
        self._names: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self._parents: npt.NDArray[np.int32] = np.full(slots, -1, np.int32)
        self._parent = view_of(self._parents)
        self._use, self._where, self._name = view_of(self._uses), view_of(self._home), view_of(self._names)
        self._queues: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._blocks = [0, 0]
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    @property
    def side_bytes(self) -> int:
        """Of its arrays; the names that it remembers come and go."""
        arrays = (self._uses, self._home, self._cools, self._names, self._parents)
        return sum(array.nbytes for array in arrays)

    def tick(self, now: int) -> None:
        """Nothing: order is all that counts here."""

    def enter(self, slots: Slots, names: Names, positions: npt.NDArray[np.int64], parents: Slots) -> None:
        """New blocks: to main when remembered, with all above them, else to small."""
        ghosts = self._ghosts
        self._names[slots] = names
        self._uses[slots] = 0
        self._home[slots] = _SMALL
        self._cools[slots] = 0
        self._parents[slots] = parents
        self._blocks[_SMALL] += len(slots)
        known = [at for at, name in enumerate(names.tolist()) if name in ghosts] if ghosts else []
        if known:
            for name in names[known].tolist():
                ghosts.pop(name, None)
            for slot in slots[known[::-1]].tolist():
                self._climb(slot)

    def _climb(self, slot: int) -> None:
        """Move a block and all above it to main: there it would hold them in small, where they could never go."""
        where, small, main = self._where, *self._queues
        while slot >= 0 and where[slot] == _SMALL:
            where[slot] = _MAIN
            if not self._is_cool[slot]:
                self._blocks[_SMALL] -= 1
                self._blocks[_MAIN] += 1
            if self._leaf[slot]:
                del small[slot]
                main[slot] = None
            slot = self._parent[slot]

    def reuse(self, slots: Slots) -> None:
        """Count a use of each; those of small that have two go to main."""
        uses = np.minimum(self._uses[slots] + 1, _MOST)
        self._uses[slots] = uses
        moving = slots[(uses >= _TWICE) & (self._home[slots] == _SMALL)]
        if not len(moving):
            return
        self._home[moving] = _MAIN
        self._uses[moving] = 0
        warm = len(moving) - int(self._cools[moving].sum())
        self._blocks[_SMALL] -= warm
        self._blocks[_MAIN] += warm
        small, main = self._queues
        for slot in moving[::-1].tolist():
            if self._leaf[slot]:
                del small[slot]
                main[slot] = None

    def leave(self, slot: int, *, is_evicted: bool) -> None:
        """Forget a block; the name of one that was evicted from small is kept."""
        where = self._where[slot]
        self._blocks[where] -= not self._is_cool[slot]
        self._is_cool[slot] = 0
        if is_evicted and where == _SMALL and self.ghosts_max:
            self._ghosts[self._name[slot]] = None
            if len(self._ghosts) > self.ghosts_max:
                self._ghosts.popitem(last=False)

    def cool(self, slots: Iterable[int]) -> None:
        """These count in no queue any more."""
        for slot in slots:
            assert not self._is_cool[slot], f"slot {slot} has left memory already"
            self._is_cool[slot] = 1
            self._blocks[self._where[slot]] -= 1

    def warm(self, slots: Iterable[int]) -> None:
        """These are back, in main."""
        for slot in slots:
            assert self._is_cool[slot], f"slot {slot} has not left memory"
            self._is_cool[slot] = 0
            self._blocks[self._where[slot]] += 1
            self._climb(slot)

    def add(self, slot: int) -> None:
        """Put a new leaf at the end of its queue."""
        assert not self._leaf[slot], f"slot {slot} is a leaf already"
        self._queues[self._where[slot]][slot] = None
        self._leaf[slot] = 1

    def readmit(self, slot: int) -> None:
        """Put a block that is a leaf again at the front of its queue: it came before the child that went."""
        self.add(slot)
        self._queues[self._where[slot]].move_to_end(slot, last=False)

    def remove(self, slot: int) -> None:
        """Take a leaf out; nothing happens when it isn't one."""
        if self._leaf[slot]:
            del self._queues[self._where[slot]][slot]
            self._leaf[slot] = 0

    def touch(self, slots: Iterable[int]) -> None:
        """Nothing: a use moves no block in a FIFO."""

    def pop(self) -> int:
        """The front of small while small has more than its share, else of main, passing by those used since."""
        small, main = self._queues
        is_small = self._blocks[_SMALL] > SMALL_SHARE * sum(self._blocks)
        if small and (is_small or not main):
            slot, _ = small.popitem(last=False)
            self._leaf[slot] = 0
            return slot
        use = self._use
        while main:  # each pass takes a use away, so it ends after three at most
            slot, _ = main.popitem(last=False)
            if not use[slot]:
                self._leaf[slot] = 0
                return slot
            use[slot] -= 1
            main[slot] = None
        return -1

    def put_back(self, slots: Sequence[int]) -> None:
        """To the front, in their order."""
        for slot in reversed(slots):
            self.readmit(slot)

    def rate(self, slot: int) -> Rating:
        """Its uses that count, at most three."""
        return Rating(uses=self._use[slot])

    def leaves(self) -> list[int]:
        """All leaves, each queue from its front on, the queue to evict from first."""
        first = _SMALL if self._blocks[_SMALL] > SMALL_SHARE * sum(self._blocks) else _MAIN
        return [*self._queues[first], *self._queues[1 - first]]

    def __len__(self) -> int:
        return len(self._queues[_SMALL]) + len(self._queues[_MAIN])
