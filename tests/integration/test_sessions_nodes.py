"""Sessions, prefetch and splits over two nodes: a chain and its index are where their roots say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess
from tests.integration.test_shards import two
from tests.test_sequence import LAYOUT, whole_cache
from ucxkv.sessions import PrefetchResult

N = 6


@contextlib.asynccontextmanager
async def nodes(kind: str) -> AsyncIterator[str]:
    """The address of one of two nodes: apart, or with the directory's shards between them."""
    if kind == "shards":
        async with two() as (one, _):
            yield one.address
        return
    with NodeProcess("a") as one, NodeProcess("b", join=one.address) as _:
        yield one.address


@pytest.mark.parametrize("kind", ["apart", "shards"])
async def test_conversations_anywhere_are_found_prefetched_and_split(kind: str) -> None:
    """Goal: nothing of this knows where a chain lives. Method: sixteen conversations in two layer groups, whose chains
    and logs lie on both nodes; another client finds each by its id, prefetches it, and splits it whole."""
    async with nodes(kind) as address, ucxkv.connect(address) as kv, ucxkv.connect(address) as other:
        for number in range(16):
            layout = dataclasses.replace(LAYOUT, layer_groups=2, salt=os.urandom(8).hex())
            source, into = whole_cache(layout, N, seed=number + 1), whole_cache(layout, N)
            seq = kv.sequence(layout, range(4 * N))
            assert (await seq.save(source)).blocks == N
            await kv.session(f"chat {number}", stored=True).turn(seq)
            session = other.session(f"chat {number}", stored=True)
            assert await session.prefetch(order="layer") == PrefetchResult(N, N, 0, 0)
            assert [len(chain) for chain in session.chains] == [N] and session.chains[0].layer_groups == 2
            found = other.sequence(layout, range(4 * N))
            match = await found.look_up()
            assert match.blocks == N and (match.load_s > 0).all() and (match.nbytes == layout.block_bytes).all()

            def compute(blocks: range, into: np.ndarray = into, source: np.ndarray = source) -> None:  # type: ignore[type-arg]
                into[blocks.start : blocks.stop] = source[blocks.start : blocks.stop]

            async with found.split(into, 1e6, compute_blocks=1, load_blocks=1) as split:
                async for blocks in split:
                    await asyncio.to_thread(compute, blocks)
            assert split.is_over and (into == source).all()
            assert await session.end(delete=True) == 2 * N
            assert await found.match() == 0 and not session.chains
        holders = {(await kv.match([root])).node for root in await roots(kv)}
        assert holders == {"a", "b"}


async def roots(kv: ucxkv.Client) -> list[bytes]:
    """Single blocks put under keys of any shard."""
    found = [os.urandom(16) for _ in range(32)]
    assert (await kv.put_many(found, [b"x"] * 32)).ok
    return found
