"""The seams between who keeps blocks (the directory, a tier's `Residents`) and an eviction policy.

A policy picks among *leaves* only: blocks that nothing holds (no visible or writing child, no lease), so whatever it
picks may go and every prefix stays closed. It is pure: no clock (its keeper writes `last_use` and passes the time in),
no random source of its own, no input or output.

An `EvictionPolicy` needs to know the leaves and nothing else. A `LearningPolicy` is told about all blocks besides:
who came, who was used again, who left. Its keeper calls, in this order,

    a use      tick(now), reuse(all used blocks), then writes last_use, then touch(the leaves among them)
    an arrival tick(now), writes last_use, remove(parent, if it was a leaf), enter(the new chain), add(its last block)
    a departure pop() or remove(), leave(the block), then readmit(its parent, if nothing holds that any more)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

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


class EvictionPolicy(Protocol):
    """Keeps the leaves and says which of them goes next."""

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

    def leaves(self) -> list[int]:
        """All leaves, the next victim first. For checks and reports."""
        ...

    def __len__(self) -> int:
        """How many leaves there are."""
        ...


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """Keeps the leaves and learns from every use, also of blocks that are no leaves and of blocks that are gone."""

    def tick(self, now: int) -> None:
        """The time, in ticks of `last_use`, of all calls until the next tick. It never goes back."""
        ...

    def enter(self, slots: Slots, names: Names, positions: npt.NDArray[np.int64], parent: int) -> None:
        """These new blocks are a chain below the block in slot `parent` (-1: a root, or a parent elsewhere).

        positions: of each block's first token in its sequence.
        """
        ...

    def reuse(self, slots: Slots) -> None:
        """These blocks are used again now; `last_use` still says when they were used before."""
        ...

    def leave(self, slot: int, *, is_evicted: bool) -> None:
        """The block in this slot is gone. Evicted ones may come back; deleted and damaged ones are forgotten."""
        ...
