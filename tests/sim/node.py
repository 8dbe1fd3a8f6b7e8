"""A simulated node: the shell around the product's `Replica`, with a journal, a control plane and readers.

It performs the replica's effects in order and feeds back what came of them: messages on the network, frames on the
disk, questions to the control plane. Clients are served by its `Door`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.control import RemoteControl
from tests.sim.door import Door
from tests.sim.journal import Journal
from tests.sim.machine import Chains
from tests.sim.network import Network
from tests.sim.process import Host, Process
from tests.sim.witness import Witness
from ucxkv import errors
from ucxkv.control import Change, ChangeKind, Conflict, Lease, LeaseLost, OutcomeUnknown
from ucxkv.replication import Entry, Member, Recovered, Replica, ShardConfig, Timing
from ucxkv.replication import events as ev
from ucxkv.replication.messages import decode, encode

__all__ = ["CONFIG_KEY", "Node", "Settings", "decode_config"]

CONFIG_KEY = "shards/0"
MEMBERS = "members/"
MS = 1_000_000


def encode_config(config: ShardConfig) -> bytes:
    """As the control plane holds it."""
    return json.dumps([config.epoch, config.leader, sorted(config.insync)]).encode()


def decode_config(raw: bytes) -> ShardConfig:
    """The inverse."""
    epoch, leader, insync = json.loads(raw)
    return ShardConfig(epoch, Member(*leader), frozenset(Member(*member) for member in insync))


@dataclass(frozen=True, slots=True)
class Settings:
    """Of all nodes of one run. is_synced: the journal is synced before anything is confirmed; else power cuts lose."""

    timing: Timing
    lease_s: float = 1.0
    tick_ns: int = 50 * MS
    is_synced: bool = True
    disk_min_ns: int = 50_000
    disk_max_ns: int = 2 * MS
    journal_entries: int = 40
    replica_class: type[Replica] = Replica
    control_class: type[RemoteControl] = RemoteControl
    reads_everywhere: bool = False
    resumes: bool = False
    on_restart: Callable[[Replica], None] | None = None


@dataclass
class Node:
    """One life of a node."""

    host: Host
    process: Process
    network: Network
    witness: Witness
    settings: Settings
    wish: tuple[str, ...]
    random: random.Random
    note: Callable[[str], None]
    fails_sync: bool = False
    chains: Chains = field(default_factory=Chains)

    def __post_init__(self) -> None:
        self.name = self.process.host_name
        self.journal = Journal(self.host.disk, self.process.incarnation)
        if not self.settings.resumes or self.process.incarnation == 1:
            self.host.lives += 1
        self.member = Member(self.name, self.host.lives)
        self._queue: list[ev.Persist] = []
        self._is_writing = False
        self._is_persist_failed = False
        self._handling = False
        self._todo: list[ev.Event] = []
        self.replica = self.settings.replica_class(self.member, self.settings.timing, self._remember())
        if self.settings.on_restart is not None and self.process.incarnation > 1:
            self.settings.on_restart(self.replica)
        self.written_claims = self.journal.remembered.claims
        self.network.attach(self.name, self.process, self._receive)
        self.door = Door(self)
        self.control = self.settings.control_class(self.process, self.network)
        self.process.spawn(self._join(), "join")
        self.process.spawn(self._watch(), "watch")
        self.process.at(self.process.now_ns() + self.settings.tick_ns, self._tick)
        self.handle(ev.Wish(self.wish))

    def _remember(self) -> Recovered | None:
        told = self.journal.remembered
        if told.base_index:
            self.chains.restore(told.base_index, told.base_epoch, told.chunks)
            self.witness.restored(self.name, told.base_index, told.base_epoch, self.chains.state())
        if not told.claims:
            return None
        is_whole = (self.settings.is_synced or self.host.last_fate == "kept") and not told.is_damaged
        return Recovered(told.claims, is_whole, told.base_index, told.base_epoch, told.entries)

    # ---- seen by the witness

    @property
    def epoch(self) -> int:
        """Of the replica."""
        return self.replica.epoch

    @property
    def watermark(self) -> int:
        """Of the replica."""
        return self.replica.watermark

    @property
    def serve_until_ns(self) -> int:
        """Of the replica."""
        return self.replica.serve_until_ns

    # ---- events and effects

    def handle(self, event: ev.Event) -> None:
        """Give the replica an event and do what it wants; events that this makes follow in order."""
        self._todo.append(event)
        if self._handling:
            return
        self._handling = True
        while self._todo:
            for effect in self.replica.handle(self._todo.pop(0), self.process.now_ns()):
                self._perform(effect)
        self._handling = False
        self.replica.check()
        self.witness.settled(self)

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send():
                to = effect.to
                self.network.send(self.name, to.name, (to.incarnation, encode(effect.message)))
            case ev.Persist():
                self._queue.append(effect)
                self._write_next()
            case ev.Apply():
                self._apply(effect)
            case ev.Refused():
                self.door.refused(effect)
            case ev.Unknown():
                self.door.unknown(effect)
            case ev.WriteConfig():
                self.process.spawn(self._write_config(effect), "write config")
            case ev.ReadConfig():
                self.process.spawn(self._read_config(), "read config")
            case ev.NeedSnapshot():
                ready = ev.SnapshotReady(effect.to, self.chains.index, self.chains.epoch, self.chains.snapshot())
                self.process.at(self.process.now_ns() + 3 * MS, self.handle, ready)
            case ev.Restore():
                self._restore(effect)
            case ev.RoleChanged():
                self.note(f"{self.name} is {effect.role} of epoch {effect.epoch}: {effect.why}")
                if effect.role.value != "leader":
                    self.door.leads_no_more()

    def _apply(self, effect: ev.Apply) -> None:
        for entry in effect.entries:
            self.witness.applied(self.name, entry)
            complaint = self.chains.apply(entry)
            if complaint is not None:
                self.witness.complain(f"{self.name}: {complaint}")
            tag = effect.tags.get(entry.index)
            if tag is not None:
                self.door.committed(tag, entry.index)
        self.door.moved_on()
        if self.journal.entries_count > self.settings.journal_entries:
            self._shorten()

    # ---- the journal: one frame on its way to the disk, what comes meanwhile rides the next

    def _write_next(self) -> None:
        if self._is_writing or not self._queue or self._is_persist_failed:
            return
        queue, self._queue = self._queue, []
        claims = queue[-1].claims
        self.journal.write(
            claims if claims != self.written_claims else None, [entry for each in queue for entry in each.entries]
        )
        self.written_claims = claims
        self._is_writing = True
        settings = self.settings
        syncs = self.journal.sync_begin() if settings.is_synced else []
        span_ns = self.random.randint(settings.disk_min_ns, settings.disk_max_ns) if settings.is_synced else 10_000
        self.process.at(self.process.now_ns() + span_ns, self._written, queue[-1].serial, syncs)

    def _written(self, serial: int, syncs: Any) -> None:
        if self._is_persist_failed:
            return
        try:
            self.journal.sync_end(syncs, fails=self.fails_sync)
        except OSError as exc:
            self._fail(exc)
            return
        self._is_writing = False
        self.handle(ev.Persisted(serial))
        self._write_next()

    def _fail(self, exc: OSError) -> None:
        self._is_persist_failed = True
        self.handle(ev.PersistFailed(str(exc)))

    def _shorten(self) -> None:
        """Begin the journal anew behind what is applied; what waits for the disk is part of it."""
        log = self.replica.log
        later = log.slice(self.chains.index + 1, log.last_index) if self.chains.index < log.last_index else []
        serial = self._queue[-1].serial if self._queue else 0
        claims = self._queue[-1].claims if self._queue else self.written_claims
        self._replace(serial, claims, self.chains.index, self.chains.epoch, self.chains.snapshot(), later)

    def _restore(self, effect: ev.Restore) -> None:
        self.chains.restore(effect.index, effect.entry_epoch, effect.chunks)
        self.witness.restored(self.name, effect.index, effect.entry_epoch, self.chains.state())
        self._replace(effect.serial, effect.claims, effect.index, effect.entry_epoch, effect.chunks, [])

    def _replace(
        self, serial: int, claims: frozenset[Member], index: int, epoch: int, chunks: tuple[bytes, ...],
        later: list[Entry],
    ) -> None:  # fmt: skip
        if self._is_persist_failed:
            return
        self._queue = []
        self.written_claims = claims
        self.journal.replace(claims, index, epoch, chunks, later)
        if serial:
            self.process.at(self.process.now_ns() + 10_000, self.handle, ev.Persisted(serial))

    # ---- the control plane

    async def _join(self) -> None:
        """Hold a lease and be on the list of members, for ever."""
        life = 0
        while True:
            try:
                lease = await self.control.lease(self.settings.lease_s)
                life += 1
                if life > 1:
                    self.host.lives += 1
                    self.member = Member(self.name, self.host.lives)
                    self.handle(ev.Reincarnated(self.member))
                await self._enlist(lease)
                lease.on_change(self._lease_changed)
                self._lease_changed(lease)
                await asyncio.shield(lease.lost)
                self.note(f"{self.member} lost its lease: {lease.lost.result()}")
            except errors.UcxKvError:
                await asyncio.sleep(0.1)

    def _lease_changed(self, lease: Lease) -> None:
        self.handle(ev.LeaseSeen(0 if lease.lost.done() else lease.until_ns))

    async def _enlist(self, lease: Lease) -> None:
        """Put this incarnation on the list, over an earlier one of this node."""
        while True:
            try:
                entry = await self.control.get(MEMBERS + self.name)
                expected = entry.revision if entry is not None else 0
                value = str(self.member.incarnation).encode()
                await self.control.compare_and_set(MEMBERS + self.name, expected, value, lease=lease)
                return
            except LeaseLost:
                raise
            except errors.UcxKvError:
                await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        alive: dict[str, Member] = {}
        revision = -1
        while True:
            try:
                if revision < 0:
                    entries, revision = await self.control.list("")
                    alive.clear()
                    config, config_revision = None, revision
                    for entry in entries:
                        if entry.key == CONFIG_KEY:
                            config, config_revision = decode_config(entry.value), entry.revision
                        else:
                            self._see_member(alive, Change(ChangeKind.PUT, entry))
                    self.handle(ev.ConfigSeen(config, config_revision))
                    self.handle(ev.MembersSeen(frozenset(alive.values()), revision))
                async for change in self.control.watch("", revision):
                    if change.kind is ChangeKind.RESYNC:
                        revision = -1
                        break
                    revision = change.entry.revision
                    if change.entry.key == CONFIG_KEY and change.kind is ChangeKind.PUT:
                        self.handle(ev.ConfigSeen(decode_config(change.entry.value), revision))
                    else:
                        self._see_member(alive, change)
                    self.handle(ev.MembersSeen(frozenset(alive.values()), revision))
            except errors.UcxKvError:
                await asyncio.sleep(0.1)

    def _see_member(self, alive: dict[str, Member], change: Change) -> None:
        name = change.entry.key.removeprefix(MEMBERS)
        if change.kind is ChangeKind.PUT:
            alive[name] = Member(name, int(change.entry.value))
        else:
            alive.pop(name, None)

    async def _read_config(self) -> None:
        try:
            entries, revision = await self.control.list(CONFIG_KEY)
        except errors.UcxKvError:
            return
        if entries:
            self.handle(ev.ConfigSeen(decode_config(entries[0].value), entries[0].revision))
        else:
            self.handle(ev.ConfigSeen(None, revision))

    async def _write_config(self, effect: ev.WriteConfig) -> None:
        outcome, revision = ev.Outcome.WRITTEN, 0
        try:
            entry = await self.control.compare_and_set(
                CONFIG_KEY, effect.expected_revision, encode_config(effect.config)
            )
            revision = entry.revision if entry is not None else 0
        except Conflict:
            outcome = ev.Outcome.CONFLICT
        except OutcomeUnknown:
            outcome = ev.Outcome.UNKNOWN
        except errors.UcxKvError:  # it was not written
            outcome = ev.Outcome.CONFLICT
        self.note(f"{self.name} writes {effect.config} at {effect.expected_revision}: {outcome.value}")
        self.handle(ev.ConfigWritten(outcome, revision))

    # ---- replicas

    def _receive(self, source: str, message: Any) -> None:
        incarnation, raw = message
        if incarnation == self.member.incarnation:
            self.handle(ev.Received(decode(raw)))

    def _tick(self) -> None:
        self.handle(ev.Tick())
        self.process.at(self.process.now_ns() + self.settings.tick_ns, self._tick)
