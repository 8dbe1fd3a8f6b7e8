"""The codec `int8`: a scale for each group and channel over the block's tokens, and a signed byte for each value.

Body, little-endian, after the head of `envelope`; groups = elements / (tokens x channels):

    offset bytes                  field
     0      4                     tokens
     4      4                     channels
     8      2 x groups x channels scales: bfloat16, never negative, infinite or NaN
     ...    elements              values: two's complement, -127 to 127, in the block's own order

A value is its byte times its scale, rounded to the block's type. The scale is the channel's largest magnitude / 127,
rounded up, so that no value overflows its byte.

Error: |decoded - original| <= ERROR_BOUND[dtype] x the largest magnitude of the value's channel in its group. Half a
step is 1/254; rounding the scale up makes it 1/252; rounding to a type that holds the original can at most double that
(both lie on its grid), and adds next to nothing in float32. Zero stays zero (of either sign: +0). A block for which
this does not hold is not taken: one with an infinity, a NaN, a channel whose largest magnitude is below 6.1e-36, where
a scale would lose precision (float32 and bfloat16 only), or so close to the type's largest value that it may overflow.

Source of the idea: per-channel quantisation of keys, KIVI (Liu et al., ICML 2024), section 3; here for keys and values,
at 8 bits, where both kinds do (`scripts/bench_codec.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import BlockDamaged
from .base import element_bytes, flat_bytes, is_worth
from .envelope import HEAD_BYTES, Head, seal, unseal
from .floats import FLOATS, FloatBits, bfloat16_up, from_bfloat16

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["ERROR_BOUND", "Int8"]

ERROR_BOUND: Mapping[str, float] = MappingProxyType({"float32": 1 / 250, "float16": 1 / 126, "bfloat16": 1 / 126})
"""Largest error of a value, as a share of the largest magnitude of its channel."""

PART_ELEMENTS = 1 << 17
"""Worked on at once: with its float32 scratch it stays in a core's second cache."""

_STEPS = 127
_INFINITY = 0x7F80  # of the scales' type
_ROUND = np.float32(3 << 22)  # added to a small float32, leaves it, rounded, in the lowest bits
_FIELD = np.dtype("<u4")
_FIELDS_BYTES = 8
_SCALE = np.dtype("<u2")


