"""What a block costs to compute and to load, and what follows from it: load or not, where to keep it, where to split.

    recompute(p, n) = n (per_token + per_token_position (p + n/2))      n tokens after p others; attention grows with p
    load(T, bytes)  = latency_T + bytes / bandwidth_T
    gain(p, T)      = max(0, recompute - load)                          seconds that a hit in T saves
    density(p, T)   = hazard gain / bytes                               seconds saved a second by a byte of T

A block stays where its density is over the tier's price (the density of what that tier evicted last), moves up when the
upper tier earns more by over what the move costs, and is not loaded where computing is faster: on a slow tier that is
so for the first blocks of a prompt. All pure: measured loads and prefill times are handed in, time is in seconds.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError

__all__ = ["CostModel", "LoadCost", "LoadEstimate", "Placing", "PrefillCost", "PrefillEstimate", "Split", "Verdict"]

Floats = npt.NDArray[np.float64]
_WINDOW, _ENOUGH = 64, 8


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute keys and values. per_token_s: of a token; per_token_position_s: more for each before it."""

    per_token_s: float
    per_token_position_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.per_token_s > 0 and self.per_token_position_s >= 0):
            raise UsageError(f"prefill costs of {self.per_token_s} s a token: a positive time, none below zero")

    @classmethod
    def of_model(cls, *, parameters: float, layers: int, width: int, flops: float) -> PrefillCost:
        """A dense model of `layers` layers with an attention width (heads x head size), `flops` sustained a second."""
        return cls(2.0 * parameters / flops, 4.0 * layers * width / flops)

    def seconds(self, position: npt.ArrayLike, tokens: int) -> Floats:
        """Of `tokens` tokens from `position` on, given the keys and values of all before."""
        middle = np.asarray(position, np.float64) + tokens / 2.0
        found: Floats = tokens * (self.per_token_s + self.per_token_position_s * middle)
        return found

    def prompt_s(self, tokens: int) -> float:
        """Of a prompt from its start."""
        return float(self.seconds(0, tokens))


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds to load from one tier: a fixed time for each load, and bytes a second."""

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bandwidth > 0):
            raise UsageError(f"a load of {self.latency_s} s at {self.bandwidth} B/s: no time below 0, a rate above")

    def seconds(self, nbytes: float) -> float:
        """Of one load."""
        return self.latency_s + nbytes / self.bandwidth


class LoadEstimate:
    """A tier's load cost from measured loads: the median line through the last ones, so that a stall moves nothing.

    The slope is the median over all pairs of different sizes (Theil, Sen), the latency the median of what is left; with
    one size only, or a slope that is none, the latency is kept and the bandwidth fitted. Until `_ENOUGH` loads, and
    between fits, the last answer stands. At most `_WINDOW` loads are kept; a fit is done every 8th.
    """

    def __init__(self, prior: LoadCost) -> None:
        self.cost = prior
        self.count = 0
        self._loads: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """One load was measured. Raises UsageError for what cannot be."""
        if nbytes <= 0 or not seconds > 0 or seconds == float("inf"):
            raise UsageError(f"a load of {nbytes} bytes in {seconds} s: both are positive")
        self._loads.append((float(nbytes), seconds))
        self.count += 1
        if self.count >= _ENOUGH and self.count % 8 == 0:
            self._fit()

    def _fit(self) -> None:
        sizes, times = np.array(self._loads).T
        first, second = np.triu_indices(len(sizes), 1)
        step = sizes[second] - sizes[first]
        differs = np.abs(step) > 0.01 * sizes.max()
        slope = 0.0
        if differs.sum() >= _ENOUGH:
            slope = float(np.median((times[second] - times[first])[differs] / step[differs]))
        if slope > 0:
            latency = max(0.0, float(np.median(times - slope * sizes)))
        else:
            latency = min(self.cost.latency_s, float(times.min()) / 2)
            slope = float(np.median((times - latency) / sizes))
        self.cost = LoadCost(latency, 1.0 / slope)


class PrefillEstimate:
    """The engine's prefill cost from its own prefills: the last ones, least squares, outliers weighed down.

    Until `_ENOUGH` prefills the prior stands. Where positions vary too little to tell the two terms apart, the prior's
    ratio of them is kept. At most `_WINDOW` prefills are kept; a fit is done every 4th.
    """

    def __init__(self, prior: PrefillCost) -> None:
        self.cost = prior
        self.count = 0
        self._prefills: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)

    def computed(self, position: int, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` tokens after `position` others. Raises UsageError for what cannot be."""
        if position < 0 or tokens <= 0 or not seconds > 0 or seconds == float("inf"):
            raise UsageError(f"a prefill of {tokens} tokens after {position} in {seconds} s: no such thing")
        self._prefills.append((float(tokens), tokens * (position + tokens / 2.0), seconds))
        self.count += 1
        if self.count >= _ENOUGH and self.count % 4 == 0:
            self._fit()

    def _fit(self) -> None:
        tokens, moments, times = np.array(self._prefills).T
        ratio = self.cost.per_token_position_s / self.cost.per_token_s
        middles = moments / tokens
        if middles.max() - middles.min() > 0.1 * middles.max():
            weights = 1.0 / times  # errors are in proportion to the time
            for _ in range(8):
                rows = np.stack([tokens, moments], axis=1) * weights[:, None]
                (token, place), *_ = np.linalg.lstsq(rows, times * weights, rcond=None)
                off = np.abs(token * tokens + place * moments - times) / times
                weights = 1.0 / times / np.maximum(1.0, off / max(1e-9, 1.5 * float(np.median(off))))
            if token > 0 and place >= 0:
                self.cost = PrefillCost(float(token), float(place))
                return
        token = float(np.median(times / (tokens + ratio * moments)))
        self.cost = PrefillCost(token, ratio * token)


