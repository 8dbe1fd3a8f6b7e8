"""RDMA tests: they skip, with the reason, where there is no device; see processes.py for which devices they use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rdma import processes

KEPT = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_RC_VERBS_TIMEOUT", "UCX_RC_VERBS_RETRY_COUNT", "UCX_WARN_UNUSED_ENV_VARS")


@pytest.fixture(scope="session", autouse=True)
def own_device() -> Iterator[None]:
    """UCX of this process uses the tests' own end of the wire."""
    reason = processes.why_not()
    if reason:
        pytest.skip(reason)
    before = {name: os.environ.get(name) for name in KEPT}
    processes.use(processes.OWN)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
