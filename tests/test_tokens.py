"""Session tokens as values, and what a follower answers to one: `ucxkv.tokens`, `ucxkv.node.shards.answering`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucxkv
from ucxkv import errors
from ucxkv.tokens import Point, Seen, Token

POINTS = st.lists(
    st.builds(Point, st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=8
)  # fmt: skip
TOKENS = POINTS.map(Token.of)


@given(TOKENS)
def test_a_token_comes_back_from_its_bytes(token: Token) -> None:
    """Goal: another process may go on with it. Method: round trip."""
    assert Token.from_bytes(token.to_bytes()) == token
    assert ucxkv.Token is Token


@given(st.binary(max_size=64))
def test_what_is_no_token_is_refused(raw: bytes) -> None:
    """Goal: foreign bytes raise UsageError or are exactly a token. Method: any bytes."""
    try:
        token = Token.from_bytes(raw)
    except errors.UsageError:
        return
    assert token.to_bytes() == raw


@given(TOKENS)
def test_a_cut_token_is_refused(token: Token) -> None:
    """Goal: no prefix of a token is one. Method: cut everywhere."""
    raw = token.to_bytes()
    for end in range(len(raw)):
        with pytest.raises(errors.UsageError):
            Token.from_bytes(raw[:end])


@given(TOKENS, TOKENS, TOKENS)
def test_tokens_merge_shard_by_shard(a: Token, b: Token, c: Token) -> None:
    """Goal: `|` is the least token that has seen both. Method: laws of a join, against indices by shard."""
    both = a | b
    assert a <= both and b <= both
    for shard in range(6):
        assert both.at(shard).index == max(a.at(shard).index, b.at(shard).index)
    assert (a <= c and b <= c) == (both <= c)
    assert (a < b) == (a <= b and not b <= a) and (a >= b) == (b <= a) and (a > b) == (b < a)
    assert Token() <= a and (not a) == (not a.points)


@given(st.lists(POINTS, max_size=5))
def test_a_session_has_seen_the_newest_of_each_shard(runs: list[list[Point]]) -> None:
    """Goal: what was seen never goes back, however often it is asked. Method: against one merge of everything."""
    seen, so_far = Seen(), Token()
    for run in runs:
        seen.take(run)
        assert so_far <= seen.token
        so_far = so_far | Token.of(run)
        assert [p.index for p in seen.token.points] == [p.index for p in so_far.points]


def test_order_is_by_index_whatever_the_epoch() -> None:
    """Goal: the entries that were committed have one order. Method: a later epoch with a smaller index is not newer."""
    old, new = Point(1, 7, 3), Point(1, 2, 9)
    points = [old, new]
    random.shuffle(points)
    assert Token.of(points).at(1) == new
