"""Several stores, one a drive, as one.

A key has a home: the drive whose store's id and the key together hash highest. It stays there while the drives stay,
and when one comes or goes only the keys of that one move. So all writes and tombstones of a key are in one log, which
orders them. A block that recovery finds away from home (the drives changed) is served from where it is, unless home
has one; the next write or forget of its key puts a tombstone on the old drive too.

A drive that takes no more writes fails those of its own keys alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from ..base import TierError
from .recovery import RecoveredBlocks
from .store import Datafiles
from .values import Block, Place, Recovered, Stats

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["StripedDatafiles"]

T = TypeVar("T")


class StripedDatafiles:
    """See the module. stores: opened with `drive=` their position, each with an engine of its own, at least one."""

    def __init__(self, stores: Sequence[Datafiles]) -> None:
        if [store.drive for store in stores] != list(range(len(stores))) or not stores:
            raise ValueError("stores must be opened with drive=0, 1, ... in this order")
        self.stores = tuple(stores)
        self._astray: dict[bytes, set[int]] = {}

    def adopt(self, recovered: Sequence[RecoveredBlocks]) -> Iterator[Recovered]:
        """What is there, from what each store recovered; go through all of it before the first write."""
        away: dict[bytes, Recovered] = {}
        for drive, blocks in enumerate(recovered):
            for each in blocks:
                if self.home(each.key) != drive:
                    self._astray.setdefault(each.key, set()).add(drive)
                    away[each.key] = each
        for drive, blocks in enumerate(recovered):
            for each in blocks:
                if self.home(each.key) == drive:
                    away.pop(each.key, None)
                    yield each
        yield from away.values()

    def home(self, key: bytes) -> int:
        """The drive whose log a key's writes go to."""
        if len(self.stores) == 1:
            return 0
        weights = [xxhash.xxh3_64_intdigest(store.store_id + key) for store in self.stores]
        return weights.index(max(weights))

    async def write(self, blocks: Sequence[Block]) -> list[Place]:
        """See Datafiles.write; the first error of any drive, once all are done."""
        drives: dict[int, list[int]] = {}
        for at, block in enumerate(blocks):
            drives.setdefault(self.home(block.key), []).append(at)
        order = list(drives.items())
        written = await _all([self.stores[drive].write([blocks[at] for at in some]) for drive, some in order])
        places: dict[int, Place] = {}
        for (_, some), found in zip(order, written, strict=True):
            places.update(zip(some, found, strict=True))
        with contextlib.suppress(
            TierError
        ):  # while home has them, copies elsewhere do not count; the next call tries again
            await self._clean([block.key for block in blocks])
        return [places[at] for at in range(len(blocks))]

    async def forget(self, keys: Iterable[bytes]) -> None:
        """See Datafiles.forget."""
        keys = list(keys)
        drives: dict[int, list[bytes]] = {}
        for key in keys:
            drives.setdefault(self.home(key), []).append(key)
        await _all([self.stores[drive].forget(some) for drive, some in drives.items()])
        await self._clean(keys)

    async def _clean(self, keys: Sequence[bytes]) -> None:
        """Have copies away from home not come back."""
        if not self._astray:
            return
        drives: dict[int, list[bytes]] = {}
        for key in keys:
            for drive in self._astray.get(key, ()):
                drives.setdefault(drive, []).append(key)
        await _all([self.stores[drive].forget(some) for drive, some in drives.items()])
        for key in keys:
            self._astray.pop(key, None)

    async def read(self, place: Place, into: Buffer) -> None:
        """See Datafiles.read."""
        await self.stores[place.drive].read(place, into)

    def begin_read(self, place: Place, address: int, room: int, then: Callable[[TierError | None], None]) -> bool:
        """See Datafiles.begin_read."""
        return self.stores[place.drive].begin_read(place, address, room, then)

    async def read_many(self, places: Sequence[Place], into: Sequence[Buffer]) -> list[TierError | None]:
        """See Datafiles.read_many; one batch a drive, side by side."""
        if len(places) != len(into):
            raise ValueError(f"{len(places)} places, {len(into)} buffers")
        drives: dict[int, list[int]] = {}
        for at, place in enumerate(places):
            drives.setdefault(place.drive, []).append(at)
        order = list(drives.items())
        read = await _all(
            [
                self.stores[drive].read_many([places[at] for at in some], [into[at] for at in some])
                for drive, some in order
            ]
        )
        outcomes: list[TierError | None] = [None] * len(places)
        for (_, some), found in zip(order, read, strict=True):
            for at, outcome in zip(some, found, strict=True):
                outcomes[at] = outcome
        return outcomes

    def register(self, memory: Buffer) -> bool:
        """See Datafiles.register; whether every drive's engine keeps it at hand."""
        known = [store.register(memory) for store in self.stores]
        return all(known)

    def pinned(self, place: Place) -> AbstractContextManager[None]:
        """See Datafiles.pinned."""
        return self.stores[place.drive].pinned(place)

    @property
    def stats(self) -> tuple[Stats, ...]:
        """Of each drive."""
        return tuple(store.stats for store in self.stores)

    async def aclose(self) -> None:
        """Close all of them."""
        await _all([store.aclose() for store in self.stores])


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them side by side; when all have ended, the first error is raised."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
