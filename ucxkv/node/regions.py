"""The shard's region table: what the u16 region number in a slot stands for.

Region 0 is this node's own segment. Other nodes' segments get the next free number when a part lies there for the first
time. A number is never given to another segment while this node lives, so a slot read late can not name the wrong
memory.
"""

from __future__ import annotations

from ucxkv import errors
from ucxkv.protocol import messages as m

__all__ = ["REGIONS_MAX", "RegionTable"]

REGIONS_MAX = 1024


class RegionTable:
    """Numbers for (node id, epoch, segment). size_bytes: of the own segment."""

    def __init__(self, node_id: int, epoch: int, size_bytes: int) -> None:
        self._infos = [m.SegmentInfo(region=0, node_id=node_id, epoch=epoch, segment=0, size_bytes=size_bytes)]
        self._numbers = {(node_id, 0): 0}

    def infos(self) -> list[m.SegmentInfo]:
        """Every region that slots of this shard may name."""
        return list(self._infos)

    def number(self, member: m.MemberInfo, segment: int) -> int:
        """The region of another node's segment; a new number the first time. Raises Overloaded when there are no
        more.
        """
        known = self._numbers.get((member.node_id, segment))
        if known is not None:
            return known
        if len(self._infos) >= REGIONS_MAX:
            raise errors.Overloaded(
                f"this shard has named {REGIONS_MAX} segments of other nodes; restart the node to forget the dead"
            )
        number = len(self._infos)
        self._infos.append(
            m.SegmentInfo(region=number, node_id=member.node_id, epoch=member.epoch, segment=segment, size_bytes=0)
        )
        self._numbers[(member.node_id, segment)] = number
        return number

    @property
    def others(self) -> bool:
        """Whether any block may have a part in another node's memory."""
        return len(self._infos) > 1

    def of_node(self, node_id: int) -> list[int]:
        """The regions that lie in one node's memory."""
        return [info.region for info in self._infos if info.node_id == node_id]

    def node_of(self, region: int) -> int:
        """The node whose memory a region is in."""
        return self._infos[region].node_id

    def segment_of(self, region: int) -> int:
        """Which of its node's segments a region is."""
        return self._infos[region].segment
