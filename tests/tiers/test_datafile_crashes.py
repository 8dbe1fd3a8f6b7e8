"""Crashes of a store at any moment: nothing acknowledged is lost, nothing forgotten comes back, no byte is wrong."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

from tests.tiers.datafile_lives import Freed, Owner, check, data_of, fill, key_of, live, opened, read_bytes
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine, Op
from ucxkv.tiers.base import WritesFailed
from ucxkv.tiers.datafiles import Hooks
from ucxkv.tiers.io import OpKind


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


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_every_subset_of_the_writes_under_way_keeps_it_too(durability: str) -> None:
    """Goal: no combination of writes that landed and writes that did not hurts. Method: moments of a life; at each, all
    subsets of the writes that no barrier covers (of six random ones where there are more), each whole or not at all."""
    owner = await _life(7, durability, 24)
    freed, rng = Freed(owner.disk), random.Random(8)
    ways = there = 0
    for at in rng.sample(range(owner.now + 1), 40 if durability == "power" else 80):
        for disk in owner.disk.crashes(at, rng, is_power=durability == "power", most=6):
            ways += 1
            there += await check(owner, disk, at, freed)
    assert ways > 60 and there > 10 * ways


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, errno.EROFS, "first sector", "half"])
async def test_a_life_whose_disk_begins_to_fail_keeps_what_was_acknowledged(fault: int | str, durability: str) -> None:
    """Goal: a failed or short write takes nothing else along, in that life, after a crash, and in the next one. Method:
    lives in which one write after the other is refused from a random one on, or one alone; reads go on; every worker
    ends with WritesFailed; then crashes of the life are checked, and what it left is opened and gone on with."""
    rng = random.Random(str(fault))
    for number in range(3):
        disk = FaultyDisk()
        owner, engine = Owner(disk, rng, durability), FaultyEngine(disk, number)
        is_lasting, left = number != 1, rng.randrange(30, 120)

        def refuse(op: Op, is_lasting: bool = is_lasting) -> int | None:
            nonlocal left
            left -= op.kind == OpKind.WRITE
            if op.kind != OpKind.WRITE or not (left < 0 if is_lasting else left == 0):
                return None
            return fault if isinstance(fault, int) else -512 if fault == "first sector" else -(op.length // 1024 * 512)

        engine.fault = refuse
        store = await owner.open(engine, run=1)
        names = [key_of(each) for each in range(60)]
        ends = await asyncio.gather(*(owner.work(store, names[at::3], 200) for at in range(3)), return_exceptions=True)
        assert all(isinstance(each, WritesFailed) for each in ends) and store.failure is not None
        for key in list(owner.index):
            await owner.read(store, key)
        await store.aclose()
        await engine.aclose()
        freed = Freed(disk)
        for at in [owner.now, *(rng.randrange(owner.now + 1) for _ in range(6))]:
            await check(owner, disk.crash(at, rng, is_power=durability == "power"), at, freed)
        again = Owner(disk.crash(owner.now, rng, is_power=False, kept=0.0), rng, durability)
        await live(again, seed=number + 5, steps=10)


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


async def test_writes_of_a_killed_owner_never_land_on_those_of_the_next() -> None:
    """Goal: kill -9 does not stop the disk. Method: owners that are killed with writes under way, which reach the disk
    when the next owner waits for them, or, if it does not, after it has written; all that it wrote is there."""
    owner = await _life(9, "process", 40)
    rng, late = random.Random(4), 0
    for at in rng.sample(range(owner.now // 3, owner.now + 1), 60):
        disk = owner.disk.killed(at, rng)
        late += bool(disk.late)
        engine = FaultyEngine(disk, at)
        async with opened(disk, engine, files_max=5) as (store, _, _):
            places = await fill(store, range(8))
            disk.land()
            for number, place in places.items():
                assert await read_bytes(store, place) == data_of(number)
    assert late > 30


async def test_hot_blocks_are_kept_though_room_for_them_was_used_before_a_crash() -> None:
    """Goal: what the owner was told is worth keeping is kept, or never asked about. Method: everything is hot, so that
    re-admission uses all its room; crashes just after blocks had moved and before their file was free; the next life
    reclaims the same file again, with less room than it would have liked."""
    rng = random.Random(6)
    owner = Owner(FaultyDisk(), rng, hot_share=1.0)
    await live(owner, seed=6, steps=60, engine_seed=6)
    moved = {at for records in owner.history.values() for record in records for at, _ in record.places[1:]}
    assert len(moved) > 10
    for at in moved:
        again = Owner(owner.disk.crash(at, rng, is_power=False, kept=0.0), rng, hot_share=1.0)
        await live(again, seed=at, steps=10)


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
