"""Paths between hosts (network namespaces; see tests/hosts.py): which interface moves the bytes, firewalls, NAT."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import wait_until
from tests.hosts import Hosts, in_host, why_not
from ucxkv import PathKind

pytestmark = pytest.mark.hosts

DATA_PORT = 13_502
_CONNECT_S = 8.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts of each test's own: interfaces and routes are changed here."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts("a", "b", "c") as made:
        yield made


async def _works(kv: ucxkv.Client) -> None:
    k, b = keys(4), blocks(4, 700_000)
    assert (await kv.put_many(k, b, "chain")).ok
    into = np.zeros_like(b)
    assert (await kv.get_many(k, into)).hits == 4 and (into == b).all()


def _allow_only(hosts: Hosts, name: str, *ports: str) -> None:
    """New connections to this host reach these ports alone; the others vanish."""
    hosts._rule(name, f"tcp flags & (syn|ack) == syn tcp dport != {{ {', '.join(ports)} }} drop")


@in_host("b")
async def test_between_hosts_the_interface_that_leads_there_moves_the_bytes(hosts: Hosts) -> None:
    """Goal: an interface that is up, and leads nowhere, is not used. Method: both hosts have a second one, with another
    subnet, that sorts first; the node listens on every address; the lanes.
    """
    for number, name in enumerate("ab"):
        hosts.ip(name, "link", "add", "aaa0", "type", "veth", "peer", "name", "bbb0")
        hosts.ip(name, "addr", "add", f"10.88.{number}.1/24", "dev", "aaa0")
        hosts.ip(name, "link", "set", "aaa0", "up")
        hosts.ip(name, "link", "set", "bbb0", "up")
    with hosts.node("a", listen="0.0.0.0:0") as node:
        address = f"{hosts.address('a')}:{node.address.rpartition(':')[2]}"
        async with ucxkv.connect(address) as kv:
            (peer,) = kv.peers()
            assert (peer.path, peer.way) == (PathKind.MESSAGE, "TCP")
            assert "(tcp/eth0)" in peer.why, peer.why
            await _works(kv)


@in_host("b")
async def test_a_host_with_two_networks_reaches_the_node_of_each_over_its_own(hosts: Hosts) -> None:
    """Goal: devices are chosen for a node, not for a client. Method: one client of two nodes on two networks."""
    for name, host in (("a", "10.89.0.1"), ("b", "10.89.0.2")):
        hosts.ip(
            "switch",
            "link",
            "add",
            f"two-{name}",
            "type",
            "veth",
            "peer",
            "name",
            "eth1",
            "netns",
            hosts.namespace(name),
        )
        hosts.ip("switch", "link", "set", f"two-{name}", "up")
        hosts.ip(name, "addr", "add", f"{host}/24", "dev", "eth1")
        hosts.ip(name, "link", "set", "eth1", "up")
    hosts.ip("switch", "link", "add", "bridge2", "type", "bridge")
    hosts.ip("switch", "link", "set", "bridge2", "up")
    for name in "ab":
        hosts.ip("switch", "link", "set", f"two-{name}", "master", "bridge2")
    with hosts.node("c") as one, hosts.node("a", listen="10.89.0.1:0") as two:
        async with ucxkv.connect(one.address, two.address) as kv:
            over = {peer.name: peer.why for peer in kv.peers()}
            assert "(tcp/eth0)" in over["n-c"] and "(tcp/eth1)" in over["n-a"], over
            await _works(kv)


@in_host("b")
async def test_two_ports_of_the_node_and_none_of_the_client_are_enough(hosts: Hosts) -> None:
    """Goal: the firewall's rules as documented. Method: the client's host takes no new connection, the node's only
    those to the control port and data_port; with data_port closed too it is refused in time, not hung.
    """
    with hosts.node("a", data_port=str(DATA_PORT)) as node:
        control = node.address.rpartition(":")[2]
        _allow_only(hosts, "a", control, str(DATA_PORT))
        hosts.refuse_new("b")
        async with ucxkv.connect(node.address) as kv:
            assert kv.peers()[0].path is PathKind.MESSAGE
            await _works(kv)
            (row,) = [row for row in await kv.connections() if row.role == "client"]
            assert (row.path, row.is_local) == ("message", True)  # one kernel: its boot id is the same
        hosts.heal_rules("a")
        _allow_only(hosts, "a", control)
        with pytest.raises(ucxkv.Unavailable):
            await ucxkv.connect(node.address, timeout_s=2)


@in_host("b")
async def test_a_client_behind_address_translation_reads_and_writes(hosts: Hosts) -> None:
    """Goal: containers on a bridge of their host. Method: c is behind b, and only b has a route to it (the node's
    default route leads into the void, as the internet would); a client there puts and gets.
    """
    inner = hosts.namespace("c")
    hosts.ip("b", "link", "add", "nat0", "type", "veth", "peer", "name", "eth9", "netns", inner)
    hosts.ip("b", "addr", "add", "10.90.0.1/24", "dev", "nat0")
    hosts.ip("b", "link", "set", "nat0", "up")
    hosts.ip("c", "link", "set", "eth0", "down")
    hosts.ip("c", "addr", "add", "10.90.0.2/24", "dev", "eth9")
    hosts.ip("c", "link", "set", "eth9", "up")
    hosts.ip("c", "route", "add", "default", "via", "10.90.0.1")
    hosts.sysctl("b", "net/ipv4/ip_forward", "1")
    rules = (
        "table ip nat {\n chain out {\n  type nat hook postrouting priority 100;\n  oifname eth0 masquerade\n }\n}\n"
    )
    hosts.run("b", "nft", "-f", "-", stdin=rules)
    hosts.ip("a", "route", "add", "default", "via", "10.77.0.250")
    with hosts.node("a") as node:
        text = await asyncio.to_thread(hosts.run, "c", sys.executable, "-c", _CLIENT, node.address, timeout_s=60)
        assert "(tcp/eth9)" in text and "all right" in text, text


_MASQUERADE = """
table ip nat {
 chain out {
  type nat hook postrouting priority 100;
  oifname eth0 masquerade
 }
}
"""

_CLIENT = """
import asyncio, sys, ucxkv
from tests.integration.test_paths_hosts import _works
async def main():
    async with ucxkv.connect(sys.argv[1]) as kv:
        print(kv.peers()[0].why)
        await _works(kv)
        print("all right")
