"""Fixtures of the tiers' tests: each io engine in turn, and files for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.tiers.transfers import ENGINES, make_engine, uring_refused
from ucxkv.tiers.engines.native import NativeEngine


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    """Each engine in turn; io_uring is skipped only where a plain io_uring_setup fails."""
    found = str(request.param)
    if found == "io_uring" and (why := uring_refused()):
        pytest.skip(f"no io_uring here: {why}")
    return found


@pytest.fixture
async def engine(name: str) -> AsyncIterator[NativeEngine]:
    made = make_engine(name)
    yield made
    await made.aclose()
    assert made.pending == 0


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of the test's own."""
    found = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    yield found
    os.close(found)


@pytest.fixture
def direct_fd(tmp_path: Path) -> Iterator[int]:
    """The same, opened with O_DIRECT."""
    try:
        found = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as exc:
        pytest.skip(f"no O_DIRECT on {tmp_path}: {exc}")
    yield found
    os.close(found)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; needs root."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "ucxkv-test", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
