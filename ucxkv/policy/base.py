"""The seam between the directory and an eviction policy.

A policy sees slot numbers of *leaves* only: blocks that nothing holds (no visible or writing child, no lease), so
whatever it picks may go and every prefix stays closed. It is pure: no clock (the directory writes `last_use` before it
calls), no random source of its own, no input or output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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
