"""A node copies values into another's memory: right bytes or none, over each path, and every extent in one hand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import ROOT, wait_until
from tests.stepping import Ended, cancel_at_every_await, threads_running
from tests.wire import RawPeer
from ucxkv import errors
from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.node import Node, NodeConfig
from ucxkv.node.mirror import GONE, THERE, Mirror, Mirrors
from ucxkv.protocol import messages as m
from ucxkv.settings import AskedPath
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.segments import HostSegment
from ucxkv.transport.inline import InlineWait

MIB = 1 << 20
PATHS = ["mapped", "message", "network", "rma"]
SHARD = 7
LENGTHS = [0, 1, 100, 100, 4096, *[20_000] * 100, 2 * MIB, 0, 9 * MIB]


class Source:
    """Values in a segment of this process, and the rows that name them. They lie as a node's would, one after the
    other.
    """

    def __init__(self, size_bytes: int = 64 * MIB) -> None:
        self.segment = HostSegment.create(size_bytes, "source", huge_pages="never")
        self.bytes = np.frombuffer(self.segment.view, np.uint8)
        self._end = 64

    def rows(self, lengths: Sequence[int], seed: int = 0) -> np.ndarray:
        """New values of random bytes: COMMIT_DTYPE[n]."""
        rows = np.zeros(len(lengths), COMMIT_DTYPE)
        for i, length in enumerate(lengths):
            value = self.bytes[self._end : self._end + length]
            value[:] = np.random.default_rng([seed, i]).integers(0, 256, length, np.uint8)
            rows[i] = (os.urandom(16), bytes(16), i, self._end, tier_copy.sum_bytes(value), length, 0, 0, 0, 0, 0, 0, 0)
            self._end += -(-length // 64) * 64 + 64
        return rows

    def value(self, row: Any) -> bytes:
        """The bytes that a row names."""
        return self.bytes[int(row["offset"]) : int(row["offset"]) + int(row["length"])].tobytes()

    def close(self) -> None:
        """Give the memory back."""
        del self.bytes
        self.segment.close()


class Pair:
    """A receiving node, and one sender's way there."""

    def __init__(self, node: Node, source: Source, mirrors: Mirrors) -> None:
        self.node, self.source, self.mirrors = node, source, mirrors
        self.arrived = node.store.space.arrived
        self.address = source.segment.address

    @property
    def mirror(self) -> Mirror:
        return self.mirrors.to(self.node.peers.own)

    async def copy(self, rows: np.ndarray, seconds: float = 20) -> list[int]:
        status = await self.mirror.copy(SHARD, rows, self.address, time.monotonic_ns() + int(seconds * 1e9))
        return status.tolist()

    async def lacking(self, rows: np.ndarray) -> list[bool]:
        return (await self.mirror.lacking(SHARD, rows, time.monotonic_ns() + 10**10)).tolist()

    def claim(self, row: Any) -> bytes | None:
        """Claim a value, as its log entry would: its bytes here; the extent is free again."""
        store, length = self.node.store, int(row["length"])
        offset = self.arrived.claim(SHARD, row["key"].tobytes(), int(row["sum"]), length)
        if offset is None:
            return None
        data = bytes(store.segment.view[offset : offset + length])
        store.slabs.free([offset])
        return data

    async def at_rest(self) -> None:
        """The sender gives back what it knows to be lent to it: that is all there was. Then it leaves."""
        if self.mirror._link is not None:
            self.mirror._link.putter.return_grants()
        numbers = self.node.store.numbers
        await wait_until(lambda: not numbers()["granted_bytes"] + numbers()["quarantined_bytes"], "grants are back")
        self.node.store.check()
        await self.mirrors.aclose()
        await wait_until(lambda: not any(s.role == "node" for s in self.node.sessions.values()), "it has left")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def pair(path: str) -> AsyncIterator[Pair]:
    """A node of 64 MiB, and a sender that reaches it by each path in turn."""
    config = NodeConfig(name="follower", listen="127.0.0.1:0", host_bytes=64 * MIB, huge_pages="never", token="t")
    source = Source()
    try:
        async with Node(config) as node:
            own = m.MemberInfo(4711, "leader", "127.0.0.1:1", 1)
            mirrors = Mirrors(own, "t", asked=AskedPath(path, "the test"))
            try:
                yield Pair(node, source, mirrors)
            finally:
                await mirrors.aclose()
    finally:
        source.close()


