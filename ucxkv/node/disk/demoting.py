"""Writing behind: each new block of class cache gets its copy on disk, soon and beside serving, parents first.

Invariants
- A block that is being written is leased meanwhile, so what reaches the disk is what was put, or what the codec makes
  of it. Of each key one block is being written at a time: encoding may take any time, and the newer is to be the later.
- The directory is told of a copy when it is as safe as the datafiles promise; until then memory is the only place.
- What the disk could not take now (too much waits, no space) is offered again later; what it cannot ever take (empty,
  or longer than a datafile) is not. A drive that has failed takes nothing more, and the others go on.
- A delete waits for a write of its key that is under way, then for a tombstone: what was deleted does not come back.
- A tombstone never stands behind a newer copy of its key in the log: whether there is one, or one is on its way, is
  looked up in the same turn of the loop in which the tombstone is offered.
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

_BATCH_BYTES_MAX = 4 << 20
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
        smallest = min(one.block_bytes_max for one in datafiles.stores)
        self._batch_bytes = min(_BATCH_BYTES_MAX, smallest // _WRITERS)
        """What is under way is no longer than a file, so that no file of it is used again before its end is told."""
        self._has_work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._burials: set[asyncio.Task[None]] = set()
        self._again: list[tuple[int, int]] = []
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        """Keys whose blocks are on their way to the disk -> done when they are there, or not."""
        self._exact: set[bytes] = set()
        """Keys of blocks to be written again, now without loss; some of them are gone."""
        self.failures: dict[int, str] = {}
        """By drive: why nothing is written there any more, once it is so."""
        self.progress_ns = time.monotonic_ns()
        """When a write ended well, or there was nothing to write."""
        self.counts = {"disk_writes_refused": 0, "disk_too_long": 0}

    @property
    def failure(self) -> str:
        """Why nothing is written any more, or not on all drives; empty while all is well."""
        return "; ".join(dict.fromkeys(self.failures.values()))

    @property
    def has_ended(self) -> bool:
        """Whether no drive takes anything any more."""
        return len(self.failures) == len(self._datafiles.stores)

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
        return has_work and not self.has_ended and now_ns - self.progress_ns < patience_ns

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
            for drive in range(len(self._datafiles.stores)):
                self._fail(drive, exc)

    async def _write_all(self) -> None:
        while not self.has_ended:
            await self._has_work.wait()
            again, self._again = tuple(self._again), []
            found = self._store.handle(tiering.Fresh(self._batch_bytes, _BATCH_BLOCKS, again), time.monotonic_ns())
            if not found.blocks:
                self._has_work.clear()
                continue
            is_taken = await self._write(tuple(found.blocks))
            if not is_taken and not self.has_ended:
                await asyncio.sleep(_PAUSE_S)

    async def _write(self, named: Named) -> bool:
        """Write these, and tell the directory; False: the disk did not take them, and they are to be offered again."""
        drives = self._by_drive(self._of_fit_length(named))
        if not drives:
            return True
        words = self._store.directory.words
        named = tuple(each for some in drives.values() for each in some)
        keys = [words.key(slot) for slot, _ in named]
        if self.is_writing(keys):  # a block of before, gone by now
            self._again += named
            return False
        lease = self._store.handle(events.Lease(b"".join(keys), _LEASE_NS, _OWNER), time.monotonic_ns()).lease
        done = asyncio.get_running_loop().create_future()
        self._writing.update(dict.fromkeys(keys, done))
        try:
            if not lease:  # as many leases run as may
                self._again += named
                return False
            transfers = [
                self._transfer(drive, tuple(some), [self._block(slot) for slot, _ in some])  # now: slots change hands
                for drive, some in drives.items()
            ]
            return all(await asyncio.gather(*transfers))
        finally:
            self._store.handle(events.Release(lease), time.monotonic_ns())
            for key in keys:
                if self._writing.get(key) is done:
                    del self._writing[key]
            done.set_result(None)

    async def _transfer(self, drive: int, named: Named, blocks: list[Block]) -> bool:
        slots, generations = zip(*named, strict=True)
        keys, shown = [block.key for block in blocks], [block.sum for block in blocks]
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
            self._fail(drive, exc)
            return False
        handles = self._places.add(keys, found, shown)
        told = tiering.Copied(np.array(slots, np.int32), np.array(generations, np.uint64), handles)
        taken = self._store.handle(told, time.monotonic_ns()).taken
        for handle in handles[taken == 0].tolist():
            self._places.free(handle)
        self.progress_ns = time.monotonic_ns()
        self._exact.difference_update(keys)
        if not taken.all():  # gone or durable by now; looked at again when they no longer count as being written
            self.forget_soon([key for key, one in zip(keys, taken.tolist(), strict=True) if not one])
        return True

    def _of_fit_length(self, named: Named) -> Named:
        limit, words = min(store.block_bytes_max for store in self._datafiles.stores), self._store.directory.words
        fit = tuple(each for each in named if 0 < words.extent(each[0])[2] <= limit)
        self.counts["disk_too_long"] += len(named) - len(fit)
        return fit

    def _by_drive(self, named: Named) -> dict[int, list[tuple[int, int]]]:
        """Those whose drive takes anything, by drive; the others stay in memory only."""
        words, home, drives = self._store.directory.words, self._datafiles.home, dict[int, list[tuple[int, int]]]()
        for each in named:
            drive = home(words.key(each[0]))
            if drive not in self.failures:
                drives.setdefault(drive, []).append(each)
        return drives

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

    def _fail(self, drive: int, why: Exception) -> None:
        if drive not in self.failures:
            self.failures[drive] = str(why)
            self._has_work.set()
            what = "what belongs on this drive is kept in memory only until the node starts again"
            log.error("disk.failed", drive=drive, why=str(why), what=what)

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
        """Return when none of these, deleted before, comes back at a later start. Raises TierError when that cannot be
        had.
        """
        while writing := {id(one): one for key in keys if (one := self._writing.get(key)) is not None}:
            for one in writing.values():
                await asyncio.shield(one)
        await self._bury(keys)

    def forget_soon(self, keys: list[bytes]) -> None:
        """Copies of these are named by nobody, or will be by nobody when they are written: see to it, beside serving,
        that they do not come back.
        """
        task = asyncio.create_task(self._forgotten(keys), name="disk-forget")
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _forgotten(self, keys: list[bytes]) -> None:
        try:
            await self.forget(keys)
        except TierError as exc:
            log.debug("disk.not_forgotten", blocks=len(keys), why=str(exc))

    async def _bury(self, keys: list[bytes]) -> None:
        """A tombstone for each of these that has no newer copy on disk, nor one on its way. Raises TierError."""
        cold = self._store.directory.cold
        slots = self._store.directory.table.find(b"".join(keys)).tolist()
        dead = [
            key
            for key, slot in zip(keys, slots, strict=True)
            if key not in self._writing and (slot < 0 or not (cold.handle(slot) or cold.copy[slot]))
        ]
        if dead:
            await self._datafiles.forget(dead)

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
        """Write no more blocks; the tombstones that are on their way are written. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._burials:
            await asyncio.gather(*self._burials, return_exceptions=True)


def _as_coded(block: Block, coded: Coded) -> Block:
    """The block as it is written; a restart learns from it how long the value is, and the sum of what comes back."""
    if not coded.codec:
        return block
    original = memoryview(block.buffers[0]).nbytes
    return block._replace(
        sum=coded.sum, version=coded.shown, buffers=(coded.data,), flags=block.flags | coded.codec, original=original
    )
