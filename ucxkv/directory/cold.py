"""Blocks and the disk: which have a copy there, which are there only. The directory's half that deals with a tier.

Invariants
- A block is *cold* when its value is on disk only: its slot says DISK_REGION and the copy's handle, `holds` says COLD.
  It is visible like any other, and found by every look-up; its value is read after the tier has brought it back.
- Memory is given up only by blocks that are held by nothing *in memory*: `holds` counts children in memory, `below`
  those that are cold. So a policy's leaf is a block that may leave memory, which for one with a copy means that it
  becomes cold, and nothing is hidden. One without a copy goes for good, and what is below it on disk with it.
- Only single-part blocks of class cache in this node's memory have copies: a durable block is in the log and in memory,
  and a block in parts goes as it always did.
- `copy` is the handle of a block in memory, 0 for none; of a cold block its slot has it. A handle belongs to one block.
- A block's sum is that of the bytes that a reader gets in memory. A tier that stores with loss brings back other bytes
  than were put, and says so in `Warm`: place and sum change at once. Its length never changes.
- Blocks without a copy are named to the tier in the order in which they came, so what it writes is parents first.
- A block in memory whose copy's file was used again is named again, but not more of them than have come anew since, nor
  than are in memory. So a disk that is smaller than memory is not written for ever, and writes at most double.

Without a tier nothing here costs anything but a comparison.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory import tiering as tr
from ucxkv.directory.events import Extent, RemovedReply
from ucxkv.directory.ranking import DAMAGED
from ucxkv.directory.slots import NONE, U8, PutStatus, as_memory
from ucxkv.policy.cost import Verdict

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

COLD = 1 << 30
"""In `holds`: the block's value is on disk only."""
DISK_REGION = 0xFFFF
"""Of a cold block's slot; its offset is the handle of the copy. No reader ever has it mapped."""
TIER_HOST, TIER_NVME = 1, 2
EXACT = 1
"""In the writer's byte of a slot: the value is not to be stored with loss."""
OWN_REGION = 0


