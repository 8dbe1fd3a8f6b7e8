"""How likely a block is used again in the next second, by its class and its age: learned on line.

A *wait* is the time from one use of a block to the next, or up to now, or to when it was forgotten. Hazard of a class
in an age bucket = waits that ended by a use in that bucket / seconds that all waits spent in it, those that still last
included: without them what never comes back would not count. Older observations fade by `FADE` a lesson, buckets with
few events lean on all classes together (`PRIOR_EVENTS`), and the hazard never rises with age, so that the oldest of a
class is the least likely of it.

Buckets are half octaves of age in seconds, from 1 s to about a day and a half; the last has no end. All sums are over
arrays; one lesson costs a few microseconds plus what the caller's arrays of waits cost.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ucxkv.policy.base import TICKS_PER_S

__all__ = ["BUCKETS", "HazardTable", "bucket_of"]

BUCKETS = 34
FADE = 0.98
PRIOR_EVENTS = 30.0
_PENDING = 4096
_PER_TICK = 1.0 / TICKS_PER_S

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.uint8]


def _edges() -> Floats:
    return np.array([2.0 ** (bucket / 2.0) - 1.0 for bucket in range(BUCKETS)])


def bucket_of(age_ticks: int) -> int:
    """The bucket of one age."""
    return min(BUCKETS - 1, int(2.0 * math.log2(1.0 + age_ticks * _PER_TICK)))


class HazardTable:
    """See the module. classes: how many there are, numbered from 0.

    rates: uses per second, by class and bucket; before the first lesson 1 / (1 + age), the order of LRU.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.lessons = 0
        self._edge = _edges()
        self._width = np.append(np.diff(self._edge), 0.0)
        self._events: Floats = np.zeros((classes, BUCKETS))
        self._exposure: Floats = np.zeros((classes, BUCKETS))
        self._ages: Floats = np.zeros(_PENDING)
        self._starts: Floats = np.zeros(_PENDING)
        self._classes: Classes = np.zeros(_PENDING, np.uint8)
        self._is_use: npt.NDArray[np.bool_] = np.zeros(_PENDING, np.bool_)
        self._pending = 0
        self._since = 0
        self.rates: list[list[float]] = [(1.0 / (1.0 + self._edge)).tolist()] * classes

    def waited(self, ages: npt.NDArray[np.int64], classes: Classes, now: int, *, is_use: bool = True) -> None:
        """Waits that end now. ages: in ticks; is_use: ended by a use, else the block was forgotten."""
        seen = now - self._since  # what came before the last lesson was counted there
        for first in range(0, len(ages), _PENDING):
            part = ages[first : first + _PENDING]
            n = len(part)
            if self._pending + n > _PENDING:
                self._flush()
            at = slice(self._pending, self._pending + n)
            self._ages[at] = part
            self._starts[at] = np.maximum(part - seen, 0)
            self._classes[at] = classes[first : first + _PENDING]
            self._is_use[at] = is_use
            self._pending += n

    def used(self, age: int, kind: int, now: int) -> None:
        """`waited` of one wait that a use ends; kind: its class."""
        if self._pending == _PENDING:
            self._flush()
        at = self._pending
        self._ages[at], self._starts[at] = age, max(age - (now - self._since), 0)
        self._classes[at], self._is_use[at] = kind, True
        self._pending += 1

    def learn(self, ages: npt.NDArray[np.int64], classes: Classes, now: int, *, weight: float = 1.0) -> None:
        """Take all waits that still last into account, and compute `rates` anew. weight: waits that each stands for."""
        self._flush()
        starts = np.maximum(ages - (now - self._since), 0)
        self._exposure += weight * (self._spent(ages, classes) - self._spent(starts, classes))
        self._since = now
        self.lessons += 1
        events, exposure = self._events.sum(0), self._exposure.sum(0)
        pool = np.where(exposure > 0, (events + 1e-3) / (exposure + 1.0), 0.0)
        lean = PRIOR_EVENTS / np.maximum(pool, 1e-9)
        rates = np.where(pool > 0, (self._events + PRIOR_EVENTS) / (self._exposure + lean), 0.0)
        self.rates = np.maximum.accumulate(rates[:, ::-1], axis=1)[:, ::-1].tolist()
        self._events *= FADE
        self._exposure *= FADE

    def _flush(self) -> None:
        n, self._pending = self._pending, 0
        if not n:
            return
        ages, classes, is_use = self._ages[:n], self._classes[:n], self._is_use[:n]
        self._exposure += self._spent(ages, classes) - self._spent(self._starts[:n], classes)
        place = self._place(ages[is_use] * _PER_TICK, classes[is_use])
        self._events += np.bincount(place, minlength=self._events.size).reshape(self._events.shape)

    def _place(self, seconds: Floats, classes: Classes) -> npt.NDArray[np.int64]:
        bucket = np.minimum((2.0 * np.log2(1.0 + seconds)).astype(np.int64), BUCKETS - 1)
        found: npt.NDArray[np.int64] = classes.astype(np.int64) * BUCKETS + bucket
        return found

    def _spent(self, ages: npt.NDArray[np.int64] | Floats, classes: Classes) -> Floats:
        """Seconds that waits from age 0 to `ages` spent in each bucket, by class."""
        seconds: Floats = np.multiply(ages, _PER_TICK, dtype=np.float64)
        place = self._place(seconds, classes)
        shape, size = self._events.shape, self._events.size
        ended = np.bincount(place, minlength=size).reshape(shape).astype(np.float64)
        sums = np.bincount(place, weights=seconds, minlength=size).reshape(shape)
        beyond = ended.sum(1, keepdims=True) - np.cumsum(ended, axis=1)
        found: Floats = sums - ended * self._edge + beyond * self._width
        return found
