"""Multi-part puts: Begin with the first part, Seal each, Commit with the last; the directory's half that deals with
them.

Part 0 is published under the block's key, part p >= 1 under `part_key(key, p, parts)`, all under one generation: the
derived slots first and the block's own last, so a reader that finds the block finds all of it. A block that goes is
hidden first.

A block may begin below a parent that is still being written under the same put_id, so that a rank sends its parts of a
whole chain in one call. When all its parts are sealed before its parent is visible it waits, and is published in the
cascade right after its parent's commit, in the same event: every single store into the slot table keeps I1 and I2.
A block that is given up (deadline, loss, no room in the table) takes everything begun below it along.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory.events import Extent, PutPart, PutReply, Roots
from ucxkv.directory.records import MAX_PARTS, derived_keys
from ucxkv.directory.roots import picked
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
        self.reap(now_ns)
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
        """BUSY where a key is being written part by part, and for how long; gives up late ones first."""
        self.reap(now_ns)
        marks, retry_ns = np.zeros(count_keys(keys), np.uint8), 0
        for i, key in enumerate(_split(keys)):
            block = self.writing.get(key)
            if block is not None:
                marks[i] = PutStatus.BUSY
                retry_ns = max(retry_ns, block.deadline_ns - now_ns)
        return marks, retry_ns

    def reap(self, now_ns: int) -> None:
        """Give up what is past its deadline, and what was begun below it."""
        for block in self.writing.late(now_ns):
            if self.writing.get(block.key) is block:
                self._give_up(block, now_ns)

    def drop(self, key: bytes, now_ns: int) -> None:
        """Give up this block, if it is being written, and what was begun below it."""
        block = self.writing.get(key)
        if block is not None:
            self._give_up(block, now_ns)

    def lost(self, gone: set[int], regions: set[int], now_ns: int) -> None:
        """Give up blocks below slots that are gone, or with a part in regions that are, and what was begun below."""
        for block in self.writing:
            if self.writing.get(block.key) is not block:
                continue  # given up with one above it
            if block.parent_slot in gone or any(region in regions for region, _, _ in block.extents()):
                if block.parent_slot in gone:
                    block.parent_slot = -1
                self._give_up(block, now_ns, regions)

    def withdraw(self, gone: set[int], roots: Roots, now_ns: int) -> None:
        """Give up blocks below slots that are gone, and roots that `roots` picks, with what was begun below them."""
        tops = [block for block in self.writing if block.parent is None]
        is_ours = picked(np.frombuffer(b"".join([block.key for block in tops]), np.uint8), roots).tolist()
        for block, one in zip(tops, is_ours, strict=True):
            if block.parent_slot in gone or (one and block.parent_slot < 0):
                block.parent_slot = -1
                self._give_up(block, now_ns)

    def _give_up(self, block: Writing, now_ns: int, lost: set[int] | None = None) -> None:
        """Forget a block and all that was begun below it; their extents leave, but those in lost regions."""
        if block.parent_slot >= 0:
            self._directory.unhold(block.parent_slot)
        below, extents = [block], []
        while below:
            block = below.pop()
            below += block.children.values()
            self.writing.end(block)
            extents += [extent for extent in block.extents() if not lost or extent[0] not in lost]
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
        if key in self._directory.durable.staged or above in self._directory.durable.leaving:
            return PutStatus.BUSY, 0
        block = self.writing.get(key)
        if block is None:
            parent_block = self._writing_parent(event, parent) if above < 0 else None
            if parent != ROOT_KEY and parent_block is None and (above < 0 or is_derived(above)):
                return PutStatus.ORDER, 0
            if self.writing.is_full:
                return PutStatus.BUSY, max(0, (self.writing.next_ns() or now_ns) - now_ns)
            parent_slot = -1 if parent == ROOT_KEY else above
            block = Writing(
                key, parent_slot, event.parts, event.put_id, event.deadline_ns, event.tier, event.flag, parent_block
            )  # fmt: skip
        elif block.put_id != event.put_id or block.parts != event.parts:
            return PutStatus.BUSY, block.deadline_ns - now_ns
        elif event.part in block.sealed:
            return PutStatus.ALREADY, 0
        is_begun = bool(block.sealed)
        if len(block.sealed) + 1 == block.parts and block.parent is None:
            return self._commit(block, event.part, extent, total, is_begun, now_ns), 0
        if not is_begun:
            self.writing.begin(block)
            if block.parent_slot >= 0:
                self._directory.hold(block.parent_slot)
        block.sealed[event.part] = (extent, total)
        return PutStatus.SEALED, 0

    def _writing_parent(self, event: PutPart, parent: bytes) -> Writing | None:
        """The parent, where it is being written and a block may be begun below it: by parts, under the same put_id."""
        block = self.writing.get(parent) if event.parts > 1 else None
        return block if block is not None and block.put_id == event.put_id else None

    def _commit(self, block: Writing, part: int, extent: Extent, total: int, is_begun: bool, now_ns: int) -> PutStatus:
        """Publish a block whose last part this is, then what waited for it; or leave the block as it was."""
        block.sealed[part] = (extent, total)
        status, slot = self._publish(block, now_ns)
        if status is not PutStatus.STORED:
            del block.sealed[part]  # it stays the caller's
            if is_begun and status is PutStatus.REFUSED:
                self._give_up(block, now_ns)
            return status
        if is_begun:
            self.writing.end(block)
            self._cascade(block, slot, now_ns)
        elif block.parent_slot >= 0:
            self._directory.hold(block.parent_slot)
        return status

    def _cascade(self, block: Writing, slot: int, now_ns: int) -> None:
        """After a block became visible at `slot`: what was begun below it holds it, and whole blocks follow, parents
        first. One that finds no room, or the key of one of its parts taken, is given up: its writers are done.
        """
        shown = deque([(block, slot)])
        while shown:
            block, slot = shown.popleft()
            children, block.children = block.children, {}
            for child in children.values():
                child.parent, child.parent_slot = None, slot
                self._directory.hold(slot)
                if not child.is_whole:
                    continue
                status, child_slot = self._publish(child, now_ns)
                if status is PutStatus.STORED:
                    self.writing.end(child)
                    shown.append((child, child_slot))
                else:
                    self._give_up(child, now_ns)

    def _publish(self, block: Writing, now_ns: int) -> tuple[PutStatus, int]:
        """Make a whole block visible whose parent is: STORED and its slot; or REFUSED or NO_SPACE, nothing changed.

        The hold on the parent is the caller's, as is the writing table.
        """
        directory, table = self._directory, self._directory.table
        derived = derived_keys(block.key, block.parts)
        taken = max(table.find(b"".join(derived)).tolist(), default=-1) >= 0
        if taken or any(self.writing.get(one) for one in derived):
            return PutStatus.REFUSED, -1
        if table.capacity - table.used < block.parts:
            return PutStatus.NO_SPACE, -1
        slots = table.publish(block.records(directory.generation + 1)).tolist()
        if min(slots) < 0:  # an index line's neighbourhood is full
            table.hide(np.array([slot for slot in reversed(slots) if slot >= 0], np.int32))
            return PutStatus.NO_SPACE, -1
        directory.generation += 1
        slot = slots[-1]
        directory.arrived(slot, block.parent_slot, sum(length for _, _, length in block.extents()), now_ns)
        for other in slots[:-1]:
            directory.parent[other], directory.holds[other] = slot, 0
        return PutStatus.STORED, slot


def _split(keys: Buffer) -> list[bytes]:
    raw = bytes(as_memory(keys))
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
