"""What a fault run does to a cluster: plans, victims, rules that overlap, nodes that die at a step."""

from __future__ import annotations

import importlib
import inspect
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.dying_node import STEPS
from tests.cluster.faults import FORGETTING, KINDS, LOCAL, REBOOTS, Field, Rules, draw
from tests.cluster.machines import NodeMachine
from tests.cluster.worker import _shards
from ucxkv.control import Entry
from ucxkv.control.mirror import Picture
from ucxkv.control.records import ShardRecord, encode_record
from ucxkv.replication import Member, ShardConfig


class FakeHosts:
    """Remembers what each host drops, as nftables does: a chain a host, emptied as a whole."""

    def __init__(self) -> None:
        self.chains: dict[str, list[tuple[str, int]]] = {}

    def drop(self, source: str, target: str) -> None:
        self.lose(source, target, 100)

    def lose(self, source: str, target: str, percent: int) -> None:
        self.chains.setdefault(target, []).append((source, percent))

    def heal_rules(self, name: str) -> None:
        self.chains.pop(name, None)


class FakeMachines:
    """Three nodes that nobody starts."""

    hosts = None

    def __init__(self) -> None:
        self.nodes = [NodeMachine(name, f"h{name}", [], "", Path("log"), Path("steps")) for name in "abc"]


def test_a_seed_is_a_plan() -> None:
    """Method: the same seed twice; all kinds come; none that needs a network where there is none."""
    seeds = range(300)
    plans = [[draw(random.Random(seed), 2.0, has_network=True, durability="power") for seed in seeds] for _ in "12"]
    assert plans[0] == plans[1]
    assert {fault.kind for plan in plans[0] for fault in plan} == KINDS.keys()
    assert all(1 <= len(plan) <= 3 and 0 < fault.span_s < 6 for plan in plans[0] for fault in plan)
    local = [draw(random.Random(seed), 2.0, has_network=False, durability="power") for seed in range(100)]
    assert {fault.kind for plan in local for fault in plan} == set(LOCAL)


def test_what_memory_does_not_survive_is_never_done_to_it() -> None:
    """Goal: no fault beyond what the durability promises. Method: with memory no kill of two, and a kill is the only
    fault; with process no reboot."""
    for seed in range(500):
        kinds = [fault.kind for fault in draw(random.Random(seed), 2.0, has_network=True, durability="memory")]
        assert not set(kinds) & set(FORGETTING)
        assert "kill" not in kinds or kinds == ["kill"]
        kinds = [fault.kind for fault in draw(random.Random(seed), 2.0, has_network=True, durability="process")]
        assert not set(kinds) & set(REBOOTS)


def test_rules_that_overlap_are_undone_one_by_one() -> None:
    """Method: a partition and a loss that share a host and a way; each end leaves the other."""
    hosts = FakeHosts()
    rules = Rules(hosts)  # type: ignore[arg-type]
    first = rules.add([("a", "b"), ("b", "a")])
    second = rules.add([("a", "b"), ("c", "b")], 20)
    third = rules.add([("a", "b")])
    assert hosts.chains == {"b": [("a", 100), ("a", 20), ("c", 20), ("a", 100)], "a": [("b", 100)]}
    first()
    assert hosts.chains == {"b": [("a", 20), ("c", 20), ("a", 100)]}
    second()
    assert hosts.chains == {"b": [("a", 100)]}
    third()
    assert hosts.chains == {}


def test_victims_are_who_leads() -> None:
    """Method: a map in which b leads all, with c; nobody knows who leads; what the control plane's records say."""
    field = Field(FakeMachines())  # type: ignore[arg-type]
    assert {field.leader(random.Random(seed)).name for seed in range(30)} == {"a", "b", "c"}
    assert field.led_by(["a"]) == []
    config = ShardConfig(epoch=4, leader=Member("b", 2), insync=frozenset((Member("b", 2), Member("c", 1))))
    entries = [Entry(f"shards/{number}", encode_record(ShardRecord.of(config)), 7) for number in range(4)]
    field.shards = _shards(Picture({entry.key: entry for entry in entries}, 7))
    assert field.shards["3"] == {"epoch": 4, "leader": "b", "insync": ["b", "c"]}
    leader = field.leader(random.Random(1))
    replica = field.replica_of(leader, random.Random(1))
    assert leader.name == "b" and replica is not None and replica.name == "c"
    assert field.replica_of(replica, random.Random(1)) is None
    assert field.led_by(["b"]) == [0, 1, 2, 3] and field.led_by(["c"]) == []


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_a_method_of_the_product(name: str) -> None:
    """Goal: renaming a method does not make fault runs weaker in silence. Method: each is looked up, and is called
    without being awaited: a step is before and after it."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert callable(found) and not inspect.iscoroutinefunction(found)


_WORK = """
import sys, time
from tests.cluster.dying_node import Countdown
from pathlib import Path
import signal
countdown = Countdown(Path(sys.argv[1]))
signal.signal(signal.SIGUSR1, countdown.start)
print('{"event": "node.ready"}', flush=True)
for _ in range(600):
    for _ in range(3):
        countdown.step()
    time.sleep(0.05)
"""


def test_a_doomed_node_dies_and_stays_down_and_one_that_dies_by_itself_is_a_surprise(tmp_path: Path) -> None:
    """Method: a program that counts steps as the node does: doomed, it is down and no surprise; killed by somebody
    else, it is one, and is started again."""
    steps = tmp_path / "steps"
    node = NodeMachine("a", "h", [sys.executable, "-c", _WORK, str(steps)], "", tmp_path / "log", steps)

    def until(is_so: Any) -> None:
        end_s = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end_s, node.tail()
            node.poll()
            time.sleep(0.01)

    try:
        node.start()
        until(lambda: node.is_ready)
        node.doom(10)
        until(lambda: not node.is_up)
        node.poll()
        assert not node.is_up and not node.is_wanted and node.surprises == []
        node.start()
        until(lambda: node.is_ready)
        subprocess.run(["kill", "-9", str(node.pid)], check=True)
        until(lambda: node.lives == 3)
        assert len(node.surprises) == 1 and "exit code -9" in node.surprises[0]
    finally:
        node.close()
