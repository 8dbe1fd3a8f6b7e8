"""Making room: leaves go, as the policy picks them, so that every prefix stays closed. What has a copy on disk leaves
memory only."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ucxkv.directory.events import Evict, Extent, RemovedReply
from ucxkv.policy.cost import Verdict

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

_PASSED_MAX = 64
"""So many leaves without a copy, where only those with one are to go, and the rest is taken to have none either."""


def evict(directory: Directory, event: Evict, now_ns: int) -> RemovedReply:
    """Carry out an Evict."""
    extents: list[Extent] = []
    hide: list[int] = []
    passed: list[int] = []
    uprooted: list[int] = []
    ranking, policy, cold = directory.ranking, directory.ranking.policy, directory.cold
    ranking.settle(now_ns)
    reason = f"memory was needed: {policy.rule}"
    size = blocks = demoted = 0
    is_cut = False
    for looked in range(event.limit + 1):
        if size + demoted >= event.bytes_needed:
            break
        if looked == event.limit or looked - len(passed) == event.most:
            is_cut = looked > len(passed)
            break
        slot = policy.pop()
        if slot < 0:
            break
        if event.regions is not None and not _is_in(directory, slot, event.regions):
            passed.append(slot)
        elif cold.is_on and cold.copy[slot]:
            ranking.decided(slot, Verdict.DEMOTE, reason, now_ns)
            demoted += cold.demote(slot, extents)
        elif not event.is_hiding:
            passed.append(slot)
            if len(passed) == _PASSED_MAX:
                break
        elif cold.is_on and cold.below[slot]:
            uprooted.append(slot)  # with what is below it on disk, which nobody could find any more
            size += directory.words.extent(slot)[2]
        else:
            ranking.decided(slot, Verdict.DROP, reason, now_ns)
            size += directory.depart(slot, extents, hide, now_ns)
            blocks += 1
    policy.put_back(passed)
    policy.put_back(uprooted)
    directory.hide(hide, extents, now_ns)
    size -= sum(directory.words.extent(slot)[2] for slot in uprooted)
    directory.blocks -= blocks
    directory.bytes -= size
    if uprooted:
        gone = directory.drop_slots(uprooted, now_ns, reason, is_evicted=True)
        directory.totals["lost"] -= gone.blocks
        blocks, size = blocks + gone.blocks, size + gone.bytes
        is_cut = is_cut or size + demoted < event.bytes_needed  # what was above them is a leaf only now
    directory.totals["evicted"] += blocks
    return RemovedReply(blocks, size, demoted=demoted, is_cut=is_cut)


def _is_in(directory: Directory, slot: int, regions: Collection[int]) -> bool:
    """Whether a block has a part in these regions."""
    single = directory.words.single(slot)
    if single is not None:
        return single[0] in regions
    return any(region in regions for region, _, _ in directory.whole(slot)[0])
