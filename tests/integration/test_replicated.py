"""Shards of a cluster on real nodes: durable blocks on several of them, and what is left when some are killed."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest
import xxhash

import ucxkv
from tests.harness import ROOT, wait_until
from tests.integration.replicas import Trio, Writer, connected
from ucxkv import PutStatus, errors
from ucxkv.node import Node
from ucxkv.node.config import NodeConfig

pytestmark = [pytest.mark.faults, pytest.mark.replicas, pytest.mark.timeout(180)]


async def command(*words: str) -> tuple[int, str]:
    """Run `ucxkv` with these words: its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ucxkv", *words,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_a_durable_block_outlives_its_leader(trio: Trio) -> None:
    """Goal: I8 with replicas: 0 acknowledged durable blocks lost. Method: two nodes; one is killed for good; what it
    led is led by the other, whole, and puts go on."""
    trio.start("a", "b")
    await trio.settled(followed=4)
    writer = Writer(1)
    async with connected(trio) as kv:
        assert await writer.put(kv, 60) == 60
        await writer.delete_tails(kv, 4)
        await trio.settled(followed=4)  # on a busy machine a member may have fallen behind: alone it takes nothing over
        trio.kill("a")
        assert await writer.put(kv, 30) >= 25
        await writer.check(kv)
    assert len(writer.gone) >= 3


async def test_all_nodes_killed_at_once_come_back_with_all(trio: Trio) -> None:
    """Goal: durability = process with nothing beside the nodes. Method: kill both amid puts, start both."""
    trio.start("a", "b")
    await trio.settled(followed=4)
    writer = Writer(2)
    async with connected(trio) as kv:
        assert await writer.put(kv, 50) == 50
        await writer.delete_tails(kv, 3)
        trio.kill("a", "b")
    trio.start("a", "b")
    await trio.settled(followed=4)
    async with connected(trio) as kv:
        await writer.check(kv)
        assert await writer.put(kv, 10) == 10
        await writer.check(kv)


async def test_one_after_the_other_is_killed_and_returns(trio: Trio) -> None:
    """Goal: a member that was away catches up before it may lead. Method: a dies, puts, a returns, b dies and
    so on."""
    trio.start("a", "b")
    await trio.settled(followed=4)
    writer = Writer(3)
    for victim in ("a", "b", "a", "b"):
        async with connected(trio) as kv:
            assert await writer.put(kv, 15) >= 14
        trio.kill(victim)
        async with connected(trio) as kv:
            await writer.put(kv, 10)
            await writer.delete_tails(kv, 2)
            await writer.check(kv)
        trio.start(victim)
        await trio.settled(followed=4)
    async with connected(trio) as kv:
        await writer.check(kv)


async def test_a_node_that_never_had_the_shard_takes_it_over_whole(trio: Trio) -> None:
    """Goal: a new member gets log and values. Method: c joins two nodes, which are then killed for good one by one."""
    trio.start("a", "b")
    await trio.settled(followed=4)
    writer = Writer(4)
    async with connected(trio) as kv:
        assert await writer.put(kv, 80) == 80
    trio.start("c")
    await asyncio.sleep(1)
    for victim in ("a", "b"):
        await trio.settled(followed=4)
        trio.kill(victim)
        async with connected(trio) as kv:
            await writer.check(kv)
            await asyncio.sleep(20 if victim == "a" else 0)  # it counts as away then, and its place is another's


async def test_a_leader_that_sleeps_past_its_lease_wakes_deposed(trio: Trio) -> None:
    """Study, fault test 3. Goal: a frozen leader shows nothing stale when it wakes. Method: SIGSTOP past the lease; the
    other one takes over, deletes and puts; the sleeper wakes, and clients that still know it see the new state alone.
    """
    trio.start("a", "b")
    await trio.settled(followed=4)
    writer = Writer(5)
    async with connected(trio) as kv, ucxkv.connect(trio.nodes["a"].address, timeout_s=10) as old:
        assert await writer.put(kv, 40) == 40
        await writer.check(old)
        trio.nodes["a"].freeze()
        await writer.put(kv, 15)
        await writer.delete_tails(kv, 4)
        trio.nodes["a"].thaw()
        for key in writer.gone:
            assert await old.get(key) is None
        await writer.check(old)
        await trio.settled(followed=4)
        assert await writer.put(kv, 15) >= 14
        await writer.check(kv)


async def test_memory_alone_with_replicas_survives_one_death(trio: Trio) -> None:
    """Goal: durable without a journal: in the memories of two nodes. Method: no state folders; one is killed."""
    trio.start("a", "b", durability="memory")
    await trio.settled(followed=4)
    writer = Writer(6)
    async with connected(trio) as kv:
        assert await writer.put(kv, 40) == 40
        trio.kill("b")
        await writer.check(kv)


