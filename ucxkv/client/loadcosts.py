"""What loading a block costs, by node and tier: documented first guesses, then what this client's own reads took.

A load is a block's way from its tier into the node's memory, where it is not there already, and from there to this
client. Both are fitted apart, each as `latency` a block and bytes a second (`policy.cost.LoadCost`):

    load(block) = bring(node, tier)(nbytes) + arrive(node)(nbytes)          bring is nothing for host memory

Promises
  - An estimate is always positive and finite, and one measurement moves it by a bounded factor (`policy.scales`).
  - Loads that overlap in time share the way and are measured together.
  - A measurement costs a few microseconds, and small reads are measured one in `_EVERY`; single reads on the short way
    never are.

Pure: seconds are handed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ucxkv.client.results import Match, PathKind
from ucxkv.errors import UsageError
from ucxkv.policy.cost import LoadCost
from ucxkv.policy.scales import Scales

if TYPE_CHECKING:
    from ucxkv.client.link import NodeLink
    from ucxkv.client.path import U64

__all__ = ["ARRIVE", "BRING", "HOST_TIER", "NVME_TIER", "LoadCosts", "LoadMeter"]

Floats = npt.NDArray[np.float64]

GPU_TIER: Final = 0
HOST_TIER: Final = 1
NVME_TIER: Final = 2

ARRIVE: Final = {
    PathKind.MAPPED: LoadCost(1e-6, 8e9),
    PathKind.RMA: LoadCost(3e-6, 10e9),
    PathKind.MESSAGE: LoadCost(10e-6, 2e9),
    PathKind.NONE: LoadCost(50e-6, 1e9),
}
"""First guesses from a node's memory to here: a copy in memory; one-sided reads over 100 Gb/s; TCP on one host."""

BRING: Final = {GPU_TIER: LoadCost(10e-6, 12e9), NVME_TIER: LoadCost(20e-6, 3e9)}
"""First guesses into a node's memory: over PCIe 3.0 x16; from one NVMe drive that is read many blocks at a time."""

_GAIN: Final = 0.2
_CLIP: Final = 4.0
_EVERY: Final = 8
_MANY: Final = 16
_LEAST_SHARE: Final = 0.1
_WAYS_MAX: Final = 4096
_TOGETHER: Final = 64


class LoadMeter:
    """One way's cost from measured loads; see the module. `cost` is the estimate now, `count` what it has seen."""

    def __init__(self, guess: LoadCost) -> None:
        self._unit_s, self._unit_byte_s = max(guess.latency_s, 1e-9), 1.0 / guess.bandwidth
        self._scales = Scales(2, gain=_GAIN, clip=_CLIP)
        self.count = 0
        self.cost = guess

    def observe(self, blocks: int, nbytes: int, seconds: float) -> None:
        """This many blocks of together `nbytes` took so long. Raises UsageError for what cannot be."""
        if blocks < 1 or nbytes < 0 or not 0 < seconds < float("inf"):
            raise UsageError(f"a load of {blocks} blocks, {nbytes} bytes in {seconds} s: there is no such load")
        self._scales.observe((blocks * self._unit_s, nbytes * self._unit_byte_s), seconds)
        later, slower = self._scales.values
        self.count += 1
        self.cost = LoadCost(self._unit_s * later, 1.0 / (self._unit_byte_s * slower))


