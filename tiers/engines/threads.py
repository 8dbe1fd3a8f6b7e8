"""The engine on threads: pread, pwrite and fdatasync in workers of C, one eventfd in the event loop's poll set.

Works everywhere. Workers are started when there is work for them and end at `aclose`; they never hold the GIL, so that
a transfer costs the loop nothing but its batch. Memory is never pinned: `register` gives False.

Source: `tiers/workers.c`.
"""

from __future__ import annotations

from .._engine import ffi, lib
from ..io import IoFailed
from .native import NativeEngine

__all__ = ["ThreadsEngine"]

WORKERS = 32
"""Threads at most, thus operations at a time: a drive's queue is full at that depth for blocks of 64 KiB, and larger
blocks are held by the bytes that may be under way."""


class ThreadsEngine(NativeEngine):
    """An IoEngine on dedicated threads."""

    name = "threads"

    def __init__(self, *, max_inflight_bytes: int, max_ops: int, workers: int = WORKERS) -> None:
        """workers: threads at most, 1 to 64. Raises IoFailed when there is no descriptor or memory left."""
        if not 1 <= workers <= 64:
            raise ValueError(f"workers {workers} is not 1 to 64")
        error = ffi.new("int32_t *")
        io = lib.kv_io_open_threads(max_ops, max_inflight_bytes, workers, error)
        if io == ffi.NULL:
            raise IoFailed("the threads engine cannot be opened", errno=error[0])
        super().__init__(io, max_inflight_bytes=max_inflight_bytes, max_ops=max_ops)
