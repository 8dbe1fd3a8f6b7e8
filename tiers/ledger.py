"""Which parts of a segment are lent to somebody, in memory that outlives the process: what a restarted node has to
leave alone while a process of before may still write.

Invariants
- The count of a unit (64 KiB of the segment) is at least the number of lent extents that touch it, at any instant and
  so also at that of a kill -9: an extent is counted before anybody is told of it, and uncounted after nobody holds it.
- Counts never go back by themselves: what an incarnation left counted stays so until a later one takes it out
  (`subtract`), which knows that no process of before can write any more.

Format: u32 a unit, little endian, from the start of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .slabs import UNIT_BYTES

__all__ = ["GrantLedger", "ledger_bytes"]

_SPAN_MAX = 8
_FEW = 4
"""Up to so many extents a loop is faster than arrays."""


def ledger_bytes(segment_bytes: int) -> int:
    """Bytes of ledger for a segment."""
    return 4 * (segment_bytes // UNIT_BYTES)


class GrantLedger:
    """Counts over `memory` (writable, `ledger_bytes` long), which is kept; zeroed memory is an empty ledger."""

    def __init__(self, memory: memoryview) -> None:
        self._counts: npt.NDArray[np.uint32] | None = np.frombuffer(memory, np.uint32)
        self._cells = memory.cast("I")

    def add(self, offsets: Sequence[int], length: int) -> None:
        """Extents of `length` bytes at these offsets are about to be lent."""
        self._change(offsets, length, 1)

    def remove(self, offsets: Sequence[int], length: int) -> None:
        """They are no longer."""
        self._change(offsets, length, -1)

    def _change(self, offsets: Sequence[int], length: int, by: int) -> None:
        counts, cells = self._counts, self._cells
        if counts is None or not offsets:
            return
        if len(offsets) <= _FEW:
            for offset in offsets:
                for unit in range(offset // UNIT_BYTES, (offset + length - 1) // UNIT_BYTES + 1):
                    cells[unit] += by
            return
        step = np.uint32(by % (1 << 32))
        starts = np.asarray(offsets, np.int64)
        first, last = starts // UNIT_BYTES, (starts + length - 1) // UNIT_BYTES
        span = int((last - first).max()) + 1
        if span > _SPAN_MAX:
            for one, other in zip(first.tolist(), last.tolist(), strict=True):
                counts[one : other + 1] += step
            return
        for unit in range(span):
            np.add.at(counts, first[first + unit <= last] + unit, step)

    def units(self) -> list[int]:
        """The units that are counted, ascending."""
        return [] if self._counts is None else np.flatnonzero(self._counts).tolist()

    def snapshot(self) -> npt.NDArray[np.uint32]:
        """A copy of the counts."""
        assert self._counts is not None, "the ledger is closed"
        return self._counts.copy()

    def subtract(self, counts: npt.NDArray[np.uint32]) -> None:
        """Take out what an earlier incarnation had left, as `snapshot` gave it then."""
        if self._counts is not None:
            self._counts -= counts

    def close(self) -> None:
        """Leave the counts as they are from now on: who holds what still holds it when this process is gone."""
        self._counts = None
        self._cells = memoryview(b"").cast("I")
