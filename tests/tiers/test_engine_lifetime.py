"""Contract of the io engines: memory that is borrowed, bounds that hold, and what is left after the end."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import uvloop

from tests.tiers.transfers import (
    PAGE,
    Memory,
    all_of,
    descriptors_open,
    faults,
    make_engine,
    move,
    noise,
    operations,
    threads_alive,
    write_all,
)
from ucxkv.tiers.engines.native import NativeEngine
from ucxkv.tiers.io import EngineBusy, EngineClosed, OpKind

READ, WRITE = OpKind.READ, OpKind.WRITE


async def test_a_cancelled_batch_is_settled_before_its_memory_is_free(engine: NativeEngine, fd: int) -> None:
    """Goal: nobody writes into memory that was given back. Method: cancel, settle, poison, work on: poison stays."""
    data = noise(1 << 20, 5)
    os.pwrite(fd, data.tobytes(), 0)
    file, back, other = engine.attach(fd, direct=False), Memory(1 << 20), Memory(1 << 20)
    faults(engine).ask_at_most = 10_000
    future = engine.submit(operations([(back.address, 0, 1 << 20, file, READ)]))
    future.cancel()
    assert engine.pending == 1
    with pytest.raises(EngineBusy):
        engine.detach(file)
    await engine.settle(future)
    assert engine.pending == 0 and future.cancelled()
    assert np.array_equal(back.bytes, data)  # it was left to finish
    back.bytes[:] = 0xEE
    assert await move(engine, READ, file, other.address, 0, 1 << 20) == 1 << 20
    assert (back.bytes == 0xEE).all() and np.array_equal(other.bytes, data)
    await engine.settle(future)
    await engine.settle(asyncio.get_running_loop().create_future())
    engine.detach(file)


async def test_a_task_cancelled_while_it_waits_can_settle(engine: NativeEngine, fd: int) -> None:
    """Goal: the pattern of callers works. Method: tasks cancelled at their await settle in `finally`; all are even."""
    os.pwrite(fd, noise(1 << 18, 6).tobytes(), 0)
    file, back = engine.attach(fd, direct=False), Memory(1 << 18)
    faults(engine).ask_at_most = 5000
    settled: list[int] = []

    async def reader(number: int) -> None:
        future = engine.submit(operations([(back.address + number * 1000, number * 1000, 100_000, file, READ)]))
        try:
            await future
        finally:
            await engine.settle(future)
            settled.append(number)

    tasks = [asyncio.ensure_future(reader(number)) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(settled) == list(range(20)) and engine.pending == 0
    assert not any(isinstance(each, Exception) for each in found)
    assert sum(isinstance(each, asyncio.CancelledError) for each in found) == 10


@pytest.mark.parametrize("longest", [16 << 10, 1 << 20])
async def test_bytes_given_to_the_kernel_stay_under_the_cap(name: str, fd: int, longest: int) -> None:
    """Goal: the cap holds, and one longer transfer goes alone. Method: the peak that C counts where it gives them."""
    engine, cap = make_engine(name, max_inflight_bytes=64 << 10), 64 << 10
    data, file = Memory(1 << 20, fill=3), engine.attach(fd, direct=False)
    rows = [(data.address, 1 << 20, 16 << 10, file, WRITE)] * 60
    rows[30] = (data.address, 0, longest, file, WRITE)
    results = await engine.submit(operations(rows))
    assert results.tolist() == [row[2] for row in rows]
    assert 16 << 10 <= engine.peak_bytes <= max(cap, longest)
    await engine.aclose()


async def test_beyond_max_ops_a_batch_is_refused_whole(name: str, fd: int) -> None:
    """Goal: the queue has a bound. Method: eight of eight taken, one more is Busy, a batch of nine can never be."""
    engine = make_engine(name, max_ops=8)
    file, data = engine.attach(fd, direct=False), Memory(PAGE, fill=1)
    row = (data.address, 0, PAGE, file, WRITE)
    first = engine.submit(operations([row] * 8))
    assert engine.pending == 8
    with pytest.raises(EngineBusy, match="8 operations are not done, 8 may be"):
        engine.submit(operations([row]))
    with pytest.raises(ValueError, match="split it"):
        engine.submit(operations([row] * 9))
    assert (await first).tolist() == [PAGE] * 8
    assert (await engine.submit(operations([row] * 8))).tolist() == [PAGE] * 8
    await engine.aclose()


async def test_syncs_have_a_bound_of_their_own(name: str, fd: int) -> None:
    """Goal: a full queue still syncs, and syncs are bounded too. Method: 400 at once beside eight of eight writes."""
    engine = make_engine(name, max_ops=8)
    file, data = engine.attach(fd, direct=False), Memory(PAGE, fill=1)
    writes = engine.submit(operations([(data.address, 0, PAGE, file, WRITE)] * 8))
    found = await asyncio.gather(*(engine.sync(file) for _ in range(400)), return_exceptions=True)
    assert found.count(None) == 256
    assert all(isinstance(each, EngineBusy) for each in found if each is not None)
    assert (await writes).tolist() == [PAGE] * 8
    await engine.sync(file)
    await engine.aclose()


async def test_memory_under_a_transfer_cannot_be_unregistered(engine: NativeEngine, fd: int) -> None:
    """Goal: the kernel's pages stay the caller's. Method: unregister while a batch is pending, cancelled too."""
    data, file = Memory(1 << 20, fill=8), engine.attach(fd, direct=False)
    registered = engine.register(data.address, 1 << 20)
    assert registered is False or engine.name == "io_uring"
    for start in (data.address - PAGE, data.address, data.address + (1 << 20) - 1):
        with pytest.raises(ValueError, match="overlap"):
            engine.register(start, 2 * PAGE)
    future = engine.submit(operations([(data.address + (1 << 20) - 100, 0, 100, file, WRITE)]))
    with pytest.raises(EngineBusy):
        engine.unregister(data.address)
    future.cancel()
    with pytest.raises(EngineBusy):
        engine.unregister(data.address)
    await engine.settle(future)
    engine.unregister(data.address)
    with pytest.raises(ValueError, match="no memory is registered"):
        engine.unregister(data.address)
    assert await move(engine, WRITE, file, data.address, 0, 1 << 20) == 1 << 20
    assert engine.register(data.address, 1 << 20) == registered
    for address, nbytes in ((0, PAGE), (data.address, 0), (-1, PAGE), (1 << 63, 1 << 63)):
        with pytest.raises(ValueError, match="cannot be memory"):
            engine.register(address, nbytes)


async def test_numbers_of_files_are_given_again(engine: NativeEngine, tmp_path: Path) -> None:
    """Goal: no file is read for another's number. Method: a hundred files attached, detached and attached crosswise."""
    opened = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(100)]
    numbers = [engine.attach(each, direct=False) for each in opened]
    assert len(set(numbers)) == 100
    for number in numbers:
        engine.detach(number)
        with pytest.raises(ValueError, match="not attached"):
            engine.detach(number)
    numbers = [engine.attach(each, direct=False) for each in reversed(opened)][::-1]
    data = [Memory(100, fill=number) for number in range(100)]
    rows = [(memory.address, 0, 100, file, WRITE) for memory, file in zip(data, numbers, strict=True)]
    assert (await engine.submit(operations(rows))).tolist() == [100] * 100
    for number, descriptor in enumerate(opened):
        assert os.pread(descriptor, 200, 0) == bytes([number]) * 100
        engine.detach(numbers[number])
        os.close(descriptor)
    for wrong in (-1, 100, 65_535, 1 << 40):
        with pytest.raises(ValueError, match="not attached"):
            engine.detach(wrong)
        with pytest.raises(ValueError, match="not attached"):
            await engine.sync(wrong)


