"""Crashes of a store at any moment: nothing acknowledged is lost, nothing forgotten comes back, no byte is wrong."""

from __future__ import annotations

import random

import pytest

from tests.tiers.datafile_lives import Freed, Owner, check, fill, live, opened
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine
from ucxkv.tiers.datafiles import Hooks


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
@pytest.mark.parametrize("seed", range(20, 23))
async def test_many_lives_keep_it_too(durability: str, seed: int) -> None:
    """Goal and method as above, with more of both."""
    owner = await _life(seed, durability, 60)
    freed, rng = Freed(owner.disk), random.Random(seed)
    for _ in range(80):
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


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_what_the_owner_was_told_is_gone_does_not_come_back(durability: str) -> None:
    """Goal: a key that is deleted after its file was used again needs no tombstone. Method: crashes at each moment when
    the owner was told of a life's end, with none and with all of the open sectors; no block of that life is found."""
    disk = FaultyDisk()
    engine = FaultyEngine(disk, 6)
    told: list[tuple[int, int, int]] = []
    hooks = Hooks(dropped=lambda file, generation: told.append((len(disk.events), file, generation)))
    async with opened(disk, engine, hooks=hooks, durability=durability) as (store, _, _):
        await fill(store, range(100))
    assert len(told) > 3
    for at, file, generation in told:
        for kept in (0.0, 1.0):
            left = disk.crash(at, random.Random(1), is_power=durability == "power", kept=kept)
            async with opened(left, FaultyEngine(left, is_prompt=True)) as (_, found, _):
                assert len(found) > 0
                assert (file, generation) not in {(each.place.file, each.place.generation) for each in found}
