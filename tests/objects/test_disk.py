"""Objects on a node with a disk: what leaves memory comes back, a kill -9 takes nothing back to an older version."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess
from tests.objects.test_loss import value_of
from ucxkv.node import Node, NodeConfig

MIB = 1 << 20


class Churn:
    """Puts, deletes and gets of 12 objects of up to 2 MiB among blocks of the cache, and what they came to."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.latest: dict[str, bytes] = {}
        self.misses = 0

    async def run(self, kv: ucxkv.Client, turns: int) -> None:
        """Each get is the latest value, or none."""
        for turn in range(turns):
            name = f"o{self._random.randrange(12)}"
            draw = self._random.random()
            if draw < 0.5:
                value = b"%d %d " % (turn, self._random.getrandbits(30))
                self.latest[name] = value + bytes(self._random.choice((0, 5000, 700_000, 2 * MIB)))
                await kv.objects.put(name, self.latest[name])
            elif draw < 0.6:
                await kv.objects.delete(name)
                self.latest.pop(name, None)
            else:
                await kv.put_many([os.urandom(16) for _ in range(8)], [os.urandom(65_536)] * 8)
            await self.look(kv, f"o{self._random.randrange(12)}")

    async def look(self, kv: ucxkv.Client, name: str) -> None:
        """One get."""
        got = value_of(await kv.objects.get(name))
        assert got in (None, self.latest.get(name)), name
        self.misses += got is None and name in self.latest


@pytest.mark.parametrize("path", ["mapped", "network"])
async def test_objects_larger_than_memory_are_read_from_disk(path: str, tmp_path: Path) -> None:
    """Goal: the same tiers as blocks. Method: 300 turns in 16 MiB of memory with a disk; no object is missed."""
    with NodeProcess(host_bytes="16MiB", disk=str(tmp_path / "disk"), disk_bytes="2GiB") as node:
        async with ucxkv.connect(node.address, path=path, timeout_s=60) as kv:
            churn = Churn(5)
            await churn.run(kv, 300)
            for name in sorted(churn.latest):
                await churn.look(kv, name)
            assert churn.misses == 0 and {info.name for info in await kv.objects.list()} == set(churn.latest)
            assert (await kv.status())[0].disk_reads > 10


async def test_no_older_version_is_there_after_kill_9(tmp_path: Path) -> None:
    """Goal: a restart from disk, which has what was copied by then, uncovers nothing. Method: five lives on one disk,
    each killed in the middle of it; afterwards each object is its latest value, or none, and some are there."""
    churn, found = Churn(6), 0
    for _ in range(5):
        with NodeProcess(host_bytes="16MiB", disk=str(tmp_path / "disk"), disk_bytes="2GiB") as node:
            async with ucxkv.connect(node.address, timeout_s=60) as kv:
                for name in [f"o{number}" for number in range(12)]:
                    before = churn.misses
                    await churn.look(kv, name)
                    if churn.misses > before:
                        del churn.latest[name]  # it went with the node
                    found += name in churn.latest
                await churn.run(kv, 60)
                node.kill()
    assert found > 5


async def test_an_object_is_never_stored_with_loss(tmp_path: Path) -> None:
    """Goal: a codec for KV does not touch what is none. Method: a node that encodes with int8 and has memory for a
    third; arrays of floats come back bit for bit, from disk."""
    pytest.importorskip("zstandard", reason="needs the extra codec")
    config = NodeConfig(
        name="exact", listen="127.0.0.1:0", host_bytes=16 << 20, disk=(str(tmp_path / "disk"),), disk_bytes=256 << 20,
        disk_codec="int8", disk_dtype="float32", disk_channels=128,
    )  # fmt: skip
    arrays = [np.random.default_rng(n).standard_normal(1 << 20).astype(np.float32) for n in range(12)]
    async with Node(config) as node, ucxkv.connect(node.address) as kv:
        for n, array in enumerate(arrays):
            await kv.objects.put(f"a{n}", array)
        for n, array in enumerate(arrays):
            found = await kv.objects.get(f"a{n}")
            assert found is not None and np.array_equal(found.value, array)
        assert (await kv.status())[0].numbers["disk_promoted"] > 0
