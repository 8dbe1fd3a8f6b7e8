"""The scripts that a new user runs first do what they say: short runs of the quickstart and of a benchmark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def _script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def test_the_quickstart_reads_every_block_that_it_wrote() -> None:
    """Goal: the README's first command is right. Method: eight requests of the trace; counts, bytes, nothing left."""
    done = _script("quickstart.py", "--requests", "8", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    writer, reader = said["writer"], said["reader"]
    assert said["ok"]
    assert said["requests"] == 8
    assert writer["put"] == said["distinct_blocks"]
    assert reader["hits"] == reader["asked"] == writer["asked"] > 0
    assert reader["misses"] == reader["wrong"] == writer["wrong"] == 0
    assert reader["verified_bytes"] == reader["hits"] * said["block_bytes"]
    assert said["left_behind"] == said["nodes_killed"] == []


def test_an_interrupted_quickstart_stops_its_processes() -> None:
    """Goal: Ctrl-C leaves nothing running. Method: SIGINT to its process group while it replays; its children end."""
    command = [sys.executable, str(SCRIPTS / "quickstart.py"), "--requests", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        assert process.stdout is not None
        said = b""
        while b"quickstart-2" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        pids = [int(word) for word in said.decode().split() if word.isdigit()]
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 130
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_benchmark_prints_its_limit_and_its_conditions() -> None:
    """Goal: the contract of every benchmark's JSON. Method: the smallest run of bench_get, each line's fields."""
    done = _script("bench_get.py", "--quick", "--json", "--sizes", "4KiB", "--host-bytes", "128MiB", "--batch", "8")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["op"] for row in rows] == ["get", "get_many"]
    wanted = {"bench", "op", "path", "bytes", "batch", "concurrency", "p50_us", "p99_us", "gbps", "cpu_s_per_gb"}
    wanted |= {"limit_name", "limit_us", "limit_gbps", "ratio", "spread", "verified", "version", "conditions"}
    for row in rows:
        assert wanted <= row.keys()
        assert row["verified"] is True
        assert {"cores", "cpu", "kernel", "other_cpus", "last_level_cache"} <= row["conditions"].keys()
