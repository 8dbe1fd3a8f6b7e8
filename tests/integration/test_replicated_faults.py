"""Fault tests of the directory's study on real nodes with replicas, those that no other module has; all sixteen are
listed in docs/verification.md. The guarantees that are checked: docs/correctness.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest

import ucxkv
from tests.harness import NodeProcess, wait_until
from tests.integration.programs import DYING, doom
from tests.integration.replicas import LEASE_MS, SHARDS, Trio, Writer, connected, journal_states
from ucxkv import DeleteStatus, PutStatus, errors
from ucxkv.ids import ROOT_KEY
from ucxkv.sharding import ShardRule

pytestmark = [pytest.mark.faults, pytest.mark.replicas, pytest.mark.timeout(300)]


async def _leader(trio: Trio, root: bytes) -> str:
    return (await trio.config(root)).leader.name


async def test_a_leader_killed_at_steps_of_a_put_and_a_delete(trio: Trio, tmp_path: Path) -> None:
    """Study, fault test 1. Goal: what was answered holds, the rest is a prefix, no deleted block is back. Method: the
    leader of a chain dies some steps after it began to work on a put of three blocks and on a delete of others: before,
    between and behind the log's and the replies' calls; the other node answers; the dead one returns."""
    files = {name: tmp_path / f"{name}.steps" for name in ("a", "b")}
    programs = {name: DYING.replace("STEPS_FILE", str(path)) for name, path in files.items()}
    for name in files:
        trio.start(name, program=programs[name])
    await trio.settled(followed=SHARDS)
    rng = random.Random(31)
    for steps in (1, 5, 9, 14, 20, 30):
        old, new = [rng.randbytes(16) for _ in range(3)], [rng.randbytes(16) for _ in range(3)]
        values = [rng.randbytes(3000) for _ in range(3)]
        async with connected(trio) as kv:
            assert (await kv.put_many(old, values, "chain", durable=True, deadline_s=20)).ok
            victim = await _leader(trio, new[0] if steps % 2 else old[0])
            doom(trio.nodes[victim], files[victim], steps)
            put = asyncio.create_task(kv.put_many(new, values, "chain", durable=True, deadline_s=20))
            deleted = (await kv.delete(old[1:], deadline_s=20)).tolist()
            stored = (await put).status.tolist()
            trio.kill(victim)

            async def seen(chain: list[bytes], kv: ucxkv.Client = kv, values: list[bytes] = values) -> list[bool]:
                found: list[bytes | None] = []

                async def is_known() -> bool:
                    result = await kv.get_many(chain, root=chain[0], deadline_s=5)
                    found[:] = result.values
                    return not (result.status == ucxkv.ReadStatus.UNAVAILABLE).any()

                await wait_until(is_known, "its shard answers", 30)
                assert all(value in (None, right) for value, right in zip(found, values, strict=True))
                return [value is not None for value in found]

            there = await seen(new)
            assert there == sorted(there, reverse=True), "a hole"
            assert all(is_there or state != PutStatus.STORED for is_there, state in zip(there, stored, strict=True))
            left = await seen(old)
            assert left == sorted(left, reverse=True) and left[0]
            assert all(not is_there or s != DeleteStatus.DELETED for is_there, s in zip(left[1:], deleted, strict=True))
        trio.start(victim, program=programs[victim])
        await trio.settled(followed=SHARDS)
        async with connected(trio) as kv:
            assert (await seen(new, kv), await seen(old, kv)) == (there, left)


async def test_a_member_that_lost_its_disk_or_the_end_of_its_journal_is_filled_again(trio: Trio) -> None:
    """Study, fault test 2. Goal: a member leads only what it has whole. Method: a member is killed and its disk is
    empty, or its log is cut at some byte; it returns while the leader lives and catches up, four times; the other one
    is killed, it has everything; at last both journals say the same."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer, rng = Writer(32), random.Random(32)
    for victim, way in (("a", "empty"), ("b", "cut"), ("a", "cut"), ("b", "cut")):
        async with connected(trio) as kv:
            assert await writer.put(kv, 12) >= 11
            trio.kill(victim)
            await writer.put(kv, 5)
            await writer.delete_tails(kv, 2)
            if way == "empty":
                trio.lose_disk(victim)
            else:
                _cut(trio.state(victim) / "journal", rng)
            trio.start(victim)
            await trio.settled(followed=SHARDS)
            await writer.check(kv)
    trio.kill("a")
    async with connected(trio) as kv:
        await writer.check(kv)
    trio.start("a")
    await trio.settled(followed=SHARDS)
    await _same_in_the_end(trio, writer, "a", "b")


