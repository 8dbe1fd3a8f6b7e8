"""S3-FIFO, leaf-first: where blocks go by their uses, and what is evicted first."""

from __future__ import annotations

import random

from tests.policy.worlds import Cache
from ucxkv.policy import S3FifoPolicy


def test_one_timers_leave_before_what_was_used_twice() -> None:
    """Goal: the small queue filters scans. Method: a chain used three times, then a scan three times the cache: it
    stays, and the scan's blocks went in the order they came."""
    cache = Cache(20, 2, S3FifoPolicy)
    for now in range(3):
        cache.request([1, 2], now)
    for number in range(60):
        cache.request([100 + number], 10 + number)
    assert {1, 2} <= cache.slots.keys()
    assert 159 in cache.slots and 100 not in cache.slots


def test_a_remembered_block_goes_to_main() -> None:
    """Goal: a second chance for what left small too early. Method: a block is scanned out, comes back while its name is
    remembered, and stays through the next scan; without ghosts it goes again."""
    for ghosts, stays in ((20, True), (0, False)):
        cache = Cache(20, 2, lambda links, ghosts=ghosts: S3FifoPolicy(links, ghosts))  # type: ignore[misc]
        cache.request([1], 0)
        for number in range(25):
            cache.request([100 + number], 1 + number)
        assert 1 not in cache.slots
        cache.request([1], 50)
        for number in range(30):
            cache.request([200 + number], 60 + number)
        assert (1 in cache.slots) is stays


def test_a_chain_is_eaten_from_its_tail() -> None:
    """Goal: leaf first. Method: one long chain fills the cache, then single blocks come; its tail goes, block by
    block."""
    cache = Cache(10, 10, S3FifoPolicy)
    cache.request(list(range(1, 11)), 0)
    for number in range(4):
        cache.request([100 + number], 1 + number)
        assert cache.slots.keys() >= set(range(1, 10 - number))
        assert 10 - number not in cache.slots


def test_what_is_above_a_block_of_main_is_in_main() -> None:
    """Goal: no block is held in small, where it could never go and would take the newcomers' room. Method: random paths
    of a tree through a small cache; after each request the queue of every block's parent."""
    cache, draw = Cache(12, 5, S3FifoPolicy), random.Random(4)
    policy = cache.residents.policy
    assert isinstance(policy, S3FifoPolicy)
    in_main = 0
    for now in range(400):
        at, chain = 0, []
        for _ in range(draw.randrange(1, 6)):
            at = 3 * at + draw.choice((1, 1, 2, 3))
            chain.append(at)
        cache.request(chain, now)
        for block, slot in cache.slots.items():
            if policy._home[slot] and block > 3:
                in_main += 1
                assert policy._home[cache.slots[(block - 1) // 3]]
        assert sum(policy._blocks) == len(cache.slots)
        assert policy._blocks[1] == sum(int(policy._home[slot]) for slot in cache.slots.values())
    assert in_main > 100
