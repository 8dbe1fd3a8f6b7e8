"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import Hosts, why_not


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
