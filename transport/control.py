"""The control connection: small framed messages between a client and a node, and the news of the other side's death.

Promises
  - Every request ends in its reply, a typed error, or its deadline; a reply never answers another request, also when
    the asker was cancelled (its late reply is dropped and counted).
  - `closed` is set, and every pending request fails, in the same loop turn in which the end of the stream arrives.
  - File descriptors that arrive are owned by the message they came with and closed unless somebody takes them.
  - What a peer said before it closed is handled, also when it did not wait for its answers.
  - Bounded: frame size, bytes waiting to be sent, pending requests. A peer that does not read is disconnected (or, on
    the serving side, no longer read from), never buffered for.
  - Nothing is written or read by another process than the one that opened the connection (fork guard).

A connection works on the raw non-blocking socket: a frame is sent from within `request()`, and a fast answer can be
awaited inline (`inline_wait_us`) without a turn of the loop. One thread, one loop.
"""

from __future__ import annotations

import array
import asyncio
import copy
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .base import Closed, DeadlineExceeded, ForkGuard, PeerLost, ProtocolError, TransportError, UsageError, remaining_s
from .frames import FLAG_REPLY, HEADER, HEADER_BYTES, MAX_FDS, MAX_FRAME_BYTES, FrameDecoder, Payload
from .inline import InlineWait
from .message import Message, PeerCredentials, close_all, credentials_of, describe_peer, local_host
from .poller import Poller
from .sweeping import DeadlineSweep

__all__ = ["ControlConnection", "Handler", "Message", "PeerCredentials"]

_Buffer = bytes | bytearray | memoryview
_JOIN_BYTES = 16 << 10  # below, one copied buffer and send() is cheaper than sendmsg() of pieces
_HIGH_WATER_BYTES = 1 << 20  # requests wait, and a serving side stops reading, while more than this is unsent
_MAX_BACKLOG_BYTES = 256 << 20
_MAX_PENDING = 1 << 16
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * 4)
_FD_SHIFT = 8


Handler = Callable[["ControlConnection", Message], None]
"""Called in the loop for every request and one-way message. It answers with `connection.reply`, now or later.

Descriptors it does not take before it returns are closed. An exception it raises ends this connection and is reported
to the loop's exception handler.
"""


class _Unsent(NamedTuple):
    data: memoryview
    fds: tuple[int, ...]  # own duplicates, sent with the first byte


