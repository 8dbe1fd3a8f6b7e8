"""A slot that a peer may still write is never given to another: attacked on every path by writers that keep no promise.

The attacker is tests/writer.py, a process that uses the real calls of its path. The victims are clients that fill the
whole tier with known bytes, so that every extent the attacker ever held would be one of theirs if it were free. A block
that another wrote has a sum that differs: `corrupt` or `stale` in the victim's count, `damaged` in the node's.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, wait_until
from tests.stepping import Ended, cancel_at_every_await, never_inline, threads_running
from tests.wire import RawPeer
from tests.writer import WRITER_PATHS, Writer
from ucxkv import PutStatus, ReadStatus
from ucxkv.node import Node, NodeConfig
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy

pytestmark = pytest.mark.faults

MIB = 1 << 20
LENGTH = 100_000
HELD = 18
BLOCKS = 160
"""What the tier of 16 MiB holds of LENGTH, and a little more."""
CLIENT_PATHS = ("mapped", "message", "network", "rma")


async def number(kv: ucxkv.Client, name: str) -> float:
    """One number of the only node's report."""
    return (await kv.status())[0].numbers[name]


async def is_number(kv: ucxkv.Client, name: str, value: float) -> bool:
    return await number(kv, name) == value


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    """A node of 16 MiB of the test's own: quickly filled."""
    with NodeProcess(host_bytes="16MiB") as node:
        yield node


class Victim:
    """Fills the tier of one node with blocks of the attacker's size and proves them."""

    def __init__(self, kv: ucxkv.Client) -> None:
        self._kv = kv
        self._keys: list[bytes] = []
        self._seed = 0
        self._bytes = np.empty((0, LENGTH), np.uint8)

    async def fill(self) -> None:
        """More than the tier holds, three times over: every extent that is free or becomes free is used."""
        for _ in range(3):
            self._seed += 1
            self._keys, self._bytes = keys(BLOCKS), blocks(BLOCKS, LENGTH, self._seed)
            assert (await self._kv.put_many(self._keys, self._bytes, deadline_s=60)).ok

    async def prove(self) -> None:
        """What is left of the last fill is right, byte by byte, and nobody found a wrong sum."""
        into = np.zeros_like(self._bytes)
        got = await self._kv.get_many(self._keys, into, deadline_s=60)
        counts = self._kv.stats()
        assert counts["corrupt"] == 0 and counts["stale"] == 0, "a slot of an attacker was given to another"
        hit = got.status == ReadStatus.HIT
        assert hit.sum() > 100 and (into[hit] == self._bytes[hit]).all()
        assert set(got.status.tolist()) <= {ReadStatus.HIT, ReadStatus.MISS}
        assert await number(self._kv, "damaged") == 0


async def all_back(kv: ucxkv.Client) -> None:
    """Of the attackers nothing is left: grants, quarantine, sessions, data sessions and their grants."""
    kv._router.sole.putter.return_grants()
    for name in ("granted_bytes", "quarantined_bytes", "vanished_writers", "leases", "writing"):
        await wait_until(lambda name=name: is_number(kv, name, 0), f"{name} is 0")
    await wait_until(lambda: is_number(kv, "connections", 1), "sessions are gone")
    for name in ("message_sessions", "message_grants"):
        await wait_until(lambda name=name: is_number(kv, name, 0), f"{name} is 0")


# ---- late, stopped and killed writers


@pytest.mark.parametrize("path", WRITER_PATHS)
@pytest.mark.parametrize("way", ["scribble-all", "put-raw"])
async def test_a_late_writer_after_its_disconnect_reaches_nothing_of_others(
    node: NodeProcess, path: str, way: str
) -> None:
    """Method: hold 40 extents, write them all the time, end the control connection without Bye and write on, by the
    path's messages and by UCX's own put; others fill the tier meanwhile and twice more.
    """
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        victim, writer = Victim(kv), await asyncio.to_thread(Writer, node.address, path)
        try:
            assert int(writer.tell(f"grant {LENGTH} {HELD}")) == HELD
            assert int(writer.tell(way)) == HELD, "the attack does not reach its own extents"
            assert writer.tell(f"flood {way}") == "flooding"
            await victim.fill()
            assert writer.tell("close") == "closed"
            await wait_until(lambda: is_number(kv, "connections", 1), "the end of its connection is seen")
            for _ in range(2):
                await victim.fill()
                await asyncio.sleep(0.1)
                await victim.prove()
            if path != "network" and way == "scribble-all":
                assert await number(kv, "quarantined_bytes") >= HELD * LENGTH
            assert writer.is_alive, "the attack ended by itself"
        finally:
            writer.end()
        await victim.prove()
        await all_back(kv)
        await victim.fill()
        await victim.prove()


