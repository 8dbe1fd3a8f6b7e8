"""Every state that a death or a power cut can leave behind, from a disk in memory that records writes and barriers."""

from __future__ import annotations

import errno
import random

import pytest

from tests.journal.faulty import FaultyFiles
from tests.journal.plain import PlainJournal, read
from ucxkv.journal import StopKind


class _Cut(Exception):
    """The moment at which the machine stops."""


def _record(lsn: int) -> bytes:
    """Content that tells its place; lengths from 10 bytes to 4 KiB."""
    return b"record %d " % lsn + bytes([lsn % 251]) * (lsn * 397 % 3900)


def _work(files: FaultyFiles, acknowledged: list[int], *, is_synced: bool, rounds: int = 14) -> None:
    """Frames over several files, with snapshots and a restart; acknowledged: the last lsn that was durable."""
    for opening in range(2):
        journal = PlainJournal(files, is_synced=is_synced)
        for number in range(rounds):
            first = journal.lsn + 1
            journal.write(*[_record(lsn) for lsn in range(first, first + 1 + number % 3)], epoch=opening + 1)
            acknowledged[:] = [journal.lsn]
            if number % 4 == 2:
                journal.snapshot([b"state at %d" % journal.lsn, bytes(3000)])
        journal.close()
        files.release()


def _check(files: FaultyFiles, acknowledged: int, begun: int) -> int:
    """What a restart finds: everything acknowledged, nothing else than was written, no gap; and it goes on from
    there."""
    chunks, records, journal = read(files)
    start = journal.recovered.snapshot_lsn
    last = journal.recovered.last_lsn
    assert chunks[:1] == ([b"state at %d" % start] if start else [])
    assert [lsn for _, lsn, _ in records] == list(range(start + 1, last + 1))
    for _, lsn, record in records:
        assert record == _record(lsn)
    assert acknowledged <= last <= begun
    is_left_alone = journal.recovered.stopped.kind is StopKind.DAMAGED
    assert is_left_alone or sum(name.startswith("snapshot-") for name in files.names()) <= 2
    journal.write(_record(last + 1))
    journal.close()
    assert files.open_handles == 0
    _, records, journal = read(files.after_power_cut(None))
    assert journal.recovered.last_lsn == last + 1
    assert [record for _, _, record in records][-1:] == [_record(last + 1)]
    return last


def _operations(is_synced: bool) -> int:
    files, acknowledged = FaultyFiles(), [0]
    _work(files, acknowledged, is_synced=is_synced)
    return sum(files.operations.values())


@pytest.mark.parametrize("seed", range(3))
def test_every_acknowledged_record_survives_a_power_cut_at_every_step(seed: int) -> None:
    """Goal: durability power. Method: the machine stops before each single operation on the disk (snapshots,
    recycling and a restart among them); for each: nothing unsynced made it, all of it, and random sectors and names
    of it."""
    rng = random.Random(seed)
    states = 0
    for stop in range(_operations(True) + 1):
        files, acknowledged = FaultyFiles(), [0]

        def before(_kind: str, _name: str, files: FaultyFiles = files, stop: int = stop) -> None:
            if sum(files.operations.values()) == stop:
                raise _Cut

        files.before = before
        try:
            _work(files, acknowledged, is_synced=True)
        except _Cut:
            pass
        files.before = lambda kind, name: None
        for state in files.power_cuts(rng, 4):
            _check(state, acknowledged[0], acknowledged[0] + 3)
            states += 1
    assert states > 1000


def test_every_acknowledged_record_survives_the_death_of_the_process_at_every_step() -> None:
    """Goal: durability process: written is enough. Method: the process ends before each operation on the disk; the
    cache stays."""
    total = _operations(False)
    assert total < _operations(True)
    for stop in range(total + 1):
        files, acknowledged = FaultyFiles(), [0]

        def before(_kind: str, _name: str, files: FaultyFiles = files, stop: int = stop) -> None:
            if sum(files.operations.values()) == stop:
                raise _Cut

        files.before = before
        try:
            _work(files, acknowledged, is_synced=False)
        except _Cut:
            pass
        _check(files.after_kill(), acknowledged[0], acknowledged[0] + 3)


def test_a_power_cut_without_syncs_leaves_a_prefix_or_an_error() -> None:
    """Goal: durability process promises nothing about power cuts, yet never wrong bytes nor a gap. Method: random
    sectors of unsynced frames; what comes back is in order and right, and no older than the newest snapshot."""
    rng = random.Random(7)
    shorter = 0
    for stop in range(_operations(False) + 1):
        files, acknowledged = FaultyFiles(), [0]

        def before(_kind: str, _name: str, files: FaultyFiles = files, stop: int = stop) -> None:
            if sum(files.operations.values()) == stop:
                raise _Cut

        files.before = before
        try:
            _work(files, acknowledged, is_synced=False)
        except _Cut:
            pass
        files.before = lambda kind, name: None
        for state in files.power_cuts(rng, 4):
            shorter += _check(state, 0, acknowledged[0] + 3) < acknowledged[0]
    assert shorter > 100


def test_a_torn_frame_is_overwritten_by_what_follows() -> None:
    """Goal: recovery after recovery. Method: chains of power cuts, each after a few frames of the restart before it;
    every acknowledged record is there at every link, and none that was cut comes back."""
    rng = random.Random(3)
    for _ in range(60):
        files, acknowledged = FaultyFiles(), 0
        for _ in range(6):
            _, records, journal = read(files)
            assert [lsn for _, lsn, _ in records] == list(range(1, journal.lsn + 1))
            assert all(record == _record(lsn) for _, lsn, record in records)
            assert journal.lsn >= acknowledged
            stop = rng.randrange(1, 12)
            left = [stop]

            def before(_kind: str, _name: str, left: list[int] = left) -> None:
                left[0] -= 1
                if not left[0]:
                    raise _Cut

            acknowledged = journal.lsn
            files.before = before
            try:
                while True:
                    acknowledged = journal.write(_record(journal.lsn + 1), epoch=rng.randrange(3))
            except _Cut:
                pass
            files = files.after_power_cut(rng, rng.randrange(4))


def test_what_a_failed_sync_left_in_the_cache_is_no_proof() -> None:
    """Goal: after a failed sync Linux marks pages clean that never reached the disk; a restart that read them from the
    cache would acknowledge them and lose them at the next power cut. Method: exactly that, on the disk in memory."""
    files = FaultyFiles()
    journal = PlainJournal(files)
    journal.write(_record(1))

    def fail(kind: str, name: str) -> None:
        if kind == "sync":
            raise OSError(errno.EIO, "Input/output error")

    files.before = fail
    with pytest.raises(OSError, match="Input/output"):
        journal.write(_record(2))
    files.before = lambda kind, name: None
    files.release()
    _, records, restarted = read(files)
    found = [lsn for _, lsn, _ in records]
    assert found == [1]
    restarted.write(b"second life")
    _, records, _ = read(files.after_power_cut(None))
    assert [record for _, _, record in records] == [_record(1), b"second life"]
