"""Leaf-first LRU alone: the intrusive list against a sorted model."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.policy import LeafLinks, LruPolicy
from ucxkv.policy.lru import WALK

SLOTS = 50
operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "readmit", "remove", "touch", "pop"]), st.integers(0, SLOTS - 1), st.integers(0, 9)
    ),
    max_size=150,
)


def make(slots: int) -> tuple[LruPolicy, memoryview]:
    prev, nxt, last_use = (memoryview(np.zeros(slots, np.uint32)) for _ in range(3))
    return LruPolicy(LeafLinks(prev, nxt, last_use)), last_use


@given(operations)
@settings(deadline=None)
def test_it_is_exact_while_the_walk_is_long_enough(operations: list[tuple[str, int, int]]) -> None:
    """Goal: order by last use. Method: up to 50 leaves (the walk sees 64) against a list that is searched from its
    end.
    """
    assert SLOTS < WALK
    policy, last_use = make(SLOTS)
    model: list[int] = []  # oldest first
    clock = 10
    for name, slot, age in operations:
        clock += age % 2
        if name == "add" and slot not in model:
            last_use[slot] = clock
            policy.add(slot)
            model.append(slot)
        elif name == "readmit" and slot not in model:
            last_use[slot] = clock - age
            policy.readmit(slot)
            at = next((i for i, other in enumerate(model) if last_use[other] >= clock - age), len(model))
            model.insert(at, slot)
        elif name == "remove":
            policy.remove(slot)
            model = [other for other in model if other != slot]
        elif name == "touch" and slot in model:
            last_use[slot] = clock
            policy.touch([slot])
            model.remove(slot)
            model.append(slot)
        elif name == "pop":
            assert policy.pop() == (model.pop(0) if model else -1)
        assert policy.leaves() == model and len(policy) == len(model)


def test_the_walk_is_bounded_and_errs_to_the_young_side() -> None:
    """Goal: readmit costs at most two walks. Method: 1,000 leaves of rising age; one from the middle of them comes
    back.
    """
    policy, last_use = make(1001)
    for slot in range(1000):
        last_use[slot] = slot
        policy.add(slot)
    last_use[1000] = 500
    policy.readmit(1000)
    assert policy.leaves().index(1000) == 999 - WALK
    policy.remove(1000)
    for exact in (5, 990):
        last_use[1000] = exact
        policy.readmit(1000)
        assert policy.leaves().index(1000) == exact
        policy.remove(1000)
