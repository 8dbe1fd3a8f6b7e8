"""Wrong addresses, tokens, versions, names and machines: one error each that says what is there and how to fix it."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ucxkv
from tests.conftest import keys
from tests.harness import ROOT, NodeProcess, open_files, wait_until
from tests.wire import RawPeer, hello
from ucxkv.node import Node, NodeConfig
from ucxkv.protocol import WIRE_VERSION, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.transport.address import TcpAddress
from ucxkv.transport.control import ControlConnection, Message
from ucxkv.transport.control_server import ControlServer


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _node(**options: str) -> subprocess.CompletedProcess[str]:
    """Run a node that is expected to end by itself."""
    argv = [sys.executable, "-m", "ucxkv", "node", "--host-bytes", "16MiB"]
    for flag, value in options.items():
        argv += [f"--{flag.replace('_', '-')}", value]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)


# ---- addresses


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
async def test_a_node_reports_the_port_chosen_and_is_reached_there(listen: str) -> None:
    """User voice 32. Method: port 0 on IPv4, IPv6 and a name with both families; connect to what was reported."""
    if listen.startswith("[") and not _has_ipv6():
        pytest.skip("this host has no IPv6 loopback")
    with NodeProcess(listen=listen, host_bytes="16MiB") as node:
        host, _, port = node.address.rpartition(":")
        assert host == listen.rpartition(":")[0] and int(port) > 0
        async with ucxkv.connect(node.address) as kv:
            (key,) = keys(1)
            assert await kv.put(key, b"v") is ucxkv.PutStatus.STORED and kv.peers()[0].address == node.address


@pytest.mark.parametrize(
    "address",
    [
        *("::1", "2605:340:1:2::3:13337:9", "[::1", "[::1]13337", "[127.0.0.1]:80", "127.0.0.1", "127.0.0.1:"),
        *("127.0.0.1:99999", "127.0.0.1:-1", "host:name", "256.1.1.1:80", "http://127.0.0.1:80", "", "unix:"),
        *(":13337", "a b:80"),
    ],
)
def test_a_bad_address_is_refused_with_its_text(address: str) -> None:
    """User voice 32. Method: malformed addresses are refused before any socket is made, quoting the text."""
    with pytest.raises(ucxkv.UsageError) as caught:
        ucxkv.connect(address)
    assert repr(address) in str(caught.value)


async def test_a_scoped_address_is_parsed_and_an_unreachable_one_is_unavailable() -> None:
    """User voice 32. Method: fe80::1%zone names a zone that is not there; and a port where nobody listens."""
    for address in ("[fe80::1%nosuchzone0]:13337", "127.0.0.1:1"):
        with pytest.raises((ucxkv.Unavailable, ucxkv.SetupError)) as caught:
            await ucxkv.connect(address, timeout_s=3)
        assert address in str(caught.value) or "does not resolve" in str(caught.value)


async def test_a_name_that_does_not_resolve_is_a_setup_error() -> None:
    """Goal: the operator's mistake is named. Method: a name in the reserved .invalid domain."""
    with pytest.raises(ucxkv.SetupError, match=r"nosuch\.invalid"):
        await ucxkv.connect("nosuch.invalid:13337", timeout_s=4)


async def test_a_node_that_is_not_there_leaves_nothing_behind() -> None:
    """Goal: Unavailable that asks the right question, no descriptor kept. Method: 20 tries at a closed port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        before = open_files()
        for _ in range(20):
            with pytest.raises(ucxkv.Unavailable, match="is the node running"):
                await ucxkv.connect(address, timeout_s=2)
        assert open_files() == before


async def test_a_listener_that_never_answers_ends_at_the_deadline() -> None:
    """Goal: no hang in the handshake. Method: a socket that listens and is never accepted from."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        before = open_files()
        with pytest.raises(ucxkv.DeadlineExceeded):
            await ucxkv.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        assert open_files() == before


async def test_one_reachable_address_of_several_is_enough(shared_node: NodeProcess) -> None:
    """Goal: seeds are alternatives. Method: a dead address beside the live one, in both orders."""
    for addresses in (("127.0.0.1:1", shared_node.address), (shared_node.address, "127.0.0.1:1")):
        async with ucxkv.connect(*addresses) as kv:
            assert [peer.alive for peer in kv.peers()] == [True]


