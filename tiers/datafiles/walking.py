"""A file without an index, followed batch by batch from its head to the first that does not prove itself.

Every payload is compared with its sum. A block that has not its sum, or cannot be read, is left out: in the last batch
because that did not land, in an earlier one because it is damaged. A header that cannot be read ends the file's use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..copy import address_of
from ..datafile_format import BLOCK_BYTES, TOMBSTONE, Head, decode_batch, padded
from ..io import IoEngine, IoFailed
from .files import DataFile, read_piece
from .memory import AlignedMemory, AlignedPiece
from .reading import sums_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["walk"]

_WINDOW_BYTES = 4 << 20
"""Read at a time: the log's batches one by one would each wait for the disk twice."""


class _Window:
    """A part of the file in memory, which moves forward."""

    def __init__(self, engine: IoEngine, memory: AlignedMemory, file: DataFile) -> None:
        self._engine, self._memory, self._file = engine, memory, file
        self._piece: AlignedPiece | None = None
        self._start = self._end = 0

    async def at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Whole blocks of the file, until the next call. Raises as `transfer`."""
        if offset < self._start or offset + nbytes > self._end or self._piece is None:
            self.close()
            most = max(nbytes, min(_WINDOW_BYTES, self._file.file_bytes - offset))
            try:
                self._piece = await read_piece(self._engine, self._memory, self._file, offset, most)
            except IoFailed:
                if most == nbytes:
                    raise
                most = nbytes  # what cannot be read may lie behind what is needed
                self._piece = await read_piece(self._engine, self._memory, self._file, offset, most)
            self._start, self._end = offset, offset + most
        return self._piece.view[offset - self._start : offset - self._start + nbytes]

    def close(self) -> None:
        """Give its memory back."""
        if self._piece is not None:
            self._memory.give(self._piece)
            self._piece = None


async def walk(engine: IoEngine, memory: AlignedMemory, file: DataFile, head: Head) -> list[int]:
    """Begin the file's life again and add its batches; the offsets of damaged blocks. Raises as `transfer`."""
    file.begin(head.generation, head.sum)
    file.last_sequence = max(head.sequence - 1, 0)
    damaged: list[int] = []
    in_last: list[int] = []
    window = _Window(engine, memory, file)
    try:
        while file.offset + BLOCK_BYTES <= file.file_bytes:
            raw = await window.at(file.offset, BLOCK_BYTES)
            decoded = decode_batch(
                raw.tobytes(),
                file=file.number,
                generation=file.generation,
                previous=file.last_sum,
                offset=file.offset,
                end=file.file_bytes,
            )
            if decoded is None:
                break
            damaged += in_last
            batch, rows = decoded
            is_readable = True
            try:
                is_good = await _are_good(rows, await window.at(file.offset, batch.length), file.offset)
            except IoFailed:  # its header was read: what cannot be is a block or some
                window.close()
                is_readable = False
                is_good = await _are_good_one_by_one(engine, memory, file, rows)
            in_last = (rows["offset"][~is_good].astype(np.int64) * BLOCK_BYTES).tolist()
            if not is_readable:  # that is damage wherever it is
                damaged, in_last = damaged + in_last, []
            file.add(rows[is_good], batch.length, batch.sum, batch.sequence)
    finally:
        window.close()
    return damaged


async def _are_good_one_by_one(
    engine: IoEngine, memory: AlignedMemory, file: DataFile, rows: NDArray[np.void]
) -> NDArray[np.bool_]:
    """The same, each block read by itself; one that cannot be read is not good."""
    is_good = np.ones(len(rows), np.bool_)
    for at in np.flatnonzero((rows["flags"] & TOMBSTONE) == 0).tolist():
        row = rows[at : at + 1]
        begin = int(row["offset"][0]) * BLOCK_BYTES
        try:
            piece = await read_piece(engine, memory, file, begin, padded(int(row["length"][0])))
        except IoFailed:
            is_good[at] = False
            continue
        try:
            is_good[at] = (await _are_good(row, piece.view, begin))[0]
        finally:
            memory.give(piece)
    return is_good


async def _are_good(rows: NDArray[np.void], data: NDArray[np.uint8], start: int) -> NDArray[np.bool_]:
    """Which descriptors of a batch, whose bytes are `data` and stand at `start`, have payloads with their sums."""
    is_block = (rows["flags"] & TOMBSTONE) == 0
    found = rows[is_block]
    addresses = address_of(data) + found["offset"].astype(np.int64) * BLOCK_BYTES - start
    is_good = np.ones(len(rows), np.bool_)
    is_good[is_block] = await sums_of(addresses, found["length"]) == found["sum"]
    return is_good
