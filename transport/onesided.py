"""Reading a peer's lent memory one-sidedly: the peer's processor takes no part where the lane has native RMA.

Promises
  - After `read` returned or raised (cancelled, past its deadline), nothing writes into its destinations any more (see
    settling.py).
  - Nothing is read outside the region that the peer lent.
The bytes prove nothing by themselves: the caller checks their sum, since the peer may have reused the place meanwhile.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import UsageError
from .endpoint import Endpoint
from .memory import MemoryRegion, RemoteKey
from .settling import settled
from .ucx import error_from_status

__all__ = ["RemoteReader"]


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
        memh = ffi.NULL if region is None else region.native()
        op_id = worker.next_id()
        native, key = endpoint.native(), self._key.native()
        status = lib.kv_transfer(native, False, len(local), *pointers, key, memh, op_id, worker.inline_wait_ns)
        if status == 0:
            return
        if status < 0:
            raise error_from_status(status, "reading the peer's memory")
        future = worker.register(op_id, (keep, region, self._key, arrays), "get")
        try:
            await worker.wait(future, "get", deadline_ns)
        except BaseException:
            await settled(worker, lambda: worker.is_pending(op_id), self._close_endpoint)
            raise
        finally:
            del future  # see Worker.wait

    async def _close_endpoint(self, deadline_ns: int | None) -> None:
        await self._endpoint.aclose(force=True, deadline_ns=deadline_ns)

    def close(self) -> None:
        """Let the remote key go. Idempotent."""
        self._key.close()
