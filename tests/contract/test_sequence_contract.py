"""Sequences on a real node, over each path, and on the dict store of tests/test_sequence.py: the same promises hold."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.test_sequence import LAYOUT, TOKENS, DictStore, steps, whole_cache
from ucxkv.errors import UsageError
from ucxkv.sequence import Loaded, Sequence


@pytest.fixture(params=["dict", "mapped", "message", "network"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A store by its client: the dict, or a real node over each path in turn."""
    if request.param == "dict":
        yield DictStore()
        return
    async with ucxkv.connect(request.getfixturevalue("shared_node").address, path=request.param) as client:
        yield client


def fresh(**changes: Any) -> ucxkv.Layout:
    """A layout whose keys nobody else has."""
    return dataclasses.replace(LAYOUT, salt=os.urandom(8).hex(), **changes)


@pytest.mark.parametrize(("groups", "order"), [(1, "lkhnd"), (2, "lkhnd"), (2, "nlkhd")])
@pytest.mark.parametrize("load_order", ["layer", "block", "tail"])
async def test_saved_blocks_load_in_place(store: Any, groups: int, order: str, load_order: Any) -> None:
    """Goal: bytes come back in place. Method: save from shuffled pages, load into others, in each order of loading
    and of axes, with one value a block and with two."""
    layout = fresh(layer_groups=groups, order=order)
    source, into = whole_cache(layout, 8, seed=1), whole_cache(layout, 8)
    out_of, in_to = [7, 2, 0, 5, 4, 1], [3, 1, 6, 0, 2, 7]
    saved = await Sequence(store, layout, TOKENS).save(source, block_ids=out_of)
    assert (saved.blocks, saved.stored) == (6, 6 * groups)
    seq = Sequence(store, layout, TOKENS)
    assert await seq.match() == 6
    async with seq.load(into, order=load_order, block_ids=in_to, ahead=1) as load:
        assert [step async for step in load]
        assert load.loaded == range(6)
    assert (into[in_to] == source[out_of]).all()
    assert not into[[4, 5]].any()


async def test_a_longer_prompt_saves_only_its_new_blocks(store: Any) -> None:
    """Goal: chains grow at their end. Method: save 16 tokens, then 26 that start alike; then a fork after 8."""
    layout = fresh()
    source = whole_cache(layout, 6, seed=2)
    assert (await Sequence(store, layout, TOKENS[:16]).save(source)).stored == 4
    again = await Sequence(store, layout, TOKENS).save(source)
    assert (again.start, again.stored, again.blocks) == (4, 2, 6)
    fork = await Sequence(store, layout, TOKENS[:8] + TOKENS[:8]).save(source)
    assert (fork.start, fork.stored, fork.blocks) == (2, 2, 4)


async def test_a_block_without_all_its_layer_groups_is_no_match(store: Any) -> None:
    """Goal: a half-saved block is not taken for whole. Method: the second group's chain holds three blocks of six."""
    layout = fresh(layer_groups=2)
    source, into = whole_cache(layout, 6, seed=3), whole_cache(layout, 6)
    seq = Sequence(store, layout, TOKENS)
    await seq.save(source)
    short = Sequence(store, layout, TOKENS)
    short._chains[1] = short._chains[1].copy()
    short._chains[1][3:] = np.frombuffer(os.urandom(48), np.uint8).reshape(3, 16)
    assert await seq.match() == 6
    assert await short.match() == 3
    assert await steps(short.load(into, blocks=6)) == [Loaded(range(2), range(6)), Loaded(range(2, 4), range(3))]
    assert (into[:3] == source[:3]).all()


async def test_another_tenants_sequence_misses(store: Any) -> None:
    """Goal: user voice 12: a salt hides what is cached. Method: same tokens, other salt."""
    layout = fresh()
    await Sequence(store, layout, TOKENS).save(whole_cache(layout, 6, seed=4))
    other = Sequence(store, layout, TOKENS, salt="other")
    assert await other.match() == 0
    assert await steps(other.load(whole_cache(layout, 6))) == []


async def test_pages_that_overlap_are_refused(store: Any) -> None:
    """Goal: no two blocks are read into one page. Method: a page named twice."""
    layout = fresh()
    cache = whole_cache(layout, 6, seed=5)
    seq = Sequence(store, layout, TOKENS)
    await seq.save(cache)
    with pytest.raises(UsageError, match="overlap"):
        await steps(seq.load(cache, block_ids=[0, 1, 2, 3, 4, 4]))
