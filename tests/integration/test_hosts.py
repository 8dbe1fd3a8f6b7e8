"""Clients and nodes on different hosts, over TCP, with what networks do to them (namespaces; see tests/hosts.py).

Every body runs inside of host b, its node on host a. Statuses, bytes and counts only: no time of this machine is
asserted,
but for the bound that each call was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, open_files, wait_until
from tests.hosts import Hosts, in_host, why_not
from ucxkv import PutStatus, ReadStatus
from ucxkv.transport.data import TCP_FRAGMENT_BYTES

pytestmark = [pytest.mark.hosts, pytest.mark.faults]

MIB = 1 << 20
POISON = 0xAB
_SLACK_S = 20.0
"""What a busy machine may add to a call's deadline before the test calls it a hang."""


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    """Two hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts("a", "b") as hosts:
        yield hosts


@pytest.fixture
def hosts(network: Hosts) -> Iterator[Hosts]:
    """The same two hosts for every test, healthy."""
    yield network
    network.heal()


@contextlib.asynccontextmanager
async def clean(node: NodeProcess, kv: ucxkv.Client) -> AsyncIterator[None]:
    """After the body: leases, sessions, grants, quarantine and descriptors are as before, tasks of calls are gone."""
    names = ("leases", "connections", "quarantined_bytes", "leaving_extents", "vanished_writers")

    async def now() -> list[float]:
        return [(await kv.status())[0].numbers[name] for name in names]

    before, files = await now(), (open_files(), open_files(node.pid))
    yield

    async def is_back() -> bool:
        try:
            return await now() == before
        except ucxkv.UcxKvError:
            return False

    await wait_until(is_back, f"{names} return to {before}", 30)
    await wait_until(lambda: open_files(node.pid) <= files[1] + 2, "descriptors of the node", 30)
    await wait_until(lambda: open_files() <= files[0] + 2, "descriptors of the client", 30)


async def _bounded(call: object, deadline_s: float) -> object:
    """Await a call that was given this deadline; a hang fails the test."""
    return await asyncio.wait_for(call, deadline_s + _SLACK_S)  # type: ignore[arg-type]


async def _works(kv: ucxkv.Client) -> bool:
    """Whether a put and its get succeed now, with the right bytes."""
    k, b = keys(4), blocks(4, 50_000)
    try:
        if not (await kv.put_many(k, b, "chain", deadline_s=2)).ok:
            return False
        into = np.zeros_like(b)
        return (await kv.get_many(k, into, deadline_s=2)).hits == 4 and bool((into == b).all())
    except ucxkv.UcxKvError:
        return False


# ---- without faults


@in_host("b")
async def test_a_client_on_another_host_takes_the_network_by_itself(hosts: Hosts) -> None:
    """The same kernel, but no way to the node's memory. Method: path="auto" from another namespace; what `peers`
    says.
    """
    with hosts.node("a") as node:
        async with ucxkv.connect(node.address) as kv:
            (peer,) = kv.peers()
            assert peer.alive and peer.address.startswith(hosts.address("a"))
            assert peer.path is ucxkv.PathKind.MESSAGE
            assert "network" in peer.why and "local socket" in peer.why, peer.why
        with pytest.raises(ucxkv.SetupError, match="cannot be mapped"):
            await ucxkv.connect(node.address, path="mapped")


@in_host("a")
async def test_a_client_on_the_nodes_host_maps_its_memory(hosts: Hosts) -> None:
    """Method: the same, from inside of the node's namespace."""
    with hosts.node("a") as node:
        async with ucxkv.connect(node.address) as kv:
            (peer,) = kv.peers()
            assert peer.path is ucxkv.PathKind.MAPPED and peer.why
            assert await _works(kv)


@in_host("b")
async def test_blocks_of_every_size_cross_the_network_whole(hosts: Hosts) -> None:
    """Method: put, get (own and caller's memory), match, exists, delete for 1 B to 9 MiB; every byte compared."""
    with hosts.node("a", host_bytes="256MiB") as node:
        async with ucxkv.connect(node.address, timeout_s=20) as kv, clean(node, kv):
            for nbytes in (1, 100, 8192, 16 << 10, (192 << 10) + 1, MIB, 9 * MIB):
                k, b = keys(5), blocks(5, nbytes, seed=nbytes)
                assert (await kv.put_many(k, b, "chain")).ok, nbytes
                into = np.full_like(b, POISON)
                assert (await kv.get_many(k, into)).hits == 5 and (into == b).all(), nbytes
                assert await kv.get(k[2]) == b[2].tobytes()
                assert (await kv.match([*k[:4], *keys(1)])).blocks == 4
                assert (await kv.exists_many([*k, *keys(1)])).tolist() == [True] * 5 + [False]
                assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.DELETED] * 5


