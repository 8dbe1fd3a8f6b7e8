"""How a client reaches one node's memory: the seam between the link and what moves the bytes.

One suite of contract tests runs on every implementation. A path never raises for the state of a single key: that is its
status. It raises `Unavailable` when the node is gone, and it writes into no destination after the call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ucxkv.tiers import copy as tier_copy

if TYPE_CHECKING:
    from ucxkv.buffers import Pieces
    from ucxkv.client.results import PathKind

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U64 = npt.NDArray[np.uint64]

ReadInto: TypeAlias = Callable[[bytes, Any, int], int | Awaitable[int]]
"""(key of 16 bytes, writable plain memory, deadline_ns) -> bytes read, or NOT_THERE, or OUT_OF_REACH: there, on disk
only or in memory that is not mapped, or OTHERWISE: ask again by `read`.

An awaitable of the same where the answer takes time. TypeError, ValueError or BufferError for other memory."""
OTHERWISE, NOT_THERE, OUT_OF_REACH = -1, -2, -3

Fetch: TypeAlias = Callable[["Pieces", U64, U64, int | None], Awaitable[U8]]
"""(destinations of n values, one piece each; offsets in the node's own segment; sums; deadline_ns) -> u8[n]: HIT, or
STALE where the bytes there have another sum. Raises Unavailable."""

INLINE_BYTES = 4 << 20
"""Bytes moved on the event loop before it gets a turn: a third of a millisecond, and about what the cache holds."""
THREAD_BYTES = 8 << 20
"""A single value above this is moved by a thread, since one C call moves it whole."""


def pieces_iov(pieces: Pieces) -> npt.NDArray[np.uint64]:
    """u64[m, 2] of (address, length), as C reads `kv_iov`."""
    iov = np.empty((len(pieces.addr), 2), np.uint64)
    iov[:, 0] = pieces.addr
    iov[:, 1] = pieces.length
    return iov


def chunk_bounds(nbytes: U64, limit: int = INLINE_BYTES) -> list[int]:
    """Cuts n values into runs of about `limit` bytes: 0, ..., n."""
    n = len(nbytes)
    total = int(nbytes.sum())
    if total <= limit:
        return [0, n]
    ends = np.cumsum(nbytes)
    cuts = [0]
    while cuts[-1] < n:
        begin = cuts[-1]
        base = int(ends[begin - 1]) if begin else 0
        cuts.append(max(begin + 1, int(np.searchsorted(ends, base + limit, side="right"))))
    return cuts


async def sums_of(pieces: Pieces) -> U64:
    """The sums of n values, u64[n]; in a thread where they are large. Reads nothing any more when it raises."""
    n = len(pieces)
    sums = np.empty(n, np.uint64)
    iov = pieces_iov(pieces).view(tier_copy.IOV_DTYPE).reshape(-1)
    first, nowhere = np.ascontiguousarray(pieces.first), np.zeros(n, np.uint64)
    if pieces.total_bytes <= THREAD_BYTES:
        tier_copy.gather(first, iov, nowhere, sums)
        return sums
    flag = tier_copy.CancelFlag()
    task = asyncio.ensure_future(asyncio.to_thread(tier_copy.gather, first, iov, nowhere, sums, flag))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        flag.set()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # another one; the first is raised below
                await asyncio.wait([task])
        raise
    return sums


class Path(Protocol):
    """What moves bytes between this client and one node."""

    kind: PathKind
    why: str
    on_other_epoch: Callable[[], None] | None
    """Called once, on a later turn of the loop, when the node is found in another epoch than it welcomed the client in.
    What it says there is no answer: a status is UNAVAILABLE, a call raises Unavailable."""
    read_into: ReadInto | None
    """The short way to read one value; None where there is none. Not to be called once the path is closed."""

    fetch: Fetch | None
    """Brings bytes from where the node says that they lie; None where the node's memory is not in reach."""

    async def read(self, keys: bytes, pieces: Pieces, deadline_ns: int | None) -> tuple[U8, U64]:
        """Read n blocks into their destinations: (ReadStatus u8[n], stored lengths u64[n])."""

    async def lookup(self, keys: bytes, deadline_ns: int | None) -> tuple[U8, U64, U8]:
        """Of n keys: visible u8[n], stored bytes u64[n], tier u8[n] (zero where not visible)."""

    async def exists(self, keys: bytes, deadline_ns: int | None) -> U8:
        """1 where visible, u8[n]."""

    async def match(self, keys: bytes, deadline_ns: int | None) -> int:
        """Length of the leading visible run."""

    async def write(self, pieces: Pieces, regions: U16, offsets: U64, deadline_ns: int | None) -> U64:
        """Move n values into granted extents; their sums, u64[n]. When it raises, the extents must not be used
        again.
        """

    async def write_one(
        self, address: int, nbytes: int, region: int, offset: int, keep: object, deadline_ns: int
    ) -> int:
        """`write` of one value that lies in one piece, owned by `keep`; its sum."""

    @property
    def is_busy(self) -> bool:
        """Whether something may still write into the node's memory on this path's behalf."""

    def close(self) -> None:
        """Give back mappings and endpoints. Idempotent."""
