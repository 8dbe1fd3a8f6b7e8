"""The journal as its user sees it: appends, commits, restarts, snapshots, failures."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import ucxkv.journal.journal as journal_module
from tests.journal.faulty import FaultyFiles
from ucxkv.errors import JournalFailed, Overloaded, SetupError, UsageError, ValueTooLarge
from ucxkv.journal import Durability, Journal, Recovered, StopKind
from ucxkv.journal.walk import LogFile, Walk, read_log_head

SMALL = 64 << 10
BOTH = pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.POWER])


async def _open(
    folder: Path, durability: Durability = Durability.POWER, **options: object
) -> tuple[Journal, Recovered]:
    chosen = {"identity": b"node-1", "file_bytes": SMALL, **options}
    return await Journal.open(folder, durability=durability, **chosen)  # type: ignore[arg-type]


def _hold(files: FaultyFiles, go: threading.Event, held: str) -> None:
    """Operations of this kind stand still until `go` is set."""

    def before(kind: str, _name: str) -> None:
        if kind == held:
            assert go.wait(20)

    files.before = before


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def _records(folder: Path) -> list[tuple[int, int, bytes]]:
    journal, recovered = await _open(folder)
    found = list(recovered.records)
    await journal.aclose()
    return found


@BOTH
async def test_what_was_committed_comes_back_after_a_restart(tmp_path: Path, durability: Durability) -> None:
    """Goal: the purpose of it; LMCache/LMCache#562 (30: the index lives in memory only). Method: 300 appends of one to
    three records by 20 tasks, epochs change on the way; a clean end; every record is there once, in order."""
    journal, recovered = await _open(tmp_path / "new" / "folder", durability)
    assert (recovered.last_lsn, list(recovered.records), list(recovered.snapshot)) == (0, [], [])
    expected: dict[int, tuple[int, bytes]] = {}

    async def client(number: int) -> None:
        for turn in range(15):
            records = [b"%d/%d/%d" % (number, turn, each) * (1 + turn * 9) for each in range(1 + turn % 3)]
            last = journal.append(turn // 5, records)
            for offset, record in enumerate(records):
                expected[last - len(records) + 1 + offset] = (turn // 5, record)
            await journal.committed(last)
            assert journal.durable_lsn >= last

    await asyncio.gather(*(client(number) for number in range(20)))
    assert journal.durable_lsn == journal.last_lsn == len(expected) == 600
    assert journal.stats.records == 600
    assert journal.stats.files > 0
    await journal.aclose()
    await journal.aclose()
    journal, recovered = await _open(tmp_path / "new" / "folder", durability)
    assert recovered.stopped.kind is StopKind.END
    assert {lsn: (epoch, record) for epoch, lsn, record in recovered.records} == expected
    assert [lsn for _, lsn, _ in recovered.records] == list(range(1, 601))
    assert journal.append(9, [b"next"]) == 601
    await journal.aclose()
    assert (await _records(tmp_path / "new" / "folder"))[-1] == (9, 601, b"next")


async def test_a_simulated_journal_needs_no_thread() -> None:
    """Goal: deterministic simulation of a whole node. Method: the same life without threads on a disk in memory: the
    number of threads stays, 30 appends of one turn of the loop share a frame, a failed sync fences, a snapshot and a
    restart work."""
    files = FaultyFiles()
    threads = threading.active_count()
    journal, _ = await _open(Path(), files=files, is_threaded=False)
    await asyncio.gather(*(journal.committed(journal.append(1, [b"%d" % i])) for i in range(30)))
    assert journal.stats.frames == 1
    await journal.snapshot(1, 20, [b"state"])
    assert threading.active_count() <= threads

    def before(kind: str, name: str) -> None:
        if kind == "sync" and name.startswith("log-"):
            raise OSError(errno.EIO, "Input/output error")

    files.before = before
    with pytest.raises(JournalFailed):
        await journal.committed(journal.append(1, [b"lost"]))
    files.before = lambda kind, name: None
    await journal.aclose()
    assert not files.is_locked
    journal, recovered = await _open(Path(), files=files.after_power_cut(None), is_threaded=False)
    assert list(recovered.snapshot) == [b"state"]
    assert [lsn for _, lsn, _ in recovered.records] == list(range(21, 31))
    journal.append(1, [b"at the end"])
    await journal.aclose()
    await journal.aclose()
    assert threading.active_count() <= threads


async def test_what_waits_is_written_by_aclose(tmp_path: Path) -> None:
    """Goal: an orderly end loses nothing, waited for or not. Method: append without awaiting, then aclose."""
    journal, _ = await _open(tmp_path)
    for number in range(100):
        journal.append(1, [b"%d" % number])
    await journal.aclose()
    assert len(await _records(tmp_path)) == 100
    with pytest.raises(UsageError, match="closed"):
        journal.append(1, [b"late"])
    with pytest.raises(UsageError, match="closed"):
        await journal.snapshot(1, 1, [])


async def test_one_commit_is_in_flight_and_all_that_arrives_rides_the_next() -> None:
    """Goal: self-clocked group commit. Method: the disk holds the first sync back while 50 appends arrive: they share
    one frame and one sync, and nothing is acknowledged before its own sync."""
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files)
    go, entered = threading.Event(), threading.Event()

    done: list[str] = []

    def before(kind: str, name: str) -> None:
        if name.startswith("log-"):
            done.append(kind)
            if kind == "sync":
                entered.set()
                assert go.wait(20)

    files.before = before
    first = asyncio.create_task(journal.committed(journal.append(1, [b"first"])))
    await asyncio.to_thread(entered.wait, 20)
    rest = [asyncio.create_task(journal.committed(journal.append(1, [b"%d" % i]))) for i in range(50)]
    await asyncio.sleep(0.05)
    assert not first.done()
    assert journal.durable_lsn == 0
    go.set()
    await asyncio.gather(first, *rest)
    assert done == ["write", "sync"] * 2
    assert (journal.stats.frames, journal.stats.records) == (2, 51)
    await journal.aclose()
    assert files.open_handles == 0
    assert not files.is_locked


async def test_an_append_stays_together_and_epochs_do_not_mix() -> None:
    """Goal: the records of one append are all there or none. Method: appends that wait for a disk that stands still;
    each frame on the disk holds whole appends of one epoch, as many as a file has room for."""
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files, file_bytes=16 << 10)
    go = threading.Event()
    _hold(files, go, "write")
    for epoch in (1, 2, 2, 2, 3, 3, 2):
        journal.append(epoch, [bytes([epoch]) * 1900] * 3)
    go.set()
    await journal.aclose()
    logs = [name for name in files.names() if name.startswith("log-")]
    heads = [read_log_head(files, name) for name in logs]
    walk = Walk(files, [LogFile(name, head[0], 16 << 10) for name, head in zip(logs, heads, strict=True) if head])
    frames = [(frame.epoch, len(frame.records)) for frame in walk.frames()]
    assert frames == [(1, 3), (2, 6), (2, 3), (3, 6), (2, 3)]


async def test_a_failed_sync_fences_the_journal_for_ever() -> None:
    """Goal: never retry a sync. Method: the disk's second sync of the log fails once; every waiter gets JournalFailed,
    so does every later append and commit; not one operation reaches the disk afterwards; what was durable stays so."""
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files)
    told: list[JournalFailed] = []
    journal.on_failed(told.append)
    # each is called, whatever the one before it does
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    journal.on_failed(lambda error: 1 // 0)
    journal.on_failed(told.append)
    durable = journal.append(1, [b"good"])
    await journal.committed(durable)
    done: list[str] = []

    def before(kind: str, name: str) -> None:
        if name.startswith("log-"):
            done.append(kind)
            if done == ["write", "sync"]:
                raise OSError(errno.EIO, "Input/output error")

    files.before = before
    waiters = [asyncio.create_task(journal.committed(journal.append(1, [b"lost %d" % i]))) for i in range(10)]
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(outcome, JournalFailed) for outcome in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 10
    assert "Input/output error" in str(outcomes[0])
    assert "smartctl" in str(outcomes[0])
    assert [str(error) for error in told] == [str(outcomes[0])] * 2
    assert journal.failed is told[0]
    for _ in range(3):
        with pytest.raises(JournalFailed):
            journal.append(1, [b"more"])
        with pytest.raises(JournalFailed):
            await journal.committed(durable + 1)
        with pytest.raises(JournalFailed):
            await journal.snapshot(1, durable, [b"state"])
    await journal.committed(durable)
    journal.on_failed(told.append)
    await asyncio.sleep(0)
    assert len(told) == 3
    await journal.aclose()
    assert done == ["write", "sync"]
    restarted, recovered = await _open(Path(), files=files.after_power_cut(None))
    assert [record for _, _, record in recovered.records] == [b"good"]
    await restarted.aclose()


async def test_a_full_disk_shows_before_the_log_is_full_and_ends_it_when_it_is() -> None:
    """Goal: allocate ahead. Method: the disk has no room for another file: the warning is there at once, appends go
    on to the end of the present file, then JournalFailed that names the fix; with room again a restart has every
    record."""
    files = FaultyFiles()
    files.room = 2 * SMALL + SMALL // 2
    journal, _ = await _open(Path(), files=files)
    count = 0
    with pytest.raises(JournalFailed, match=r"No space left.*fix: free space") as caught:
        while True:
            await journal.committed(journal.append(1, [bytes(3000)]))
            count += 1
            if count == 20:
                await _until(lambda: "No space left" in journal.stats.space_warning)
    assert isinstance(caught.value.__cause__, OSError)
    assert count == 2 * 15
    assert not [name for name in files.names() if name.endswith(".tmp")]
    await journal.aclose()
    files.room = -1
    journal, recovered = await _open(Path(), files=files.after_kill())
    assert len(list(recovered.records)) == count
    await journal.aclose()


async def test_appends_beyond_the_bound_are_refused_until_the_disk_catches_up() -> None:
    """Goal: every queue has a bound. Method: the disk stands still: appends up to the bound, then Overloaded; later it
    works again. Appends that can never fit are ValueTooLarge."""
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files, pending_bytes_max=10_000)
    go = threading.Event()
    _hold(files, go, "write")
    for _ in range(9):
        last = journal.append(1, [bytes(1000)])
    with pytest.raises(Overloaded):
        journal.append(1, [bytes(1000)])
    with pytest.raises(Overloaded):
        journal.append(1, [b"x"] * 10)
    go.set()
    await journal.committed(last)
    assert journal.append(1, [bytes(1000)]) == last + 1
    with pytest.raises(ValueTooLarge):
        journal.append(1, [bytes(10_001)])
    with pytest.raises(ValueTooLarge):
        journal.append(1, [bytes(17 << 20)])
    for wrong in ([], [b""], [b"a", b""]):
        with pytest.raises(UsageError):
            journal.append(1, wrong)
    with pytest.raises(UsageError, match="not appended"):
        await journal.committed(last + 2)
    await journal.aclose()


@BOTH
async def test_a_snapshot_replaces_the_log_before_it(tmp_path: Path, durability: Durability) -> None:
    """Goal: a restart reads the newest snapshot and what follows; the folder does not grow. Method: 12 rounds of
    records and a snapshot, chunks from a list and from an async generator; files are counted, contents compared."""

    async def later(chunks: list[bytes]) -> AsyncIterator[bytes]:
        for chunk in chunks:
            await asyncio.sleep(0)
            yield chunk

    journal, _ = await _open(tmp_path, durability)
    for number in range(12):
        for _ in range(30):
            last = journal.append(1, [bytes(3000)])
        await journal.committed(last)
        chunks = [b"round %d" % number, b"", bytes(2 << 20)]
        await journal.snapshot(number, last - 10, chunks if number % 2 else later(chunks))
    assert journal.stats.snapshots == 12
    names = sorted(os.listdir(tmp_path))
    assert sum(name.startswith("snapshot-") for name in names) == 2
    assert sum(name.startswith(("log-", "spare-")) for name in names) <= 8
    await journal.aclose()
    journal, recovered = await _open(tmp_path, durability)
    assert (recovered.snapshot_epoch, recovered.snapshot_lsn, recovered.last_lsn) == (11, 350, 360)
    assert list(recovered.snapshot) == chunks
    assert [lsn for _, lsn, _ in recovered.records] == list(range(351, 361))
    with pytest.raises(UsageError, match=r"a snapshot at 349: from 350"):
        await journal.snapshot(1, 349, [])
    with pytest.raises(UsageError, match="360"):
        await journal.snapshot(1, 361, [])
    await journal.aclose()


async def test_a_snapshot_that_fails_or_is_cancelled_changes_nothing() -> None:
    """Goal: the log goes on; the older snapshot stays. Method: every write, sync and rename of a snapshot fails in
    turn, its chunks raise, and its task is cancelled between chunks; then one succeeds."""
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files)
    last = journal.append(1, [b"record"])
    await journal.committed(last)
    await journal.snapshot(1, last, [b"first"])
    for failing in ("create", "write", "sync", "rename"):

        def before(kind: str, name: str, failing: str = failing) -> None:
            if kind == failing and name.startswith("snapshot-"):
                raise OSError(errno.ENOSPC, "No space left on device")

        files.before = before
        with pytest.raises(SetupError, match=r"the log goes on.*free space"):
            await journal.snapshot(2, last, [b"second"])
    files.before = lambda kind, name: None

    def broken() -> list[bytes]:
        raise RuntimeError("the state is gone")

    async def endless() -> AsyncIterator[bytes]:
        yield bytes(2 << 20)
        await asyncio.sleep(3600)

    with pytest.raises(RuntimeError):
        await journal.snapshot(2, last, (chunk for _ in range(2) for chunk in broken()))
    task = asyncio.create_task(journal.snapshot(2, last, endless()))
    await _until(lambda: any(name.endswith(".tmp") for name in files.names()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    last = journal.append(1, [b"another"])
    await journal.committed(last)
    await journal.snapshot(3, last, [b"third"])
    await journal.aclose()
    assert files.open_handles == 0
    assert len([name for name in files.names() if name.startswith("snapshot-")]) == 2
    _, recovered = await _open(Path(), files=files.after_kill())
    assert list(recovered.snapshot) == [b"third"]


async def test_an_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: aclose is bounded. Method: the disk, then a snapshot's source stand still: aclose returns all the same and
    says so in the log; when they move again a second aclose finishes the work."""
    monkeypatch.setattr(journal_module, "_CLOSE_S", 0.05)
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files)
    last = journal.append(1, [b"record"])
    await journal.committed(last)
    source = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        await source.wait()
        yield b"state"

    snapshot = asyncio.create_task(journal.snapshot(1, last, slow()))
    await asyncio.sleep(0)
    go = threading.Event()
    _hold(files, go, "sync")
    journal.append(1, [b"late"])
    await journal.aclose()
    go.set()
    await journal.committed(last + 1)
    await journal.aclose()
    assert files.is_locked
    source.set()
    with pytest.raises(UsageError, match="closed"):
        await snapshot
    monkeypatch.setattr(journal_module, "_CLOSE_S", 60.0)
    await journal.aclose()
    await journal.aclose()
    assert not files.is_locked
    assert files.open_handles == 0


