"""Taking out at once what is lost and all that hangs on it: no half of it may be seen by an event.

What stood on regions that are gone is looked for in the whole table, vectorised, since losing a node may remove
millions of blocks. What single blocks take along is found from them (`offspring`), where that is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.descent import with_descendants
from ucxkv.directory.events import Extent, RemovedReply
from ucxkv.directory.records import derived_keys
from ucxkv.directory.slots import NONE, PART_FLAG, U32

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

Slots = npt.NDArray[np.int64]


def lose(directory: Directory, regions: set[int], now_ns: int, reason: str) -> RemovedReply:
    """Hide every block with a part in these regions and all descendants, deepest first.

    Extents outside the lost regions leave in good order.

    Gives up the writing of blocks with a sealed part there or below what is hidden. Counters are the caller's to
    adjust. reason: what the policy and its log are told.
    """
    records, is_visible, parents = _all(directory)
    is_derived = is_visible & (records["flags"][:, 0] & PART_FLAG != 0)
    is_hit = is_visible & np.isin(records["region"], np.array(sorted(regions), np.uint16))
    marked = is_hit.copy()
    marked[parents[is_hit & is_derived]] = True  # a lost part takes its block along
    gone = with_descendants(parents, marked)
    blocks, derived = gone[~is_derived[gone]], gone[is_derived[gone]]
    is_gone = np.zeros(len(records) + 1, np.bool_)
    is_gone[blocks] = True
    above = np.minimum(parents[blocks], np.uint32(len(records)))
    tops = blocks[(above != len(records)) & ~is_gone[above]]
    return _take_out(directory, blocks, derived, tops.tolist(), regions, now_ns, reason, is_evicted=False)


def drop(
    directory: Directory, slots: Sequence[int], now_ns: int, reason: str, *, is_evicted: bool = False
) -> RemovedReply:
    """Hide the blocks of these slots, which may be parts of them, and all descendants, children first.

    Gives up the writing of blocks below. Counters, reason: as for `lose`. is_evicted: what the policy is told, too.
    Work: in proportion to what goes, with a disk tier; elsewhere only as long as no block has children.
    """
    words, parent = directory.words, directory.parent
    hit = list(dict.fromkeys(parent[slot] if words.is_derived(slot) else slot for slot in slots))
    if directory.offspring.is_on:
        order, heads = directory.offspring.with_descendants(hit)
    elif not any(map(directory.children, hit)):
        order = heads = hit
    else:
        order, heads = _look_for(directory, hit)
    tops = [slot for slot in heads if parent[slot] != NONE]
    parted = [slot for slot in order if words.parts(slot) > 1]
    keys = b"".join(key for slot in parted for key in derived_keys(words.key(slot), words.parts(slot)))
    blocks, derived = np.array(order, np.int64), directory.table.find(keys).astype(np.int64)
    return _take_out(directory, blocks, derived, tops, set(), now_ns, reason, is_evicted=is_evicted)


def _all(directory: Directory) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_], U32]:
    """Every slot in use: its record, whether it is visible, and its parent, NONE where it is not."""
    table = directory.table
    records = table.records[: table.fresh]
    is_visible = records["state"] == 1
    return records, is_visible, np.where(is_visible, directory.arrays["parent"][: table.fresh], np.uint32(NONE))


def _look_for(directory: Directory, slots: list[int]) -> tuple[list[int], list[int]]:
    """What `Offspring.with_descendants` finds, by looking at all there is."""
    records, _, parents = _all(directory)
    marked = np.zeros(len(records), np.bool_)
    marked[slots] = True
    found = with_descendants(parents, marked)
    order: list[int] = found[records["flags"][found, 0] & PART_FLAG == 0].tolist()
    gone = set(order)
    return order, [slot for slot in order if directory.parent[slot] not in gone]


def _take_out(
    directory: Directory,
    blocks: Slots,
    derived: Slots,
    tops: list[int],
    regions: set[int],
    now_ns: int,
    reason: str,
    *,
    is_evicted: bool,
) -> RemovedReply:
    """Hide these blocks, children first, and then their parts. tops: those whose parents stay."""
    table, order = directory.table, np.concatenate([blocks, derived])
    directory.ranking.gone(blocks, now_ns, reason, is_evicted=is_evicted)
    directory.elsewhere.gone(blocks)
    left = directory.durable.gone(blocks.tolist())
    for slot in tops:
        directory.leave_parent(slot)
    directory.cold.gone(blocks, now_ns)
    directory.offspring.gone(blocks)
    send_off(directory, order, regions, now_ns)
    size = int(table.records["length"][order].sum(dtype=np.uint64))
    table.hide(order.astype(np.int32))
    if regions:
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
