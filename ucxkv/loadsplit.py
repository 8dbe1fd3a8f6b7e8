"""Load or compute: a prefix's blocks are computed from the front while the rest loads from the back, until they meet.

The plan of one such prefix of n blocks, after Cake ("Compute or load KV cache? Why not both?", ICML 2025). It is told
what begins and ends and when, and answers what to take next:

    0 ......... head ............ tail ......... n
    | computed  |  nobody's yet   |  loaded      |
    (or being   |                 |  (or being loaded, or handed back to compute because it did not come)
     computed)

Invariants
  - Each block is on one side at a time and ends on exactly one: computed or loaded. head and tail meet once; a load
    that is called back moves tail up again, over blocks that were never told to be there.
  - What is handed to the engine comes in token order, except for blocks that did not come; those follow at the end,
    when all blocks below them are there. So an engine always has the keys and values of all tokens before a span.
  - By the costs known at a decision the two sides end as close to each other as blocks allow. With costs that are true
    the whole is over no later than by loading all of it or by computing all of it.
  - Costs are learned on the way (`policy.scales`): what a span took corrects what a pass and its blocks are thought to
    cost, what a load took corrects its tiers. A load that is late is thought to take as long again as it is late.
  - A decision costs O(log n), the whole plan at most O(n) of them; nothing is kept but a few words a block.

Pure: time is handed in, in seconds of any monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError
from ucxkv.policy.scales import Scales

__all__ = ["LoadSplit"]

Floats = npt.NDArray[np.float64]

_GAIN: Final = 0.6
_CLIP: Final = 16.0
_LEAST_S: Final = 1e-9
_NOBODY, _COMPUTED, _LOADED = 0, 1, 2


@dataclass(slots=True)
class _Running:
    """A span of blocks on its way: since when, and how long that should take."""

    blocks: range
    start_s: float
    expected_s: float


class LoadSplit:
    """See the module. Blocks are numbered from 0.

    computes_s: f64[n], seconds to compute each block after all before it; loads_s: f64[n], to load each; tiers: u8[n],
    where each is, so that tiers are learned apart (None: all in one). pass_s: what each span costs besides, whatever it
    computes. compute_blocks: most blocks of a span to compute, load_blocks: most of a load; loads_at_once: loads in
    flight, which end in the order in which they began.
    Raises UsageError for arrays of other lengths, and for costs that are no time.
    """

    def __init__(
        self,
        computes_s: Floats,
        loads_s: Floats,
        tiers: npt.NDArray[np.uint8] | None = None,
        *,
        pass_s: float = 0.0,
        compute_blocks: int = 16,
        load_blocks: int = 4,
        loads_at_once: int = 1,
    ) -> None:
        n = len(loads_s)
        tiers = np.zeros(n, np.uint8) if tiers is None else tiers
        if len(computes_s) != n or len(tiers) != n:
            raise UsageError(
                f"{len(computes_s)} compute times, {n} load times and {len(tiers)} tiers: one each a block"
            )
        for what, seconds in (("compute", computes_s), ("load", loads_s)):
            if not (np.isfinite(seconds).all() and (np.asarray(seconds) >= 0).all()):
                raise UsageError(f"{what} times of blocks are seconds, at least 0")
        if not 0 <= pass_s < float("inf"):
            raise UsageError(f"pass_s={pass_s}; seconds of a pass, at least 0")
        if min(compute_blocks, load_blocks, loads_at_once) < 1:
            raise UsageError("compute_blocks, load_blocks and loads_at_once are at least 1")
        self.blocks_count = n
        self.head, self.tail = 0, n
        self._compute_blocks, self._load_blocks, self._loads_at_once = compute_blocks, load_blocks, loads_at_once
        self._compute_sums = _sums(np.maximum(computes_s, _LEAST_S))
        loads = np.maximum(loads_s, _LEAST_S)
        self._tiers = np.unique(tiers).tolist()
        self._load_sums = [_sums(np.where(tiers == tier, loads, 0.0)) for tier in self._tiers]
        self._pass_s = pass_s
        self._compute_scales = Scales(2, gain=_GAIN, clip=_CLIP)
        self._load_scales = Scales(len(self._tiers), gain=_GAIN, clip=_CLIP)
        self._computing: _Running | None = None
        self._loading: deque[_Running] = deque()
        self._load_end_s = -float("inf")
        self._measured, self._measured_s, self._measured_told_s = 0, 0.0, [0.0] * len(self._tiers)
        self._is_loading_over = False
        self._missing: list[int] = []
        self._sides = bytearray(n)

    # ---- what is known

    @property
    def is_over(self) -> bool:
        """Every block is there."""
        return self.head == self.tail and not (self._computing or self._loading or self._missing)

    @property
    def computed_blocks(self) -> int:
        """Blocks that were computed so far."""
        return self._sides.count(_COMPUTED)

    @property
    def loaded_blocks(self) -> int:
        """Blocks that were loaded so far."""
        return self._sides.count(_LOADED)

    @property
    def compute_scales(self) -> tuple[float, float]:
        """How many times as long as told a pass takes, and computing blocks in it."""
        a_pass, blocks = self._compute_scales.values
        return a_pass, blocks

    def load_scale(self, tier: int = 0) -> float:
        """How many times as long as told loading from a tier takes; 1 for one that holds no block of these."""
        return self._load_scales.values[self._tiers.index(tier)] if tier in self._tiers else 1.0

    # ---- computing

    def next_compute(self, now_s: float) -> range | None:
        """Blocks to compute now, which nobody else brings; None: nothing, until a load ends or `wait_s` is over.

        Not to be asked again before `computed`.
        """
        assert self._computing is None, "the span that was handed out is not computed yet"
        blocks = range(0)
        if self.head < self.tail:
            blocks = range(self.head, min(self._meeting(now_s), self.head + self._compute_blocks))
            self.head += len(blocks)
        elif self._missing and not self._loading:
            first = self._missing[0]
            end = 1
            while end < min(len(self._missing), self._compute_blocks) and self._missing[end] == first + end:
                end += 1
            blocks = range(first, first + end)
            del self._missing[:end]
        if not blocks:
            return None
        self._computing = _Running(blocks, now_s, self._compute_s(blocks))
        return blocks

    def computed(self, now_s: float) -> None:
        """The span that was handed out is computed."""
        done, self._computing = self._computing, None
        assert done is not None, "nothing was handed out to compute"
        self._cover(done.blocks, _COMPUTED)
        self._compute_scales.observe(self._compute_told_s(done.blocks), max(now_s - done.start_s, _LEAST_S))

    # ---- loading

    def next_load(self, now_s: float) -> range | None:
        """Blocks to load now, from the last on; None: no more for now."""
        if self._is_loading_over or self.head == self.tail or len(self._loading) >= self._loads_at_once:
            return None
        blocks = range(max(self._meeting(now_s), self.tail - self._load_blocks), self.tail)
        if not blocks:
            return None
        self.tail = blocks.start
        self._loading.append(_Running(blocks, now_s, self._load_s(blocks)))
        return blocks

    def loaded(self, now_s: float, missing: Iterable[int] = ()) -> None:
        """The oldest load in flight ended; `missing`: blocks of it that did not come, which are computed instead.

        Further loads are tried: a store that evicts from a chain's tail has its head. See `stop_loading`.
        """
        done = self._loading.popleft()
        gone = set(missing)
        assert gone <= set(done.blocks), f"{sorted(gone)} are not all of the load {done.blocks}"
        for block in done.blocks:
            if block in gone:
                insort(self._missing, block)
            else:
                self._cover(range(block, block + 1), _LOADED)
        lasted_s = now_s - max(done.start_s, self._load_end_s)
        self._load_end_s = now_s
        if not gone:
            self._measure(done.blocks, lasted_s)

    def stop_loading(self) -> None:
        """Begin no more loads, as their node is gone, say; those in flight may end."""
        self._is_loading_over = True

    def recall(self, now_s: float) -> range | None:
        """The newest load in flight, when computing its blocks is over before it would be; else None.

        The caller ends it, and then tells `returned`, or `loaded` where it came after all.
        """
        if self.head < self.tail or self._computing or not self._loading:
            return None
        newest = self._loading[-1].blocks
        return newest if self._in_flight_s(now_s) > self._compute_s(newest) else None

    def returned(self, now_s: float) -> None:
        """The newest load in flight was given up, and writes nowhere any more: its blocks are left to compute.

        No load begins after that: below there is nothing left, and here the store has just lost against the engine.
        """
        given_up = self._loading.pop()
        assert given_up.blocks.start == self.tail == self.head, "only what nothing was taken below may be given up"
        self.tail = given_up.blocks.stop
        self.stop_loading()
        lasted_s = now_s - max(given_up.start_s, self._load_end_s)
        if not self._loading and lasted_s > given_up.expected_s:
            self._measure(given_up.blocks, lasted_s)

    def wait_s(self, now_s: float) -> float:
        """After how long to ask again when nothing ends before: a load may be late by then."""
        if not self._loading:
            return _LEAST_S
        return max(1e-3, 0.5 * self._lasted_s(now_s), self._in_flight_s(now_s))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert 0 <= self.head <= self.tail <= self.blocks_count
        spans = [*(run.blocks for run in self._loading), *([self._computing.blocks] if self._computing else ())]
        taken = sorted([block for span in spans for block in span] + self._missing + list(range(self.head, self.tail)))
        assert taken == [block for block, side in enumerate(self._sides) if side == _NOBODY]

    # ---- costs

    def _compute_told_s(self, blocks: range) -> tuple[float, float]:
        passes = -(-len(blocks) // self._compute_blocks)
        return passes * self._pass_s, self._compute_sums[blocks.stop] - self._compute_sums[blocks.start]

    def _load_told_s(self, blocks: range) -> list[float]:
        return [sums[blocks.stop] - sums[blocks.start] for sums in self._load_sums]

    def _compute_s(self, blocks: range) -> float:
        return self._compute_scales.seconds(self._compute_told_s(blocks))

    def _load_s(self, blocks: range) -> float:
        return self._load_scales.seconds(self._load_told_s(blocks))

    def _measure(self, blocks: range, lasted_s: float) -> None:
        """Loads that were in flight at once shared the way, and may end at once: they are measured together."""
        self._measured_s += lasted_s
        for at, told_s in enumerate(self._load_told_s(blocks)):
            self._measured_told_s[at] += told_s
        self._measured += 1
        if self._measured >= self._loads_at_once or not self._loading:
            self._load_scales.observe(self._measured_told_s, max(self._measured_s, _LEAST_S))
            self._measured, self._measured_s, self._measured_told_s = 0, 0.0, [0.0] * len(self._tiers)

    def _lasted_s(self, now_s: float) -> float:
        """Since when the loads that are in flight now have the way to themselves."""
        return now_s - max(self._loading[0].start_s, self._load_end_s) if self._loading else 0.0

    def _in_flight_s(self, now_s: float) -> float:
        """Until the loads in flight are over."""
        expected_s = sum(run.expected_s for run in self._loading)
        return abs(expected_s - self._lasted_s(now_s))

    def _busy_s(self, now_s: float) -> tuple[float, float]:
        """Until the span that is being computed is over, and how late it makes those after it: 1, or so many times."""
        if self._computing is None:
            return 0.0, 1.0
        lasted_s, expected_s = now_s - self._computing.start_s, self._computing.expected_s
        return abs(expected_s - lasted_s), max(1.0, lasted_s / expected_s)

    def _meeting(self, now_s: float) -> int:
        """Where the two sides should meet, head <= ... <= tail, so that the later one ends soonest; of two as good,
        the one with less to compute.

        That one load is late says nothing of the next ones: a disk has hiccups.
        """
        if self._is_loading_over:
            return self.tail
        busy_s, late = self._busy_s(now_s)
        in_flight_s = self._in_flight_s(now_s)

        def computed_s(place: int) -> float:
            return busy_s + late * self._compute_s(range(self.head, place))

        def loaded_s(place: int) -> float:
            return in_flight_s + self._load_s(range(place, self.tail))

        places = range(self.head, self.tail + 1)
        at = self.head + bisect_left(places, True, key=lambda place: computed_s(place) >= loaded_s(place))
        at = min(at, self.tail)
        if at > self.head and loaded_s(at - 1) <= max(computed_s(at), loaded_s(at)):
            at -= 1
        return at

    def _cover(self, blocks: range, side: int) -> None:
        for block in blocks:
            assert self._sides[block] == _NOBODY, f"block {block} is there already"
            self._sides[block] = side


def _sums(seconds: Floats) -> list[float]:
    """Of the first 0, 1, 2... blocks."""
    return [0.0, *np.cumsum(seconds).tolist()]
