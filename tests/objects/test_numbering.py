"""The shape of the chain of versions: which header hangs on which, which may go, and who is current."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.objects import numbering as nb


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Base 3 and four levels, so that a few dozen versions reach all of them."""
    use_small_numbers(monkeypatch)
    yield


def use_small_numbers(monkeypatch: pytest.MonkeyPatch, levels: int = 4) -> None:
    """Base 3."""
    for name, value in (("RADIX", 3), ("LEVELS", levels), ("LAST", 3**levels - 1)):
        monkeypatch.setattr(nb, name, value)


def current(headers: set[int]) -> int:
    """What `search` finds among these headers."""
    steps = nb.search()
    numbers = next(steps)
    while True:
        assert len(numbers) <= nb.LEVELS + nb.RADIX
        try:
            numbers = steps.send([number in headers for number in numbers])
        except StopIteration as done:
            return int(done.value)


def is_current(headers: set[int], number: int) -> bool:
    """Whether this number is, by the rule of the module."""
    behind = {number + 1, *nb.closers(number)}
    return (not number or number in headers) and not behind & headers


def test_every_version_follows_one_that_is_there_and_is_found(small: None) -> None:
    """Goal: the chain works up to its last number, cleared at every step that allows it. Method: put all versions one
    after the other; the parent is there, nothing that closes their run is, the search finds each, few headers stay."""
    headers: set[int] = set()
    for number in range(1, nb.LAST + 1):
        above = nb.parent(number)
        assert above < number and (not above or above in headers)
        assert number not in headers and not set(nb.closers_above(number)) & headers
        headers.add(number)
        headers -= set(nb.closed_numbers(number))
        assert len(headers) <= nb.LEVELS * (nb.RADIX - 1) + 1
        assert current(headers) == number
        assert [n for n in range(nb.LAST + 1) if is_current(headers, n)] == [number]
    assert nb.closers(nb.LAST) == []


@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_header_put_late_is_known_by_the_stamps_of_what_closed_its_run(small: None, is_cleared: bool) -> None:
    """Goal: nobody has a version that another one had long ago. Method: every (number current, number claimed late)
    pair whose place is free and whose parent is there; what closes its run is there, and lists it."""
    for newest in range(1, nb.LAST + 1):
        headers = set(range(1, newest + 1))
        for number in range(1, newest + 1) if is_cleared else ():
            headers -= set(nb.closed_numbers(number))
        for late in range(1, newest):
            above = nb.parent(late)
            if late in headers or (above and above not in headers):
                continue
            visible = [one for one in nb.closers_above(late) if one in headers]
            assert visible
            if visible[0] == nb.closers_above(late)[0]:
                assert late in nb.closed_numbers(visible[0])


@given(st.integers(1, nb.LAST))
@settings(max_examples=300, deadline=None)
def test_the_chain_has_the_same_shape_at_full_size(number: int) -> None:
    """Goal: what small numbers show holds for large ones. Method: the headers that are needed up to any number are the
    way to it, digit by digit; the search finds it, its parent is on the way, and what it closes is the run below it."""
    way: set[int] = set()
    for at in range(nb.LEVELS - 1, -1, -1):
        step = nb.RADIX**at
        base = number // (step * nb.RADIX) * step * nb.RADIX
        way |= {base + step * digit for digit in range(1, number // step % nb.RADIX + 1)}
    assert number in way and current(way) == number and is_current(way, number)
    assert nb.parent(number) in way | {0}
    assert all(number in nb.closed_numbers(one) for one in nb.closers_above(number)[:1])
    assert not set(nb.closed_numbers(number)) & way
    assert len(nb.closed_numbers(number)) == nb.level(number) * (nb.RADIX - 1)


@given(st.sets(st.integers(1, 80)))
@settings(max_examples=200, deadline=None)
def test_all_headers_that_can_be_there_are_in_some_run(seeds: set[int]) -> None:
    """Goal: a removal finds every header. Method: any set of headers that is closed upwards is walked by its runs."""
    headers: set[int] = set()
    for number in seeds:
        while number:
            headers.add(number)
            number = nb.parent(number)
    found: set[int] = set()
    bases = [0]
    while bases:
        bases = [number for base in bases for run in nb.runs(base) for number in run if number in headers]
        assert not found & set(bases)
        found |= set(bases)
    assert found == headers
