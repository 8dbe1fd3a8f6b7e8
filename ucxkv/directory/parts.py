"""Multi-part puts: Begin with the first part, Seal each, Commit with the last; the directory's half that deals with
them.

Part 0 is published under the block's key, part p >= 1 under `part_key(key, p, parts)`, all under one generation: the
derived slots first and the block's own last, so a reader that finds the block finds all of it. A block that goes is
hidden first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory.events import Extent, PutPart, PutReply
from ucxkv.directory.records import MAX_PARTS, derived_keys
from ucxkv.directory.slots import KEY_BYTES, ROOT_KEY, U8, Buffer, PutStatus, as_memory, count_keys
from ucxkv.directory.writing import Writing, WritingTable

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory


class PartWriter:
    """See the module; `writing` is the table of what is begun. Only a Directory makes and calls it."""

    def __init__(self, directory: Directory, limit: int) -> None:
        self._directory = directory
        self.writing = WritingTable(limit)

    def put(self, event: PutPart, now_ns: int) -> PutReply:
        """Carry out a PutPart."""
        if not 0 <= event.part < event.parts <= MAX_PARTS:
            raise ValueError(f"part {event.part} of {event.parts}: parts go from 0, and there are at most {MAX_PARTS}")
        n, directory = count_keys(event.keys), self._directory
        keys, parents = _split(event.keys), _split(event.parents)
        regions = as_memory(event.regions).cast("H").tolist()
        offsets = as_memory(event.offsets).cast("Q").tolist()
        lengths = as_memory(event.lengths).cast("I").tolist()
        sums = as_memory(event.sums).cast("Q").tolist()
        if not len(parents) == len(regions) == len(offsets) == len(lengths) == len(sums) == n:
            raise ValueError(f"columns that do not belong to {n} keys")
        status = np.zeros(n, np.uint8)
        slots, above = directory.table.find(event.keys).tolist(), directory.table.find(event.parents).tolist()
        before, retry_ns = directory.generation, 0
        for i, key in enumerate(keys):
            if directory.generation != before:  # a block of this call became visible
                slots[i], above[i] = directory.table.find(key + parents[i]).tolist()
            extent = (regions[i], offsets[i], lengths[i])
            status[i], wait_ns = self._seal(
                event, key, parents[i], slots[i], above[i], extent, sums[i], now_ns
            )  # fmt: skip
            retry_ns = max(retry_ns, wait_ns)
        return PutReply(status, directory.generation, retry_ns)

    def busy_marks(self, keys: Buffer, now_ns: int) -> tuple[U8, int]:
        """BUSY where a key is being written part by part, and for how long; gives up late ones on the way."""
        marks, retry_ns = np.zeros(count_keys(keys), np.uint8), 0
        for i, key in enumerate(_split(keys)):
            block = self._current(key, now_ns)
            if block is not None:
                marks[i] = PutStatus.BUSY
                retry_ns = max(retry_ns, block.deadline_ns - now_ns)
        return marks, retry_ns

    def reap(self, now_ns: int) -> None:
        """Give up what is past its deadline."""
        for block in self.writing.late(now_ns):
            self._give_up(block, now_ns)

    def lost(self, gone: set[int], regions: set[int], now_ns: int) -> None:
        """Give up blocks below slots that are gone, or with a part in regions that are."""
        for block in self.writing:
            if block.parent_slot in gone or any(region in regions for region, _, _ in block.extents()):
                if block.parent_slot in gone:
                    block.parent_slot = -1
                self._give_up(block, now_ns, regions)

    def _current(self, key: bytes, now_ns: int) -> Writing | None:
        block = self.writing.get(key)
        if block is not None and block.deadline_ns <= now_ns:
            self._give_up(block, now_ns)
            return None
        return block

    def _give_up(self, block: Writing, now_ns: int, lost: set[int] | None = None) -> None:
        self.writing.end(block)
        if block.parent_slot >= 0:
            self._directory.unhold(block.parent_slot)
        extents = [extent for extent in block.extents() if not lost or extent[0] not in lost]
        if extents:
            self._directory.leaving.add(extents, now_ns)

    def _seal(
        self, event: PutPart, key: bytes, parent: bytes, slot: int, above: int, extent: Extent, total: int, now_ns: int
    ) -> tuple[PutStatus, int]:
        """One block's part; its status, and for BUSY how long."""
        is_derived = self._directory.words.is_derived
        if key == ROOT_KEY or (slot >= 0 and is_derived(slot)):
            return PutStatus.REFUSED, 0
        if slot >= 0:
            return PutStatus.ALREADY, 0
        block = self._current(key, now_ns)
        if block is None:
            if parent != ROOT_KEY and (above < 0 or is_derived(above)):
                return PutStatus.ORDER, 0
            if self.writing.is_full:
                return PutStatus.BUSY, max(0, (self.writing.next_ns() or now_ns) - now_ns)
            parent_slot = -1 if parent == ROOT_KEY else above
            block = Writing(
                key, parent_slot, event.parts, event.put_id, event.deadline_ns, event.tier, event.flag
            )  # fmt: skip
        elif block.put_id != event.put_id or block.parts != event.parts:
            return PutStatus.BUSY, block.deadline_ns - now_ns
        elif event.part in block.sealed:
            return PutStatus.ALREADY, 0
        is_begun = bool(block.sealed)
        if len(block.sealed) + 1 == block.parts:
            return self._commit(block, event.part, extent, total, is_begun, now_ns), 0
        if not is_begun:
            self.writing.begin(block)
            if block.parent_slot >= 0:
                self._directory.hold(block.parent_slot)
        block.sealed[event.part] = (extent, total)
        return PutStatus.SEALED, 0

    def _commit(self, block: Writing, part: int, extent: Extent, total: int, is_begun: bool, now_ns: int) -> PutStatus:
        """Publish a block whose last part this is, or leave it as it was."""
        directory, table = self._directory, self._directory.table
        derived = derived_keys(block.key, block.parts)
        taken = max(table.find(b"".join(derived)).tolist(), default=-1) >= 0
        if taken or any(self.writing.get(one) for one in derived):
            if is_begun:
                self._give_up(block, now_ns)
            return PutStatus.REFUSED
        if table.capacity - table.used < block.parts:
            return PutStatus.NO_SPACE
        block.sealed[part] = (extent, total)
        slots = table.publish(block.records(directory.generation + 1)).tolist()
        if min(slots) < 0:  # an index line's neighbourhood is full
            table.hide(np.array([slot for slot in reversed(slots) if slot >= 0], np.int32))
            del block.sealed[part]
            return PutStatus.NO_SPACE
        if is_begun:
            self.writing.end(block)
        elif block.parent_slot >= 0:
            directory.hold(block.parent_slot)
        directory.generation += 1
        slot = slots[-1]
        directory.arrived(slot, block.parent_slot, sum(length for _, _, length in block.extents()), now_ns)
        for other in slots[:-1]:
            directory.parent[other], directory.holds[other] = slot, 0
        return PutStatus.STORED


def _split(keys: Buffer) -> list[bytes]:
    raw = bytes(as_memory(keys))
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
