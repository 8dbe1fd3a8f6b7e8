"""UCX's own ucx_perftest as a backend: both sides run it on the same tests, a batch in one connection.

Latency tests (put, am, tag one at a time) say half of a round trip; get says a whole one. It moves one buffer again and
again, which stays in the cache, and compares nothing. Its server has no option to bind one address: it listens on every
interface, on a free port, until our client has come.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import Client, Config, Facts, Missing, Result, Server, ServerCpu, Task
from .device import why_no_device

__all__ = ["Test", "make_client", "make_server", "parse_results", "render_tests", "test_of"]

_LATENCY = {"get": "ucp_get", "put": "ucp_put_lat", "am": "ucp_am_lat", "tag": "tag_lat"}
_BANDWIDTH = {"get": "ucp_get", "put": "ucp_put_bw", "am": "ucp_am_bw", "tag": "tag_bw"}
_NAMES = {*_LATENCY.values(), *_BANDWIDTH.values()}
_ROUGH = {"shm": (2e-6, 5e9), "net": (30e-6, 1e9)}
"""Seconds and bytes a second that decide how often a test repeats."""
_MEMORY = ("host", "cuda")
_SESSION_S = 120.0
_LISTEN_S = 15.0
_LISTENING = "0A"  # in /proc/net/tcp

# Runs a program that dies with its parent, also when that is killed.
_BOUND = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Test:
    """One line of a batch file. window: operations on their way; 0 = the test is a ping-pong."""

    name: str
    nbytes: int
    window: int
    iterations: int
    warm_up: int
    memory: str = "host"


def test_of(task: Task, wire: str, memory: str = "host") -> Test:
    """The test that stands beside a task: a batched call is that many operations on their way."""
    window = max(task.batch, task.at_once)
    name = (_LATENCY if window == 1 else _BANDWIDTH)[task.op]
    latency_s, rate = _ROUGH[wire]
    iterations = max(4, window, min(20_000, int(task.budget_s / (latency_s + task.nbytes / rate))))
    is_ping_pong = window == 1 and task.op != "get"
    return Test(name, task.nbytes, 0 if is_ping_pong else window, iterations, max(1, iterations // 10), memory)


def render_tests(tests: list[Test]) -> str:
    """The batch file, which both sides need. Raises ValueError for what is no test of ours."""
    lines = []
    for number, test in enumerate(tests):
        counts = (test.nbytes, test.window, test.iterations, test.warm_up)
        if test.name not in _NAMES or test.memory not in _MEMORY or any(type(n) is not int or n < 0 for n in counts):
            raise ValueError(f"{test} is no test of ucx_perftest's that this backend runs")
        window = f" -O {test.window}" if test.window else ""
        size = f"-s {test.nbytes} -n {test.iterations} -w {test.warm_up}{window}"
        lines.append(f"t{number} -t {test.name} {size} -m {test.memory},{test.memory}")
    return "\n".join(lines) + "\n"


def parse_results(text: str) -> dict[int, tuple[float, float, int]]:
    """Test number -> (median us, messages a second over all, iterations), from the output of `-b FILE -v`.

    The columns are found by the header's names; lines of the log in between are passed over.
    """
    columns: dict[str, int] = {}
    found: dict[int, tuple[float, float, int]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if "iterations" in cells:
            columns = {name: place for place, name in enumerate(cells)}
            continue
        match = re.fullmatch(r"t(\d+)", cells[0])
        if match is None or len(cells) != len(columns):
            continue
        median = next((name for name in columns if "percentile" in name or name.startswith("typical")), "avg_lat")
        try:
            us, rate = float(cells[columns[median]]), float(cells[columns["overall_mr"]])
            found[int(match[1])] = (us, rate, int(cells[columns["iterations"]]))
        except (KeyError, ValueError):
            continue
    return found


def _check(config: Config) -> None:
    if not config.tool:
        raise Missing("ucx_perftest was not found beside libucp, in the libucx wheel or in PATH")
    if config.memory == "cuda" and (why := why_no_device()):
        raise Missing(why)


class _Session:
    """One run of ucx_perftest in a folder of its own."""

    def __init__(self, config: Config, tests: list[Test], port: int, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ucxkv-perf-")
        batch = Path(self._folder.name) / "batch"
        batch.write_text(render_tests(tests))
        self._out = (Path(self._folder.name) / "out").open("w+")
        command = [config.tool, "-p", str(port), "-b", str(batch), "-v", *arguments]
        libraries = str(Path(config.tool).resolve().parent.parent / "lib")  # where the wheel has them
        paths = [libraries, os.environ.get("LD_LIBRARY_PATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOUND, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))},
        )

    async def wait(self, seconds: float) -> str:
        """Its output, once it has ended. Raises RuntimeError when it fails or takes longer."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                self.close()
                raise RuntimeError(f"ucx_perftest did not end within {seconds:.0f} s")
            await asyncio.sleep(0.01)
        text = self.output()
        if self.process.returncode:
            raise RuntimeError(f"ucx_perftest ended with {self.process.returncode}: {_last_words(text)}")
        return text

    def output(self) -> str:
        """What it said so far."""
        self._out.seek(0)
        return self._out.read()

    def close(self) -> None:
        """Kill it if it still runs. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._out.close()
        self._folder.cleanup()


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "ERROR" in line] or text.strip().splitlines()
    return " | ".join(lines[-2:])[:400] or "no output"


def _is_listening(port: int) -> bool:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class _PerftestServer(Server):
    def __init__(self) -> None:
        self._session: _Session | None = None

    async def start(self, config: Config) -> Facts:
        _check(config)
        self._config = config
        return {"host": config.host}

    async def ask(self, request: Facts) -> Facts:
        self.close()
        port = _free_port()
        self._session = session = _Session(self._config, [Test(**test) for test in request["tests"]], port)
        deadline = asyncio.get_running_loop().time() + _LISTEN_S
        while not _is_listening(port):
            if session.process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                said = _last_words(session.output())
                self.close()
                raise RuntimeError(f"the server side of ucx_perftest did not start: {said}")
            await asyncio.sleep(0.005)
        return {"port": port}

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class _PerftestClient(Client):
    def __init__(self) -> None:
        self._session: _Session | None = None

    async def start(self, config: Config, server: Facts) -> Facts:
        _check(config)
        self._config, self._server = config, server
        return {}

    async def measure(self, tasks: list[Task], server_cpu: ServerCpu) -> list[Result]:
        tests = [test_of(task, self._config.wire, self._config.memory) for task in tasks]
        plain: list[dict[str, Any]] = [vars(test) for test in tests]
        answer = await self.ask_server({"tests": plain})
        self._session = session = _Session(self._config, tests, answer["port"], self._server["host"])
        try:
            text = await session.wait(_SESSION_S)
        finally:
            self.close()
        found = parse_results(text)
        if len(found) != len(tests):
            raise RuntimeError(f"ucx_perftest said {len(found)} of {len(tests)} results: {_last_words(text)}")
        results = []
        for number, test in enumerate(tests):
            us, rate, iterations = found[number]
            if test.window > 1:  # its medians of operations that overlap say nothing
                us = tasks[number].batch * 1e6 / rate
            results.append(Result(p50_us=us, gbps=rate * test.nbytes / 1e9, samples=iterations))
        return results

    def facts(self) -> Facts:
        return {"tool": self._config.tool}

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def make_server() -> Server:
    """The side that runs ucx_perftest without an address."""
    return _PerftestServer()


def make_client() -> Client:
    """The side that runs it with the server's."""
    return _PerftestClient()
