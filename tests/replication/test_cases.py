"""Single cases of replication, message by message."""

from __future__ import annotations

from collections import Counter

import pytest

from ucxkv.replication import Member, Recovered, Replica, Role, ShardConfig
from ucxkv.replication import events as ev
from ucxkv.replication.messages import Append, Appended, Rejected, SnapshotPart

A, B, C = Member("a", 1), Member("b", 2), Member("c", 3)
NOW = 10**9
LEASE = 10 * NOW


class Wire:
    """Replicas whose messages arrive at once and are counted; journals and the control plane answer at once."""

    def __init__(self, *members: Member) -> None:
        self.replicas = {member: Replica(member) for member in members}
        self.sent: Counter[str] = Counter()
        self.applied: dict[Member, list[bytes]] = {member: [] for member in members}
        self.tags: list[int] = []
        self.refused: list[ev.Refused] = []
        self.config: ShardConfig | None = None
        self.revision = 1
        self.down: set[Member] = set()
        for member in members:
            self.feed(member, ev.Wish(tuple(m.name for m in members)))
            self.feed(member, ev.LeaseSeen(LEASE))
            self.feed(member, ev.MembersSeen(frozenset(members), 1))
        self.now = NOW
        for _ in range(40):
            self.tick()

    def tick(self) -> None:
        self.now += 60_000_000
        for member in self.replicas:
            self.feed(member, ev.ConfigSeen(self.config, self.revision))
            self.feed(member, ev.MembersSeen(frozenset(self.replicas) - self.down, self.revision))
            self.feed(member, ev.Tick())

    def feed(self, member: Member, event: ev.Event) -> None:
        if member in self.down:
            return
        replica = self.replicas[member]
        for effect in replica.handle(event, getattr(self, "now", NOW)):
            match effect:
                case ev.Send(to, message):
                    if not isinstance(message, Append) or message.entries:
                        self.sent[type(message).__name__] += 1
                    self.feed(to, ev.Received(message))
                case ev.Persist(serial, _, _):
                    self.feed(member, ev.Persisted(serial))
                case ev.NeedSnapshot(to):
                    at, state = replica.watermark, b"/".join(self.applied[member])
                    self.feed(member, ev.SnapshotReady(to, at, replica.log.epoch_at(at) or 0, (state,)))
                case ev.Restore():
                    self.applied[member][:] = b"".join(effect.chunks).split(b"/")
                    self.feed(member, ev.Persisted(effect.serial))
                case ev.Apply(entries, tags):
                    self.applied[member] += [entry.record for entry in entries]
                    self.tags += tags.values()
                case ev.WriteConfig(expected, config):
                    is_next = expected == (0 if self.config is None else self.revision)
                    outcome = ev.Outcome.WRITTEN if is_next else ev.Outcome.CONFLICT
                    if is_next:
                        self.config, self.revision = config, self.revision + 1
                    self.feed(member, ev.ConfigWritten(outcome, self.revision))
                case ev.ReadConfig():
                    self.feed(member, ev.ConfigSeen(self.config, self.revision))
                case ev.Refused():
                    self.refused.append(effect)
        replica.check()

    def roles(self) -> dict[str, Role]:
        return {member.name: replica.role for member, replica in self.replicas.items()}


@pytest.mark.parametrize("members", [(A,), (A, B), (A, B, C)])
def test_a_record_costs_one_round_trip_to_each_replica_and_no_more(members: tuple[Member, ...]) -> None:
    """Goal: the speed line of the design. Method: count the messages of one record."""
    wire = Wire(*members)
    assert list(wire.roles().values()) == [Role.LEADER, *[Role.FOLLOWER] * (len(members) - 1)]
    wire.sent.clear()
    wire.feed(A, ev.Propose(7, (b"x", b"y")))
    assert wire.tags == [7] and wire.applied[A] == [b"", b"x", b"y"]
    others = len(members) - 1
    assert wire.sent == ({"Append": others, "Appended": others} if others else {})
    wire.tick()
    assert all(state == [b"", b"x", b"y"] for state in wire.applied.values())


