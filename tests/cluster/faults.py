"""What is done to a running cluster, drawn from a seed: which kinds, to whom, for how long.

Each kind strikes and gives back how it is undone. Whom it hits is decided when it strikes: mostly who leads some shard
at that moment. Choices come from the seed; moments and outcomes are the machine's, so a seed gives the same plan and
not the same run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.machines import CLIENT_HOST, ETCD_HOST, Machines, NodeMachine
from tests.hosts import Hosts

__all__ = ["KINDS", "Blow", "Fault", "Field", "Rules", "draw"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a round. after_s: since the round began; dice: its own randomness."""

    kind: str
    after_s: float
    span_s: float
    dice: int


@dataclass(slots=True)
class Blow:
    """A fault that struck. undo: ends it. dead: nodes that it killed."""

    text: str
    undo: Callable[[], None]
    dead: list[NodeMachine] = field(default_factory=list)


class Rules:
    """Drops and losses on the hosts: several at once, each to be undone alone."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._rules: list[tuple[str, str, int]] = []

    def add(self, ways: Sequence[tuple[str, str]], percent: int = 100) -> Callable[[], None]:
        """Lose this share of what goes these ways (source, target), until what is returned is called."""
        mine = [(source, target, percent) for source, target in ways]
        self._rules += mine
        for one in mine:
            self._apply(*one)

        def undo() -> None:
            for one in mine:
                self._rules.remove(one)
            for target in dict.fromkeys(target for _, target in ways):
                self.hosts.heal_rules(target)
                for rule in self._rules:
                    if rule[1] == target:
                        self._apply(*rule)

        return undo

    def _apply(self, source: str, target: str, percent: int) -> None:
        if percent == 100:
            self.hosts.drop(source, target)
        else:
            self.hosts.lose(source, target, percent)


class Field:
    """What faults act on. shards: as the control plane has them, shard -> leader and in-sync names; may be empty."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.rules = Rules(machines.hosts) if machines.hosts else None
        self.shards: dict[str, dict[str, Any]] = {}
        self.is_relaying = False
        self.etcd_down = 0

    @property
    def nodes(self) -> list[NodeMachine]:
        """All."""
        return self.machines.nodes

    def led_by(self, names: Sequence[str]) -> list[int]:
        """The shards that these nodes lead; all, where nobody says who leads and there is one node."""
        if not self.shards and len(self.nodes) == 1:
            return [0]
        return [int(shard) for shard, said in self.shards.items() if said["leader"] in names]

    def leader(self, rng: random.Random) -> NodeMachine:
        """Of some shard; any node where nobody says."""
        names = {node.name: node for node in self.nodes}
        leaders = [said["leader"] for _, said in sorted(self.shards.items()) if said["leader"] in names]
        return names[rng.choice(leaders)] if leaders else rng.choice(self.nodes)

    def replica_of(self, leader: NodeMachine, rng: random.Random) -> NodeMachine | None:
        """Another node that is in sync in a shard of this leader's."""
        names = {node.name: node for node in self.nodes if node is not leader}
        held = {name for said in self.shards.values() if said["leader"] == leader.name for name in said["insync"]}
        found = sorted(held & names.keys())
        return names[rng.choice(found)] if found else None

    def victim(self, rng: random.Random) -> NodeMachine:
        """Mostly a leader."""
        return self.leader(rng) if rng.random() < 0.6 else rng.choice(self.nodes)

    def kill(self, victims: Sequence[NodeMachine]) -> Blow:
        """kill -9 of all of them; undone by starting them again."""
        for node in victims:
            node.kill()

        def undo() -> None:
            for node in victims:
                node.start()

        return Blow(f"kill -9 of {', '.join(node.name for node in victims)}", undo, list(victims))


def _kill(field: Field, rng: random.Random) -> Blow:
    return field.kill([field.victim(rng)])


def _kill_both(field: Field, rng: random.Random) -> Blow:
    leader = field.leader(rng)
    replica = field.replica_of(leader, rng)
    return field.kill([leader] if replica is None else [leader, replica])


def _kill_all(field: Field, rng: random.Random) -> Blow:
    return field.kill(rng.sample(field.nodes, len(field.nodes)))


def _reboot_all(field: Field, rng: random.Random) -> Blow:
    """All of them lose what they had in memory, too."""
    blow = field.kill(rng.sample(field.nodes, len(field.nodes)))
    for node in field.nodes:
        node.lose_memory()
    return Blow(f"reboot of {', '.join(node.name for node in field.nodes)}", blow.undo, blow.dead)


def _freeze(field: Field, rng: random.Random) -> Blow | None:
    victims = [field.victim(rng)]
    if rng.random() < 0.15:
        victims = list(field.nodes)
    victims = [node for node in victims if node.is_wanted and not node.is_frozen]
    for node in victims:
        node.freeze()

    def undo() -> None:
        for node in victims:
            node.thaw()

    return Blow(f"SIGSTOP of {', '.join(node.name for node in victims)}", undo) if victims else None


