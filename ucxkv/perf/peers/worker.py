"""The process of one side of a backend: JSON lines in on standard input, out on standard output.

in   {"start": Config, "server": facts}   -> {"ok": facts}      server: what the server said; null = be the server
     {"ask": request}                     -> {"ok": answer}     to a server
     {"measure": [Task]}                  -> {"ok": {"results": [Result], "facts": ...}}    to a client
out  {"cpu": true}  {"ask": request}      while a client measures: answered by {"answer": value}
     {"error": text, "kind": "missing" | "wrong" | "failed"}

The process ends with its standard input, whatever it is doing. What libraries print to standard output goes to
standard error.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from .base import Client, Config, Missing, Server, Task, WrongBytes

__all__ = ["main"]


class _Worker:
    def __init__(self, module: str, out: TextIO) -> None:
        self._module = module
        self._out = out
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self.side: Server | Client | None = None

    def _say(self, **message: Any) -> None:
        print(json.dumps(message), file=self._out, flush=True)

    async def _question(self, **question: Any) -> Any:
        self._say(**question)
        return json.loads(await self._lines.get())["answer"]

    async def _server_cpu(self) -> int:
        return int(await self._question(cpu=True))

    async def _start(self, config: Config, server: dict[str, Any] | None) -> dict[str, Any]:
        module = importlib.import_module(self._module)
        if server is None:
            self.side = made = module.make_server()
            assert isinstance(made, Server)
            return await made.start(config)
        self.side = client = module.make_client()
        assert isinstance(client, Client)
        client.ask_server = lambda request: self._question(ask=request)
        hello = await client.start(config, server)
        if hello:
            await client.ask_server({"peer": hello})
        await client.ready()
        return {}

    async def _carry_out(self, message: dict[str, Any]) -> dict[str, Any]:
        if "start" in message:
            return await self._start(Config(**message["start"]), message["server"])
        if "ask" in message:
            assert isinstance(self.side, Server)
            return await self.side.ask(message["ask"])
        assert isinstance(self.side, Client)
        tasks = [Task(**task) for task in message["measure"]]
        results = await self.side.measure(tasks, self._server_cpu)
        return {"results": [asdict(result) for result in results], "facts": self.side.facts()}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        while True:
            line = await self._lines.get()
            try:
                self._say(ok=await self._carry_out(json.loads(line)))
            except Missing as exc:
                self._say(error=str(exc), kind="missing")
            except WrongBytes as exc:
                self._say(error=str(exc), kind="wrong")
            except Exception as exc:
                traceback.print_exc()
                self._say(error=f"{type(exc).__name__}: {exc}", kind="failed")

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._lines.put_nowait, line)
        if self.side is not None:
            self.side.close()
        os._exit(0)  # some libraries crash or hang in their destructors (NIXL 1.5.1 crashes)


def main(module: str) -> None:
    """Be one side of the backend in `module`; returns never."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(_Worker(module, out).run())
