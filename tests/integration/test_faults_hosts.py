"""What networks do to clients and nodes on different hosts (namespaces; see tests/hosts.py): silence, loss, crowds.

Every body runs inside of host b, its node on host a. Statuses, bytes and counts only: no time of this machine is
asserted, but for the bound that each call was given.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import sys

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import POISON, bounded, clean, works
from tests.harness import open_files, wait_until
from tests.hosts import Hosts, in_host
from tests.writer import Writer
from ucxkv import PathKind, PutStatus, ReadStatus

pytestmark = [pytest.mark.hosts, pytest.mark.faults]

MIB = 1 << 20


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
            got = await bounded(getting, 3)
            hit = got.status == ReadStatus.HIT
            assert not hit.all() and set(got.status.tolist()) <= {ReadStatus.HIT, ReadStatus.UNAVAILABLE}
            assert (into[hit] == b[hit]).all()
            after = np.full_like(b, POISON)
            after[:] = into  # what the call left; nothing may change it from here on
            hosts.heal()
            await asyncio.sleep(1.0)
            assert (into == after).all(), "a buffer was written after its call had ended"
            await wait_until(lambda: works(kv), "the client works again", 40)
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
            got = await bounded(kv.get_many(k, into, deadline_s=0.5), 0.5)
            assert (got.status == ReadStatus.UNAVAILABLE).all()
            put = await bounded(kv.put_many(keys(4), b, deadline_s=0.5), 0.5)
            assert not put.stored and set(put.status.tolist()) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE}
            assert not (await bounded(kv.exists_many(k, deadline_s=0.5), 0.5)).any()
            assert (await bounded(kv.match(k, deadline_s=0.5), 0.5)).blocks == 0
            with pytest.raises(ucxkv.Unavailable):
                await bounded(kv.status(deadline_s=0.5), 0.5)
            hosts.heal()
            await wait_until(lambda: works(kv), "the client works again", 40)
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
    got = await bounded(kv.get_many(k, np.zeros_like(b), deadline_s=0.5), 0.5)
    assert got.hits == 0 and (got.status == ReadStatus.UNAVAILABLE).all()
    await wait_until(lambda: not kv.peers()[0].alive, "the death is seen", 40)
    assert kv.peers()[0].why
    assert await kv.put(keys(1)[0], b"x") is PutStatus.UNAVAILABLE
    hosts.plug("a")
    with hosts.node("a", "n1", port=port):
        await wait_until(lambda: works(kv), "the successor is used", 40)
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
        await wait_until(lambda: works(lost), "the vanished client works again", 40)
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


@in_host("b")
async def test_a_stopped_writer_of_another_host_wakes_after_its_slots_were_reclaimed(hosts: Hosts) -> None:
    """Method: a writer on host b floods its extents and is stopped, its cable pulled; the node gives it up, a client of
    host a fills the tier three times; the cable is back and the writer wakes: it writes on, and reaches nothing.
    """
    with hosts.node("a", host_bytes="16MiB") as node:
        writer = await asyncio.to_thread(Writer, node.address, "network")
        try:
            assert await asyncio.to_thread(writer.tell, "grant 100000 18") == "18"
            assert await asyncio.to_thread(writer.tell, "flood scribble-all") == "flooding"
            await asyncio.sleep(0.2)
            writer.signal(signal.SIGSTOP)
            hosts.unplug("b")
            seen = await asyncio.to_thread(hosts.run, "a", sys.executable, "-c", _FILL, node.address, timeout_s=90)
            assert "filled" in seen, seen
            hosts.plug("b")
            writer.signal(signal.SIGCONT)
            await asyncio.sleep(1.0)
            assert writer.is_alive
            seen = await asyncio.to_thread(hosts.run, "a", sys.executable, "-c", _FILL, node.address, timeout_s=90)
            assert "filled" in seen, seen
        finally:
            writer.end()


_FILL = """
import asyncio, sys, time
import numpy as np, os, ucxkv
async def main():
    async with ucxkv.connect(sys.argv[1], timeout_s=20) as kv:
        until = time.monotonic() + 60
        while (await kv.status())[0].numbers["connections"] != 1:  # the writer's is given up
            assert time.monotonic() < until, "never"
            await asyncio.sleep(0.2)
        blocks = np.random.default_rng(1).integers(0, 256, (150, 100_000), np.uint8)
        for _ in range(3):
            keys = [os.urandom(16) for _ in range(150)]
            assert (await kv.put_many(keys, blocks)).ok
        await asyncio.sleep(0.5)
        into = np.zeros_like(blocks)
        got = await kv.get_many(keys, into)
        hit = got.status == 0
        assert hit.sum() > 100 and (into[hit] == blocks[hit]).all() and kv.stats()["corrupt"] == 0, kv.stats()
        assert (await kv.status())[0].numbers["damaged"] == 0
    print("filled")
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
async def test_a_chain_of_puts_at_once_keeps_its_order_over_connections_that_lag(hosts: Hosts) -> None:
    """Method: 5 % of the packets lost; chains of twelve blocks, small and large in turns, each put by a call of its
    own, all begun at once: every one is stored, and the chain is whole.
    """
    with hosts.node("a", host_bytes="64MiB") as node:
        async with ucxkv.connect(node.address, timeout_s=60) as kv, clean(node, kv):
            for nbytes in (190_000, 100):
                assert await kv.put(keys(1)[0], bytes(nbytes)) is PutStatus.STORED  # extents are at hand from now on
            hosts.lose("b", "a", 5)
            for _ in range(15):
                k = keys(12)
                above = [None, *k[:-1]]
                puts = [kv.put(k[i], bytes(100 if i % 2 else 190_000), parent=above[i]) for i in range(12)]
                assert await asyncio.gather(*puts) == [PutStatus.STORED] * 12
                assert (await kv.match(k)).blocks == 12


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
            got = await bounded(getting, 60)
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
            await bounded(ucxkv.connect(node.address, timeout_s=1)._open(), 1)
        node.thaw()
        for s in crowd:
            s.close()

        async def is_back() -> bool:
            try:
                async with ucxkv.connect(node.address, timeout_s=2) as kv:
                    report = (await kv.status())[0]
                    return report.numbers["connections"] == 1 and await works(kv)
            except ucxkv.UcxKvError:
                return False

        await wait_until(is_back, "it serves again", 30)


