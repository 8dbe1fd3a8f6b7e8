"""Real nodes as processes, for tests: start, block, freeze, kill, and look at what they hold."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

__all__ = ["NodeProcess", "open_files", "wait_until"]

ROOT = Path(__file__).resolve().parent.parent
_READY_S = 30.0

# The node's main program, with one thing more: SIGUSR1 blocks its interpreter for a second, as a long pause of its
# collector or a greedy callback would.
_PROGRAM = """
import signal, sys, time
from ucxkv.cli import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1.0))
sys.argv[0] = "ucxkv"
main()
"""


class NodeProcess:
    """One `ucxkv node`. Options are its flags, `host_bytes="64MiB"` for `--host-bytes 64MiB`."""

    def __init__(
        self,
        name: str = "n1",
        *,
        listen: str = "127.0.0.1:0",
        join: str = "",
        limits: dict[int, int] | None = None,
        prefix: tuple[str, ...] = (),
        program: str = _PROGRAM,
        **options: str | bool,
    ) -> None:
        """limits: resource -> soft and hard limit of the process; prefix: a command that execs what follows it;
        program: another main program, in the end that of `ucxkv`.
        """
        flags: dict[str, str | bool] = {"name": name, "listen": listen, "host_bytes": "64MiB", **options}
        if join:
            flags["join"] = join
        argv = [*prefix, sys.executable, "-c", program, "node"]
        for flag, value in flags.items():
            option = flag.replace("_", "-")
            argv += [f"--{option}", value] if isinstance(value, str) else [f"--{'' if value else 'no-'}{option}"]
        self.name = name
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # no pipe: nobody reads it while the node writes

        self._last_words = ""

        def limit() -> None:
            for which, value in (limits or {}).items():
                resource.setrlimit(which, (value, value))

        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=self._log, env=env, preexec_fn=limit)
        try:
            ready = self._ready()
        except BaseException:
            self.kill()
            raise
        self.address: str = ready["address"]
        self.pid: int = ready["pid"]

    def _ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], _READY_S)[0]:
            raise TimeoutError("the node was not ready in time")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(_READY_S)  # its last words come after the end of its output
            raise RuntimeError(f"the node ended ({self.process.returncode}): {self.log()[-2000:]}")
        ready: dict[str, Any] = json.loads(line)
        return ready

    def log(self) -> str:
        """What it wrote to standard error so far."""
        return self._last_words or os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def block_python(self) -> None:
        """Keep the node's interpreter busy for one second; its C threads go on."""
        os.kill(self.pid, signal.SIGUSR1)

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs when this returns, and nobody is told."""
        os.kill(self.pid, signal.SIGSTOP)
        while not all(state == "T" for state in self._thread_states()):
            time.sleep(0.001)

    def _thread_states(self) -> list[str]:
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait for the end. Idempotent."""
        self.process.kill()
        self._end()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        try:
            return self._end()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _end(self) -> int:
        code = self.process.wait(15)
        if self.process.stdout is not None:
            self.process.stdout.close()
        if not self._log.closed:
            self._last_words = self.log()
            self._log.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._end()


def open_files(pid: int | None = None) -> int:
    """How many descriptors a process has open (default: this one)."""
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))


async def wait_until(condition, what: str, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    """Await `condition()` (sync or async) to become true; fails the test when it does not within `seconds`."""
    import asyncio
    import inspect

    until = time.monotonic() + seconds
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.02)
