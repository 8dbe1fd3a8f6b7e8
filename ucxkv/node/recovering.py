"""What a node finds when it starts again: the blocks that its journal names, each proven by its sum before anybody sees
it.

A block whose bytes are gone or not what was put is left out, and with it all below, so no hole is ever visible. Nothing
of another incarnation's writers is given out (`NodeMemory.held_units`). It ends, or raises SetupError and has changed
nothing outside of this process.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory import PutStatus, events
from ucxkv.directory.log import LogError, Replay
from ucxkv.errors import IntegrityError, SetupError
from ucxkv.journal import StopKind
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.base import ForeignExtent
from ucxkv.tiers.slabs import PLACE_DTYPE

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.directory.slots import Records
    from ucxkv.journal import Recovered, ValueFile
    from ucxkv.node.state import NodeMemory, NodeState
    from ucxkv.node.store import HostStore

__all__ = ["Recovery", "are_there", "proven", "recover"]

_THREADS_MAX = 8
_REFUSED = int(PutStatus.REFUSED)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came back. lost: the keys that did not, children before parents, to be logged as gone.

    damaged: blocks whose bytes are not what was put; the other lost ones hung below, or all bytes are gone.
    index_s: reading the journal and building the directory; index_cpu_s: this thread's share. sums_s: proving the
    bytes. log_bytes: of the records behind the snapshot. rows: what came back, COMMIT_DTYPE[n].
    """

    blocks: int
    lost: bytes
    damaged: int
    index_s: float
    index_cpu_s: float
    sums_s: float
    held_bytes: int
    log_bytes: int
    rows: Records

    @property
    def lost_blocks(self) -> int:
        """How many did not come back."""
        return len(self.lost) // 16


def recover(
    store: HostStore, state: NodeState, memory: NodeMemory, journal: Recovered, values: ValueFile | None
) -> Recovery:
    """Take in what the journal of `state` says, into a store on `memory` that has nothing yet. Raises SetupError.

    values: where the disk has them, too; read when the memory of before is gone.
    """
    began, cpu_s = time.monotonic(), time.thread_time()
    rows, log_bytes = _replayed(state, journal)
    if len(rows) > store.table.capacity:
        raise SetupError(
            "the slot table is too small for the durable blocks of before",
            found=f"{store.table.capacity} slots",
            needed=f"{len(rows)} or more",
            fix="set slots_count back to what it was, or 0",
        )
    read, read_cpu_s = time.monotonic(), time.thread_time()
    status = proven(store, rows) if are_there(memory, rows, values) else np.full(len(rows), _REFUSED, np.uint8)
    proved, cpu_s = time.monotonic(), cpu_s + time.thread_time() - read_cpu_s
    out = store.handle(events.Restore(rows, status), time.monotonic_ns()).status
    if bool((out == PutStatus.NO_SPACE).any()):
        raise SetupError("the slot table has no room for a durable block of before", fix="raise slots_count")
    try:
        store.slabs.restore(_places(rows[out == PutStatus.STORED]))
    except ForeignExtent as exc:
        raise SetupError(
            f"the journal in {state.journal_folder} does not fit the segment",
            found=str(exc),
            needed="the journal and the segment of one node",
            fix=f"report this; to give the blocks up: `ucxkv forget {state.folder}`",
        ) from exc
    held_bytes = store.hold_over(memory)
    lost = rows["key"][out != PutStatus.STORED][::-1].tobytes()
    done = time.monotonic()
    return Recovery(
        blocks=int((out == PutStatus.STORED).sum()),
        lost=lost,
        damaged=0 if memory.why_empty and values is None else int((status != 0).sum()),
        index_s=(read - began) + (done - proved),
        index_cpu_s=time.thread_time() - cpu_s,
        sums_s=proved - read,
        held_bytes=held_bytes,
        log_bytes=log_bytes,
        rows=rows[out == PutStatus.STORED],
    )


def are_there(memory: NodeMemory, rows: Records, values: ValueFile | None) -> bool:
    """Whether the memory has bytes of before, fetched from the disk if need be: each block's sum tells whether it is
    there. Raises SetupError.
    """
    if memory.why_empty and values is not None:
        try:
            values.read(rows)
        except OSError as exc:
            raise SetupError(
                f"the values of durable blocks in {values.folder} cannot be read",
                found=str(exc),
                needed="the file as it was written",
                fix="check the disk (dmesg), then start the node again",
            ) from exc
    return not memory.why_empty or values is not None


def _replayed(state: NodeState, journal: Recovered) -> tuple[Records, int]:
    """What the journal comes to, and how many bytes of it came after its snapshot."""
    if journal.stopped.kind is StopKind.DAMAGED:
        raise SetupError(
            f"the journal in {state.journal_folder} is damaged: what was acknowledged after that place cannot be read",
            found=str(journal.stopped),
            needed="the files as they were written",
            fix=f"put them back from a copy; or give the blocks up: `ucxkv forget {state.folder}`",
        )
    replay, log_bytes = Replay(), 0
    try:
        for chunk in journal.snapshot:
            replay.feed(chunk)
        for _, _, record in journal.records:
            replay.feed(record)
            log_bytes += len(record)
    except (LogError, IntegrityError) as exc:
        raise SetupError(
            f"the journal in {state.journal_folder} cannot be read",
            found=str(exc),
            needed="records of this version of ucxkv",
            fix=f"run the version that wrote it; to give the blocks up: `ucxkv forget {state.folder}`",
        ) from exc
    return replay.rows(), log_bytes


def proven(store: HostStore, rows: Records) -> npt.NDArray[np.uint8]:
    """0 for each block whose bytes are what was put; by several threads, without the GIL."""
    size, base = np.uint64(store.segment.size_bytes), np.uint64(store.segment.address)
    lengths = rows["length"].astype(np.uint64)
    is_inside = (rows["region"] == 0) & (rows["offset"] <= size) & (lengths <= size - np.minimum(rows["offset"], size))
    iov = np.zeros(len(rows), tier_copy.IOV_DTYPE)
    iov["addr"] = base + np.where(is_inside, rows["offset"], 0)
    iov["len"] = np.where(is_inside, lengths, 0)
    sums = np.zeros(len(rows), np.uint64)
    cuts = np.linspace(0, len(rows), min(_THREADS_MAX, os.cpu_count() or 1) + 1).astype(int).tolist()

    def prove(begin: int, end: int) -> None:
        n = end - begin
        first = np.arange(n + 1, dtype=np.uint32)
        tier_copy.gather(first, iov[begin:end], np.zeros(n, np.uint64), sums[begin:end])

    with ThreadPoolExecutor(len(cuts) - 1) as pool:
        list(pool.map(prove, cuts[:-1], cuts[1:]))
    return np.where(is_inside & (sums == rows["sum"]), 0, _REFUSED).astype(np.uint8)


def _places(rows: Records) -> Records:
    out = np.zeros(len(rows), PLACE_DTYPE)
    for name in ("offset", "slot_lines", "base_unit", "units"):
        out[name] = rows[name]
    return out
