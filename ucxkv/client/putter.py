"""Puts to one node: extents granted ahead, bytes moved into them, one message that commits a batch.

Invariants
  - Before its message is sent nothing of a batch is visible; after it was sent its extents are used up.
  - The bytes of a chunk move while the node commits the one before it; the number of chunks on their way is bounded.
  - Extents whose write was stopped go back to the node, since the path has let go of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.chunking import CHUNK_BYTES_MIN, CHUNK_KEYS_MAX, ahead_count, runs
from ucxkv.client.grants import GrantCache, Taken
from ucxkv.client.path import INLINE_BYTES, U8, U64
from ucxkv.client.results import PutStatus
from ucxkv.dial import answer_to, start_asking
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from ucxkv.buffers import Pieces
    from ucxkv.client.link import NodeLink
    from ucxkv.transport.control import Message as ControlMessage

__all__ = ["UNTRIED", "Putter"]

UNTRIED = 0xFF
"""Of a block whose message was not sent, or was refused as a whole: nothing of it happened. No caller sees this."""

_PUTS_IN_FLIGHT = 8
_GRANT_IDLE_S = 10.0
_RETRY_MIN_S = 0.001
_RETRY_MAX_S = 0.05
_UNAVAILABLE = int(PutStatus.UNAVAILABLE)
_NO_SPACE = int(PutStatus.NO_SPACE)
_ORDER = int(PutStatus.ORDER)


class Putter:
    """The putting half of a link: its grants and the puts on their way."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._connection = link.connection
        self._path = link.path
        self._name = link.name
        self._loop = asyncio.get_running_loop()
        self.grants = GrantCache()
        self._granting = asyncio.Lock()
        self._is_open = True
        self._last_put = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """The link ended: no extent of it is handed out any more."""
        self._is_open = False
        self.grants.drain()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def late(self, answer: m.Granted | m.PutDone) -> None:
        """An answer nobody waits for any more still brings extents."""
        if not self._is_open:
            return
        self._note_put()
        if isinstance(answer, m.Granted):
            self.grants.add(answer.capacity, answer.regions, answer.offsets)
        else:
            self.grants.add(answer.refill_capacity, answer.refill_regions, answer.refill_offsets)

    def _note_put(self) -> None:
        self._last_put = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(_GRANT_IDLE_S, self._return_idle)

    async def put_one(
        self, key: bytes, parent: bytes, address: int, nbytes: int, keep: object, deadline_ns: int
    ) -> int | None:
        """Store one block that lies in one piece: its PutStatus; None: use `put` (no extent at hand, or the node no
        longer leads its shard).

        keep: owns the memory.
        """
        place = self.grants.take_one(nbytes)
        if place is None:
            return None
        self._note_put()
        held, ahead = self.grants.count(nbytes), ahead_count(nbytes)
        wanted = 0 if 2 * held > ahead else ahead - held  # a stock for many puts, so that few of them have to ask
        region, offset = place
        try:
            total = await self._path.write_one(address, nbytes, region, offset, keep, deadline_ns)
        except errors.Unavailable:
            self._give_back(region.to_bytes(2, "little"), offset.to_bytes(8, "little"))
            return None if self._link.led else _UNAVAILABLE
        except BaseException:
            self._give_back(region.to_bytes(2, "little"), offset.to_bytes(8, "little"))
            raise
        message = m.Put(
            keys=key,
            parents=parent,
            regions=region.to_bytes(2, "little"),
            offsets=offset.to_bytes(8, "little"),
            lengths=nbytes.to_bytes(4, "little"),
            sums=total.to_bytes(8, "little"),
            refill_length=nbytes if wanted else 0,
            refill_count=wanted,
            epoch=self._link.epoch,
        )
        try:
            future = self._start(message, deadline_ns)
            self._connection.wait_inline(future, deadline_ns)
            status = (await self._answer(future, 1, nbytes)).status[0]
        except errors.NotLeader:
            return None
        except (errors.Unavailable, errors.DeadlineExceeded):
            return _UNAVAILABLE
        return status if status != _ORDER or not self._link.led else None

    def check_durable(self) -> None:
        """Raises UsageError when the node keeps nothing durable."""
        if self._link.welcome.durability == "memory":
            raise errors.UsageError(
                "durable=True, and the node keeps nothing durable: start it with --durability process --state-dir DIR, "
                "or put without it",
                node=self._name,
            )

    async def put(
        self,
        keys: bytes,
        parents: bytes,
        pieces: Pieces,
        deadline_ns: int,
        *,
        durable: bool = False,
        exact: bool = False,
        untried: int = _UNAVAILABLE,
    ) -> U8:
        """Store n single-part blocks in order; PutStatus u8[n], UNAVAILABLE where no answer came in time.

        untried: the status of blocks of which nothing happened: their message was not sent, or the node leads their
        shard no longer.
        Raises JournalFailed for a durable put that the node cannot log, UsageError where it keeps nothing durable.
        """
        n = len(pieces)
        if durable:
            self.check_durable()
        self._check_sizes(pieces)
        self._note_put()
        uniform = n == 1 or bool((pieces.nbytes == pieces.nbytes[0]).all())
        if uniform and n <= CHUNK_KEYS_MAX and int(pieces.nbytes[0]) * n <= CHUNK_BYTES_MIN:
            return await self._put_small(keys, parents, pieces, deadline_ns, durable, exact, untried)
        status = np.full(n, untried, np.uint8)
        flying: list[tuple[int, int, asyncio.Future[ControlMessage], int]] = []
        moved = 0
        try:
            for begin, end in runs(pieces, uniform=uniform):
                while begin < end:
                    length = int(pieces.nbytes[begin])
                    while flying and self.grants.count(length) < end - begin:
                        await self._collect(flying.pop(0), status, untried)  # its answer brings extents
                    batch = n - begin if uniform else end - begin
                    taken = await self._extents(length, end - begin, batch, deadline_ns)
                    if not len(taken):
                        status[begin:end] = _NO_SPACE
                        break
                    stop = begin + len(taken)
                    part = pieces.run(begin, stop)
                    some, above = keys[16 * begin : 16 * stop], parents[16 * begin : 16 * stop]
                    future = await self._send(some, above, part, taken, length, deadline_ns, durable, exact)
                    flying.append((begin, stop, future, length))
                    status[begin:stop] = _UNAVAILABLE  # from here on its answer alone tells
                    moved += length * len(taken)
                    if moved >= INLINE_BYTES:
                        moved = 0
                        await asyncio.sleep(0)
                    if len(flying) >= _PUTS_IN_FLIGHT:
                        await self._collect(flying.pop(0), status, untried)
                    begin = stop
            if flying:
                self._connection.wait_inline(flying[-1][2], deadline_ns)
            while flying:
                await self._collect(flying.pop(0), status, untried)
        except errors.NotLeader:
            while flying:  # each of them was refused too, or not
                with contextlib.suppress(errors.Unavailable):
                    await self._collect(flying.pop(0), status, untried)
        except (errors.Unavailable, errors.DeadlineExceeded):
            pass  # what was not answered stays UNAVAILABLE
        finally:
            for *_, future, _length in flying:
                self._connection.discard(future)
        return status

    async def _put_small(
        self, keys: bytes, parents: bytes, pieces: Pieces, deadline_ns: int, durable: bool, exact: bool, untried: int
    ) -> U8:
        """One message, one round trip: the common case."""
        n, length = len(pieces), int(pieces.nbytes[0]) if len(pieces) else 0
        status = np.full(n, untried, np.uint8)
        done = 0
        try:
            while done < n:
                taken = await self._extents(length, n - done, n - done, deadline_ns)
                if not len(taken):
                    status[done:] = _NO_SPACE
                    break
                stop = done + len(taken)
                part = pieces.run(done, stop)
                some, above = keys[16 * done : 16 * stop], parents[16 * done : 16 * stop]
                future = await self._send(some, above, part, taken, length, deadline_ns, durable, exact)
                if untried != _UNAVAILABLE:
                    status[done:stop] = _UNAVAILABLE
                self._connection.wait_inline(future, deadline_ns)
                await self._collect((done, stop, future, length), status, untried)
                done = stop
        except (errors.Unavailable, errors.DeadlineExceeded):
            pass
        return status

    def _check_sizes(self, pieces: Pieces) -> None:
        largest = int(pieces.nbytes.max()) if len(pieces) else 0
        limit = self._link.welcome.value_bytes_max
        if largest > limit:
            raise errors.ValueTooLarge(
                f"a value of {largest} bytes; node {self._name} takes at most {limit}: split it, or start "
                "nodes with larger --host-bytes",
                size_bytes=largest,
                limit_bytes=limit,
                node=self._name,
            )

    async def _send(
        self,
        keys: bytes,
        parents: bytes,
        pieces: Pieces,
        taken: Taken,
        length: int,
        deadline_ns: int,
        durable: bool,
        exact: bool,
    ) -> asyncio.Future[ControlMessage]:
        """Move the bytes, then send the commit; returns the future of its answer."""
        try:
            sums = await self._path.write(pieces, taken.regions, taken.offsets, deadline_ns)
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
            durable=durable,
            epoch=self._link.epoch,
            exact=exact,
        )
        return self._start(message, deadline_ns)

    def _start(self, message: m.Put, deadline_ns: int) -> asyncio.Future[ControlMessage]:
        return start_asking(self._connection, message, deadline_ns, self._name)

    def abandon(self, taken: Taken) -> None:
        """Extents whose write was stopped: the path has let go of them (its promise), so the node may have them
        back.
        """
        self._give_back(taken.regions.tobytes(), taken.offsets.tobytes())

    def _give_back(self, regions: bytes, offsets: bytes) -> None:
        try:
            self._link.tell(m.Return(regions=regions, offsets=offsets))
        except errors.UcxKvError:
            return  # the connection is gone, and its grants with it

    async def _collect(
        self, sent: tuple[int, int, asyncio.Future[ControlMessage], int], status: U8, untried: int
    ) -> None:
        begin, end, future, length = sent
        try:
            answer = await self._answer(future, end - begin, length)
        except errors.NotLeader:
            status[begin:end] = untried
            raise
        status[begin:end] = np.frombuffer(answer.status, np.uint8)

    async def _answer(self, future: asyncio.Future[ControlMessage], n: int, length: int) -> m.PutDone:
        answer = await answer_to(self._connection, future, self._name)
        if not isinstance(answer, m.PutDone) or len(answer.status) != n:
            raise errors.Unavailable("the node's answer to a put does not fit it", node=self._name)
        self._link.saw(answer.token)
        if answer.refill_capacity:
            self.grants.learn(length, answer.refill_capacity)
            self.grants.add(answer.refill_capacity, answer.refill_regions, answer.refill_offsets)
        return answer

    # ---- grants

    async def lend(self, pieces: Pieces, deadline_ns: int) -> tuple[Taken, U64] | None:
        """Write as many of these values, all of one length, as extents can be had for: (extents, sums), None for
        none.
        """
        self._check_sizes(pieces)
        self._note_put()
        count = min(len(pieces), CHUNK_KEYS_MAX)
        taken = await self._extents(int(pieces.nbytes[0]), count, len(pieces), deadline_ns)
        if not len(taken):
            return None
        try:
            sums = await self._path.write(pieces.run(0, len(taken)), taken.regions, taken.offsets, deadline_ns)
        except BaseException:
            self.abandon(taken)
            raise
        return taken, sums

    async def _extents(self, length: int, count: int, batch: int, deadline_ns: int) -> Taken:
        """One to `count` extents for values of `length` bytes; none when the node stays full.

        batch: how many the whole call will need: a request to the node asks for them all, so that later chunks wait for
        nothing.
        """
        if self.grants.count(length) >= count:
            return self.grants.take(length, count)
        try:
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                await self._granting.acquire()
        except TimeoutError:
            return self.grants.take(length, count)
        try:
            is_full = False
            while (held := self.grants.count(length)) < count:
                missing = min(batch - held, 4 * CHUNK_KEYS_MAX)
                try:
                    answer = await self._link.ask(m.Grant(length=length, count=missing), deadline_ns)
                except errors.DeadlineExceeded:
                    if not is_full:
                        raise
                    break  # it answered before, and was full
                if not isinstance(answer, m.Granted):
                    raise errors.Unavailable("the node's answer to a grant does not fit it", node=self._name)
                self.grants.learn(length, answer.capacity)
                self.grants.add(answer.capacity, answer.regions, answer.offsets)
                if self.grants.count(length):
                    break
                is_full = True
                self.return_grants()  # of other sizes: they may be what is missing
                pause = min(_RETRY_MAX_S, max(_RETRY_MIN_S, answer.retry_after_ms / 1e3))
                if not answer.retry_after_ms or time.monotonic_ns() + int(pause * 1e9) >= deadline_ns:
                    break
                await asyncio.sleep(pause)
            return self.grants.take(length, count)
        finally:
            self._granting.release()

    def _return_idle(self) -> None:
        """Nothing was put for a while: the node may have its memory back."""
        self._idle_timer = None
        if not self._link.is_alive:
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
                self._link.tell(m.Return(regions=regions, offsets=offsets))
            except errors.UcxKvError:
                return
