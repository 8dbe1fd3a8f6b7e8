"""Byte planes: element i's byte k stands at place i of plane k, so that bytes of one meaning are neighbours.

A float's exponent varies little from element to element and its mantissa's low bytes are noise: apart, the first
compress and the others cost no attempt. Pure numpy on unsigned integers, one pass a plane, for elements of 1, 2, 4 and
8 bytes. Source of the idea: the byte shuffle filter of HDF5 and Blosc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WORDS", "join_planes", "split_plane"]

WORDS: dict[int, np.dtype[Any]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
"""The unsigned integer that stands for an element of so many bytes."""


def split_plane(words: NDArray[Any], plane: int, out: NDArray[np.uint8], scratch: NDArray[Any]) -> None:
    """Write byte `plane` (0 is the lowest) of each word to `out`, equally long. scratch: words, at least as many."""
    if plane == 0:
        np.copyto(out, words, casting="unsafe")
        return
    shifted = scratch[: len(words)]
    np.right_shift(words, 8 * plane, out=shifted)
    np.copyto(out, shifted, casting="unsafe")


def join_planes(planes: Sequence[NDArray[np.uint8]], words: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `words` from its planes, the lowest byte's first; the opposite of `split_plane`."""
    widened = scratch[: len(words)]
    np.copyto(words, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(words, 8, out=words)
        np.copyto(widened, plane)
        np.bitwise_or(words, widened, out=words)
