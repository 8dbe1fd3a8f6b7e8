"""Syncs of the io engines: what they cover, and that a failed one closes its file to writes for good."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.transfers import PAGE, Memory, faults, make_engine, move, operations
from ucxkv.tiers.engines.native import NativeEngine
from ucxkv.tiers.engines.threads import ThreadsEngine
from ucxkv.tiers.io import IoFailed, OpKind, SyncFailed

READ, WRITE = OpKind.READ, OpKind.WRITE


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two files of the test's own."""
    found = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b")]
    yield found[0], found[1]
    for each in found:
        os.close(each)


async def test_a_sync_returns_with_the_data_written_and_no_operation_pending(
    engine: NativeEngine, fds: tuple[int, int]
) -> None:
    """Goal: a plain sync works. Method: writes, syncs of both files at once, what another descriptor reads."""
    files = [engine.attach(each, direct=False) for each in fds]
    data = Memory(10_000, fill=3)
    assert await move(engine, WRITE, files[0], data.address, 0, 10_000) == 10_000
    await asyncio.gather(*(engine.sync(file) for file in files * 5))
    assert engine.pending == 0
    assert os.pread(fds[0], 20_000, 0) == data.bytes.tobytes()


async def test_a_failed_sync_is_never_tried_again(engine: NativeEngine, fds: tuple[int, int]) -> None:
    """Goal: a fenced file takes no write and no sync, whatever the kernel would say later; reads and other files go on.

    Method: EIO in place of the kernel's answer to one sync, then real answers again.
    """
    file, other = (engine.attach(each, direct=False) for each in fds)
    data = Memory(PAGE, fill=4)
    assert await move(engine, WRITE, file, data.address, 0, PAGE) == PAGE
    faults(engine).sync_answer = -errno.EIO
    with pytest.raises(SyncFailed, match="the sync of file 0 failed") as first:
        await engine.sync(file)
    faults(engine).sync_answer = 0
    assert first.value.errno == errno.EIO and isinstance(first.value, IoFailed)
    entered = engine.view.enters
    with pytest.raises(SyncFailed, match="an earlier sync") as again:
        await engine.sync(file)
    assert again.value.errno == errno.EIO
    for batch in ([(data.address, 0, PAGE, file, WRITE)], [(data.address, 0, PAGE, f, WRITE) for f in (other, file)]):
        with pytest.raises(SyncFailed, match="an earlier sync of file 0"):
            engine.submit(operations(batch))
    assert engine.view.enters == entered and engine.pending == 0
    assert os.fstat(fds[1]).st_size == 0
    assert await move(engine, READ, file, data.address, 0, PAGE) == PAGE
    assert await move(engine, WRITE, other, data.address, 0, PAGE) == PAGE
    await engine.sync(other)


async def test_a_file_attached_anew_is_not_fenced(engine: NativeEngine, fds: tuple[int, int]) -> None:
    """Goal: a fence ends with its file, not with the number. Method: fenced, detached, another file with its number."""
    file, data = engine.attach(fds[0], direct=False), Memory(PAGE)
    faults(engine).sync_answer = -errno.EIO
    with pytest.raises(SyncFailed):
        await engine.sync(file)
    faults(engine).sync_answer = 0
    engine.detach(file)
    assert engine.attach(fds[1], direct=False) == file
    assert await move(engine, WRITE, file, data.address, 0, PAGE) == PAGE
    await engine.sync(file)


async def test_a_sync_cancelled_by_its_caller_still_fences(engine: NativeEngine, fds: tuple[int, int]) -> None:
    """Goal: nobody waiting does not mean that nothing failed. Method: the waiting task is cancelled before the EIO."""
    file, other = (engine.attach(each, direct=False) for each in fds)
    data = Memory(PAGE)
    faults(engine).sync_answer = -errno.EIO
    task = asyncio.ensure_future(engine.sync(file))
    await asyncio.sleep(0)
    assert engine.pending == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    faults(engine).sync_answer = 0
    while engine.pending:
        await engine.sync(other)
    with pytest.raises(SyncFailed):
        engine.submit(operations([(data.address, 0, PAGE, file, WRITE)]))


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.ENOSPC, errno.EINVAL])
async def test_every_answer_but_success_is_a_failure(engine: NativeEngine, fds: tuple[int, int], code: int) -> None:
    """Goal: nothing that a sync says is waved through or asked twice. Method: codes that transfers would retry."""
    file = engine.attach(fds[0], direct=False)
    faults(engine).sync_answer = -code
    with pytest.raises(SyncFailed) as caught:
        await engine.sync(file)
    assert caught.value.errno == code


async def test_writes_that_wait_behind_a_failed_sync_are_not_started(name: str, fds: tuple[int, int]) -> None:
    """Goal: the fence holds for what was taken and not begun. Method: one page under way at a time, 64 pages wait."""
    engine = make_engine(name, max_inflight_bytes=PAGE)
    if name == "threads":  # one worker takes the first write, then the sync
        await engine.aclose()
        engine = ThreadsEngine(max_inflight_bytes=PAGE, max_ops=100, workers=1)
    file, data = engine.attach(fds[0], direct=False), Memory(PAGE, fill=5)
    faults(engine).sync_answer = -errno.EIO
    writes = engine.submit(operations([(data.address, at * PAGE, PAGE, file, WRITE) for at in range(64)]))
    with pytest.raises(SyncFailed):
        await engine.sync(file)
    results = (await writes).tolist()
    begun = results.count(PAGE)
    assert results == [PAGE] * begun + [-errno.EIO] * (64 - begun)
    assert 1 <= begun < 10
    assert os.fstat(fds[0]).st_size == begun * PAGE
    await engine.aclose()
