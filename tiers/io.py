"""The seam between what keeps bytes on disks and what moves them: an engine of batched reads and writes.

Invariants:
- A batch is one array of operations and one future; no order is promised among operations, of one batch or of several.
- Memory belongs to the kernel from `submit` until the batch has left it. A future that is done says so; one that was
  cancelled says nothing: `settle` does.
- What a future gives is what the kernel did: bytes moved, or -errno. A short transfer is gone on with inside, so fewer
  bytes than asked mean the end of the file.
- A sync that failed is never tried again: the kernel may have dropped the pages it could not write, and would report
  success. Its file is fenced: writes and syncs fail from then on, reads go on.

Addresses are plain ints into memory that the caller keeps. Nothing here does I/O; the engines are in `engines/`.

Source: Linux man-pages io_uring(7); `fsync` failure: Rebello et al., "Can Applications Recover from fsync Failures?",
USENIX ATC 2020.
"""

from __future__ import annotations

import asyncio
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .base import TierError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "DIRECT_ALIGNMENT",
    "OP_DTYPE",
    "EngineBusy",
    "EngineClosed",
    "IoEngine",
    "IoFailed",
    "OpKind",
    "SyncFailed",
]

OP_DTYPE = np.dtype([("address", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("file", "<u2"), ("kind", "<u2")])
"""One transfer, as `kv_io_op` in C: 24 bytes. address and length: the caller's memory; offset: in the file; file: what
`attach` gave; kind: an OpKind."""

DIRECT_ALIGNMENT = 4096
"""Address, offset and length of a transfer on a file opened with O_DIRECT are multiples of this: drives with sectors of
4 KiB need it, all others take it."""


class OpKind(IntEnum):
    """What an operation does, in OP_DTYPE's `kind`."""

    READ = 0
    WRITE = 1


class IoFailed(TierError):
    """The system refused a transfer or a call: `errno` says why. Nothing is known of the bytes it was to move."""

    def __init__(self, what: str, *, errno: int) -> None:
        super().__init__(f"{what}: {os.strerror(errno)} (errno {errno})")
        self.what = what
        self.errno = errno


class SyncFailed(IoFailed):
    """A sync of this file failed, now or earlier: what was written and not synced may be lost, whatever a later sync
    would say. The file is closed to writes for good: keep what it was to hold elsewhere, and start another file."""


class EngineBusy(TierError):
    """As many operations wait as may, or the file or the memory is in use: wait for some of them, then try again."""


class EngineClosed(TierError):
    """The engine was closed: nothing was started."""


class IoEngine(Protocol):
    """Moves bytes between memory and files, many at a time, for one event loop. All calls are made in its thread.

    name: `io_uring` or `threads`. max_inflight_bytes: of transfers that the kernel has at a time; more wait inside, in
    order. One transfer may be longer and then goes alone.
    """

    name: str
    max_inflight_bytes: int

    def attach(self, fd: int, *, direct: bool) -> int:
        """A number for `fd` in operations; borrowed until `detach`, never closed here.

        direct: it was opened with O_DIRECT, so that transfers must be aligned. Raises IoFailed (EBADF), EngineBusy when
        no number is free, EngineClosed.
        """
        ...

    def detach(self, file: int) -> None:
        """Forget a file; its number may be given again. Raises EngineBusy while operations on it are not done."""
        ...

    def register(self, address: int, nbytes: int) -> bool:
        """Tell the kernel of memory that transfers will use often; False where it refuses, and all works the same.

        The memory stays mapped until `unregister` or `aclose`. Raises ValueError for memory that overlaps some that is
        registered.
        """
        ...

    def unregister(self, address: int) -> None:
        """Take back a `register` of this address, whatever it gave. Raises EngineBusy while transfers use it."""
        ...

    def submit(self, ops: NDArray[np.void]) -> asyncio.Future[NDArray[np.int64]]:
        """Start a batch; its future gives bytes moved per operation (fewer only at the end of the file), or -errno.

        ops: OP_DTYPE [n], copied before this returns. The memory it names is borrowed until the future is done, and
        when that is cancelled, until `settle` returns: a cancel stops no transfer. Raises ValueError for operations
        that cannot be (unknown file or kind, misaligned on a direct file), EngineBusy beyond `max_ops` operations not
        done, EngineClosed, and SyncFailed for writes to a fenced file; then nothing was started.
        """
        ...

    async def settle(self, future: asyncio.Future[NDArray[np.int64]]) -> None:
        """Return when every operation of that batch has left the kernel, also though its future was cancelled."""
        ...

    async def sync(self, file: int) -> None:
        """fdatasync: what writes of `file` wrote whose futures were done before the call survives a power cut.

        Raises SyncFailed; from then on every write and sync of that file fails at once with it. Raises EngineClosed,
        ValueError for an unknown file.
        """
        ...

    @property
    def pending(self) -> int:
        """Operations that are not done, syncs included."""
        ...

    async def aclose(self) -> None:
        """Take nothing more, wait for what was taken, give everything back. Idempotent."""
        ...
