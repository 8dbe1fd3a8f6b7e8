"""The script that measures the sharding on traces: it reads every format, folds exactly, and prints its figures."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SHIPPED = SCRIPTS.parent / "examples" / "data" / "mooncake_conversation_slice.jsonl"


def _rows(*arguments: object) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPTS / "trace_shards.py"), *map(str, arguments), "--json", "--draws", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_shipped_slice_is_spread_and_a_known_head_is_no_hot_spot() -> None:
    """Goal: the measurement runs for anyone. Method: the trace slice of the repository over 4 shards: its one root is
    in every request, so without memory one shard answers them all, with it none stands out that much."""
    rows = _rows(SHIPPED, "--shards", "4", "--fanout", "2")
    assert [row["memory"] for row in rows] == ["none", "heads"]
    assert {"busiest_messages", "busiest_blocks", "messages_p50", "met", "version", "conditions"} <= rows[0].keys()
    assert rows[0]["messages_p50"] <= 2
    assert rows[1]["messages_mean"] <= rows[0]["messages_mean"] + 0.2
    assert rows[1]["busiest_messages"] < rows[0]["busiest_messages"]


def test_every_format_is_read_and_partial_blocks_are_left_out(tmp_path: Path) -> None:
    """Goal: chains as ucxkv would store them. Method: tiny traces of each kind, packed and not; one shard takes all
    blocks with one message a request; 64 shards as many blocks."""
    lines = {
        "mooncake_a.jsonl": [
            {"hash_ids": [0, 1, 2], "input_length": 1100},
            {"hash_ids": [0, 1, 3], "input_length": 1536},
        ],
        "lmcache.jsonl.xz": [
            {"t": 0, "s": "x", "chars": 9, "hash_ids": [1, 2]},
            {"t": 1, "s": "y", "hash_ids": [1, 3]},
        ],
        "agentic.jsonl": [
            {"trace": 1, "block_size": 64, "tool_tokens": 64, "system_tokens": 64, "models": ["m"]},
            {"s": 1, "t": 0, "runs": [1, 4]},
            {"s": 1, "t": 1, "runs": [1, 3, 7, 2]},
        ],
    }
    for name, content in lines.items():
        path = tmp_path / name
        with lzma.open(path, "wt") if path.suffix == ".xz" else path.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in content)
        rows = _rows(path, "--shards", "1,64", "--fanout", "1")
        assert [row["shards"] for row in rows] == [1, 64, 1, 64]
        assert (rows[0]["busiest_messages"], rows[0]["busiest_blocks"], rows[0]["messages_mean"]) == (1, 1, 1)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    """Goal: a plain message. Method: other JSON; the exit code and the line on stderr."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"a": 1}\n')
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "trace_shards.py"), str(path)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 2
    assert "other.jsonl" in done.stderr


@pytest.mark.parametrize("option", ["--help"])
def test_it_says_what_it_measures(option: str) -> None:
    """Goal: help without a trace. Method: --help names the targets' terms."""
    command = [sys.executable, str(SCRIPTS / "trace_shards.py"), option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0
    assert "busiest" in done.stdout
