"""Which path is chosen where there are RDMA devices, when no UCX_ variable names devices or transports."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.rdma import processes
from tests.rdma.processes import OWN, PEER, Process, node_main
from ucxkv import PathKind
from ucxkv.transport.progress import Worker
from ucxkv.transport.ucx import Context

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def node() -> Iterator[Process]:
    """A node that chooses its devices by the address it listens on."""
    with Process(node_main, "p1", (), None) as running:
        yield running


@pytest.fixture(autouse=True)
async def chosen() -> AsyncIterator[None]:
    """This process chooses too, for the time of a test."""
    processes.use(None)
    yield
    processes.use(OWN)


async def _works(kv: ucxkv.Client) -> None:
    k, b = keys(3), blocks(3, 300_000)
    assert (await kv.put_many(k, b, "chain")).ok
    into = np.zeros_like(b)
    assert (await kv.get_many(k, into)).hits == 3 and (into == b).all()


async def test_reads_go_by_verbs_over_the_device_of_each_ends_address(node: Process) -> None:
    """Goal: RMA over verbs by itself. Method: path="network" (one kernel, so "auto" would map); path, way and the
    device in `peers`, the same at the node, whose transports name its own device; blocks are read without its thread.
    """
    async with ucxkv.connect(node.told, path="network", timeout_s=_TIMEOUT_S) as kv:
        (peer,) = kv.peers()
        assert peer.path is PathKind.RMA, peer
        assert peer.way in ("same rail", "cross rail")
        assert f"one-sided reads over RDMA (rc_verbs/{OWN.device}" in peer.why or f"rc_mlx5/{OWN.device}" in peer.why
        (seen,) = [row for row in await kv.connections() if row.role == "client"]
        assert (seen.path, seen.why) == ("rma", peer.why)
        facts = (await kv.status())[0].facts
        assert f"/{PEER.device}" in facts["transports"] and PEER.device in facts["devices"]
        assert "one-sided" in facts["protocol"]
        before = await asyncio.to_thread(node.ask, "numbers")
        await _works(kv)
        after = await asyncio.to_thread(node.ask, "numbers")
        assert after["message_read_keys"] == before["message_read_keys"]


async def test_rdma_can_be_demanded_and_is_not_taken_where_memory_is_nearer(node: Process) -> None:
    """Goal: forcing works over verbs. Method: path="rdma", then no path at all, on the node's own host."""
    async with ucxkv.connect(node.told, path="rdma", timeout_s=_TIMEOUT_S) as kv:
        assert kv.peers()[0].path is PathKind.RMA and OWN.device in kv.peers()[0].why
        await _works(kv)
    async with ucxkv.connect(node.told, timeout_s=_TIMEOUT_S) as kv:
        assert kv.peers()[0].path is PathKind.MAPPED  # the same host: nearer than any device


def _nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


async def test_tcp_takes_over_where_rdma_does_not_come_through(node: Process) -> None:
    """Goal: a fabric that drops everything costs speed, not the cache. Method: nft drops what arrives at RoCE's port (a
    drop on the way out is no loss but a local error, on which the kernel waits for ever); the path is by messages over
    TCP, and says why; path="rdma" ends within its deadline; healed, RDMA is used again.
    """
    if not OWN.device.startswith("rxe"):
        pytest.skip("only packets of a device in software pass nft")
    _nft("table ip paths {\n chain arrived {\n  type filter hook input priority 0;\n  udp dport 4791 drop\n }\n}\n")
    try:
        async with ucxkv.connect(node.told, path="network", timeout_s=60) as kv:
            (peer,) = kv.peers()
            assert (peer.path, peer.way) == (PathKind.MESSAGE, "TCP")
            assert "did not come through" in peer.why and "tcp/" in peer.why, peer.why
            await _works(kv)
        with pytest.raises(ucxkv.Unavailable):
            await ucxkv.connect(node.told, path="rdma", timeout_s=10)
    finally:
        _nft("delete table ip paths\n")
    async with ucxkv.connect(node.told, path="network", timeout_s=_TIMEOUT_S) as kv:
        assert kv.peers()[0].path is PathKind.RMA


async def test_settings_of_tcp_take_effect_in_this_ucx() -> None:
    """Goal: UCX before 1.17 names a transport's settings otherwise. Method: a port that a worker then listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Context(devices=("lo",), settings={"TCP_PORT_RANGE": f"{port}-{port}"}, is_shared=False) as context:
        worker = Worker(context)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                pass
        finally:
            await worker.aclose()
    assert "UCX_TCP_PORT_RANGE" not in os.environ
