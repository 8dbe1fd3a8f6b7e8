"""What is remembered of evicted blocks: when they were used last and how often, in arrays of fixed size.

A name lies in one of the places of its set, `WAYS` or somewhat fewer; the one that comes to a full set takes the
oldest's place there. So many ways, because with 8 a tenth of what tuc saves in the Mooncake conversation trace is lost
to crowded sets. 15 bytes a ghost, all of them taken at the start: an index in a dictionary took 190.

Invariant: a place is live exactly while its `used` is not NONE; `len` counts the live ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucxkv.policy.base import Names, view_of

__all__ = ["Ghosts"]

Bytes = npt.NDArray[np.uint8]
Ticks = npt.NDArray[np.int64]
WAYS = 256
_NONE = 0xFFFFFFFF


class Ghosts:
    """See the module. size: how many are remembered, less what does not divide into sets; 0: none."""

    def __init__(self, size: int) -> None:
        self._sets = -(-size // WAYS)
        self._ways = size // self._sets if size else 0
        self.size = self._ways * self._sets
        self._names: npt.NDArray[np.uint64] = np.zeros((self._sets, self._ways), np.uint64)
        self._last_use: npt.NDArray[np.uint32] = np.full(self.size, _NONE, np.uint32)
        self._facts: Bytes = np.zeros((3, self.size), np.uint8)
        self._name = view_of(self._names.reshape(-1))
        self._hits, self._kids, self._classes = (view_of(row) for row in self._facts)
        self._used = view_of(self._last_use)
        self._turn = view_of(np.zeros(self._sets, np.uint8))
        """Of each set, the way that is written next."""
        self.nbytes = self._names.nbytes + self._last_use.nbytes + self._facts.nbytes + self._turn.nbytes
        """Of all its arrays."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, name: int, last_use: int, hits: int, kids: int, kind: int) -> tuple[int, int] | None:
        """Remember a block, which is not remembered now; answers the last use and class of the one that is forgotten
        for it, if any.

        kind: its class.
        """
        if not self.size:
            return last_use, kind
        row = name % self._sets
        turn = self._turn[row]
        self._turn[row] = turn + 1 if turn + 1 < self._ways else 0
        at = row * self._ways + turn
        used = self._used[at]
        forgotten = None
        if used != _NONE:
            forgotten = used, self._classes[at]
        else:
            self._count += 1
        self._name[at], self._used[at] = name, last_use
        self._hits[at], self._kids[at], self._classes[at] = hits, kids, kind
        return forgotten

    def take(self, names: Names, now: int) -> tuple[Bytes, Bytes, Ticks, Bytes]:
        """Facts of blocks that are back, and forget them: uses with this one, children seen, wait, class.

        Of a block that is not remembered the wait is -1 and all else 0.
        """
        n = len(names)
        hits, kids, classes = np.zeros((3, n), np.uint8)
        waits: Ticks = np.full(n, -1, np.int64)
        if self._count:
            rows = (names % np.uint64(self._sets)).astype(np.int64)
            which, ways = np.nonzero(self._names[rows] == names[:, None])
            places = rows[which] * self._ways + ways
            used = self._last_use[places]
            is_live = used != _NONE
            if is_live.any():
                which, places, used = which[is_live], places[is_live], used[is_live]
                hits[which] = np.minimum(2, self._facts[0, places] + 1)
                kids[which], classes[which] = self._facts[1, places], self._facts[2, places]
                waits[which] = np.maximum(0, now - used.astype(np.int64))
                self._last_use[places] = _NONE
                self._count -= len(np.unique(places))
        return hits, kids, waits, classes

    def waiting(self, stride: int) -> tuple[Ticks, Bytes]:
        """Last use and class of all that are remembered, or of every `stride`-th place."""
        used = self._last_use[::stride]
        live = used != _NONE
        return used[live].astype(np.int64), self._facts[2, ::stride][live]
