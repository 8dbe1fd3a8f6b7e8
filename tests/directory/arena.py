"""Memory for directory tests: aligned buffers, a segment that values are appended to, and made-up keys."""

from __future__ import annotations

import ctypes
import mmap

import xxhash


def aligned(nbytes: int) -> memoryview:
    """Zeroed, page-aligned, private memory of exactly this size."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def address_of(memory: memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def key_of(number: int, salt: bytes = b"") -> bytes:
    """A 16-byte key like those of real blocks: a hash."""
    return xxhash.xxh3_128_digest(salt + number.to_bytes(8, "little"))


def chain(length: int, salt: bytes = b"") -> list[bytes]:
    """`length` keys."""
    return [key_of(i, salt) for i in range(length)]


class Arena:
    """A segment into which values are written one behind the other."""

    def __init__(self, size: int) -> None:
        self.memory = aligned(size)
        self.size = size
        self.address = address_of(self.memory)
        self._end = 0

    def write(self, value: bytes) -> int:
        """Append a value; its offset."""
        offset = self._end
        self.memory[offset : offset + len(value)] = value
        self._end += len(value)
        return offset

    @staticmethod
    def at(address: int, length: int) -> bytes:
        """The bytes at an address."""
        return ctypes.string_at(address, length)
