"""Reads by a session's token at replicas of real nodes: what was put is seen, what was deleted is not, led or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TypeAlias

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess, wait_until
from tests.integration.replicas import SHARDS, Trio
from ucxkv import DeleteStatus, PutStatus, ReadStatus, Token, errors

pytestmark = [pytest.mark.faults, pytest.mark.replicas, pytest.mark.timeout(180)]
PATHS = pytest.mark.parametrize("path", ["mapped", "message"])


async def ready(trio: Trio) -> None:
    """Start a and b, which follow what the other leads; each leads what it is to lead in the long run."""
    trio.start("a", "b")

    async def is_so() -> bool:
        await trio.settled(followed=SHARDS)
        async with ucxkv.connect(trio.url, timeout_s=5) as kv:
            return (leads(kv, "a"), leads(kv, "b")) == (3, 1)

    await wait_until(is_so, "b leads its shard", 60)


@contextlib.asynccontextmanager
async def connected(trio: Trio, path: str = "auto") -> AsyncIterator[ucxkv.Client]:
    """A client of both, by this path."""
    async with ucxkv.connect(trio.url, timeout_s=10, path=path) as kv:
        yield kv


Chain: TypeAlias = tuple[list[bytes], list[bytes]]


def chain(length: int, size: int = 5000) -> Chain:
    """Keys and values."""
    return [os.urandom(16) for _ in range(length)], [os.urandom(size) for _ in range(length)]


async def put(kv: ucxkv.Client, keys: list[bytes], values: list[bytes]) -> Token:
    """Put a durable chain: its token."""
    result = await kv.put_many(keys, values, "chain", durable=True, deadline_s=30)
    result.raise_for_status()
    assert result.token
    return result.token


def leads(kv: ucxkv.Client, name: str) -> int:
    """How many shards a node leads that this client reaches."""
    return sum(peer.leads for peer in kv.peers() if peer.name == name and peer.alive)


async def led_by(trio: Trio, kv: ucxkv.Client, name: str, length: int = 4, size: int = 5000) -> Chain:
    """A chain that this node leads, put."""
    for _ in range(64):
        keys, values = chain(length, size)
        if (await trio.config(keys[0])).leader.name == name:
            await put(kv, keys, values)
            return keys, values
    raise AssertionError(f"{name} leads nothing")


@PATHS
async def test_a_session_reads_its_writes_at_a_follower_whose_leader_is_dead(trio: Trio, path: str) -> None:
    """Goal: read-your-writes before anybody has taken over. Method: put, delete the last, kill the leader at once: the
    follower answers by the token alone; with values in pieces and of several answers' size; a read without a token
    says still that nobody leads."""
    await ready(trio)
    async with connected(trio, path) as kv:
        keys, values = await led_by(trio, kv, "a", 5, 700_000)
        before = kv.token
        more, (last,) = chain(1)
        assert await kv.put(more[0], last, keys[-1], durable=True) is PutStatus.STORED
        written = kv.token
        assert before < written
        (status,) = (await kv.delete(more)).tolist()
        assert status == DeleteStatus.DELETED and written < kv.token
        trio.kill("a")
        await wait_until(
            lambda: not leads(kv, "a"), "the client knows", 10
        )  # it may read a dead node's memory until then
        result = await kv.get_many([*keys, *more], root=keys[0], after=kv.token)
        match = await kv.match([*keys, *more], after=kv.token)
        halves = [[bytearray(300_000), bytearray(400_000)] for _ in keys]
        scattered = await kv.get_many(keys, halves, root=keys[0], after=kv.token)
        alone = await kv.get(keys[2], after=Token.from_bytes(kv.token.to_bytes()))
        plain = await kv.get_many(keys, root=keys[0])
        assert (plain.status == ReadStatus.UNAVAILABLE).all(), "the follower took over too soon for this test"
        assert result.sources == {"b": 5} and result.values is not None
        assert result.values == [*values, None] and result.status[-1] == ReadStatus.UNAVAILABLE
        assert (match.blocks, match.is_certain) == (5, False) and (match.load_s > 0).all()
        assert scattered.hits == 5 and [b"".join(pieces) for pieces in halves] == values
        assert alone == values[2]

        async def is_led() -> bool:
            found = await kv.get_many([*keys, *more], root=keys[0], after=kv.token)
            assert found.values is not None and found.values[-1] is None, "a deleted block came back"
            assert (found.status[:-1] != ReadStatus.MISS).all()
            return found.values[:-1] == values and found.status[-1] == ReadStatus.MISS

        await wait_until(is_led, "b leads", 30)


@PATHS
async def test_a_follower_answers_when_it_is_as_far_and_the_leader_until_then(trio: Trio, path: str) -> None:
    """Goal: read-your-writes and deletes at once, wherever; replicas take part. Method: chains in all shards, each read
    right after its put and after its delete, with and without its root; some are answered by who does not lead."""
    await ready(trio)
    by_follower = 0
    async with connected(trio, path) as kv:
        for _ in range(40):
            keys, values = chain(3)
            token = await put(kv, keys, values)
            seen = kv.token
            result = await kv.get_many(keys, root=keys[0], after=token)
            assert result.values == values
            assert await kv.get(keys[1], after=token) == values[1]
            into = np.zeros(len(values[2]), np.uint8)
            assert await kv.get(keys[2], into, after=token) == len(into) and into.tobytes() == values[2]
            assert (await kv.match(keys, after=token)).blocks == 3
            by_follower += list(result.sources) != [(await trio.config(keys[0])).leader.name]
            assert (await kv.delete(keys[2:])).tolist() == [DeleteStatus.DELETED]
            assert seen <= kv.token
            result = await kv.get_many(keys, root=keys[0], after=kv.token)
            assert result.values == [*values[:2], None] and result.status[2] == ReadStatus.MISS
            assert await kv.get(keys[2], after=kv.token) is None
            assert (await kv.match(keys, after=kv.token)).blocks == 2
        assert 5 <= by_follower <= 35
        assert len(kv.token.points) <= 4
        with pytest.raises(errors.UsageError, match="exactly"):
            await kv.get(keys[0], bytearray(7), after=kv.token)
        with pytest.raises(errors.UsageError, match="cluster"):
            await kv.get(keys[0], after=Token.from_bytes(b"\1\1\0" + b"\xff\0" + bytes(8) + b"\1" + bytes(7)))


async def test_a_cache_block_has_no_token_and_its_leader_alone(trio: Trio) -> None:
    """Goal: the cache class is in no log. Method: put one, read it with tokens while its leader lives, and after."""
    await ready(trio)
    async with connected(trio) as kv:
        keys, values = await led_by(trio, kv, "a")
        token, (key,) = kv.token, chain(1)[0]
        assert await kv.put(key, b"cached", keys[-1]) is PutStatus.STORED
        assert kv.token == token
        assert await kv.get(key, after=token) == b"cached"
        whole = await kv.get_many([*keys, key], root=keys[0], after=token)
        assert whole.values == [*values, b"cached"]
        match = await kv.match([*keys, key], after=token)
        assert (match.blocks, match.is_certain) == (5, True)
        trio.kill("a")
        await wait_until(lambda: not leads(kv, "a"), "the client knows", 10)
        whole = await kv.get_many([*keys, key], root=keys[0], after=token)
        assert whole.values == [*values, None] and whole.status[-1] != ReadStatus.HIT


@PATHS
async def test_a_follower_that_lags_is_passed_over(trio: Trio, path: str) -> None:
    """Goal: no state before the token's is shown, even where nobody else is left. Method: freeze the follower until the
    leader goes on without it, put and delete, kill the leader for good, and wake the follower: it answers to the old
    token, and to no newer one."""
    await ready(trio)
    async with connected(trio, path) as kv:
        keys, values = await led_by(trio, kv, "a")
        old = kv.token
        trio.nodes["b"].freeze()
        more, newer = chain(1)

        async def is_stored() -> bool:  # a leader that loses its lease on a busy machine says UNAVAILABLE once
            status = await kv.put(more[0], newer[0], keys[-2], durable=True, deadline_s=30)
            return status in (PutStatus.STORED, PutStatus.ALREADY)

        await wait_until(is_stored, "the leader goes on without the follower", 60)

        async def leads_all() -> bool:
            result = await kv.get_many(keys, root=keys[0])  # which has it notice another epoch
            return result.hits == len(keys) and leads(kv, "a") == SHARDS

        await wait_until(leads_all, "a leads all", 30)
        async with ucxkv.connect(trio.nodes["a"].address, timeout_s=3) as other:  # it has no link to who sleeps
            assert (await other.delete(keys[-1:])).tolist() == [DeleteStatus.DELETED]
            new = kv.token | Token.from_bytes(other.token.to_bytes())
        assert old < new
        result = await kv.get_many([*keys, *more], root=keys[0], after=new)
        assert result.values == [*values[:-1], None, *newer] and result.status[-2] == ReadStatus.MISS
        trio.kill("a")
        await wait_until(lambda: not leads(kv, "a"), "the client knows", 10)
        trio.nodes["b"].thaw()

        async def is_answered() -> bool:
            found = await kv.get_many([*keys, *more], root=keys[0], after=new, deadline_s=2)
            assert (found.status == ReadStatus.UNAVAILABLE).all(), "a state before the token's was shown"
            found = await kv.get_many([*keys, *more], root=keys[0], after=old, deadline_s=2)
            return found.values == [*values, None]

        await wait_until(is_answered, "b answers to the old token", 30)
        match = await kv.match([*keys[:-1], *more], after=new)
        assert (match.blocks, match.is_certain) == (0, False)


async def test_places_are_held_for_readers_while_blocks_come_and_go(trio: Trio) -> None:
    """Goal: wrong bytes never, and reads that are answered, while the memory under them is reused. Method: one client
    puts and deletes in the shards that b follows, another reads by token over b's mapped memory all the time."""
    await ready(trio)
    hits = 0
    async with connected(trio) as kv, connected(trio) as reader:
        keys, values = await led_by(trio, kv, "a", 2, 200_000)
        is_over = False

        async def churn() -> None:
            nonlocal is_over
            try:
                for _ in range(120):
                    tail, value = chain(1, 200_000)
                    status = await kv.put(tail[0], value[0], keys[-1], durable=True)
                    while status is PutStatus.UNAVAILABLE:  # a lease was lost on a busy machine
                        status = await kv.put(tail[0], value[0], keys[-1], durable=True)
                    assert status in (PutStatus.STORED, PutStatus.ALREADY)
                    found = await kv.get(tail[0], after=kv.token)
                    assert found == value[0]
                    assert (await kv.delete(tail)).tolist() == [DeleteStatus.DELETED]
                    assert await kv.get(tail[0], after=kv.token) is None
            finally:
                is_over = True

        work = asyncio.create_task(churn())
        while not is_over:
            result = await reader.get_many(keys, root=keys[0], after=reader.token)
            assert result.values == values
            hits += result.hits
            await asyncio.sleep(0)  # reads of mapped memory may all be done without a pause
        await work
        reports = await kv.status()
        assert min(report.numbers["free_bytes"] for report in reports) > 0
    assert hits > 100


async def test_without_shards_a_token_is_refused_by_name() -> None:
    """Goal: the error says why. Method: one node alone."""
    with NodeProcess() as node:
        async with ucxkv.connect(node.address) as kv:
            assert await kv.put(os.urandom(16), b"x") is PutStatus.STORED
            assert kv.token == Token()
            for call in (
                kv.get(os.urandom(16), after=Token()),
                kv.get_many([os.urandom(16)], after=Token()),
                kv.match([os.urandom(16)], after=Token()),
            ):
                with pytest.raises(errors.UsageError, match="leave after= out"):
                    await call
