"""Which node leads which shard, as a client is told: words of nodes in, the leader and what is certain out."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from tests.sharded import RULE, bits, root_in
from ucxkv import errors
from ucxkv.client.leading import ShardMap, led_shards
from ucxkv.protocol import WIRE_VERSION
from ucxkv.protocol import messages as m

_PLAIN = m.Welcome(WIRE_VERSION, "0", 5, "n", "h:1", 1, "host", "", 9, 0, 16, 1 << 20, [], [])


def welcome(*led: int, shards: int = 8, leaders: tuple[str, ...] = ()) -> m.Welcome:
    """Of a node that leads these shards."""
    return msgspec.structs.replace(_PLAIN, shards=shards, led=bits(led), leaders=list(leaders))


def two() -> ShardMap:
    """Node a leads 0 to 3, node b 4 to 7."""
    shards = ShardMap()
    shards.welcomed("a", welcome(0, 1, 2, 3))
    shards.welcomed("b", welcome(4, 5, 6, 7))
    return shards


def test_the_leader_is_the_node_that_says_so_of_itself() -> None:
    """Method: every shard, one key at a time and many at once; a word of others makes nobody the leader."""
    shards = two()
    assert shards.behind() == set()
    roots = [root_in(shard) for shard in range(8)]
    assert [shards.leader(root) for root in roots] == ["a"] * 4 + ["b"] * 4
    rows = np.frombuffer(b"".join(roots), np.uint8).reshape(-1, 16)
    assert shards.leaders(rows) == ["a"] * 4 + ["b"] * 4
    shards.heard(["b"] * 8)
    assert [shards.leader(root) for root in roots] == ["a"] * 4 + ["b"] * 4
    assert shards.behind() == {"a", "b"}
    shards.lost("a")
    assert [shards.leader(root) for root in roots] == [""] * 4 + ["b"] * 4
    assert (shards.leads("a"), shards.leads("b")) == (0, 4)


def test_of_two_that_say_they_lead_the_latest_word_is_asked() -> None:
    """Method: the later Welcome wins; then a push that names the other; then that is in doubt, and welcomed anew."""
    shards, root = two(), root_in(2)
    shards.welcomed("b", welcome(2, 4, 5, 6, 7))
    assert shards.leader(root) == "b"
    shards.heard(["", "", "a"])
    assert shards.leader(root) == "a"
    shards.doubt("a")
    assert shards.leader(root) == "b"
    shards.welcomed("a", welcome(0, 1, 2, 3))
    assert shards.leader(root) == "a"
    shards.welcomed("a", welcome(0, 1, 3))
    assert shards.leader(root) == "b"


def test_a_miss_is_certain_when_the_leaders_of_all_shards_it_may_be_in_have_answered() -> None:
    """Method: with the root its shard alone counts, without it all; without shards everything is certain."""
    shards = two()
    low, high = led_shards(welcome(0, 1, 2, 3)), led_shards(welcome(4, 5, 6, 7))
    assert shards.covers([low, high]) and not shards.covers([low]) and not shards.covers([])
    assert shards.covers([low], root_in(3)) and not shards.covers([low], root_in(4))
    assert ShardMap().covers([]) and ShardMap().covers([], os.urandom(16))


def test_words_that_do_not_fit_are_refused_or_left_out() -> None:
    """Goal: a wrong or hostile node breaks nothing. Method: numbers of shards that cannot be, that differ, bits and
    names past the last shard; a node without shards among others leads none.
    """
    for shards in (3, 1 << 17, 1 << 62):
        with pytest.raises(errors.Unavailable, match="cannot be"):
            ShardMap().welcomed("n", welcome(0, shards=shards))
    known = two()
    with pytest.raises(errors.Unavailable, match="16 shards"):
        known.welcomed("c", welcome(0, shards=16))
    assert "c" not in known.leaders(np.frombuffer(root_in(0), np.uint8).reshape(1, 16))
    known.welcomed("c", welcome(shards=0))
    assert known.count == 8 and not known.leads("c")
    known.heard(["x"] * 100)
    assert known.leads("x") == 8
    assert led_shards(msgspec.structs.replace(_PLAIN, shards=4, led=b"\xff" * 9)) == 0b1111
    assert led_shards(msgspec.structs.replace(_PLAIN, shards=0, led=b"\xff")) == 0
    assert RULE.shards == known.count


def test_the_number_of_shards_is_that_of_the_nodes_that_are_there() -> None:
    """Goal: a client outlives its cluster. Method: all nodes go, and others of another cluster answer there."""
    shards = two()
    shards.lost("a")
    shards.lost("b")
    assert shards.count == 8, "puts wait for the same shards"
    shards.welcomed("a", welcome(0, 1, shards=2))
    assert shards.count == 2 and shards.leader(os.urandom(16)) == "a"
    shards.lost("a")
    shards.welcomed("a", welcome(shards=0))
    assert shards.count == 0
