"""What tests of faults have in common: bounds, poison, and that everything returns to what it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import numpy as np

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, open_files, wait_until

__all__ = ["POISON", "bounded", "clean", "works"]

POISON = 0xAB
SLACK_S = 20.0
"""What a busy machine may add to a call's deadline before the test calls it a hang."""


@contextlib.asynccontextmanager
async def clean(node: NodeProcess, kv: ucxkv.Client) -> AsyncIterator[None]:
    """After the body: leases, sessions, grants, quarantine, descriptors and threads are as before."""
    names = (
        *("leases", "connections", "quarantined_bytes", "leaving_extents", "vanished_writers", "granted_bytes"),
        *("message_sessions", "message_grants", "message_closing"),
    )

    async def now() -> list[float]:
        kv._router.sole.putter.return_grants()
        return [(await kv.status())[0].numbers[name] for name in names]

    before, files = await now(), (open_files(), open_files(node.pid))
    threads = len(os.listdir(f"/proc/{node.pid}/task"))
    yield

    async def is_back() -> bool:
        try:
            return await now() == before
        except ucxkv.UcxKvError:
            return False

    await wait_until(is_back, f"{names} return to {before}", 30)
    await wait_until(lambda: open_files(node.pid) <= files[1] + 2, "descriptors of the node", 30)
    await wait_until(lambda: open_files() <= files[0] + 2, "descriptors of the client", 30)
    assert len(os.listdir(f"/proc/{node.pid}/task")) <= threads


async def bounded(call: object, deadline_s: float) -> object:
    """Await a call that was given this deadline; a hang fails the test."""
    return await asyncio.wait_for(call, deadline_s + SLACK_S)  # type: ignore[arg-type]


async def works(kv: ucxkv.Client) -> bool:
    """Whether a put and its get succeed now, with the right bytes."""
    k, b = keys(4), blocks(4, 50_000)
    try:
        if not (await kv.put_many(k, b, "chain", deadline_s=2)).ok:
            return False
        into = np.zeros_like(b)
        return (await kv.get_many(k, into, deadline_s=2)).hits == 4 and bool((into == b).all())
    except ucxkv.UcxKvError:
        return False
