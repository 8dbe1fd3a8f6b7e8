"""Splits, prefetches and turns cancelled at every await: nothing writes, runs or is held afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess, wait_until
from tests.stepping import Ended, cancel_at_every_await, never_inline
from tests.test_sequence import whole_cache
from ucxkv.layout import Layout

LAYOUT = Layout(model="m", dtype="float32", layers=2, kv_heads=2, head_dim=16, block_tokens=16, layer_groups=2)
N = 12
POISON = 7e7


@pytest.mark.parametrize("path", ["mapped", "message"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
async def test_calls_cancelled_at_every_await_leave_nothing(tmp_path: Path, path: str, again: bool) -> None:
    """Goal: who is cancelled gets memory back that nobody touches, and no task, lease or prefetch stays. Method: splits
    whose loads come first and whose engine does, prefetches of a chain and of a session, turns of a stored session,
    each cancelled at its await 1, 2, ... (and at each further one); the cache is poisoned after each call and looked at
    after the next; then all of them work."""
    with NodeProcess("c", disk=str(tmp_path), disk_bytes="64MiB") as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            never_inline(kv)
            layout = dataclasses.replace(LAYOUT, salt=os.urandom(8).hex())
            source, into = whole_cache(layout, N, seed=1), whole_cache(layout, N)
            seq = kv.sequence(layout, range(16 * N))
            assert (await seq.save(source)).blocks == N
            session = kv.session("c", stored=True)
            await session.turn(seq)
            tasks = len(asyncio.all_tasks())

            async def after_each(ended: Ended) -> None:
                assert len(asyncio.all_tasks()) == tasks
                into[:] = POISON
                assert await seq.match() == N
                assert (into == POISON).all(), "written after the end of its call"

            async def split(prefill: float) -> None:
                async with seq.split(into, prefill, compute_blocks=2, load_blocks=2) as running:
                    async for blocks in running:
                        await asyncio.sleep(0)
                        into[blocks.start : blocks.stop] = source[blocks.start : blocks.stop]
                assert running.is_over and (into == source).all()

            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "split, loads first": lambda: split(1e-3),
                "split, engine first": lambda: split(1e9),
                "prefetch": lambda: kv.prefetch(seq, order="layer"),
                "session's prefetch": lambda: session.prefetch(),
                "turn": lambda: session.turn(seq),
            }
            cancelled = {
                name: await cancel_at_every_await(call, after_each, again=again) for name, call in calls.items()
            }
            at_once = {"prefetch"} if path == "mapped" else set()  # all is in memory, and a match is one C call
            assert all(count for name, count in cancelled.items() if name not in at_once), cancelled
            assert (await session.prefetch()).in_memory == N and np.array_equal(session.chains[0].keys, seq.keys)
            assert session.log is not None and not session.log.failures

            async def is_at_rest() -> bool:
                return (await kv.status())[0].numbers["leases"] == 0

            await wait_until(is_at_rest, "no lease of a call that ended is left")
