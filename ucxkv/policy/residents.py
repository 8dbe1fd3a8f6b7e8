"""The blocks of one tier at one place: their slots, their chains, and which of them goes next.

Invariants, all of them checked by `check`:
- a block's holds are its children here plus what others hold it for (children elsewhere, leases);
- the policy's leaves are exactly the blocks with no holds; only a leaf is ever evicted, so chains stay closed;
- a slot is free or holds one block; there are never more blocks than slots.

Pure: the time is passed in, in ticks of 10 ms. The directory keeps the same book for its slot table; this one is for
tiers that have no directory of their own, and for the simulator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ucxkv.policy.base import EvictionPolicy, LeafLinks, LearningPolicy, Names, Slots, view_of

__all__ = ["NONE", "Residents"]

NONE = -1
"""No parent: a root, or a block whose parent is kept elsewhere."""


class Residents:
    """See the module. policy: makes the policy over this table's arrays."""

    def __init__(self, slots_count: int, policy: Callable[[LeafLinks], EvictionPolicy]) -> None:
        self.slots_count = slots_count
        self.last_use: npt.NDArray[np.uint32] = np.zeros(slots_count, np.uint32)
        self.parents: npt.NDArray[np.int64] = np.full(slots_count, NONE, np.int64)
        self.holds: npt.NDArray[np.int64] = np.full(slots_count, NONE, np.int64)
        self._parent, self._hold = view_of(self.parents), view_of(self.holds)
        self._prev: npt.NDArray[np.uint32] = np.zeros(slots_count, np.uint32)
        nxt: npt.NDArray[np.uint32] = np.zeros(slots_count, np.uint32)
        self.policy = policy(LeafLinks(view_of(self._prev), view_of(nxt), view_of(self.last_use)))
        self._learner = self.policy if isinstance(self.policy, LearningPolicy) else None
        self._free = list(range(slots_count - 1, -1, -1))

    def __len__(self) -> int:
        return self.slots_count - len(self._free)

    @property
    def free_count(self) -> int:
        """Slots without a block."""
        return len(self._free)

    def next_slots(self, count: int) -> Slots:
        """The slots that the next `insert` of so many blocks will take."""
        return np.array(self._free[len(self._free) - count :], np.int64)

    def use(self, slots: Slots, now: int) -> None:
        """These blocks were used; a chain in token order, which is touched from its tail."""
        if self._learner is not None:
            self._learner.tick(now)
            self._learner.reuse(slots)
        self.last_use[slots] = now
        leaves = slots[self.holds[slots] == 0]
        if len(leaves):
            self.policy.touch(leaves[::-1].tolist())

    def insert(self, parent: int, names: Names, positions: npt.NDArray[np.int64], now: int) -> Slots:
        """Take in new blocks, a chain below slot `parent` (or NONE); their slots. There must be as many free."""
        n = len(names)
        assert 0 < n <= len(self._free), f"{n} blocks and {len(self._free)} free slots"
        taken = self._free[-n:]
        del self._free[-n:]
        slots = np.array(taken, np.int64)
        self.last_use[slots] = now
        self.parents[slots[1:]] = slots[:-1]
        self.parents[slots[0]] = parent
        self.holds[slots] = 1
        if self._learner is not None:
            self._learner.tick(now)
        if parent != NONE:
            self.hold(parent)
        if self._learner is not None:
            self._learner.enter(slots, names, positions, self.parents[slots])
        last = taken[-1]
        self._hold[last] = 0
        self.policy.add(last)
        return slots

    def evict(self) -> int:
        """Let the policy's next leaf go; its slot, -1 when every block is held."""
        slot = self.policy.pop()
        if slot >= 0:
            self._go(slot, is_evicted=True)
        return slot

    def drop(self, slot: int) -> None:
        """Forget a leaf that was deleted or damaged, or that another tier let go."""
        assert self._hold[slot] == 0, f"slot {slot} is held {self._hold[slot]} times"
        self.policy.remove(slot)
        self._go(slot, is_evicted=False)

    def hold(self, slot: int) -> None:
        """Keep a block for one more child or lease."""
        if not self._hold[slot]:
            self.policy.remove(slot)
        self._hold[slot] += 1

    def release(self, slot: int) -> None:
        """Take one hold back; without holds it is a leaf again."""
        holds = self._hold[slot] - 1
        assert holds >= 0, f"slot {slot} is not held"
        self._hold[slot] = holds
        if not holds:
            self.policy.readmit(slot)

    def check(self) -> None:
        """Assert the module's invariants."""
        there = np.flatnonzero(self.holds >= 0)
        assert len(there) == len(self) and not set(self._free) & set(there.tolist())
        inner = self.parents[there]
        children = np.bincount(inner[inner >= 0], minlength=self.slots_count)
        assert np.all(self.holds[there] >= children[there]) and not children[self._free].any()
        leaves = self.policy.leaves()
        assert len(leaves) == len(set(leaves)) == len(self.policy)
        assert set(leaves) == set(there[self.holds[there] == 0].tolist())
        assert set(np.flatnonzero(self._prev).tolist()) <= set(leaves)

    def _go(self, slot: int, *, is_evicted: bool) -> None:
        if self._learner is not None:
            self._learner.leave(slot, is_evicted=is_evicted)
        self._hold[slot] = NONE
        self._free.append(slot)
        parent = self._parent[slot]
        if parent != NONE:
            self.release(parent)
