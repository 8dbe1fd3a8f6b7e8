"""What both engines are in Python: batches, futures and refusals around the C of io.c.

Invariants:
- Python works once a batch, never once an operation; C copies the operations before `submit` returns.
- A batch's results array and future are kept here until C has named the batch as done, whatever became of the future.
- Nothing is freed while an operation is pending: the kernel may write to memory until then. A forked child, which has
  neither the threads nor the operations, frees nothing and cannot use the engine.

Single-threaded: all calls come from the event loop's thread. C is called without the GIL.
"""

from __future__ import annotations

import asyncio
import errno
import os
import warnings
from typing import TYPE_CHECKING, NoReturn

import numpy as np

try:
    from .._engine import ffi as _ffi
    from .._engine import lib as _lib
except ImportError as exc:
    raise ImportError(
        "the io engines need the native module ucxkv.tiers._engine, which an installation builds: install a C compiler "
        "and install ucxkv again, or run python tiers/build_io.py in its source"
    ) from exc
from ..io import DIRECT_ALIGNMENT, OP_DTYPE, EngineBusy, EngineClosed, IoFailed, SyncFailed

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

__all__ = ["NativeEngine"]

PAUSE_S = 0.001
"""How long to wait before the kernel is asked again when it had no memory for an operation."""


def _file(number: int) -> int:
    """A file's number as C takes it; one that can be none's for what is out of range."""
    return number if 0 <= number < _lib.KV_FILES else int(_lib.KV_FILES)


class _Batch:
    """A batch that is not done: where its results go, who waits for them, and who waits for its memory."""

    __slots__ = ("future", "results", "waiters")

    def __init__(self, future: asyncio.Future[NDArray[np.int64]], results: NDArray[np.int64]) -> None:
        self.future = future
        self.results = results
        self.waiters: list[asyncio.Future[None]] = []


