"""The side that is asked: this machine's (LocalSide), or another's through its `ucxkv perf --server` (link.RemoteSide).

A side starts servers of backends and a node, and counts their CPU time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ucxkv.cli.launch import NodeProcess, start_node, stop_nodes
from ucxkv.cli.measure import run_ns
from ucxkv.perf.backends import BACKENDS, find_perftest
from ucxkv.perf.machine import machine_facts
from ucxkv.perf.process import Worker
from ucxkv.perf.wires import environment, is_loopback
from ucxkv.transport.address import TcpAddress

__all__ = ["LocalSide", "Side", "StartedNode", "StartedServer", "is_same_host"]

ASK_S = 60.0
_NODE_READY_S = 120.0


class StartedServer(Protocol):
    """A running server of a backend. ready: what its client needs."""

    ready: dict[str, Any]

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have it answer a request of its client."""

    async def cpu_ns(self) -> int:
        """CPU time of its process so far."""

    async def aclose(self) -> None:
        """End it. Idempotent."""


class StartedNode(Protocol):
    """A node to measure against, started for this run or given. addresses: of it or of its cluster."""

    addresses: list[str]

    async def cpu_ns(self) -> int | None:
        """CPU time of its process so far; None when that is not known here."""

    async def aclose(self) -> None:
        """End it if it was started here. Idempotent."""


class Side(Protocol):
    """See the module. host: where its servers listen, as the measuring side reaches them."""

    host: str
    is_remote: bool

    async def start(self, name: str, wire: str, memory: str) -> StartedServer:
        """Start a backend's server. Raises Missing, Unavailable."""

    async def node(self, host_bytes: int) -> StartedNode:
        """Start a node. Raises SetupError, Unavailable."""

    async def facts(self) -> dict[str, Any]:
        """What its figures depend on."""


def is_same_host(side: Side) -> bool:
    """Whether shared memory reaches the servers of a side."""
    return not side.is_remote or is_loopback(side.host)


class _LocalServer:
    def __init__(self, worker: Worker, ready: dict[str, Any]) -> None:
        self._worker, self.ready = worker, ready

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._worker.request({"ask": request}, seconds=ASK_S)
        return answer

    async def cpu_ns(self) -> int:
        return run_ns([self._worker.pid])

    async def aclose(self) -> None:
        await self._worker.aclose()


class GivenNode:
    """A node, or several, that somebody else runs."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)

    async def cpu_ns(self) -> int | None:
        """Not known: it may run anywhere."""
        return None

    async def aclose(self) -> None:
        """It is left as it is."""


class _LocalNode:
    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self.addresses = [node.address]

    async def cpu_ns(self) -> int | None:
        return run_ns([self._node.pid])

    async def aclose(self) -> None:
        await asyncio.to_thread(stop_nodes, [self._node])


class LocalSide:
    """Servers and a node as processes of this machine."""

    is_remote = False

    def __init__(
        self, host: str, interpreters: Mapping[str, str], token_file: Path | None, addresses: Sequence[str] = ()
    ) -> None:
        """host: one address of this machine, never a wildcard. addresses: of a given node; empty = start one."""
        self.host = host
        self._interpreters = interpreters
        self._token_file = token_file
        self._addresses = addresses

    async def start(self, name: str, wire: str, memory: str) -> StartedServer:
        """See Side."""
        config = {"backend": name, "wire": wire, "host": self.host, "memory": memory, "tool": find_perftest()}
        message = {"start": config, "server": None}
        worker, ready = await Worker.start(
            BACKENDS[name], self._interpreters, environment(name, wire, self.host), message
        )
        return _LocalServer(worker, ready)

    async def node(self, host_bytes: int) -> StartedNode:
        """See Side."""
        if self._addresses:
            return GivenNode(self._addresses)
        arguments = ["--token-file", str(self._token_file)] if self._token_file else []
        listen = str(TcpAddress(self.host, 0))
        node = start_node("perf", listen=listen, host_bytes=str(host_bytes), arguments=arguments)
        try:
            await asyncio.to_thread(node.wait_ready, time.monotonic() + _NODE_READY_S)
        except BaseException:
            stop_nodes([node])
            raise
        return _LocalNode(node)

    async def facts(self) -> dict[str, Any]:
        """See Side."""
        return await asyncio.to_thread(machine_facts)
