"""Two processes for the contract tests: a node, and a client in the test's own."""

from __future__ import annotations

import pytest

from tests.transport.harness import SHM, TCP, Client, NodeProcess


@pytest.fixture(scope="module", params=[SHM, TCP], ids=["shm", "tcp"])
def process(request):
    """A node process for the tests that leave it alive."""
    node = NodeProcess.launch(request.param)
    yield node
    node.end()


@pytest.fixture
async def client(process):
    """A client of the shared node process, whose blocks are gone."""
    await process.connect()
    await process.call("reset")
    made = await Client.start(process)
    yield made
    await made.aclose()
    assert await process.call("close_session", token=made.token) is True
    process.control.abort()


@pytest.fixture(params=[SHM, TCP], ids=["shm", "tcp"])
async def lone_client(request):
    """A client of a node process of the test's own, which may die."""
    node = await NodeProcess.start(request.param)
    made = await Client.start(node)
    yield made
    await made.aclose()
    await node.stop()
