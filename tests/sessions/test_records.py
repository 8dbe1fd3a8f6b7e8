"""Records of a session's log: read back as written, whatever else is there read as nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions.test_book import chain, word
from ucxkv.sessions.records import BASES, RECORDS_MAX, SessionLog, Turn, record_keys, session_key

words = st.lists(st.tuples(st.text("abc", min_size=1, max_size=12), st.integers(1, 2)), max_size=30)


def written(used: list[tuple[str, int]]) -> list[bytes]:
    """The records of turns that used these words, in so many layer groups."""
    log, records = SessionLog(), []
    for i, (text, groups) in enumerate(used):
        turn = Turn(chain(text, groups), 1e9 + i, 60.0)
        records.append(log.encode(turn))
        log.add(turn.chain)
    return records


@settings(deadline=None)
@given(words)
def test_a_log_is_read_as_it_was_written(used: list[tuple[str, int]]) -> None:
    """Goal: another process knows each turn's chain. Method: any turns encoded by one log and decoded by another."""
    log = SessionLog()
    for i, record in enumerate(written(used)):
        turn = log.decode(record)
        assert turn is not None
        assert (word(turn.chain), turn.chain.layer_groups) == used[i]
        assert (turn.used_unix_s, turn.ttl_s, log.count) == (1e9 + i, 60.0, i)
        log.add(turn.chain)


def test_a_turn_that_goes_on_costs_its_new_keys_only() -> None:
    """Goal: a long conversation's record is small. Method: bytes of records that add 2 keys to 1, 3, 5... before them,
    and of one that forks from the chain BASES turns back."""
    used = [("a" * n, 1) for n in range(1, 2 * BASES, 2)]
    records = written([*used, ("ab", 1)])
    assert [len(record) for record in records] == [40 + 16] + [40 + 32] * (BASES - 1) + [40 + 16]


@settings(deadline=None)
@given(words.filter(bool), st.data())
def test_what_is_no_record_reads_as_nothing(used: list[tuple[str, int]], data: st.DataObject) -> None:
    """Goal: a foreign value ends the log, no more. Method: records cut, and with bytes changed anywhere; what is read
    is a turn of whole keys in the right form, or nothing."""
    records = written(used)
    log = SessionLog()
    for record in records[:-1]:
        turn = log.decode(record)
        assert turn is not None
        log.add(turn.chain)
    cut = records[-1][: data.draw(st.integers(0, len(records[-1]) - 1))]
    assert log.decode(cut) is None
    damaged = bytearray(records[-1])
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    turn = log.decode(bytes(damaged))
    if turn is not None:
        assert turn.chain.keys.shape[1] == 16 and len(turn.chain) and turn.chain.layer_groups > 0 and turn.ttl_s > 0
        assert turn.chain.keys.any(axis=1).all()
    assert log.decode(os.urandom(200)) is None


def test_keys_of_sessions_salts_and_records_all_differ_and_stay_the_same() -> None:
    """Goal: no two sessions meet, and any process finds its own. Method: keys of ids and salts that read alike when
    joined; one key as it has always been."""
    names = [("a", ""), ("b", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("a\0", "b")]
    sessions = [session_key(*name) for name in names]
    keys = np.concatenate([record_keys(session) for session in sessions])
    assert len({row.tobytes() for row in keys} | set(sessions)) == len(names) * (RECORDS_MAX + 1)
    assert session_key("chat-42").hex() == "850b44f9fa8ae01977d9292251fa59ab"
    assert record_keys(session_key("chat-42"), 1).tobytes().hex() == "ebc53a6e017d82d6b39dfeed8bbab907"


@pytest.mark.parametrize(("ago_s", "left_s"), [(0, 60), (20, 40), (70, -10), (-1000, 60)])
def test_a_turns_time_to_live_is_counted_from_its_own_clock(ago_s: float, left_s: float) -> None:
    """Goal: a turn of another machine is over when it says so, and one of a clock ahead is of now. Method: turns
    of before and after now."""
    assert Turn(chain("a"), 1e9 - ago_s, 60.0).left_s(1e9) == left_s
