"""A directory's durable blocks out of its log, and back into one: all of them in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.directory.slots import NONE, U8, PutStatus, Records

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

DURABLE = np.uint32(1 << 31)


def restore(directory: Directory, rows: Records, status: U8, now_ns: int) -> U8:
    """Make these blocks visible and durable, in a directory that has none yet: PutStatus u8[n].

    A block whose parent did not come back is ORDER, so no hole is ever visible. Generations go on behind the log's.
    """
    if directory.blocks or directory.generation or directory.durable.is_busy:
        raise ValueError("blocks are restored into an empty directory")
    table, arrays = directory.table, directory.arrays
    columns = (np.ascontiguousarray(rows[name]) for name in ("key", "parent", "region", "offset", "length", "sum"))
    keys, parents, regions, offsets, lengths, sums = columns
    directory.generation = int(rows["generation"].max(initial=0))
    out, slots, above, nbytes = table.put(
        keys.view(np.uint8), parents.view(np.uint8), regions, offsets, lengths, sums,
        generation=directory.generation + 1, status=status.copy(),
    )  # fmt: skip
    directory.generation += len(rows)
    stored = out == PutStatus.STORED
    mine, over = slots[stored], above[stored]
    arrays["parent"][mine] = over.astype(np.uint32)  # -1 is NONE
    arrays["last_use"][mine] = directory.clock(now_ns)
    np.add.at(arrays["holds"], over[over >= 0], np.uint32(1))
    arrays["holds"][mine] |= DURABLE
    directory.blocks = directory.durable.blocks = len(mine)
    directory.bytes = directory.durable.bytes = nbytes
    return out


def durable_rows(directory: Directory) -> Records:
    """See `Directory.durable_rows`. A parent was visible before its child, so generations put it first."""
    table, arrays = directory.table, directory.arrays
    records = table.records[: table.fresh]
    is_durable = (records["state"] == 1) & (arrays["holds"][: table.fresh] & DURABLE != 0)
    slots = np.flatnonzero(is_durable)
    slots = slots[np.argsort(records["generation"][slots], kind="stable")]
    rows = np.zeros(len(slots), COMMIT_DTYPE)
    for name in ("key", "generation", "offset", "sum", "length", "region", "tier"):
        rows[name] = records[name][slots]
    rows["flag"] = records["flags"][slots, 1]
    parents = arrays["parent"][slots]
    is_child = parents != NONE
    rows["parent"][is_child] = records["key"][parents[is_child]]
    return rows
