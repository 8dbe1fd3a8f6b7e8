"""Keeping a file free: a new one while there may be more, else the oldest, after its hot blocks were written again.

Invariants
- Files are reclaimed in the order of their generations, never out of turn: so whatever a file says of a key, all that
  older files said is gone when its turn comes, and tombstones are never written again.
- A file's next life begins after its hot blocks are acknowledged in another file, after its last reader has gone, and
  after a head that says so is written (and synced, for `power`): a crash never brings back what the owner was told is
  gone.
- What is written again, headers and all, is at most `share` of a file; so much of the open file is kept for it. A life
  that ended amid a reclaim has used some of that: only as much as there is room for is asked about.
- A reader that stays makes writers wait, at most `space_wait_s`; then they get NoSpace until it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..base import TierError
from ..datafile_format import BLOCK_BYTES, DESCRIPTORS_MAX, FLAGS_MAX, FREE, TOMBSTONE, encode_file, index_bytes, padded
from ..io import EngineBusy, IoEngine, OpKind
from .batches import Request, entry_of_block
from .files import BUSY_RETRY_S, OP_BYTES_MAX, DataFile, FileState, file_name, read_index, transfer
from .folder import Folder, how_to_fix
from .log import Log
from .memory import AlignedMemory, AlignedPiece
from .reading import Fetch, fetch
from .values import Block, Hooks, Place

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Reclaimer"]

_KEYS_PER_TURN = 256
"""So many of a file's blocks are asked about before others have their turn on the event loop."""


class _Chosen(NamedTuple):
    """A hot block, as its descriptor says."""

    key: bytes
    parent: bytes
    version: int
    place: Place
    original: int


def _described(file: DataFile, descriptors: NDArray[np.void], drive: int) -> Iterator[tuple[_Chosen, bool]]:
    """(block, whether it is one) of descriptors; what is none is a tombstone."""
    for key, parent, total, version, offset, length, flags, original in descriptors.tolist():
        place = Place(file.number, file.generation, offset * BLOCK_BYTES, length, total, flags & FLAGS_MAX, drive)
        yield _Chosen(bytes(key), bytes(parent), version, place, original), not flags & TOMBSTONE


