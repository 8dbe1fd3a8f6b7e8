"""A real etcd on the loopback, to be killed, stopped, started again and compacted."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

ETCD = shutil.which("etcd") or ""
_SERVING = b"serving client traffic"
WHY_NOT = "" if ETCD else "needs etcd (apt-get install etcd-server)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def three_members() -> Iterator[list[EtcdServer]]:
    """An etcd of three members, all running."""
    with contextlib.ExitStack() as running:
        members = [EtcdServer(f"m{i}") for i in range(3)]
        together = ",".join(member.initial_cluster for member in members)
        for member in members:
            member.initial_cluster = together
            running.enter_context(member)
        yield members


class EtcdServer:
    """One etcd member, by default of one, with a data folder and ports of its own. `with EtcdServer() as etcd:`

    host, prefix: the address it listens at, and the command that runs it where that address is (another host).
    """

    def __init__(self, name: str = "one", *, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="ucxkv-etcd-")
        self.port, self._peer_port = free_port(), free_port()
        self._prefix = tuple(prefix)
        self.endpoint = f"{host}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.peer_url = f"http://127.0.0.1:{self._peer_port}"
        self.initial_cluster = f"{name}={self.peer_url}"

    def url(self, cluster: str) -> str:
        return f"etcd://{self.endpoint}/{cluster}"

    def start(self) -> None:
        """Start it (again) on its data and wait until it takes connections."""
        peer = self.peer_url
        client = f"http://{self.endpoint}"
        flags = {
            "name": self.name, "data-dir": f"{self.folder.name}/data", "listen-client-urls": client,
            "advertise-client-urls": client, "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
            "initial-cluster": self.initial_cluster, "heartbeat-interval": "20", "election-timeout": "200",
            "logger": "zap", "log-outputs": f"{self.folder.name}/log",
        }  # fmt: skip
        log = Path(self.folder.name, "log")
        before = log.stat().st_size if log.exists() else 0
        argv = [*self._prefix, ETCD, *(f"--{name}={value}" for name, value in flags.items())]
        self.process = subprocess.Popen(argv)
        until = time.monotonic() + 60
        while not self._answers(log, before):
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"etcd did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _answers(self, log: Path, before: int) -> bool:
        """Whether it takes connections; on another host its log says so."""
        if self._prefix:
            return log.exists() and _SERVING in log.read_bytes()[before:]
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None

    def stop(self) -> None:
        """SIGSTOP: it answers nothing and its connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "T":  # each of its threads has to come to a halt
            time.sleep(0.001)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Lose all data; not running."""
        assert self.process is None
        shutil.rmtree(f"{self.folder.name}/data")

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.folder.cleanup()
