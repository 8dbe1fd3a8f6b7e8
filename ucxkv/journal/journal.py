"""The journal of a node: what was acknowledged comes back, in order, or the journal says that it cannot.

    committed(lsn) returns only when every record up to lsn is as durable as the class says; from the first failed write
    or sync on it raises, and so does append: a sync that failed is never tried again, since the kernel may have dropped
    the bytes and report success the next time. What is read back after any end is a prefix of what was appended that
    holds at least everything that was committed. The records of one append are all there or none.

Used from one event loop; the disk is written by a thread (committer.py), files are made and snapshots written by
another. Bytes on the disk: pieces.py and docs/journal.md."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ucxkv.errors import JournalFailed, Overloaded, SetupError, UsageError, ValueTooLarge
from ucxkv.journal.committer import Append, Beside, Commit, Committer, LoopCommitter, LoopExecutor
from ucxkv.journal.files import Files, FolderFiles, how_to_fix, setup_error
from ucxkv.journal.log import frame_bytes
from ucxkv.journal.pieces import BLOCK_BYTES
from ucxkv.journal.recovery import Recovered, Recovery, recover
from ucxkv.journal.snapshots import CHUNK_BYTES_MAX, Generations, SnapshotWriter
from ucxkv.journal.walk import StopKind

__all__ = ["RECORD_BYTES_MAX", "Durability", "Journal", "JournalStats"]

RECORD_BYTES_MAX = 16 << 20
IDENTITY_BYTES_MAX = 1024
FILE_BYTES_MIN = 16 << 10
_RECORD_OVERHEAD_BYTES = 64  # of memory, about, for a record that waits
_CLOSE_S = 30.0
_SNAPSHOT_BATCH_BYTES = 1 << 20

log = logging.getLogger(__name__)
T = TypeVar("T")


class Durability(enum.StrEnum):
    """What an acknowledged record survives. memory: nothing, no journal is kept. process: the death of the process, as
    the bytes are the kernel's then. power: a power cut, as the bytes are the disk's."""

    MEMORY = "memory"
    PROCESS = "process"
    POWER = "power"


@dataclass(slots=True)
class JournalStats:
    """Counted since it was opened. records, records_bytes: committed. frames: commits. disk_bytes: of frames. files:
    that were begun. snapshots: written. space_warning: why the next file could not be made ahead, empty = it is there.
    """

    records: int = 0
    records_bytes: int = 0
    frames: int = 0
    disk_bytes: int = 0
    files: int = 0
    snapshots: int = 0
    space_warning: str = ""


class Journal:
    """A write-ahead log in one folder, which it has to itself. Make it with `open`."""

    def __init__(
        self,
        files: Files,
        recovery: Recovery,
        keeper: Executor,
        *,
        durability: Durability,
        identity: bytes,
        file_bytes: int,
        pending_bytes_max: int,
    ) -> None:
        self._files, self._keeper, self._identity = files, keeper, identity
        self._log, self._spares, self._run = recovery.log, recovery.spares, recovery.run
        self._loop = asyncio.get_running_loop()
        self._last_lsn = self._durable_lsn = recovery.recovered.last_lsn
        self._pending_bytes, self._pending_bytes_max = 0, pending_bytes_max
        self._append_bytes_max = file_bytes - BLOCK_BYTES
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._failed: JournalFailed | None = None
        self._on_failed: list[Callable[[JournalFailed], object]] = []
        self._is_closed = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._generations = Generations(files, recovery.snapshots, recovery.recovered.damaged)
        self._snapshot_turn = asyncio.Lock()
        self.durability = durability
        self.stats = JournalStats()
        is_threaded = isinstance(keeper, ThreadPoolExecutor)
        self._committer = (Committer if is_threaded else LoopCommitter)(
            recovery.log,
            frame_bytes_max=self._append_bytes_max,
            on_commit=lambda commit: self._tell(self._committed, commit),
            on_switch=lambda: self._tell(self._switched),
            on_end=lambda error: self._tell(self._end, error),
        )
        self._committer.start()
        self._make_ahead()

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        durability: Durability,
        identity: bytes = b"",
        file_bytes: int = 64 << 20,
        pending_bytes_max: int = 64 << 20,
        files: Files | None = None,
        is_threaded: bool = True,
    ) -> tuple[Journal, Recovered]:
        """Lock the folder (made if missing), read what is there, and get ready to append.

        identity: whose journal it is, at most 1,024 bytes; must equal what the files say. file_bytes: of a log file, a
        multiple of 4 KiB; bounds a record. pending_bytes_max: appended and not committed yet, with 64 bytes a record
        on top. files: another disk;
        is_threaded=False then writes it in the loop, for simulations. Raises SetupError: held by another process,
        foreign, newer, not usable, or records are missing (left as it is)."""
        if durability is Durability.MEMORY:
            raise UsageError("durability=memory keeps no journal: open none")
        if file_bytes % BLOCK_BYTES or file_bytes < FILE_BYTES_MIN:
            raise UsageError(f"file_bytes={file_bytes}: a multiple of {BLOCK_BYTES}, at least {FILE_BYTES_MIN}")
        if len(identity) > IDENTITY_BYTES_MAX:
            raise UsageError(f"identity has {len(identity)} bytes: {IDENTITY_BYTES_MAX} at most")
        if pending_bytes_max < 1:
            raise UsageError(f"pending_bytes_max={pending_bytes_max}: positive")
        disk = FolderFiles(Path(folder)) if files is None else files
        is_synced = durability is Durability.POWER

        def read() -> Recovery:
            disk.lock()
            try:
                return recover(
                    disk, identity=identity, file_bytes=file_bytes, now_run=time.time_ns(), is_synced=is_synced
                )
            except OSError as exc:
                disk.release()
                raise setup_error(disk.folder, exc) from exc
            except BaseException:
                disk.release()
                raise

        def undo(done: asyncio.Future[Recovery]) -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().log.close()
                disk.release()

        keeper: Executor = LoopExecutor()
        if is_threaded:
            keeper = ThreadPoolExecutor(1, thread_name_prefix="ucxkv-journal-keeper")
        reading = asyncio.get_running_loop().run_in_executor(keeper, read)
        try:
            recovery = await asyncio.shield(reading)
        except BaseException:
            reading.add_done_callback(undo)
            keeper.shutdown(wait=False)
            raise
        journal = cls(
            disk,
            recovery,
            keeper,
            durability=durability,
            identity=identity,
            file_bytes=file_bytes,
            pending_bytes_max=pending_bytes_max,
        )
        found = recovery.recovered
        if found.stopped.kind is StopKind.DAMAGED or found.damaged:
            log.error("the journal in %s is damaged: %s; snapshots: %s", disk.folder, found.stopped, found.damaged)
        return journal, found

    @property
    def files(self) -> Files:
        """The folder, for what is kept beside the log."""
        return self._files

    def keep_beside(self, beside: Beside) -> None:
        """From now on each frame is written after `beside` has kept what its records name; closed with the journal.

        Call it before the first append.
        """
        self._committer.beside = beside

    # ---- appending

    def append(self, epoch: int, records: Sequence[bytes]) -> int:
        """Append these records as one unit; returns the lsn of the last. Not durable yet: see `committed`.

        records: 1 byte to 16 MiB each, at least one. Raises Overloaded (nothing was appended: wait for `committed`,
        then retry), ValueTooLarge, UsageError, JournalFailed.
        """
        if self._failed is not None:
            raise self._failure()
        if self._is_closed:
            raise UsageError("the journal is closed")
        nbytes = 0
        for record in records:
            length = len(record)
            if not 0 < length <= RECORD_BYTES_MAX:
                self._refuse(length)
            nbytes += length
        if not records or not 0 <= epoch < 1 << 64:
            raise UsageError(
                f"append(epoch={epoch}) of {len(records)} records: an epoch of 64 bits and a record or more"
            )
        disk_bytes = frame_bytes(len(records), nbytes)
        if disk_bytes > self._append_bytes_max or nbytes > self._pending_bytes_max:
            limit = min(self._append_bytes_max, self._pending_bytes_max)
            raise ValueTooLarge(
                f"one append of {nbytes} bytes: split it, or raise the journal's file_bytes and pending_bytes_max",
                size_bytes=disk_bytes,
                limit_bytes=limit,
            )
        held_bytes = nbytes + _RECORD_OVERHEAD_BYTES * len(records)
        if self._pending_bytes + held_bytes > self._pending_bytes_max and self._pending_bytes:
            raise Overloaded(
                f"{self._pending_bytes} bytes wait for the disk: wait for `committed`, then append again",
                retry_after_s=0.01,
            )
        first = self._last_lsn + 1
        self._last_lsn += len(records)
        self._pending_bytes += held_bytes
        self._committer.put(Append(epoch, first, tuple(records), nbytes))
        return self._last_lsn

    def _refuse(self, length: int) -> None:
        if length:
            raise ValueTooLarge(
                f"a record of {length} bytes: {RECORD_BYTES_MAX} at most",
                size_bytes=length,
                limit_bytes=RECORD_BYTES_MAX,
            )
        raise UsageError("a record without bytes: at least one")

    async def committed(self, lsn: int) -> None:
        """Return when all records up to `lsn` are durable; raise JournalFailed when they never will be."""
        if lsn <= self._durable_lsn:
            return
        if self._failed is not None:
            raise self._failure()
        if lsn > self._last_lsn:
            raise UsageError(f"record {lsn} was not appended, the last is {self._last_lsn}")
        waiter = self._loop.create_future()
        waiters = self._waiters
        if not waiters or waiters[-1][0] <= lsn:
            waiters.append((lsn, waiter))
        else:
            waiters.insert(bisect_right(waiters, lsn, key=_lsn_of), (lsn, waiter))
        await waiter

    @property
    def durable_lsn(self) -> int:
        """The last record that is durable, with all before it."""
        return self._durable_lsn

    @property
    def last_lsn(self) -> int:
        """The last record that was appended."""
        return self._last_lsn

    @property
    def failed(self) -> JournalFailed | None:
        """Why nothing is acknowledged any more; None while all is well."""
        return self._failed

    def on_failed(self, callback: Callable[[JournalFailed], object]) -> None:
        """Call this once, from the loop, when the journal fails: the node stops serving. At once if it has."""
        if self._failed is not None:
            self._loop.call_soon(callback, self._failed)
        else:
            self._on_failed.append(callback)

    # ---- what the threads report, in the loop

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, *arguments)

    def _committed(self, commit: Commit) -> None:
        self._durable_lsn = commit.last_lsn
        self._pending_bytes -= commit.nbytes + _RECORD_OVERHEAD_BYTES * commit.records
        stats = self.stats
        stats.records += commit.records
        stats.records_bytes += commit.nbytes
        stats.frames += 1
        stats.disk_bytes += commit.disk_bytes
        waiters = self._waiters
        ready = len(waiters)
        if ready and waiters[-1][0] > commit.last_lsn:
            ready = bisect_right(waiters, commit.last_lsn, key=_lsn_of)
        for _, waiter in waiters[:ready]:
            if not waiter.done():
                waiter.set_result(None)
        del waiters[:ready]

    def _switched(self) -> None:
        self.stats.files += 1
        self._make_ahead()

    def _make_ahead(self) -> None:
        """Make the next file now, in the other thread, so that no commit waits for it."""
        if not self._is_closed:
            self._keeper.submit(self._make_spare)

    def _make_spare(self) -> None:
        try:
            self._spares.make_ahead()
        except OSError as exc:
            warning = f"no room for the journal's next file in {self._files.folder} ({exc}); {how_to_fix(exc)}"
            log.warning(warning)
        else:
            warning = ""
        self.stats.space_warning = warning

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        fix = how_to_fix(error) if isinstance(error, OSError) else "report this with the traceback above"
        if not isinstance(error, OSError):
            log.error("the journal's thread ended", exc_info=error)
        failed = JournalFailed(
            f"the journal in {self._files.folder} could not be written; nothing more is acknowledged",
            found=str(error) or repr(error),
            needed="writes and syncs that succeed",
            fix=fix,
        )
        failed.__cause__ = error
        self._failed = failed
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._failure())
        self._waiters.clear()
        callbacks, self._on_failed = self._on_failed, []
        for callback in callbacks:
            self._loop.call_soon(callback, failed)

    def _failure(self) -> JournalFailed:
        """A fresh error for each who asks: tracebacks do not grow."""
        why = self._failed
        assert why is not None
        found = JournalFailed(why.message, found=why.found, needed=why.needed, fix=why.fix)
        found.__cause__ = why.__cause__
        return found

    # ---- snapshots

    async def snapshot(self, epoch: int, lsn: int, chunks: Iterable[bytes] | AsyncIterable[bytes]) -> None:
        """Write the state after record `lsn` as a snapshot, then recycle log files that the one before made needless.

        epoch: kept with it. lsn: durable, and not before the last snapshot's. chunks: read in the loop, one after the
        other, 256 MiB at most each; come back as they were. Snapshots are always synced. Raises SetupError when the
        disk refuses: no record is lost then, and appending goes on.
        """
        async with self._snapshot_turn:
            if self._failed is not None:
                raise self._failure()
            if self._is_closed:
                raise UsageError("the journal is closed")
            newest = self._generations.newest_lsn
            if not newest <= lsn <= self._durable_lsn or not 0 <= epoch < 1 << 64:
                raise UsageError(
                    f"a snapshot at {lsn}: from {newest} (the last one's) to {self._durable_lsn} (durable)"
                )
            try:
                await self._write_snapshot(epoch, lsn, chunks)
            except OSError as exc:
                raise SetupError(
                    f"no snapshot could be written in {self._files.folder}; the log goes on and grows",
                    found=str(exc),
                    needed="room for a snapshot",
                    fix=how_to_fix(exc),
                ) from exc

    async def _write_snapshot(self, epoch: int, lsn: int, chunks: Iterable[bytes] | AsyncIterable[bytes]) -> None:
        writer = SnapshotWriter(self._files, epoch=epoch, lsn=lsn, run=self._run, identity=self._identity)
        try:
            batch: list[bytes] = []
            nbytes = 0
            async for chunk in _each(chunks):
                if self._is_closed:
                    raise UsageError("the journal was closed")
                if len(chunk) > CHUNK_BYTES_MAX:
                    raise ValueTooLarge(
                        f"a chunk of {len(chunk)} bytes", size_bytes=len(chunk), limit_bytes=CHUNK_BYTES_MAX
                    )
                batch.append(chunk)
                nbytes += len(chunk)
                if nbytes >= _SNAPSHOT_BATCH_BYTES:
                    await self._keep(partial(writer.add, batch))
                    batch, nbytes = [], 0
            await self._keep(partial(writer.add, batch))
        except BaseException:
            self._keeper.submit(writer.abort)
            raise
        await self._keep(lambda: self._finish(writer))
        self.stats.snapshots += 1

    def _finish(self, writer: SnapshotWriter) -> None:
        """In the keeper: make it real, then recycle."""
        self._log.trim(self._generations.finish(writer))

    def _keep(self, call: Callable[[], T]) -> Awaitable[T]:
        """Run it in the keeper; a caller that is cancelled does not stop it."""
        return asyncio.shield(self._loop.run_in_executor(self._keeper, call))

    # ---- end

    async def aclose(self) -> None:
        """Commit what was appended, then close the files and let the folder go. Idempotent; raises no JournalFailed."""
        if not self._is_closed:
            self._is_closed = True
            self._committer.stop()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self._ended)
                await self._snapshot_turn.acquire()
        except TimeoutError:
            log.error("the disk under %s, or a snapshot's source, does not answer: left open", self._files.folder)
            return
        try:
            if isinstance(self._keeper, ThreadPoolExecutor):
                await self._loop.run_in_executor(None, self._close)
            else:
                self._close()
        finally:
            self._snapshot_turn.release()

    def _close(self) -> None:
        self._keeper.shutdown(wait=True)
        with contextlib.suppress(OSError):
            self._log.close()
        if self._committer.beside is not None:
            self._committer.beside.close()
        self._files.release()


def _lsn_of(waiter: tuple[int, asyncio.Future[None]]) -> int:
    return waiter[0]


async def _each(chunks: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterable[bytes]:
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield chunk
    else:
        for chunk in chunks:
            yield chunk
