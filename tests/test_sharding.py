"""The rule of sharding: one answer in every process, balance, cuts, and shards that move as little as can be."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_placement import names, some_keys, weight
from ucxkv.errors import UsageError
from ucxkv.ids import NodeId
from ucxkv.placement import Members
from ucxkv.sharding import ShardRule, holders, leaders, levelled

SHARDS = 256


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 2**60))
@settings(deadline=None)
def test_single_and_batch_forms_agree(log_shards: int, log_cut: int, start: int) -> None:
    """Goal: the directory and the client see one rule. Method: any power of two, counter keys, both forms."""
    rule, keys = ShardRule(shards=1 << log_shards, cut_blocks=1 << log_cut), some_keys(50, start)
    assert [rule.own(key.tobytes()) for key in keys] == rule.own_many(keys).tolist()
    assert [rule.is_cut(key.tobytes()) for key in keys] == rule.cuts(keys).tolist()


def test_keys_spread_evenly_and_cuts_come_as_often_as_they_should() -> None:
    """Goal: balance, and cuts that don't depend on shards. Method: 200,000 counter keys; each of 64 shards, its share
    of the cuts too, is within five standard deviations of its expectation."""
    rule, keys = ShardRule(shards=64, cut_blocks=16), some_keys(200_000)
    own, cuts = rule.own_many(keys), rule.cuts(keys)
    for chosen in (own, own[cuts]):
        counts = np.bincount(chosen, minlength=64)
        expected = len(chosen) / 64
        assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert abs(cuts.sum() - 200_000 / 16) < 5 * np.sqrt(200_000 / 16)


def test_twice_the_shards_split_each_in_two() -> None:
    """Goal: a later, larger cluster could split shards in place. Method: own shard under 32 and under 64."""
    keys = some_keys(1000)
    assert (ShardRule(shards=64).own_many(keys) % 32 == ShardRule(shards=32).own_many(keys)).all()


def test_one_shard_has_no_cuts() -> None:
    """Goal: one machine pays nothing. Method: one shard, with a cut at every other key if there were any."""
    rule = ShardRule(shards=1, cut_blocks=2)
    assert not rule.cuts(some_keys(100)).any()
    assert {rule.child(key.tobytes(), 0, True) for key in some_keys(100)} == {0}


def test_children_stay_until_the_fan_out_and_then_go_by_their_own_keys() -> None:
    """Goal: the rule of the design. Method: children of one parent, one by one, with the third delegated."""
    rule = ShardRule(shards=64, fanout=2, cut_blocks=1 << 32)
    assert [rule.delegates(children, False) for children in range(4)] == [False, False, True, True]
    assert rule.delegates(0, True)
    key = bytes(range(16))
    assert (rule.child(key, 5, False), rule.child(key, 5, True)) == (5, rule.own(key))
    always = next(one.tobytes() for one in some_keys(10_000) if ShardRule(cut_blocks=256).is_cut(one.tobytes()))
    assert ShardRule(cut_blocks=256).child(always, 5, False) == ShardRule().own(always)


@given(names.filter(lambda nodes: len(nodes) > 1), st.data())
@settings(max_examples=50, deadline=None)
def test_only_shards_of_the_node_that_left_or_joined_move(nodes: list[NodeId], data: st.DataObject) -> None:
    """Goal: minimal movement, exactly. Method: leaders with and without one member, of any weights: a shard moves if
    and only if it was on that member. Read backwards it is the joining case."""
    weights = {node: data.draw(weight) for node in nodes}
    gone = data.draw(st.sampled_from(nodes))
    before = leaders(SHARDS, Members(weights))
    after = leaders(SHARDS, Members({node: w for node, w in weights.items() if node != gone}))
    assert [old == new for old, new in zip(before, after, strict=True)] == [old != gone for old in before]


def test_a_joining_node_gets_its_share_of_the_shards() -> None:
    """Goal: 1/n of the blocks move, no more. Method: a ninth node, 4,096 shards; five standard deviations."""
    nodes = [NodeId(f"node-{number}") for number in range(9)]
    before, after = leaders(4096, Members(nodes[:8])), leaders(4096, Members(nodes))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {nodes[8]}
    assert abs(len(moved) - 4096 / 9) < 5 * np.sqrt(4096 / 9)


@given(names, names, st.integers(0, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_levelled_shards_are_even_and_move_no_more_than_they_must(
    old: list[NodeId], new: list[NodeId], log_shards: int, data: st.DataObject
) -> None:
    """Goal: balance and minimal movement at once. Method: from any map (of nothing, of other members, at random) to
    members of any weights: each has its share rounded down or up, and as many shards moved as had to: those beyond a
    share or of no member, or more when others lacked them. Levelling again moves nothing."""
    shards = 1 << log_shards
    members = Members({node: data.draw(weight) for node in new}) if data.draw(st.booleans()) else Members(new)
    before: list[NodeId | None] = data.draw(
        st.one_of(st.just([None] * shards), st.lists(st.sampled_from(old), min_size=shards, max_size=shards))
    )
    if data.draw(st.booleans()):
        before = [*levelled(before, Members(old))]
    after = levelled(before, members)
    share = dict(zip(members.nodes, np.array(members.weights) * shards / sum(members.weights), strict=True))
    count = {node: after.count(node) for node in new}
    assert all(np.floor(share[node]) <= count[node] <= np.ceil(share[node]) for node in new)
    had = {node: before.count(node) for node in new}
    surplus = shards - sum(min(had[node], int(np.ceil(share[node]))) for node in new)
    lacking = sum(max(0, int(np.floor(share[node])) - had[node]) for node in new)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == max(surplus, lacking)
    assert levelled(after, members) == after


def test_a_node_that_joins_or_leaves_level_shards_moves_its_share_only() -> None:
    """Goal: 1/n of the blocks. Method: 64 shards on 4 nodes and back; none moves between nodes that stay."""
    four = Members([NodeId(f"node-{number}") for number in range(4)])
    three = Members(four.nodes[:3])
    on_three = levelled([None] * 64, three)
    on_four = levelled(on_three, four)
    assert {new for old, new in zip(on_three, on_four, strict=True) if old != new} == {four.nodes[3]}
    assert on_four.count(four.nodes[3]) == 16
    back = levelled(on_four, three)
    assert [old == new for old, new in zip(on_four, back, strict=True)] == [old != four.nodes[3] for old in on_four]


@given(names, st.integers(1, 4), st.data())
@settings(max_examples=50, deadline=None)
def test_copies_of_a_shard_stand_apart(nodes: list[NodeId], copies: int, data: st.DataObject) -> None:
    """Goal: a rack or a host takes one copy along where there are others. Method: random racks and hosts; the leader is
    the rendezvous winner; copies are distinct nodes, on as many racks, and then hosts, as there are."""
    racks = {node: data.draw(st.integers(0, 3)) for node in nodes}
    domains = {node: (f"rack-{racks[node]}", f"host-{racks[node]}-{data.draw(st.integers(0, 2))}") for node in nodes}
    members = Members(nodes)
    found = holders(SHARDS, members, copies, domains)
    assert [row[0] for row in found] == leaders(SHARDS, members)
    for row in found:
        assert len(set(row)) == len(row) == min(copies, len(nodes))
        assert len({domains[node][0] for node in row}) == min(len(row), len(set(racks.values())))
        assert len({domains[node] for node in row}) == min(len(row), len(set(domains.values())))


@given(names.filter(lambda nodes: len(nodes) > 1), st.data())
@settings(max_examples=50, deadline=None)
def test_copies_that_need_not_move_stay(nodes: list[NodeId], data: st.DataObject) -> None:
    """Goal: minimal movement of replicas without racks. Method: a member leaves; every other copy is where it was."""
    gone = data.draw(st.sampled_from(nodes))
    before = holders(64, Members(nodes), 3)
    after = holders(64, Members([node for node in nodes if node != gone]), 3)
    for old, new in zip(before, after, strict=True):
        assert set(old) - {gone} <= set(new)
        assert gone in old or old == new


def test_the_rule_is_the_same_in_every_process() -> None:
    """Goal: blocks are found by it for ever. Method: a fresh interpreter with another hash seed; what is recorded."""
    code = (
        "from ucxkv.sharding import ShardRule, leaders; from ucxkv.placement import Members;"
        "print([ShardRule().own(bytes([n] * 16)) for n in range(6)], leaders(4, Members(['a', 'b', 'c'])))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == RECORDED


RECORDED = "[44, 25, 21, 23, 39, 43] ['a', 'b', 'c', 'a']"


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"shards": 0}, "power of two"),
        ({"shards": 48}, "power of two"),
        ({"shards": 1 << 17}, "power of two"),
        ({"cut_blocks": 4095}, "power of two"),
        ({"fanout": 0}, "at least one"),
    ],
)
def test_a_rule_that_is_none_is_refused_by_name(numbers: dict[str, int], says: str) -> None:
    """Goal: a wrong number is told at the start. Method: one case for each check."""
    with pytest.raises(UsageError, match=says):
        ShardRule(**numbers)
    with pytest.raises(UsageError, match="at least"):
        holders(4, Members([NodeId("a")]), 0)
