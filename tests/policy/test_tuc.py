"""Token-unit cost: what it learns, what it evicts, and that it beats LRU where there is something to learn."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from tests.policy.worlds import Cache, flat, steep
from ucxkv.policy import LruPolicy, S3FifoPolicy, TucPolicy
from ucxkv.policy.ghosts import Ghosts
from ucxkv.policy.hazard import BUCKETS, HazardTable, bucket_of


def scans_and_friends(requests: int) -> list[tuple[list[int], int]]:
    """(chain, time): 30 chains that come back again and again, and twice as many that never do."""
    draw = random.Random(7)
    fresh = iter(range(1_000, 10**9))
    found = []
    for number in range(requests):
        friend = 10 * draw.randrange(30) + 1
        chain = [friend, friend + 1] if number % 3 == 0 else [next(fresh), next(fresh)]
        found.append((chain, 50 * number))
    return found


def hits(cache: Cache, trace: list[tuple[list[int], int]]) -> int:
    """Blocks hit in all."""
    return sum(cache.request(chain, now) for chain, now in trace)


def test_tuc_beats_lru_where_most_blocks_never_come_back() -> None:
    """Goal: the hazard by class keeps what has been used before. Method: 30 recurring chains of two blocks among scans,
    room for them and half as many more; hits of tuc, S3-FIFO and LRU, of 4,000 that are possible."""
    trace = scans_and_friends(6000)
    found = {
        "lru": hits(Cache(90, 2, LruPolicy), trace),
        "s3fifo": hits(Cache(90, 2, S3FifoPolicy), trace),
        "tuc": hits(Cache(90, 2, lambda links: TucPolicy(links, flat)), trace),
    }
    assert found["lru"] < 1_800
    assert found["tuc"] > 2_800
    assert found["s3fifo"] > 2 * found["lru"]


def test_the_costlier_of_two_equal_blocks_stays() -> None:
    """Goal: worth is hazard times gain. Method: two leaves of one class and one age, at the start and deep in a prompt:
    the first goes under a steep cost, whichever was put first."""
    for places in ((0, 100_000), (100_000, 0)):
        cache = Cache(8, 2, lambda links: TucPolicy(links, steep))
        for name, place in enumerate(places, 1):
            cache.residents.insert(-1, np.array([name], np.uint64), np.array([place], np.int64), 100)
        policy = cache.residents.policy
        assert isinstance(policy, TucPolicy)
        policy.tick(5000)
        shallow = places.index(0)
        assert policy.worth(shallow and 1) < policy.worth(1 - shallow)
        assert cache.residents.evict() == shallow
        assert policy.water == pytest.approx(float(steep(np.zeros(1, np.int64))[0]) / (1 + 49), rel=0.5)


def test_a_block_that_is_not_worth_loading_goes_first() -> None:
    """Goal: do not keep what is computed faster than loaded. Method: a gain of 0 below position 1,000; the freshest
    block has it and goes before two old ones; after `reprice` the order is by age."""
    cache = Cache(8, 2, lambda links: TucPolicy(links, lambda places: np.where(places < 1000, 0.0, 1.0)))
    policy = cache.residents.policy
    assert isinstance(policy, TucPolicy)
    for name, (place, now) in enumerate(((2000, 100), (3000, 200), (0, 300)), 1):
        cache.residents.insert(-1, np.array([name], np.uint64), np.array([place], np.int64), now)
    policy.tick(400)
    assert policy.leaves() == [2, 0, 1]
    policy.reprice(flat)
    cache.residents.check()
    assert [cache.residents.evict() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("gain", [flat, steep])
def test_what_goes_is_what_a_search_of_all_leaves_finds(gain: object) -> None:
    """Goal: queues, heap and shortcut pick as a full search would, within the rounding of gains and of the refresh.
    Method: a random workload with lessons; each victim's worth against the least of all leaves at that moment."""
    cache = Cache(80, 12, lambda links: TucPolicy(links, flat if gain is flat else steep))
    policy, draw, now, worse, seen = cache.residents.policy, random.Random(3), 0, 0, 0
    assert isinstance(policy, TucPolicy)
    for _ in range(1500):
        now += draw.randrange(1, 300)
        root = 100 * draw.randrange(40)
        stem = [root + at for at in range(draw.randrange(1, 5))]
        cache.request([*stem, *[root + 50 + 10 * len(stem) + at for at in range(draw.randrange(3))]], now)
        policy.tick(now)
        least = min(map(policy.worth, policy.leaves()))
        slot = cache.residents.evict()
        cache.forget(slot)
        seen += 1
        worse += policy.water > 1.1 * least + 1e-12
    assert policy.hazard.lessons > 2
    assert worse <= 0.02 * seen


def test_hazard_counts_waits_that_still_last() -> None:
    """Goal: uses per second, by class and age, the waiting included. Method: class 0 comes back after 2 s one time in
    ten, class 1 always; the rates of that bucket, and that none rises with age."""
    table, now = HazardTable(2), 0
    for _ in range(40):
        now += 1000
        table.waited(np.full(100, 200), np.zeros(100, np.uint8), now)
        table.waited(np.full(100, 200), np.ones(100, np.uint8), now)
        table.waited(np.full(900, 400), np.zeros(900, np.uint8), now, is_use=False)
        table.learn(np.full(50, 300), np.zeros(50, np.uint8), now)
    rare, sure = table.rates
    at = bucket_of(200)
    assert sure[at] > 5 * rare[at] > 0
    for rates in table.rates:
        assert all(a >= b for a, b in pairwise(rates))


