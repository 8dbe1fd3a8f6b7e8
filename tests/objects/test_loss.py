"""Objects when blocks of theirs are evicted, their writers killed, their nodes gone: a miss or the newest value, never
an old one, and nothing is left for ever."""

from __future__ import annotations

import asyncio
import os
import random
import time

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess, wait_until
from tests.integration.durable_nodes import Lives, lives
from tests.objects.killed import STEPS, killed_put
from ucxkv.node import Node, NodeConfig
from ucxkv.objects import ABSENT
from ucxkv.objects.chains import Chains, Claim
from ucxkv.objects.records import BODY_BLOCK_BYTES, Body, header_key, root_key
from ucxkv.objects.store import StoredObject

MIB = 1 << 20


def value_of(found: StoredObject | None) -> bytes | None:
    """The bytes, of an object of bytes."""
    assert found is None or isinstance(found.value, bytearray)
    return None if found is None else bytes(found.value)  # type: ignore[call-overload]


async def evict_header(kv: ucxkv.Client, name: str) -> None:
    """Take out the current version's header, a leaf, as an eviction may."""
    at = await Chains(kv).locate(name, time.monotonic_ns() + 10**10)
    assert at.header is not None and at.life is not None
    assert (await kv.delete([header_key(at.life, at.number)])).tolist() == [0]


async def test_without_its_newest_header_an_object_is_a_miss(node: NodeProcess) -> None:
    """Goal: a version that was overwritten never comes back. Method: of five versions the newest header goes, and the
    next, down to the root; each time the object is a miss, no old version is taken for the one to replace, and a put
    makes it whole again."""
    async with ucxkv.connect(node.address) as kv:
        versions = [await kv.objects.put("x", b"%d" % number) for number in range(1, 6)]
        for _ in range(5):
            await evict_header(kv, "x")
            assert await kv.objects.get("x") is None and await kv.objects.stat("x") is None
            assert await kv.objects.list() == []
            for version in versions:
                with pytest.raises(ucxkv.VersionConflict, match="there is none"):
                    await kv.objects.put("x", b"late", if_version=version)
        latest = await kv.objects.put("x", b"again", if_version=ABSENT)
        assert latest.number == 1 and latest not in versions
        assert value_of(await kv.objects.get("x")) == b"again"
        await evict_header(kv, "x")
        assert await kv.objects.put("x", b"once more")
        assert value_of(await kv.objects.get("x")) == b"once more"


async def test_what_a_killed_writer_did_not_remove_is_removed_by_the_next(
    node: NodeProcess,
) -> None:
    """Goal: the invariant behind "never an old value", when nobody is left to tidy up. Method: a writer dies before it
    removes version 1; version 3 is put; then the headers of 3 and 2 go, so that 1 is the newest: a miss."""
    async with ucxkv.connect(node.address) as kv:
        await kv.objects.put("x", b"old")
        killed_put(node.address, "x", b"\2", "claimed")
        await kv.objects.put("x", b"newest")
        await evict_header(kv, "x")
        assert await kv.objects.get("x") is None
        await evict_header(kv, "x")
        assert await kv.objects.get("x") is None


async def test_a_writer_that_slept_while_its_version_was_evicted_loses(node: NodeProcess) -> None:
    """Goal: a number that is given again after an eviction is another version. Method: a writer sees version 3; its
    header goes, another version 3 is put; the writer's claim on 4 is lost, and nothing of it stays."""
    async with ucxkv.connect(node.address) as kv:
        for number in range(1, 4):
            await kv.objects.put("x", b"%d" % number)
        at = await Chains(kv).locate("x", time.monotonic_ns() + 10**10)
        await evict_header(kv, "x")
        again = await kv.objects.put("x", b"again")
        claim, _ = await Chains(kv).claim(
            at, Body(os.urandom(16), 1), durable=False, deadline_ns=time.monotonic_ns() + 10**10
        )
        found = await kv.objects.get("x")
        assert claim is Claim.LOST and at.number == again.number == 3
        assert found is not None and (found.value, found.info.version) == (b"again", again)


