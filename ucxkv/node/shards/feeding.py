"""A leader's messages to one other member of a shard, each sent behind the values that it names.

Invariants
  - Messages that name values go out in their order, and only when these values are there, or are gone from here.
  - No message names one value twice (a block that was put again): "gone" is said of a name, and means one entry's.
  - A member that waits for values hears of its leader all the same: heartbeats do not queue behind values.
  - Bounded: what does not fit the queue is dropped, as a message may be; the replica sends it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ucxkv import errors
from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.node.shards.values import commit_rows, gone_name
from ucxkv.protocol import messages as m
from ucxkv.replication import events as ev
from ucxkv.replication.log import decode_entry
from ucxkv.replication.messages import Append, ReplicaMessage, SnapshotPart, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucxkv.directory.slots import Records
    from ucxkv.node.mirror import Mirror
    from ucxkv.node.shards.shard import Shard
    from ucxkv.replication import Member

__all__ = ["Feeder"]

_QUEUE_MAX = 64
_COPY_S = 5.0
_COPIED_MAX = 16_384
_VALUES_BYTES = 4 << 20
"""Of the values behind one message: it is taken only when all are there, and where they wait is bounded, too."""
_GONE = 1
_RETRY_S = 0.05
_ATTEMPTS = 40

log = structlog.get_logger("ucxkv.node")


class Feeder:
    """See the module. tell: sends one control message to the member's node; base: address of this node's segment."""

    def __init__(
        self, shard: Shard, to: Member, mirror: Mirror, tell: Callable[[m.Replicate], None], base: int
    ) -> None:
        self._shard = shard
        self._to = to
        self._mirror = mirror
        self._tell = tell
        self._base = base
        self._queue: deque[Append | SnapshotPart] = deque()
        self._copied: dict[tuple[int, bytes], bool] = {}
        """By entry (or less than 0: by snapshot) and name: values that the member was given; False: gone from here by
        then. Of one epoch: the next one's entries are others.
        """
        self._copied_epoch = 0
        self._task: asyncio.Task[None] | None = None

    def send(self, message: ReplicaMessage) -> None:
        """Send it, now or behind its values."""
        if message.epoch != self._copied_epoch:
            self._copied.clear()
            self._copied_epoch = message.epoch
        if isinstance(message, Append) and not message.entries and self._queue:
            replica = self._shard.replica  # what it was to follow is still on its way: say where all are for sure
            epoch = replica.log.epoch_at(replica.watermark)
            if epoch is not None:
                self._say(
                    Append(
                        message.sender, message.epoch, replica.watermark, epoch, [], message.watermark, message.serial
                    )
                )
        elif not isinstance(message, Append | SnapshotPart):
            self._say(message)
        elif not self._queue and not self._lacking(message):
            for part in _parts(message):
                self._say(part)
        else:
            for part in _parts(message):
                if len(self._queue) < _QUEUE_MAX and not any(self._is_same(part, one) for one in self._queue):
                    self._queue.append(part)
            if self._task is None:
                self._task = asyncio.create_task(self._work(), name=f"feed-{self._shard.number}-{self._to.name}")

    @staticmethod
    def _is_same(a: Append | SnapshotPart, b: Append | SnapshotPart) -> bool:
        if isinstance(a, Append) and isinstance(b, Append):
            return (a.epoch, a.prev_index, len(a.entries)) == (b.epoch, b.prev_index, len(b.entries))
        return a == b

    def forget(self) -> None:
        """The member has lost values that it was given: give them again."""
        self._copied.clear()

    async def aclose(self) -> None:
        """Send nothing more. Idempotent."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        attempts = 0
        try:
            while self._queue:
                message, replica = self._queue[0], self._shard.replica
                if message.epoch != replica.epoch or replica.leading is None:
                    self._queue.clear()  # it leads no more, and may not know any more what is gone
                    break
                try:
                    for index, rows in self._rows(message):
                        await self._copy(index, rows)
                except errors.UcxKvError as exc:
                    is_full = isinstance(exc, errors.Overloaded | errors.DeadlineExceeded | errors.ValueTooLarge)
                    attempts += 1
                    if attempts < _ATTEMPTS and not is_full:  # it is just changing what it leads, or is dialled anew
                        await asyncio.sleep(_RETRY_S)
                        continue
                    log.warning("shard.feed", shard=self._shard.number, to=self._to.name, why=str(exc))
                    attempts = 0
                    self._queue.clear()  # the replica sends all of it again, in its order
                    self._shard.handle(ev.Unfit(self._to))
                    await asyncio.sleep(_RETRY_S)
                    continue
                attempts = 0
                if self._queue and self._queue[0] is message:
                    self._queue.popleft()
                    self._say(message)
        finally:
            self._task = None

    def _say(self, message: ReplicaMessage) -> None:
        gone = b""
        if isinstance(message, Append | SnapshotPart):
            gone = b"".join(
                name
                for index, rows in self._rows(message)
                for name, _, _ in _named(rows)
                if not self._copied.get((index, name), True)
            )
        self._tell(m.Replicate(self._shard.number, self._to.incarnation, encode(message), gone))

    @staticmethod
    def _rows(message: Append | SnapshotPart) -> Iterator[tuple[int, Records]]:
        """The Commit rows of a message, each with its entry's index; a snapshot's with a number below 0 of its own:
        what is gone for one snapshot may be there for the next.
        """
        if isinstance(message, SnapshotPart):
            yield -1 - message.index, np.frombuffer(message.chunk, COMMIT_DTYPE)
            return
        for raw in message.entries:
            entry = decode_entry(raw)
            rows = commit_rows(entry)
            if len(rows):
                yield entry.index, rows

    def _lacking(self, message: Append | SnapshotPart) -> bool:
        return any(
            (index, name) not in self._copied for index, rows in self._rows(message) for name, _, _ in _named(rows)
        )

    async def _copy(self, index: int, rows: Records) -> None:
        """Give the member those of these values that it was not given yet."""
        local: list[int] = []
        offsets: list[int] = []
        for at, (name, total, length) in enumerate(_named(rows)):
            if (index, name) in self._copied:
                continue
            place = self._shard.place(index, name[:16], total, length)
            if place is None:
                self._copied[index, name] = False
            else:
                local.append(at)
                offsets.append(place.offset)
        if not local:
            return
        mine = rows[local].copy()
        mine["offset"], mine["region"] = offsets, 0
        deadline_ns = time.monotonic_ns() + int(_COPY_S * 1e9)
        if index < 0:
            lacks = await self._mirror.lacking(self._shard.number, mine, deadline_ns)
        else:
            lacks = np.ones(len(mine), np.bool_)
        status = np.zeros(len(mine), np.uint8)
        if lacks.any():
            status[lacks] = await self._mirror.copy(self._shard.number, mine[lacks], self._base, deadline_ns)
        while len(self._copied) > _COPIED_MAX:
            del self._copied[next(iter(self._copied))]
        for (name, _, _), state in zip(_named(mine), status.tolist(), strict=True):
            self._copied[index, name] = state != _GONE


