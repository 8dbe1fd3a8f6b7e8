"""The cost model and the decision log: formulas, estimates from measured times, and what follows from them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.policy.cost import (
    CostModel,
    LoadCost,
    LoadEstimate,
    PrefillCost,
    PrefillEstimate,
    Verdict,
    best_split,
)
from ucxkv.policy.decisions import Decision, DecisionLog

PREFILL = PrefillCost.of_model(parameters=8e9, layers=32, width=4096, flops=400e12)
TIERS = {"host": LoadCost(20e-6, 40e9), "nvme": LoadCost(150e-6, 2e9)}
MODEL = CostModel(PREFILL, 512, 64 << 20, TIERS)


def test_the_blocks_of_a_prompt_cost_what_the_prompt_costs() -> None:
    """Goal: the attention term is summed right. Method: 200 blocks against one prefill; the study's 8B figures."""
    each = PREFILL.seconds(512 * np.arange(200), 512)
    assert float(each.sum()) == pytest.approx(PREFILL.prompt_s(512 * 200))
    assert float(each[0]) == pytest.approx(20.7e-3, rel=0.01)
    assert float(PREFILL.seconds(120_000, 512)) == pytest.approx(101e-3, rel=0.02)


def test_loading_pays_from_some_position_on() -> None:
    """Goal: do not load what is computed faster. Method: 64 MiB from a disk of 2 GB/s take 34 ms, more than the first
    blocks of a prompt and less than later ones; gains are never below 0."""
    assert not MODEL.is_worth_loading(0, "nvme") and MODEL.is_worth_loading(60_000, "nvme")
    assert MODEL.is_worth_loading(0, "host")
    assert float(MODEL.gain_s(0, "nvme")) == 0.0
    over = float(MODEL.gain_s(60_000, "host", over="nvme"))
    assert over == pytest.approx(MODEL.load_s("nvme") - MODEL.load_s("host"))


@given(
    st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12), st.lists(st.floats(1e-3, 1.0), min_size=12, max_size=12)
)
def test_the_split_is_the_best_of_all(loads: list[float], costs: list[float]) -> None:
    """Goal: compute from the front, load from the back, meet best. Method: every place to meet, by hand; never slower
    than all of either."""
    computed = [0.0, *itertools.accumulate(costs[: len(loads)])]
    ways = [max(computed[at], sum(loads[at:])) for at in range(len(loads) + 1)]
    found = best_split(np.array(computed), np.array(loads))
    assert found.seconds == pytest.approx(min(ways))
    assert found.seconds <= min(found.computed_s, found.loaded_s) + 1e-12


def test_a_load_estimate_follows_the_tier_and_not_its_stalls() -> None:
    """Goal: a robust calibration. Method: loads of several sizes at 1 ms + 5 GB/s, one in six stalled for a second."""
    estimate, draw = LoadEstimate(LoadCost(0.0, 50e9)), random.Random(1)
    for number in range(64):
        nbytes = draw.choice([1, 2, 4, 8, 16]) << 20
        estimate.loaded(nbytes, 1e-3 + nbytes / 5e9 + (1.0 if number % 6 == 0 else 0.0))
    assert estimate.cost.bandwidth == pytest.approx(5e9, rel=0.1)
    assert estimate.cost.latency_s == pytest.approx(1e-3, rel=0.3)


def test_one_size_calibrates_the_bandwidth_alone_and_few_loads_nothing() -> None:
    """Goal: what cannot be told apart is not guessed. Method: 7 loads leave the prior, 16 of one size fit a rate."""
    prior = LoadCost(1e-4, 50e9)
    estimate = LoadEstimate(prior)
    for _ in range(7):
        estimate.loaded(1 << 20, 1e-3)
    assert estimate.cost == prior
    for _ in range(9):
        estimate.loaded(1 << 20, 1e-3)
    assert estimate.cost.latency_s == prior.latency_s
    assert estimate.cost.seconds(1 << 20) == pytest.approx(1e-3)