async def test_without_a_block_of_its_body_an_object_is_a_miss(node: NodeProcess) -> None:
    """Goal: a value is whole or not there. Method: the seal goes, then a block below it, as evictions take them."""
    async with ucxkv.connect(node.address) as kv:
        await kv.objects.put("x", b"old")
        for blocks in (1, 2, 3):
            await kv.objects.put("x", bytes(2 * BODY_BLOCK_BYTES + 1))
            at = await Chains(kv).locate("x", time.monotonic_ns() + 10**10)
            assert (await kv.delete(at.body.keys()[-blocks:])).tolist() == [0] * blocks
            assert await kv.objects.get("x") is None
        await kv.objects.put("x", b"new", if_version=ABSENT)
        assert value_of(await kv.objects.get("x")) == b"new"
        assert await kv.objects.delete("x")


@pytest.mark.parametrize("path", ["mapped", "network"])
async def test_under_memory_pressure_a_get_is_the_newest_value_or_a_miss(path: str) -> None:
    """Goal: real evictions, in any order, never bring an old value back. Method: 12 objects of up to 2 MiB are put over
    and over in a node of 16 MiB among blocks of the cache; each get is a miss or what was put last, listed ones too."""
    rng = random.Random(5)
    with NodeProcess(host_bytes="16MiB") as node:
        async with ucxkv.connect(node.address, path=path, timeout_s=30) as kv:
            latest: dict[str, bytes] = {}
            misses = hits = 0
            for turn in range(300):
                name = f"o{rng.randrange(12)}"
                if rng.random() < 0.5:
                    value = b"%d " % turn + bytes(rng.choice((0, 5000, 700_000, 2 * MIB)))
                    await kv.objects.put(name, value)
                    latest[name] = value
                    assert value_of(await kv.objects.get(name)) == value
                else:
                    await kv.put_many([os.urandom(16) for _ in range(8)], [os.urandom(65_536)] * 8)
                name = f"o{rng.randrange(12)}"
                got = value_of(await kv.objects.get(name))
                assert got in (None, latest.get(name)), f"turn {turn}: {name}"
                misses, hits = misses + (got is None and name in latest), hits + (got is not None)
            assert misses > 10 and hits > 10
            for info in await kv.objects.list():
                assert info.nbytes == len(latest[info.name])
            assert (await kv.status())[0].evicted > 100


async def test_a_body_is_evicted_before_the_header_that_names_it() -> None:
    """Goal: where the order of use decides, an eviction frees what an object loses by it. Method: the order of lru's
    leaves after puts, and after gets; a header comes later than its seal."""
    async with Node(NodeConfig(name="n", listen="127.0.0.1:0", host_bytes=64 << 20, policy="lru")) as node:
        async with ucxkv.connect(node.address) as kv:
            for _ in range(2):
                for name in ("a", "b"):
                    await kv.objects.put(name, b"value")
            for read in ((), ("b",), ("a", "b"), ("a",)):
                for name in read:
                    assert await kv.objects.get(name) is not None
                await kv.status()  # what was read is reported before
                directory = node.store.directory
                leaves = [directory.words.key(slot) for slot in directory.ranking.policy.leaves()]
                for name in ("a", "b"):
                    at = await Chains(kv).locate(name, time.monotonic_ns() + 10**10)
                    assert at.life is not None
                    seal, header = (leaves.index(key) for key in (at.body.seal_key, header_key(at.life, at.number)))
                    assert seal < header


