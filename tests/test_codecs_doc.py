"""What docs/codecs.md promises can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "codecs.md").read_text()


def test_the_example_of_the_page_runs() -> None:
    """Goal: a reader's first block is encoded and back. Method: the Python block is run as it stands; it saves what the
    page's table says of float16 in blocks of 16 tokens.
    """
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.78 times smaller")
    assert "| int8 | float16 | 16 | 368,640 | 1.78x |" in TEXT
