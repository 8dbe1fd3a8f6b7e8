"""A trace laid out for replay: ids made dense, requests end to end, each block's parent, each reference's next.

Pure; all are arrays, so that a trace of 10^7 references takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError
from ucxkv.keys import KeyArray
from ucxkv.policy import TICKS_PER_S
from ucxkv.simulation.traces import Ids, Request

__all__ = ["NEVER", "Workload", "keys_of", "lay_out"]

NEVER = 1 << 62
_SPAN_S_MAX = ((1 << 32) - 4) // TICKS_PER_S
"""Policies keep times as 32 bits of ticks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order. ids: of all requests end to end, 0 to unique - 1; request r has ids[starts[r]:starts[r + 1]].

    ticks: the requests' times in 10 ms, from 1 on. parents: of each id, -1 for a root. sessions: of each request.
    """

    name: str
    block_tokens: int
    ids: Ids
    starts: Ids
    ticks: Ids
    sessions: Ids
    parents: Ids

    @property
    def requests(self) -> int:
        """How many requests."""
        return len(self.ticks)

    @property
    def blocks(self) -> int:
        """How many references to blocks."""
        return len(self.ids)

    @property
    def unique(self) -> int:
        """How many different blocks: the footprint, of which capacities are shares."""
        return len(self.parents)

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return int(np.diff(self.starts).max())

    def next_uses(self) -> Ids:
        """For each reference the number of the request that uses its block next, NEVER if none does."""
        request = np.repeat(np.arange(self.requests), np.diff(self.starts))
        order = np.argsort(self.ids, kind="stable")
        found = np.full(self.blocks, NEVER, np.int64)
        same = self.ids[order[1:]] == self.ids[order[:-1]]
        found[order[:-1][same]] = request[order[1:][same]]
        return found


def lay_out(name: str, block_tokens: int, requests: Sequence[Request]) -> Workload:
    """The workload of requests that are in order of their times and not none.

    Raises UsageError where they lie further apart than ticks of 32 bits count, nearly 500 days.
    """
    flat = np.concatenate([request.ids for request in requests])
    lengths = np.array([len(request.ids) for request in requests], np.int64)
    starts = np.append(0, np.cumsum(lengths))
    firsts, ids = np.unique(flat, return_inverse=True)
    parents = np.full(len(firsts), -1, np.int64)
    above = np.append(-1, ids[:-1])
    above[starts[:-1]] = -1
    parents[ids] = above
    times = np.array([request.time_s for request in requests])
    if (span_s := float(times[-1] - times[0])) > _SPAN_S_MAX:
        raise UsageError(
            f"{name}: the first and the last request are {span_s:.3g} s apart; at most {_SPAN_S_MAX:.3g} s are "
            "simulated. Are its times in the unit that its format says?"
        )
    ticks = 1 + ((times - times[0]) * TICKS_PER_S).astype(np.int64)
    sessions = np.array([request.session for request in requests], np.int64)
    return Workload(name, block_tokens, ids.astype(np.int64), starts, ticks, sessions, parents)


def keys_of(count: int) -> KeyArray:
    """Keys for ids 0 to count - 1, spread as hashes are."""
    words: npt.NDArray[np.uint64] = np.empty((count, 2), np.uint64)
    with np.errstate(over="ignore"):
        for column, salt in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
            x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(salt)
            x ^= x >> np.uint64(30)
            x *= np.uint64(0xBF58476D1CE4E5B9)
            x ^= x >> np.uint64(27)
            words[:, column] = x
    return words.view(np.uint8)
