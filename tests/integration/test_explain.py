"""Why a block is where it is, asked of a running node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess
from ucxkv.errors import UsageError
from ucxkv.node import Node, NodeConfig
from ucxkv.protocol import messages as m

BLOCK = 256 << 10
MEMORY = 4 << 20


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "tuc"])
async def test_what_was_evicted_says_when_and_why(policy: str) -> None:
    """Goal: the fate of a block that is gone, under each policy. Method: chains of many times the memory; the first is
    gone, the last is there and held by what hangs on it; a key that nobody ever put is not known."""
    config = NodeConfig(name="e1", listen="127.0.0.1:0", host_bytes=MEMORY, policy=policy)  # type: ignore[arg-type]
    async with Node(config) as node, ucxkv.connect(node.address) as kv:
        chains = [keys(4) for _ in range(12)]
        for seed, chain in enumerate(chains):
            parents = [bytes(16), *chain[:3]]
            (await kv.put_many(chain, blocks(4, BLOCK, seed=seed), parents)).raise_for_status()
        gone = [chain for chain in chains if not await kv.exists(chain[-1])][0]  # noqa: RUF015
        (past,) = await kv.explain(gone[-1])
        assert past.policy == policy and not past.tier and past.is_known
        assert past.decisions[0].verdict == "drop" and past.decisions[0].from_tier == "host"
        assert past.rule in past.decisions[0].reason and past.rule in past.why
        assert (past.decisions[0].hazard > 0) == (policy == "tuc")
        (here,) = await kv.explain(chains[-1][0])
        assert here.tier == "host" and here.children == 1 and here.nbytes == BLOCK and "1 block below it" in here.why
        (last,) = await kv.explain(chains[-1][-1])
        assert last.children == 0 and "its turn" in last.why and last.depth == (0 if policy == "lru" else 3)
        (never,) = await kv.explain(keys(1)[0])
        assert not never.is_known and "not stored" in never.why
        node.store.check()
        assert (await kv.status())[0].facts["policy"] == policy


async def test_a_block_tells_its_way_to_disk_and_back(tmp_path: Path) -> None:
    """Method: a working set of twice the memory on a node with a disk; a demoted block is explained, read, explained
    again, deleted, and explained once more. The disk's cost is measured on the way."""
    config = NodeConfig(
        name="e2", listen="127.0.0.1:0", host_bytes=MEMORY, disk=(str(tmp_path / "disk"),), disk_bytes=64 << 20
    )
    async with Node(config) as node, ucxkv.connect(node.address) as kv:
        chain, values = keys(32), blocks(32, BLOCK, seed=3)
        for at in range(0, 32, 4):
            parents = [chain[at - 1] if at else bytes(16), *chain[at : at + 3]]
            (await kv.put_many(chain[at : at + 4], values[at : at + 4], parents)).raise_for_status()
        stats = [await kv.explain(key) for key in chain]
        cold = [key for key, (one,) in zip(chain, stats, strict=True) if one.tier == "nvme"]
        assert cold
        (before,) = await kv.explain(cold[-1])
        assert before.has_copy and before.decisions[0].verdict == "demote" and before.decisions[0].to_tier == "nvme"
        got = await kv.get_many(chain)
        assert got.values == [np.asarray(value).tobytes() for value in values]
        (after,) = await kv.explain(cold[-1])
        assert {past.verdict for past in after.decisions} >= {"demote", "promote"}
        numbers = (await kv.status())[0].numbers
        assert numbers["disk_loads_measured"] > 0 and numbers["disk_load_bytes_s"] > 0
        assert numbers["decided_promotions"] > 0 and numbers["decided_demotions"] > 0
        await kv.delete([chain[-1]])
        (deleted,) = await kv.explain(chain[-1])
        assert deleted.decisions[0].reason == "deleted" and not deleted.tier
        node.store.check()


async def test_several_keys_at_once_are_refused() -> None:
    """Method: the message with two keys, and with none."""
    async with (
        Node(NodeConfig(name="e3", listen="127.0.0.1:0", host_bytes=MEMORY)) as node,
        ucxkv.connect(node.address) as kv,
    ):
        link = next(iter(kv._router.links.values()))
        for wrong in (bytes(32), b""):
            with pytest.raises(UsageError, match="ask for one"):
                await link.ask(m.Explain(wrong), kv._deadline(None))


def test_the_command_tells_a_miss_from_a_hit() -> None:
    """Goal: `ucxkv explain` for people and for programs. Method: a real node; a key that is there, one that was
    deleted, one that never was (exit code 1), and a word that is no key (exit code 2)."""
    with NodeProcess("e4", policy="tuc") as node:

        def ucxkv_(*arguments: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
            command = [sys.executable, "-m", "ucxkv", *arguments, "--address", node.address]
            return subprocess.run(command, input=data, capture_output=True, timeout=60)

        for name in ("name:a", "name:b"):
            assert ucxkv_("put", name, data=b"x" * 5000).returncode == 0
        assert ucxkv_("rm", "name:b").returncode == 0
        said = ucxkv_("explain", "name:a")
        assert said.returncode == 0 and said.stdout.startswith(b"e4: in memory, without a copy on disk"), said
        there = json.loads(ucxkv_("explain", "name:a", "--json").stdout)
        assert there["tier"] == "host" and there["node"] == "e4" and there["policy"] == "tuc"
        gone = json.loads(ucxkv_("explain", "name:b", "--json").stdout)
        assert gone["tier"] == "" and gone["decisions"][0]["reason"] == "deleted"
        assert ucxkv_("explain", "name:c").returncode == 1
        wrong = ucxkv_("explain", "what")
        assert wrong.returncode == 2 and b"is no key" in wrong.stderr