@pytest.mark.parametrize("path", WRITER_PATHS)
async def test_a_stopped_writer_that_wakes_after_its_slots_were_reclaimed_reaches_nothing(
    node: NodeProcess, path: str
) -> None:
    """Method: the writer ends its connection and writes on; SIGSTOP in the middle of that; others fill the tier;
    SIGCONT: it goes on where it was.
    """
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        victim, writer = Victim(kv), await asyncio.to_thread(Writer, node.address, path)
        try:
            assert int(writer.tell(f"grant {LENGTH} {HELD}")) == HELD
            assert writer.tell("flood scribble-all") == "flooding"
            assert writer.tell("close") == "closed"
            for _ in range(3):
                writer.signal(signal.SIGSTOP)
                await wait_until(lambda: is_number(kv, "connections", 1), "the end of its connection is seen")
                await victim.fill()
                writer.signal(signal.SIGCONT)
                await asyncio.sleep(0.1)
                await victim.prove()
            assert writer.is_alive, "the attack ended by itself"
        finally:
            writer.end()
        await all_back(kv)


@pytest.mark.parametrize("path", WRITER_PATHS)
async def test_writers_killed_while_they_write_leave_nothing_and_reach_nothing(node: NodeProcess, path: str) -> None:
    """Method: kill -9 in the middle of writes into granted extents, five times; others fill the tier at once."""
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        victim = Victim(kv)
        for round_ in range(5):
            writer = await asyncio.to_thread(Writer, node.address, path)
            try:
                assert int(writer.tell(f"grant {LENGTH} {HELD}")) == HELD
                assert writer.tell("flood scribble-all") == "flooding"
                await asyncio.sleep(0.003 * round_)
            finally:
                writer.end()
            await victim.fill()
            await victim.prove()
            await all_back(kv)


async def test_a_writer_killed_between_grant_and_commit_leaves_nothing(node: NodeProcess) -> None:
    """User voice 14. Method: kill -9 writers that hold grants; another client puts the same key; space is back."""
    async with ucxkv.connect(node.address) as kv:
        free = await number(kv, "free_bytes")
        for path in WRITER_PATHS:
            writer = await asyncio.to_thread(Writer, node.address, path)
            assert int(writer.tell("grant 600000 3")) == 3
            assert await number(kv, "granted_bytes") >= 1_800_000
            writer.end()
            await all_back(kv)
        assert await number(kv, "free_bytes") == free
        assert await kv.put(keys(1)[0], bytes(1_000_000)) is PutStatus.STORED


# ---- extents with a new meaning: committed, returned, adopted by another node


@pytest.mark.parametrize("path", ["message", "network"])
async def test_a_committed_or_returned_extent_takes_no_more_writes(node: NodeProcess, path: str) -> None:
    """Method: commit five blocks, return the other extents, write all of them again: each write is refused."""
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        writer = await asyncio.to_thread(Writer, node.address, path)
        try:
            assert int(writer.tell(f"grant {LENGTH} {HELD}")) == HELD
            mine = keys(5)
            for key in mine:
                assert writer.tell(f"put {key.hex()}") == str(int(PutStatus.STORED))
            assert writer.tell("return") == "returned"
            refused = await number(kv, "message_refused")
            assert int(writer.tell("scribble-all")) == HELD
            await wait_until(lambda: is_number(kv, "message_refused", refused + HELD), "every write is refused")
            for key in mine:
                assert await kv.get(key) == b"\x11" * LENGTH
            victim = Victim(kv)
            assert writer.tell("flood scribble-all") == "flooding"
            await victim.fill()
            await victim.prove()
            assert writer.is_alive, "the attack ended by itself"
        finally:
            writer.end()
        await all_back(kv)


@pytest.mark.parametrize("path", WRITER_PATHS)
async def test_opening_the_data_path_again_takes_no_promise_away(node: NodeProcess, path: str) -> None:
    """Method: a second OpenData on one connection (the first one of a mapped client); then the late writer's attack."""
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        victim, writer = Victim(kv), await asyncio.to_thread(Writer, node.address, path)
        try:
            assert int(writer.tell(f"grant {LENGTH} {HELD}")) == HELD
            assert writer.tell("open-data") == ("DataOpened" if path == "mapped" else "Failure")
            assert writer.tell("flood scribble-all") == "flooding"
            assert writer.tell("close") == "closed"
            await wait_until(lambda: is_number(kv, "connections", 1), "the end of its connection is seen")
            await victim.fill()
            await asyncio.sleep(0.1)
            await victim.prove()
            assert writer.is_alive, "the attack ended by itself"
        finally:
            writer.end()
        await all_back(kv)


