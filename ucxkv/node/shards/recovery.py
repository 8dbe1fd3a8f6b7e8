"""What a node of a cluster finds in its journal when it starts again: each shard's log, values proven by their sums.

It ends, or raises SetupError and has changed nothing outside of this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory.log import COMMIT_DTYPE, LogError
from ucxkv.errors import IntegrityError, SetupError
from ucxkv.journal import StopKind
from ucxkv.node.recovering import are_there, proven
from ucxkv.node.shards.records import ABSENT_REGION, ShardLog, feed
from ucxkv.tiers.base import ForeignExtent
from ucxkv.tiers.slabs import PLACE_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from ucxkv.directory.slots import Records
    from ucxkv.journal import Journal, Recovered, ValueFile
    from ucxkv.node.state import NodeMemory, NodeState
    from ucxkv.node.store import HostStore
    from ucxkv.replication import ShardConfig

__all__ = ["ShardRecovery", "recover_shards"]


@dataclass(slots=True)
class ShardRecovery:
    """What came back. logs: by shard; lacking: shards of which some value is not what was put, or gone.

    log_bytes: of the records behind the snapshot.
    """

    journal: Journal
    logs: dict[int, ShardLog] = field(default_factory=dict)
    lacking: dict[int, int] = field(default_factory=dict)
    """By shard: how many."""
    blocks: int = 0
    held_bytes: int = 0
    log_bytes: int = 0
    is_memory_lost: bool = False
    """The values are gone, and maybe the end of a journal that is not synced with them."""

    def rows(self) -> Records:
        """All rows whose values are here."""
        found = [rows for log in self.logs.values() for rows, _ in _newest_first(log)]
        return np.concatenate(found) if found else np.empty(0, COMMIT_DTYPE)

    def is_whole(self, shard: int, found: tuple[ShardConfig, int] | None, name: str) -> bool:
        """Whether the log of this shard may be gone on with: it is all here, or nobody else has any of it.

        A journal that is not synced may lack its end when the machine was started anew, as the memory's loss tells.
        """
        if shard not in self.lacking and not self.is_memory_lost:
            return True
        return found is None or {member.name for member in found[0].insync} == {name}


def recover_shards(
    store: HostStore,
    state: NodeState,
    memory: NodeMemory,
    journal: Journal,
    told: Recovered,
    values: ValueFile | None,
) -> ShardRecovery:
    """Take in what the journal of `state` says; the values stay where they are, in a store that has nothing yet.

    values: where the disk has them, too; read when the memory of before is gone.
    """
    if told.stopped.kind is StopKind.DAMAGED:
        raise SetupError(
            f"the journal in {state.journal_folder} is damaged: what was acknowledged after that place cannot be read",
            found=str(told.stopped),
            needed="the files as they were written",
            fix="put them back from a copy; or, where replicas have the rest, give this node's up: "
            f"`ucxkv forget {state.folder}`",
        )
    out = ShardRecovery(journal, is_memory_lost=bool(memory.why_empty and values is None and told.last_lsn))
    try:
        for record in told.snapshot:
            feed(out.logs, bytes(record))
        for _, _, record in told.records:
            feed(out.logs, bytes(record))
            out.log_bytes += len(record)
    except (LogError, IntegrityError) as exc:
        raise SetupError(
            f"the journal in {state.journal_folder} cannot be read",
            found=str(exc),
            needed="records of a node of a cluster, of this version of ucxkv",
            fix="start the node as it was started before (with or without --cluster), by the version that wrote it; to "
            f"give its blocks up: `ucxkv forget {state.folder}`",
        ) from exc
    _prove(store, memory, out, values)
    try:
        store.slabs.restore(_places(out.logs))
    except ForeignExtent as exc:
        raise SetupError(
            f"the journal in {state.journal_folder} does not fit the segment",
            found=str(exc),
            needed="the journal and the segment of one node",
            fix=f"report this; to give the blocks up: `ucxkv forget {state.folder}`",
        ) from exc
    out.held_bytes = store.hold_over(memory)
    return out


def _prove(store: HostStore, memory: NodeMemory, out: ShardRecovery, values: ValueFile | None) -> None:
    """Mark what is not there any more, or not what was put: all of it in one go, by several threads."""
    pieces = [(number, rows, is_over) for number, log in out.logs.items() for rows, is_over in _newest_first(log)]
    if not pieces:
        return
    whole = np.concatenate([rows for _, rows, _ in pieces])
    here = whole["region"] != ABSENT_REGION
    good = np.zeros(len(whole), np.bool_)
    if are_there(memory, whole, values):
        good = here & (proven(store, whole) == 0)
    out.blocks, at = int(good.sum()), 0
    for number, rows, is_over in pieces:
        fine = good[at : at + len(rows)]
        bad = int((here[at : at + len(rows)] & ~fine & ~is_over).sum())
        at += len(rows)
        rows["region"][~fine] = ABSENT_REGION
        if bad:
            out.lacking[number] = out.lacking.get(number, 0) + bad


def _newest_first(log: ShardLog) -> Iterator[tuple[Records, npt.NDArray[np.bool_]]]:
    """The rows of the log and of its state, each with a mark where a later record names its block, too: that may have
    been applied, and the row's memory be another block's.
    """
    named: set[bytes] = set()
    for logged in reversed(log.entries):
        if logged.rows is not None:
            keys = _keys(logged.rows["key"].tobytes())
            yield logged.rows, np.array([key in named for key in keys], np.bool_)
            named.update(keys)
        named.update(_keys(logged.keys))
    for rows in reversed(log.base):
        yield rows, np.array([key in named for key in _keys(rows["key"].tobytes())], np.bool_)


def _keys(raw: bytes) -> list[bytes]:
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def _places(logs: dict[int, ShardLog]) -> Records:
    """All places that are in use. Of a row whose block is named again, only where no other has any of its memory."""
    sure: list[Records] = []
    doubtful: list[tuple[Records, int]] = []
    for log in logs.values():
        for rows, is_over in _newest_first(log):
            here = rows["region"] != ABSENT_REGION
            sure.append(rows[here & ~is_over])
            doubtful += [(rows, int(at)) for at in np.flatnonzero(here & is_over)]
    places = _as_places(np.concatenate(sure)) if sure else np.empty(0, PLACE_DTYPE)
    if not doubtful:
        return places
    owners = {unit: _slab(place) for place in places for unit in _units(place)}
    taken = set(places["offset"].tolist())
    kept: list[Records] = []
    for rows, at in doubtful:
        place = _as_places(rows[at : at + 1])
        slab, units = _slab(place[0]), _units(place[0])
        if int(place["offset"][0]) in taken or any(owners.get(unit, slab) != slab for unit in units):
            rows["region"][at] = ABSENT_REGION
            continue
        owners.update(dict.fromkeys(units, slab))
        taken.add(int(place["offset"][0]))
        kept.append(place)
    return np.concatenate([places, *kept])


def _slab(place: np.void) -> tuple[int, int, int]:
    return int(place["base_unit"]), int(place["units"]), int(place["slot_lines"])


def _units(place: np.void) -> range:
    return range(int(place["base_unit"]), int(place["base_unit"]) + int(place["units"]))


def _as_places(rows: Records) -> Records:
    out = np.zeros(len(rows), PLACE_DTYPE)
    for name in ("offset", "slot_lines", "base_unit", "units"):
        out[name] = rows[name]
    return out
