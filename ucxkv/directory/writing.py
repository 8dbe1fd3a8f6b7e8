"""Multi-part blocks that are being written: begun, some parts sealed, not visible.

Invariants: a block in here is not in the slot table; its parts all belong to one put_id (two puts never mix). Its
parent, if it has one, is visible and held since it was known to be, or is in here too, under the same put_id: the
blocks in here are a forest. A block whose parts are all sealed is in here only while its parent is. Bounded in number;
each has a deadline.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from ucxkv.directory.events import Extent
from ucxkv.directory.records import part_key
from ucxkv.directory.slots import PART_FLAG, SLOT_BYTES

_SLOT = struct.Struct("<16sQIBBHQIB3sQII")
assert _SLOT.size == SLOT_BYTES


def slot_record(
    key: bytes, generation: int, extent: Extent, tier: int, flag: int, total: int, part: int = 0, parts: int = 1
) -> bytes:
    """The slot to publish for one part of a block, 64 bytes; the table fills in the rest."""
    region, offset, length = extent
    flags = bytes((PART_FLAG if part else 0, flag, 0))
    return _SLOT.pack(key, generation, 0, 0, parts, region, offset, length, tier, flags, total, 0, 0)


@dataclass(slots=True, eq=False)
class Writing:
    """One block: `sealed` maps a part to its (extent, sum). parent_slot: -1 for a root, or while `parent` is set.

    parent: the parent while it is being written itself; it has this block among its `children`, by key, from Begin on.
    root: of its chain, once somebody asked.
    """

    key: bytes
    parent_slot: int
    parts: int
    put_id: int
    deadline_ns: int
    tier: int
    flag: int
    parent: Writing | None = None
    children: dict[bytes, Writing] = field(default_factory=dict)
    sealed: dict[int, tuple[Extent, int]] = field(default_factory=dict)
    root: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether all parts are sealed."""
        return len(self.sealed) == self.parts

    def extents(self) -> list[Extent]:
        """The sealed parts' extents."""
        return [extent for extent, _ in self.sealed.values()]

    def records(self, generation: int) -> bytes:
        """The slots to publish, 64 bytes each: the derived parts first, the block itself last."""
        out = []
        for part in range(self.parts - 1, -1, -1):
            extent, total = self.sealed[part]
            key = part_key(self.key, part, self.parts)
            out.append(slot_record(key, generation, extent, self.tier, self.flag, total, part, self.parts))
        return b"".join(out)


@dataclass(slots=True)
class WritingTable:
    """See the module."""

    limit: int
    _blocks: dict[bytes, Writing] = field(default_factory=dict)
    _deadlines: list[tuple[int, bytes, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Writing]:
        return iter(list(self._blocks.values()))

    @property
    def is_full(self) -> bool:
        """Whether no block can be begun now."""
        return len(self._blocks) >= self.limit

    def get(self, key: bytes) -> Writing | None:
        """The block being written under this key."""
        return self._blocks.get(key)

    def begin(self, block: Writing) -> None:
        """Take in a new block."""
        assert block.key not in self._blocks and not self.is_full
        self._blocks[block.key] = block
        if block.parent is not None:
            block.parent.children[block.key] = block
        heapq.heappush(self._deadlines, (block.deadline_ns, block.key, block.put_id))

    def end(self, block: Writing) -> None:
        """Take a block out: committed, or given up. Its children are the caller's to look after."""
        del self._blocks[block.key]
        if block.parent is not None:
            del block.parent.children[block.key]
            block.parent = None
        if len(self._deadlines) > 2 * len(self._blocks) + 64:
            self._deadlines = [(one.deadline_ns, one.key, one.put_id) for one in self._blocks.values()]
            heapq.heapify(self._deadlines)

    def late(self, now_ns: int) -> list[Writing]:
        """The blocks whose deadline has passed; still in here."""
        out: dict[bytes, Writing] = {}
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline, key, _ = heapq.heappop(self._deadlines)
            block = self._blocks.get(key)
            if block is not None and block.deadline_ns == deadline:
                out[key] = block
        return list(out.values())

    def next_ns(self) -> int | None:
        """The next deadline."""
        return self._deadlines[0][0] if self._deadlines else None

    def check(self) -> None:
        """Assert the invariants that need no table."""
        assert len(self._blocks) <= self.limit
        for key, block in self._blocks.items():
            assert block.key == key and 0 < len(block.sealed) < block.parts + (block.parent is not None)
            assert all(0 <= part < block.parts for part in block.sealed)
            assert any(d == block.deadline_ns and k == key for d, k, _ in self._deadlines), "a writing without deadline"
        seen, below = 0, [block for block in self._blocks.values() if block.parent is None]
        while below:
            block = below.pop()
            seen += 1
            for key, child in block.children.items():
                assert self._blocks.get(key) is child and child.parent is block, "a child that is not being written"
                assert child.put_id == block.put_id and child.parent_slot == -1, "a child of another put"
                below.append(child)
        assert seen == len(self._blocks), "a writing that hangs on nothing"
