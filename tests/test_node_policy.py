"""The node's cost model: what it measures, and when the policy is told."""

from __future__ import annotations

import time
import tracemalloc
from typing import Literal

import numpy as np
import pytest

from tests.directory.arena import aligned
from ucxkv.directory import SlotTable, table_bytes
from ucxkv.node import NodeConfig
from ucxkv.node.policy import NodePolicy
from ucxkv.policy import TucPolicy


def test_measured_reads_replace_the_assumed_cost_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: calibration. Method: reads of a disk of 2 ms and 200 MB/s; the estimate is within a tenth, and the policy's
    gain of a shallow block, which such a disk makes worth computing, is what computing takes."""
    now = 10**12
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    config = NodeConfig(disk=("/somewhere",), policy="tuc")
    policy = NodePolicy(config)
    directory = policy.directory(SlotTable(aligned(table_bytes(64)), 64, epoch=1, seed=2), config)
    learner = directory.ranking.policy
    assert isinstance(learner, TucPolicy)
    depths = np.array([0, 4096], np.int64)
    before = learner._gain(depths)
    rng = np.random.default_rng(5)
    for _ in range(64):
        now += 11 * 10**9
        nbytes = int(rng.integers(1, 64)) << 16
        policy.disk_read(directory, nbytes, (2e-3 + nbytes / 200e6) * float(rng.uniform(0.95, 1.05)))
    cost = policy.disk.cost
    assert abs(cost.latency_s - 2e-3) < 4e-4 and abs(cost.bandwidth - 200e6) < 20e6
    assert policy.repriced >= 1
    after = learner._gain(depths)
    assert (after > 1.25 * before).any() and after[0] <= 16 / config.prefill_tokens_s * 1.01
    numbers = policy.numbers(directory)
    assert numbers["disk_loads_measured"] == 64 and numbers["disk_load_bytes_s"] == cost.bandwidth
    assert "measured" in policy.facts()["disk_reads"]


def test_reads_that_cannot_be_are_left_out() -> None:
    """Method: no bytes, and no time."""
    config = NodeConfig(disk=("/somewhere",))
    policy = NodePolicy(config)
    directory = policy.directory(SlotTable(aligned(table_bytes(64)), 64, epoch=1, seed=2), config)
    policy.disk_read(directory, 0, 1.0)
    policy.disk_read(directory, 5, 0.0)
    assert policy.disk.count == 0


def test_without_a_disk_a_block_that_leaves_is_computed_again() -> None:
    """Method: the gain by depth grows as attention does, and is about what computing 16 tokens takes at the start."""
    config = NodeConfig(prefill_tokens_s=1000.0)
    policy = NodePolicy(config)
    learner = policy.directory(SlotTable(aligned(table_bytes(64)), 64, epoch=1, seed=2), config).ranking.policy
    assert isinstance(learner, TucPolicy)
    gains = learner._gain(np.array([0, 1000, 8000], np.int64))
    assert abs(gains[0] - 0.016) < 1e-3 and gains[0] < gains[1] < gains[2]


@pytest.mark.parametrize(("name", "slot_bytes"), [("lru", 0), ("s3fifo", 17), ("tuc", 40)])
def test_the_index_counts_what_a_learning_policy_keeps(name: Literal["lru", "s3fifo", "tuc"], slot_bytes: int) -> None:
    """Goal: `index_bytes` is what the index takes. Method: by policy, the bytes beside the table against those that
    Python's allocators gave out meanwhile, and against lru's."""
    slots = 1 << 16
    table = SlotTable(aligned(table_bytes(slots)), slots, epoch=1, seed=2)
    lru, config = NodeConfig(policy="lru"), NodeConfig(policy=name)
    without = NodePolicy(lru).directory(table, lru).side_bytes
    memory, policy = aligned(table_bytes(slots)), NodePolicy(config)
    tracemalloc.start()
    try:
        directory = policy.directory(SlotTable(memory, slots, epoch=1, seed=2), config)
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert directory.side_bytes <= allocated <= 1.05 * directory.side_bytes + 500_000
    assert directory.side_bytes - without == pytest.approx(slot_bytes * slots, rel=0.01)
