"""`ucxkv topo` on recorded machines and on this one: the matrix, the choices, JSON, recording, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.transport.topology import recorded
from ucxkv.cli.app import run


def _root(name: str) -> str:
    return str(recorded.MACHINES / f"{name}.json")


def test_a_dgx_is_shown_as_nvidia_smi_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no cell is cut, however narrow the terminal; choices and legend follow. Method: its output as text."""
    assert run(["topo", "--root", _root("dgx_h100")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [*(f"gpu{i}" for i in range(8)), *(f"mlx5_{i}" for i in range(12)), "eno3", "NUMA"]
    assert lines[1].split() == ["gpu0", "X", *["NV18"] * 7, "PXB", *["NODE"] * 5, *["SYS"] * 6, "NODE", "0"]
    text = "\n".join(lines)
    assert "near gpu5   mlx5_9:1" in text
    assert "mlx5_0:1   InfiniBand, ACTIVE, 400 Gb/sec (4X NDR), GID 0 (IB), ibp24s0" in text
    assert "NV#        # NVLinks between two GPUs" in text
    assert "PHB " not in text  # the legend holds what is shown only


def test_near_and_far_differ_in_colour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the eye finds what is near. Method: the dual-socket matrix on a terminal with colours; and without them."""
    green, red = "\x1b[32m", "\x1b[31m"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run(["topo", "--root", _root("dual_socket")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert f"{green}PIX" in rows[1] and f"{red}SYS" in rows[1] and f"{red}PIX" not in rows[1]
    described = next(row for row in rows if "ens3f0np0" in row)
    assert described.index("\x1b[0m") < described.index("Ethernet")  # the name alone is bold
    monkeypatch.delenv("FORCE_COLOR")
    assert run(["topo", "--root", _root("dual_socket")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [*recorded.NAMES, ""])
def test_json_holds_the_whole_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: one object, for every machine and this one. Method: its keys, matrix and choices."""
    assert run(["topo", "--json", *(["--root", _root(name)] if name else [])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"numa", "gpus", "rdma", "interfaces", "matrix", "choices", "node_placement"} <= set(found)
    assert all(found["matrix"][device][device] == "X" for device in found["matrix"])
    assert len(found["choices"]) == len(found["gpus"]) + sum(bool(node["cpus"]) for node in found["numa"])
    assert all(choice["why"] for choice in found["choices"])


def test_max_rails_is_heeded(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the option reaches the choice. Method: one and four rails near a socket of the DGX."""
    for rails in (1, 4):
        assert run(["topo", "--json", "--root", _root("dgx_h100"), "--max-rails", str(rails)]) == 0
        choices = {choice["near"]: choice for choice in json.loads(capsys.readouterr().out)["choices"]}
        assert len(choices["numa0"]["devices"]) == rails


def test_recording_writes_a_file_that_root_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: users send us theirs. Method: record a recorded machine and this one, show them again."""
    for index, more in enumerate(([], ["--root", _root("dual_socket")])):
        folder = tmp_path / str(index)
        assert run(["topo", "--record", str(folder), *more]) == 0
        assert str(folder / "topology.json") in capsys.readouterr().out
        assert run(["topo", "--root", str(folder)]) == 0
        shown = capsys.readouterr().out
    assert "near numa0  mlx5_0:1  SYS from numa0" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--root", "/does/not/exist"], "/does/not/exist"),
        (["--root", "pyproject.toml"], "pyproject.toml"),
        (["--record", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_an_error_is_one_line_that_names_its_cause(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: no traceback. Method: wrong folders; exit code 2, the path on stderr, nothing on stdout."""
    assert run(["topo", *arguments]) == 2
    written = capsys.readouterr()
    assert said in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""
