"""A read never waits for another process's Python: the node's interpreter is busy, its blocks are read all the same."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess


@pytest.mark.parametrize("path", ["mapped", "rma", "message", "network"])
async def test_reads_are_served_while_the_nodes_python_is_blocked(node: NodeProcess, path: str) -> None:
    """Goal: rule 1 of the design. Method: block the node's interpreter for a second, send it a question that only its
    Python answers, and count the reads and look-ups that end before that answer comes.
    """
    async with ucxkv.connect(node.address, path=path, timeout_s=10) as kv:
        k, b = keys(16), blocks(16, 16_384)
        assert (await kv.put_many(k, b, "chain")).ok
        into = np.zeros_like(b)
        node.block_python()
        await asyncio.sleep(0.05)
        answer = asyncio.create_task(kv.status())
        reads = 0
        while not answer.done():
            into[:] = 0
            got = await kv.get_many(k, into)
            assert got.hits == 16 and (into == b).all()
            assert (await kv.match(k)).blocks == 16
            reads += 1
            await asyncio.sleep(0)
        assert (await answer)[0].numbers["blocks"] == 16
        assert reads >= 50, f"only {reads} reads while the node's Python was busy for a second"
