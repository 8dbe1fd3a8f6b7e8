"""Writing behind: each new block of class cache gets its copy on disk, soon and beside serving, parents first.

Invariants
- A block that is being written is leased meanwhile, so what reaches the disk is what was put, or what the codec makes
  of it.
- The directory is told of a copy when it is as safe as the datafiles promise; until then memory is the only place.
- What the disk could not take now (too much waits, no space) is offered again later; what it cannot ever take (longer
  than a datafile) is not. A drive that has failed takes nothing more, and the others go on.
- A delete waits for a write of its key that is under way, then for a tombstone: what was deleted does not come back.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ucxkv.directory import events, tiering
from ucxkv.directory.cold import EXACT as SAID_EXACT
from ucxkv.directory.slots import NONE, ROOT_KEY
from ucxkv.node.disk.coding import EXACT
from ucxkv.tiers.base import NoSpace, TierBusy, TierError, WritesFailed
from ucxkv.tiers.datafiles import Block
from ucxkv.tiers.io import EngineClosed

if TYPE_CHECKING:
    from ucxkv.node.disk.coding import Coded, Coder
    from ucxkv.node.disk.places import Places
    from ucxkv.node.store import HostStore
    from ucxkv.tiers.datafiles import StripedDatafiles

__all__ = ["Demoter"]

_BATCH_BYTES = 4 << 20
_BATCH_BLOCKS = 256
_WRITERS = 2
"""Batches under way at once: one is gathered and summed up while the drive has the other."""
_LEASE_NS = 60 * 10**9
_PAUSE_S = 0.05
_EXACT_KEYS = 4096
"""From so many on, keys of blocks that are gone are left out."""
_OWNER = 0
"""Of the tier's leases; no session has it."""

log = structlog.get_logger("ucxkv.node")

Named = tuple[tuple[int, int], ...]
"""(slot, generation) of blocks."""


