"""The processes of a fault run: one etcd and N nodes, each on a host of its own (a network namespace), or all on the
loopback.

Promises
  - A node that is wanted and has ended is started again, on its folder, as a service manager would.
  - A node that ends by itself after it was ready is remembered (`surprises`); while it starts it may, since its name
    can be its former life's for as long as that one's lease.
  - All ends with `close`: no process, no namespace, no memory is left."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from tests.control.etcd_server import EtcdServer, free_port
from tests.hosts import Hosts
from ucxkv.node.state import forget

__all__ = ["Machines", "NodeMachine", "knows_replicas"]

ROOT = Path(__file__).resolve().parent.parent.parent
ETCD_HOST, CLIENT_HOST, WATCH_HOST = "etcd", "client", "watch"
_RESTART_S = 0.2
_END_S = 30.0


def knows_replicas() -> bool:
    """Whether this ucxkv's nodes replicate."""
    argv = [sys.executable, "-m", "ucxkv", "node", "--help"]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return "--replicas" in subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, check=True).stdout


class NodeMachine:
    """One node, over all its lives. name: in the cluster, host: where it runs. steps: the file that `doom` writes, see
    tests/cluster/dying_node.py."""

    def __init__(self, name: str, host: str, argv: Sequence[str], address: str, log: Path, steps: Path) -> None:
        self.name = name
        self.host = host
        self.address = address
        self.is_wanted = False
        self.is_ready = False
        self.is_frozen = False
        self.is_doomed = False
        self.lives = 0
        self.surprises: list[str] = []
        self._argv = list(argv)
        self._log_path = log
        self._steps = steps
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._again_s = 0.0

    def start(self) -> None:
        """Start its next life, unless it runs; it is not ready yet."""
        self.is_wanted = True
        if self._process is not None:
            return
        self._log = self._log or self._log_path.open("ab")
        self.lives += 1
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip

    def poll(self) -> None:
        """See what became of it; start it again when it is to run and does not."""
        if self._process is None:
            if self.is_wanted and time.monotonic() >= self._again_s:
                self.start()
            return
        if self._process.poll() is None:
            self.is_ready = self.is_ready or self._says_ready()
            return
        if self.is_doomed:
            self.is_wanted = False
        elif self.is_ready:
            self.surprises.append(
                f"node {self.name} ended by itself, exit code {self._process.returncode}: {self.tail()}"
            )
        self._over()
        self._again_s = time.monotonic() + _RESTART_S

    def _says_ready(self) -> bool:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(0):
                return False
        line = self._process.stdout.readline()
        return bool(line) and json.loads(line).get("event") == "node.ready"

    def tail(self) -> str:
        """The end of what its lives wrote."""
        return self._log_path.read_text(errors="replace")[-1500:] if self._log_path.exists() else ""

    def kill(self) -> None:
        """kill -9; it stays down until `start`. Idempotent."""
        self.is_wanted = False
        if self._process is not None:
            self.poll()  # that it had ended by itself is not to be missed
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
            self._over()
        self.is_wanted = False

    def lose_memory(self) -> None:
        """What lies in the machine's memory is gone, as after a reboot; the node does not run."""
        for path in Path("/dev/shm").glob(f"ucxkv-{self.name}-*"):
            path.unlink()

    def doom(self, steps: int) -> None:
        """It is to die so many steps of its work later; it stays down until `start`. One that is not ready yet has
        none to count."""
        if self._process is not None and self.is_ready:
            self.is_doomed = True
            self._steps.write_text(str(steps))
            self._process.send_signal(signal.SIGUSR1)

    @property
    def pid(self) -> int:
        """Of its process; 0 when it has none."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_up(self) -> bool:
        """Whether it has a process."""
        return self._process is not None

    def freeze(self) -> None:
        """SIGSTOP."""
        if self._process is not None and not self.is_frozen:
            self.is_frozen = True
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self._process is not None and self.is_frozen:
            self._process.send_signal(signal.SIGCONT)
        self.is_frozen = False

    def _over(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None
        self.is_ready = self.is_frozen = self.is_doomed = False

    def close(self) -> None:
        """End it for good."""
        self.kill()
        if self._log is not None:
            self._log.close()


class Machines:
    """etcd and the nodes. hosts: None on the loopback; url: the cluster's. `with Machines(...)`.

    flags: further ones of every `ucxkv node`. disk_bytes: of a disk tier of each node, "" for none.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        in_namespaces: bool,
        durability: str,
        flags: Sequence[str],
        host_bytes: str,
        disk_bytes: str = "",
    ) -> None:
        self.folder = folder
        self.names = [f"f{os.getpid()}-{chr(ord('a') + at)}" for at in range(nodes)]
        self.hosts: Hosts | None = None
        self._in_namespaces = in_namespaces
        self._durability = durability
        self._flags = [*flags, "--host-bytes", host_bytes]
        self._disk_bytes = disk_bytes
        self._open = contextlib.ExitStack()
        self.nodes: list[NodeMachine] = []

    def __enter__(self) -> Machines:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _build(self) -> None:
        places = [f"n{at}" for at in range(len(self.names))]
        if self._in_namespaces:
            self.hosts = self._open.enter_context(Hosts(*places, ETCD_HOST, CLIENT_HOST, WATCH_HOST))
        host = self.hosts.address(ETCD_HOST) if self.hosts else "127.0.0.1"
        self.etcd = EtcdServer(host=host, prefix=self.argv(ETCD_HOST))
        self._open.callback(self.etcd.folder.cleanup)
        self._open.callback(self.etcd.kill)
        self.etcd.start()
        self.url = self.etcd.url("faults")
        for name, place in zip(self.names, places, strict=True):
            address = f"{self.hosts.address(place)}:13337" if self.hosts else f"127.0.0.1:{free_port()}"
            steps = self.folder / f"{name}.steps"
            argv = [*self.argv(place), sys.executable, "-m", "tests.cluster.dying_node", str(steps)]
            argv += ["node", "--stop-with-stdin", "--name", name]
            argv += ["--listen", address, "--cluster", self.url, "--durability", self._durability, *self._flags]
            if self._durability != "memory":
                argv += ["--state-dir", str(self._state(name))]
            if self._disk_bytes:
                argv += ["--disk", str(self._disk(name)), "--disk-bytes", self._disk_bytes]
            self.nodes.append(NodeMachine(name, place, argv, address, self.folder / f"{name}.log", steps))
        for node in self.nodes:
            node.start()

    def _state(self, name: str) -> Path:
        return self.folder / f"state-{name}"

    def _disk(self, name: str) -> Path:
        return self.folder / f"disk-{name}"

    def argv(self, place: str) -> list[str]:
        """What runs a command at this place."""
        return self.hosts.argv(place) if self.hosts else []

    def poll(self) -> None:
        """Look after the nodes."""
        for node in self.nodes:
            node.poll()

    def await_ready(self, seconds: float, tick: Callable[[], None]) -> list[str]:
        """Wait until all nodes that are wanted are ready; the names of those that are not in time."""
        until = time.monotonic() + seconds
        while True:
            self.poll()
            tick()
            late = [node.name for node in self.nodes if node.is_wanted and not node.is_ready]
            if not late or time.monotonic() > until:
                return late
            time.sleep(0.02)

    def keep_journals(self) -> None:
        """Copy the folders aside, for whoever looks into a failed run; nothing runs any more."""
        for name in self.names:
            if self._state(name).exists():
                shutil.copytree(self._state(name), self.folder / f"kept-{name}", dirs_exist_ok=True)

    def close(self) -> None:
        """End everything; the journals and the nodes' memory go. Idempotent."""
        for node in self.nodes:
            node.close()
        self._open.close()
        for name in self.names:
            shutil.rmtree(self._disk(name), ignore_errors=True)
            if self._state(name).exists():
                forget(self._state(name))
                shutil.rmtree(self._state(name), ignore_errors=True)
        for node in self.nodes:
            node.lose_memory()  # of a life that kept nothing and was killed
