"""What loads cost, learned from measured ones: convergence, bounds, and what a match is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.client.loadcosts import ARRIVE, BRING, LoadCosts, LoadMeter
from ucxkv.client.results import PathKind
from ucxkv.errors import UsageError
from ucxkv.policy.cost import LoadCost

GUESS = LoadCost(10e-6, 2e9)
KIB = 1024


@settings(deadline=None)
@given(st.floats(0.2, 5), st.floats(0.2, 5), st.integers(0, 1000))
def test_the_fit_finds_latency_and_bandwidth_when_sizes_differ(slower: float, later: float, seed: int) -> None:
    """Goal: both terms are learned. Method: loads of mixed sizes and counts whose costs are the first guess's times
    two factors of up to 5; in the end any load of those sizes is predicted within 10 %."""
    rng = np.random.default_rng(seed)
    meter = LoadMeter(GUESS)

    def true_s(blocks: int, nbytes: int) -> float:
        return blocks * GUESS.latency_s * later + nbytes / GUESS.bandwidth * slower

    for _ in range(400):
        blocks, size = int(rng.integers(1, 64)), int(rng.choice([4 * KIB, 64 * KIB, 1024 * KIB]))
        meter.observe(blocks, blocks * size, true_s(blocks, blocks * size))
    for size in (4 * KIB, 64 * KIB, 1024 * KIB):
        found = meter.cost.latency_s + size / meter.cost.bandwidth
        assert found == pytest.approx(true_s(1, size), rel=0.1)


@settings(deadline=None)
@given(st.floats(0.001, 1000), st.integers(1, 256), st.sampled_from([0, 1, 4 * KIB, 64 * KIB, 4096 * KIB]))
def test_with_one_size_only_that_size_is_learned(factor: float, blocks: int, size: int) -> None:
    """Goal: an engine has blocks of one size; its loads are predicted all the same. Method: 60 equal loads, so many
    times as long as guessed."""
    meter = LoadMeter(GUESS)
    seconds = factor * (blocks * GUESS.latency_s + blocks * size / GUESS.bandwidth)
    for _ in range(60):
        meter.observe(blocks, blocks * size, seconds)
    found = blocks * (meter.cost.latency_s + size / meter.cost.bandwidth)
    assert found == pytest.approx(seconds, rel=0.02)


loads = st.tuples(st.integers(1, 2**20), st.integers(0, 2**40), st.floats(1e-9, 1e6))


@settings(deadline=None)
@given(st.lists(loads, max_size=60))
def test_whatever_is_measured_an_estimate_stays_in_bounds(measured: list[tuple[int, int, float]]) -> None:
    """Goal: no measurement makes an estimate zero, negative, infinite or absurd. Method: any loads; after each, both
    terms are within 10,000 times the guess."""
    meter = LoadMeter(GUESS)
    for load in measured:
        meter.observe(*load)
        assert GUESS.latency_s / 1.01e4 <= meter.cost.latency_s <= GUESS.latency_s * 1.01e4
        assert GUESS.bandwidth / 1.01e4 <= meter.cost.bandwidth <= GUESS.bandwidth * 1.01e4
    assert meter.count == len(measured)


def test_a_stall_moves_an_estimate_little_and_is_forgotten() -> None:
    """Goal: one slow read is no slow node. Method: 30 equal loads, one that takes a thousand times as long, 30 more:
    the estimate rises by less than half and is back within 5 %."""
    meter = LoadMeter(GUESS)
    usual = 16 * GUESS.seconds(64 * KIB)
    for _ in range(30):
        meter.observe(16, 16 * 64 * KIB, usual)
    meter.observe(16, 16 * 64 * KIB, 1000 * usual)
    assert usual < 16 * meter.cost.seconds(64 * KIB) < 1.5 * usual
    for _ in range(30):
        meter.observe(16, 16 * 64 * KIB, usual)
    assert 16 * meter.cost.seconds(64 * KIB) == pytest.approx(usual, rel=0.05)


def test_nodes_paths_and_tiers_are_learned_apart() -> None:
    """Goal: a slow disk or a far node does not make others look slow. Method: guesses first; then measured loads of one
    node's way and of another's disk; what was not measured stays as guessed."""
    costs, sizes = LoadCosts(), np.full(3, 64 * KIB, np.float64)
    tiers = np.array([0, 1, 2], np.uint8)
    arrive = ARRIVE[PathKind.MAPPED].seconds(64 * KIB)
    guessed = costs.load_s("a", PathKind.MAPPED, sizes, tiers)
    assert guessed == pytest.approx([arrive + BRING[0].seconds(64 * KIB), arrive, arrive + BRING[2].seconds(64 * KIB)])
    for at in range(60):
        costs.arrived("a", PathKind.MAPPED, 16, 16 * 64 * KIB, at, at + 16 * 1e-3)
        costs.brought("b", 2, 16, 16 * 64 * KIB, at, at + 16 * 5e-3)
        costs.brought("b", 1, 16, 16 * 64 * KIB, at, at + 1.0)  # host memory is brought from nowhere
        costs.arrived("a", PathKind.RMA, 16, 16 * 64 * KIB, at, at)  # a clock that stood still
    assert costs.load_s("a", PathKind.MAPPED, sizes, tiers)[1] == pytest.approx(1e-3, rel=0.02)
    assert costs.load_s("b", PathKind.MAPPED, sizes, tiers) == pytest.approx(
        [guessed[0], guessed[1], guessed[1] + 5e-3], rel=0.02
    )
    assert costs.load_s("c", PathKind.MAPPED, sizes, tiers) == pytest.approx(guessed)
    assert costs.cost("a", PathKind.RMA) == ARRIVE[PathKind.RMA]


@pytest.mark.parametrize("at_once", [1, 2, 5, 20])
def test_loads_that_overlap_are_measured_together(at_once: int) -> None:
    """Goal: reads side by side are not each taken for as slow as all of them. Method: so many at once, of which each
    takes as long as all, again and again, with a pause and without; a block is found to take its share of the time."""
    for pause_s in (0.0, 0.5):
        costs, now_s = LoadCosts(), 0.0
        for _ in range(2000):
            took_s = at_once * 16 * 1e-3
            for i in range(at_once):
                costs.arrived("a", PathKind.MESSAGE, 16, 16 * 64 * KIB, now_s, now_s + took_s + i * 1e-6)
            now_s += took_s + pause_s
        assert costs.cost("a", PathKind.MESSAGE).seconds(64 * KIB) == pytest.approx(1e-3, rel=0.25)


def test_a_read_from_disk_is_laid_to_the_disk_but_for_what_memory_takes() -> None:
    """Goal: the disk is not charged twice for the way from memory. Method: reads from memory of 1 ms a block, then from
    disk of 4 ms; a load from disk is 4 ms, of it 3 of the disk. One that is faster than memory leaves it a tenth."""
    costs, sizes = LoadCosts(), np.full(1, 64 * KIB, np.float64)
    for at in range(60):
        costs.arrived("a", PathKind.MAPPED, 16, 16 * 64 * KIB, at, at + 16 * 1e-3)
        costs.came_cold("a", PathKind.MAPPED, 16, 16 * 64 * KIB, at + 0.5, at + 0.5 + 16 * 4e-3)
    assert costs.cost("a", 2).seconds(64 * KIB) == pytest.approx(3e-3, rel=0.05)
    assert costs.load_s("a", PathKind.MAPPED, sizes, np.array([2], np.uint8)) == pytest.approx([4e-3], rel=0.05)
    for at in range(100, 160):
        costs.came_cold("a", PathKind.MAPPED, 16, 16 * 64 * KIB, at, at + 16 * 0.5e-3)
    assert costs.cost("a", 2).seconds(64 * KIB) == pytest.approx(0.05e-3, rel=0.1)


def test_large_reads_are_always_measured_and_small_ones_now_and_then() -> None:
    """Goal: small reads pay nothing. Method: count what is due of 80 reads of one block and of 10 of 64."""
    costs = LoadCosts()
    assert sum(costs.is_due(1) for _ in range(80)) == 10
    assert all(costs.is_due(64) for _ in range(10))


@pytest.mark.parametrize("load", [(0, 1, 1.0), (1, -1, 1.0), (1, 1, 0.0), (1, 1, float("inf")), (1, 1, float("nan"))])
def test_loads_that_cannot_be_are_refused(load: tuple[int, int, float]) -> None:
    """Goal: a wrong call is named. Method: one case for each."""
    with pytest.raises(UsageError, match="no such load"):
        LoadMeter(GUESS).observe(*load)
