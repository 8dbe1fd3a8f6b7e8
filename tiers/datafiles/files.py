"""The datafiles of a store and what each is doing.

    free -> open -> closing -> sealed -> retiring -> free

One file is open: batches are put at its end. A closing one takes no more and waits for its last batches, then for its
index. A sealed one is read only. A retiring one refuses new readers, waits for those it has, and then begins its next
life; places of the last one are refused from then on. The order in which files were opened is the order of their
generations, and the order in which they are reclaimed."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..datafile_format import BLOCK_BYTES, decode_index, decode_index_head, index_bytes, padded
from ..io import OP_DTYPE, EngineBusy, IoEngine, IoFailed, OpKind
from .memory import AlignedMemory, AlignedPiece
from .values import Place
from .waiting import to_the_end

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datafile_format import Index
    from .folder import Folder

__all__ = [
    "BUSY_RETRY_S",
    "OP_BYTES_MAX",
    "DataFile",
    "FileState",
    "file_name",
    "is_whole",
    "moved_by",
    "places_of",
    "raise_if_short",
    "read_index",
    "read_piece",
    "transfer",
]


class FileState(enum.Enum):
    """See the module."""

    FREE = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    SEALED = enum.auto()
    RETIRING = enum.auto()


@dataclass(slots=True, eq=False)
class DataFile:
    """One file. offset: where the next batch goes; last_sum, last_sequence: of the batch before it; count and
    descriptors: of this life, until it is sealed; flying: batches given to the engine and not landed."""

    number: int
    fd: int
    is_direct: bool
    engine_file: int
    file_bytes: int
    state: FileState = FileState.FREE
    generation: int = 0
    head_sum: int = 0
    offset: int = 0
    last_sum: int = 0
    last_sequence: int = 0
    count: int = 0
    descriptors: list[NDArray[np.void]] = field(default_factory=list)
    flying: int = 0
    readers: int = 0
    drained: asyncio.Event | None = None

    @property
    def name(self) -> str:
        """Of the file in its folder."""
        return file_name(self.number)

    def room(self, *, reserve: int = 0) -> int:
        """Bytes for the next batch and the index that it makes longer, leaving `reserve`."""
        return self.file_bytes - self.offset - reserve

    def begin(self, generation: int, head_sum: int) -> None:
        """Its next life: nothing in it yet."""
        self.state, self.generation, self.head_sum = FileState.OPEN, generation, head_sum
        self.offset, self.last_sum = BLOCK_BYTES, head_sum
        self.last_sequence = self.count = 0
        self.descriptors = []

    def add(self, descriptors: NDArray[np.void], nbytes: int, total: int, sequence: int) -> None:
        """A batch of nbytes with this sum was put at its end."""
        self.descriptors.append(descriptors)
        self.count += len(descriptors)
        self.offset += nbytes
        self.last_sum, self.last_sequence = total, sequence

    def has(self, generation: int) -> bool:
        """Whether that life of it may be read: whoever does counts as a reader until `let_go`."""
        return (
            generation == self.generation and self.state is not FileState.FREE and self.state is not FileState.RETIRING
        )

    def let_go(self) -> None:
        """One reader less."""
        self.readers -= 1
        if not self.readers and self.drained is not None:
            self.drained.set()

    def close(self, folder: Folder, engine: IoEngine) -> None:
        """Forget it, and close it; nothing of it is under way."""
        engine.detach(self.engine_file)
        folder.close(self.fd)


OP_BYTES_MAX = 1 << 30
"""One operation moves no more, and no block is longer: the kernel stops below 2 GiB."""
BUSY_RETRY_S = 0.001
"""After so long an engine that was full of reads is asked again by what must not fail for that."""


def file_name(number: int) -> str:
    """The name of datafile `number`."""
    return f"data-{number:06d}"


async def moved_by(engine: IoEngine, ops: NDArray[np.void]) -> NDArray[np.int64]:
    """Run a batch of operations; what each moved, or -errno, when the memory is free.

    Raises EngineBusy, SyncFailed, EngineClosed as the engine does. A cancel is passed on once the memory is free.
    """
    future = engine.submit(ops)
    try:
        return await future
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await to_the_end(asyncio.ensure_future(engine.settle(future)))
        if not future.cancelled():
            future.exception()
        raise


async def transfer(engine: IoEngine, what: str, ops: Sequence[tuple[int, int, int, int, OpKind]]) -> None:
    """Run operations (address, offset, length, file, kind), all of them whole, and return when the memory is free.

    Waits while the engine is full: what is written here is a head or an index, and the store would end without it.
    Raises IoFailed for the first that is not whole; else as `moved_by`.
    """
    batch = np.array(ops, OP_DTYPE)
    while True:
        try:
            moved = await moved_by(engine, batch)
            break
        except EngineBusy:
            await asyncio.sleep(BUSY_RETRY_S)
    raise_if_short(what, batch["length"], moved)


def raise_if_short(what: str, asked: NDArray[np.uint32], moved: NDArray[np.int64]) -> None:
    """IoFailed for the first operation that did not move all its bytes."""
    short = np.flatnonzero(moved != asked)
    if len(short):
        result = int(moved[short[0]])
        raise IoFailed(what if result < 0 else f"{what} ended after {result} bytes", errno=-result if result < 0 else 5)


async def read_piece(engine: IoEngine, memory: AlignedMemory, file: DataFile, offset: int, nbytes: int) -> AlignedPiece:
    """Read whole blocks into a piece of `memory`, which the caller gives back. Raises as `transfer`."""
    piece = memory.take(nbytes)
    ops = [
        (piece.address + at, offset + at, min(OP_BYTES_MAX, nbytes - at), file.engine_file, OpKind.READ)
        for at in range(0, nbytes, OP_BYTES_MAX)
    ]
    try:
        await transfer(engine, f"reading {file.name}", ops)
    except BaseException:
        memory.give(piece)
        raise
    return piece


async def read_index(engine: IoEngine, memory: AlignedMemory, file: DataFile) -> Index | None:
    """The index of the file's present life, or None where there is none that proves itself. Raises as `transfer`."""
    piece = await read_piece(engine, memory, file, file.file_bytes - BLOCK_BYTES, BLOCK_BYTES)
    raw = piece.view[:BLOCK_BYTES].tobytes()
    memory.give(piece)
    head = decode_index_head(
        raw, file=file.number, generation=file.generation, previous=file.head_sum, file_bytes=file.file_bytes
    )
    if head is None:
        return None
    nbytes = index_bytes(head.count) - BLOCK_BYTES
    if not nbytes:
        return decode_index(head, raw, b"")
    piece = await read_piece(engine, memory, file, head.length, nbytes)
    try:
        return decode_index(head, raw, piece.view[:nbytes].data)
    finally:
        memory.give(piece)


def places_of(file: DataFile, descriptors: NDArray[np.void], drive: int) -> list[tuple[bytes, Place]]:
    """(key, place) of descriptors, which are no tombstones."""
    return [
        (key, Place(file.number, file.generation, offset * BLOCK_BYTES, length, total, flags, drive))
        for key, _, total, _, offset, length, flags, _ in descriptors.tolist()
    ]


def is_whole(file: DataFile, place: Place) -> bool:
    """Whether the place can lie in the file at all."""
    if not 0 < place.length <= OP_BYTES_MAX:
        return False
    return place.offset > BLOCK_BYTES and place.offset + padded(place.length) <= file.file_bytes
