"""Split loads in virtual time: real code on a simulated loop; store and engine take what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from tests.sim.loop import SimLoop
from tests.test_sequence import LAYOUT, DictStore, whole_cache
from ucxkv.client.results import GetResult, Match
from ucxkv.keys import Keys, as_key_array
from ucxkv.policy.cost import best_split
from ucxkv.sequence import Sequence

N = 120
TOKENS = list(range(4 * N))


class SlowStore(DictStore):
    """Loads one after the other, each as long as its blocks take; says that they take `told` times as long."""

    def __init__(self, load_s: float, told: float = 1.0, stall_at: int = -1, stall_s: float = 1e4) -> None:
        super().__init__()
        self.load_s, self.told, self.stall_at, self.stall_s = load_s, told, stall_at, stall_s
        self.way: asyncio.Lock | None = None

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        match = await super().match(keys)
        return Match(match.blocks, match.tiers, np.full(match.blocks, self.load_s * self.told))

    async def get_many(self, keys: Keys, into: object, **options: Any) -> GetResult:
        self.way = self.way or asyncio.Lock()
        async with self.way:
            self.stall_at -= 1
            await asyncio.sleep(self.stall_s if self.stall_at == 0 else self.load_s * len(as_key_array(keys)))
            return await super().get_many(keys, into, **options)


def in_virtual_time(call: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a simulated loop."""
    loop = SimLoop(seed=1)
    try:
        return loop.run_until_complete(loop.create_task(call))
    finally:
        loop.close()


async def split(
    store: SlowStore, block_s: float, *, told: float = 1.0, pass_s: float = 0.0, compute_blocks: int = 8
) -> tuple[float, int, float]:
    """Of a split whose engine needs `block_s` a block, told as `told` times that: virtual seconds, blocks computed, and
    how many times as long as told loads are thought to take in the end."""
    seq, source = Sequence(store, LAYOUT, TOKENS), whole_cache(LAYOUT, N, seed=1)
    await seq.save(source)
    into = whole_cache(LAYOUT, N)
    loop = asyncio.get_running_loop()
    began = loop.time()
    rate = LAYOUT.block_tokens / (block_s * told)
    options: dict[str, Any] = {"pass_s": pass_s, "compute_blocks": compute_blocks, "load_blocks": 4}
    async with seq.split(into, rate, **options) as running:
        async for blocks in running:
            await asyncio.sleep(pass_s + block_s * len(blocks))
            into[blocks.start : blocks.stop] = source[blocks.start : blocks.stop]
    assert (into == source).all() and running.blocks == N
    return loop.time() - began, running.computed_blocks, running._plan.load_scale(1)


@pytest.mark.parametrize("pass_s", [0.0, 0.02])
@pytest.mark.parametrize("times", [0.01, 0.25, 1.0, 4.0, 16.0, 1000.0])
def test_with_true_costs_it_is_over_when_the_best_split_is(times: float, pass_s: float) -> None:
    """Goal: the shell adds nothing to the plan's time. Method: an engine so many times as slow as a load of 1 ms; the
    virtual time against the best place to meet, which is no later than either side alone."""
    took, computed, _ = in_virtual_time(split(SlowStore(1e-3), 1e-3 * times, pass_s=pass_s))
    blocks = np.arange(N + 1)
    best = best_split(1e-3 * times * blocks + pass_s * -(-blocks // 8), np.full(N, 1e-3))
    assert took == pytest.approx(best.seconds, rel=1e-3)
    assert computed == pytest.approx(best.compute, abs=1)


@pytest.mark.parametrize("times", [0.25, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("told_loads", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("told_computes", [0.1, 1.0, 10.0])
def test_with_wrong_guesses_it_is_over_not_much_later(times: float, told_loads: float, told_computes: float) -> None:
    """Goal: what is learned on the way makes up for guesses that are ten times off. Method: each mixture of wrong
    guesses; later than the best split by three of the engine's spans and two loads at most."""
    took, _, _ = in_virtual_time(split(SlowStore(1e-3, told_loads), 1e-3 * times, told=told_computes, compute_blocks=2))
    best = best_split(1e-3 * times * np.arange(N + 1), np.full(N, 1e-3)).seconds
    assert took <= best + 3 * 2 * 1e-3 * times + 2 * 4 * 1e-3


@pytest.mark.parametrize("stall_at", [1, 2, 5])
def test_a_store_that_stalls_costs_what_a_late_load_may(stall_at: int) -> None:
    """Goal: a stalled disk costs no more than computing. Method: one load of many lasts hours; it is over as soon as
    all of the rest is computed, but for the wait until a load counts as late."""
    took, computed, _ = in_virtual_time(split(SlowStore(1e-3, stall_at=stall_at), 2e-3))
    assert computed == N - 4 * (stall_at - 1)
    assert took <= 2e-3 * computed + 0.03


def test_a_hiccup_of_the_disk_is_no_reason_to_compute_much() -> None:
    """Goal: an engine that computes 40 times as slowly as blocks load is not sent off by one slow read. Method: the
    first of many loads takes 0.2 s; it is over no later than twice that stall and the loads."""
    store = SlowStore(1e-3, stall_at=1, stall_s=0.2)
    took, computed, _ = in_virtual_time(split(store, 40e-3, pass_s=0.1))
    assert computed <= 6
    assert took <= 2 * 0.2 + N * 1e-3


class SharedStore(SlowStore):
    """Loads that are in flight at once share the way, and end at once."""

    free_s = 0.0

    async def get_many(self, keys: Keys, into: object, **options: Any) -> GetResult:
        loop = asyncio.get_running_loop()
        self.free_s = max(self.free_s, loop.time()) + self.load_s * len(as_key_array(keys))
        await asyncio.sleep(self.free_s - loop.time())
        if (left_s := self.free_s - loop.time()) > 1e-6:  # another one began meanwhile
            await asyncio.sleep(left_s)
        return await DictStore.get_many(self, keys, into, **options)


@pytest.mark.parametrize("times", [0.25, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("told", [0.25, 1.0, 4.0])
def test_loads_that_end_together_are_measured_as_one(times: float, told: float) -> None:
    """Goal: two loads that share a drive are not taken for one slow and one that took no time. Method: a store whose
    loads in flight end at once, told rightly and wrongly; what is thought of them in the end, and the end itself, later
    than the best split's by two spans and three loads at most."""
    took, _, scale = in_virtual_time(split(SharedStore(1e-3, told), 1e-3 * times, compute_blocks=2))
    best = best_split(1e-3 * times * np.arange(N + 1), np.full(N, 1e-3)).seconds
    assert took <= best + 2 * 2 * 1e-3 * times + 3 * 4 * 1e-3
    assert scale == pytest.approx(1 / told, rel=0.25)
