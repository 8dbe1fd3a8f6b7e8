"""A journal against a plain list, over random lives: writes, snapshots, ends of every kind, disks that fail."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.journal.faulty import FaultyFiles
from tests.journal.plain import PlainJournal


class JournalMachine(RuleBasedStateMachine):
    """records: what was written, by lsn; certain: the last lsn that must come back; possible: whose records may also be
    there, as their write failed or had no sync; snapshots: lsn -> state of those that may be the newest."""

    @initialize(is_synced=st.booleans())
    def begin(self, is_synced: bool) -> None:
        self.files = FaultyFiles()
        self.is_synced = is_synced
        self.records: dict[int, tuple[int, bytes]] = {}
        self.states: dict[int, list[bytes]] = {}
        self.certain = 0
        self.journal: PlainJournal | None = None
        self.reopen()

    def reopen(self) -> None:
        """Start on what is there, and compare all of it."""
        journal = PlainJournal(self.files, is_synced=self.is_synced)
        found = journal.recovered
        assert found.damaged == ()
        assert found.last_lsn >= self.certain
        chunks = list(found.snapshot)
        assert chunks == self.states.get(found.snapshot_lsn, [])[: len(chunks)]
        assert len(chunks) == 2 or found.snapshot_lsn == 0
        records = list(found.records)
        assert [lsn for _, lsn, _ in records] == list(range(found.snapshot_lsn + 1, found.last_lsn + 1))
        for epoch, lsn, record in records:
            assert self.records[lsn] == (epoch, record)
        self.journal = journal
        self.certain = found.last_lsn  # from here on it was acted upon
        for lsn in [each for each in self.records if each > found.last_lsn]:
            del self.records[lsn]

    @property
    def open_journal(self) -> PlainJournal:
        assert self.journal is not None
        return self.journal

    @rule(epoch=st.integers(0, 3), lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=5))
    def write(self, epoch: int, lengths: list[int]) -> None:
        self._write(epoch, lengths)
        self.certain = self.open_journal.lsn

    def _write(self, epoch: int, lengths: list[int]) -> None:
        first = self.open_journal.lsn + 1
        records = [bytes([(first + i) % 251]) * length for i, length in enumerate(lengths)]
        for lsn, record in enumerate(records, first):
            self.records[lsn] = (epoch, record)
        self.open_journal.write(*records, epoch=epoch)

    @rule(back=st.integers(0, 4))
    def snapshot(self, back: int) -> None:
        self._snapshot(back)
        assert sum(name.startswith("snapshot-") for name in self.files.names()) <= 2

    def _snapshot(self, back: int) -> None:
        journal = self.open_journal
        lsn = max(journal.generations.newest_lsn, journal.lsn - back)
        self.states[lsn] = [b"state at %d" % lsn, bytes(lsn)]
        journal.snapshot(self.states[lsn], lsn=lsn)

    @rule()
    def kill(self) -> None:
        self.files = self.files.after_kill()
        self.reopen()

    @precondition(lambda self: self.is_synced)
    @rule(seed=st.integers(0, 2**32), names_kept=st.integers(0, 3))
    def cut_power(self, seed: int, names_kept: int) -> None:
        self.files = self.files.after_power_cut(random.Random(seed), names_kept)
        self.reopen()

    @precondition(lambda self: not self.is_synced)
    @rule(seed=st.integers(0, 2**32), names_kept=st.integers(0, 3))
    def cut_power_without_syncs(self, seed: int, names_kept: int) -> None:
        self.certain = self.open_journal.generations.newest_lsn
        self.files = self.files.after_power_cut(random.Random(seed), names_kept)
        self.reopen()

    @rule(
        steps=st.integers(1, 12),
        code=st.sampled_from((errno.EIO, errno.ENOSPC)),
        ending=st.sampled_from(("kill", "power")),
        is_snapshot=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def fail(self, steps: int, code: int, ending: str, is_snapshot: bool, seed: int) -> None:
        """An operation fails; the journal writes no more; then the process or the machine ends."""
        left = [steps]

        def before(kind: str, name: str) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(code, "injected")

        self.files.before = before
        try:
            while left[0] > 0:
                if is_snapshot:
                    self._snapshot(0)
                else:
                    self._write(1, [700])
                    self.certain = self.open_journal.lsn
        except OSError:
            pass
        self.files.before = lambda kind, name: None
        if ending == "kill":
            self.files = self.files.after_kill()
        else:
            if not self.is_synced:
                self.certain = self.open_journal.generations.newest_lsn
            self.files = self.files.after_power_cut(random.Random(seed), seed % 3)
        self.reopen()

    @invariant()
    def files_are_bounded(self) -> None:
        assert sum(name.startswith("spare-") for name in self.files.names()) <= 5
        assert not self.files.is_locked


JournalMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestJournalMachine = pytest.mark.timeout(400)(JournalMachine.TestCase)
