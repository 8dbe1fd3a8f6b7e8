"""In whose chain a block is: the root of one key, and all blocks below chosen roots.

A chain lives in the shard of its root, so the root says which log a block belongs to. What is remembered of a slot
counts only under the generation it was seen with: a block's chain does not change while it is visible, and no other
block ever has its generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.descent import with_descendants
from ucxkv.directory.durable import Staged
from ucxkv.directory.events import Roots
from ucxkv.directory.slots import KEY_BYTES, NONE, U32, Records
from ucxkv.directory.writing import Writing

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

Mask = npt.NDArray[np.bool_]
_REMEMBERED_MAX = 1 << 14  # about 4 MB of Python objects
_STRIDE = 64  # of the blocks that a walk passes, one in so many is remembered besides the one that was asked for


class RootFinder:
    """See the module. Only a Directory makes it; nothing here changes it."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._remembered: dict[int, tuple[int, bytes]] = {}
        """Slot -> (generation, root), the one used last behind."""

    def root_of(self, key: bytes) -> bytes | None:
        """See `Directory.root_of`."""
        directory = self._directory
        slot = int(directory.table.find(key)[0])
        if slot >= 0:
            return None if directory.words.is_derived(slot) else self._of_slot(slot)
        block = directory.durable.staged.get(key) or directory.parts.writing.get(key)
        return None if block is None else self._of_pending(block)

    def _of_pending(self, block: Staged | Writing) -> bytes | None:
        """The root of a block that is not visible yet; each block passed keeps it."""
        if isinstance(block, Staged) and block.is_doomed:
            return None  # what it hung on is gone; so is every block below marked
        passed: list[Staged | Writing] = []
        while not block.root:
            passed.append(block)
            above = block.above if isinstance(block, Staged) else block.parent
            if above is None:
                block.root = self._of_slot(block.parent_slot) if block.parent_slot >= 0 else block.key
            else:
                block = above
        for one in passed:
            one.root = block.root
        return block.root

    def _of_slot(self, slot: int) -> bytes:
        words, parent, remembered = self._directory.words, self._directory.parent, self._remembered
        passed: list[int] = []
        while True:
            generation = words.generation(slot)
            known = remembered.get(slot)
            if known is not None and known[0] == generation:
                root = known[1]
                remembered[slot] = remembered.pop(slot)
                break
            above = parent[slot]
            if above == NONE:
                root = words.key(slot)
                break
            passed.append(slot)
            slot = above
        for one in reversed(passed[::_STRIDE]):
            remembered.pop(one, None)
            remembered[one] = words.generation(one), root
            if len(remembered) > _REMEMBERED_MAX:
                del remembered[next(iter(remembered))]
        return root

    def check(self) -> None:
        """Assert that what is remembered of blocks that are visible is so, and that it is bounded."""
        directory = self._directory
        assert len(self._remembered) <= _REMEMBERED_MAX
        for slot, (generation, root) in self._remembered.items():
            if directory.table.records["state"][slot] != 1 or directory.words.generation(slot) != generation:
                continue
            while directory.parent[slot] != NONE:
                slot = directory.parent[slot]
            assert directory.words.key(slot) == root, "another root is remembered"


def below_roots(directory: Directory, roots: Roots) -> npt.NDArray[np.int64]:
    """Slot numbers of all visible blocks whose root `roots` picks, and of their parts, the deepest first; int64[m].

    Work: n log(depth) for n slots in use, without a step in Python for any of them.
    """
    table = directory.table
    records, parents = table.records[: table.fresh], directory.arrays["parent"][: table.fresh]
    is_visible = records["state"] == 1
    above: U32 = np.where(is_visible, parents, np.uint32(NONE))
    tops = np.flatnonzero(is_visible & (above == NONE))
    marked = np.zeros(len(records), np.bool_)
    marked[tops[picked(records["key"][tops], roots)]] = True
    return with_descendants(above, marked)


def picked(keys: Records, roots: Roots) -> Mask:
    """What `roots` says of these keys; any array of n x 16 bytes. bool[n]."""
    n = keys.nbytes // KEY_BYTES
    if not n:
        return np.zeros(0, np.bool_)
    out = np.asarray(roots(np.ascontiguousarray(keys).view(np.uint8).reshape(n, KEY_BYTES)))
    if out.shape != (n,) or out.dtype != np.bool_:
        raise ValueError(f"of {n} roots, {out.dtype}{list(out.shape)} is said, not bool[{n}]")
    return out
