"""Durable puts and deletes between their staging in the directory and the word of the log: who waits for what.

Promises
  - What comes while something is staged does not overtake it: a put that needs what is staged waits for it, and what
    its session puts after it waits behind it.
  - Every staged batch ends once: settled, or abandoned, and then whoever asked is told why.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucxkv import errors
from ucxkv.directory import PutStatus, events
from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.node.space import u64s
from ucxkv.protocol import messages as m
from ucxkv.tokens import NOTHING_SEEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucxkv.directory.slots import Records
    from ucxkv.node.session import Session
    from ucxkv.node.store import HostStore
    from ucxkv.tokens import Token

__all__ = ["Outcome", "Staging", "Waiting"]

_NO_ROWS = np.empty(0, COMMIT_DTYPE)


class Outcome(NamedTuple):
    """What a durable put or delete came to. status: one byte a key; token: the log's entries that made it so, where the
    log is a shard's. is_logged: every member in sync has it in its log, so that it is true whatever has become of this
    node's lease.
    """

    status: bytes
    token: Token = NOTHING_SEEN
    is_logged: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """A staged batch. offsets: of the blocks that it will store; status: what the answer will be; rows: what the log is
    to say of it, with the places of the values, COMMIT_DTYPE[n].
    """

    batch: int
    offsets: list[int]
    status: bytes
    done: asyncio.Future[Outcome]
    rows: Records

    def answer(self, status: bytes, token: Token = NOTHING_SEEN) -> None:
        """Whoever asked is told. token: the entry of the shard's log that has it."""
        if not self.done.done():
            self.done.set_result(Outcome(status, token, token is not NOTHING_SEEN))

    def refuse(self, why: errors.UcxKvError) -> None:
        """Whoever asked is told that it is not so."""
        if not self.done.done():
            self.done.set_exception(why)
            self.done.exception()  # whoever asked may be gone


class Staging(abc.ABC):
    """The durable half of a node's store: what all kinds of logs share."""

    failed: errors.JournalFailed | None = None
    """Why nothing durable is acknowledged any more."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Waiting] = {}

    # ---- what sessions ask

    @abc.abstractmethod
    def put(self, session: Session, request: m.Put, now_ns: int) -> asyncio.Future[Outcome]:
        """Stage a durable put, now; the future brings its PutStatus.

        Raises JournalFailed, StaleError, Overloaded, NotLeader; its extents are used up all the same.
        """

    @abc.abstractmethod
    def delete(self, request: m.Delete, now_ns: int) -> asyncio.Future[Outcome]:
        """Stage or carry out a delete, now; the future brings its DeleteStatus. Raises JournalFailed when durable
        blocks are among them and cannot be logged as gone; then nothing is deleted.
        """

    @abc.abstractmethod
    def numbers(self) -> dict[str, float]:
        """For the report and the metrics."""

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
            waiting = self._waiting.get(batch)
            if waiting is None:
                return
            with contextlib.suppress(errors.UcxKvError):  # that was another's
                await asyncio.shield(waiting.done)

    # ---- for logs

    def take(self, session: Session, request: m.Put) -> list[int]:
        """A put's extents, out of its session's grants. Raises StaleError."""
        offsets = u64s(request.offsets)
        self._store.space.take(session.id, request.regions, offsets, request.lengths)
        return offsets

    def stage(self, request: m.Put, offsets: list[int], log: int, now_ns: int) -> Waiting | bytes:
        """Stage a put whose extents are the store's: the batch, or PutStatus bytes when there is nothing to wait for.
        Extents of blocks that it does not store are free.
        """
        store = self._store
        columns = (request.keys, request.parents, request.regions, request.offsets, request.lengths, request.sums)
        if store.disk is not None:  # what is on disk only fills the table, and is worth less
            store.room.make_slots(len(offsets), now_ns, request.parents)
        reply = store.handle(events.StagePut(*columns, log=log), now_ns)
        status = reply.status.tobytes()
        store.counts["puts"] += len(status)
        store.slabs.free([offset for offset, st in zip(offsets, status, strict=True) if st])
        if not reply.batch:
            return status
        mine = [offset for offset, st in zip(offsets, status, strict=True) if not st]
        return self.wait_for(reply.batch, mine, status, self.placed(reply.rows))

    def wait_for(self, batch: int, offsets: list[int], status: bytes, rows: Records = _NO_ROWS) -> Waiting:
        """A batch was staged."""
        one = self._waiting[batch] = Waiting(batch, offsets, status, self._loop.create_future(), rows)
        return one

    def known(self, status: bytes, token: Token = NOTHING_SEEN) -> asyncio.Future[Outcome]:
        """An answer that waits for nothing."""
        done: asyncio.Future[Outcome] = self._loop.create_future()
        done.set_result(Outcome(status, token))
        return done

    def placed(self, rows: Records) -> Records:
        """Fill in where the values lie."""
        places = self._store.slabs.places(rows["offset"])
        for name in ("slot_lines", "base_unit", "units"):
            rows[name] = places[name]
        return rows

    def settle(self, batch: int, token: Token = NOTHING_SEEN, *, is_freeing: bool = True) -> events.SettleReply:
        """The log has it: show it, and answer. What could not be shown is to be logged as gone; its memory is free, or
        the caller's.
        """
        one, store = self._waiting.pop(batch), self._store
        reply = store.handle(events.Settle(batch), time.monotonic_ns())
        status = one.status
        if len(reply.status):
            status = reply.status.tobytes()
            stored = [offset for offset, st in zip(one.offsets, _of_stored(one.status, status), strict=True) if st]
            if is_freeing:
                store.slabs.free(stored)
        one.answer(status, token)
        return reply

    def abandon(self, one: Waiting) -> None:
        """The log will not have it, or not through here: the directory forgets it. Its extents are the caller's."""
        self._store.handle(events.Abandon(one.batch), time.monotonic_ns())
        self._waiting.pop(one.batch, None)

    def newest_first(self) -> Iterator[Waiting]:
        """What is staged, in the order in which it can be abandoned."""
        yield from sorted(self._waiting.values(), key=lambda one: -one.batch)


def _of_stored(before: bytes, after: bytes) -> bytes:
    """The final statuses of the blocks that were to be stored."""
    return bytes(now for was, now in zip(before, after, strict=True) if was == PutStatus.STORED)
