"""The directory's invariants, asserted over its whole state; for tests and debug runs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory.cold import COLD, DISK_REGION
from ucxkv.directory.durable import DURABLE
from ucxkv.directory.events import Extent
from ucxkv.directory.records import derived_keys
from ucxkv.directory.slots import NONE, PART_FLAG

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory


def check(directory: Directory) -> None:
    """Assert I1, I2, I5, I6 and that holds, leaves, counters and tables agree with each other."""
    records = directory.table.records
    visible = _visible(directory)
    derived = {slot for slot in visible if records["flags"][slot][0] & PART_FLAG}
    blocks = visible - derived
    assert len(visible) == directory.table.used
    _check_keys(directory, visible, blocks, derived)
    _check_holds(directory, visible, blocks)
    _check_extents(directory, visible)
    directory.leases.check()
    directory.parts.writing.check()
    directory.durable.check()
    _check_durable(directory, blocks)
    _check_cold(directory, blocks)
    directory.elsewhere.check()
    directory.roots.check()
    generations = {int(records["generation"][slot]): slot for slot in blocks}
    assert len(generations) == len(blocks) and all(0 < g <= directory.generation for g in generations)
    for generation, leases in directory.leases.pins.items():
        assert (generation in generations) != directory.leaving.is_held(generation), "a pin on nothing"
        assert directory.leaving.held().get(generation, leases) == leases, "a leaving block held by other leases"
    assert directory.blocks == len(blocks)
    assert directory.bytes == sum(int(records["length"][slot]) for slot in visible)


def _visible(directory: Directory) -> set[int]:
    return set(np.flatnonzero(directory.table.records["state"][: directory.table.fresh] == 1).tolist())


def _check_keys(directory: Directory, visible: set[int], blocks: set[int], derived: set[int]) -> None:
    """I6 and I2: each visible slot is found under its own key, and a block has exactly its parts."""
    records = directory.table.records
    keys = {slot: records["key"][slot].tobytes() for slot in visible}
    assert len(set(keys.values())) == len(visible), "I6: two visible slots of one key"
    for slot, key in keys.items():
        assert int(directory.table.find(key)[0]) == slot, "I6: a visible slot is not found"
    seen = set()
    for slot in blocks:
        for key in derived_keys(keys[slot], int(records["parts"][slot])):
            part = int(directory.table.find(key)[0])
            assert part in derived and part not in seen, "I2: a part is missing"
            assert records["generation"][part] == records["generation"][slot], "I2: parts of two generations"
            assert directory.parent[part] == slot
            seen.add(part)
    assert seen == derived, "I2: a part of no block"


def _check_holds(directory: Directory, visible: set[int], blocks: set[int]) -> None:
    """I1, and holds = children + writing children + leases, and the leaves are those that nothing holds."""
    holds: Counter[int] = Counter()
    for slot in blocks:
        above = directory.parent[slot]
        assert above == NONE or above in blocks, "I1: a visible block whose parent is not"
        holds[above] += not directory.holds[slot] & COLD
    for block in directory.parts.writing:  # below another writing block: parent_slot is -1, and nothing held
        assert block.parent_slot == -1 or block.parent_slot in blocks, "I1: a writing block whose parent is not visible"
        assert int(directory.table.find(block.key)[0]) < 0, "a writing block is visible"
        holds[block.parent_slot] += 1
    for staged in directory.durable.staged.values():
        assert staged.parent_slot == -1 or staged.parent_slot in blocks, (
            "I1: a staged block whose parent is not visible"
        )
        holds[staged.parent_slot] += 1
    for slot in (*directory.durable.upgrading, *directory.durable.leaving):
        holds[slot] += 1
    for slot, children in directory.elsewhere.pinned.items():
        holds[slot] += len(children)
    for slot in blocks:
        holds[slot] += directory.leases.pins.get(directory.words.generation(slot), 0)
        assert directory.holds[slot] & ~(DURABLE | COLD) == holds[slot], "holds"
    directory.ranking.check(blocks)
    directory.offspring.check(blocks)


def _check_durable(directory: Directory, blocks: set[int]) -> None:
    """I8: above a durable block all is durable; and the counts."""
    durable = {slot for slot in blocks if directory.durable.is_durable(slot)}
    for slot in durable:
        above = directory.parent[slot]
        assert above == NONE or above in durable, "I8: a durable block whose parent is not"
        assert directory.words.parts(slot) == 1
    for block in directory.durable.staged.values():
        above = block.parent_slot
        assert above == -1 or above in durable or above in directory.durable.upgrading, "I8: a staged block's parent"
    for pending in (directory.durable.upgrading, directory.durable.leaving):
        assert all(slot in blocks and directory.words.generation(slot) == g for slot, (g, _) in pending.items())
    assert directory.durable.blocks == len(durable)
    assert directory.durable.bytes == sum(directory.words.extent(slot)[2] for slot in durable)


def _check_cold(directory: Directory, blocks: set[int]) -> None:
    """What is on disk only says so everywhere, each copy is one block's, and the counts."""
    state = directory.cold
    is_cold = {slot for slot in blocks if directory.holds[slot] & COLD}
    regions = directory.table.records["region"]
    assert is_cold == {slot for slot in blocks if regions[slot] == DISK_REGION}, "a cold block elsewhere than on disk"
    assert not any(directory.durable.is_durable(slot) for slot in is_cold), "a durable block on disk only"
    assert (state.blocks, state.bytes) == (len(is_cold), sum(directory.words.extent(slot)[2] for slot in is_cold))
    if not state.is_on:
        assert not is_cold
        return
    below: Counter[int] = Counter(directory.parent[slot] for slot in is_cold)
    handles = Counter(directory.words.extent(slot)[1] for slot in is_cold)
    for slot in range(directory.table.capacity):
        assert state.below[slot] == (below[slot] if slot in blocks else 0), "children on disk"
        assert not state.copy[slot] or (slot in blocks and slot not in is_cold), "a copy of nothing"
        handles[state.copy[slot]] += 1
    del handles[0]
    handles.update(offset for region, offset, _ in directory.leaving.extents() if region == DISK_REGION)
    assert set(handles.values()) <= {1}, "a copy of two blocks"


def held_extents(directory: Directory, visible: set[int] | None = None) -> list[Extent]:
    """Every extent the directory has in hand: of the visible slots (default: found here), of writings, staged, and
    leaving."""
    if visible is None:
        visible = _visible(directory)
    spans = [directory.words.extent(slot) for slot in visible]
    spans += [extent for block in directory.parts.writing for extent in block.extents()]
    spans += [block.extent for block in directory.durable.staged.values()]
    return spans + directory.leaving.extents()


def _check_extents(directory: Directory, visible: set[int]) -> None:
    """I5: no byte belongs to two of visible, being written, leaving."""
    directory.leaving.check()
    spans = sorted(extent for extent in held_extents(directory, visible) if extent[0] != DISK_REGION)
    for (region, offset, length), (other, start, _) in pairwise(spans):
        assert region != other or offset + length <= start, "I5: an extent in two hands"