# ---- tokens


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the right secret\n")
    path.chmod(0o600)
    return path


async def test_only_the_right_token_opens_a_node(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: both sides prove the token. Method: right, wrong, missing, and one where the node asks for none."""
    monkeypatch.delenv("UCXKV_TOKEN", raising=False)
    with NodeProcess(host_bytes="16MiB", token_file=str(token_file)) as node, NodeProcess("open") as unlocked:
        async with ucxkv.connect(node.address, token="the right secret") as kv:
            assert await kv.put(keys(1)[0], b"v") is ucxkv.PutStatus.STORED
        before = open_files()
        for token in ("wrong", "", "the right secret\n"):
            with pytest.raises(ucxkv.SetupError, match="token"):
                await ucxkv.connect(node.address, token=token)
        with pytest.raises(ucxkv.SetupError, match="asks for no token"):
            await ucxkv.connect(unlocked.address, token="extra")
        assert open_files() == before
        monkeypatch.setenv("UCXKV_TOKEN", "the right secret")
        async with ucxkv.connect(node.address) as kv:
            assert kv.peers()[0].alive


async def test_an_unproved_peer_learns_and_does_nothing(token_file: Path) -> None:
    """Goal: before the proof nothing is answered. Method: requests without, before and after a wrong proof."""
    with NodeProcess(host_bytes="16MiB", token_file=str(token_file)) as node:
        for first in (m.GetStatus(), m.ListKeys(0, 10), m.Grant(1, 1), m.Proof(bytes(32))):
            with RawPeer(node.address) as peer:
                answer = peer.ask(first)
                assert answer is None or isinstance(answer, m.Failure)
                assert peer.is_ended()
        with RawPeer(node.address) as peer:
            assert isinstance(peer.ask(hello()), m.Challenge)
            assert isinstance(peer.ask(m.GetStatus()), m.Failure)
        with RawPeer(node.address) as peer:
            assert isinstance(peer.ask(hello()), m.Challenge)
            refused = peer.ask(m.Proof(bytes(32)))
            assert isinstance(refused, m.Failure) and refused.kind == "SetupError" and peer.is_ended()


# ---- versions


async def test_a_client_of_another_wire_version_is_told_what_to_install(shared_node: NodeProcess) -> None:
    """Goal: VersionMismatch names both versions and the fix. Method: a Hello of the next wire version."""
    with RawPeer(shared_node.address) as peer:
        answer = peer.ask(hello(wire=WIRE_VERSION + 1))
        assert isinstance(answer, m.Failure) and answer.kind == "VersionMismatch"
        assert f"wire version {WIRE_VERSION + 1}" in answer.text and "install the same ucxkv release" in answer.text
        assert peer.is_ended()
    with RawPeer(shared_node.address) as peer:  # a later version appends fields; they are passed over
        payload = encode(hello())
        peer.send(m.Hello.CODE, bytes([payload[0] + 1]) + payload[1:] + b"\xa3new")
        frame = peer.receive()
        assert frame is not None and isinstance(decode(frame[0], frame[3]), m.Welcome)


async def test_a_node_of_another_wire_version_is_refused_by_the_client() -> None:
    """Goal: the other way round. Method: a server that welcomes with the next wire version."""

    def welcome(connection: ControlConnection, message: Message) -> None:
        answer = m.Welcome(WIRE_VERSION + 1, "9.9", 1, "new", "", 1, "host", "", 1, 0, 0, 0, [], [])
        connection.reply(message, answer.CODE, encode(answer))

    server = await ControlServer.start([TcpAddress("127.0.0.1", 0)], welcome)
    try:
        with pytest.raises(ucxkv.VersionMismatch, match="install the same ucxkv release") as caught:
            await ucxkv.connect(str(server.addresses[0]))
        assert "9.9" in str(caught.value) and isinstance(caught.value, ucxkv.SetupError)
    finally:
        server.close()


async def test_a_server_of_another_protocol_is_no_node() -> None:
    """Goal: a web server or garbage on the port is an error, no crash. Method: servers that send other bytes."""
    for noise in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64, os.urandom(4096), b"+OK\r\n"):

        def answer(connection: ControlConnection, message: Message, noise: bytes = noise) -> None:
            connection._sock.send(noise)

        server = await ControlServer.start([TcpAddress("127.0.0.1", 0)], answer)
        try:
            with pytest.raises(ucxkv.Unavailable):
                await ucxkv.connect(str(server.addresses[0]), timeout_s=0.5)
        finally:
            server.close()


# ---- nodes that cannot start


def test_a_port_in_use_is_one_setup_error(shared_node: NodeProcess) -> None:
    """Goal: exit code 2, the address and the fix on stderr, nothing on stdout. Method: a second node on the port."""
    done = _node(name="second", listen=shared_node.address)
    assert done.returncode == 2 and done.stdout == ""
    assert shared_node.address in done.stderr and "port 0 picks a free one" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_memory_than_there_is_is_one_setup_error() -> None:
    """User voice 20. Method: an exabyte of host tier, and a small one under an address space limit."""
    done = _node(name="huge", listen="127.0.0.1:0", host_bytes="900TiB")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "found" in done.stderr and "needed" in done.stderr and "fix" in done.stderr
    limited = subprocess.run(
        [sys.executable, "-m", "ucxkv", "node", "--listen", "127.0.0.1:0", "--host-bytes", "3GiB"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
        check=False,
    )
    assert limited.returncode == 2 and limited.stdout == "" and "ulimit -v" in limited.stderr


async def test_a_memlock_limit_keeps_no_node_from_starting() -> None:
    """User voice 20. Method: a node under `ulimit -l 64` serves, since mapped memory needs no locked pages."""
    with NodeProcess(limits={resource.RLIMIT_MEMLOCK: 65_536}) as node:
        async with ucxkv.connect(node.address) as kv:
            assert await kv.put(keys(1)[0], bytes(1 << 20)) is ucxkv.PutStatus.STORED


def test_a_second_node_of_the_same_name_is_refused(shared_node: NodeProcess) -> None:
    """Goal: names are unique among live nodes. Method: join under the name of the node that is joined."""
    done = _node(name="shared", listen="127.0.0.1:0", join=shared_node.address)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "named 'shared' already" in done.stderr and "--name" in done.stderr


async def test_a_client_of_two_nodes_with_one_name_is_refused(shared_node: NodeProcess) -> None:
    """Goal: never half a cluster in silence. Method: two nodes that do not know each other, one name, one client."""
    with NodeProcess("shared", host_bytes="16MiB") as other:
        before = open_files()
        with pytest.raises(ucxkv.SetupError, match="nodes are named 'shared'"):
            await ucxkv.connect(shared_node.address, other.address)
        assert open_files() == before


def test_nobody_to_join_is_one_error() -> None:
    """Goal: a node that was to join and cannot does not run alone. Method: join a closed port."""
    done = _node(name="lonely", listen="127.0.0.1:0", join="127.0.0.1:1")
    assert done.returncode != 0 and done.stdout == "" and "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_start_that_fails_gives_everything_back() -> None:
    """Goal: no half-up node. Method: nodes in this process that cannot bind or join; descriptors are counted."""
    async with Node(NodeConfig(name="a", listen="127.0.0.1:0", host_bytes=4 << 20, message_path=False)) as node:
        before = open_files()
        for config in (
            NodeConfig(name="b", listen=node.address, host_bytes=4 << 20, message_path=False),
            NodeConfig(name="c", listen="127.0.0.1:0", host_bytes=4 << 20, message_path=False, join=("127.0.0.1:1",)),
            NodeConfig(name="a", listen="127.0.0.1:0", host_bytes=4 << 20, message_path=False, join=(node.address,)),
            NodeConfig(name="d", listen="127.0.0.1:0", host_bytes=1 << 60, message_path=False),
        ):
            with pytest.raises((ucxkv.SetupError, ucxkv.Unavailable)):
                await Node(config).start()
        await wait_until(lambda: open_files() == before, "descriptors are closed")
