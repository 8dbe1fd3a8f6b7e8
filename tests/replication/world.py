"""Three replicas of one shard in a world that does what it likes, one seeded step at a time.

Messages come late, twice, in any order or never; the control plane answers late, or does not say what it did; journals
take their time, and a crash keeps what was confirmed and any part of the rest; processes freeze past their leases.
After each step the invariants that concern all replicas together are asserted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ucxkv.replication import Entry, Kind, Member, Recovered, Replica, Role, ShardConfig, Timing
from ucxkv.replication import events as ev
from ucxkv.replication.messages import decode, encode

MS = 1_000_000
LEASE_NS = 400 * MS
TIMING = Timing(
    heartbeat_ns=20 * MS,
    resend_ns=40 * MS,
    silence_ns=120 * MS,
    retry_ns=30 * MS,
    batch_bytes=64,
    inflight_records=6,
    window_records=8,
)


@dataclass
class Disk:
    """What a journal holds: a snapshot, and entries of which the first `sure` were confirmed."""

    base: tuple[int, int] = (0, 0)
    state: tuple[bytes, ...] = ()
    lines: list[Entry | frozenset[Member]] = field(default_factory=list)
    """What was appended: entries, and claims where they changed."""
    sure: int = 0
    claims: frozenset[Member] = frozenset()
    """Of the snapshot."""


class Process:
    """One life of a node."""

    def __init__(self, world: World, name: str, incarnation: int, disk: Disk, make: Callable[..., Replica]) -> None:
        self.world, self.name, self.disk = world, name, disk
        self.me = Member(name, incarnation)
        recovered = None
        if disk.claims or disk.lines:
            claims = [disk.claims, *(line for line in disk.lines if isinstance(line, frozenset))][-1]
            entries = tuple(line for line in disk.lines if isinstance(line, Entry))
            recovered = Recovered(claims, True, *disk.base, entries)
        self.state = list(disk.state)
        """The machine: the records that were applied, which is what a snapshot of it is made of."""
        self.applied = disk.base
        self.replica = make(self.me, TIMING, recovered)
        self.lease_end = 0
        """In the world's time."""
        self.frozen_until = 0
        self.role = Role.OUT

    def feed(self, event: ev.Event) -> None:
        for effect in self.replica.handle(event, self.world.now):
            self.carry_out(effect)
        self.replica.check()
        self.world.served(self)

    def later(self, what: Callable[[], None], most: int = 15 * MS) -> None:
        world = self.world

        def if_alive() -> None:
            if world.processes[self.name] is self:
                what()

        world.at(world.now + world.rng.randrange(most), if_alive, self)

    def carry_out(self, effect: ev.Effect) -> None:
        world, disk = self.world, self.disk
        match effect:
            case ev.Send(to, message):
                world.send(self.me, to, encode(message))
            case ev.Persist(serial, claims, entries):
                disk.lines += [claims, *entries]
                count = len(disk.lines)
                self.later(lambda: self.persisted(serial, count))
            case ev.Apply(entries, tags):
                for entry in entries:
                    world.applied(self, entry)
                    if entry.index in tags:
                        world.acknowledged(tags[entry.index], entry.index)
                self.applied = (entries[-1].index, entries[-1].epoch)
            case ev.WriteConfig(expected, config):
                world.write_config(self, expected, config)
            case ev.ReadConfig():
                self.later(lambda: world.read_config(self))
            case ev.NeedSnapshot(to):
                chunks = tuple(self.state[i : i + 3] for i in range(0, len(self.state), 3))
                ready = ev.SnapshotReady(to, *self.applied, tuple(b"|".join(chunk) for chunk in chunks))
                self.later(lambda: self.feed(ready))
            case ev.Restore(serial, claims, index, epoch, chunks):
                self.state = [record for chunk in chunks for record in chunk.split(b"|") if record]
                self.applied = (index, epoch)
                disk.base, disk.state, disk.claims = (index, epoch), tuple(self.state), claims
                disk.lines, disk.sure = [], 0
                world.restored(self)
                self.later(lambda: self.feed(ev.Persisted(serial)))
            case ev.RoleChanged(role, _, _):
                self.role = role
            case ev.Refused(tag, _, _):
                world.waiting.pop(tag, None)
            case ev.Unknown(tags):
                for tag in tags:
                    world.waiting.pop(tag, None)

    def persisted(self, serial: int, count: int) -> None:
        self.disk.sure = max(self.disk.sure, min(count, len(self.disk.lines)))
        self.feed(ev.Persisted(serial))


