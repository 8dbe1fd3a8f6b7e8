"""Reading a peer's lent memory one-sidedly: the peer's processor takes no part where the lane has native RMA.

Promises
  - After `read` returned or raised (cancelled, past its deadline), nothing writes into its destinations any more.
  UCX cannot
    cancel a get: what is in flight is waited for, and if it does not end within a second the endpoint is closed by
    force,
    then the worker destroyed.
  - Nothing is read outside the region that the peer lent.
The bytes prove nothing by themselves: the caller checks their sum, since the peer may have reused the place meanwhile.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from .base import PeerLost, UsageError
from .endpoint import Endpoint
from .memory import MemoryRegion, RemoteKey
from .ucx import error_from_status

__all__ = ["RemoteReader"]

_SETTLE_NS = 1_000_000_000


class RemoteReader:
    """One region of a peer. base: its address there; size_bytes: its length; key: packed by the peer."""

    def __init__(self, endpoint: Endpoint, key: bytes, base: int, size_bytes: int) -> None:
        self._endpoint = endpoint
        self._worker = endpoint.worker
        self._key: RemoteKey = endpoint.unpack_key(key)
        self._base = base
        self._size = size_bytes

    async def read(
        self,
        local: NDArray[np.uint64],
        length: NDArray[np.uint64],
        offsets: NDArray[np.uint64],
        *,
        keep: object,
        region: MemoryRegion | None = None,
        deadline_ns: int | None = None,
    ) -> None:
        """n gets with one completion: local u64[n] addresses, length u64[n] bytes, offsets u64[n] into the region.

        keep: what owns the destinations. region: a registration they all lie in. Raises UsageError (outside the
        region),
        PeerLost, Closed, DeadlineExceeded, UcxError; the destinations' content is undefined then.
        """
        if len(offsets) and (int(offsets.max()) > self._size or bool((length > self._size - offsets).any())):
            raise UsageError(f"a read past the end of the peer's region of {self._size} bytes")
        endpoint, worker = self._endpoint, self._worker
        ffi, lib = endpoint.binding
        arrays = [np.ascontiguousarray(a, "<u8") for a in (local, length, offsets + np.uint64(self._base))]
        pointers = [ffi.from_buffer("uint64_t[]", a) for a in arrays]
        memh = ffi.NULL if region is None else region.handle
        op_id = worker.next_id()
        native, key = endpoint.native(), self._key.handle
        status = lib.kv_transfer(native, False, len(local), *pointers, key, memh, op_id, worker.inline_wait_ns)
        if status == 0:
            return
        if status < 0:
            raise error_from_status(status, "reading the peer's memory")
        future = worker.register(op_id, (keep, region, self._key, arrays), "get")
        try:
            await worker.wait(future, "get", deadline_ns)
        except BaseException:
            await self._settle(op_id)
            raise

    async def _settle(self, op_id: int) -> None:
        """Wait until the operation has let go of its memory, whatever is cancelled meanwhile."""
        if not self._worker.is_pending(op_id):
            return
        task = asyncio.ensure_future(self._end(op_id))
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue  # bounded by _end; the caller's own exception is on its way already
        task.result()

    async def _end(self, op_id: int) -> None:
        worker, until = self._worker, time.monotonic_ns() + _SETTLE_NS
        while worker.is_open and worker.is_pending(op_id):
            if time.monotonic_ns() > until:
                break
            worker.progress()
            await asyncio.sleep(0)
        else:
            return
        await self._endpoint.aclose(force=True, deadline_ns=time.monotonic_ns() + _SETTLE_NS)
        if worker.is_open:
            worker.progress()
        if worker.is_open and worker.is_pending(op_id):
            worker.abort(PeerLost("a get could not be ended; the worker was destroyed to protect its memory"))

    def close(self) -> None:
        """Let the remote key go. Idempotent."""
        self._key.close()
