"""Nodes with a disk tier in a folder of the test: in this process or in one of their own, filled, asked, damaged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

import ucxkv
from tests.harness import NodeProcess
from ucxkv.node import Node, NodeConfig

MIB = 1 << 20
BLOCK = 256 << 10
DISK_BYTES = 96 * MIB


def config(folder: Path, **changes: object) -> NodeConfig:
    values: dict[str, object] = {
        "name": "d1", "listen": "127.0.0.1:0", "host_bytes": 8 * MIB, "disk": (str(folder / "disk"),),
        "disk_bytes": DISK_BYTES, **changes,
    }  # fmt: skip
    return NodeConfig(**values)  # type: ignore[arg-type]


def process(folder: Path, **flags: str) -> NodeProcess:
    return NodeProcess("d1", **{"host_bytes": "8MiB", "disk": str(folder / "disk"), "disk_bytes": "96MiB", **flags})


@contextlib.asynccontextmanager
async def life(folder: Path, **changes: object) -> AsyncIterator[tuple[Node, ucxkv.Client]]:
    """One life in this process, checked at its end."""
    async with Node(config(folder, **changes)) as node, ucxkv.connect(node.address) as kv:
        yield node, kv
        node.store.check()


async def put_all(kv: ucxkv.Client, chain: list[bytes], values: np.ndarray, step: int = 8) -> None:
    """In calls of a few, as engines do; back-pressure is waited for."""
    for at in range(0, len(chain), step):
        some = chain[at : at + step]
        parents = [chain[at - 1] if at else bytes(16), *some[:-1]]
        (await kv.put_many(some, values[at : at + step], parents)).raise_for_status()


async def numbers(kv: ucxkv.Client) -> dict[str, float]:
    return (await kv.status())[0].numbers


async def on_disk(kv: ucxkv.Client) -> bool:
    return (await numbers(kv))["disk_pending"] == 0


def flip(folder: Path, stored: bytes) -> None:
    """One byte of the one copy of these bytes."""
    flipped = 0
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        at = data.find(stored[:4096])
        if at >= 0:
            with file.open("r+b") as out:
                out.seek(at + 77)
                out.write(bytes([data[at + 77] ^ 1]))
            flipped += 1
    assert flipped == 1
