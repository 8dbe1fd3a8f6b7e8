"""The command `ucxkv` as its users meet it: exit codes, one-line errors, JSON, and a node that starts, serves and
stops."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from ucxkv.cli.app import run
from ucxkv.cli.launch import NodeProcess, running_node, start_node, stop_nodes
from ucxkv.cli.options import parse_key
from ucxkv.cli.residue import residue
from ucxkv.errors import SetupError, UsageError

HOST_BYTES = str(48 << 20)


def _ucxkv(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "ucxkv", *arguments], input=data, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with running_node("cli-test", host_bytes=HOST_BYTES) as running:
        yield running


def test_version_help_and_an_unknown_command_answer() -> None:
    """Goal: the command explains itself. Method: `version --json`, `--help` and a command that does not exist."""
    done = _ucxkv("version", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ucxkv"]
    done = _ucxkv("--help")
    assert done.returncode == 0
    assert all(name.encode() in done.stdout for name in ("node", "status", "put", "get", "ls", "rm", "perf", "doctor"))
    assert _ucxkv("nonsense").returncode == 2


def test_version_loads_no_libucp_and_no_node() -> None:
    """Goal: the command starts fast. Method: the modules of a fresh interpreter after `ucxkv version`."""
    code = (
        "import sys; from ucxkv.cli.app import run; run(['version']); "
        "heavy = {'ucxkv.node', 'prometheus_client', 'torch'} & sys.modules.keys(); "
        "sys.exit(str(heavy) if heavy or 'libucp' in open('/proc/self/maps').read() else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_blocks_go_in_and_out_through_the_command(node: NodeProcess, tmp_path: Path) -> None:
    """Goal: put, get, ls, rm and status agree. Method: a chain of two blocks, through files and pipes, with JSON."""
    at = ("--address", node.address)
    first, second = "11" * 16, "name:second"
    assert _ucxkv("put", first, "-", *at, data=b"one").returncode == 0
    path = tmp_path / "value"
    path.write_bytes(bytes(range(256)) * 100)
    done = _ucxkv("put", second, str(path), "--parent", first, "--json", *at)
    assert json.loads(done.stdout) == {"key": parse_key(second).hex(), "bytes": 25600, "status": "STORED"}
    assert _ucxkv("put", first, "-", *at, data=b"one").returncode == 0  # ALREADY is no failure
    assert _ucxkv("get", second, *at).stdout == path.read_bytes()
    done = _ucxkv("get", second, "-o", str(tmp_path / "copy"), *at)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    listed = {item["key"]: item for item in map(json.loads, _ucxkv("ls", "--json", *at).stdout.splitlines())}
    assert set(listed) == {first, parse_key(second).hex()}
    assert listed[first]["bytes"] == 3
    assert listed[first]["tier"] == "host"
    status = json.loads(_ucxkv("status", "--json", *at).stdout)
    assert status["name"] == "cli-test"
    assert status["blocks"] == 2
    assert b"cli-test" in _ucxkv("status", *at).stdout
    assert _ucxkv("rm", first, *at).returncode == 1  # it has a child
    done = _ucxkv("rm", first, second, *at)
    assert done.returncode == 0, done.stdout
    done = _ucxkv("get", first, *at)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"not stored" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("get", "xyz"), 2, b"xyz"),
        (("get", "00" * 16), 2, b"reserved"),
        (("put", "11" * 16, "/does/not/exist"), 2, b"/does/not/exist"),
        (("status", "--address", "127.0.0.1"), 2, b"127.0.0.1"),
        (("status", "--address", "127.0.0.1:9", "--timeout", "2"), 3, b"127.0.0.1:9"),
        (("node", "--host-bytes", "1G"), 2, b"1G"),
        (("node", "--listen", "nowhere"), 2, b"nowhere"),
        (("node", "--config", "/does/not/exist.toml"), 2, b"/does/not/exist.toml"),
        (("node", "--log-level", "loud"), 2, b"loud"),
        (("node", "--policy", "fifo"), 2, b"--policy: policy; found: 'fifo'; needed: tuc | s3fifo | lru"),
        (("node", "--durability", "process"), 2, b"--state-dir"),
        (("simulate", "--trace", "/does/not/exist"), 2, b"--trace /does/not/exist: no such file"),
    ],
)
def test_an_error_is_one_line_that_names_its_cause(
    arguments: tuple[str, ...], code: int, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Goal: no traceback for an operator. Method: wrong calls; exit code, the offending text on stderr, no stdout."""
    try:
        assert run(list(arguments)) == code
    finally:
        structlog.reset_defaults()
    written = capfd.readouterr()
    assert said.decode() in written.err
    assert "Traceback" not in written.err
    assert written.out == ""


