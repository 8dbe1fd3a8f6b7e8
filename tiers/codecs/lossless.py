"""The codec `lossless`: byte planes, each entropy-coded by zstd where that saves something.

Body, little-endian, after the head of `envelope`:

    offset bytes       field
     0      4          piece: elements of a piece, all pieces but the last
     4      4          zero
     8      4 x P x W  lengths: of each piece's planes, the lowest byte's first; bit 31: stored as it is
     ...               the planes, in that order, then what is left of the block behind its last whole element

P = ceil(elements / piece), W = bytes of an element. A plane is a zstd frame that says its size, or the plane itself.

zstd is set up to find next to no repeats and to spend its time on the entropy code: the exponents of a block hardly
ever repeat for 7 bytes, and hunting for such repeats, as level 1 does, takes two fifths of the speed and saves nothing
(`scripts/bench_codec.py --peers`). Long runs and repeated tokens are still found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import BlockDamaged, SetupFailed
from .base import element_bytes, flat_bytes, is_worth
from .envelope import HEAD_BYTES, Head, seal, unseal
from .planes import WORDS, join_planes, split_plane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["Lossless"]

PIECE_ELEMENTS = 1 << 17
"""Of a piece: a plane of it is what zstd codes as one, and with its scratch it stays in a core's second cache."""

PIECE_MIN, PIECE_MAX = 1 << 12, 1 << 24
"""Elements of a piece that a decoder accepts: this bounds what it can be made to allocate, and how many pieces."""

_AS_IS = 1 << 31
_LENGTH = np.dtype("<u4")
_FIELDS_BYTES = 8


