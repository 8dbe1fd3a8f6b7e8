"""Crashes of a store at any moment: nothing acknowledged is lost, nothing forgotten comes back, no byte is wrong."""

from __future__ import annotations

import random

import pytest

from tests.tiers.datafile_lives import Freed, Owner, check, live
from tests.tiers.faulty_engine import FaultyDisk


async def _life(seed: int, durability: str, steps: int) -> Owner:
    owner = Owner(FaultyDisk(), random.Random(seed), durability)
    await live(owner, seed=seed, steps=steps, engine_seed=seed)
    return owner


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_every_prefix_of_a_life_keeps_what_was_acknowledged(durability: str) -> None:
    """Goal: 0 acknowledged lost, 0 wrong, whatever the moment. Method: a life that recycles and re-admits; the folder
    after each of its events, with a random subset of the open sectors, is opened and compared with the record."""
    owner = await _life(1, durability, 24 if durability == "power" else 40)  # syncs are events too
    freed, rng = Freed(owner.disk), random.Random(2)
    there = 0
    for at in range(owner.now + 1):
        disk = owner.disk.crash(at, rng, is_power=durability == "power")
        there += await check(owner, disk, at, freed)
    assert there > 10 * owner.now and owner.moves > 0


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("seed", range(10, 14))
async def test_random_moments_of_other_lives_keep_it_too(durability: str, seed: int) -> None:
    """Goal: the same for other orders of completion. Method: other seeds, random moments, several subsets at each."""
    owner = await _life(seed, durability, 40)
    freed, rng = Freed(owner.disk), random.Random(seed)
    there = 0
    for _ in range(12):
        at = rng.randrange(owner.now + 1)
        for kept in (0.0, 0.5, 1.0):
            disk = owner.disk.crash(at, rng, is_power=durability == "power", kept=kept)
            there += await check(owner, disk, at, freed)
    assert there > 100 and owner.moves > 0


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("seed", range(20, 30))
async def test_many_lives_keep_it_too(durability: str, seed: int) -> None:
    """Goal and method as above, with more of both."""
    owner = await _life(seed, durability, 80)
    freed, rng = Freed(owner.disk), random.Random(seed)
    for _ in range(120):
        at = rng.randrange(owner.now + 1)
        await check(owner, owner.disk.crash(at, rng, is_power=durability == "power"), at, freed)


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_lives_that_each_begin_with_a_crash_keep_it_too(durability: str) -> None:
    """Goal: going on after a crash is as safe as the first life. Method: eight lives, each on what a crash of the last
    one left, and crashes of each are checked; its owner begins with what it finds."""
    rng = random.Random(3)
    disk = FaultyDisk()
    for seed in range(8):
        owner = Owner(disk, rng, durability)
        await live(owner, seed=seed, steps=12, engine_seed=seed)
        freed = Freed(disk)
        for _ in range(10):
            at = rng.randrange(owner.now + 1)
            await check(owner, disk.crash(at, rng, is_power=durability == "power"), at, freed)
        disk = disk.crash(rng.randrange(owner.now // 2, owner.now + 1), rng, is_power=durability == "power")
