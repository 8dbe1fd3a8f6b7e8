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
from collections import deque
from typing import TYPE_CHECKING

import structlog

from ucxkv import errors
from ucxkv.directory import events
from ucxkv.directory.log import COMMIT_DTYPE, commits, epoch_record, leaves
from ucxkv.node.staging import Outcome, Staging, Waiting
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class DurableLog(Staging):
    """The durable half of the store of a node without a cluster. `start` once, `aclose` at the end."""

    def __init__(self, store: HostStore, journal: Journal) -> None:
        super().__init__(store)
        self._journal = journal
        self._lsns: deque[tuple[int, int]] = deque()
        """Of the staged batches, in order: committed with this lsn."""
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

    def put(self, session: Session, request: m.Put, now_ns: int) -> asyncio.Future[Outcome]:
        """See Staging."""
        offsets = self.take(session, request)
        if self.failed is not None:
            self._store.slabs.free(offsets)
            raise self._failure()
        staged = self.stage(request, offsets, 0, now_ns)
        if isinstance(staged, bytes):
            return self.known(staged)
        return self._log(staged, commits(staged.rows))

    def delete(self, request: m.Delete, now_ns: int) -> asyncio.Future[Outcome]:
        """See Staging."""
        reply = self._store.handle(events.Delete(request.keys), now_ns)
        status = reply.status.tobytes()
        if not reply.batch:
            return self.known(status)
        if self.failed is not None:
            self._store.handle(events.Abandon(reply.batch), now_ns)
            raise self._failure()
        return self._log(self.wait_for(reply.batch, [], status), leaves(reply.left))

    def _log(self, staged: Waiting, records: Iterator[bytes]) -> asyncio.Future[Outcome]:
        named = list(records)
        try:
            lsn = self._journal.append(self._store.epoch, named) if named else self._journal.last_lsn
        except errors.UcxKvError:
            self.abandon(staged)
            self._store.slabs.free(staged.offsets)
            raise
        self._lsns.append((lsn, staged.batch))
        self._has_work.set()
        return staged.done

    def _left(self, keys: bytes, _: int = 0) -> None:
        """Durable blocks were found damaged and are hidden already."""
        if self.failed is None:
            try:
                for record in leaves(keys):
                    self._journal.append(self._store.epoch, [record])
            except errors.UcxKvError as exc:  # a replay finds them damaged again
                log.warning("durable.unlogged", blocks=len(keys) // 16, why=str(exc))

    # ---- settling

    async def _settle_all(self) -> None:
        lsns = self._lsns
        while self.failed is None:
            if not lsns:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            try:
                await self._journal.committed(lsns[0][0])
            except errors.JournalFailed:
                return  # _fail is told, too
            durable_lsn = self._journal.durable_lsn
            while lsns and lsns[0][0] <= durable_lsn and self.failed is None:
                self._settled_lsn, batch = lsns.popleft()
                self._settled(batch)
            self._consider_snapshot()

    def _settled(self, batch: int) -> None:
        reply = self.settle(batch)
        if reply.left:
            self._left(reply.left)

    def _fail(self, why: errors.JournalFailed) -> None:
        """The journal has failed: nothing of what is staged is acknowledged."""
        self.failed = why
        log.error("durable.failed", node=self._store.epoch, why=str(why), staged=len(self._lsns))
        self._lsns.clear()
        for one in self.newest_first():
            self.abandon(one)
            self._store.slabs.free(one.offsets)
            one.refuse(self._failure())
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
        rows = self.placed(self._store.directory.durable_rows())
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
        if self._lsns and self.failed is None:
            with contextlib.suppress(errors.JournalFailed, TimeoutError):
                await asyncio.wait_for(self._journal.committed(self._lsns[-1][0]), 5.0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.on_left = _nowhere
        await self._journal.aclose()


def _nowhere(keys: bytes, log: int) -> None:
    """Nobody logs any more."""
