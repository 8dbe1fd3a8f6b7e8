"""Requests, their entries, and how a batch of entries becomes operations of the engine.

A request ends only when none of its memory is with the engine, whatever happened to it before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..datafile_format import BLOCK_BYTES, DESCRIPTOR_DTYPE, TOMBSTONE, encode_batch, padded
from ..io import OpKind
from .files import OP_BYTES_MAX, DataFile
from .memory import AlignedMemory, AlignedPiece, address_of, is_aligned
from .values import Place

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Batch", "Entry", "Operation", "Request", "build_batch", "cost"]

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
        if self.done.done() or self.sent:
            return
        if self.error is not None:
            self.done.set_exception(self.error)
            self.done.exception()  # somebody may have stopped waiting
        elif not self.left:
            self.done.set_result(self.places)


@dataclass(slots=True)
class Entry:
    """One block or tombstone of a request, `at` its place in the request."""

    key: bytes
    parent: bytes
    sum: int
    version: int
    flags: int
    length: int
    buffers: tuple[NDArray[np.uint8], ...]
    request: Request
    at: int


@dataclass(slots=True)
class Batch:
    """With the engine, or landed and not acknowledged; the head of a file is one without entries."""

    file: DataFile
    entries: list[Entry]
    places: list[Place]
    memory: AlignedPiece
    ops: list[Operation]
    is_landed: bool = False
    error: BaseException | None = None
    future: asyncio.Future[NDArray[np.int64]] | None = None


def build_batch(
    file: DataFile, entries: Sequence[Entry], memory: AlignedMemory, *, sequence: int, run: int, drive: int
) -> tuple[Batch, NDArray[np.void], int, int]:
    """(batch for the end of `file`, its descriptors, its bytes, its sum). Changes nothing but `memory`."""
    is_staged = [not _goes_as_it_is(entry, file.is_direct) for entry in entries]
    staged_bytes = sum(padded(entry.length) for entry, copied in zip(entries, is_staged, strict=True) if copied)
    piece = memory.take(BLOCK_BYTES + staged_bytes)
    descriptors = np.zeros(len(entries), DESCRIPTOR_DTYPE)
    places: list[Place] = []
    ops: list[Operation] = [(piece.address, file.offset, BLOCK_BYTES, file.engine_file, OpKind.WRITE)]
    offset, staging = file.offset + BLOCK_BYTES, BLOCK_BYTES
    last: object = piece  # whose memory the last operation is of: one operation never spans two allocations
    for at, (entry, copied) in enumerate(zip(entries, is_staged, strict=True)):
        block = offset // BLOCK_BYTES if entry.length else 0
        descriptors[at] = (entry.key, entry.parent, entry.sum, entry.version, block, entry.length, entry.flags, 0)
        flags = entry.flags & ~TOMBSTONE
        places.append(Place(file.number, file.generation, offset, entry.length, entry.sum, flags, drive))
        nbytes = padded(entry.length)
        if copied:
            _copy(piece.view[staging : staging + nbytes], entry.buffers)
            _append(ops, piece.address + staging, offset, nbytes, file.engine_file, is_more=last is piece)
            last = piece
            staging += nbytes
        else:
            to = offset
            for data in entry.buffers:
                _append(ops, address_of(data), to, data.nbytes, file.engine_file, is_more=last is entry)
                last = entry
                to += data.nbytes
        offset += nbytes
    nbytes = offset - file.offset
    header, total = encode_batch(
        descriptors,
        file=file.number,
        generation=file.generation,
        sequence=sequence,
        length=nbytes,
        run=run,
        previous=file.last_sum,
    )
    piece.view[:BLOCK_BYTES] = np.frombuffer(header, np.uint8)
    return Batch(file, list(entries), places, piece, ops), descriptors, nbytes, total


def cost(entry: Entry) -> int:
    """What an entry counts for in the queue's bound: a tombstone as its descriptor and then some."""
    return max(entry.length, 256)


def _goes_as_it_is(entry: Entry, is_direct: bool) -> bool:
    """Whether its buffers can be written from where they are."""
    if len(entry.buffers) > _BUFFERS_MAX:
        return False
    return not is_direct or all(map(is_aligned, entry.buffers))


def _copy(into: NDArray[np.uint8], buffers: tuple[NDArray[np.uint8], ...]) -> None:
    at = 0
    for data in buffers:
        into[at : at + data.nbytes] = data
        at += data.nbytes
    into[at:] = 0


def _append(ops: list[Operation], address: int, offset: int, nbytes: int, file: int, *, is_more: bool) -> None:
    """One more write; it becomes part of the last one where that is of the same memory and both continue."""
    last = ops[-1]
    if is_more and (last[0] + last[2], last[1] + last[2]) == (address, offset) and last[2] + nbytes <= OP_BYTES_MAX:
        ops[-1] = (last[0], last[1], last[2] + nbytes, file, OpKind.WRITE)
        return
    for at in range(0, nbytes, OP_BYTES_MAX):
        ops.append((address + at, offset + at, min(OP_BYTES_MAX, nbytes - at), file, OpKind.WRITE))
