"""Putting and getting blocks: the part of the client that moves bytes, and the checks at its edge.

Promises
  - Every call ends in an answer or a typed error within its deadline. A dead node is a miss (get) or UNAVAILABLE (put).
  - A batch succeeds in part: each key has its own status. Only bytes whose sum agreed are a HIT.
  - Buffers are borrowed until the call returns or raises, cancellation included; nothing touches them later.
  - One client belongs to one event loop and one process; other uses are refused, not survived by luck.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from ucxkv import errors
from ucxkv.buffers import Pieces, RegisteredBuffer, as_destinations, as_source, as_sources
from ucxkv.client.cold import read_one_cold
from ucxkv.client.ordering import PutOrder
from ucxkv.client.path import NOT_THERE, OTHERWISE, OUT_OF_REACH, THREAD_BYTES
from ucxkv.client.reading import plan, read_blocks
from ucxkv.client.replicas import read_after
from ucxkv.client.results import (
    GetResult,
    Part,
    PutResult,
    PutStatus,
    ReadStatus,
)
from ucxkv.client.ticket import Ticket
from ucxkv.client.writing import chained, put_blocks, put_parts
from ucxkv.directory import part_key
from ucxkv.ids import KEY_BYTES, ROOT_KEY
from ucxkv.keys import Keys, as_key, as_key_array

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy.typing as npt

    from ucxkv.client.router import Router
    from ucxkv.tokens import Token

__all__ = ["BlockCalls"]

_KEYS_MAX = 1 << 20
_DEADLINE_S_MAX = 86_400.0
_READ_ATTEMPTS = 8


class _Forks:
    """How often this process has come out of a fork: a client that was made before one is not this process's."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._add)

    def _add(self) -> None:
        self.count += 1


_forks = _Forks()
_PLAIN = (bytearray, memoryview)
_STORED = (int(PutStatus.STORED), int(PutStatus.SEALED))


