"""The book of sessions: each conversation's chains, most recent first, until its time to live is over.

Invariants
  - No more than `sessions_max` sessions and `keys_max` keys are kept; the sessions used longest ago go first.
  - A session has at most `CHAINS_MAX` chains, of which none is the head of another.
  - What is over its time to live is never told again.
  - Each call costs O(log sessions) and the comparison of the session's own chains.

Pure: time is handed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from ucxkv.errors import UsageError
from ucxkv.keys import KeyArray

__all__ = ["CHAINS_MAX", "Chain", "SessionBook", "common_head"]

CHAINS_MAX: Final = 8
"""A conversation goes on in one chain; edits and answers made anew fork it."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The keys of a chain's whole blocks, (n, 16) uint8, root first, never changed; stored in so many layer groups."""

    keys: KeyArray
    layer_groups: int = 1

    def __len__(self) -> int:
        return len(self.keys)


def common_head(a: Chain, b: Chain) -> int:
    """How many leading keys two chains share; none where they are stored in different layer groups."""
    n = min(len(a), len(b))
    if a.layer_groups != b.layer_groups or not n:
        return 0
    differ = np.flatnonzero((a.keys[:n] != b.keys[:n]).any(axis=1))
    return int(differ[0]) if len(differ) else n


@dataclass(slots=True)
class _Entry:
    chains: list[Chain]
    expiry_s: float

    @property
    def keys_count(self) -> int:
        return sum(map(len, self.chains))


class SessionBook:
    """See the module. A session is named by 16 bytes."""

    def __init__(self, *, sessions_max: int = 10_000, keys_max: int = 1 << 20) -> None:
        """keys_max: of 16 bytes each, so 16 MiB by default."""
        if sessions_max < 1 or keys_max < 1:
            raise UsageError(f"a book of {sessions_max} sessions and {keys_max} keys; at least 1 of each")
        self._sessions_max, self._keys_max = sessions_max, keys_max
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # used longest ago first
        self._expiries: list[tuple[float, bytes]] = []  # a heap; an entry that was used since is skipped
        self.keys_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def turn(self, name: bytes, chain: Chain, now_s: float, ttl_s: float) -> None:
        """The session has just used this chain; it is kept for `ttl_s` from now. Longer than `keys_max`: its head is.

        An empty chain only prolongs a session that is known. Raises UsageError for a time to live that is none.
        """
        if not ttl_s > 0:
            raise UsageError(f"ttl_s={ttl_s}; pass seconds above 0")
        self.expire(now_s)
        entry = self._entries.get(name)
        if entry is None:
            if not len(chain):
                return
            entry = self._entries[name] = _Entry([], 0.0)
        self.keys_count -= entry.keys_count
        if len(chain):
            entry.chains = _with(entry.chains, Chain(chain.keys[: self._keys_max], chain.layer_groups))
        while len(entry.chains) > CHAINS_MAX or entry.keys_count > self._keys_max:
            entry.chains.pop()
        self.keys_count += entry.keys_count
        self._prolong(name, entry, now_s + ttl_s)
        while len(self._entries) > self._sessions_max or self.keys_count > self._keys_max:
            self.end(next(iter(self._entries)))

    def chains(self, name: bytes, now_s: float) -> list[Chain]:
        """The session's chains, the one used last first; none when it is not known or over."""
        self.expire(now_s)
        entry = self._entries.get(name)
        return list(entry.chains) if entry is not None else []

    def end(self, name: bytes) -> bool:
        """Forget a session; whether it was known."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self.keys_count -= entry.keys_count
        return True

    def expire(self, now_s: float) -> int:
        """Forget what is over its time to live; how many sessions that were."""
        ended = 0
        while self._expiries and self._expiries[0][0] <= now_s:
            expiry_s, name = heapq.heappop(self._expiries)
            entry = self._entries.get(name)
            if entry is not None and entry.expiry_s == expiry_s:
                ended += self.end(name)
        return ended

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._entries) <= self._sessions_max
        assert self.keys_count == sum(entry.keys_count for entry in self._entries.values()) <= self._keys_max
        waiting = set(self._expiries)
        for name, entry in self._entries.items():
            assert 0 < len(entry.chains) <= CHAINS_MAX and (entry.expiry_s, name) in waiting
            for i, chain in enumerate(entry.chains):
                others = entry.chains[:i] + entry.chains[i + 1 :]
                assert all(common_head(chain, other) < len(chain) for other in others), "a chain is another's head"
        assert len(self._expiries) <= 2 * len(self._entries) + _EXPIRIES_SLACK

    def _prolong(self, name: bytes, entry: _Entry, expiry_s: float) -> None:
        entry.expiry_s = expiry_s
        self._entries.move_to_end(name)
        heapq.heappush(self._expiries, (expiry_s, name))
        if len(self._expiries) > 2 * len(self._entries) + _EXPIRIES_SLACK:
            self._expiries = [(other.expiry_s, key) for key, other in self._entries.items()]
            heapq.heapify(self._expiries)


_EXPIRIES_SLACK: Final = 64


def _with(chains: list[Chain], chain: Chain) -> list[Chain]:
    """The chains with one that was just used in front: in place of those that it goes on from, or, where one goes on
    from it already, that one.
    """
    rest = []
    for other in chains:
        common = common_head(chain, other)
        if common == len(chain):
            chain = other
        elif common < len(other):
            rest.append(other)
    return [chain, *rest]
