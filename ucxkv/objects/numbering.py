"""How the versions of one object are numbered and chained, so that their headers stay few and none is used twice.

Version 1 is the first. The number is read as digits of base `RADIX`, and its *level* is how many zeros it ends with.
The header of a version is a child of the last one before it that is on its own level or a higher one; version 0 stands
for the object's root block. In base 10 it would look so:

    0 -- 1 -- 2 -- ... -- 9          level 0, a run below 0
    0 -- 10 -- 20 -- ... -- 90       level 1, a run below 0
         10 -- 11 -- ... -- 19       level 0, a run below 10
    0 -- 100 ...                     level 2

Invariants, where nothing is evicted:
- versions are put one after the other, so a header that is visible was current once, and the next number is free or
  taken for good: whoever puts a header first has that version.
- a run is *closed* by the first number on a higher level behind it (9 by 10, 90 by 100). Headers of closed runs may be
  deleted, and nothing else: `closed_numbers` of the closing version. So of n versions at most
  `LEVELS * (RADIX - 1) + 1` headers are needed at any time.
- a version is current when its header is visible, the next number's is not and none of its `closers` is.

A header that is put late, into a run that was closed and cleared long ago, may find its place free again: that is what
`closers_above` are looked at for, after a put.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

__all__ = ["LAST", "LEVELS", "RADIX", "closed_numbers", "closers", "closers_above", "level", "parent", "runs", "search"]

RADIX: Final = 64
LEVELS: Final = 5
LAST: Final = RADIX**LEVELS - 1
"""The last version of one life of an object, a thousand million overwrites."""


def level(number: int) -> int:
    """How many zeros the number ends with, in base RADIX; of 0, the root: the highest level of all."""
    if not number:
        return LEVELS
    found = 0
    while number % RADIX == 0:
        number //= RADIX
        found += 1
    return found


def parent(number: int) -> int:
    """The version whose header is the parent of this one's; 0 is the root. number: 1 to LAST."""
    return number - int(RADIX ** level(number))


def closers(number: int) -> list[int]:
    """The numbers behind `number` that close a run, of each level the first; the next number may be one of them."""
    return _closers(number, 1)


def closers_above(number: int) -> list[int]:
    """The numbers that close the run that `number` itself is in, the first of them first: one of these is visible when
    its run may have been cleared.
    """
    return _closers(number, level(number) + 1)


def _closers(number: int, lowest: int) -> list[int]:
    steps = (RADIX**at for at in range(lowest, LEVELS))
    found = dict.fromkeys((number // step + 1) * step for step in steps)
    return [one for one in found if one <= LAST]


def closed_numbers(number: int) -> list[int]:
    """The runs that `number` closes, the highest level first, each in order; none for a number of level 0."""
    found: list[int] = []
    for at in range(level(number) - 1, -1, -1):
        step = RADIX**at
        base = number - step * RADIX
        found += [base + step * digit for digit in range(1, RADIX)]
    return found


def runs(base: int) -> list[list[int]]:
    """The runs that hang below a header, or below the root (0): one of each level under its own."""
    return [[base + RADIX**at * digit for digit in range(1, RADIX)] for at in range(level(base))]


def search() -> Generator[list[int], list[bool], int]:
    """Find the current version: yields numbers, is sent which of their headers are visible, returns the number.

    Its answer is a candidate: what was visible one after the other may not have been so at one time.
    """
    base, below = 0, LEVELS
    while True:
        heads = [base + RADIX**at for at in range(below - 1, 0, -1)]
        lowest = [base + digit for digit in range(1, RADIX)]
        seen = yield heads + lowest
        top = next((at for at, is_there in zip(range(below - 1, 0, -1), seen, strict=False) if is_there), 0)
        if not top:
            return base + _leading(seen[len(heads) :])
        step = RADIX**top
        seen = yield [base + step * digit for digit in range(1, RADIX)]
        base += step * max(1, _leading(seen))
        below = top


def _leading(seen: list[bool]) -> int:
    return next((at for at, is_there in enumerate(seen) if not is_there), len(seen))
