"""The node's eviction policy: which one, what its cost model has learned of this machine, and why blocks are where
they are.

A block's worth needs two costs. What computing it takes comes from `prefill_tokens_s`, the engine's rate at the start
of a prompt, and grows with the block's depth as attention does; the node does not know tokens, so a block counts as
`block_tokens` of them. What loading it takes is measured: each read from the disk tier is a pair (bytes, seconds), and
the median line through the last ones (`LoadEstimate`) is the disk's cost. Without a disk a block that leaves memory is
computed again; with one it is loaded or computed, whichever is faster.

The policy is given the costs anew when they have moved by over `_MOVED`, at most once in `_REPRICE_NS`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory import KEY_BYTES, Directory
from ucxkv.directory.explaining import facts_of
from ucxkv.errors import UsageError
from ucxkv.policy import TICKS_PER_S, LruPolicy, S3FifoPolicy, TucPolicy
from ucxkv.policy.cost import CostModel, LoadCost, LoadEstimate, PrefillCost, Verdict
from ucxkv.policy.decisions import Decision, DecisionLog
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from ucxkv.directory import SlotTable
    from ucxkv.node.config import NodeConfig
    from ucxkv.policy import EvictionPolicy, LeafLinks

__all__ = ["NodePolicy"]

DECISIONS = 16_384
"""Kept, some 400 bytes each."""
_S3FIFO_GHOSTS_SHARE = 8
"""S3-FIFO's names of evicted blocks, one for so many slots: some 100 bytes each. tuc has one a slot, of 15 bytes."""
_YOUNG_TICKS = 2 * TICKS_PER_S
"""An engine adds a block to a chain with every 16 tokens or so that it decodes."""
_SAMPLE_MAX = 8_192
"""Blocks that a lesson looks at: about a millisecond."""
_ATTENTION_PER_TOKEN = 3.3e-5
"""Of a token's cost, what each token before it adds: a model of 8 G parameters, 32 layers and a width of 4096."""
_HOST = LoadCost(20e-6, 10e9)
_DISK_PRIOR = LoadCost(100e-6, 2e9)
_BLOCK_BYTES_PRIOR = 256 << 10
_MOVED, _REPRICE_NS = 1.25, 10 * 10**9
_PROBES = np.array([0, 16, 128, 1024, 8192], np.int64)
_ANSWERED_MAX = 64