class World:
    """See the module. make: the class under test."""

    def __init__(
        self, seed: int, replicas: int = 3, make: Callable[..., Replica] = Replica, doubt: float = 0.15
    ) -> None:
        self.doubt = doubt
        """Share of configuration writes of unknown outcome."""
        self.rng = random.Random(seed)
        self.make = make
        self.now = 0
        self._queue: list[tuple[int, int, Callable[[], None], Process | None]] = []
        self._count = 0
        self.config: ShardConfig | None = None
        self.config_revision = 0
        self.revision = 0
        self.alive: dict[str, Member] = {}
        self.committed: list[bytes] = []
        """What any replica has applied, by index: the one history (I4)."""
        self.waiting: dict[int, bytes] = {}
        self.acked: list[tuple[int, bytes]] = []
        self.tag = 0
        self.faults = 0
        self.is_calm = False
        self.cut: set[tuple[str, str]] = set()
        self.is_control_down = False
        self.served_until: tuple[int, int] = (0, 0)
        """Epoch that served last, and until when it may have."""
        self.server: Process | None = None
        self.names = ("a", "b", "c")[:replicas]
        self.processes: dict[str, Process] = {}
        for name in self.names:
            self.start(name, Disk())

    # ---- time

    def at(self, when: int, what: Callable[[], None], whose: Process | None = None) -> None:
        self._count += 1
        self._queue.append((when, self._count, what, whose))

    def run(self, until: int) -> None:
        while True:
            due = [one for one in self._queue if one[0] <= until]
            if not due:
                break
            first = min(due)
            self._queue.remove(first)
            when, _, what, whose = first
            if whose is not None and whose.frozen_until > max(when, self.now):
                self.at(whose.frozen_until, what, whose)
                continue
            self.now = max(self.now, when)
            what()
        self.now = until

    def every(self, process: Process, step: int, what: Callable[[], None]) -> None:
        def go() -> None:
            if self.processes.get(process.name) is process:
                what()
                self.at(self.now + step, go, process)

        self.at(self.now + self.rng.randrange(step), go, process)

    # ---- processes

    def start(self, name: str, disk: Disk) -> None:
        self._count += 1
        process = Process(self, name, self._count, disk, self.make)
        self.processes[name] = process
        process.feed(ev.Wish(self.names))
        self.every(process, 10 * MS, lambda: process.feed(ev.Tick()))
        self.every(process, 60 * MS, lambda: self.keep_lease(process))
        self.every(process, 40 * MS, lambda: self.watch(process))

    def crash(self, name: str, *, is_empty: bool) -> None:
        process = self.processes[name]
        disk = process.disk
        if is_empty:
            disk = Disk()
        else:
            keep = self.rng.randint(disk.sure, len(disk.lines))
            disk = Disk(disk.base, disk.state, disk.lines[:keep], keep, disk.claims)
        self.faults += 1
        self.start(name, disk)

    def keep_lease(self, process: Process) -> None:
        """Ask for the lease; the control plane counts from when it hears, the holder from before it asked."""
        asked = self.now

        def heard() -> None:
            if self.is_control_down:
                return
            holder = self.alive.get(process.name)
            if holder is not None and holder != process.me and self.lease_of.get(process.name, 0) > self.now:
                return  # an earlier life's lease has to end first
            if holder == process.me and self.lease_of.get(process.name, 0) <= self.now:
                holder = None
            if holder != process.me:
                if process.replica.lease_until_ns:  # it was lost: this process goes on as another member
                    self._count += 1
                    process.me = Member(process.name, self._count)
                    if self.processes[process.name] is process:
                        process.feed(ev.Reincarnated(process.me))
                    process.replica.lease_until_ns = 0
                    self.alive.pop(process.name, None)
                    self.revision += 1
                    return
                self.revision += 1
                self.alive[process.name] = process.me
            self.lease_of[process.name] = self.now + LEASE_NS
            until = asked + int(LEASE_NS * 0.99)
            me = process.me

            def told() -> None:
                if process.me == me:
                    process.feed(ev.LeaseSeen(until))

            process.later(told)

        self.at(self.now + self.rng.randrange(10 * MS), heard)

    @property
    def lease_of(self) -> dict[str, int]:
        return self.__dict__.setdefault("_lease_of", {})

    def expire(self) -> None:
        for name, end in list(self.lease_of.items()):
            if end <= self.now and name in self.alive:
                del self.alive[name]
                self.revision += 1

    def watch(self, process: Process) -> None:
        if self.is_control_down:
            return
        self.expire()
        alive, revision, config, at = frozenset(self.alive.values()), self.revision, self.config, self.config_revision
        process.later(lambda: process.feed(ev.MembersSeen(alive, revision)))
        if config is not None:
            process.later(lambda: process.feed(ev.ConfigSeen(config, at)))

    # ---- the control plane's value

    def read_config(self, process: Process) -> None:
        if self.is_control_down:
            self.at(self.now + 50 * MS, lambda: self.read_config(process), process)
            return
        config, revision = self.config, self.config_revision if self.config is not None else self.revision
        process.later(lambda: process.feed(ev.ConfigSeen(config, revision)))

    def write_config(self, process: Process, expected: int, config: ShardConfig) -> None:
        is_unknown = not self.is_calm and self.rng.random() < self.doubt
        delay = self.rng.randrange(300 * MS if is_unknown else 15 * MS)

        def arrive() -> None:
            is_ok = expected == self.config_revision
            if is_ok:
                self.revision += 1
                self.config, self.config_revision = config, self.revision
            if not is_unknown:
                outcome = ev.Outcome.WRITTEN if is_ok else ev.Outcome.CONFLICT
                written = ev.ConfigWritten(outcome, self.config_revision if is_ok else 0)
                process.later(lambda: process.feed(written))

        if not self.is_control_down and (not is_unknown or self.rng.random() < 0.7):
            self.at(self.now + delay, arrive)
        elif not is_unknown:
            is_unknown = True
        if is_unknown:
            process.later(lambda: process.feed(ev.ConfigWritten(ev.Outcome.UNKNOWN)), 20 * MS)

    # ---- messages

    def send(self, sender: Member, to: Member, raw: bytes) -> None:
        if (sender.name, to.name) in self.cut or (not self.is_calm and self.rng.random() < 0.1):
            return
        copies = 2 if not self.is_calm and self.rng.random() < 0.05 else 1
        for _ in range(copies):
            most = 120 * MS if not self.is_calm and self.rng.random() < 0.1 else 6 * MS

            def arrive() -> None:
                process = self.processes[to.name]
                if process.frozen_until > self.now:
                    self.at(process.frozen_until, arrive)
                elif process.me == to:
                    process.feed(ev.Received(decode(raw)))

            self.at(self.now + self.rng.randrange(most), arrive)

    # ---- what must hold

    def applied(self, process: Process, entry: Entry) -> None:
        at = entry.index - 1
        shown = entry.record if entry.kind is Kind.RECORD else b"epoch"
        if at < len(self.committed):
            assert self.committed[at] == shown, f"{process.me} applied another entry {entry.index} (I4)"
        else:
            assert at == len(self.committed), f"{process.me} skipped entries before {entry.index}"
            self.committed.append(shown)
        process.state.append(shown)
        assert len(process.state) == entry.index

    def restored(self, process: Process) -> None:
        assert process.state == self.committed[: process.applied[0]], f"{process.me} restored another history"

    def acknowledged(self, tag: int, index: int) -> None:
        record = self.waiting.pop(tag)
        self.acked.append((index, record))
        assert self.committed[index - 1] == record

    def served(self, process: Process) -> None:
        """I3, and that who serves has everything that was acknowledged."""
        replica = process.replica
        epoch, until = self.served_until
        if replica.serve_until_ns <= self.now:
            if self.server is process:  # it has stopped by itself, to hand over
                self.server, self.served_until = None, (epoch, min(until, self.now))
            return
        self.server = process
        if replica.epoch > epoch:
            assert self.now >= until, f"epoch {replica.epoch} serves while {epoch} may, {until - self.now} ns (I3)"
            self.served_until = (replica.epoch, replica.serve_until_ns)
        else:
            assert replica.epoch == epoch, f"epoch {replica.epoch} serves after {epoch}"
            self.served_until = (epoch, max(until, replica.serve_until_ns))
        most = max((index for index, _ in self.acked), default=0)
        assert len(process.state) >= most, f"{process.me} serves {len(process.state)} of {most} acknowledged"

    # ---- what happens

    def propose(self, name: str) -> None:
        process = self.processes[name]
        if process.frozen_until > self.now:
            return
        self.tag += 1
        record = b"r%d" % self.tag
        self.waiting[self.tag] = record
        process.feed(ev.Propose(self.tag, (record,)))

    def step(self) -> None:
        """One thing, by the seed."""
        rng, names = self.rng, list(self.processes)
        self.run(self.now + rng.randrange(1, 30) * MS)
        roll = rng.random()
        if roll < 0.70:
            self.propose(rng.choice(names))
        elif roll < 0.76:
            pair = (rng.choice(names), rng.choice(names))
            self.cut |= {pair, pair[::-1]} if rng.random() < 0.5 else {pair}
            self.faults += 1
        elif roll < 0.85:
            self.cut.clear()
        elif roll < 0.89:
            self.crash(rng.choice(names), is_empty=False)
        elif roll < 0.93:
            process = self.processes[rng.choice(names)]
            process.frozen_until = self.now + rng.randrange(2 * LEASE_NS)
            self.faults += 1
        elif roll < 0.95:
            self.is_control_down = not self.is_control_down
            self.faults += 1
        elif roll < 0.97:
            self.is_control_down = False
        elif roll < 0.98:
            self.processes[rng.choice(names)].feed(ev.HandOver())
        else:
            self.lose_one()

    def lose_one(self) -> None:
        """Empty the disk of a follower in sync while others are: never more than may fail."""
        config = self.config
        if config is None or len(config.insync) < 2 or any(p.frozen_until > self.now for p in self.processes.values()):
            return
        others = [m.name for m in config.insync if self.processes[m.name].me == m and m != config.leader]
        if len(others) == len(config.insync) - 1 and self.processes[config.leader.name].role is Role.LEADER:
            self.crash(self.rng.choice(others), is_empty=True)

    def heal(self) -> None:
        """No more faults; everybody is back."""
        self.is_calm, self.is_control_down = True, False
        self.cut.clear()
        for process in self.processes.values():
            process.frozen_until = min(process.frozen_until, self.now)
        self.run(self.now + 3000 * MS)
