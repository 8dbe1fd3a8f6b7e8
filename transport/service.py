"""The node's data service: one C thread that answers look-ups, reads and writes without this process's Python.

Invariants
  - A session's token is given out over the control connection; messages with an unknown one are dropped and counted.
  - **A slot that a peer may still write is never given to another**: a write lands only within an extent that is
    granted to its session at that moment, and the next points say when that is over. This is about WRITE messages; a
    peer that puts one-sidedly goes around it (docs/decisions.md), which no client of ours does.
  - After `close_session` returned True nothing of that session can write any more: its token is unknown, its grants are
    gone, no receive into an extent is in flight. False (after 5 s, or at the deadline) means that a transfer could
    not be
    ended: its extents must not be given to anybody (the tier quarantines them).
  - `revoke` answers BUSY while a write into the extent is in flight; then no further one starts, and the caller
  asks again.

`lend`, `grant`, `revoke` and `counters` may be called from any thread; the rest belongs to the loop's.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import library
from .base import (
    MAX_CONNECTIONS,
    Closed,
    DeadlineExceeded,
    ForkGuard,
    PeerLost,
    TransportError,
    UsageError,
    remaining_s,
)
from .memory import MemoryRegion
from .ucx import Context, checked_address, error_from_status

__all__ = ["DataCounters", "DataService", "GrantStatus"]

_OPEN, _CLOSE, _AWAIT, _LISTEN = 1, 2, 3, 4
_CLEAN, _STILL_WRITING, _UNKNOWN = 0, 1, 2
_RESULTS = 256


class GrantStatus(enum.IntEnum):
    """The answer of `grant` and `revoke` for one extent."""

    OK = 0
    BUSY = 1
    """revoke: a write is in flight; no further one starts; ask again."""
    UNKNOWN = 2
    """revoke: not granted to this session; grant: outside of any lent region."""
    TAKEN = 3
    """grant: granted already, or revoked and still being written."""


class DataCounters(NamedTuple):
    """Totals since the start, but `sessions`, `grants` and `closing` (now). Each moves when the thing is done."""

    lookups: int
    lookup_keys: int
    reads: int
    read_keys: int
    read_hits: int
    read_bytes: int
    writes: int
    write_bytes: int
    refused: int
    """Writes outside of a live grant."""
    unknown_session: int
    malformed: int
    dropped: int
    """Requests of sessions with too many unanswered ones, or when memory ran out."""
    sessions: int
    sleeps: int
    """Times the thread went to sleep: an idle one adds about one a second."""
    grants: int
    closing: int
    """Sessions that are over but for what UCX still has of theirs. Over shared memory UCX never gives up messages to a
    process that died with many on their way: a few hundred bytes each, until the service ends."""


class DataService:
    """Serves the blocks that a resolver finds, from regions that were lent to it.

    resolve, resolve_context: addresses of a C function `size_t (*)(void *ctx, size_t n, const uint8_t *keys,
    kv_found *)`
    and of its context; both outlive the service and are called in its thread. spin_us: how long the thread polls after
    the last event before it sleeps. on_session_lost(token, error): called in the loop when UCX reports a peer's end.
    """

    def __init__(
        self,
        context: Context,
        resolve: int,
        resolve_context: int,
        *,
        spin_us: int = 50,
        on_session_lost: Callable[[int, TransportError], None] | None = None,
    ) -> None:
        self._ffi, self._lib = library.binding()
        self._guard = ForkGuard("this data service")
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._on_session_lost = on_session_lost
        out = self._ffi.new("kv_service **")
        status = self._lib.kv_service_open(context.acquire(), resolve, resolve_context, spin_us * 1000, out)
        if status != 0:
            context.release()
            raise error_from_status(status, "starting the data service")
        self._handle = out[0]
        self._regions: dict[int, MemoryRegion] = {}
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._last_ticket = 0
        self._results = (np.empty(_RESULTS, "<u8"), np.empty(_RESULTS, "<u8"), np.empty(_RESULTS, "<i4"))
        self._fd: int = self._lib.kv_service_result_fd(self._handle)
        self._loop.add_reader(self._fd, self._on_results)

    def _native(self) -> Any:
        self._guard.check()
        if self._handle is None:
            raise Closed("this data service is closed")
        return self._handle

    @property
    def address(self) -> bytes:
        """The service's worker address, for the clients' endpoints."""
        room = self._ffi.new("char[]", 16384)
        length = self._lib.kv_service_address(self._native(), room, 16384)
        return bytes(self._ffi.buffer(room, length))

    def lend(self, index: int, region: MemoryRegion) -> None:
        """Serve reads from and writes into a registered region under this index. The region outlives the service."""
        status = self._lib.kv_service_lend(self._native(), index, region.address, region.length_bytes, region.handle)
        if status != 0:
            raise error_from_status(status, f"lending region {index}")
        self._regions[index] = region

    # ---- sessions

    async def open_session(
        self,
        token: int,
        client_address: bytes,
        *,
        is_peer_mode: bool,
        is_eager_only: bool,
        connections: int = 1,
        deadline_ns: int | None = None,
    ) -> None:
        """Answer the client with this worker address under this token (u64, random, given out by the caller).

        connections: how many the client makes, for blocks to go over, 1 to 8. is_peer_mode: UCX's error mode, the same
        as the client's. is_eager_only: refuse writes by rendezvous, which over TCP could land after the session's end.
        Raises UsageError (too many, or the token is in use), PeerLost.
        """
        address, count = checked_address(client_address), max(1, min(connections, MAX_CONNECTIONS))
        status = await self._command(_OPEN, token, address, is_peer_mode, is_eager_only, deadline_ns, count)
        if status == -18:
            raise UsageError(f"session {token:#x} is open already")
        if status != 0:
            raise error_from_status(status, f"opening session {token:#x}")

    async def await_session(
        self, token: int, client_id: int, *, is_peer_mode: bool, is_eager_only: bool, deadline_ns: int | None = None
    ) -> None:
        """Answer, under this token, the client that connects to the listener with this id (`Worker.client_id`).

        Nothing is answered before it connects; see `open_session` for the rest.
        """
        raw = client_id.to_bytes(8, "little")
        status = await self._command(_AWAIT, token, raw, is_peer_mode, is_eager_only, deadline_ns)
        if status == -18:
            raise UsageError(f"session {token:#x} is open already")
        if status != 0:
            raise error_from_status(status, f"announcing session {token:#x}")

    async def listen(self, host: str, port: int = 0, *, deadline_ns: int | None = None) -> int:
        """Let clients connect by socket address (rdmacm or tcp) too; the bound port. Once a service.

        host: an IPv4 or IPv6 address of this host. Raises UsageError, UcxError (port taken, no such transport).
        """
        status = await self._command(_LISTEN, port, host.encode() + b"\0", True, True, deadline_ns)
        if status <= 0:
            raise error_from_status(status, f"listening on {host} port {port}")
        return status

    async def close_session(self, token: int, *, deadline_ns: int | None = None) -> bool:
        """End a session; True when nothing of it can write any more (see the module). Unknown tokens are True."""
        try:
            status = await self._command(_CLOSE, token, b"", False, False, deadline_ns)
        except DeadlineExceeded:
            return False
        return status in (_CLEAN, _UNKNOWN)

    async def _command(
        self,
        kind: int,
        token: int,
        address: bytes,
        is_peer_mode: bool,
        is_eager_only: bool,
        deadline_ns: int | None,
        connections: int = 1,
    ) -> int:
        self._last_ticket += 1
        ticket = self._last_ticket
        future: asyncio.Future[int] = self._loop.create_future()
        self._waiting[ticket] = future
        try:
            status = self._lib.kv_service_command(
                self._native(), kind, ticket, token, address, len(address), is_peer_mode, is_eager_only, connections
            )
            if status != 0:
                raise error_from_status(status, "asking the data service")
            async with asyncio.timeout(remaining_s(deadline_ns)):
                return await future
        except TimeoutError as exc:
            raise DeadlineExceeded("the data service did not answer within the deadline") from exc
        finally:
            self._waiting.pop(ticket, None)

    def _on_results(self) -> None:
        if self._handle is None or self._guard.is_forked:
            return
        pointers = [self._ffi.from_buffer(f"{kind}[]", a) for kind, a in zip(_RESULT_TYPES, self._results, strict=True)]
        count = self._lib.kv_service_results(self._handle, _RESULTS, *pointers)
        tickets, tokens, statuses = (a[:count].tolist() for a in self._results)
        for ticket, token, status in zip(tickets, tokens, statuses, strict=True):
            if not ticket:
                if self._on_session_lost is not None:
                    reason = error_from_status(status, f"the client of session {token:#x} is gone")
                    self._on_session_lost(token, reason if isinstance(reason, PeerLost) else PeerLost(str(reason)))
                continue
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(status)

    # ---- grants

    def grant(self, token: int, regions: Any, offsets: Any, capacities: Any) -> NDArray[np.uint8]:
        """Let a session write n extents: regions u16[n], offsets u64[n], capacities u64[n] -> GrantStatus u8[n]."""
        region, offset, capacity = _arrays(regions, offsets, capacities)
        out = np.empty(len(region), np.uint8)
        self._lib.kv_service_grant(self._native(), token, len(region), *self._pointers(region, offset, capacity, out))
        return out

    def revoke(self, token: int, regions: Any, offsets: Any) -> NDArray[np.uint8]:
        """Take n extents back from a session -> GrantStatus u8[n]. Do this before an extent gets a new meaning."""
        region, offset, _ = _arrays(regions, offsets, offsets)
        out = np.empty(len(region), np.uint8)
        self._lib.kv_service_revoke(self._native(), token, len(region), *self._pointers(region, offset, out))
        return out

    def _pointers(self, *arrays: NDArray[Any]) -> list[Any]:
        names = {"u2": "uint16_t[]", "u8": "uint64_t[]", "u1": "uint8_t[]"}
        return [self._ffi.from_buffer(names[a.dtype.str[1:]], a) for a in arrays]

    def counters(self) -> DataCounters:
        """The counters, read while the thread runs on."""
        out = self._ffi.new("uint64_t[16]")
        self._lib.kv_service_counters(self._native(), out)
        return DataCounters(*out)

    def close(self) -> None:
        """End every session and the thread; waits for it (half a second at most). Idempotent."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        if self._guard.is_forked:
            return
        self._loop.remove_reader(self._fd)
        self._lib.kv_service_close(handle)
        self._context.release()
        self._regions.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Closed("the data service was closed"))


_RESULT_TYPES = ("uint64_t", "uint64_t", "int32_t")


def _arrays(regions: Any, offsets: Any, capacities: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    region = np.ascontiguousarray(regions, dtype="<u2")
    offset = np.ascontiguousarray(offsets, dtype="<u8")
    capacity = np.ascontiguousarray(capacities, dtype="<u8")
    if not (region.ndim == 1 and region.shape == offset.shape == capacity.shape):
        raise UsageError(f"{region.shape} regions, {offset.shape} offsets, {capacity.shape} capacities")
    return region, offset, capacity
