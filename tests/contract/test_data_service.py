"""The data service's contract, on shared memory and on TCP, always between two real processes."""

from __future__ import annotations

import asyncio
import os
import random

import numpy as np
import psutil
import pytest

from tests.transport.harness import POISON, one_piece_each, read
from tests.transport.native import EPOCH, keys_of, pattern
from ucxkv.transport.base import UsageError, deadline_after
from ucxkv.transport.data import WriteStatus
from ucxkv.transport.service import GrantStatus

HIT, MISS, SIZE, UNMAPPED, STALE, UNAVAILABLE = 0, 1, 2, 4, 5, 6


@pytest.mark.parametrize("length", [1, 63, 4096, 5029, 65_536, 200_000, 3 << 20])
async def test_blocks_of_every_size_arrive_whole(client, length):
    """Goal: bytes are right on each of UCX's paths (short, copy, fragments, rendezvous). Method: sizes around them."""
    await client.node.call("publish", first=0, offsets=[i * length for i in range(8)], length=length)
    order = [3, 0, 7, 7, 1]
    status, buffer, stored = await read(client, order, length)
    assert status == [HIT] * 5 and stored == [length] * 5
    for i, number in enumerate(order):
        assert (buffer[i * length : (i + 1) * length] == pattern(number, length)).all()


