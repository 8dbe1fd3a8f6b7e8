"""The path by remote reads: look-ups by message, bytes by one-sided gets. For lanes with native RMA (RDMA, CMA).

The node's C thread says where the blocks lie, with their sums; the bytes are fetched without it, straight into the
caller's memory. A sum that differs means that the place was reused meanwhile: those blocks are asked for by message,
which looks them up anew. Writes go by message, checked against their grants.

Why a read here is never stale, though nobody of the node takes part in it: the look-up is answered under the node's
lease (`slots_reader.c`: UNAVAILABLE once it is over), so at a moment within the call the block was visible with that
sum. What is fetched then is the block's content if it has that sum, whenever it was fetched and whoever leads by then:
a key has one content, whose sum was committed with it. So the lease need not hold until the bytes are here: the node's
memory may have been reused, and the sum tells. A remote key is good for this incarnation of the node alone.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.client.message import MessagePath
from ucxkv.client.path import INLINE_BYTES, U8, U64, chunk_bounds, pieces_iov
from ucxkv.client.results import PathKind, ReadStatus
from ucxkv.dial import mapped_error
from ucxkv.errors import Unavailable
from ucxkv.tiers import copy as tier_copy
from ucxkv.transport.base import TransportError
from ucxkv.transport.data import DataClient
from ucxkv.transport.onesided import RemoteReader

if TYPE_CHECKING:
    from ucxkv.buffers import Pieces
    from ucxkv.client.message import MessageEngine

__all__ = ["RmaPath"]

_OWN_REGION = 0
_HIT, _MISS, _SIZE = int(ReadStatus.HIT), int(ReadStatus.MISS), int(ReadStatus.SIZE)
_STALE, _UNMAPPED = int(ReadStatus.STALE), int(ReadStatus.UNMAPPED)


class RmaPath(MessagePath):
    """One node by one-sided reads. See `Path`."""

    kind = PathKind.RMA

    def __init__(self, engine: MessageEngine, client: DataClient, over: str, reader: RemoteReader) -> None:
        super().__init__(engine, client, over)
        self._reader = reader
        self.read_into = None  # it would go by message
        self.fetch = self._fetch_at

    async def _read(self, keys: bytes, pieces: Pieces, deadline_ns: int | None) -> tuple[U8, U64]:
        if not pieces.is_flat:  # scattered values go by message, which gathers them in C
            return await super()._read(keys, pieces, deadline_ns)
        try:
            found = await self._client.lookup(keys, deadline_ns=deadline_ns)
            status = found["status"].astype(np.uint8)
            lengths = found["length"].astype(np.uint64)
            status[(status == _HIT) & (lengths != pieces.nbytes)] = _SIZE
            status[(status == _HIT) & (found["region"] != _OWN_REGION)] = _UNMAPPED
            wanted = np.flatnonzero(status == _HIT)
            if len(wanted):
                status[wanted] = await self._fetch(
                    pieces.take(wanted), found["addr"][wanted], found["sum"][wanted], deadline_ns
                )
        except TransportError as exc:
            raise mapped_error(exc) from exc
        stale = np.flatnonzero(status == _STALE)
        if len(stale):
            again = b"".join(keys[16 * i : 16 * i + 16] for i in stale.tolist())
            status[stale], lengths[stale] = await super()._read(again, pieces.take(stale), deadline_ns)
        return status, lengths

    async def _fetch_at(self, pieces: Pieces, offsets: U64, sums: U64, deadline_ns: int | None) -> U8:
        """See Fetch."""
        if self._is_closed:
            raise Unavailable("the node is gone")
        try:
            return await self._fetch(pieces, offsets, sums, deadline_ns)
        except TransportError as exc:
            raise mapped_error(exc) from exc

    async def _fetch(self, pieces: Pieces, offsets: U64, sums: U64, deadline_ns: int | None) -> U8:
        """Bring the bytes, about 4 MiB at a time, and prove them: u8[n]; the loop gets a turn in between."""
        status = np.empty(len(pieces), np.uint8)
        cuts = chunk_bounds(pieces.nbytes, INLINE_BYTES)
        for begin, end in itertools.pairwise(cuts):
            part = pieces.run(begin, end)
            await self._reader.read(part.addr, part.length, offsets[begin:end], keep=pieces, deadline_ns=deadline_ns)
            status[begin:end] = _checked(part, sums[begin:end])
            if end < len(pieces):
                await asyncio.sleep(0)
        return status

    def close(self) -> None:
        """See Path."""
        if not self._is_closed:
            self._reader.close()
        super().close()


def _checked(pieces: Pieces, sums: U64) -> U8:
    """HIT where the fetched bytes have the committed sum, else STALE."""
    n = len(pieces)
    actual = np.empty(n, np.uint64)
    iov = pieces_iov(pieces).view(tier_copy.IOV_DTYPE).reshape(-1)
    tier_copy.gather(np.ascontiguousarray(pieces.first), iov, np.zeros(n, np.uint64), actual)
    return np.where(actual == sums, np.uint8(_HIT), np.uint8(_STALE))