@in_host("b")
async def test_one_sided_reads_are_refused_where_the_node_would_have_to_answer_them(hosts: Hosts) -> None:
    """Goal: no client's end is the node's (UCX ends a process whose answer to an emulated read finds nobody)."""
    with hosts.node("a", "n1", port=13_413) as node:
        with pytest.raises(ucxkv.SetupError, match="no lane to this node can do them by itself"):
            await ucxkv.connect(node.address, path="rma", timeout_s=30)
        async with ucxkv.connect(node.address) as kv:
            assert kv.peers()[0].path is PathKind.MESSAGE


@in_host("b")
async def test_a_thousand_pending_operations_end_when_their_endpoint_dies(hosts: Hosts) -> None:
    """Method: 1,000 gets, look-ups and puts wait behind a partition, the node is killed, the cable comes back: each
    ends in its status, no buffer changes afterwards, a new node on the port is used.
    """
    port = 13_412
    files = open_files()
    with hosts.node("a", "n1", port=port) as node:
        kv = await ucxkv.connect(node.address, path="network", timeout_s=30)
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
    got = await bounded(asyncio.gather(*gets), 30)
    assert all(result.status[0] == ReadStatus.UNAVAILABLE for result in got)
    assert not any(await bounded(asyncio.gather(*asks), 30))
    assert set(await bounded(asyncio.gather(*puts), 30)) <= {PutStatus.UNAVAILABLE, PutStatus.NO_SPACE}
    with hosts.node("a", "n1", port=port):
        await wait_until(lambda: works(kv), "the successor is used", 40)
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
                got, put = await bounded(getting, 1), await bounded(putting, 1)
                hit = got.status == ReadStatus.HIT
                assert (into[hit] == b[hit]).all() and len(put.status) == 8
                hosts.heal()
                await wait_until(lambda: works(kv), f"turn {turn}: works again", 40)
