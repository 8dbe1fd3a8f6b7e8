"""A UCX worker driven by an asyncio loop.

Progress has three stages: an operation first waits inline in C (the GIL is released; the common short one never
suspends its coroutine), longer while its bytes are coming in, but the loop gets its turn after 200 us; then, while
operations are pending and the last event is younger than `loop_spin_us`, the worker is progressed at every turn of the
loop; then it is armed and its descriptor wakes the loop, with a tick every
second because wake-ups can get lost (rapidsai/ucxx#15). An idle worker costs one wake-up a second.

Ownership: an operation's buffers and handles stay referenced here, by its id, until UCX completes it, whatever
happens to the task that awaits it. UCX cannot cancel sends, gets or puts (openucx/ucx#1162).

One worker belongs to the thread of its loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import library
from .base import Closed, DeadlineExceeded, ForkGuard, TransportError
from .ucx import Context, error_from_status

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["RECORD_DTYPE", "ReceivedMessage", "Worker"]

RECORD_DTYPE = np.dtype(
    [
        ("id", "<u8"),
        ("status", "<i4"),
        ("kind", "<u2"),
        ("header_length", "<u2"),
        ("length", "<u8"),
        ("aux", "<u8"),
        ("ep", "<u8"),
        ("header", "V88"),
    ]
)
"""One completion, 128 bytes; kv_record of ucx.h."""

DONE, MESSAGE, CONNECT, EP_ERROR, QUIET = 1, 2, 3, 4, 5
_TICK_S = 1.0
_TURN_NS = 200_000
_TURN_IDLE_NS = 5_000
_ADDRESS_BYTES = 16384
_LAST_NS = 20_000_000
_LAST_TURNS = 1000  # a millisecond where nothing moves; on a busy machine the time above may be gone after one


class ReceivedMessage:
    """An active message nobody pre-posted a buffer for. The payload is held by the worker until received or dropped."""

    __slots__ = ("_token", "_worker", "am_id", "header", "length")

    def __init__(self, worker: Worker, am_id: int, header: bytes, length: int, token: int) -> None:
        self._worker = worker
        self._token = token
        self.am_id = am_id
        self.header = header
        self.length = length
        """Payload bytes to receive; 0 = none."""

    async def receive(self, into: Any = None, *, deadline_ns: int | None = None) -> memoryview:
        """Bring the payload into `into` (writable, contiguous, at least `length` bytes; a new buffer when None).

        Rendezvous payloads are pulled by this call. `into` is borrowed until the operation completes, also when this
        call is cancelled. Raises Closed when the payload was taken or dropped before, PeerLost, UsageError.
        """
        return await self._worker._receive(self._token, self.length, into, deadline_ns)

    def drop(self) -> None:
        """Let the payload go; the sender's operation ends well. Idempotent."""
        self._worker._drop(self._token)


class _Operation:
    __slots__ = ("future", "keep", "what")

    def __init__(self, future: asyncio.Future[int], keep: object, what: str) -> None:
        self.future = future
        self.keep = keep
        self.what = what


