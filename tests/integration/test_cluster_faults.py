"""Real nodes, a real etcd and real clients under random faults: short runs of scripts/cluster_faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.control.etcd_server import WHY_NOT
from tests.hosts import why_not

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "cluster_faults.py"
pytestmark = [
    pytest.mark.replicas,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here"),
]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """A run without a violation; what it says of itself."""
    command = [sys.executable, str(SCRIPT), *arguments, "--json", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    events = folder / "events.log"
    assert done.returncode == 0, done.stdout + done.stderr + (events.read_text()[-6000:] if events.exists() else "")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["violations"] == said["lost"] == said["wrong"] == said["holes"] == 0
    assert said["operations"] > 100 and said["acknowledged"] > 10, said
    assert not list(Path("/dev/shm").glob(f"ucxkv-f{said['pid']}-*")), "memory was left behind"
    return said


def test_one_node_that_is_killed_and_stopped_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """Goal: one durable node's promises, by the checks of the cluster. Method: 12 s on the loopback, kill -9 and
    SIGSTOP of node and etcd; histories, last reading."""
    said = run(tmp_path, "--seconds", "12", "--seed", "11", "--nodes", "1", "--replicas", "0", "--no-namespaces")
    assert sum(said["faults"].values()) >= 1


def test_rounds_of_kill_9_of_one_node(tmp_path: Path) -> None:
    """Goal: 0 lost. Method: three rounds, the node killed at a random moment of each, or at a step
    of its work, once or twice."""
    said = run(tmp_path, "--rounds", "3", "--seed", "3", "--nodes", "1", "--replicas", "0", "--no-namespaces")
    assert said["rounds"] == 3 and said["kills"] >= 3


@pytest.mark.hosts
def test_three_nodes_and_etcd_survive_random_faults(tmp_path: Path) -> None:
    """Goal: the guarantees of docs/correctness.md by real processes (issue 4). Method: 20 s of random faults between
    namespaces, seed 7: kills, stops, partitions, loss, of nodes and of etcd."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    said = run(tmp_path, "--seconds", "20", "--seed", "7")
    assert sum(said["faults"].values()) >= 2


def test_rounds_of_kill_9_of_leader_and_replica(tmp_path: Path) -> None:
    """Goal: 0 acknowledged durable puts lost (issue 4). Method: four rounds on the loopback, leader or replica
    or both."""
    said = run(tmp_path, "--rounds", "4", "--seed", "5", "--no-namespaces")
    assert said["rounds"] == 4 and said["kills"] >= 4
