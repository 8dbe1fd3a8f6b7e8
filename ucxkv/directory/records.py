"""Keys of parts, and reading a slot's fields out of its eight words without a numpy scalar."""

from __future__ import annotations

import xxhash

from ucxkv.directory.events import Extent
from ucxkv.directory.slots import KEY_BYTES

MAX_PARTS = 255


def part_key(key: bytes, part: int, parts: int) -> bytes:
    """The key of part `part` (from 0) of a block split into `parts`; part 0 is found under the block's own key.

    16 bytes: xxh3-128 over b"part", the key, part and parts as u16.
    """
    if not 0 <= part < parts <= MAX_PARTS:
        raise ValueError(f"part {part} of {parts}: parts go from 0 to parts - 1, and at most {MAX_PARTS} of them")
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes, got {len(key)}")
    if part == 0:
        return bytes(key)
    return xxhash.xxh3_128_digest(b"part" + key + part.to_bytes(2, "little") + parts.to_bytes(2, "little"))


def derived_keys(key: bytes, parts: int) -> list[bytes]:
    """The keys of parts 1 .. parts - 1."""
    return [part_key(key, part, parts) for part in range(1, parts)]


class SlotWords:
    """Fields of slots, by slot number; `words` is the table's memory as u64, eight a slot."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def key(self, slot: int) -> bytes:
        """The block's key."""
        words = self._words
        return words[8 * slot].to_bytes(8, "little") + words[8 * slot + 1].to_bytes(8, "little")

    def generation(self, slot: int) -> int:
        """Its generation."""
        return int(self._words[8 * slot + 2])

    def parts(self, slot: int) -> int:
        """Into how many parts it is split."""
        return self._words[8 * slot + 3] >> 40 & 0xFF

    def extent(self, slot: int) -> Extent:
        """Where this part's value lies."""
        words, at = self._words, 8 * slot
        return words[at + 3] >> 48, words[at + 4], words[at + 5] & 0xFFFFFFFF

    def single(self, slot: int) -> Extent | None:
        """Where a block's value lies; None when the block is split into parts."""
        words, at = self._words, 8 * slot
        head = words[at + 3]
        return (head >> 48, words[at + 4], words[at + 5] & 0xFFFFFFFF) if head >> 40 & 0xFF <= 1 else None

    def tail(self, slot: int) -> tuple[int, int, int]:
        """Its tier, the writer's flag, and the sum of its value."""
        words, at = self._words, 8 * slot
        return words[at + 5] >> 32 & 0xFF, words[at + 5] >> 48 & 0xFF, words[at + 6]

    def is_visible(self, slot: int) -> bool:
        """Whether there is a block, or a part of one, in this slot."""
        return self._words[8 * slot + 3] >> 32 & 0xFF == 1

    def is_derived(self, slot: int) -> bool:
        """Whether it is part p >= 1 of a block."""
        return bool(self._words[8 * slot + 5] >> 40 & 1)
