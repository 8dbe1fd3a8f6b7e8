"""What goes in and comes out of a store of datafiles. Values only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..datafile_format import NO_PARENT

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Block", "Durability", "Hooks", "Place", "Problem", "ProblemKind", "Recovered", "Stats"]


class Durability(enum.StrEnum):
    """When a write is acknowledged. process: the kernel or the disk has it (survives kill -9); power: it is synced."""

    PROCESS = "process"
    POWER = "power"


class Place(NamedTuple):
    """Where a block is: `length` bytes at `offset` of datafile `file`, in that file's life `generation`, with `sum`.

    A place stays good until its file is used again; reads of an older life are refused. flags: the writer's.
    drive: which store, where several are striped.
    """

    file: int
    generation: int
    offset: int
    length: int
    sum: int
    flags: int
    drive: int = 0


class Block(NamedTuple):
    """A block to write. key: 16 bytes. sum: xxh3-64 over the payload, which is the buffers one after the other.

    buffers: C-contiguous, not empty, borrowed until the write returned or raised. Whole blocks of 4 KiB at such
    addresses are written from where they are, others are copied. flags: below 2**31. parent: 16 bytes, the key of the
    block before it in its chain; zeros: it is a root. original: the block's bytes before they were encoded, 0 where
    they are written as they are; below 2**32.
    """

    key: bytes
    sum: int
    version: int
    buffers: Sequence[Buffer]
    flags: int = 0
    parent: bytes = NO_PARENT
    original: int = 0


class Recovered(NamedTuple):
    """A block that was found when the store was opened, as its last writer described it."""

    key: bytes
    version: int
    place: Place
    parent: bytes = NO_PARENT
    original: int = 0


class ProblemKind(enum.StrEnum):
    """What is wrong with a file that is left alone (damaged blocks: with a block that is left out)."""

    STRAY = "stray"
    FOREIGN = "foreign"
    NEWER = "newer"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that an operator should know. text: a sentence that says what was done about it."""

    kind: ProblemKind
    name: str
    text: str


def _no(_key: bytes, _place: Place) -> bool:
    return False


def _moved(_key: bytes, _old: Place, _new: Place) -> None:
    pass


def _dropped(_file: int, _generation: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the owner of the index is asked and told, synchronously, on the event loop; none of them may raise.

    is_hot: of a block in the file that is reclaimed next: whether its index names this very place for the key, no
    write or forget of the key is under way, and it is worth writing once more. moved: a copy of the block is safe at
    `new`; the index follows if it still names `old`. dropped: all places of this life of this file are gone.
    """

    is_hot: Callable[[bytes, Place], bool] = _no
    moved: Callable[[bytes, Place, Place], None] = _moved
    dropped: Callable[[int, int], None] = _dropped


@dataclass(slots=True)
class Stats:
    """Counts since the store was opened; bytes as given to the engine.

    payload_bytes: of acknowledged blocks, re-admitted ones not counted; written_bytes: headers, padding, indexes and
    re-admitted blocks included, so written_bytes / payload_bytes is the write amplification.
    """

    payload_bytes: int = 0
    written_bytes: int = 0
    batches: int = 0
    blocks_written: int = 0
    blocks_read: int = 0
    read_bytes: int = 0
    blocks_gone: int = 0
    blocks_damaged: int = 0
    tombstones: int = 0
    syncs: int = 0
    files: int = 0
    files_sealed: int = 0
    files_reclaimed: int = 0
    blocks_readmitted: int = 0
    readmitted_bytes: int = 0
    queued_bytes: int = 0
    warning: str = ""
    failure: str = ""
