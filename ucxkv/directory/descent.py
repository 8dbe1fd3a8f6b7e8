"""Who hangs on whom: the descendants of a set of slots, for all slots at once by pointer jumping."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucxkv.directory.slots import U32

Mask = npt.NDArray[np.bool_]


def with_descendants(parents: U32, marked: Mask) -> npt.NDArray[np.int64]:
    """Slot numbers of the marked slots and of all their descendants, the deepest first; int64[m].

    parents: u32[n], the parent's slot number, or anything >= n for none. marked: bool[n]; both are left as they are.
    Work: n log(depth). Source: pointer jumping, as in Wyllie's list ranking.
    """
    n = len(parents)
    up = np.full(n + 1, n, np.int64)  # up[n] = n: nobody, its own ancestor
    np.copyto(up[:n], np.minimum(parents, np.uint32(n)))
    below = np.zeros(n + 1, np.bool_)
    below[:n] = marked
    depth = (up != n).astype(np.int64)
    while (up != n).any():
        below |= below[up]
        depth += depth[up]
        up = up[up]
    slots = np.flatnonzero(below[:n])
    order = np.argsort(-depth[slots], kind="stable")
    return slots[order]
