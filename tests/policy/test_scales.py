"""Costs of several parts, learned from wholes: what is told apart, bounds, and a stall."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.policy.scales import Scales

factors = st.floats(0.2, 5)


@settings(deadline=None)
@given(st.lists(factors, min_size=1, max_size=4), st.integers(0, 1000), st.sampled_from([0.2, 0.6]))
def test_parts_are_told_apart_when_mixtures_differ(truth: list[float], seed: int, gain: float) -> None:
    """Goal: each part's scale is found. Method: costs of random parts, so many times as long as told; in the end each
    scale is within 10 % of the truth."""
    rng, scales = np.random.default_rng(seed), Scales(len(truth), gain=gain, clip=4.0)
    for _ in range(800):
        told = rng.exponential(size=len(truth)) ** 2 + 1e-6
        scales.observe(told.tolist(), float(told @ np.array(truth)))
    assert scales.values == pytest.approx(truth, rel=0.1)


@settings(deadline=None)
@given(st.floats(0.001, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=4).filter(any))
def test_with_one_mixture_the_whole_is_learned(factor: float, told: list[float]) -> None:
    """Goal: what is always asked for is right, though its parts cannot be told apart. Method: one cost again and again;
    parts of nothing keep their scale."""
    told = [part if part > 1e-3 else 0.0 for part in told]
    if not any(told):
        return
    scales = Scales(len(told), gain=0.2, clip=4.0)
    for _ in range(80):
        scales.observe(told, factor * sum(told))
    assert scales.seconds(told) == pytest.approx(factor * sum(told), rel=0.02)
    assert all(scale == 1.0 for scale, part in zip(scales.values, told, strict=True) if not part)


parts = st.lists(st.floats(1e-12, 1e12), min_size=3, max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(parts, st.floats(1e-12, 1e12)), max_size=60))
def test_whatever_is_measured_scales_stay_in_bounds(measured: list[tuple[list[float], float]]) -> None:
    """Goal: no measurement makes a cost zero, negative, infinite or absurd. Method: any costs, any times."""
    scales = Scales(3, gain=0.6, clip=16.0, most=100.0)
    for told, seconds in measured:
        scales.observe(told, seconds)
        assert all(0.01 <= scale <= 100.0 for scale in scales.values)


def test_a_stall_moves_little_and_is_forgotten() -> None:
    """Goal: one slow call is no slow node. Method: one that lasts a thousand times as long counts as four times, at a
    fifth in logarithms; after twenty more it is nearly gone."""
    scales = Scales(1, gain=0.2, clip=4.0)
    scales.observe([1.0], 1000.0)
    assert scales.values[0] == pytest.approx(4**0.2)
    for _ in range(20):
        scales.observe([1.0], 1.0)
    assert scales.values[0] == pytest.approx(1.0, rel=0.01)
