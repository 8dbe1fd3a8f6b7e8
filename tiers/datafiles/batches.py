"""Requests, their entries, and how a batch of entries becomes operations of the engine.

A request ends only when none of its memory is with the engine, whatever happened to it before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..base import ValueTooLarge
from ..copy import address_of
from ..datafile_format import (
    BLOCK_BYTES,
    DESCRIPTOR_DTYPE,
    FLAGS_MAX,
    KEY_BYTES,
    NO_PARENT,
    TOMBSTONE,
    encode_batch,
    padded,
)
from ..io import OP_DTYPE, OpKind
from .files import OP_BYTES_MAX, DataFile
from .memory import AlignedMemory, AlignedPiece, flat_bytes
from .values import Block, Place

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Batch", "Entry", "Operation", "Request", "build_batch", "cost", "entry_of_block", "entry_of_key"]

Operation = tuple[int, int, int, int, OpKind]
"""address, offset, length, file, kind: a row of OP_DTYPE."""

_BUFFERS_MAX = 16  # of one block that are written from where they are: more are copied, to bound a batch's operations
_NOWHERE = Place(0, 0, 0, 0, 0, 0)


class Request:
    """What one call offered. It ends with the places, or with an error, once nothing of it is with the engine."""

    __slots__ = ("done", "error", "left", "places", "sent")

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[list[Place]] = asyncio.get_running_loop().create_future()
        self.places: list[Place] = [_NOWHERE] * count
        self.left = count  # not acknowledged
        self.sent = 0  # with the engine
        self.error: BaseException | None = None

    def end_if_over(self) -> None:
        """Tell the waiter if there is something to tell."""
        if self.sent or self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
            self.done.exception()  # somebody may have stopped waiting
        elif not self.left:
            self.done.set_result(self.places)


@dataclass(slots=True)
class Entry:
    """One block or tombstone of a request, `at` its place in the request.

    nbytes: of the file, padding included. pieces: (address, bytes) of the buffers, which are kept here meanwhile.
    is_aligned: O_DIRECT takes all of them as they are.
    """

    key: bytes
    parent: bytes
    sum: int
    version: int
    flags: int
    length: int
    original: int
    nbytes: int
    buffers: Sequence[NDArray[np.uint8]]
    pieces: Sequence[tuple[int, int]]
    is_aligned: bool
    request: Request
    at: int


@dataclass(slots=True)
class Batch:
    """With the engine, or landed and not acknowledged; the head of a file is one without entries."""

    file: DataFile
    entries: list[Entry]
    places: list[Place]
    memory: AlignedPiece
    ops: NDArray[np.void]
    is_landed: bool = False
    error: BaseException | None = None
    future: asyncio.Future[NDArray[np.int64]] | None = None


def entry_of_block(block: Block, request: Request, at: int, *, bytes_max: int) -> Entry:
    """The entry of a block. Raises ValueError for one that cannot be, ValueTooLarge above bytes_max."""
    key, total, version, given, flags, parent, original = block
    if not 0 <= flags <= FLAGS_MAX or not 0 <= original < 1 << 32:
        raise ValueError(f"flags must be below 2**31, original below 2**32, not {flags} and {original}")
    buffers, pieces = [], []
    length = bits = 0
    for data in given:
        flat = flat_bytes(data)
        address, nbytes = address_of(flat), flat.nbytes
        buffers.append(flat)
        pieces.append((address, nbytes))
        length += nbytes
        bits |= address | nbytes
    if not length:
        raise ValueError("a block must have at least one byte")
    if length > bytes_max:
        raise ValueTooLarge(f"a block of {length} bytes fits no datafile: at most {bytes_max}; use larger datafiles")
    is_aligned = not bits % BLOCK_BYTES
    return Entry(
        _key(key), _key(parent), total, version, flags, length, original, padded(length), buffers, pieces, is_aligned,
        request, at,
    )  # fmt: skip


def entry_of_key(key: bytes, request: Request, at: int) -> Entry:
    """The tombstone of a key. Raises ValueError."""
    return Entry(_key(key), NO_PARENT, 0, 0, TOMBSTONE, 0, 0, 0, (), (), True, request, at)


def _key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def build_batch(
    file: DataFile, entries: list[Entry], memory: AlignedMemory, *, sequence: int, run: int, drive: int
) -> tuple[Batch, NDArray[np.void], int, int]:
    """(batch for the end of `file`, its descriptors, its bytes, its sum). Changes nothing but `memory`."""
    is_copied = [len(each.pieces) > _BUFFERS_MAX or not (each.is_aligned or not file.is_direct) for each in entries]
    copied_bytes = sum(each.nbytes for each, copied in zip(entries, is_copied, strict=True) if copied)
    piece = memory.take(BLOCK_BYTES + copied_bytes)
    rows = []
    places: list[Place] = []
    ops: list[Operation] = []
    _append(ops, piece.address, file.offset, BLOCK_BYTES, file.engine_file)
    number, generation = file.number, file.generation
    offset, staging = file.offset + BLOCK_BYTES, BLOCK_BYTES
    for entry, copied in zip(entries, is_copied, strict=True):
        length, flags = entry.length, entry.flags
        block = offset // BLOCK_BYTES if length else 0
        rows.append((entry.key, entry.parent, entry.sum, entry.version, block, length, flags, entry.original))
        places.append(Place(number, generation, offset, length, entry.sum, flags & FLAGS_MAX, drive))
        if copied:
            _copy(piece.view[staging : staging + entry.nbytes], entry.buffers)
            _append(ops, piece.address + staging, offset, entry.nbytes, file.engine_file)
            staging += entry.nbytes
        else:
            to = offset
            for address, nbytes in entry.pieces:
                _append(ops, address, to, nbytes, file.engine_file)
                to += nbytes
        offset += entry.nbytes
    descriptors = np.array(rows, DESCRIPTOR_DTYPE)
    header, total = encode_batch(
        descriptors,
        file=number,
        generation=generation,
        sequence=sequence,
        length=offset - file.offset,
        run=run,
        previous=file.last_sum,
    )
    piece.view[:BLOCK_BYTES] = np.frombuffer(header, np.uint8)
    return Batch(file, entries, places, piece, np.array(ops, OP_DTYPE)), descriptors, offset - file.offset, total


def cost(entry: Entry) -> int:
    """What an entry counts for in the queue's bound: a tombstone as its descriptor and then some."""
    return max(entry.length, 256)


def _copy(into: NDArray[np.uint8], buffers: Sequence[NDArray[np.uint8]]) -> None:
    at = 0
    for data in buffers:
        into[at : at + data.nbytes] = data
        at += data.nbytes
    into[at:] = 0


def _append(ops: list[Operation], address: int, offset: int, nbytes: int, file: int) -> None:
    """One more write; it becomes part of the last one where it goes on behind that in memory and in the file.

    So one write may span buffers of several blocks. All of them are kept until the whole batch has landed.
    """
    if ops:
        before, at, length, _, _ = ops[-1]
        if before + length == address and at + length == offset and length + nbytes <= OP_BYTES_MAX:
            ops[-1] = (before, at, length + nbytes, file, OpKind.WRITE)
            return
    ops.append((address, offset, nbytes, file, OpKind.WRITE))
