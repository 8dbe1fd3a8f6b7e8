"""Class durable on a running node: staged in the directory, appended to the journal, settled when the journal says so.

Promises
- A durable put or delete is answered after the journal has committed it, and seen by readers from then on; in the order
  in which the messages came. (`ucxkv.directory.durable` has why.)
- What comes while something is staged does not overtake it: a put that needs what is staged waits for it, and what its
  session puts after it waits behind it.
- When the journal fails nothing more is acknowledged: all that is staged is forgotten and answered with JournalFailed,
  as is every later durable put, and every delete of a durable block. Reads and puts of class cache go on; what was
  acknowledged stays, also over a restart.
- The log is kept short: when it has grown past what is alive, a snapshot is written beside serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from ucxkv import errors
from ucxkv.directory import PutStatus, events
from ucxkv.directory.log import COMMIT_DTYPE, commits, epoch_record, leaves
from ucxkv.node.space import u64s
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucxkv.directory.slots import Records
    from ucxkv.journal import Journal
    from ucxkv.node.recovering import Recovery
    from ucxkv.node.session import Session
    from ucxkv.node.store import HostStore

__all__ = ["NO_NUMBERS", "DurableLog"]

NO_NUMBERS = dict.fromkeys(
    (
        "durable_lost",
        "snapshots_failed",
        "journal_failed",
        "journal_records",
        "journal_bytes",
        "journal_commits",
        "journal_snapshots",
    ),
    0.0,
)
"""What `DurableLog.numbers` has, of a node that keeps nothing durable."""

_SNAPSHOT_BYTES_MIN = 16 << 20
_SNAPSHOT_GROWTH = 2
_RECORDS_AT_ONCE = 256

log = structlog.get_logger("ucxkv.node")


@dataclass(slots=True)
class _Waiting:
    """A staged batch. lsn: committed with it. offsets: of the blocks that it will store."""

    batch: int
    lsn: int
    done: asyncio.Future[bytes]
    offsets: list[int] = field(default_factory=list)
    status: bytes = b""


class DurableLog:
    """The durable half of a node's store. `start` once, `aclose` at the end."""

    def __init__(self, store: HostStore, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._has_work = asyncio.Event()
        self._settled_lsn = 0
        self._snapshot_at = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_snapshotting = False
        self.failed: errors.JournalFailed | None = None
        self.counts = {"durable_lost": 0, "snapshots_failed": 0}

    async def start(self, recovery: Recovery) -> None:
        """Log the new epoch, and what did not come back. Raises JournalFailed."""
        records = [epoch_record(self._store.epoch), *leaves(recovery.lost)]
        for at in range(0, len(records), _RECORDS_AT_ONCE):
            await self._journal.committed(self._journal.append(self._store.epoch, records[at : at + _RECORDS_AT_ONCE]))
        self._settled_lsn = self._journal.last_lsn
        self._snapshot_at = -recovery.log_bytes
        self.counts["durable_lost"] = recovery.lost_blocks
        self._store.on_left = self._left
        self._journal.on_failed(self._fail)
        self._spawn(self._settle_all())
        self._consider_snapshot()

    def _spawn(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- what sessions ask

    def waits(self, session: Session, request: m.Put | m.PutPart) -> bool:
        """Whether a put has to wait, for what is staged or for what its session put before it."""
        return session.puts_waiting is not None or bool(self._batch_before(request))

    def waits_delete(self, request: m.Delete) -> bool:
        """The same for a delete."""
        return bool(self._batch_before(request))

    def _batch_before(self, request: m.Put | m.PutPart | m.Delete) -> int:
        durable = self._store.directory.durable
        if isinstance(request, m.Delete):
            return durable.waits_delete(request.keys)
        is_durable = isinstance(request, m.Put) and request.durable
        return durable.waits(request.keys, request.parents, is_durable=is_durable)

    async def until_free(self, request: m.Put | m.PutPart | m.Delete) -> None:
        """Wait until nothing is staged that this would have to wait for."""
        while batch := self._batch_before(request):
            waiting = next((one for one in self._waiting if one.batch == batch), None)
            if waiting is None:
                return
            with contextlib.suppress(errors.JournalFailed):  # that was another's
                await asyncio.shield(waiting.done)

    def put(self, session: Session, request: m.Put, now_ns: int) -> asyncio.Future[bytes]:
        """Stage a durable put, now; the future brings its PutStatus bytes.

        Raises JournalFailed, StaleError, Overloaded; its extents are used up all the same.
        """
        store, offsets = self._store, u64s(request.offsets)
        store.space.take(session.id, request.regions, offsets, request.lengths)
        if self.failed is not None:
            store.slabs.free(offsets)
            raise self._failure()
        columns = (request.keys, request.parents, request.regions, request.offsets, request.lengths, request.sums)
        reply = store.handle(events.StagePut(*columns), now_ns)
        status = reply.status.tobytes()
        store.counts["puts"] += len(status)
        store.slabs.free([offset for offset, st in zip(offsets, status, strict=True) if st])
        mine = [offset for offset, st in zip(offsets, status, strict=True) if not st]
        if not reply.batch:
            done = self._loop.create_future()
            done.set_result(status)
            return done
        return self._log(reply.batch, commits(self._placed(reply.rows)), mine, status)

    def delete(self, request: m.Delete, now_ns: int) -> asyncio.Future[bytes]:
        """Stage or carry out a delete, now; the future brings its DeleteStatus bytes. Raises JournalFailed when durable
        blocks are among them and cannot be logged as gone; then nothing is deleted.
        """
        reply = self._store.handle(events.Delete(request.keys), now_ns)
        status = reply.status.tobytes()
        if not reply.batch:
            done = self._loop.create_future()
            done.set_result(status)
            return done
        if self.failed is not None:
            self._store.handle(events.Abandon(reply.batch), now_ns)
            raise self._failure()
        return self._log(reply.batch, leaves(reply.left), [], status)

    def _placed(self, rows: Records) -> Records:
        """Fill in where the values lie."""
        places = self._store.slabs.places(rows["offset"])
        for name in ("slot_lines", "base_unit", "units"):
            rows[name] = places[name]
        return rows

    def _log(self, batch: int, records: Iterator[bytes], offsets: list[int], status: bytes) -> asyncio.Future[bytes]:
        named = list(records)
        try:
            lsn = self._journal.append(self._store.epoch, named) if named else self._journal.last_lsn
        except errors.UcxKvError:
            self._store.handle(events.Abandon(batch), time.monotonic_ns())
            self._store.slabs.free(offsets)
            raise
        waiting = _Waiting(batch, lsn, self._loop.create_future(), offsets, status)
        self._waiting.append(waiting)
        self._has_work.set()
        return waiting.done

    def _left(self, keys: bytes) -> None:
        """Durable blocks were found damaged and are hidden already."""
        if self.failed is None:
            try:
                for record in leaves(keys):
                    self._journal.append(self._store.epoch, [record])
            except errors.UcxKvError as exc:  # a replay finds them damaged again
                log.warning("durable.unlogged", blocks=len(keys) // 16, why=str(exc))

    # ---- settling

    async def _settle_all(self) -> None:
        waiting = self._waiting
        while self.failed is None:
            if not waiting:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            try:
                await self._journal.committed(waiting[0].lsn)
            except errors.JournalFailed:
                return  # _fail is told, too
            durable_lsn = self._journal.durable_lsn
            while waiting and waiting[0].lsn <= durable_lsn and self.failed is None:
                self._settle(waiting.popleft())
            self._consider_snapshot()

    def _settle(self, one: _Waiting) -> None:
        store = self._store
        reply = store.handle(events.Settle(one.batch), time.monotonic_ns())
        self._settled_lsn = one.lsn
        status = one.status
        if len(reply.status):
            status = reply.status.tobytes()
            stored = [offset for offset, st in zip(one.offsets, self._of_stored(one.status, status), strict=True) if st]
            store.slabs.free(stored)
        if reply.left:
            self._left(reply.left)
        if not one.done.done():
            one.done.set_result(status)

    @staticmethod
    def _of_stored(before: bytes, after: bytes) -> bytes:
        """The final statuses of the blocks that were to be stored."""
        return bytes(now for was, now in zip(before, after, strict=True) if was == PutStatus.STORED)

    def _fail(self, why: errors.JournalFailed) -> None:
        """The journal has failed: nothing of what is staged is acknowledged."""
        self.failed = why
        log.error("durable.failed", node=self._store.epoch, why=str(why), staged=len(self._waiting))
        while self._waiting:
            one = self._waiting.pop()
            self._store.handle(events.Abandon(one.batch), time.monotonic_ns())
            self._store.slabs.free(one.offsets)
            if not one.done.done():
                one.done.set_exception(self._failure())
                one.done.exception()  # whoever asked may be gone
        self._has_work.set()

    def _failure(self) -> errors.JournalFailed:
        why = self.failed
        assert why is not None
        return errors.JournalFailed(
            f"{why.message}; durable puts and deletes are refused, the rest is served",
            found=why.found,
            needed=why.needed,
            fix=f"{why.fix}, then start the node again",
        )

    # ---- snapshots

    def _consider_snapshot(self) -> None:
        grown = self._journal.stats.records_bytes - self._snapshot_at
        alive = self._store.directory.durable.blocks * COMMIT_DTYPE.itemsize
        if grown > max(_SNAPSHOT_BYTES_MIN, _SNAPSHOT_GROWTH * alive) and not self._is_snapshotting:
            self._is_snapshotting = True
            self._spawn(self._snapshot())

    async def _snapshot(self) -> None:
        """The state after the batch that was settled last: what is visible and durable now."""
        grown, lsn = self._journal.stats.records_bytes, self._settled_lsn
        rows = self._placed(self._store.directory.durable_rows())
        try:
            await self._journal.snapshot(self._store.epoch, lsn, commits(rows))
            self._snapshot_at = grown
        except errors.JournalFailed:
            pass
        except errors.UcxKvError as exc:
            self.counts["snapshots_failed"] += 1
            self._snapshot_at = grown  # not again before it has grown as much once more
            log.warning("durable.no_snapshot", why=str(exc))
        finally:
            self._is_snapshotting = False

    # ---- reports, the end

    def numbers(self) -> dict[str, float]:
        """For the report and the metrics."""
        stats = self._journal.stats
        return {
            **self.counts,
            "journal_failed": float(self.failed is not None),
            "journal_records": stats.records,
            "journal_bytes": stats.disk_bytes,
            "journal_commits": stats.frames,
            "journal_snapshots": stats.snapshots,
        }

    async def aclose(self) -> None:
        """Settle what was appended, then close the journal. Idempotent."""
        if self._waiting and self.failed is None:
            with contextlib.suppress(errors.JournalFailed, TimeoutError):
                await asyncio.wait_for(self._journal.committed(self._waiting[-1].lsn), 5.0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.on_left = _nowhere
        await self._journal.aclose()


def _nowhere(keys: bytes) -> None:
    """Nobody logs any more."""
