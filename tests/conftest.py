"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.harness import NodeProcess
from tests.long import is_long


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m rdma` imports the RDMA tests alone: where they run, importing the others takes minutes."""
    only_rdma = config.option.markexpr.strip() == "rdma"
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if only_rdma and is_test and collection_path.parent.name != "rdma" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what a full run leaves out."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    """One node for tests that only put and get; its contents are anybody's."""
    with NodeProcess("shared", host_bytes="256MiB") as node:
        yield node


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    """A node of 64 MiB of the test's own."""
    with NodeProcess() as node:
        yield node


@pytest.fixture(params=["mapped", "message", "network", "rma"])
async def kv(shared_node: NodeProcess, request: pytest.FixtureRequest) -> AsyncIterator[ucxkv.Client]:
    """A client of the shared node, over each path in turn: the same promises hold on all of them."""
    async with ucxkv.connect(shared_node.address, path=request.param) as client:
        yield client


def keys(n: int) -> list[bytes]:
    """n keys nobody else has."""
    return [os.urandom(16) for _ in range(n)]


def blocks(n: int, nbytes: int, seed: int = 0) -> np.ndarray:
    """n blocks of random bytes, u8[n, nbytes]."""
    return np.random.default_rng(seed).integers(0, 256, (n, nbytes), np.uint8)
