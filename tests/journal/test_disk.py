"""The journal on real file systems and in real processes: kill -9, two owners, full and read-only disks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.journal.writer import FILE_BYTES, content
from ucxkv.errors import JournalFailed, SetupError
from ucxkv.journal import Durability, Journal, StopKind

ROOT = Path(__file__).resolve().parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


class _Writer:
    """tests.journal.writer in a process of its own; `committed` grows as it reports."""

    def __init__(self, folder: Path, durability: str) -> None:
        command = [sys.executable, "-m", "tests.journal.writer", str(folder), durability, "16"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        self.committed = 0

    def kill_after(self, count: int) -> int:
        """Let it commit so many more, kill it, and return the largest lsn that it reported."""
        out = self.process.stdout
        assert out is not None
        for _ in range(count):
            line = out.readline()
            assert line, "the writer ended by itself"
            self.committed = max(self.committed, int(line))
        os.kill(self.process.pid, signal.SIGKILL)
        for line in out.read().split(b"\n")[:-1]:
            self.committed = max(self.committed, int(line))
        self.process.wait(30)
        out.close()
        return self.committed


@pytest.mark.parametrize(("durability", "rounds"), [("process", 12), ("power", 12)])
@pytest.mark.timeout(400)
async def test_kill_9_loses_no_acknowledged_record(tmp_path: Path, durability: str, rounds: int) -> None:
    """Goal: LMCache/LMCache#562 (30) and vllm-project/vllm#57303 (37): after kill -9 all that was committed is there,
    nothing accumulates, no stale lock stops the next start. Method: a process with 16 tasks and a snapshot now and then
    is killed at a random moment, in rounds on one folder; every record is compared; names in the folder are counted."""
    rng = random.Random(durability)
    for _ in range(rounds):
        reported = await asyncio.to_thread(_Writer(tmp_path, durability).kill_after, rng.randrange(1, 6000))
        journal, recovered = await Journal.open(
            tmp_path, durability=Durability(durability), identity=b"writer", file_bytes=FILE_BYTES
        )
        assert recovered.last_lsn >= reported
        assert recovered.stopped.kind is not StopKind.DAMAGED
        chunks = list(recovered.snapshot)
        assert chunks == ([b"%d" % recovered.snapshot_lsn, bytes(10_000)] if recovered.snapshot_epoch else [])
        records = list(recovered.records)
        assert [lsn for _, lsn, _ in records] == list(range(recovered.snapshot_lsn + 1, recovered.last_lsn + 1))
        assert all(record == content(lsn) for _, lsn, record in records)
        await journal.aclose()
        names = os.listdir(tmp_path)
        assert sum(name.startswith("snapshot-") for name in names) <= 2
        assert not [name for name in names if name.endswith(".tmp")]
        assert sum(name.startswith("spare-") for name in names) <= 3


async def test_a_second_process_on_the_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    """Goal: vllm-project/vllm#57303 (37): a second live owner is refused. Method: a writer process runs; open here
    names its pid and the way out, and does it no harm; so does a second open in one process; after the end it works."""
    writer = _Writer(tmp_path, "process")
    out = writer.process.stdout
    assert out is not None
    assert out.readline()
    with pytest.raises(
        SetupError, match=rf"process {writer.process.pid} holds.*one process a folder.*fix: stop"
    ) as caught:
        await Journal.open(tmp_path, durability=Durability.PROCESS, identity=b"writer", file_bytes=FILE_BYTES)
    assert str(tmp_path) in str(caught.value)
    await asyncio.to_thread(writer.kill_after, 10)
    journal, _ = await Journal.open(tmp_path, durability=Durability.PROCESS, identity=b"writer", file_bytes=FILE_BYTES)
    with pytest.raises(SetupError, match=f"process {os.getpid()} holds"):
        await Journal.open(tmp_path, durability=Durability.PROCESS, identity=b"writer", file_bytes=FILE_BYTES)
    await journal.aclose()


async def _fill(folder: Path) -> tuple[int, JournalFailed]:
    """(records committed until the journal failed, why)."""
    journal, recovered = await Journal.open(folder, durability=Durability.POWER, file_bytes=1 << 20)
    last = recovered.last_lsn
    try:
        while True:
            lsn = journal.append(1, [bytes(50_000)])
            await journal.committed(lsn)
            last = lsn
    except JournalFailed as exc:
        return last, exc
    finally:
        await journal.aclose()


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ucxkv-test", str(folder)], check=True, timeout=30)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


@needs_root
async def test_a_full_file_system_fails_the_journal_with_the_way_out(tmp_path: Path) -> None:
    """Goal: kvcache-ai/Mooncake#2475 (28): the disk fills to the end. Method: a tmpfs of 5 MiB, files of 1 MiB: each
    file that was made can be filled, then JournalFailed says to free space; with less in it a restart has every
    record."""
    with _mounted(tmp_path / "disk", "size=5m") as disk:
        other = disk / "other"
        other.write_bytes(bytes(1 << 20))
        last, why = await _fill(disk / "journal")
        assert last == 3 * 19  # frames of 13 blocks
        assert "No space left" in str(why)
        assert "free space on that file system" in str(why)
        assert not [name for name in os.listdir(disk / "journal") if name.endswith(".tmp")]
        other.unlink()
        last, _ = await _fill(disk / "journal")
        assert last == 4 * 19
        journal, recovered = await Journal.open(disk / "journal", durability=Durability.POWER, file_bytes=1 << 20)
        assert len(list(recovered.records)) == last
        await journal.aclose()
        with pytest.raises(SetupError, match=r"No space left.*fix: free space"):
            await Journal.open(disk / "second", durability=Durability.POWER, file_bytes=1 << 20)


@needs_root
async def test_a_read_only_file_system_is_a_typed_error(tmp_path: Path) -> None:
    """Goal: an operator reads what to do. Method: a tmpfs mounted read-only; a file where the folder should be."""
    with _mounted(tmp_path / "disk", "ro") as disk:
        with pytest.raises(SetupError, match=r"Read-only file system.*fix: mount that file system read-write"):
            await Journal.open(disk / "journal", durability=Durability.POWER)
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SetupError, match=r"fix: name a folder"):
            await Journal.open(wrong, durability=Durability.POWER)


def _in_child(work: Callable[[Path], str], folder: Path) -> str:
    """What `work(folder)` answers in a fresh process."""

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(work, folder, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        return str(ours.recv())
    finally:
        process.join(30)
        ours.close()


def _answer(work: Callable[[Path], str], folder: Path, pipe: Connection) -> None:
    pipe.send(work(folder))


def _with_small_files(folder: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
    try:
        asyncio.run(_fill(folder))
    except SetupError as exc:
        return f"{sorted(os.listdir(folder))} {exc}"
    return "it worked"


def _as_nobody(folder: Path) -> str:
    os.setgid(65534)
    os.setuid(65534)
    try:
        asyncio.run(_fill(folder))
    except SetupError as exc:
        return str(exc)
    return "it worked"


def test_a_short_write_and_a_limit_of_file_sizes_are_typed_errors(tmp_path: Path) -> None:
    """Goal: short writes are carried on, and what stops them is told. Method: RLIMIT_FSIZE below a file's size: the
    kernel writes a part, then refuses; nothing half-made is left."""
    said = _in_child(_with_small_files, tmp_path)
    assert "File too large" in said
    assert "fix: raise the limit of file sizes" in said
    assert said.startswith("['lock']")


@needs_root
def test_a_folder_of_somebody_else_is_a_typed_error() -> None:
    """Goal: wrong permissions are named. Method: a process without rights opens a folder, then one whose files belong
    to root although the folder does not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ucxkv-test-") as top:  # every user may enter /dev/shm
        Path(top).chmod(0o755)
        locked, shared = Path(top) / "locked", Path(top) / "shared"
        locked.mkdir(0o700)
        shared.mkdir()
        asyncio.run(_small(shared))
        shared.chmod(0o777)
        for folder in (locked, shared):
            said = _in_child(_as_nobody, folder)
            assert "Permission denied" in said
            assert "fix: give the node's user read and write access" in said


async def _small(folder: Path) -> None:
    journal, _ = await Journal.open(folder, durability=Durability.POWER, file_bytes=1 << 20)
    await journal.committed(journal.append(1, [b"record"]))
    await journal.aclose()


async def test_a_restart_is_quick_for_a_long_log(tmp_path: Path) -> None:
    """Goal: 100,000 records come back without reading anything twice as much as needed. Method: they are appended by
    one task in batches; the restart's reads are counted by the kernel: at most three times the log."""
    journal, _ = await Journal.open(tmp_path, durability=Durability.PROCESS, file_bytes=16 << 20)
    for _ in range(100):
        last = journal.append(1, [bytes(100)] * 1000)
    await journal.committed(last)
    await journal.aclose()
    before = _read_bytes()
    start = time.perf_counter()
    journal, recovered = await Journal.open(tmp_path, durability=Durability.PROCESS, file_bytes=16 << 20)
    assert sum(1 for _ in recovered.records) == 100_000
    print(f"100,000 records in {time.perf_counter() - start:.2f} s")
    assert _read_bytes() - before <= 3 * (16 << 20)
    await journal.aclose()


def _read_bytes() -> int:
    """Bytes that this process has read, from the disk or its cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