class _Way:
    """A way's meter, and the loads since it was asked last that overlapped in time: they shared the way."""

    def __init__(self, guess: LoadCost) -> None:
        self.meter = LoadMeter(guess)
        self._end_s = -float("inf")
        self._clear()

    def _clear(self) -> None:
        self._loads = self._blocks = self._nbytes = 0
        self._lasted_s = self._besides_s = 0.0

    def add(self, blocks: int, nbytes: int, start_s: float, end_s: float, besides_s: float) -> None:
        """A load ended, not before those that were added ended. besides_s: of it another way's."""
        if start_s >= self._end_s or self._loads >= _TOGETHER:
            self.settle()
        self._loads += 1
        self._blocks += blocks
        self._nbytes += nbytes
        self._lasted_s += max(0.0, end_s - max(start_s, self._end_s))
        self._besides_s += besides_s
        self._end_s = max(self._end_s, end_s)

    def settle(self) -> None:
        """Measure what was added."""
        if self._lasted_s > 0:
            seconds = max(self._lasted_s - self._besides_s, _LEAST_SHARE * self._lasted_s)
            self.meter.observe(self._blocks, self._nbytes, seconds)
        self._clear()


class LoadCosts:
    """The meters of one client: of each node's way to it, and of each node's slower tiers into the node's memory.

    Times are of one monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[str, PathKind | int], _Way] = {}
        self._calls = 0

    def is_due(self, blocks: int) -> bool:
        """Whether a read of so many blocks is to be measured: all large ones, some of the small."""
        self._calls += 1
        return blocks >= _MANY or self._calls % _EVERY == 0

    def arrived(self, node: str, path: PathKind, blocks: int, nbytes: int, start_s: float, end_s: float) -> None:
        """Blocks came from the node's memory, all of them hits."""
        self._way(node, path).add(blocks, nbytes, start_s, end_s, 0.0)

    def brought(self, node: str, tier: int, blocks: int, nbytes: int, start_s: float, end_s: float) -> None:
        """The node brought blocks from a tier into its memory, as seen from here."""
        if tier in BRING:
            self._way(node, tier).add(blocks, nbytes, start_s, end_s, 0.0)

    def came_cold(self, node: str, path: PathKind, blocks: int, nbytes: int, start_s: float, end_s: float) -> None:
        """Blocks came from the node's disk: what its memory would not have taken is laid to the disk."""
        arrive = self.cost(node, path)
        from_memory_s = blocks * arrive.latency_s + nbytes / arrive.bandwidth
        self._way(node, NVME_TIER).add(blocks, nbytes, start_s, end_s, from_memory_s)

    def cost(self, node: str, way: PathKind | int) -> LoadCost:
        """What is known of a way: a path to here, or a tier into the node's memory."""
        known = self._ways.get((node, way))
        if known is None:
            return _guess(way)
        known.settle()
        return known.meter.cost

    def load_s(self, node: str, path: PathKind, sizes: Floats, tiers: npt.NDArray[np.uint8]) -> Floats:
        """Seconds to load each of n blocks, f64[n], as one of many; sizes in bytes. Tiers not known count as host."""
        arrive = self.cost(node, path)
        seconds: Floats = arrive.latency_s + sizes / arrive.bandwidth
        for tier in BRING:
            there = tiers == tier
            if there.any():
                bring = self.cost(node, tier)
                seconds[there] += bring.latency_s + sizes[there] / bring.bandwidth
        return seconds

    def match(self, holder: NodeLink | None, sizes: U64, tiers: npt.NDArray[np.uint8], *, is_certain: bool) -> Match:
        """The answer for blocks of these sizes in these tiers at a node (None: nobody has any)."""
        if holder is None:
            return Match(0, tiers.copy(), np.zeros(0), is_certain, sizes)
        load_s = self.load_s(holder.name, holder.path.kind, sizes.astype(np.float64), tiers)
        return Match(len(tiers), tiers.copy(), load_s, is_certain, sizes, holder.name)

    def _way(self, node: str, way: PathKind | int) -> _Way:
        known = self._ways.get((node, way))
        if known is None:
            if len(self._ways) >= _WAYS_MAX:  # nodes come and go
                del self._ways[next(iter(self._ways))]
            known = self._ways[node, way] = _Way(_guess(way))
        return known


def _guess(way: PathKind | int) -> LoadCost:
    return ARRIVE[way] if isinstance(way, PathKind) else BRING[way]
