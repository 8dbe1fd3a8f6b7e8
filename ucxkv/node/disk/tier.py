"""The disk tier of one node: its folders, what was in them at the start, and the two ways between memory and disk.

Promises
- A block is read back with the bytes that were put (where a codec with loss was chosen: with those it makes of them),
  or it is a miss; a folder that fails takes no part of memory along.
- Nothing here is waited for by a put that finds memory; one that finds none waits for the disk for `disk_wait_ms` at
  most, then the oldest blocks go without a copy.
- A deleted block does not come back: the answer to a delete waits until its tombstone is as safe as a copy is.
- What was on disk at the end is there after the next start, kill -9 included, as far as its parents are; in a cluster
  with shards it is not, since another node may have led its chains meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import structlog

from ucxkv import errors
from ucxkv.directory import tiering
from ucxkv.ids import KEY_BYTES
from ucxkv.node.disk.coding import AS_IS, Coder, codec_in, is_exact_next, is_usable
from ucxkv.node.disk.demoting import Demoter
from ucxkv.node.disk.places import Places
from ucxkv.node.disk.promoting import Promoter
from ucxkv.tiers.base import SetupFailed, TierError
from ucxkv.tiers.codecs import CODECS
from ucxkv.tiers.datafiles import Datafiles, Hooks, StripedDatafiles
from ucxkv.tiers.engines import open_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from ucxkv.node.config import NodeConfig
    from ucxkv.node.store import HostStore
    from ucxkv.tiers.datafiles import Place, Problem, Recovered, RecoveredBlocks
    from ucxkv.tiers.engines import Probe
    from ucxkv.tiers.io import IoEngine

__all__ = ["DiskTier", "datafile_bytes"]

_FLUSH_S = 10.0
_CLOSE_S = 15.0
_WARM_SHARE = 8
_WARM_BYTES_MAX = 64 << 20
_ADOPT_AT_ONCE = 4096
_SPARE = 4
"""One handle more for so many slots: those of blocks that went count until the grace is over."""

log = structlog.get_logger("ucxkv.node")


def datafile_bytes(disk_bytes: int) -> int:
    """How long each datafile of a folder is that may take so many bytes: 256 MiB, and at least eight of them."""
    return max(1 << 20, min(256 << 20, disk_bytes // 8)) >> 12 << 12


class DiskTier:
    """See the module. Made by `open`; `start` when the node serves; `aclose` before its store is closed."""

    def __init__(self, config: NodeConfig, store: HostStore) -> None:
        self._config, self._store = config, store
        self.places = Places(store.table.capacity + store.table.capacity // _SPARE)
        self.coder = Coder(config)
        self._engines: list[IoEngine] = []
        self._stores: list[Datafiles] = []
        self._probes: list[Probe] = []
        self._patience_ns = config.disk_wait_ms * 1_000_000
        self._tombs: list[bytes] = []
        self._tomb_timer: asyncio.TimerHandle | None = None
        self.recovered = self.unreachable = 0
        self.has_unshown = False
        """Blocks are on disk that this start does not show, and another one may."""
        self.is_stuck = False
        """It was closed while the disk did not answer: the kernel has its memory until the process ends."""

    @classmethod
    async def open(cls, config: NodeConfig, store: HostStore) -> Self:
        """Open the folders and take in what is there. Raises SetupFailed; then nothing is left open."""
        tier = cls(config, store)
        try:
            await tier._open()
        except BaseException:
            await tier._close_stores()
            raise
        return tier

    async def _open(self) -> None:
        config = self._config
        found: list[RecoveredBlocks] = []
        for drive, name in enumerate(config.disk):
            folder = Path(name)
            await asyncio.to_thread(_make, folder)
            engine = open_engine(config.io_engine, directory=folder, on_probe=self._probes.append)
            self._engines.append(engine)
            store, blocks, problems = await Datafiles.open(
                folder,
                engine,
                file_bytes=datafile_bytes(config.disk_bytes),
                files_max=max(3, config.disk_bytes // datafile_bytes(config.disk_bytes)),
                hooks=Hooks(self._is_hot, self._moved, partial(self._dropped, drive)),
                drive=drive,
                register=[self._store.segment.view],
            )
            self._stores.append(store)
            found.append(blocks)
            _report(name, problems, self._probes[-1])
            _warn_of_small(name, config.disk_bytes)
        self.datafiles = StripedDatafiles(self._stores)
        self.promoter = Promoter(
            self._store,
            self.datafiles,
            self.places,
            self.coder,
            min(_WARM_BYTES_MAX, max(1 << 20, config.host_bytes // _WARM_SHARE)),
        )
        self.demoter = Demoter(self._store, self.datafiles, self.places, self.coder)
        blocks_found = self._readable(self.datafiles.adopt(found))
        if config.cluster:
            self.unreachable = sum(1 for _ in blocks_found)
        else:
            self._adopt(blocks_found)
        self.has_unshown |= self.unreachable > 0

    def start(self) -> None:
        """Begin to write."""
        self._store.disk = self
        self.demoter.start()

    # ---- what is there at the start

    def _readable(self, found: Iterable[Recovered]) -> Iterator[Recovered]:
        """Without those of a codec that this process lacks, or too long for its memory: they are left as they are."""
        usable: dict[int, bool] = {}
        unknown = Counter[int]()
        limit, longest, too_long = self._store.value_bytes_max, 0, 0
        for one in found:
            length = one.original or one.place.length
            if length > limit:
                longest, too_long = max(longest, length), too_long + 1
                continue
            if not one.place.flags and not one.original:
                yield one
                continue
            codec = codec_in(one.place.flags)
            if codec not in usable:
                usable[codec] = is_usable(codec)
            if usable[codec] and (codec == AS_IS) == (not one.original):
                yield one
            else:
                unknown[codec] += 1
        self.has_unshown |= bool(too_long or unknown)
        if too_long:
            fix = "give the node more --host-bytes, then start it again"
            log.warning("disk.too_long", blocks=too_long, longest=longest, limit=limit, fix=fix)
        for number, count in unknown.items():
            log.warning("disk.undecodable", blocks=count, codec=number, fix=_fix_for(number))

    def _adopt(self, found: Iterable[Recovered]) -> None:
        """Show what was recovered, parents before children; log order is that but for what was written again."""
        began, left = time.monotonic(), list(found)
        while left:
            before = len(left)
            rest: list[Recovered] = []
            for at in range(0, before, _ADOPT_AT_ONCE):
                rest += self._adopt_some(left[at : at + _ADOPT_AT_ONCE])
            left = rest
            if len(left) == before:
                break
        self.unreachable = len(left)
        log.info(
            "disk.recovered",
            blocks=self.recovered,
            unreachable=self.unreachable,
            seconds=round(time.monotonic() - began, 3),
        )

    def _adopt_some(self, some: list[Recovered]) -> list[Recovered]:
        """Those that were not taken in."""
        shown = [one.version if one.original else one.place.sum for one in some]
        handles = self.places.add([one.key for one in some], [one.place for one in some], shown)
        event = tiering.AdoptCold(
            b"".join(one.key for one in some),
            b"".join(one.parent for one in some),
            handles,
            np.array([one.original or one.place.length for one in some], np.uint32),
            np.array(shown, np.uint64),
        )
        taken = self._store.handle(event, time.monotonic_ns()).taken
        for handle in handles[taken == 0].tolist():
            self.places.free(handle)
        self.recovered += int(taken.sum())
        missing = self._store.directory.table.find(b"".join(one.key for one in some)) < 0  # a durable one is in memory
        return [one for one, is_missing in zip(some, missing.tolist(), strict=True) if is_missing]

    # ---- what the datafiles ask and tell

    def _copy_at(self, key: bytes, place: Place) -> tuple[int, int]:
        """(slot, handle) of the visible block whose copy is there; (-1, 0): of none."""
        directory = self._store.directory
        slot = int(directory.table.find(key)[0])
        if slot < 0:
            return -1, 0
        handle = directory.cold.handle(slot) or directory.cold.copy[slot]
        return (slot, handle) if handle and self.places.place(handle) == place else (-1, 0)

    def _is_hot(self, key: bytes, place: Place) -> bool:
        """Whether chains go on below a block: without it all of them would be lost, and it is what they share; or the
        policy would rather have it in memory than what it evicted last."""
        slot, _ = self._copy_at(key, place)
        directory = self._store.directory
        return slot >= 0 and (directory.children(slot) > 0 or directory.ranking.is_wanted(slot))

    def _moved(self, key: bytes, old: Place, new: Place) -> None:
        slot, handle = self._copy_at(key, old)
        if slot >= 0:
            self.places.move(handle, new)

    def _dropped(self, drive: int, file: int, generation: int) -> None:
        handles = self.places.of_file(drive, file, generation)
        if len(handles):
            self._keep_exact(handles)
            event = tiering.CopiesLost(self.places.keys(handles), handles)
            gone = self._store.handle(event, time.monotonic_ns())
            self._store.counts["disk_reclaimed"] += gone.blocks
            self.poke()

    def _keep_exact(self, handles: npt.NDArray[np.uint32]) -> None:
        """Before these copies are lost: blocks that stay in memory are written again, some of them without loss."""
        flags = self.places.flags(handles)
        exact = [one for one in np.unique(flags).tolist() if is_exact_next(one)]
        if exact:
            keys, cold = self.places.keys(handles[np.isin(flags, exact)]), self._store.directory.cold
            slots = self._store.directory.table.find(keys).tolist()
            self.demoter.keep_exact(
                [keys[16 * at : 16 * at + 16] for at, slot in enumerate(slots) if slot >= 0 and cold.copy[slot]]
            )

    # ---- what the store asks and tells

    def poke(self) -> None:
        """There are new blocks."""
        self.demoter.poke()

    def is_working(self, now_ns: int) -> bool:
        """Whether memory may soon be had from blocks that are being written."""
        return self.demoter.is_working(now_ns, self._patience_ns)

    def freed(self, handle: int) -> None:
        """Nobody names this copy any more: see to it that it does not come back."""
        if self.places.place(handle) is not None:
            self._tombs.append(self.places.key(handle))
            if self._tomb_timer is None:
                self._tomb_timer = asyncio.get_running_loop().call_later(0.05, self._bury)
        self.places.free(handle)

    def _bury(self) -> None:
        self._tomb_timer = None
        keys, self._tombs = list(dict.fromkeys(self._tombs)), []
        self.demoter.forget_soon(keys)

    # ---- what sessions ask

    def has_cold(self, keys: bytes) -> bool:
        """Whether one of these blocks is on disk only."""
        cold = self._store.directory.cold
        return cold.blocks > 0 and any(
            slot >= 0 and cold.handle(slot) for slot in self._store.directory.table.find(keys).tolist()
        )

    def cold_above(self, keys: bytes, parents: bytes) -> list[bytes]:
        """The cold ones of these blocks and of all above them, which a durable put needs in memory."""
        directory = self._store.directory
        if not directory.cold.blocks:
            return []
        found: dict[int, None] = {}
        seen: set[int] = set()
        for slot in directory.table.find(keys + parents).tolist():
            while 0 <= slot < directory.table.capacity and slot not in seen:
                if directory.durable.is_durable(slot):
                    break
                seen.add(slot)
                if directory.cold.handle(slot):
                    found[slot] = None
                slot = directory.parent[slot]
        return [directory.words.key(slot) for slot in reversed(found)]

    def in_memory_only(self, keys: bytes) -> set[bytes]:
        """Those of these blocks that a delete need not mark on disk: none are, but where a drive has failed. What is in
        memory now may have been on disk under the same key before, as a block that went without a delete, or that the
        last start could not show.
        """
        directory, failures, found = self._store.directory, self.demoter.failures, set[bytes]()
        for at, slot in enumerate(directory.table.find(keys).tolist() if failures else ()):
            key = keys[KEY_BYTES * at : KEY_BYTES * (at + 1)]
            is_known = slot >= 0 and (directory.cold.handle(slot) or directory.cold.copy[slot])
            if self.datafiles.home(key) in failures and not is_known and not self.demoter.is_writing([key]):
                found.add(key)
        return found

    async def forget(self, keys: list[bytes]) -> None:
        """After a delete: return when none of these comes back. Raises Unavailable when that cannot be had."""
        if not keys:
            return
        try:
            await self.demoter.forget(keys)
        except TierError as exc:
            raise errors.Unavailable(
                f"the blocks are deleted here, but their copies on disk could not be marked so: {exc}; after a restart "
                "of the node they may be back, delete them again then"
            ) from exc

    # ---- reports, the end

    def numbers(self) -> dict[str, float]:
        """For the report and the metrics."""
        stats, cold = self.datafiles.stats, self._store.directory.cold
        return {
            "disk_blocks": cold.blocks,
            "disk_block_bytes": cold.bytes,
            "disk_copies": len(self.places),
            "disk_pending": self.demoter.pending,
            "disk_demoted": cold.demoted,
            "disk_promoted": cold.promoted,
            "disk_failed": float(bool(self.demoter.failure)),
            "disk_payload_bytes": sum(one.payload_bytes for one in stats),
            "disk_written_bytes": sum(one.written_bytes for one in stats),
            "disk_read_bytes": sum(one.read_bytes for one in stats),
            "disk_damaged": sum(one.blocks_damaged for one in stats),
            "disk_files": sum(one.files for one in stats),
            "disk_files_reclaimed": sum(one.files_reclaimed for one in stats),
            **self.coder.counts,
            **self.promoter.counts,
            **self.demoter.counts,
        }

    def facts(self) -> dict[str, str]:
        """What kind of disk tier this is."""
        engine = self._probes[-1]
        text = f"{', '.join(self._config.disk)} ({engine.name}{': ' + engine.why if engine.why else ''})"
        warnings = [one.warning for one in self.datafiles.stats if one.warning]
        failed = [f"failed: {self.demoter.failure}"] if self.demoter.failure else []
        return {"disk": "; ".join([text, *filter(None, [self.coder.fact]), *warnings, *failed])}

    async def aclose(self) -> None:
        """Write what is not written yet, for some seconds at most, and close; a disk that hangs is left. Idempotent."""
        if self._store.disk is self:
            left = await self.demoter.flush(_FLUSH_S, self._patience_ns)
            if left:
                log.warning("disk.unwritten", blocks=left, why=self.demoter.failure or "the disk is too slow")
            self._store.disk = None
        if self._tomb_timer is not None:
            self._tomb_timer.cancel()
            self._bury()
            self._tomb_timer = None
        closing = asyncio.ensure_future(self._close())
        done, _ = await asyncio.wait({closing}, timeout=_CLOSE_S)
        if not done:  # the kernel keeps what it still reads and writes; this process can only go
            self.is_stuck = True
            log.error("disk.stuck", folders=self._config.disk, why=f"the disk has not answered for {_CLOSE_S:.0f} s")
        else:
            closing.result()

    async def _close(self) -> None:
        if hasattr(self, "demoter"):
            await self.demoter.aclose()
            await self.promoter.aclose()
            self.coder.close()
        await self._close_stores()

    async def _close_stores(self) -> None:
        for store in self._stores:
            await store.aclose()
        for engine in self._engines:
            await engine.aclose()
        self._stores, self._engines = [], []


def _fix_for(codec: int) -> str:
    if codec < len(CODECS):
        return 'pip install "ucxkv[codec]", then start the node again'
    return "start the release that wrote them; this one does not know that codec"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SetupFailed(
            f"the folder {folder} of the disk tier",
            found=f"{exc.strerror}: {exc.filename}",
            needed="a folder that this process may write to, or a place to make one",
            fix="name another with --disk, or give this user the rights",
        ) from exc


def _warn_of_small(folder: str, disk_bytes: int) -> None:
    """Say that a drive can never hold what it was set to: each 64 KiB of that costs a slot in memory all the same."""
    try:
        drive = os.statvfs(folder)
    except OSError:
        return
    if disk_bytes > (total := drive.f_blocks * drive.f_frsize):
        why = (
            f"disk_bytes is {disk_bytes} and the drive has {total}; files stop where it is full; fix: lower disk_bytes"
        )
        log.warning("disk.small", folder=folder, why=why)


def _report(folder: str, problems: list[Problem], probe: Probe) -> None:
    """Say once what an operator should know."""
    if probe.why:
        log.info("disk.engine", folder=folder, engine=probe.name, why=probe.why)
    for problem in problems:
        log.warning("disk.found", folder=folder, kind=problem.kind.value, name=problem.name, what=problem.text)
