"""What is known of one block: where it is, what holds it, what the policy makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucxkv.policy.base import Rating

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

__all__ = ["BlockFacts", "facts_of"]


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A visible block. idle: ticks since its last use; depth: blocks above it, 0 where no policy asks for it.

    children: in memory or being written; cold_children: on disk only. has_copy: its value is on disk, too.
    """

    is_cold: bool
    nbytes: int
    parts: int
    idle: int
    depth: int
    children: int
    cold_children: int
    leases: int
    is_durable: bool
    has_copy: bool
    rating: Rating


def facts_of(directory: Directory, key: bytes, now_ns: int) -> BlockFacts | None:
    """The visible block of this key, None when there is none. Tells the policy first what it has not been told yet."""
    slot = int(directory.table.find(key)[0])
    if slot < 0 or directory.words.is_derived(slot):
        return None
    directory.ranking.settle(now_ns)
    cold = directory.cold
    below = cold.below[slot] if cold.is_on else 0
    extents, _ = directory.whole(slot)
    depths = directory.ranking.depth
    return BlockFacts(
        is_cold=cold.is_cold(slot),
        nbytes=sum(length for _, _, length in extents),
        parts=len(extents),
        idle=max(0, directory.clock(now_ns) - directory.last_use[slot]),
        depth=depths[slot] if len(depths) else 0,
        children=directory.children(slot) - below,
        cold_children=below,
        leases=directory.leases.pins.get(directory.words.generation(slot), 0),
        is_durable=directory.durable.is_durable(slot),
        has_copy=bool(cold.is_on and (cold.is_cold(slot) or cold.copy[slot])),
        rating=directory.ranking.policy.rate(slot),
    )