async def test_a_value_larger_than_the_node_is_refused_and_leaves_the_old_one() -> None:
    """Goal: no room is said. Method: 40 MiB for a node of 16 MiB; the old value may be evicted, no other is there."""
    with NodeProcess(host_bytes="16MiB") as node:
        async with ucxkv.connect(node.address) as kv:
            await kv.objects.put("x", b"old")
            with pytest.raises(ucxkv.Unavailable):
                await kv.objects.put("x", np.zeros(40 * MIB, np.uint8), deadline_s=5)
            assert value_of(await kv.objects.get("x")) in (b"old", None)
            await kv.objects.put("x", b"new")
            assert value_of(await kv.objects.get("x")) == b"new"


@pytest.mark.parametrize("step", STEPS)
async def test_a_killed_writer_leaves_one_value_and_what_is_left_goes(node: NodeProcess, step: str) -> None:
    """Goal: garbage is bounded. Method: a writer dies in the middle of a put, ten times; the object is the old value,
    or the new one once that was claimed; the next put, a sweep and a delete leave only blocks without a seal."""
    async with ucxkv.connect(node.address) as kv:
        first = await kv.objects.put("x", b"old")
        for turn in range(1, 11):
            new = bytes([turn]) * (BODY_BLOCK_BYTES + 7)
            killed_put(node.address, "x", new, step)
            found = await kv.objects.get("x")
            assert value_of(found) == (new if step == "claimed" else b"old")
            assert found is not None and found.info.version.number == first.number + (turn if step == "claimed" else 0)
        assert await kv.objects.put("x", b"next")
        assert await kv.objects.sweep() == 0  # nothing is old enough
        swept = await kv.objects.sweep(older_than_s=0)
        assert swept == (10 if step == "sealed" else 0)
        assert value_of(await kv.objects.get("x")) == b"next"
        assert await kv.objects.delete("x")
        left = await kv.list_keys()
        assert len(left) == (10 if step == "half" else 0) and all(info.nbytes == BODY_BLOCK_BYTES for info in left)


@pytest.fixture
def durable_lives() -> object:
    """A node with a state folder of its own."""
    with lives(f"o{os.getpid()}") as own:
        yield own


async def test_durable_objects_are_there_after_kill_9(durable_lives: Lives) -> None:
    """Goal: what was acknowledged durable survives, in its newest version. Method: three objects, one with a long
    chain, one made durable late, one of class cache; kill -9, twice; versions go on, deletes last."""
    value = np.random.default_rng(3).standard_normal((400, 700))
    with durable_lives.process() as node:
        async with ucxkv.connect(node.address) as kv:
            for number in range(70):
                long = await kv.objects.put("long", b"%d" % number, durable=True)
            for number in range(3):
                await kv.objects.put("late", b"%d" % number)
            late = await kv.objects.put("late", value, durable=True)
            await kv.objects.put("cache", b"x")
        node.kill()
    with durable_lives.process() as node:
        async with ucxkv.connect(node.address) as kv:
            assert [info.name for info in await kv.objects.list()] == ["late", "long"]
            found = await kv.objects.get("late")
            assert found is not None and np.array_equal(found.value, value) and found.info.is_durable  # type: ignore[arg-type]
            assert found.info.version == late
            assert value_of(await kv.objects.get("long")) == b"69"
            assert (await kv.objects.put("long", b"70", if_version=long, durable=True)).number == long.number + 1
            await kv.objects.put("late", b"of class cache")
        node.kill()
    with durable_lives.process() as node:
        async with ucxkv.connect(node.address) as kv:
            assert value_of(await kv.objects.get("long")) == b"70"
            assert await kv.objects.get("late") is None  # the durable value was overwritten by one that was not
            assert await kv.objects.delete("long")
            await kv.objects.put("late", b"", durable=True)
            await kv.objects.delete("late")
        node.kill()
    with durable_lives.process() as node:
        async with ucxkv.connect(node.address) as kv:
            assert await kv.list_keys() == [] and await kv.objects.list() == []