def test_a_record_waits_for_a_replica_that_is_down_until_the_set_is_smaller() -> None:
    wire = Wire(A, B)
    wire.down.add(B)
    wire.feed(A, ev.Propose(1, (b"x",)))
    assert not wire.tags
    for _ in range(20):
        wire.tick()
    assert wire.tags == [1] and wire.config is not None and wire.config.insync == {A}


def test_a_follower_refuses_and_says_who_leads() -> None:
    wire = Wire(A, B)
    wire.feed(B, ev.Propose(1, (b"x",)))
    assert wire.refused == [ev.Refused(1, ev.Refusal.NOT_LEADER, A)]


def test_nothing_is_taken_after_the_lease() -> None:
    wire = Wire(A, B)
    assert wire.replicas[A].serve_until_ns == LEASE
    wire.now = LEASE
    wire.feed(A, ev.Propose(1, (b"x",)))
    assert wire.refused[0].why is ev.Refusal.NO_LEASE
    wire.feed(A, ev.LeaseSeen(0))
    assert wire.replicas[A].serve_until_ns == 0


def test_a_replica_in_sync_takes_over_when_the_leader_is_off_a_list_as_new_as_the_configuration() -> None:
    wire = Wire(A, B, C)
    wire.feed(A, ev.Propose(1, (b"x",)))
    wire.down.add(A)
    wire.feed(B, ev.MembersSeen(frozenset({B, C}), wire.revision - 1))
    assert wire.replicas[B].role is Role.FOLLOWER
    for _ in range(20):
        wire.tick()
    assert wire.config is not None and wire.config.epoch == 2 and wire.config.insync == {B, C}
    leader = wire.config.leader
    wire.feed(leader, ev.Propose(2, (b"y",)))
    assert wire.tags == [1, 2] and wire.applied[leader] == [b"", b"x", b"", b"y"]


def test_leadership_is_handed_over_with_nothing_lost() -> None:
    wire = Wire(A, B)
    wire.feed(A, ev.Propose(1, (b"x",)))
    wire.feed(A, ev.HandOver())
    for _ in range(10):
        wire.tick()
    assert wire.roles() == {"a": Role.FOLLOWER, "b": Role.LEADER}
    assert wire.replicas[A].serve_until_ns == 0
    wire.feed(B, ev.Propose(2, (b"y",)))
    wire.tick()
    assert wire.applied[A] == wire.applied[B] == [b"", b"x", b"", b"y"]


@pytest.mark.parametrize("heir", [B, C])
def test_leadership_is_handed_to_the_member_that_is_wished_for(heir: Member) -> None:
    """Goal: two that are wished for less do not hand it to each other for ever."""
    wire = Wire(A, B, C)
    for member in (A, B, C):
        wire.feed(member, ev.Wish((heir.name, *({"a", "b", "c"} - {heir.name}))))
    wire.feed(A, ev.HandOver())
    for _ in range(10):
        wire.tick()
    assert wire.config is not None and wire.config.leader == heir


def test_a_control_plane_that_went_back_ends_the_replica() -> None:
    wire = Wire(A, B)
    wire.feed(A, ev.ConfigSeen(None, wire.revision + 1))
    assert wire.replicas[A].role is Role.FAILED
    late = Replica(B, recovered=Recovered(frozenset({B}), True, 5, 3))
    late.handle(ev.ConfigSeen(ShardConfig(2, A, frozenset({A})), 1), NOW)
    assert late.role is Role.FAILED


def test_a_failed_journal_ends_the_replica_and_says_so_to_who_waits() -> None:
    wire = Wire(A, B)
    wire.down.add(B)
    wire.feed(A, ev.Propose(1, (b"x",)))
    effects = wire.replicas[A].handle(ev.PersistFailed("disk full"), wire.now)
    assert ev.Unknown((1,)) in effects and wire.replicas[A].role is Role.FAILED
    assert not wire.replicas[A].handle(ev.Received(Appended(B, 1, 2, 1)), wire.now)


