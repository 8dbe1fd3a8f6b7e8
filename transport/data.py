"""The client's side of the data service: look-ups, reads into the caller's memory, writes into granted extents.

Promises
  - Every call ends within its deadline. A node that is gone, or does not answer in time, is a status (UNAVAILABLE) of
    the keys it has not answered, not an exception; keys already answered keep their answer.
  - Requests are asked in one epoch of the node, the one that what the caller knows of it is about. An answer of another
    epoch is UNAVAILABLE and is told once (`on_other_epoch`); bytes that came by themselves are a HIT in any.
  - HIT means that the destination holds bytes whose xxh3 equals the producer's. A sum that differs is STALE: the extent
    was reused under the read; the caller asks again. The destination's content is undefined for anything but HIT.
  - After a read returned or raised (cancelled too) its destinations are not touched any more (see requests.py).
  - After a write returned or raised its sources are only read, never written, and stay referenced (`keep`) until UCX is
    done with them; its extents accept no further write of this client before what was sent has arrived.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import TransportError, UsageError
from .endpoint import Endpoint
from .memory import MemoryRegion
from .progress import Worker
from .requests import OTHER_EPOCH, UNAVAILABLE, Chunk, Requests

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

_HIT, _MISS, _UNMAPPED = 0, 1, 4
_OTHERWISE = -1
_FAILURES = {_MISS: -2, _UNMAPPED: -3}
_DIRTY_S = 0.0005
_DIRTY_MAX = 4096
_ANY_KEY = bytes(range(16))


class WriteStatus(enum.IntEnum):
    """The answer for one written value."""

    WRITTEN = 0
    REFUSED = 1
    """No live grant of this session covers it."""
    BROKEN = 2
    """The transfer failed; the extent's content is undefined."""
    UNAVAILABLE = 6


