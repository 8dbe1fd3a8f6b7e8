"""The simulated disk against a plain model: what must, may and must not survive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.disk import Disk, File


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 1500), st.booleans()), max_size=12), st.integers(0, 99))
def test_synced_bytes_survive_and_others_are_new_old_or_zero(writes: list[tuple[int, int, bool]], seed: int) -> None:
    """Goal: power loss. Method: random writes, some followed by a sync; after the loss each byte that no later write
    touched is what was synced, and every other one is what it was at the sync, or what some later write put there."""
    file = File()
    synced: dict[int, int] = {}
    may: dict[int, set[int]] = {}
    for number, (offset, size, sync) in enumerate(writes, 1):
        file.write(offset, bytes([number]) * size)
        for at in range(offset, offset + size):
            may.setdefault(at, set()).add(number)
        if sync:
            file.sync()
            synced = dict(enumerate(file.read()))
            may = {}
    before = file.read()
    file.lose_power(random.Random(seed))
    after = file.read()
    assert len(after) <= len(before)
    for at, value in synced.items():
        assert after[at] == value or after[at] in may.get(at, ())
    for at in range(len(synced), len(after)):
        assert after[at] == 0 or after[at] in may[at]
    assert file.pending == []


def test_a_later_write_may_survive_where_an_earlier_one_is_lost() -> None:
    """Goal: no order among unsynced writes. Method: two writes over sixty seeds; each of the four outcomes occurs, and
    a torn one too."""
    outcomes = set()
    for seed in range(60):
        file = File()
        file.write(0, b"a" * 1024)
        file.write(1024, b"b" * 1024)
        file.lose_power(random.Random(seed))
        data = file.read()
        outcomes.add((data[:1024].count(b"a"), data[1024:].count(b"b")))
    assert {(0, 0), (1024, 0), (0, 1024), (1024, 1024)} <= outcomes
    assert any(0 < a < 1024 for a, _ in outcomes)
    assert {(512, 0), (512, 1024)} & outcomes


def test_a_sync_covers_what_was_written_before_it_began() -> None:
    """Goal: a write during a sync is not covered. Method: begin, write, end; lose all that is pending."""
    file = File()
    file.write(0, b"one")
    sync = file.sync_begin()
    file.write(3, b"two")
    file.sync_end(sync)
    assert bytes(file.stable) == b"one"
    assert file.read() == b"onetwo"
    assert len(file.pending) == 1


def test_after_a_failed_sync_the_next_one_lies() -> None:
    """Goal: the kernel's way with a failed fsync. Method: fail, then succeed: the first write is still not durable, a
    new one is; over thirty seeds a power loss takes the first."""
    survived = set()
    for seed in range(30):
        file = File()
        file.write(0, b"1")
        with pytest.raises(OSError, match="fdatasync"):
            file.sync(fails=True)
        assert file.read() == b"1"
        file.write(1, b"2")
        file.sync()
        file.lose_power(random.Random(seed))
        survived.add(file.read())
    assert survived == {b"12", b"\x002"}


def test_what_only_the_cache_had_is_gone_once_the_disk_is_asked() -> None:
    """Goal: a restart after a failed sync does not take the cache for the disk. Method: one doomed write, one pending;
    the first is read until the cache is forgotten, the second still is."""
    file = File()
    file.write(0, b"1")
    with pytest.raises(OSError, match="fdatasync"):
        file.sync(fails=True)
    file.write(1, b"2")
    assert file.read() == b"12"
    file.forget_cached()
    assert file.read() == b"\x002"
    file.sync()
    file.lose_power(random.Random(1))
    assert file.read() == b"\x002"


def test_truncation_is_a_write_like_others_and_a_crash_loses_nothing() -> None:
    """Goal: cutting a torn tail is itself unsynced. Method: truncate, crash, then lose power over many seeds."""
    outcomes = set()
    for seed in range(30):
        disk = Disk()
        file = disk.open("log")
        assert file.append(b"keep") == 0
        assert file.append(b"tail") == 4
        file.sync()
        file.truncate(4)
        disk.crash()
        assert disk.open("log").read() == b"keep"
        disk.lose_power(random.Random(seed))
        outcomes.add(disk.open("log").read())
    assert outcomes == {b"keep", b"keeptail"}
    disk.open("log").truncate(6)
    assert disk.open("log").size_bytes == 6
    disk.remove("log")
    assert disk.open("log").read() == b""
