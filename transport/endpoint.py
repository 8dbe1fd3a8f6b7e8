"""Endpoints and listeners: sending, one-sided transfers, closing, and the news of a peer's failure.

Error modes, as UCX means them. NONE: shared memory at full speed, a dead peer is never noticed here (the control
connection tells), and an endpoint cannot be closed by force. PEER: a dead peer fails every pending operation within the
keepalive bound, and `aclose(force=True)` ends every operation with Closed; same-host traffic then goes over TCP.

Both sides make an endpoint and close it. One made on one side alone leaves UCX's own on the other side, and over
TCP its
connection, until that worker ends.

Over TCP a put can land after the endpoint was closed by force (openucx/ucx#11918): the layers above use messages there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import library
from .base import Closed, PeerLost, TransportError, UsageError
from .memory import MemoryRegion, RemoteKey
from .progress import Worker
from .ucx import checked_address, error_from_status

__all__ = ["SEND_EAGER", "SEND_RENDEZVOUS", "Endpoint", "Listener"]

SEND_EAGER = 2
SEND_RENDEZVOUS = 4
_CLOSE_S = 1.0


class Endpoint:
    """A way to one peer's worker. Make it with `connect`, `connect_socket` or from a Listener.

    error: why it failed, once it did; `on_error` is called in the loop at that moment.
    """

    def __init__(self, worker: Worker, handle: Any, is_peer_mode: bool) -> None:
        self._ffi, self._lib = library.binding()
        self.worker = worker
        self.is_peer_mode = is_peer_mode
        self._handle = handle
        self.identity = int(self._ffi.cast("uintptr_t", handle))
        self.error: TransportError | None = None
        self.on_error: Callable[[Endpoint], None] | None = None
        self.keys: set[RemoteKey] = set()
        """Remote keys unpacked on this endpoint; destroyed when it closes."""
        worker.endpoints[self.identity] = self

    @classmethod
    def connect(cls, worker: Worker, address: bytes, *, is_peer_mode: bool) -> Endpoint:
        """An endpoint to the worker with this address. Raises PeerLost, UcxError, UsageError (too many endpoints)."""
        checked = checked_address(address)
        return cls._make(worker, is_peer_mode, "connecting to a worker address", "address", checked)

    @classmethod
    def connect_socket(cls, worker: Worker, host: str, port: int, *, is_peer_mode: bool = True) -> Endpoint:
        """An endpoint through a Listener; host is an IPv4 or IPv6 address. Needs tcp or rdmacm among the transports."""
        return cls._make(worker, is_peer_mode, f"connecting to {host} port {port}", "socket", host.encode(), port)

    @classmethod
    def _make(cls, worker: Worker, is_peer_mode: bool, what: str, way: str, *target: Any) -> Endpoint:
        ffi, lib = library.binding()
        out = ffi.new("kv_endpoint **")
        status = getattr(lib, f"kv_endpoint_from_{way}")(worker.native(), *target, is_peer_mode, out)
        if status != 0:
            raise error_from_status(status, what)
        worker.kick()
        return cls(worker, out[0], is_peer_mode)

    # ---- facts

    @property
    def is_open(self) -> bool:
        """False once closed or failed."""
        return self._handle is not None and self.error is None

    def native(self) -> Any:
        """The native handle; raises what the endpoint failed with, or Closed."""
        self.worker.native()
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        if self._handle is None:
            raise Closed("this endpoint is closed")
        return self._handle

    @property
    def binding(self) -> tuple[Any, Any]:
        """(ffi, lib) of the native module, for the modules that build on endpoints."""
        return self._ffi, self._lib

    @property
    def handle_or_none(self) -> Any:
        """The native handle even of a failed endpoint; None once closed."""
        return self._handle if self.worker.is_open else None

    def join(self, other: Endpoint) -> None:
        """Let a data client's blocks go over `other`, to the same peer, too. Raises UsageError (more than 7)."""
        if self._lib.kv_endpoint_join(self.native(), other.native()) != 0:
            raise UsageError("an endpoint takes 7 further connections at most")

    def unpack_key(self, packed: bytes) -> RemoteKey:
        """The peer's memory region behind a packed key. Raises UcxError for a key that does not fit this endpoint."""
        return RemoteKey(self, packed)

    # ---- messages

    async def send(
        self,
        am_id: int,
        header: bytes = b"",
        payload: Any = None,
        *,
        region: MemoryRegion | None = None,
        flags: int = 0,
        deadline_ns: int | None = None,
    ) -> None:
        """Send an active message: a header of up to 84 bytes, and a payload (a buffer or a list of buffers).

        Ends when the payload may be reused. It is borrowed until then, also when this call is cancelled (UCX cannot
        cancel a send: what the buffer then holds is sent). region: the registration the one buffer lies in.
        """
        buffers = [] if payload is None else payload if isinstance(payload, list) else [payload]
        views = [self._ffi.from_buffer("char[]", buffer) for buffer in buffers]
        pieces = self._ffi.new("kv_iov[]", max(1, len(views)))
        for piece, view in zip(pieces, views, strict=False):
            piece.addr, piece.len = int(self._ffi.cast("uintptr_t", view)), len(view)
        memh = region.native() if region is not None else self._ffi.NULL
        worker = self.worker
        op_id = worker.next_id()
        status = self._lib.kv_message_send(
            self.native(), am_id, header, len(header), len(views), pieces, flags, memh, op_id, worker.inline_wait_ns
        )
        await worker.finish(status, op_id, (views, region), f"sending message {am_id}", deadline_ns)

    # ---- one-sided

    async def get(
        self,
        into: Any,
        remote_address: int,
        key: RemoteKey,
        *,
        region: MemoryRegion | None = None,
        deadline_ns: int | None = None,
    ) -> None:
        """Read the peer's memory into a writable buffer, whole; `into` is borrowed until UCX is done with it."""
        view = self._ffi.from_buffer("char[]", into, require_writable=True)
        await self._one(False, view, into, remote_address, key, region, deadline_ns)

    async def put(
        self,
        data: Any,
        remote_address: int,
        key: RemoteKey,
        *,
        region: MemoryRegion | None = None,
        deadline_ns: int | None = None,
    ) -> None:
        """Write a buffer to the peer's memory; `flush` tells when it is there. Never over TCP (see the module)."""
        view = self._ffi.from_buffer("char[]", data)
        await self._one(True, view, data, remote_address, key, region, deadline_ns)

    async def _one(
        self,
        is_put: bool,
        view: Any,
        keep: Any,
        remote: int,
        key: RemoteKey,
        region: MemoryRegion | None,
        deadline_ns: int | None,
    ) -> None:
        address = np.array([int(self._ffi.cast("uintptr_t", view))], dtype="<u8")
        length = np.array([len(view)], dtype="<u8")
        await self.transfer(
            is_put,
            address,
            length,
            np.array([remote], dtype="<u8"),
            key,
            region=region,
            keep=(view, keep),
            deadline_ns=deadline_ns,
        )

    async def transfer(
        self,
        is_put: bool,
        local: np.ndarray[Any, np.dtype[np.uint64]],
        length: np.ndarray[Any, np.dtype[np.uint64]],
        remote: np.ndarray[Any, np.dtype[np.uint64]],
        key: RemoteKey,
        *,
        region: MemoryRegion | None = None,
        keep: object = None,
        deadline_ns: int | None = None,
    ) -> None:
        """n gets (or puts) with one completion: local, length, remote are u64[n] addresses and bytes.

        keep: what owns the local memory; referenced until UCX completes. Raises PeerLost, Closed, UcxError; some of the
        transfers may have happened then.
        """
        if not (len(local) == len(length) == len(remote)):
            raise UsageError(f"{len(local)} local addresses, {len(length)} lengths, {len(remote)} remote addresses")
        arrays = [np.ascontiguousarray(a, dtype="<u8") for a in (local, length, remote)]
        pointers = [self._ffi.from_buffer("uint64_t[]", a) for a in arrays]
        memh = region.native() if region is not None else self._ffi.NULL
        worker = self.worker
        op_id = worker.next_id()
        status = self._lib.kv_transfer(
            self.native(), is_put, len(local), *pointers, key.native(), memh, op_id, worker.inline_wait_ns
        )
        await worker.finish(status, op_id, (keep, region, key), "put" if is_put else "get", deadline_ns)

    async def flush(self, *, deadline_ns: int | None = None) -> None:
        """Ends when every operation submitted before is complete at the peer."""
        worker = self.worker
        op_id = worker.next_id()
        status = self._lib.kv_flush(self.native(), op_id, worker.inline_wait_ns)
        await worker.finish(status, op_id, None, "flush", deadline_ns)

    # ---- the end

    def _failed(self, status: int) -> None:
        """UCX said that the peer is gone."""
        if self.error is None:
            reason = error_from_status(status, "the peer of this endpoint is gone")
            self.error = reason if isinstance(reason, PeerLost) else PeerLost(str(reason))
            if self.on_error is not None:
                self.on_error(self)

    def _dead(self, reason: TransportError) -> None:
        """The worker goes away with this endpoint open."""
        for key in list(self.keys):
            key.close()
        self._handle = None
        self.worker.endpoints.pop(self.identity, None)
        if self.error is None:
            self.error = reason

    async def aclose(self, *, deadline_ns: int | None = None, force: bool = False) -> bool:
        """Close; without force what was sent is flushed first. True when UCX confirmed it. Idempotent.

        force (PEER mode only): every pending operation ends with Closed. In NONE mode, or when a flush passes the
        deadline (1 s without one), the endpoint is left to the worker's end and False is returned.
        """
        if self._handle is None:
            return True
        handle = self._handle
        deadline = time.monotonic_ns() + int(_CLOSE_S * 1e9) if deadline_ns is None else deadline_ns
        for key in list(self.keys):
            key.close()
        use_force = self.is_peer_mode and (force or self.error is not None)
        status = self._lib.kv_endpoint_close(handle, use_force)
        if status < 0:
            raise error_from_status(status, "closing an endpoint")
        self._handle = None
        worker = self.worker
        try:
            while worker.handle is not None and not self._lib.kv_endpoint_is_closed(handle):
                if time.monotonic_ns() >= deadline:
                    return False
                worker.progress()
                await asyncio.sleep(0 if worker.inflight_count else 0.0005)
            worker.kick()
            return True
        finally:
            if worker.handle is not None:
                worker.progress()
                if self._lib.kv_endpoint_is_closed(handle):
                    self._lib.kv_endpoint_free(handle)
            worker.endpoints.pop(self.identity, None)