class Demoter:
    """See the module. `start` once, `aclose` at the end."""

    def __init__(self, store: HostStore, datafiles: StripedDatafiles, places: Places, coder: Coder) -> None:
        self._store, self._datafiles, self._places, self._coder = store, datafiles, places, coder
        self._has_work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._again: list[tuple[int, int]] = []
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        """Keys whose blocks are on their way to the disk -> done when they are there, or not."""
        self._exact: set[bytes] = set()
        """Keys of blocks to be written again, now without loss; some of them are gone."""
        self.failure: str = ""
        """Why nothing is written any more, once it is so."""
        self.progress_ns = time.monotonic_ns()
        """When a write ended well, or there was nothing to write."""
        self.counts = {"disk_writes_refused": 0, "disk_too_long": 0}

    def start(self) -> None:
        """Begin to write what is there, and what comes."""
        self._tasks = [asyncio.create_task(self._run(), name="disk-writer") for _ in range(_WRITERS)]
        self._has_work.set()

    def poke(self) -> None:
        """There may be new blocks."""
        if not self._has_work.is_set():
            self.progress_ns = time.monotonic_ns()
            self._has_work.set()

    def is_working(self, now_ns: int, patience_ns: int) -> bool:
        """Whether blocks are being written, and the disk has not stood still for longer than this."""
        has_work = bool(self._writing or self._again or self._store.directory.cold.fresh)
        return has_work and not self.failure and now_ns - self.progress_ns < patience_ns

    @property
    def pending(self) -> int:
        """Blocks that have no copy yet, at most; some of them may be gone."""
        return len(self._store.directory.cold.fresh) + len(self._again) + len(self._writing)

    # ---- writing

    async def _run(self) -> None:
        try:
            await self._write_all()
        except Exception as exc:  # a fault of ours: memory goes on without the disk, and says so
            log.exception("disk.broken")
            self._fail(exc)

    async def _write_all(self) -> None:
        while not self.failure:
            await self._has_work.wait()
            again, self._again = tuple(self._again), []
            found = self._store.handle(tiering.Fresh(_BATCH_BYTES, _BATCH_BLOCKS, again), time.monotonic_ns())
            if not found.blocks:
                self._has_work.clear()
                continue
            is_taken = await self._write(tuple(found.blocks))
            if not is_taken and not self.failure:
                await asyncio.sleep(_PAUSE_S)

    async def _write(self, named: Named) -> bool:
        """Write these, and tell the directory; False: the disk did not take them, and they are to be offered again."""
        named = self._short_enough(named)
        if not named:
            return True
        words = self._store.directory.words
        keys = [words.key(slot) for slot, _ in named]
        lease = self._store.handle(events.Lease(b"".join(keys), _LEASE_NS, _OWNER), time.monotonic_ns()).lease
        done = asyncio.get_running_loop().create_future()
        self._writing.update(dict.fromkeys(keys, done))
        try:
            if not lease:  # as many leases run as may
                self._again += named
                return False
            return await self._transfer(named, keys)
        finally:
            self._store.handle(events.Release(lease), time.monotonic_ns())
            for key in keys:
                if self._writing.get(key) is done:
                    del self._writing[key]
            done.set_result(None)

    async def _transfer(self, named: Named, keys: list[bytes]) -> bool:
        slots, generations = zip(*named, strict=True)
        blocks = [self._block(slot) for slot in slots]
        shown = [block.sum for block in blocks]
        try:
            if self._coder.is_encoding:
                exact = [block.flags == EXACT for block in blocks]
                coded = await self._coder.encode([block.buffers[0] for block in blocks], shown, exact)
                blocks, shown = list(map(_as_coded, blocks, coded)), [one.shown for one in coded]
            found = await self._datafiles.write(blocks)
        except (TierBusy, NoSpace) as exc:
            self.counts["disk_writes_refused"] += len(named)
            self._again += named
            log.debug("disk.refused", blocks=len(named), why=str(exc))
            return False
        except EngineClosed:
            return False
        except (WritesFailed, TierError, OSError) as exc:
            self._fail(exc)
            return False
        handles = self._places.add(keys, found, shown)
        told = tiering.Copied(np.array(slots, np.int32), np.array(generations, np.uint64), handles)
        taken = self._store.handle(told, time.monotonic_ns()).taken
        for handle in handles[taken == 0].tolist():
            self._places.free(handle)
        self.progress_ns = time.monotonic_ns()
        self._exact.difference_update(keys)
        self._forget_soon([key for key, one in zip(keys, taken.tolist(), strict=True) if not one])
        return True

    def _short_enough(self, named: Named) -> Named:
        limit, words = min(store.block_bytes_max for store in self._datafiles.stores), self._store.directory.words
        short = tuple(each for each in named if words.extent(each[0])[2] <= limit)
        self.counts["disk_too_long"] += len(named) - len(short)
        return short

    def _block(self, slot: int) -> Block:
        directory = self._store.directory
        words, above = directory.words, directory.parent[slot]
        _, offset, length = words.extent(slot)
        value = self._store.segment.view[offset : offset + length]
        key, (_, said, total) = words.key(slot), words.tail(slot)
        return Block(
            key=key,
            sum=total,
            version=0,
            buffers=(value,),
            flags=EXACT if said & SAID_EXACT or key in self._exact else 0,
            parent=ROOT_KEY if above == NONE else words.key(above),
        )

    def _fail(self, why: Exception) -> None:
        self.failure = str(why)
        self._has_work.set()
        log.error("disk.failed", why=self.failure, what="blocks are kept in memory only until the node starts again")

    def keep_exact(self, keys: list[bytes]) -> None:
        """Do not store these with loss: they were, or are not to be."""
        self._exact.update(keys)
        if len(self._exact) > _EXACT_KEYS:
            slots = self._store.directory.table.find(b"".join(self._exact)).tolist()
            self._exact = {key for key, slot in zip(self._exact, slots, strict=True) if slot >= 0}

    # ---- forgetting

    def is_writing(self, keys: list[bytes]) -> bool:
        """Whether one of these is on its way to the disk."""
        return not self._writing.keys().isdisjoint(keys)

    async def forget(self, keys: list[bytes]) -> None:
        """Return when none of these comes back at a later start. Raises TierError when that cannot be had."""
        for key in keys:
            while (writing := self._writing.get(key)) is not None:
                await asyncio.shield(writing)
        await self._datafiles.forget(keys)

    def _forget_soon(self, keys: list[bytes]) -> None:
        """The blocks of these went while they were written."""
        find = self._store.directory.table.find
        dead = [key for key in keys if key not in self._writing or int(find(key)[0]) < 0]
        if dead and not self.failure:
            task = asyncio.create_task(self._forgotten(dead), name="disk-forget")
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _forgotten(self, keys: list[bytes]) -> None:
        try:
            await self._datafiles.forget(keys)
        except TierError as exc:
            log.debug("disk.not_forgotten", blocks=len(keys), why=str(exc))

    async def flush(self, limit_s: float, patience_ns: int) -> int:
        """Wait until all that is there is written, at most so long, and while the disk does not stand still; how many
        blocks are not.
        """
        until = time.monotonic() + limit_s
        self.poke()
        while self.is_working(time.monotonic_ns(), patience_ns) and time.monotonic() < until:
            self.poke()
            await asyncio.sleep(0.01)
        return self.pending

    async def aclose(self) -> None:
        """Write nothing more. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_coded(block: Block, coded: Coded) -> Block:
    """The block as it is written; a restart learns from it how long the value is, and the sum of what comes back."""
    if not coded.codec:
        return block
    original = memoryview(block.buffers[0]).nbytes
    return block._replace(
        sum=coded.sum, version=coded.shown, buffers=(coded.data,), flags=block.flags | coded.codec, original=original
    )
