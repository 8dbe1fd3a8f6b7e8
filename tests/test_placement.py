"""Rendezvous hashing: balance, minimal movement, independence of order, and parts on distinct nodes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.ids import NodeId
from ucxkv.keys import KeyArray
from ucxkv.placement import Members, PartGrid, attention_indices, home, home_indices, part_indices, part_nodes

names = st.lists(st.text(min_size=1, max_size=6).map(NodeId), min_size=1, max_size=9, unique=True)
weight = st.floats(0.1, 10)


def some_keys(count: int, start: int = 1) -> KeyArray:
    """Keys that are as regular as can be: a counter in the low bytes."""
    words = np.zeros((count, 2), "<u8")
    words[:, 0] = np.arange(start, start + count)
    return words.view(np.uint8)


def home_names(keys: KeyArray, members: Members) -> list[NodeId]:
    """The home of each key by name."""
    return [members.nodes[index] for index in home_indices(keys, members)]


@given(names, st.data(), st.integers(1, 2**60))
@settings(deadline=None)
def test_single_and_batch_forms_agree(nodes: list[NodeId], data: st.DataObject, start: int) -> None:
    """Goal: home, home_indices and part_nodes say one thing. Method: random members, evenly and unevenly weighted."""
    members = Members({node: data.draw(weight) for node in nodes}) if data.draw(st.booleans()) else Members(nodes)
    keys = some_keys(20, start)
    assert [home(key.tobytes(), members) for key in keys] == home_names(keys, members)
    rows = part_indices(keys, 3, members)
    assert [part_nodes(key.tobytes(), 3, members) for key in keys] == [[members.nodes[i] for i in row] for row in rows]


@given(names, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_in_which_members_are_listed_does_not_matter(nodes: list[NodeId], random: object) -> None:
    """Goal: two clients with differently ordered lists agree. Method: shuffle and compare homes and parts."""
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    keys = some_keys(50)
    assert home_names(keys, Members(nodes)) == home_names(keys, Members(shuffled))
    assert (part_indices(keys, 4, Members(nodes)) == part_indices(keys, 4, Members(shuffled))).all()


@given(names.filter(lambda nodes: len(nodes) > 1), st.data())
@settings(max_examples=50, deadline=None)
def test_only_keys_of_the_member_that_left_or_joined_move(nodes: list[NodeId], data: st.DataObject) -> None:
    """Goal: minimal movement, exactly. Method: homes with and without one member, of any weights; a key moves if and
    only if it was on that member. Read backwards it is the joining case."""
    weights = {node: data.draw(weight) for node in nodes}
    gone = data.draw(st.sampled_from(nodes))
    keys = some_keys(300)
    before = home_names(keys, Members(weights))
    after = home_names(keys, Members({node: w for node, w in weights.items() if node != gone}))
    for old, new in zip(before, after, strict=True):
        assert (old == new) == (old != gone)


def test_keys_spread_in_proportion_to_weight() -> None:
    """Goal: balance. Method: 40,000 counter keys on 8 nodes, even and weighted 1 to 8; every share is within five
    standard deviations of its expectation."""
    nodes = [NodeId(f"node-{number}") for number in range(8)]
    keys = some_keys(40_000)
    for members in (Members(nodes), Members({node: number + 1 for number, node in enumerate(nodes)})):
        share = np.array(members.weights) / sum(members.weights)
        counts = np.bincount(home_indices(keys, members), minlength=8)
        assert (np.abs(counts - len(keys) * share) < 5 * np.sqrt(len(keys) * share * (1 - share))).all()


@given(names, st.integers(1, 20))
@settings(deadline=None)
def test_parts_stand_on_distinct_nodes_while_there_are_enough(nodes: list[NodeId], parts: int) -> None:
    """Goal: losing a node loses as few parts as possible. Method: within each round of as many parts as members all
    differ."""
    members = Members(nodes)
    rows = part_indices(some_keys(30), parts, members)
    assert rows.shape == (30, parts)
    for row in rows:
        for start in range(0, parts, len(members)):
            group = row[start : start + len(members)]
            assert len(set(group.tolist())) == len(group)


def test_few_parts_move_when_a_member_leaves() -> None:
    """Goal: near-minimal movement of parts. Method: 4 parts on 8 nodes, one leaves; its eighth must move, and fewer
    than as many again move besides."""
    nodes = [NodeId(f"node-{number}") for number in range(8)]
    keys = some_keys(5_000)
    before = np.array(Members(nodes).nodes)[part_indices(keys, 4, Members(nodes))]
    after = np.array(Members(nodes[1:]).nodes)[part_indices(keys, 4, Members(nodes[1:]))]
    lost = before == nodes[0]
    moved = before != after
    assert moved[lost].all()
    assert abs(lost.mean() - 1 / 8) < 0.01
    assert (moved & ~lost).mean() < 1 / 8


def test_placement_is_the_same_in_every_process() -> None:
    """Goal: user voice 9, for placement.

    Method: a fresh interpreter with another hash seed, and the recorded answer.
    """
    code = (
        "from ucxkv.placement import Members, part_nodes;"
        "print(part_nodes(bytes(range(16)), 5, Members(['a', 'b', 'c', 'd', 'e'])))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    here = part_nodes(bytes(range(16)), 5, Members([NodeId(name) for name in "edcba"]))
    assert done.stdout.strip() == str(here) == RECORDED_NODES


RECORDED_NODES = "['a', 'b', 'd', 'e', 'c']"


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([], "no members"),
        (["a", "a"], "occurs twice"),
        ({"a": 0.0}, "positive"),
        ({"a": -1.0, "b": 1.0}, "positive"),
        ({"a": float("inf")}, "finite"),
        ({"a": float("nan")}, "finite"),
    ],
)
def test_impossible_members_are_refused_by_name(members: object, says: str) -> None:
    """Goal: no key is placed on nothing. Method: one case for each rule."""
    with pytest.raises(UsageError, match=says):
        Members(members)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one part"):
        part_nodes(b"k" * 16, 0, Members([NodeId("a")]))


NEAR, FAR = 3, 6  # two ways' ranks
grids = st.builds(PartGrid, st.integers(1, 3), st.integers(1, 4))


@given(names, grids, st.data())
@settings(max_examples=60, deadline=None)
def test_what_one_rank_reads_lies_together_and_near_it(
    nodes: list[NodeId], grid: PartGrid, data: st.DataObject
) -> None:
    """Goal: one batch from one near node for each tensor-parallel rank. Method: random grids, weights and ways; each
    column is on one node, a nearest one where the reader is known; unknown ones share no node while that can be."""
    members = Members({node: data.draw(weight) for node in nodes})
    way = st.one_of(st.none(), st.lists(st.integers(0, 6), min_size=len(nodes), max_size=len(nodes)))
    ways = data.draw(st.lists(way, min_size=grid.head_groups, max_size=grid.head_groups))
    found = attention_indices(some_keys(40), grid, members, ways)
    assert found.shape == (40, grid.parts)
    for row in found.reshape(40, grid.layer_groups, grid.head_groups):
        assert (row == row[0]).all()
        for column, far in zip(row[0], ways, strict=True):
            assert far is None or far[column] == min(far)
        unknown = [node for node, far in zip(row[0], ways, strict=True) if far is None]
        if not any(ways) or len(nodes) >= grid.head_groups > len(unknown) > 0:
            assert len(set(unknown)) == min(len(unknown), len(nodes))


@given(names, st.integers(1, 12), st.booleans())
@settings(max_examples=40, deadline=None)
def test_without_readers_it_is_the_plain_placement(nodes: list[NodeId], parts: int, is_even: bool) -> None:
    """Goal: blocks stored before are found. Method: both, with one layer group and no ways."""
    members = Members(nodes) if is_even else Members({node: 1.0 + at for at, node in enumerate(nodes)})
    keys = some_keys(40)
    assert (attention_indices(keys, PartGrid(1, parts), members) == part_indices(keys, parts, members)).all()


def test_near_nodes_share_a_reader_in_proportion_to_weight() -> None:
    """Goal: balance among equals. Method: 8 nodes weighted 1 to 8, the upper four near the one reader; 20,000 blocks
    within five standard deviations, and none on the far ones."""
    nodes = [NodeId(f"node-{number}") for number in range(8)]
    members = Members({node: number + 1 for number, node in enumerate(nodes)})
    found = attention_indices(some_keys(20_000), PartGrid(2, 1), members, [[FAR] * 4 + [NEAR] * 4])[:, 0]
    count, share = np.bincount(found, minlength=8), np.array([0, 0, 0, 0, 5, 6, 7, 8]) / 26
    assert (abs(count - 20_000 * share) <= 5 * np.sqrt(20_000 * share)).all()


@given(names.filter(lambda nodes: len(nodes) > 1), st.data())
@settings(max_examples=50, deadline=None)
def test_only_columns_of_the_node_that_left_or_joined_move(nodes: list[NodeId], data: st.DataObject) -> None:
    """Goal: minimal movement, exactly, for one reader. Method: with and without one member, with any weights and ways:
    a column moves if it was there; and else only if that was the last of the nearest, so that others are now."""
    weights = {node: data.draw(weight) for node in nodes}
    far = {node: data.draw(st.integers(0, 2)) for node in nodes}
    gone = data.draw(st.sampled_from(nodes))
    keys, grid = some_keys(200), PartGrid(2, 1)

    def placed(members: Members) -> list[NodeId]:
        ways = [[far[node] for node in members.nodes]]
        return [members.nodes[index] for index in attention_indices(keys, grid, members, ways)[:, 0]]

    before, after = placed(Members(weights)), placed(Members({node: weights[node] for node in nodes if node != gone}))
    assert [old == new for old, new in zip(before, after, strict=True)] == [old != gone for old in before]


def test_few_columns_move_when_a_member_leaves() -> None:
    """Goal: near-minimal movement with several readers. Method: 8 nodes on 4 hosts, a reader near each host; one node
    leaves: its eighth of the columns moves, to its host's other node, and no other."""
    nodes = [NodeId(f"node-{number}") for number in range(8)]
    keys, grid = some_keys(4_000), PartGrid(2, 4)

    def placed(some: list[NodeId]) -> npt.NDArray[np.str_]:
        members = Members(some)
        ways = [[NEAR if int(node[-1]) // 2 == host else FAR for node in members.nodes] for host in range(4)]
        return np.array(members.nodes)[attention_indices(keys, grid, members, ways)]

    before, after = placed(nodes), placed(nodes[1:])
    assert ((before != after) == (before == nodes[0])).all()
    assert abs((before != after).mean() - 1 / 8) < 0.01
    assert set(after[before == nodes[0]]) == {nodes[1]}


def test_a_grid_or_ways_that_do_not_fit_are_refused() -> None:
    """Goal: no part is placed by accident. Method: empty grids; ways for other numbers of head groups and members."""
    members = Members([NodeId("a"), NodeId("b")])
    with pytest.raises(UsageError, match="at least one"):
        PartGrid(0, 1)
    for ways in ([[1, 2]], [[1], [2]], [None]):
        with pytest.raises(UsageError, match="ways"):
            attention_indices(some_keys(1), PartGrid(1, 2), members, ways)
