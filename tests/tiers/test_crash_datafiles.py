"""kill -9 of a process that writes datafiles, a few rounds; `scripts/crash_datafiles.py` does as many as one likes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers.transfers import uring_refused

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "crash_datafiles.py"


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_killed_owner_of_datafiles_loses_nothing_that_was_acknowledged(tmp_path: Path, engine: str) -> None:
    """Goal: 0 lost, wrong, back, refused. Method: the script, three rounds of four writers: seed 3; files were used
    again meanwhile."""
    if engine == "io_uring" and (why := uring_refused()):
        pytest.skip(f"no io_uring here: {why}")
    words = ["--rounds", "3", "--seed", "3", "--engine", engine, "--folder", str(tmp_path), "--json"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] == 3 and found["lost"] == found["wrong"] == found["back"] == found["refused"] == 0
    assert found["acknowledged"] > 20 and found["files dropped"] > 0