def _one_or_both(rng: random.Random, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """One direction, the other, or both, of all pairs alike."""
    dice = rng.random()
    ways = list(pairs) if dice < 0.75 else []
    return ways + [(b, a) for a, b in pairs] if dice >= 0.25 else ways


def _cut(field: Field, rng: random.Random, what: str, pairs: Sequence[tuple[str, str]]) -> Blow | None:
    if field.rules is None or not pairs:
        return None
    ways = _one_or_both(rng, pairs)
    text = ", ".join(f"{source}>{target}" for source, target in ways)
    return Blow(f"{what}: {text}", field.rules.add(ways))


def _part_nodes(field: Field, rng: random.Random) -> Blow | None:
    node = field.victim(rng)
    others = [other.host for other in field.nodes if other is not node]
    if len(others) > 1 and rng.random() < 0.3:
        others = [rng.choice(others)]
    return _cut(field, rng, "partition of nodes", [(node.host, other) for other in others])


def _part_etcd(field: Field, rng: random.Random) -> Blow | None:
    return _cut(field, rng, "partition from etcd", [(field.victim(rng).host, ETCD_HOST)])


def _part_client(field: Field, rng: random.Random) -> Blow | None:
    nodes = [field.victim(rng)] if rng.random() < 0.5 else field.nodes
    return _cut(field, rng, "partition of a client", [(CLIENT_HOST, node.host) for node in nodes])


def _isolate(field: Field, rng: random.Random) -> Blow | None:
    """A node alone, but for the clients that share its host, and sometimes the others'."""
    if field.rules is None:
        return None
    node = field.victim(rng)
    hosts = field.rules.hosts
    if rng.random() < 0.3:
        hosts.unplug(node.host)
        return Blow(f"cable of {node.host} out", lambda: hosts.plug(node.host))
    others = [other.host for other in field.nodes if other is not node] + [ETCD_HOST]
    ways = [way for other in others for way in ((node.host, other), (other, node.host))]
    return Blow(f"isolation of {node.host}", field.rules.add(ways))


def _lose(field: Field, rng: random.Random) -> Blow | None:
    if field.rules is None:
        return None
    node = field.victim(rng)
    others = [other.host for other in field.nodes if other is not node] + [ETCD_HOST, CLIENT_HOST]
    other, percent = rng.choice(others), rng.choice((1, 5, 20))
    undo = field.rules.add([(node.host, other), (other, node.host)], percent)
    return Blow(f"{percent} % lost between {node.host} and {other}", undo)


def _delay(field: Field, rng: random.Random) -> Blow | None:
    """Through the one relay that there is."""
    if field.rules is None or field.is_relaying:
        return None
    node = field.victim(rng)
    others = [other.host for other in field.nodes if other is not node] + [ETCD_HOST, CLIENT_HOST]
    other, seconds = rng.choice(others), rng.choice((0.005, 0.03, 0.2))
    relay = field.rules.hosts.delay(node.host, other, seconds)
    field.is_relaying = True

    def undo() -> None:
        relay.close()
        field.is_relaying = False

    return Blow(f"{seconds * 1000:.0f} ms between {node.host} and {other}", undo)


def _kill_etcd(field: Field, rng: random.Random) -> Blow | None:
    if field.etcd_down:
        return None
    field.machines.etcd.kill()
    field.etcd_down += 1

    def undo() -> None:
        field.machines.etcd.start()
        field.etcd_down -= 1

    return Blow("kill -9 of etcd", undo)


def _freeze_etcd(field: Field, rng: random.Random) -> Blow | None:
    if field.etcd_down:
        return None
    field.machines.etcd.stop()
    field.etcd_down += 1

    def undo() -> None:
        field.machines.etcd.go_on()
        field.etcd_down -= 1

    return Blow("SIGSTOP of etcd", undo)


KINDS: Mapping[str, Callable[[Field, random.Random], Blow | None]] = {
    "kill": _kill,
    "kill of leader and replica": _kill_both,
    "kill of all": _kill_all,
    "reboot of all": _reboot_all,
    "freeze": _freeze,
    "kill of etcd": _kill_etcd,
    "freeze of etcd": _freeze_etcd,
    "partition of nodes": _part_nodes,
    "partition from etcd": _part_etcd,
    "partition of a client": _part_client,
    "isolation": _isolate,
    "loss": _lose,
    "delay": _delay,
}
LOCAL = (
    "kill",
    "kill of leader and replica",
    "kill of all",
    "reboot of all",
    "freeze",
    "kill of etcd",
    "freeze of etcd",
)
"""Those that need no network of our own."""

FORGETTING = ("kill of leader and replica", "kill of all")
"""Those that no memory survives: never with durability = memory."""
REBOOTS = ("reboot of all",)
"""Those that durability = power alone survives."""

_WEIGHTS = {
    "kill": 5,
    "reboot of all": 3,
    "freeze": 4,
    "partition of nodes": 3,
    "isolation": 2,
    "partition from etcd": 2,
}


def draw(rng: random.Random, lease_s: float, *, has_network: bool, durability: str) -> list[Fault]:
    """The faults of one round, one to three, in order. durability: of the nodes; with memory what a killed node knew is
    gone, so a kill is alone (whoever calls waits until all is in sync again).
    """
    is_memory = durability == "memory"
    kinds = [kind for kind in KINDS if has_network or kind in LOCAL]
    if durability != "power":
        kinds = [kind for kind in kinds if kind not in REBOOTS]
    if is_memory:
        kinds = [kind for kind in kinds if kind not in FORGETTING]
    faults = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        kind = rng.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
        span_s = lease_s * rng.choice((0.2, 0.6, 1.3, 2.0)) * (0.7 + 0.6 * rng.random())
        faults.append(Fault(kind, rng.random(), span_s, rng.getrandbits(32)))
    kills = [fault for fault in faults if fault.kind == "kill"]
    return kills[:1] if is_memory and kills else sorted(faults, key=lambda fault: fault.after_s)
