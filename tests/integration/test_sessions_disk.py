"""Prefetch, estimates and split loads where blocks are on a node's disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess, wait_until
from tests.test_sequence import whole_cache
from ucxkv.layout import Layout
from ucxkv.sessions import PrefetchResult

LAYOUT = Layout(model="m", dtype="float32", layers=4, kv_heads=2, head_dim=64, block_tokens=16, layer_groups=2)
N = 24
BLOCK_BYTES = LAYOUT.block_bytes  # 64 KiB in two values


@pytest.fixture
def disk_node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node of 8 MiB of memory and 64 MiB of disk."""
    (tmp_path / "disk").mkdir()
    with NodeProcess("cold", host_bytes="8MiB", disk=str(tmp_path / "disk"), disk_bytes="64MiB") as node:
        yield node


async def conversation(kv: ucxkv.Client, seed: int) -> tuple[Any, np.ndarray[Any, Any]]:
    """A sequence of N blocks in the store, and its bytes."""
    tokens = np.random.default_rng(seed).integers(0, 1000, 16 * N + 1)
    seq, source = kv.sequence(LAYOUT, tokens), whole_cache(LAYOUT, N, seed=seed + 1)
    assert (await seq.save(source)).blocks == N
    return seq, source


async def cold_conversation(kv: ucxkv.Client, first: int = 0) -> tuple[Any, np.ndarray[Any, Any]]:
    """A sequence whose blocks are all on disk only: others have filled the memory since."""
    seq, source = await conversation(kv, first)

    async def is_cold() -> bool:
        return all((match.tiers == 2).all() for match in [await kv.match(chain) for chain in seq._chains])

    for seed in range(first + 1, first + 12):
        await conversation(kv, seed)
        if await is_cold():
            break
    await wait_until(is_cold, "the first conversation is on disk only")
    return seq, source


@pytest.mark.parametrize("path", ["mapped", "message"])
@pytest.mark.parametrize("order", ["block", "layer"])
async def test_a_session_brings_its_blocks_from_disk_to_memory(disk_node: NodeProcess, path: str, order: Any) -> None:
    """Goal: the user's next turn reads memory. Method: a session whose blocks were pushed to disk; after its prefetch
    all are in memory, a second one brings nothing, and the load that follows has the stored bytes."""
    async with ucxkv.connect(disk_node.address, path=path) as kv:
        seq, source = await cold_conversation(kv)
        session = kv.session("chat")
        await session.turn(seq)
        result = await session.prefetch(order=order, flight_bytes=16 * BLOCK_BYTES)
        assert result == PrefetchResult(N, N, 2 * N, N * BLOCK_BYTES)
        assert ((await seq.look_up()).tiers == 1).all()
        assert await session.prefetch() == PrefetchResult(N, N, 0, 0)
        into = whole_cache(LAYOUT, N)
        async for _ in seq.load(into):
            pass
        assert (into == source).all()


async def test_a_match_says_that_disk_is_slower_and_learns_how_slow(disk_node: NodeProcess) -> None:
    """Goal: tiers and load seconds of a match are true. Method: a cold chain costs more than the same in memory;
    reading it from disk changes what is thought of the disk; the bytes are right."""
    async with ucxkv.connect(disk_node.address) as kv:
        seq, source = await cold_conversation(kv)
        costs = kv._router.loads
        guess, cold = costs.cost("cold", 2), await seq.look_up()
        assert (cold.nbytes == BLOCK_BYTES).all() and cold.node == "cold"
        into = whole_cache(LAYOUT, N)
        async for _ in seq.load(into):
            pass
        assert (into == source).all()
        assert costs.cost("cold", 2) != guess
        again = await cold_conversation(kv, 100)
        slow = (await again[0].look_up()).load_s
        await kv.prefetch(again[0])
        fast = (await again[0].look_up()).load_s
        assert (slow > fast).all() and (fast > 0).all()


@pytest.mark.parametrize("prefill", [1e-3, 1e6])
async def test_a_split_of_blocks_on_disk_is_whole(disk_node: NodeProcess, prefill: float) -> None:
    """Goal: the engine computes while the disk is read. Method: split a cold conversation with a hopeless engine and
    with one about as fast as the disk; computed blocks have the other sign."""
    async with ucxkv.connect(disk_node.address) as kv:
        seq, source = await cold_conversation(kv)
        into = whole_cache(LAYOUT, N)
        computed: list[int] = []

        def compute(blocks: range) -> None:
            for block in blocks:
                into[block] = -source[block]

        async with seq.split(into, prefill, compute_blocks=2, load_blocks=3) as split:
            async for blocks in split:
                await asyncio.to_thread(compute, blocks)
                computed += blocks
        assert split.is_over and split.blocks == N and split.computed_blocks + split.loaded_blocks == N
        for block in range(N):
            assert (into[block] == (-source[block] if block in computed else source[block])).all(), block
        if prefill == 1e-3:
            assert not computed


async def test_a_chain_longer_than_memory_is_prefetched_as_far_as_there_is_room(disk_node: NodeProcess) -> None:
    """Goal: a prefetch that is too large ends, and harms nothing. Method: a chain of twice the memory; what is told to
    be in memory is less than all, and all of it reads back."""
    async with ucxkv.connect(disk_node.address) as kv:
        n = 256
        keys = [os.urandom(16) for _ in range(n)]
        values = np.random.default_rng(3).integers(0, 256, (n, 65536), np.uint8)
        for at in range(0, n, 32):
            parents = [bytes(16) if i == 0 else keys[i - 1] for i in range(at, at + 32)]
            assert (await kv.put_many(keys[at : at + 32], values[at : at + 32], parents)).ok
        result = await kv.prefetch(keys)
        assert result.blocks == n and (await kv.match(keys)).blocks == n
        into = np.zeros_like(values)
        assert (await kv.get_many(keys, into, deadline_s=30)).hits == n
        assert (into == values).all()