@pytest.mark.parametrize("length", [100, 20_000, 700_001])
@pytest.mark.parametrize("fragment", [None, 0, 5000])
async def test_scattered_destinations_get_their_pieces(client, length, fragment):
    """Goal: a value of many pieces is one value. Method: random cuts, empty pieces too, on each way of sending."""
    if "tcp" in client.node.transports and fragment == 0:
        pytest.skip("over TCP blocks come in fragments")
    await client.reopen(fragment)
    await client.node.call("publish", first=0, offsets=[0, length], length=length)
    rng = random.Random(length)
    memory = np.full(4 * length + 1000, POISON, np.uint8)
    first, addr, lengths, want = [0], [], [], np.full(len(memory), POISON, np.uint8)
    at = 0
    for number in (1, 0):
        data, done = pattern(number, length), 0
        while done < length:
            step = min(rng.choice([0, 1, 7, length // 3 + 1]), length - done)
            addr.append(memory.ctypes.data + at)
            lengths.append(step)
            want[at : at + step] = data[done : done + step]
            done += step
            at += step + rng.randrange(3)
        first.append(len(addr))
    status, _, _ = await client.data.read(
        keys_of([1, 0]), np.array(first, "<u4"), np.array(addr, "<u8"), np.array(lengths, "<u8"),
        deadline_ns=deadline_after(20),
    )  # fmt: skip
    assert status.tolist() == [HIT, HIT]
    assert (memory == want).all()


async def test_what_is_not_there_is_a_status_beside_the_hits(client):
    """Goal: a batch succeeds in part. Method: misses, a wrong size, a bad region, a bad address, an empty value."""
    await client.node.call("publish", first=0, offsets=[i * 1000 for i in range(6)], length=1000)
    await client.node.call("spoil", number=2, field="region", value=900)
    await client.node.call("spoil", number=3, field="addr", value=client.base + (64 << 20) - 999)
    await client.node.call("show", number=4, offset=0, length=0)
    status, buffer, stored = await read(client, [0, 4000, 2, 3, 5, 9999], 1000)
    assert status == [HIT, MISS, UNMAPPED, UNMAPPED, HIT, MISS]
    assert (buffer[1000:4000] == POISON).all() and (buffer[4000:5000] == pattern(5, 1000)).all()
    status, buffer, stored = await read(client, [0, 1], 999)
    assert status == [SIZE, SIZE] and stored == [1000, 1000] and (buffer == POISON).all()
    status, buffer, _ = await read(client, [4], 0)
    assert status == [HIT] and (buffer == POISON).all()


async def test_bytes_that_do_not_match_their_sum_are_stale(client):
    """Goal: wrong bytes are never a hit. Method: flip a byte in the node's memory; small, fragmented and large
    blocks.
    """
    for length in (100, 400_000):
        await client.node.call("publish", first=0, offsets=[0, length], length=length)
        await client.node.call("spoil", number=1, field="byte", value=0x10)
        status, buffer, _ = await read(client, [0, 1], length)
        assert status == [HIT, STALE]
        assert (buffer[:length] == pattern(0, length)).all()
    assert client.data.counters()["stale"] == 2


@pytest.mark.parametrize("length", [1000, 400_000])
async def test_what_is_said_of_another_epoch_is_no_answer_and_is_told_once(client, length):
    """Goal: a miss counts in the epoch that it was asked in alone, on every way to ask; bytes prove themselves. Method:
    the node goes over to another epoch and back, under a client that stays.
    """
    await client.node.call("publish", first=0, offsets=[0, length], length=length)
    told, into = [], np.zeros(length, np.uint8)
    client.data.on_other_epoch = lambda: told.append(None)
    reader = client.data.into_reader()

    async def short(number):
        done = reader(keys_of([number]), into, deadline_ns=deadline_after(20))
        return done if isinstance(done, int) else await done

    async def answers():
        assert (await read(client, [0, 4000, 1], length - 1))[0] == [SIZE, MISS, SIZE]
        assert (await read(client, [0, 4000, 1], length))[0] == [HIT, MISS, HIT]
        assert (await short(0), await short(4000)) == (length, -2)
        found = await client.data.lookup(keys_of([0, 4000]), deadline_ns=deadline_after(20))
        assert found["status"].tolist() == [HIT, MISS]

    await answers()
    for epoch in (EPOCH + 1, EPOCH - 1, 0, 2**32 - 1):
        await client.node.call("begin_epoch", epoch=epoch)
        status, buffer, stored = await read(client, [0, 4000, 1], length - 1)
        assert (status, stored) == ([SIZE, UNAVAILABLE, SIZE], [length, 0, length]) and (buffer == POISON).all()
        status, buffer, stored = await read(client, [0, 4000, 1], length)
        assert (status, stored) == ([HIT, UNAVAILABLE, HIT], [length, 0, length])
        assert (buffer[2 * length :] == pattern(1, length)).all()
        assert (await short(0), await short(4000)) == (length, -1)
        found = await client.data.lookup(keys_of(range(3000)), deadline_ns=deadline_after(20))
        assert (found["status"] == UNAVAILABLE).all() and not found["length"].any()
        await asyncio.sleep(0)
        assert len(told) == 1
    await client.node.call("begin_epoch", epoch=EPOCH)
    await answers()
    assert len(told) == 1 and client.data.counters()["malformed"] == 0


@pytest.mark.parametrize("way", ["read", "lookup", "into_reader"])
async def test_each_call_tells_of_another_epoch_on_a_later_turn(client, way):
    """Goal: whoever sees it first tells, and not from within the call. Method: each way alone, asked for one miss."""
    await client.node.call("begin_epoch", epoch=EPOCH + 1)
    told = []
    client.data.on_other_epoch = lambda: told.append(None)
    absent = keys_of([4000])
    match way:
        case "read":
            assert (await read(client, [4000], 10))[0] == [UNAVAILABLE]
        case "lookup":
            assert (await client.data.lookup(absent, deadline_ns=deadline_after(20)))["status"].tolist() == [
                UNAVAILABLE
            ]
        case _:
            done = client.data.into_reader()(absent, bytearray(10), deadline_ns=deadline_after(20))
            assert (done if isinstance(done, int) else await done) == -1
    assert told == []
    await asyncio.sleep(0)
    assert told == [None]


async def test_two_thousand_keys_in_one_call(client):
    """Goal: batches are split and put together. Method: 2,000 keys of 16 KiB, then 10,000 look-ups."""
    await client.node.call("publish", first=0, offsets=[i * 16384 for i in range(512)], length=16384)
    order = np.random.default_rng(1).integers(0, 600, 2000)
    status, buffer, _ = await read(client, order, 16384, 60)
    assert status == [HIT if number < 512 else MISS for number in order]
    for i in range(0, 2000, 97):
        if order[i] < 512:
            assert (buffer[i * 16384 : (i + 1) * 16384] == pattern(int(order[i]), 16384)).all()
    wanted = np.arange(10_000) % 1024
    found = await client.data.lookup(keys_of(wanted), deadline_ns=deadline_after(20))
    assert found["status"].tolist() == [HIT if number < 512 else MISS for number in wanted]
    hits = found["status"] == HIT
    assert (found["length"][hits] == 16384).all() and (found["generation"][hits] == wanted[hits] + 1).all()
    assert (found["addr"][hits] == wanted[hits] * 16384).all(), "the place within its region"
    assert client.data.counters()["requests"] == 0


async def test_reads_are_served_while_the_nodes_python_is_busy(client):
    """Goal: rule 1: a read never waits for another process's Python. Method: block it for 1 s, count reads
    meanwhile.
    """
    await client.node.call("publish", first=0, offsets=[0], length=4096)
    await client.node.call("block", seconds=1.0)
    alive = asyncio.ensure_future(client.node.call("counters"))
    served = 0
    while not alive.done() and served < 200:
        status, _, _ = await read(client, [0], 4096)
        assert status == [HIT]
        served += not alive.done()
    assert served >= 20
    await alive


@pytest.mark.parametrize("length", [1000, 300_000, 2 << 20])
async def test_granted_writes_land_and_nothing_else_does(client, length):
    """Goal: a write is checked against the grants. Method: granted, too long, ungranted, foreign and revoked
    extents.
    """
    call = client.node.call
    assert await call("grant", token=client.token, offsets=[0, 4 << 20], capacity=length) == [GrantStatus.OK] * 2
    assert await call("grant", token=client.token + 1, offsets=[8 << 20], capacity=length) == [GrantStatus.OK]
    source = np.concatenate([pattern(i, length) for i in range(4)] + [pattern(9, 1)])
    first, addr, lengths = one_piece_each(source, length, 4)
    lengths[1] += 1  # one byte more than the capacity
    offsets = np.array([0, 4 << 20, 8 << 20, 12 << 20], "<u8")
    status = await client.data.write(np.zeros(4, "<u2"), offsets, first, addr, lengths, deadline_ns=deadline_after(20))
    refused = WriteStatus.REFUSED
    assert status.tolist() == [WriteStatus.WRITTEN, refused, refused, refused]
    assert await call("peek", offset=0, length=length) == pattern(0, length).tobytes().hex()
    if "tcp" not in client.node.transports:
        for offset in offsets[1:].tolist():
            assert await call("peek", offset=offset, length=length) == "00" * length
    assert await call("revoke", token=client.token, offsets=[0]) == [GrantStatus.OK]
    assert await call("revoke", token=client.token, offsets=[0, 8 << 20]) == [GrantStatus.UNKNOWN] * 2
    again = await client.data.write(
        np.zeros(1, "<u2"), offsets[:1], first[:2], addr[1:2], lengths[:1], deadline_ns=deadline_after(20)
    )
    assert again.tolist() == [refused]
    assert await call("peek", offset=0, length=length) == pattern(0, length).tobytes().hex()
    assert await call("revoke", token=client.token + 1, offsets=[8 << 20]) == [GrantStatus.OK]
    assert (await call("counters"))["refused"] >= 4


async def test_scattered_sources_are_gathered(client):
    """Goal: vectored values can be written. Method: 3 pieces in reverse order of memory, read back as a block."""
    await client.node.call("grant", token=client.token, offsets=[0], capacity=300_000)
    source = pattern(5, 300_000)
    addr = source.ctypes.data + np.array([200_000, 100_000, 0], "<u8")
    status = await client.data.write(
        np.zeros(1, "<u2"), np.zeros(1, "<u8"), np.array([0, 3], "<u4"), addr, np.full(3, 100_000, "<u8"),
        deadline_ns=deadline_after(20),
    )  # fmt: skip
    assert status.tolist() == [WriteStatus.WRITTEN]
    await client.node.call("show", number=1, offset=0, length=300_000)
    status, buffer, _ = await read(client, [1], 300_000)
    want = np.concatenate([source[200_000:], source[100_000:200_000], source[:100_000]])
    assert status == [HIT] and (buffer == want).all()


async def test_grants_are_exclusive_and_inside_their_region(client):
    """Goal: a slot that a peer may write is never given to another. Method: grant twice, and past the region's end."""
    call = client.node.call
    assert await call("grant", token=1, offsets=[0], capacity=100) == [GrantStatus.OK]
    assert await call("grant", token=2, offsets=[0], capacity=100) == [GrantStatus.TAKEN]
    assert await call("grant", token=2, offsets=[(64 << 20) - 99], capacity=100) == [GrantStatus.UNKNOWN]
    assert await call("revoke", token=2, offsets=[0]) == [GrantStatus.UNKNOWN]
    assert await call("revoke", token=1, offsets=[0]) == [GrantStatus.OK]
    assert await call("grant", token=2, offsets=[0], capacity=100) == [GrantStatus.OK]
    assert await call("revoke", token=2, offsets=[0]) == [GrantStatus.OK]


async def test_a_closed_session_reads_and_writes_nothing(client):
    """Goal: close_session's invariant. Method: close with a grant open, then read and write under the old token."""
    call = client.node.call
    await call("publish", first=0, offsets=[1 << 20], length=1000)
    await call("grant", token=client.token, offsets=[0], capacity=1000)
    assert await call("close_session", token=client.token) is True
    counters = await call("counters")
    assert counters["grants"] == 0
    status, buffer, _ = await read(client, [0], 1000, 0.3)
    assert status == [UNAVAILABLE] and (buffer == POISON).all()
    source = pattern(1, 1000)
    status = await client.data.write(
        np.zeros(1, "<u2"), np.zeros(1, "<u8"), *one_piece_each(source, 1000, 1), deadline_ns=deadline_after(0.3)
    )
    assert status.tolist() == [WriteStatus.UNAVAILABLE]
    assert await call("peek", offset=0, length=1000) == "00" * 1000
    assert await call("close_session", token=client.token) is True  # unknown by now


async def test_malformed_messages_are_counted_and_kill_nothing(client):
    """Goal: no bytes of a peer crash the node. Method: random and near-miss headers to every id, then a healthy
    read.
    """
    call = client.node.call
    await call("publish", first=0, offsets=[0], length=1000)
    rng = random.Random(7)
    good = {
        16: client.token.to_bytes(8, "little") + bytes(8) + (1).to_bytes(4, "little") + bytes(4),
        18: client.token.to_bytes(8, "little") + bytes(8) + (1).to_bytes(4, "little") + bytes(4),
        21: client.token.to_bytes(8, "little") + bytes(32),
    }
    for am_id, header in good.items():
        for _ in range(60):
            cut = bytearray(header)
            kind = rng.randrange(4)
            if kind == 0:
                cut = cut[: rng.randrange(len(cut))]
            elif kind == 1:
                cut[rng.randrange(len(cut))] = rng.randrange(256)
            elif kind == 2:
                cut[:] = rng.randbytes(rng.randrange(85))
            payload = rng.randbytes(rng.choice([0, 1, 15, 16, 17, 4096, 70_000]))
            await client.endpoint.send(am_id, bytes(cut), payload, deadline_ns=deadline_after(10))
    status, _, _ = await read(client, [0], 1000)
    assert status == [HIT]
    counters = await call("counters")
    assert counters["malformed"] > 50 and counters["unknown_session"] > 0
    assert await call("peek", offset=0, length=1000) == pattern(0, 1000).tobytes().hex()


async def test_answers_that_nobody_asked_for_are_dropped(client):
    """Goal: a node's message ids sent to it, and its own to us, do no harm. Method: every id both ways, then a read."""
    await client.node.call("publish", first=0, offsets=[0], length=1000)
    for am_id in (17, 19, 20, 22, 23, 31):
        await client.endpoint.send(am_id, os.urandom(48), os.urandom(100), deadline_ns=deadline_after(10))
    status, _, _ = await read(client, [0], 1000)
    assert status == [HIT]


async def test_a_hundred_sessions_leave_nothing_behind(client):
    """Goal: sessions, endpoints, descriptors and memory return. Method: open, read, close 100 times; both processes."""
    await client.node.call("publish", first=0, offsets=[0], length=50_000)
    node, here = psutil.Process(client.node.process.pid), psutil.Process()

    async def once():
        await client.reopen()
        assert (await read(client, [0], 50_000))[0] == [HIT]

    for _ in range(10):
        await once()
    before = (node.num_fds(), here.num_fds(), node.memory_info().rss, here.memory_info().rss)
    for _ in range(100):
        await once()
    after = (node.num_fds(), here.num_fds(), node.memory_info().rss, here.memory_info().rss)
    assert after[0] <= before[0] + 4 and after[1] <= before[1] + 4
    assert after[2] - before[2] < 24 << 20 and after[3] - before[3] < 24 << 20
    counters = await client.node.call("counters")
    assert counters["sessions"] == 1 and counters["closing"] == 0


async def test_an_idle_service_and_an_idle_worker_sleep(lone_client):
    """Goal: no busy spinning. Method: count the wake-ups of the thread and of the worker's loop in an idle second."""
    client = lone_client
    await client.node.call("publish", first=0, offsets=[0], length=1000)
    await read(client, [0], 1000)
    await asyncio.sleep(0.3)
    sleeps, turns = (await client.node.call("counters"))["sleeps"], client.worker.turns_count
    await asyncio.sleep(1.2)
    assert (await client.node.call("counters"))["sleeps"] - sleeps <= 20
    assert client.worker.turns_count - turns <= 20


async def test_wrong_arguments_are_usage_errors(client):
    """Goal: nothing reaches C unchecked. Method: key bytes, piece runs and shapes that do not fit."""
    buffer = np.zeros(100, np.uint8)
    first, addr, length = one_piece_each(buffer, 50, 2)
    with pytest.raises(UsageError, match="16"):
        await client.data.read(b"short", first, addr, length)
    for bad_first in ([0, 1], [0, 2, 1], [0, 1, 3]):
        with pytest.raises(UsageError):
            await client.data.read(keys_of([0, 1]), np.array(bad_first, "<u4"), addr, length)
    with pytest.raises(UsageError):
        await client.data.write(np.zeros(2, "<u2"), np.zeros(3, "<u8"), first, addr, length)
    status, _, _ = await client.data.read(b"", np.zeros(1, "<u4"), addr[:0], length[:0])
    assert len(status) == 0
