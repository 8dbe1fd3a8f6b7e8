"""One journal for the logs of all shards of a node: what they persist, in order, and its snapshots.

Promises
  - Persisted is told to a shard in the order of its serials, and only for what the journal has committed.
  - Without a journal (durability = memory) it is told at once: what is acknowledged lives in the memories of the
    in-sync nodes alone.
  - What the journal takes no more of for the moment waits, in order; when it fails, every shard is told.
  - A snapshot says nothing that the log has not committed: with it come the values, where the disk has them (power).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import structlog

from ucxkv import errors
from ucxkv.replication import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucxkv.journal import Journal
    from ucxkv.node.shards.shard import Shard

__all__ = ["ShardJournal"]

_SNAPSHOT_BYTES_MIN = 16 << 20
_SNAPSHOT_GROWTH = 2

log = structlog.get_logger("ucxkv.node")


class ShardJournal:
    """See the module. epoch: of the frames, this start's; state: every shard's records as a snapshot has them."""

    def __init__(self, journal: Journal | None, epoch: int, state: Callable[[], Iterable[bytes]]) -> None:
        self.journal = journal
        self._epoch = epoch
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[Shard, int, list[bytes]]] = deque()
        self._sent: deque[tuple[int, Shard, int]] = deque()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._snapshot_at = 0
        self.snapshots_failed = 0

    def start(self, log_bytes: int) -> None:
        """Begin. log_bytes: of the records behind the last snapshot."""
        self._snapshot_at = -log_bytes
        if self.journal is not None:
            self._task = asyncio.create_task(self._work(), name="shard-journal")

    @property
    def failed(self) -> errors.JournalFailed | None:
        """Why nothing is acknowledged any more."""
        return self.journal.failed if self.journal is not None else None

    def persist(self, shard: Shard, serial: int, records: list[bytes]) -> None:
        """See ShardHost."""
        if self.journal is None:
            if serial:
                self._loop.call_soon(shard.handle, ev.Persisted(serial))
            return
        if self.journal.failed is not None:
            self._loop.call_soon(shard.handle, ev.PersistFailed(str(self.journal.failed)))
            return
        self._unsent.append((shard, serial, records))
        self._send()
        self._has_work.set()

    def _send(self) -> None:
        """Append what waits, as far as the journal takes it."""
        assert self.journal is not None
        while self._unsent:
            shard, serial, records = self._unsent[0]
            try:
                lsn = self.journal.append(self._epoch, records) if records else self.journal.last_lsn
            except errors.Overloaded:
                return  # when it has written some
            except errors.JournalFailed:
                return  # all are told below
            except errors.UcxKvError as exc:  # it will never take this one, and nothing may overtake it
                self._fail(str(exc))
                return
            self._unsent.popleft()
            self._sent.append((lsn, shard, serial))

    async def _work(self) -> None:
        journal = self.journal
        assert journal is not None
        while True:
            if not self._sent and not self._unsent:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            try:
                await journal.committed(self._sent[0][0] if self._sent else journal.last_lsn)
            except errors.JournalFailed as exc:
                self._fail(str(exc))
                return
            while self._sent and self._sent[0][0] <= journal.durable_lsn:
                _, shard, serial = self._sent.popleft()
                if serial:
                    shard.handle(ev.Persisted(serial))
            self._send()
            if self._unsent and not self._sent:
                await asyncio.sleep(0.01)
            self._consider_snapshot()

    def _fail(self, why: str) -> None:
        told = {shard.number: shard for _, shard, _ in self._sent}
        told.update((shard.number, shard) for shard, _, _ in self._unsent)
        self._sent.clear()
        self._unsent.clear()
        for shard in told.values():
            shard.handle(ev.PersistFailed(why))
        log.error("shards.journal_failed", why=why)

    def _consider_snapshot(self) -> None:
        journal = self.journal
        assert journal is not None
        grown = journal.stats.records_bytes - self._snapshot_at
        if self._snapshot is not None or self._unsent:
            return
        if grown > max(_SNAPSHOT_BYTES_MIN, _SNAPSHOT_GROWTH * self._state_bytes):
            self._snapshot_at = journal.stats.records_bytes
            chunks = list(self._state())
            self._state_bytes = sum(map(len, chunks))
            self._snapshot = asyncio.create_task(
                self._write_snapshot(journal.durable_lsn, journal.last_lsn, chunks), name="shard-snapshot"
            )

    _state_bytes = 0

    async def _write_snapshot(self, lsn: int, last_lsn: int, chunks: list[bytes]) -> None:
        """All shards as they were after record last_lsn. What is in the log behind lsn comes again, and changes
        nothing.
        """
        journal = self.journal
        assert journal is not None
        try:
            await journal.committed(last_lsn)
            await journal.snapshot(self._epoch, lsn, chunks)
        except errors.JournalFailed:
            pass
        except errors.UcxKvError as exc:
            self.snapshots_failed += 1
            log.warning("shards.no_snapshot", why=str(exc))
        finally:
            self._snapshot = None

    async def aclose(self) -> None:
        """Commit what was appended, and close the journal. Idempotent."""
        for task in (self._task, self._snapshot):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self.journal is not None:
            await self.journal.aclose()