async def test_an_extent_that_another_node_adopted_takes_no_more_writes_of_its_writer() -> None:
    """Method: a writer by messages at node n2; a put at n1 that names its extent, so that n1 adopts it; write again."""
    one = NodeConfig(name="n1", listen="127.0.0.1:0", host_bytes=16 * MIB)
    async with Node(one) as home:
        two = NodeConfig(name="n2", listen="127.0.0.1:0", host_bytes=16 * MIB, join=(home.address,))
        async with Node(two) as holder:
            writer = await asyncio.to_thread(Writer, holder.address, "message")
            try:
                assert await asyncio.to_thread(writer.tell, f"grant {LENGTH} 1") == "1"
                assert await asyncio.to_thread(writer.tell, "scribble-all") == "1"
                await wait_until(lambda: holder.service.numbers()["message_writes"] == 1, "the write is done")
                session = int(await asyncio.to_thread(writer.tell, "session"))
                (extent,) = holder.store.grants.lent_to(session)
                view = holder.store.segment.view[extent.offset : extent.offset + LENGTH]
                part = m.PutPart(
                    keys(1)[0],
                    bytes(16),
                    bytes(2),
                    extent.offset.to_bytes(8, "little"),
                    LENGTH.to_bytes(4, "little"),
                    tier_copy.sum_bytes(view).to_bytes(8, "little"),
                    part=0,
                    parts=2,
                    put_id=1,
                    owner=holder.node_id,
                    owner_session=session,
                    deadline_ms=20_000,
                )

                def ask() -> object:
                    with RawPeer(home.address) as peer:
                        peer.open()
                        return peer.ask(part)

                done = await asyncio.to_thread(ask)
                assert isinstance(done, m.PutDone) and done.status[0] == PutStatus.SEALED, done
                assert holder.store.adoption.bytes_of("n1") >= LENGTH
                view[:] = b"\x22" * LENGTH
                await asyncio.to_thread(writer.tell, "scribble-all")
                await wait_until(lambda: holder.service.numbers()["message_refused"] == 1, "the write is refused")
                assert view == b"\x22" * LENGTH, "written by a session that no longer holds it"
                view.release()
            finally:
                writer.end()
            await wait_until(lambda: holder.store.grants.quarantined_bytes == 0, "nothing waits")
            home.store.check(), holder.store.check()


async def test_what_a_put_around_the_protocol_spoils_is_never_a_hit(node: NodeProcess) -> None:
    """UCX's TCP checks no key: who can reach the node's UCX port can write its memory, whatever the protocol says (see
    docs/decisions.md). Method: such a writer spoils blocks of others: their sums say so, no get returns them.
    """
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        writer = await asyncio.to_thread(Writer, node.address, "network")
        try:
            assert int(writer.tell(f"grant {LENGTH} {HELD}")) == HELD
            assert writer.tell("close") == "closed"
            await wait_until(lambda: is_number(kv, "connections", 1), "the end of its connection is seen")
            k, b = keys(130), blocks(130, LENGTH)
            for _ in range(3):
                k = keys(130)
                assert (await kv.put_many(k, b)).ok
            assert int(writer.tell("put-raw-anew")) > 0
            await asyncio.sleep(0.1)
            into = np.zeros_like(b)
            got = await kv.get_many(k, into)
            hit = got.status == ReadStatus.HIT
            assert (into[hit] == b[hit]).all()
            assert set(got.status.tolist()) <= {ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT}
            assert kv.stats()["corrupt"] > 0, "UCX checks something now: this can become a test that nothing is spoilt"
        finally:
            writer.end()


# ---- cancelled puts, and clients that race


