"""The bytes of a datafile: a head, batches of blocks one after the other, and an index at its end. No I/O here.

    A piece (the file's head, a batch's header, the index) is good only when its sum holds, when it names the file
    and the generation that it is read for, and, except the file's head, when it names the sum of the piece before it
    (the index: of the file's head). So a batch that an earlier life of the file left behind, or one behind a tail that
    was cut, continues no walk: generations grow with each life, and `run` differs with each opening of the store, so
    that not even the same blocks written again in the same place are followed by what once stood behind them.

    A payload is good when its descriptor's sum holds over it; nothing else is said of it. The sum is the one that the
    block carries from its producer, over the bytes as they are stored.

Everything stands at multiples of 4 KiB (what O_DIRECT asks for) and is little-endian. A piece begins with a head of 64
bytes, the same in every version:

    offset bytes  field
     0      4     magic: UKVD file, UKVB batch, UKVI index, UKVS store
     4      2     version: 1
     6      2     state: file: 0 free, 1 in use; else zero
     8      4     file: its number, which is its name's; store: zero
    12      4     count: batch, index: descriptors; else zero
    16      8     generation: which life of the file; grows over all files of a store
    24      8     sequence: batch: its own, grows by one over all files; file: of its first batch; index: of its last
    32      8     length: file: bytes of the file; batch: bytes with its payloads; index: offset of its descriptors
    40      8     mark: file: lowest generation that still counted; batch: run; index: zero
    48      8     previous: batch: sum of the batch before it, or of the file's head; index: of the file's head; else 0
    56      8     sum: xxh3-64 over bytes 0 to 56 and the body

Bodies, right behind the head (the index's: at `length`):

    file, store   16 bytes: the store's id, then zeros up to 4 KiB. All that says something is in one sector
    batch         63 descriptors of 64 bytes, unused ones zero; the payloads follow at 4 KiB, in the same order
    index         `count` descriptors; the head is the last 4 KiB of the file

A descriptor:

    offset bytes  field
     0     16     key
    16     16     parent: the key of the block before it in its chain; zeros: it is a root; tombstone: zeros
    32      8     sum: xxh3-64 of the payload; tombstone: zero
    40      8     version: the caller's
    48      4     offset: in the file, in blocks of 4 KiB; tombstone: zero
    52      4     length: bytes of the payload; tombstone: zero
    56      4     flags: the caller's (codec), below 2**31; bit 31: tombstone, all that came before of this key is gone
    60      4     original: bytes of the block before the writer encoded it; zero: it did not; tombstone: zero

Of several descriptors of a key the last one counts: the one in the higher generation, and there in the later batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .copy import sum_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BATCH",
    "BLOCK_BYTES",
    "DESCRIPTORS_MAX",
    "DESCRIPTOR_BYTES",
    "DESCRIPTOR_DTYPE",
    "FILE",
    "FLAGS_MAX",
    "FREE",
    "INDEX",
    "IN_USE",
    "KEY_BYTES",
    "NO_PARENT",
    "NUMBER_MAX",
    "STORE",
    "TOMBSTONE",
    "VERSION",
    "Head",
    "Index",
    "decode_batch",
    "decode_file",
    "decode_index",
    "decode_index_head",
    "decode_store",
    "encode_batch",
    "encode_file",
    "encode_index",
    "encode_store",
    "index_bytes",
    "padded",
    "read_head",
]

VERSION = 1
BLOCK_BYTES = 4096
HEAD_BYTES = 64
KEY_BYTES = 16
NO_PARENT = bytes(KEY_BYTES)  # a root's
DESCRIPTOR_BYTES = 64
DESCRIPTORS_MAX = (BLOCK_BYTES - HEAD_BYTES) // DESCRIPTOR_BYTES
NUMBER_MAX = (1 << 63) - 1  # of generation, sequence and run, so that counting on from any of them stays within 64 bits
FREE, IN_USE = 0, 1
TOMBSTONE = 1 << 31
FLAGS_MAX = TOMBSTONE - 1
FILE, BATCH, INDEX, STORE = (int.from_bytes(b"UKV" + x, "little") for x in (b"D", b"B", b"I", b"S"))

DESCRIPTOR_DTYPE = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("sum", "<u8"),
        ("version", "<u8"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("flags", "<u4"),
        ("original", "<u4"),
    ]
)
"""A descriptor, as the table above says."""

_HEAD = struct.Struct("<IHHIIQQQQQ")
_SUM = struct.Struct("<Q")
assert _HEAD.size + _SUM.size == HEAD_BYTES
assert DESCRIPTOR_DTYPE.itemsize == DESCRIPTOR_BYTES
assert HEAD_BYTES + DESCRIPTORS_MAX * DESCRIPTOR_BYTES == BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a piece, fields as in the table above; `sum` is what it claims."""

    magic: int
    version: int
    state: int
    file: int
    count: int
    generation: int
    sequence: int
    length: int
    mark: int
    previous: int
    sum: int


