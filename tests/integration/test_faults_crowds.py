"""Peers that come and go by the thousand, half-way or whole: others are served meanwhile, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, open_files, wait_until
from tests.wire import RawPeer, hello
from ucxkv import PutStatus, ReadStatus
from ucxkv.protocol import encode
from ucxkv.protocol import messages as m
from ucxkv.transport.frames import pack_header

pytestmark = pytest.mark.faults

MIB = 1 << 20
NUMBERS = (
    *("granted_bytes", "quarantined_bytes", "leases", "writing", "vanished_writers"),
    *("message_sessions", "message_grants", "message_closing"),
)


class Weight(NamedTuple):
    """What a process holds."""

    files: int
    threads: int
    memory_bytes: int
    """Of its own: without the segments, whose pages it maps as they are used."""

    @classmethod
    def of(cls, pid: int) -> Weight:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(open_files(pid), int(status["Threads"]), 1024 * int(status["RssAnon"].split()[0]))


async def returns_to(before: Weight, pid: int, grown_bytes: int) -> None:
    """Descriptors and threads are as before, and memory within some bytes of it."""

    def is_back() -> bool:
        now = Weight.of(pid)
        return now.files <= before.files and now.threads <= before.threads

    await wait_until(is_back, f"{before} again, not {Weight.of(pid)}", 30)
    grown = Weight.of(pid).memory_bytes - before.memory_bytes
    assert grown < grown_bytes, f"{grown} bytes more"


@pytest.fixture
async def bystander(node: NodeProcess) -> AsyncIterator[ucxkv.Client]:
    """A client that works all the time; afterwards the node holds nothing of anybody else."""
    async with ucxkv.connect(node.address, timeout_s=20) as kv:
        works, stop = 0, asyncio.Event()

        async def work() -> None:
            nonlocal works
            while not stop.is_set():
                k, b = keys(4), blocks(4, 1000)
                assert (await kv.put_many(k, b)).ok
                into = np.zeros_like(b)
                assert (await kv.get_many(k, into)).status.tolist() == [ReadStatus.HIT] * 4 and (into == b).all()
                works += 1
                await asyncio.sleep(0.01)

        working = asyncio.create_task(work())
        yield kv
        stop.set()
        await working
        assert works > 3

        async def is_quiet() -> bool:
            kv._router.sole.putter.return_grants()
            numbers = (await kv.status())[0].numbers
            return numbers["connections"] == 1 and not any(numbers[name] for name in NUMBERS)

        await wait_until(is_quiet, "sessions, grants and leases are gone", 30)


async def test_ten_thousand_connections_come_and_go(node: NodeProcess, bystander: ucxkv.Client) -> None:
    """User voice 4. Method: connect, shake hands, drop, over TCP and over the local socket where descriptors travel; a
    third dropped half-way, a third with the answer unread; descriptors, threads and memory of the node are as before.
    """
    first = encode(hello())
    frame = pack_header(len(first), m.Hello.CODE, 0, 1) + first
    first = encode(hello(want_memory=True))
    frame_for_memory = pack_header(len(first), m.Hello.CODE, 0, 1) + first
    host, _, port = node.address.rpartition(":")
    with RawPeer(node.address) as peer:
        local = "\0" + (await asyncio.to_thread(peer.open)).local_name

    def cycles(count: int, seed: int) -> None:
        rng = random.Random(seed)
        for number in range(count):
            is_local = number % 4 == 0
            if is_local:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(20)
                sock.connect(local)
            else:
                sock = socket.create_connection((host, int(port)), 20)
            with sock:
                say = frame_for_memory if is_local else frame
                sock.sendall(say[: rng.randrange(len(say))] if number % 3 == 0 else say)
                if number % 3 == 1:
                    assert sock.recv(1)

    await asyncio.to_thread(cycles, 1000, 0)
    await wait_until(lambda: _connections_are(bystander, 1), "they are gone")
    before = Weight.of(node.pid)
    await asyncio.gather(*(asyncio.to_thread(cycles, 2500, seed) for seed in range(1, 5)))
    await wait_until(lambda: _connections_are(bystander, 1), "they are gone")
    await returns_to(before, node.pid, 8 * MIB)


async def _connections_are(kv: ucxkv.Client, count: int) -> bool:
    return (await kv.status())[0].numbers["connections"] == count


@pytest.mark.parametrize("path", ["message", "network"])
async def test_hundreds_of_data_paths_are_opened_and_dropped_at_every_step(
    node: NodeProcess, bystander: ucxkv.Client, path: str
) -> None:
    """User voice 4, with UCX. Method: 360 peers that end their connection after the greeting, with OpenData unanswered,
    answered, with an endpoint, with an answered look-up, or that are whole clients that put and leave, six at a time;
    descriptors, threads and memory of both processes are as before. Each has a worker of its own, as processes have:
    UCX pairs the two sides' connections by worker and number alone, so one that is half-open may get a sibling's.
    """
    from ucxkv.transport.data import DataClient
    from ucxkv.transport.endpoint import Endpoint
    from ucxkv.transport.progress import Worker
    from ucxkv.transport.ucx import SAME_HOST_TRANSPORTS, Context

    is_far = path == "network"
    with RawPeer(node.address) as peer:
        local = f"unix:@{(await asyncio.to_thread(peer.open)).local_name}"
    context = Context(transports=None if is_far else SAME_HOST_TRANSPORTS, is_shared=False)

    async def one(step: int) -> None:
        if step == 5:
            async with ucxkv.connect(node.address, path=path, timeout_s=20) as kv:
                assert await kv.put(keys(1)[0], os.urandom(50_000)) is PutStatus.STORED
            return
        worker = Worker(context)
        try:
            await half_way(step, worker)
            assert worker.owned_count == 0
        finally:
            await worker.aclose()

    async def half_way(step: int, worker: Worker) -> None:
        peer = await asyncio.to_thread(RawPeer, node.address if is_far else local, 20.0)
        welcome = await asyncio.to_thread(peer.open)
        request = m.OpenData(worker.address, is_far, is_far)
        if step == 1:
            peer.send(request.CODE, encode(request))
        if step > 1:
            assert isinstance(await asyncio.to_thread(peer.ask, request), m.DataOpened)
        if step > 2:
            endpoint = Endpoint.connect(worker, welcome.data_address, is_peer_mode=is_far)
            client = DataClient(worker, endpoint, welcome.session, welcome.epoch)
            if step > 3:
                assert (await client.lookup(os.urandom(16)))["status"].tolist() == [1]
            if step % 2:
                await client.aclose()
        peer.close()
        if step > 2:
            await client.aclose()

    async def rounds(count: int) -> None:
        for _ in range(count):
            await asyncio.gather(*(one(step) for step in range(6)))

    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(64)))  # every thread of the loop's pool
    await rounds(10)
    await wait_until(lambda: _connections_are(bystander, 1), "they are gone")
    here, there = Weight.of(os.getpid()), Weight.of(node.pid)
    await rounds(60)
    await wait_until(lambda: _connections_are(bystander, 1), "they are gone")
    await returns_to(there, node.pid, 32 * MIB)
    assert threading.active_count() <= here.threads
    await returns_to(here, os.getpid(), 32 * MIB)
    context.close()


async def test_more_connections_than_the_node_takes_are_refused_and_it_goes_on() -> None:
    """Goal: a bound on connections. Method: few descriptors, many idle connections; then they go."""
    limits = {resource.RLIMIT_NOFILE: 128}
    with NodeProcess(host_bytes="16MiB", message_path=False, limits=limits) as node:
        async with ucxkv.connect(node.address) as kv:
            crowd = [socket.create_connection(node.address.split(":"), 5) for _ in range(200)]
            k, b = keys(20), blocks(20, 1000)
            assert (await kv.put_many(k, b)).ok and (await kv.get_many(k, np.empty_like(b))).hits == 20
            for sock in crowd:
                sock.close()

            async def is_reachable() -> bool:
                try:
                    async with ucxkv.connect(node.address, timeout_s=1) as other:
                        return await other.exists(k[0])
                except ucxkv.Unavailable:
                    return False

            await wait_until(is_reachable, "new clients are served again", 20)
