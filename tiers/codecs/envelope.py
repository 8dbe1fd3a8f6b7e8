"""The bytes of an encoded block: a head that says what they are, then the codec's own body. No I/O here.

Little-endian:

    offset bytes  field
     0      4     magic: UKVC
     4      2     version: 1
     6      2     zero
     8      8     sum: xxh3-64 of all that follows, body included
    16      1     codec: its number, as in the block's flags
    17      1     dtype: number of the element type (DTYPE_NUMBERS)
    18      6     zero
    24      8     original: bytes of the block before it was encoded
    32            body

Invariants: what `unseal` returns has the sum that it was sealed with, so a body is only read as it was written; the
first 6 bytes are the same in every version. The store's own sum covers these bytes too: it tells a rotten disk, this
one tells bytes that are of another codec, cut or mixed up, wherever they come from.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base import BlockDamaged
from ..copy import sum_bytes
from .base import ELEMENT_BYTES, CodecUnknown, flat_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["DTYPE_NUMBERS", "HEAD_BYTES", "VERSION", "Head", "read_head", "seal", "unseal"]

VERSION = 1
HEAD_BYTES = 32
MAGIC = int.from_bytes(b"UKVC", "little")
DTYPE_NUMBERS = {name: number for number, name in enumerate(ELEMENT_BYTES, 1)}
"""An element type's number in the head; the order of ELEMENT_BYTES is part of the format, new types are appended."""

_DTYPE_NAMES = {number: name for name, number in DTYPE_NUMBERS.items()}
_FRONT = struct.Struct("<IHHQ")
_SUMMED = struct.Struct("<BB6sQ")
assert _FRONT.size + _SUMMED.size == HEAD_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """What an encoded block says of itself. dtype: a name of ELEMENT_BYTES; original_bytes: before it was encoded."""

    codec: int
    dtype: str
    original_bytes: int


def seal(stored: NDArray[np.uint8], head: Head) -> memoryview:
    """Write the head in front of a finished body and return all of it, read-only.

    stored: HEAD_BYTES of room, then the body; it belongs to the result from now on.
    """
    dtype, raw = DTYPE_NUMBERS[head.dtype], stored.data
    _SUMMED.pack_into(raw, _FRONT.size, head.codec, dtype, bytes(6), head.original_bytes)
    _FRONT.pack_into(raw, 0, MAGIC, VERSION, 0, sum_bytes(raw[_FRONT.size :]))
    return raw.toreadonly()


def read_head(stored: Buffer) -> Head:
    """What stored bytes say of themselves, after their sum was proved.

    Raises BlockDamaged (no encoded block, cut, or changed) and CodecUnknown (version or element type of a newer
    release).
    """
    raw = flat_bytes(stored).data
    if len(raw) < HEAD_BYTES:
        raise BlockDamaged(f"{len(raw)} bytes are no encoded block: its head has {HEAD_BYTES}")
    magic, version, zero, total = _FRONT.unpack_from(raw)
    if magic != MAGIC:
        raise BlockDamaged(f"no encoded block: it begins with {bytes(raw[:4]).hex()}")
    if version != VERSION:
        raise CodecUnknown(f"encoded block of version {version}; this release reads version {VERSION}")
    if zero or sum_bytes(raw[_FRONT.size :]) != total:
        raise BlockDamaged(f"encoded block of {len(raw)} bytes does not have its sum")
    codec, dtype, zeros, original_bytes = _SUMMED.unpack_from(raw, _FRONT.size)
    if any(zeros) or dtype not in _DTYPE_NAMES:
        raise CodecUnknown(f"encoded block with element type {dtype} and fields that this release does not know")
    return Head(codec, _DTYPE_NAMES[dtype], original_bytes)


def unseal(stored: Buffer, *, codec: int, into_bytes: int) -> tuple[Head, NDArray[np.uint8]]:
    """(head, body) of a block that this codec encoded from into_bytes bytes; a view of `stored`. Raises as `read_head`.

    BlockDamaged too where another codec stored it or its length is another: the caller's books are not about this.
    """
    head = read_head(stored)
    if head.codec != codec:
        raise BlockDamaged(f"encoded by codec {head.codec}, not by {codec}")
    if head.original_bytes != into_bytes:
        raise BlockDamaged(f"encoded from {head.original_bytes} bytes, not from {into_bytes}")
    return head, flat_bytes(stored)[HEAD_BYTES:]
