"""Bringing blocks back: read from the datafiles into memory that is found for them, proved, and shown in place.

Invariants
- A block is brought back once at a time, however many ask for it; whoever asks while it is read waits for that.
- Memory that a read may still write into is in this module's hands (`in_hand`) and in nobody else's.
- A copy that is bad or gone is told to the directory: the block, and what is below it, is a miss from then on.
- What a read brought counts only while its handle is of a copy with those bytes, and a failure only while the copy is
  where it was read: meanwhile the block may have been deleted and put anew, or the copy written to another place.
- Bounded: `bytes_max` of one request; what does not fit, or finds no memory now, is LATER, and is asked for again.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from ucxkv.directory import tiering
from ucxkv.node.disk.fetching import Fetcher, Wanted
from ucxkv.tiers.base import BlockDamaged, BlockGone

if TYPE_CHECKING:
    from ucxkv.node.disk.coding import Coder
    from ucxkv.node.disk.places import Places
    from ucxkv.node.store import HostStore
    from ucxkv.tiers.base import TierError
    from ucxkv.tiers.datafiles import StripedDatafiles

__all__ = ["Promoter", "WarmStatus"]

log = structlog.get_logger("ucxkv.node")


class WarmStatus(IntEnum):
    """What became of one key of a request, as the protocol's Warmed says it."""

    WARM = 0  # its value is in memory
    MISS = 1  # there is no such block, or its copy was bad
    LATER = 2  # there was no room, or the disk was busy: ask again


class _Coming(NamedTuple):
    """A block that is being brought back: its copy's handle, and the extent at `offset` that is its own meanwhile."""

    key: bytes
    handle: int
    offset: int
    wanted: Wanted


