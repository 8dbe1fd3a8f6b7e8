"""Nodes that keep durable blocks, for tests: one folder, many lives."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import ucxkv
from tests.harness import NodeProcess
from ucxkv.node import Node, NodeConfig
from ucxkv.node.state import forget

__all__ = ["MIB", "Lives", "life", "lives", "reboot"]

MIB = 1 << 20


class Lives:
    """A node that is started again and again on one state folder."""

    def __init__(self, folder: Path, name: str = "d1") -> None:
        self.folder = folder
        self.name = name

    def process(self, **options: str | bool) -> NodeProcess:
        """The next life, as a process."""
        flags: dict[str, str | bool] = {"durability": "process", "state_dir": str(self.folder), **options}
        return NodeProcess(self.name, **flags)  # type: ignore[arg-type]

    def config(self, **changes: object) -> NodeConfig:
        """The next life, in this process."""
        values: dict[str, object] = {
            "name": self.name,
            "listen": "127.0.0.1:0",
            "host_bytes": 64 << 20,
            "durability": "process",
            "state_dir": str(self.folder),
            **changes,
        }
        return NodeConfig(**values)  # type: ignore[arg-type]

    def segment(self) -> Path:
        """The file with the values."""
        (found,) = Path("/dev/shm").glob(f"ucxkv-{self.name}-????????????????")
        return found


def reboot(*state_dirs: Path) -> None:
    """What the end of their machine takes along of these nodes, which do not run."""
    for folder in state_dirs:
        identity = json.loads((folder / "node.json").read_text())["identity"]
        for path in Path("/dev/shm").glob(f"ucxkv-*-{identity}*"):
            path.unlink()


@contextmanager
def lives(name: str = "d1") -> Iterator[Lives]:
    """A folder, and nothing left of it."""
    with tempfile.TemporaryDirectory(prefix="ucxkv-test-") as folder:
        own = Lives(Path(folder) / "state", name)
        try:
            yield own
        finally:
            if own.folder.exists():
                forget(own.folder)
            assert not list(Path("/dev/shm").glob(f"ucxkv-{name}-*")), "memory was left behind"


@asynccontextmanager
async def life(again: Lives, **changes: object) -> AsyncIterator[tuple[Node, ucxkv.Client]]:
    """One life in this process, checked at its end."""
    async with Node(again.config(**changes)) as node, ucxkv.connect(node.address) as kv:
        yield node, kv
        node.store.check()
