"""Giving up a shard: every block of its chains goes out of the table in one step, when another node leads it.

What is class cache is freed in good order. What is durable stays where it is, in the caller's hands: it is what a
follower keeps of the shard, and what it takes in again (`Restore`) should it lead once more.

Invariant: no memory that a lease covers is freed before the lease ends, in whosever hands it is. The leases on what the
caller keeps can't be renewed any more, so the reply's `busy_until_ns` is final; the directory remembers these extents
until then, for blocks that come back and go again meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.events import Extent, Roots, Withdraw, WithdrawReply
from ucxkv.directory.loss import send_off
from ucxkv.directory.recovery import DURABLE, rows_of
from ucxkv.directory.roots import below_roots, picked
from ucxkv.directory.slots import PART_FLAG

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

Slots = npt.NDArray[np.int64]


def withdraw(directory: Directory, event: Withdraw, now_ns: int) -> WithdrawReply:
    """Carry out a Withdraw; counters of blocks and bytes included."""
    table, arrays = directory.table, directory.arrays
    slots = below_roots(directory, event.roots)
    is_derived = table.records["flags"][slots, 0] & PART_FLAG != 0
    blocks = slots[~is_derived]
    gone = set(blocks.tolist())
    _refuse_staged(directory, gone, event.roots)
    order = np.concatenate([blocks, slots[is_derived]])  # a block before its parts
    is_durable = arrays["holds"][blocks] & DURABLE != 0
    rows = rows_of(directory, blocks[is_durable])

    is_kept = np.zeros(table.capacity, np.bool_)
    is_kept[blocks[is_durable]] = True
    if event.keep:
        named = table.find(b"".join(event.keep))
        is_kept[np.intersect1d(named, blocks)] = True
    parts = slots[is_derived]
    is_kept[parts] = is_kept[arrays["parent"][parts]]
    kept, freed = order[is_kept[order]], order[~is_kept[order]]
    busy_until_ns = _let_leases_run_out(directory, kept, now_ns)

    directory.ranking.gone(blocks, now_ns, "another node leads its shard now")
    directory.elsewhere.gone(blocks)
    directory.cold.gone(blocks, now_ns)
    directory.offspring.gone(blocks)
    send_off(directory, freed, set(), now_ns)
    lengths = table.records["length"]
    size = int(lengths[order].sum(dtype=np.uint64))
    durable = directory.durable
    durable.blocks -= len(rows)
    durable.bytes -= int(rows["length"].sum(dtype=np.uint64))
    table.hide(order.astype(np.int32))
    directory.parts.withdraw(gone, event.roots, now_ns)
    directory.blocks -= len(blocks)
    directory.bytes -= size
    directory.totals["withdrawn"] += len(blocks)
    return WithdrawReply(rows, len(blocks), size, busy_until_ns)


def _refuse_staged(directory: Directory, gone: set[int], roots: Roots) -> None:
    """ValueError when a batch still has something to do with these blocks."""
    durable = directory.durable
    for pending in (durable.upgrading, durable.leaving):
        for slot in pending.keys() & gone:
            raise ValueError(f"{directory.words.key(slot).hex()} is withdrawn, and batch {pending[slot][1]} is staged")
    tops = [block for block in durable.staged.values() if block.above is None and not block.is_doomed]
    keys = b"".join([block.key for block in tops])
    is_ours = picked(np.frombuffer(keys, np.uint8), roots).tolist()
    for block, one in zip(tops, is_ours, strict=True):
        if block.parent_slot in gone or (one and block.parent_slot < 0):
            raise ValueError(f"{block.key.hex()} is withdrawn with its chain, and batch {block.batch} is staged")


def _let_leases_run_out(directory: Directory, kept: Slots, now_ns: int) -> int:
    """See to it that no lease on these slots is renewed, and that their extents stay as long as one runs; until when,
    `now_ns` when none does."""
    pins, leaving, records = directory.leases.pins, directory.leaving, directory.table.records
    extents: dict[int, list[Extent]] = {}
    until_ns = now_ns
    if leaving.busy:
        columns = (records[name][kept].tolist() for name in ("region", "offset", "length"))
        until_ns = max(until_ns, leaving.busy_until(zip(*columns, strict=True)))
    if pins:
        generations = records["generation"][kept]
        for at in np.flatnonzero(np.isin(generations, np.fromiter(pins, np.uint64, len(pins)))).tolist():
            extents.setdefault(int(generations[at]), []).append(directory.words.extent(int(kept[at])))
    if extents:
        until_ns = max(until_ns, directory.leases.let_run_out(extents.keys()))
        leaving.keep_busy([one for some in extents.values() for one in some], until_ns, now_ns)
        for generation in extents:
            leaving.add_held(generation, pins[generation], [], now_ns)
    return until_ns
