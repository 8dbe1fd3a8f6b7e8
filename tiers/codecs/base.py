"""What all codecs share: the seam, the error of what this release cannot read, the element types.

Invariants: a codec holds no state, so one object serves any number of threads; `decode` gives the bytes that `encode`
was given (or, where `is_lossless` is False, values within the codec's stated error) or raises, never other bytes; what
it reads and writes lies within the two buffers, whatever the stored bytes say. Nothing here does I/O.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..base import TierError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["ELEMENT_BYTES", "Codec", "CodecUnknown", "by_channel", "flat_bytes", "is_worth"]

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "uint8": 1,
        "int8": 1,
        "bool": 1,
        "float8_e4m3": 1,
        "float8_e5m2": 1,
        "float16": 2,
        "bfloat16": 2,
        "int16": 2,
        "uint16": 2,
        "float32": 4,
        "int32": 4,
        "uint32": 4,
        "float64": 8,
        "int64": 8,
        "uint64": 8,
    }
)
"""Bytes of one element by the canonical name of its type. Bytes of no type are `uint8`.

The order is part of the stored format (`envelope`): new types go to the end.
"""


class CodecUnknown(TierError):
    """Stored by a codec or a format that this release does not have: a miss here; the entry is left as it is."""


class Codec(Protocol):
    """How blocks are stored. Work on megabytes: call it from a thread, not from the event loop; the GIL is released."""

    @property
    def name(self) -> str:
        """As in the configuration."""
        ...

    @property
    def number(self) -> int:
        """As in a stored block's flags: 0 is `none`, others 1 to 255. A number never gets another meaning."""
        ...

    @property
    def is_lossless(self) -> bool:
        """Whether `decode` gives exactly the bytes that were encoded."""
        ...

    def encode(self, data: Buffer, *, dtype: str, shape: Sequence[int] = ()) -> Buffer | None:
        """What to store instead of `data`, or None: store `data` as it is, with number 0.

        data: C-contiguous, borrowed until this returns, not changed. dtype: a name of ELEMENT_BYTES. shape: its axes
        when known, (..., tokens, channels), as `by_channel` gives them. The result is the caller's, and shorter than
        `data` by 1/16 at least. Raises ValueError (dtype unknown, shape that does not fit, data not contiguous) and
        SetupFailed where the codec's library is missing.
        """
        ...

    def decode(self, stored: Buffer, into: Buffer) -> None:
        """Fill `into` with what was encoded.

        stored: as `encode` gave it, exactly so many bytes. into: writable, C-contiguous, exactly as long as the data
        was; borrowed, apart from `stored`; undefined after an error. Raises BlockDamaged (these bytes are not what this
        codec stored for `into`: a miss), CodecUnknown, SetupFailed, and ValueError for an `into` that cannot be
        written.
        """
        ...


def flat_bytes(data: Buffer, *, writable: bool = False) -> NDArray[np.uint8]:
    """The bytes of a C-contiguous buffer; a view, nothing is copied. Raises ValueError when that cannot be."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("buffer is not C-contiguous")
    if writable and view.readonly:
        raise ValueError("destination is read-only")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def element_bytes(dtype: str) -> int:
    """Bytes of one element; ValueError names the known types."""
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; known are {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def is_worth(stored_bytes: int, original_bytes: int) -> bool:
    """Whether at least 1/16 is saved; below that the work of decoding is not paid for."""
    return 16 * stored_bytes <= 15 * original_bytes


def by_channel(shape: Sequence[int], token_axis: int) -> tuple[int, int, int]:
    """A block's axes as (groups, tokens, channels) for `encode`: what stands before the axis of tokens, it, and after.

    Values of one group and channel share a scale over the tokens, whatever the order of the block's axes is: one layer,
    head and element of keys or of values. Raises ValueError for an axis that `shape` does not have.
    """
    if not 0 <= token_axis < len(shape):
        raise ValueError(f"axis {token_axis} of {len(shape)}")
    before, after = shape[:token_axis], shape[token_axis + 1 :]
    return int(np.prod(before, dtype=np.int64)), int(shape[token_axis]), int(np.prod(after, dtype=np.int64))
