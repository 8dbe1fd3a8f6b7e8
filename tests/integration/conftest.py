"""Fixtures of the integration tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Hosts, why_not
from tests.integration.durable_nodes import Lives, lives
from tests.integration.replicas import Trio, trio_of


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    """Two hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts("a", "b") as hosts:
        yield hosts


@pytest.fixture
def hosts(network: Hosts) -> Iterator[Hosts]:
    """The same two hosts for every test, healthy."""
    yield network
    network.heal()


@pytest.fixture
def again() -> Iterator[Lives]:
    """A node with a state folder of its own, to be started again and again."""
    with lives(f"d{os.getpid()}") as own:
        yield own


@pytest.fixture
def trio(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """Nodes a, b and c of one cluster, of which none is started; the parameter is the number of replicas."""
    with trio_of(tmp_path, getattr(request, "param", 2)) as made:
        yield made
