"""Two real processes for transport tests: a node (node.py) and a client in the test's own process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import subprocess
import sys
from typing import Any

import numpy as np

from tests.transport.native import EPOCH, ROOT, address_of, keys_of
from ucxkv.transport.address import UnixAddress
from ucxkv.transport.base import deadline_after
from ucxkv.transport.control import ControlConnection
from ucxkv.transport.control_server import connect
from ucxkv.transport.data import TCP_FRAGMENT_BYTES, DataClient
from ucxkv.transport.endpoint import Endpoint
from ucxkv.transport.progress import Worker
from ucxkv.transport.ucx import Context

SHM = "posix,cma,self"
TCP = "tcp,self"
POISON = 0xA5
_names = itertools.count()


def said(process: subprocess.Popen[str], word: str) -> str:
    """What a child printed after this word; UCX writes its own warnings to stdout in between."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line[len(word) :].strip()
    raise AssertionError(f"the process ended without {word!r}")


class NodeProcess:
    """The node's process and the control connection to it."""

    def __init__(self, process: subprocess.Popen[str], name: str, transports: str) -> None:
        self.process = process
        self.name = name
        self.transports = transports
        self.control: ControlConnection

    @classmethod
    def launch(cls, transports: str) -> NodeProcess:
        """Start the process and wait until it listens; `connect` comes next."""
        address_of("test_resolve")  # built once, here
        name = f"ucxkv-test-{os.getpid()}-{next(_names)}"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.node", name, transports],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        said(process, "ready")
        return cls(process, name, transports)

    @classmethod
    async def start(cls, transports: str) -> NodeProcess:
        """Launched and connected."""
        node = await asyncio.to_thread(cls.launch, transports)
        await node.connect()
        return node

    async def connect(self) -> None:
        """(Re)open the control connection in the running loop."""
        self.control = await connect(UnixAddress(self.name), deadline_ns=deadline_after(20))

    async def call(self, command: str, **arguments: Any) -> Any:
        """One command; 20 s at most."""
        payload = json.dumps([command, arguments]).encode()
        _, reply = await self.control.request(1, payload, deadline_after(20))
        return json.loads(reply)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    async def stop(self) -> None:
        """Ask it to stop if it lives, then make sure of it."""
        if self.process.poll() is None and self.control.is_open:
            try:
                await self.call("stop")
                await asyncio.to_thread(self.process.wait, 10)
            except Exception:
                self.process.kill()
        self.control.abort()
        self.end()

    def end(self) -> None:
        """Make sure that the process is gone."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Client:
    """A data client of a node, with what it needs."""

    def __init__(self, node: NodeProcess, context: Context, worker: Worker) -> None:
        self.node = node
        self.context = context
        self.worker = worker
        self.token = 0
        self.data: DataClient
        self.base = 0
        self.key = b""

    @classmethod
    async def start(
        cls, node: NodeProcess, *, fragment: int | None = None, is_checked: bool = True, **worker: Any
    ) -> Client:
        """fragment None: what fits the transports."""
        context = Context(transports=node.transports)
        client = cls(node, context, Worker(context, **worker))
        await client.open(fragment, is_checked)
        return client

    async def open(self, fragment: int | None = None, is_checked: bool = True) -> None:
        """Open a session (again)."""
        is_tcp = "tcp" in self.node.transports
        self.token = secrets.randbits(63)
        hello = await self.node.call("hello", token=self.token, address=self.worker.address.hex(), eager_only=is_tcp)
        self.base, self.key = hello["base"], bytes.fromhex(hello["key"])
        endpoint = Endpoint.connect(self.worker, bytes.fromhex(hello["address"]), is_peer_mode=is_tcp)
        self.endpoint = endpoint
        if fragment is None:
            fragment = TCP_FRAGMENT_BYTES if is_tcp else 0
        self.data = DataClient(
            self.worker,
            endpoint,
            self.token,
            EPOCH,
            fragment_bytes=fragment,
            is_checked=is_checked,
        )

    async def reopen(self, fragment: int | None = None) -> None:
        """End the session on both sides and open another."""
        await self.data.aclose()
        assert await self.node.call("close_session", token=self.token) is True
        await self.open(fragment)

    async def aclose(self) -> None:
        await self.data.aclose()
        await self.worker.aclose()
        self.context.close()


def one_piece_each(buffer: np.ndarray[Any, Any], length: int, n: int) -> tuple[Any, Any, Any]:
    """first, addr, length of n destinations of `length` bytes, one after the other in a buffer."""
    first = np.arange(n + 1, dtype="<u4")
    addr = buffer.ctypes.data + np.arange(n, dtype="<u8") * np.uint64(length)
    return first, addr, np.full(n, length, "<u8")


async def read(client: Client, indices: Any, length: int, seconds: float = 20.0, **more: Any):
    """(status list, buffer, stored lengths) of one read into fresh memory."""
    indices = list(indices)
    buffer = np.full(max(1, len(indices) * length), POISON, np.uint8)
    status, stored, _ = await client.data.read(
        keys_of(indices), *one_piece_each(buffer, length, len(indices)), deadline_ns=deadline_after(seconds), **more
    )
    return status.tolist(), buffer, stored.tolist()