class ColdBlocks:
    """See the module. Only a Directory makes and calls it. is_on: there is a disk tier."""

    def __init__(self, directory: Directory, *, is_on: bool) -> None:
        self._directory = directory
        self.is_on = is_on
        n = directory.table.capacity if is_on else 0
        self.arrays: dict[str, npt.NDArray[np.uint32]] = {name: np.zeros(n, np.uint32) for name in ("below", "copy")}
        self.below, self.copy = (as_memory(array).cast("I") for array in self.arrays.values())
        self.fresh: deque[tuple[int, int]] = deque()
        """(slot, generation) of blocks to be copied, some of them gone by now."""
        self._again_max = 0
        """So many blocks whose copies are gone may be named again."""
        self.blocks = self.bytes = 0
        self.demoted = self.promoted = 0

    # ---- coming and going, told by the directory

    def arrived(self, slots: list[int]) -> None:
        """Blocks of class cache in one part have become visible in memory."""
        generation = self._directory.words.generation
        self.fresh.extend((slot, generation(slot)) for slot in slots)
        self._again_max = min(self._again_max + len(slots), self._directory.blocks + len(slots) - self.blocks)
        if len(self.fresh) > 2 * len(self.copy):
            self.fresh = deque(each for each in self.fresh if self._is_fresh(*each))

    def left(self, slot: int, extents: list[Extent]) -> None:
        """This block is being hidden: its copy is no longer needed."""
        if self._directory.holds[slot] & COLD:
            self.blocks -= 1
            self.bytes -= self._directory.words.extent(slot)[2]
        elif self.copy[slot]:
            extents.append((DISK_REGION, self.copy[slot], 0))
            self.copy[slot] = 0
        self.below[slot] = 0

    def gone(self, slots: npt.NDArray[np.int64], now_ns: int) -> None:
        """The same for many at once, whatever holds them."""
        if not self.is_on or not len(slots):
            return
        is_cold = self._directory.arrays["holds"][slots] & np.uint32(COLD) != 0
        self.blocks -= int(is_cold.sum())
        self.bytes -= int(self._directory.table.records["length"][slots[is_cold]].sum(dtype=np.uint64))
        handles = self.arrays["copy"][slots]
        copies: list[Extent] = [(DISK_REGION, handle, 0) for handle in handles[handles != 0].tolist()]
        self.arrays["copy"][slots] = 0
        self.arrays["below"][slots] = 0
        if copies:
            self._directory.leaving.add(copies, now_ns)

    def demote(self, slot: int, extents: list[Extent]) -> int:
        """Give up the memory of a block that nothing holds and that has a copy; its bytes."""
        directory = self._directory
        extent = directory.words.extent(slot)
        directory.table.move(slot, DISK_REGION, self.copy[slot], TIER_NVME, directory.words.tail(slot)[2])
        self.copy[slot] = 0
        directory.holds[slot] = COLD
        directory.ranking.cooled(slot)
        above = directory.parent[slot]
        if above != NONE:
            self.below[above] += 1
            directory.unhold(above)
        extents.append(extent)
        self.blocks += 1
        self.bytes += extent[2]
        self.demoted += 1
        return extent[2]

    # ---- events

    def take_fresh(self, event: tr.Fresh, now_ns: int) -> tr.FreshReply:
        """Carry out a Fresh."""
        self.fresh.extendleft(reversed(event.again))
        blocks: list[tuple[int, int]] = []
        nbytes = 0
        while self.fresh and nbytes < event.nbytes and len(blocks) < event.limit:
            slot, generation = self.fresh.popleft()
            if self._is_fresh(slot, generation):
                nbytes += self._directory.words.extent(slot)[2]
                blocks.append((slot, generation))
        return tr.FreshReply(blocks, bool(self.fresh))

    def _is_fresh(self, slot: int, generation: int) -> bool:
        """Whether this is a visible block of that generation, in memory, without a copy and of class cache."""
        directory = self._directory
        words = directory.words
        if words.generation(slot) != generation or not words.is_visible(slot):
            return False
        single = words.single(slot)
        if single is None or single[0] != OWN_REGION or self.copy[slot]:
            return False
        return not directory.durable.is_durable(slot)

    def copied(self, event: tr.Copied, now_ns: int) -> tr.TakenReply:
        """Carry out a Copied."""
        slots = as_memory(event.slots).cast("i").tolist()
        generations = as_memory(event.generations).cast("Q").tolist()
        handles = as_memory(event.handles).cast("I").tolist()
        taken = np.zeros(len(slots), np.uint8)
        for at, (slot, generation, handle) in enumerate(zip(slots, generations, handles, strict=True)):
            if self._is_fresh(slot, generation):
                self.copy[slot] = handle
                taken[at] = 1
        return tr.TakenReply(taken)

    def warm(self, event: tr.Warm, now_ns: int) -> tr.TakenReply:
        """Carry out a Warm."""
        directory = self._directory
        slots: list[int] = directory.table.find(event.keys).tolist()
        handles = as_memory(event.handles).cast("I").tolist()
        offsets = as_memory(event.offsets).cast("Q").tolist()
        sums = as_memory(event.sums).cast("Q").tolist()
        taken = np.zeros(len(slots), np.uint8)
        promoted: list[int] = []
        for at, (slot, handle, offset, total) in enumerate(zip(slots, handles, offsets, sums, strict=True)):
            if slot >= 0 and handle and self.handle(slot) == handle:
                directory.ranking.decided(slot, Verdict.PROMOTE, "somebody asked for it", now_ns)
                self._promote(slot, handle, offset, total)
                promoted.append(slot)
                taken[at] = 1
        directory.ranking.warmed(promoted, now_ns)
        return tr.TakenReply(taken)

    def _promote(self, slot: int, handle: int, offset: int, total: int) -> None:
        directory = self._directory
        directory.table.move(slot, OWN_REGION, offset, TIER_HOST, total)
        self.copy[slot] = handle
        directory.holds[slot] = directory.holds[slot] & ~COLD
        above = directory.parent[slot]
        if above != NONE:
            self.below[above] -= 1
            directory.hold(above)
        self.blocks -= 1
        self.bytes -= directory.words.extent(slot)[2]
        self.promoted += 1

    def is_cold(self, slot: int) -> bool:
        """Whether a visible block's value is on disk only."""
        return bool(self._directory.holds[slot] & COLD)

    def among(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of these visible blocks that are cold."""
        found: npt.NDArray[np.int64] = slots[self._directory.arrays["holds"][slots] & np.uint32(COLD) != 0]
        return found

    def handle(self, slot: int) -> int:
        """The copy of a cold block; 0 when it is in memory."""
        region, offset, _ = self._directory.words.extent(slot)
        return offset if region == DISK_REGION else 0

    def lost(self, event: tr.CopiesLost, now_ns: int) -> RemovedReply:
        """Carry out a CopiesLost."""
        directory = self._directory
        slots: list[int] = directory.table.find(event.keys).tolist()
        gone: list[int] = []
        copies: list[Extent] = []
        for slot, handle in zip(slots, as_memory(event.handles).cast("I").tolist(), strict=True):
            if slot < 0 or not handle:
                continue
            if self.handle(slot) == handle:
                gone.append(slot)
            elif self.copy[slot] == handle:
                self.copy[slot] = 0
                if self._again_max > 0:
                    self._again_max -= 1
                    self.fresh.append((slot, directory.words.generation(slot)))
                copies.append((DISK_REGION, handle, 0))
        if copies:
            directory.leaving.add(copies, now_ns)
        reason = DAMAGED if event.is_damage else "the datafile of its copy, or of one above it, was needed again"
        reply = RemovedReply(0, 0)
        if gone:
            reply = directory.drop_slots(gone, now_ns, reason, is_evicted=not event.is_damage)
        if not event.is_damage:
            directory.totals["lost"] -= reply.blocks
            directory.totals["evicted"] += reply.blocks
        return reply

    def adopt(self, event: tr.AdoptCold, now_ns: int) -> tr.TakenReply:
        """Carry out an AdoptCold."""
        directory, table = self._directory, self._directory.table
        handles = np.frombuffer(event.handles, np.uint32)
        n = len(handles)
        out, slots, above, nbytes = table.put(
            event.keys, event.parents, np.full(n, DISK_REGION, np.uint16), handles.astype(np.uint64), event.lengths,
            event.sums, generation=directory.generation + 1, tier=TIER_NVME,
        )  # fmt: skip
        directory.generation += n
        stored = out == PutStatus.STORED
        mine, over = slots[stored], above[stored]
        arrays = directory.arrays
        arrays["parent"][mine] = over.astype(np.uint32)  # -1 is NONE
        arrays["holds"][mine] = COLD
        directory.ranking.came_held(mine.astype(np.int64), now_ns)
        directory.offspring.came(mine.tolist())
        np.add.at(self.arrays["below"], over[over >= 0], np.uint32(1))
        directory.blocks += len(mine)
        directory.bytes += nbytes
        self.blocks += len(mine)
        self.bytes += nbytes
        taken: U8 = stored.astype(np.uint8)
        return tr.TakenReply(taken)

    def trim(self, event: tr.Trim, now_ns: int) -> RemovedReply:
        """Carry out a Trim."""
        self._directory.ranking.settle(now_ns)
        directory, n = self._directory, self._directory.table.fresh
        holds, last_use = directory.arrays["holds"][:n], directory.arrays["last_use"][:n]
        is_visible = directory.table.records["state"][:n] == 1
        tails = np.flatnonzero((holds == COLD) & (self.arrays["below"][:n] == 0) & is_visible)
        gone: list[int] = []
        kept = set(directory.table.find(event.keep).tolist()) if event.keep else ()
        taken: Counter[int] = Counter()
        """Children that are among `gone`, by their parent's slot."""
        for tail in tails[np.argsort(last_use[tails], kind="stable")][: event.count].tolist():
            slot = tail
            while len(gone) < event.count and slot not in kept:
                gone.append(slot)
                slot = directory.parent[slot]
                if slot == NONE:
                    break
                taken[slot] += 1
                if directory.holds[slot] != COLD or self.below[slot] > taken[slot]:
                    break
        size = sum(directory.words.extent(slot)[2] for slot in gone)
        directory.leave(gone, now_ns, "the table was full: used longest ago of what is on disk only", is_evicted=True)
        directory.totals["evicted"] += len(gone)
        return RemovedReply(len(gone), size)
