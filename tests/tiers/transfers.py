"""What tests of io engines share: memory with guards, operations, and whether this kernel has io_uring at all."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ucxkv.tiers.engines.native import NativeEngine
from ucxkv.tiers.engines.threads import ThreadsEngine
from ucxkv.tiers.engines.uring import open_ring
from ucxkv.tiers.io import OP_DTYPE, IoFailed, OpKind

PAGE = 4096
ENGINES = ("io_uring", "threads")


def uring_refused() -> str:
    """The kernel's words when a plain io_uring_setup fails; empty when it works. Asks without the code under test.

    Locked memory of rings that were just closed comes back a little later: that is waited for.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    until = time.monotonic() + 2
    while True:
        parameters = ctypes.create_string_buffer(120)
        descriptor = libc.syscall(425, ctypes.c_uint(4), parameters)
        if descriptor >= 0:
            os.close(descriptor)
            return ""
        code = ctypes.get_errno()
        if code != errno.ENOMEM or time.monotonic() >= until:
            return os.strerror(code)
        time.sleep(0.005)


def make_engine(name: str, *, max_inflight_bytes: int = 8 << 20, max_ops: int = 4096, workers: int = 8) -> NativeEngine:
    """The engine of that name, without a probe."""
    if name != "io_uring":
        return ThreadsEngine(max_inflight_bytes=max_inflight_bytes, max_ops=max_ops, workers=workers)
    until = time.monotonic() + 10  # on a busy machine the kernel gives locked memory of closed rings back late
    while True:
        try:
            return open_ring(max_inflight_bytes=max_inflight_bytes, max_ops=max_ops)
        except IoFailed as exc:
            if exc.errno != errno.ENOMEM:
                raise
            if time.monotonic() >= until:
                pytest.skip("no locked memory is left for one more ring")


class Memory:
    """`nbytes` of page-aligned memory with a page of guard bytes on either side."""

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self._map = mmap.mmap(-1, (nbytes + 3 * PAGE - 1) // PAGE * PAGE)
        whole = np.frombuffer(self._map, np.uint8)
        whole[:] = 0xA5
        self.bytes: NDArray[np.uint8] = whole[PAGE : PAGE + nbytes]
        self.bytes[:] = fill
        self._guards = (whole[:PAGE], whole[PAGE + nbytes :])
        self.address = int(self.bytes.ctypes.data)

    @property
    def is_guarded(self) -> bool:
        """Whether nothing was written beside it."""
        return all(bool((guard == 0xA5).all()) for guard in self._guards)


def noise(nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def operations(rows: Sequence[tuple[int, int, int, int, int]]) -> NDArray[np.void]:
    """(address, offset, length, file, kind) each."""
    return np.array(list(rows), OP_DTYPE)


async def move(engine: NativeEngine, kind: OpKind, file: int, address: int, offset: int, length: int) -> int:
    """One transfer: bytes moved, or -errno."""
    return int((await engine.submit(operations([(address, offset, length, file, kind)])))[0])


async def write_all(engine: NativeEngine, file: int, data: NDArray[np.uint8], offset: int = 0) -> None:
    """Write data and expect all of it to be written."""
    assert await move(engine, OpKind.WRITE, file, data.ctypes.data, offset, data.nbytes) == data.nbytes


def faults(engine: NativeEngine) -> _Faults:
    """The answers that C gives in place of the kernel's, for operations started from now on."""
    return cast(_Faults, engine.view)


class _Faults:
    """The fields of kv_io_view that are for tests."""

    ask_at_most: int
    sync_answer: int
    transfer_answer: int


def threads_alive() -> list[str]:
    """Names of this process's threads, without those that the kernel runs for a ring."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        except OSError:
            continue  # it has ended
    return sorted(name for name in names if not name.startswith("iou-"))


def descriptors_open() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


async def all_of(*futures: asyncio.Future[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Their results, in order."""
    return list(await asyncio.gather(*futures))
