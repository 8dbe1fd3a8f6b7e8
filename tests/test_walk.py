"""Walks over shards: always the longest visible prefix, by few messages, with and without remembered heads."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.shards_model import ShardsModel, chain
from ucxkv.heads import Heads
from ucxkv.keys import KeyArray
from ucxkv.sharding import ShardRule
from ucxkv.walk import Head, Walk

paths = st.lists(st.integers(0, 3), min_size=1, max_size=7)
UNCUT = 1 << 32


def run(walk: Walk, keys: KeyArray, model: ShardsModel, before_answer: Callable[[Walk], None] = lambda _: None) -> Walk:
    """Carry a walk out to its end."""
    while (ask := walk.ask()) is not None:
        before_answer(walk)
        walk.answer(model.answer(ask, keys))
        assert walk.messages < 100
    return walk


def look_up(model: ShardsModel, heads: Heads, keys: KeyArray) -> Walk:
    """As a client does: behind a head if one is known, and learning from it."""
    walk = run(Walk(keys, model.rule, head=heads.find(keys)), keys, model)
    for key, shard in heads.learn(keys, walk):
        block = model.blocks.get(key)
        if block is not None and block.home == shard and block.delegates:
            heads.complete(key, block.life, model.local(key))
        else:
            heads.forget(key)
    return walk


class WalkMachine(RuleBasedStateMachine):
    """Chains come, leaves go, shards are lost; every walk finds what is there, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ShardsModel(ShardRule(shards=4, fanout=1, cut_blocks=8))
        self.heads = [Heads(limit=3), Heads()]

    @rule(path=paths)
    def put(self, path: list[int]) -> None:
        self.model.put(chain(path))

    @rule(path=paths, count=st.integers(1, 6))
    def evict(self, path: list[int], count: int) -> None:
        for row in chain(path)[::-1]:
            if count and row.tobytes() in self.model.blocks and not self.model.children(row.tobytes()):
                self.model.evict(row.tobytes())
                count -= 1

    @rule(shard=st.integers(0, 3))
    def lose(self, shard: int) -> None:
        self.model.lose(shard)

    @rule(path=paths, client=st.integers(0, 1), strict=st.booleans())
    def walk(self, path: list[int], client: int, strict: bool) -> None:
        keys, expected = chain(path), self.model.prefix(chain(path))
        forward = run(Walk(keys, self.model.rule, strict=strict), keys, self.model)
        assert (forward.visible, forward.is_settled) == (expected, True)
        assert [self.model.blocks[keys[at].tobytes()].home for at in range(expected)] == [
            span.shard for span in forward.spans for _ in range(span.last - span.first)
        ]
        known = look_up(self.model, self.heads[client], keys)
        assert known.visible == expected
        head = expected if not known.spans else known.spans[0].first
        assert sum(span.last - span.first for span in known.spans) == expected - head


WalkMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWalksOverAModel = WalkMachine.TestCase


def family(count: int, tail: int = 3) -> tuple[ShardsModel, list[KeyArray]]:
    """A head of four blocks with `count` continuations, in 16 shards."""
    model = ShardsModel(ShardRule(shards=16, fanout=2, cut_blocks=UNCUT))
    chains = [chain([9, 9, 9, 9, number] + [7] * (tail - 1)) for number in range(count)]
    for keys in chains:
        model.put(keys)
    return model, chains


def test_a_known_head_costs_its_shard_no_message() -> None:
    """Goal: one message a look-up, and none at the shard of the head that all share. Method: 60 continuations, of which
    half are looked up before they are stored; a client that has seen the head; every question is recorded."""
    model, chains = family(60)
    heads, asked = Heads(), []
    look_up(model, heads, chains[10])
    home = model.rule.own(chains[0][0].tobytes())
    for keys in chains[11:] + [chain([9, 9, 9, 9, number]) for number in range(60, 120)] + [chains[0][:4]] * 9:
        walk = Walk(keys, model.rule, head=heads.find(keys))
        run(walk, keys, model, lambda walk: asked.append(walk.ask().shard))  # type: ignore[union-attr]
        assert walk.visible == model.prefix(keys)
        assert walk.messages <= 2
        heads.learn(keys, walk)
    by_chance = sum(model.rule.own(keys[4].tobytes()) == home for keys in chains[11:])
    assert asked.count(home) <= by_chance + 60 * 2 / 16 + 12
    assert len(asked) <= 1.1 * (49 + 60 + 9)