class Promoter:
    """See the module. bytes_max: of values that one call brings back."""

    def __init__(
        self, store: HostStore, datafiles: StripedDatafiles, places: Places, coder: Coder, bytes_max: int
    ) -> None:
        self._store, self._places, self._bytes_max = store, places, bytes_max
        self._fetcher = Fetcher(datafiles, coder)
        self._works: set[asyncio.Future[None]] = set()
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self.in_hand: set[int] = set()
        """Offsets of extents that are being read into."""
        self.counts = {"disk_reads": 0, "disk_read_failed": 0}

    def status(self, key: bytes) -> WarmStatus:
        """Where this block is now; LATER: on disk only."""
        slot = self._store.directory.table.find_one(key)
        if slot < 0:
            return WarmStatus.MISS
        return WarmStatus.LATER if self._store.directory.cold.handle(slot) else WarmStatus.WARM

    def begin(self, key: bytes) -> WarmStatus | asyncio.Future[None]:
        """`warm` of one block for a caller that waits in no task: what it is, or what is done when `status` knows.

        LATER: this takes `warm`, which waits for room and reads what is long or encoded. The future is not to be
        cancelled; it may be others' too.
        """
        directory = self._store.directory
        slot = directory.table.find_one(key)
        if slot < 0:
            return WarmStatus.MISS
        handle = directory.cold.handle(slot)
        if not handle:
            return WarmStatus.WARM
        if key in self._coming:
            return self._coming[key]
        each = self._with_room(key, slot, handle, time.monotonic_ns())
        if each is None:
            return WarmStatus.LATER
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._fetcher.begin(each.wanted, partial(self._one_arrived, each, work, time.perf_counter())):
            self._give_back([each.offset])
            return WarmStatus.LATER
        self._works.add(work)
        self._coming[key] = work
        self._keep_room()  # while the disk works
        return work

    def _one_arrived(self, each: _Coming, work: asyncio.Future[None], began: float, failed: TierError | None) -> None:
        """What `begin` began is over. What is learned from it waits until those who wait for it have their turn."""
        seconds = time.perf_counter() - began
        self._works.discard(work)
        del self._coming[each.key]
        try:
            nbytes = self._show([each], [failed])
        except Exception as exc:  # a fault of ours, told to those who wait
            work.set_exception(exc)
            return
        work.set_result(None)
        work.get_loop().call_soon(self._store.policy.disk_read, self._store.directory, nbytes, seconds)

    async def warm(self, keys: list[bytes]) -> bytes:
        """Bring back those of these blocks that are cold: one WarmStatus a key."""
        status = bytearray(len(keys))
        cold = self._sort(keys, status)
        if cold:
            wanted = [key for key in dict.fromkeys(keys[at] for at in cold) if key not in self._coming]
            waits = {id(one): one for at in cold if (one := self._coming.get(keys[at])) is not None}
            if wanted:
                await self._bring(wanted)
            for one in waits.values():
                await asyncio.shield(one)
            slots = self._store.directory.table.find(b"".join([keys[at] for at in cold])).tolist()
            for at, slot in zip(cold, slots, strict=True):
                is_cold = slot >= 0 and self._store.directory.cold.handle(slot) != 0
                status[at] = WarmStatus.LATER if is_cold else WarmStatus.MISS if slot < 0 else WarmStatus.WARM
        return bytes(status)

    def _sort(self, keys: list[bytes], status: bytearray) -> list[int]:
        """Fill in what is known at once; the indices of cold blocks."""
        directory = self._store.directory
        cold = []
        for at, slot in enumerate(directory.table.find(b"".join(keys)).tolist()):
            if slot < 0:
                status[at] = WarmStatus.MISS
            elif directory.cold.handle(slot):
                cold.append(at)
        return cold

    async def _bring(self, keys: list[bytes]) -> None:
        """Bring back these cold blocks, as many as there is room for."""
        todo: list[_Coming] = []
        nbytes, now_ns = 0, time.monotonic_ns()
        directory = self._store.directory
        for key in keys:
            slot = directory.table.find_one(key)
            handle = directory.cold.handle(slot) if slot >= 0 else 0
            if not handle or self._places.place(handle) is None:
                continue
            nbytes += directory.words.extent(slot)[2]
            if todo and nbytes > self._bytes_max:
                break
            each = self._with_room(key, slot, handle, now_ns)
            if each is None:
                break
            todo.append(each)
        self._keep_room()
        if todo:
            work = asyncio.ensure_future(self._read(todo))
            self._works.add(work)
            self._coming.update((each.key, work) for each in todo)
            work.add_done_callback(lambda _: self._arrived(keys))
            work.add_done_callback(self._works.discard)
            await asyncio.shield(work)  # a cancelled request's read goes on: the disk has its memory

    def _with_room(self, key: bytes, slot: int, handle: int, now_ns: int) -> _Coming | None:
        """This cold block, with memory to come to, in hand; None: no such copy, or no room now."""
        place = self._places.place(handle)
        if place is None:
            return None
        length = self._store.directory.words.extent(slot)[2]
        offset = self._store.room_for(length, now_ns)
        if offset < 0:
            return None
        self.in_hand.add(offset)
        into = self._store.segment.view[offset : offset + self._store.slabs.bytes_at(offset)]
        return _Coming(key, handle, offset, Wanted(place, into, length, self._places.shown(handle)))

    def _keep_room(self) -> None:
        """Have some memory free for those who come next."""
        if self._store.space.is_low:
            self._store.room.evict_soon(self._store.space.free_target)

    def _arrived(self, keys: list[bytes]) -> None:
        for key in keys:
            one = self._coming.get(key)
            if one is not None and one.done():
                del self._coming[key]

    async def _read(self, todo: list[_Coming]) -> None:
        began = time.perf_counter()
        try:
            found = await self._fetcher.fetch([each.wanted for each in todo])
        except BaseException:
            self._give_back([each.offset for each in todo])
            raise
        seconds = time.perf_counter() - began
        self._store.policy.disk_read(self._store.directory, self._show(todo, found), seconds)

    def _show(self, todo: list[_Coming], found: list[TierError | None]) -> int:
        """Have the directory show what was read, and hear of what could not be; the bytes that were read well."""
        good: list[_Coming] = []
        failed: list[tuple[bytes, int, TierError]] = []
        for each, why in zip(todo, found, strict=True):
            place = each.wanted.place
            if why is not None and self._places.place(each.handle) == place:
                failed.append((each.key, each.handle, why))
            elif why is None and self._places.is_of(each.handle, place):
                good.append(each)
        self._bad(failed)
        taken, nbytes = b"", 0
        if good:
            event = tiering.Warm(
                b"".join(each.key for each in good),
                array("I", [each.handle for each in good]).tobytes(),
                array("Q", [each.offset for each in good]).tobytes(),
                array("Q", [each.wanted.shown for each in good]).tobytes(),
            )
            taken = self._store.handle(event, time.monotonic_ns()).taken.tobytes()
            self.counts["disk_reads"] += len(good)
            nbytes = sum([each.wanted.place.length for each in good])
        kept = {each.offset for each, one in zip(good, taken, strict=True) if one}
        self.in_hand -= kept
        self._give_back([each.offset for each in todo if each.offset not in kept])
        return nbytes

    async def aclose(self) -> None:
        """Return when nothing is read into memory any more: what was under way has arrived. No request comes."""
        await asyncio.gather(*self._works, return_exceptions=True)

    def _give_back(self, offsets: list[int]) -> None:
        self.in_hand.difference_update(offsets)
        self._store.slabs.free(offsets)

    def _bad(self, failed: list[tuple[bytes, int, TierError]]) -> None:
        """Copies that could not be read; one whose file was used again meanwhile is known to be gone already."""
        lost = [(key, handle) for key, handle, why in failed if isinstance(why, BlockDamaged | BlockGone)]
        if failed:  # once a batch: a drive that is gone fails thousands at a time, one that is busy is no news
            say = log.warning if lost else log.debug
            say("disk.unreadable", blocks=len(failed), key=failed[0][0].hex(), why=str(failed[0][2]))
        self.counts["disk_read_failed"] += len(failed)
        if lost:
            keys, handles = zip(*lost, strict=True)
            self._store.handle(
                tiering.CopiesLost(b"".join(keys), np.array(handles, np.uint32), is_damage=True), time.monotonic_ns()
            )
