"""Blocks in the datafiles of one folder.

    What was acknowledged is there after a kill -9 (durability `process`) or a power cut (`power`) until its file's turn
    to be used again comes; then the owner is told. Forgotten blocks stay forgotten. A read gives the block's bytes,
    proved by its sum, or raises.

The store keeps no index: whoever owns it keeps the places that `open` and `write` gave, and hears through Hooks when
they end. Memory is bounded by the writes that wait. All calls are made in the event loop's thread, and the engine is
the store's alone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import NoSpace, SetupFailed, TierError
from ..copy import address_of
from ..datafile_format import BLOCK_BYTES, NUMBER_MAX, index_bytes
from ..io import EngineClosed, IoEngine
from .batches import Entry, Request, entry_of_block, entry_of_key
from .files import OP_BYTES_MAX, FileState
from .folder import Folder, RealFolder
from .log import Log
from .memory import AlignedMemory, flat_bytes
from .reading import Reader
from .reclaim import Reclaimer
from .recovery import RecoveredBlocks, Recovery, recover
from .values import Block, Durability, Hooks, Place, Problem, ProblemKind, Stats

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from typing_extensions import Buffer

__all__ = ["FILES_MIN", "Datafiles"]

FILES_MIN = 3
"""One is written, one is free, one holds what was there before."""


class Datafiles:
    """See the module; made by `open`.

    files: by number. store_id: 16 bytes that all its files carry. drive: as its places say. stats: counts, live.
    engine, memory: for what belongs to the store (scrub).
    """

    def __init__(
        self,
        folder: Folder,
        engine: IoEngine,
        memory: AlignedMemory,
        recovery: Recovery,
        log: Log,
        reclaimer: Reclaimer,
        puts: dict[Request, list[Entry]],
        drive: int,
    ) -> None:
        self._folder, self.engine, self.memory = folder, engine, memory
        self._log, self._reclaimer, self._puts = log, reclaimer, puts
        self._registered: dict[int, object] = {}
        self._reader = Reader(engine, memory, recovery.files, log.stats)
        self.files = recovery.files
        self.store_id = recovery.store
        self.drive = drive
        self.stats = log.stats
        self.is_closed = False

    @classmethod
    async def open(
        cls,
        folder: Path | Folder,
        engine: IoEngine,
        *,
        file_bytes: int = 256 << 20,
        files_max: int = 16,
        direct: bool = True,
        durability: str = Durability.PROCESS,
        hooks: Hooks | None = None,
        readmit_share: float = 0.02,
        batch_bytes: int = 1 << 20,
        queue_bytes_max: int = 64 << 20,
        space_wait_s: float = 30.0,
        drive: int = 0,
        run: int | None = None,
        register: Sequence[Buffer] = (),
    ) -> tuple[Datafiles, RecoveredBlocks, list[Problem]]:
        """(the store, the blocks that are there in log order, what an operator should know).

        file_bytes: of new files, a multiple of 4 KiB. files_max: at least 3; more than the disk has room for is no
        error while 3 fit. readmit_share: of a file that may be spent on hot blocks of the one that is reclaimed.
        batch_bytes: of payload in one batch. queue_bytes_max: of blocks that wait. run: a number that no earlier
        opening had, random by default. register: what `register` is called with.
        Raises SetupFailed (locked, no access, no room, another release's), ValueError.
        """
        _check_sizes(file_bytes, files_max, readmit_share, batch_bytes)
        is_synced = Durability(durability) is Durability.POWER
        place = RealFolder(folder) if isinstance(folder, Path) else folder
        memory, stats = AlignedMemory(engine), Stats()
        place.lock()
        try:
            found = await recover(
                place, engine, memory, new_store=os.urandom(16), direct=direct, drive=drive, is_synced=is_synced
            )
        except BaseException:
            memory.unregister()
            place.release()
            raise
        log = Log(
            place.path,
            engine,
            memory,
            stats,
            store=found.store,
            drive=drive,
            run=run if run is not None else int.from_bytes(os.urandom(7), "little") or time.time_ns(),
            is_synced=is_synced,
            batch_bytes=batch_bytes,
            queue_bytes_max=queue_bytes_max,
            generation=found.next_generation,
            sequence=found.next_sequence,
        )
        puts: dict[Request, list[Entry]] = {}
        reclaimer = Reclaimer(
            place,
            engine,
            memory,
            log,
            found.files,
            hooks or Hooks(),
            store=found.store,
            drive=drive,
            direct=direct,
            is_synced=is_synced,
            file_bytes=file_bytes,
            files_max=files_max,
            number=found.next_number,
            share=readmit_share,
            batch_bytes=batch_bytes,
            space_wait_s=space_wait_s,
            busy_keys=lambda: {entry.key for entries in puts.values() for entry in entries},
        )
        store = cls(place, engine, memory, found, log, reclaimer, puts, drive)
        try:
            await store._begin(found, direct)
            for each in register:
                store.register(each)
        except BaseException:
            await store.aclose()
            raise
        return store, found.blocks, found.problems

    async def _begin(self, found: Recovery, direct: bool) -> None:
        """Go on where the last file ended, and have files to go on in."""
        self._log.free.extend(file for file in self.files.values() if file.state is FileState.FREE)
        newest = max((file.generation for file in self.files.values() if file.state is not FileState.FREE), default=0)
        for file in found.unsealed:
            if file.generation == newest:
                file.state = FileState.OPEN
                self._log.open_file = file
            else:
                self._log.seal_later(file)
        while len(self.files) < FILES_MIN:
            if not await self._reclaimer.grow():
                raise SetupFailed(
                    f"the datafiles in {self._folder.path} cannot be made",
                    found=f"{len(self.files)} datafiles; {self.stats.warning}",
                    needed=f"room for {FILES_MIN}",
                    fix="free space there, use smaller datafiles, or name a folder on a larger file system",
                )
        self.stats.files = len(self.files)
        if direct and not all(file.is_direct for file in self.files.values()):
            text = "this file system refuses O_DIRECT: transfers go through the page cache"
            found.report(ProblemKind.NOTICE, "", text)

    @property
    def failure(self) -> TierError | None:
        """Why the store takes no more writes, once it does not."""
        return self._log.failure

    @property
    def block_bytes_max(self) -> int:
        """The longest block that any file takes."""
        smallest = min(file.file_bytes for file in self.files.values())
        return min(smallest - 2 * BLOCK_BYTES - index_bytes(1), OP_BYTES_MAX)

    async def write(self, blocks: Sequence[Block]) -> list[Place]:
        """Write blocks; their places, once they are as durable as the store promises.

        Buffers are borrowed until this returns or raises; a cancel is passed on when they are free. Raises TierBusy
        (too much waits; nothing was taken), NoSpace (readers hold every file), WritesFailed, ValueTooLarge,
        EngineClosed, ValueError. After an error some of the blocks may be there all the same.
        """
        self._check_open()
        request, most = Request(len(blocks)), self.block_bytes_max
        entries = [entry_of_block(block, request, at, bytes_max=most) for at, block in enumerate(blocks)]
        places = await self._put(request, entries)
        self.stats.payload_bytes += sum(entry.length for entry in entries)
        self.stats.blocks_written += len(entries)
        return places

    async def forget(self, keys: Iterable[bytes]) -> None:
        """Have none of these keys come back at a later `open`; returns when that is as durable as a write is.

        For deletes: what is only pushed out by newer blocks needs none of it. Costs 64 bytes of disk a key. Raises as
        `write`; then the keys may come back.
        """
        self._check_open()
        keys = list(keys)
        request = Request(len(keys))
        await self._put(request, [entry_of_key(key, request, at) for at, key in enumerate(keys)])
        self.stats.tombstones += len(keys)

    async def _put(self, request: Request, entries: list[Entry]) -> list[Place]:
        if not entries:
            return []
        self._reclaimer.start()
        self._log.offer(entries)
        if self._reclaimer.changed is not None:
            self._reclaimer.changed.update(entry.key for entry in entries)
        self._puts[request] = entries
        try:
            return await self._log.wait(request)
        finally:
            del self._puts[request]

    async def read(self, place: Place, into: Buffer) -> None:
        """Put the block at `place` into the first `place.length` bytes of `into`, proved by its sum.

        into: writable, C-contiguous; borrowed until this returns or raises, then undefined if it raised. Where it is
        4 KiB-aligned and as long as the block in whole blocks of 4 KiB, the disk's bytes go there directly (the rest
        of the last 4 KiB is overwritten too), else they are copied. Raises BlockGone, BlockDamaged (a wrong sum, or
        the disk cannot read it), EngineBusy, EngineClosed, ValueError.
        """
        self._check_open()
        await self._reader.read(place, into)

    async def read_many(self, places: Sequence[Place], into: Sequence[Buffer]) -> list[TierError | None]:
        """Read each place into its own buffer, in one batch of the engine (a further one after each 64 MiB).

        None for a block that is there and proved, else what `read` would have raised; one's error does not keep others
        back. Buffers: as in `read`, none overlapping another. Raises EngineClosed, ValueError.
        """
        self._check_open()
        return await self._reader.read_many(places, into)

    def begin_read(self, place: Place, address: int, room: int, then: Callable[[TierError | None], None]) -> bool:
        """Begin to read a block to where it stays: `read` of one block for a caller that waits in no task.

        address: of memory whose `room` bytes are the store's until `then` is told what `read_many` would have given,
        once, on a later turn of the loop; it may not raise. False, and nothing is begun, where it takes `read_many`:
        the block is longer than a MiB, it can't go there directly, it is gone, or the engine does not take it now.
        """
        return not self.is_closed and self._reader.begin(place, address, room, then)

    async def prove(self, place: Place) -> None:
        """Read a block to compare it with its sum. Raises as `read`."""
        self._check_open()
        await self._reader.prove(place)

    def pinned(self, place: Place) -> AbstractContextManager[None]:
        """Keep the place's file as it is meanwhile, for readers past this store. Writers may have to wait for the end.

        Raises BlockGone, EngineClosed.
        """
        self._check_open()
        return self._reader.pinned(place)

    def register(self, memory: Buffer) -> bool:
        """Have the kernel keep this memory at hand, which blocks will often come from or go to: less CPU a transfer.

        It is borrowed until `aclose`. False where the kernel refuses (its limit of locked memory, an engine of
        threads): all works the same. Raises EngineClosed, and ValueError for what overlaps other such memory.
        """
        self._check_open()
        flat = flat_bytes(memory)
        address = address_of(flat)
        is_pinned = self.engine.register(address, flat.nbytes)
        self._registered[address] = flat
        return is_pinned

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineClosed(f"the datafiles in {self._folder.path} are closed")

    async def aclose(self) -> None:
        """Take nothing more, wait for what the engine has, and give files and lock back; the engine stays open.

        Writes that were not given to the engine end with NoSpace: await them first. Reads are waited for. Idempotent.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._log.refuse_waiting(NoSpace(f"the datafiles in {self._folder.path} are closed"))
        self._reclaimer.stop()
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await self._log.settle()
        await self._wait_for_readers()
        for address in self._registered:
            self.engine.unregister(address)
        self._registered.clear()
        self.memory.unregister()
        for file in self.files.values():
            file.close(self._folder, self.engine)
        self._folder.release()

    async def _wait_for_readers(self) -> None:
        for file in self.files.values():
            while file.readers:
                file.drained = asyncio.Event()
                await file.drained.wait()


def _check_sizes(file_bytes: int, files_max: int, readmit_share: float, batch_bytes: int) -> None:
    if file_bytes % BLOCK_BYTES or not 8 * BLOCK_BYTES <= file_bytes <= BLOCK_BYTES << 32:
        raise ValueError(f"file_bytes must be a multiple of 4096 from 32 KiB to 16 TiB, not {file_bytes}")
    if files_max < FILES_MIN:
        raise ValueError(f"files_max must be at least {FILES_MIN}, not {files_max}")
    if not 0 <= readmit_share <= 0.25:
        raise ValueError(f"readmit_share must be 0 to 0.25, not {readmit_share}")
    if not BLOCK_BYTES <= batch_bytes <= NUMBER_MAX:
        raise ValueError(f"batch_bytes must be at least 4096, not {batch_bytes}")
