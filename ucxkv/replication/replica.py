"""One shard's log on one node: leading, following, taking over. Sans-IO: an event and the time in, effects out.

The rules (each has a planted bug in tests/sim that breaks it, and is found):

  R1  A record is committed, and only then applied or answered for, when every member of the in-sync set has it in its
      journal. The watermark never goes back.
  R2  The in-sync set shrinks or grows by compare-and-set alone. From before it grows until after it has shrunk the
      larger set has to confirm. A write whose outcome is unknown is settled by another write, never by reading: the
      first may still be on its way.
  R3  Only an in-sync member takes over: this very incarnation with its memory, or one that its journal still proves,
      whole. The compare-and-set is on the revision at which it saw itself in the set. The others of the set that live
      stay in it: whatever they have and the new leader has not was confirmed to nobody, and goes. An epoch begins with
      an entry of its leader's; nothing is served before that is committed.
      A shard that takes no records (`ShardConfig.keeps`) has nothing to lose: where none of its members lives, whoever
      is wished to lead it begins it anew.
  R4  A member takes over only when the leader's lease is known to be over: the members' list is as new as the
      configuration, and the leader is not on it.
  R5  A leader serves while its own lease runs by its own clock, and no longer: see `serve_until_ns`.
  R6  A replica promises its newest epoch, from the control plane before it speaks or from a message, and refuses what
      older leaders send. Its log is cut only by a leader of a newer epoch than the entries that go, behind what is
      committed, and what is cut proves nothing any more (R3).
  R7  A journal that failed, or a control plane whose epochs went back, ends this replica until a restart.

The shell carries out effects in order, sends messages best effort, and calls `handle(Tick())` every few tens of
milliseconds. Sources: a TLA+ module of one shard's log, but for R3 (there a new leader is alone in sync at first);
Raft's log matching; Kafka's in-sync replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucxkv.replication import events as ev
from ucxkv.replication.config import Member, Role, ShardConfig, Timing
from ucxkv.replication.configuring import ConfigCell
from ucxkv.replication.following import Following
from ucxkv.replication.leading import Leading
from ucxkv.replication.log import Entry, Kind, LogWindow
from ucxkv.replication.messages import (
    Append,
    Appended,
    Join,
    Rejected,
    SnapshotGot,
    SnapshotPart,
)

__all__ = ["Recovered", "Replica"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a journal told at start. members: as last persisted; is_whole: everything that it ever confirmed is in it
    (its durability covers the way in which the process ended, and replay found no damage). The state of the snapshot
    at (base_index, base_epoch) is the shell's.
    """

    members: frozenset[Member]
    is_whole: bool
    base_index: int = 0
    base_epoch: int = 0
    entries: Sequence[Entry] = ()