async def test_values_arrive_whole_and_are_claimed_once(pair: Pair, path: str) -> None:
    """Method: values of all sizes, none and several runs long; each is claimed and compared, then nothing is left."""
    rows = pair.source.rows(LENGTHS)
    assert all(await pair.lacking(rows))
    assert await pair.copy(rows) == [THERE] * len(rows)
    assert not any(await pair.lacking(rows)) and len(pair.arrived) == len(rows)
    assert pair.mirror.copied_bytes == sum(LENGTHS)
    assert pair.mirror.path == ("message" if path == "network" else path)
    (session,) = [s for s in pair.node.sessions.values() if s.role == "node"]
    assert (session.name, session.node_id, session.path) == ("leader", 4711, pair.mirror.path)
    pair.node.store.check()
    for row in rows:
        assert pair.claim(row) == pair.source.value(row)
        assert pair.claim(row) is None
    assert all(await pair.lacking(rows))
    await pair.at_rest()
    assert pair.arrived.bytes_count == 0 and pair.node.store.slabs.used_bytes == 0


async def test_what_is_not_what_its_row_says_is_gone_and_takes_no_memory(pair: Pair) -> None:
    """Method: every third value is changed after its row was made."""
    rows = pair.source.rows([5000] * 90 + [300_000] * 9 + [9 * MIB])
    changed = np.arange(len(rows)) % 3 == 0
    for offset in rows["offset"][changed].tolist():
        pair.source.bytes[offset] ^= 1
    assert await pair.copy(rows) == np.where(changed, GONE, THERE).tolist()
    assert await pair.lacking(rows) == changed.tolist()
    await pair.at_rest()
    assert pair.node.store.slabs.used_bytes == pair.arrived.bytes_count
    for row in rows[~changed]:
        assert pair.claim(row) == pair.source.value(row)


async def test_a_value_that_is_overwritten_while_it_is_sent_is_not_named(pair: Pair, path: str) -> None:
    """Method: the source changes right after the path wrote it: a path that sums the bytes before it sends them may
    have sent others, so only a mapped path, which sums what it copies, may call it there.
    """
    rows = pair.source.rows([3000] * 10)
    assert await pair.copy(rows[:1]) == [THERE]
    link = pair.mirror._link
    assert link is not None
    write = link.path.write

    async def racing(*what: Any) -> Any:
        sums = await write(*what)
        pair.source.bytes[int(rows["offset"][4])] ^= 1
        return sums

    link.path.write = link.putter._path.write = racing  # type: ignore[method-assign]
    expected = [THERE] * 9
    if path != "mapped":
        expected[3] = GONE
    assert await pair.copy(rows[1:]) == expected


async def test_a_full_node_is_overloaded_and_leaks_nothing(pair: Pair) -> None:
    """Method: no extent is free and nothing can be evicted; then blocks of cache class fill the node instead."""
    slabs, rows = pair.node.store.slabs, pair.source.rows([100_000] * 20)
    taken = slabs.allocate(100_000, 1000)
    with pytest.raises(errors.Overloaded, match="no memory"):
        await pair.copy(rows, seconds=0.3)
    assert len(pair.arrived) == 0
    slabs.free(taken)
    async with ucxkv.connect(pair.node.address, token="t", timeout_s=20) as kv:
        assert (await kv.put_many(keys(800), blocks(800, 100_000))).ok
        assert slabs.free_bytes < 16 * MIB
        for round_ in range(20):
            some = pair.source.rows([100_000] * 20, seed=round_)
            assert await pair.copy(some) == [THERE] * 20
            assert [pair.claim(row) for row in some] == [pair.source.value(row) for row in some]
        assert 0 < pair.node.store.numbers()["blocks"] < 800
    await pair.at_rest()


async def test_copies_side_by_side_do_not_mix(pair: Pair) -> None:
    """Method: twelve calls at once, for the same sizes, more than may move at a time."""
    several = [pair.source.rows([70_000] * 30 + [4000] * 20, seed=i) for i in range(12)]
    assert await asyncio.gather(*(pair.copy(rows) for rows in several)) == [[THERE] * 50] * 12
    for rows in several:
        for row in rows:
            data = pair.claim(row)
            assert data is None or data == pair.source.value(row)  # None: over the limit, the oldest went
    await pair.at_rest()
    assert pair.node.store.slabs.used_bytes == 0


async def test_what_was_named_is_written_no_more_by_messages(pair: Pair, path: str) -> None:
    """Method: the sender writes again into an extent that it has named: refused, and the bytes are as they were. (A
    process that has the memory mapped is trusted to write before it names, as with a put.)
    """
    if path == "mapped":
        pytest.skip("nobody is between a mapped writer and the memory")
    rows = pair.source.rows([5000] * 2)
    assert await pair.copy(rows[:1]) == [THERE]
    link = pair.mirror._link
    assert link is not None
    name = next(iter(pair.arrived._values))
    offset = pair.arrived._values[name].offset
    with pytest.raises(errors.Unavailable):
        await link.path.write_one(
            pair.address + int(rows["offset"][1]), 5000, 0, offset, pair.source, time.monotonic_ns() + 5 * 10**9
        )
    assert pair.claim(rows[0]) == pair.source.value(rows[0])


