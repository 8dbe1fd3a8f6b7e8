"""The plan of a split load, run against a made-up engine and store in virtual time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.loadsplit import LoadSplit
from ucxkv.policy.cost import PrefillCost, best_split

NEVER = 1e12
costs = st.floats(1e-6, 1.0)


@dataclass
class World:
    """What really happens: seconds to compute and to load each block, and the blocks that are not there."""

    computes: list[float]
    loads: list[float]
    gone: set[int] = field(default_factory=set)
    pass_s: float = 0.0
    order: list[range] = field(default_factory=list)
    sides: dict[int, str] = field(default_factory=dict)
    decisions: int = 0

    def run(self, plan: LoadSplit) -> float:
        """Drive the plan to its end, as a shell does; when that is, in virtual seconds."""
        self.now, self.events, self.way_free, self.computing = 0.0, [], 0.0, None
        self.loading: list[tuple[range, float]] = []
        while not plan.is_over:
            self.decide(plan)
            plan.check()
            wake = self.now + plan.wait_s(self.now)
            ends = [event[0] for event in self.events[:1]]
            assert ends or self.loading, "nobody has anything to do"
            until = min(ends + ([wake] if self.loading and self.computing is None else []))
            self.now = max(until, np.nextafter(self.now, NEVER))
            while self.events and self.events[0][0] <= self.now:
                self.end(plan, *heapq.heappop(self.events)[1:])
            assert self.decisions < 400 + 60 * len(self.loads), "the plan does not come to an end"
        return self.now

    def decide(self, plan: LoadSplit) -> None:
        self.decisions += 1
        while (blocks := plan.next_load(self.now)) is not None:
            self.way_free = max(self.way_free, self.now) + sum(self.loads[block] for block in blocks)
            self.loading.append((blocks, self.way_free))
            heapq.heappush(self.events, (self.way_free, 1, "load", blocks))
        if self.computing is None:
            if (given_up := plan.recall(self.now)) is not None:
                assert self.loading.pop()[0] == given_up
                self.events = [event for event in self.events if event[3] != given_up]
                heapq.heapify(self.events)
                self.way_free = self.loading[-1][1] if self.loading else self.now
                plan.returned(self.now)
            if (blocks := plan.next_compute(self.now)) is not None:
                assert all(block in self.sides for block in range(blocks.start)), "computed before what it needs"
                self.computing = blocks
                self.order.append(blocks)
                seconds = self.pass_s + sum(self.computes[block] for block in blocks)
                heapq.heappush(self.events, (self.now + seconds, 0, "compute", blocks))

    def end(self, plan: LoadSplit, _: int, what: str, blocks: range) -> None:
        if what == "compute":
            self.computing = None
            plan.computed(self.now)
        else:
            assert self.loading.pop(0)[0] == blocks
            plan.loaded(self.now, self.gone & set(blocks))
        for block in blocks:
            if what == "compute" or block not in self.gone:
                assert block not in self.sides, "there twice"
                self.sides[block] = what


@st.composite
def prefixes(draw: st.DrawFn, least: int = 0) -> dict[str, Any]:
    """Costs of a prefix and the sizes of steps."""
    n = draw(st.integers(least, 40))
    rate = PrefillCost(draw(costs), draw(st.floats(0, 0.01)))
    computes = rate.seconds(4 * np.arange(n), 4)
    by_tier = [draw(costs), draw(costs)]
    tiers = np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.uint8)
    loads = np.array([by_tier[tier] for tier in tiers], np.float64)
    steps = {name: draw(st.integers(1, 8)) for name in ("compute_blocks", "load_blocks")}
    return {
        "computes": computes,
        "loads": loads,
        "tiers": tiers,
        "pass_s": draw(st.sampled_from([0.0, 1e-4, 0.03, 1.0])),
        "steps": {**steps, "loads_at_once": draw(st.integers(1, 3))},
    }


def plan_of(prefix: dict[str, Any], scale_computes: float = 1.0, scale_loads: float = 1.0) -> LoadSplit:
    """A plan that was told costs so many times the true ones."""
    computes, loads = prefix["computes"] * scale_computes, prefix["loads"] * scale_loads
    return LoadSplit(computes, loads, prefix["tiers"], pass_s=prefix["pass_s"] * scale_computes, **prefix["steps"])


def world_of(prefix: dict[str, Any], **options: Any) -> World:
    """A world in which these costs are true."""
    return World(prefix["computes"].tolist(), prefix["loads"].tolist(), pass_s=prefix["pass_s"], **options)


@settings(deadline=None)
@given(prefixes())
def test_with_true_costs_a_split_ends_when_the_best_one_does(prefix: dict[str, Any]) -> None:
    """Goal: never later than loading all or computing all, and as early as any split. Method: run plans whose costs are
    true against the best single place to meet; the steps' sizes change nothing."""
    world = world_of(prefix)
    took = world.run(plan_of(prefix))
    blocks = np.arange(len(prefix["loads"]) + 1)
    passes = prefix["pass_s"] * -(-blocks // prefix["steps"]["compute_blocks"])
    best = best_split(np.append(0.0, np.cumsum(prefix["computes"])) + passes, prefix["loads"])
    assert took <= min(best.computed_s, best.loaded_s) * (1 + 1e-6) + 1e-9
    assert took == pytest.approx(best.seconds, rel=1e-6, abs=1e-8)


@settings(deadline=None)
@given(prefixes(), st.floats(0.05, 20), st.floats(0.05, 20), st.data())
def test_every_block_is_covered_once_whatever_is_told_and_missing(
    prefix: dict[str, Any], wrong_computes: float, wrong_loads: float, data: st.DataObject
) -> None:
    """Goal: a whole prefix comes out, each block by one side, and the engine always has what is before a span. Method:
    costs told wrongly by factors, any blocks missing; the world asserts order and that nothing is there twice."""
    n = len(prefix["loads"])
    gone = data.draw(st.sets(st.integers(0, max(0, n - 1)), max_size=n) if n else st.just(set()))
    world = world_of(prefix, gone=gone)
    plan = plan_of(prefix, wrong_computes, wrong_loads)
    world.run(plan)
    assert set(world.sides) == set(range(n))
    assert plan.computed_blocks + plan.loaded_blocks == n
    assert all(world.sides[block] == "compute" for block in gone)
    assert all(len(blocks) <= prefix["steps"]["compute_blocks"] for blocks in world.order)


@settings(deadline=None)
@given(prefixes(least=1), st.integers(0, 39))
def test_loads_that_never_end_cost_a_bounded_wait(prefix: dict[str, Any], hangs_below: int) -> None:
    """Goal: a store that stalls does not stall the engine. Method: loads of the blocks below one never end; the whole
    takes no longer than computing all of it, what the stalled loads were thought to take, and the wait until they
    count as late (twice as long)."""
    loads = prefix["loads"].copy()
    loads[: hangs_below + 1] = NEVER
    world = world_of(prefix)
    world.loads = loads.tolist()
    took = world.run(plan_of(prefix))
    in_flight = prefix["steps"]["load_blocks"] * prefix["steps"]["loads_at_once"]
    passes = prefix["pass_s"] * len(loads)
    computed, step = float(prefix["computes"].sum()) + passes, float(prefix["loads"].max()) * in_flight
    late = float(prefix["computes"].max()) * in_flight + passes
    looks = 0.002 * prefix["steps"]["loads_at_once"]  # not more often than once a millisecond
    assert took <= 3 * computed + 6 * (step + late) + looks
    assert set(world.sides) == set(range(len(loads)))


def test_the_meeting_place_moves_when_a_side_is_slower_than_told() -> None:
    """Goal: costs are learned on the way. Method: 200 blocks told as equally fast on both sides; where loads take four
    times as long, and where computing does, the sides meet near where the truth says: 80 % and 20 %."""
    equal = np.full(200, 0.01)
    for computes, loads, meets in ((1.0, 4.0, 160), (4.0, 1.0, 40), (1.0, 1.0, 100)):
        world = World((equal * computes).tolist(), (equal * loads).tolist())
        plan = LoadSplit(equal, equal, compute_blocks=4, load_blocks=4)
        took = world.run(plan)
        assert abs(plan.computed_blocks - meets) <= 6, (computes, loads)
        assert took <= 0.01 * max(computes * meets, loads * (200 - meets)) + 0.01 * 8 * max(computes, loads)


def test_a_pass_that_costs_much_is_not_made_for_a_few_blocks() -> None:
    """Goal: near the loads an engine does not run its whole model for little. Method: 40 blocks that load in 1 ms each,
    of which computing takes 2 ms each and 45 ms a pass: all are loaded, in 40 ms; told without the pass, some are
    computed, and it is over later."""
    computes, loads = np.full(40, 2e-3), np.full(40, 1e-3)
    told, untold = (LoadSplit(computes, loads, pass_s=pass_s, load_blocks=2) for pass_s in (45e-3, 0.0))
    world, other = (World(computes.tolist(), loads.tolist(), pass_s=45e-3) for _ in range(2))
    assert world.run(told) == pytest.approx(40e-3) and told.computed_blocks == 0
    assert other.run(untold) > 45e-3 and untold.computed_blocks > 4
    assert untold.compute_scales[1] > 1.5 and told.compute_scales == (1.0, 1.0)


def test_tiers_are_learned_apart() -> None:
    """Goal: a slow disk does not make memory look slow. Method: blocks of two tiers in turn, one as told, one ten times
    as slow; the scale of each is near the truth at the end."""
    n = 120
    tiers = np.array([1 + (block // 4) % 2 for block in range(n)], np.uint8)
    told = np.full(n, 0.001)
    world = World([0.05] * n, np.where(tiers == 2, 0.01, 0.001).tolist())
    plan = LoadSplit(np.full(n, 0.05), told, tiers, load_blocks=4, compute_blocks=2)
    world.run(plan)
    assert plan.load_scale(1) == pytest.approx(1.0, rel=0.05)
    assert plan.load_scale(2) == pytest.approx(10.0, rel=0.05)
    assert plan.load_scale(7) == 1.0


def test_loads_go_on_below_a_tail_that_was_evicted() -> None:
    """Goal: a chain that lost its tail is not computed as a whole. Method: the last 20 of 64 blocks are gone, loads of
    two blocks are fast; the 20 are computed at the end, in order, and nearly nothing else."""
    world = World([1.0] * 64, [0.001] * 64, set(range(44, 64)))
    plan = LoadSplit(np.full(64, 1.0), np.full(64, 0.001), load_blocks=2, loads_at_once=2)
    world.run(plan)
    assert world.order == [range(44, 60), range(60, 64)]


def test_after_the_last_load_the_rest_is_computed() -> None:
    """Goal: a dead node is not asked once a step. Method: stop with two loads in flight, of which one comes."""
    plan = LoadSplit(np.full(64, 1.0), np.full(64, 0.01), load_blocks=2, loads_at_once=2)
    begun = [plan.next_load(0.0), plan.next_load(0.0)]
    assert begun == [range(62, 64), range(60, 62)]
    plan.loaded(0.01, range(62, 64))
    plan.stop_loading()
    plan.loaded(0.02)
    assert plan.next_load(0.02) is None
    spans, now = [], 1.0
    while (span := plan.next_compute(now)) is not None:
        now += 16
        plan.computed(now)
        spans.append(span)
    assert [block for span in spans for block in span] == [*range(60), 62, 63]
    assert plan.is_over and plan.loaded_blocks == 2


def test_a_stalled_load_is_called_back_and_its_blocks_are_computed() -> None:
    """Goal: the last blocks are not waited for when computing them is faster. Method: a load of 4 blocks that should
    take 4 ms lasts; it is called back once it is late by more than the blocks' computing takes, not before."""
    plan = LoadSplit(np.full(8, 1e-3), np.full(8, 1e-3), load_blocks=8)
    assert plan.next_load(0.0) == range(4, 8)
    assert plan.next_compute(0.0) == range(4)
    plan.computed(0.004)
    assert plan.next_compute(0.004) is None
    assert plan.recall(0.004) is None
    assert plan.wait_s(0.004) == pytest.approx(0.002)
    assert plan.recall(0.0079) is None
    assert plan.recall(0.0081) == range(4, 8)
    plan.returned(0.0081)
    plan.check()
    assert plan.next_load(0.0081) is None
    assert plan.next_compute(0.0081) == range(4, 8)
    assert plan.load_scale() > 1.5
    plan.computed(0.0121)
    assert plan.is_over
    assert (plan.computed_blocks, plan.loaded_blocks) == (8, 0)


@pytest.mark.parametrize(
    ("computes", "loads", "options", "says"),
    [
        ([1.0], [1.0, 1.0], {}, "one each a block"),
        ([1.0, float("nan")], [1.0, 1.0], {}, "compute times"),
        ([1.0, 1.0], [1.0, -1.0], {}, "load times"),
        ([1.0], [1.0], {"load_blocks": 0}, "at least 1"),
        ([1.0], [1.0], {"pass_s": -1.0}, "pass_s=-1"),
    ],
)
def test_costs_that_cannot_be_are_refused(computes: Any, loads: Any, options: Any, says: str) -> None:
    """Goal: a wrong call is named. Method: one case for each rule."""
    with pytest.raises(UsageError, match=says):
        LoadSplit(np.array(computes), np.array(loads), **options)
