"""What sessions ask of blocks on disk: to bring them into memory, alone or under a lease, and to delete them.

A request that waited is answered only when its session is still there and the node's lease still runs.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.directory import events
from ucxkv.directory.events import DeleteStatus
from ucxkv.ids import KEY_BYTES
from ucxkv.node.disk.promoting import Promoter, WarmStatus
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.node.node import Node
    from ucxkv.node.session import Session

__all__ = ["DiskRequests"]

_KEYS_MAX = 65_536
"""In one request, and in all that a session waits for at once; what is more is to be asked for again later."""
_OWNER = 0
"""Of leases that requests hold while they are carried out; no session has it."""
_ROOM_S = 1.0
"""So long a request waits for the first of its blocks to find room in memory."""


class DiskRequests:
    """See the module. For nodes without a disk tier, too: then there is nothing to wait for."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store = node.store
        self._waiting: dict[int, int] = {}
        """Keys that each session waits for."""

    # ---- what there is to wait for

    def has_cold(self, keys: bytes) -> bool:
        """Whether one of these blocks is on disk only."""
        disk = self._node.disk
        return disk is not None and disk.has_cold(keys)

    def in_memory_only(self, request: m.Delete) -> set[bytes] | None:
        """Those of the blocks to be deleted of which the disk need not be told; None: of none of them."""
        disk = self._node.disk
        if disk is None:
            return None
        found = disk.in_memory_only(request.keys)
        return None if len(found) * KEY_BYTES == len(request.keys) else found

    def cold_above(self, request: m.Put | m.PutPart) -> list[bytes]:
        """Blocks that a durable put makes durable with it, and whose values are on disk only."""
        disk = self._node.disk
        if disk is None or not isinstance(request, m.Put) or not request.durable:
            return []
        return disk.cold_above(request.keys, request.parents)

    # ---- answers

    def begin_warm(self, session: Session, request: m.Warm, answer: Callable[[Callable[[], m.Warmed]], None]) -> bool:
        """`warm` of one block without a task: `answer` is called with what makes the answer, now or when it is known.

        False, and nothing is begun, where it takes `warm`.
        """
        disk = self._node.disk
        if disk is None or len(request.keys) != KEY_BYTES or self._is_too_much(session, request.keys):
            return False
        begun = disk.promoter.begin(request.keys)
        if begun is WarmStatus.LATER:
            return False
        lease = m.Leased(0, 0, b"")
        if request.ttl_ms:  # while the disk works
            lease = self._store.lease(session.id, m.LeaseKeys(request.keys, request.ttl_ms), time.monotonic_ns())
        finish = partial(self._one_warmed, session, lease, request.keys, disk.promoter)
        self._waits(session, 1)
        if isinstance(begun, WarmStatus):
            answer(partial(finish, None))
        else:
            begun.add_done_callback(lambda done: answer(partial(finish, done)))
        return True

    def _one_warmed(
        self, session: Session, lease: m.Leased, key: bytes, promoter: Promoter, done: asyncio.Future[None] | None
    ) -> m.Warmed:
        """The end of what `begin_warm` began. Raises as `warm`."""
        self._waits(session, -1)
        try:
            if done is not None:
                if done.cancelled():
                    raise errors.Unavailable("the node ends")
                done.result()
            self._check_still(session)
        except BaseException:
            self._store.release(session.id, lease.lease, time.monotonic_ns())
            raise
        return m.Warmed(lease.lease, lease.ttl_ms, bytes((promoter.status(key),)))

    async def warm(self, session: Session, request: m.Warm) -> m.Warmed:
        """Bring blocks into memory, and hold them there if asked to. Raises UsageError for too many keys."""
        if len(request.keys) > KEY_BYTES * _KEYS_MAX:
            raise errors.UsageError(f"{len(request.keys) // KEY_BYTES} keys in one request; the most is {_KEYS_MAX}")
        lease, ttl_ms = 0, 0
        if self._is_too_much(session, request.keys):
            return m.Warmed(0, 0, bytes([WarmStatus.LATER]) * (len(request.keys) // KEY_BYTES))
        if request.ttl_ms:
            leased = self._store.lease(session.id, m.LeaseKeys(request.keys, request.ttl_ms), time.monotonic_ns())
            lease, ttl_ms = leased.lease, leased.ttl_ms
        return m.Warmed(lease, ttl_ms, await self._warmed_under(session, lease, request.keys))

    async def lease(self, session: Session, request: m.LeaseKeys) -> m.Leased:
        """A lease keeps values in place for who reads them in memory: so they are brought there, under it."""
        if self._is_too_much(session, request.keys):
            return m.Leased(0, 0, bytes([events.LeaseStatus.LIMIT]) * (len(request.keys) // KEY_BYTES))
        leased = self._store.lease(session.id, request, time.monotonic_ns())
        status = await self._warmed_under(session, leased.lease, request.keys, is_all=True)
        granted = bytes(was if now == WarmStatus.WARM else 1 for was, now in zip(leased.status, status, strict=True))
        return m.Leased(leased.lease, leased.ttl_ms, granted)

    async def _warmed_under(self, session: Session, lease: int, keys: bytes, *, is_all: bool = False) -> bytes:
        self._waits(session, len(keys) // KEY_BYTES)
        try:
            status = await self.warmed(keys, is_all=is_all)
            self._check_still(session)
        except BaseException:
            self._store.release(session.id, lease, time.monotonic_ns())
            raise
        finally:
            self._waits(session, -len(keys) // KEY_BYTES)
        return status

    def _check_still(self, session: Session) -> None:
        """Raise Unavailable when who asked is gone, or this node may not answer any more."""
        if session.id not in self._node.sessions:
            raise errors.Unavailable("the connection has ended")
        if not self._store.serving.is_running:
            raise self._store.serving.refusal()

    def _waits(self, session: Session, keys: int) -> None:
        """The session waits for so many more keys."""
        count = self._waiting.get(session.id, 0) + keys
        if count:
            self._waiting[session.id] = count
        else:
            self._waiting.pop(session.id, None)  # a request may name no key at all

    def _is_too_much(self, session: Session, keys: bytes) -> bool:
        before = self._waiting.get(session.id, 0)
        return before > 0 and before + len(keys) // KEY_BYTES > _KEYS_MAX

    async def warmed(self, keys: bytes, *, is_all: bool = False) -> bytes:
        """Bring blocks into memory: one WarmStatus a key. Waits a little for room, so that an answer has something, or
        all of them.
        """
        disk = self._node.disk
        if disk is None:
            slots = self._store.directory.table.find(keys).tolist()
            return bytes(WarmStatus.MISS if slot < 0 else WarmStatus.WARM for slot in slots)
        names = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        until = time.monotonic() + _ROOM_S
        while True:
            status = await disk.promoter.warm(names)
            is_enough = WarmStatus.WARM in status and not is_all
            if WarmStatus.LATER not in status or is_enough or time.monotonic() > until:
                return status
            await asyncio.sleep(max(1, self._node.config.grace_ms) / 1e3)

    async def ready_for(self, session: Session, request: m.Put | m.PutPart) -> int:
        """Return when a put's ancestors are where it needs them, or no more of them can be brought there: a lease that
        keeps them there, for `let_go`.
        """
        cold = self.cold_above(request)
        keys, left = b"".join(cold), len(cold) + 1
        now_ns, ttl_ns = time.monotonic_ns(), self._node.config.lease_ms_max * 1_000_000
        lease = self._store.handle(events.Lease(keys, ttl_ns, _OWNER), now_ns).lease if cold else 0
        try:
            while 0 < len(cold) < left and session.id in self._node.sessions:
                left = len(cold)
                await self.warmed(b"".join(cold))
                cold = self.cold_above(request)
        except BaseException:
            self.let_go(lease)
            raise
        return lease

    def let_go(self, lease: int) -> None:
        """What `ready_for` kept may leave memory."""
        if lease:
            self._store.handle(events.Release(lease), time.monotonic_ns())

    async def forgotten(self, request: m.Delete, answer: m.Statuses, besides: set[bytes]) -> None:
        """After a delete: return when none of the deleted, but these, comes back at a later start, nor what it did not
        find because this start does not show it. Raises Unavailable.
        """
        disk = self._node.disk
        if disk is None:
            return
        over = (DeleteStatus.DELETED, DeleteStatus.MISS) if disk.has_unshown else (DeleteStatus.DELETED,)
        keys = [
            request.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at, st in enumerate(answer.status) if st in over
        ]
        await disk.forget([key for key in keys if key not in besides])
