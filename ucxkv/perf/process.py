"""One side of a backend as a child process, spoken to in JSON lines (see peers.worker). Every wait is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import ucxkv
from ucxkv.errors import IntegrityError, UcxKvError, Unavailable
from ucxkv.perf import peers
from ucxkv.perf.backends import Backend, interpreter_of

__all__ = ["Missing", "Worker"]

_LINE_MAX = 16 << 20
_START_S = 60.0  # importing ucxx alone takes seconds on a busy machine
_END_S = 3.0
_NOT_THERE = ("is not installed", "was not found")

# The package `peers` alone, without ucxkv: another interpreter need not have it.
_BOOT = """
import importlib, importlib.util, sys
folder, package, module = sys.argv[1:]
sys.path[:] = [path for path in sys.path if path]
if package == "peers":
    place = folder + "/__init__.py"
    spec = importlib.util.spec_from_file_location(package, place, submodule_search_locations=[folder])
    sys.modules[package] = importlib.util.module_from_spec(spec)
else:
    sys.path.insert(0, folder)
importlib.import_module(package + ".worker").main(module)
"""

Question = Callable[[dict[str, Any]], Awaitable[Any]]


class Missing(UcxKvError):
    """The backend cannot run here; the text says why."""

    @property
    def is_installable(self) -> bool:
        """Whether installing it is what helps: its module or program was not found."""
        return any(words in self.message for words in _NOT_THERE)


class Worker:
    """A running side. Make it with `start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Any) -> None:
        self._name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @classmethod
    async def start(
        cls, backend: Backend, interpreters: Mapping[str, str], environment: Mapping[str, str], message: dict[str, Any]
    ) -> tuple[Worker, dict[str, Any]]:
        """Start a side with its first message: the process, and its answer for a server. Raises as `request`."""
        worker = await cls.spawn(backend, interpreters, environment)
        try:
            return worker, await worker.request(message, seconds=_START_S)
        except BaseException:
            await worker.aclose()
            raise

    @classmethod
    async def spawn(cls, backend: Backend, interpreters: Mapping[str, str], environment: Mapping[str, str]) -> Worker:
        """Start the process, which waits for its first message."""
        variables = {**os.environ, **environment}
        if backend.is_foreign:
            folder, package = Path(peers.__file__).parent, "peers"
            variables.pop("PYTHONPATH", None)
            module = f"{package}.{backend.module}"
        else:
            folder, package = Path(ucxkv.__file__).parent.parent, "ucxkv.perf.peers"
            module = backend.module
        log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process; has no name on disk)
        try:
            process = await asyncio.create_subprocess_exec(
                interpreter_of(backend.name, interpreters),
                *("-c", _BOOT, str(folder), package, module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=variables,
                limit=_LINE_MAX,
                start_new_session=True,  # Ctrl-C reaches us only; it ends with its standard input
            )
        except OSError as exc:
            log.close()
            raise Missing(f"{interpreter_of(backend.name, interpreters)} does not start: {exc}") from exc
        return cls(backend.name, process, log)

    async def request(self, message: dict[str, Any], *, seconds: float, question: Question | None = None) -> Any:
        """Send one message and return its answer; `question` answers what the side asks meanwhile.

        Raises Missing, IntegrityError (wrong bytes), Unavailable (it failed, ended, or took longer than `seconds`).
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(message, question)
        except TimeoutError as exc:
            raise Unavailable(f"{self._name} gave no answer within {seconds:.0f} s: {self.last_words()}") from exc
        except (ConnectionError, ValueError) as exc:
            raise Unavailable(f"{self._name} ended: {self.last_words() or exc}") from exc

    async def _exchange(self, message: dict[str, Any], question: Question | None) -> Any:
        await self._send(message)
        assert self._process.stdout is not None
        while True:
            line = await self._process.stdout.readline()
            if not line:
                raise ConnectionError("its process has ended")
            said = json.loads(line)
            if "ok" in said:
                return said["ok"]
            if "error" in said:
                kind = {"missing": Missing, "wrong": IntegrityError}.get(said["kind"], Unavailable)
                raise kind(f"{self._name}: {said['error']}")
            assert question is not None
            await self._send({"answer": await question(said)})

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    def last_words(self, limit_bytes: int = 600) -> str:
        """The end of what it wrote to standard error."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), limit_bytes, max(0, size - limit_bytes)).decode(errors="replace")
        return " | ".join(line.strip() for line in text.strip().splitlines()[-3:])

    async def aclose(self) -> None:
        """End the process: its standard input first, then by force. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._log.close()