def test_a_prefill_estimate_finds_both_terms_of_the_engine() -> None:
    """Goal: cost by position from the engine's own prefills. Method: times of a twice slower model, one in eight
    disturbed; then prefills at one position only, which keep the ratio of the terms."""
    twice = PrefillCost(2 * PREFILL.per_token_s, 3 * PREFILL.per_token_position_s)
    estimate, draw = PrefillEstimate(PREFILL), random.Random(2)
    for number in range(64):
        place, tokens = draw.randrange(0, 100_000), draw.randrange(100, 4000)
        noise = 4.0 if number % 8 == 0 else 1.0
        estimate.computed(place, tokens, noise * float(twice.seconds(place, tokens)))
    assert estimate.cost.per_token_s == pytest.approx(twice.per_token_s, rel=0.1)
    assert estimate.cost.per_token_position_s == pytest.approx(twice.per_token_position_s, rel=0.1)
    flat = PrefillEstimate(PREFILL)
    for _ in range(16):
        flat.computed(0, 512, 5 * PREFILL.prompt_s(512))
    assert flat.cost.per_token_s == pytest.approx(5 * PREFILL.per_token_s)


def test_placing_follows_worth_and_price() -> None:
    """Goal: keep, promote, demote, drop. Method: a block's hazard against prices of a byte in two tiers."""
    gain = float(MODEL.gain_s(60_000, "host")) / MODEL.block_bytes
    below = float(MODEL.gain_s(60_000, "nvme")) / MODEL.block_bytes
    assert MODEL.place(1.0, 60_000, 0, [gain / 2, below / 2]).verdict is Verdict.KEEP
    assert MODEL.place(1.0, 60_000, 1, [0.0, 0.0]).verdict is Verdict.PROMOTE
    assert MODEL.place(1.0, 60_000, 1, [0.0, 0.0], move_s=10.0).verdict is Verdict.KEEP
    assert MODEL.place(1.0, 60_000, 0, [2 * gain, below / 2]).verdict is Verdict.DEMOTE
    assert MODEL.place(1.0, 60_000, 0, [2 * gain, 2 * below]).verdict is Verdict.DROP
    assert MODEL.place(0.0, 60_000, 0, [0.0, 0.0]).verdict is Verdict.DROP
    assert MODEL.place(1.0, 0, 1, [2 * gain, 0.0]).tier == -1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PrefillCost(0.0),
        lambda: LoadCost(-1.0, 1.0),
        lambda: LoadCost(0.0, 0.0),
        lambda: CostModel(PREFILL, 0, 1),
        lambda: LoadEstimate(LoadCost(0.0, 1.0)).loaded(0, 1.0),
        lambda: LoadEstimate(LoadCost(0.0, 1.0)).loaded(1, float("nan")),
        lambda: PrefillEstimate(PREFILL).computed(0, 1, 0.0),
        lambda: DecisionLog(0),
    ],
)
def test_what_cannot_be_is_refused(wrong: object) -> None:
    """Goal: a clear error instead of a strange estimate. Method: each impossible value."""
    assert callable(wrong)
    with pytest.raises(UsageError):
        wrong()


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 20))
def test_the_log_answers_for_a_key_what_it_still_has(keys: list[int], capacity: int) -> None:
    """Goal: explain where a block is. Method: random decisions against a plain list of the last `capacity`."""
    log = DecisionLog(capacity)
    kept: list[Decision] = []
    for now, key in enumerate(keys):
        verdict = list(Verdict)[key % 4]
        kept.append(Decision(now, bytes([key]) * 16, verdict, "host", "nvme", 0.5, 0.25, "colder than its neighbours"))
        log.record(kept[-1])
    kept = kept[-capacity:]
    for key in range(6):
        assert log.of(bytes([key]) * 16) == [each for each in reversed(kept) if each.key[0] == key]
    assert len(log) == len(kept) and sum(log.counts.values()) == len(keys)
    if kept:
        assert "colder" in str(kept[-1]) and "host -> nvme" in str(kept[-1])