def test_a_walk_without_a_head_asks_home_by_home() -> None:
    """Goal: two messages for head and rest. Method: the same family, hit and miss, forward."""
    model, chains = family(20)
    for keys in chains[2:]:
        forward = run(Walk(keys, model.rule), keys, model)
        assert (forward.visible, forward.messages) == (7, 1 if len(forward.spans) == 1 else 2)
    for keys in chains[:2]:
        assert run(Walk(keys, model.rule), keys, model).messages == 1


@given(st.integers(0, 200), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_a_cut_chain_is_found_whole(seed: int, log_cut: int) -> None:
    """Goal: long chains in many shards. Method: chains of 60 with a cut at every 2nd to 8th key; a question never holds
    keys that the rule puts elsewhere."""
    model = ShardsModel(ShardRule(shards=8, fanout=2, cut_blocks=1 << log_cut))
    keys = chain([seed] * 60)
    model.put(keys)
    walk = Walk(keys, model.rule)
    while (ask := walk.ask()) is not None:
        inside = [row.tobytes() for row in keys[ask.first + 1 : ask.last]]
        assert all(model.rule.own(key) == ask.shard for key in inside if model.rule.is_cut(key))
        walk.answer(model.answer(ask, keys))
    assert walk.visible == 60


def two_shards() -> tuple[ShardsModel, KeyArray]:
    """A chain that lies in two shards."""
    model, chains = family(20)
    keys = next(one for one in chains if len({model.blocks[row.tobytes()].home for row in one}) == 2)
    return model, keys


def test_a_strict_walk_starts_anew_when_a_shard_lost_blocks_on_the_way() -> None:
    """Goal: the double collect. Method: the head's shard is lost after it answered: a plain walk joins what was never
    visible together, a strict one doesn't."""
    model, keys = two_shards()
    home = model.blocks[keys[0].tobytes()].home

    def lose_once(walk: Walk) -> None:
        if walk.messages == 1:
            model.epoch[home] += 1  # lost and come back otherwise: the blocks behind it are others'

    plain = run(Walk(keys, model.rule), keys, model, lose_once)
    assert plain.messages == 2
    strict = run(Walk(keys, model.rule, strict=True), keys, model, lose_once)
    assert strict.is_settled
    assert (strict.visible, strict.messages) == (7, 2 + 2 + 2 + 2)  # walk, collect again, and both once more


def test_a_strict_walk_that_never_settles_says_so() -> None:
    """Goal: bounded. Method: an epoch that changes before every answer."""
    model, keys = two_shards()

    def always(walk: Walk) -> None:
        model.epoch = [epoch + 1 for epoch in model.epoch]

    walk = run(Walk(keys, model.rule, strict=True), keys, model, always)
    assert not walk.is_settled
    assert walk.messages < 20


def test_a_head_in_another_life_is_not_vouched_for() -> None:
    """Goal: a stale memory of local children hides nothing. Method: the head goes and comes back with other local
    children; a client that remembers the old ones finds the new."""
    model, chains = family(20, tail=1)
    heads = Heads()
    look_up(model, heads, chains[5])
    for keys in chains:
        model.evict(keys[4].tobytes())
    model.evict(chains[0][3].tobytes())
    for keys in reversed(chains):
        model.put(keys)
    for keys in chains:
        assert look_up(model, heads, keys).visible == 5


def test_a_lost_head_is_forgotten() -> None:
    """Goal: no message wasted twice. Method: the head's shard is lost; the walk falls back to the root, the next one
    starts there."""
    model, chains = family(20)
    heads = Heads()
    look_up(model, heads, chains[5])
    assert len(heads) == 1
    model.lose(model.blocks[chains[0][0].tobytes()].home)
    assert look_up(model, heads, chains[6]).visible == 0
    assert len(heads) == 0


def test_heads_are_bounded_and_the_oldest_goes() -> None:
    """Goal: memory of a client is bounded. Method: three heads in room for two, the first used again before the
    third."""
    heads = Heads(limit=2)
    chains = [chain([number, 1]) for number in range(3)]

    def learn(keys: KeyArray) -> None:
        walk = Walk(keys, ShardRule(shards=1))
        walk.heads.append(Head(1, 0))
        heads.learn(keys, walk)

    learn(chains[0])
    learn(chains[1])
    assert heads.find(chains[0]) is not None
    learn(chains[2])
    assert len(heads) == 2
    assert [heads.find(keys) is not None for keys in chains] == [True, False, True]