def test_an_output_that_cannot_be_written_is_named(node: NodeProcess, tmp_path: Path) -> None:
    """Goal: no traceback after a read that worked. Method: a block and an object, to no folder."""
    at, to = ("--address", node.address), ("--output", str(tmp_path / "none" / "file"))
    assert _ucxkv("put", "22" * 16, "-", *at, data=b"one").returncode == 0
    assert _ucxkv("object", "put", "written", "-", *at, data=b"one").returncode == 0
    for command in (("get", "22" * 16), ("object", "get", "written")):
        done = _ucxkv(*command, *to, *at)
        assert done.returncode == 2
        assert f"--output {to[1]}: No such file or directory" in done.stderr.decode()
        assert b"Traceback" not in done.stderr
    assert _ucxkv("rm", "22" * 16, *at).returncode == 0
    assert _ucxkv("object", "delete", "written", *at).returncode == 0


def test_what_brackets_hold_stands_in_the_help() -> None:
    """Goal: the help names the table of the file. Method: the help of `ucxkv node`, where brackets could be markup."""
    assert b"[node]" in _ucxkv("node", "--help").stdout


def test_an_address_is_one_word_in_a_pipe(node: NodeProcess) -> None:
    """Goal: what `ucxkv status` prints can be searched and copied. Method: its address in one piece in a pipe."""
    assert node.address.encode() in _ucxkv("status", "--address", node.address).stdout


def test_a_mistyped_cluster_is_not_made_by_who_asks(tmp_path: Path) -> None:
    """Goal: a wrong path is told, not taken for an empty cluster. Method: each command that asks, a file that is not
    there; it is not there afterwards either.
    """
    file = tmp_path / "typo.db"
    url = f"sqlite://{file}"
    for command in (("status", "-a", url), ("drain", "n1", "--cluster", url), ("elect", "--cluster", url)):
        done = _ucxkv(*command)
        assert done.returncode == 3, done
        assert f"no file {file}" in done.stderr.decode()
    assert not file.exists()


