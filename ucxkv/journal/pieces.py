"""The journal's bytes: sealed pieces, each a head of 64 bytes and a payload, each proving the piece before it.

    A piece is good only when its sum holds over head and payload, and when `previous` is the sum of the piece before
    it. So a reader that walks from piece to piece meets no damaged one, no gap, and none that was left over: what an
    earlier life of a recycled file or a tail that was cut left behind does not continue this chain. `run` differs with
    every opening of the journal, so not even the same records written again at the same place continue an old one.

Head, little-endian, the same for every kind of piece and in every version (additions go into the payload);
sequence, lsn and run are below 2**63:

    offset bytes  field
     0      4     magic: UKVL file, UKVF frame, UKVS snapshot, UKVC chunk, UKVE end of snapshot
     4      2     version: 1
     6      2     zero
     8      4     length: bytes of the payload
    12      4     count: frame: records; chunk, end: chunks before it; else zero
    16      8     sequence: frame, file: the file's number, never used again; else zero
    24      8     epoch: frame: of all its records; snapshot, chunk, end: of the snapshot; file: zero
    32      8     lsn: frame: of its first record; file: of its first frame's first record; else of the snapshot
    40      8     run: which opening of the journal wrote it; grows
    48      8     previous: sum of the piece before it; a file's: of the last frame before it, 0 = none; of a file's
    first frame: the file's head; a snapshot's: 0
    56      8     sum: xxh3-64 over bytes 0 to 56 of the head and the payload

Payloads:

    frame         count u32 lengths, then the records one after the other
    file          u64 bytes of the file, then the identity
    snapshot      the identity
    chunk         the chunk
    end           nothing

A log file: its head piece in the first 4 KiB, then frames, each from a multiple of 4 KiB on and padded with zeros. A
snapshot: its pieces one after the other without gaps, the last is the end."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

__all__ = [
    "BLOCK_BYTES",
    "CHUNK",
    "END",
    "FILE",
    "FRAME",
    "HEAD_BYTES",
    "NUMBER_MAX",
    "SNAPSHOT",
    "VERSION",
    "Head",
    "decode_records",
    "encode_records",
    "padded",
    "read_head",
    "seal",
]

BLOCK_BYTES = 4096
HEAD_BYTES = 64
VERSION = 1
NUMBER_MAX = (1 << 63) - 1  # of sequence, lsn and run, so that counting on from any of them stays within 64 bits
FILE, FRAME, SNAPSHOT, CHUNK, END = (int.from_bytes(b"UKV" + x, "little") for x in (b"L", b"F", b"S", b"C", b"E"))

_HEAD = struct.Struct("<IHHIIQQQQQ")
_SUM = struct.Struct("<Q")
assert _HEAD.size + _SUM.size == HEAD_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """The head of one piece, fields as in the table above; `sum` is what it claims, see `is_sound`."""

    magic: int
    version: int
    length: int
    count: int
    sequence: int
    epoch: int
    lsn: int
    run: int
    previous: int
    sum: int

    def is_sound(self, raw: bytes, payload: bytes | memoryview) -> bool:
        """Whether the sum holds; raw: the 64 bytes that this was read from."""
        hashed = xxhash.xxh3_64(raw[: _HEAD.size])
        hashed.update(payload)
        return hashed.intdigest() == self.sum


def read_head(raw: bytes) -> Head | None:
    """The head in the first 64 bytes of `raw`, or None where there is none; its sum was not looked at."""
    if len(raw) < HEAD_BYTES:
        return None
    magic, version, zero, length, count, sequence, epoch, lsn, run, previous = _HEAD.unpack_from(raw)
    if magic not in (FILE, FRAME, SNAPSHOT, CHUNK, END) or zero or max(sequence, lsn, run) > NUMBER_MAX:
        return None
    (total,) = _SUM.unpack_from(raw, _HEAD.size)
    return Head(magic, version, length, count, sequence, epoch, lsn, run, previous, total)


def seal(
    magic: int,
    payload: bytes,
    *,
    count: int = 0,
    sequence: int = 0,
    epoch: int = 0,
    lsn: int = 0,
    run: int = 0,
    previous: int = 0,
    version: int = VERSION,
) -> tuple[bytes, int]:
    """(head of 64 bytes, sum) of a piece with this payload."""
    front = _HEAD.pack(magic, version, 0, len(payload), count, sequence, epoch, lsn, run, previous)
    hashed = xxhash.xxh3_64(front)
    hashed.update(payload)
    total = hashed.intdigest()
    return front + _SUM.pack(total), total


def padded(nbytes: int) -> int:
    """nbytes rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def encode_records(records: Sequence[bytes]) -> bytes:
    """The payload of a frame with these records."""
    lengths = array("I", map(len, records))
    if sys.byteorder == "big":
        lengths.byteswap()
    return b"".join((lengths.tobytes(), *records))


def decode_records(payload: bytes, count: int) -> list[bytes] | None:
    """The records of a frame's payload, or None when its lengths do not add up."""
    if count < 1 or len(payload) < 4 * count:
        return None
    lengths = array("I")
    lengths.frombytes(payload[: 4 * count])
    if sys.byteorder == "big":
        lengths.byteswap()
    if 4 * count + sum(lengths) != len(payload) or 0 in lengths:
        return None
    found, at = [], 4 * count
    for length in lengths:
        found.append(payload[at : at + length])
        at += length
    return found