class Listener:
    """Accepts endpoints on an address of this host (tcp or rdmacm needed); an alternative to worker addresses.

    on_endpoint is called in the loop with each new endpoint.
    """

    def __init__(
        self,
        worker: Worker,
        host: str,
        port: int,
        on_endpoint: Callable[[Endpoint], None],
        *,
        is_peer_mode: bool = True,
    ) -> None:
        self._ffi, self._lib = library.binding()
        self._worker = worker
        self._on_endpoint = on_endpoint
        self._is_peer_mode = is_peer_mode
        out, bound = self._ffi.new("ucp_listener_h *"), self._ffi.new("uint16_t *")
        status = self._lib.kv_listen(worker.native(), host.encode(), port, out, bound)
        if status != 0:
            raise error_from_status(status, f"listening on {host} port {port}")
        self._handle = out[0]
        self.port: int = bound[0]
        worker.connect_handlers.append(self._accept)

    def _accept(self, request: int) -> None:
        out = self._ffi.new("kv_endpoint **")
        status = self._lib.kv_endpoint_from_request(self._worker.native(), request, self._is_peer_mode, out)
        if status == 0:
            self._on_endpoint(Endpoint(self._worker, out[0], self._is_peer_mode))

    def close(self) -> None:
        """Stop listening; endpoints stay. Idempotent."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._lib.kv_listener_close(handle)
            self._worker.connect_handlers.remove(self._accept)
