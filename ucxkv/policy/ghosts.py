"""What is remembered of evicted blocks: when they were used last and how often, in a ring of fixed size.

Invariants: a name is in the index exactly while its place in the ring is live; a new ghost takes the oldest place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucxkv.policy.base import Names, view_of

__all__ = ["Ghosts"]

Bytes = npt.NDArray[np.uint8]
Ticks = npt.NDArray[np.int64]


class Ghosts:
    """See the module. size: how many are remembered; with 0 none are."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._index: dict[int, int] = {}
        self._names: list[int] = [-1] * size
        self._last_use: Ticks = np.full(size, -1, np.int64)  # -1: not live
        self._facts: Bytes = np.zeros((3, size), np.uint8)
        self._hits, self._kids, self._classes = (view_of(row) for row in self._facts)
        self._used = view_of(self._last_use)
        self._at = 0

    def __len__(self) -> int:
        return len(self._index)

    def put(self, name: int, last_use: int, hits: int, kids: int, kind: int) -> tuple[int, int] | None:
        """Remember a block; answers the last use and class of the one that is forgotten for it, if any.

        kind: its class.
        """
        if not self.size:
            return last_use, kind
        at = self._at
        self._at = at + 1 if at + 1 < self.size else 0
        forgotten = None
        if self._used[at] >= 0:
            del self._index[self._names[at]]
            forgotten = self._used[at], self._classes[at]
        older = self._index.get(name)
        if older is not None:  # the same block twice: the newer counts
            self._used[older] = -1
        self._index[name] = at
        self._names[at], self._used[at] = name, last_use
        self._hits[at], self._kids[at], self._classes[at] = hits, kids, kind
        return forgotten

    def take(self, names: Names, now: int) -> tuple[Bytes, Bytes, Ticks, Bytes]:
        """Facts of blocks that are back, and forget them: uses with this one, children seen, wait, class.

        Of a block that is not remembered the wait is -1 and all else 0.
        """
        n = len(names)
        hits, kids, classes = np.zeros((3, n), np.uint8)
        waits: Ticks = np.full(n, -1, np.int64)
        if self._index:
            find = self._index.get
            places = [find(name, -1) for name in names.tolist()]
            for i, at in enumerate(places if max(places) >= 0 else ()):
                if at >= 0:
                    del self._index[self._names[at]]
                    hits[i] = min(2, self._hits[at] + 1)
                    kids[i], classes[i] = self._kids[at], self._classes[at]
                    waits[i] = max(0, now - self._used[at])
                    self._used[at] = -1
        return hits, kids, waits, classes

    def waiting(self, stride: int) -> tuple[Ticks, Bytes]:
        """Last use and class of all that are remembered, or of every `stride`-th place."""
        used = self._last_use[::stride]
        live = used >= 0
        return used[live], self._facts[2, ::stride][live]