async def test_a_copy_cancelled_at_every_await_leaves_nothing_lent(pair: Pair) -> None:
    """Method: cancel at the 1st, 2nd, ... await, until one ends by itself; books after each, all back in the end."""
    rows = pair.source.rows([5000] * 40 + [9 * MIB])
    assert await pair.copy(rows[:1]) == [THERE]
    link = pair.mirror._link
    assert link is not None
    link.connection._inline = InlineWait(link.connection._fd, 0)
    rounds = 0

    async def after_each(ended: Ended) -> None:
        nonlocal rounds
        rounds += 1
        assert not threads_running()
        pair.node.store.check()
        assert await pair.copy(rows[1:5]) == [THERE] * 4

    await cancel_at_every_await(lambda: pair.copy(rows), after_each)
    assert rounds > 4 and not any(await pair.lacking(rows))
    for row in rows:
        assert pair.claim(row) == pair.source.value(row)
    await pair.at_rest()
    assert pair.node.store.slabs.used_bytes == 0


_SENDER = """
import asyncio, sys, time
from tests.integration.test_mirror import SHARD, Source
from ucxkv.node.mirror import Mirrors
from ucxkv.protocol import messages as m
from ucxkv.settings import AskedPath

async def main():
    source = Source()
    rows = source.rows([200_000] * 60)
    member = m.MemberInfo(int(sys.argv[1]), "follower", sys.argv[2], 1)
    mirror = Mirrors(m.MemberInfo(5, "leader", "127.0.0.1:1", 1), "t", asked=AskedPath(sys.argv[3], "me")).to(member)
    print("ready", flush=True)
    while True:
        await mirror.copy(SHARD, rows, source.segment.address, time.monotonic_ns() + 10**10)

asyncio.run(main())
"""


@pytest.mark.faults
async def test_a_sender_killed_half_way_leaves_what_it_named_and_nothing_else(pair: Pair, path: str) -> None:
    """Method: kill -9 of a process that copies without a pause: what was lent to it is free when it has ended, what it
    had named is whole.
    """
    argv = [sys.executable, "-c", _SENDER, str(pair.node.node_id), pair.node.address, path]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sender = await asyncio.to_thread(subprocess.Popen, argv, cwd=ROOT, env=env)
    try:
        await wait_until(lambda: len(pair.arrived) >= 20, "values arrive", 30)
        await wait_until(lambda: pair.node.store.grants.lent_bytes > 0, "extents are lent")
        sender.send_signal(signal.SIGKILL)
    finally:
        sender.kill()
        sender.wait()
    await pair.at_rest()
    view = pair.node.store.segment.view
    assert len(pair.arrived) >= 20
    for (_, _, total, length), value in pair.arrived._values.items():
        assert tier_copy.sum_bytes(view[value.offset : value.offset + length]) == total


async def test_only_nodes_name_values_and_only_what_they_hold() -> None:
    """Method: raw peers, a client and a node: refused; extents of nobody, of another's, too short, named twice."""
    config = NodeConfig(name="follower", listen="127.0.0.1:0", host_bytes=16 * MIB, huge_pages="never")
    async with Node(config) as node:

        def words(role: str) -> list[Any]:
            with RawPeer(node.address) as peer, RawPeer(node.address) as other:
                peer.open(role=role)
                other.open(role=role)
                mine, others = peer.ask(m.Grant(1000, 2)), other.ask(m.Grant(1000, 1))
                a, b = np.frombuffer(mine.offsets, np.uint64).tolist()
                (c,) = np.frombuffer(others.offsets, np.uint64).tolist()
                offsets = np.array([a, a, b, c, 1 << 40], np.uint64)
                sizes = np.array([1000, 1000, 1 << 20, 1000, 0], np.uint32)
                node_side.append((a, b, c))
                values = m.Values(SHARD, os.urandom(80), bytes(40), sizes.tobytes(), offsets.tobytes())
                again = m.Values(SHARD, bytes(16), bytes(8), bytes(4), a.to_bytes(8, "little"))
                return [
                    peer.ask(values),
                    peer.ask(again),
                    peer.ask(m.HaveValues(SHARD, values.keys, bytes(40), bytes(20))),
                ]

        node_side: list[tuple[int, ...]] = []
        for answer in await asyncio.to_thread(words, "client"):
            assert isinstance(answer, m.Failure) and answer.kind == "UsageError"
        taken, again, had = await asyncio.to_thread(words, "node")
        assert taken == m.Statuses(bytes([0, 1, 1, 1, 1])), "one extent, once, where the value fits"
        assert again == m.Statuses(b"\1") and had == m.Statuses(b"\1" * 5)
        await wait_until(lambda: node.store.grants.lent_bytes == 0, "the rest is free")
        assert len(node.store.space.arrived) == 1
        node.store.check()


