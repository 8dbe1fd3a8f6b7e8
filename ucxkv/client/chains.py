"""Chains of blocks: how much of one is there, and bringing it to memory ahead of reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.blocks import BlockCalls
from ucxkv.client.loadcosts import NVME_TIER
from ucxkv.client.replicas import match_after
from ucxkv.client.warming import warm_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.client.link import NodeLink
    from ucxkv.client.results import Match
    from ucxkv.keys import Keys
    from ucxkv.sequence import Sequence
    from ucxkv.sessions import PrefetchOrder, PrefetchResult
    from ucxkv.tokens import Token

__all__ = ["ChainCalls"]

_NOTHING = np.zeros(0, np.uint8), np.zeros(0, np.uint64), np.zeros(0, np.uint8)


class ChainCalls(BlockCalls):
    """The part of `ucxkv.Client` that knows of chains; see there."""

    async def match(self, keys: Keys, *, after: Token | None = None, deadline_s: float | None = None) -> Match:
        """The longest visible prefix of a chain whose keys are given in order, root first. `Match.is_certain` is False
        where a node that may hold more of it did not answer: with shards, the leader of the root's shard, which alone
        is asked. after: see `get_many`; a replica that has all of the keys answers, else the leader, else the longest
        that a replica has is told.
        """
        rows = self._keys(keys)
        deadline_ns = self._deadline(deadline_s)
        if after is not None and len(rows):
            return await match_after(self._router, rows, after, deadline_ns, lambda: self._match(rows, deadline_ns))
        return await self._match(rows, deadline_ns)

    async def _match(self, rows: npt.NDArray[np.uint8], deadline_ns: int) -> Match:
        best: tuple[int, NodeLink | None] = (0, None)
        is_certain = bool(self._router.links)
        if len(rows):
            raw, first = rows.tobytes(), rows[0].tobytes()
            links = self._router.links_of(first)
            is_certain = bool(links)
            for link in links:
                try:
                    blocks = await link.path.match(raw, deadline_ns)
                except errors.Unavailable:
                    is_certain = False
                    continue
                if blocks > best[0]:
                    best = (blocks, link)
                if blocks:
                    break  # a chain lives in one place
        blocks, holder = best
        found, sizes, tiers = _NOTHING
        if holder is not None:
            try:
                found, sizes, tiers = await holder.path.lookup(rows[:blocks].tobytes(), deadline_ns)
                self._router.remember(rows[0].tobytes(), holder)
            except errors.Unavailable:  # it ended, or its lease did, after it had answered
                is_certain = False
        gone = np.flatnonzero(found == 0)
        blocks = int(gone[0]) if len(gone) else len(found)
        return self._router.loads.match(holder, sizes[:blocks], tiers[:blocks], is_certain=is_certain)

    async def warm(self, keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None) -> int:
        """Bring those of these blocks that are on disk into their nodes' memory, in this order, ahead of their reads;
        how many of all are in memory then.

        A hint: what there is no room for stays where it is, and what was brought may leave again. Cancelled, it asks
        for nothing more. root: see `get_many`. Reads need none of this: `get_many` brings back what it is asked for.
        """
        rows = self._keys(keys)
        if not len(rows):
            return 0
        self._busy += 1
        try:
            return await warm_blocks(self._router, rows, root, self._deadline(deadline_s))
        finally:
            self._leave()

    async def prefetch(
        self,
        what: Sequence | Keys,
        *,
        order: PrefetchOrder = "block",
        flight_bytes: int = 64 << 20,
        deadline_s: float | None = None,
    ) -> PrefetchResult:
        """Bring the stored blocks of a sequence, or of a chain's keys in order, from disk to their node's memory.

        order: "block", from the first block on, or "layer", one layer group of a sequence after the other.
        flight_bytes: most on their way at a time. Stops where memory is full; a node that does not answer ends it. Can
        be cancelled at any time.
        """
        from ucxkv.sessions.session import chain_of

        self._check()
        chain = chain_of(what)
        return await self.prefetch_chain(chain.keys, chain.layer_groups, order, flight_bytes, deadline_s)

    async def prefetch_chain(
        self,
        keys: npt.NDArray[np.uint8],
        layer_groups: int,
        order: PrefetchOrder,
        flight_bytes: int,
        deadline_s: float | None,
    ) -> PrefetchResult:
        """`prefetch` of keys whose blocks are stored in so many layer groups."""
        from ucxkv.sequence import group_keys
        from ucxkv.sessions.prefetch import prefetch

        def brought(node: str, blocks: int, nbytes: int, start_s: float, end_s: float) -> None:
            self._router.loads.brought(node, NVME_TIER, blocks, nbytes, start_s, end_s)

        return await prefetch(
            self,
            group_keys(keys, layer_groups),
            order=order,
            flight_bytes=flight_bytes,
            deadline_s=deadline_s,
            on_brought=brought,
        )
