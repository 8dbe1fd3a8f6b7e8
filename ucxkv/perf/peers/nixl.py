"""NIXL: one-sided reads and writes of another agent's slab over its UCX backend; no directory, no sums.

A transfer request is made from two prepared descriptor lists, posted, and polled: 20 checks before each turn of the
loop. NIXL's progress thread is off in the client: with the server's own it is one too many for two cores.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from importlib import metadata
from typing import Any

from .base import Client, Config, Facts, Missing, OneByOne, Result, Server, ServerCpu, Task, WrongBytes
from .blocks import Blocks, Pattern, anonymous_blocks
from .rounds import Operation, draw, measure

__all__ = ["make_client", "make_server"]

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
_CHECKS_A_TURN = 20
_POOL_BYTES_MAX = 8 << 30


def _library(config: Config) -> tuple[Any, str]:
    if config.memory != "host":
        raise Missing("NIXL is measured with host memory only here")
    reasons = []
    for name in _PACKAGES:
        try:
            module = importlib.import_module(f"{name}._api")
            return module, metadata.version(name.replace("_", "-"))
        except (ImportError, metadata.PackageNotFoundError) as exc:
            reasons.append(str(exc))
    raise Missing(f"NIXL is not installed ({'; '.join(reasons)})")


def _descriptors(pool: Blocks) -> list[tuple[int, int, int, str]]:
    return [(pool.ctypes.data, pool.nbytes, 0, "")]


class _NixlServer(Server):
    async def start(self, config: Config) -> Facts:
        library, _ = _library(config)
        self._agent = library.nixl_agent("server", library.nixl_agent_config(backends=["UCX"]))
        self._registered: Any = None
        return {}

    async def ask(self, request: Facts) -> Facts:
        count, nbytes = int(request["count"]), int(request["nbytes"])
        if not 0 < count * nbytes <= _POOL_BYTES_MAX or nbytes % 8:
            raise ValueError(f"a slab of {count} blocks of {nbytes} bytes")
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._slab = anonymous_blocks(count, nbytes)
        Pattern(nbytes).fill_all(self._slab)
        self._registered = self._agent.register_memory(_descriptors(self._slab), "DRAM")
        return {"base": self._slab.ctypes.data, "agent": self._agent.get_agent_metadata().hex()}


class _NixlClient(OneByOne):
    async def start(self, config: Config, server: Facts) -> Facts:
        library, self._version = _library(config)
        agent_config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = library.nixl_agent("client", agent_config)
        return {}

    async def measure_one(self, task: Task, server_cpu: ServerCpu) -> Result:
        slab = await self.ask_server({"count": task.count, "nbytes": task.nbytes})
        transfers = _Transfers(self._agent, task, slab)
        try:
            return await measure(transfers, task, server_cpu)
        finally:
            transfers.close()

    def facts(self) -> Facts:
        return {"version": self._version, "ucx": "bundled"}


class _Transfers(Operation):
    """READs, or WRITEs, of task.batch blocks a request, task.at_once requests on their way."""

    def __init__(self, agent: Any, task: Task, slab: Facts) -> None:
        self._agent, self._task = agent, task
        self._pattern = Pattern(task.nbytes)
        self._pool = anonymous_blocks(task.count, task.nbytes)
        self._random = random.Random(1)
        self._remote = agent.add_remote_agent(bytes.fromhex(slab["agent"]))
        if isinstance(self._remote, bytes):
            self._remote = self._remote.decode()
        self._registered = agent.register_memory(_descriptors(self._pool), "DRAM")
        n, address = task.nbytes, self._pool.ctypes.data
        local = [(address + i * n, n, 0) for i in range(task.count)]
        remote = [(slab["base"] + i * n, n, 0) for i in range(task.count)]
        self._here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        self._there = agent.prep_xfer_dlist(self._remote, remote, "DRAM")
        self._calls: list[tuple[list[int], list[int]]] = []

    def close(self) -> None:
        """Give back lists and registration."""
        self._here.release()
        self._there.release()
        self._agent.deregister_memory(self._registered)
        self._agent.remove_remote_agent(self._remote)

    async def prepare(self, calls: int) -> None:
        batch, count = self._task.batch, self._task.count
        here, there = draw(self._random, count, calls * batch), draw(self._random, count, calls * batch)
        lows = range(0, calls * batch, batch)
        self._calls = [(here[low : low + batch], there[low : low + batch]) for low in lows]
        for i, number in enumerate(here):
            if self._task.op == "get":
                self._pool[number] = 0
            else:
                self._pattern.fill(there[i] ^ 1, self._pool[number])  # other content than lies there already

    async def operate(self) -> list[int]:
        operation = "READ" if self._task.op == "get" else "WRITE"
        times: list[int] = []
        left = iter(self._calls)

        async def caller() -> None:
            for here, there in left:
                start = time.perf_counter_ns()
                await self._transfer(operation, here, there)
                times.append(time.perf_counter_ns() - start)

        await asyncio.gather(*[caller() for _ in range(self._task.at_once)])
        return times

    async def _transfer(self, operation: str, here: list[int], there: list[int]) -> None:
        agent = self._agent
        handle = agent.make_prepped_xfer(operation, self._here, here, self._there, there)
        state, checks = agent.transfer(handle), 0
        while state == "PROC":
            checks += 1
            if checks % _CHECKS_A_TURN == 0:
                await asyncio.sleep(0)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a NIXL transfer ended in state {state}")
        handle.release()

    async def check(self) -> None:
        for here, there in self._calls:
            if self._task.op == "put":
                self._pool[here] = 0
                await self._transfer("READ", here, there)
            for mine, theirs in zip(here, there, strict=True):
                number = theirs if self._task.op == "get" else theirs ^ 1
                if not self._pattern.matches(number, self._pool[mine]):
                    raise WrongBytes(f"block {theirs} of {self._task.nbytes} bytes is not what was transferred")


def make_server() -> Server:
    """The agent that owns the slab."""
    return _NixlServer()


def make_client() -> Client:
    """The agent that reads and writes."""
    return _NixlClient()
