"""Extents across nodes: this node's that hold parts of other nodes' blocks, and others' that hold this shard's.

An extent that another node's shard has adopted is that shard's until it surrenders it, or its node is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucxkv.node.space import OWN_SEGMENT, Space, u64, u64s
from ucxkv.protocol import messages as m
from ucxkv.tiers.base import Extent, ForeignExtent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.node.regions import RegionTable

__all__ = ["Adoption"]


class Adoption:
    """See the module; the books of one node."""

    def __init__(self, space: Space, regions: RegionTable) -> None:
        self._space = space
        self._regions = regions
        self._adopted: dict[str, dict[int, int]] = {}
        self._surrendered: dict[int, list[Extent]] = {}

    # ---- own extents in other shards

    def adopt(self, home: str, request: m.Adopt) -> m.Statuses:
        """Extents granted here now belong to a block of another node's shard: 0 = adopted, 1 = not held, a key each."""
        mine = self._adopted.setdefault(home, {})
        status = bytearray()
        for offset in u64s(request.offsets):
            try:
                length = self._space.grants.take(request.session, Extent(OWN_SEGMENT, offset, 0))
            except ForeignExtent:
                status.append(1)
                continue
            mine[offset] = length
            status.append(0)
        if any(status):  # the home refuses the whole put then
            taken = [o for o, st in zip(u64s(request.offsets), status, strict=True) if not st]
            for offset in taken:
                del mine[offset]
            self._space.slabs.free(taken)
        return m.Statuses(status=bytes(status))

    def surrendered(self, home: str, request: m.Surrender) -> None:
        """Another node's shard needs these extents no longer."""
        mine = self._adopted.get(home, {})
        self._space.slabs.free([o for o in u64s(request.offsets) if mine.pop(o, None) is not None])

    def home_lost(self, home: str) -> None:
        """A node is gone, and its shard: what it had here is free."""
        self._space.slabs.free(list(self._adopted.pop(home, {})))

    def bytes_of(self, home: str) -> int:
        """Bytes of this node's memory that hold parts of another node's blocks."""
        return sum(self._adopted.get(home, {}).values())

    @property
    def bytes_count(self) -> int:
        """The same for all nodes."""
        return sum(sum(mine.values()) for mine in self._adopted.values())

    # ---- others' extents in this shard

    def free(self, places: Iterable[tuple[int, int]]) -> None:
        """The shard needs these (region, offset) no longer: own ones are free, others' are to be surrendered."""
        own: list[int] = []
        for region, offset in places:
            if region == OWN_SEGMENT:
                own.append(offset)
            else:
                node = self._regions.node_of(region)
                self._surrendered.setdefault(node, []).append(Extent(self._regions.segment_of(region), offset, 0))
        if own:
            self._space.slabs.free(own)

    @property
    def has_news(self) -> bool:
        """Whether `take_surrendered` has something."""
        return bool(self._surrendered)

    def take_surrendered(self) -> dict[int, m.Surrender]:
        """What other nodes are to be told since the last call, by node id."""
        out, self._surrendered = self._surrendered, {}
        return {
            node_id: m.Surrender(
                segments=np.array([e.segment for e in extents], np.uint16).tobytes(),
                offsets=u64([e.offset for e in extents]),
            )
            for node_id, extents in out.items()
        }
