"""Copies read into memory: straight there, or, of what is encoded, into memory of the reader's own and decoded from it.

Invariants
- A block is in its target with the sum that its place was said to bring back, or there is an error for it.
- Encoded bytes that are read at once take `_AT_ONCE` x `_SLICE_BYTES`, or as many single blocks that are longer.
- The targets are the caller's again when `fetch` returns or raises.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from ucxkv.node.disk.coding import AS_IS, Stored, codec_in
from ucxkv.tiers.copy import address_of
from ucxkv.tiers.datafile_format import padded
from ucxkv.tiers.datafiles.memory import AlignedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucxkv.node.disk.coding import Coder
    from ucxkv.tiers.base import TierError
    from ucxkv.tiers.datafiles import Place, StripedDatafiles

__all__ = ["Fetcher", "Wanted"]

_SLICE_BYTES = 8 << 20
_AT_ONCE = 4


class Wanted(NamedTuple):
    """A copy to read. into: all of the memory that it may use, `length` bytes of which become the value.

    shown: the sum of the value.
    """

    place: Place
    into: memoryview
    length: int
    shown: int


class Fetcher:
    """See the module."""

    def __init__(self, datafiles: StripedDatafiles, coder: Coder) -> None:
        self._datafiles, self._coder = datafiles, coder
        self._memory = AlignedMemory()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def begin(self, wanted: Wanted, then: Callable[[TierError | None], None]) -> bool:
        """`fetch` of one, told to `then`; see Datafiles.begin_read. False where it takes `fetch`."""
        place, into = wanted.place, wanted.into
        return codec_in(place.flags) == AS_IS and self._datafiles.begin_read(place, address_of(into), into.nbytes, then)

    async def fetch(self, wanted: Sequence[Wanted]) -> list[TierError | None]:
        """Read these: for each None, or why it could not be read. Raises as Datafiles.read_many."""
        parts: list[list[int]] = [[at for at, each in enumerate(wanted) if codec_in(each.place.flags) == AS_IS]]
        nbytes = _SLICE_BYTES
        for at, each in enumerate(wanted):
            if codec_in(each.place.flags) != AS_IS:
                if nbytes + padded(each.place.length) > _SLICE_BYTES:
                    parts.append([])
                    nbytes = 0
                parts[-1].append(at)
                nbytes += padded(each.place.length)
        reads = [self._plain, *[self._coded] * (len(parts) - 1)]
        works = [read([wanted[at] for at in part]) for read, part in zip(reads, parts, strict=True) if part]
        done = await asyncio.gather(*works, return_exceptions=True)  # what raises leaves no other behind
        outcomes: dict[int, TierError | None] = {}
        for part, found in zip(filter(None, parts), done, strict=True):
            if isinstance(found, BaseException):
                raise found
            outcomes.update(zip(part, found, strict=True))
        return [outcomes[at] for at in range(len(wanted))]

    async def _plain(self, wanted: Sequence[Wanted]) -> list[TierError | None]:
        return await self._datafiles.read_many([each.place for each in wanted], [each.into for each in wanted])

    async def _coded(self, wanted: Sequence[Wanted]) -> list[TierError | None]:
        async with self._slots:
            piece = self._memory.take(sum(padded(each.place.length) for each in wanted))
            try:
                return await self._decoded(wanted, piece.view.data)
            finally:
                self._memory.give(piece)

    async def _decoded(self, wanted: Sequence[Wanted], memory: memoryview) -> list[TierError | None]:
        """Read into `memory`, which is page-aligned, and decode from there."""
        buffers, at = [], 0
        for each in wanted:
            buffers.append(memory[at : at + padded(each.place.length)])
            at += padded(each.place.length)
        outcomes = await self._datafiles.read_many([each.place for each in wanted], buffers)
        good = [at for at, failed in enumerate(outcomes) if failed is None]
        stored = [
            Stored(
                buffers[at][: wanted[at].place.length],
                codec_in(wanted[at].place.flags),
                wanted[at].into[: wanted[at].length],
                wanted[at].shown,
            )
            for at in good
        ]
        for at, failed in zip(good, await self._coder.decode(stored), strict=True):
            outcomes[at] = failed
        return outcomes
