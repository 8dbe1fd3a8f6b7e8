"""Which path a client takes, why, who sees it, and how it is forced; clients and nodes on one host."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import ROOT, NodeProcess, wait_until
from ucxkv import PathKind
from ucxkv.node import Node, NodeConfig
from ucxkv.node.service import port_settings
from ucxkv.protocol import WIRE_VERSION
from ucxkv.settings import CONFIG_VARIABLE, PATH_VARIABLE, path_setting


async def _works(kv: ucxkv.Client) -> None:
    k, b = keys(3), blocks(3, 300_000)
    assert (await kv.put_many(k, b, "chain")).ok
    into = np.zeros_like(b)
    assert (await kv.get_many(k, into)).hits == 3 and (into == b).all()


async def _peer(address: str, path: str | None = None) -> ucxkv.client.PeerInfo:
    """What `peers` says of a connection that was seen to work."""
    async with ucxkv.connect(address, path=path) as kv:
        await _works(kv)
        (peer,) = kv.peers()
        return peer


# ---- chosen


async def test_a_client_in_the_nodes_process_reads_its_memory() -> None:
    """Goal: same process: direct memory, and shown as that. Method: an embedded node; a view lies in a mapping of the
    node's own segment (one file), and no message was served.
    """
    async with Node(NodeConfig(name="in", listen="127.0.0.1:0", host_bytes=32 << 20)) as node:
        async with ucxkv.connect(node.address) as kv:
            (peer,) = kv.peers()
            assert (peer.path, peer.way) == (PathKind.MAPPED, "same process")
            assert peer.why.startswith("same process")
            await _works(kv)
            key = keys(1)[0]
            await kv.put(key, b"direct")
            async with await kv.view(key) as view:  # type: ignore[union-attr]
                address = np.frombuffer(view.data, np.uint8).ctypes.data
                assert _file_at(address) == _file_at(node.store.segment.address)
        assert node.service.numbers()["message_reads"] == 0


def _file_at(address: int) -> str:
    """Device and inode of the file that is mapped there in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *_ = line.split()
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            return f"{device} {inode}"
    raise AssertionError(f"nothing is mapped at {address:#x}")


async def test_a_client_on_the_nodes_host_maps_its_memory(node: NodeProcess) -> None:
    """Goal: same host. Method: a node of its own process."""
    peer = await _peer(node.address)
    assert (peer.path, peer.way) == (PathKind.MAPPED, "same host")
    assert peer.why.startswith("same host")


def test_a_forked_child_is_no_longer_in_the_nodes_process() -> None:
    """Goal: "same process" is never inherited. Method: the identity in a forked child differs."""
    from ucxkv.whereabouts import process_identity

    mine = process_identity()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, process_identity().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        theirs = pipe.read()
    assert theirs and theirs != mine == process_identity()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_over_the_loopback_the_loopback_moves_the_bytes(host: str) -> None:
    """Goal: no device that does not lead to the peer. Method: path="network" to loopback addresses; the lanes."""
    with NodeProcess(listen=f"{host}:0") as node:
        peer = await _peer(node.address, "network")
        assert (peer.path, peer.way) == (PathKind.MESSAGE, "TCP")
        assert "(tcp/lo)" in peer.why


async def test_a_node_on_all_addresses_is_reached_on_each() -> None:
    """Goal: whatever address a client has, the data takes it too. Method: 0.0.0.0, by the loopback and by this host's
    own address; the lanes.
    """
    with NodeProcess(listen="0.0.0.0:0") as node:
        port = node.address.rpartition(":")[2]
        assert "(tcp/lo)" in (await _peer(f"127.0.0.1:{port}", "network")).why
        own = _own_address()
        if own is not None:
            host, interface = own
            assert f"(tcp/{interface})" in (await _peer(f"{host}:{port}", "network")).why


def _own_address() -> tuple[str, str] | None:
    """An IPv4 address of this host that is not the loopback's, and its interface."""
    from ucxkv.transport.netlink import interface_addresses

    for name, addresses in interface_addresses().items():
        for address in addresses:
            if address.version == 4 and not address.ip.is_loopback:
                return str(address.ip), name
    return None


