"""Objects in a cluster: on several nodes, in shards, and when the leader of their shard is killed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess, wait_until
from tests.integration.replicas import Trio, connected, trio_of
from tests.sharded import ShardedNode
from ucxkv.objects import Version


@contextlib.asynccontextmanager
async def plain_pair() -> AsyncIterator[list[str]]:
    """Two nodes without a control plane: a chain's home is drawn from its root."""
    with NodeProcess("a") as a, NodeProcess("b", join=a.address) as b:
        yield [a.address, b.address]


@contextlib.asynccontextmanager
async def sharded_pair() -> AsyncIterator[list[str]]:
    """Two nodes that lead four shards each."""
    async with ShardedNode("a", range(4)) as a, ShardedNode("b", range(4, 8), (a.address,)) as b:
        await wait_until(lambda: len(b.peers.members()) == 2, "the nodes know each other")
        yield [a.address, b.address]


async def ready(address: str, stack: contextlib.AsyncExitStack, **options: str) -> ucxkv.Client:
    """A client that sees both nodes."""
    kv = await stack.enter_async_context(ucxkv.connect(address, timeout_s=20, **options))  # type: ignore[arg-type]
    await wait_until(lambda: sum(peer.alive for peer in kv.peers()) == 2, "both nodes are seen")
    return kv


@pytest.mark.parametrize("pair", [plain_pair, sharded_pair])
async def test_objects_are_the_same_for_clients_of_every_node(pair) -> None:  # type: ignore[no-untyped-def]
    """Goal: a name is one object in a cluster. Method: 12 names, put in turns by clients of two nodes over two paths,
    80 times one of them; all see the newest; expectations, lists and deletes agree; the nodes share the blocks."""
    async with pair() as addresses, contextlib.AsyncExitStack() as stack:
        kvs = [await ready(addresses[0], stack), await ready(addresses[1], stack, path="network")]
        newest: dict[str, Version] = {}
        for turn in range(36):
            name = f"o{turn % 12:02}"
            newest[name] = await kvs[turn % 2].objects.put(name, np.full(200_000, turn))
        for turn in range(80):
            newest["o00"] = await kvs[turn % 2].objects.put("o00", np.full(10, turn), if_version=newest["o00"])
        for kv in kvs:
            assert {info.name: info.version for info in await kv.objects.list()} == newest
            for name, version in newest.items():
                found = await kv.objects.get(name)
                assert found is not None and found.info.version == version and isinstance(found.value, np.ndarray)
                assert (found.value == found.value[0]).all()
        with pytest.raises(ucxkv.VersionConflict):
            await kvs[0].objects.put("o01", b"x", if_version=newest["o02"])
        assert all(report.blocks > 5 for report in await kvs[0].status())
        for turn, name in enumerate(newest):
            assert await kvs[turn % 2].objects.delete(name)
        for kv in kvs:
            assert await kv.objects.list() == [] and await kv.list_keys() == []


async def test_a_name_whose_shard_has_no_leader_is_unknown_and_no_miss() -> None:
    """Goal: not knowing is not absence. Method: a leader gives its shards up; objects there are Unavailable, the others
    are served, and nobody can create one that may be there."""
    async with ShardedNode("a", range(4)) as a, ShardedNode("b", range(4, 8), (a.address,)) as b:
        await wait_until(lambda: len(b.peers.members()) == 2, "the nodes know each other")
        async with contextlib.AsyncExitStack() as stack:
            kv = await ready(a.address, stack)
            names = [f"o{number}" for number in range(12)]
            for name in names:
                await kv.objects.put(name, name.encode())
            b.lead(())
            known = unknown = 0
            for name in names:
                try:
                    found = await kv.objects.get(name, deadline_s=2)
                except ucxkv.Unavailable:
                    unknown += 1
                    with pytest.raises(ucxkv.Unavailable):
                        await kv.objects.put(name, b"new", deadline_s=0.3)
                else:
                    known += 1
                    assert found is not None and found.value == name.encode()
            assert known and unknown


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Trio]:
    """Nodes a, b and c of a cluster that keeps two replicas of everything durable; none is started."""
    with trio_of(tmp_path, 2) as made:
        yield made


@pytest.mark.replicas
@pytest.mark.timeout(180)
async def test_durable_objects_outlive_the_leader_of_their_shards(trio: Trio) -> None:
    """Goal: a durable version that was acknowledged survives a node for good. Method: two nodes, ten objects in several
    versions; one node is killed; each object is there in its last version, and is put again from there."""
    trio.start("a", "b")
    await trio.settled(followed=4)
    newest: dict[str, tuple[Version, bytes]] = {}
    async with connected(trio) as kv:
        for turn in range(30):
            name, value = f"o{turn % 10}", b"%d " % turn * 5000
            newest[name] = await kv.objects.put(name, value, durable=True, deadline_s=30), value
        await trio.settled(followed=4)
        trio.kill("a")

        async def is_whole() -> bool:
            try:
                for name, (version, value) in newest.items():
                    found = await kv.objects.get(name, deadline_s=5)
                    assert found is not None and (found.info.version, found.value) == (version, value)
            except ucxkv.Unavailable:
                return False
            return True

        await wait_until(is_whole, "every object is there", 60)
        for name, (version, _) in newest.items():
            after = await kv.objects.put(name, b"after", if_version=version, durable=True, deadline_s=30)
            assert after.number == version.number + 1
