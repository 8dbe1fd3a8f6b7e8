"""The engine on io_uring: one ring, its descriptor in the event loop's poll set, no polling threads.

Files and registered memory are put into the kernel's tables where it allows that; elsewhere each operation names its
own, and all works the same. Opening needs a kernel of 5.6 that lets the process use io_uring.

Source: Linux man-pages io_uring(7); `tiers/uring.c`.
"""

from __future__ import annotations

import errno
import time

from .._engine import ffi, lib
from ..io import IoFailed
from .native import NativeEngine

__all__ = ["UringEngine", "open_ring"]

ENTRIES = 256
"""Operations that the kernel may have at a time: of 64 KiB each, twice the bytes that it may have by default. A ring of
this size fits in 64 KiB of locked memory, which kernels before 5.12 and after 6.13 count; two hardly do."""

_GIVEN_BACK_S = 0.25
"""How long the kernel may take to give back what a ring that was closed, perhaps by a killed process, had locked."""


class UringEngine(NativeEngine):
    """An IoEngine on one io_uring."""

    name = "io_uring"

    def __init__(self, *, max_inflight_bytes: int, max_ops: int) -> None:
        """Raises IoFailed with the errno of io_uring_setup, or ENOSYS when the kernel's io_uring is too old."""
        error = ffi.new("int32_t *")
        io = lib.kv_io_open_uring(max_ops, max_inflight_bytes, ENTRIES, error)
        if io == ffi.NULL:
            raise IoFailed("io_uring cannot be used", errno=error[0])
        super().__init__(io, max_inflight_bytes=max_inflight_bytes, max_ops=max_ops)


def open_ring(*, max_inflight_bytes: int, max_ops: int) -> UringEngine:
    """The engine, when there is locked memory for it, which is waited for a little. Raises as UringEngine."""
    until = time.monotonic() + _GIVEN_BACK_S
    while True:
        try:
            return UringEngine(max_inflight_bytes=max_inflight_bytes, max_ops=max_ops)
        except IoFailed as exc:
            if exc.errno != errno.ENOMEM or time.monotonic() >= until:
                raise
        time.sleep(0.005)