def test_too_few_in_sync_or_too_many_records_are_refused_by_name() -> None:
    from dataclasses import replace

    wire = Wire(A, B)
    replica = wire.replicas[A]
    replica.timing = replace(replica.timing, insync_min=3)
    wire.feed(A, ev.Propose(1, (b"x",)))
    replica.timing = replace(replica.timing, insync_min=1, pending_records=2)
    wire.feed(A, ev.Propose(2, (b"x",) * 3))
    assert [one.why for one in wire.refused] == [ev.Refusal.TOO_FEW, ev.Refusal.OVERLOADED]


def test_a_failed_replica_does_not_lead_whatever_the_configuration_says() -> None:
    """Goal: R7 against a hand-over, or an own write, that is answered after the journal failed. Method: B fails, then
    reads that the shard was given to it; it stays failed, and nothing is sent or asked for."""
    wire = Wire(A, B)
    replica = wire.replicas[B]
    wire.feed(B, ev.PersistFailed("the disk is gone"))
    assert wire.config is not None
    given = ShardConfig(wire.config.epoch + 1, B, frozenset({A, B}))
    assert replica.handle(ev.ConfigSeen(given, wire.revision + 1), wire.now) == []
    assert replica.role is Role.FAILED and replica.leading is None and replica.serve_until_ns == 0
    replica.check()


@pytest.mark.parametrize("records", [0, 2, 9])
def test_a_history_that_was_given_up_by_hand_is_given_up_by_who_has_it(records: int) -> None:
    """Goal: after `ucxkv elect` a member of before holds what the new leader has, not what it once had at the same
    indices. Method: a and b commit five records; c, which has nothing, is made the leader by hand, and a is gone; b
    joins c: its log is c's then, also where c has fewer entries than b had committed, and it takes over with all."""
    wire = Wire(A, B)
    wire.feed(A, ev.Propose(1, tuple(b"old%d" % i for i in range(5))))
    wire.tick()
    assert wire.config is not None and wire.replicas[B].watermark >= 6
    wire.down.add(A)
    wire.replicas[C], wire.applied[C] = Replica(C), []
    wire.config, wire.revision = ShardConfig(wire.config.epoch + 1, C, frozenset({C})), wire.revision + 1
    for member in (B, C):
        wire.feed(member, ev.Wish(("c", "b")))
    wire.feed(C, ev.LeaseSeen(LEASE))
    wire.tick()
    wire.tick()
    if records:
        wire.feed(C, ev.Propose(2, tuple(b"new%d" % i for i in range(records))))
    for _ in range(60):
        wire.tick()
    b, c = wire.replicas[B], wire.replicas[C]
    assert c.role is Role.LEADER and b.role is Role.FOLLOWER
    assert b.watermark == c.watermark and b.log.last_epoch == c.log.last_epoch
    wire.down.add(C)
    wire.revision += 1
    for _ in range(60):
        wire.tick()
    assert b.role is Role.LEADER
    assert [record for record in wire.applied[B] if record] == [b"new%d" % i for i in range(records)]


def test_a_snapshot_of_another_history_is_taken_when_what_was_here_is_gone() -> None:
    """Goal: no value of a snapshot is given back with the history that it replaces. Method: a member with committed
    records gets a part of an elected leader's snapshot at an index that it has: it drops its own and takes nothing of
    the part; the part comes again, and then it is taken."""
    wire = Wire(A, B)
    wire.feed(A, ev.Propose(1, tuple(b"old%d" % i for i in range(5))))
    wire.tick()
    b, part = wire.replicas[B], SnapshotPart(C, 9, 3, 9, 0, 1, b"new")
    effects = b.handle(ev.Received(part), wire.now)
    assert [effect.chunks for effect in effects if isinstance(effect, ev.Restore)] == [()] and b.watermark == 0
    assert any(isinstance(effect, ev.Send) and isinstance(effect.message, Rejected) for effect in effects)
    effects = b.handle(ev.Received(part), wire.now)
    assert [effect.chunks for effect in effects if isinstance(effect, ev.Restore)] == [(b"new",)] and b.watermark == 3