class DataClient(Requests):
    """Data requests to one node under one session token, in one epoch of it.

    endpoint: to the node's data service; others: further connections to it that blocks go over in turns. All are owned
    from here on, and the first that fails ends this client. fragment_bytes: 0 = blocks come whole, in place by
    rendezvous where they are large (shared memory, RDMA); over TCP TCP_FRAGMENT_BYTES. is_checked: prove each value by
    its xxh3-64; False = the caller does. epoch: the node's table epoch that answers must be of.
    """

    def __init__(
        self,
        worker: Worker,
        endpoint: Endpoint,
        session: int,
        epoch: int,
        *,
        others: Sequence[Endpoint] = (),
        fragment_bytes: int = 0,
        is_checked: bool = True,
    ) -> None:
        super().__init__(worker, endpoint, others)
        self._session = session
        self._epoch = epoch
        self._fragment = fragment_bytes
        self._is_checked = is_checked
        self._dirty: dict[tuple[int, int], int] = {}
        """Extents of abandoned writes, with the request: its fragments may still be on their way."""

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
        status.fill(UNAVAILABLE)
        ffi = self._ffi
        memh = region.native() if region is not None else ffi.NULL
        view = ffi.from_buffer("uint8_t[]", keys)

        def start(request_id: int, low: int, high: int, spin_ns: int) -> int:
            return int(
                self._lib.kv_fetch_read(
                    self._fetcher.handle,
                    self._endpoint.native(),
                    self._session,
                    self._epoch,
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
        self._without_other_epochs(status)
        return status, stored, generation

    def into_reader(self) -> Callable[[bytes, Any, int], int | Coroutine[Any, Any, int]]:
        """A function (key, into, deadline_ns) that reads one value at a fraction of `read`'s cost.

        key: exactly 16 bytes, unchecked. into: writable, contiguous plain memory of the value's length; TypeError,
        ValueError or BufferError for other objects. It gives the bytes read, -2 for a miss, -3 for a value that is not
        in the node's memory, -1 for anything else; or, where the answer has not come at once, an awaitable of the same
        with `read`'s promises.
        """
        lib, ffi, worker, fetcher = self._lib, self._ffi, self._worker, self._fetcher
        from_buffer, chars = ffi.from_buffer, ffi.typeof("char[]")
        status, stored = ffi.new("uint8_t *"), ffi.new("uint64_t *")
        read_one, session, epoch = lib.kv_fetch_read_one, self._session, self._epoch
        fragment, is_checked = self._fragment, self._is_checked

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
                fetcher.handle, endpoint, session, epoch, request_id, key, cells, size, fragment, is_checked,
                0 if self._waiters else worker.inline_wait_ns, status, stored,
            )  # fmt: skip
            if code == 0:
                found = status[0]
                return size if found == _HIT else self._no_hit(found)
            return _OTHERWISE if code < 0 else self._read_rest(request_id, cells, size, deadline_ns)

        return read_into

    async def _read_rest(self, request_id: int, cells: Any, size: int, deadline_ns: int) -> int:
        """The end of a `read_into` that was not answered at once. cells: keeps the destination."""
        status = self._ffi.new("uint8_t *", UNAVAILABLE)
        outs = (status, None, None, None)
        flying = deque((Chunk(request_id, 0, 1, self._worker.register(request_id, None, "read")),))
        try:
            await self._run("read", 0, None, None, outs, cells, deadline_ns, flying=flying)
        except TransportError:
            return _OTHERWISE  # the general way says what is wrong
        return size if status[0] == _HIT else self._no_hit(status[0])

    def _no_hit(self, status: int) -> int:
        if status == OTHER_EPOCH:
            self._saw_other_epoch()
        return _FAILURES.get(status, _OTHERWISE)

    async def lookup(self, keys: bytes, *, deadline_ns: int | None = None) -> NDArray[Any]:
        """Where the keys are: FOUND_DTYPE[n], with status HIT or MISS (UNAVAILABLE for those without an answer)."""
        return await self._lookup_over(self._endpoint, keys, deadline_ns)

    async def _lookup_over(self, endpoint: Endpoint, keys: bytes, deadline_ns: int | None) -> NDArray[Any]:
        n = _keys_count(keys)
        found, status = np.zeros(n, FOUND_DTYPE), np.zeros(n, np.uint8)
        found["status"] = UNAVAILABLE
        ffi = self._ffi
        view = ffi.from_buffer("uint8_t[]", keys)

        def start(request_id: int, low: int, high: int, spin_ns: int) -> int:
            return int(
                self._lib.kv_fetch_lookup(
                    self._fetcher.handle,
                    endpoint.native(),
                    self._session,
                    self._epoch,
                    request_id,
                    high - low,
                    view + low * 16,
                    spin_ns,
                )
            )

        outs = (ffi.from_buffer("uint8_t[]", status), None, None, ffi.from_buffer("kv_found[]", found))
        await self._run("look-up", n, None, start, outs, None, deadline_ns)
        self._without_other_epochs(status)
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
        status.fill(UNAVAILABLE)
        if self._dirty and not await self._clean(extents, deadline_ns):
            return status
        ffi = self._ffi
        memh = region.native() if region is not None else ffi.NULL
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

    def value_writer(self) -> Callable[[int, int, int, int, object, int], bool | Coroutine[Any, Any, bool]]:
        """A function (region, offset, address, bytes, keep, deadline_ns) that writes one piece, cheaper than `write`.

        It says whether the value was WRITTEN, or gives an awaitable of that, with `write`'s promises.
        """
        ffi, lib, worker, fetcher = self._ffi, self._lib, self._worker, self._fetcher
        first, receives, status = ffi.new("uint32_t[]", [0, 1]), ffi.new("uint32_t *"), ffi.new("uint8_t *")
        addr, length = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        where, at = ffi.new("uint16_t *"), ffi.new("uint64_t *")
        null, session, fragment = ffi.NULL, self._session, self._fragment

        def write_one(
            region: int, offset: int, address: int, nbytes: int, keep: object, deadline_ns: int
        ) -> bool | Coroutine[Any, Any, bool]:
            endpoint = self._endpoint.handle_or_none
            if self.error is not None or endpoint is None:
                return False
            if (region, offset) in self._dirty:
                return write_later(region, offset, address, nbytes, keep, deadline_ns)
            addr[0], length[0], where[0], at[0] = address, nbytes, region, offset
            request_id = worker.next_id()
            code = lib.kv_fetch_write(
                fetcher.handle, endpoint, session, request_id, 1, first, addr, length, where, at, fragment, null,
                0 if self._waiters else worker.inline_wait_ns,
            )  # fmt: skip
            if code > 0:
                return self._write_rest(request_id, (region, offset), keep, deadline_ns)
            if code < 0:
                return False
            if lib.kv_fetch_take(fetcher.handle, request_id, status, null, null, null, receives):
                fetcher.kept[request_id] = keep  # answered, and UCX still reads the source
            return bool(status[0] == WriteStatus.WRITTEN)

        async def write_later(
            region: int, offset: int, address: int, nbytes: int, keep: object, deadline_ns: int
        ) -> bool:
            if not await self._clean([(region, offset)], deadline_ns):
                return False
            done = write_one(region, offset, address, nbytes, keep, deadline_ns)
            return done if isinstance(done, bool) else await done

        return write_one

    async def _write_rest(self, request_id: int, extent: tuple[int, int], keep: object, deadline_ns: int) -> bool:
        """The end of a write that was not answered at once."""
        status = self._ffi.new("uint8_t *", UNAVAILABLE)
        flying = deque((Chunk(request_id, 0, 1, self._worker.register(request_id, None, "write")),))

        def let_go(request_id: int, low: int, high: int) -> None:
            self._dirty[extent] = request_id

        outs = (status, None, None, None)
        await self._run("write", 0, None, None, outs, keep, deadline_ns, let_go, flying)
        return bool(status[0] == WriteStatus.WRITTEN)

    async def _clean(self, extents: list[tuple[int, int]], deadline_ns: int | None) -> bool:
        """Wait until no abandoned write can reach these extents any more; False: the node or the time is gone first.

        UCX is done with a message when the kernel has it. That the node has it too shows in the answer to a look-up
        sent after it on the same connection; there are several, and one may lag behind the others.
        """
        kept = self._fetcher.kept
        if len(self._dirty) > _DIRTY_MAX and not await self._fence(deadline_ns):
            return False
        while not self._dirty.keys().isdisjoint(extents):
            if self.error is not None or (deadline_ns is not None and time.monotonic_ns() >= deadline_ns):
                return False
            if any(self._dirty.get(extent) in kept for extent in extents):
                self._worker.progress()
                await asyncio.sleep(_DIRTY_S)
            elif not await self._fence(deadline_ns):
                return False
        return True

    async def _fence(self, deadline_ns: int | None) -> bool:
        """Have everything that UCX has sent dealt with by the node; False: it does not answer."""
        sent = {
            extent: request_id for extent, request_id in self._dirty.items() if request_id not in self._fetcher.kept
        }
        asked = [self._lookup_over(each, _ANY_KEY, deadline_ns) for each in (self._endpoint, *self._others)]
        if any(answer["status"][0] == UNAVAILABLE for answer in await asyncio.gather(*asked)):
            return False
        self._dirty = {extent: i for extent, i in self._dirty.items() if sent.get(extent) != i}
        return True


def _keys_count(keys: bytes) -> int:
    if len(keys) % 16:
        raise UsageError(f"{len(keys)} bytes of keys; a key has 16")
    return len(keys) // 16
