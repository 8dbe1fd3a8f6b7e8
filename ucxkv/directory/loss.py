"""Taking out everything that stood on regions which are gone, and all that hangs on it, in one step.

Vectorised over the whole table: losing a node may remove millions of blocks, and no half of it may be seen by an event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.descent import with_descendants
from ucxkv.directory.events import Extent, RemovedReply
from ucxkv.directory.slots import NONE, PART_FLAG

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory


def lose(
    directory: Directory,
    regions: set[int],
    now_ns: int,
    reason: str,
    slots: Sequence[int] = (),
    *,
    is_evicted: bool = False,
) -> RemovedReply:
    """Hide every block with a part in these regions or in these slots and all descendants, deepest first.

    Extents outside the lost regions leave in good order.

    Gives up the writing of blocks with a sealed part there or below what is hidden. Counters are the caller's to
    adjust. reason, is_evicted: what the policy and its log are told.
    """
    table, arrays = directory.table, directory.arrays
    records = table.records[: table.fresh]
    is_visible = records["state"] == 1
    is_derived = is_visible & (records["flags"][:, 0] & PART_FLAG != 0)
    parents = np.where(is_visible, arrays["parent"][: table.fresh], np.uint32(NONE))
    is_hit = is_visible & np.isin(records["region"], np.array(sorted(regions), np.uint16))
    is_hit[list(slots)] = True
    marked = is_hit.copy()
    marked[parents[is_hit & is_derived]] = True  # a lost part takes its block along
    gone = with_descendants(parents, marked)
    blocks, derived = gone[~is_derived[gone]], gone[is_derived[gone]]
    order = np.concatenate([blocks, derived])
    directory.ranking.gone(blocks, now_ns, reason, is_evicted=is_evicted)
    directory.elsewhere.gone(blocks)

    left = directory.durable.gone(blocks.tolist())
    is_gone = np.zeros(len(records) + 1, np.bool_)
    is_gone[blocks] = True
    above = np.minimum(parents[blocks], np.uint32(len(records)))
    tops = blocks[(above != len(records)) & ~is_gone[above]]
    for slot in tops.tolist():
        directory.leave_parent(slot)

    directory.cold.gone(blocks, now_ns)
    send_off(directory, order, regions, now_ns)
    size = int(records["length"][order].sum(dtype=np.uint64))
    table.hide(order.astype(np.int32))
    directory.leaving.forget(regions)
    directory.parts.lost(set(blocks.tolist()) if directory.parts.writing else set(), regions, now_ns)
    return RemovedReply(len(blocks), size, left)


def send_off(directory: Directory, order: npt.NDArray[np.int64], regions: set[int], now_ns: int) -> None:
    """Send the extents of these slots on their way, by block where leases hold it; those in lost regions are no
    more."""
    records, pins = directory.table.records[order], directory.leases.pins
    columns = (records[name].tolist() for name in ("generation", "region", "offset", "length"))
    free: list[Extent] = []
    held: dict[int, list[Extent]] = defaultdict(list)
    for generation, region, offset, length in zip(*columns, strict=True):
        extents = held[generation] if generation in pins else free
        if region not in regions:
            extents.append((region, offset, length))
    for generation, extents in held.items():
        directory.leaving.add_held(generation, pins[generation], extents, now_ns)
    if free:
        directory.leaving.add(free, now_ns)
