"""Reading everything again, slowly, to find what a drive has lost before somebody asks for it.

Files are scrubbed in the order in which they were filled; one that is used again meanwhile is left at once. A block
whose bytes are wrong is reported, nothing is changed: the owner drops it from its index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from ..base import BlockDamaged, BlockGone, TierError
from ..datafile_format import TOMBSTONE, padded
from .files import DataFile, FileState, places_of, read_index
from .store import Datafiles
from .values import Place

__all__ = ["Scrubbed", "scrub"]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """One file was gone through. blocks, nbytes: that had their sums; damaged: (key, place) of those that had not;
    error: why the file could not be gone through, else empty."""

    file: int
    generation: int
    blocks: int
    nbytes: int
    damaged: tuple[tuple[bytes, Place], ...]
    error: str = ""


async def scrub(
    store: Datafiles, *, bytes_per_s: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[Scrubbed]:
    """Prove every block of the sealed files once, reading at most `bytes_per_s` on average.

    Ends after one round, and when the store is closed. Close the generator (`aclose`) to stop early. ValueError for a
    rate that is none. pause: waits so many seconds.
    """
    if not bytes_per_s > 0:
        raise ValueError(f"bytes_per_s must be above 0, not {bytes_per_s}")
    done: set[tuple[int, int]] = set()
    while not store.is_closed:
        rest = [
            file
            for file in store.files.values()
            if file.state is FileState.SEALED and (file.number, file.generation) not in done
        ]
        if not rest:
            return
        file = min(rest, key=lambda each: each.generation)
        done.add((file.number, file.generation))
        yield await _scrub_file(store, file, bytes_per_s, pause)


async def _scrub_file(
    store: Datafiles, file: DataFile, bytes_per_s: float, pause: Callable[[float], Awaitable[None]]
) -> Scrubbed:
    generation, blocks, nbytes = file.generation, 0, 0
    damaged: list[tuple[bytes, Place]] = []
    error = ""
    try:
        if not file.has(generation):
            raise BlockGone("used again meanwhile")
        file.readers += 1
        try:
            index = await read_index(store.engine, store.memory, file)
        finally:
            file.let_go()
        if index is None:
            error = "its index is damaged"
        else:
            rows = index.descriptors
            for key, place in places_of(file, rows[(rows["flags"] & TOMBSTONE) == 0], store.drive):
                try:
                    await store.prove(place)
                    blocks, nbytes = blocks + 1, nbytes + place.length
                except BlockDamaged:
                    damaged.append((key, place))
                await pause(padded(place.length) / bytes_per_s)
    except BlockGone:
        pass  # used again: what was in it is no more
    except TierError as exc:
        error = str(exc)
    return Scrubbed(file.number, generation, blocks, nbytes, tuple(damaged), error)