async def test_the_users_devices_are_used_at_the_node() -> None:
    """Goal: UCX_NET_DEVICES of the user wins. Method: a node on 0.0.0.0 that has it set to lo; what it opened."""
    with NodeProcess(listen="0.0.0.0:0", prefix=("env", "UCX_NET_DEVICES=lo")) as node:
        started = next(line for line in node.log().splitlines() if "node.start" in line)
        assert '"transports": "tcp/lo"' in started and "lo (the environment's UCX_NET_DEVICES)" in started
        port = node.address.rpartition(":")[2]
        assert "(tcp/lo)" in (await _peer(f"127.0.0.1:{port}", "network")).why


async def test_the_start_is_logged_with_devices_version_and_protocol(node: NodeProcess) -> None:
    """Goal: one line says what runs. Method: the line `node.start` against `status`."""
    started = json.loads(next(line for line in node.log().splitlines() if "node.start" in line))
    assert re.fullmatch(r"\d+\.\d+\.\d+ \((wheel|system|explicit)\)", started["ucx"])
    assert started["transports"] == "tcp/lo" and started["devices"].startswith("lo ")
    assert started["protocol"] == f"wire {WIRE_VERSION}, messages"
    async with ucxkv.connect(node.address) as kv:
        facts = (await kv.status())[0].facts
    assert {name: started[name] for name in facts} == facts


# ---- forced


def test_a_forced_path_comes_from_the_argument_the_environment_or_a_file(tmp_path: Path) -> None:
    """Goal: the documented order. Method: all three, then fewer; the default is auto."""
    file = tmp_path / "ucxkv.toml"
    file.write_text("[node]\nname = 'n1'\n[client]\npath = 'message'\n")
    environ = {PATH_VARIABLE: "rma", CONFIG_VARIABLE: str(file)}
    assert path_setting("network", environ) == ("network", "path='network'")
    assert path_setting(None, environ)[0] == "rma"
    del environ[PATH_VARIABLE]
    assert path_setting(None, environ)[0] == "message"
    assert str(file) in path_setting(None, environ).by
    assert path_setting(None, {}) == ("auto", "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[client]\npath = 'mmap'\n", "mmap"),
        ("[client]\npath = 3\n", "3"),
        ("[client]\npaht = 'rma'\n", "did you mean 'path'"),
        ("client = 1\n", "client"),
        ("[clients]\n", "clients"),
        ("[client\n", "ucxkv.toml"),
    ],
)
def test_a_wrong_client_setting_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    """Goal: a misspelt key never silently means the default. Method: each bad file; the error names file and key."""
    file = tmp_path / "ucxkv.toml"
    file.write_text(text)
    with pytest.raises(ucxkv.SetupError, match=re.escape(named)):
        path_setting(None, {CONFIG_VARIABLE: str(file)})
    with pytest.raises(ucxkv.SetupError, match=PATH_VARIABLE):
        path_setting(None, {PATH_VARIABLE: "mmap"})
    with pytest.raises(ucxkv.SetupError, match="absent"):
        path_setting(None, {CONFIG_VARIABLE: str(tmp_path / "absent.toml")})
    with pytest.raises(ucxkv.UsageError, match="mmap"):
        path_setting("mmap", {})


@pytest.mark.parametrize(
    ("path", "kind", "over"),
    [
        ("mapped", PathKind.MAPPED, "handed out"),
        ("message", PathKind.MESSAGE, "shared memory"),
        ("rma", PathKind.RMA, "shared memory"),
        ("network", PathKind.MESSAGE, "the network"),
    ],
)
async def test_the_environment_forces_every_path(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, path: str, kind: PathKind, over: str
) -> None:
    """Goal: no code is changed to try a path. Method: UCXKV_PATH; what `peers` says, and who is named in it."""
    monkeypatch.setenv(PATH_VARIABLE, path)
    peer = await _peer(shared_node.address)
    assert peer.path is kind and over in peer.why
    assert path == "mapped" or f"{PATH_VARIABLE}={path}" in peer.why