class Verdict(enum.StrEnum):
    """What to do with a block."""

    KEEP = "keep"
    PROMOTE = "promote"
    DEMOTE = "demote"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a block should be. tier: index, fastest first, -1 for none. density: what a byte earns there a second."""

    verdict: Verdict
    tier: int
    density: float
    price: float


@dataclass(frozen=True, slots=True)
class Split:
    """Load or compute. The first `compute` blocks are computed, while the rest of a hit prefix loads from its tail.

    seconds: until the whole prefix is there; computed_s, loaded_s: the same if all were computed, or all loaded.
    """

    compute: int
    seconds: float
    computed_s: float
    loaded_s: float


@dataclass(frozen=True)
class CostModel:
    """The costs of one model's blocks over tiers, fastest first."""

    prefill: PrefillCost
    block_tokens: int
    block_bytes: int
    tiers: Mapping[str, LoadCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.block_bytes < 1:
            raise UsageError(f"blocks of {self.block_tokens} tokens and {self.block_bytes} bytes: both are positive")

    def recompute_s(self, position: npt.ArrayLike) -> Floats:
        """Of a block whose first token is at `position`."""
        return self.prefill.seconds(position, self.block_tokens)

    def load_s(self, tier: str) -> float:
        """Of one block."""
        return self.tiers[tier].seconds(self.block_bytes)

    def gain_s(self, position: npt.ArrayLike, tier: str | None = None, *, over: str | None = None) -> Floats:
        """What a hit in `tier` (None: loads cost nothing) saves over computing, or over loading from tier `over`."""
        instead = self.recompute_s(position)
        if over is not None:
            instead = np.minimum(instead, self.load_s(over))
        gain: Floats = np.maximum(0.0, instead - (self.load_s(tier) if tier is not None else 0.0))
        return gain

    def is_worth_loading(self, position: int, tier: str) -> bool:
        """Whether loading this block alone is faster than computing it."""
        return self.load_s(tier) < float(self.recompute_s(position))

    def place(self, hazard: float, position: int, tier: int, prices: Sequence[float], move_s: float = 0.0) -> Placing:
        """Where a block belongs that is in tier number `tier` now.

        hazard: uses per second expected. prices: of a byte in each tier, seconds saved per second. move_s: seconds that
        a move costs, spread over the wait for the next use.
        """
        names = list(self.tiers)
        density = [hazard * float(self.gain_s(position, name)) / self.block_bytes for name in names]
        surplus = [have - price for have, price in zip(density, prices, strict=True)]
        cost = hazard * move_s / self.block_bytes
        worth = [gain - (cost if at != tier else 0.0) for at, gain in enumerate(surplus)]
        best = max(range(len(worth)), key=lambda at: (worth[at], at == tier))
        if density[best] <= 0 or worth[best] < 0:
            return Placing(Verdict.DROP, -1, max(density), min(prices))
        verdict = Verdict.KEEP if best == tier else Verdict.PROMOTE if best < tier else Verdict.DEMOTE
        return Placing(verdict, best, density[best], prices[best])

    def split(self, loads_s: Floats, position: int = 0) -> Split:
        """The best place to meet for a hit prefix of blocks that start at `position`; loads_s: of each block.

        Computing goes from the front and loading from the back at the same time (Cake, ICML 2025).
        """
        places = position + self.block_tokens * np.arange(len(loads_s))
        return best_split(np.append(0.0, np.cumsum(self.recompute_s(places))), loads_s)


def best_split(computed_s: Floats, loads_s: Floats) -> Split:
    """See `CostModel.split`. computed_s: of the first 0, 1, 2... blocks; loads_s: of each block, one fewer."""
    left = np.append(np.cumsum(loads_s[::-1])[::-1], 0.0)
    both = np.maximum(computed_s, left)
    at = int(np.argmin(both))
    return Split(at, float(both[at]), float(computed_s[-1]), float(left[0]))
