"""The engines of the control plane, each behind the same few handles: what the contract suite runs over."""

from __future__ import annotations

import atexit
import contextlib
import functools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest
from etcd3aio._protobuf import CompactionRequest

from tests.control.etcd_server import WHY_NOT, EtcdServer
from tests.control.memory import MemoryControl, Store
from ucxkv import errors
from ucxkv.control import ControlPlane, SystemClock, open_control
from ucxkv.control.etcd import EtcdControl
from ucxkv.control.sqlite import SqliteControl
from ucxkv.control.sqlite_file import SqliteFile


class Engine(Protocol):
    """One control plane under test. ttl_s: the shortest lease that it really keeps."""

    ttl_s: float

    async def open(self) -> ControlPlane:
        """One more handle, as another process would have."""

    async def compact(self) -> None:
        """Drop the history of changes so far."""

    async def aclose(self) -> None:
        """Close all handles, then the engine."""


class MemoryEngine:
    """The in-memory one, on the real clock."""

    ttl_s = 0.3

    def __init__(self) -> None:
        self.store = Store(SystemClock())
        self.handles: list[MemoryControl] = []

    async def open(self) -> ControlPlane:
        self.handles.append(MemoryControl(self.store))
        return self.handles[-1]

    async def compact(self) -> None:
        self.store.compact()

    async def aclose(self) -> None:
        for handle in self.handles:
            await handle.aclose()
        await self.store.aclose()


class SqliteEngine:
    """A file of its own."""

    ttl_s = 0.5

    def __init__(self, folder: Path) -> None:
        self.path = folder / "control.db"
        self.handles: list[SqliteControl] = []

    async def open(self) -> ControlPlane:
        self.handles.append(await SqliteControl.open(self.path, SystemClock()))
        return self.handles[-1]

    async def compact(self) -> None:
        file = SqliteFile(self.path)
        file.drop_history(1 << 62)
        file.close()

    async def aclose(self) -> None:
        for handle in self.handles:
            await handle.aclose()


class EtcdEngine:
    """A cluster of its own name in an etcd that is shared and must stay healthy."""

    ttl_s = 1.0

    def __init__(self, server: EtcdServer) -> None:
        self.url = server.url(f"c-{uuid.uuid4().hex}")
        self.handles: list[ControlPlane] = []

    async def open(self) -> ControlPlane:
        self.handles.append(await open_control(self.url, timeout_s=20))
        return self.handles[-1]

    async def compact(self) -> None:
        plane = self.handles[0]
        assert isinstance(plane, EtcdControl)
        revision = (await plane.list(""))[1]
        with contextlib.suppress(errors.Unavailable):  # compacted there already
            await plane._client.ask_once("KV", "Compact", CompactionRequest(revision=revision))

    async def aclose(self) -> None:
        for handle in self.handles:
            await handle.aclose()


@functools.cache
def shared_etcd(purpose: str = "") -> EtcdServer:
    """One etcd a purpose: revisions are its own, and leases that others left behind end in it."""
    server = EtcdServer()
    server.start()
    atexit.register(server.__exit__, None, None, None)
    return server


async def make_engine(kind: str, folder: Path, purpose: str = "") -> Engine:
    if kind == "memory":
        return MemoryEngine()
    if kind == "sqlite":
        return SqliteEngine(folder)
    return EtcdEngine(shared_etcd(purpose))


ENGINES = [
    "memory",
    "sqlite",
    pytest.param("etcd", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here")),
]


@pytest.fixture(params=ENGINES)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    """Each engine in turn, empty."""
    made = await make_engine(request.param, tmp_path)
    yield made
    await made.aclose()


@pytest.fixture
async def plane(engine: Engine) -> ControlPlane:
    """One handle on it."""
    return await engine.open()
