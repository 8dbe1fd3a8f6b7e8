"""Why a block is where it is: the last decisions about blocks, in a ring, to be asked by key.

Invariants: at most `capacity` decisions are kept, the newest; `of` finds all kept ones about a key and only those.
Recording costs a tuple and two dictionary writes and never fails, so that it may stay on.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ucxkv.errors import UsageError
from ucxkv.policy.base import TICKS_PER_S
from ucxkv.policy.cost import Verdict

__all__ = ["Decision", "DecisionLog"]


_VERDICTS = (Verdict.DROP, Verdict.DEMOTE, Verdict.PROMOTE, Verdict.KEEP)


class Decision(NamedTuple):
    """One decision. now: when, in ticks. worth: seconds saved a second by keeping the block in its old tier, or, for a
    promotion, in its new one; price: what the tier asked for that place then; both 0 from a policy that knows only an
    order. from_tier, to_tier: names, "" for none. age: ticks since the block was used last; hazard: uses a second that
    were expected of it."""

    now: int
    key: bytes
    verdict: Verdict
    from_tier: str
    to_tier: str
    worth: float
    price: float
    reason: str
    age: int = 0
    hazard: float = 0.0

    def __str__(self) -> str:
        way = f"{self.from_tier or 'nowhere'} -> {self.to_tier or 'nowhere'}"
        figures = f"worth {self.worth:.3g}, price {self.price:.3g}"
        return f"{self.now / TICKS_PER_S:.2f} s: {self.verdict}, {way}: {self.reason} ({figures})"


class DecisionLog:
    """See the module."""

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise UsageError(f"a log of {capacity} decisions; keep one at least")
        self.capacity = capacity
        self._counts = [0] * len(_VERDICTS)
        self._ring: list[tuple[Decision, int] | None] = [None] * capacity
        self._newest: dict[bytes, int] = {}
        self._next = 0

    @property
    def counts(self) -> Counter[Verdict]:
        """Decisions by verdict since the start, also of those no longer kept."""
        return Counter({verdict: count for verdict, count in zip(_VERDICTS, self._counts, strict=True) if count})

    def __len__(self) -> int:
        return min(self._next, self.capacity)

    def record(self, decision: Decision) -> None:
        """Keep one decision, and let the oldest go."""
        number = self._next
        place = number % self.capacity
        old = self._ring[place]
        if old is not None and self._newest.get(old[0].key) == number - self.capacity:
            del self._newest[old[0].key]
        self._ring[place] = (decision, self._newest.get(decision.key, -1))
        self._newest[decision.key] = number
        self._next += 1
        verdict = decision.verdict
        for at, one in enumerate(_VERDICTS):  # by identity: an enum's hash is a call into Python
            if one is verdict:
                self._counts[at] += 1
                return

    def of(self, key: bytes) -> list[Decision]:
        """What was decided about this key, the newest first."""
        found = []
        number = self._newest.get(key, -1)
        while number >= 0 and number >= self._next - self.capacity:
            entry = self._ring[number % self.capacity]
            assert entry is not None
            found.append(entry[0])
            number = entry[1]
        return found
