"""The client's side of the data service: look-ups, reads into the caller's memory, writes into granted extents.

Promises
  - Every call ends within its deadline. A node that is gone, or does not answer in time, is a status (UNAVAILABLE)
  of the
    keys it has not answered, not an exception; keys already answered keep their answer.
  - HIT means that the destination holds bytes whose xxh3 equals the producer's. A sum that differs is STALE: the extent
    was reused under the read; the caller asks again. The destination's content is undefined for anything but HIT.
  - After a read returned or raised (cancelled too) its destinations are not touched any more. Payload that comes by
    copying is dropped from that moment on; a rendezvous receive that is in flight is waited for (it is local
    work), and if
    it does not end within a second the endpoint is closed by force, then the worker destroyed.
  - After a write returned or raised its sources are only read, never written, and stay referenced (`keep`) until UCX is
    done with them; its extents accept no further write of this client before that.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import library
from .base import Closed, DeadlineExceeded, PeerLost, TransportError, UsageError
from .endpoint import Endpoint
from .fetcher import Fetcher
from .memory import MemoryRegion
from .progress import Worker
from .ucx import error_from_status

__all__ = ["FOUND_DTYPE", "TCP_FRAGMENT_BYTES", "DataClient", "WriteStatus"]

FOUND_DTYPE = np.dtype(
    [
        ("addr", "<u8"),
        ("length", "<u8"),
        ("sum", "<u8"),
        ("generation", "<u8"),
        ("slot", "<u4"),
        ("region", "<u2"),
        ("status", "u1"),
        ("tier", "u1"),
    ]
)
"""What a look-up says of one key (kv_found of wire.h); addr is the offset within the region, all ones when unknown."""

TCP_FRAGMENT_BYTES = 192 << 10
"""Fits one TCP segment of UCX as we set it (256 KiB), so that a fragment is copied once, into its place."""

_HIT, _MISS, _UNAVAILABLE = 0, 1, 6
_OTHERWISE, _NOT_THERE = -1, -2
_CHUNK_BYTES = 2 << 20
_CHUNK_KEYS = 1024
_CHUNKS_IN_FLIGHT = 2  # about 4 MiB: more falls out of the cache
_QUIET_NS = 1_000_000_000
_DIRTY_S = 0.0005


class WriteStatus(enum.IntEnum):
    """The answer for one written value."""

    WRITTEN = 0
    REFUSED = 1
    """No live grant of this session covers it."""
    BROKEN = 2
    """The transfer failed; the extent's content is undefined."""
    UNAVAILABLE = 6


class _Chunk(NamedTuple):
    """Keys low .. high of a batch, on their way as one request; future: of its end (None: it has ended)."""

    request_id: int
    low: int
    high: int
    future: asyncio.Future[int] | None


class _Pieces(NamedTuple):
    """Native views of checked arrays; they keep the arrays alive."""

    first: Any
    addr: Any
    length: Any


