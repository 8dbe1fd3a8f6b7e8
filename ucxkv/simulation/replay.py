"""One policy over one workload and one cluster: hits, seconds saved, bytes moved, time to first token.

Each request looks up the longest prefix that is there, loads or computes it, computes the rest and leaves all of its
blocks in the first tier. Saved prefill is what the hits would have cost to compute. What is left of it when loads take
their time is given for three ways to use a hit: load all; load as much of its head as pays (`cheaper`); compute from
the front while the tail loads (`split`). Times are of one request alone, without queues: a plan's order of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError
from ucxkv.policy import EvictionPolicy, LeafLinks, LruPolicy, S3FifoPolicy, TucPolicy
from ucxkv.policy.cost import CostModel, best_split
from ucxkv.simulation.belady import BeladyPolicy
from ucxkv.simulation.cluster import Cluster
from ucxkv.simulation.level import Level
from ucxkv.simulation.traces import Ids
from ucxkv.simulation.workload import Workload

__all__ = ["POLICIES", "WAYS", "Result", "replay"]

POLICIES = ("lru", "s3fifo", "tuc", "belady")
WAYS = ("always", "cheaper", "split")
Way = Literal["always", "cheaper", "split"]
_STEP = 64
Floats = npt.NDArray[np.float64]


@dataclass
class Result:
    """What one replay found. Seconds are of one serving instance a request; bytes are sums over the whole trace.

    hits: blocks by tier. saved_s: net of loads, by way. ttft_s: by request, in the way asked for. written: bytes into
    each tier, stored and demoted. served: bytes read from each node that has blocks.
    """

    policy: str
    capacity: list[int]
    requests: int
    blocks: int
    unique: int
    hits: list[int]
    prefill_s: float = 0.0
    saved_prefill_s: float = 0.0
    saved_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAYS, 0.0))
    ttft_s: list[float] = field(default_factory=list)
    uncached_s: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    served: dict[int, int] = field(default_factory=dict)
    evicted: int = 0
    refused: int = 0

    def row(self, names: list[str]) -> dict[str, Any]:
        """The figures as plain values, for JSON. names: of the tiers."""
        hits = sum(self.hits)
        total = sum(self.served.values())
        busiest = max(self.served.values(), default=0)

        def by_tier(values: list[int]) -> dict[str, int]:
            return dict(zip(names, values, strict=True))

        return {
            "policy": self.policy,
            "hit_rate": round(hits / self.blocks, 6),
            "saved_prefill_s": round(self.saved_prefill_s, 3),
            "requests": self.requests,
            "blocks": self.blocks,
            "unique_blocks": self.unique,
            "capacity_blocks": by_tier(self.capacity),
            "prefill_s": round(self.prefill_s, 3),
            "net_saved_s": {way: round(saved, 3) for way, saved in self.saved_s.items()},
            "hits": by_tier(self.hits),
            "read_bytes": by_tier(self.read),
            "written_bytes": by_tier(self.written),
            "link_bytes": total,
            "busiest_node_share": round(busiest / total, 4) if total else 0.0,
            "ttft_p50_s": _quantile(self.ttft_s, 50),
            "ttft_p95_s": _quantile(self.ttft_s, 95),
            "ttft_mean_s": round(float(np.mean(self.ttft_s)), 6),
            "uncached_ttft_p50_s": _quantile(self.uncached_s, 50),
            "uncached_ttft_p95_s": _quantile(self.uncached_s, 95),
            "uncached_ttft_mean_s": round(float(np.mean(self.uncached_s)), 6),
            "evicted": self.evicted,
            "refused": self.refused,
        }


def _quantile(values: list[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 6)


def _maker(policy: str, costs: CostModel, tier: str | None, over: str | None) -> Callable[[LeafLinks], EvictionPolicy]:
    if policy == "tuc":
        return lambda links: TucPolicy(links, lambda positions: costs.gain_s(positions, tier, over=over))
    found: dict[str, Callable[[LeafLinks], EvictionPolicy]] = {
        "lru": LruPolicy,
        "s3fifo": S3FifoPolicy,
        "belady": BeladyPolicy,
    }
    if policy not in found:
        raise UsageError(f"policy {policy!r}: use one of {', '.join(POLICIES)}")
    return found[policy]


def _levels(workload: Workload, cluster: Cluster, node_of: Ids, policy: str, costs: CostModel) -> list[Level]:
    names = [tier.name for tier in cluster.tiers]
    levels, capacity = [], 0
    for at, tier in enumerate(cluster.tiers):
        capacity += tier.blocks(workload.unique, costs.block_bytes)
        single = len(names) == 1
        make = _maker(
            policy, costs, None if single else names[at], None if at + 1 == len(names) else names[at + 1]
        )  # a place in a tier is worth what it saves over the next one
        levels.append(Level(workload, node_of, cluster.nodes, capacity, make))
    return levels


def replay(
    workload: Workload,
    cluster: Cluster,
    policy: str,
    node_of: Ids,
    *,
    way: Way = "cheaper",
    next_uses: Ids | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Result:
    """Run one policy. node_of: of each block, from `node_of_blocks`. next_uses: of the workload, for Belady's rule.

    on_progress is told now and then how many requests are done.
    """
    costs = cluster.costs(workload.block_tokens)
    levels = _levels(workload, cluster, node_of, policy, costs)
    if policy == "belady" and next_uses is None:
        next_uses = workload.next_uses()
    tiers = len(levels)
    capacity = [tier.blocks(workload.unique, costs.block_bytes) for tier in cluster.tiers]
    zeros = [0] * tiers
    result = Result(policy, capacity, workload.requests, workload.blocks, workload.unique, list(zeros),
                    read=list(zeros), written=list(zeros))  # fmt: skip
    positions = workload.block_tokens * np.arange(workload.longest, dtype=np.int64)
    computed = np.append(0.0, np.cumsum(costs.recompute_s(positions)))
    loads = np.array([costs.load_s(tier.name) for tier in cluster.tiers])
    served = np.zeros(cluster.nodes, np.int64)
    starts: list[int] = workload.starts.tolist()
    ticks: list[int] = workload.ticks.tolist()
    for number, now in enumerate(ticks):
        span = slice(starts[number], starts[number + 1])
        ids = workload.ids[span]
        tier_of = _tiers(levels, ids)
        loaded = _count(result, tier_of, len(ids), computed, loads, way)
        if len(loaded):
            read = np.bincount(tier_of[loaded], minlength=tiers)
            for tier in range(tiers):
                result.read[tier] += int(read[tier]) * costs.block_bytes
            served += np.bincount(node_of[ids[loaded]], minlength=cluster.nodes) * costs.block_bytes
        upcoming = next_uses[span] if next_uses is not None and policy == "belady" else None
        _take(levels, ids, positions[: len(ids)], now, upcoming, result, costs.block_bytes, int((tier_of == 0).sum()))
        if on_progress is not None and number % _STEP == 0:
            on_progress(number)
    result.refused = levels[-1].refused
    result.served = {node: int(nbytes) for node, nbytes in enumerate(served) if nbytes}
    return result


def _tiers(levels: list[Level], ids: Ids) -> Ids:
    """The tier of each block of the longest prefix that is there."""
    tier = np.full(len(ids), len(levels), np.int64)
    for at in range(len(levels) - 1, -1, -1):
        tier[levels[at].slot_of[ids] >= 0] = at
    missing = tier == len(levels)
    stop = int(np.argmax(missing))
    return tier[:stop] if missing[stop] else tier


def _count(result: Result, tier_of: Ids, blocks: int, computed: Floats, loads: Floats, way: Way) -> Ids:
    """Add one request's figures; which blocks of its hit prefix are loaded, by place."""
    n, full = len(tier_of), float(computed[blocks])
    result.prefill_s += full
    result.uncached_s.append(full)
    if not n:
        result.ttft_s.append(full)
        return np.zeros(0, np.int64)
    for tier, count in enumerate(np.bincount(tier_of, minlength=len(loads)).tolist()):
        result.hits[tier] += count
    each = loads[tier_of]
    hit_s = float(computed[n])
    result.saved_prefill_s += hit_s
    so_far = np.append(0.0, np.cumsum(each))
    heads = so_far - computed[: n + 1]  # seconds against computing, by how many of the head are loaded
    head = int(np.argmin(heads))
    split = best_split(computed[: n + 1], each)
    saved = {"always": -float(heads[n]), "cheaper": -float(heads[head]), "split": hit_s - split.seconds}
    for name, seconds in saved.items():
        result.saved_s[name] += seconds
    result.ttft_s.append(full - saved[way])
    return np.arange(split.compute, n) if way == "split" else np.arange(n if way == "always" else head)


def _take(
    levels: list[Level], ids: Ids, positions: Ids, now: int, upcoming: Ids | None,
    result: Result, block_bytes: int, first_hits: int,
) -> None:  # fmt: skip
    """Keep a request's blocks in the first tier, demote and let go what has to."""
    gone = [level.take(ids, positions, now, upcoming) for level in levels]
    for at in range(1, len(levels)):
        for block in gone[at]:  # what a level lets go is in no tier above either
            for level in levels[:at]:
                level.drop(block)
        result.written[at] += block_bytes * int((levels[at].slot_of[gone[at - 1]] >= 0).sum())
    result.written[0] += block_bytes * (len(ids) - first_hits)
    result.evicted += len(gone[-1])