class BlockCalls:
    """The putting and getting half of `ucxkv.Client`; see there."""

    def __init__(self, router: Router, timeout_s: float) -> None:
        self._router = router
        self._timeout_ns = int(timeout_s * 1e9)
        self._loop = asyncio.get_running_loop()
        self._forks = _forks.count
        self._is_open = True
        self._closing: asyncio.Task[None] | None = None
        self._on_close: list[Callable[[], Awaitable[None]]] = []
        self._busy = 0
        self._idle = asyncio.Event()
        self._order = PutOrder()
        self.counts = {
            "gets": 0, "hits": 0, "misses": 0, "stale": 0, "corrupt": 0, "errors": 0,
            "puts": 0, "stored": 0, "bytes_in": 0, "bytes_out": 0,
        }  # fmt: skip

    # ---- the edge: who may call, until when

    def _check(self) -> None:
        if self._is_open and _forks.count == self._forks and asyncio.get_running_loop() is self._loop:
            return
        if not self._is_open:
            raise errors.ClientClosed("this client is closed; connect again")
        if _forks.count != self._forks:
            raise errors.ForkError("this client was connected before a fork; connect again in the child")
        raise errors.UsageError(
            "this client belongs to another event loop; connect one on each loop, or use ucxkv.sync"
        )

    def _deadline(self, deadline_s: float | None) -> int:
        if deadline_s is None:
            return time.monotonic_ns() + self._timeout_ns
        if not deadline_s > 0:
            raise errors.UsageError(f"deadline_s={deadline_s}; pass seconds from now, above 0")
        return time.monotonic_ns() + int(min(deadline_s, _DEADLINE_S_MAX) * 1e9)

    def _keys(self, keys: Keys) -> npt.NDArray[np.uint8]:
        self._check()
        rows = as_key_array(keys)
        if len(rows) > _KEYS_MAX:
            raise errors.UsageError(f"{len(rows)} keys in one call; split it, the most is {_KEYS_MAX}")
        return rows

    # ---- put

    async def put(
        self,
        key: bytes,
        block: object,
        parent: bytes | None = None,
        *,
        durable: bool = False,
        exact: bool = False,
        deadline_s: float | None = None,
    ) -> PutStatus:
        """Store one block; visible to everybody when this returns STORED or ALREADY.

        block: a buffer, or a list of buffers that together are the value; borrowed until this returns. parent: the key
        before it in its chain, None for a root; a call of this client that still puts it is waited for. The first
        writer of a key wins. Raises UsageError, ValueTooLarge. A full or dead node is a status.

        durable: it, and what is above it, is not evicted and survives the node's process; STORED and ALREADY mean that
        then. Raises JournalFailed where the node can log nothing more. Only nodes started with durability =
        process or power take it. exact: no node stores it with loss (`disk_codec = "int8"`); for what is no keys and
        values.
        """
        self._check()
        deadline_ns = self._deadline(deadline_s)
        key = as_key(key)
        above = ROOT_KEY if parent is None else as_key(parent)
        source = as_source(block)
        sole = self._router.sole
        is_plain = source.is_flat and not (durable or exact)
        if sole is not None and sole.is_alive and is_plain and not self._order.puts(above):
            address, nbytes = int(source.addr[0]), int(source.nbytes[0])
            if nbytes <= THREAD_BYTES:
                self._busy += 1
                call = None if self._router.fast is not None else self._order.begin(key)
                try:
                    done = await sole.putter.put_one(key, above, address, nbytes, source, deadline_ns)
                finally:
                    if call is not None:
                        self._order.leave(call)
                    self._leave()
                if done is not None:
                    self._count_put(1, *((1, nbytes) if done in _STORED else (0, 0)))
                    return PutStatus(done)
        row, parents = np.frombuffer(key, np.uint8).reshape(1, 16), np.frombuffer(above, np.uint8).reshape(1, 16)
        status = await self._put(row, parents, source, None, deadline_ns, durable, exact)
        return PutStatus(status[0])

    def _count_put(self, puts: int, stored: int, nbytes: int) -> None:
        counts = self.counts
        counts["puts"] += puts
        counts["stored"] += stored
        counts["bytes_in"] += nbytes

    async def put_many(
        self,
        keys: Keys,
        blocks: object,
        parents: Keys | Literal["chain"] | None = None,
        *,
        part: Part | None = None,
        gather: bool = False,
        durable: bool = False,
        exact: bool = False,
        deadline_s: float | None = None,
    ) -> PutResult:
        """Store n blocks in order; each has its own status.

        blocks: n values (buffers, or lists of buffers), one array or tensor whose first axis counts the blocks, or
        rows of
        a registered buffer. parents: "chain" (each key's parent is the one before it in the call, the first is a
        root), one
        key a block (all zeros = root), or None (all are roots). part: store only this part of each block.
        gather: copy non-contiguous sources instead of refusing them. durable: see `put`; for whole blocks only.
        exact: see `put`.
        """
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        pieces = as_sources(blocks, len(rows), gather=gather)
        if parents is None:
            above = np.zeros_like(rows)
        elif isinstance(parents, str):
            if parents != "chain":
                raise errors.UsageError(f'parents={parents!r}; pass "chain", None or one key a block')
            above = chained(rows)
        else:
            above = as_key_array(parents, allow_root=True)
            if len(above) != len(rows):
                raise errors.UsageError(f"{len(above)} parents for {len(rows)} keys; pass one parent a key")
        if durable and part is not None and part.count > 1:
            raise errors.UsageError("durable=True with part: only whole blocks are durable; put them in one piece")
        if not len(rows):
            return PutResult(np.empty(0, np.uint8), self._router.seen.token)
        status = await self._put(rows, above, pieces, part, deadline_ns, durable, exact)
        return PutResult(status, self._router.seen.token)

    async def _put(
        self,
        rows: npt.NDArray[np.uint8],
        parents: npt.NDArray[np.uint8],
        pieces: Pieces,
        part: Part | None,
        deadline_ns: int,
        durable: bool,
        exact: bool,
    ) -> npt.NDArray[np.uint8]:
        self._busy += 1
        try:
            call = await self._order.enter(rows, parents, deadline_ns)
            try:
                if part is None or part.count == 1:
                    status = await put_blocks(
                        self._router, rows, parents, pieces, deadline_ns, durable=durable, exact=exact
                    )
                else:
                    status = await put_parts(self._router, rows, parents, pieces, part, deadline_ns)
            finally:
                self._order.leave(call)
        finally:
            self._leave()
        if not status.any():  # STORED is 0
            self._count_put(len(rows), len(rows), pieces.total_bytes)
            return status
        stored = (status == _STORED[0]) | (status == _STORED[1])
        self._count_put(len(rows), int(np.count_nonzero(stored)), int(pieces.nbytes[stored].sum()))
        return status

    async def _awaited(self, answer: Awaitable[int]) -> int:
        """The rest of a read that is on its way; counted, so that closing waits for it."""
        self._busy += 1
        try:
            return await answer
        finally:
            self._leave()

    def _leave(self) -> None:
        self._busy -= 1
        if not self._busy and not self._is_open:
            self._idle.set()

    # ---- get

    @overload
    async def get(self, key: bytes, *, after: Token | None = None, deadline_s: float | None = None) -> bytes | None: ...
    @overload
    async def get(
        self, key: bytes, into: object, *, after: Token | None = None, deadline_s: float | None = None
    ) -> int | None: ...

    async def get(
        self, key: bytes, into: object = None, *, after: Token | None = None, deadline_s: float | None = None
    ) -> bytes | int | None:
        """Read one block: its bytes, or with `into` the number of bytes written there. None is a miss (b"" and 0
        are not).

        into: writable, contiguous, exactly as long as the stored value; borrowed until this returns. after: see
        `get_many`. Raises UsageError when the stored value has another length. Bytes that do not match their sum are a
        miss.
        """
        self._check()
        fast = self._router.fast_read if after is None else None
        if fast is not None and type(key) is bytes and len(key) == KEY_BYTES:
            kind = type(into)
            if (kind is np.ndarray and not into.dtype.hasobject) or kind in _PLAIN:  # type: ignore[attr-defined]
                link, deadline_ns = fast[0], self._deadline(deadline_s)
                try:
                    found = fast[1](key, into, deadline_ns)
                except (TypeError, ValueError, BufferError):
                    found = OTHERWISE  # the general way says what is wrong with it
                nbytes = found if type(found) is int else await self._awaited(found)  # type: ignore[arg-type]
                if nbytes == OUT_OF_REACH and link.welcome.has_disk:
                    nbytes = await self._awaited(read_one_cold(link, key, into, self._router.loads, deadline_ns))
                if nbytes >= 0 or nbytes == NOT_THERE:
                    if nbytes == NOT_THERE:
                        as_key(key)  # of a hit nothing but its length can be wrong
                    counts = self.counts
                    counts["gets"] += 1
                    if nbytes == NOT_THERE:
                        counts["misses"] += 1
                        return None
                    link.touch(key)
                    counts["hits"] += 1
                    counts["bytes_out"] += nbytes
                    return nbytes
        key = as_key(key)
        if into is None:
            result = await self.get_many([key], after=after, deadline_s=deadline_s)
            return result.values[0] if result.values else None
        result = await self.get_many(
            [key], into if isinstance(into, (Pieces, RegisteredBuffer)) else [into], after=after, deadline_s=deadline_s
        )
        status = ReadStatus(result.status[0])
        if status is ReadStatus.SIZE:
            raise errors.UsageError(
                f"the stored value has {int(result.lengths[0])} bytes, and the destination another size; pass "
                "exactly that many",
                key=key,
            )
        return int(result.lengths[0]) if status is ReadStatus.HIT else None

    async def get_many(
        self,
        keys: Keys,
        into: object = None,
        *,
        root: bytes | None = None,
        part: Part | None = None,
        after: Token | None = None,
        deadline_s: float | None = None,
    ) -> GetResult:
        """Read n blocks; each has its own status.

        into: n destinations as `put_many` takes sources, each exactly as long as the stored value; borrowed until this
        returns; None: the values come back as bytes (a copy more). root: the first key of the chain these belong
        to, spares a search where there are several nodes; where the directory has shards only the leader of its shard
        is asked. part: read this part of each block. after: any replica of the shard may answer, the nearest first,
        whose state has all that this token names; a block that none of them has is asked of the leader, and is
        UNAVAILABLE where there is none. Raises UsageError where there are no shards, and with part.
        """
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        n = len(rows)
        if after is not None and part is not None and part.count > 1:
            raise errors.UsageError("after= with part: only whole blocks have replicas; leave one of them out")
        if part is not None and part.index:
            raw = rows.tobytes()
            whole = b"".join(part_key(raw[i : i + 16], part.index, part.count) for i in range(0, len(raw), 16))
            if root is None and n and not self._router.shards.count:
                root = raw[:16]  # a guess at where to ask first
            rows = np.frombuffer(whole, np.uint8).reshape(-1, 16)
        if not n:
            return GetResult(np.empty(0, np.uint8), np.empty(0, np.uint64), [] if into is None else None)
        self._busy += 1
        try:
            pieces = None if into is None else as_destinations(into, n)

            async def at_leaders(keys: npt.NDArray[np.uint8], to: Pieces | None) -> GetResult:
                if to is None:
                    return await self._get_values(keys, root, deadline_ns)
                status, lengths, sources = await read_blocks(self._router, keys, to, root, deadline_ns)
                return GetResult(status, lengths, None, sources)

            if after is None:
                result = await at_leaders(rows, pieces)
            else:
                result = await read_after(self._router, rows, root, after, pieces, deadline_ns, at_leaders)
        finally:
            self._leave()
        self._count_reads(result)
        return result

    def _count_reads(self, result: GetResult) -> None:
        counts = self.counts
        counts["gets"] += len(result.status)
        if not result.status.any():  # HIT is 0
            counts["hits"] += len(result.status)
            counts["bytes_out"] += int(result.lengths.sum())
            return
        tally = np.bincount(result.status, minlength=len(ReadStatus)).tolist()
        counts["hits"] += tally[ReadStatus.HIT]
        counts["misses"] += tally[ReadStatus.MISS]
        counts["stale"] += tally[ReadStatus.STALE]
        counts["corrupt"] += tally[ReadStatus.CORRUPT]
        counts["errors"] += tally[ReadStatus.SIZE] + sum(tally[ReadStatus.UNMAPPED :]) - tally[ReadStatus.STALE]
        counts["bytes_out"] += result.nbytes

    async def _get_values(
        self, rows: npt.NDArray[np.uint8], root: bytes | None, deadline_ns: int, attempts: int = _READ_ATTEMPTS
    ) -> GetResult:
        """Read into memory of our own: look the lengths up, allocate, read; again for values that changed meanwhile.

        A length is the word of the first node that has the key, as its value will be: two may have it in two sizes.
        """
        n = len(rows)
        lengths, is_found = np.zeros(n, np.uint64), np.zeros(n, np.bool_)
        for link, indices in plan(self._router, rows, root):
            wanted = indices[~is_found[indices]]
            if not len(wanted):
                continue
            try:
                found, sizes, _ = await link.path.lookup(rows[wanted].tobytes(), deadline_ns)
            except errors.Unavailable:
                continue
            there = found.astype(np.bool_)
            lengths[wanted[there]], is_found[wanted[there]] = sizes[there], True
        buffers = [bytearray(length) for length in lengths.tolist()]
        status, sizes, sources = await read_blocks(self._router, rows, as_destinations(buffers, n), root, deadline_ns)
        changed = np.flatnonzero(status == ReadStatus.SIZE)
        if len(changed) and attempts == 1:
            status[changed] = ReadStatus.STALE
        elif len(changed):  # put between the look-up and the read
            again = await self._get_values(rows[changed], root, deadline_ns, attempts - 1)
            status[changed], sizes[changed] = again.status, again.lengths
            for i, value in zip(changed.tolist(), again.values or [], strict=True):
                buffers[i] = bytearray(value or b"")
        values = [
            bytes(buffer) if st == ReadStatus.HIT else None for buffer, st in zip(buffers, status.tolist(), strict=True)
        ]
        return GetResult(status, sizes, values, sources)

    def submit_get(self, keys: Keys, into: object = None, *, deadline_s: float | None = None) -> Ticket[GetResult]:
        """Start a `get_many` from any thread but the loop's; complete it by poll, eventfd or result."""
        return Ticket(self._loop, self.get_many(keys, into, deadline_s=deadline_s))

    def submit_put(
        self, keys: Keys, blocks: object, parents: Keys | Literal["chain"] | None = None, *, durable: bool = False
    ) -> Ticket[PutResult]:
        """Start a `put_many` from any thread but the loop's; complete it by poll, eventfd or result."""
        return Ticket(self._loop, self.put_many(keys, blocks, parents, durable=durable))
