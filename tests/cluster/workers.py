"""The client processes of a fault run, as their starter sees them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["WorkerProcess"]

ROOT = Path(__file__).resolve().parent.parent.parent
_END_S = 20.0


class WorkerProcess:
    """One `tests.cluster.worker`. prefix: what runs it on its host."""

    def __init__(self, name: str, folder: Path, prefix: Sequence[str], arguments: Sequence[str]) -> None:
        self.name = name
        argv = [*prefix, sys.executable, "-m", "tests.cluster.worker", "--name", name]
        argv += ["--log", str(folder / f"{name}.ops"), *arguments]
        self._log = (folder / f"{name}.log").open("ab")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, text=True,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.put(json.loads(line))
        self.said.put({"worker": self.name, "event": "ended"})

    def ask(self, *words: object) -> None:
        """Send a command; its answer comes among `said`."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it: first by the end of its standard input. Idempotent."""
        if self._log.closed:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait(_END_S)
        self._reader.join(_END_S)
        self._process.stdout.close()
        self._log.close()


class Workers:
    """All of them. tell: called with every line that answers nothing (news, complaints)."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.all: list[WorkerProcess] = []
        self._tell = tell
        self._answers: dict[tuple[str, str], dict[str, Any]] = {}

    def poll(self) -> None:
        """Take in what they said."""
        for worker in self.all:
            while not worker.said.empty():
                said = worker.said.get()
                if said["event"] in ("ready", "going", "paused", "probed", "audited"):
                    self._answers[worker.name, said["event"]] = said
                else:
                    self._tell(said)

    def await_all(
        self, workers: Sequence[WorkerProcess], event: str, seconds: float, tick: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """One answer of each; `tick` is called while waiting. Raises TimeoutError."""
        until_s = time.monotonic() + seconds
        while True:
            self.poll()
            missing = [worker.name for worker in workers if (worker.name, event) not in self._answers]
            if not missing:
                return [self._answers.pop((worker.name, event)) for worker in workers]
            if time.monotonic() > until_s:
                raise TimeoutError(f"{', '.join(missing)}: not {event!r} within {seconds:.0f} s")
            tick()
            time.sleep(0.02)

    def close(self) -> None:
        """End all."""
        for worker in self.all:
            worker.close()
