"""What both slot tables speak in: the layout of a slot, statuses, whether a table is served. Plain values, no table.

The layout itself is described in `slots` and, byte by byte, in slots.h.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ucxkv.errors import Unavailable

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap | np.ndarray[Any, np.dtype[Any]]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]

KEY_BYTES = 16
ROOT_KEY = bytes(KEY_BYTES)
SLOT_BYTES = 64
HEADER_BYTES = 4096
LINE_ENTRIES = 7
NONE = 0xFFFFFFFF
FOREVER = 0xFFFFFFFFFFFFFFFF
"""A lease without an end: a table that is always served, as a fresh one is."""
PART_FLAG = 1

SLOT_DTYPE = np.dtype(
    [
        ("key", "V16"),
        ("generation", "<u8"),
        ("epoch", "<u4"),
        ("state", "u1"),
        ("parts", "u1"),
        ("region", "<u2"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("tier", "u1"),
        ("flags", "u1", (3,)),
        ("sum", "<u8"),
        ("check", "<u4"),
        ("version", "<u4"),
    ]
)
assert SLOT_DTYPE.itemsize == SLOT_BYTES


class ReadStatus(enum.IntEnum):
    """What became of one key of a read."""

    HIT = 0
    MISS = 1
    SIZE = 2  # the stored length differs from the destination's
    CORRUPT = 3  # the sum differs and the slot did not change
    UNMAPPED = 4  # the region is not mapped here
    STALE = 5  # kept changing under the read
    UNAVAILABLE = 6  # the node is gone, or its lease is over
    CANCELLED = 7


class PutStatus(enum.IntEnum):
    """What became of one block of a put."""

    STORED = 0
    ALREADY = 1  # visible before; the first writer wins
    ORDER = 2  # the parent is not visible, nor (for one of several parts) being written by the same put
    BUSY = 3  # another put of this key is in progress
    NO_SPACE = 4  # the slot table is full
    SEALED = 5  # this part is in; others are missing, or the parent is not visible yet
    REFUSED = 6  # the key is reserved: all zero, or that of another block's part
    UNAVAILABLE = 7  # the client's word: its node is gone or did not answer in time; the put may still have happened
    ELSEWHERE = 8  # it belongs in the shard of its own key, which is to pin its parent first


class Serving(enum.IntEnum):
    """Whether a reader may answer from a table now."""

    SERVED = 0
    LEASE_OVER = 1  # until the node's leader renews it
    OTHER_EPOCH = 2  # the table went over to another epoch: attach anew, or follow


class NotServed(Unavailable):
    """The table's node may not answer: its lease is over, or its epoch is another. Neither a hit nor a miss."""


class SlotTableError(ValueError):
    """The memory is no slot table, or too small for the one asked for. Format a fresh one, or map all of it."""


class Found(NamedTuple):
    """Where one key's value lies: `address` in this process's mapping (0: not known), its xxh3 `sum`, its slot."""

    status: ReadStatus
    address: int
    length: int
    sum: int
    generation: int
    slot: int
    region: int
    tier: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Of n keys: `status` u8[n] (ReadStatus), stored `length` u64[n] and `generation` u64[n] (0 on a miss), `hits`."""

    status: U8
    length: U64
    generation: U64
    hits: int


class CancelFlag:
    """Makes a running `SlotReader.read` of another thread stop within 256 KiB."""

    __slots__ = ("_cell",)

    def __init__(self) -> None:
        self._cell: npt.NDArray[np.int32] = np.zeros(1, np.int32)

    def set(self) -> None:
        """Ask for the stop."""
        self._cell[0] = 1

    def is_set(self) -> bool:
        """Whether the stop was asked for."""
        return bool(self._cell[0])

    @property
    def cell(self) -> npt.NDArray[np.int32]:
        """The int32[1] that the C code looks at."""
        return self._cell


def default_lines(capacity: int) -> int:
    """Index lines for `capacity` slots at a load of 0.8."""
    return (capacity * 10 + 55) // 56


def table_bytes(capacity: int, lines: int = 0) -> int:
    """Bytes of memory that a table of `capacity` slots takes (`lines` 0: the default number of index lines)."""
    return HEADER_BYTES + SLOT_BYTES * ((lines or default_lines(capacity)) + capacity)


def slots_offset(lines: int) -> int:
    """Where the slots begin in the table's memory."""
    return HEADER_BYTES + SLOT_BYTES * lines


def as_memory(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, flat."""
    return memoryview(cast(bytes, buffer)).cast("B")


def count_keys(keys: Buffer) -> int:
    """How many 16-byte keys these bytes are; raises ValueError when it isn't a whole number."""
    nbytes = len(keys) if type(keys) is bytes else as_memory(keys).nbytes
    if nbytes % KEY_BYTES:
        raise ValueError(f"{nbytes} bytes of keys is not a multiple of {KEY_BYTES}")
    return nbytes // KEY_BYTES


def lease_word(until_ns: int) -> int:
    """`until_ns` as the header holds it; raises ValueError for what is no time."""
    if not 0 <= until_ns <= FOREVER:
        raise ValueError(f"a lease until {until_ns}: pass nanoseconds of time.monotonic_ns, 0 or FOREVER")
    return until_ns


def not_served(epoch: int, serving: Serving) -> NotServed:
    """The error that says why a reader of this epoch may not answer."""
    if serving is Serving.OTHER_EPOCH:
        return NotServed("the node went over to another epoch; connect again", epoch=epoch)
    return NotServed("the node's lease is over; retry when it has it again, or recompute", epoch=epoch)
