"""The log's records: every byte of them round-trips, and what is no record is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.directory.arena import key_of
from ucxkv.directory.log import COMMIT_DTYPE, RECORD_ROWS_MAX, LogError, Replay, commits, epoch_record, leaves


def _rows(numbers: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    rows = np.zeros(len(numbers), COMMIT_DTYPE)
    for i, number in enumerate(numbers):
        rows[i] = (
            key_of(number),
            key_of(number + 1),
            number + 1,
            64 * number,
            (1 << 63) + number,
            9,
            7,
            5,
            3,
            0,
            1,
            8,
            0,
        )
    return rows


def test_a_commit_has_the_bytes_of_the_table() -> None:
    """Goal: the format is what its docstring says. Method: one row, field by field at its offset."""
    (record,) = commits(_rows([3]))
    assert record[:8] == b"\1\1\0\0\1\0\0\0" and len(record) == 88
    row = record[8:]
    assert (row[:16], row[16:32]) == (key_of(3), key_of(4))
    fields = {32: (8, 4), 40: (8, 192), 48: (8, (1 << 63) + 3), 56: (4, 9), 60: (4, 7), 64: (4, 5), 68: (4, 3)}
    fields |= {72: (2, 0), 74: (1, 1), 75: (1, 8), 76: (4, 0)}
    for at, (size, value) in fields.items():
        assert int.from_bytes(row[at : at + size], "little") == value, at
    assert next(leaves(key_of(1))) == b"\2\1\0\0\1\0\0\0" + key_of(1)
    assert epoch_record(5) == b"\3\1\0\0\1\0\0\0" + (5).to_bytes(8, "little")


@given(st.lists(st.integers(0, 5000), max_size=40), st.lists(st.integers(0, 5000), max_size=20))
def test_replay_is_a_dict_in_the_order_of_the_last_commits(put: list[int], left: list[int]) -> None:
    """Goal: replay comes to the state that the records say. Method: against a dict; a key put twice counts last."""
    replay, expected = Replay(), dict[int, None]()
    for number in put:
        for record in commits(_rows([number])):
            replay.feed(record)
        expected.pop(number, None)
        expected[number] = None
    for record in leaves(b"".join(map(key_of, left))):
        replay.feed(record)
    for number in left:
        expected.pop(number, None)
    assert len(replay) == len(expected)
    assert replay.rows().tobytes() == _rows(list(expected)).tobytes()


def test_many_rows_are_many_records() -> None:
    """Goal: no record grows with the call. Method: 2,000 rows and keys, cut, fed, back."""
    rows, replay = _rows(list(range(2000))), Replay()
    records = list(commits(rows))
    assert len(records) == 3 and max(map(len, records)) == 8 + 80 * RECORD_ROWS_MAX
    for record in records:
        replay.feed(record)
    replay.feed(epoch_record(9))
    assert replay.epoch == 9 and replay.rows().tobytes() == rows.tobytes()
    for record in leaves(rows["key"].tobytes()):
        replay.feed(record)
    assert len(replay.rows()) == 0


@given(st.binary(max_size=200))
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    """Goal: LogError and nothing else. Method: random bytes, and good records cut, lengthened, of another version."""
    replay = Replay()
    for record in (raw, epoch_record(1)[:-1], epoch_record(1) + b"x", b"\1\2" + epoch_record(1)[2:], b"\4" + raw):
        try:
            replay.feed(record)
        except LogError:
            continue
        assert record == raw and replay.epoch >= 0
    with pytest.raises(LogError):
        replay.feed(b"")
