"""The faults of one run, drawn from its seed: what, when, to whom, for how long.

Whom a fault hits is decided when it strikes, mostly the leader of that moment. Each kind is one class with `act`, which
does it and sees to its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.control import SERVER
from tests.sim.loop import SECOND

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.process import DiskFate

from ucxkv.replication import events as ev

__all__ = ["KINDS", "Fault", "Plan"]

MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. dice: its own randomness, so that plans can be cut short without changing the rest."""

    at_ns: int
    kind: str
    span_ns: int
    dice: int

    def act(self, cluster: Cluster) -> None:
        """Do it."""
        KINDS[self.kind](cluster, random.Random(self.dice), self.span_ns)


def _victim(cluster: Cluster, rng: random.Random) -> str:
    return cluster.leader if rng.random() < 0.6 else rng.choice(sorted(cluster.hosts))


def _crash(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    fate: DiskFate = rng.choice(("kept", "kept", "kept", "torn", "torn", "torn", "damaged", "empty"))
    victims = [_victim(cluster, rng)]
    if rng.random() < 0.25:
        victims = sorted(cluster.hosts)
        if rng.random() < 0.5:
            victims.remove(rng.choice(victims))
    for name in victims:
        if cluster.crash(name):
            cluster.did("crash", f"{name}, disk {fate} in {span_ns / 1e6:.0f} ms")
            late_ns = rng.randrange(MS, 200 * MS)
            cluster.loop.at(cluster.loop.now_ns + span_ns + late_ns, cluster.restart, (name, fate))


def _power_cut(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """All nodes lose power at one moment, and come back one after the other."""
    for name in sorted(cluster.hosts):
        if cluster.crash(name):
            cluster.did("power cut", name)
        late_ns = span_ns + rng.randrange(MS, 400 * MS)
        cluster.loop.at(cluster.loop.now_ns + late_ns, cluster.restart, (name, "torn"))


def _freeze(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    name = _victim(cluster, rng)
    process = cluster.hosts[name].process
    process.freeze()
    cluster.did("freeze", f"{process.name} for {span_ns / 1e6:.0f} ms")
    cluster.loop.at(cluster.loop.now_ns + span_ns, process.wake)


def _cut(cluster: Cluster, rng: random.Random, span_ns: int, ways: Sequence[tuple[str, str]], kind: str) -> None:
    """Cut these directions for a while, or let them flap."""
    network, loop = cluster.network, cluster.loop
    is_flapping = rng.random() < 0.2
    cluster.did(kind, f"{'flapping ' * is_flapping}{', '.join(f'{a}>{b}' for a, b in ways)} {span_ns / 1e6:.0f} ms")
    for source, destination in ways:
        if is_flapping:
            period_ns = rng.choice((40, 300, 800)) * MS
            network.flap(source, destination, period_ns, max(1, span_ns // period_ns))
        else:
            network.cut(source, destination)
            loop.at(loop.now_ns + span_ns, network.heal, (source, destination))


def _one_or_both(rng: random.Random, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """One direction, the other, or both, of all pairs alike."""
    dice = rng.random()
    ways = list(pairs) if dice < 0.75 else []
    if dice >= 0.25:
        ways += [(b, a) for a, b in pairs]
    return ways


def _part_nodes(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    name = _victim(cluster, rng)
    others = [other for other in sorted(cluster.hosts) if other != name]
    if rng.random() < 0.3:
        others = [rng.choice(others)]
    _cut(cluster, rng, span_ns, _one_or_both(rng, [(name, other) for other in others]), "partition of nodes")


def _part_control(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    name = _victim(cluster, rng)
    ways = _one_or_both(rng, [(f"{name}.control", SERVER)])
    _cut(cluster, rng, span_ns, ways, "partition from control plane")


def _last_answer(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """The control plane's last answers to a node are slow, then none come: how long does it believe in its lease?"""
    name = _victim(cluster, rng)
    network, loop = cluster.network, cluster.loop
    answers, questions = (SERVER, f"{name}.control"), (f"{name}.control", SERVER)
    slow_ns = rng.choice((200, 350)) * MS
    cluster.did("slow last answer", f"{name}, by {slow_ns / 1e6:.0f} ms, then {span_ns / 1e6:.0f} ms of nothing")
    network.shape(*answers, delay_min_ns=slow_ns, delay_max_ns=slow_ns + 40 * MS)
    until_ns = rng.randrange(300, 1200) * MS
    loop.at(loop.now_ns + until_ns, network.cut, questions)
    loop.at(loop.now_ns + until_ns + SECOND + span_ns, network.heal, questions)
    calm = network.link(SERVER, "anybody")
    loop.at(
        loop.now_ns + until_ns + SECOND + span_ns,
        lambda: network.shape(*answers, delay_min_ns=calm.delay_min_ns, delay_max_ns=calm.delay_max_ns),
    )


def _deposed(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """The leader shrinks its set to one follower and is cut off with records on their way; that follower takes over, is
    joined by the third node and restarts with nothing; then the two old ones, alone, see each other again."""
    names = sorted(cluster.hosts)
    config = cluster.config
    if config is None or any(not cluster.hosts[name].is_up for name in names) or cluster.is_calm:
        return
    old = config.leader.name
    heir, third = rng.sample([name for name in names if name != old], 2)
    network, loop = cluster.network, cluster.loop
    cluster.did("return of the deposed", f"{old}, its heir {heir}, the third {third}")
    cluster.set_wish((old, heir, third))
    start_ns = loop.now_ns

    def cut_third() -> None:
        network.isolate(third, names)

    def depose() -> None:
        for way in ((old, heir), (heir, old), (f"{old}.control", SERVER), (SERVER, f"{old}.control")):
            network.cut(*way)

    def join_third() -> None:
        network.heal(third, heir)
        network.heal(heir, third)

    def empty_heir() -> None:
        if cluster.crash(heir):
            cluster.restart(heir, rng.choice(("empty", "torn", "kept")))
            network.heal(old, heir)
            network.heal(heir, old)
            if rng.random() < 0.5:
                network.isolate(third, names)

    def calm() -> None:
        for one in names:
            network.heal(f"{one}.control", SERVER)
            network.heal(SERVER, f"{one}.control")
            for other in names:
                network.heal(one, other)

    at_ns = start_ns
    for pause_ns, step in (
        (0, cut_third),
        (rng.randrange(500, 1500) * MS, depose),
        (rng.randrange(1200, 2000) * MS, join_third),
        (rng.randrange(100, 1200) * MS, empty_heir),
        (500 * MS + span_ns, calm),
    ):
        at_ns += pause_ns
        loop.at(at_ns, step)
    cluster.busy_until_ns = max(cluster.busy_until_ns, at_ns)


def _part_client(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    client = rng.choice(cluster.clients).name
    names = [_victim(cluster, rng)] if rng.random() < 0.5 else sorted(cluster.hosts)
    ways = _one_or_both(rng, [(client, f"{name}.door") for name in names])
    _cut(cluster, rng, span_ns, ways, "partition of a client")


def _isolate(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """A node alone: no other node, no control plane; clients still reach it."""
    name = _victim(cluster, rng)
    pairs = [(name, other) for other in sorted(cluster.hosts) if other != name] + [(f"{name}.control", SERVER)]
    _cut(cluster, rng, span_ns, [*pairs, *((b, a) for a, b in pairs)], "isolation")


def _control_gone(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    if rng.random() < 0.5:
        process = cluster.control_host.process
        process.freeze()
        cluster.loop.at(cluster.loop.now_ns + span_ns, process.wake)
        cluster.did("control plane gone", f"frozen for {span_ns / 1e6:.0f} ms")
        return
    pairs = [(f"{name}.control", SERVER) for name in sorted(cluster.hosts)]
    _cut(cluster, rng, span_ns, _one_or_both(rng, pairs), "control plane gone")


def _noise(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """Loss, copies and delay between nodes, or between a client and all nodes."""
    drop, duplicate = rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.1, 0.5))
    late, late_max_ns = rng.choice((0.0, 0.1, 0.5)), rng.choice((20, 300, 1500)) * MS
    ways = [way for way in sorted(cluster.network.links) if SERVER not in way]
    if rng.random() < 0.4:  # clients' connections break instead
        client = rng.choice(cluster.clients).name
        doors = [f"{name}.door" for name in sorted(cluster.hosts)]
        ways = [(client, door) for door in doors] + [(door, client) for door in doors]
    cluster.did("noise", f"drop {drop} duplicate {duplicate} late {late} to {late_max_ns / 1e6:.0f} ms")
    _shape(cluster, ways, span_ns, drop=drop, duplicate=duplicate, late=late, late_max_ns=late_max_ns)


def _late_control(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """Questions to the control plane, or its answers, come late, lost or twice."""
    late, late_max_ns = rng.choice((0.3, 0.9)), rng.choice((100, 800, 3000)) * MS
    is_answers = rng.random() < 0.5
    ways = [way for way in sorted(cluster.network.links) if way[0 if is_answers else 1] == SERVER]
    if rng.random() < 0.5:
        name = _victim(cluster, rng)
        ways = [way for way in ways if f"{name}.control" in way]
    what = "answers" if is_answers else "questions"
    cluster.did("late control plane", f"{what} late {late} to {late_max_ns / 1e6:.0f} ms, {len(ways)} ways")
    duplicate = 0.0 if is_answers else rng.choice((0.0, 0.2))
    _shape(cluster, ways, span_ns, late=late, late_max_ns=late_max_ns, drop=rng.choice((0.0, 0.2)), duplicate=duplicate)


def _shape(cluster: Cluster, ways: Sequence[tuple[str, str]], span_ns: int, **changes: Any) -> None:
    for way in ways:
        cluster.network.shape(*way, **changes)
        calm = dict.fromkeys(changes, 0)
        cluster.loop.at(cluster.loop.now_ns + span_ns, lambda way=way, calm=calm: cluster.network.shape(*way, **calm))


def _bad_sync(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """A node's journal fails; it is restarted later."""
    name = _victim(cluster, rng)
    if not cluster.hosts[name].is_up or not cluster.may_lose(name) or not cluster.settings.is_synced:
        return
    node = cluster.nodes[name]
    node.fails_sync = True
    cluster.did("failed sync", name)

    def replace() -> None:
        if cluster.nodes[name] is node and cluster.crash(name):
            cluster.restart(name, "kept")

    cluster.loop.at(cluster.loop.now_ns + span_ns, replace)


def _wish(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """Other nodes are to hold the shard."""
    names = sorted(cluster.hosts)
    rng.shuffle(names)
    names = names[: rng.randint(cluster.settings.timing.insync_min, 3)]
    cluster.did("other members", ", ".join(names))
    cluster.set_wish(tuple(names))


def _hand_over(cluster: Cluster, rng: random.Random, span_ns: int) -> None:
    """The leader is asked to let another one lead."""
    cluster.did("hand over", cluster.leader)
    if cluster.hosts[cluster.leader].is_up:
        cluster.at_node(cluster.leader, ev.HandOver())


KINDS: dict[str, Callable[[Cluster, random.Random, int], None]] = {
    "crash": _crash,
    "power cut": _power_cut,
    "freeze": _freeze,
    "partition of nodes": _part_nodes,
    "partition from control plane": _part_control,
    "partition of a client": _part_client,
    "isolation": _isolate,
    "slow last answer": _last_answer,
    "return of the deposed": _deposed,
    "control plane gone": _control_gone,
    "noise": _noise,
    "late control plane": _late_control,
    "failed sync": _bad_sync,
    "other members": _wish,
    "hand over": _hand_over,
}
WEIGHTS = {"crash": 5, "freeze": 4, "partition of nodes": 3, "noise": 3, "isolation": 2, "late control plane": 2}


@dataclass(frozen=True, slots=True)
class Plan:
    """All faults of a run, within `span_ns`."""

    faults: tuple[Fault, ...]
    span_ns: int

    @staticmethod
    def of_seed(seed: int) -> Plan:
        """The plan of a seed: some kinds out of all, so that runs differ in character."""
        rng = random.Random(f"plan {seed}")
        span_ns = rng.choice((3, 5, 8)) * SECOND
        kinds = rng.sample(sorted(KINDS), rng.randint(2, 6))
        weights = [WEIGHTS.get(kind, 1) for kind in kinds]
        faults = []
        for _ in range(rng.randint(3, 12)):
            kind = rng.choices(kinds, weights)[0]
            lasting_ns = int(rng.choice((50, 300, 700, 1500, 2500)) * MS * (0.5 + rng.random()))
            faults.append(Fault(rng.randrange(span_ns), kind, lasting_ns, rng.getrandbits(32)))
        return Plan(tuple(sorted(faults, key=lambda fault: fault.at_ns)), span_ns)
