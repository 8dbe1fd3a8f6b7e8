"""Which blocks hang on a block: the children of each visible block, in lists through arrays.

A copy on disk that is gone takes its block along and all that is below it. Without this, finding those means looking
at the parent of every slot there is. Kept only with a disk tier, whose files end all the time; elsewhere such a loss is
a node's or a damaged value's, and is looked for.

Invariants
- From `first` of a visible block the list through `next` has each of its visible children once, parts left out; `prev`
  is the way back. Entries are slot numbers plus one, 0 is the end, so that memory is touched by use only.
- `first` of a slot that is no visible block is 0. `next` and `prev` count only while a block has a parent.
- A block that goes without its parent is taken out of the list; one that goes with it need not be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.slots import NONE, as_memory

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory


class Offspring:
    """See the module. Only a Directory and its parts make and call it. is_on: without it, nothing is kept."""

    def __init__(self, directory: Directory, *, is_on: bool) -> None:
        self._directory = directory
        self.is_on = is_on
        n = directory.table.capacity if is_on else 0
        self.arrays = {name: np.zeros(n, np.uint32) for name in ("first", "next", "prev")}
        self._first, self._next, self._prev = (as_memory(array).cast("I") for array in self.arrays.values())

    def came(self, slots: Iterable[int]) -> None:
        """These blocks are visible now; `parent` says where they hang."""
        parent, first, after, before = self._directory.parent, self._first, self._next, self._prev
        for slot in slots:
            above = parent[slot]
            if above != NONE:
                head = first[above]
                after[slot], before[slot] = head, 0
                if head:
                    before[head - 1] = slot + 1
                first[above] = slot + 1

    def left_parent(self, slot: int) -> None:
        """A block goes whose parent stays."""
        left, right = self._prev[slot], self._next[slot]
        if left:
            self._next[left - 1] = right
        else:
            self._first[self._directory.parent[slot]] = right
        if right:
            self._prev[right - 1] = left

    def left(self, slot: int) -> None:
        """A block goes, and with it or before it all that hangs on it."""
        self._first[slot] = 0

    def gone(self, slots: npt.NDArray[np.int64]) -> None:
        """The same for many at once."""
        if self.is_on:
            self.arrays["first"][slots] = 0

    def of(self, slot: int) -> list[int]:
        """The children of a block."""
        found: list[int] = []
        child = self._first[slot]
        while child:
            found.append(child - 1)
            child = self._next[child - 1]
        return found

    def with_descendants(self, slots: Iterable[int]) -> tuple[list[int], list[int]]:
        """These blocks and all below them, children before parents; and those among them whose parent is not.

        Work: in proportion to what is found.
        """
        found = set(slots)
        waiting = list(found)
        while waiting:
            new = [child for child in self.of(waiting.pop()) if child not in found]
            found.update(new)
            waiting += new
        parent = self._directory.parent
        tops = [slot for slot in found if parent[slot] not in found]
        order = list(tops)
        for slot in order:  # grows as it goes: all children of what is found are found
            order += self.of(slot)
        order.reverse()
        return order, tops

    def check(self, blocks: set[int]) -> None:
        """Assert that the lists are what looking at every block's parent finds. blocks: all visible ones."""
        if not self.is_on:
            return
        parent = self._directory.parent
        children: dict[int, list[int]] = {}
        for slot in blocks:
            children.setdefault(parent[slot], []).append(slot)
        for slot in range(self._directory.table.capacity):
            listed = self.of(slot)
            assert sorted(listed) == sorted(children.get(slot, ())), "not a block's children"
            back = [0, *(child + 1 for child in listed)]
            assert [self._prev[child] for child in listed] == back[:-1], "no way back from a child"