asyncio.run(main())
"""


@in_host("b")
async def test_a_client_that_the_node_cannot_reach_holds_nobody_up(hosts: Hosts) -> None:
    """Goal: one bad address does not stop the data service. Method: a client on b is served; another session gives the
    node the address of a worker on c, whose host drops everything; meanwhile and afterwards the first is answered.
    """
    with hosts.node("a") as node:
        async with ucxkv.connect(node.address, timeout_s=_CONNECT_S) as kv:
            k, b = keys(2), blocks(2, 100_000)
            assert (await kv.put_many(k, b)).ok
            hosts.refuse_new("c")
            text = asyncio.create_task(
                asyncio.to_thread(hosts.run, "c", sys.executable, "-c", _UNREACHABLE, node.address, timeout_s=60)
            )
            await wait_until(lambda: _sessions(kv, 2), "the other session is open", 30)
            for _ in range(20):
                into = np.zeros_like(b)
                assert (await kv.get_many(k, into)).hits == 2 and (into == b).all()
                await asyncio.sleep(0.05)
            assert "opened" in await text


async def _sessions(kv: ucxkv.Client, count: int) -> bool:
    return (await kv.status())[0].numbers["message_sessions"] == count


_UNREACHABLE = """
import asyncio, sys, time
from ucxkv.dial import Caller, ask, dial
from ucxkv.protocol import messages as m
from ucxkv.transport.progress import Worker
from ucxkv.transport.ucx import Context
async def main():
    soon = lambda: time.monotonic_ns() + 10_000_000_000
    dialed = await dial(sys.argv[1], Caller("client", "unreachable"), soon())
    context = Context(devices=("eth0",), is_shared=False)
    worker = Worker(context)
    request = m.OpenData(worker.address, True, True)  # it connects to nobody: the node has to
    assert isinstance(await ask(dialed.connection, request, soon()), m.DataOpened)
    print("opened")
    await asyncio.sleep(3)
    dialed.connection.abort()
    await worker.aclose()
    context.close()
asyncio.run(main())
"""
