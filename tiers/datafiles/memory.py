"""Memory that O_DIRECT takes: page-aligned, and addresses of what callers bring.

Pieces are kept for the next batch, up to `_KEPT_BYTES`; a piece is lent to one user at a time."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from ..io import DIRECT_ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["AlignedMemory", "AlignedPiece", "address_of", "flat_bytes", "is_aligned"]

_KEPT_BYTES = 16 << 20


class AlignedPiece:
    """Page-aligned bytes: `view` (u8), at `address`."""

    __slots__ = ("address", "view")

    def __init__(self, nbytes: int) -> None:
        self.view: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.address = self.view.ctypes.data


class AlignedMemory:
    """Lends pieces and keeps some of those that come back."""

    def __init__(self) -> None:
        self._kept: dict[int, list[AlignedPiece]] = {}
        self._kept_bytes = 0

    def take(self, nbytes: int) -> AlignedPiece:
        """A piece of at least nbytes; its contents are anything."""
        size = max(DIRECT_ALIGNMENT, 1 << (nbytes - 1).bit_length())
        kept = self._kept.get(size)
        if kept:
            self._kept_bytes -= size
            return kept.pop()
        return AlignedPiece(size)

    def give(self, piece: AlignedPiece) -> None:
        """Take it back: nobody reads or writes it any more."""
        size = piece.view.nbytes
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept.setdefault(size, []).append(piece)
            self._kept_bytes += size


def flat_bytes(data: Buffer, *, writable: bool = False) -> NDArray[np.uint8]:
    """The bytes of a buffer as u8, nothing copied. ValueError when it is not C-contiguous, empty, or read-only and
    must not be."""
    view = memoryview(data)
    if not view.c_contiguous or not view.nbytes:
        raise ValueError("a buffer must be C-contiguous and not empty")
    if writable and view.readonly:
        raise ValueError("the buffer to read into is read-only")
    return np.frombuffer(view, np.uint8)


def is_aligned(data: NDArray[np.uint8]) -> bool:
    """Whether O_DIRECT takes it as it is."""
    return data.nbytes % DIRECT_ALIGNMENT == 0 and address_of(data) % DIRECT_ALIGNMENT == 0


def address_of(data: NDArray[np.uint8]) -> int:
    """Where it begins; a quarter of the time of `data.ctypes.data`, and this is asked for every block."""
    address: int = data.__array_interface__["data"][0]
    return address
