"""What README.md promises can be run: its example, and every script and document that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_of_the_readme_runs() -> None:
    """Goal: a reader's first twenty lines work. Method: the Python block is run as it stands; its output says equal."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "4 blocks stored" in done.stdout.splitlines()
    assert "equal" in done.stdout


def test_every_file_that_the_readme_names_exists() -> None:
    """Goal: no dead pointer. Method: words in backquotes and commands that look like paths are looked up."""
    named = set(re.findall(r"(?:scripts|examples|docs|ucxkv|tests|tiers|transport)/[\w./-]*\w", README))
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
