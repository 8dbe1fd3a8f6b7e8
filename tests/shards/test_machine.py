"""Real shards of two or three nodes against what their logs come to, whatever happens in which order."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.shards.fleet import Fleet
from tests.shards.life import SHARDS
from ucxkv.replication import events as ev

NODES = st.integers(0, 2)
NUMBERS = st.integers(0, SHARDS - 1)
PLACES = st.integers(0, 4)


class FleetMachine(RuleBasedStateMachine):
    """See `tests.shards.fleet`: it asserts after each step, and heals at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet: Fleet | None = None

    @initialize(replicas=st.sampled_from([2, 2, 3]))
    def begin(self, replicas: int) -> None:
        self.fleet = Fleet(replicas)
        self.fleet.advance(600)

    def name(self, node: int) -> str:
        return self.fleet.names[node % len(self.fleet.names)]

    def leader(self, shard: int) -> str:
        return next((life.name for life in self.fleet.lives.values() if life.serves(shard)), "a")

    @rule(shard=NUMBERS, at=PLACES, version=st.integers(0, 2), durable=st.sampled_from([True, True, True, False]))
    def put(self, shard: int, at: int, version: int, durable: bool) -> None:
        self.fleet.put(self.leader(shard), shard, at, version, durable=durable)

    @rule(shard=NUMBERS, most=st.integers(1, 5), version=st.integers(0, 2))
    def put_all(self, shard: int, most: int, version: int) -> None:
        for at in range(most):
            self.fleet.put(self.leader(shard), shard, at, version)

    @rule(shard=NUMBERS, at=PLACES)
    def delete(self, shard: int, at: int) -> None:
        self.fleet.delete(self.leader(shard), shard, at)

    @rule(shard=NUMBERS, version=st.integers(0, 1), again=st.integers(0, 1))
    def put_delete_put(self, shard: int, version: int, again: int) -> None:
        """The same block twice in a log, with a Leave between: with the same bytes, or others."""
        leader = self.leader(shard)
        for step in (version, None, again):
            if step is None:
                self.fleet.delete(leader, shard, 0)
            else:
                self.fleet.put(leader, shard, 0, step)
            self.fleet.do(lambda: self.fleet.lives[leader].ack(1000))
            self.fleet.deliver(6)
            self.fleet.do(lambda: [life.ack(1000) for life in self.fleet.lives.values()])
            self.fleet.deliver(6)

    @rule(shard=NUMBERS, at=PLACES)
    def damage(self, shard: int, at: int) -> None:
        self.fleet.damage(self.leader(shard), shard, at)

    @rule(node=NODES, count=st.integers(1, 5))
    def ack(self, node: int, count: int) -> None:
        life = self.fleet.lives[self.name(node)]
        self.fleet.do(lambda: life.ack(count))

    @precondition(lambda self: self.fleet is not None and self.fleet.net)
    @rule(count=st.integers(1, 8), at=st.sampled_from([0, 0, 0, 1, 3]))
    def deliver(self, count: int, at: int) -> None:
        self.fleet.deliver(count, at)

    @precondition(lambda self: self.fleet is not None and self.fleet.net)
    @rule(count=st.integers(1, 3))
    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self.fleet.net))):
            self.fleet.net.popleft()

    @rule(
        ms=st.sampled_from([50, 100, 300, 1500, 4000]),
        acks=st.sampled_from([0, 1, 1000]),
        messages=st.sampled_from([0, 5, 1000]),
    )
    def advance(self, ms: int, acks: int, messages: int) -> None:
        self.fleet.advance(ms, acks=acks, messages=messages)

    @rule(node=NODES)
    def cut(self, node: int) -> None:
        """No messages, no control plane: its lease ends, and it notices."""
        life = self.fleet.lives[self.name(node)]
        life.is_cut = not life.is_cut

    @rule(node=NODES)
    def lose_lease(self, node: int) -> None:
        """It is lost and there is another at once: others may have led, or not."""
        life = self.fleet.lives[self.name(node)]
        if not life.is_cut:
            self.fleet.do(life.lose_lease)
            self.fleet.do(life.come_back)

    @rule(node=NODES)
    def lapse(self, node: int) -> None:
        """The lease's end is told, then that it goes on after all."""
        life = self.fleet.lives[self.name(node)]
        if life.lease_end:
            self.fleet.do(lambda: life.shards.on_lease(0))
            self.fleet.do(life.grant_lease)

    @rule(shard=NUMBERS)
    def hand_over(self, shard: int) -> None:
        life = self.fleet.lives[self.leader(shard)]
        self.fleet.do(lambda: life.shards.shards[shard].handle(ev.HandOver()))

    @rule(count=st.integers(1, 2))
    def doubt(self, count: int) -> None:
        self.fleet.doubts = count

    @rule(node=NODES, cut=st.integers(0, 6), is_rebooted=st.booleans())
    def restart(self, node: int, cut: int, is_rebooted: bool) -> None:
        self.fleet.restart(self.name(node), cut, is_rebooted=is_rebooted)

    @invariant()
    def holds(self) -> None:
        if self.fleet is not None:
            self.fleet.check()

    def teardown(self) -> None:
        if self.fleet is not None:
            try:
                self.fleet.heal()
            finally:
                self.fleet.close()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
