"""Split loads on a real node, over each path: bytes in place whoever brings them, a node that dies in the middle."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess
from tests.test_sequence import whole_cache
from ucxkv.layout import Layout

N = 60
LAYOUT = Layout(model="m", dtype="float32", layers=4, kv_heads=2, head_dim=64, block_tokens=16)
TOKENS = list(range(16 * N + 3))


@pytest.fixture(params=["mapped", "message", "network"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ucxkv.Client]:
    """A client of a real node over each path in turn."""
    async with ucxkv.connect(request.getfixturevalue("shared_node").address, path=request.param) as kv:
        yield kv


def compute(cache: np.ndarray[Any, Any], pages: list[int], source: np.ndarray[Any, Any], blocks: range) -> None:
    """What an engine does, in its own thread: the same keys and values as were stored, but for their sign."""
    for block in blocks:
        cache[pages[block]] = -source[block]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("prefill", [1e-3, 3e6, 1e12])
async def test_a_split_brings_every_block_to_its_page(client: ucxkv.Client, groups: int, prefill: float) -> None:
    """Goal: whoever brings a block, it is whole and in its page. Method: save, split into shuffled pages with an engine
    that is hopeless, about as fast as a load, and faster than any; computed blocks have the other sign."""
    layout = dataclasses.replace(LAYOUT, salt=os.urandom(8).hex(), layer_groups=groups)
    source = whole_cache(layout, N, seed=1) + 1
    into = whole_cache(layout, N + 5)
    pages = np.random.default_rng(2).permutation(N + 5)[:N].tolist()
    await client.sequence(layout, TOKENS).save(source)
    seq = client.sequence(layout, TOKENS)
    computed: list[int] = []
    async with seq.split(into, prefill, block_ids=pages, compute_blocks=4, load_blocks=3) as split:
        async for blocks in split:
            await asyncio.to_thread(compute, into, pages, source, blocks)
            computed += blocks
    assert split.blocks == N == split.computed_blocks + split.loaded_blocks and split.is_over
    assert sorted(computed) == sorted(set(computed)) and len(computed) == split.computed_blocks
    for block in range(N):
        wanted = -source[block] if block in computed else source[block]
        assert (into[pages[block]] == wanted).all(), f"block {block}"
    assert not into[sorted(set(range(N + 5)) - set(pages))].any()
    if prefill == 1e-3:
        assert split.computed_blocks == 0
    if prefill == 1e12:
        assert split.computed_blocks > 0


@pytest.mark.parametrize("path", ["mapped", "message"])
async def test_a_node_that_dies_during_a_split_leaves_its_blocks_to_compute(path: str) -> None:
    """Goal: a dead node costs time, not the prompt. Method: kill -9 after the first span of a split whose engine is
    slow; the loop hands out what was not loaded, and every block is there in the end."""
    with NodeProcess("dies") as node:
        async with ucxkv.connect(node.address, path=path, timeout_s=3.0) as kv:
            source, into = whole_cache(LAYOUT, N, seed=1) + 1, whole_cache(LAYOUT, N)
            seq = kv.sequence(LAYOUT, TOKENS)
            assert (await seq.save(source)).blocks == N
            computed: list[int] = []
            async with seq.split(into, 1e9, compute_blocks=2, load_blocks=1) as split:
                async for blocks in split:
                    if not computed:
                        node.kill()
                    await asyncio.to_thread(compute, into, list(range(N)), source, blocks)
                    computed += blocks
            assert split.is_over and split.blocks == N == split.computed_blocks + split.loaded_blocks
            for block in range(N):
                assert (into[block] == (-source[block] if block in computed else source[block])).all()
            assert computed[0] == 0 and split.loaded_blocks < N
