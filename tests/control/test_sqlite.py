"""The SQLite engine's own traps: files that are not what they should be, other processes, reboots, a held lock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.control.processes import holder
from tests.control.test_contract import absent, put, take
from tests.harness import open_files, wait_until
from ucxkv import errors
from ucxkv.control import ChangeKind, Conflict, SystemClock, open_control, sqlite_file
from ucxkv.control.sqlite import SqliteControl
from ucxkv.control.sqlite_file import SqliteFile


def url_of(path: Path) -> str:
    return f"sqlite://{path}"


async def refused(path: Path) -> errors.SetupError:
    with pytest.raises(errors.SetupError) as caught:
        await open_control(url_of(path))
    assert str(path) in str(caught.value)
    assert caught.value.fix or caught.value.needed
    return caught.value


@pytest.mark.parametrize(
    "url",
    ["", "redis://h:1", "sqlite://relative.db", "sqlite:///", "sqlite:///dir/", "etcd://h:2379", "etcd://h/c",
     "etcd://h:0/c", "etcd://h:99999/c", "etcd://h:2379,/c", "etcd://h:2379/c/d", "etcd://u@h:2379/c", "etcd:///c"],
)  # fmt: skip
async def test_a_url_of_no_engine_is_refused_with_an_example(url: str) -> None:
    """Goal: a typo is told, not guessed at. Method: URLs that are nearly right."""
    with pytest.raises(errors.SetupError, match=r"etcd://host:2379\[,host:2379\]/cluster-name"):
        await open_control(url)


async def test_what_is_set_survives_closing_and_another_process_sees_it(tmp_path: Path) -> None:
    """Goal: one file, many processes. Method: set, close, open; a fresh interpreter reads it with plain sqlite3."""
    path = tmp_path / "c.db"
    plane = await open_control(url_of(path))
    entry = await put(plane, "k", b"v")
    await plane.aclose()
    again = await open_control(url_of(path))
    assert await again.get("k") == entry
    assert (await put(again, "k2", b"")).revision > entry.revision
    await again.aclose()
    script = f"import sqlite3; print(sqlite3.connect({str(path)!r}).execute('select count(*) from entries').fetchone())"
    command = [sys.executable, "-c", script]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "(2,)"
    assert path.stat().st_mode & 0o077 == 0


async def test_files_that_are_none_of_ours_are_refused_and_left_alone(tmp_path: Path) -> None:
    """Goal: SetupError that names the fix, nothing overwritten. Method: another program's database, text, a folder, a
    missing folder, a damaged page, a newer version."""
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as db:
        db.execute("create table t (x)")
        db.commit()
    text = tmp_path / "text.db"
    text.write_bytes(b"this is no database at all, but long enough to be looked at as one" * 100)
    before = other.read_bytes(), text.read_bytes()
    assert "another program" in str(await refused(other))
    assert "damaged" in str(await refused(text))
    with contextlib.closing(sqlite3.connect(other)) as db:
        assert db.execute("select name from sqlite_master").fetchall() == [("t",)]
    assert text.read_bytes() == before[1]
    await refused(tmp_path)
    await refused(tmp_path / "missing" / "c.db")

    newer = tmp_path / "newer.db"
    SqliteFile(newer).close()
    with contextlib.closing(sqlite3.connect(newer)) as db:
        db.execute(f"pragma user_version = {sqlite_file.SCHEMA_VERSION + 1}")
    error = await refused(newer)
    assert f"version {sqlite_file.SCHEMA_VERSION + 1}" in str(error) and "upgrade" in error.fix

    torn = tmp_path / "torn.db"
    plane = await open_control(url_of(torn))
    for i in range(200):
        await put(plane, f"k/{i}", os.urandom(200))
    await plane.aclose()
    data = bytearray(torn.read_bytes())
    data[4096 * 4 : 4096 * 8] = os.urandom(4096 * 4)
    torn.write_bytes(data)
    assert "damaged" in str(await refused(torn))


_AS_NOBODY = """
import os, pathlib, sys
from ucxkv.control.sqlite_file import SqliteFile
from ucxkv.errors import SetupError
os.setgid(65534)
os.setuid(65534)
try:
    SqliteFile(pathlib.Path(sys.argv[1]))
except SetupError as exc:
    print("refused", exc)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user who may not write")
