"""One shard on one node: the shell around its `Replica`. It carries out effects in order and feeds back what came of
them.

    log, applied    active (this node leads and serves it): blocks are in the node's directory, seen by readers
                    else: in `standby`, seen by nobody
    log, not applied  `pending`: entries with this node's places, by index
    leaving the log   values are free when nobody can read them any more

Invariants
  - A value's memory is in one hand: the directory's, the standby's, or that of a pending entry, and what is replaced or
    cut gives it back.
  - Nothing of an entry is confirmed before the values that it names are in this node's memory, or its leader has said
    that they are gone from its own.
  - The shard is taken out of readers' sight before any effect of the step that ended its leadership is carried out.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ucxkv.directory.log import COMMIT_DTYPE, leaves, read_record
from ucxkv.node.shards.records import (
    ABSENT_REGION,
    LoggedEntry,
    base_records,
    claims_record,
    entry_record,
    placeless,
    reset_record,
)
from ucxkv.node.shards.standby import Standby, places_of
from ucxkv.node.shards.values import SnapshotValues, commit_rows, gone_name
from ucxkv.node.space import Place
from ucxkv.replication import Kind, Member, Recovered, Replica, Role, Timing
from ucxkv.replication import events as ev
from ucxkv.replication.log import decode_entry
from ucxkv.replication.messages import Append, ReplicaMessage, SnapshotPart
from ucxkv.tokens import Point

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.directory.slots import Records
    from ucxkv.node.shards.base import ShardHost
    from ucxkv.node.shards.records import ShardLog
    from ucxkv.replication import Entry

__all__ = ["Shard"]

_CHUNK_ROWS = 768
_UNIT_RECORDS = 64

log = structlog.get_logger("ucxkv.node")


class Shard:
    """See the module. number: which one; told: what the journal says of it; is_whole: see `Recovered`; keeps: see
    `ShardConfig`.
    """

    def __init__(
        self,
        number: int,
        host: ShardHost,
        me: Member,
        timing: Timing,
        told: ShardLog | None,
        *,
        is_whole: bool,
        keeps: bool,
    ) -> None:
        self.number = number
        self.is_active = False
        """Its blocks are in the directory."""
        self.dormant_epoch = 0
        """Not 0: active, and not led since this epoch of its: the lease is over, and nobody is known to lead yet."""
        self.pending: dict[int, LoggedEntry] = {}
        self.limbo: dict[bytes, Records] = {}
        """While active: rows (of one) that the log has and the directory has not: their Leave is owed. Their values'
        memory, where they have any, is this table's until then.
        """
        self.busy_until_ns = 0
        """Until then readers may look at values that were withdrawn from the directory."""
        self._host = host
        self._proposed: dict[bytes, Records] = {}
        self._todo: deque[ev.Event] = deque()
        self._is_handling = False
        self._snapshot = SnapshotValues(number, host)
        self._claims: frozenset[Member] = frozenset()
        self.standby = Standby(told.rows() if told is not None else None)
        recovered = None
        if told is not None and is_whole:
            self.pending = {logged.index: logged for logged in told.entries}
            self._claims = told.claims
            entries = [logged.entry for logged in told.entries]
            recovered = Recovered(told.claims, True, told.base_index, told.base_epoch, entries)
        elif told is not None:  # what is here is of use for a leader's snapshot alone
            for logged in told.entries:
                host.free(self, places_of(logged.rows) if logged.rows is not None else [])
            host.persist(self, 0, [reset_record(number, 0, 0)])
        self.replica = Replica(me, timing, recovered, keeps=keeps)

    # ---- events and effects

    def handle(self, event: ev.Event) -> None:
        """Give the replica an event and do what it wants; events that this makes follow in order."""
        self._todo.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._todo:
                effects = self.replica.handle(self._todo.popleft(), time.monotonic_ns())
                self._look()
                for effect in effects:
                    self._perform(effect)
        except Exception as exc:  # a fault of ours: what was to be done is half done, so this node is not to go on
            self._todo.clear()
            self.replica.fail(f"a fault of the program: {exc!r}")
            self._host.broken(self, repr(exc))
            log.exception("shard.broken", shard=self.number)  # last: it may be the log that can't be written
        finally:
            self._is_handling = False
        if self.replica.serve_until_ns:
            if self.is_showable:
                self._host.gain_soon(self)
            elif self.dormant_epoch:
                self._host.resume(self)

    @property
    def is_showable(self) -> bool:
        """Whether its blocks may go into the directory: what it proposed when it was active before is applied, too."""
        return bool(self.replica.serve_until_ns) and not self.is_active and not self.pending

    def _look(self) -> None:
        """Whether what is in the directory may still be shown, now that the replica has gone on."""
        replica = self.replica
        if not self.is_active:
            return
        if self.dormant_epoch:
            if replica.leading is None and replica.epoch > self.dormant_epoch:
                self._host.lose(self)
        elif not replica.serve_until_ns:
            if replica.lease_until_ns or self.pending or self._host.writes.is_busy(self):
                self._host.lose(self)
            else:
                self._host.pause(self)

    def _perform(self, effect: ev.Effect) -> None:
        host = self._host
        match effect:
            case ev.Send():
                host.send(self, effect.to, effect.message)
            case ev.Persist():
                self._persist(effect)
            case ev.Apply():
                self._apply(effect)
            case ev.Refused():
                host.writes.refused(effect)
            case ev.Unknown():
                host.writes.unknown(effect.tags)
            case ev.WriteConfig():
                host.write_config(self, effect)
            case ev.ReadConfig():
                host.read_config(self)
            case ev.NeedSnapshot():
                self.handle(self._snapshot_for(effect.to))
            case ev.Restore():
                self._restore(effect)
            case ev.RoleChanged():
                say = log.error if effect.role is Role.FAILED else log.info
                say("shard.role", shard=self.number, role=effect.role.value, epoch=effect.epoch, why=effect.why)

    @property
    def is_busy(self) -> bool:
        """Whether time matters to it at this moment."""
        replica = self.replica
        config = replica.config.value
        if config is None or not replica.config.is_settled or replica.log.last_index != replica.watermark:
            return True
        if replica.leading is not None:
            return len(config.insync) > 1 or not replica.leading.is_ready
        return replica.role is Role.OUT and replica.me.name in replica.wish

    def held(self) -> Iterable[int]:
        """Offsets of the values that are this shard's outside of the directory, each once."""
        yield from self.standby.offsets()
        yield from self._snapshot.offsets()
        for row in self.limbo.values():
            yield from places_of(row)
        for logged in () if self.is_active else self.pending.values():  # the directory holds what it has staged
            if logged.rows is not None:
                yield from places_of(logged.rows)

    def snapshot_has(self, key: bytes, total: int) -> bool:
        """Whether this value of a snapshot that is coming is here."""
        return self._snapshot.has(key, total)

    # ---- proposals

    def propose(self, tag: int, parts: Iterable[tuple[bytes, Records | None]]) -> None:
        """Have these records written, in this order and together: each with its rows and their places, for a Commit.

        What becomes of them is told to `host.writes` by the tag, at once when they are refused.
        """
        records = []
        for record, rows in parts:
            if rows is not None:
                self._proposed[record] = rows
            records.append(record)
        self.handle(ev.Propose(tag, tuple(records)))
        for record in records:
            self._proposed.pop(record, None)  # it was refused

    def owe_leaves(self, rows: Records) -> None:
        """These durable blocks of this shard can't be shown, or are no longer there: have that logged, now or later.

        rows: of the log, children first, with the places of values that are here: the shard's until it is logged.
        """
        going = {rows["key"][at].tobytes(): rows[at : at + 1] for at in range(len(rows))}
        for logged in self.pending.values():
            for at, (key, _, _) in enumerate(_names(logged.rows) if logged.rows is not None else ()):
                row = going.get(key)
                if row is not None and row["region"][0] == ABSENT_REGION:
                    del going[key]  # it was there, is to become durable, and its memory is gone
                    logged.rows["region"][at], logged.rows["offset"][at] = ABSENT_REGION, 0  # type: ignore[index]
        self.limbo |= going
        self.propose(0, [(record, None) for record in leaves(rows["key"].tobytes())])

    def owe_again(self) -> None:
        """Some may have been refused, since the log took nothing then: once more, when nothing is on its way."""
        replica, limbo = self.replica, self.limbo
        if limbo and self.is_active and replica.serve_until_ns and replica.log.last_index == replica.watermark:
            self.owe_leaves(np.concatenate(list(limbo.values())))

    # ---- the journal

    def _persist(self, effect: ev.Persist) -> None:
        records = []
        if effect.claims != self._claims:
            self._claims = effect.claims
            records.append(claims_record(self.number, effect.claims))
        if effect.entries:
            self._drop_pending(effect.entries[0].index)
        # the newest first: of a block that went and came again one value has come, and it is the last Commit's
        logged = [self._logged(entry) for entry in reversed(effect.entries)]
        for one in reversed(logged):
            self.pending[one.index] = one
            records.append(entry_record(self.number, one))
        self._host.persist(self, effect.serial, records)

    def _logged(self, entry: Entry) -> LoggedEntry:
        """The entry with places of this node's."""
        if entry.kind is Kind.EPOCH:
            return LoggedEntry(entry.index, entry.epoch, entry.kind)
        said = self._proposed.pop(entry.record, None)
        if said is None:
            said = read_record(entry.record)  # type: ignore[assignment]
            if not isinstance(said, np.ndarray):
                return LoggedEntry(entry.index, entry.epoch, entry.kind, keys=said if isinstance(said, bytes) else b"")
            self._claim(said)
        return LoggedEntry(entry.index, entry.epoch, entry.kind, said)

    def _claim(self, rows: Records) -> None:
        """Fill in where the values came to lie; ABSENT_REGION where the leader had none any more."""
        for at, (key, total, length) in enumerate(_names(rows)):
            offset = self._host.arrived.claim(self.number, key, total, length)
            rows["region"][at] = 0 if offset is not None else ABSENT_REGION
            rows["offset"][at] = offset or 0
        self._host.fill_places(rows)

    def _drop_pending(self, first: int) -> None:
        """Entries from `first` on were cut."""
        for index in [index for index in self.pending if index >= first]:
            rows = self.pending.pop(index).rows
            if rows is not None:
                self._host.free(self, places_of(rows))

    def records(self) -> list[bytes]:
        """All of the shard as a journal's snapshot has it."""
        replica, number = self.replica, self.number
        epoch = replica.log.epoch_at(replica.watermark)
        out = [reset_record(number, replica.watermark, epoch or 0), *base_records(number, self.rows())]
        if self._claims:
            out.append(claims_record(number, self._claims))
        return out + [entry_record(number, self.pending[index]) for index in sorted(self.pending)]

    # ---- the state

    @property
    def applied(self) -> Point:
        """How far the log is applied here."""
        replica = self.replica
        epoch = replica.log.epoch_at(replica.watermark)
        assert epoch is not None
        return Point(self.number, epoch, replica.watermark)

    def rows(self) -> Records:
        """The durable blocks as of the last entry applied, with this node's places, parents first."""
        if not self.is_active:
            return self.standby.rows()
        rows = self._host.durable_rows(self)
        return np.concatenate([rows, *self.limbo.values()]) if self.limbo else rows

    def _apply(self, effect: ev.Apply) -> None:
        for entry in effect.entries:
            logged = self.pending.pop(entry.index)
            if not self.is_active:
                if logged.rows is not None:
                    self._host.free(self, self.standby.commit(logged.rows))
                elif logged.keys:
                    self._host.free(self, self.standby.leave(logged.keys))
            else:
                self._apply_limbo(logged)
            tag = effect.tags.get(entry.index)
            if tag:
                self._host.writes.committed(self, tag, entry.index)

    def _apply_limbo(self, logged: LoggedEntry) -> None:
        """Go on with what the log has and the directory has not."""
        freed: list[int] = []

        def over(key: bytes) -> None:
            row = self.limbo.pop(key, None)
            if row is not None:
                freed.extend(places_of(row))

        if logged.rows is None:
            for at in range(0, len(logged.keys) if self.limbo else 0, 16):
                over(logged.keys[at : at + 16])
        else:
            is_absent = (logged.rows["region"] == ABSENT_REGION).tolist()
            for at, (key, _, _) in enumerate(_names(logged.rows) if self.limbo or any(is_absent) else ()):
                over(key)
                if is_absent[at]:
                    self.limbo[key] = logged.rows[at : at + 1]
        self._host.free(self, freed)

    def place(self, index: int, key: bytes, total: int, length: int) -> Place | None:
        """Where the value of an entry's row lies; None where it is gone."""
        logged = self.pending.get(index)
        if logged is not None and logged.rows is not None:
            for at, name in enumerate(_names(logged.rows)):
                if name == (key, total, length) and logged.rows["region"][at] != ABSENT_REGION:
                    return Place(int(logged.rows["offset"][at]), length, total)
            return None
        found = self._host.visible(key) if self.is_active else self.standby.place(key)
        return found if found is not None and (found.sum, found.length) == (total, length) else None

    # ---- snapshots

    def _snapshot_for(self, to: Member) -> ev.SnapshotReady:
        replica, rows = self.replica, placeless(self.rows())
        epoch = replica.log.epoch_at(replica.watermark)
        assert epoch is not None
        chunks = [rows[at : at + _CHUNK_ROWS].tobytes() for at in range(0, len(rows), _CHUNK_ROWS)]
        return ev.SnapshotReady(to, replica.watermark, epoch, tuple(chunks))

    def _restore(self, effect: ev.Restore) -> None:
        rows = np.frombuffer(b"".join(effect.chunks), COMMIT_DTYPE).copy()
        for at, (key, total, length) in enumerate(_names(rows)):
            here = self.standby.find(key, total, length)
            offset = self._snapshot.claim(key, total, length) if here is None else _offset(here)
            rows["region"][at] = 0 if offset is not None else ABSENT_REGION
            rows["offset"][at] = offset or 0
        self._host.fill_places(rows)
        self._snapshot.forget()
        self._drop_pending(0)
        self._host.free(self, self.standby.replace(rows))
        self._claims = effect.claims
        records = [reset_record(self.number, effect.index, effect.entry_epoch), *base_records(self.number, rows)]
        for at in range(0, len(records), _UNIT_RECORDS):  # without the claims behind it, none of it counts
            self._host.persist(self, 0, records[at : at + _UNIT_RECORDS])
        self._host.persist(self, effect.serial, [claims_record(self.number, effect.claims)])

    # ---- messages of other replicas

    def received(self, message: ReplicaMessage, gone: bytes) -> bool:
        """A message came. False: its values did not, and it was not taken, or not to its end; the sender is to send the
        rest again.

        gone: names (see `gone_name`) of values that the sender has no longer.
        """
        missing = frozenset(gone[at : at + 24] for at in range(0, len(gone), 24))
        if isinstance(message, Append | SnapshotPart) and message.epoch < self.replica.epoch:
            pass  # it is refused, whatever came with it
        elif isinstance(message, Append):
            count = self._complete(message, missing)
            if count < len(message.entries):
                if count:
                    self.handle(ev.Received(message.until(count)))
                return False
        elif isinstance(message, SnapshotPart) and message.index > self.replica.watermark:
            rows = np.frombuffer(message.chunk, COMMIT_DTYPE)
            names = [name for name in _names(rows) if self.standby.find(*name) is None]
            if not self._snapshot.take((message.epoch, message.index, message.entry_epoch), names, missing):
                return False
        self.handle(ev.Received(message))
        return True

    def _complete(self, message: Append, missing: frozenset[bytes]) -> int:
        """How many of these entries can be taken: all values that they name are here, but for those that are gone.

        A value is here once, and it is the last entry's that names it (a block was put, deleted and put again). Where
        that one may still be cut, and the first would be left without, it has to come with the value again.
        """
        arrived, named = self._host.arrived, set[tuple[bytes, int, int]]()
        for at, raw in enumerate(message.entries):
            entry = decode_entry(raw)
            known = self.pending.get(entry.index)
            if entry.index <= self.replica.watermark or (known is not None and known.epoch == entry.epoch):
                continue
            for name in _names(commit_rows(entry)):
                is_gone = gone_name(*name[:2]) in missing
                if not is_gone and not arrived.has(self.number, *name):
                    return at
                if name in named and (is_gone or entry.index > message.watermark):
                    return at
                named.add(name)
        return len(message.entries)


def _names(rows: Records) -> list[tuple[bytes, int, int]]:
    """Key, sum and length of each row: what a value is told apart by."""
    keys = rows["key"].tobytes()
    sums, lengths = rows["sum"].tolist(), rows["length"].tolist()
    return [(keys[16 * i : 16 * i + 16], sums[i], lengths[i]) for i in range(len(rows))]


def _offset(row: bytes) -> int:
    return int(np.frombuffer(row, COMMIT_DTYPE)["offset"][0])
