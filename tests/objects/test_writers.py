"""Several writers and readers of one object: a version has one writer, a get is one version, and nothing goes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess
from tests.objects.test_numbering import use_small_numbers
from ucxkv.objects import ABSENT, Version
from ucxkv.objects.chains import Chains, Claim, Position, Removal
from ucxkv.objects.records import BODY_BLOCK_BYTES, Body, root_key

PATHS = ("mapped", "message", "network")


async def clients(stack: contextlib.AsyncExitStack, address: str) -> list[ucxkv.Client]:
    """One client a path."""
    return [await stack.enter_async_context(ucxkv.connect(address, path=path, timeout_s=30)) for path in PATHS]


async def test_of_writers_that_expect_one_version_exactly_one_wins(node: NodeProcess) -> None:
    """Goal: compare-and-set over all paths, across the closing of runs. Method: three clients, four tasks each, count
    to 200 together: every number is put once, by the writer who was told so, and the last value is the count."""
    async with contextlib.AsyncExitStack() as stack:
        kvs = await clients(stack, node.address)
        await kvs[0].objects.put("count", (0).to_bytes(8, "little"))
        won: list[tuple[int, Version]] = []

        async def writer(kv: ucxkv.Client) -> None:
            while True:
                found = await kv.objects.get("count")
                assert found is not None and isinstance(found.value, bytearray)
                count = int.from_bytes(found.value, "little") + 1
                assert found.info.version.number == count
                if count > 200:
                    return
                with contextlib.suppress(ucxkv.VersionConflict):
                    value = count.to_bytes(8, "little")
                    won.append((count, await kv.objects.put("count", value, if_version=found.info.version)))

        async with asyncio.TaskGroup() as group:
            for kv in kvs * 4:
                group.create_task(writer(kv))
        assert sorted(count for count, _ in won) == list(range(1, 201))
        assert all(version.number == count + 1 for count, version in won)
        assert await kvs[0].objects.delete("count") and await kvs[1].list_keys() == []


async def test_writers_that_expect_nothing_all_get_a_version_of_their_own(node: NodeProcess) -> None:
    """Goal: no put is lost or doubled, creation and deletion included. Method: twelve tasks put 25 times each while one
    deletes; every put has a version of its own, and after the last delete nothing is left."""
    async with contextlib.AsyncExitStack() as stack:
        kvs = await clients(stack, node.address)
        versions: list[Version] = []

        async def writer(kv: ucxkv.Client, number: int) -> None:
            for turn in range(25):
                versions.append(await kv.objects.put("x", b"%d %d" % (number, turn)))

        async def remover(kv: ucxkv.Client) -> None:
            for _ in range(20):
                await kv.objects.delete("x")
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            for number, kv in enumerate(kvs * 4):
                group.create_task(writer(kv, number))
            group.create_task(remover(kvs[1]))
        assert len(set(versions)) == len(versions) == 300
        await kvs[2].objects.delete("x")
        assert await kvs[0].list_keys() == []


async def test_of_writers_that_create_an_object_exactly_one_does(shared_node: NodeProcess) -> None:
    """Goal: ABSENT is compare-and-set too. Method: twelve tasks create each of 20 names."""
    async with contextlib.AsyncExitStack() as stack:
        kvs = await clients(stack, shared_node.address)
        for _ in range(20):
            name = secrets.token_hex(8)
            puts = [kv.objects.put(name, b"%d" % i, if_version=ABSENT) for i, kv in enumerate(kvs * 4)]
            done = await asyncio.gather(*puts, return_exceptions=True)
            won = [i for i, one in enumerate(done) if isinstance(one, Version)]
            assert len(won) == 1 and all(isinstance(one, Version | ucxkv.VersionConflict) for one in done)
            found = await kvs[0].objects.get(name)
            assert found is not None and found.value == b"%d" % won[0]


async def test_a_get_is_one_version_whole_and_never_goes_back(node: NodeProcess) -> None:
    """Goal: no mix, no old value. Method: one client overwrites 4 MiB of one number by 4 MiB of the next, others read
    all the while; each read is of one number, the number is that of its version, and no reader sees it fall."""
    size = 4 * BODY_BLOCK_BYTES // 8
    is_done = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        kvs = await clients(stack, node.address)
        await kvs[0].objects.put("x", np.full(size, 1))
        reads = 0

        async def reader(kv: ucxkv.Client) -> None:
            nonlocal reads
            before, into = 0, np.zeros(size, np.int64)
            while not is_done.is_set():
                found = await kv.objects.get("x", into, deadline_s=60)
                assert found is not None
                number = found.info.version.number
                assert number >= before and (into == number).all()
                before, reads = number, reads + 1
                await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as group:
            for kv in kvs:
                group.create_task(reader(kv))
            for number in range(2, 60):
                await kvs[0].objects.put("x", np.full(size, number), deadline_s=60)
                await asyncio.sleep(0.02)
            is_done.set()
        assert reads > 10


@pytest.fixture
async def small_chains(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A client whose objects have short runs, and its chains."""
    use_small_numbers(monkeypatch)
    async with ucxkv.connect(node.address) as kv:
        yield kv, Chains(kv)


