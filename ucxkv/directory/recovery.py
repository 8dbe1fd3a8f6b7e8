"""A directory's durable blocks out of its log, and back into one: all of them in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory.events import Roots
from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.directory.roots import below_roots
from ucxkv.directory.slots import KEY_BYTES, NONE, U8, PutStatus, Records

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

DURABLE = np.uint32(1 << 31)


def restore(directory: Directory, rows: Records, status: U8, now_ns: int) -> U8:
    """Make these blocks visible and durable: PutStatus u8[n].

    A block whose parent did not come back is ORDER, so no hole is ever visible; one whose parent is there but not
    durable is so too. Generations go on behind the log's and behind the directory's.
    """
    table, arrays = directory.table, directory.arrays
    columns = (np.ascontiguousarray(rows[name]) for name in ("key", "parent", "region", "offset", "length", "sum"))
    keys, parents, regions, offsets, lengths, sums = columns
    marks = status.copy()
    if directory.blocks or directory.durable.is_busy or directory.parts.writing:
        _mark(directory, keys.view(np.uint8), parents.view(np.uint8), marks)
    directory.generation = max(directory.generation, int(rows["generation"].max(initial=0)))
    out, slots, above, nbytes = table.put(
        keys.view(np.uint8), parents.view(np.uint8), regions, offsets, lengths, sums,
        generation=directory.generation + 1, status=marks,
    )  # fmt: skip
    directory.generation += len(rows)
    stored = out == PutStatus.STORED
    mine, over = slots[stored], above[stored]
    arrays["parent"][mine] = over.astype(np.uint32)  # -1 is NONE
    arrays["holds"][mine] = DURABLE
    np.add.at(arrays["holds"], over[over >= 0], np.uint32(1))
    directory.ranking.came_held(mine.astype(np.int64), now_ns)
    if directory.offspring.is_on:
        directory.offspring.came(mine.tolist())
    directory.blocks += len(mine)
    directory.durable.blocks += len(mine)
    directory.bytes += nbytes
    directory.durable.bytes += nbytes
    return out


def _mark(directory: Directory, keys: U8, parents: U8, marks: U8) -> None:
    """Mark what must not come back beside what is there already, where it would hang on something that may go."""
    table, pending = directory.table, directory.durable
    above = table.find(parents)
    is_there = above >= 0
    is_loose = is_there & (directory.arrays["holds"][above] & DURABLE == 0)
    marks[(marks == 0) & is_loose] = PutStatus.ORDER
    if pending.leaving:
        marks[(marks == 0) & np.isin(above, list(pending.leaving))] = PutStatus.BUSY
    if pending.staged or directory.parts.writing:
        raw, writing = keys.tobytes(), directory.parts.writing
        names = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        is_busy = [name in pending.staged or writing.get(name) is not None for name in names]
        marks[(marks == 0) & np.array(is_busy, np.bool_)] = PutStatus.BUSY


def durable_rows(directory: Directory, roots: Roots | None = None) -> Records:
    """See `Directory.durable_rows`."""
    table = directory.table
    holds = directory.arrays["holds"]
    if roots is None:
        slots = np.flatnonzero((table.records["state"][: table.fresh] == 1) & (holds[: table.fresh] & DURABLE != 0))
    else:
        slots = below_roots(directory, roots)
        slots = slots[holds[slots] & DURABLE != 0]
    return rows_of(directory, slots)


def rows_of(directory: Directory, slots: npt.NDArray[np.int64]) -> Records:
    """These blocks as rows of the log. A parent was put before its child, so generations put it first."""
    records = directory.table.records
    slots = slots[np.argsort(records["generation"][slots], kind="stable")]
    rows = np.zeros(len(slots), COMMIT_DTYPE)
    for name in ("key", "generation", "offset", "sum", "length", "region", "tier"):
        rows[name] = records[name][slots]
    rows["flag"] = records["flags"][slots, 1]
    parents = directory.arrays["parent"][slots]
    is_child = parents != NONE
    rows["parent"][is_child] = records["key"][parents[is_child]]
    return rows
