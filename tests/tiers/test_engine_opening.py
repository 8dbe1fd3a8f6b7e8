"""Which io engine is opened: found by doing, said once, refused clearly, also where the kernel refuses io_uring."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers.transfers import descriptors_open, threads_alive, uring_refused
from ucxkv.tiers.engines import Probe, open_engine, probe_engine
from ucxkv.tiers.io import IoFailed

ROOT = Path(__file__).resolve().parent.parent.parent
WITHOUT = [sys.executable, str(ROOT / "scripts" / "without_io_uring.py")]

OPEN_ALL = """
import asyncio, json, os
from ucxkv.tiers.base import SetupFailed
from ucxkv.tiers.engines import open_engine
from ucxkv.tiers.io import OP_DTYPE
import numpy as np

async def main():
    said, refused = [], ""
    engine = open_engine("auto", on_probe=said.append)
    try:
        await open_engine("io_uring").aclose()
    except SetupFailed as exc:
        refused = str(exc)
    data, back = np.arange(9000, dtype=np.uint32), np.zeros(9000, np.uint32)
    file = engine.attach(os.memfd_create("data"), direct=False)
    rows = [(array.ctypes.data, 0, array.nbytes, file, kind) for array, kind in ((data, 1), (back, 0))]
    moved = [int((await engine.submit(np.array([row], OP_DTYPE)))[0]) for row in rows]
    await engine.sync(file)
    await engine.aclose()
    print(json.dumps({"name": engine.name, "said": [[each.name, each.why] for each in said], "refused": refused,
                      "moved": moved, "equal": bool((data == back).all())}))

asyncio.run(main())
"""


def test_auto_takes_io_uring_exactly_where_it_works(tmp_path: Path) -> None:
    """Goal: no fallback without a reason. Method: a plain io_uring_setup beside the probe; nothing is left behind."""
    before = (descriptors_open(), threads_alive(), list(tmp_path.iterdir()))
    found = probe_engine(tmp_path)
    assert (found.name == "io_uring") == (not uring_refused())
    assert (found.why == "") == (found.name == "io_uring")
    assert (descriptors_open(), threads_alive(), list(tmp_path.iterdir())) == before


async def test_the_choice_is_told_once() -> None:
    """Goal: one line for the log. Method: each way to open, with a list in place of a logger."""
    for which in ("auto", "threads"):
        said: list[Probe] = []
        engine = open_engine(which, on_probe=said.append)
        assert [each.name for each in said] == [engine.name]
        assert (said[0].why == "") == (engine.name == "io_uring")
        await engine.aclose()


def test_a_folder_that_cannot_be_used_does_not_decide(tmp_path: Path) -> None:
    """Goal: the probe judges io_uring, not the folder. Method: a folder that is away gives the same answer."""
    assert probe_engine(tmp_path / "away").name == probe_engine(None).name


@pytest.mark.parametrize("wrong", [{"max_ops": 0}, {"max_ops": 1 << 21}, {"max_inflight_bytes": 0}, {"which": "aio"}])
def test_limits_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    """Goal: no engine with nonsense inside. Method: each limit out of range, an unknown name."""
    before = descriptors_open()
    with pytest.raises(ValueError, match=r"cannot be|is none of"):
        open_engine(**wrong)  # type: ignore[arg-type]
    assert descriptors_open() == before


def test_without_descriptors_the_error_has_its_number() -> None:
    """Goal: a process out of descriptors is told so. Method: the limit of open files at what is open already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(IoFailed) as caught:
            open_engine("threads")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", ["EPERM", "ENOSYS"])
def test_where_io_uring_is_refused_threads_serve_and_the_reason_is_said(code: str) -> None:
    """Goal: the fallback is a first-class way. Method: a process under a filter as Docker's, a whole round in it."""
    done = subprocess.run(
        [*WITHOUT, "--errno", code, "--", sys.executable, "-c", OPEN_ALL],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["name"] == "threads" and told["equal"] and told["moved"] == [36_000, 36_000]
    (name, why), number = told["said"][0], getattr(errno, code)
    assert len(told["said"]) == 1 and name == "threads" and f"(errno {number})" in why
    assert ("seccomp" if code == "EPERM" else "older than 5.6") in why
    assert why in told["refused"] and "fix: run with a seccomp profile that allows io_uring" in told["refused"]


@pytest.mark.timeout(500)
def test_the_engines_contract_holds_where_io_uring_is_refused() -> None:
    """Goal: a container has the same promises. Method: the contract's own tests in a process under that filter."""
    tests = ["contract", "lifetime", "syncs", "model"]
    files = [str(ROOT / "tests" / "tiers" / f"test_engine_{each}.py") for each in tests]
    command = [*WITHOUT, "--", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "no io_uring here: Operation not permitted" in done.stdout
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 30


SEVERAL = """
import asyncio, json, os, resource
from ucxkv.tiers.base import TierError
from ucxkv.tiers.engines import open_engine

async def main():
    engines, said = [], []
    for _ in range(6):
        engines.append(open_engine("auto", on_probe=said.append))
    names = [engine.name for engine in engines]
    for engine in engines:
        await engine.aclose()
    print(json.dumps([names, [each.name for each in said], [each.why for each in said if each.name == "threads"]]))

async def nothing():
    await open_engine("threads").aclose()

asyncio.run(nothing())  # everything is imported before the rights go
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
asyncio.run(main())
"""


def test_drives_beyond_the_limit_of_locked_memory_get_threads() -> None:
    """Goal: every drive gets an engine and the reason is said. Method: six engines at a time under 64 KiB, without
    root; on kernels that do not count rings all six are io_uring."""
    done = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names, said, whys = json.loads(done.stdout)
    assert len(names) == 6 and said == names
    assert all("ulimit -l" in why or uring_refused() for why in whys)


LITTLE_LOCKED = """
import asyncio, json, os, resource
import numpy as np
from ucxkv.tiers.engines import open_engine
from ucxkv.tiers.io import OP_DTYPE

async def main():
    data, back = np.full(8 << 20, 7, np.uint8), np.zeros(8 << 20, np.uint8)
    engine = open_engine("WHICH")
    registered = [engine.register(array.ctypes.data, array.nbytes) for array in (data, back)]
    file = engine.attach(os.memfd_create("data"), direct=False)
    results = []
    for array, kind in ((data, 1), (back, 0)):
        rows = [(array.ctypes.data + at, at, 1 << 20, file, kind) for at in range(0, 8 << 20, 1 << 20)]
        results += (await engine.submit(np.array(rows, OP_DTYPE))).tolist()
    for array in (data, back):
        engine.unregister(array.ctypes.data)
    await engine.aclose()
    print(json.dumps([engine.name, registered, set(results) == {1 << 20}, bool((data == back).all())]))

async def nothing():
    await open_engine("WHICH").aclose()

asyncio.run(nothing())  # everything is imported before the rights go
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
asyncio.run(main())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["auto", "threads"])
def test_64_kib_of_locked_memory_are_enough(which: str) -> None:
    """Goal: memory that cannot be pinned costs speed only. Method: 8 MiB to register under that limit, without root."""
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_LOCKED.replace("WHICH", which)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    name, registered, whole, equal = json.loads(done.stdout)
    assert name == ("threads" if which == "threads" or uring_refused() else "io_uring")
    assert registered == [False, False] and whole and equal