class Int8:
    """Eight bits a value; 1.78x for bfloat16 in blocks of 16 tokens, 1.94x in blocks of 64. See Codec."""

    name = "int8"
    number = 2
    is_lossless = False

    def encode(self, data: Buffer, *, dtype: str, shape: Sequence[int] = ()) -> Buffer | None:
        """See Codec; None too without a shape, for types that are no float of 2 or 4 bytes, and as the module says."""
        width, raw = element_bytes(dtype), flat_bytes(data)
        if shape and (min(shape) < 0 or int(np.prod(shape, dtype=np.int64)) * width != len(raw)):
            raise ValueError(f"{len(raw)} bytes are no {dtype} array of shape {tuple(shape)}")
        if dtype not in FLOATS or len(shape) < 2 or not len(raw):
            return None
        tokens, channels = shape[-2:]
        count = len(raw) // width
        start = HEAD_BYTES + _FIELDS_BYTES + _SCALE.itemsize * (count // tokens)
        if not is_worth(start + count, len(raw)):
            return None
        kind = FLOATS[dtype]
        stored = np.empty(start + count, np.uint8)
        stored[HEAD_BYTES : HEAD_BYTES + _FIELDS_BYTES].view(_FIELD)[:] = (tokens, channels)
        words = raw.view(kind.word).reshape(-1, tokens, channels)
        scales = stored[HEAD_BYTES + _FIELDS_BYTES : start].view(_SCALE).reshape(-1, channels)
        if not _quantise(kind, words, scales, stored[start:].reshape(words.shape)):
            return None
        return seal(stored, Head(self.number, dtype, len(raw)))

    def decode(self, stored: Buffer, into: Buffer) -> None:
        """See Codec."""
        target = flat_bytes(into, writable=True)
        head, body = unseal(stored, codec=self.number, into_bytes=len(target))
        if head.dtype not in FLOATS:
            raise BlockDamaged(f"int8 of {head.dtype}")
        kind = FLOATS[head.dtype]
        scales, values = _read_body(body, len(target) // kind.word.itemsize)
        words = target[: values.size * kind.word.itemsize].view(kind.word).reshape(values.shape)
        if words.nbytes != len(target):
            raise BlockDamaged(f"{len(target)} bytes are no whole {head.dtype} values")
        _restore(kind, scales, values, words)


def _parts(groups: int, tokens: int, channels: int) -> Iterator[tuple[slice, slice]]:
    """Cut (groups, tokens, channels) into parts of about PART_ELEMENTS: (slice of groups, slice of channels)."""
    if tokens * channels <= PART_ELEMENTS:
        step = PART_ELEMENTS // (tokens * channels)
        yield from ((slice(first, first + step), slice(None)) for first in range(0, groups, step))
    else:
        step = max(1, PART_ELEMENTS // tokens)
        for group in range(groups):
            yield from ((slice(group, group + 1), slice(first, first + step)) for first in range(0, channels, step))


def _scratch(part: NDArray[Any], kept: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """float32 in the shape of `part`, in the memory of `kept` where that is enough."""
    if kept is None or kept.size < part.size:
        kept = np.empty(part.size, np.float32)
    return kept


def _quantise(kind: FloatBits, words: NDArray[Any], scales: NDArray[Any], values: NDArray[np.uint8]) -> bool:
    """Fill scales (groups, channels) and values (as words); False, with both undefined, for a block that is refused."""
    scratch: NDArray[np.float32] | None = None
    for groups, channels in _parts(*words.shape):
        part = words[groups, :, channels]
        scratch = _scratch(part, scratch)
        wide = scratch[: part.size].reshape(part.shape)
        patterns = kind.peaks(part)
        if int(patterns.max()) > kind.ceiling or ((patterns > 0) & (patterns < kind.floor)).any():
            return False
        peaks = kind.widen(patterns, np.empty(patterns.shape, np.float32))
        steps = bfloat16_up(peaks / np.float32(_STEPS))
        scales[groups, channels] = steps
        size = from_bfloat16(steps)
        inverse = np.divide(1, size, out=np.zeros_like(size), where=size > 0)
        np.multiply(kind.widen(part, wide), inverse[:, None, :], out=wide)
        np.add(wide, _ROUND, out=wide)
        np.copyto(values[groups, :, channels], wide.view(np.uint32), casting="unsafe")
    return True


def _read_body(body: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """(scales (groups, channels), copied; values (groups, tokens, channels), a view), or BlockDamaged."""
    if len(body) < _FIELDS_BYTES:
        raise BlockDamaged(f"a body of {len(body)} bytes is too short")
    tokens, channels = (int(field) for field in np.frombuffer(body[:_FIELDS_BYTES].tobytes(), _FIELD))
    if not tokens or not channels or not count or count % (tokens * channels):
        raise BlockDamaged(f"{count} values are no groups of {tokens} x {channels}")
    start = _FIELDS_BYTES + _SCALE.itemsize * (count // tokens)
    if len(body) != start + count:
        raise BlockDamaged(f"a body of {len(body)} bytes for {count} values")
    scales = np.frombuffer(body[_FIELDS_BYTES:start].tobytes(), _SCALE).reshape(-1, channels)
    if int(scales.max()) >= _INFINITY:
        raise BlockDamaged("a scale that is no finite positive number")
    return scales, body[start:].view(np.int8).reshape(-1, tokens, channels)


def _restore(kind: FloatBits, scales: NDArray[np.uint16], values: NDArray[np.int8], words: NDArray[Any]) -> None:
    """Fill words with values times scales. What a hostile scale makes overflow becomes an infinity."""
    scratch: NDArray[np.float32] | None = None
    with np.errstate(over="ignore"):
        for groups, channels in _parts(*words.shape):
            part = values[groups, :, channels]
            scratch = _scratch(part, scratch)
            wide = scratch[: part.size].reshape(part.shape)
            factors = from_bfloat16(scales[groups, channels])[:, None, :]
            kind.product(part, factors, words[groups, :, channels], wide)