class Reclaimer:
    """See the module. files: by number; changed here alone. busy_keys: that are being written or forgotten."""

    def __init__(
        self,
        folder: Folder,
        engine: IoEngine,
        memory: AlignedMemory,
        log: Log,
        files: dict[int, DataFile],
        hooks: Hooks,
        *,
        store: bytes,
        drive: int,
        direct: bool,
        is_synced: bool,
        file_bytes: int,
        files_max: int,
        number: int,
        share: float,
        batch_bytes: int,
        space_wait_s: float,
        busy_keys: Callable[[], set[bytes]],
    ) -> None:
        self._folder, self._engine, self._memory, self._log, self._files = folder, engine, memory, log, files
        self._hooks, self._store, self._drive, self._direct, self._is_synced = hooks, store, drive, direct, is_synced
        self._file_bytes, self.files_max, self._number = file_bytes, files_max, number
        self._share, self._batch_bytes, self._space_wait_s = share, batch_bytes, space_wait_s
        self._busy_keys = busy_keys
        self._is_running = False
        self.is_stopped = True
        self.changed: set[bytes] | None = None
        """While a file's hot blocks are read: the keys that were written or forgotten since."""
        log.reserve_bytes = padded(int(file_bytes * share))
        log.floor = self.floor
        log.on_short = log.on_sealed = self.kick

    def floor(self) -> int:
        """The lowest generation that still counts."""
        return min((f.generation for f in self._files.values() if f.state is not FileState.FREE), default=0)

    def start(self) -> None:
        """From now on see to it that a file is free: the owner has seen what was recovered, and begins to write."""
        if self.is_stopped:
            self.is_stopped = False
            self.kick()

    def kick(self) -> None:
        """See to it that a file is free."""
        if self._log.free or self._is_running or self.is_stopped or self._log.failure is not None:
            return
        self._is_running = True
        self._log.start(self._run())

    async def _run(self) -> None:
        try:
            while not self._log.free and not self.is_stopped and self._log.failure is None:
                if len(self._files) < self.files_max and await self.grow():
                    continue
                sealed = [file for file in self._files.values() if file.state is FileState.SEALED]
                if not sealed:
                    break  # one is about to be: that calls again
                await self._reclaim(min(sealed, key=lambda file: file.generation))
        except (TierError, OSError) as exc:
            self._log.fail(exc)
        finally:
            self._is_running = False
            self._log.pump_soon()

    async def grow(self) -> bool:
        """Make one more file. False when the disk has no room: then there are as many as may be."""
        number = self._number
        head, _ = encode_file(
            store=self._store,
            file=number,
            state=FREE,
            generation=0,
            sequence=0,
            file_bytes=self._file_bytes,
            floor=0,
        )
        name = file_name(number)
        try:
            await self._folder.create(name, nbytes=self._file_bytes, head=head)
            fd, is_direct = self._folder.open(name, direct=self._direct)
        except OSError as exc:
            self.files_max = len(self._files)
            text = f"{self._folder.path} stays at {self.files_max} datafiles: {exc}; {how_to_fix(exc.errno)}"
            self._log.stats.warning = text
            return False
        self._number += 1
        try:
            engine_file = self._engine.attach(fd, direct=is_direct)
        except TierError:
            self._folder.close(fd)
            raise
        file = DataFile(number, fd, is_direct, engine_file, self._file_bytes)
        self._files[number] = file
        self._log.free.append(file)
        self._log.stats.files = len(self._files)
        return True

    async def _reclaim(self, file: DataFile) -> None:
        if self._share > 0:
            await self._readmit(file)
        if self._log.failure is not None or self.is_stopped:
            return
        generation = file.generation
        file.state = FileState.RETIRING
        await self._wait_for_readers(file)
        if self.is_stopped:
            file.state = FileState.SEALED
            return
        await self._write_head(file)
        file.state = FileState.FREE
        self._log.stats.files_reclaimed += 1
        self._hooks.dropped(file.number, generation)
        if len(self._files) > self.files_max:
            del self._files[file.number]
            file.close(self._folder, self._engine)
            await self._folder.remove(file.name)
            self._log.stats.files = len(self._files)
            return
        self._log.free.append(file)
        self._log.pump_soon()

    async def _write_head(self, file: DataFile) -> None:
        head, _ = encode_file(
            store=self._store,
            file=file.number,
            state=FREE,
            generation=file.generation,
            sequence=self._log.sequence,
            file_bytes=file.file_bytes,
            floor=self.floor(),
        )
        piece = self._memory.take(BLOCK_BYTES)
        piece.view[:BLOCK_BYTES] = np.frombuffer(head, np.uint8)
        ops = [(piece.address, 0, BLOCK_BYTES, file.engine_file, OpKind.WRITE)]
        try:
            await transfer(self._engine, f"writing the head of {file.name}", ops)
        finally:
            self._memory.give(piece)
        self._log.stats.written_bytes += BLOCK_BYTES
        if self._is_synced:
            await self._engine.sync(file.engine_file)
            self._log.stats.syncs += 1

    async def _wait_for_readers(self, file: DataFile) -> None:
        file.drained = asyncio.Event()
        try:
            while file.readers and not self.is_stopped:
                file.drained.clear()
                try:
                    await asyncio.wait_for(file.drained.wait(), self._space_wait_s)
                except TimeoutError:
                    text = f"{file.readers} readers hold {file.name} of {self._folder.path}, which is to be used again"
                    self._log.no_space = f"{text}; fix: end them, or allow more datafiles"
                    self._log.pump_soon()
        finally:
            file.drained = None
            self._log.no_space = ""

    def stop(self) -> None:
        """Reclaim no more; a wait for readers ends."""
        self.is_stopped = True
        for file in self._files.values():
            if file.drained is not None:
                file.drained.set()

    async def _readmit(self, file: DataFile) -> None:
        """Write the hot blocks of a file again. One that cannot be read is left out."""
        self.changed = set()
        piece = None
        try:
            index = await read_index(self._engine, self._memory, file)
            chosen = await self._choose(file, index.descriptors) if index is not None else []
            if chosen:
                piece = self._memory.take(sum(padded(hot.place.length) for hot in chosen))
                await self._write_again(await self._read(file, chosen, piece), piece)
        except TierError:
            return  # the index cannot be read, or there is no room: what was not written again is dropped
        finally:
            self.changed = None
            if piece is not None:
                self._memory.give(piece)

    async def _read(self, file: DataFile, chosen: list[_Chosen], piece: AlignedPiece) -> list[tuple[_Chosen, int]]:
        """(block, where it is in the piece) of those that could be read."""
        wanted, at = [], 0
        for hot in chosen:
            wanted.append(Fetch(file, hot.place, piece.address + at))
            at += padded(hot.place.length)
        outcomes = await fetch(self._engine, wanted)
        while isinstance(outcomes[0], EngineBusy):  # then it took none of them
            await asyncio.sleep(BUSY_RETRY_S)
            outcomes = await fetch(self._engine, wanted)
        offsets = [each.address - piece.address for each in wanted]
        return [(hot, offset) for hot, offset, bad in zip(chosen, offsets, outcomes, strict=True) if bad is None]

    async def _write_again(self, found: list[tuple[_Chosen, int]], piece: AlignedPiece) -> None:
        """Offer what nobody wrote or forgot meanwhile, and tell the owner when it is safe."""
        assert self.changed is not None
        changed = self.changed | self._busy_keys()
        kept = [(hot, offset) for hot, offset in found if hot.key not in changed]
        if not kept:
            return
        request = Request(len(kept))
        blocks = [
            Block(
                hot.key,
                hot.place.sum,
                hot.version,
                (piece.view[offset : offset + hot.place.length].data,),
                hot.place.flags,
                hot.parent,
                hot.original,
            )
            for hot, offset in kept
        ]
        entries = [entry_of_block(block, request, at, bytes_max=OP_BYTES_MAX) for at, block in enumerate(blocks)]
        self._log.offer(entries, is_urgent=True)
        self.changed = None
        places = await self._log.wait(request)
        for (hot, _), new in zip(kept, places, strict=True):
            self._hooks.moved(hot.key, hot.place, new)
        self._log.stats.blocks_readmitted += len(kept)
        self._log.stats.readmitted_bytes += sum(entry.length for entry in entries)

    async def _choose(self, file: DataFile, descriptors: NDArray[np.void]) -> list[_Chosen]:
        """Hot blocks, newest first, as many as the share allows; nothing is asked about a block that has no room."""
        room = self._log.room_for_kept()
        seen: set[bytes] = set()
        chosen: list[_Chosen] = []
        nbytes = 0
        for start in range(len(descriptors), 0, -_KEYS_PER_TURN):
            part = descriptors[max(0, start - _KEYS_PER_TURN) : start][::-1]
            for hot, is_block in _described(file, part, self._drive):
                if hot.key in seen:
                    continue
                seen.add(hot.key)
                if not is_block:
                    continue
                more = nbytes + padded(hot.place.length)
                if self._needs(more, len(chosen) + 1) > room or not self._hooks.is_hot(hot.key, hot.place):
                    continue
                nbytes = more
                chosen.append(hot)
            if self._needs(nbytes + BLOCK_BYTES, len(chosen) + 1) > room:
                return chosen
            await asyncio.sleep(0)
        return chosen

    def _needs(self, nbytes: int, count: int) -> int:
        """Bytes of the open file that so much takes at most, headers and index included."""
        batches = 1 + count // DESCRIPTORS_MAX + 2 * nbytes // self._batch_bytes
        return nbytes + batches * BLOCK_BYTES + index_bytes(count)