class ControlConnection:
    """One control connection over a connected stream socket (TCP or Unix), owned from here on.

    handler: for what the peer asks; without one, requests from the peer are a ProtocolError.
    is_serving: this is the accepting side: it stops reading while the peer does not read its replies.
    inline_wait_us: how long `request` polls for the answer before it suspends; 0 = never. Only used while no other
    request is pending, and less and less while it does not help.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler | None = None,
        *,
        is_serving: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        inline_wait_us: int = 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._guard = ForkGuard("this control connection")
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._is_unix = sock.family == socket.AF_UNIX
        self.local_host = local_host(sock)
        """This side's address; "" over a Unix socket."""
        self._handler = handler
        self._is_serving = is_serving
        self._decoder = FrameDecoder(max_frame_bytes)
        self._arrived_fds: deque[int] = deque()
        self._pending: dict[int, tuple[asyncio.Future[Message], int | None]] = {}
        self._last_id = 0
        self._unsent: deque[_Unsent] = deque()
        self._unsent_bytes = 0
        self._drained: asyncio.Future[None] | None = None
        self._deadlines = DeadlineSweep(self._pending, lambda: f"no answer from {self.peer_text} within the deadline")
        self._has_left = False  # the peer reads no more; what it said before that is still to be read
        self._inline = InlineWait(self._fd, inline_wait_us)
        self._is_open = True
        self._is_reading = True
        self._on_closed: list[Callable[[ControlConnection], None]] = []
        self.close_reason: TransportError | None = None
        self.closed = asyncio.Event()
        self.late_replies_count = 0
        self.on_late_reply: Callable[[Message], None] | None = None
        """Sees the replies that came after their asker was cancelled or its deadline passed: what they give can be
        given back."""
        self.owner: object = None
        """For the layer above: whatever it keeps per connection."""
        self._poller = Poller.of_loop()
        self._poller.set_reader(self._fd, self._readable)

    # ---- facts

    @property
    def is_open(self) -> bool:
        """False from the moment the end of the stream, a reset or a close on this side was seen."""
        return self._is_open

    @property
    def pending_count(self) -> int:
        """Requests without an answer yet."""
        return len(self._pending)

    @property
    def unsent_bytes(self) -> int:
        """Bytes the kernel has not taken yet."""
        return self._unsent_bytes

    @property
    def max_frame_bytes(self) -> int:
        """Largest payload accepted from the peer; raise it once the peer has proved itself."""
        return self._decoder.max_frame_bytes

    @max_frame_bytes.setter
    def max_frame_bytes(self, value: int) -> None:
        self._decoder.max_frame_bytes = value

    @property
    def is_unix(self) -> bool:
        """True over a Unix socket: descriptors can travel, and the peer is on this host."""
        return self._is_unix

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The peer process over a Unix socket; None over TCP."""
        if not self._is_unix or not self._is_open:
            return None
        return credentials_of(self._sock)

    @property
    def peer_text(self) -> str:
        """The peer for messages and logs: host:port, or the pid over a Unix socket."""
        return describe_peer(self._sock)

    def on_closed(self, callback: Callable[[ControlConnection], None]) -> None:
        """Call `callback(connection)` once, when the connection ends; at once if it already did."""
        if self._is_open:
            self._on_closed.append(callback)
        else:
            callback(self)

    # ---- sending

    async def request(
        self, kind: int, payload: _Buffer | Sequence[_Buffer] = b"", deadline_ns: int | None = None
    ) -> tuple[int, Payload]:
        """Send a request and return its reply's (type, payload). Descriptors in the reply are closed.

        Raises DeadlineExceeded, PeerLost, Closed, ProtocolError, UsageError (payload over the limit).
        """
        message = await self.request_message(kind, payload, deadline_ns)
        if message.fds_count:
            message.close_fds()
        return message.type, message.payload

    async def request_message(
        self,
        kind: int,
        payload: _Buffer | Sequence[_Buffer] = b"",
        deadline_ns: int | None = None,
        *,
        fds: Sequence[int] = (),
    ) -> Message:
        """Like `request`, with descriptors both ways; the caller owns the reply (take or close its descriptors)."""
        if self._unsent_bytes > _HIGH_WATER_BYTES:
            await self._wait_drained(deadline_ns)
        future = self.start_request(kind, payload, deadline_ns, fds=fds)
        if len(self._pending) == 1:
            self.wait_inline(future, deadline_ns)
        try:
            return await future
        except asyncio.CancelledError:
            self.discard(future)  # the answer may have come in the turn of the cancellation
            raise

    def start_request(
        self,
        kind: int,
        payload: _Buffer | Sequence[_Buffer] = b"",
        deadline_ns: int | None = None,
        *,
        fds: Sequence[int] = (),
    ) -> asyncio.Future[Message]:
        """Send a request now and return the future of its reply, so that several can be on their way in order.

        The future raises what `request` raises; cancelling it drops the reply. Nothing waits for a full backlog here:
        the caller bounds what it has on its way.
        """
        if len(self._pending) >= _MAX_PENDING:
            raise UsageError(f"{_MAX_PENDING} requests are pending on this connection already")
        request_id = self._next_id()
        future: asyncio.Future[Message] = self._loop.create_future()
        self._send(kind, 0, request_id, payload, fds)
        self._pending[request_id] = (future, deadline_ns)
        future.add_done_callback(lambda _: self._pending.pop(request_id, None))
        if deadline_ns is not None:
            self._deadlines.arm(deadline_ns)
        return future

    def discard(self, future: asyncio.Future[Message]) -> None:
        """Give up a request: its answer, here already or still to come, goes to `on_late_reply`. Idempotent."""
        if not future.done():
            future.cancel()
        elif not future.cancelled() and future.exception() is None:
            self._too_late(future.result())

    def _too_late(self, reply: Message) -> None:
        self.late_replies_count += 1
        if self.on_late_reply is not None:
            self.on_late_reply(reply)
        reply.close_fds()

    def send(self, kind: int, payload: _Buffer | Sequence[_Buffer] = b"", *, fds: Sequence[int] = ()) -> None:
        """Send a one-way message; what the kernel does not take at once is copied and sent later.

        Raises Closed, PeerLost, UsageError; the connection ends when its bound of unsent bytes is passed.
        """
        self._send(kind, 0, 0, payload, fds)

    def reply(
        self, to: Message, kind: int, payload: _Buffer | Sequence[_Buffer] = b"", *, fds: Sequence[int] = ()
    ) -> None:
        """Answer a request, once. To a one-way message there is no answer (UsageError). Raises as `send`."""
        if not to.request_id:
            raise UsageError(f"message of type {to.type} is one-way; it has no reply")
        self._send(kind, FLAG_REPLY, to.request_id, payload, fds)

    def _next_id(self) -> int:
        request_id = self._last_id
        while True:
            request_id = request_id % 0xFFFFFFFF + 1
            if request_id not in self._pending:
                self._last_id = request_id
                return request_id

    def _send(
        self, kind: int, flags: int, request_id: int, payload: _Buffer | Sequence[_Buffer], fds: Sequence[int]
    ) -> None:
        self._guard.check()
        if not self._is_open:
            raise self._gone()
        if self._has_left:
            return
        if isinstance(payload, (bytes, bytearray, memoryview)):
            payload = (payload,)
        length = sum([memoryview(piece).nbytes for piece in payload])
        if length > MAX_FRAME_BYTES:
            raise UsageError(f"payload of {length} bytes; a frame carries at most {MAX_FRAME_BYTES}")
        if fds:
            if not self._is_unix:
                raise UsageError("descriptors travel over Unix sockets only")
            if len(fds) > MAX_FDS:
                raise UsageError(f"{len(fds)} descriptors; a frame carries at most {MAX_FDS}")
            flags |= len(fds) << _FD_SHIFT
        pieces: Sequence[_Buffer] = (HEADER.pack(length, kind, flags, request_id), *payload)
        if length <= _JOIN_BYTES:
            pieces = (b"".join(pieces),)
        sent = 0 if self._unsent else self._send_now(pieces, fds)
        if sent < length + HEADER_BYTES:
            self._queue(pieces, sent, fds)

    def _send_now(self, pieces: Sequence[_Buffer], fds: Sequence[int]) -> int:
        """Bytes the kernel took of these pieces."""
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                return self._sock.sendmsg(pieces, rights)
            if len(pieces) == 1:
                return self._sock.send(pieces[0])
            return self._sock.sendmsg(pieces[:512])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            if self._is_serving:
                self._stop_sending()
                return sum([memoryview(piece).nbytes for piece in pieces])
            self._end(PeerLost(f"control connection to the peer broke while sending: {exc}"))
            raise self._gone() from exc

    def _stop_sending(self) -> None:
        """The peer has closed: answers go nowhere, but it may have said goodbye; the end of the stream ends this."""
        self._has_left = True
        if self._unsent:
            self._poller.set_writer(self._fd, None)
        self._drop_unsent()
        if not self._is_reading:
            self._is_reading = True
            self._poller.set_reader(self._fd, self._readable)

    def _drop_unsent(self) -> None:
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _queue(self, pieces: Sequence[_Buffer], sent: int, fds: Sequence[int]) -> None:
        rest = b"".join(pieces)[sent:]
        if self._unsent_bytes + len(rest) > _MAX_BACKLOG_BYTES:
            self._end(PeerLost(f"the peer does not read: {self._unsent_bytes} bytes wait to be sent"))
            raise self._gone()
        if not self._unsent:
            self._poller.set_writer(self._fd, self._writable)
        self._unsent.append(_Unsent(memoryview(rest), () if sent else tuple(os.dup(fd) for fd in fds)))
        self._unsent_bytes += len(rest)
        if self._is_serving and self._unsent_bytes > _HIGH_WATER_BYTES and self._is_reading:
            self._is_reading = False
            self._poller.set_reader(self._fd, None)

    def _writable(self) -> None:
        if self._guard.is_forked:
            return
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                sent = self._send_now((data,), fds)
            except TransportError:
                return  # _end has told everybody
            if not sent or self._has_left:
                return
            close_all(fds)
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent[0] = _Unsent(data[sent:], ())
            else:
                self._unsent.popleft()
        self._poller.set_writer(self._fd, None)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if not self._is_reading:
            self._is_reading = True
            self._poller.set_reader(self._fd, self._readable)

    async def _wait_drained(self, deadline_ns: int | None) -> None:
        """Wait until the backlog is gone, the connection ended (then `_send` raises) or the deadline passed."""
        if self._drained is None or self._drained.done():
            self._drained = self._loop.create_future()
        done, _ = await asyncio.wait([self._drained], timeout=remaining_s(deadline_ns))
        if not done:
            raise DeadlineExceeded(f"{self._unsent_bytes} bytes still wait to be sent to {self.peer_text}")

    # ---- receiving

    def wait_inline(self, future: asyncio.Future[Message], deadline_ns: int | None = None) -> None:
        """Poll for a fast answer, at most `inline_wait_us`; the future may be pending afterwards."""
        if not future.done():
            self._inline.run(lambda: future.done() or not self._is_open, self._readable, deadline_ns)

    def _readable(self) -> None:
        if self._guard.is_forked:
            return
        buffer = self._decoder.buffer()
        try:
            count = self._receive_with_fds(buffer) if self._is_unix else self._sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as exc:
            self._end(exc)
            return
        except OSError as exc:
            self._end(PeerLost(f"control connection to the peer broke: {exc}"))
            return
        if not count:
            self._end_of_stream()
            return
        self._decoder.received(count)
        try:
            while self._is_open:
                frame = self._decoder.next_frame()
                if frame is None:
                    return
                self._dispatch(*frame)
        except TransportError as exc:
            self._end(exc)
        except Exception as exc:
            self._end(ProtocolError(f"the handler failed on a message of {self.peer_text}: {exc!r}"))
            context = {"message": "control connection's handler failed", "exception": exc}
            self._loop.call_exception_handler(context)

    def _receive_with_fds(self, buffer: memoryview) -> int:
        count, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._arrived_fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                "descriptors from the peer were cut off: too many, or this process is out of descriptors"
            )
        if len(self._arrived_fds) > 4 * MAX_FDS:
            raise ProtocolError(f"the peer sent {len(self._arrived_fds)} descriptors that no frame claims")
        return count

    def _end_of_stream(self) -> None:
        try:
            self._decoder.finish()
        except ProtocolError as exc:
            self._end(exc)
        else:
            self._end(PeerLost(f"the peer closed the control connection ({self.peer_text})"))

    def _dispatch(self, kind: int, flags: int, request_id: int, payload: Payload) -> None:
        count = flags >> _FD_SHIFT
        fds: tuple[int, ...] = ()
        if count:
            if count > len(self._arrived_fds):
                raise ProtocolError(
                    f"frame of type {kind} claims {count} descriptors, {len(self._arrived_fds)} arrived"
                )
            fds = tuple(self._arrived_fds.popleft() for _ in range(count))
        message = Message(kind, flags, request_id, payload, fds)
        if flags & FLAG_REPLY:
            entry = self._pending.pop(request_id, None)
            if entry is None or entry[0].done():
                self._too_late(message)
            else:
                entry[0].set_result(message)
        elif self._handler is None:
            message.close_fds()
            raise ProtocolError(f"the peer asked (type {kind}) and nobody here answers requests")
        else:
            try:
                self._handler(self, message)
            finally:
                message.close_fds()

    # ---- the end

    def _gone(self) -> TransportError:
        reason = self.close_reason
        if reason is None:
            return Closed("this control connection is closed")
        return copy.copy(reason)  # a fresh one each time: tracebacks of different waiters must not pile up

    def _end(self, reason: TransportError | None) -> None:
        """Everything that must happen when the connection is over, once."""
        if not self._is_open:
            return
        self._is_open = False
        self.close_reason = reason
        self._poller.remove(self._fd)
        self._sock.close()
        self._deadlines.stop()
        close_all(list(self._arrived_fds))
        self._arrived_fds.clear()
        self._drop_unsent()
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(self._gone())
        self.closed.set()
        callbacks, self._on_closed = self._on_closed, []
        for callback in callbacks:
            callback(self)

    def abort(self, reason: TransportError | None = None) -> None:
        """Close at once; unsent bytes are dropped, pending requests raise Closed (or `reason`). Idempotent."""
        if self._guard.is_forked:
            self._sock.close()
            self._is_open = False
            return
        self._end(reason)

    async def aclose(self, deadline_ns: int | None = None) -> None:
        """Send what is unsent (within the deadline; 1 s without one), then close. Idempotent."""
        if self._is_open and self._unsent:
            try:
                await self._wait_drained(time.monotonic_ns() + 10**9 if deadline_ns is None else deadline_ns)
            except DeadlineExceeded:
                pass
        self.abort()
