"""What the eviction policy is told, and when: leaves at once, everything that it learns from in batches.

A policy that ranks by order alone (`EvictionPolicy`) is told of leaves and uses as they come: that is a few stores a
block. A `LearningPolicy` costs more a call, so what comes and what is used is written down, by tick (10 ms), and worked
off before it matters: before a block is picked or goes, and by a `Tick`, `DELAY_NS` after the first or at once after
`SOON` blocks, which is when the request that brought them is answered; without one, at `BACKLOG` blocks. So a put costs
an append a block, and the work is done for many blocks in one call.

Invariants, with a learner
- Without a backlog the blocks it knows are exactly the visible ones, whatever holds them and in whatever tier they are;
  derived slots are none. It knows one to be cool exactly while the block is cold.
- A block in the backlog as new is no leaf of the policy's yet, and no slot leaves the table while there is a backlog:
  a slot number means the same block in all of it.
- `last_use` is written as the backlog is worked off, so that the policy finds in it what it has been told of.
- `depth` is how many blocks are above a block, as far as this table knows them; a block whose parent is elsewhere
  counts as a root. It stops at 65,535.

What the policy picks, and what else befalls blocks in their tiers, goes to `decisions` when there is a log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.slots import NONE, as_memory
from ucxkv.policy.base import EvictionPolicy, LearningPolicy
from ucxkv.policy.cost import Verdict
from ucxkv.policy.decisions import Decision, DecisionLog

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

__all__ = ["BACKLOG", "DAMAGED", "DELAY_NS", "Ranking"]

DAMAGED = "its bytes, or those of a block above it, did not match their sum"

SOON, BACKLOG = 256, 4096
DELAY_NS = 100_000_000
DEPTH_MAX = 0xFFFF
PROMOTED_TICKS = 200
"""A block is promoted because somebody wants it; that it is used within so long afterwards is the same use."""
_NAMED_MAX = 256
"""Of blocks that go together by a loss, so many get a line in the log."""


@dataclass(slots=True)
class _Span:
    """What happened in one tick. came: slots, parents before children; used: in the order of the uses."""

    clock: int
    came: list[int] = field(default_factory=list)
    used: dict[int, None] = field(default_factory=dict)


class Ranking:
    """See the module. Only a Directory and its parts make and call it."""

    def __init__(self, directory: Directory, policy: EvictionPolicy, decisions: DecisionLog | None) -> None:
        self._directory = directory
        self.policy = policy
        self.decisions = decisions
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        n = directory.table.capacity if self._learner is not None else 0
        self.depths: npt.NDArray[np.uint16] = np.zeros(n, np.uint16)
        self.depth = as_memory(self.depths).cast("H")
        self._spans: list[_Span] = []
        self._came: set[int] = set()
        self._count = 0
        self._due_ns: int | None = None
        self._promoted: dict[int, int] = {}
        """Slot -> tick of its promotion, of late, the oldest first."""

    def __len__(self) -> int:
        """How many blocks may leave memory."""
        return len(self.policy) + len(self.new_leaves())

    @property
    def side_bytes(self) -> int:
        """Bytes of the arrays that a learning policy needs, here and its own; 0 for one that ranks by order alone."""
        return self.depths.nbytes + (self._learner.side_bytes if self._learner is not None else 0)

    def new_leaves(self) -> set[int]:
        """Blocks that nothing holds and that the policy has not been told of yet."""
        holds = self._directory.holds
        return {slot for slot in self._came if not holds[slot]}

    # ---- leaves

    def remove(self, slot: int) -> None:
        """This block is no leaf any more; nothing happens when it wasn't one."""
        self.policy.remove(slot)

    def readmit(self, slot: int) -> None:
        """Nothing holds this block any more."""
        if slot not in self._came:
            self.policy.readmit(slot)

    # ---- what comes and what is used

    def came(self, slots: list[int], now_ns: int) -> None:
        """Blocks have become visible, parents before children; `parent` and `holds` are as they are to be."""
        if self._learner is not None:
            self._span(now_ns).came.extend(slots)
            self._came.update(slots)
            self._counted(len(slots), now_ns)
            return
        clock, last_use, holds = self._directory.clock(now_ns), self._directory.last_use, self._directory.holds
        for slot in slots:
            last_use[slot] = clock
            if not holds[slot]:
                self.policy.add(slot)

    def used(self, slots: list[int], now_ns: int) -> None:
        """Visible blocks were used, in this order."""
        if self._learner is not None:
            self._span(now_ns).used.update(dict.fromkeys(slots))
            self._counted(len(slots), now_ns)
            return
        clock, last_use, holds = self._directory.clock(now_ns), self._directory.last_use, self._directory.holds
        for slot in slots:
            last_use[slot] = clock
        self.policy.touch([slot for slot in slots if not holds[slot]])

    def came_held(self, slots: npt.NDArray[np.int64], now_ns: int) -> None:
        """The same for many at once that something holds, so that none is a leaf."""
        self.settle(now_ns)
        clock = self._directory.clock(now_ns)
        if self._learner is not None and len(slots):
            self._enter(self._learner, slots.tolist(), clock)
        self._directory.arrays["last_use"][slots] = clock

    def warmed(self, slots: list[int], now_ns: int) -> None:
        """Cold blocks are in memory again, for a use of them; `holds` says so already."""
        directory, clock = self._directory, self._directory.clock(now_ns)
        if self._learner is not None and slots:
            self.settle(now_ns)
            self._learner.reuse(np.array(slots, np.int64))
            self._learner.warm(slots)
            self._promoted.update(dict.fromkeys(slots, clock))
        for slot in slots:
            directory.last_use[slot] = clock
            if not directory.holds[slot]:
                self.policy.add(slot)

    def is_wanted(self, slot: int) -> bool:
        """Whether a block was used again since it came and is worth more than what left memory last. Of the past as
        far as the policy has been told of it; never so with a policy that knows only an order of uses.
        """
        rating = self.policy.rate(slot)
        return rating.uses > 0 and rating.worth >= rating.price and slot not in self._came

    # ---- what goes

    def cooled(self, slot: int) -> None:
        """A block that was picked has left memory and stays visible."""
        if self._learner is not None:
            self._learner.cool((slot,))

    def left(self, slot: int, *, is_evicted: bool) -> None:
        """This block, no leaf now, is being hidden. There must be no backlog."""
        if self._learner is not None:
            self._learner.leave(slot, is_evicted=is_evicted)

    def gone(self, slots: npt.NDArray[np.int64], now_ns: int, reason: str, *, is_evicted: bool = False) -> None:
        """These blocks are going all at once, whatever holds them; nothing about them has changed yet."""
        self.settle(now_ns)
        for slot in slots[self._directory.arrays["prev"][slots] != 0].tolist():
            self.policy.remove(slot)
        if self.decisions is not None:
            for slot in slots[:_NAMED_MAX].tolist():
                self.decided(slot, Verdict.DROP, reason, now_ns)
        if self._learner is not None:
            for slot in slots.tolist():
                self._learner.leave(slot, is_evicted=is_evicted)

    # ---- the backlog

    @property
    def backlog(self) -> int:
        """How many lines are written down."""
        return self._count

    def next_ns(self) -> int | None:
        """When `settle` is due; None: there is no backlog."""
        return self._due_ns

    def settle(self, now_ns: int) -> None:
        """Work off the backlog; the policy's time is now."""
        learner = self._learner
        if learner is None:
            return
        spans, self._spans = self._spans, []
        self._came, self._count, self._due_ns = set(), 0, None
        for span in spans:
            learner.tick(span.clock)
            if span.came:
                self._enter(learner, span.came, span.clock)
            if span.used:
                self._reuse(learner, list(span.used), span.clock)
        clock = self._directory.clock(now_ns)
        learner.tick(clock)
        promoted = self._promoted
        while promoted and promoted[slot := next(iter(promoted))] + PROMOTED_TICKS < clock:
            del promoted[slot]

    def check(self, blocks: set[int]) -> None:
        """Assert that the leaves are what nothing holds, and that what is new is there. blocks: all visible ones."""
        directory, leaves, new = self._directory, self.policy.leaves(), self.new_leaves()
        assert len(leaves) == len(set(leaves)) == len(self.policy)
        assert new.isdisjoint(leaves) and self._came <= blocks, "a block is new and known"
        assert new | set(leaves) == {slot for slot in blocks if not directory.holds[slot]}, (
            "the leaves are not what nothing holds"
        )
        prev = directory.arrays["prev"]
        assert set(np.flatnonzero(prev).tolist()) == set(leaves)
        assert set().union(*(span.came for span in self._spans)) == self._came
        assert (self._count == 0) == (self._due_ns is None) and self._count < BACKLOG

    def _span(self, now_ns: int) -> _Span:
        clock = self._directory.clock(now_ns)
        if not self._spans or self._spans[-1].clock != clock:
            self._spans.append(_Span(clock))
        return self._spans[-1]

    def _counted(self, blocks: int, now_ns: int) -> None:
        self._count += blocks
        if self._count >= BACKLOG:
            self.settle(now_ns)
        elif self._count >= SOON:
            self._due_ns = now_ns
        elif self._due_ns is None:
            self._due_ns = now_ns + DELAY_NS

    def _enter(self, learner: LearningPolicy, came: list[int], clock: int) -> None:
        directory, depth = self._directory, self.depth
        slots = np.array(came, np.int64)
        above = directory.arrays["parent"][slots]
        parents = np.where(above == NONE, np.int64(-1), above)
        for slot, parent in zip(came, parents.tolist(), strict=True):
            depth[slot] = min(depth[parent] + 1, DEPTH_MAX) if parent >= 0 else 0
        directory.arrays["last_use"][slots] = clock
        keys = np.ascontiguousarray(directory.table.records["key"][slots])
        names = keys.view(np.uint64).reshape(len(came), 2)[:, 0]
        learner.enter(slots, names, self.depths[slots].astype(np.int64), parents)
        held = directory.arrays["holds"][slots]
        for slot in slots[held == 0].tolist():
            learner.add(slot)
        if directory.cold.is_on:
            learner.cool(directory.cold.among(slots).tolist())

    def _reuse(self, learner: LearningPolicy, used: list[int], clock: int) -> None:
        arrays, slots = self._directory.arrays, np.array(used, np.int64)
        told = self._promoted
        new_uses = [slot for slot in used if slot not in told or told.pop(slot) + PROMOTED_TICKS < clock]
        learner.reuse(np.array(new_uses, np.int64) if told or len(new_uses) < len(used) else slots)
        arrays["last_use"][slots] = clock
        leaves = slots[arrays["holds"][slots] == 0]
        if len(leaves):
            learner.touch(leaves.tolist())

    # ---- decisions

    def decided(self, slot: int, verdict: Verdict, reason: str, now_ns: int) -> None:
        """Write down what happens to this block, while it is still in the table and before it moves."""
        log, directory = self.decisions, self._directory
        if log is None:
            return
        clock = directory.clock(now_ns)
        tier = "nvme" if directory.cold.is_cold(slot) else "host"
        to = "" if verdict is Verdict.DROP else "nvme" if verdict is Verdict.DEMOTE else "host"
        worth, price, hazard, _, _ = self.policy.rate(slot)
        age = max(0, clock - directory.last_use[slot])
        key = directory.words.key(slot)
        # as Decision(...), at half the cost: this is done for each block that goes
        log.record(tuple.__new__(Decision, (clock, key, verdict, tier, to, worth, price, reason, age, hazard)))