async def test_durable_values_of_killed_writers_are_swept_or_evictable(durable_lives: Lives) -> None:
    """Goal: durable garbage does not pile up. Method: writers die at each step; of their bodies only the sealed ones
    are durable, and these a sweep removes; the node holds no more durable blocks than the object needs."""
    with durable_lives.process() as node:
        async with ucxkv.connect(node.address) as kv:
            await kv.objects.put("x", b"old", durable=True)
            needed = (await kv.status())[0].durable_blocks
            for step, more in (("half", 0), ("sealed", 3), ("claimed", 4)):
                killed_put(node.address, "x", b"\5" * (BODY_BLOCK_BYTES + 7), step, durable=True)
                assert (await kv.status())[0].durable_blocks == needed + more
                assert await kv.objects.sweep(older_than_s=0) == (step != "half")
                await kv.objects.put("x", b"old", durable=True)
                needed += 2 if step == "claimed" else 1
                assert (await kv.status())[0].durable_blocks == needed
            assert await kv.objects.delete("x")
            assert (await kv.status())[0].durable_blocks == 0


async def test_a_kill_of_the_node_while_writers_put_loses_no_acknowledged_version(durable_lives: Lives) -> None:
    """Goal: an acknowledged durable version is never followed by an older one. Method: six lives, each killed under
    three writers of three objects; afterwards each object has the number that was acknowledged last, or a later one,
    and the bytes that belong to it."""
    acknowledged = {f"o{i}": 0 for i in range(3)}

    async def writer(kv: ucxkv.Client, name: str) -> None:
        while True:
            number = acknowledged[name] + 1
            found = await kv.objects.stat(name)
            number = found.version.number + 1 if found is not None else 1
            value = np.full(30_000, number)
            try:
                version = await kv.objects.put(name, value, durable=True, deadline_s=5)
            except ucxkv.Unavailable:
                return
            assert version.number == number
            acknowledged[name] = number

    for _ in range(6):
        with durable_lives.process() as node:
            async with ucxkv.connect(node.address) as kv:
                for name, number in acknowledged.items():
                    found = await kv.objects.get(name)
                    got = found.info.version.number if found is not None else 0
                    assert number <= got <= number + 1
                    if found is not None:
                        assert isinstance(found.value, np.ndarray) and (found.value == got).all()
                tasks = [asyncio.create_task(writer(kv, name)) for name in acknowledged]
                await asyncio.sleep(0.4)
                node.kill()
                for done in await asyncio.gather(*tasks, return_exceptions=True):
                    assert done is None or isinstance(done, ucxkv.Unavailable), done
    assert all(acknowledged.values())


async def test_a_node_that_is_gone_is_an_error_within_the_deadline(node: NodeProcess) -> None:
    """Goal: not knowing is not a miss. Method: a read at once after kill -9, which may still find the value in mapped
    memory; then every call, when the client has seen it."""
    async with ucxkv.connect(node.address, timeout_s=2) as kv:
        await kv.objects.put("x", b"1")
        node.kill()
        try:
            assert value_of(await kv.objects.get("x")) == b"1"
        except ucxkv.Unavailable:
            pass
        await wait_until(lambda: not kv.peers()[0].alive, "the client sees the end of the node")
        objects = kv.objects
        for call in (objects.get, objects.stat, objects.delete, lambda name: objects.put(name, b"2")):
            with pytest.raises(ucxkv.Unavailable):
                await call("x")


async def test_a_root_without_a_version_is_no_object(node: NodeProcess) -> None:
    """Goal: a writer that died before its first header leaves a name that works. Method: a root alone."""
    from ucxkv.objects.records import Root

    async with ucxkv.connect(node.address) as kv:
        await kv.put(root_key("x"), Root(os.urandom(16), "x").to_bytes())
        assert await kv.objects.get("x") is None and await kv.objects.list() == [] and not await kv.objects.delete("x")
        assert (await kv.objects.put("x", b"1", if_version=ABSENT)).number == 1
        assert await kv.objects.delete("x") and await kv.list_keys() == []