def test_a_read_only_file_is_refused() -> None:
    """Goal: SetupError naming the fix. Method: root opens everything, so a child gives up its rights first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.db"
        SqliteFile(path).close()
        path.chmod(0o644)
        path.parent.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", _AS_NOBODY, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("refused") and "chown" in done.stdout, (done.stdout, done.stderr)


async def test_a_replaced_file_is_refused_not_written_on(tmp_path: Path) -> None:
    """Goal: no two histories. Method: the file is moved away under an open handle; changes and leases raise."""
    path = tmp_path / "c.db"
    plane = await open_control(url_of(path))
    entry = await put(plane, "k", b"v")
    path.rename(tmp_path / "moved.db")
    for _ in range(2):
        with pytest.raises(errors.SetupError, match="replaced"):
            await plane.compare_and_set("k", entry.revision, b"w")
        path.touch()
    with pytest.raises(errors.SetupError, match="replaced"):
        await plane.lease(1)
    await plane.aclose()


async def test_a_reboot_ends_every_lease(tmp_path: Path) -> None:
    """Goal: no lease outlives its granter's clock. Method: the rows are given another boot's id and an end far ahead;
    the key is gone at the next look, and the watch says so."""
    path = tmp_path / "c.db"
    plane = await open_control(url_of(path))
    lease = await plane.lease(1000)
    entry = await plane.compare_and_set("k", 0, b"", lease=lease)
    assert entry is not None
    changes = plane.watch("", entry.revision)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("update leases set boot = 'of another boot', until_ns = until_ns * 2")
        db.commit()
    assert (await take(changes, 1))[0].kind is ChangeKind.DELETE
    assert await plane.get("k") is None
    await changes.aclose()
    await plane.aclose()


async def test_a_lock_held_by_a_stopped_process_is_unavailable_and_does_not_block_the_loop(tmp_path: Path) -> None:
    """Goal: nothing hangs. Method: a foreign connection holds the write lock; reads go on, changes end in Unavailable
    with nothing changed, the loop ticks meanwhile; then all works again."""
    path = tmp_path / "c.db"
    plane = await open_control(url_of(path))
    entry = await put(plane, "k", b"v")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("begin immediate")
        assert await plane.get("k") == entry
        with pytest.raises(errors.Unavailable, match="another process holds"):
            await plane.compare_and_set("k", entry.revision, b"w")
        db.execute("rollback")
    assert ticks > 20
    ticking.cancel()
    assert await plane.get("k") == entry
    assert await plane.compare_and_set("k", entry.revision, b"w") is not None
    await plane.aclose()


async def test_calls_behind_a_late_one_are_withdrawn(tmp_path: Path) -> None:
    """Goal: a change that was not begun when its deadline passed never happens; one that was is of unknown outcome.
    Method: deadlines shorter than the wait for the lock."""
    path = tmp_path / "c.db"
    plane = await SqliteControl.open(path, SystemClock(), timeout_s=0.5)
    entry = await put(plane, "k", b"v")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("begin immediate")
        first = asyncio.create_task(plane.compare_and_set("k", entry.revision, b"first"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(plane.compare_and_set("k2", 0, b"second"))
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        db.execute("rollback")
    assert [type(outcome).__name__ for outcome in outcomes] == ["OutcomeUnknown", "Unavailable"]

    async def settled() -> bool:
        with contextlib.suppress(errors.Unavailable):
            found = await plane.get("k")
            return found is not None and found.value == b"first"
        return False

    await wait_until(settled, "the change that had begun")
    assert await plane.get("k2") is None
    await plane.aclose()


async def test_history_is_bounded_and_a_watch_that_lags_gets_a_resync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the file does not grow for ever. Method: a history of 64; a watch from the start of 700 changes."""
    monkeypatch.setattr(sqlite_file, "HISTORY", 64)
    path = tmp_path / "c.db"
    plane = await open_control(url_of(path))
    revision = 0
    for i in range(700):
        entry = await plane.compare_and_set("k", revision, str(i).encode())
        assert entry is not None
        revision = entry.revision
    changes = plane.watch("", 1)
    assert (await take(changes, 1))[0].kind is ChangeKind.RESYNC
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("select count(*) from changes").fetchone()[0] < 64 + 256
    await changes.aclose()
    await plane.aclose()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_key_of_a_killed_or_stopped_process_goes(tmp_path: Path, end: signal.Signals) -> None:
    """Goal: lease life cycle across processes. Method: another process holds a key under a lease for three times its
    time; killed or stopped, the key goes when the lease is over; a stopped one that continues knows that it lost."""
    url = url_of(tmp_path / "c.db")
    plane = await open_control(url)
    with holder(url, "held", ttl_s=0.6) as process:
        entry = await plane.get("held")
        assert entry is not None
        await asyncio.sleep(1.8)
        assert await plane.get("held") == entry
        with pytest.raises(Conflict):
            await plane.compare_and_set("held", 0, b"mine")
        process.send_signal(end)
        await absent(plane, "held")
        mine = await plane.compare_and_set("held", 0, b"mine")
        if end is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert (await asyncio.to_thread(process.stdout.readline)).startswith("lost")
        assert await plane.get("held") == mine
    await plane.aclose()


async def test_opening_and_closing_leaves_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    """Goal: no leak, also when opening fails. Method: descriptors and threads before and after."""
    await (await open_control(url_of(tmp_path / "c.db"))).aclose()
    await refused(tmp_path)
    before, threads = open_files(), threading.active_count()
    for _ in range(5):
        await (await open_control(url_of(tmp_path / "c.db"))).aclose()
        await refused(tmp_path)
    await wait_until(lambda: threading.active_count() <= threads, "threads ended")
    assert open_files() == before


def test_a_second_connection_of_a_process_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """Goal: one file, not two: a process's watch opens the file anew, and POSIX locks end with any close. Method: two
    connections here; other processes open, look and leave, the last of whom would take the log away if it thought
    itself alone; then everybody sees everybody's changes.
    """
    path = tmp_path / "c.db"
    look = (
        "import sys; from pathlib import Path; from ucxkv.control.sqlite_file import SqliteFile\n"
        "f = SqliteFile(Path(sys.argv[1])); print(len(f.list('')[0])); f.close()"
    )

    def others_see() -> int:
        seen = subprocess.run([sys.executable, "-c", look, path], capture_output=True, text=True, check=True)
        return int(seen.stdout)

    first, second = SqliteFile(path), SqliteFile(path)
    try:
        for i in range(3):
            first.compare_and_set(f"first/{i}", 0, b"v", 0)
            assert others_see() == 2 * i + 1
            second.compare_and_set(f"second/{i}", 0, b"v", 0)
            assert others_see() == len(first.list("")[0]) == len(second.list("")[0]) == 2 * i + 2
    finally:
        first.close()
        second.close()
