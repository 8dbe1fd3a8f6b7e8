"""What tests of policies share: blocks as chains over `Residents`, and the policies under one name each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ucxkv.policy import EvictionPolicy, LeafLinks, LruPolicy, Residents, S3FifoPolicy, TucPolicy
from ucxkv.policy.cost import PrefillCost

PREFILL = PrefillCost(4e-5, 1e-9)


def flat(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Every block saves the same."""
    return np.ones(len(positions))


def steep(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Later blocks save more, as attention makes them."""
    return PREFILL.seconds(positions, 512)


POLICIES: dict[str, Callable[[LeafLinks], EvictionPolicy]] = {
    "lru": LruPolicy,
    "s3fifo": S3FifoPolicy,
    "tuc": lambda links: TucPolicy(links, steep),
}


class Cache:
    """A cache of `capacity` blocks of chains of numbers; each request uses its chain and leaves all of it here."""

    def __init__(self, capacity: int, longest: int, policy: Callable[[LeafLinks], EvictionPolicy]) -> None:
        self.capacity = capacity
        self.residents = Residents(capacity + longest, policy)
        self.slots: dict[int, int] = {}
        self.blocks: dict[int, int] = {}

    def request(self, chain: list[int], now: int) -> int:
        """How many blocks of the chain were here."""
        hits = next((at for at, block in enumerate(chain) if block not in self.slots), len(chain))
        if hits:
            self.residents.use(np.array([self.slots[block] for block in chain[:hits]], np.int64), now)
        if hits < len(chain):
            parent = self.slots[chain[hits - 1]] if hits else -1
            names = np.array(chain[hits:], np.uint64)
            places = 512 * np.arange(hits, len(chain), dtype=np.int64)
            for block, slot in zip(
                chain[hits:], self.residents.insert(parent, names, places, now).tolist(), strict=True
            ):
                self.slots[block], self.blocks[slot] = slot, block
        while len(self.residents) > self.capacity:
            self.forget(self.residents.evict())
        return hits

    def forget(self, slot: int) -> None:
        """The block in this slot has gone."""
        del self.slots[self.blocks.pop(slot)]
