"""Nodes as child processes: started, awaited, stopped, and never left behind.

Promises: a child dies with this process, however this process dies, because it runs `ucxkv node --stop-with-stdin` and
we hold the only writing end of its standard input (a pipe outlives neither us nor a kill -9). `stop()` is bounded:
SIGTERM, a wait, then SIGKILL, and it always reaps. A child that fails to start ends in SetupError with its own last
words.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from ucxkv.cli.node import READY
from ucxkv.errors import SetupError

__all__ = ["NodeProcess", "running_node", "start_node", "stop_nodes"]

_LINE_MAX = 1 << 16


@dataclass(slots=True)
class NodeProcess:
    """A node's process. address: host:port once `wait_ready` returned."""

    name: str
    process: subprocess.Popen[bytes]
    log: IO[bytes] | None
    address: str = ""
    _line: bytes = field(default=b"", repr=False)
    _tail: str = field(default="", repr=False)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """False once the process ended; reaps it."""
        return self.process.poll() is None

    def wait_ready(self, deadline_s: float) -> str:
        """Wait for the readiness line until `deadline_s` (time.monotonic) and return the node's address.

        Raises SetupError with the end of the node's log when it ends or stays silent; the process is stopped then.
        """
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._line:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or len(self._line) > _LINE_MAX:
                break
            if select.select([descriptor], [], [], min(left_s, 0.5))[0]:
                piece = os.read(descriptor, 4096)
                if not piece:
                    self._wait_end(deadline_s)  # it ended, or is about to: its own exit code is the better word
                    break
                self._line += piece
        else:
            said = json.loads(self._line)
            if said.get("event") == READY:
                self.address = str(said["address"])
                return self.address
        why = "did not get ready in time" if self.is_alive else f"ended with exit code {self.process.returncode}"
        stop_nodes([self], wait_s=2.0)
        raise SetupError(f"node {self.name} {why}", found=self.log_tail() or "no output")

    def _wait_end(self, deadline_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, min(5.0, deadline_s - time.monotonic())))

    def log_tail(self, limit_bytes: int = 2000) -> str:
        """The end of what the node wrote to stderr; empty when its log is not kept here."""
        if self.log is None or self.log.closed:
            return self._tail
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - limit_bytes))
        self._tail = self.log.read().decode(errors="replace").strip()
        return self._tail

    def release(self) -> None:
        """Close what is left of a process that has ended; `log_tail` still answers."""
        self.close_pipes()
        if self.log is not None and not self.log.closed:
            self.log_tail()
            self.log.close()

    def close_pipes(self) -> None:
        """Close our ends; the node, if it still runs, takes the end of its standard input as a call to stop."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def start_node(
    name: str,
    *,
    listen: str = "127.0.0.1:0",
    host_bytes: str = "1GiB",
    join: Sequence[str] = (),
    arguments: Sequence[str] = (),
    keep_log: bool = True,
) -> NodeProcess:
    """Start one node with this interpreter; it is not ready yet.

    arguments: further flags of `ucxkv node`. keep_log: keep stderr for error messages; else it goes where ours goes.
    """
    command = [sys.executable, "-m", "ucxkv", "node", "--stop-with-stdin", "--name", name, "--listen", listen]
    command += ["--host-bytes", host_bytes, *arguments]
    for address in join:
        command += ["--join", address]
    log = tempfile.TemporaryFile() if keep_log else None  # noqa: SIM115  (lives as long as the node; has no name on disk)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches us only; we stop the children in order
    )
    return NodeProcess(name, process, log)


def stop_nodes(nodes: Sequence[NodeProcess], wait_s: float = 10.0) -> list[str]:
    """SIGTERM to all, wait up to `wait_s` for all together, SIGKILL to the rest; every child is reaped.

    Returns the names of those that had to be killed.
    """
    for node in nodes:
        if node.is_alive:
            node.process.terminate()
        node.close_pipes()
    deadline_s = time.monotonic() + wait_s
    killed = []
    for node in nodes:
        try:
            node.process.wait(max(0.01, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
            killed.append(node.name)
        node.release()
    return killed


@contextlib.contextmanager
def running_node(
    name: str = "n1", *, host_bytes: str = "1GiB", arguments: Sequence[str] = (), ready_s: float = 30.0
) -> Iterator[NodeProcess]:
    """One node on a free port for the length of a `with` block. arguments: further flags of `ucxkv node`."""
    node = start_node(name, host_bytes=host_bytes, arguments=arguments)
    try:
        node.wait_ready(time.monotonic() + ready_s)
        yield node
    finally:
        stop_nodes([node])