class Worker:
    """A UCX worker in the running loop's thread.

    ring_records: completions that may be outstanding, a power of two; inline_wait_us: stage one; loop_spin_us: stage
    two. Use `await worker.aclose()` at the end; it closes what is left of its endpoints first.
    """

    def __init__(
        self, context: Context, *, ring_records: int = 8192, inline_wait_us: int = 30, loop_spin_us: int = 100
    ) -> None:
        if ring_records & (ring_records - 1) or not 2 <= ring_records <= 1 << 20:
            raise ValueError(f"ring_records is a power of two from 2 to 2**20, not {ring_records}")
        self._ffi, self._lib = library.binding()
        self.context = context
        self._loop = asyncio.get_running_loop()
        self._guard = ForkGuard("this UCX worker")
        self.client_id = secrets.randbits(63) | 1
        """What listeners are told of this worker when it connects to them."""
        out = self._ffi.new("kv_worker **")
        status = self._lib.kv_worker_open(context.acquire(), ring_records, self.client_id, out)
        if status != 0:
            context.release()
            raise error_from_status(status, "creating a UCX worker")
        self.handle = out[0]
        context.workers.add(self)
        ring = self._ffi.buffer(self._lib.kv_ring(self.handle), ring_records * RECORD_DTYPE.itemsize)
        self.ring = np.frombuffer(ring, dtype=RECORD_DTYPE)
        """The completion ring itself, read-only by convention."""
        self._ring_mask = ring_records - 1
        self.inline_wait_ns = inline_wait_us * 1000
        self._loop_spin_ns = loop_spin_us * 1000
        self._operations: dict[int, _Operation] = {}
        self._last_id = 0
        self._message_handlers: dict[int, Callable[[ReceivedMessage], None]] = {}
        self.endpoints: dict[int, Endpoint] = {}
        self.connect_handlers: deque[Callable[[int], None]] = deque()
        self.quiet_handler: Callable[[int], None] | None = None
        """For the data client: a request it let go of touches no memory any more."""
        self.extension: object = None
        """What the data client keeps per worker."""
        self.closers: list[Callable[[], None]] = []
        """Called once the native worker is destroyed."""
        self.keepers: list[Callable[[], Iterable[object]]] = []
        """What else is kept for UCX, besides what the operations here keep."""
        self._until_let_go: list[tuple[object, Callable[[], None], bool]] = []
        fd = self._ffi.new("int *")
        status = self._lib.kv_worker_fd(self.handle, fd)
        if status != 0:
            raise error_from_status(status, "getting the worker's event descriptor")
        self._fd: int = fd[0]
        self._has_moved = self._ffi.new("int *")
        self._is_scheduled = False
        self._last_event_ns = 0
        self.turns_count = 0
        """Times the loop progressed this worker: an idle worker adds about one a second."""
        self._tick: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._woken)
        self._on_tick()

    # ---- facts

    @property
    def is_open(self) -> bool:
        """False once closed."""
        return self.handle is not None

    @property
    def address(self) -> bytes:
        """The worker's address, for a peer's `Endpoint.connect`."""
        room = self._ffi.new("char[]", _ADDRESS_BYTES)
        length = self._lib.kv_worker_address(self.native(), room, _ADDRESS_BYTES)
        if length < 0:
            raise error_from_status(length, "asking for the worker's address")
        return bytes(self._ffi.buffer(room, length))

    @property
    def inflight_count(self) -> int:
        """Operations that UCX has not completed."""
        return int(self._lib.kv_inflight(self.native()))

    @property
    def dropped_count(self) -> int:
        """Messages dropped because the ring or the memory for unasked payloads was full."""
        return int(self._lib.kv_dropped(self.native()))

    @property
    def owned_count(self) -> int:
        """Operations whose buffers are still referenced here."""
        return len(self._operations)

    def native(self) -> Any:
        """The native handle; raises Closed after `aclose` or a fork."""
        self._guard.check()
        if self.handle is None:
            raise Closed("this UCX worker is closed")
        return self.handle

    # ---- messages

    def on_message(self, am_id: int, handler: Callable[[ReceivedMessage], None]) -> None:
        """Call `handler` in the loop for every active message with this id (0..15)."""
        status = self._lib.kv_message_handle(self.native(), am_id)
        if status != 0:
            raise error_from_status(status, f"setting a handler for message id {am_id}")
        self._message_handlers[am_id] = handler

    async def _receive(self, token: int, length: int, into: Any, deadline_ns: int | None) -> memoryview:
        buffer = bytearray(length) if into is None else into
        if not length:
            return memoryview(buffer).cast("B")[:0]
        view = self._ffi.from_buffer("char[]", buffer, require_writable=True)
        address = int(self._ffi.cast("uintptr_t", view))
        op_id = self.next_id()
        status = self._lib.kv_message_receive(
            self.native(), token, address, len(view), self._ffi.NULL, op_id, self.inline_wait_ns
        )
        if status == -12:  # NO_ELEM
            raise Closed("this message's payload was received or dropped before")
        await self.finish(status, op_id, (view, buffer), "receiving a message", deadline_ns)
        return memoryview(buffer).cast("B")[:length]

    def _drop(self, token: int) -> None:
        if self.handle is not None and not self._guard.is_forked:
            self._lib.kv_message_drop(self.handle, token)

    # ---- operations

    def next_id(self) -> int:
        """A fresh operation id."""
        self._last_id += 1
        return self._last_id

    async def finish(self, status: int, op_id: int, keep: object, what: str, deadline_ns: int | None) -> int:
        """Await the operation that a native call started: its length. `keep` is referenced until UCX completes it."""
        if status == 0:
            return int(self._lib.kv_last_length(self.handle))
        if status < 0:
            raise error_from_status(status, what)
        return await self.expect(op_id, keep, what, deadline_ns)

    async def expect(self, op_id: int, keep: object, what: str, deadline_ns: int | None) -> int:
        """Await the record with this id."""
        return await self.wait(self.register(op_id, keep, what), what, deadline_ns)

    def register(self, op_id: int, keep: object, what: str) -> asyncio.Future[int]:
        """The future of the record with this id. Call it before the worker is progressed again."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._operations[op_id] = _Operation(future, keep, what)
        self.kick()
        return future

    async def wait(self, future: asyncio.Future[int], what: str, deadline_ns: int | None) -> int:
        """Await a registered record, at most until the deadline (DeadlineExceeded; it stays registered)."""
        timer = None
        if deadline_ns is not None:
            timer = self._loop.call_later(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9), _expire, future, what)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            # What is raised refers to this frame: with the future it would be a cycle. CPython 3.11 crashes when it
            # collects a cycle that holds a memoryview whose buffer cffi has borrowed.
            del future

    def is_pending(self, op_id: int) -> bool:
        """Whether UCX has not completed this operation yet."""
        return op_id in self._operations

    def forget(self, op_id: int) -> None:
        """No record with this id will come: let go of what it kept."""
        operation = self._operations.pop(op_id, None)
        if operation is not None:
            operation.future.cancel()

    # ---- registrations and keys that are closed under an operation

    def keeps(self, thing: object) -> bool:
        """Whether an operation that UCX has not completed uses this registration or remote key."""
        kept = [operation.keep for operation in self._operations.values()]
        for more in self.keepers:
            kept += more()
        return any(thing is part for parts in kept if isinstance(parts, tuple) for part in parts)

    def once_let_go(self, thing: object, release: Callable[[], None], *, before_end: bool) -> None:
        """Call `release` when no operation uses `thing` any more; at the latest at the worker's end, just before or
        after it.
        """
        self._until_let_go.append((thing, release, before_end))

    def _let_go(self) -> None:
        waiting, self._until_let_go = self._until_let_go, []
        for thing, release, before_end in waiting:
            if self.keeps(thing):
                self._until_let_go.append((thing, release, before_end))
            else:
                release()

    # ---- progress

    def kick(self) -> None:
        """Something was submitted: progress from the next turn of the loop on."""
        self._last_event_ns = time.monotonic_ns()
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._pump)

    def _woken(self) -> None:
        self._last_event_ns = time.monotonic_ns()
        if not self._is_scheduled:
            self._pump()

    def _on_tick(self) -> None:
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)
        if not self._is_scheduled:
            self._pump()

    def _pump(self) -> None:
        self._is_scheduled = False
        if self.handle is None or self._guard.is_forked:
            return
        self.turns_count += 1
        is_pending = bool(self._operations)
        if self.progress(_TURN_IDLE_NS if is_pending else 0):
            self._last_event_ns = time.monotonic_ns()
        if self.handle is None:
            return  # closed by a handler
        is_spinning = self._operations and time.monotonic_ns() - self._last_event_ns < self._loop_spin_ns
        if (is_spinning or self._lib.kv_worker_arm(self.handle) > 0) and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._pump)

    def progress(self, idle_ns: int = 0) -> bool:
        """Progress while something moves (and `idle_ns` longer), but for 200 us at most; hand out what completed.

        Returns whether anything moved.
        """
        lib, has_moved = self._lib, self._has_moved
        count = lib.kv_progress(self.handle, idle_ns, _TURN_NS, has_moved)
        if not count:
            return bool(has_moved[0])
        start = lib.kv_ring_tail(self.handle)
        rows = self.ring[np.arange(start, start + count) & self._ring_mask] if count > 1 else None
        records = [self.ring[start & self._ring_mask].item()] if rows is None else rows.tolist()
        lib.kv_ring_release(self.handle, count)
        for record in records:
            self._dispatch(*record)
        if self._until_let_go:
            self._let_go()
        return True

    def _dispatch(
        self, op_id: int, status: int, kind: int, header_length: int, length: int, aux: int, ep: int, header: bytes
    ) -> None:
        if kind == DONE:
            operation = self._operations.pop(op_id, None)
            if operation is not None and not operation.future.done():
                if status == 0:
                    operation.future.set_result(length)
                else:
                    operation.future.set_exception(error_from_status(status, operation.what))
        elif kind == QUIET:
            if self.quiet_handler is not None:
                self.quiet_handler(op_id)
        elif kind == MESSAGE:
            message = ReceivedMessage(self, op_id, bytes(header)[:header_length], length, aux)
            handler = self._message_handlers.get(op_id)
            if handler is None:
                message.drop()
            else:
                handler(message)
        elif kind == EP_ERROR:
            endpoint = self.endpoints.get(ep)
            if endpoint is not None:
                endpoint._failed(status)
        elif kind == CONNECT and self.connect_handlers:
            self.connect_handlers[0](aux)

    async def drain(self, deadline_ns: int) -> bool:
        """Progress until nothing is in flight (True) or the deadline passed (False)."""
        while self.handle is not None and self.inflight_count:
            if time.monotonic_ns() >= deadline_ns:
                return False
            self.progress()
            await asyncio.sleep(0 if self._operations else 0.001)
        return True

    # ---- the end

    async def aclose(self, deadline_ns: int | None = None) -> None:
        """Close the endpoints (by force where UCX can), let operations end (1 s without a deadline), destroy the
        worker.

        What is still pending then raises Closed. Idempotent.
        """
        if self.handle is None:
            return
        deadline = time.monotonic_ns() + 10**9 if deadline_ns is None else deadline_ns
        try:
            for endpoint in list(self.endpoints.values()):
                await endpoint.aclose(deadline_ns=deadline, force=True)
            await self.drain(deadline)
        finally:
            self.abort()

    def abort(self, reason: TransportError | None = None) -> None:
        """Destroy the worker at once, 20 ms for what ends by itself; nothing of it touches memory afterwards.

        Idempotent.
        """
        if self.handle is None:
            return
        if self._guard.is_forked:
            self.handle = None
            return
        until, turns = time.monotonic_ns() + _LAST_NS, 0
        while self.handle is not None and self.inflight_count and (turns < _LAST_TURNS or time.monotonic_ns() < until):
            self.progress()  # a read over CMA that has not begun makes UCX (1.21) abort the process below
            turns += 1
        if self.handle is None:
            return
        for endpoint in list(self.endpoints.values()):
            endpoint._dead(reason or Closed("the UCX worker is closed"))
        late, self._until_let_go = self._until_let_go, []
        for _, release, before_end in late:
            if before_end:
                release()
        self._loop.remove_reader(self._fd)
        if self._tick is not None:
            self._tick.cancel()
        handle, self.handle = self.handle, None
        self.ring = np.empty(0, dtype=RECORD_DTYPE)
        self._lib.kv_worker_close(handle)
        self.context.workers.discard(self)
        self.context.release()
        for closer in self.closers:
            closer()
        operations, self._operations = self._operations, {}
        for _, release, before_end in late:
            if not before_end:
                release()
        for operation in operations.values():
            if not operation.future.done():
                operation.future.set_exception(reason or Closed(f"{operation.what}: the UCX worker was closed"))


def _expire(future: asyncio.Future[int], what: str) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded(f"{what}: not finished within the deadline"))
