"""Whether io_uring can be used here, found out by using it: set up, register, write and read one page.

Containers refuse io_uring by default, kernels can have it switched off, and some accept the ring and fail what is given
to it. Only doing tells. Nothing is kept; without an event loop, so that it can be asked anywhere.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from .._engine import ffi, lib
from ..base import TierError
from ..io import OP_DTYPE, IoFailed, OpKind
from .uring import open_ring

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .native import NativeEngine

__all__ = ["Probe", "probe_engine", "refused"]

PAGE = 4096
PROBE_S = 5.0
"""A page that takes longer than this is taken for a ring that does not work."""

_CAUSES = {
    errno.EPERM: "the kernel refuses io_uring here: a container's seccomp profile, or kernel.io_uring_disabled",
    errno.EACCES: "the kernel refuses io_uring here: a security module's rule",
    errno.ENOSYS: "the kernel has no io_uring, or one older than 5.6",
    errno.ENOMEM: "no memory for the ring: raise the limit of locked memory (ulimit -l)",
    errno.EMFILE: "no descriptor is left: raise the limit of open files (ulimit -n)",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """Which engine was found to work, and why it is not io_uring (empty when it is).

    registers: whether memory was registered with the kernel; False costs some CPU and nothing else.
    """

    name: Literal["io_uring", "threads"]
    why: str
    registers: bool = False


def probe_engine(directory: Path | None = None) -> Probe:
    """Try io_uring on a file without a name in `directory`; None: on one in memory. Never raises for what it finds.

    Takes about a millisecond. A directory that cannot be written leaves the file in memory to try with.
    """
    try:
        engine = open_ring(max_inflight_bytes=1 << 20, max_ops=16)
    except IoFailed as exc:
        return refused(exc)
    descriptor = _scratch(directory)
    memory = mmap.mmap(-1, 2 * PAGE)
    try:
        registers, why = _one_page(engine, descriptor, memory)
    except TierError as exc:
        registers, why = False, f"io_uring was set up and failed in use ({exc})"
    finally:
        os.close(descriptor)
    if engine.pending:
        _STUCK.append((engine, memory))
    else:
        engine.abort()
    return Probe("threads", why) if why else Probe("io_uring", "", registers)


def refused(exc: IoFailed) -> Probe:
    """What a ring that cannot be opened means."""
    return Probe("threads", f"{_CAUSES.get(exc.errno, 'io_uring cannot be set up')} ({exc})")


_STUCK: list[tuple[NativeEngine, object]] = []
"""Rings that did not answer, with the memory that the kernel may still write to: kept for the process's life."""


def _scratch(directory: Path | None) -> int:
    if directory is not None:
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                return os.dup(file.fileno())
        except OSError:
            pass  # read-only, full or away: whoever keeps files there will say so; the ring is tried all the same
    return os.memfd_create("probe")


def _one_page(engine: NativeEngine, descriptor: int, memory: mmap.mmap) -> tuple[bool, str]:
    """Write a page, sync it, read it back. Whether memory could be registered, and what went wrong."""
    flat = np.frombuffer(memory, np.uint8)
    address = flat.ctypes.data
    flat[:PAGE] = np.arange(PAGE) % 251
    file = engine.attach(descriptor, direct=False)
    registers = engine.register(address, 2 * PAGE)
    for kind, at in ((OpKind.WRITE, address), (OpKind.READ, address + PAGE)):
        ops = np.array([(at, 0, PAGE, file, kind)], OP_DTYPE)
        moved = _wait(engine, ops)
        if moved is None:
            return registers, f"io_uring was set up and did not answer a {kind.name} for {PROBE_S:.0f} s"
        if moved != PAGE:
            what = os.strerror(-moved) if moved < 0 else f"moved {moved} bytes of {PAGE}"
            return registers, f"io_uring was set up and failed a {kind.name}: {what}"
    if not np.array_equal(flat[:PAGE], flat[PAGE:]):
        return registers, "io_uring read other bytes than it had written"
    return registers, ""


def _wait(engine: NativeEngine, ops: NDArray[np.void]) -> int | None:
    """Bytes moved or -errno of one operation; None when there was no answer."""
    results = np.empty(1, np.int64)
    number = lib.kv_io_submit(engine.io, ffi.from_buffer("kv_io_op[]", ops), 1, ffi.from_buffer("int64_t[]", results))
    assert number >= 0, number
    poll = select.poll()
    poll.register(engine.view.fd, select.POLLIN)
    end = time.monotonic() + PROBE_S
    while not lib.kv_io_drain(engine.io):
        left = end - time.monotonic()
        if left <= 0:
            _STUCK.append((engine, results))
            return None
        poll.poll(min(left * 1000, 10.0))
    return int(results[0])