def test_a_flag_forces_a_path_and_a_file_does(shared_node: NodeProcess, tmp_path: Path) -> None:
    """Goal: the command obeys too. Method: `status --peers` as a client: its own row, by flag, by file, by neither."""
    file = tmp_path / "ucxkv.toml"
    file.write_text("[client]\npath = 'message'\n")
    for arguments, environ, wanted in (
        (("--path", "rma"), {}, "rma"),
        ((), {CONFIG_VARIABLE: str(file)}, "message"),
        ((), {}, "mapped"),
    ):
        rows = _status_peers(shared_node.address, *arguments, environ=environ)
        assert [row["path"] for row in rows] == [wanted]


def _status_peers(address: str, *arguments: str, environ: dict[str, str] | None = None) -> list[dict[str, object]]:
    argv = [sys.executable, "-m", "ucxkv", "status", "--peers", "--json", "-a", address, *arguments]
    env = {**os.environ, **(environ or {})}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_a_path_that_cannot_be_had_says_why_who_asked_and_what_to_do() -> None:
    """Goal: a typed error that an operator can act on. Method: RDMA over the loopback; messages of a node that serves
    none; memory of a node that is no longer there is Unavailable, not a wrong path.
    """
    with NodeProcess() as node:
        with pytest.raises(ucxkv.SetupError) as caught:
            await ucxkv.connect(node.address, path="rdma")
        assert "RDMA" in str(caught.value) and "path='rdma'" in str(caught.value) and "ucxkv topo" in str(caught.value)
    with NodeProcess(message_path=False) as node:
        for path in ("message", "rma", "network"):
            with pytest.raises(ucxkv.SetupError) as caught:
                await ucxkv.connect(node.address, path=path)
            assert "message_path = false" in str(caught.value) and f"path={path!r}" in str(caught.value)
        assert (await _peer(node.address)).path is PathKind.MAPPED
    with pytest.raises(ucxkv.Unavailable):
        await ucxkv.connect(node.address, path="mapped")


# ---- seen


@pytest.fixture
async def clients() -> AsyncIterator[tuple[Node, list[ucxkv.Client]]]:
    """Two joined nodes; a client of both by each path."""
    config = NodeConfig(name="v1", listen="127.0.0.1:0", host_bytes=32 << 20, metrics_listen="127.0.0.1:0")
    async with Node(config) as node:
        second = NodeConfig(name="v2", listen="127.0.0.1:0", host_bytes=32 << 20, join=(node.address,))
        async with Node(second):
            opened = [await ucxkv.connect(node.address, path=path) for path in ("mapped", "message", "rma", "network")]
            yield node, opened
            for kv in opened:
                await kv.aclose()


async def test_nodes_know_the_paths_of_their_clients(clients: tuple[Node, list[ucxkv.Client]]) -> None:
    """Goal: one place to look. Method: `connections` of one client names all four at both nodes, each with the reason
    that its own `peers` gives; nodes' links move no bytes; one that leaves is gone.
    """
    node, opened = clients
    found = await opened[0].connections()
    assert {row.node for row in found} == {"v1", "v2"}
    for name in ("v1", "v2"):
        here = [row for row in found if row.node == name and row.role == "client"]
        assert sorted(row.path for row in here) == ["mapped", "message", "message", "rma"]
        said = {peer.why for kv in opened for peer in kv.peers() if peer.name == name}
        assert {row.why for row in here} == said
        assert all(row.is_local and row.name for row in here)
    assert {row.path for row in found if row.role == "node"} == {"control"}
    await opened.pop().aclose()
    await wait_until(lambda: len(node.connections()) == 4, "the client that left is forgotten")


async def test_a_metric_counts_connections_by_path(clients: tuple[Node, list[ucxkv.Client]]) -> None:
    """Goal: alert when RDMA is lost. Method: a scrape; the labels are those five, and they sum to all connections."""
    node, _ = clients
    assert node._metrics is not None
    url = f"http://{node._metrics.address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    found = dict(re.findall(r'^ucxkv_connections_by_path\{node="v1",path="(\w+)"\} (\S+)$', text, re.M))
    counts = {path: int(float(value)) for path, value in found.items()}
    assert counts == {"mapped": 1, "message": 2, "rma": 1, "none": 0, "control": 1}
    total = re.search(r'^ucxkv_connections\{node="v1"\} (\S+)$', text, re.M)
    assert total is not None and float(total[1]) == sum(counts.values())


