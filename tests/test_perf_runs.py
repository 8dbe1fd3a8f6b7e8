"""`ucxkv perf` as it is run: every backend that is here, two sides over the loopback, and what goes wrong.

ucxx, ucx-py and NIXL bring another libucx, so they live in environments of their own: UCXKV_PERF_PYTHON names their
interpreters ("ucxx=/path/to/python,nixl=/path/to/python"); without it their runs are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, wait_until
from ucxkv.cli.perf import READY
from ucxkv.dial import Caller, dial
from ucxkv.errors import Overloaded, SetupError, Unavailable, UsageError
from ucxkv.perf.backends import BACKENDS
from ucxkv.perf.link import ANSWER, REQUEST, RemoteSide
from ucxkv.perf.process import Missing, Worker
from ucxkv.perf.server import PerfServer
from ucxkv.transport.address import TcpAddress

PYTHONS = dict(pair.split("=", 1) for pair in os.environ.get("UCXKV_PERF_PYTHON", "").split(",") if pair)
SMALL = ("--sizes", "8,16KiB", "--batch", "4", "--at-once", "2", "--cache", "hot", "--quick")
ROW_KEYS = {"bench", "backend", "op", "path", "wire", "over", "bytes", "batch", "concurrency", "set_bytes"}
ROW_KEYS |= {"p50_us", "gbps", "samples", "verified"}
CPU_KEYS = {"cpu_client_s_per_gb", "cpu_server_s_per_gb", "cpu_s_per_gb"}
pytestmark = pytest.mark.timeout(240)


def _perf(*arguments: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ucxkv", "perf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _json(*arguments: str) -> dict[str, Any]:
    done = _perf(*SMALL, "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # one object, nothing else
    return found


def _ops(found: dict[str, Any]) -> set[tuple[str, int, int]]:
    return {(row["op"], row["batch"], row["concurrency"]) for row in found["rows"]}


MOVES = {(op, *shape) for op, shape in (("get", (1, 1)), ("get_many", (4, 1)), ("put", (1, 1)), ("put_many", (4, 1)))}
AT_ONCE = {("get", 1, 2), ("put", 1, 2)}
MESSAGES = {("am", 1, 1), ("am_stream", 1, 2)}
TAGS = {("tag", 1, 1), ("tag_stream", 1, 2)}
EXPECTED = {
    "ucxkv": MOVES | AT_ONCE | MESSAGES | {("look_up", 1, 1), ("look_up_many", 4, 1)},
    "ucx_perftest": MOVES | AT_ONCE | MESSAGES | TAGS,
    "ucxx": MESSAGES | TAGS,
    "ucx-py": MESSAGES | TAGS,
    "nixl": MOVES | AT_ONCE,
    "socket": MOVES,
    "memcpy": MOVES,
}


@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_backend_measures_what_it_can_over_both_wires(name: str) -> None:
    """Goal: every promised row, verified, with its keys. Method: the smallest real run of each backend that is here."""
    if BACKENDS[name].is_foreign and name in ("ucxx", "ucx-py", "nixl") and name not in PYTHONS:
        pytest.skip(f"UCXKV_PERF_PYTHON names no interpreter with {name}")
    python = ("--python", f"{name}={PYTHONS[name]}") if name in PYTHONS else ()
    found = _json("--backend", name, *python)
    assert found["notices"] == []
    assert _ops(found) == EXPECTED[name]
    for row in found["rows"]:
        keys = ROW_KEYS - {"bytes", "gbps", "set_bytes"} if row["op"].startswith("look_up") else ROW_KEYS
        assert keys <= row.keys(), row
        assert row["backend"] == name
        assert row["p50_us"] > 0
        assert row["samples"] > 0
        assert row["verified"] is (name != "ucx_perftest")
        if name not in ("ucx_perftest", "memcpy") and not row["op"].startswith("look_up"):
            assert row.keys() >= CPU_KEYS, row
    paths = {row["path"] for row in found["rows"]}
    assert paths >= {"ucxkv": {"mapped", "rma", "message", "network"}, "memcpy": {"copy"}}.get(name, {"shm", "net"})
    assert {"machine", "server", "conditions", "command", "ucxkv", "notices"} <= found.keys()
    assert found["machine"]["ucx"]


def test_rows_of_ucxkv_have_the_copy_beside_them() -> None:
    """Goal: the keys of the other benchmarks. Method: get and put on the mapped path; limit and ratio."""
    found = _json("--backend", "ucxkv", "--op", "get,put", "--path", "mapped")
    for row in found["rows"]:
        assert {"limit_name", "limit_us", "limit_gbps", "ratio", "spread", "p99_us"} <= row.keys()
        assert row["limit_name"] == "memcpy"
        assert row["path"] == "mapped"


def test_a_missing_backend_is_a_notice_and_the_others_go_on() -> None:
    """Goal: never a crash. Method: ucxx and NIXL in an interpreter that has neither, beside a socket; then alone."""
    if any(BACKENDS[name].is_foreign and _has(module) for name, module in (("ucxx", "ucxx"), ("ucx-py", "ucp"))):
        pytest.skip("this interpreter has ucxx or ucx-py")
    found = _json("--backend", "ucxx,ucx-py,nixl,socket", "--op", "get,am", "--path", "network")
    assert {row["backend"] for row in found["rows"]} == {"socket"}
    texts = {notice["backend"]: notice["text"] for notice in found["notices"] if notice["state"] == "missing"}
    assert set(texts) == {"ucxx", "ucx-py", "nixl"}
    assert texts["ucxx"].startswith("not installed: pip install ucxx-cu12")
    assert "No module named 'ucxx'" in texts["ucxx"]
    alone = _perf(*SMALL, "--backend", "ucxx", "--path", "network")
    assert alone.returncode == 1
    assert "not installed: pip install ucxx-cu12" in alone.stdout.replace("\n", " ")


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def test_an_interpreter_that_breaks_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    """Goal: a backend that fails is seen, in bounded time, and the run's exit code says so. Method: an "interpreter"
    that writes a line and ends."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'libucs.so.0 is broken' >&2\nexit 3\n")
    fake.chmod(0o755)
    done = _perf(*SMALL, "--json", "--backend", "ucxx,memcpy", "--op", "get,am", "--python", f"ucxx={fake}")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    states = [(notice["backend"], notice["state"]) for notice in found["notices"]]
    assert ("ucxx", "failed") in states
    assert "libucs.so.0 is broken" in found["notices"][0]["text"]
    assert {row["backend"] for row in found["rows"]} == {"memcpy"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--sizes", "0"), 2, "0 bytes"),
        (("--backend", "ucxy"), 2, "ucxy"),
        (("--path", "shm"), 2, "shm"),
        (("--op", "fetch"), 2, "fetch"),
        (("--cache", "warm"), 2, "warm"),
        (("--memory", "disk"), 2, "disk"),
        (("--plot", "out.jpg"), 2, ".png or .html"),
        (("--plot", "/does/not/exist/out.png"), 2, "/does/not/exist"),
        (("--python", "ucxx=/does/not/exist"), 2, "/does/not/exist"),
        (("127.0.0.1:1",), 2, "--server"),
        (("--server", "--connect", "x"), 2, "--connect"),
        (("--connect", "x", "--address", "127.0.0.1:1"), 2, "--address"),
        (("--connect", "host:99999"), 2, "99999"),
        (("--connect", "127.0.0.1:9"), 3, "ucxkv perf --server"),
        (("--connect", "no-such-host.invalid"), 3, "no-such-host"),
        (("--server", "0.0.0.0:0"), 2, "token"),
        (("--server", "192.0.2.1:0", "--token-file", "TOKEN"), 2, "192.0.2.1"),
        (("--address", "127.0.0.1:9", "--backend", "ucxkv", "--op", "get", "--quick"), 1, "127.0.0.1:9"),
    ],
)
def test_bad_input_ends_in_one_line_and_soon(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    """Goal: typed errors that name the cause, in bounded time. Method: wrong calls; exit code, text, no traceback."""
    token = _token(tmp_path)
    done = _perf(*[str(token) if word == "TOKEN" else word for word in arguments], timeout_s=60)
    assert done.returncode == code, done.stderr
    assert said in (done.stdout + done.stderr).replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_gpu_buffers_without_a_gpu_are_a_typed_error() -> None:
    """Goal: --memory cuda says why not. Method: on a host without a CUDA driver (skipped on others)."""
    from ucxkv.perf.peers.device import why_no_device

    if not why_no_device():
        pytest.skip("this host has a CUDA device")
    done = _perf("--quick", "--memory", "cuda")
    assert done.returncode == 2
    assert "no CUDA driver here" in done.stderr
    assert "Traceback" not in done.stderr


def test_plots_come_out_of_a_run(tmp_path: Path) -> None:
    """Goal: --plot works from the command. Method: a small run into each kind of file."""
    for name, start in (("out.png", b"\x89PNG\r\n"), ("out.html", b"<!doctype html>")):
        _json("--backend", "memcpy", "--op", "get", "--plot", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_script_measures_ucx_without_a_node() -> None:
    """Goal: scripts/ucx_perf.py has its own defaults. Method: a small run; no row of ucxkv's, its own options win."""
    script = [sys.executable, str(ROOT / "scripts" / "ucx_perf.py"), *SMALL, "--json", "--op=get,tag", "--path=network"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["backend"] for row in found["rows"]} >= {"ucx_perftest", "socket", "memcpy"}
    assert "ucxkv" not in {row["backend"] for row in found["rows"]}
    assert {row["wire"] for row in found["rows"]} == {"net", "copy"}


# ---- processes


def _children(pid: int) -> dict[int, str]:
    """All processes below `pid`: id -> command line."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                text = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(name)] = f"{parent} {text}"
    below = {pid}
    while True:
        more = {each for each, text in found.items() if int(text.split()[0]) in below} - below
        if not more:
            return {each: found[each] for each in below if each != pid}
        below |= more


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("backend", ["ucx_perftest", "socket"])
async def test_nothing_survives_a_killed_run(backend: str) -> None:
    """Goal: no worker and no ucx_perftest is left behind. Method: kill -9 of the command while it measures."""
    command = [sys.executable, "-m", "ucxkv", "perf", "--backend", backend, "--op", "get,put,am", "--path", "network"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **silent) as process:  # noqa: ASYNC220
        tool = "-v" if backend == "ucx_perftest" else "peers.sockets"
        try:
            await wait_until(
                lambda: sum(f"{tool} " in f"{text} " for text in _children(process.pid).values()) >= 2, "started", 60
            )
            children = _children(process.pid)
        finally:
            process.kill()
    assert len(children) >= 2
    await wait_until(lambda: all(map(_is_gone, children)), f"gone: {children}")


async def test_an_interrupted_run_ends_soon_and_whole() -> None:
    """Goal: Ctrl-C stops a run with all that it started. Method: SIGINT while it measures; it ends, without a traceback
    or a process left."""
    command = [sys.executable, "-m", "ucxkv", "perf", "--backend", "ucxkv,socket", "--op", "get,am"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        await wait_until(lambda: len(_children(process.pid)) >= 1, "a node or a worker", 60)
        await asyncio.sleep(1.0)
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    await wait_until(lambda: all(map(_is_gone, children)), f"gone: {children}")


async def test_a_worker_that_is_silent_or_dies_is_unavailable() -> None:
    """Goal: every wait is bounded. Method: a real worker asked for an answer within 0 s; then one that is killed."""
    message = {"start": {"backend": "socket", "wire": "net"}, "server": None}
    worker = await Worker.spawn(BACKENDS["socket"], {}, {})
    with pytest.raises(Unavailable, match="no answer within"):
        await worker.request(message, seconds=0.0)
    await worker.aclose()
    worker, ready = await Worker.start(BACKENDS["socket"], {}, {}, message)
    assert ready["address"][0] == "127.0.0.1"
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="ended"):
        await worker.request({"ask": {}}, seconds=20)
    await worker.aclose()
    await worker.aclose()


# ---- two sides


def _token(folder: Path, text: str = "0123456789abcdef") -> Path:
    file = folder / f"token-{text[:4]}"
    file.touch(mode=0o600)
    file.write_text(text)
    return file


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path, subprocess.Popen[str]]]:
    """A perf server on the loopback, its token file, its process."""
    token = _token(tmp_path)
    pythons = [word for name, path in PYTHONS.items() for word in ("--python", f"{name}={path}")]
    command = [sys.executable, "-m", "ucxkv", "perf", "--server", "127.0.0.1:0", "--token-file", str(token), *pythons]
    with subprocess.Popen([*command, "--backend", "all"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == READY
            yield ready["address"], token, process
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_two_sides_measure_with_the_token(served: tuple[str, Path, subprocess.Popen[str]]) -> None:
    """Goal: the two-node mode, whole: node, our messages, ucx_perftest, socket, and ucxx where it is. Method: over the
    loopback; rows have the server's CPU time, the report its facts; the node and all servers are gone afterwards."""
    address, token, process = served
    pythons = [word for name, path in PYTHONS.items() for word in ("--python", f"{name}={path}")]
    names = [name for name in BACKENDS if not BACKENDS[name].how or name in PYTHONS or name == "ucx_perftest"]
    here = ("--connect", address, "--token-file", str(token), "--backend", ",".join(names), *pythons)
    found = _json(*here, "--sizes", "16KiB", "--path", "auto,network")
    assert found["notices"] == []
    assert {row["backend"] for row in found["rows"]} == set(names)
    for name in names:
        assert _ops({"rows": [row for row in found["rows"] if row["backend"] == name]}) == EXPECTED[name]
    for row in found["rows"]:
        if row["backend"] in ("ucxkv", "socket") and "gbps" in row:
            assert row.keys() >= CPU_KEYS, row
    assert found["server"]["ucx"] == found["machine"]["ucx"]
    deadline = time.monotonic() + 10
    while _children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _children(process.pid) == {}


def test_a_wrong_token_is_refused(served: tuple[str, Path, subprocess.Popen[str]], tmp_path: Path) -> None:
    """Goal: strangers start nothing. Method: another token, none; exit code 2 and nothing started."""
    address, _, process = served
    other = _token(tmp_path, "ffff000011112222")
    for arguments in (("--token-file", str(other)), ()):
        done = _perf("--quick", "--connect", address, *arguments, timeout_s=60)
        assert done.returncode == 2, done.stderr
        assert "token" in done.stderr
    assert _children(process.pid) == {}


async def test_a_node_is_no_perf_server_and_a_perf_server_is_no_node(shared_node: Any) -> None:
    """Goal: mixed-up addresses are told. Method: each asked for the other."""
    import ucxkv

    host, _, port = shared_node.address.partition(":")
    with pytest.raises(UsageError, match="no perf server"):
        await RemoteSide.connect(TcpAddress(host, int(port)), "")
    async with _server() as server:
        with pytest.raises(SetupError, match="no node"):
            async with ucxkv.connect(str(server.address), timeout_s=5):
                pass


@contextlib.asynccontextmanager
async def _server(*backends: str) -> AsyncIterator[PerfServer]:
    server = await PerfServer.start(TcpAddress("127.0.0.1", 0), token="", backends=backends)
    try:
        yield server
    finally:
        await server.aclose()


def _servers() -> list[str]:
    """Socket servers below this process (its children are other tests' nodes too)."""
    return [text for text in _children(os.getpid()).values() if "peers.sockets" in text]


async def test_one_client_at_a_time_and_what_it_started_ends_with_it() -> None:
    """Goal: figures do not disturb each other, a vanished client leaves nothing. Method: a second client while one is
    served; the first goes away with a server running; then a third is served."""
    async with _server("socket") as server:
        first = await RemoteSide.connect(server.address, "")
        with pytest.raises(Overloaded, match="being served"):
            await RemoteSide.connect(server.address, "")
        started = await first.start("socket", "net", "host")
        assert started.ready["address"][0] == "127.0.0.1"
        assert await started.cpu_ns() > 0
        with pytest.raises(Missing, match="not served"):
            await first.start("ucx_perftest", "net", "host")
        assert len(_servers()) == 1
        await first.aclose()
        await wait_until(lambda: not _servers(), "its server has ended")
        async with asyncio.timeout(10):
            third = await RemoteSide.connect(server.address, "")
        assert (await third.facts())["cores"] >= 1
        await third.aclose()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        b'{"do": "fly"}',
        b'{"do": "facts"}',
        b'{"do": "open", "host": 5}',
        b'{"do": "start", "backend": "/bin/sh", "wire": "net", "memory": "host"}',
        b'{"do": "start", "backend": "socket", "wire": "net; rm", "memory": "host"}',
        b'{"do": "ask", "id": 77, "request": {}}',
        b'{"do": "cpu", "id": "x"}',
        b'{"do": "node", "host_bytes": 1e30}',
        b'{"do": "node", "host_bytes": -1}',
        b"\xff\x00",
    ],
)
async def test_a_malformed_request_is_a_refusal(payload: bytes) -> None:
    """Goal: a perf server survives what it is sent. Method: bad requests after the handshake; a failure each, and the
    next good one is answered."""
    async with _server("socket") as server:
        deadline_ns = time.monotonic_ns() + 20_000_000_000
        dialed = await dial(str(server.address), Caller("client", "test"), deadline_ns)
        if b"open" not in payload and b"facts" not in payload:
            await dialed.connection.request(REQUEST, b'{"do": "open", "host": "127.0.0.1"}', deadline_ns)
        kind, _ = await dialed.connection.request(REQUEST, payload, deadline_ns)
        assert kind == ANSWER if b"5" in payload else kind != ANSWER
        kind, answer = await dialed.connection.request(REQUEST, b'{"do": "open", "host": "127.0.0.1"}', deadline_ns)
        assert kind == ANSWER
        assert json.loads(bytes(answer)) == {"host": "127.0.0.1"}
        dialed.connection.abort()


async def test_a_server_on_all_interfaces_binds_the_one_that_its_client_came_by() -> None:
    """Goal: nothing else listens on a wildcard. Method: a server that was told to; hosts that it is asked for."""
    server = await PerfServer.start(TcpAddress("0.0.0.0", 0), token="secret", backends=("socket",))
    try:
        side = await RemoteSide.connect(TcpAddress("127.0.0.1", server.address.port), "secret")
        assert side.host == "127.0.0.1"
        for host in ("0.0.0.0", "::", "224.0.0.1", "example.com"):
            with pytest.raises(UsageError):
                await side.request("open", host=host)
        started = await side.start("socket", "net", "host")
        assert started.ready["address"][0] == "127.0.0.1"
        await side.aclose()
    finally:
        await server.aclose()