class DataClient:
    """Data requests to one node under one session token.

    endpoint: to the node's data service, owned from here on. fragment_bytes: 0 = blocks come whole, in place by
    rendezvous where they are large (shared memory, RDMA); over TCP TCP_FRAGMENT_BYTES. is_checked: prove each value by
    its xxh3-64; False = the caller does.
    """

    def __init__(
        self, worker: Worker, endpoint: Endpoint, session: int, *, fragment_bytes: int = 0, is_checked: bool = True
    ) -> None:
        self._ffi, self._lib = library.binding()
        self._worker = worker
        self._endpoint = endpoint
        self._session = session
        self._fragment = fragment_bytes
        self._is_checked = is_checked
        self._fetcher = Fetcher.of(worker)
        self._dirty: dict[tuple[int, int], int] = {}
        self.error: TransportError | None = None
        self.on_lost: Callable[[TransportError], None] | None = None
        """Called once, with what UCX says, when the endpoint fails; not after `lost` or `aclose`."""
        self._waiters = 0
        endpoint.on_error = lambda e: self._failed(e.error)

    @property
    def is_open(self) -> bool:
        """False once closed, or the node is known to be gone."""
        return self.error is None

    def counters(self) -> dict[str, int]:
        """Of this worker's data clients together: requests held, messages that came too late, sums that differed,
        ...
        """
        out = self._ffi.new("uint64_t[4]")
        self._worker.native()
        self._lib.kv_fetcher_counters(self._fetcher.handle, out)
        return {
            "requests": out[0],
            "late": out[1],
            "stale": out[2],
            "malformed": out[3],
            "kept": len(self._fetcher.kept),
        }

    # ---- requests

    async def read(
        self,
        keys: bytes,
        first: NDArray[np.uint32],
        addr: NDArray[np.uint64],
        length: NDArray[np.uint64],
        *,
        keep: object = None,
        region: MemoryRegion | None = None,
        deadline_ns: int | None = None,
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]]:
        """Read n keys (16 bytes each) into memory; the value of key i goes to pieces first[i] .. first[i + 1].

        first: u32[n + 1]; addr, length: u64 addresses and bytes of the pieces; keep: what owns them; region: a
        registration that every one-piece destination lies in. Returns status u8[n], stored length u64[n] and generation
        u64[n]. Statuses: 0 HIT, 1 MISS, 2 SIZE, 4 UNMAPPED, 5 STALE, 6 UNAVAILABLE.
        """
        n = _keys_count(keys)
        pieces = self._pieces(n, first, addr, length)
        status, stored, generation = np.empty(n, np.uint8), np.zeros(n, "<u8"), np.zeros(n, "<u8")
        status.fill(_UNAVAILABLE)
        ffi = self._ffi
        memh = region.handle if region is not None else ffi.NULL
        view = ffi.from_buffer("uint8_t[]", keys)

        def start(request_id: int, low: int, high: int, spin_ns: int) -> int:
            return int(
                self._lib.kv_fetch_read(
                    self._fetcher.handle,
                    self._endpoint.native(),
                    self._session,
                    request_id,
                    high - low,
                    view + low * 16,
                    pieces.first + low,
                    pieces.addr,
                    pieces.length,
                    self._fragment,
                    self._is_checked,
                    memh,
                    spin_ns,
                )
            )

        outs = (
            ffi.from_buffer("uint8_t[]", status),
            ffi.from_buffer("uint64_t[]", stored),
            ffi.from_buffer("uint64_t[]", generation),
            None,
        )
        await self._run("read", n, pieces, start, outs, (keep, region), deadline_ns)
        return status, stored, generation

    def into_reader(self) -> Callable[[bytes, Any, int], int | Coroutine[Any, Any, int]]:
        """A function (key, into, deadline_ns) that reads one value at a fraction of `read`'s cost.

        key: exactly 16 bytes, unchecked. into: writable, contiguous plain memory of the value's length; TypeError,
        ValueError or BufferError for other objects. It gives the bytes read, -2 for a miss, -1 for anything else; or,
        where the answer has not come at once, an awaitable of the same with `read`'s promises.
        """
        lib, ffi, worker, fetcher = self._lib, self._ffi, self._worker, self._fetcher
        from_buffer, chars = ffi.from_buffer, ffi.typeof("char[]")
        status, stored = ffi.new("uint8_t *"), ffi.new("uint64_t *")
        read_one, session, fragment, is_checked = lib.kv_fetch_read_one, self._session, self._fragment, self._is_checked

        def read_into(key: bytes, into: Any, deadline_ns: int) -> int | Coroutine[Any, Any, int]:
            if self.error is not None:
                return -1
            cells = from_buffer(chars, into, True)
            size = len(cells)
            endpoint = self._endpoint.handle_or_none
            if endpoint is None or not worker.is_open:
                return _OTHERWISE
            request_id = worker.next_id()
            code = read_one(
                fetcher.handle, endpoint, session, request_id, key, cells, size, fragment, is_checked,
                0 if self._waiters else worker.inline_wait_ns, status, stored,
            )  # fmt: skip
            if code == 0:
                found = status[0]
                return size if found == _HIT else _NOT_THERE if found == _MISS else _OTHERWISE
            return _OTHERWISE if code < 0 else self._read_rest(request_id, cells, size, deadline_ns)

        return read_into

    async def _read_rest(self, request_id: int, cells: Any, size: int, deadline_ns: int) -> int:
        """The end of a `read_into` that was not answered at once. cells: keeps the destination."""
        status = self._ffi.new("uint8_t *", _UNAVAILABLE)
        chunk = _Chunk(request_id, 0, 1, self._worker.register(request_id, None, "read"))
        outs = (status, None, None, None)
        try:
            await self._run("read", 0, None, None, outs, cells, deadline_ns, flying=deque((chunk,)))
        except TransportError:
            return _OTHERWISE  # the general way says what is wrong
        found = status[0]
        return size if found == _HIT else _NOT_THERE if found == _MISS else _OTHERWISE

    async def lookup(self, keys: bytes, *, deadline_ns: int | None = None) -> NDArray[Any]:
        """Where the keys are: FOUND_DTYPE[n], with status HIT or MISS (UNAVAILABLE for those without an answer)."""
        n = _keys_count(keys)
        found = np.zeros(n, FOUND_DTYPE)
        found["status"] = _UNAVAILABLE
        ffi = self._ffi
        view = ffi.from_buffer("uint8_t[]", keys)

        def start(request_id: int, low: int, high: int, spin_ns: int) -> int:
            return int(
                self._lib.kv_fetch_lookup(
                    self._fetcher.handle,
                    self._endpoint.native(),
                    self._session,
                    request_id,
                    high - low,
                    view + low * 16,
                    spin_ns,
                )
            )

        outs = (None, None, None, ffi.from_buffer("kv_found[]", found))
        await self._run("look-up", n, None, start, outs, None, deadline_ns)
        return found

    async def write(
        self,
        regions: NDArray[np.uint16],
        offsets: NDArray[np.uint64],
        first: NDArray[np.uint32],
        addr: NDArray[np.uint64],
        length: NDArray[np.uint64],
        *,
        keep: object = None,
        region: MemoryRegion | None = None,
        deadline_ns: int | None = None,
    ) -> NDArray[np.uint8]:
        """Write n values, gathered from their pieces, into granted extents (regions u16[n], offsets u64[n]).

        Returns WriteStatus u8[n]. Waits, at most until the deadline, for earlier, abandoned writes to these extents.
        """
        n = len(regions)
        pieces = self._pieces(n, first, addr, length)
        where, at = np.ascontiguousarray(regions, "<u2"), np.ascontiguousarray(offsets, "<u8")
        if where.shape != at.shape:
            raise UsageError(f"{where.shape} regions, {at.shape} offsets")
        extents = list(zip(where.tolist(), at.tolist(), strict=True))
        status = np.empty(n, np.uint8)
        status.fill(_UNAVAILABLE)
        if self._dirty and not await self._wait_for_dirty(extents, deadline_ns):
            return status
        ffi = self._ffi
        memh = region.handle if region is not None else ffi.NULL
        p_where, p_at = ffi.from_buffer("uint16_t[]", where), ffi.from_buffer("uint64_t[]", at)

        def start(request_id: int, low: int, high: int, spin_ns: int) -> int:
            return int(
                self._lib.kv_fetch_write(
                    self._fetcher.handle,
                    self._endpoint.native(),
                    self._session,
                    request_id,
                    high - low,
                    pieces.first + low,
                    pieces.addr,
                    pieces.length,
                    p_where + low,
                    p_at + low,
                    self._fragment,
                    memh,
                    spin_ns,
                )
            )

        def let_go(request_id: int, low: int, high: int) -> None:
            for extent in extents[low:high]:
                self._dirty[extent] = request_id

        outs = (ffi.from_buffer("uint8_t[]", status), None, None, None)
        await self._run("write", n, pieces, start, outs, (keep, region), deadline_ns, let_go)
        return status

    async def _wait_for_dirty(self, extents: list[tuple[int, int]], deadline_ns: int | None) -> bool:
        """Wait until no abandoned write to these extents is in flight; False: the node or the time is gone first."""
        while True:
            self._dirty = {extent: i for extent, i in self._dirty.items() if i in self._fetcher.kept}
            if self._dirty.keys().isdisjoint(extents):
                return True
            if self.error is not None or (deadline_ns is not None and time.monotonic_ns() >= deadline_ns):
                return False
            self._worker.progress()
            await asyncio.sleep(_DIRTY_S)

    # ---- running a batch in chunks

    async def _run(
        self,
        what: str,
        n: int,
        pieces: _Pieces | None,
        start: Callable[[int, int, int, int], int] | None,
        outs: tuple[Any, ...],
        keep: object,
        deadline_ns: int | None,
        let_go: Callable[[int, int, int], None] | None = None,
        flying: deque[_Chunk] | None = None,
    ) -> None:
        """Start the chunks of n keys, about 4 MiB in flight, and collect their results.

        flying: chunks that were started before.
        """
        flying = deque() if flying is None else flying
        low = 0
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
                    future = self._worker.register(request_id, None, what) if code else None
                    flying.append(_Chunk(request_id, low, high, future))
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

    def _take(self, chunk: _Chunk, outs: tuple[Any, ...]) -> tuple[int, int]:
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
        flying: deque[_Chunk],
        outs: tuple[Any, ...],
        keep: object,
        let_go: Callable[[int, int, int], None] | None,
    ) -> None:
        """Let go of what is on its way; returns once no destination is touched any more, whatever is cancelled
        meanwhile.
        """
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
        task = asyncio.ensure_future(self._quiesce(receiving))
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue  # bounded by _quiesce; the caller's own exception is on its way already
        task.result()

    async def _quiesce(self, receiving: list[int]) -> None:
        """Wait until these requests' receives are over; by force if need be."""
        worker, kept = self._worker, self._fetcher.kept
        until = time.monotonic_ns() + _QUIET_NS
        while worker.is_open and any(i in kept for i in receiving):
            if time.monotonic_ns() > until:
                break
            worker.progress()
            await asyncio.sleep(0)
        else:
            return
        await self._endpoint.aclose(force=True, deadline_ns=time.monotonic_ns() + _QUIET_NS)
        if worker.is_open:
            worker.progress()
        if any(i in kept for i in receiving):
            worker.abort(PeerLost("a receive could not be ended; the worker was destroyed to protect its memory"))

    # ---- the end

    def _failed(self, reason: TransportError | None) -> None:
        """UCX's news of the endpoint's end."""
        was_open = self.is_open
        self.lost(reason)
        if was_open and self.on_lost is not None and self.error is not None:
            self.on_lost(self.error)

    def lost(self, reason: TransportError | None = None) -> None:
        """The node is gone (the control connection's news, or UCX's): every key without an answer is UNAVAILABLE
        now.
        """
        if self.error is not None:
            return
        self.error = reason or PeerLost("the node is gone")
        handle = self._endpoint.handle_or_none
        if handle is not None and self._worker.is_open and self._fetcher.handle is not None:
            self._lib.kv_fetch_endpoint_gone(self._fetcher.handle, handle)
            self._worker.kick()

    async def aclose(self, *, deadline_ns: int | None = None) -> None:
        """End every request (UNAVAILABLE) and close the endpoint. Idempotent."""
        self.lost(Closed("this data client is closed"))
        await self._endpoint.aclose(force=True, deadline_ns=deadline_ns)

    def _pieces(self, n: int, first: Any, addr: Any, length: Any) -> _Pieces:
        first = np.ascontiguousarray(first, "<u4")
        addr = np.ascontiguousarray(addr, "<u8")
        length = np.ascontiguousarray(length, "<u8")
        if first.shape != (n + 1,) or addr.shape != length.shape or addr.ndim != 1:
            raise UsageError(
                f"{n} values: first is u32[{n + 1}], not {first.shape}; {addr.shape} and {length.shape} pieces"
            )
        from_buffer = self._ffi.from_buffer
        pieces = _Pieces(
            from_buffer("uint32_t[]", first), from_buffer("uint64_t[]", addr), from_buffer("uint64_t[]", length)
        )
        if not self._lib.kv_pieces_fit(n, pieces.first, len(addr)):
            raise UsageError("first does not grow from value to value, or ends past the pieces")
        return pieces


def _keys_count(keys: bytes) -> int:
    if len(keys) % 16:
        raise UsageError(f"{len(keys)} bytes of keys; a key has 16")
    return len(keys) // 16
