"""`ucxkv simulate` as its users meet it: JSON, tables, plots, cluster files, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.traces import rows, write
from ucxkv.cli.app import run
from ucxkv.cli.described import parse_capacity, read_cluster
from ucxkv.errors import SetupError, UsageError

KEYS = {"policy", "capacity", "hit_rate", "saved_prefill_s", "requests", "blocks", "ttft_p50_s", "read_bytes"}
DESCRIBED = """
[model]
name = "mine"
kv_bytes_per_token = 131072
prefill_tokens_per_s = 20000
prefill_slowdown_tokens = 100000

[cluster]
nodes = 3
placement = "shards"
link = "12.5GB"

[[tier]]
name = "host"
capacity = "2GiB"
bandwidth = "40GB"
latency_us = 20

[[tier]]
name = "nvme"
capacity = 0.4
bandwidth = "6GB"
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "mooncake_made.jsonl", rows(150))


def objects(capfd: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert run(["simulate", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_json_is_one_object_a_policy_and_capacity(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Goal: the contract for programs. Method: a sweep of two capacities and four policies; keys, order, Belady's
    bound, and that more room never hurts Belady."""
    found = objects(capfd, "--trace", trace, "--capacity", "0.05,0.3", "--json")
    names = ["lru", "s3fifo", "tuc", "belady"]
    assert [(row["capacity"], row["policy"]) for row in found] == [(c, p) for c in (0.05, 0.3) for p in names]
    assert all(row.keys() >= KEYS and row["requests"] == 150 for row in found)
    for part in (found[:4], found[4:]):
        assert max(row["hit_rate"] for row in part) == part[3]["hit_rate"] > 0
    assert found[3]["hit_rate"] <= found[7]["hit_rate"]


def test_a_described_cluster_has_its_tiers_and_nodes(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Goal: what a file says is simulated. Method: two tiers on three nodes, by file alone and with flags over it."""
    path = tmp_path / "cluster.toml"
    path.write_text(DESCRIBED)
    (row,) = objects(capfd, "--trace", trace, "--policy", "tuc", "--cluster", path, "--load", "split", "--json")
    assert (row["model"], row["nodes"], row["placement"], row["load"]) == ("mine", 3, "shards", "split")
    assert row["capacity_blocks"]["host"] == (2 << 30) // row["block_bytes"]
    assert row["read_bytes"].keys() == {"host", "nvme"}
    (row,) = objects(
        capfd, "--trace", trace, "--policy", "lru", "--cluster", path, "--model", "70b", "--nodes", "2",
        "--placement", "chain", "--capacity", "1GiB", "--json",
    )  # fmt: skip
    assert (row["model"], row["nodes"], row["placement"], row["capacity"]) == ("70b", 2, "chain", "1GiB")


def test_people_get_a_table_and_a_plot(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Goal: something to read. Method: the table names policies and the trace; a picture and a page are written."""
    for name in ("a.png", "a.html"):
        arguments = ["--trace", str(trace), "--policy", "lru,belady", "--capacity", "0.1,0.5", "--plot"]
        assert run(["simulate", *arguments, str(tmp_path / name)]) == 0
        shown = capfd.readouterr().out
        assert "belady" in shown and "made: 150 requests" in shown
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "fifo"], "fifo"),
        (["--capacity", "1.5"], "1.5"),
        (["--capacity", "0"], "capacity '0'"),
        (["--capacity", "5 apples"], "apples"),
        (["--model", "7b"], "7b"),
        (["--load", "never"], "never"),
        (["--placement", "here"], "here"),
        (["--plot", "a.svg"], "a.svg"),
        (["--cluster", "none.toml"], "none.toml"),
        (["--sessions", "3"], "names no sessions"),
        (["--hash-tokens", "100"], "line 1"),
    ],
)
def test_an_error_is_one_line(trace: Path, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Goal: no traceback. Method: one wrong argument at a time; exit code 2, the cause on stderr, nothing on stdout."""
    assert run(["simulate", "--trace", str(trace), *arguments]) == 2
    written = capfd.readouterr()
    assert said in written.err and "Traceback" not in written.err
    assert written.out == ""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("nodes = 3", "knots = 3", "did you mean 'nodes'"),
        ("nodes = 3", "nodes = 0", "0 nodes"),
        ('placement = "shards"', 'placement = "near"', "near"),
        ('bandwidth = "6GB"', "", "bandwidth"),
        ('bandwidth = "6GB"', 'bandwidth = "0GB"', "bandwidth"),
        ("capacity = 0.4", "capacity = 1.5", "capacity '1.5'"),
        ('name = "nvme"', 'name = "host"', "two tiers"),
        ("prefill_tokens_per_s = 20000", "", "prefill_tokens_per_s"),
        ("prefill_tokens_per_s = 20000", "prefill_tokens_per_s = -1", "prefill_tokens_per_s"),
        ("nodes = 3", "nodes = 1e17", "nodes"),
        ("kv_bytes_per_token = 131072", "kv_bytes_per_token = 1e17", "kv_bytes_per_token"),
        ("[model]", "[model", "no TOML"),
        ("[[tier]]", "[[teir]]", "teir"),
    ],
)
def test_a_wrong_cluster_file_is_named_with_its_key(tmp_path: Path, before: str, after: str, said: str) -> None:
    """Goal: a misspelt key never means its default. Method: one change to a good file at a time."""
    path = tmp_path / "cluster.toml"
    path.write_text(DESCRIBED.replace(before, after))
    with pytest.raises(SetupError, match=said) as caught:
        read_cluster(path)
    assert "cluster.toml" in str(caught.value)


def test_capacities_of_a_cluster_file_are_printed_as_sizes(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Goal: the table says 2 GiB, no long number. Method: a cluster file's first tier, without --capacity."""
    path = tmp_path / "cluster.toml"
    path.write_text(DESCRIBED)
    assert run(["simulate", "--trace", str(trace), "--policy", "lru", "--cluster", str(path)]) == 0
    out = capfd.readouterr().out
    assert "2 GiB" in out or "2.00 GiB" in out
    assert str(2 << 30) not in out


def test_capacities_are_shares_or_sizes() -> None:
    """Goal: one option for both. Method: a share, a size, and what is neither."""
    assert parse_capacity("0.05") == 0.05
    assert parse_capacity("64GiB") == 64 << 30
    with pytest.raises(UsageError):
        parse_capacity("nan")
