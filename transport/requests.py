"""Requests on their way to one node: a batch in chunks, their results, and letting go of them.

Promises
  - What was let go of (cancelled, past its deadline, node lost) touches no destination any more once the call that let
    it go returns. Payload that comes by copying is dropped from that moment on; a rendezvous receive that is in flight
    is waited for (it is local work; see settling.py).
  - An answer that the node gave in another epoch than the request's is no answer, and is told of once.
  - What is still being sent stays referenced until UCX is done with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import library
from .base import Closed, DeadlineExceeded, PeerLost, TransportError, UsageError
from .endpoint import Endpoint
from .fetcher import Fetcher
from .progress import Worker
from .settling import settled
from .ucx import error_from_status

__all__ = ["OTHER_EPOCH", "UNAVAILABLE", "Chunk", "NativePieces", "Requests"]

UNAVAILABLE, OTHER_EPOCH = 6, 8
_CHUNK_BYTES = 2 << 20
_CHUNK_KEYS = 1024
_CHUNKS_IN_FLIGHT = 2  # about 4 MiB: more falls out of the cache


class Chunk(NamedTuple):
    """Keys low .. high of a batch, on their way as one request; future: of its end (None: it has ended)."""

    request_id: int
    low: int
    high: int
    future: asyncio.Future[int] | None


class NativePieces(NamedTuple):
    """Native views of checked arrays; they keep the arrays alive."""

    first: Any
    addr: Any
    length: Any


class Requests:
    """The requests of one data client. endpoint, others: owned; the first that fails ends all of them."""

    def __init__(self, worker: Worker, endpoint: Endpoint, others: Sequence[Endpoint]) -> None:
        self._ffi, self._lib = library.binding()
        self._worker = worker
        self._endpoint = endpoint
        self._others = tuple(others)
        self._fetcher = Fetcher.of(worker)
        self._waiters = 0
        self.error: TransportError | None = None
        self.on_lost: Callable[[TransportError], None] | None = None
        """Called once, with what UCX says, when an endpoint fails; not after `lost` or `aclose`."""
        self.on_other_epoch: Callable[[], None] | None = None
        """Called once, on a later turn of the loop, when the node has answered in another epoch than was asked in."""
        self._is_told = False
        for other in others:
            endpoint.join(other)
        for each in (endpoint, *others):
            each.on_error = lambda e: self._failed(e.error)

    @property
    def is_open(self) -> bool:
        """False once closed, or the node is known to be gone."""
        return self.error is None

    # ---- running a batch in chunks

    async def _run(
        self,
        what: str,
        n: int,
        pieces: NativePieces | None,
        start: Callable[[int, int, int, int], int] | None,
        outs: tuple[Any, ...],
        keep: object,
        deadline_ns: int | None,
        let_go: Callable[[int, int, int], None] | None = None,
        flying: deque[Chunk] | None = None,
    ) -> None:
        """Start the chunks of n keys, about 4 MiB in flight, and collect their results.

        flying: chunks that were started before.
        """
        flying = deque() if flying is None else flying
        low = 0
        chunk: Chunk | None = None
        try:
            while (low < n and self.error is None) or flying:  # once the node is lost, the rest is UNAVAILABLE
                while start is not None and low < n and len(flying) < _CHUNKS_IN_FLIGHT and self.error is None:
                    high = (
                        min(n, low + _CHUNK_KEYS)
                        if pieces is None
                        else self._lib.kv_chunk_end(n, pieces.first, pieces.length, low, _CHUNK_BYTES, _CHUNK_KEYS)
                    )
                    request_id = self._worker.next_id()
                    spin_ns = self._worker.inline_wait_ns if self._waiters + len(flying) == 0 else 0
                    code = start(request_id, low, high, spin_ns)
                    if code < 0:
                        raise error_from_status(code, what)
                    flying.append(
                        Chunk(request_id, low, high, self._worker.register(request_id, keep, what) if code else None)
                    )
                    low = high
                chunk = flying[0]
                if chunk.future is not None:
                    self._waiters += 1
                    try:
                        await self._worker.wait(chunk.future, what, deadline_ns)
                    finally:
                        self._waiters -= 1
                flying.popleft()
                self._take(chunk, outs)
        except DeadlineExceeded:
            await self._abandon(flying, outs, keep, let_go)
        except PeerLost as exc:
            await self._abandon(flying, outs, keep, let_go)
            self._failed(exc)
        except BaseException:
            await self._abandon(flying, outs, keep, let_go)
            raise
        finally:
            chunk = None  # no cycle of exception, frame and future, see Worker.wait
            flying.clear()

    def _take(self, chunk: Chunk, outs: tuple[Any, ...]) -> tuple[int, int]:
        """Results of one request into the outputs: (operations in flight, receives among them)."""
        if self._fetcher.handle is None:
            return 0, 0
        null, low = self._ffi.NULL, chunk.low
        pointers = [null if out is None else out + low for out in outs]
        receives = self._ffi.new("uint32_t *")
        count = self._lib.kv_fetch_take(self._fetcher.handle, chunk.request_id, *pointers, receives)
        return max(0, count), receives[0]

    async def _abandon(
        self,
        flying: deque[Chunk],
        outs: tuple[Any, ...],
        keep: object,
        let_go: Callable[[int, int, int], None] | None,
    ) -> None:
        """Let go of what is on its way; returns once no destination is touched any more, whatever is cancelled."""
        receiving: list[int] = []
        for chunk in flying:
            self._worker.forget(chunk.request_id)
            if chunk.future is not None and chunk.future.done() and not chunk.future.cancelled():
                chunk.future.exception()  # seen: the first one's is on its way to the caller
            in_flight, receives = self._take(chunk, outs)
            if in_flight:
                self._fetcher.kept[chunk.request_id] = keep
            if let_go is not None:
                let_go(chunk.request_id, chunk.low, chunk.high)
            if receives:
                receiving.append(chunk.request_id)
        if not receiving:
            return
        kept = self._fetcher.kept
        await settled(self._worker, lambda: any(i in kept for i in receiving), self._close_endpoints)

    def _pieces(self, n: int, first: Any, addr: Any, length: Any) -> NativePieces:
        first = np.ascontiguousarray(first, "<u4")
        addr = np.ascontiguousarray(addr, "<u8")
        length = np.ascontiguousarray(length, "<u8")
        if first.shape != (n + 1,) or addr.shape != length.shape or addr.ndim != 1:
            raise UsageError(
                f"{n} values: first is u32[{n + 1}], not {first.shape}; {addr.shape} and {length.shape} pieces"
            )
        from_buffer = self._ffi.from_buffer
        pieces = NativePieces(
            from_buffer("uint32_t[]", first), from_buffer("uint64_t[]", addr), from_buffer("uint64_t[]", length)
        )
        if not self._lib.kv_pieces_fit(n, pieces.first, len(addr)):
            raise UsageError("first does not grow from value to value, or ends past the pieces")
        return pieces

    # ---- the node's epoch

    def _without_other_epochs(self, status: NDArray[np.uint8]) -> None:
        """Make UNAVAILABLE what was answered in another epoch."""
        if OTHER_EPOCH in status.tobytes():  # comparing arrays takes twenty times as long
            status[status == OTHER_EPOCH] = UNAVAILABLE
            self._saw_other_epoch()

    def _saw_other_epoch(self) -> None:
        if not self._is_told and self.on_other_epoch is not None:
            self._is_told = True
            asyncio.get_running_loop().call_soon(self.on_other_epoch)

    # ---- the end

    def _failed(self, reason: TransportError | None) -> None:
        """UCX's news of the endpoint's end."""
        was_open = self.is_open
        self.lost(reason)
        if was_open and self.on_lost is not None and self.error is not None:
            self.on_lost(self.error)

    def lost(self, reason: TransportError | None = None) -> None:
        """The node is gone (the control connection's news, or UCX's): keys without an answer are UNAVAILABLE now."""
        if self.error is not None:
            return
        self.error = reason or PeerLost("the node is gone")
        for each in (self._endpoint, *self._others):
            handle = each.handle_or_none
            if handle is not None and self._worker.is_open and self._fetcher.handle is not None:
                self._lib.kv_fetch_endpoint_gone(self._fetcher.handle, handle)
                self._worker.kick()

    async def aclose(self, *, deadline_ns: int | None = None) -> None:
        """End every request (UNAVAILABLE) and close the endpoint. Idempotent."""
        self.lost(Closed("this data client is closed"))
        await self._close_endpoints(deadline_ns)

    async def _close_endpoints(self, deadline_ns: int | None) -> None:
        """All connections, the first one last: it knows of the others."""
        for each in (*self._others, self._endpoint):
            await each.aclose(force=True, deadline_ns=deadline_ns)