@dataclass(frozen=True, slots=True)
class Index:
    """What a file's index says: the sequence of its last batch, and where the descriptors begin."""

    sequence: int
    offset: int
    descriptors: NDArray[np.void]


def padded(nbytes: int) -> int:
    """nbytes rounded up to whole blocks of 4 KiB."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def index_bytes(count: int) -> int:
    """Bytes at the end of a file that an index of so many descriptors needs, its head included."""
    return padded(count * DESCRIPTOR_BYTES) + BLOCK_BYTES


def read_head(raw: bytes | memoryview) -> Head | None:
    """The head in the first 64 bytes of `raw`, of any version; None where there is none. Its sum was not looked at."""
    if len(raw) < HEAD_BYTES:
        return None
    head = Head(*_HEAD.unpack_from(raw), *_SUM.unpack_from(raw, _HEAD.size))
    if head.magic not in (FILE, BATCH, INDEX, STORE) or max(head.generation, head.sequence, head.length) > NUMBER_MAX:
        return None
    return head


def _seal(front: bytes, body: bytes | memoryview) -> tuple[bytes, int]:
    total = sum_bytes(front + body)
    return front + _SUM.pack(total), total


def _is_sound(head: Head, raw: bytes | memoryview, body: bytes | memoryview) -> bool:
    return sum_bytes(bytes(raw[: _HEAD.size]) + body) == head.sum


def encode_store(store: bytes) -> bytes:
    """The file that gives a folder its store's id (16 bytes)."""
    sealed, _ = _seal(_HEAD.pack(STORE, VERSION, 0, 0, 0, 0, 0, 0, 0, 0), store)
    return (sealed + store).ljust(BLOCK_BYTES, b"\0")


def decode_store(raw: bytes) -> tuple[Head, bytes] | None:
    """(head, the store's id), or None for what is no such file or damaged. Of another version: look at head.version."""
    return _decode_named(STORE, raw)


def encode_file(
    *, store: bytes, file: int, state: int, generation: int, sequence: int, file_bytes: int, floor: int
) -> tuple[bytes, int]:
    """(the first 4 KiB of a datafile, their sum)."""
    sealed, total = _seal(_HEAD.pack(FILE, VERSION, state, file, 0, generation, sequence, file_bytes, floor, 0), store)
    return (sealed + store).ljust(BLOCK_BYTES, b"\0"), total


def decode_file(raw: bytes | memoryview) -> tuple[Head, bytes] | None:
    """(head, the store's id), or None for what is no datafile's head or damaged; the version may be another one."""
    return _decode_named(FILE, raw)


def _decode_named(magic: int, raw: bytes | memoryview) -> tuple[Head, bytes] | None:
    head = read_head(raw)
    body = bytes(raw[HEAD_BYTES : HEAD_BYTES + KEY_BYTES])
    if head is None or head.magic != magic or len(body) < KEY_BYTES or not _is_sound(head, raw, body):
        return None
    return head, body


