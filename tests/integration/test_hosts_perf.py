"""`ucxkv perf` between two hosts over TCP (namespaces; see tests/hosts.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.hosts import Hosts, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]
SMALL = ("--sizes", "16KiB", "--batch", "4", "--at-once", "2", "--cache", "hot", "--quick", "--json")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts("a", "b") as found:
        yield found


def test_two_hosts_measure_over_their_network(hosts: Hosts, tmp_path: Path) -> None:
    """Goal: `--server HOST` on one host and `--connect HOST` on the other are all it takes. Method: node, own messages,
    ucx_perftest and socket between two namespaces, which share a kernel but must not share memory."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("between two hosts")
    perf = [sys.executable, "-m", "ucxkv", "perf", "--token-file", str(token)]
    address = hosts.address("a")
    serving = hosts.argv("a", *perf, "--server", address, "--backend", "all")
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            assert json.loads(server.stdout.readline())["address"] == f"{address}:13336"
            names = "ucxkv,ucx_perftest,socket"
            measuring = hosts.argv("b", *perf, "--connect", address, "--backend", names, *SMALL)
            done = subprocess.run(measuring, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
            assert done.returncode == 0, done.stderr
        finally:
            server.terminate()
            assert server.wait(30) == 0
    found = json.loads(done.stdout)
    assert found["notices"] == []
    assert {row["backend"] for row in found["rows"]} == {"ucxkv", "ucx_perftest", "socket"}
    assert {row["wire"] for row in found["rows"]} == {"net"}
    assert {row["path"] for row in found["rows"] if row["op"] == "get"} == {"message", "net"}
    assert {row["over"] for row in found["rows"] if row["backend"] == "socket"} == {"tcp"}
    assert all(row["verified"] for row in found["rows"] if row["backend"] != "ucx_perftest")