async def test_a_closed_engine_takes_nothing_and_finishes_what_it_took(name: str, fd: int) -> None:
    """Goal: aclose is an orderly end. Method: closed twice at once under a long batch; each call after is refused."""
    before = (descriptors_open(), threads_alive())
    engine = make_engine(name)
    file, data = engine.attach(fd, direct=False), Memory(1 << 20, fill=2)
    faults(engine).ask_at_most = 9000
    future = engine.submit(operations([(data.address, 0, 1 << 20, file, WRITE)] * 3))
    closing = [asyncio.ensure_future(engine.aclose()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        engine.submit(operations([(data.address, 0, 10, file, WRITE)]))
    await asyncio.gather(*closing)
    assert future.done() and (await future).tolist() == [1 << 20] * 3
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.sync(file)
    with pytest.raises(EngineClosed):
        engine.attach(fd, direct=False)
    with pytest.raises(EngineClosed):
        engine.register(data.address, PAGE)
    engine.detach(file)
    assert engine.pending == 0 and (descriptors_open(), threads_alive()) == before


async def test_an_engine_that_was_never_closed_warns(name: str) -> None:
    """Goal: a leak is told. Method: the last reference of a fresh engine goes; its descriptor does too."""
    before = descriptors_open()
    engine = make_engine(name)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del engine
        gc.collect()
    assert descriptors_open() == before


FORKED = """
import asyncio, gc, os, sys, warnings
from tests.tiers.transfers import Memory, make_engine, operations
from ucxkv.tiers.io import OpKind

async def main():
    engine = make_engine(sys.argv[1])
    file, data = engine.attach(os.memfd_create("data"), direct=False), Memory(4096, fill=1)
    ops = operations([(data.address, 0, 4096, file, OpKind.WRITE)] * 4)
    assert (await engine.submit(ops)).tolist() == [4096] * 4
    return engine, ops, data

loop = asyncio.new_event_loop()
engine, ops, data = loop.run_until_complete(main())
child = os.fork()
if not child:
    warnings.simplefilter("error")
    engine.abort()
    del engine
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

async def after():
    assert (await engine.submit(ops)).tolist() == [4096] * 4
    await engine.aclose()

loop.run_until_complete(after())
print("both ended")
"""


@pytest.mark.timeout(300)
def test_a_forked_child_leaves_the_parents_engine_alone(name: str) -> None:
    """Goal: a child without our threads does not wait for them. Method: fork, close and collect in the child, go on."""
    command = [sys.executable, "-c", FORKED, name]
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both ended\n"


async def test_thousands_of_batches_leave_nothing(name: str, fd: int) -> None:
    """Goal: no leak. Method: 3,000 batches of 4, many at a time; descriptors, threads and memory before and after."""
    before = (descriptors_open(), threads_alive())
    engine = make_engine(name)
    file, data = engine.attach(fd, direct=False), Memory(4 * PAGE, fill=6)
    ops = operations([(data.address + at * 512, at * 512, 512, file, at % 2) for at in range(4)])

    async def many(count: int) -> None:
        for _ in range(count):
            for results in await all_of(*(engine.submit(ops) for _ in range(50))):
                assert len(results) == 4

    await many(5)
    gc.collect()
    tracemalloc.start()
    try:
        await many(2)
        gc.collect()
        level = tracemalloc.get_traced_memory()[0]
        await many(53)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - level
    finally:
        tracemalloc.stop()
    assert grown < 20_000
    await engine.aclose()
    assert (descriptors_open(), threads_alive()) == before


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_both_event_loops_are_woken(
    name: str, tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Goal: the descriptor works in each loop's poll set. Method: rounds of batches, a sync and a close in either."""

    async def rounds() -> int:
        engine = make_engine(name)
        descriptor = os.open(tmp_path / "loop", os.O_RDWR | os.O_CREAT)
        file, data, back = engine.attach(descriptor, direct=False), noise(300_000, 7), Memory(300_000)
        await write_all(engine, file, data)
        await engine.sync(file)
        for turn in range(20):
            ops = operations([(back.address + at, at, 30_000, file, READ) for at in range(0, 300_000, 30_000)])
            back.bytes[:] = turn
            assert (await asyncio.wait_for(engine.submit(ops), 60)).sum() == 300_000
            assert np.array_equal(back.bytes, data)
        await engine.aclose()
        os.close(descriptor)
        return turn

    loop = make_loop()
    try:
        assert loop.run_until_complete(rounds()) == 19
    finally:
        loop.close()