async def test_a_drained_node_holds_nothing_and_nothing_is_lost(trio: Trio) -> None:
    """Goal: `ucxkv drain NODE` moves shards and durable blocks away. Method: two nodes drain one of them while puts go
    on; it is killed then; `--undo` lets it hold shards again."""
    trio.start("a", "b", "c")
    await trio.settled(followed=4)
    writer = Writer(7)

    async def drain(*options: str) -> str:
        code, said = await command("drain", "a", "--cluster", trio.url, *options)
        assert code == 0
        return said

    async with connected(trio) as kv:
        assert await writer.put(kv, 40) == 40
        draining = asyncio.create_task(drain())
        await writer.put(kv, 40)
        assert "holds no shard" in await draining
        trio.kill("a")
        await writer.check(kv)
        assert await writer.put(kv, 10) == 10
        trio.start("a")
        assert "again" in await drain("--undo")
        await trio.settled(followed=4)
        await writer.check(kv)


async def test_a_leader_knows_its_values_while_it_may_not_answer() -> None:
    """Goal: a follower is never told that a value is gone which is there: it would confirm without it, and lead without
    it later. Method: a node's lease ends; readers are refused, and where the value lies is known all the same."""
    async with Node(NodeConfig(name="n", listen="127.0.0.1:0", host_bytes=64 << 20)) as node:
        async with ucxkv.connect(node.address) as kv:
            key, value = os.urandom(16), os.urandom(5000)
            assert await kv.put(key, value) is PutStatus.STORED
        node.lease_until(0)
        place = node.store.place_of(key)
        assert place is not None
        assert bytes(node.store.segment.view[place.offset : place.offset + place.length]) == value
        assert place.sum == xxhash.xxh3_64_intdigest(value) and node.store.place_of(os.urandom(16)) is None


async def test_a_node_that_is_still_joining_welcomes_no_client(trio: Trio) -> None:
    """Goal: nobody takes a node that leads nothing yet for one that knows everything. Method: a client dials a node
    over and over from before it listens; whenever it gets in, it has been told of the shards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    starting = asyncio.create_task(asyncio.to_thread(trio.start, "a", listen=f"127.0.0.1:{port}"))
    turned_away = 0
    for _ in range(4000):
        try:
            async with ucxkv.connect(f"127.0.0.1:{port}", timeout_s=2) as kv:
                assert [link.welcome.shards for link in kv._router.links.values()] == [4]
                if starting.done():
                    break
        except errors.Unavailable as exc:
            turned_away += "joining" in str(exc)
            await asyncio.sleep(0.001)
    await starting
    assert turned_away, "the node was never seen while it joined"


async def test_a_shard_whose_holders_are_gone_for_good_is_given_another_leader(trio: Trio) -> None:
    """Goal: no cluster is dead for ever. Method: both holders of all shards lose their folders; two nodes start, wait,
    and `ucxkv status` says for whom; `ucxkv elect` refuses without --accept-loss, and then the cluster goes on."""
    trio.start("a", "b")
    await trio.settled(followed=4)
    writer = Writer(8)
    async with connected(trio) as kv:
        assert await writer.put(kv, 20) == 20
    trio.kill("a", "b")
    trio.lose_disk("a")
    trio.lose_disk("b")
    trio.start("c", "a")

    async def waits() -> bool:
        async with connected(trio) as kv:
            return all("wait for a node" in report.facts["shards"] for report in await kv.status())

    await wait_until(waits, "both nodes say what they wait for", 30)
    assert await command("elect", "--cluster", trio.url) == (2, "")
    code, said = await command("elect", "--cluster", trio.url, "--accept-loss")
    assert code == 0 and said.count("is led by") == 4
    await trio.settled(followed=4)
    async with connected(trio) as kv:
        fresh = Writer(9)
        assert await fresh.put(kv, 20) == 20
        await fresh.check(kv)
    assert (await command("elect", "--cluster", trio.url))[1].startswith("every shard has a live holder")


@pytest.mark.parametrize("trio", [1], indirect=True)
async def test_a_cache_without_durable_blocks_loses_nothing_but_its_blocks(trio: Trio) -> None:
    """Goal: nobody has to act when a node of a plain cache dies. Method: the defaults, one copy and no journal; a node
    is killed and returns: all shards are led again; it is killed for good: the other leads all, and puts go on."""
    trio.start("a", "b", durability="memory")
    await trio.settled(followed=0)
    async with connected(trio) as kv:
        assert await kv.put(os.urandom(16), b"v") is PutStatus.STORED
        trio.kill("a")
        trio.start("a", durability="memory")
        await trio.settled(followed=0)
        trio.kill("a")
        await trio.settled(followed=0)
        for _ in range(20):
            assert await kv.put(os.urandom(16), b"v", deadline_s=30) is PutStatus.STORED
