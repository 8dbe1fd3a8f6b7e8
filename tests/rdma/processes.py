"""Processes of the RDMA tests, and what they run.

They come from a fork server that has imported everything: in the emulated machine one import of the package costs as
much as ten tests. An end is an RDMA device with the address of its network interface. Everything here uses `PEER`, the
tests themselves `OWN`: the two ends of one wire.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import numpy as np

__all__ = ["OWN", "PEER", "REGION_BYTES", "Process", "node_main", "peer_main", "use", "why_not"]

REGION_BYTES = 1 << 20
_READY_S = 240.0
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["tests.rdma.preload"])


class End(NamedTuple):
    """An RDMA device and port as UCX names it, and an address that belongs to it."""

    device: str
    address: str


def _ends() -> tuple[End, End]:
    """Soft-RoCE's two (scripts/roce_vm.sh), or UCXKV_RDMA_ENDS="device=address,device=address" of real ones."""
    text = os.environ.get("UCXKV_RDMA_ENDS") or "rxe0:1=10.77.0.1,rxe1:1=10.77.0.2"
    one, other = (End(*part.split("=")) for part in text.split(","))
    return one, other


PEER, OWN = _ends()


def why_not() -> str:
    """Why there is nothing to test here; empty when there is."""
    for end in (PEER, OWN):
        if not os.path.exists(f"/sys/class/infiniband/{end.device.partition(':')[0]}"):
            return f"no RDMA device {end.device} (bash scripts/roce_vm.sh pytest -m rdma, or set UCXKV_RDMA_ENDS)"
    return ""


def use(end: End | None) -> None:
    """Make UCX use this device alone (None: whatever ucxkv chooses), with time limits that suit a test."""
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        os.environ.pop(name, None)
    if end is not None:
        os.environ["UCX_TLS"] = "rc"  # with its auxiliary UD, and neither shared memory nor tcp
        os.environ["UCX_NET_DEVICES"] = end.device
    os.environ.update(
        UCX_RC_VERBS_TIMEOUT="1s",
        UCX_RC_VERBS_RETRY_COUNT="7",
        UCX_WARN_UNUSED_ENV_VARS="n",
    )


class Process:
    """A child that runs `main(connection, *arguments)` on the peer's device; `told`: what it said when it was ready."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=main, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.told = self.ask()

    def ask(self, question: Any = None) -> Any:
        """Send something (None: nothing) and wait for what comes back; an exception that comes back is raised."""
        if question is not None:
            self.pipe.send(question)
        if not self.pipe.poll(_READY_S):
            raise TimeoutError("the peer process does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Let it end by itself; by force when it does not. Idempotent."""
        self.pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _said(pipe: Connection) -> Any:
    """What the test says next; None when it has closed the pipe."""
    while not pipe.poll():  # noqa: ASYNC110  # a pipe is no event
        await asyncio.sleep(0.01)
    try:
        return pipe.recv()
    except EOFError:
        return None


def _run(pipe: Connection, body: Callable[[], Any], end: End | None = PEER) -> None:
    use(end)
    try:
        asyncio.run(body())
    except BaseException as exc:
        pipe.send(RuntimeError(f"{type(exc).__name__}: {exc}"))
        raise


def peer_main(pipe: Connection) -> None:
    """A worker with a listener and a region: tells (port, address, packed key), sends every message back, and answers
    "bytes" with the region's content.
    """

    async def body() -> None:
        from ucxkv.transport.endpoint import Endpoint, Listener
        from ucxkv.transport.memory import MemoryRegion
        from ucxkv.transport.progress import ReceivedMessage, Worker
        from ucxkv.transport.ucx import Context

        context = Context(is_shared=False)
        worker = Worker(context)
        memory = np.arange(REGION_BYTES, dtype=np.uint32).astype(np.uint8)
        region = MemoryRegion.register(context, memory)
        endpoints: list[Endpoint] = []
        listener = Listener(worker, PEER.address, 0, endpoints.append)
        tasks: set[asyncio.Task[None]] = set()

        async def echo(message: ReceivedMessage) -> None:
            payload = await message.receive() if message.length else None
            await endpoints[-1].send(2, message.header, payload)

        def on_message(message: ReceivedMessage) -> None:
            task = asyncio.get_running_loop().create_task(echo(message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        worker.on_message(1, on_message)
        pipe.send((listener.port, region.address, region.pack_key()))
        while await _said(pipe) == "bytes":
            pipe.send(memory.tobytes())
        listener.close()
        for endpoint in endpoints:
            await endpoint.aclose(force=True)
        region.close()
        await worker.aclose()
        context.close()

    _run(pipe, body)


def node_main(pipe: Connection, name: str, join: tuple[str, ...], end: End | None = PEER) -> None:
    """A node at the peer's address, with UCX as `use` of `end` says: tells its address, answers anything with its data
    service's numbers.
    """

    async def body() -> None:
        from ucxkv.node import Node, NodeConfig

        config = NodeConfig(name=name, listen=f"{PEER.address}:0", host_bytes=64 << 20, join=join)
        async with Node(config) as node:
            pipe.send(node.address)
            while await _said(pipe) is not None:
                pipe.send({**node.service.numbers(), "port": node.service.port})

    _run(pipe, body, end)