class Lossless:
    """Byte planes and zstd; 1.45x on the keys and values of real models in bfloat16. See Codec."""

    name = "lossless"
    number = 1
    is_lossless = True

    def encode(self, data: Buffer, *, dtype: str, shape: Sequence[int] = ()) -> Buffer | None:
        """See Codec; `shape` is of no use here."""
        width = element_bytes(dtype)
        raw = flat_bytes(data)
        if not is_worth(HEAD_BYTES + _FIELDS_BYTES, len(raw)):
            return None
        count = len(raw) // width
        words = raw[: count * width].view(WORDS[width])
        bodies = -(-count // PIECE_ELEMENTS) * width
        start = HEAD_BYTES + _FIELDS_BYTES + _LENGTH.itemsize * bodies
        stored = np.empty(start + len(raw), np.uint8)
        stored[HEAD_BYTES : HEAD_BYTES + _FIELDS_BYTES].view(_LENGTH)[:] = (PIECE_ELEMENTS, 0)
        lengths = stored[HEAD_BYTES + _FIELDS_BYTES : start].view(_LENGTH)
        end = start + _encode_planes(words, lengths, stored[start:])
        tail = raw[count * width :]
        stored[end : end + len(tail)] = tail
        end += len(tail)
        return seal(stored[:end], Head(self.number, dtype, len(raw))) if is_worth(end, len(raw)) else None

    def decode(self, stored: Buffer, into: Buffer) -> None:
        """See Codec."""
        target = flat_bytes(into, writable=True)
        head, body = unseal(stored, codec=self.number, into_bytes=len(target))
        width = element_bytes(head.dtype)
        count = len(target) // width
        tail = len(target) - count * width
        piece, planes = _read_planes(body, count, width, tail)
        words = target[: count * width].view(WORDS[width])
        scratch = np.empty(min(piece, count), WORDS[width])
        expand = _decompressor()
        for first in range(0, count, piece):
            part = words[first : first + piece]
            join_planes([_plane(next(planes), len(part), expand) for _ in range(width)], part, scratch)
        np.copyto(target[count * width :], body[len(body) - tail :])


def _encode_planes(words: NDArray[Any], lengths: NDArray[Any], out: NDArray[np.uint8]) -> int:
    """Write all planes of all pieces to `out`, their lengths to `lengths`; how many bytes of `out` they took.

    out has room for all planes as they are: a plane is split in its place, and a shorter frame put over it.
    """
    scratch = np.empty(min(PIECE_ELEMENTS, len(words)), words.dtype)
    compress = _compressor()
    end = index = 0
    for first in range(0, len(words), PIECE_ELEMENTS):
        part = words[first : first + PIECE_ELEMENTS]
        for plane in range(words.itemsize):
            place = out[end : end + len(part)]
            split_plane(part, plane, place, scratch)
            frame: bytes = compress(place)
            if is_worth(len(frame), len(part)):
                out[end : end + len(frame)] = np.frombuffer(frame, np.uint8)
                lengths[index] = len(frame)
            else:
                lengths[index] = len(part) | _AS_IS
            end += int(lengths[index]) & ~_AS_IS
            index += 1
    return end


def _read_planes(
    body: NDArray[np.uint8], count: int, width: int, tail: int
) -> tuple[int, Iterator[tuple[NDArray[np.uint8], bool]]]:
    """(elements of a piece, (bytes, whether as is) of each plane) when the lengths add up to the body's, else raise."""
    if len(body) < _FIELDS_BYTES:
        raise BlockDamaged(f"a body of {len(body)} bytes is too short")
    piece, zero = (int(field) for field in np.frombuffer(body[:_FIELDS_BYTES].tobytes(), _LENGTH))
    if zero or not PIECE_MIN <= piece <= PIECE_MAX:
        raise BlockDamaged(f"pieces of {piece} elements")
    start = _FIELDS_BYTES + _LENGTH.itemsize * -(-count // piece) * width
    lengths = np.frombuffer(body[_FIELDS_BYTES:start].tobytes()[: max(0, start - _FIELDS_BYTES)], np.uint8)
    if len(lengths) != start - _FIELDS_BYTES:
        raise BlockDamaged(f"a body of {len(body)} bytes is too short for its lengths")
    flagged = lengths.view(_LENGTH)
    sizes = (flagged & np.uint32(_AS_IS - 1)).astype(np.int64)
    ends = start + np.cumsum(sizes)
    if (int(ends[-1]) if len(ends) else start) + tail != len(body):
        raise BlockDamaged(f"the planes of a body of {len(body)} bytes do not end where it ends")
    places = zip((ends - sizes).tolist(), ends.tolist(), (flagged >= _AS_IS).tolist(), strict=True)
    return piece, ((body[begin:end], as_is) for begin, end, as_is in places)


def _plane(stored: tuple[NDArray[np.uint8], bool], count: int, expand: Any) -> NDArray[np.uint8]:
    """A plane of `count` bytes from how it is stored."""
    data, as_is = stored
    plane = data if as_is else np.frombuffer(expand(data, count), np.uint8)
    if len(plane) != count:
        raise BlockDamaged(f"a plane of {len(plane)} bytes, not of {count}")
    return plane


def _zstd() -> Any:
    """The package zstandard; SetupFailed says how to get it."""
    try:
        import zstandard
    except ImportError as exc:
        raise SetupFailed(
            "codec lossless", found=f"no zstandard in this Python ({exc})", needed="the package zstandard",
            fix='pip install "ucxkv[codec]"',
        ) from exc  # fmt: skip
    return zstandard


def _compressor() -> Any:
    """bytes-like -> frame. Made for each call: zstd's contexts serve one thread at a time."""
    zstd = _zstd()
    parameters = zstd.ZstdCompressionParameters(
        window_log=17, chain_log=6, hash_log=6, search_log=1, min_match=7, target_length=0, strategy=zstd.STRATEGY_FAST
    )
    return zstd.ZstdCompressor(compression_params=parameters).compress


def _decompressor() -> Any:
    """(frame, count) -> exactly `count` bytes, or BlockDamaged; never allocates more, whatever a frame says."""
    zstd = _zstd()
    expand = zstd.ZstdDecompressor(max_window_size=PIECE_MAX).decompress

    def plane(frame: NDArray[np.uint8], count: int) -> bytes:
        try:
            if zstd.frame_content_size(frame) != count:
                raise BlockDamaged(f"a frame that is not of {count} bytes")
            found: bytes = expand(frame, max_output_size=count, allow_extra_data=False)
        except zstd.ZstdError as exc:
            raise BlockDamaged(f"a frame that zstd cannot read: {exc}") from exc
        return found

    return plane
