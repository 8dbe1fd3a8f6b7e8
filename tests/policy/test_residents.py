"""A tier's book and every policy over it: chains stay closed, leaves are the policy's, memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.worlds import POLICIES, Cache
from ucxkv.policy import LearningPolicy, LruPolicy, Residents, S3FifoPolicy, TucPolicy

requests = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 200)), max_size=60)


def chain_of(branches: list[int]) -> list[int]:
    """Block numbers that name all before them: the path through a tree with three children a node."""
    found, at = [], 0
    for branch in branches:
        at = 4 * at + branch + 1
        found.append(at)
    return found


@pytest.mark.parametrize("name", POLICIES)
@given(requests=requests, capacity=st.integers(1, 12), drops=st.lists(st.integers(0, 59), max_size=4))
@settings(deadline=None, max_examples=60)
def test_chains_stay_closed_and_the_books_agree(
    name: str, requests: list[tuple[list[int], int]], capacity: int, drops: list[int]
) -> None:
    """Goal: whatever a policy picks, every prefix of what stays is there. Method: random requests of a tree, some
    leaves dropped on the way; after each the parents of all blocks, the size and the invariants."""
    cache = Cache(capacity, 6, POLICIES[name])
    now = 0
    for number, (branches, wait) in enumerate(requests):
        now += wait
        cache.request(chain_of(branches), now)
        if number in drops and len(cache.residents):
            slot = cache.residents.policy.leaves()[-1]
            cache.residents.drop(slot)
            cache.forget(slot)
        cache.residents.check()
        assert len(cache.residents) == len(cache.slots) <= capacity
        assert all((block - 1) // 4 in cache.slots for block in cache.slots if block > 4)


@pytest.mark.parametrize("name", POLICIES)
@given(requests=requests)
@settings(deadline=None, max_examples=15)
def test_the_same_calls_give_the_same_victims(name: str, requests: list[tuple[list[int], int]]) -> None:
    """Goal: no hidden clock and no chance. Method: the same requests twice, everything that is left compared."""
    left = []
    for _ in range(2):
        cache, now = Cache(5, 6, POLICIES[name]), 0
        for branches, wait in requests:
            now += wait
            cache.request(chain_of(branches), now)
        left.append((cache.slots, cache.residents.policy.leaves()))
    assert left[0] == left[1]


@given(requests=requests, capacity=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_lru_is_the_plain_model(requests: list[tuple[list[int], int]], capacity: int) -> None:
    """Goal: leaf-first LRU over a tree. Method: against a list of blocks by (last use, depth), scanned for the leaf
    used longest ago, the deepest first; times differ between requests, so there is one answer."""
    cache = Cache(capacity, 6, LruPolicy)
    used: dict[int, tuple[int, int]] = {}
    for now, (branches, _) in enumerate(requests, 1):
        chain = chain_of(branches)
        cache.request(chain, now)
        used.update({block: (now, -depth) for depth, block in enumerate(chain)})
        while len(used) > capacity:
            inner = {(block - 1) // 4 for block in used}
            del used[min((block for block in used if block not in inner), key=lambda block: used[block])]
        assert cache.slots.keys() == used.keys()


def test_a_held_block_is_never_evicted_and_is_a_leaf_again_after() -> None:
    """Goal: leases and children elsewhere keep blocks. Method: of two single blocks the older is held; the younger
    goes, then nothing can, then the released one does."""
    for make in POLICIES.values():
        residents = Residents(4, make)
        one, two = (
            int(residents.insert(-1, np.array([name], np.uint64), np.zeros(1, np.int64), name)[0]) for name in (1, 2)
        )
        residents.hold(one)
        assert residents.evict() == two
        assert residents.evict() == -1
        residents.release(one)
        residents.check()
        assert residents.evict() == one
        assert len(residents) == 0 and residents.free_count == 4


def test_which_policies_learn() -> None:
    """Goal: a policy that learns is recognised. Method: the protocol, against all three."""
    found = {name: isinstance(Residents(4, make).policy, LearningPolicy) for name, make in POLICIES.items()}
    assert found == {"lru": False, "s3fifo": True, "tuc": True}


@pytest.mark.parametrize("name", POLICIES)
def test_memory_stays_bounded_over_many_blocks(name: str) -> None:
    """Goal: ghosts and queues have a bound. Method: 4,000 requests, one in two a repetition of a hot chain; the sizes
    of everything that could grow, against the slots."""
    cache = Cache(40, 3, POLICIES[name])
    for number in range(4000):
        cache.request([1, 2, 3] if number % 2 else [10 * number + 11, 10 * number + 12], 30 * number)
    policy, slots = cache.residents.policy, cache.residents.slots_count
    if isinstance(policy, S3FifoPolicy):
        assert 0 < len(policy._ghosts) <= slots
    if isinstance(policy, TucPolicy):
        assert 0 < len(policy._ghosts) <= 2 * slots
        assert sum(map(len, policy._queues.values())) == policy._entries <= 2 * len(policy) + 1025
        assert len(policy._order) <= 1200
    cache.residents.check()
    assert 1 in cache.slots and 3 in cache.slots