class NativeEngine:
    """An IoEngine over an opened `kv_io`; `UringEngine` and `ThreadsEngine` say how to open one.

    It belongs to the event loop in which its first batch is started. Up to 256 syncs may be under way at a time,
    further ones raise EngineBusy.
    """

    name = "native"

    def __init__(self, io: Any, *, max_inflight_bytes: int, max_ops: int) -> None:
        """io: what C opened, now owned."""
        self.max_inflight_bytes = max_inflight_bytes
        self.max_ops = max_ops
        self.io = io
        self.view = _lib.kv_io_look(io)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batches: dict[int, _Batch] = {}
        self._flying: dict[asyncio.Future[NDArray[np.int64]], _Batch] = {}
        self._regions: dict[int, tuple[int, bool]] = {}
        self._closing = False
        self._process = os.getpid()
        self._emptied: list[asyncio.Future[None]] = []
        self._again: asyncio.Handle | None = None

    def __del__(self) -> None:
        if getattr(self, "io", None) is not None and self._process == os.getpid():
            warnings.warn(f"{self!r} was not closed: await aclose()", ResourceWarning, stacklevel=1)
            if not self.view.pending:
                self._free()

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{self.pending} pending"
        return f"<{type(self).__name__} {state}>"

    # ---- files and memory

    def attach(self, fd: int, *, direct: bool) -> int:
        """See IoEngine; regular files and block devices only (ESPIPE for others)."""
        self._open()
        number = int(_lib.kv_io_attach(self.io, fd, direct))
        if number == -errno.EMFILE:
            raise EngineBusy(f"{_lib.KV_FILES} files are attached, the most there can be: detach some")
        if number == -errno.ESPIPE:
            raise IoFailed(f"descriptor {fd} is no regular file or block device", errno=errno.ESPIPE)
        if number < 0:
            raise IoFailed(f"descriptor {fd} cannot be used", errno=-number)
        return number

    def detach(self, file: int) -> None:
        """See IoEngine."""
        if self.io is None:
            return
        found = _lib.kv_io_detach(self.io, _file(file))
        if found == _lib.KV_UNKNOWN_FILE:
            raise ValueError(f"file {file} is not attached")
        if found == _lib.KV_BUSY:
            raise EngineBusy(f"operations on file {file} are not done: await them, then detach it")

    def register(self, address: int, nbytes: int) -> bool:
        """See IoEngine. Pinning takes the kernel some 40 ms a GiB: do it before there is work."""
        self._open()
        if address <= 0 or nbytes <= 0 or address + nbytes >= 1 << 64:
            raise ValueError(f"{nbytes} bytes at {address:#x} cannot be memory")
        for other, (length, _) in self._regions.items():
            if address < other + length and other < address + nbytes:
                raise ValueError(f"{nbytes} bytes at {address:#x} overlap {length} that are registered at {other:#x}")
        pinned = bool(_lib.kv_io_register(self.io, address, nbytes))
        self._regions[address] = (nbytes, pinned)
        return pinned

    def unregister(self, address: int) -> None:
        """See IoEngine; also takes back a register that gave False. Raises ValueError for what was not registered."""
        if self.io is None:
            return
        if address not in self._regions:
            raise ValueError(f"no memory is registered at {address:#x}")
        nbytes, pinned = self._regions[address]
        if _lib.kv_io_uses(self.io, address, nbytes):
            raise EngineBusy(f"transfers use the memory at {address:#x}: settle them, then unregister it")
        del self._regions[address]
        if pinned:
            _lib.kv_io_unregister(self.io, address, nbytes)

    # ---- work

    def submit(self, ops: NDArray[np.void]) -> asyncio.Future[NDArray[np.int64]]:
        """See IoEngine. Raises ValueError also for a batch longer than `max_ops`."""
        if self._closing:
            raise EngineClosed("the engine is closed: open another one")
        if (ops.dtype is not OP_DTYPE and ops.dtype != OP_DTYPE) or ops.ndim != 1 or not ops.flags.c_contiguous:
            raise ValueError(f"operations must be a contiguous OP_DTYPE array, not {ops.dtype} {ops.shape}")
        loop = self._loop or self._bind()
        count = len(ops)
        results = np.empty(count, np.int64)
        future: asyncio.Future[NDArray[np.int64]] = loop.create_future()
        if not count:
            future.set_result(results)
            return future
        number = _lib.kv_io_submit(
            self.io, _ffi.from_buffer("kv_io_op[]", ops), count, _ffi.from_buffer("int64_t[]", results)
        )
        if number < 0:
            self._refuse(number, ops)
        self._keep(number, _Batch(future, results))
        return future

    async def settle(self, future: asyncio.Future[NDArray[np.int64]]) -> None:
        """See IoEngine; of a future that is not of this engine nothing is known, so it returns at once."""
        batch = self._flying.get(future)
        if batch is None:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.waiters.append(waiter)
        await waiter

    async def sync(self, file: int) -> None:
        """See IoEngine."""
        if self._closing:
            raise EngineClosed("the engine is closed: open another one")
        loop = self._loop or self._bind()
        results = np.empty(1, np.int64)
        future: asyncio.Future[NDArray[np.int64]] = loop.create_future()
        number = _lib.kv_io_sync(self.io, _file(file), _ffi.from_buffer("int64_t[]", results))
        if number == _lib.KV_UNKNOWN_FILE:
            raise ValueError(f"file {file} is not attached")
        if number == _lib.KV_FENCED:
            raise SyncFailed(f"an earlier sync of file {file} failed", errno=self.view.bad_errno)
        if number == _lib.KV_BUSY:
            raise EngineBusy(f"{self.pending} operations are not done: await some of them")
        self._keep(number, _Batch(future, results))
        result = int((await future)[0])
        if result < 0:
            raise SyncFailed(f"the sync of file {file} failed", errno=-result)

    @property
    def pending(self) -> int:
        """See IoEngine."""
        return int(self.view.pending) if self.io is not None else 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes of transfers that were with the kernel at a time, counted in C where they are given to it."""
        return int(self.view.peak_bytes) if self.io is not None else 0

    def abort(self) -> None:
        """Close at once an engine that has nothing pending. Raises EngineBusy otherwise; idempotent."""
        if self.pending:
            raise EngineBusy(f"{self.pending} operations are not done: await aclose()")
        self._closing = True
        if self.io is not None:
            self._free()

    async def aclose(self) -> None:
        """See IoEngine. Cancelled, it leaves the engine closed to work and not freed: call it again."""
        self._closing = True
        while self.io is not None and self.view.pending:
            emptied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._emptied.append(emptied)
            await emptied
        if self.io is not None:
            self._free()

    # ---- inside

    def _open(self) -> None:
        if self._closing:
            raise EngineClosed("the engine is closed: open another one")

    def _bind(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.view.fd, self._drain)
        return self._loop

    def _keep(self, number: int, batch: _Batch) -> None:
        self._batches[number] = batch
        self._flying[batch.future] = batch
        if self.view.again:
            self._drain_again()

    def _drain(self) -> None:
        """The descriptor is readable, or C asked for it: resolve what is done."""
        if self.io is None:
            return
        done = self.view.done
        for index in range(_lib.kv_io_drain(self.io)):
            batch = self._batches.pop(done[index])
            del self._flying[batch.future]
            if not batch.future.done():
                batch.future.set_result(batch.results)
            for waiter in batch.waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self.view.again:
            self._drain_again()
        if self._emptied and not self.view.pending:
            for emptied in self._emptied:
                if not emptied.done():
                    emptied.set_result(None)
            self._emptied.clear()

    def _drain_again(self) -> None:
        """C has something that no readiness will announce."""
        if self._again is None and self._loop is not None:
            soon = self.view.again == _lib.KV_SOON
            self._again = self._loop.call_later(0 if soon else PAUSE_S, self._drain_once_more)

    def _drain_once_more(self) -> None:
        self._again = None
        self._drain()

    def _refuse(self, number: int, ops: NDArray[np.void]) -> NoReturn:
        """Raise what a refusal of kv_io_submit means."""
        at = int(self.view.bad)
        if number == _lib.KV_TOO_MANY:
            raise ValueError(f"a batch of {len(ops)} operations is longer than max_ops, {self.max_ops}: split it")
        if number == _lib.KV_BUSY:
            raise EngineBusy(f"{self.pending} operations are not done, {self.max_ops} may be: await some of them")
        if number == _lib.KV_FENCED:
            raise SyncFailed(f"an earlier sync of file {ops['file'][at]} failed", errno=self.view.bad_errno)
        why = {
            _lib.KV_UNKNOWN_FILE: "its file is not attached",
            _lib.KV_UNKNOWN_KIND: "its kind is neither READ nor WRITE",
            _lib.KV_BEYOND: "its offset or its memory goes beyond what there is",
            _lib.KV_MISALIGNED: f"address, offset and length on a direct file are multiples of {DIRECT_ALIGNMENT}",
        }[number]
        raise ValueError(f"operation {at}, {ops[at]}: {why}")

    def _free(self) -> None:
        io, self.io = self.io, None
        if self._process != os.getpid():
            return  # a forked child: even the loop's poll set is the parent's
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.view.fd)
        if self._again is not None:
            self._again.cancel()
        _lib.kv_io_close(io)
