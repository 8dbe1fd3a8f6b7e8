"""`ucxkv object`: what a shell script meets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness import NodeProcess


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A node's."""
    with NodeProcess("object-cli") as node:
        yield node.address


def run(address: str, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """One command, its output in a pipe with a buffer before it as anywhere."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "ucxkv", "object", *arguments, "--address", address]
    return subprocess.run(words, input=data, capture_output=True, timeout=60, env=env)


def test_objects_go_in_and_out_through_the_command(address: str, tmp_path: Path) -> None:
    """Goal: put, get, stat, list and delete agree. Method: bytes by pipe and file, an expectation that holds, one that
    does not, and one of absence."""
    done = run(address, "put", "docs/a", "--json", data=b"one")
    first = json.loads(done.stdout)
    assert done.returncode == 0 and first["bytes"] == 3 and first["version"].startswith("1-")
    file = tmp_path / "value"
    file.write_bytes(bytes(range(256)) * 10_000)
    assert run(address, "put", "docs/a", str(file), "--if-version", first["version"]).returncode == 0
    done = run(address, "put", "docs/a", "--if-version", first["version"], data=b"late")
    assert done.returncode == 1 and b"version 2-" in done.stderr and done.stdout == b""
    assert run(address, "put", "docs/a", "--if-version", "absent", data=b"late").returncode == 1
    assert run(address, "get", "docs/a").stdout == file.read_bytes()
    assert run(address, "get", "docs/a", "-o", str(tmp_path / "copy")).returncode == 0
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    info = json.loads(run(address, "stat", "docs/a", "--json").stdout)
    assert (info["kind"], info["bytes"], info["shape"], info["durable"]) == ("bytes", 2_560_000, [], False)
    run(address, "put", "other", data=b"x")
    listed = [json.loads(line) for line in run(address, "list", "docs/", "--json").stdout.splitlines()]
    assert listed == [info] and b"docs/a  2-" in run(address, "list").stdout
    assert run(address, "sweep").stdout == b"0 values removed\n"
    assert run(address, "delete", "docs/a", "--if-version", first["version"]).returncode == 1
    assert run(address, "delete", "docs/a").stdout == b"docs/a DELETED\n"
    assert [run(address, word, "docs/a").returncode for word in ("delete", "get", "stat")] == [1, 1, 1]


def test_arrays_go_in_and_out_as_npy_files(address: str) -> None:
    """Goal: numpy users need no program. Method: a .npy file in, the same array out; other files are refused."""
    value = np.random.default_rng(1).standard_normal((30, 40)).astype("f4")
    file = io.BytesIO()
    np.save(file, value)
    assert run(address, "put", "array", "--npy", data=file.getvalue()).returncode == 0
    info = json.loads(run(address, "stat", "array", "--json").stdout)
    assert (info["kind"], info["dtype"], info["shape"]) == ("numpy", "<f4", [30, 40])
    assert np.array_equal(np.load(io.BytesIO(run(address, "get", "array", "--npy").stdout)), value)
    assert run(address, "get", "array").stdout == value.tobytes()
    done = run(address, "put", "array", "--npy", data=b"no such file")
    assert done.returncode == 2 and b"no .npy file" in done.stderr and b"Traceback" not in done.stderr
    run(address, "put", "array", data=b"bytes")
    assert run(address, "get", "array", "--npy").returncode == 2


@pytest.mark.parametrize("value", [np.float32(3).reshape(()), np.array(["2026-12-01"], "M8[s]"), np.eye(3, order="F")])
def test_arrays_of_any_plain_kind_keep_their_shape(address: str, value: np.ndarray) -> None:
    """Goal: what comes back is what went in. Method: no axis, a type without a buffer format, Fortran order."""
    file = io.BytesIO()
    np.save(file, value)
    done = run(address, "put", "any", "--npy", "--json", data=file.getvalue())
    assert (done.returncode, done.stderr) == (0, b"") and json.loads(done.stdout)["bytes"] == value.nbytes
    found = np.load(io.BytesIO(run(address, "get", "any", "--npy").stdout))
    assert (found.dtype, found.shape) == (value.dtype, value.shape) and np.array_equal(found, value)


def _claims(shape: tuple[int, ...]) -> bytes:
    """The head of a .npy file of that shape, and no array."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize("data", [b"PK\x03\x04 cut", b"PK\x05\x06" + bytes(18), _claims((1 << 50,)), b"\x93NUMPY"])
def test_a_broken_npy_file_is_one_line_and_exit_code_2(address: str, data: bytes) -> None:
    """Goal: no traceback. Method: archives that are cut or empty, an array that no memory holds, half a head."""
    done = run(address, "put", "broken", "--npy", data=data)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == b""


@pytest.mark.parametrize("older", ["nan", "inf", "-1"])
def test_a_sweep_of_no_age_is_exit_code_2(address: str, older: str) -> None:
    """Goal: no traceback, and nothing swept. Method: ages that are none."""
    done = run(address, "sweep", "--older-than", older)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and done.stdout == b""


def test_a_file_that_cannot_be_written_is_exit_code_2(address: str) -> None:
    """Method: a folder that is not there."""
    assert run(address, "put", "out", data=b"x").returncode == 0
    done = run(address, "get", "out", "-o", "/does/not/exist")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("put", "", "-"), ("get", ""), ("put", "x", "/does/not/exist"), ("put", "x", "--if-version", "7")]
)
def test_a_wrong_call_is_one_line_and_exit_code_2(address: str, arguments: tuple[str, ...]) -> None:
    """Goal: no traceback. Method: names, files and versions that are none."""
    done = run(address, *arguments, data=b"x")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == b""
