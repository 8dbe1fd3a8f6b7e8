"""Registered memory and the keys by which peers reach it.

A region pins its buffer (the object that owns the memory) until it is closed. A remote key belongs to one endpoint
and is destroyed before it. Both may be closed under an operation: nothing new is started with them, and UCX loses them
when the last operation that uses them is complete, since it reads both until then.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import library
from .base import Closed, UsageError
from .ucx import Context, error_from_status

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["MemoryRegion", "RemoteKey"]

_KEY_BYTES = 4096


class MemoryRegion:
    """Memory registered with a context: the caller's (`register`), or allocated by UCX (`allocate`).

    address and length_bytes say where it is; `handle` goes with every operation on it.
    """

    def __init__(self, context: Context, address: int, length_bytes: int, keep: object) -> None:
        if length_bytes <= 0:
            raise UsageError(f"a memory region has at least one byte, not {length_bytes}")
        self._ffi, self._lib = library.binding()
        self._context = context
        self._keep = keep
        out, base = self._ffi.new("ucp_mem_h *"), self._ffi.new("uint64_t *")
        native = context.acquire()
        status = self._lib.kv_memory_map(native, address, length_bytes, out, base)
        if status != 0:
            context.release()
            raise error_from_status(status, f"registering {length_bytes} bytes of memory")
        self.handle = out[0]
        self.address: int = base[0] if address == 0 else address
        self.length_bytes = length_bytes
        self.is_allocated = address == 0

    @classmethod
    def register(cls, context: Context, buffer: object) -> MemoryRegion:
        """Register a C-contiguous buffer; it stays referenced until the region is closed."""
        ffi, _ = library.binding()
        try:
            view = ffi.from_buffer("char[]", buffer)
        except (TypeError, BufferError) as exc:
            raise UsageError(f"memory to register must be a contiguous buffer: {exc}") from exc
        return cls(context, int(ffi.cast("uintptr_t", view)), len(view), (buffer, view))

    @classmethod
    def at(cls, context: Context, address: int, length_bytes: int, keep: object = None) -> MemoryRegion:
        """Register memory by address; `keep` stays referenced until the region is closed."""
        if address <= 0:
            raise UsageError(f"no memory at address {address}")
        return cls(context, address, length_bytes, keep)

    @classmethod
    def allocate(cls, context: Context, length_bytes: int) -> MemoryRegion:
        """Let UCX allocate it: over shared memory such a region can be mapped by peers (`RemoteKey.pointer`)."""
        return cls(context, 0, length_bytes, None)

    @property
    def view(self) -> memoryview:
        """The memory itself, writable; dead once the region is closed when UCX allocated it."""
        self.native()
        return memoryview(self._ffi.buffer(self._ffi.cast("char *", self.address), self.length_bytes)).cast("B")

    def native(self) -> Any:
        """The native handle, for operations on this memory. Raises Closed."""
        if self.handle is None:
            raise Closed("this memory region is closed")
        return self.handle

    def pack_key(self) -> bytes:
        """The remote key, packed for the wire."""
        room = self._ffi.new("char[]", _KEY_BYTES)
        length = self._lib.kv_rkey_pack(self._context.handle, self.native(), room, _KEY_BYTES)
        if length < 0:
            raise error_from_status(length, "packing a remote key")
        if length > _KEY_BYTES:
            raise UsageError(f"remote key of {length} bytes")
        return bytes(self._ffi.buffer(room, length))

    def close(self) -> None:
        """Deregister; once the operations in flight on it are complete. Idempotent."""
        if self.handle is None or self._context.guard.is_forked:
            return
        handle, self.handle = self.handle, None
        self._end(handle)

    def _end(self, handle: Any) -> None:
        for worker in self._context.workers:
            if worker.keeps(self):
                worker.once_let_go(self, lambda: self._end(handle), before_end=False)
                return
        self._lib.kv_memory_unmap(self._context.handle, handle)
        self._context.release()
        self._keep = None

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class RemoteKey:
    """A peer's memory region as seen through one endpoint."""

    def __init__(self, endpoint: Endpoint, packed: bytes) -> None:
        self._ffi, self._lib = library.binding()
        self._endpoint = endpoint
        out = self._ffi.new("ucp_rkey_h *")
        status = self._lib.kv_rkey_unpack(endpoint.native(), packed, out)
        if status != 0:
            raise error_from_status(status, f"unpacking a remote key of {len(packed)} bytes")
        self.handle = out[0]
        endpoint.keys.add(self)

    def native(self) -> Any:
        """The native handle, for operations on the peer's memory. Raises Closed."""
        if self.handle is None:
            raise Closed("this remote key is destroyed")
        return self.handle

    def pointer(self, remote_address: int) -> int:
        """Local address of the peer's memory, where it can be mapped (same host, allocated by UCX). Raises UcxError."""
        out = self._ffi.new("uint64_t *")
        status = self._lib.kv_rkey_pointer(self.native(), remote_address, out)
        if status != 0:
            raise error_from_status(status, "mapping the peer's memory")
        return int(out[0])

    def close(self) -> None:
        """Destroy the key, once the operations that use it are complete; pointers got from it are dead. Idempotent."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        self._endpoint.keys.discard(self)
        worker = self._endpoint.worker
        if worker.keeps(self):
            worker.once_let_go(self, lambda: self._lib.kv_rkey_destroy(handle), before_end=True)
        else:
            self._lib.kv_rkey_destroy(handle)
