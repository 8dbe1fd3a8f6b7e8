"""The crash harness in a short run: what a node said before kill -9 is what it says after."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ucxkv.node.keeping import file_system

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "crash_rounds.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", [[], ["--reboots"]], ids=["process", "power"])
def test_rounds_of_kill_9_lose_nothing_that_was_acknowledged(more: list[str]) -> None:
    """Goal: 0 lost, back, wrong and holes. Method: `scripts/crash_rounds.py`, a few rounds: seed 5; with power
    the memory goes, too."""
    if more and file_system(Path(tempfile.gettempdir())) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory: set TMPDIR to a folder on a disk")
    command = [sys.executable, str(SCRIPT), "--rounds", "3", "--seed", "5", "--host-bytes", "64MiB", "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert bool(more) == ("reboots" in said)
    assert said["violations"] == 0 and said["kills"] >= 3 and said["acknowledged"] > 20, said
    assert not list(Path("/dev/shm").glob(f"ucxkv-{said['node']}-*")), "memory was left behind"
