"""One node as a client sees it: its control connection, the path to its memory, the grants it gave, and its death.

Invariants
  - After the control connection ends, nothing of that node is a hit any more: `is_alive` is False in the same loop
  turn.
  - A put is committed by one message; before it is sent nothing is visible, after it was sent its extents are used up.
  - What an answer gives is never lost: one that comes after its asker was cancelled or gave up is used all the same
  (extents) or given back (leases).
  - Whoever waits for extents holds no uncollected answers, so that two puts never wait for each other.
  - Every request carries the call's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.grants import GrantCache, Taken
from ucxkv.client.path import INLINE_BYTES, U8, U64, chunk_bounds
from ucxkv.client.results import PutStatus
from ucxkv.dial import ask, mapped_error, raise_failure
from ucxkv.protocol import MessageError, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.transport.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.buffers import Pieces
    from ucxkv.client.path import Path
    from ucxkv.protocol import Message
    from ucxkv.transport.control import ControlConnection
    from ucxkv.transport.control import Message as ControlMessage

__all__ = ["NodeLink"]

_PUTS_IN_FLIGHT = 8
_PUT_CHUNK_BYTES = 1 << 20
_PUT_CHUNK_KEYS = 1024
_TOUCH_DELAY_S = 0.05
_TOUCH_KEYS_MAX = 65_536
_GRANT_IDLE_S = 10.0
_RETRY_MIN_S = 0.001
_RETRY_MAX_S = 0.05


class NodeLink:
    """An open session with one node. Made by `ucxkv.client.opening.open_link`."""

    def __init__(
        self, welcome: m.Welcome, connection: ControlConnection, path: Path, on_lost: Callable[[NodeLink], None]
    ) -> None:
        self.welcome = welcome
        self.connection = connection
        self.path = path
        self.name = welcome.name
        self.address = welcome.address
        self.node_id = welcome.node_id
        self.is_alive = True
        self.grants = GrantCache()
        self.last_token = (0, 0, 0)
        """(shard, epoch, index) of the newest answer: a Lamport token for session guarantees."""
        self._loop = asyncio.get_running_loop()
        self._touched: list[bytes] = []
        self._touched_keys = 0
        self._touch_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._granting = asyncio.Lock()
        self._last_put = 0.0
        self._on_lost = on_lost
        connection.on_closed(self._closed)
        connection.on_late_reply = self._late

    def _closed(self, connection: ControlConnection) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._stop_timers()
        self._on_lost(self)

    def _stop_timers(self) -> None:
        for timer in (self._touch_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._touch_timer = self._idle_timer = None

    def _late(self, reply: ControlMessage) -> None:
        """An answer nobody waits for any more."""
        try:
            answer = decode(reply.type, reply.payload)
        except MessageError:
            return
        match answer:
            case m.Granted():
                self.grants.add(answer.capacity, answer.regions, answer.offsets)
            case m.PutDone() if answer.refill_capacity:
                self.grants.add(answer.refill_capacity, answer.refill_regions, answer.refill_offsets)
            case m.Leased() if answer.lease:
                with contextlib.suppress(errors.UcxKvError):
                    self.tell(m.Release(lease=answer.lease))

    async def ask(self, message: Message, deadline_ns: int | None) -> Message:
        """One request on the control connection. Raises an error of `ucxkv.errors`."""
        return await ask(self.connection, message, deadline_ns, self.name)

    def tell(self, message: Message) -> None:
        """One one-way message; lost with the connection."""
        if self.is_alive:
            try:
                self.connection.send(message.CODE, encode(message))
            except TransportError as exc:
                raise mapped_error(exc, self.name) from exc

    # ---- what was read, so that the node's policy knows

    def touch(self, keys: bytes) -> None:
        """Report these keys as read, soon and together with others; under pressure reports are dropped, not queued."""
        if self._touched_keys < _TOUCH_KEYS_MAX:
            self._touched.append(keys)
            self._touched_keys += len(keys) // 16
            if self._touch_timer is None and self.is_alive:
                self._touch_timer = self._loop.call_later(_TOUCH_DELAY_S, self.flush_touches)

    def flush_touches(self) -> None:
        """Send the pending report now."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        if self._touched and self.is_alive:
            keys = b"".join(self._touched)
            self._touched.clear()
            self._touched_keys = 0
            try:
                self.tell(m.Touch(keys=keys))
            except errors.UcxKvError:
                return  # the connection ended just now; its callback tells everybody

    def report_damage(self, keys: bytes) -> None:
        """Tell the node that these blocks' bytes do not match their sums."""
        try:
            self.tell(m.Damaged(keys=keys))
        except errors.UcxKvError:
            return  # the node is gone, and the blocks with it

    # ---- putting

    async def put(self, keys: bytes, parents: bytes, pieces: Pieces, deadline_ns: int) -> U8:
        """Store n single-part blocks in order; PutStatus u8[n], UNAVAILABLE where no answer came in time."""
        n = len(pieces)
        self._check_sizes(pieces)
        self._last_put = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(_GRANT_IDLE_S, self._return_idle)
        uniform = n == 1 or bool((pieces.nbytes == pieces.nbytes[0]).all())
        if uniform and n <= _PUT_CHUNK_KEYS and int(pieces.nbytes[0]) * n <= _PUT_CHUNK_BYTES:
            return await self._put_small(keys, parents, pieces, deadline_ns)
        status = np.full(n, PutStatus.UNAVAILABLE, np.uint8)
        flying: list[tuple[int, int, asyncio.Future[ControlMessage], int]] = []
        moved = 0
        try:
            for begin, end in _runs(pieces, uniform):
                while begin < end:
                    length = int(pieces.nbytes[begin])
                    while flying and self.grants.count(length) < _per_chunk(length, end - begin):
                        await self._collect(flying.pop(0), status)  # its answer brings extents
                    taken = await self._extents(length, end - begin, deadline_ns)
                    if not len(taken):
                        status[begin:end] = PutStatus.NO_SPACE
                        break
                    stop = begin + len(taken)
                    part = pieces.run(begin, stop)
                    future = await self._send(
                        keys[16 * begin : 16 * stop], parents[16 * begin : 16 * stop], part, taken, length, deadline_ns
                    )
                    flying.append((begin, stop, future, length))
                    moved += length * len(taken)
                    if moved >= INLINE_BYTES:
                        moved = 0
                        await asyncio.sleep(0)
                    if len(flying) >= _PUTS_IN_FLIGHT:
                        await self._collect(flying.pop(0), status)
                    begin = stop
            if flying:
                self.connection.wait_inline(flying[-1][2], deadline_ns)
            while flying:
                await self._collect(flying.pop(0), status)
        except (errors.Unavailable, errors.DeadlineExceeded):
            pass  # what was not answered stays UNAVAILABLE
        finally:
            for *_, future, _length in flying:
                future.add_done_callback(_ignore)
        return status

    async def _put_small(self, keys: bytes, parents: bytes, pieces: Pieces, deadline_ns: int) -> U8:
        """One message, one round trip: the common case."""
        n, length = len(pieces), int(pieces.nbytes[0]) if len(pieces) else 0
        status = np.full(n, PutStatus.UNAVAILABLE, np.uint8)
        done = 0
        try:
            while done < n:
                taken = await self._extents(length, n - done, deadline_ns)
                if not len(taken):
                    status[done:] = PutStatus.NO_SPACE
                    break
                stop = done + len(taken)
                part = pieces.run(done, stop)
                future = await self._send(
                    keys[16 * done : 16 * stop], parents[16 * done : 16 * stop], part, taken, length, deadline_ns
                )
                self.connection.wait_inline(future, deadline_ns)
                await self._collect((done, stop, future, length), status)
                done = stop
        except (errors.Unavailable, errors.DeadlineExceeded):
            pass
        return status

    def _check_sizes(self, pieces: Pieces) -> None:
        largest = int(pieces.nbytes.max()) if len(pieces) else 0
        limit = self.welcome.value_bytes_max
        if largest > limit:
            raise errors.ValueTooLarge(
                f"a value of {largest} bytes; node {self.name} takes at most {limit}: split it, or start "
                "nodes with larger --host-bytes",
                size_bytes=largest,
                limit_bytes=limit,
                node=self.name,
            )

    async def _send(
        self, keys: bytes, parents: bytes, pieces: Pieces, taken: Taken, length: int, deadline_ns: int
    ) -> asyncio.Future[ControlMessage]:
        """Move the bytes, then send the commit; returns the future of its answer."""
        try:
            sums = await self.path.write(pieces, taken.regions, taken.offsets, deadline_ns)
        except BaseException:
            self.abandon(taken)
            raise
        message = m.Put(
            keys=keys,
            parents=parents,
            regions=taken.regions.tobytes(),
            offsets=taken.offsets.tobytes(),
            lengths=pieces.nbytes.astype(np.uint32).tobytes(),
            sums=sums.tobytes(),
            refill_length=length,
        )
        try:
            return self.connection.start_request(message.CODE, encode(message), deadline_ns)
        except TransportError as exc:
            raise mapped_error(exc, self.name) from exc

    def abandon(self, taken: Taken) -> None:
        """Extents whose write was stopped: the path has let go of them (its promise), so the node may have them
        back.
        """
        try:
            self.tell(m.Return(regions=taken.regions.tobytes(), offsets=taken.offsets.tobytes()))
        except errors.UcxKvError:
            return  # the connection is gone, and its grants with it

    async def _collect(self, sent: tuple[int, int, asyncio.Future[ControlMessage], int], status: U8) -> None:
        begin, end, future, length = sent
        try:
            reply = await future
            answer = decode(reply.type, reply.payload)
        except (TransportError, MessageError) as exc:
            raise mapped_error(exc, self.name) from exc
        if isinstance(answer, m.Failure):
            raise_failure(answer, self.name)
        if not isinstance(answer, m.PutDone) or len(answer.status) != end - begin:
            raise errors.Unavailable("the node's answer to a put does not fit it", node=self.name)
        status[begin:end] = np.frombuffer(answer.status, np.uint8)
        self.last_token = (answer.shard, answer.epoch, answer.index)
        if answer.refill_capacity:
            self.grants.learn(length, answer.refill_capacity)
            self.grants.add(answer.refill_capacity, answer.refill_regions, answer.refill_offsets)

    # ---- grants

    async def lend(self, pieces: Pieces, deadline_ns: int) -> tuple[Taken, U64] | None:
        """Write as many of these values, all of one length, as extents can be had for: (extents, sums), None for
        none.
        """
        self._check_sizes(pieces)
        self._last_put = self._loop.time()
        taken = await self._extents(int(pieces.nbytes[0]), len(pieces), deadline_ns)
        if not len(taken):
            return None
        try:
            sums = await self.path.write(pieces.run(0, len(taken)), taken.regions, taken.offsets, deadline_ns)
        except BaseException:
            self.abandon(taken)
            raise
        return taken, sums

    async def _extents(self, length: int, count: int, deadline_ns: int) -> Taken:
        """At least one extent for values of `length` bytes, up to a chunk's worth; none when the node stays full."""
        per_chunk = _per_chunk(length, count)
        if self.grants.count(length) >= per_chunk:
            return self.grants.take(length, per_chunk)
        try:
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                await self._granting.acquire()
        except TimeoutError:
            return self.grants.take(length, per_chunk)
        try:
            while self.grants.count(length) < per_chunk:
                answer = await self.ask(m.Grant(length=length, count=min(count, 4 * _PUT_CHUNK_KEYS)), deadline_ns)
                if not isinstance(answer, m.Granted):
                    raise errors.Unavailable("the node's answer to a grant does not fit it", node=self.name)
                self.grants.learn(length, answer.capacity)
                self.grants.add(answer.capacity, answer.regions, answer.offsets)
                if self.grants.count(length):
                    break
                self.return_grants()  # of other sizes: they may be what is missing
                pause = min(_RETRY_MAX_S, max(_RETRY_MIN_S, answer.retry_after_ms / 1e3))
                if not answer.retry_after_ms or time.monotonic_ns() + int(pause * 1e9) >= deadline_ns:
                    break
                await asyncio.sleep(pause)
            return self.grants.take(length, per_chunk)
        finally:
            self._granting.release()

    def _return_idle(self) -> None:
        """Nothing was put for a while: the node may have its memory back."""
        self._idle_timer = None
        if not self.is_alive:
            return
        quiet = self._loop.time() - self._last_put
        if quiet < _GRANT_IDLE_S or self._granting.locked():
            self._idle_timer = self._loop.call_later(max(0.1, _GRANT_IDLE_S - quiet), self._return_idle)
            return
        self.return_grants()

    def return_grants(self) -> None:
        """Give all unused grants back now."""
        regions, offsets = self.grants.drain()
        if offsets:
            try:
                self.tell(m.Return(regions=regions, offsets=offsets))
            except errors.UcxKvError:
                return

    # ---- the end

    def close(self) -> None:
        """Leave in good order: the node may reuse everything this client was granted. Idempotent.

        The caller has waited for its own puts; nothing of this process writes into the node's memory any more.
        """
        if self.is_alive:
            self.flush_touches()
        if self.is_alive:
            self.is_alive = False
            self._stop_timers()
            if self.connection.is_open:
                try:
                    self.connection.send(m.Bye.CODE, encode(m.Bye()))
                except TransportError:
                    pass
        self.connection.abort()
        self.path.close()


def _per_chunk(length: int, count: int) -> int:
    """How many of `count` values of `length` bytes one put message commits."""
    return max(1, min(count, _PUT_CHUNK_KEYS, _PUT_CHUNK_BYTES // max(1, length)))


def _runs(pieces: Pieces, uniform: bool) -> list[tuple[int, int]]:
    """Neighbouring values of one length, cut into chunks that are copied and committed while the next one is copied."""
    if uniform:
        cuts = chunk_bounds(pieces.nbytes, _PUT_CHUNK_BYTES)
        return list(itertools.pairwise(cuts))
    edges = [0, *(np.flatnonzero(np.diff(pieces.nbytes)) + 1).tolist(), len(pieces)]
    return list(itertools.pairwise(edges))


def _ignore(future: asyncio.Future[ControlMessage]) -> None:
    if not future.cancelled():
        future.exception()