async def late_claim(chains: Chains, at: Position) -> Claim:
    """What becomes of a writer that saw the object so long ago."""
    claim, _ = await chains.claim(at, Body(os.urandom(16), 1), durable=False, deadline_ns=deadline())
    return claim


def deadline() -> int:
    """Half a minute from now."""
    return time.monotonic_ns() + 30_000_000_000


async def test_a_writer_that_slept_through_many_versions_loses(small_chains: tuple[ucxkv.Client, Chains]) -> None:
    """Goal: a version that was there once is nobody else's, though its header is long removed. Method: after each of 40
    versions, in runs of three, every writer that saw an earlier one tries; all lose, and the object is as it was."""
    kv, chains = small_chains
    seen = [await chains.locate("x", deadline())]
    for number in range(1, 41):
        version = await kv.objects.put("x", b"%d" % number)
        for at in seen:
            assert await late_claim(chains, at) is Claim.LOST
        at = await Chains(kv).locate("x", deadline())
        assert at.header is not None and at.header.version == version and version.number == number
        found = await kv.objects.get("x")
        assert found is not None and found.value == b"%d" % number
        seen.append(at)
    assert await kv.objects.delete("x") and await kv.list_keys() == []


async def test_a_writer_that_slept_through_a_deletion_loses(small_chains: tuple[ucxkv.Client, Chains]) -> None:
    """Goal: an object that was made anew is another one. Method: writers that saw versions 1 to 12 of the first life
    try at each version of the second; all lose, nothing of theirs stays."""
    kv, chains = small_chains
    seen = []
    for number in range(12):
        await kv.objects.put("x", b"first %d" % number)
        seen.append(await Chains(kv).locate("x", deadline()))
    await kv.objects.delete("x")
    for at in seen:
        assert await late_claim(chains, at) is Claim.LOST
    assert await kv.list_keys() == []
    for number in range(1, 13):
        version = await kv.objects.put("x", b"second %d" % number)
        for at in seen:
            assert await late_claim(chains, at) is Claim.LOST
        info = await kv.objects.stat("x")
        assert info is not None and info.version == version and version.number == number
    assert await kv.objects.delete("x") and await kv.list_keys() == []


async def test_a_removal_takes_nothing_that_was_put_since(small_chains: tuple[ucxkv.Client, Chains]) -> None:
    """Goal: a delete is of the version that it saw. Method: for each of 30 versions, a removal that saw the one before
    it, with a next version below it or beside it: it does not say that it is done, and the newest is there."""
    kv, chains = small_chains
    await kv.objects.put("x", b"1")
    for number in range(2, 31):
        at = await Chains(kv).locate("x", deadline())
        version = await kv.objects.put("x", b"%d" % number)
        assert await chains.remove(at, deadline()) is not Removal.DONE
        found = await kv.objects.get("x")
        assert found is not None and (found.value, found.info.version) == (b"%d" % number, version)
    assert await kv.objects.delete("x") and await kv.list_keys() == []


async def test_an_object_is_deleted_though_a_killed_writer_left_a_header_of_another_life(node: NodeProcess) -> None:
    """Goal: garbage below a root is in nobody's way. Method: a header of a life that is over lies below the root; the
    object is deleted, is a miss, and can be put and deleted again."""
    async with ucxkv.connect(node.address) as kv:
        version = await kv.objects.put("x", b"1")
        await kv.put(os.urandom(16), b"of another life", parent=root_key("x"))
        assert await kv.objects.delete("x", if_version=version)
        assert await kv.objects.get("x") is None and not await kv.objects.delete("x")
        assert (await kv.objects.put("x", b"2", if_version=ABSENT)).number == 1
        assert await kv.objects.delete("x") and await kv.objects.list() == []


async def test_a_put_cancelled_anywhere_leaves_the_old_value_or_the_new_one(node: NodeProcess) -> None:
    """Goal: cancellation is safe. Method: puts are cancelled after 0, 1, 2 ... turns of the loop, until one ends before
    that; each time the object is a value that was put, whole, none older than the last; what is left is swept away."""
    nbytes = 2 * BODY_BLOCK_BYTES
    async with ucxkv.connect(node.address) as kv, ucxkv.connect(node.address) as other:
        await kv.objects.put("x", np.full(nbytes // 8, -1))
        before, cancelled = -1, 0
        for turns in itertools.accumulate(itertools.count(), lambda turns, step: turns + 1 + step // 24):
            task = asyncio.create_task(kv.objects.put("x", np.full(nbytes // 8, turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            cancelled += isinstance(done, asyncio.CancelledError)
            found = await other.objects.get("x")
            assert found is not None and isinstance(found.value, np.ndarray)
            value = int(found.value[0])
            assert before <= value <= turns and (found.value == value).all()
            before = value
            if isinstance(done, Version):
                assert found.info.version == done and value == turns
                break
        assert cancelled > 3
        await kv.objects.sweep(older_than_s=0)
        assert await kv.objects.put("x", b"last") and await kv.objects.delete("x")
        assert [info for info in await kv.list_keys() if info.nbytes < BODY_BLOCK_BYTES] == []