def _parts(message: Append | SnapshotPart) -> Iterator[Append | SnapshotPart]:
    """The message, or several that say the same, each with values of about `_VALUES_BYTES` or one entry, none of them
    twice."""
    if isinstance(message, SnapshotPart) or len(message.entries) < 2:
        yield message  # a snapshot's values are taken as they come
        return
    entries: list[bytes] = []
    names: set[bytes] = set()
    size, prev, last = 0, (message.prev_index, message.prev_epoch), (0, 0)
    for raw in message.entries:
        entry = decode_entry(raw)
        rows = commit_rows(entry)
        nbytes = int(rows["length"].sum(dtype=np.uint64))
        named = {name for name, _, _ in _named(rows)}
        if entries and (size + nbytes > _VALUES_BYTES or not names.isdisjoint(named)):
            yield Append(message.sender, message.epoch, *prev, entries, message.watermark, message.serial)
            entries, names, size, prev = [], set(), 0, last
        entries.append(raw)
        names |= named
        size, last = size + nbytes, (entry.index, entry.epoch)
    yield Append(message.sender, message.epoch, *prev, entries, message.watermark, message.serial)


def _named(rows: Records) -> Iterator[tuple[bytes, int, int]]:
    """The name of each row's value, its sum and its length."""
    keys = rows["key"].tobytes()
    for at, (total, length) in enumerate(zip(rows["sum"].tolist(), rows["length"].tolist(), strict=True)):
        yield gone_name(keys[16 * at : 16 * at + 16], total), total, length
