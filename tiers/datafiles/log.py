"""The writing end: what is offered becomes batches at the end of the open file, acknowledged in log order.

Invariants
- Entries reach the log in the order in which they were offered (those of the reclaimer go first), and are acknowledged
  in the order of the log: never while a batch before theirs, or the head of their file, has not landed. So a hole that
  a crash leaves hides nothing that was acknowledged.
- With durability `power` what is acknowledged was synced after it had landed.
- A file's index is written after all its batches landed (`power`: are synced).
- After the first write or sync that failed nothing is given to the engine any more; batches ahead of it are still
  acknowledged. A sync is never tried again.
- A request ends only when none of its memory is with the engine.

Group commit has no timer: a batch that is not full goes only when nothing is under way, so what arrives meanwhile
rides the next one; full batches go side by side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import NoSpace, TierBusy, TierError, WritesFailed
from ..datafile_format import (
    BLOCK_BYTES,
    DESCRIPTOR_DTYPE,
    DESCRIPTORS_MAX,
    IN_USE,
    encode_file,
    encode_index,
    index_bytes,
)
from ..io import OP_DTYPE, EngineBusy, IoEngine, IoFailed, OpKind
from .batches import Batch, Entry, Operation, Request, build_batch, cost
from .files import BUSY_RETRY_S, DataFile, FileState, raise_if_short, transfer
from .folder import how_to_fix
from .memory import AlignedMemory
from .values import Place, Stats

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Log"]

BATCHES_FLYING_MAX = 4


class Log:
    """See the module. `free` are files to go on in; on_short: called when there is one less; on_sealed: when a file
    has its index. reserve_bytes: at the end of a file for the reclaimer alone while no file is free."""

    def __init__(
        self,
        path: str,
        engine: IoEngine,
        memory: AlignedMemory,
        stats: Stats,
        *,
        store: bytes,
        drive: int,
        run: int,
        is_synced: bool,
        batch_bytes: int,
        queue_bytes_max: int,
        generation: int,
        sequence: int,
    ) -> None:
        self._path, self._engine, self._memory, self.stats = path, engine, memory, stats
        self._store, self._drive, self._run, self._is_synced = store, drive, run, is_synced
        self._batch_bytes, self._queue_bytes_max = batch_bytes, queue_bytes_max
        self.generation, self.sequence = generation, sequence  # the next ones
        self.reserve_bytes = 0
        self.floor: Callable[[], int] = lambda: self.generation
        self.on_short: Callable[[], None] = lambda: None
        self.on_sealed: Callable[[], None] = lambda: None
        self.open_file: DataFile | None = None
        self.free: deque[DataFile] = deque()
        self.failure: WritesFailed | None = None
        self.no_space = ""
        self._queue: deque[Entry] = deque()
        self._urgent: deque[Entry] = deque()
        self._flying: deque[Batch] = deque()
        self._unsynced: list[Batch] = []
        self._is_scheduled = self._is_broken = self._is_syncing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Nothing waits, flies or is synced."""
        return not (self._queue or self._urgent or self._flying or self._unsynced or self._tasks)

    def offer(self, entries: list[Entry], *, is_urgent: bool = False) -> None:
        """Take entries in. TierBusy when too much waits, WritesFailed, NoSpace; then none was taken."""
        if self.failure is not None:
            raise self.failure
        if self.no_space and not is_urgent:
            raise NoSpace(self.no_space)
        nbytes = sum(map(cost, entries))
        if not is_urgent:
            if self.stats.queued_bytes and self.stats.queued_bytes + nbytes > self._queue_bytes_max:
                raise TierBusy(f"{self.stats.queued_bytes} bytes wait for {self._path}: offer the block again later")
            self.stats.queued_bytes += nbytes
        (self._urgent if is_urgent else self._queue).extend(entries)
        self.pump_soon()

    async def wait(self, request: Request) -> list[Place]:
        """The request's places. A cancel takes back what was not sent, and waits for what was."""
        cancelled: asyncio.CancelledError | None = None
        while not request.done.done():
            try:
                await asyncio.shield(request.done)
            except asyncio.CancelledError as exc:
                cancelled = exc
                self._withdraw(request, TierError("the write was cancelled"))
            except TierError:
                break
        if cancelled is not None:
            raise cancelled
        return request.done.result()

    def _withdraw(self, request: Request, error: BaseException) -> None:
        """Take its unsent entries back; it ends with `error` when the others have landed."""
        for queue in (self._queue, self._urgent):
            kept = [entry for entry in queue if entry.request is not request]
            if len(kept) != len(queue):
                if queue is self._queue:
                    self.stats.queued_bytes -= sum(cost(entry) for entry in queue if entry.request is request)
                queue.clear()
                queue.extend(kept)
                request.error = request.error or error
        request.end_if_over()

    def refuse_waiting(self, error: TierError) -> None:
        """End every request that waits with `error`."""
        requests = dict.fromkeys(entry.request for entry in [*self._urgent, *self._queue])
        self._urgent.clear()
        self._queue.clear()
        self.stats.queued_bytes = 0
        for request in requests:
            request.error = request.error or error
            request.end_if_over()

    def pump_soon(self) -> None:
        """Look in the loop's next turn whether a batch can go: calls of the same turn share it."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_scheduled = False
        while self.failure is None:
            queue = self._urgent or self._queue
            if not queue or len(self._flying) >= BATCHES_FLYING_MAX:
                return
            entries, is_full = self._fitting(queue)
            if self._flying and not is_full:
                return
            if entries:
                if not self._send(queue, entries):
                    return
            elif self.free:
                if not self._roll():
                    return
            elif queue is self._urgent:
                self._withdraw(queue[0].request, NoSpace("no room is left for a block to be kept"))
            else:
                if self.no_space:
                    self.refuse_waiting(NoSpace(self.no_space))
                return

    def _fitting(self, queue: Iterable[Entry]) -> tuple[list[Entry], bool]:
        """(the entries of the next batch, whether more of them would not go into it); none when the open file has no
        room for the first one."""
        file = self.open_file
        if file is None:
            return [], True
        reserve = self.reserve_bytes if not self.free and queue is not self._urgent else 0
        found: list[Entry] = []
        nbytes, room = 0, file.room(reserve=reserve) - BLOCK_BYTES
        ample = room - index_bytes(file.count + DESCRIPTORS_MAX)
        for entry in queue:
            nbytes += entry.nbytes
            count = len(found) + 1
            has_room = nbytes <= ample or nbytes <= room - index_bytes(file.count + count)
            if not has_room or (found and nbytes > self._batch_bytes):
                return found, True
            found.append(entry)
            if nbytes >= self._batch_bytes or count == DESCRIPTORS_MAX:
                return found, True
        return found, False

    def room_for_kept(self) -> int:
        """Bytes that urgent entries may take, index and headers included, while no file is free."""
        file = self.open_file
        if file is None:
            return 0
        return max(0, min(self.reserve_bytes, file.room() - index_bytes(file.count)))

    def _roll(self) -> bool:
        """Go on in a free file; False when the engine takes no more just now, or never."""
        old, file = self.open_file, self.free.popleft()
        if old is not None:
            old.state = FileState.CLOSING
        generation = self.generation
        self.generation += 1
        head, total = encode_file(
            store=self._store,
            file=file.number,
            state=IN_USE,
            generation=generation,
            sequence=self.sequence,
            file_bytes=file.file_bytes,
            floor=self.floor(),
        )
        file.begin(generation, total)
        piece = self._memory.take(BLOCK_BYTES)
        piece.view[:BLOCK_BYTES] = np.frombuffer(head, np.uint8)
        ops = np.array([(piece.address, 0, BLOCK_BYTES, file.engine_file, OpKind.WRITE)], OP_DTYPE)
        if not self._fly(Batch(file, [], [], piece, ops)):
            file.state = FileState.FREE
            self.free.appendleft(file)
            if old is not None:
                old.state = FileState.OPEN
            return False
        self.open_file = file
        if old is not None:
            self._seal_if_landed(old)
        self.on_short()
        return True

    def _send(self, queue: deque[Entry], entries: list[Entry]) -> bool:
        """Give a batch of the queue's first entries to the engine; False when it takes no more just now."""
        file = self.open_file
        assert file is not None
        sequence = self.sequence
        batch, descriptors, nbytes, total = build_batch(
            file, entries, self._memory, sequence=sequence, run=self._run, drive=self._drive
        )
        if not self._fly(batch):
            return False
        for entry in entries:
            queue.popleft()
            entry.request.sent += 1
        if queue is self._queue:
            self.stats.queued_bytes -= sum(map(cost, entries))
        file.add(descriptors, nbytes, total, sequence)
        self.sequence += 1
        self.stats.batches += 1
        return True

    def _fly(self, batch: Batch) -> bool:
        try:
            future = batch.future = self._engine.submit(batch.ops)
        except EngineBusy:
            self._memory.give(batch.memory)
            if not self._flying:
                self._is_scheduled = True
                asyncio.get_running_loop().call_later(BUSY_RETRY_S, self._pump)
            return False
        except TierError as exc:
            self._memory.give(batch.memory)
            self.fail(exc)
            return False
        batch.file.flying += 1
        self._flying.append(batch)
        self.stats.written_bytes += int(batch.ops["length"].sum())
        future.add_done_callback(lambda done: self._landed(batch, done))
        return True

    def _landed(self, batch: Batch, done: asyncio.Future[NDArray[np.int64]]) -> None:
        try:
            raise_if_short(f"writing {batch.file.name}", batch.ops["length"], done.result())
        except (TierError, asyncio.CancelledError) as exc:
            batch.error = exc
            self.fail(exc)
        batch.is_landed = True
        batch.file.flying -= 1
        self._memory.give(batch.memory)
        while self._flying and self._flying[0].is_landed:
            head = self._flying.popleft()
            if self._is_broken or head.error is not None:
                self._is_broken = True
                self._end(head)
            elif self._is_synced:
                self._unsynced.append(head)
            else:
                self._acknowledge(head)
        if self._unsynced and not self._is_syncing:
            self._is_syncing = True
            self.start(self._sync())
        self._seal_if_landed(batch.file)
        self.pump_soon()

    async def _sync(self) -> None:
        """Acknowledge what has landed, group by group, after a sync of its files."""
        while self._unsynced:
            group, self._unsynced = self._unsynced, []
            try:
                for file in dict.fromkeys(batch.file for batch in group):
                    await self._engine.sync(file.engine_file)
                    self.stats.syncs += 1
            except TierError as exc:
                self._is_broken = True
                self.fail(exc)
                for batch in group + self._unsynced:
                    self._end(batch)
                self._unsynced = []
                break
            for batch in group:
                self._acknowledge(batch)
        self._is_syncing = False

    def _acknowledge(self, batch: Batch) -> None:
        for entry, place in zip(batch.entries, batch.places, strict=True):
            request = entry.request
            request.places[entry.at] = place
            request.sent -= 1
            request.left -= 1
            if not request.sent:
                request.end_if_over()

    def _end(self, batch: Batch) -> None:
        """The batch is not safe: its requests end with the failure."""
        for entry in batch.entries:
            entry.request.sent -= 1
            entry.request.error = entry.request.error or self.failure
            entry.request.end_if_over()

    def fail(self, exc: BaseException) -> None:
        """Write no more; the first reason counts."""
        if self.failure is not None:
            return
        fix = f"; {how_to_fix(exc.errno)}" if isinstance(exc, IoFailed) else ""
        self.failure = WritesFailed(self._path, reason=f"{exc}{fix}")
        self.stats.failure = self.failure.reason
        self.refuse_waiting(self.failure)

    def _seal_if_landed(self, file: DataFile) -> None:
        if file.state is FileState.CLOSING and not file.flying and self.failure is None:
            file.flying = 1  # the index; only one task seals
            self.start(self._seal(file))

    def seal_later(self, file: DataFile) -> None:
        """Give a file that recovery found without an index its index."""
        file.state = FileState.CLOSING
        self._seal_if_landed(file)

    async def _seal(self, file: DataFile) -> None:
        found = np.concatenate(file.descriptors) if file.descriptors else np.empty(0, DESCRIPTOR_DTYPE)
        body, head = encode_index(
            found,
            file=file.number,
            generation=file.generation,
            sequence=file.last_sequence,
            offset=file.offset,
            previous=file.head_sum,
        )
        piece = self._memory.take(index_bytes(len(found)))
        piece.view[: len(head)] = np.frombuffer(head, np.uint8)
        piece.view[len(head) : len(head) + len(body)] = np.frombuffer(body, np.uint8)
        ops: list[Operation] = [
            (piece.address, file.file_bytes - BLOCK_BYTES, BLOCK_BYTES, file.engine_file, OpKind.WRITE)
        ]
        if body:
            ops.append((piece.address + len(head), file.offset, len(body), file.engine_file, OpKind.WRITE))
        try:
            await self._sync_if_synced(file)  # an index that is there says of all that it names that it is there
            await transfer(self._engine, f"writing the index of {file.name}", ops)
            await self._sync_if_synced(file)
        except TierError as exc:
            self.fail(exc)
            return
        finally:
            file.flying -= 1
            self._memory.give(piece)
        self.stats.written_bytes += len(head) + len(body)
        self.stats.files_sealed += 1
        file.state, file.descriptors = FileState.SEALED, []
        self.on_sealed()

    async def _sync_if_synced(self, file: DataFile) -> None:
        if self._is_synced:
            await self._engine.sync(file.engine_file)
            self.stats.syncs += 1

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task that `settle` waits for."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Return when nothing is with the engine and no task runs. Requests that wait are not waited for."""
        while self._flying or self._tasks:
            flying: list[asyncio.Future[Any]] = [batch.future for batch in self._flying if batch.future is not None]
            await asyncio.wait([*self._tasks, *flying], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # their callbacks
