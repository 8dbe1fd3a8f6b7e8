"""The log's window and its form on disk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucxkv.replication.log import Entry, Kind, LogWindow, decode_entry, encode_entry

ENTRIES = st.builds(
    Entry,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from(Kind),
    st.binary(max_size=50),
)


@given(ENTRIES)
def test_an_entry_comes_back(entry: Entry) -> None:
    assert decode_entry(encode_entry(entry)) == entry


@pytest.mark.parametrize("raw", [b"", b"x" * 16, bytes(16) + b"\2"])
def test_what_is_no_entry_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_entry(raw)


def entries(first: int, epochs: str) -> list[Entry]:
    return [Entry(first + i, int(epoch), Kind.RECORD, b"%d" % (first + i)) for i, epoch in enumerate(epochs)]


def test_an_entry_that_replaces_another_in_the_journal_ends_what_was_behind_it() -> None:
    log, is_sound = LogWindow.replay(0, 0, [*entries(1, "11112"), *entries(3, "33")])
    assert is_sound and log.last_index == 4 and [log.epoch_at(i) for i in range(1, 5)] == [1, 1, 3, 3]


def test_a_gap_in_the_journal_ends_the_log() -> None:
    log, is_sound = LogWindow.replay(0, 0, [*entries(1, "11"), *entries(4, "1")])
    assert not is_sound and log.last_index == 2


def test_entries_that_the_snapshot_has_are_passed_over() -> None:
    log, is_sound = LogWindow.replay(3, 2, [*entries(1, "112"), *entries(4, "23")])
    assert is_sound and log.base_index == 3 and log.last_index == 5


def test_the_window_forgets_what_is_committed_and_old() -> None:
    log = LogWindow()
    log.append(entries(1, "1122334455"))
    log.trim(4, keep=4)
    assert log.base_index == 0
    log.trim(9, keep=4)
    assert (log.base_index, log.base_epoch, log.last_index) == (5, 3, 10)
    assert log.epoch_at(4) is None and log.epoch_at(5) == 3 and log.epoch_at(10) == 5 and log.epoch_at(11) is None
    assert [entry.index for entry in log.batch(6, 3, 100)] == [6, 7, 8]
    assert [entry.index for entry in log.batch(6, 9, 2)] == [6, 7]