def _cut(journal: Path, rng: random.Random) -> None:
    """Nothing behind some byte of the newest log file has reached the disk; the file is as long as it was made."""
    for path in sorted(journal.glob("log-*"), reverse=True):
        raw = path.read_bytes()
        used = len(raw.rstrip(b"\0"))
        if used > 8192:
            end = rng.randrange(used // 2, used)
            path.write_bytes(raw[:end] + bytes(len(raw) - end))
            return
    raise AssertionError(f"no log in {sorted(journal.iterdir())}")


async def _same_in_the_end(trio: Trio, writer: Writer, *names: str) -> None:
    """Stop these nodes; their journals come to the same state, which is the writer's."""
    await asyncio.sleep(1)  # what followers confirmed, they apply with the next heartbeat
    for name in names:
        await asyncio.to_thread(trio.nodes[name].stop)
    states = [await journal_states(trio.state(name)) for name in names]
    rule = ShardRule(SHARDS)
    for shard in range(SHARDS):
        held = [state[shard] for state in states if state.get(shard)]
        wanted = {key for chain in writer.chains if chain and rule.own(chain[0]) == shard for key in chain}
        assert all(state == held[0] for state in held), f"shard {shard} differs"
        assert not wanted or len(held) == len(names), f"shard {shard} is not on all"
        assert not held or wanted <= held[0].keys(), f"shard {shard} lacks blocks"
        assert not held or not writer.gone & held[0].keys(), f"shard {shard} has what was deleted"


async def test_the_control_plane_is_gone_for_longer_than_the_lease(trio: Trio) -> None:
    """Study, fault test 4. Goal: serve until the lease ends, then stop; go on by themselves, with everything. Method:
    the control plane's file is held; what is acknowledged meanwhile counts; puts and reads end by their deadlines;
    it comes back."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer = Writer(34)
    async with connected(trio) as kv:
        assert await writer.put(kv, 30) == 30
        with contextlib.closing(sqlite3.connect(trio.url.removeprefix("sqlite://"), isolation_level=None)) as db:
            db.execute("begin immediate")
            until_s = time.monotonic() + 4 * LEASE_MS / 1e3
            last = 1
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                last = await writer.put(kv, 1, deadline_s=0.5)
                assert time.monotonic() - began_s < 10
            assert last == 0, "acknowledged long after the lease"
            result = await kv.get_many(list(writer.values), deadline_s=5)
            assert (result.status == ucxkv.ReadStatus.UNAVAILABLE).all(), "read long after the lease"
            db.execute("rollback")
        await trio.settled(followed=SHARDS)
        await writer.check(kv)
        assert await writer.put(kv, 10) >= 9
    await _same_in_the_end(trio, writer, "a", "b")


async def test_a_put_of_unknown_outcome_put_again_is_one_put(trio: Trio) -> None:
    """Study, fault test 6. Goal: exactly one Commit. Method: the leader is stopped under puts, whose outcome nobody
    knows; they are put again at the next leader; the old one wakes, with the first puts on their way, and all are
    deleted at once: no block is back, there and after all nodes were killed."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    keys, value = [os.urandom(16) for _ in range(12)], os.urandom(2000)
    async with connected(trio) as kv:
        for key in keys:
            assert await kv.put(key, b"warm" + key) is PutStatus.STORED  # class cache: it is upgraded
        trio.nodes["a"].freeze()
        first = [kv.put(key, b"warm" + key, durable=True, deadline_s=0.5) for key in keys]
        others = [kv.put(os.urandom(16), value, durable=True, deadline_s=0.5) for _ in keys]
        await asyncio.gather(*first, *others, return_exceptions=True)
        for key in keys:

            async def is_stored(key: bytes = key) -> bool:
                status = await kv.put(key, b"warm" + key, durable=True, deadline_s=1)
                return status in (PutStatus.STORED, PutStatus.ALREADY)

            await wait_until(is_stored, "the next leader takes it", 40)
        trio.nodes["a"].thaw()
        states = (await kv.delete(keys, deadline_s=30)).tolist()
        gone = [key for key, state in zip(keys, states, strict=True) if state == DeleteStatus.DELETED]
        assert gone, states
        await trio.settled(followed=SHARDS)
        assert not (await kv.exists_many(gone)).any()
    trio.kill("a", "b")
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    async with connected(trio) as kv:
        assert not (await kv.exists_many(gone)).any()


async def test_two_writers_of_one_durable_key_leave_one_value_on_all_replicas(trio: Trio) -> None:
    """Study, fault test 8. Goal: one put wins whole. Method: two clients put other bytes under the same twenty keys at
    once; every reader sees the winner's; so do those of the next leader."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    keys = [os.urandom(16) for _ in range(20)]
    async with connected(trio) as one, connected(trio) as two:
        puts = [
            kv.put(key, bytes((number,)) * 20_000, durable=True, deadline_s=30)
            for key in keys
            for number, kv in ((1, one), (2, two))
        ]
        states = await asyncio.gather(*puts)
        won = [1 if states[2 * i] is PutStatus.STORED else 2 for i in range(len(keys))]
        for i in range(len(keys)):
            assert {states[2 * i], states[2 * i + 1]} == {PutStatus.STORED, PutStatus.ALREADY}
        right = [bytes((number,)) * 20_000 for number in won]
        assert (await one.get_many(keys)).values == (await two.get_many(keys)).values == right
        trio.kill("a")

        async def is_there() -> bool:
            result = await two.get_many(keys, deadline_s=5)
            assert all(value in (None, wanted) for value, wanted in zip(result.values, right, strict=True))
            return result.values == right

        await wait_until(is_there, "the next leader has them", 40)


async def test_a_long_chain_is_looked_up_while_its_leader_fails(trio: Trio) -> None:
    """Study, fault test 11. Goal: a look-up during a failover tells of a whole chain, or that it cannot know. Method:
    300 durable blocks, matched and read without a pause while their leader is killed and returns, twice."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    chain = [os.urandom(16) for _ in range(300)]
    values = [key * 40 for key in chain]
    seen = {"certain": 0, "uncertain": 0, "hit": 0, "unavailable": 0}
    async with connected(trio) as kv, connected(trio) as other:
        for at in range(0, 300, 50):
            parents = [chain[at - 1] if at else ROOT_KEY, *chain[at : at + 49]]
            done = await kv.put_many(chain[at : at + 50], values[at : at + 50], parents, durable=True, deadline_s=30)
            assert done.ok, done.status

        async def look() -> None:
            while True:
                match = await other.match(chain, deadline_s=3)
                assert match.blocks == 300 or not match.is_certain, match
                seen["certain" if match.is_certain else "uncertain"] += 1
                result = await other.get_many(chain, root=chain[0], deadline_s=3)
                for state, value, right in zip(result.status.tolist(), result.values, values, strict=True):
                    assert value == right or (value is None and state == ucxkv.ReadStatus.UNAVAILABLE), state
                seen["hit" if result.hits == 300 else "unavailable"] += 1
                await asyncio.sleep(0.01)

        looking = asyncio.create_task(look())
        for _ in range(2):
            leader = await _leader(trio, chain[0])
            trio.kill(leader)
            before = seen["hit"]
            await wait_until(lambda before=before: seen["hit"] > before + 3 or looking.done(), "it is read again", 40)
            await asyncio.to_thread(trio.start, leader)
            await trio.settled(followed=SHARDS)
            assert not looking.done(), looking.exception()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert seen["hit"] > 5 and seen["uncertain"] + seen["unavailable"] > 0, seen


async def test_a_slow_member_delays_puts_and_fills_nobodys_memory(trio: Trio) -> None:
    """Study, fault test 15. Goal: back-pressure, deadlines, no growth without bounds. Method: one of two nodes runs a
    tenth of the time (stopped, let go, again and again) while puts of 64 KiB go on: each ends by its deadline; the
    memory of the other grows by less than it keeps; then both are well."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer = Writer(35)
    async with connected(trio) as kv:
        assert await writer.put(kv, 20) == 20
        before = _resident_bytes(trio.nodes["a"])
        until_s, is_over = time.monotonic() + 8, False

        async def slow() -> None:
            while not is_over:
                os.kill(trio.nodes["b"].pid, signal.SIGSTOP)
                await asyncio.sleep(0.09)
                os.kill(trio.nodes["b"].pid, signal.SIGCONT)
                await asyncio.sleep(0.01)

        slowing = asyncio.create_task(slow())
        stored = 0
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            stored += await writer.put(kv, 1, deadline_s=5)
            assert time.monotonic() - began_s < 15
        is_over = True
        await slowing
        assert stored
        assert _resident_bytes(trio.nodes["a"]) - before < 64 << 20
        await trio.settled(followed=SHARDS)
        await writer.check(kv)
    trio.kill("a")
    async with connected(trio) as kv:
        await writer.check(kv)


async def test_a_member_without_room_is_said_and_puts_end(trio: Trio) -> None:
    """Study, fault test 15, memory exhausted. Goal: a full member takes nobody down and hides nothing. Method: one of
    two nodes has a quarter of the other's memory; more durable puts than it has room for: each
    ends in a status; all acknowledged ones are read; after deletes the small one follows again, and puts go on."""
    trio.start("a")
    trio.start("b", host_bytes="16MiB")
    await trio.settled(followed=SHARDS)
    blocks: list[bytes] = []
    value = os.urandom(256 << 10)
    async with connected(trio) as kv:
        for _ in range(110):  # 27 MiB
            key = os.urandom(16)
            with contextlib.suppress(errors.Overloaded):
                status = await kv.put(key, value, durable=True, deadline_s=5)
                assert status in (PutStatus.STORED, PutStatus.NO_SPACE, PutStatus.UNAVAILABLE, PutStatus.BUSY), status
                if status is PutStatus.STORED:
                    blocks.append(key)
        assert len(blocks) > 20

        async def all_read() -> bool:
            result = await kv.get_many(blocks, deadline_s=10)
            assert all(found in (None, value) for found in result.values)
            return result.hits == len(blocks)

        await wait_until(all_read, "what was acknowledged is there", 30)
        assert all(node.process.poll() is None for node in trio.nodes.values())
        for key in blocks[5:]:

            async def is_gone(key: bytes = key) -> bool:
                return (await kv.delete([key], deadline_s=5)).tolist()[0] in (DeleteStatus.DELETED, DeleteStatus.MISS)

            await wait_until(is_gone, "it is deleted", 30)
        await trio.settled(followed=SHARDS)
        assert await kv.put(os.urandom(16), value, durable=True, deadline_s=20) is PutStatus.STORED


def _resident_bytes(node: NodeProcess) -> int:
    """Of its own, not of the segment, which is shared."""
    for line in Path(f"/proc/{node.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


async def test_random_faults_from_a_seed_end_in_equal_states_and_flat_memory(trio: Trio) -> None:
    """Study, fault test 16, in small; in large scripts/cluster_faults.py and simulate_faults.py. Goal: nothing is lost,
    nothing grows. Method: six kills, stops and restarts of nodes chosen by a seed, puts and deletes between
    them; at the end the journals of all come to one state a shard."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer, rng = Writer(36), random.Random(36)
    for _ in range(6):
        victim, way = rng.choice("ab"), rng.choice(("kill", "stop", "freeze"))
        async with connected(trio) as kv:
            await writer.put(kv, rng.randrange(5, 15))
            if way == "kill":
                trio.kill(victim)
            elif way == "stop":
                assert await asyncio.to_thread(trio.nodes[victim].stop) == 0
            else:
                trio.nodes[victim].freeze()
            await writer.put(kv, 5)
            await writer.delete_tails(kv, rng.randrange(4))
            if way == "freeze":
                trio.nodes[victim].thaw()
            else:
                await asyncio.to_thread(trio.start, victim)
            await trio.settled(followed=SHARDS)
            await writer.check(kv)
    assert all(_resident_bytes(node) < 400 << 20 for node in trio.nodes.values())
    await _same_in_the_end(trio, writer, "a", "b")
