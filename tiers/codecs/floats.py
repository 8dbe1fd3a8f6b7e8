"""float32, float16 and bfloat16 as bit patterns: widened to float32, rounded back, their largest magnitude.

A float's magnitude grows with its bits without the sign, so the largest magnitude of a channel is a maximum of
integers; infinities and NaN are the largest patterns of all. bfloat16 is the upper half of a float32, which is all that
numpy need know of it.

Patterns are compared, and 16 bits converted, as integers: libraries built for fast mathematics make a process's
processor take subnormal numbers for zero (FTZ, DAZ), and none of this may depend on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["FLOATS", "FloatBits", "bfloat16_up", "from_bfloat16"]


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A float type. word: the unsigned integer of its bits; infinity: the pattern of +inf.

    floor, ceiling: patterns of the smallest and largest peak that a channel in steps of peak / 127 may have: its step
    is a normal float32 of 2**-124 at least, and half a step beyond the peak is still finite.
    """

    name: str
    word: np.dtype[Any]
    infinity: int
    floor: int
    ceiling: int

    def peaks(self, words: NDArray[Any]) -> NDArray[Any]:
        """Patterns of the largest magnitudes over axis 1 of words (groups, tokens, channels)."""
        found: NDArray[Any] = np.bitwise_and(words, (1 << (8 * self.word.itemsize - 1)) - 1).max(axis=1)
        return found

    def widen(self, words: NDArray[Any], scratch: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values of `words`, exact: a view of float32 itself, else in `scratch`, which has the shape of words."""
        if self.name == "float32":
            return words.view(np.float32)
        if self.name == "float16":
            np.copyto(scratch, words.view(np.float16))
        else:
            bits = scratch.view(np.uint32)
            np.copyto(bits, words)
            np.left_shift(bits, 16, out=bits)
        return scratch

    def product(
        self,
        values: NDArray[np.int8],
        factors: NDArray[np.float32],
        out: NDArray[Any],
        scratch: NDArray[np.float32],
    ) -> None:
        """Write values x factors (broadcast), rounded to the nearest of this type, to `out`, as words.

        scratch: in the shape of values; float32 needs none. bfloat16 rounds ties away from zero.
        """
        wide = out.view(np.float32) if self.name == "float32" else scratch
        np.copyto(wide, values)
        np.multiply(wide, factors, out=wide)
        if self.name == "float16":
            np.copyto(out.view(np.float16), wide, casting="same_kind")
        elif self.name == "bfloat16":
            bits = wide.view(np.uint32)
            np.add(bits, 0x8000, out=bits)
            np.right_shift(bits, 16, out=bits)
            np.copyto(out, bits, casting="unsafe")


FLOATS: Mapping[str, FloatBits] = MappingProxyType(
    {
        found.name: found
        for found in (
            FloatBits("float32", np.dtype("<u4"), 0x7F800000, floor=0x05000000, ceiling=0x7F7C0000),
            FloatBits("float16", np.dtype("<u2"), 0x7C00, floor=0x0001, ceiling=0x7BE0),
            FloatBits("bfloat16", np.dtype("<u2"), 0x7F80, floor=0x0500, ceiling=0x7F7C),
        )
    }
)
"""By name."""


def bfloat16_up(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Patterns of the smallest bfloat16 not below each value; values: finite, not negative."""
    return ((values.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Their values."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