def test_status_shows_the_peers_as_a_table(shared_node: NodeProcess) -> None:
    """Goal: for people. Method: the command's own row; no traceback, no lost column."""
    argv = [sys.executable, "-m", "ucxkv", "status", "--peers", "-a", shared_node.address]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60, check=True)
    heading, *rows = [line for line in done.stdout.splitlines() if line.strip() and set(line.strip()) != {"─"}]
    assert heading.split() == ["node", "peer", "role", "host", "path", "way", "why"]
    assert rows[0].split()[0] == "shared" and "mapped" in rows[0] and "same host" in rows[0]


async def test_what_a_client_says_cannot_harm_a_terminal_or_the_metric(node: NodeProcess) -> None:
    """Goal: labels stay bounded, texts printable and short. Method: a client that reports nonsense."""
    from ucxkv.protocol import messages as m

    async with ucxkv.connect(node.address) as kv:
        link = kv._router.links["n1"]
        link.tell(m.ChosenPath("\x1b[2Jmapped", "way\n\x07", "x" * 100_000))
        (row,) = await kv.connections()
        assert (row.path, row.way) == ("none", "way")
        assert len(row.why) <= 512
        numbers = (await kv.status())[0].numbers
        assert numbers["connections_none"] == 1 and numbers["connections_mapped"] == 0


# ---- nearness


async def test_nodes_that_hold_no_hint_are_asked_nearest_first() -> None:
    """Goal: of equal places the nearest is asked first (replicas will come). Method: a node by mapping, one by messages
    alone; the order of a client for keys of either's, but for the home, which comes first.
    """
    with NodeProcess("far", message_path=True) as far, NodeProcess("near", join=far.address) as near:
        async with ucxkv.connect(near.address) as kv:
            await wait_until(lambda: sum(peer.alive for peer in kv.peers()) == 2, "both nodes are reached")
            router = kv._router
            ways = {name: link.way for name, link in router.links.items()}
            assert len(set(ways.values())) == 1
            router.links["far"].way = type(ways["far"]).TCP  # as if it were on another host
            router._changed()
            assert [link.name for link in router._nearest] == ["near", "far"]
            for key in keys(20):
                home = router.home_link(key)
                assert home is not None
                assert [link.name for link in router.order(key)] == [
                    home.name,
                    *(name for name in ("near", "far") if name != home.name),
                ]


# ---- the data service's ports


def _free_port() -> int:
    """The first of two free ports in a row."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two free ports in a row")


def _listening(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with_socket = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
        if with_socket:
            inodes.add(with_socket[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


async def test_data_port_is_the_only_port_besides_the_control_port() -> None:
    """Goal: an operator can write the firewall's rule. Method: the ports that the process listens on; it serves."""
    port = _free_port()
    for text in (str(port), f"{port}-{port + 1}"):
        with NodeProcess(data_port=text) as node:
            control = int(node.address.rpartition(":")[2])
            data = _listening(node.pid) - {control}
            assert len(data) == 1 and data <= {port, port + 1}
            assert (await _peer(node.address, "network")).path is PathKind.MESSAGE


async def test_a_data_port_in_use_stops_the_start_by_name() -> None:
    """Goal: no node behind a firewall that silently serves nobody. Method: a port that is taken; nothing is left."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node = Node(NodeConfig(name="p", listen="127.0.0.1:0", host_bytes=16 << 20, data_port=port))
        with pytest.raises(ucxkv.SetupError, match=f"data_port {port}"):
            await node.start()


def test_one_port_is_too_few_with_rdma() -> None:
    """Goal: the listener and UCX's own port do not meet. Method: the settings that a service with a listener takes."""
    with pytest.raises(ucxkv.SetupError, match="13338-13339"):
        port_settings((13_338, 13_338), has_listener=True)
    assert port_settings((13_338, 13_338), has_listener=False) == {"TCP_PORT_RANGE": "13338-13338"}
    assert port_settings((13_338, 13_340), has_listener=True) == {"TCP_PORT_RANGE": "13339-13340"}
    assert port_settings(None, has_listener=True) == {}
