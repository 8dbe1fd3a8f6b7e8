"""The blocks that are in a node's tiers down to one of them, for every node of a cluster.

Tiers hold a block once: what the first tier evicts is demoted to the second, and so on. That is modelled by nested
sets: level k is all blocks in tiers 0 to k, as large as those together, with a policy of its own, which sees every use.
A block's tier is the first level that has it. For one tier there is one level.

A chain may lie on several nodes; a block is held at its node by its children on others, so every chain stays closed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ucxkv.policy import EvictionPolicy, LeafLinks, Residents
from ucxkv.policy.base import view_of
from ucxkv.policy.residents import NONE
from ucxkv.simulation.belady import BeladyPolicy
from ucxkv.simulation.traces import Ids
from ucxkv.simulation.workload import Workload

__all__ = ["Level"]

PolicyMaker = Callable[[LeafLinks], EvictionPolicy]


class Level:
    """See the module. capacity: blocks on all nodes together, shared evenly.

    refused: blocks that were not kept, as all of their node's were held.
    """

    def __init__(self, workload: Workload, node_of: Ids, nodes: int, capacity: int, policy: PolicyMaker) -> None:
        self.slot_of: Ids = np.full(workload.unique, -1, np.int64)
        self.refused = 0
        self._slot, self._parent, self._node = view_of(self.slot_of), view_of(workload.parents), view_of(node_of)
        self._node_of, self._parents, self._block_tokens = node_of, workload.parents, workload.block_tokens
        self._names = np.arange(workload.unique, dtype=np.uint64)
        used = np.unique(node_of).tolist()
        share, more = divmod(capacity, nodes)
        self._capacity = {node: max(1, share + (node < more)) for node in used}
        most = {node: min(self._capacity[node], int((node_of == node).sum())) for node in used} if nodes > 1 else {}
        slots = {node: most.get(node, min(capacity, workload.unique)) + workload.longest for node in used}
        self._nodes = {node: Residents(slots[node], policy) for node in used}
        self._id_at: dict[int, Ids] = {node: np.full(slots[node], -1, np.int64) for node in used}
        self._id = {node: view_of(ids) for node, ids in self._id_at.items()}

    def matched(self, ids: Ids) -> int:
        """How many blocks of this chain are here, from its root on."""
        missing = self.slot_of[ids] < 0
        at = int(np.argmax(missing))
        return at if missing[at] else len(ids)

    def take(self, ids: Ids, positions: Ids, now: int, next_uses: Ids | None) -> list[int]:
        """A request used this chain, and all of it is kept; the ids that were evicted for it, in order."""
        hits = self.matched(ids)
        where = self._node_of[ids]
        bounds = [0, *(np.flatnonzero(where[1:] != where[:-1]) + 1).tolist(), len(ids)]
        touched = []
        for first, stop in pairwise(bounds):
            node = int(where[first])
            touched.append(node)
            place = self._nodes[node]
            if isinstance(place.policy, BeladyPolicy) and next_uses is not None:
                known = self.slot_of[ids[first : min(stop, hits)]]
                place.policy.next_use[known] = next_uses[first : first + len(known)]
            if first < hits:
                place.use(self.slot_of[ids[first : min(stop, hits)]], now)
            start = max(first, hits)
            if start < stop:
                upcoming = next_uses[start:stop] if next_uses is not None else None
                if not self._insert(node, ids, start, stop, positions, now, upcoming):
                    self.refused += len(ids) - start
                    break
        gone: list[int] = []
        for node in dict.fromkeys(touched):
            self._shrink(node, gone)
        return gone

    def drop(self, block: int) -> bool:
        """Forget a block that a lower tier let go; whether it was here."""
        slot = int(self.slot_of[block])
        if slot < 0:
            return False
        node = int(self._node_of[block])
        self._nodes[node].drop(slot)
        self._forget(node, block)
        return True

    def check(self) -> None:
        """Assert that the books agree and every chain is closed."""
        there = np.flatnonzero(self.slot_of >= 0)
        parents = self._parents[there]
        assert np.all(self.slot_of[parents[parents >= 0]] >= 0)
        assert sum(map(len, self._nodes.values())) == len(there)
        for place in self._nodes.values():
            place.check()

    def _insert(
        self, node: int, ids: Ids, start: int, stop: int, positions: Ids, now: int, upcoming: Ids | None
    ) -> bool:
        place = self._nodes[node]
        if place.free_count < stop - start:
            return False
        parent, above = NONE, int(ids[start - 1]) if start else -1
        if above >= 0:
            slot, other = int(self.slot_of[above]), int(self._node_of[above])
            if other == node:
                parent = slot
            else:
                self._nodes[other].hold(slot)
        if isinstance(place.policy, BeladyPolicy) and upcoming is not None:
            place.policy.next_use[place.next_slots(stop - start)] = upcoming
        slots = place.insert(parent, self._names[ids[start:stop]], positions[start:stop], now)
        self.slot_of[ids[start:stop]] = slots
        self._id_at[node][slots] = ids[start:stop]
        return True

    def _shrink(self, node: int, gone: list[int]) -> None:
        place, capacity, id_at = self._nodes[node], self._capacity[node], self._id[node]
        while len(place) > capacity:
            slot = place.evict()
            if slot < 0:
                return
            block = id_at[slot]
            self._forget(node, block)
            gone.append(block)

    def _forget(self, node: int, block: int) -> None:
        self._slot[block] = -1
        above = self._parent[block]
        if above >= 0 and (other := self._node[above]) != node:
            self._nodes[other].release(self._slot[above])