def test_buckets_cover_all_ages() -> None:
    """Goal: ages from 0 to a year have a bucket, rising. Method: the ends and a walk of doubling ages."""
    found = [bucket_of(age) for age in (0, 99, 100, *[100 << n for n in range(25)])]
    assert found[0] == 0 and found == sorted(found) and found[-1] == BUCKETS - 1


def test_the_ring_of_ghosts_forgets_the_oldest_and_each_once() -> None:
    """Goal: a bounded memory of the evicted. Method: five into a ring of three, one of them twice, then taken back."""
    ghosts = Ghosts(3)
    told = [ghosts.put(name, 10 * name, 1, 0, name) for name in (1, 2, 3, 1, 4)]
    assert told == [None, None, None, (10, 1), (20, 2)]
    assert len(ghosts) == 3
    hits, _, waits, kinds = ghosts.take(np.array([1, 2, 4], np.uint64), 100)
    assert waits.tolist() == [90, -1, 60] and kinds.tolist() == [1, 0, 4] and hits.tolist() == [2, 0, 2]
    assert len(ghosts) == 1
    assert ghosts.waiting(1)[0].tolist() == [30]
    assert Ghosts(0).put(1, 5, 0, 0, 2) == (5, 2)


def test_leaves_of_a_new_cost_model_each_go_once_and_the_cheapest_first() -> None:
    """Goal: `reprice` rebuilds nothing at once and loses nothing. Method: 200 leaves of one age, repriced to the
    opposite order, some used meanwhile; all go, each once, and of those not used again the worth never falls by more
    than a queue's rounding (1/8 octave)."""
    cache = Cache(200, 2, lambda links: TucPolicy(links, lambda places: 1.0 + places))
    policy, residents = cache.residents.policy, cache.residents
    assert isinstance(policy, TucPolicy)
    for name in range(200):
        residents.insert(-1, np.array([name], np.uint64), np.array([name], np.int64), 100)
    policy.reprice(lambda places: 201.0 - places)
    residents.use(np.array([3, 50], np.int64), 900)
    policy.tick(1000)
    gone = []
    while (slot := policy.pop()) >= 0:
        gone.append((slot, policy.water))
        residents.hold(slot)
    assert sorted(slot for slot, _ in gone) == list(range(200))
    rest = [worth for slot, worth in gone if slot not in (3, 50)]
    assert all(after > before / 2**0.13 for before, after in pairwise(rest))


def test_a_use_costs_no_entry() -> None:
    """Goal: bounded queues. Method: 50 leaves that are used 10,000 times over; few entries, and the order is right."""
    cache = Cache(50, 2, lambda links: TucPolicy(links, flat))
    policy = cache.residents.policy
    assert isinstance(policy, TucPolicy)
    for name in range(50):
        cache.residents.insert(-1, np.array([name], np.uint64), np.array([0], np.int64), 100)
    for now in range(200, 40_200, 4):
        cache.residents.use(np.array([now // 4 % 50], np.int64), now)
    assert policy._entries <= 50 * 3
    oldest = min(range(50), key=lambda slot: int(cache.residents.last_use[slot]))
    policy.tick(41_000)
    assert policy.worth(policy.pop()) == policy.worth(oldest)
    assert policy._entries <= 50 * 3


def test_uses_one_by_one_teach_what_they_teach_together() -> None:
    """Method: 64 blocks, some with children; rounds of uses of some of them, in one call and in many: the same classes,
    and the same rates after the same lesson."""
    draw, taught = np.random.default_rng(3), []
    rounds = [np.sort(draw.choice(64, 24, replace=False)).astype(np.int64) for _ in range(100)]
    for size in (1, 64):
        cache = Cache(64, 2, lambda links: TucPolicy(links, flat))
        policy = cache.residents.policy
        assert isinstance(policy, TucPolicy)
        for name in range(64):
            above = name // 4 if name >= 40 else -1
            cache.residents.insert(above, np.array([name], np.uint64), np.array([0], np.int64), 100)
        for number, some in enumerate(rounds):
            policy.tick(200 + 90 * number)
            for at in range(0, len(some), size):
                policy.reuse(some[at : at + size])
        policy.hazard.learn(np.full(64, 500), policy._classes[:64], policy.now)
        taught.append((policy._classes.tolist(), policy._hits.tolist(), policy.hazard.rates))
    assert taught[0] == taught[1] and len(set(taught[0][0])) > 2


def test_young_blocks_go_last_and_in_order() -> None:
    """Goal: the end of a chain that is being written stays. Method: cheap blocks used just now against dear old ones;
    when only young ones are left, the oldest goes first and the price is that of what was not young."""
    cache = Cache(8, 2, lambda links: TucPolicy(links, lambda places: 1.0 + places, young_ticks=200))
    policy, residents = cache.residents.policy, cache.residents
    assert isinstance(policy, TucPolicy)
    for name, (place, now) in enumerate(((9000, 0), (0, 950), (500, 900), (100, 980))):
        residents.insert(-1, np.array([name], np.uint64), np.array([place], np.int64), now)
    policy.tick(1000)
    assert [residents.evict() for _ in range(4)] == [0, 2, 1, 3]
    assert 0 < policy.price < float("inf")


def test_what_is_put_back_is_not_the_next_victim_for_it() -> None:
    """Method: three leaves are popped and put back; they are popped in the same order again."""
    cache = Cache(8, 2, lambda links: TucPolicy(links, flat))
    policy = cache.residents.policy
    assert isinstance(policy, TucPolicy)
    for name in range(3):
        cache.residents.insert(-1, np.array([name], np.uint64), np.array([0], np.int64), 100 * name)
    policy.tick(5000)
    for _ in range(2):
        popped = [policy.pop() for _ in range(3)]
        assert popped == [0, 1, 2]
        policy.put_back(popped)
    cache.residents.check()
