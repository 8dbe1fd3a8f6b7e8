"""What docs/sessions.md promises can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ucxkv.client.loadcosts import ARRIVE, BRING
from ucxkv.client.results import PathKind

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "sessions.md").read_text()


def test_the_example_of_the_page_runs() -> None:
    """Goal: a reader's first loop works. Method: the Python block is run as it stands; its cache is whole."""
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "blocks" in line]
    assert said == ["40 blocks are in memory, 0 values came from disk", "40 blocks, whole"]


def test_the_first_guesses_of_the_page_are_those_of_the_code() -> None:
    """Goal: a table that is true. Method: its rows against the constants."""
    rows = {
        "memory, mapped": ARRIVE[PathKind.MAPPED],
        "memory, one-sided": ARRIVE[PathKind.RMA],
        "memory, by message": ARRIVE[PathKind.MESSAGE],
        "nvme to memory, besides": BRING[2],
        "gpu to memory, besides": BRING[0],
    }
    for name, cost in rows.items():
        assert f"| from {name} | {cost.latency_s * 1e6:.0f} us | {cost.bandwidth / 1e9:.0f} GB/s |" in TEXT
