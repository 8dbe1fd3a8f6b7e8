"""Clients and nodes on different hosts, over TCP (namespaces; see tests/hosts.py): what works.

Every body runs inside of host b, its node on host a. Statuses, bytes and counts only: no time of this machine is
asserted, but for the bound that each call was given.
"""

from __future__ import annotations

import os
import re
import subprocess
import time

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import POISON, clean, works
from tests.harness import wait_until
from tests.hosts import Hosts, in_host
from ucxkv.transport.data import TCP_FRAGMENT_BYTES

pytestmark = pytest.mark.hosts

MIB = 1 << 20


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
            assert await works(kv)


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
