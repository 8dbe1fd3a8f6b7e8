"""The book of sessions against a plain model: what is remembered, for how long, and within which bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ucxkv.errors import UsageError
from ucxkv.sessions.book import CHAINS_MAX, Chain, SessionBook, common_head

NAMES = [bytes([i]) * 16 for i in range(1, 7)]


def chain(text: str, layer_groups: int = 1) -> Chain:
    """A chain whose keys are letters, so that prefixes are prefixes of words."""
    return Chain(np.array([[ord(letter)] * 16 for letter in text], np.uint8).reshape(-1, 16), layer_groups)


def word(of: Chain) -> str:
    """The letters of a chain."""
    return "".join(chr(row[0]) for row in of.keys)


class BookMachine(RuleBasedStateMachine):
    """Turns, questions and ends in virtual time; the model keeps a list of words a session."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SessionBook(sessions_max=4, keys_max=20)
        self.now_s = 0.0
        self.model: dict[bytes, tuple[list[str], float]] = {}  # used longest ago first

    @rule(name=st.sampled_from(NAMES), text=st.text("ab", max_size=9), ttl_s=st.floats(0.5, 50))
    def turn(self, name: bytes, text: str, ttl_s: float) -> None:
        self.book.turn(name, chain(text), self.now_s, ttl_s)
        words, _ = self.model.pop(name, ([], 0.0))
        if text:
            longer = [old for old in words if old.startswith(text)][:1]
            first = longer[0] if longer else text
            words = [first] + [old for old in words if not first.startswith(old)]
        if not words:
            return
        while len(words) > CHAINS_MAX or sum(map(len, words)) > 20:
            words.pop()
        self.model[name] = (words, self.now_s + ttl_s)
        while len(self.model) > 4 or sum(len(w) for words, _ in self.model.values() for w in words) > 20:
            del self.model[next(iter(self.model))]

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: bytes) -> None:
        assert [word(one) for one in self.book.chains(name, self.now_s)] == self.model.get(name, ([], 0.0))[0]

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: bytes) -> None:
        assert self.book.end(name) == (self.model.pop(name, None) is not None)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        over = [name for name, (_, expiry_s) in self.model.items() if expiry_s <= self.now_s]
        for name in over:
            del self.model[name]
        assert self.book.expire(self.now_s) == len(over)

    @invariant()
    def the_books_agree(self) -> None:
        self.book.check()
        assert len(self.book) == len(self.model)


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_chains_in_other_layer_groups_share_nothing() -> None:
    """Goal: the same tokens stored by layer are other values. Method: the head of equal keys in 1 and 2 groups."""
    assert common_head(chain("abc"), chain("abd")) == 2
    assert common_head(chain("abc"), chain("abd", 2)) == 0
    assert common_head(chain(""), chain("a")) == 0


@pytest.mark.parametrize("options", [{"sessions_max": 0}, {"keys_max": 0}])
def test_bounds_that_hold_nothing_are_refused(options: Any) -> None:
    """Goal: a wrong call is named. Method: each bound at 0, and a time to live of 0."""
    with pytest.raises(UsageError, match="at least 1"):
        SessionBook(**options)
    with pytest.raises(UsageError, match="ttl_s=0"):
        SessionBook().turn(NAMES[0], chain("a"), 0.0, 0)


def test_a_book_that_is_used_for_ever_keeps_no_more_expiries_than_sessions() -> None:
    """Goal: no growth. Method: ten thousand turns of one session; `check` looks at the heap."""
    book = SessionBook()
    for now_s in range(10_000):
        book.turn(NAMES[0], chain("ab"), float(now_s), 1e6)
    book.check()