class Replica:
    """See the module. me: this incarnation."""

    def __init__(
        self, me: Member, timing: Timing | None = None, recovered: Recovered | None = None, *, keeps: bool = True
    ) -> None:
        """keeps: whether this node takes records at all; see `ShardConfig`."""
        self.me = me
        self.keeps = keeps
        self.timing = timing or Timing()
        self.role = Role.OUT
        self.epoch = 0
        self.log = LogWindow()
        self.watermark = 0
        self.claims: set[Member] = {me}
        """The incarnations whose logs this one still has whole."""
        self.lease_until_ns = 0
        self.config = ConfigCell(self)
        self.leading: Leading | None = None
        self.following = Following(self)
        self.wish: tuple[str, ...] = ()
        self.alive: frozenset[Member] = frozenset()
        self.alive_revision = -1
        self.effects: list[ev.Effect] = []
        self._serial = 0
        self._persisting: deque[tuple[int, int, int]] = deque()
        """Asked of the journal: serial, index and epoch of its last entry."""
        self.persisted = 0
        self._claims_serial: int | None = None
        """Of the Persist that has these claims; None: none has."""
        self._persisted_serial = 0
        if recovered is not None:
            self.log, is_sound = LogWindow.replay(recovered.base_index, recovered.base_epoch, recovered.entries)
            self.watermark = recovered.base_index
            self.persisted = self.log.last_index
            self.epoch = self.log.last_epoch
            if recovered.is_whole and is_sound:
                self.claims |= recovered.members
        self._handlers: dict[type[Any], Callable[[Any, int], None]] = {
            ev.Propose: self._propose,
            ev.Received: self._received,
            ev.ConfigSeen: lambda event, now: self.config.seen(event.config, event.revision, now),
            ev.ConfigWritten: lambda event, now: self.config.written(event.outcome, event.revision, now),
            ev.MembersSeen: self._members_seen,
            ev.LeaseSeen: self._lease_seen,
            ev.Reincarnated: self._reincarnated,
            ev.Persisted: self._persisted,
            ev.PersistFailed: lambda event, now: self.fail(event.why),
            ev.SnapshotReady: self._snapshot_ready,
            ev.Wish: self._wish,
            ev.HandOver: self._hand_over,
            ev.Unfit: self._unfit,
            ev.Tick: lambda event, now: None,
        }

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Effect]:
        """Carry out one event at `now_ns` of this node's monotonic clock."""
        self._handlers[type(event)](event, now_ns)
        if self.role is not Role.FAILED:
            self._settle(now_ns)
        effects, self.effects = self.effects, []
        return effects

    @property
    def serve_until_ns(self) -> int:
        """Until when, by this node's clock, what was applied here may be shown as the shard's present state. A reader
        looks at the clock after it has read. 0: not at all.
        """
        leading = self.leading
        return self.lease_until_ns if leading is not None and leading.is_ready and not leading.is_leaving else 0

    def can_answer(self, index: int) -> bool:
        """Whether a session that has seen the log up to `index` may be answered from here (by its token, not now)."""
        return self.role is not Role.FAILED and self.watermark >= index

    # ---- what happens

    def _propose(self, event: ev.Propose, now_ns: int) -> None:
        why = self._refusal(len(event.records), now_ns)
        if why is not None:
            leader = self.config.value.leader if self.config.value is not None else None
            self.effects.append(ev.Refused(event.tag, why, leader))
            return
        assert self.leading is not None
        first = self.log.last_index + 1
        entries = [Entry(first + i, self.epoch, Kind.RECORD, record) for i, record in enumerate(event.records)]
        self.leading.tags.append((first + len(entries) - 1, event.tag))
        self.take_in(entries)

    def _refusal(self, count: int, now_ns: int) -> ev.Refusal | None:
        leading = self.leading
        if leading is None or leading.is_leaving:
            return ev.Refusal.NOT_LEADER
        if not leading.is_ready or now_ns >= self.lease_until_ns:
            return ev.Refusal.NO_LEASE
        if self.log.last_index - self.watermark + count > self.timing.pending_records:
            return ev.Refusal.OVERLOADED
        config = self.config.value
        if config is None or not config.keeps or len(config.insync) < self.timing.insync_min:
            return ev.Refusal.TOO_FEW
        return None

    def _received(self, event: ev.Received, now_ns: int) -> None:
        message = event.message
        if self.role is Role.FAILED or message.sender.name == self.me.name:
            return
        if isinstance(message, Append | SnapshotPart):
            self.following.received(message, now_ns)
        elif message.epoch > self.epoch:
            self.config.want_read(now_ns)  # somebody knows of a newer leader than this one does
        elif self.leading is not None and message.epoch == self.epoch:
            match message:
                case Appended():
                    self.leading.appended(message, now_ns)
                case Rejected():
                    self.leading.rejected(message, now_ns)
                case Join():
                    self.leading.joined(message, now_ns)
                case SnapshotGot():
                    self.leading.got(message, now_ns)

    def _members_seen(self, event: ev.MembersSeen, now_ns: int) -> None:
        if event.revision >= self.alive_revision:
            self.alive, self.alive_revision = event.alive, event.revision

    def _lease_seen(self, event: ev.LeaseSeen, now_ns: int) -> None:
        self.lease_until_ns = event.until_ns

    def _reincarnated(self, event: ev.Reincarnated, now_ns: int) -> None:
        self.lease_until_ns = 0
        self.step_down(now_ns, "its lease was lost")
        self.me = event.me
        self.claims.add(event.me)
        self._claims_serial = None

    def _persisted(self, event: ev.Persisted, now_ns: int) -> None:
        self._persisted_serial = max(self._persisted_serial, event.serial)
        while self._persisting and self._persisting[0][0] <= event.serial:
            _, index, epoch = self._persisting.popleft()
            if index > self.persisted and self.log.epoch_at(index) == epoch:
                self.persisted = index
        if self.leading is None:
            self.following.confirm(now_ns)

    def _snapshot_ready(self, event: ev.SnapshotReady, now_ns: int) -> None:
        if self.leading is not None:
            self.leading.snapshot(event)

    def _wish(self, event: ev.Wish, now_ns: int) -> None:
        self.wish = event.names

    def _hand_over(self, event: ev.HandOver, now_ns: int) -> None:
        if self.leading is not None:
            self.leading.is_leaving = True

    def _unfit(self, event: ev.Unfit, now_ns: int) -> None:
        if self.leading is not None:
            self.leading.unfit(event.member)

    # ---- after each event: what is due now

    @property
    def persisting(self) -> int:
        """How much was asked of the journal so far: a serial."""
        return self._serial

    @property
    def is_claimed(self) -> bool:
        """Whether a restart would know what this incarnation proves; it is not to be in sync before that."""
        return self._claims_serial is not None and self._persisted_serial >= self._claims_serial

    def _settle(self, now_ns: int) -> None:
        if self._claims_serial is None:
            self._persist(())
        if self.leading is not None:
            self.leading.settle(now_ns)
        else:
            self._consider(now_ns)
            if self.leading is None:
                self.following.settle(now_ns)
        self.config.settle(now_ns)

    def _consider(self, now_ns: int) -> None:
        """Found the shard, or take it over, where that is this node's to do (R3, R4)."""
        config = self.config.value
        if not self.config.is_settled or not self.is_claimed or now_ns >= self.lease_until_ns:
            return
        if config is None:
            if self.config.is_known and self.wish[:1] == (self.me.name,):
                self.config.write(ShardConfig(1, self.me, frozenset({self.me}), self.keeps), now_ns)
        elif self.is_insync and self.is_leader_gone(config):
            stay = (config.insync & self.alive) - self.claims | {self.me}
            self.config.write(replace(config, epoch=config.epoch + 1, leader=self.me, insync=stay), now_ns)
        elif not config.keeps and self.is_abandoned(config) and self.wish[:1] == (self.me.name,):
            self.config.write(ShardConfig(config.epoch + 1, self.me, frozenset({self.me}), self.keeps), now_ns)

    @property
    def is_insync(self) -> bool:
        """Whether this replica has all that was acknowledged, as far as the newest configuration seen goes."""
        config = self.config.value
        return config is not None and self.role is not Role.FAILED and not self.claims.isdisjoint(config.insync)

    def is_leader_gone(self, config: ShardConfig) -> bool:
        """R4; a leader that was this process under an earlier incarnation is gone, too."""
        if config.leader == self.me:
            return False
        return self.alive_revision >= self.config.revision and config.leader not in self.alive

    def is_abandoned(self, config: ShardConfig) -> bool:
        """Whether none of its members lives."""
        return self.is_leader_gone(config) and self.alive.isdisjoint(config.insync)

    def config_changed(self, now_ns: int) -> None:
        """A newer configuration was seen, or an own one written."""
        config = self.config.value
        if config is None or self.role is Role.FAILED:
            return
        if config.epoch > self.epoch:
            self.step_down(now_ns, f"epoch {config.epoch} began")
            self.epoch = config.epoch
        if config.leader == self.me and config.epoch == self.epoch and self.leading is None:
            self._lead(config, now_ns)
        elif self.leading is not None and config.leader != self.me:
            self.step_down(now_ns, "another member leads")
        if self.leading is None:
            is_in = self.me in config.insync and config.epoch == self.epoch
            self.become(Role.FOLLOWER if is_in else Role.OUT, "by the configuration")

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        """Begin to lead: all of the log will be committed."""
        assert self.is_insync
        self.leading = Leading(self, config, now_ns)
        self.become(Role.LEADER, "elected")
        self.take_in([Entry(self.log.last_index + 1, self.epoch, Kind.EPOCH, b"")])

    def step_down(self, now_ns: int, why: str) -> None:
        """Lead no more."""
        if self.leading is None:
            return
        tags = tuple(tag for _, tag in self.leading.tags)
        self.leading = None
        self.become(Role.OUT, why)
        if tags:
            self.effects.append(ev.Unknown(tags))

    def become(self, role: Role, why: str) -> None:
        """Change the role, where it is another."""
        if role is not self.role and self.role is not Role.FAILED:
            self.role = role
            self.effects.append(ev.RoleChanged(role, self.epoch, why))

    def fail(self, why: str) -> None:
        """R7."""
        self.step_down(0, why)
        self.become(Role.FAILED, why)
        self.claims.clear()

    # ---- the log

    def take_in(self, entries: Sequence[Entry]) -> None:
        """Append entries and have them persisted."""
        self.log.append(entries)
        self._persisting.append((self._serial + 1, entries[-1].index, entries[-1].epoch))
        self._persist(tuple(entries))

    def _persist(self, entries: tuple[Entry, ...]) -> None:
        self._serial += 1
        if self._claims_serial is None:
            self._claims_serial = self._serial
        self.effects.append(ev.Persist(self._serial, frozenset(self.claims), entries))

    def cut(self, last_index: int) -> None:
        """Drop the log behind `last_index` for that of a newer leader (R6)."""
        assert last_index >= self.watermark
        if last_index < self.log.last_index:
            self.log.truncate(last_index)
            self.persisted = min(self.persisted, last_index)
            self.claims, self._claims_serial = {self.me}, None

    def replace(self, index: int, entry_epoch: int, chunks: tuple[bytes, ...]) -> None:
        """Take a leader's snapshot instead of everything here."""
        assert index >= self.watermark
        self.log = LogWindow(index, entry_epoch)
        self.claims = {self.me}
        self.watermark, self.persisted = index, 0
        self._serial += 1
        self._claims_serial = self._serial
        self._persisting.append((self._serial, index, entry_epoch))
        self.effects.append(ev.Restore(self._serial, frozenset(self.claims), index, entry_epoch, chunks))

    def forsake(self) -> None:
        """What is committed here is another history than the leader's: an operator began the shard anew without it
        (`ucxkv elect`). All of it is given up, also what this incarnation would prove.
        """
        self.log = LogWindow()
        self.claims = {self.me}
        self.watermark = self.persisted = 0
        self._persisting.clear()
        self._serial += 1
        self._claims_serial = self._serial
        self.effects.append(ev.Restore(self._serial, frozenset(self.claims), 0, 0, ()))

    def is_other_history(self, index: int, epoch: int) -> bool:
        """Whether a leader's entry of this index and epoch contradicts what is committed here. Never so but after an
        election by hand: two committed logs are the same as far as both go.
        """
        if index > self.watermark:
            return False
        known = self.log.epoch_at(index)
        return epoch > self.log.base_epoch if known is None else epoch != known

    def commit(self, watermark: int) -> None:
        """Everything up to `watermark` is committed: apply it."""
        if watermark <= self.watermark:
            return
        entries = tuple(self.log.slice(self.watermark + 1, watermark))
        self.watermark = watermark
        tags: dict[int, int] = {}
        if self.leading is not None:
            waiting = self.leading.tags
            while waiting and waiting[0][0] <= watermark:
                index, tag = waiting.popleft()
                tags[index] = tag
        self.effects.append(ev.Apply(entries, tags))
        self.log.trim(watermark, self.timing.window_records)

    def check(self) -> None:
        """Assert what must hold between two events; for tests and debug runs."""
        assert 0 <= self.log.base_index <= self.watermark <= self.log.last_index
        assert self.persisted <= self.log.last_index
        assert (self.leading is not None) == (self.role is Role.LEADER)
        assert self.log.last_epoch <= self.epoch
        if self.leading is not None:
            self.leading.check()
