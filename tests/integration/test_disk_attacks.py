"""More attacks on a disk tier: what it finds at its start, keys that change hands while they are written, and books that
must not count the disk's bytes as memory's."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import blocks, keys
from tests.faults import bounded, works
from tests.integration.test_disk import BLOCK, MIB, life, numbers
from ucxkv import PutStatus


async def test_blocks_longer_than_memory_of_an_earlier_life_cost_no_other_block_its_memory(tmp_path: Path) -> None:
    """Goal: a node that starts again with less memory serves what fits. Method: short blocks and one that is longer
    than the next life's memory, which goes on below it; the short ones come back together with the long one's key, again
    and again; the long one is a miss, all of memory can be used, and it can be put anew in a life with room."""
    short, values, long = keys(8), blocks(8, BLOCK, seed=21), blocks(1, 5 * MIB, seed=22)[0]
    top, below = keys(2)
    async with life(tmp_path) as (_, kv):
        assert (await kv.put_many(short, values)).ok
        assert await kv.put(top, long) is PutStatus.STORED
        assert await kv.put(below, values[0], top) is PutStatus.STORED
    async with life(tmp_path, host_bytes=4 * MIB) as (node, kv):
        for _ in range(6):
            got = await bounded(kv.get_many([*short, top, below]), 20)
            assert got.values == [*(value.tobytes() for value in values), None, None]
        assert node.disk is not None and not node.disk.promoter.in_hand
        assert (await kv.match([top, below])).blocks == 0 and await works(kv)
        assert (await numbers(kv))["disk_blocks"] + (await numbers(kv))["disk_promoted"] >= 8
    async with life(tmp_path) as (_, kv):
        assert (await kv.match([top, below])).blocks == 2 and await kv.get(top) == long.tobytes()
