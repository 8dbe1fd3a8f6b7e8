"""Memory that O_DIRECT takes: page-aligned, and addresses of what callers bring.

Pieces come from an arena that the engine was told of, as far as it goes, else each has memory of its own. A piece is
lent to one user at a time; those that come back are kept for the next batch: the arena's always, of the others
`_KEPT_BYTES`."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from ..copy import address_of
from ..io import DIRECT_ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from ..io import IoEngine

__all__ = ["AlignedMemory", "AlignedPiece", "flat_bytes"]

_ARENA_BYTES = 8 << 20
"""As much as may be under way by default. It is pinned where the kernel allows, so it is taken at once."""
_PIECE_BYTES_MAX = (1 << 20) + DIRECT_ALIGNMENT
"""Of the arena: a full batch that was copied together."""
_KEPT_BYTES = 16 << 20


class AlignedPiece:
    """Page-aligned bytes: `view` (u8), at `address`. of_arena: it lies there."""

    __slots__ = ("address", "of_arena", "view")

    def __init__(self, nbytes: int, view: NDArray[np.uint8] | None = None) -> None:
        self.of_arena = view is not None
        self.view: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8) if view is None else view
        self.address = address_of(self.view)


class AlignedMemory:
    """Lends pieces. engine: told of the arena, None for no arena."""

    def __init__(self, engine: IoEngine | None = None) -> None:
        self._engine = engine
        self._arena: NDArray[np.uint8] | None = None
        self._cut = 0  # bytes of the arena that were made pieces
        self._kept: dict[int, list[AlignedPiece]] = {}
        self._kept_bytes = 0

    def take(self, nbytes: int) -> AlignedPiece:
        """A piece of at least nbytes; its contents are anything."""
        size = DIRECT_ALIGNMENT  # a header, and behind it a power of two of bytes: of payload, most of the time
        if nbytes > size:
            size += max(size, 1 << (nbytes - size - 1).bit_length())
        kept = self._kept.get(size)
        if kept:
            piece = kept.pop()
            self._kept_bytes -= 0 if piece.of_arena else size
            return piece
        if size <= _PIECE_BYTES_MAX and self._cut + size <= _ARENA_BYTES and self._engine is not None:
            if self._arena is None:
                self._arena = np.frombuffer(mmap.mmap(-1, _ARENA_BYTES), np.uint8)
                self._engine.register(address_of(self._arena), _ARENA_BYTES)
            self._cut += size
            return AlignedPiece(size, self._arena[self._cut - size : self._cut])
        return AlignedPiece(size)

    def give(self, piece: AlignedPiece) -> None:
        """Take it back: nobody reads or writes it any more."""
        size = piece.view.nbytes
        if not piece.of_arena:
            if self._kept_bytes + size > _KEPT_BYTES:
                return
            self._kept_bytes += size
        self._kept.setdefault(size, []).append(piece)

    def unregister(self) -> None:
        """Take back what the engine was told: no piece is lent, and none is taken any more."""
        if self._engine is not None and self._arena is not None:
            self._engine.unregister(address_of(self._arena))
        self._engine = self._arena = None


def flat_bytes(data: Buffer, *, writable: bool = False) -> NDArray[np.uint8]:
    """The bytes of a buffer as u8, nothing copied. ValueError when it is not C-contiguous, empty, or read-only and
    must not be."""
    view = memoryview(data)
    if not view.c_contiguous or not view.nbytes:
        raise ValueError("a buffer must be C-contiguous and not empty")
    if writable and view.readonly:
        raise ValueError("the buffer to read into is read-only")
    return np.frombuffer(view, np.uint8)
