"""The same-host path: the node's slot table and segments, mapped; one C call reads, proves and never asks anybody.

Invariants
  - The table is mapped read-only; segments are mapped writable only for what this client was granted.
  - An answer is given only under the node's lease and in the epoch that the client was welcomed in, both checked
    after the last byte was read (`slots_reader.c`); else it is UNAVAILABLE, or NotServed is raised. Seen in another
    epoch, the node is left and dialled again.
  - Bytes are a HIT only when the slot did not change under the copy and the sum agrees.
  - `close()` unmaps only after no call of this path is running: a reader in a thread counts itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ucxkv import errors
from ucxkv.client.path import THREAD_BYTES, U8, U16, U64, Fetch, ReadInto, chunk_bounds, pieces_iov
from ucxkv.client.results import PathKind
from ucxkv.directory import CancelFlag, NotServed, ReadStatus, Serving, SlotReader, SlotTableError
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.segments import MappedSegment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucxkv.buffers import Pieces
    from ucxkv.directory import Found
    from ucxkv.protocol import messages as m

__all__ = ["MappedPath"]

T = TypeVar("T")


class MappedPath:
    """A node's memory in this process. Takes over the descriptors (the table, then the segments of regions 0, 1,
    ...).
    """

    kind = PathKind.MAPPED

    def __init__(self, welcome: m.Welcome, fds: Sequence[int]) -> None:
        self.why = "the node runs on this host and handed out its memory"
        self._running = 0
        self._is_closed = False
        self._is_leaving = False
        self.on_other_epoch: Callable[[], None] | None = None
        """See Path."""
        self.segments: list[MappedSegment] = []
        self._foreign: dict[int, tuple[MappedSegment, memoryview]] = {}  # the view keeps the pages while it is here
        self._retired: list[memoryview] = []  # unmapped while a thread was reading
        try:
            own = [info for info in welcome.regions if info.node_id == welcome.node_id]
            if len(fds) != 1 + len(own):
                raise SlotTableError(f"{len(fds)} descriptors for a table and {len(own)} segments")
            self._table = MappedSegment(fds[0], welcome.table_bytes, writable=False)
            self._reader = SlotReader(self._table.view)
            for info, fd in zip(own, fds[1:], strict=True):
                if info.region >= self._reader.max_regions:
                    raise SlotTableError(f"region {info.region} is not below {self._reader.max_regions}")
                segment = MappedSegment(fd, info.size_bytes, writable=True)
                self.segments.append(segment)
                self._reader.map_region(info.region, segment.address, segment.size_bytes)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self.read_into: ReadInto | None = self._reader.into_reader(THREAD_BYTES)
        """See Path."""
        self.fetch: Fetch | None = self._fetch
        """See Path."""
        self.contains = self._reader.contains
        """(key) -> whether it is visible; not for a closed path. Raises NotServed: call `refused`."""
        self._bases = np.array([segment.address for segment in self.segments], np.uint64)
        self._bases_list = self._bases.tolist()

    # ---- reading

    async def read(self, keys: bytes, pieces: Pieces, deadline_ns: int | None) -> tuple[U8, U64]:
        """See Path. Gives the loop a turn every few megabytes; values too large for that are read by a thread."""
        n = len(pieces)
        if self._is_closed:
            return np.full(n, ReadStatus.UNAVAILABLE, np.uint8), np.zeros(n, np.uint64)
        iov = pieces_iov(pieces)
        cuts = chunk_bounds(pieces.nbytes)
        if len(cuts) == 2 and (n != 1 or int(pieces.nbytes[0]) <= THREAD_BYTES):
            result = self._reader.read(keys, pieces.first, iov)
            self._look_at(result.status)
            return result.status, result.length
        status, lengths = np.empty(n, np.uint8), np.empty(n, np.uint64)
        for begin, end in itertools.pairwise(cuts):
            first = np.ascontiguousarray(pieces.first[begin : end + 1])
            part = iov[first[0] : first[-1]]
            first = first - first[0]
            some = keys[16 * begin : 16 * end]
            if end - begin == 1 and int(pieces.nbytes[begin]) > THREAD_BYTES:
                flag = CancelFlag()
                result = await self._in_thread(partial(self._reader.read, some, first, part, flag), flag.set)
            else:
                result = self._reader.read(some, first, part)
                await asyncio.sleep(0)
            self._look_at(result.status)
            status[begin:end], lengths[begin:end] = result.status, result.length
            if self._is_closed:
                status[end:] = ReadStatus.UNAVAILABLE
                lengths[end:] = 0
                break
        return status, lengths

    def _look_at(self, status: U8) -> None:
        if len(status) and status[0] == ReadStatus.UNAVAILABLE:  # all of them are, or none
            self.refused()

    def refused(self) -> None:
        """The node did not answer: look whether it is because of its epoch, and leave it then."""
        if self.is_other_epoch and not self._is_leaving and self.on_other_epoch is not None:
            self._is_leaving = True
            asyncio.get_running_loop().call_soon(self.on_other_epoch)

    @property
    def is_other_epoch(self) -> bool:
        """Whether the node went over to another epoch than the one the client was welcomed in."""
        return not self._is_closed and self._reader.serving is Serving.OTHER_EPOCH

    @property
    def is_served(self) -> bool:
        """Whether the node may answer at this moment, as far as its memory says."""
        return not self._is_closed and self._reader.serving is Serving.SERVED

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except NotServed:
            self.refused()
            raise

    async def _in_thread(self, call: Callable[[], T], cancel: Callable[[], None]) -> T:
        """Run `call` in a thread; when cancelled, stop it and wait until it has let go of the caller's memory."""
        self._running += 1
        task = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancel()
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):  # another one; the first is raised below
                    await asyncio.wait([task])
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._retired.clear()
                if self._is_closed:
                    self._unmap()

    async def lookup(self, keys: bytes, deadline_ns: int | None) -> tuple[U8, U64, U8]:
        """See Path."""
        with self._noticing():
            records, found = self._reader.lookup(keys)
        return found, records["length"].astype(np.uint64), records["tier"]

    async def exists(self, keys: bytes, deadline_ns: int | None) -> U8:
        """See Path."""
        with self._noticing():
            return self._reader.exists(keys)

    async def match(self, keys: bytes, deadline_ns: int | None) -> int:
        """See Path."""
        with self._noticing():
            return self._reader.match(keys)

    async def _fetch(self, pieces: Pieces, offsets: U64, sums: U64, deadline_ns: int | None) -> U8:
        """See Fetch."""
        if self._is_closed:
            raise errors.Unavailable("the node is gone")
        status = np.full(len(pieces), ReadStatus.STALE, np.uint8)
        size = np.uint64(self.segments[0].size_bytes)
        if (offsets > size).any() or (pieces.nbytes > size - offsets).any():
            raise errors.Unavailable("the node named a place outside of its memory")
        for begin, end in itertools.pairwise(chunk_bounds(pieces.nbytes)):
            part = pieces.run(begin, end)
            iov = np.empty(end - begin, tier_copy.IOV_DTYPE)
            words = iov.view(np.uint64).reshape(-1, 2)
            words[:, 0], words[:, 1] = self._bases[0] + offsets[begin:end], part.nbytes
            to, found, flag = np.ascontiguousarray(part.addr), np.empty(end - begin, np.uint64), tier_copy.CancelFlag()
            copy = partial(tier_copy.gather, np.arange(end - begin + 1, dtype=np.uint32), iov, to, found, flag)
            if part.total_bytes > THREAD_BYTES:
                await self._in_thread(copy, flag.set)
            else:
                copy()
                await asyncio.sleep(0)
            status[begin:end] = np.where(found == sums[begin:end], np.uint8(ReadStatus.HIT), status[begin:end])
            if self._is_closed:
                break
        return status

    def view(self, key: bytes) -> tuple[Found, memoryview | None]:
        """Where one block lies, and its bytes, read-only; they stay put only under a lease."""
        found = self._reader.view(key)
        if found.status is not ReadStatus.HIT:
            if found.status is ReadStatus.UNAVAILABLE:
                self.refused()
            return found, None
        for segment in (*self.segments, *(segment for segment, _ in self._foreign.values())):
            if not segment.is_closed and 0 <= found.address - segment.address < segment.size_bytes:
                begin = found.address - segment.address
                return found, segment.view[begin : begin + found.length].toreadonly()
        return found, None

    def map_region(self, region: int, segment: MappedSegment) -> None:
        """A region of this shard that lies in another node's memory, mapped by that node's path."""
        self._foreign[region] = (segment, segment.view)
        self._reader.map_region(region, segment.address, segment.size_bytes)

    def unmap_region(self, region: int) -> None:
        """Forget a region whose node is gone."""
        self._reader.unmap_region(region)
        gone = self._foreign.pop(region, None)
        if gone is not None and self._running:
            self._retired.append(gone[1])

    def unmap_regions_of(self, other: MappedPath) -> None:
        """Forget all regions that lie in the memory of `other`, a path that is about to close."""
        for region in [r for r, (segment, _) in self._foreign.items() if segment in other.segments]:
            self.unmap_region(region)

    # ---- writing

    async def write(self, pieces: Pieces, regions: U16, offsets: U64, deadline_ns: int | None) -> U64:
        """See Path. `regions` are numbers of the node's own segments."""
        n = len(pieces)
        if self._is_closed:
            raise errors.Unavailable("the node is gone")
        sums = np.empty(n, np.uint64)
        targets = self._bases[regions] + offsets
        iov = pieces_iov(pieces).view(tier_copy.IOV_DTYPE).reshape(-1)
        flag = tier_copy.CancelFlag()
        if int(pieces.nbytes.sum()) > THREAD_BYTES:
            await self._in_thread(partial(tier_copy.gather, pieces.first, iov, targets, sums, flag), flag.set)
        else:
            tier_copy.gather(pieces.first, iov, targets, sums)
        return sums

    async def write_one(
        self, address: int, nbytes: int, region: int, offset: int, keep: object, deadline_ns: int
    ) -> int:
        """See Path."""
        return tier_copy.engine.copy_sum_at(self._bases_list[region] + offset, address, nbytes)

    # ---- the end

    @property
    def is_busy(self) -> bool:
        """See Path."""
        return self._running > 0

    def close(self) -> None:
        """See Path. Views that are still held keep their pages; new reads are refused."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._running:
            self._unmap()

    def _unmap(self) -> None:
        for region in list(self._foreign):
            self.unmap_region(region)
        for segment in self.segments:
            segment.close()
        if hasattr(self, "_table"):
            self._table.close()
