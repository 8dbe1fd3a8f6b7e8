"""Blocks for the tests of codecs: values as models have them, in each float type, and buffers with guarded ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ucxkv.tiers.codecs import CODECS, Codec
from ucxkv.tiers.codecs.floats import FLOATS

if TYPE_CHECKING:
    from numpy.typing import NDArray

GUARD = 64
"""Bytes on either side of a guarded buffer."""


def kv_values(shape: tuple[int, ...], seed: int = 1) -> NDArray[np.float32]:
    """Normal values, (..., tokens, channels), each channel with a size of its own, as keys and values have."""
    random = np.random.default_rng(seed)
    sizes = np.exp2(random.integers(-6, 4, (*shape[:-2], 1, shape[-1])))
    found: NDArray[np.float32] = (random.standard_normal(shape) * sizes).astype(np.float32)
    return found


def as_words(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Values as the bits of a float type, rounded to it (bfloat16: towards zero)."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.astype(dtype)).view(FLOATS[dtype].word)


def as_float64(words: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """The values that the bits stand for, exact."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return words.view(dtype).astype(np.float64)


def with_codecs(*names: str) -> list[Any]:
    """Parameters of those codecs; `lossless` needs its extra."""
    return [pytest.param(codec, id=codec.name) for codec in CODECS if codec.name in names]


def need(codec: Codec) -> None:
    """Skip where the codec's library is not installed."""
    if codec.name == "lossless":
        pytest.importorskip("zstandard", reason="needs the extra codec")


class Guarded:
    """`nbytes` of writable memory, at an odd address when asked, between bytes that nobody may write."""

    def __init__(self, nbytes: int, *, shift: int = 0) -> None:
        self._all = np.full(nbytes + 2 * GUARD + shift, 0xA5, np.uint8)
        self._start = GUARD + shift
        self.view = memoryview(self._all.data)[self._start : self._start + nbytes]

    def check(self) -> None:
        """The guards are untouched."""
        ends = (self._all[: self._start], self._all[self._start + self.view.nbytes :])
        assert all((end == 0xA5).all() for end in ends)