class NodePolicy:
    """See the module. Made with the store, before its directory."""

    def __init__(self, config: NodeConfig) -> None:
        self.name = config.policy
        self.decisions = DecisionLog(DECISIONS)
        self.disk = LoadEstimate(_DISK_PRIOR)
        self._has_disk = bool(config.disk)
        self._block_tokens = config.block_tokens
        per_token_s = 1.0 / config.prefill_tokens_s
        self._prefill = PrefillCost(per_token_s, per_token_s * _ATTENTION_PER_TOKEN)
        self._costs = self._model(_BLOCK_BYTES_PRIOR)
        self._repriced_ns = 0
        self.repriced = 0

    def make(self, links: LeafLinks) -> EvictionPolicy:
        """The policy of a directory."""
        if self.name == "lru":
            return LruPolicy(links)
        if self.name == "s3fifo":
            return S3FifoPolicy(links, len(links.prev) // _S3FIFO_GHOSTS_SHARE)
        gain, slots = partial(self._gain, self._costs), len(links.prev)
        return TucPolicy(links, gain, slots, sample_max=_SAMPLE_MAX, young_ticks=_YOUNG_TICKS)

    def directory(self, table: SlotTable, config: NodeConfig) -> Directory:
        """The node's directory, under this policy and with its log."""
        return Directory(
            table,
            policy=self.make,
            grace_ns=config.grace_ms * 1_000_000,
            has_disk=bool(config.disk),
            decisions=self.decisions,
        )

    # ---- costs

    def _model(self, block_bytes: int) -> CostModel:
        tiers = {"host": _HOST, "nvme": self.disk.cost}
        return CostModel(self._prefill, self._block_tokens, max(1, block_bytes), tiers)

    def _gain(self, costs: CostModel, depths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds that a block in memory saves over one that has left it."""
        return costs.gain_s(depths * self._block_tokens, "host", over="nvme" if self._has_disk else None)

    def disk_read(self, directory: Directory, nbytes: int, seconds: float) -> None:
        """One request of the disk tier took so long for so many bytes."""
        if nbytes <= 0 or seconds <= 0:
            return
        self.disk.loaded(nbytes, seconds)
        now_ns = time.monotonic_ns()
        if now_ns - self._repriced_ns >= _REPRICE_NS and self.disk.cost is not self._costs.tiers["nvme"]:
            self._repriced_ns = now_ns
            self._reprice(directory)

    def _reprice(self, directory: Directory) -> None:
        policy = directory.ranking.policy
        costs = self._model(directory.bytes // max(1, directory.blocks))
        before, after = (np.maximum(self._gain(model, _PROBES), 1e-9) for model in (self._costs, costs))
        if isinstance(policy, TucPolicy) and float(np.maximum(after / before, before / after).max()) > _MOVED:
            self._costs = costs
            self.repriced += 1
            policy.reprice(partial(self._gain, costs))

    # ---- answers

    def explain(self, directory: Directory, request: m.Explain, now_ns: int) -> m.Explained:
        """What is known of this block, and what befell it last."""
        key = request.keys
        if len(key) != KEY_BYTES:
            raise UsageError(f"{len(key) // KEY_BYTES} keys are to be explained; ask for one")
        facts = facts_of(directory, key, now_ns)
        clock = directory.clock(now_ns)
        past = [_told(each, clock) for each in self.decisions.of(key)[:_ANSWERED_MAX]]
        rule, kept = directory.ranking.policy.rule, len(self.decisions)
        if facts is None:
            return m.Explained(self.name, rule, decisions=past, kept=kept)
        worth, price, hazard, gain, uses = facts.rating
        return m.Explained(
            self.name,
            rule,
            tier="nvme" if facts.is_cold else "host",
            nbytes=facts.nbytes,
            parts=facts.parts,
            idle_s=facts.idle / TICKS_PER_S,
            depth=facts.depth,
            children=facts.children,
            cold_children=facts.cold_children,
            leases=facts.leases,
            is_durable=facts.is_durable,
            has_copy=facts.has_copy,
            uses=uses,
            worth=worth,
            price=price,
            hazard=hazard,
            gain=gain,
            decisions=past,
            kept=kept,
        )

    def numbers(self, directory: Directory) -> dict[str, float]:
        """For the report and the metrics."""
        policy, counts = directory.ranking.policy, self.decisions.counts
        cost = self.disk.cost
        return {
            "policy_lessons": policy.hazard.lessons if isinstance(policy, TucPolicy) else 0,
            "policy_price": policy.price if isinstance(policy, TucPolicy) else 0.0,
            "policy_repriced": self.repriced,
            "decided_demotions": counts[Verdict.DEMOTE],
            "decided_promotions": counts[Verdict.PROMOTE],
            "decided_drops": counts[Verdict.DROP],
            "disk_load_latency_s": cost.latency_s if self._has_disk else 0.0,
            "disk_load_bytes_s": cost.bandwidth if self._has_disk else 0.0,
            "disk_loads_measured": self.disk.count,
        }

    def facts(self) -> dict[str, str]:
        """For people."""
        if not self._has_disk:
            return {"policy": self.name}
        cost, is_measured = self.disk.cost, self.disk.count >= 8
        text = f"{cost.latency_s * 1e6:.0f} us and {cost.bandwidth / 1e9:.2f} GB/s a request"
        return {"policy": self.name, "disk_reads": text + (", measured" if is_measured else ", assumed until measured")}


def _told(each: Decision, clock: int) -> m.PastDecision:
    return m.PastDecision(
        ago_s=max(0, clock - each.now) / TICKS_PER_S,
        verdict=each.verdict.value,
        from_tier=each.from_tier,
        to_tier=each.to_tier,
        reason=each.reason,
        age_s=each.age / TICKS_PER_S,
        worth=each.worth,
        price=each.price,
        hazard=each.hazard,
    )
