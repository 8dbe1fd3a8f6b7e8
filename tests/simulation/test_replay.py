"""Replaying: LRU and Belady against models that are obviously right, tiers, clusters, and one answer for one input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.traces import workload
from ucxkv.policy import LruPolicy
from ucxkv.policy.cost import LoadCost
from ucxkv.simulation.belady import BeladyPolicy
from ucxkv.simulation.cluster import MODELS, Cluster, Tier, node_of_blocks
from ucxkv.simulation.level import Level
from ucxkv.simulation.replay import POLICIES, Result, replay
from ucxkv.simulation.traces import Request
from ucxkv.simulation.workload import Workload, lay_out

HOST = Tier("host", 0.1, 40e9)
ONE = Cluster(MODELS["8b"], (HOST,))


def run(load: Workload, cluster: Cluster, policy: str, way: str = "cheaper") -> Result:
    return replay(load, cluster, policy, node_of_blocks(load, cluster), way=way)  # type: ignore[arg-type]


def sized(blocks: int, load: Workload) -> Cluster:
    """One node and tier of so many blocks."""
    return replace(ONE, tiers=(replace(HOST, capacity=min(1.0, blocks / load.unique)),))


def plain_lru(load: Workload, capacity: int) -> int:
    """Hits of leaf-first LRU by a sorted list."""
    used: dict[int, tuple[int, int]] = {}
    hits = 0
    for number in range(load.requests):
        chain = load.ids[load.starts[number] : load.starts[number + 1]].tolist()
        hits += next((at for at, block in enumerate(chain) if block not in used), len(chain))
        used.update({block: (number, -depth) for depth, block in enumerate(chain)})
        for block in sorted(used, key=lambda block: used[block])[: max(0, len(used) - capacity)]:
            del used[block]
    return hits


def test_lru_is_the_plain_model(tmp_path: Path) -> None:
    """Goal: the simulator's LRU is LRU. Method: 600 requests at three capacities against a sorted list; requests stand
    700 ms apart, so no two have one time."""
    load = workload(tmp_path, 600)
    for blocks in (15, 60, 300):
        assert sum(run(load, sized(blocks, load), "lru").hits) == plain_lru(load, blocks)


trees = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


def tree_load(paths: list[list[int]]) -> Workload:
    requests = []
    for number, path in enumerate(paths):
        at, chain = 0, []
        for branch in path:
            at = 2 * at + branch + 1
            chain.append(at)
        requests.append(Request(np.array(chain, np.int64), -1, float(number)))
    return lay_out("tree", 512, requests)


def most_hits(load: Workload, capacity: int) -> int:
    """The most that any choice of what to keep can hit: every prefix-closed set that may stay, tried."""
    chains = [tuple(load.ids[load.starts[n] : load.starts[n + 1]].tolist()) for n in range(load.requests)]
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += next((at for at, block in enumerate(chain) if block not in kept), len(chain))
            seen, todo = set(), [kept | set(chain)]
            while todo:
                there = todo.pop()
                if there in seen:
                    continue
                seen.add(there)
                if len(there) <= capacity:
                    after[there] = max(after.get(there, 0), hits)
                inner = {int(load.parents[block]) for block in there}
                todo += [there - {block} for block in there if block not in inner]
        best = after
    return max(best.values())


@given(trees, st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_belady_is_the_best_there_is(paths: list[list[int]], capacity: int) -> None:
    """Goal: the bound is one. Method: tiny trees, every set that any policy could keep after each request, against the
    replay; no policy of ours beats it either."""
    load = tree_load(paths)
    capacity = min(capacity, load.unique)
    cluster = sized(capacity, load)
    found = {policy: sum(run(load, cluster, policy).hits) for policy in POLICIES}
    assert found["belady"] == most_hits(load, capacity)
    assert max(found.values()) == found["belady"]


def test_nothing_is_evicted_and_all_that_can_be_is_hit_at_full_capacity(tmp_path: Path) -> None:
    """Goal: the figures at the end of a sweep. Method: capacity 1; hits are all references but the first of each block,
    saved seconds what those cost, for every policy."""
    load = workload(tmp_path, 200)
    for policy in POLICIES:
        found = run(load, sized(load.unique, load), policy)
        assert sum(found.hits) == load.blocks - load.unique
        assert found.evicted == found.refused == 0
        assert 0 < found.saved_prefill_s < found.prefill_s == pytest.approx(sum(found.uncached_s))
        assert found.written == [load.unique * 64 << 20]


def test_one_input_has_one_answer(tmp_path: Path) -> None:
    """Goal: reproducible figures. Method: every policy twice over the same trace, all fields compared."""
    load = workload(tmp_path, 300)
    for policy in POLICIES:
        assert run(load, sized(40, load), policy) == run(load, sized(40, load), policy)


def test_loads_cost_what_they_say_and_split_is_never_slower(tmp_path: Path) -> None:
    """Goal: net seconds and TTFT by way. Method: two tiers, the second too slow for the first blocks of a prompt;
    always <= cheaper <= split, TTFTs add up to what was saved, reads follow the way."""
    load = workload(tmp_path, 400)
    tiers = (replace(HOST, capacity=0.05), Tier("nvme", 0.5, 2e9, 150e-6))
    cluster = Cluster(MODELS["70b"], tiers, link=LoadCost(10e-6, 20e9))
    found = {way: run(load, cluster, "lru", way) for way in ("always", "cheaper", "split")}
    for way, result in found.items():
        saved = result.saved_s
        assert saved["always"] < saved["cheaper"] < saved["split"] < result.saved_prefill_s
        assert result.prefill_s - sum(result.ttft_s) == pytest.approx(saved[way])
        assert all(hits > 0 for hits in result.hits)
    assert sum(found["always"].read) == sum(found["always"].hits) * 160 << 20
    assert sum(found["cheaper"].read) < sum(found["always"].read) == sum(found["always"].served.values())


def test_two_tiers_hit_as_one_of_their_size_under_lru(tmp_path: Path) -> None:
    """Goal: demotion loses nothing. Method: 30 + 90 blocks in two tiers against 120 in one; what the first holds is
    what it would hold alone; what it evicts is written below."""
    load = workload(tmp_path, 400)
    tiers = (replace(HOST, capacity=30 / load.unique), Tier("nvme", 90 / load.unique, 6e9))
    both = run(load, Cluster(MODELS["8b"], tiers), "lru")
    assert both.capacity == [30, 90]
    assert sum(both.hits) == sum(run(load, sized(120, load), "lru").hits)
    assert both.hits[0] == sum(run(load, sized(30, load), "lru").hits)
    assert both.written[1] > 0


@pytest.mark.parametrize("placement", ["chain", "shards"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cluster_keeps_every_chain_closed(tmp_path: Path, placement: str, policy: str) -> None:
    """Goal: blocks on many nodes, each chain whole from its root. Method: 7 nodes, chats that share no head and ones
    that do; every 20 requests the books of all nodes; hits no more than one node of the whole size has under Belady."""
    load = workload(tmp_path, 240, shared=0 if placement == "chain" else 2)
    cluster = replace(sized(80, load), nodes=7, placement=placement)  # type: ignore[arg-type]
    node_of = node_of_blocks(load, cluster)
    assert len(np.unique(node_of)) > 3
    roots = np.flatnonzero(load.parents < 0)
    if placement == "chain":
        inner = np.flatnonzero(load.parents >= 0)
        assert np.array_equal(node_of[inner], node_of[load.parents[inner]]) and len(roots) > 20
    found = replay(load, cluster, policy, node_of)
    assert sum(found.hits) <= sum(run(load, sized(80, load), "belady").hits)
    assert len(found.served) > 1
    if policy != "belady":
        return
    level = Level(load, node_of, 7, 80, LruPolicy)
    for number in range(load.requests):
        ids = load.ids[load.starts[number] : load.starts[number + 1]]
        level.take(ids, 512 * np.arange(len(ids)), number + 1, None)
        if number % 20 == 0:
            level.check()


def test_a_thousand_nodes_are_no_trouble(tmp_path: Path) -> None:
    """Goal: large clusters. Method: 1,000 nodes with room for everything: hits are those of one node that has it."""
    load = workload(tmp_path, 300, shared=0)
    cluster = replace(sized(load.unique, load), nodes=1000, tiers=(replace(HOST, capacity=float(1 << 42)),))
    found = run(load, cluster, "tuc")
    assert sum(found.hits) == load.blocks - load.unique
    assert found.evicted == 0 and len(found.served) > 20


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_belady_pops_the_farthest(uses: list[tuple[int, int]]) -> None:
    """Goal: the heap says the truth after touches. Method: leaves whose next use changes, against a search."""
    from ucxkv.policy import Residents

    residents = Residents(6, BeladyPolicy)
    policy = residents.policy
    assert isinstance(policy, BeladyPolicy)
    for slot, upcoming in uses:
        if residents.holds[slot] < 0:
            policy.next_use[slot] = upcoming
            assert residents.next_slots(1).tolist() == [residents._free[-1]]
            got = residents.insert(-1, np.zeros(1, np.uint64), np.zeros(1, np.int64), 1)
            policy.next_use[got] = upcoming
        else:
            policy.next_use[slot] = upcoming
        policy.touch(policy.leaves())
        far = max(policy.next_use[each] for each in policy.leaves())
        if residents.free_count == 0:
            assert policy.next_use[residents.evict()] == far
