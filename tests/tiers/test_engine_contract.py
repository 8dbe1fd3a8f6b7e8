"""Contract of the io engines: what both promise of bytes and refusals, on the real kernel."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiers.transfers import PAGE, Memory, all_of, faults, move, noise, operations
from ucxkv.tiers.engines.native import NativeEngine
from ucxkv.tiers.io import IoFailed, OpKind

READ, WRITE = OpKind.READ, OpKind.WRITE
ODD_SIZES = (1, 511, 512, 4095, 4096, 4097, 65_535, 65_536, 65_537, (1 << 20) + 3)


async def test_transfers_of_every_size_move_exactly_their_bytes(engine: NativeEngine, fd: int) -> None:
    """Goal: right bytes at the right places. Method: odd sizes at odd offsets in one batch, against pread; guards."""
    offsets = np.cumsum([3, *(size + 5 for size in ODD_SIZES)])
    data, back = Memory(sum(ODD_SIZES)), Memory(sum(ODD_SIZES), fill=0x11)
    data.bytes[:] = noise(data.bytes.nbytes)
    starts = np.cumsum([0, *ODD_SIZES])
    file = engine.attach(fd, direct=False)
    places = [(int(a), int(b), size) for a, b, size in zip(starts, offsets, ODD_SIZES, strict=False)]
    written = await engine.submit(operations([(data.address + a, b, size, file, WRITE) for a, b, size in places]))
    assert written.tolist() == list(ODD_SIZES)
    for start, offset, size in places:
        assert os.pread(fd, size, offset) == data.bytes[start : start + size].tobytes()
    read = await engine.submit(operations([(back.address + a, b, size, file, READ) for a, b, size in reversed(places)]))
    assert read.tolist() == list(reversed(ODD_SIZES))
    assert np.array_equal(back.bytes, data.bytes)
    assert data.is_guarded and back.is_guarded


async def test_direct_transfers_move_exactly_their_bytes(engine: NativeEngine, direct_fd: int, tmp_path: Path) -> None:
    """Goal: O_DIRECT works on both. Method: aligned transfers, also in registered memory, against a plain read."""
    sizes = (4096, 8192, 65_536, 1 << 20)
    data, back = Memory(sum(sizes)), Memory(sum(sizes))
    data.bytes[:] = noise(data.bytes.nbytes, 2)
    engine.register(data.address, data.bytes.nbytes)
    file, starts = engine.attach(direct_fd, direct=True), [int(at) for at in np.cumsum([0, *sizes])]
    rows = [(start, size, file) for start, size in zip(starts, sizes, strict=False)]
    await engine.submit(operations([(data.address + start, start, size, file, WRITE) for start, size, file in rows]))
    assert (tmp_path / "direct").read_bytes() == data.bytes.tobytes()
    await engine.submit(operations([(back.address + start, start, size, file, READ) for start, size, file in rows]))
    assert np.array_equal(back.bytes, data.bytes) and back.is_guarded
    engine.unregister(data.address)


async def test_what_cannot_be_direct_is_refused_whole(engine: NativeEngine, direct_fd: int, tmp_path: Path) -> None:
    """Goal: no EINVAL from far below. Method: each of address, offset, length misaligned beside a good operation."""
    data, file = Memory(8 * PAGE, fill=7), engine.attach(direct_fd, direct=True)
    for wrong in ((512, 0, PAGE), (0, 512, PAGE), (0, 0, 512)):
        address, offset, length = wrong
        rows = [(data.address, 0, PAGE, file, WRITE), (data.address + address, offset, length, file, WRITE)]
        with pytest.raises(ValueError, match=r"operation 1.*multiples of 4096"):
            engine.submit(operations(rows))
    assert engine.pending == 0 and (tmp_path / "direct").stat().st_size == 0


async def test_a_direct_read_ends_where_the_file_does(engine: NativeEngine, direct_fd: int, tmp_path: Path) -> None:
    """Goal: an end that is not aligned is an end and no error. Method: files of 0 to 9,000 bytes read by 16 KiB."""
    back, file = Memory(4 * PAGE), engine.attach(direct_fd, direct=True)
    for size in (0, 1, 512, 4096, 5000, 8192, 9000):
        (tmp_path / "direct").write_bytes(noise(size, size).tobytes())
        back.bytes[:] = 0x33
        assert await move(engine, READ, file, back.address, 0, 4 * PAGE) == size
        assert np.array_equal(back.bytes[:size], noise(size, size))
    assert await move(engine, READ, file, back.address, 4 * PAGE, PAGE) == 0
    assert back.is_guarded


async def test_reads_end_where_the_file_does(engine: NativeEngine, fd: int) -> None:
    """Goal: fewer bytes mean the end, beyond it none. Method: reads across, at and behind the end; nothing beside."""
    os.pwrite(fd, b"x" * 1000, 0)
    back, file = Memory(2000, fill=0x44), engine.attach(fd, direct=False)
    for offset, length, want in ((0, 2000, 1000), (999, 2, 1), (1000, 10, 0), (1 << 40, 10, 0), (0, 0, 0), (500, 0, 0)):
        assert await move(engine, READ, file, back.address, offset, length) == want
    assert (back.bytes[1000:] == 0x44).all() and back.is_guarded


async def test_short_transfers_are_gone_on_with(engine: NativeEngine, fd: int, direct_fd: int) -> None:
    """Goal: one short answer of the kernel is not the end. Method: the kernel is asked for a little at a time."""
    data, back = Memory(40 * PAGE), Memory(40 * PAGE)
    data.bytes[:] = noise(data.bytes.nbytes, 3)
    for descriptor, direct, most in ((fd, False, 1777), (direct_fd, True, PAGE), (direct_fd, True, 3 * PAGE)):
        file = engine.attach(descriptor, direct=direct)
        faults(engine).ask_at_most = most
        assert await move(engine, WRITE, file, data.address, 8192, 40 * PAGE) == 40 * PAGE
        back.bytes[:] = 0
        assert await move(engine, READ, file, back.address, 8192, 40 * PAGE) == 40 * PAGE
        assert np.array_equal(back.bytes, data.bytes)
        assert await move(engine, READ, file, back.address, 40 * PAGE, 40 * PAGE) == 2 * PAGE


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
async def test_a_transfer_that_is_always_interrupted_ends(engine: NativeEngine, fd: int, code: int) -> None:
    """Goal: retries have a bound. Method: each answer is EINTR or EAGAIN; the future ends with it; then all works."""
    file, data = engine.attach(fd, direct=False), Memory(PAGE, fill=9)
    faults(engine).transfer_answer = -code
    assert await asyncio.wait_for(asyncio.shield(engine.submit(_one(data, file, WRITE))), 30) == [-code]
    faults(engine).transfer_answer = 0
    assert await move(engine, WRITE, file, data.address, 0, PAGE) == PAGE


async def test_an_error_of_one_operation_is_that_operations(engine: NativeEngine, tmp_path: Path) -> None:
    """Goal: -errno where it belongs. Method: a batch over files of several modes and memory that is none."""
    path = tmp_path / "modes"
    path.write_bytes(b"y" * PAGE)
    opened = [os.open(path, mode) for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR)]
    read_only, write_only, both = (engine.attach(each, direct=False) for each in opened)
    data = Memory(PAGE, fill=1)
    rows = [
        (data.address, 0, PAGE, both, READ),
        (data.address, 0, PAGE, read_only, WRITE),
        (data.address, 0, PAGE, write_only, READ),
        (1 << 20, 0, PAGE, both, READ),
        (data.address, 0, 100, both, WRITE),
    ]
    results = await engine.submit(operations(rows))
    assert results.tolist() == [PAGE, -errno.EBADF, -errno.EBADF, -errno.EFAULT, 100]
    for each in opened:
        os.close(each)


async def test_only_files_can_be_attached(engine: NativeEngine, tmp_path: Path) -> None:
    """Goal: nothing that could keep a transfer for ever. Method: a closed descriptor, a pipe, a folder."""
    ends = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    for descriptor, code in ((ends[0], errno.ESPIPE), (folder, errno.ESPIPE), (-1, errno.EBADF), (9999, errno.EBADF)):
        with pytest.raises(IoFailed) as caught:
            engine.attach(descriptor, direct=False)
        assert caught.value.errno == code
    for descriptor in (*ends, folder):
        os.close(descriptor)


async def test_operations_that_cannot_be_start_nothing(engine: NativeEngine, fd: int) -> None:
    """Goal: the whole batch or nothing. Method: each kind of bad operation behind a good write; the file is empty."""
    file, data = engine.attach(fd, direct=False), Memory(PAGE)
    good = (data.address, 0, PAGE, file, WRITE)
    for bad, why in (
        ((data.address, 0, PAGE, file + 1, WRITE), "not attached"),
        ((data.address, 0, PAGE, 65_535, READ), "not attached"),
        ((data.address, 0, PAGE, file, 2), "neither READ nor WRITE"),
        ((data.address, (1 << 63) - 100, PAGE, file, READ), "beyond"),
        ((data.address, (1 << 64) - 1, 1, file, READ), "beyond"),
        (((1 << 64) - 10, 0, PAGE, file, READ), "beyond"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.submit(operations([good, bad]))
    arrays: list[NDArray[np.void]] = [
        np.zeros(3, "V24"),
        operations([good] * 4)[::2],
        operations([good] * 4).reshape(2, 2),
    ]
    for array in arrays:
        with pytest.raises(ValueError, match="contiguous OP_DTYPE"):
            engine.submit(array)
    assert engine.pending == 0 and os.fstat(fd).st_size == 0
    empty = operations([good])[:0]
    assert (await engine.submit(empty)).tolist() == []
    assert (await engine.submit(operations([(data.address, 0, 0, file, WRITE), good]))).tolist() == [0, PAGE]


async def test_a_limit_on_the_files_size_is_an_error(engine: NativeEngine, fd: int) -> None:
    """Goal: a file that may not grow fails by its name. Method: RLIMIT_FSIZE in the middle of a write, then beyond."""
    file, data = engine.attach(fd, direct=False), Memory(90_000, fill=5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, before[1]))
    try:
        results = await all_of(
            engine.submit(operations([(data.address, 0, 90_000, file, WRITE)])),
            engine.submit(operations([(data.address, 80_000, 10, file, WRITE)])),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [each.tolist() for each in results] == [[-errno.EFBIG], [-errno.EFBIG]]
    assert os.fstat(fd).st_size <= 70_000


async def test_a_full_file_system_is_an_error(engine: NativeEngine, small_disk: Path) -> None:
    """Goal: ENOSPC is told, what fitted is right. Method: 2 MiB of writes into a file system of 1 MiB."""
    descriptor = os.open(small_disk / "full", os.O_RDWR | os.O_CREAT)
    file, data = engine.attach(descriptor, direct=False), Memory(64 << 10)
    data.bytes[:] = noise(64 << 10, 4)
    rows = [(data.address, at, 64 << 10, file, WRITE) for at in range(0, 2 << 20, 64 << 10)]
    results = (await engine.submit(operations(rows))).tolist()
    assert set(results) == {64 << 10, -errno.ENOSPC}
    for row, result in zip(rows, results, strict=True):
        if result > 0:
            assert os.pread(descriptor, 64 << 10, row[1]) == data.bytes.tobytes()
    engine.detach(file)
    os.close(descriptor)


def _one(memory: Memory, file: int, kind: OpKind) -> NDArray[np.void]:
    return operations([(memory.address, 0, memory.bytes.nbytes, file, kind)])
