"""The reading end: blocks by their places, many in one batch of the engine, proved by their sums.

Invariants
- A file has a reader for each block under way, so that its next life begins after them; a place of another life is
  refused before anything is read.
- Bytes that do not have their sum are never called good. Buffers are undefined after an error.
- Memory is given back, to the caller too, when neither the engine nor a thread that sums uses it, cancelled or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from errno import EIO
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import BlockDamaged, BlockGone, TierError
from ..copy import IOV_DTYPE, CancelFlag, address_of, gather
from ..copy import engine as copies
from ..datafile_format import BLOCK_BYTES, padded
from ..io import OP_DTYPE, IoEngine, IoFailed, OpKind
from .files import DataFile, is_whole, moved_by
from .memory import AlignedMemory, flat_bytes
from .values import Place, Stats
from .waiting import to_the_end

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["Fetch", "Reader", "fetch", "sums_of"]

_TURN_BYTES = 1 << 20
"""So much is summed in one turn of the event loop: 0.03 to 0.1 ms. A hop to another thread costs more than that."""
_BATCH_BLOCKS = 1024
_BATCH_BYTES = 64 << 20
"""One batch of the engine reads no more, so that it has room for others and staging has a bound."""


@dataclass(slots=True)
class Fetch:
    """A block to read: whole blocks of 4 KiB go to `address`; from there its bytes go to `target` unless that is 0."""

    file: DataFile
    place: Place
    address: int
    target: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = padded(self.place.length)


async def fetch(engine: IoEngine, wanted: Sequence[Fetch]) -> list[TierError | None]:
    """Read blocks in one batch of the engine and prove them: for each None, or BlockDamaged, or what the engine raised.

    Files are held by the caller, and the memory is the caller's again when this returns or raises.
    """
    rows = [(each.address, each.place.offset, each.nbytes, each.file.engine_file, OpKind.READ) for each in wanted]
    ops = np.array(rows, OP_DTYPE)
    try:
        moved = await moved_by(engine, ops)
    except TierError as exc:
        return [exc] * len(wanted)
    is_moved = moved == ops["length"]
    if is_moved.all():
        return await _prove(wanted)
    outcomes: list[TierError | None] = []
    proved = iter(await _prove([each for each, is_good in zip(wanted, is_moved, strict=True) if is_good]))
    for each, is_good, result in zip(wanted, is_moved, moved.tolist(), strict=True):
        outcomes.append(next(proved) if is_good else _unreadable(each, result))
    return outcomes


async def _fetch_one(engine: IoEngine, each: Fetch) -> TierError | None:
    """`fetch` of one block."""
    try:
        moved = int((await moved_by(engine, _operation(each)))[0])
    except TierError as exc:
        return exc
    if moved == each.nbytes > _TURN_BYTES:
        (outcome,) = await _prove([each])
        return outcome
    return _proved(each, moved)


def _operation(each: Fetch) -> NDArray[np.void]:
    return np.array([(each.address, each.place.offset, each.nbytes, each.file.engine_file, OpKind.READ)], OP_DTYPE)


def _proved(each: Fetch, moved: int) -> TierError | None:
    """What came of a block of which so many bytes were read, at most _TURN_BYTES."""
    place = each.place
    if moved != each.nbytes:
        return _unreadable(each, moved)
    if each.target:
        total = copies.copy_sum_at(each.target, each.address, place.length)
    else:
        total = copies.sum_at(each.address, place.length)
    return None if total == place.sum else _damaged(each)


def _unreadable(each: Fetch, result: int) -> BlockDamaged:
    what = f"reading {each.file.name}" if result < 0 else f"reading {each.file.name} ended after {result} bytes"
    return BlockDamaged(f"block at {each.place.offset}: {IoFailed(what, errno=-result if result < 0 else EIO)}")


async def _prove(wanted: Sequence[Fetch]) -> list[TierError | None]:
    """Compare what was read with its sums, on the way to its target; None for each that has it.

    Others have their turns on the loop after each MiB.
    """
    outcomes: list[TierError | None] = []
    start = 0
    while start < len(wanted):
        end, nbytes = start + 1, wanted[start].nbytes
        while end < len(wanted) and nbytes + wanted[end].nbytes <= _TURN_BYTES:
            nbytes += wanted[end].nbytes
            end += 1
        part = wanted[start:end]
        sums = await sums_of(
            np.array([each.address for each in part], np.uint64),
            np.array([each.place.length for each in part], np.uint64),
            np.array([each.target for each in part], np.uint64),
        )
        outcomes += [
            None if total == each.place.sum else _damaged(each) for each, total in zip(part, sums.tolist(), strict=True)
        ]
        start = end
        if start < len(wanted):
            await asyncio.sleep(0)
    return outcomes


async def sums_of(
    addresses: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]], targets: NDArray[np.uint64] | None = None
) -> NDArray[np.uint64]:
    """The sums of stretches of memory, each copied to its target unless that is 0. More than a MiB: in another thread.

    The memory is the caller's again when this returns or raises.
    """
    count = len(addresses)
    iov = np.empty(count, IOV_DTYPE)
    iov["addr"], iov["len"] = addresses, lengths
    targets = np.zeros(count, np.uint64) if targets is None else targets
    first, sums, cancel = np.arange(count + 1, dtype=np.uint32), np.zeros(count, np.uint64), CancelFlag()
    if int(iov["len"].sum()) > _TURN_BYTES:
        work = asyncio.get_running_loop().run_in_executor(None, gather, first, iov, targets, sums, cancel)
        await to_the_end(work, cancel.set)
    else:
        gather(first, iov, targets, sums)
    return sums


def _damaged(each: Fetch) -> BlockDamaged:
    return BlockDamaged(
        f"{each.place.length} bytes at {each.place.offset} of {each.file.name} do not have the block's sum"
    )


class Reader:
    """Reads of one store. files: by number, the store's."""

    def __init__(self, engine: IoEngine, memory: AlignedMemory, files: dict[int, DataFile], stats: Stats) -> None:
        self._engine, self._memory, self._files, self._stats = engine, memory, files, stats

    async def read(self, place: Place, into: Buffer) -> None:
        """See Datafiles.read. What `read_many` does, in half the time for one block."""
        target = _target(place, into)
        with self.pinned(place):
            each = Fetch(self._files[place.file], place, address_of(target))
            if each.address % BLOCK_BYTES or target.nbytes < each.nbytes:
                piece = self._memory.take(each.nbytes)
                each.target, each.address = each.address, piece.address
                try:
                    outcome = await _fetch_one(self._engine, each)
                finally:
                    self._memory.give(piece)
            else:
                outcome = await _fetch_one(self._engine, each)
        if outcome is not None:
            self._stats.blocks_damaged += isinstance(outcome, BlockDamaged)
            raise outcome
        self._stats.blocks_read += 1
        self._stats.read_bytes += place.length

    def begin(self, place: Place, address: int, room: int, then: Callable[[TierError | None], None]) -> bool:
        """See Datafiles.begin_read."""
        if address % BLOCK_BYTES or not padded(place.length) <= min(room, _TURN_BYTES):
            return False
        held: list[DataFile] = []
        if self._hold(place, held) is not None:
            return False
        each = Fetch(held[0], place, address)
        try:
            future = self._engine.submit(_operation(each))
        except BaseException as exc:
            held[0].let_go()
            if isinstance(exc, TierError):
                return False
            raise
        future.add_done_callback(partial(self._landed, each, then))
        return True

    def _landed(
        self, each: Fetch, then: Callable[[TierError | None], None], moved: asyncio.Future[NDArray[np.int64]]
    ) -> None:
        """What `begin` began has left the engine; nobody has the future to cancel it."""
        error = moved.exception()
        if error is None:
            outcome = _proved(each, int(moved.result()[0]))
        else:
            outcome = error if isinstance(error, TierError) else IoFailed(f"reading: {error!r}", errno=EIO)
        each.file.let_go()
        self._count((each.place,), (outcome,))
        then(outcome)

    async def read_many(self, places: Sequence[Place], into: Sequence[Buffer]) -> list[TierError | None]:
        """See Datafiles.read_many."""
        targets = [_target(place, buffer) for place, buffer in zip(places, into, strict=True)]
        outcomes: list[TierError | None] = [None] * len(places)
        start = 0
        while start < len(places):
            end, nbytes = start, 0
            while end < len(places) and end - start < _BATCH_BLOCKS and (end == start or nbytes < _BATCH_BYTES):
                nbytes += places[end].length
                end += 1
            outcomes[start:end] = await self._batch(places[start:end], targets[start:end])
            start = end
        return outcomes

    async def _batch(self, places: Sequence[Place], targets: Sequence[NDArray[np.uint8]]) -> list[TierError | None]:
        """One batch of the engine: what can be read of it."""
        held: list[DataFile] = []
        outcomes: list[TierError | None] = []
        try:
            for place in places:
                outcomes.append(self._hold(place, held))
            if len(held) == len(places):
                outcomes = await self._fetch(held, places, targets)
            elif held:
                found = [at for at, outcome in enumerate(outcomes) if outcome is None]
                read = await self._fetch(held, [places[at] for at in found], [targets[at] for at in found])
                for at, outcome in zip(found, read, strict=True):
                    outcomes[at] = outcome
        finally:
            for file in held:
                file.let_go()
        self._count(places, outcomes)
        return outcomes

    def _hold(self, place: Place, held: list[DataFile]) -> BlockGone | None:
        """Add the place's file to `held`, with one more reader; BlockGone where that is over."""
        file = self._files.get(place.file)
        if file is None or not is_whole(file, place):
            return BlockGone(f"there is no datafile {place.file} that has it")
        if not file.has(place.generation):
            return BlockGone(f"datafile {place.file} was given to other blocks since")
        file.readers += 1
        held.append(file)
        return None

    async def _fetch(
        self, files: Sequence[DataFile], places: Sequence[Place], targets: Sequence[NDArray[np.uint8]]
    ) -> list[TierError | None]:
        """Read blocks whose files are held, directly where memory allows, else through a piece of our own."""
        wanted: list[Fetch] = []
        staged: list[Fetch] = []
        nbytes = 0
        for file, place, target in zip(files, places, targets, strict=True):
            each = Fetch(file, place, address_of(target))
            if each.address % BLOCK_BYTES or target.nbytes < each.nbytes:
                each.target, each.address = each.address, nbytes
                nbytes += each.nbytes
                staged.append(each)
            wanted.append(each)
        piece = self._memory.take(nbytes) if staged else None
        try:
            if piece is not None:
                for each in staged:
                    each.address += piece.address
            return await fetch(self._engine, wanted)
        finally:
            if piece is not None:
                self._memory.give(piece)

    def _count(self, places: Sequence[Place], outcomes: Sequence[TierError | None]) -> None:
        stats = self._stats
        for place, outcome in zip(places, outcomes, strict=True):
            if outcome is None:
                stats.blocks_read += 1
                stats.read_bytes += place.length
            else:
                stats.blocks_damaged += isinstance(outcome, BlockDamaged)
                stats.blocks_gone += isinstance(outcome, BlockGone)

    async def prove(self, place: Place) -> None:
        """See Datafiles.prove."""
        with self.pinned(place):
            piece = self._memory.take(padded(place.length))
            try:
                outcome = await _fetch_one(self._engine, Fetch(self._files[place.file], place, piece.address))
            finally:
                self._memory.give(piece)
        if outcome is not None:
            self._stats.blocks_damaged += isinstance(outcome, BlockDamaged)
            raise outcome

    @contextlib.contextmanager
    def pinned(self, place: Place) -> Iterator[None]:
        """See Datafiles.pinned."""
        held: list[DataFile] = []
        gone = self._hold(place, held)
        if gone is not None:
            self._stats.blocks_gone += 1
            raise gone
        try:
            yield
        finally:
            held[0].let_go()


def _target(place: Place, into: Buffer) -> NDArray[np.uint8]:
    target = flat_bytes(into, writable=True)
    if target.nbytes < place.length:
        raise ValueError(f"the block has {place.length} bytes, the buffer {target.nbytes}")
    return target