def test_ctrl_c_while_the_command_loads_is_no_traceback() -> None:
    """Goal: exit code 130 and silence at any moment. Method: SIGINT comes when the commands' module is looked for."""
    code = (
        "import importlib.abc, signal, sys\n"
        "class Signals(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'ucxkv.cli.app': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Signals()); signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ucxkv.cli import main; sys.argv = ['ucxkv', 'version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_node_that_waits_for_its_name_ends_at_ctrl_c(tmp_path: Path) -> None:
    """Goal: no start is deaf to signals. Method: the second node of a name is signalled when it has opened the
    control file; heard, it ends with 0, not with the refusal that comes when the wait is over.
    """
    cluster = ("--cluster", f"sqlite://{tmp_path}/cluster.db", "--cluster-lease-ms", "60000")
    with running_node("twice", host_bytes=HOST_BYTES, arguments=cluster):
        second = start_node("twice", host_bytes=HOST_BYTES, arguments=cluster)
        try:
            end = time.monotonic() + 30
            while not any("cluster.db" in name for name in _open_files(second.pid)):
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(second.pid, signal.SIGINT)
            assert second.process.wait(30) == 0
            assert "Traceback" not in second.log_tail()
        finally:
            stop_nodes([second])


def _open_files(pid: int) -> list[str]:
    names = list[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(link))
    return names


def test_a_port_in_use_is_a_setup_error(node: NodeProcess) -> None:
    """Goal: the second node on a port says so. Method: a node is told to listen where one already does."""
    done = _ucxkv("node", "--name", "second", "--listen", node.address, "--host-bytes", HOST_BYTES)
    assert done.returncode == 2
    assert node.address.rpartition(":")[2].encode() in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_node_gracefully(number: signal.Signals) -> None:
    """Goal: exit code 0, nothing on stdout but the readiness line. Method: start, signal, read the rest."""
    node = start_node("graceful", host_bytes=HOST_BYTES)
    try:
        node.wait_ready(time.monotonic() + 30)
        os.kill(node.pid, number)
        assert node.process.wait(15) == 0
        assert node.process.stdout is not None
        assert node.process.stdout.read() == b""
        assert "Traceback" not in node.log_tail()
    finally:
        stop_nodes([node])


def test_a_node_ends_with_the_process_that_started_it() -> None:
    """Goal: no orphan after kill -9 of the parent. Method: a parent that starts a node and is killed; the node ends."""
    code = (
        "import sys, time; from ucxkv.cli.launch import start_node; n = start_node('orphan', host_bytes=sys.argv[1]); "
        "n.wait_ready(time.monotonic() + 30); print(n.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, HOST_BYTES], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert _ends(pid)


def test_a_node_that_cannot_start_ends_in_its_own_words() -> None:
    """Goal: the starter repeats why. Method: a size that no host has."""
    node = start_node("huge", host_bytes="900TiB")
    with pytest.raises(SetupError, match="huge") as caught:
        node.wait_ready(time.monotonic() + 30)
    assert node.process.returncode == 2
    assert caught.value.found


def test_residue_is_what_no_living_process_holds() -> None:
    """Goal: the check of other tests can fail. Method: a file in /dev/shm named like UCX's, mapped, then let go."""
    path = Path(f"/dev/shm/ucx_test_residue_{os.getpid()}")
    with path.open("w+b") as file:
        try:
            file.write(b"x")
            file.flush()
            assert str(path) not in residue()
            file.close()
            assert str(path) in residue()
        finally:
            path.unlink()
    assert str(path) not in residue()


def test_keys_are_hexadecimal_or_named() -> None:
    """Goal: one text, one key. Method: both forms, and refusals that quote the text."""
    assert parse_key("0a" * 16) == b"\n" * 16
    assert len(parse_key("name:x")) == 16
    assert parse_key("name:x") != parse_key("name:y")
    for text in ("", "0a", "name:", "0a" * 17, "zz" * 16):
        with pytest.raises(UsageError, match="is no key"):
            parse_key(text)


def test_start_nodes_starts_joins_and_leaves_nothing_behind() -> None:
    """Goal: the script's promises. Method: two nodes as JSON, both seen by status, SIGTERM, then both pids are gone."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "start_nodes.py"
    command = [sys.executable, str(script), "-n", "2", "--host-bytes", "48MiB", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        nodes = json.loads(process.stdout.readline())["nodes"]
        assert [node["name"] for node in nodes] == ["n1", "n2"]
        seen = _ucxkv("status", "--json", "--address", nodes[0]["address"]).stdout.splitlines()
        assert {json.loads(line)["name"] for line in seen} == {"n1", "n2"}
        process.terminate()
        assert process.wait(20) == 0
    assert all(_ends(node["pid"]) for node in nodes)


def test_start_nodes_stops_the_others_when_one_dies() -> None:
    """Goal: no half cluster. Method: kill -9 of one of two nodes; exit code 1, its name on stderr, the other gone."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "start_nodes.py"
    command = [sys.executable, str(script), "-n", "2", "--host-bytes", "48MiB", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        nodes = json.loads(process.stdout.readline())["nodes"]
        os.kill(nodes[1]["pid"], signal.SIGKILL)
        assert process.wait(20) == 1
        assert b"n2" in process.stderr.read()
    assert all(_ends(node["pid"]) for node in nodes)


@pytest.mark.timeout(600)
def test_twenty_killed_nodes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: user voice 37: restarts do not use up the host. Method: start and kill -9 twenty nodes on one port; then
    /dev/shm, abstract sockets and their folder for temporary files are as before, and the next start works."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the nodes: other tests use the host's own beside this one
    before = _left()
    port = _quiet_port()
    for _ in range(20):
        node = start_node("killed", listen=f"127.0.0.1:{port}", host_bytes=HOST_BYTES)
        try:
            assert node.wait_ready(time.monotonic() + 30) == f"127.0.0.1:{port}"
            node.process.kill()
            node.process.wait(10)
        finally:
            stop_nodes([node])
    assert _left() <= before and not os.listdir(tmp_path)
    with running_node("after", host_bytes=HOST_BYTES) as node:
        assert node.is_alive


def _quiet_port() -> int:
    """A free port below the range from which the system gives ports to others while our node is down."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest // 2, lowest), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port below the ephemeral range")


def _left() -> set[str]:
    """What dead processes left, without what tests of another run on this host make for themselves."""
    return {name for name in residue() if "test" not in name}


def _ends(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # ended; its new parent has not collected it yet
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.timeout(300)
def test_a_durable_put_from_the_shell_and_forgetting_a_node(tmp_path: Path, node: NodeProcess) -> None:
    """Goal: the class and its end are within an operator's reach. Method: `put --durable` on a node that keeps nothing
    (refused) and on one that does; kill -9, start, `get`; `forget` while it runs is refused, after it deletes all."""
    state = tmp_path / "state"
    flags = ("--durability", "process", "--state-dir", str(state))
    done = _ucxkv("put", "name:k", "--durable", "--address", node.address, data=b"v")
    assert done.returncode == 2 and b"--durability process" in done.stderr
    name = f"kept-{os.getpid()}"
    kept = start_node(name, host_bytes=HOST_BYTES, arguments=flags)
    try:
        address = kept.wait_ready(time.monotonic() + 60)
        assert _ucxkv("put", "name:k", "--durable", "--address", address, data=b"value").returncode == 0
        done = _ucxkv("forget", str(state))
        assert done.returncode == 2 and b"in use" in done.stderr and str(kept.pid).encode() in done.stderr
        kept.process.kill()
        kept.process.wait()
        kept.release()
        kept = start_node(name, host_bytes=HOST_BYTES, arguments=flags)
        address = kept.wait_ready(time.monotonic() + 60)
        assert _ucxkv("get", "name:k", "--address", address).stdout == b"value"
    finally:
        stop_nodes([kept])
        done = _ucxkv("forget", str(state), "--json")
    assert done.returncode == 0, done.stderr
    deleted = json.loads(done.stdout)["deleted"]
    assert sum(path.startswith(f"/dev/shm/ucxkv-{name}-") for path in deleted) == 2
    assert not list(Path("/dev/shm").glob(f"ucxkv-{name}-*")) and not list(state.iterdir())
    assert _ucxkv("forget", str(state)).returncode == 2
