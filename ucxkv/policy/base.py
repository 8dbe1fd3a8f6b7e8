"""The seams between who keeps blocks (the directory, a tier's `Residents`) and an eviction policy.

A policy picks among *leaves* only: blocks that nothing holds (no visible or writing child, no lease), so whatever it
picks may go and every prefix stays closed. It is pure: no clock (its keeper writes `last_use` and passes the time in),
no random source of its own, no input or output.

An `EvictionPolicy` needs to know the leaves and nothing else. A `LearningPolicy` is told about all blocks besides:
who came, who was used again, who left. Its keeper calls, in this order,

    a use      tick(now), reuse(all used blocks), then writes last_use, then touch(the leaves among them)
    an arrival tick(now), writes last_use, remove(parent, if it was a leaf), enter(the new blocks), add(the leaves of
               them)
    a departure pop() or remove(), leave(the block), then readmit(its parent, if nothing holds that any more)
    a move     pop() or remove(), cool(the block), readmit(its parent, ...) when it leaves the memory that the policy
               ranks for a slower tier, and is found there under the same slot; on its way back reuse, warm, and add(it)
               if it is a leaf
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

TICKS_PER_S = 100
"""Ticks of `last_use` and of every policy's time: 10 ms."""

Slots = npt.NDArray[np.int64]
"""Slot numbers, of a chain in token order."""
Names = npt.NDArray[np.uint64]
"""64 bits of each block's key, under which a policy remembers a block that has gone."""


def view_of(array: npt.NDArray[Any]) -> memoryview:
    """The items of an array as plain Python numbers, several times faster one by one than through the array."""
    return memoryview(cast(bytes, array))


@dataclass(frozen=True, slots=True)
class LeafLinks:
    """Per-slot arrays lent to a policy, each a u32 memoryview as long as the slot table.

    prev: the policy's own; all zero at the start, and must be zero again for every slot that is no leaf.
    next: the policy's own for leaves only; the slot table keeps its free list in the entries of free slots.
    last_use: read-only for the policy; when each block was used last, in units of 10 ms.
    """

    prev: memoryview
    next: memoryview
    last_use: memoryview


class Rating(NamedTuple):
    """What a policy knows of a block, for reports; zeros where it goes by order alone.

    worth: prefill seconds saved per second by keeping the block in memory, hazard (uses per second expected) x gain
    (seconds that a hit saves). price: the worth of what was evicted last. uses: since it came, up to a few.
    """

    worth: float = 0.0
    price: float = 0.0
    hazard: float = 0.0
    gain: float = 0.0
    uses: int = 0


UNRATED = Rating()


class EvictionPolicy(Protocol):
    """Keeps the leaves and says which of them goes next."""

    rule: str
    """Why its victims are its victims, in a few words for people."""

    def add(self, slot: int) -> None:
        """This new block is a leaf, used just now; `last_use` says so already."""
        ...

    def readmit(self, slot: int) -> None:
        """This block has become a leaf again; its last use, in `last_use`, may be long ago."""
        ...

    def remove(self, slot: int) -> None:
        """This block is no leaf any more; nothing happens when it wasn't one."""
        ...

    def touch(self, slots: Iterable[int]) -> None:
        """These leaves were used just now, in this order; `last_use` says so already."""
        ...

    def pop(self) -> int:
        """Take out the leaf to evict next; -1 when there is none."""
        ...

    def put_back(self, slots: Sequence[int]) -> None:
        """These leaves, popped in this order, stay after all."""
        ...

    def rate(self, slot: int) -> Rating:
        """What is known of the block in this slot, a leaf or not."""
        ...

    def leaves(self) -> list[int]:
        """All leaves, the next victim first. For checks and reports."""
        ...

    def __len__(self) -> int:
        """How many leaves there are."""
        ...


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """Keeps the leaves and learns from every use, also of blocks that are no leaves and of blocks that are gone."""

    @property
    def side_bytes(self) -> int:
        """Bytes of its arrays, by slot and by remembered block; what it queues of leaves is left out."""
        ...

    def tick(self, now: int) -> None:
        """The time, in ticks of `last_use`, of all calls until the next tick. It never goes back."""
        ...

    def enter(self, slots: Slots, names: Names, positions: npt.NDArray[np.int64], parents: Slots) -> None:
        """These blocks are new, parents before their children. They need not be of one chain.

        positions: of each block's first token in its sequence. parents: the slot of the block above each one, which has
        entered before or is in the same call; -1: a root, or a parent elsewhere.
        """
        ...

    def reuse(self, slots: Slots) -> None:
        """These blocks are used again now; `last_use` still says when they were used before."""
        ...

    def leave(self, slot: int, *, is_evicted: bool) -> None:
        """The block in this slot is gone. Evicted ones may come back; deleted and damaged ones are forgotten."""
        ...

    def cool(self, slots: Iterable[int]) -> None:
        """These blocks, no leaves now, are in a slower tier only; they keep their slots, and may be used and leave."""
        ...

    def warm(self, slots: Iterable[int]) -> None:
        """These blocks are in memory again, because of a use that `reuse` has told."""
        ...