@in_host("b")
async def test_blocks_go_over_several_connections(hosts: Hosts) -> None:
    """Goal: networks that limit one flow are used in full. Method: the kernel's count of bytes on each connection of
    this process, for 1, 4 and 8 of them; values fewer than connections are spread too. Where both sides connect at the
    same moment UCX keeps a connection for each direction.
    """
    k, b = keys(32), blocks(32, MIB, seed=5)
    with hosts.node("a", host_bytes="256MiB") as node:
        for connections in (1, 4, 8):
            for some in (32, 1):
                async with ucxkv.connect(node.address, timeout_s=20, connections=connections) as kv, clean(node, kv):
                    assert (await kv.put_many(k[:some], b[:some], "chain")).ok
                    into = np.full_like(b[:some], POISON)
                    assert (await kv.get_many(k[:some], into)).hits == some and (into == b[:some]).all()
                    received, sent = _bytes_by_connection()
                    used = min(connections, -(-MIB // TCP_FRAGMENT_BYTES)) if some == 1 else connections
                    for bytes_each in (received, sent):
                        busy = sum(n >= TCP_FRAGMENT_BYTES // 4 for n in bytes_each)
                        assert used <= busy <= 2 * used, (connections, some, bytes_each)
                    await kv.delete(k[:some])
        for wrong in (0, 9):
            with pytest.raises(ucxkv.UsageError, match="1 to 8"):
                ucxkv.connect(node.address, connections=wrong)


def _bytes_by_connection() -> tuple[list[int], list[int]]:
    """Bytes received and sent on each TCP connection of this process."""
    text = subprocess.run(["ss", "-tipnH"], capture_output=True, text=True, check=True).stdout
    received, sent = [], []
    lines = text.splitlines()
    for line, facts in zip(lines[::2], lines[1::2], strict=True):
        if f"pid={os.getpid()}," in line:
            received.append(int((re.search(r"bytes_received:(\d+)", facts) or [0, 0])[1]))
            sent.append(int((re.search(r"bytes_acked:(\d+)", facts) or [0, 0])[1]))
    return received, sent


@in_host("b")
async def test_two_nodes_on_two_hosts_serve_one_client_each_by_its_best_path(hosts: Hosts) -> None:
    """Method: nodes on a and b joined; one address given; the own host's is mapped, the other by messages; chains
    on both.
    """
    with hosts.node("a") as far, hosts.node("b", join=far.address) as near:
        async with ucxkv.connect(far.address) as kv:
            await wait_until(lambda: len(kv.peers()) == 2 and all(p.alive for p in kv.peers()), "both are known")
            paths = {peer.name: peer.path for peer in kv.peers()}
            assert paths == {"n-a": ucxkv.PathKind.MESSAGE, "n-b": ucxkv.PathKind.MAPPED}
            sources: set[str] = set()
            for seed in range(12):
                k, b = keys(3), blocks(3, 30_000, seed)
                assert (await kv.put_many(k, b, "chain")).ok
                into = np.zeros_like(b)
                got = await kv.get_many(k, into)
                assert got.hits == 3 and (into == b).all()
                sources |= set(got.sources)
            assert sources == {"n-a", "n-b"}
        assert near.process.poll() is None


# ---- silence


@in_host("b")
async def test_a_partition_under_a_large_get_ends_in_unavailable_and_leaves_the_buffer_alone(hosts: Hosts) -> None:
    """Method: 64 MiB at 400 Mbit/s, partition in the middle; UNAVAILABLE at the deadline; poison stays; heal; it
    works.
    """
    with hosts.node("a", host_bytes="192MiB") as node:
        async with ucxkv.connect(node.address, timeout_s=20) as kv, clean(node, kv):
            k, b = keys(64), blocks(64, MIB)
            assert (await kv.put_many(k, b)).ok
            hosts.limit_rate("a", 400)
            into = np.full_like(b, POISON)
            getting = asyncio.create_task(kv.get_many(k, into, deadline_s=3))
            await asyncio.sleep(0.4)
            hosts.partition("a", "b")
            got = await _bounded(getting, 3)
            hit = got.status == ReadStatus.HIT
            assert not hit.all() and set(got.status.tolist()) <= {ReadStatus.HIT, ReadStatus.UNAVAILABLE}
            assert (into[hit] == b[hit]).all()
            after = np.full_like(b, POISON)
            after[:] = into  # what the call left; nothing may change it from here on
            hosts.heal()
            await asyncio.sleep(1.0)
            assert (into == after).all(), "a buffer was written after its call had ended"
            await wait_until(lambda: _works(kv), "the client works again", 40)
            fresh = np.full_like(b, POISON)
            assert (await kv.get_many(k, fresh)).hits == 64 and (fresh == b).all()
            assert (into == after).all()


@in_host("b")
@pytest.mark.parametrize("direction", ["requests", "answers"])
async def test_a_one_way_loss_of_the_network_ends_calls_at_their_deadline(hosts: Hosts, direction: str) -> None:
    """Method: drop what b sends, or what a sends; get, exists, match and put end within the deadline; heal; it
    works.
    """
    with hosts.node("a") as node:
        async with ucxkv.connect(node.address) as kv, clean(node, kv):
            k, b = keys(4), blocks(4, 300_000)
            assert (await kv.put_many(k, b)).ok
            hosts.drop(*(("b", "a") if direction == "requests" else ("a", "b")))
            into = np.full_like(b, POISON)
            got = await _bounded(kv.get_many(k, into, deadline_s=0.5), 0.5)
            assert (got.status == ReadStatus.UNAVAILABLE).all()
            put = await _bounded(kv.put_many(keys(4), b, deadline_s=0.5), 0.5)
            assert not put.stored and set(put.status.tolist()) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE}
            assert not (await _bounded(kv.exists_many(k, deadline_s=0.5), 0.5)).any()
            assert (await _bounded(kv.match(k, deadline_s=0.5), 0.5)).blocks == 0
            with pytest.raises(ucxkv.Unavailable):
                await _bounded(kv.status(deadline_s=0.5), 0.5)
            hosts.heal()
            await wait_until(lambda: _works(kv), "the client works again", 40)
            assert (into == POISON).all(), "a buffer was written after its call had ended"


@in_host("b")
async def test_a_host_that_vanishes_without_a_word_is_noticed_and_its_successor_is_used(hosts: Hosts) -> None:
    """Half-open connection. Method: cable out, then kill -9 (no reset gets out); calls end at their deadlines, the
    death is
    seen without one; cable in, a new node on the same port: the client returns to it by itself.
    """
    port = 13_411
    files = open_files()
    with hosts.node("a", "n1", port=port) as node:
        kv = await ucxkv.connect(node.address)
        k, b = keys(4), blocks(4, 300_000)
        assert (await kv.put_many(k, b)).ok
        hosts.unplug("a")
        node.kill()
    got = await _bounded(kv.get_many(k, np.zeros_like(b), deadline_s=0.5), 0.5)
    assert got.hits == 0 and (got.status == ReadStatus.UNAVAILABLE).all()
    await wait_until(lambda: not kv.peers()[0].alive, "the death is seen", 40)
    assert kv.peers()[0].why
    assert await kv.put(keys(1)[0], b"x") is PutStatus.UNAVAILABLE
    hosts.plug("a")
    with hosts.node("a", "n1", port=port):
        await wait_until(lambda: _works(kv), "the successor is used", 40)
        assert (await kv.get_many(k, np.zeros_like(b))).hits == 0  # it has none of the old blocks
        await kv.aclose()
    await wait_until(lambda: open_files() <= files + 2, "descriptors of the client")


@in_host("b")
async def test_a_client_that_vanishes_gives_its_grants_and_leases_back(hosts: Hosts) -> None:
    """The other half of half-open. Method: a client on host b with grants and a lease, its host unplugged for
    good; a client
    on host a sees the node's numbers return, and may use all of the memory.
    """
    with hosts.node("a", host_bytes="16MiB") as node:
        lost = await ucxkv.connect(node.address)
        k, b = keys(8), blocks(8, MIB)
        assert (await lost.put_many(k, b)).ok
        async with lost.lease(k, ttl_s=3.0) as lease:
            assert lease.granted.all()
            hosts.unplug("b")
            # seen from the node's own host; this process runs in b
            text = hosts.run("a", sys.executable, "-c", _WATCH, node.address, timeout_s=60)
            assert "returned" in text, text
        hosts.plug("b")
        await wait_until(lambda: _works(lost), "the vanished client works again", 40)
        await lost.aclose()


_WATCH = """
import asyncio, sys, time
import numpy as np, os, ucxkv
async def main():
    async with ucxkv.connect(sys.argv[1]) as kv:
        until = time.monotonic() + 50
        while time.monotonic() < until:
            n = (await kv.status())[0].numbers
            if n["connections"] == 1 and n["leases"] == 0 and n["granted_bytes"] == 0 and n["quarantined_bytes"] == 0:
                got = await kv.put_many([os.urandom(16) for _ in range(13)], np.zeros((13, 1 << 20), np.uint8))
                print("returned" if got.ok else f"full: {got.status}")
                return
            await asyncio.sleep(0.2)
        print("never:", n)
asyncio.run(main())
"""


# ---- slowness and loss


@in_host("b")
async def test_fragments_of_a_put_that_was_given_up_never_land_in_the_next_one(hosts: Hosts) -> None:
    """Several connections carry blocks, each at its own pace. Method: 10 % of the packets lost, so that connections lag
    behind each other; puts of four blocks given up after a random time, which gives their extents back; at once a put
    of one block, which gets one of them and goes over one connection; every block is proved.
    """
    rng = random.Random(11)
    with hosts.node("a", host_bytes="128MiB") as node:
        async with ucxkv.connect(node.address, timeout_s=60) as kv, clean(node, kv):
            assert "connections" in kv.peers()[0].why, kv.peers()
            kept: dict[bytes, np.ndarray] = {}
            hosts.lose("b", "a", 10)
            for round_ in range(150):
                doomed = asyncio.create_task(kv.put_many(keys(4), np.full((4, 190_000), 0xEE, np.uint8)))
                await asyncio.sleep(rng.random() * 0.004)
                doomed.cancel()
                await asyncio.gather(doomed, return_exceptions=True)
                (key,), (block,) = keys(1), blocks(1, 190_000, round_)
                assert await kv.put(key, block) is PutStatus.STORED
                kept[key] = block
            hosts.heal()
            into = np.full((len(kept), 190_000), POISON, np.uint8)
            got = await kv.get_many(list(kept), into)
            counts = kv.stats()
            assert counts["stale"] == counts["corrupt"] == 0, f"spoilt by a put that was given up: {counts}"
            assert got.hits == len(kept) and (into == np.stack(list(kept.values()))).all()


@in_host("b")
async def test_a_transfer_longer_than_its_lease_is_whole_or_a_miss(hosts: Hosts) -> None:
    """Method: 16 MiB at 40 Mbit/s (3 s) under a lease of 0.5 s that is not renewed, while others evict everything."""
    with hosts.node("a", host_bytes="32MiB") as node:
        async with ucxkv.connect(node.address, timeout_s=60) as kv, clean(node, kv):
            k, b = keys(16), blocks(16, MIB)
            assert (await kv.put_many(k, b)).ok
            hosts.limit_rate("a", 40)
            into = np.full_like(b, POISON)
            lease = await kv.lease(k, ttl_s=0.5).__aenter__()
            getting = asyncio.create_task(kv.get_many(k, into))
            for seed in range(4):
                await kv.put_many(keys(16), blocks(16, MIB, 100 + seed), deadline_s=20)
            got = await _bounded(getting, 60)
            await lease.release()
            hosts.heal()
            hit = got.status == ReadStatus.HIT
            assert (into[hit] == b[hit]).all()
            assert set(got.status.tolist()) <= {ReadStatus.HIT, ReadStatus.MISS, ReadStatus.STALE}


@in_host("b")
async def test_two_percent_loss_costs_time_and_no_byte(hosts: Hosts) -> None:
    """Method: 2 % lost each way; 40 rounds of put and get of three sizes; every byte compared, nothing unavailable."""
    with hosts.node("a", host_bytes="128MiB") as node:
        async with ucxkv.connect(node.address, timeout_s=60) as kv, clean(node, kv):
            hosts.lose("a", "b", 2)
            hosts.lose("b", "a", 2)
            for seed in range(40):
                k, b = keys(4), blocks(4, (3_000, 70_000, 900_000)[seed % 3], seed)
                assert (await kv.put_many(k, b, "chain")).ok, seed
                into = np.full_like(b, POISON)
                got = await kv.get_many(k, into)
                assert got.hits == 4 and (into == b).all(), (seed, got.status)


@in_host("b")
async def test_a_far_host_answers_everything(hosts: Hosts) -> None:
    """Method: 5 ms each way through the relay; put, get and match of 4 MiB."""
    with hosts.node("a") as node, hosts.delay("a", "b", 0.005):
        async with ucxkv.connect(node.address, timeout_s=20) as kv:
            k, b = keys(16), blocks(16, 256 << 10)
            started = time.monotonic()
            assert await kv.exists(k[0]) is False
            assert time.monotonic() - started >= 0.01, "the relay is not on the way"
            assert (await kv.put_many(k, b, "chain")).ok
            into = np.zeros_like(b)
            assert (await kv.get_many(k, into)).hits == 16 and (into == b).all()
            assert (await kv.match(k)).blocks == 16


# ---- crowds


@in_host("b")
async def test_a_full_backlog_refuses_in_time_and_recovers(hosts: Hosts) -> None:
    """Method: a frozen node, its backlog filled with 1,200 connections; connect ends at its deadline; thawed, it
    works.
    """
    with hosts.node("a") as node:
        host, _, port = node.address.rpartition(":")
        node.freeze()
        crowd = []
        for _ in range(1_200):
            s = socket.socket()
            s.setblocking(False)
            s.connect_ex((host, int(port)))
            crowd.append(s)
        await asyncio.sleep(0.3)
        with pytest.raises(ucxkv.Unavailable):
            await _bounded(ucxkv.connect(node.address, timeout_s=1)._open(), 1)
        node.thaw()
        for s in crowd:
            s.close()

        async def is_back() -> bool:
            try:
                async with ucxkv.connect(node.address, timeout_s=2) as kv:
                    report = (await kv.status())[0]
                    return report.numbers["connections"] == 1 and await _works(kv)
            except ucxkv.UcxKvError:
                return False

        await wait_until(is_back, "it serves again", 30)


@in_host("b")
async def test_a_thousand_pending_operations_end_when_their_endpoint_dies(hosts: Hosts) -> None:
    """Method: 1,000 gets, look-ups and puts wait behind a partition, the node is killed, the cable comes back:
    every one
    ends in its status, no buffer changes afterwards, a new node on the port is used.
    """
    port = 13_412
    files = open_files()
    with hosts.node("a", "n1", port=port) as node:
        kv = await ucxkv.connect(node.address, timeout_s=30)
        k, b = keys(32), blocks(32, 40_000)
        assert (await kv.put_many(k, b)).ok
        hosts.unplug("a")
        into = np.full((600, 40_000), POISON, np.uint8)
        gets = [asyncio.create_task(kv.get_many([k[i % 32]], into[i : i + 1])) for i in range(600)]
        asks = [asyncio.create_task(kv.exists(k[i % 32])) for i in range(200)]
        puts = [asyncio.create_task(kv.put(key, b[0])) for key in keys(200)]
        await asyncio.sleep(0.3)
        node.kill()
    hosts.plug("a")
    got = await _bounded(asyncio.gather(*gets), 30)
    assert all(result.status[0] == ReadStatus.UNAVAILABLE for result in got)
    assert not any(await _bounded(asyncio.gather(*asks), 30))
    assert set(await _bounded(asyncio.gather(*puts), 30)) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE}
    with hosts.node("a", "n1", port=port):
        await wait_until(lambda: _works(kv), "the successor is used", 40)
    assert (into == POISON).all(), "a buffer was written after its call had ended"
    await kv.aclose()
    assert len(asyncio.all_tasks()) == 1
    await wait_until(lambda: open_files() <= files + 2, "descriptors of the client")


@in_host("b")
async def test_partitions_one_after_the_other_leave_nothing_behind(hosts: Hosts) -> None:
    """Method: six partitions with gets and puts running, healed after a while; in the end all numbers are as before."""
    with hosts.node("a") as node:
        async with ucxkv.connect(node.address, timeout_s=5) as kv, clean(node, kv):
            k, b = keys(8), blocks(8, 200_000)
            assert (await kv.put_many(k, b)).ok
            for turn in range(6):
                into = np.zeros_like(b)
                getting = asyncio.create_task(kv.get_many(k, into, deadline_s=1))
                putting = asyncio.create_task(kv.put_many(keys(8), b, deadline_s=1))
                hosts.partition("a", "b") if turn % 2 else hosts.drop("a", "b")
                got, put = await _bounded(getting, 1), await _bounded(putting, 1)
                hit = got.status == ReadStatus.HIT
                assert (into[hit] == b[hit]).all() and len(put.status) == 8
                hosts.heal()
                await wait_until(lambda: _works(kv), f"turn {turn}: works again", 40)
