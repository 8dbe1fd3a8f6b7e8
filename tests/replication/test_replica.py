"""Replicas of one shard: taking over, rejoining, and no record lost, by seeded worlds and by single cases."""

from __future__ import annotations

import pytest

from tests.replication.planted import PLANTED, SettlesByReading
from tests.replication.world import MS, World
from ucxkv.replication import Replica, Role


def settled(world: World) -> None:
    """One leads, the others follow, a record goes through, and all have the same."""
    roles = {name: process.role for name, process in world.processes.items()}
    assert sorted(roles.values()) == sorted([Role.LEADER] + [Role.FOLLOWER] * (len(roles) - 1)), roles
    leader = next(name for name, role in roles.items() if role is Role.LEADER)
    before = len(world.acked)
    world.propose(leader)
    world.run(world.now + 500 * MS)
    assert len(world.acked) == before + 1, "a record does not go through"
    assert len({tuple(process.state) for process in world.processes.values()}) == 1


def run(seed: int, replicas: int = 3, make: type[Replica] = Replica, doubt: float = 0.15) -> World:
    """One seeded world of 300 steps, then calm."""
    world = World(seed, replicas, make, doubt)
    for _ in range(300):
        world.step()
    world.heal()
    settled(world)
    return world


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_whatever_happens_nothing_acknowledged_is_lost_and_all_becomes_well(replicas: int, first: int) -> None:
    """Method: 20 seeded worlds with every fault."""
    for seed in range(first, first + 20):
        try:
            run(seed, replicas)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}, {replicas} replicas: {exc}") from exc


def test_the_worlds_are_not_idle() -> None:
    """Goal: the method tests something. Records are acknowledged, leaders change, snapshots and cuts happen."""
    worlds = [run(seed) for seed in range(200, 210)]
    assert sum(len(world.acked) for world in worlds) > 200
    assert sum(world.faults for world in worlds) > 200
    assert all(world.config is not None and world.config.epoch > 1 for world in worlds)
    assert any(process.disk.base[0] for world in worlds for process in world.processes.values())


@pytest.mark.parametrize("planted", PLANTED, ids=lambda make: make.__name__)
def test_a_replica_that_breaks_a_rule_is_found(planted: type[Replica]) -> None:
    """Method: worlds until one sees it; 200 are enough for each rule."""
    doubt = 0.8 if planted is SettlesByReading else 0.15
    for seed in range(200):
        try:
            run(seed, make=planted, doubt=doubt)
        except AssertionError:
            return
    pytest.fail(f"200 worlds did not see what {planted.__name__} does")
