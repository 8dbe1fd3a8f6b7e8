"""The simulated node's journal: the product's frames and recovery on a disk that tears, against what was promised."""

from __future__ import annotations

import random

import pytest

from tests.sim.disk import Disk
from tests.sim.journal import Journal
from ucxkv.replication import Entry, Kind, Member

ME, EARLIER = Member("a", 2), Member("a", 1)


def _entry(index: int, epoch: int = 1, record: bytes = b"r") -> Entry:
    return Entry(index, epoch, Kind.RECORD, record * index)


def test_what_was_synced_comes_back_and_what_was_not_is_a_prefix() -> None:
    """Goal: no promise is broken by a power cut. Method: two hundred journals of some frames, some synced, over several
    files; after the cut at least the synced entries are there, and all that is there was written, in order."""
    rng = random.Random(4)
    lengths = set()
    for seed in range(200):
        disk = Disk()
        journal = Journal(disk, 1)
        synced = last = 0
        for _ in range(rng.randint(1, 12)):
            count = rng.randint(1, 3)
            journal.write({ME} if last == 0 else None, [_entry(last + at + 1) for at in range(count)])
            last += count
            if rng.random() < 0.6:
                journal.sync_end(journal.sync_begin())
                synced = last
        disk.lose_power(random.Random(seed))
        told = Journal(disk, 2).remembered
        assert told.entries == tuple(_entry(at + 1) for at in range(len(told.entries)))
        assert synced <= len(told.entries) <= last
        assert told.claims == {ME} or synced == 0
        lengths.add(len(told.entries) - synced)
    assert len(lengths) > 2


def test_a_snapshot_replaces_all_before_it_and_survives() -> None:
    """Goal: nothing of the old log comes back. Method: entries, a snapshot with others behind it, more entries, power
    lost; twice, so that the second snapshot stands on the first."""
    disk = Disk()
    for run in (1, 2):
        journal = Journal(disk, 2 * run)
        journal.write({EARLIER}, [_entry(run * 100 + 1), _entry(run * 100 + 2)])
        journal.replace({ME}, run * 100 + 10, run, (b"state", b"more"), [_entry(run * 100 + 11)])
        journal.write(None, [_entry(run * 100 + 12)])
        journal.sync_end(journal.sync_begin())
        disk.lose_power(random.Random(run))
        told = Journal(disk, 2 * run + 1).remembered
        assert (told.base_index, told.base_epoch, told.chunks) == (run * 100 + 10, run, (b"state", b"more"))
        assert told.entries == (_entry(run * 100 + 11), _entry(run * 100 + 12))
        assert told.claims == {ME}
        assert not told.is_damaged


def test_a_failed_sync_is_told() -> None:
    """Goal: the shell learns of it. Method: a sync that fails raises OSError, once it ends."""
    journal = Journal(Disk(), 1)
    journal.write({ME}, [_entry(1)])
    syncs = journal.sync_begin()
    with pytest.raises(OSError, match="fdatasync"):
        journal.sync_end(syncs, fails=True)


def test_damage_before_the_last_frame_is_noticed() -> None:
    """Goal: a journal that lost synced entries never claims to be whole. Method: a bit of a hundred journals is turned;
    either all entries are there, or the journal says that it is damaged; both occur."""
    outcomes = set()
    for seed in range(100):
        disk = Disk()
        journal = Journal(disk, 1)
        for at in range(6):
            journal.write({ME} if at == 0 else None, [_entry(at + 1)])
            journal.sync_end(journal.sync_begin())
        disk.damage(random.Random(seed))
        told = Journal(disk, 2).remembered
        is_whole = told.entries == tuple(_entry(at + 1) for at in range(6))
        assert is_whole or told.is_damaged
        outcomes.add((is_whole, told.is_damaged))
    assert (False, True) in outcomes
