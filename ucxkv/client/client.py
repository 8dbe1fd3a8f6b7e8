"""The client: what inference engines call, on their own asyncio loop.

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
from typing import TYPE_CHECKING, Literal, Self, overload

import numpy as np
import xxhash

from ucxkv import errors
from ucxkv.buffers import Pieces, RegisteredBuffer, as_destinations, as_source, as_sources
from ucxkv.client.holding import Lease, View
from ucxkv.client.mapped import MappedPath
from ucxkv.client.path import THREAD_BYTES
from ucxkv.client.reading import plan, read_blocks
from ucxkv.client.results import (
    DeleteStatus,
    GetResult,
    KeyInfo,
    Match,
    NodeStatus,
    Part,
    PeerInfo,
    PutResult,
    PutStatus,
    ReadStatus,
)
from ucxkv.client.writing import chained, put_blocks, put_parts
from ucxkv.directory import part_key
from ucxkv.ids import ROOT_KEY
from ucxkv.keys import Keys, as_key, as_key_array
from ucxkv.memory import locate
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import numpy.typing as npt

    from ucxkv.client.link import NodeLink
    from ucxkv.client.router import Router
    from ucxkv.layout import Layout
    from ucxkv.sequence import Sequence

__all__ = ["Client"]

_KEYS_MAX = 1 << 20
_LIST_PAGE = 1000
_ASSUMED_LOAD_BYTES_S = 8e9
_LIST_ROUNDS_MAX = 1 << 20


class Client:
    """An open client; made by `await ucxkv.connect(...)` or `async with ucxkv.connect(...) as kv`."""

    def __init__(self, router: Router, timeout_s: float) -> None:
        self._router = router
        self._timeout_ns = int(timeout_s * 1e9)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._is_open = True
        self._on_close: list[Callable[[], None]] = []
        self._busy = 0
        self._idle = asyncio.Event()
        self.counts = {
            "gets": 0, "hits": 0, "misses": 0, "stale": 0, "corrupt": 0, "errors": 0,
            "puts": 0, "stored": 0, "bytes_in": 0, "bytes_out": 0,
        }  # fmt: skip

    # ---- the edge: who may call, until when

    def _check(self) -> None:
        if not self._is_open:
            raise errors.ClientClosed("this client is closed; connect again")
        if os.getpid() != self._pid:
            raise errors.ForkError(f"this client belongs to process {self._pid}, and this is {os.getpid()}; connect again after a fork")
        if asyncio.get_running_loop() is not self._loop:
            raise errors.UsageError("this client belongs to another event loop; connect one on each loop, or use ucxkv.sync")

    def _deadline(self, deadline_s: float | None) -> int:
        if deadline_s is None:
            return time.monotonic_ns() + self._timeout_ns
        if deadline_s <= 0:
            raise errors.UsageError(f"deadline_s={deadline_s}; pass seconds from now, above 0")
        return time.monotonic_ns() + int(deadline_s * 1e9)

    def _keys(self, keys: Keys) -> npt.NDArray[np.uint8]:
        self._check()
        rows = as_key_array(keys)
        if len(rows) > _KEYS_MAX:
            raise errors.UsageError(f"{len(rows)} keys in one call; split it, the most is {_KEYS_MAX}")
        return rows

    # ---- put

    async def put(self, key: bytes, block: object, parent: bytes | None = None, *, deadline_s: float | None = None) -> PutStatus:
        """Store one block; visible to everybody when this returns STORED or ALREADY.

        block: a buffer, or a list of buffers that together are the value; borrowed until this returns. parent: the key
        before it in its chain, None for a root. The first writer of a key wins.
        Raises UsageError, ValueTooLarge. A full or dead node is a status.
        """
        self._check()
        deadline_ns = self._deadline(deadline_s)
        row = np.frombuffer(as_key(key), np.uint8).reshape(1, 16)
        parents = np.frombuffer(ROOT_KEY if parent is None else as_key(parent), np.uint8).reshape(1, 16)
        status = await self._put(row, parents, as_source(block), None, deadline_ns)
        return PutStatus(status[0])

    async def put_many(
        self,
        keys: Keys,
        blocks: object,
        parents: Keys | Literal["chain"] | None = None,
        *,
        part: Part | None = None,
        gather: bool = False,
        deadline_s: float | None = None,
    ) -> PutResult:
        """Store n blocks in order; each has its own status.

        blocks: n values (buffers, or lists of buffers), one array or tensor whose first axis counts the blocks, or rows of
        a registered buffer. parents: "chain" (each key's parent is the one before it in the call, the first is a root), one
        key a block (all zeros = root), or None (all are roots). part: store only this part of each block.
        gather: copy non-contiguous sources instead of refusing them.
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
        if not len(rows):
            return PutResult(np.empty(0, np.uint8))
        return PutResult(await self._put(rows, above, pieces, part, deadline_ns))

    async def _put(
        self, rows: npt.NDArray[np.uint8], parents: npt.NDArray[np.uint8], pieces: Pieces, part: Part | None, deadline_ns: int
    ) -> npt.NDArray[np.uint8]:
        self._busy += 1
        try:
            if part is None or part.count == 1:
                status = await put_blocks(self._router, rows, parents, pieces, deadline_ns)
            else:
                status = await put_parts(self._router, rows, parents, pieces, part, deadline_ns)
        finally:
            self._leave()
        stored = (status == PutStatus.STORED) | (status == PutStatus.SEALED)
        counts = self.counts
        counts["puts"] += len(rows)
        counts["stored"] += int(np.count_nonzero(stored))
        counts["bytes_in"] += int(pieces.nbytes[stored].sum())
        return status

    def _leave(self) -> None:
        self._busy -= 1
        if not self._busy and not self._is_open:
            self._idle.set()

    # ---- get

    @overload
    async def get(self, key: bytes, *, deadline_s: float | None = None) -> bytes | None: ...
    @overload
    async def get(self, key: bytes, into: object, *, deadline_s: float | None = None) -> int | None: ...

    async def get(self, key: bytes, into: object = None, *, deadline_s: float | None = None) -> bytes | int | None:
        """Read one block: its bytes, or with `into` the number of bytes written there. None is a miss (b"" and 0 are not).

        into: writable, contiguous, exactly as long as the stored value; borrowed until this returns.
        Raises UsageError when the stored value has another length. Bytes that do not match their sum are a miss.
        """
        self._check()
        key = as_key(key)
        if into is None:
            result = await self.get_many([key], deadline_s=deadline_s)
            return result.values[0] if result.values else None
        sole = self._router.sole
        if sole is not None and type(sole.path) is MappedPath and not isinstance(into, (list, tuple, Pieces, RegisteredBuffer)):
            try:
                address, nbytes, _owner = locate(into, True, False)
            except errors.UsageError as exc:
                raise errors.UsageError(f"the destination {exc.message}") from exc
            if nbytes <= THREAD_BYTES and sole.is_alive:
                found = sole.path.read_one(key, address, nbytes)
                if found.status is ReadStatus.HIT:
                    sole.touch(key)
                    counts = self.counts
                    counts["gets"] += 1
                    counts["hits"] += 1
                    counts["bytes_out"] += nbytes
                    return nbytes
        result = await self.get_many([key], into if isinstance(into, (Pieces, RegisteredBuffer)) else [into], deadline_s=deadline_s)
        status = ReadStatus(result.status[0])
        if status is ReadStatus.SIZE:
            raise errors.UsageError(
                f"the stored value has {int(result.lengths[0])} bytes, and the destination another size; pass exactly that many", key=key
            )
        return int(result.lengths[0]) if status is ReadStatus.HIT else None

    async def get_many(
        self,
        keys: Keys,
        into: object = None,
        *,
        root: bytes | None = None,
        part: Part | None = None,
        deadline_s: float | None = None,
    ) -> GetResult:
        """Read n blocks; each has its own status.

        into: n destinations as `put_many` takes sources, each exactly as long as the stored value; borrowed until this
        returns; None: the values come back as bytes (a copy more). root: the first key of the chain these belong to, spares
        a search where there are several nodes. part: read this part of each block.
        """
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        n = len(rows)
        if part is not None and part.index:
            raw = rows.tobytes()
            whole = b"".join(part_key(raw[i : i + 16], part.index, part.count) for i in range(0, len(raw), 16))
            root = raw[:16] if root is None and n else root
            rows = np.frombuffer(whole, np.uint8).reshape(-1, 16)
        if not n:
            return GetResult(np.empty(0, np.uint8), np.empty(0, np.uint64), [] if into is None else None)
        self._busy += 1
        try:
            if into is None:
                result = await self._get_values(rows, root, deadline_ns)
            else:
                pieces = as_destinations(into, n)
                status, lengths, sources = await read_blocks(self._router, rows, pieces, root, deadline_ns)
                result = GetResult(status, lengths, None, sources)
        finally:
            self._leave()
        self._count_reads(result)
        return result

    def _count_reads(self, result: GetResult) -> None:
        tally = np.bincount(result.status, minlength=len(ReadStatus)).tolist()
        counts = self.counts
        counts["gets"] += len(result.status)
        counts["hits"] += tally[ReadStatus.HIT]
        counts["misses"] += tally[ReadStatus.MISS]
        counts["stale"] += tally[ReadStatus.STALE]
        counts["corrupt"] += tally[ReadStatus.CORRUPT]
        counts["errors"] += tally[ReadStatus.SIZE] + sum(tally[ReadStatus.UNMAPPED :]) - tally[ReadStatus.STALE]
        counts["bytes_out"] += result.nbytes

    async def _get_values(self, rows: npt.NDArray[np.uint8], root: bytes | None, deadline_ns: int) -> GetResult:
        """Read into memory of our own: look the lengths up, allocate, read; again for values that changed meanwhile."""
        n = len(rows)
        lengths = np.zeros(n, np.uint64)
        for link, indices in plan(self._router, rows, root):
            try:
                records, found = await link.path.lookup(rows[indices].tobytes(), deadline_ns)
            except errors.Unavailable:
                continue
            there = found.astype(np.bool_)
            lengths[indices[there]] = records["length"][there]
        buffers = [bytearray(length) for length in lengths.tolist()]
        status, sizes, sources = await read_blocks(self._router, rows, as_destinations(buffers, n), root, deadline_ns)
        changed = np.flatnonzero(status == ReadStatus.SIZE)
        if len(changed):  # put between the look-up and the read
            again = await self._get_values(rows[changed], root, deadline_ns)
            status[changed], sizes[changed] = again.status, again.lengths
            for i, value in zip(changed.tolist(), again.values or [], strict=True):
                buffers[i] = bytearray(value or b"")
        values = [bytes(buffer) if st == ReadStatus.HIT else None for buffer, st in zip(buffers, status.tolist(), strict=True)]
        return GetResult(status, sizes, values, sources)

    # ---- asking without moving

    async def exists(self, key: bytes, *, deadline_s: float | None = None) -> bool:
        """Whether the block is visible now."""
        return bool((await self.exists_many([key], deadline_s=deadline_s))[0])

    async def exists_many(self, keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None) -> npt.NDArray[np.bool_]:
        """Which blocks are visible now, bool[n]. Keeps nothing alive."""
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        out = np.zeros(len(rows), np.bool_)
        if not len(rows):
            return out
        for link, indices in plan(self._router, rows, root):
            missing = indices[~out[indices]]
            if len(missing):
                try:
                    out[missing] = (await link.path.exists(rows[missing].tobytes(), deadline_ns)).astype(np.bool_)
                except errors.Unavailable:
                    continue
        return out

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        """The longest visible prefix of a chain whose keys are given in order, root first."""
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        best: tuple[int, NodeLink | None] = (0, None)
        if len(rows):
            raw, first = rows.tobytes(), rows[0].tobytes()
            for link in self._router.order(first):
                try:
                    blocks = await link.path.match(raw, deadline_ns)
                except errors.Unavailable:
                    continue
                if blocks > best[0]:
                    best = (blocks, link)
                if blocks:
                    break  # a chain lives in one place
        blocks, holder = best
        tiers, lengths = np.zeros(blocks, np.uint8), np.zeros(blocks, np.float64)
        if holder is not None:
            records, found = await holder.path.lookup(rows[:blocks].tobytes(), deadline_ns)
            gone = np.flatnonzero(found == 0)
            blocks = int(gone[0]) if len(gone) else blocks
            tiers, lengths = records["tier"][:blocks].copy(), records["length"][:blocks].astype(np.float64)
            self._router.remember(rows[0].tobytes(), holder)
        return Match(blocks, tiers, lengths / _ASSUMED_LOAD_BYTES_S)

    # ---- holding and removing

    def links_for(self, rows: npt.NDArray[np.uint8]) -> list[NodeLink]:
        """Reachable nodes, the likeliest holder of these keys first."""
        self._check()
        return self._router.order(rows[0].tobytes()) if len(rows) else []

    def lease(self, keys: Keys, *, ttl_s: float = 10.0) -> Lease:
        """`async with kv.lease(keys) as lease:` hold these blocks in place; renewed until released or out of reach for ttl_s."""
        return Lease(self, self._keys(keys), ttl_s)

    async def view(self, key: bytes, *, ttl_s: float = 10.0) -> View | None:
        """One block's bytes in the node's own memory, leased and proved, without a copy; None is a miss.

        Raises UsageError when the node's memory is not mapped here (another host): use `get`.
        """
        self._check()
        lease = await self.lease([as_key(key)], ttl_s=ttl_s).__aenter__()
        try:
            for link in self._router.order(key) if lease.granted[0] else []:
                if not isinstance(link.path, MappedPath):
                    raise errors.UsageError(f"a view needs the node's memory mapped, and {link.name} is reached by {link.path.kind}; use get")
                found, data = link.path.view(key)
                if data is not None and xxhash.xxh3_64_intdigest(data) == found.sum:
                    link.touch(key)
                    view, lease = View(lease, data), None
                    return view
                if data is not None:
                    link.report_damage(key)
            return None
        finally:
            if lease is not None:
                await lease.release()

    async def delete(self, keys: Keys, *, deadline_s: float | None = None) -> npt.NDArray[np.uint8]:
        """Remove blocks: DeleteStatus u8[n]. A block with visible children that are not in the call stays (ORDER)."""
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        out = np.full(len(rows), DeleteStatus.MISS if self._router.links else DeleteStatus.UNAVAILABLE, np.uint8)
        for link in list(self._router.links.values()):
            wanted = np.flatnonzero((out == DeleteStatus.MISS) | (out == DeleteStatus.UNAVAILABLE))
            if not len(wanted):
                break
            try:
                answer = await link.ask(m.Delete(keys=rows[wanted].tobytes()), deadline_ns)
                if not isinstance(answer, m.Statuses) or len(answer.status) != len(wanted):
                    raise errors.Unavailable("the node's answer to a delete does not fit it", node=link.name)
            except errors.Unavailable:
                out[wanted] = DeleteStatus.UNAVAILABLE
                continue
            out[wanted] = np.frombuffer(answer.status, np.uint8)
        return out

    # ---- memory, sequences

    def register(self, array: object, *, row_bytes: int | None = None) -> RegisteredBuffer:
        """Check a contiguous array once; `pool[i]`, `pool[a:b]`, `pool[indices]` then name rows of it at no cost per row.

        row_bytes: size of a row; default the array's first axis.
        """
        self._check()
        return RegisteredBuffer(array, row_bytes=row_bytes)

    def sequence(self, layout: Layout, token_ids: npt.ArrayLike, *, salt: str | None = None) -> Sequence:
        """Tokens in, KV out: the blocks of this token sequence in this layout."""
        from ucxkv.sequence import Sequence  # noqa: PLC0415  (it needs this class's protocol, not the other way round)

        self._check()
        return Sequence(self, layout, token_ids, salt=salt)

    # ---- what operators see

    def peers(self) -> list[PeerInfo]:
        """Every known node and the path taken to it."""
        return self._router.peers()

    def stats(self) -> dict[str, int]:
        """Totals of this client: gets = hits + misses + stale + corrupt + errors."""
        return dict(self.counts)

    async def status(self, *, deadline_s: float | None = None) -> list[NodeStatus]:
        """A report of every reachable node."""
        self._check()
        deadline_ns = self._deadline(deadline_s)
        reports = []
        for link in list(self._router.links.values()):
            link.flush_touches()
            r = await link.ask(m.GetStatus(), deadline_ns)
            assert isinstance(r, m.NodeReport)
            reports.append(NodeStatus(r.name, r.address, r.version, r.epoch, r.uptime_s, r.numbers, r.facts))
        return reports

    async def list_keys(self, limit: int = 1000, *, deadline_s: float | None = None) -> list[KeyInfo]:
        """Up to `limit` visible blocks, in no particular order; blocks put or removed meanwhile may be missing."""
        self._check()
        if limit < 0:
            raise errors.UsageError(f"limit={limit}; pass 0 or more")
        deadline_ns = self._deadline(deadline_s)
        out: list[KeyInfo] = []
        for link in list(self._router.links.values()):
            cursor = 0
            while cursor >= 0 and len(out) < limit:
                page = await link.ask(m.ListKeys(cursor=cursor, limit=min(_LIST_PAGE, limit - len(out))), deadline_ns)
                assert isinstance(page, m.KeyPage)
                lengths = np.frombuffer(page.lengths, np.uint32).tolist()
                for i, nbytes in enumerate(lengths):
                    out.append(KeyInfo(page.keys[16 * i : 16 * i + 16], nbytes, page.tiers[i], page.parts[i], link.name))
                cursor = page.next_cursor
        return out

    # ---- the end

    async def aclose(self) -> None:
        """Wait for running calls (bounded by the client's timeout), then leave every node in good order. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._busy:
            try:
                await asyncio.wait_for(self._idle.wait(), self._timeout_ns / 1e9)
            except TimeoutError:
                pass
        await self._router.aclose()
        for callback in self._on_close:
            callback()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this once, after the nodes were left: for what was made on this client's behalf."""
        self._on_close.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