@pytest.mark.parametrize("path", CLIENT_PATHS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
async def test_a_put_cancelled_at_any_await_writes_into_no_slot_of_another(path: str, again: bool) -> None:
    """Method: puts of 1 and of 6 blocks, and of one that a thread moves, cancelled at await 1, 2, ...; at once another
    client puts blocks of the same size, which take the extents that came back; in the end all of them are proved.
    """
    with NodeProcess() as node:
        async with ucxkv.connect(node.address, timeout_s=20) as rival:
            async with ucxkv.connect(node.address, path=path, timeout_s=20) as kv:
                never_inline(kv)
                for nbytes, count in ((LENGTH, 1), (LENGTH, 6), (9 * MIB, 1)):
                    kept: dict[bytes, np.ndarray] = {}

                    async def steal(ended: Ended, nbytes: int = nbytes, kept: dict[bytes, np.ndarray] = kept) -> None:
                        assert not threads_running(), "a thread still copies into extents that were given back"
                        k, b = keys(2), blocks(2, nbytes, random.randrange(1 << 30))
                        assert (await rival.put_many(k, b)).ok
                        kept.update(zip(k, b, strict=True))

                    source = blocks(count, nbytes, 99)
                    cancelled = await cancel_at_every_await(
                        lambda count=count, source=source: kv.put_many(keys(count), source), steal, again=again
                    )
                    assert cancelled or (path == "mapped" and nbytes == LENGTH)  # those move in the first step
                    k = list(kept)
                    into = np.zeros((len(k), nbytes), np.uint8)
                    got = await rival.get_many(k, into)
                    assert rival.stats()["corrupt"] == rival.stats()["stale"] == 0
                    for i in np.flatnonzero(got.status == ReadStatus.HIT).tolist():
                        assert (into[i] == kept[k[i]]).all()
                    assert (got.status == ReadStatus.HIT).sum() >= min(4, len(k))
            await all_back(rival)


@pytest.mark.parametrize("paths", [(a, b) for i, a in enumerate(CLIENT_PATHS) for b in CLIENT_PATHS[i:]])
async def test_two_clients_that_race_for_the_same_slots_never_write_each_others(paths: tuple[str, str]) -> None:
    """Method: a tier of 16 MiB, two clients that put all the time, half of the puts cancelled or with a deadline of
    almost nothing, so that extents go round; each client proves what it stored last.
    """
    with NodeProcess(host_bytes="16MiB") as node:
        async with (
            ucxkv.connect(node.address, path=paths[0], timeout_s=20) as one,
            ucxkv.connect(node.address, path=paths[1], timeout_s=20) as other,
            ucxkv.connect(node.address, timeout_s=20) as judge,
        ):

            async def race(kv: ucxkv.Client, seed: int) -> None:
                rng = random.Random(seed)
                for round_ in range(40):
                    doomed = asyncio.create_task(kv.put_many(keys(3), blocks(3, LENGTH, round_), deadline_s=20))
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                    doomed.cancel()
                    await asyncio.gather(doomed, return_exceptions=True)
                    await kv.put_many(keys(2), blocks(2, LENGTH, round_), deadline_s=rng.choice([0.0005, 0.002, 5]))
                    k, b = keys(4), blocks(4, LENGTH, seed * 1000 + round_)
                    put = await kv.put_many(k, b, deadline_s=20)
                    assert put.ok, put.status
                    into = np.zeros_like(b)
                    got = await judge.get_many(k, into)
                    hit = got.status == ReadStatus.HIT
                    assert hit.any() and (into[hit] == b[hit]).all() and judge.stats()["corrupt"] == 0

            await asyncio.gather(race(one, 1), race(other, 2))
            for kv in (one, other):
                counts = kv.stats()
                assert counts["corrupt"] == counts["stale"] == 0
            assert await number(judge, "damaged") == 0


async def test_sixteen_writers_of_one_key_some_killed(node: NodeProcess) -> None:
    """Study, fault test 8. User voice 13. Method: 8 processes and 8 clients put one key at once, some are killed; one
    wins whole.
    """
    writers = await asyncio.gather(*(asyncio.to_thread(Writer, node.address, WRITER_PATHS[i % 3]) for i in range(8)))
    clients = [await ucxkv.connect(node.address) for _ in range(8)]
    kv = clients[0]
    try:
        for writer in writers:
            writer.tell("grant 50000 2")
        for round_ in range(2):
            (key,) = keys(1)
            asked = [asyncio.to_thread(writer.tell, f"put {key.hex()}") for writer in writers[4:]]
            asked_here = [client.put(key, bytes([i]) * 50_000) for i, client in enumerate(clients)]
            for writer in writers[round_ * 2 : round_ * 2 + 2]:
                writer.start(f"put {key.hex()}")
                writer.signal(signal.SIGKILL)
            outside, inside = await asyncio.gather(*asked), await asyncio.gather(*asked_here)
            said = [PutStatus(int(answer)) for answer in outside] + inside
            assert set(said) <= {PutStatus.STORED, PutStatus.ALREADY} and said.count(PutStatus.STORED) <= 1
            value = await kv.get(key)
            assert await kv.exists(key) and value is not None and value == value[:1] * 50_000
            if PutStatus.STORED in inside:
                assert value[0] == inside.index(PutStatus.STORED)
            for client in clients:
                assert await client.get(key) == value and await client.put(key, b"other") is PutStatus.ALREADY
    finally:
        for writer in writers:
            writer.end()
        for client in clients[1:]:
            await client.aclose()
    await all_back(kv)
    await kv.aclose()
