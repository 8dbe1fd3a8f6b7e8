"""What a disk tier tells a directory: copies that are written, values that are back in memory, files that are gone.

Events like those of `events`; their part of the directory is `cold`. A copy on disk is named by its *handle*, a number
of the tier's own from 1 to 2**32 - 1, its own until an effect FreeExtents names (DISK_REGION, handle, length): then
nobody reads or names it any more. Columns: handles u32[n]; the rest as in `events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucxkv.directory.events import Event, RemovedReply
from ucxkv.directory.slots import U8, Buffer

__all__ = ["AdoptCold", "Copied", "CopiesLost", "Fresh", "FreshReply", "TakenReply", "Trim", "Warm"]


@dataclass(frozen=True, slots=True)
class TakenReply:
    """`taken` u8[n]: 1 where the directory has it now; elsewhere the handle, or the extent, stays the caller's."""

    taken: U8


@dataclass(frozen=True, slots=True)
class FreshReply:
    """Blocks without a copy, parents before children: (slot, generation) each. more: there are others."""

    blocks: list[tuple[int, int]]
    more: bool


@dataclass(frozen=True, slots=True)
class Fresh(Event[FreshReply]):
    """Take the next blocks that are in memory and have no copy, until `nbytes` or `limit` of them are named.

    Each is named once; `Copied` says what became of it, and one that could not be written is given back with `again`.
    """

    nbytes: int
    limit: int
    again: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Copied(Event[TakenReply]):
    """The values of these (slots i32[n], generations u64[n]) are on disk under `handles`."""

    slots: Buffer
    generations: Buffer
    handles: Buffer


@dataclass(frozen=True, slots=True)
class Warm(Event[TakenReply]):
    """The values of these cold blocks, read from the copies `handles`, lie in this node's memory at `offsets`.

    sums: u64[n], of the bytes there: what is shown from now on, also where the tier stores with loss.
    """

    keys: Buffer
    handles: Buffer
    offsets: Buffer
    sums: Buffer


@dataclass(frozen=True, slots=True)
class CopiesLost(Event[RemovedReply]):
    """These copies are gone: blocks that are there only go, and all below them; others have none any more.

    is_damage: they are bad, not given up; so the blocks count as lost, not as evicted.
    """

    keys: Buffer
    handles: Buffer
    is_damage: bool = False


@dataclass(frozen=True, slots=True)
class Trim(Event[RemovedReply]):
    """Hide so many cold blocks if there are, chains from their tails, those unused longest first: for a full table.

    keep: keys of blocks that stay, since others are to come below them.
    """

    count: int
    keep: Buffer = b""


@dataclass(frozen=True, slots=True)
class AdoptCold(Event[TakenReply]):
    """Take in what a tier found at its start, parents before children: blocks of class cache, in no memory.

    One whose parent is not there is left out, and with it what is below, so that no hole is ever visible.
    """

    keys: Buffer
    parents: Buffer
    handles: Buffer
    lengths: Buffer
    sums: Buffer
