"""The client: what inference engines call, on their own asyncio loop. Putting and getting is in `blocks`; this
adds the rest.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from ucxkv import errors
from ucxkv.buffers import RegisteredBuffer
from ucxkv.client.chains import ChainCalls
from ucxkv.client.explaining import Explanation, explained_by
from ucxkv.client.holding import Lease, View
from ucxkv.client.mapped import MappedPath
from ucxkv.client.reading import plan
from ucxkv.client.results import (
    ConnectionInfo,
    DeleteStatus,
    KeyInfo,
    NodeStatus,
    PeerInfo,
    ReadStatus,
)
from ucxkv.directory import NotServed
from ucxkv.keys import Keys, as_key
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from types import TracebackType

    import numpy.typing as npt

    from ucxkv.client.link import NodeLink
    from ucxkv.layout import Layout
    from ucxkv.objects import Objects
    from ucxkv.sequence import Sequence
    from ucxkv.sessions import Session, Sessions
    from ucxkv.tokens import Token

__all__ = ["Client"]

_LIST_PAGE = 1000


class Client(ChainCalls):
    """An open client; made by `await ucxkv.connect(...)` or `async with ucxkv.connect(...) as kv`."""

    _sessions: Sessions | None = None

    # ---- asking without moving

    async def exists(self, key: bytes, *, deadline_s: float | None = None) -> bool:
        """Whether the block is visible now; False too where its node does not answer (`get_many` tells these apart)."""
        self._check()
        key, fast = as_key(key), self._router.fast
        if fast is not None:
            try:
                return fast[1].contains(key)
            except NotServed:
                fast[1].refused()
                return False
        return bool((await self.exists_many([key], deadline_s=deadline_s))[0])

    async def exists_many(
        self, keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which blocks are visible now, bool[n]; False too where a node does not answer, or a shard has no leader in
        reach (`get_many` tells these apart). Keeps nothing alive. root: see `get_many`.
        """
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        out = np.zeros(len(rows), np.bool_)
        if not len(rows):
            return out
        sole = self._router.sole
        if sole is not None:
            try:
                return (await sole.path.exists(rows.tobytes(), deadline_ns)).astype(np.bool_)
            except errors.Unavailable:
                return out
        for link, indices in plan(self._router, rows, root):
            missing = indices[~out[indices]]
            if len(missing):
                try:
                    out[missing] = (await link.path.exists(rows[missing].tobytes(), deadline_ns)).astype(np.bool_)
                except errors.Unavailable:
                    continue
        return out

    # ---- holding and removing

    def links_for(self, rows: npt.NDArray[np.uint8]) -> list[NodeLink]:
        """Reachable nodes, the likeliest holder of these keys first."""
        self._check()
        return self._router.order(rows[0].tobytes()) if len(rows) else []

    async def is_nowhere(self, links: list[NodeLink], key: bytes, deadline_ns: int) -> bool:
        """See Router."""
        return await self._router.is_nowhere(links, key, deadline_ns)

    def deadline(self) -> int:
        """When a call that starts now and names no deadline of its own has to end, monotonic ns."""
        return self._deadline(None)

    def lease(self, keys: Keys, *, ttl_s: float = 10.0) -> Lease:
        """`async with kv.lease(keys) as lease:` hold these blocks in place; renewed until released or out of reach
        for ttl_s.
        """
        return Lease(self, self._keys(keys), ttl_s)

    async def view(self, key: bytes, *, ttl_s: float = 10.0) -> View | None:
        """One block's bytes in the node's own memory, leased and proved, without a copy; None is a miss.

        Raises UsageError when the node's memory is not mapped here (another host): use `get`. Raises Unavailable when a
        node that may hold the block does not answer, or may not because its own lease is over.
        """
        self._check()
        lease: Lease | None = await self.lease([as_key(key)], ttl_s=ttl_s).__aenter__()
        assert lease is not None
        try:
            if lease.unanswered is not None and not lease.granted[0]:
                raise lease.unanswered
            for link in self._router.order(key) if lease.granted[0] else []:
                if not isinstance(link.path, MappedPath):
                    raise errors.UsageError(
                        f"a view needs the node's memory mapped, and {link.name} is reached by "
                        f"{link.path.kind}; use get"
                    )
                found, data = link.path.view(key)
                if data is not None and xxhash.xxh3_64_intdigest(data) == found.sum:
                    link.touch(key)
                    view, lease = View(lease, data, link.path), None
                    return view
                if data is not None:
                    link.report_damage(key)
                if found.status is ReadStatus.UNAVAILABLE:
                    raise errors.Unavailable("the node's lease ended meanwhile; retry, or recompute", node=link.name)
            return None
        finally:
            if lease is not None:
                await lease.release()

    async def delete(self, keys: Keys, *, deadline_s: float | None = None) -> npt.NDArray[np.uint8]:
        """Remove blocks: DeleteStatus u8[n]. A block with visible children that are not in the call stays (ORDER).

        UNAVAILABLE: a node did not answer, and may have removed it, or have it; or with shards, one has no leader here.
        """
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        answered: list[NodeLink] = []
        out = np.full(len(rows), DeleteStatus.MISS if self._router.links else DeleteStatus.UNAVAILABLE, np.uint8)
        for link in list(self._router.order(rows[0].tobytes())) if len(rows) else ():  # the likeliest holder first
            wanted = np.flatnonzero((out == DeleteStatus.MISS) | (out == DeleteStatus.UNAVAILABLE))
            if not len(wanted):
                break
            try:
                answer = await link.ask(m.Delete(keys=rows[wanted].tobytes(), epoch=link.epoch), deadline_ns)
                if not isinstance(answer, m.Statuses) or len(answer.status) != len(wanted):
                    raise errors.Unavailable("the node's answer to a delete does not fit it", node=link.name)
                link.saw(answer.token)
            except errors.Unavailable:
                out[wanted] = DeleteStatus.UNAVAILABLE
                continue
            got = np.frombuffer(answer.status, np.uint8)
            out[wanted] = got
            if not (got == DeleteStatus.UNAVAILABLE).any():
                answered.append(link)
        missing = np.flatnonzero(out == DeleteStatus.MISS)
        if len(missing) and not await self.is_nowhere(answered, rows[missing[0]].tobytes(), deadline_ns):
            out[missing] = DeleteStatus.UNAVAILABLE
        return out

    # ---- memory, sequences

    def register(self, array: object, *, row_bytes: int | None = None) -> RegisteredBuffer:
        """Check a contiguous array once; `pool[i]`, `pool[a:b]`, `pool[indices]` then name rows of it at no cost
        per row.

        row_bytes: size of a row; default the array's first axis.
        """
        self._check()
        return RegisteredBuffer(array, row_bytes=row_bytes)

    def sequence(self, layout: Layout, token_ids: npt.ArrayLike, *, salt: str | None = None) -> Sequence:
        """Tokens in, KV out: the blocks of this token sequence in this layout."""
        from ucxkv.sequence import Sequence

        self._check()
        return Sequence(self, layout, token_ids, salt=salt)

    @cached_property
    def objects(self) -> Objects:
        """Values under names of the user's, overwritable and versioned; see docs/objects.md."""
        from ucxkv.objects import Objects

        return Objects(self)

    def session(self, session_id: str, *, ttl_s: float = 1800.0, stored: bool = False, salt: str = "") -> Session:
        """A conversation: remembers what its turns used, and prefetches it at the next one; see Session.

        ttl_s: how long a turn is remembered. stored: its index is kept in the store, so that any process finds it; else
        this client alone knows it. salt: the tenant's; the same id under another salt is another session.
        """
        from ucxkv.sessions.session import Sessions

        self._check()
        if self._sessions is None:
            self._sessions = Sessions(self)
        return self._sessions.session(session_id, ttl_s, stored, salt)

    # ---- what operators see

    def peers(self) -> list[PeerInfo]:
        """Every known node and the path taken to it."""
        return self._router.peers()

    @property
    def token(self) -> Token:
        """All that this client has seen in the logs of a cluster's shards: its durable puts, its deletes, and its reads
        that named a token; other reads, and blocks of the cache class, add nothing. Empty without shards. A read
        `after` it, by this client or another's, shows at least that.
        """
        return self._router.seen.token

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

    async def connections(self, *, deadline_s: float | None = None) -> list[ConnectionInfo]:
        """Who is connected to every reachable node, by which path and why: the nodes' view of all their peers."""
        self._check()
        deadline_ns = self._deadline(deadline_s)
        found = []
        for link in list(self._router.links.values()):
            answer = await link.ask(m.GetConnections(), deadline_ns)
            assert isinstance(answer, m.Connections)
            host = link.welcome.host
            found += [
                ConnectionInfo(link.name, c.name, c.role, c.host == host, c.path, c.way, c.why)
                for c in answer.connections
            ]
        return found

    async def explain(self, key: bytes, *, deadline_s: float | None = None) -> list[Explanation]:
        """Why the block is where it is, by every reachable node: of one that is gone, what befell it last."""
        self._check()
        return await explained_by(list(self._router.links.values()), as_key(key), self._deadline(deadline_s))

    async def list_keys(self, limit: int = 1000, *, deadline_s: float | None = None) -> list[KeyInfo]:
        """Up to `limit` visible blocks, in no particular order; blocks put or removed meanwhile may be missing."""
        self._check()
        if limit < 0:
            raise errors.UsageError(f"limit={limit}; pass 0 or more")
        out: list[KeyInfo] = []
        async for name, page in self._key_pages(self._deadline(deadline_s)):
            lengths = np.frombuffer(page.lengths, np.uint32).tolist()[: limit - len(out)]
            for i, nbytes in enumerate(lengths):
                out.append(KeyInfo(page.keys[16 * i : 16 * i + 16], nbytes, page.tiers[i], page.parts[i], name))
            if len(out) >= limit:
                break
        return out

    async def find_keys(self, prefix: bytes, *, deadline_s: float | None = None) -> list[bytes]:
        """The keys of all visible blocks whose first bytes are these, each once, in no particular order; blocks put or
        removed meanwhile may be missing. Looks through all keys of all nodes; prefix: at most 16 bytes.
        """
        self._check()
        wanted = np.frombuffer(prefix, np.uint8)
        found: dict[bytes, None] = {}
        async for _, page in self._key_pages(self._deadline(deadline_s)):
            rows = np.frombuffer(page.keys, np.uint8).reshape(-1, 16)
            fits = (rows[:, : len(wanted)] == wanted).all(axis=1)
            found.update((row.tobytes(), None) for row in rows[fits])
        return list(found)

    async def _key_pages(self, deadline_ns: int) -> AsyncIterator[tuple[str, m.KeyPage]]:
        """All visible blocks of all reachable nodes, page by page, with the node's name."""
        for link in list(self._router.links.values()):
            cursor = 0
            while cursor >= 0:
                page = await link.ask(m.ListKeys(cursor=cursor, limit=_LIST_PAGE), deadline_ns)
                assert isinstance(page, m.KeyPage)
                yield link.name, page
                cursor = page.next_cursor

    # ---- the end

    async def aclose(self) -> None:
        """Wait for running calls (bounded by the client's timeout), then leave every node in good order. Idempotent.

        Cancelled, it raises when that is done: nothing is left half closed.
        """
        if self._closing is None:
            self._is_open = False
            self._closing = asyncio.create_task(self._close(), name="client-close")
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    async def _close(self) -> None:
        if self._busy:
            try:
                await asyncio.wait_for(self._idle.wait(), self._timeout_ns / 1e9)
            except TimeoutError:
                pass
        await self._router.aclose()
        for callback in self._on_close:
            await callback()

    def on_close(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call this once, after the nodes were left: for what was made on this client's behalf."""
        self._on_close.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