async def test_values_are_taken_though_the_receiver_may_not_serve() -> None:
    """A follower of a shard answers for nobody. Method: a node whose lease is over while extents are lent."""
    config = NodeConfig(name="follower", listen="127.0.0.1:0", host_bytes=16 * MIB, huge_pages="never")
    async with Node(config) as node:

        def granted() -> tuple[RawPeer, int]:
            peer = RawPeer(node.address).__enter__()
            peer.open(role="node")
            return peer, int(np.frombuffer(peer.ask(m.Grant(1000, 1)).offsets, np.uint64)[0])

        peer, offset = await asyncio.to_thread(granted)
        node.lease_until(0)
        values = m.Values(SHARD, bytes(16), bytes(8), bytes(4), offset.to_bytes(8, "little"))
        assert await asyncio.to_thread(peer.ask, values) == m.Statuses(b"\0")
        refused = await asyncio.to_thread(peer.ask, m.Grant(1000, 1))
        assert isinstance(refused, m.Failure) and refused.kind == "Unavailable"
        peer.close()
        node.store.check()


async def test_a_lost_link_is_made_again_after_a_pause_that_grows() -> None:
    """Method: nobody at the address, then another node than the named one, then the right one, whose link is cut."""
    own, source = m.MemberInfo(4711, "leader", "127.0.0.1:1", 1), Source(1 * MIB)
    rows = source.rows([100])

    def copy(mirror: Mirror) -> Any:
        return mirror.copy(SHARD, rows, source.segment.address, time.monotonic_ns() + 5 * 10**9)

    async def fails(mirror: Mirror, words: str) -> None:
        with pytest.raises(errors.Unavailable, match=words):
            await copy(mirror)

    async def there(mirror: Mirror) -> bool:
        try:
            return (await copy(mirror)).tolist() == [THERE]
        except errors.Unavailable:
            return False

    mirrors = Mirrors(own, "")
    nobody = mirrors.to(m.MemberInfo(1, "x", "127.0.0.1:1", 1))
    pauses = []
    for _ in range(3):
        await fails(nobody, "nobody answers")
        await fails(nobody, "dialled again soon: .*nobody answers")
        begin = time.monotonic()
        await asyncio.sleep(max(0.0, (nobody._retry_ns - time.monotonic_ns()) / 1e9))
        pauses.append(time.monotonic() - begin)
    assert pauses[2] > 2 * pauses[0]
    config = NodeConfig(name="follower", listen="127.0.0.1:0", host_bytes=16 * MIB, huge_pages="never")
    async with Node(config) as node:
        await fails(mirrors.to(m.MemberInfo(2, "follower", node.address, 1)), "another node answers")
        mirror = mirrors.to(node.peers.own)
        assert await there(mirror)
        for session in list(node.sessions.values()):
            session.connection.abort()
        await wait_until(lambda: mirror.path is None, "the end is seen")
        await fails(mirror, "dialled again soon")
        await wait_until(lambda: there(mirror), "it is there again")
        mirrors.forget(node.node_id)
        await fails(mirror, "has left")
        await mirrors.aclose()
        await fails(mirrors.to(node.peers.own), "has left")
    source.close()


async def test_nodes_have_their_mirrors_and_close_them() -> None:
    """Method: a value of one node's own memory, copied by its own mirror; the sender ends first."""
    one = NodeConfig(name="n1", listen="127.0.0.1:0", host_bytes=16 * MIB, huge_pages="never")
    two = NodeConfig(name="n2", listen="127.0.0.1:0", host_bytes=16 * MIB, huge_pages="never")
    async with Node(one) as follower:
        async with Node(two) as leader:
            store = leader.store
            (offset,) = store.slabs.allocate(5000)
            store.segment.view[offset : offset + 5000] = bytes(range(250)) * 20
            total = tier_copy.sum_bytes(bytes(range(250)) * 20)
            rows = np.array([(b"k" * 16, bytes(16), 1, offset, total, 5000, 0, 0, 0, 0, 0, 0, 0)], COMMIT_DTYPE)
            mirror = leader.mirrors.to(follower.peers.own)
            status = await mirror.copy(3, rows, store.segment.address, time.monotonic_ns() + 5 * 10**9)
            assert status.tolist() == [THERE] and mirror.path == "mapped"
            store.slabs.free([offset])
        claimed = follower.store.space.arrived.claim(3, b"k" * 16, total, 5000)
        assert claimed is not None
        assert bytes(follower.store.segment.view[claimed : claimed + 5000]) == bytes(range(250)) * 20
        follower.store.slabs.free([claimed])
        await wait_until(lambda: not follower.sessions, "the leader has left")
        follower.store.check()
