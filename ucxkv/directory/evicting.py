"""Making room: leaves go, as the policy picks them, so that every prefix stays closed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ucxkv.directory.events import Evict, Extent, RemovedReply

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory


def evict(directory: Directory, event: Evict, now_ns: int) -> RemovedReply:
    """Carry out an Evict."""
    extents: list[Extent] = []
    hide: list[int] = []
    passed: list[int] = []
    policy = directory.policy
    size = blocks = 0
    for _ in range(event.limit):
        slot = policy.pop() if size < event.bytes_needed else -1
        if slot < 0:
            break
        if event.regions is not None and not _is_in(directory, slot, event.regions):
            passed.append(slot)
            continue
        size += directory.depart(slot, extents, hide, now_ns)
        blocks += 1
    for slot in reversed(passed):
        policy.readmit(slot)
    directory.hide(hide, extents, now_ns)
    directory.blocks -= blocks
    directory.bytes -= size
    directory.totals["evicted"] += blocks
    return RemovedReply(blocks, size)


def _is_in(directory: Directory, slot: int, regions: Collection[int]) -> bool:
    """Whether a block has a part in these regions."""
    single = directory.words.single(slot)
    if single is not None:
        return single[0] in regions
    return any(region in regions for region, _, _ in directory.whole(slot)[0])