async def test_a_cancelled_wait_harms_nobody() -> None:
    """Goal: redis/redis-py#2665 (38): a cancelled call does not shift the answers of others. Method: half of the
    waiters are cancelled while the disk stands still; the others return, every record is there."""
    files = FaultyFiles()
    journal, _ = await _open(Path(), files=files)
    go = threading.Event()
    _hold(files, go, "sync")
    waiters = [asyncio.create_task(journal.committed(journal.append(1, [b"%d" % i]))) for i in range(20)]
    await asyncio.sleep(0.01)
    for waiter in waiters[::2]:
        waiter.cancel()
    await asyncio.sleep(0)
    go.set()
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, type(None)] * 10
    await journal.committed(20)
    await journal.aclose()
    _, recovered = await _open(Path(), files=files.after_power_cut(None))
    assert len(list(recovered.records)) == 20


async def test_a_cancelled_open_leaves_the_folder_free() -> None:
    """Goal: no lock is left behind. Method: open is cancelled while the disk stands still; then it is opened again."""
    files = FaultyFiles()
    go = threading.Event()
    _hold(files, go, "create")
    task = asyncio.create_task(_open(Path(), files=files))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await _until(lambda: not files.is_locked and not files.open_handles)
    journal, _ = await _open(Path(), files=files)
    await journal.aclose()


async def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    """Goal: mistakes are named. Method: each wrong setting of open."""
    for wrong in ({"file_bytes": 5000}, {"file_bytes": 4096}, {"identity": bytes(2000)}, {"pending_bytes_max": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            await _open(tmp_path, **wrong)
    with pytest.raises(UsageError, match="memory keeps no journal"):
        await _open(tmp_path, Durability.MEMORY)
