"""The cluster that is simulated: a model, nodes, their tiers, the network; and on which node each block lives.

Placement is the product's: `chain` puts a whole chain on the home of its root (`ucxkv.placement.home`), as nodes do
today; `shards` puts it by the rule of a sharded directory (`ucxkv.sharding`): a child with its parent, until the parent
delegates or the key is a cut, shards levelled over the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ucxkv.errors import UsageError
from ucxkv.ids import NodeId
from ucxkv.placement import Members, home_indices
from ucxkv.policy.cost import CostModel, LoadCost, PrefillCost
from ucxkv.sharding import ShardRule, levelled
from ucxkv.simulation.traces import Ids
from ucxkv.simulation.workload import Workload, keys_of

__all__ = ["MODELS", "Cluster", "Model", "Tier", "node_of_blocks"]

Placement = Literal["chain", "shards"]
_SHARDS_A_NODE = 4
_SHARDS_LEAST, _SHARDS_MOST = 64, 4096


@dataclass(frozen=True, slots=True)
class Model:
    """A model on one serving instance. kv_bytes: keys and values of a token, all layers."""

    name: str
    kv_bytes: int
    prefill: PrefillCost


def _dense(name: str, parameters: float, layers: int, width: int, kv_width: int, flops: float) -> Model:
    cost = PrefillCost.of_model(parameters=parameters, layers=layers, width=width, flops=flops)
    return Model(name, 2 * layers * kv_width * 2, cost)


MODELS = {
    "8b": _dense("8b", 8.0e9, 32, 4096, 1024, 400e12),
    "70b": _dense("70b", 70.6e9, 80, 8192, 1024, 3200e12),
}
"""Llama 3 sizes in 16 bits: 8B on one GPU and 70B on eight, each GPU at 400 TFLOP/s sustained."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of every node. capacity: of all nodes together, as a share of the trace's different blocks (up to 1), or
    in bytes (above 1). bandwidth: bytes a second to one serving instance."""

    name: str
    capacity: float
    bandwidth: float
    latency_s: float = 0.0

    def blocks(self, unique: int, block_bytes: int) -> int:
        """The capacity in blocks, of all nodes together."""
        blocks = unique * self.capacity if self.capacity <= 1 else self.capacity / block_bytes
        return max(1, int(blocks + 1e-9))


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated. tiers: fastest first. link: what a load crosses besides the tier, None for nothing."""

    model: Model
    tiers: tuple[Tier, ...]
    nodes: int = 1
    placement: Placement = "chain"
    link: LoadCost | None = None

    def __post_init__(self) -> None:
        if not self.tiers or self.nodes < 1:
            raise UsageError(f"a cluster of {self.nodes} nodes with {len(self.tiers)} tiers: one of each at least")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise UsageError(f"two tiers have one name among {', '.join(names)}")
        for tier in self.tiers:
            if not tier.capacity > 0:
                raise UsageError(f"tier {tier.name}: capacity {tier.capacity}; it is above 0")

    def costs(self, block_tokens: int) -> CostModel:
        """The cost model of its blocks, loads over the link included."""
        loads = {}
        for tier in self.tiers:
            link = self.link or LoadCost(0.0, tier.bandwidth)
            loads[tier.name] = LoadCost(tier.latency_s + link.latency_s, min(tier.bandwidth, link.bandwidth))
        return CostModel(self.model.prefill, block_tokens, block_tokens * self.model.kv_bytes, loads)


def node_of_blocks(workload: Workload, cluster: Cluster) -> Ids:
    """On which node each block lives, by its id."""
    if cluster.nodes == 1:
        return np.zeros(workload.unique, np.int64)
    members = Members([NodeId(f"node-{number:05d}") for number in range(cluster.nodes)])
    keys = keys_of(workload.unique)
    parents = workload.parents
    if cluster.placement == "chain":
        found = np.full(workload.unique, -1, np.int64)
        roots = np.flatnonzero(parents < 0)
        found[roots] = home_indices(keys[roots], members)
    else:
        found = _by_shards(keys, workload, members)
    while (loose := np.flatnonzero(found < 0)).size:  # each round halves what is left of every chain
        above = parents[loose]
        found[loose] = found[above]
        parents = np.where(found < 0, parents[parents], parents)
    return found


def _by_shards(keys: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], workload: Workload, members: Members) -> Ids:
    """The nodes of blocks that live in their own key's shard; -1 for those that live with their parents."""
    shards = _SHARDS_LEAST
    while shards < min(_SHARDS_MOST, _SHARDS_A_NODE * len(members)):
        shards *= 2
    rule = ShardRule(shards=shards)
    number = {node: at for at, node in enumerate(members.nodes)}
    leader = np.array([number[node] for node in levelled([None] * shards, members)], np.int64)
    parents = workload.parents
    first = np.full(workload.unique, workload.blocks, np.int64)
    np.minimum.at(first, workload.ids, np.arange(workload.blocks))
    order = np.argsort(first)
    cut: list[bool] = rule.cuts(keys).tolist()
    apart: list[bool] = (parents < 0).tolist()
    local, has_elsewhere = [0] * workload.unique, [False] * workload.unique
    for block, above in zip(order.tolist(), parents[order].tolist(), strict=True):
        if above < 0:
            continue
        if cut[block] or rule.delegates(local[above], has_elsewhere[above]):
            apart[block] = has_elsewhere[above] = True
        else:
            local[above] += 1
    own = leader[rule.own_many(keys)]
    return np.where(np.array(apart), own, -1).astype(np.int64)