def encode_batch(
    descriptors: NDArray[np.void], *, file: int, generation: int, sequence: int, length: int, run: int, previous: int
) -> tuple[bytes, int]:
    """(header of 4 KiB, its sum) of a batch. length: with the payloads."""
    count = len(descriptors)
    assert 0 < count <= DESCRIPTORS_MAX, "a batch holds 1 to 63 descriptors"
    body = descriptors.tobytes().ljust(BLOCK_BYTES - HEAD_BYTES, b"\0")
    sealed, total = _seal(_HEAD.pack(BATCH, VERSION, 0, file, count, generation, sequence, length, run, previous), body)
    return sealed + body, total


def decode_batch(
    raw: bytes | memoryview, *, file: int, generation: int, previous: int, offset: int, end: int
) -> tuple[Head, NDArray[np.void]] | None:
    """(head, descriptors) of the batch at `offset` of that file's life; None where none follows `previous`.

    raw: 4 KiB. end: where the file's room ends. Payloads are not looked at, but lie within the batch, in order.
    """
    head = read_head(raw)
    if head is None or len(raw) < BLOCK_BYTES or head.magic != BATCH or head.version != VERSION:
        return None
    if (head.file, head.generation, head.previous) != (file, generation, previous):
        return None
    if not 0 < head.count <= DESCRIPTORS_MAX or head.length % BLOCK_BYTES or offset + head.length > end:
        return None
    if not _is_sound(head, raw, bytes(raw[HEAD_BYTES:BLOCK_BYTES])):
        return None
    found = np.frombuffer(raw, DESCRIPTOR_DTYPE, head.count, HEAD_BYTES)
    return (head, found) if _lie_within(found, offset + BLOCK_BYTES, offset + head.length) else None


def encode_index(
    descriptors: NDArray[np.void], *, file: int, generation: int, sequence: int, offset: int, previous: int
) -> tuple[bytes, bytes]:
    """(descriptors, padded, for `offset` of the file; head, for its last 4 KiB). previous: sum of the file's head."""
    body = descriptors.tobytes()
    sealed, _ = _seal(
        _HEAD.pack(INDEX, VERSION, 0, file, len(descriptors), generation, sequence, offset, 0, previous), body
    )
    return body.ljust(padded(len(body)), b"\0"), sealed.ljust(BLOCK_BYTES, b"\0")


def decode_index_head(
    raw: bytes | memoryview, *, file: int, generation: int, previous: int, file_bytes: int
) -> Head | None:
    """The head of that life's index, from the file's last 4 KiB, or None; only `decode_index` proves it."""
    head = read_head(raw)
    if head is None or head.magic != INDEX or head.version != VERSION:
        return None
    if (head.file, head.generation, head.previous) != (file, generation, previous):
        return None
    if head.length % BLOCK_BYTES or head.length < BLOCK_BYTES:
        return None
    return head if head.length + index_bytes(head.count) <= file_bytes else None


def decode_index(head: Head, raw: bytes | memoryview, body: bytes | memoryview) -> Index | None:
    """The index whose head was read from `raw`; body: its descriptors, padding included. None when damaged."""
    packed = bytes(body[: head.count * DESCRIPTOR_BYTES])
    if len(packed) < head.count * DESCRIPTOR_BYTES or not _is_sound(head, raw, packed):
        return None
    found = np.frombuffer(packed, DESCRIPTOR_DTYPE) if packed else np.empty(0, DESCRIPTOR_DTYPE)
    return Index(head.sequence, head.length, found) if _lie_within(found, 2 * BLOCK_BYTES, head.length) else None


def _lie_within(descriptors: NDArray[np.void], start: int, end: int) -> bool:
    """Whether payloads follow one another without overlap between these offsets, and tombstones name none."""
    is_gone = (descriptors["flags"] & TOMBSTONE) != 0
    length = descriptors["length"].astype(np.int64)
    if length[is_gone].any() or descriptors["original"][is_gone].any() or not length[~is_gone].all():
        return False
    begins = descriptors["offset"][~is_gone].astype(np.int64) * BLOCK_BYTES
    ends = begins + -(-length[~is_gone] // BLOCK_BYTES) * BLOCK_BYTES
    if not len(begins):
        return True
    return bool(begins[0] >= start and ends[-1] <= end and (begins[1:] >= ends[:-1]).all())
