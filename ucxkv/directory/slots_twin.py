"""The slot table in plain Python: the same two classes and the same bytes as `slots`, without the extension.

Promises what `slots` promises within one process; it has no atomics, so nobody may map its memory while it writes. Its
reader may read a table that the C code wrote, and the other way round. `read` and `view` work on addresses, as in C.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator

import numpy as np
import xxhash

from ucxkv.directory.slot_values import (
    FOREVER,
    I32,
    KEY_BYTES,
    LINE_ENTRIES,
    NONE,
    PART_FLAG,
    ROOT_KEY,
    SLOT_BYTES,
    SLOT_DTYPE,
    U8,
    U32,
    U64,
    Buffer,
    CancelFlag,
    Found,
    PutStatus,
    ReadResult,
    ReadStatus,
    Records,
    Serving,
    SlotTableError,
    as_memory,
    count_keys,
    default_lines,
    lease_word,
    not_served,
    slots_offset,
    table_bytes,
)

_MAGIC = 0x31544F4C53564B55
_FORMAT = 2
_HEADER = struct.Struct("<QIIQQQQQQQ")
_EPOCH, _LEASE = slice(12, 16), slice(64, 72)
_PROBES = 256
_MASK = (1 << 64) - 1
_STATE = 28
_FLAGS = 45
_GENERATION = slice(16, 24)


def _u64(piece: bytes | bytearray | memoryview) -> int:
    return int.from_bytes(piece, "little")


def _split(keys: Buffer) -> list[bytes]:
    raw = bytes(keys)
    return [raw[16 * i : 16 * i + 16] for i in range(count_keys(raw))]


class _Index:
    """The search and the layout both sides share."""

    def __init__(self, memory: memoryview, capacity: int, lines: int, seed: int, epoch: int) -> None:
        self.capacity, self.lines, self.seed, self.epoch = capacity, lines, seed, epoch
        start = slots_offset(lines)
        self.entries = memory[start - 64 * lines : start].cast("Q")
        self.slots = memory[start : start + SLOT_BYTES * capacity]

    def hash(self, key: bytes) -> int:
        lo, hi = _u64(key[:8]), _u64(key[8:])
        product = (lo ^ self.seed ^ 0x9E3779B97F4A7C15) * (hi ^ self.seed ^ 0xD6E8FEB86659FD93)
        h = (product ^ product >> 64 ^ lo ^ (hi << 32 | hi >> 32)) & _MASK
        h = (h ^ h >> 32) * 0xFF51AFD7ED558CCD & _MASK
        h ^= h >> 29
        return h if h & NONE else h | 1

    def home(self, hashed: int) -> int:
        return (hashed >> 32) * self.lines >> 32

    def walk(self, hashed: int) -> Iterator[int]:
        """The lines a key may lie on, as positions of their first entry."""
        home = self.home(hashed)
        for step in range(min(self.lines, _PROBES)):
            yield (home + step) % self.lines * 8

    def copy(self, slot: int) -> bytes:
        return bytes(self.slots[SLOT_BYTES * slot : SLOT_BYTES * (slot + 1)])

    def is_whole(self, raw: bytes | bytearray) -> bool:
        check = xxhash.xxh3_64_intdigest(raw[:56]) & 0xFFFFFFFF
        return raw[_STATE] == 1 and _u64(raw[24:28]) == self.epoch and _u64(raw[56:60]) == check and not raw[60] & 1

    def search(self, key: bytes) -> tuple[int, bytes]:
        """(slot number, its bytes), or (-1, zeros)."""
        hashed = self.hash(key)
        for at in self.walk(hashed):
            for entry in self.entries[at : at + LINE_ENTRIES]:
                slot = (entry & NONE) - 1
                if entry >> 32 == hashed & NONE and 0 <= slot < self.capacity:
                    raw = self.copy(slot)
                    if raw[:16] == key and self.is_whole(raw):
                        return slot, raw
            if not self.entries[at + LINE_ENTRIES]:
                break
        return -1, bytes(SLOT_BYTES)


class TwinTable:
    """`slots.SlotTable` in Python; see there."""

    def __init__(
        self, memory: Buffer, capacity: int, *, epoch: int, seed: int = 0, lines: int = 0, links: U32 | None = None
    ) -> None:
        self.memory, self.capacity, self.epoch = memory, capacity, epoch
        self.lines = lines or default_lines(capacity)
        self.links: U32 = np.zeros(capacity, np.uint32) if links is None else links
        if self.links.nbytes != 4 * capacity:
            raise ValueError(f"links: {self.links.nbytes} bytes, expected {4 * capacity}")
        view = as_memory(memory)
        needed = table_bytes(capacity, self.lines)
        if not 0 < capacity < 0x7FFFFFFF or len(view) < needed:
            raise SlotTableError(f"no table of {capacity} slots fits: {len(view)} bytes given, {needed} needed")
        start = slots_offset(self.lines)
        _HEADER.pack_into(
            view, 0, _MAGIC, _FORMAT, epoch, capacity, self.lines, slots_offset(0), start, len(view), seed, FOREVER
        )  # fmt: skip
        self._index = _Index(view, capacity, self.lines, seed, epoch)
        self._free: list[int] = []
        self.used = 0
        self.fresh = 0
        self.records: Records = np.frombuffer(self._index.slots, SLOT_DTYPE)
        self.words = self._index.slots.cast("Q")

    def reader(self) -> TwinReader:
        """A reader on the same memory."""
        return TwinReader(self.memory)

    @property
    def lease_end_ns(self) -> int:
        """See `SlotTable.lease_end_ns`."""
        return _u64(as_memory(self.memory)[_LEASE])

    def set_lease(self, until_ns: int) -> None:
        """See `SlotTable.set_lease`."""
        as_memory(self.memory)[_LEASE] = lease_word(until_ns).to_bytes(8, "little")

    def set_epoch(self, epoch: int) -> int:
        """See `SlotTable.set_epoch`."""
        self.set_lease(0)
        moved = 0
        for slot in range(self.fresh):
            raw = bytearray(self._index.copy(slot))
            if self._index.is_whole(raw):
                raw[24:28] = epoch.to_bytes(4, "little")
                self._write(slot, raw)
                moved += 1
        self.epoch = self._index.epoch = epoch
        as_memory(self.memory)[_EPOCH] = epoch.to_bytes(4, "little")
        return moved

    def find_one(self, key: bytes) -> int:
        """See SlotTable."""
        return int(self.find(key)[0])

    def find(self, keys: Buffer) -> I32:
        """See `SlotTable.find`."""
        return np.array([self._index.search(key)[0] for key in _split(keys)], np.int32)

    def publish(self, records: Buffer) -> I32:
        """See `SlotTable.publish`."""
        raw = bytes(as_memory(records))
        return np.array([self._publish(raw[at : at + SLOT_BYTES]) for at in range(0, len(raw), SLOT_BYTES)], np.int32)

    def put(
        self,
        keys: Buffer,
        parents: Buffer,
        regions: Buffer,
        offsets: Buffer,
        lengths: Buffer,
        sums: Buffer,
        *,
        generation: int,
        tier: int = 1,
        flag: int = 0,
        status: U8 | None = None,
    ) -> tuple[U8, I32, I32, int]:
        """See `SlotTable.put`."""
        every, above = _split(keys), _split(parents)
        n = len(every)
        if status is None:
            status = np.zeros(n, np.uint8)
        slots, ups = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        named = ((regions, "<u2"), (offsets, "<u8"), (lengths, "<u4"), (sums, "<u8"))
        columns = [np.frombuffer(column, dtype) for column, dtype in named]
        if len(above) != n or len(status) != n or any(len(column) != n for column in columns):
            raise ValueError(f"arrays that do not belong to {n} keys")
        record, nbytes = np.zeros(1, SLOT_DTYPE), 0
        for i, key in enumerate(every):
            if status[i]:
                continue
            status[i], slots[i], ups[i] = self._admit(key, above[i])
            if status[i] == PutStatus.STORED:
                record["key"] = np.void(key)
                record["generation"], record["parts"], record["tier"] = generation + i, 1, tier
                record["flags"] = (0, flag, 0)
                for name, column in zip(("region", "offset", "length", "sum"), columns, strict=True):
                    record[name] = column[i]
                slots[i] = self._publish(record.tobytes())
                if slots[i] < 0:
                    status[i] = PutStatus.NO_SPACE
                else:
                    nbytes += int(columns[2][i])
        return status, slots, ups, nbytes

    def hide(self, slots: I32) -> int:
        """See `SlotTable.hide`."""
        return sum(self._hide(int(slot)) for slot in slots)

    def _admit(self, key: bytes, parent: bytes) -> tuple[PutStatus, int, int]:
        slot, raw = self._index.search(key)
        if key == ROOT_KEY or raw[_FLAGS] & PART_FLAG:
            return PutStatus.REFUSED, -1, -1
        if slot >= 0:
            return PutStatus.ALREADY, slot, -1
        if parent == ROOT_KEY:
            return PutStatus.STORED, -1, -1
        above, raw = self._index.search(parent)
        if above < 0 or raw[_FLAGS] & PART_FLAG:
            return PutStatus.ORDER, -1, -1
        return PutStatus.STORED, -1, above

    def _publish(self, record: bytes) -> int:
        index = self._index
        hashed = index.hash(record[:16])
        passed: list[int] = []
        for at in index.walk(hashed):
            empty = [e for e in range(LINE_ENTRIES) if not index.entries[at + e]]
            if empty:
                break
            passed.append(at)
        else:
            return -1
        if not self._free and self.fresh >= self.capacity:
            return -1
        if self._free:
            slot = self._free.pop()
        else:
            slot, self.fresh = self.fresh, self.fresh + 1
        raw = bytearray(record)
        raw[24:28] = self.epoch.to_bytes(4, "little")
        raw[_STATE] = 1
        self._write(slot, raw)
        for line in passed:
            index.entries[line + LINE_ENTRIES] += 1
        index.entries[at + empty[0]] = (hashed & NONE) << 32 | slot + 1
        self.used += 1
        return slot

    def move(self, slot: int, region: int, offset: int, tier: int, sum: int) -> None:
        """See `SlotTable.move`."""
        raw = bytearray(self._index.copy(slot)) if 0 <= slot < self.capacity else bytearray(SLOT_BYTES)
        if raw[_STATE] != 1:
            raise ValueError(f"slot {slot} is not visible")
        raw[30:32], raw[32:40], raw[44] = region.to_bytes(2, "little"), offset.to_bytes(8, "little"), tier
        raw[48:56] = sum.to_bytes(8, "little")
        self._write(slot, raw)

    def _hide(self, slot: int) -> bool:
        index = self._index
        if not 0 <= slot < self.capacity:
            return False
        raw = bytearray(index.copy(slot))
        if raw[_STATE] != 1:
            return False
        hashed = index.hash(bytes(raw[:16]))
        wanted, passed = (hashed & NONE) << 32 | slot + 1, []
        for at in index.walk(hashed):
            entries = list(index.entries[at : at + LINE_ENTRIES])
            if wanted in entries:
                break
            passed.append(at)
        else:
            return False
        index.entries[at + entries.index(wanted)] = 0
        for line in passed:
            index.entries[line + LINE_ENTRIES] -= 1
        raw[_STATE] = 0
        self._write(slot, raw)
        self._free.append(slot)
        self.used -= 1
        return True

    def _write(self, slot: int, raw: bytearray) -> None:
        version = _u64(self._index.copy(slot)[60:64])
        raw[56:60] = (xxhash.xxh3_64_intdigest(bytes(raw[:56])) & 0xFFFFFFFF).to_bytes(4, "little")
        raw[60:64] = ((version | 1) + 1 & 0xFFFFFFFF).to_bytes(4, "little")
        self._index.slots[SLOT_BYTES * slot : SLOT_BYTES * (slot + 1)] = raw


class TwinReader:
    """`slots.SlotReader` in Python; see there."""

    def __init__(self, memory: Buffer, *, max_regions: int = 1024) -> None:
        view = as_memory(memory)
        fields = _HEADER.unpack_from(view) if len(view) >= slots_offset(0) else (0,) * 10
        magic, version, epoch, capacity, lines, lines_at, slots_at, _, seed, _ = fields
        sound = magic == _MAGIC and version == _FORMAT and 0 < capacity < 0x7FFFFFFF and 0 < lines < 0x7FFFFFFF
        if not sound or lines_at != slots_offset(0) or slots_at != slots_offset(lines):
            raise SlotTableError(f"{len(view)} bytes that are no slot table of this version")
        if len(view) < table_bytes(capacity, lines):
            raise SlotTableError(f"{len(view)} bytes that are only a piece of a slot table")
        self.capacity, self.epoch, self.max_regions = capacity, epoch, max_regions
        self._header: memoryview | None = view[: slots_offset(0)]
        self._index = _Index(view, capacity, lines, seed, epoch)
        self._regions: dict[int, tuple[int, int]] = {}

    def close(self) -> None:
        """See `SlotReader.close`."""
        self._index, self.capacity = _Index(memoryview(bytearray(table_bytes(1, 1))), 1, 1, 0, self.epoch), 1
        self._header = None

    @property
    def serving(self) -> Serving:
        """See `SlotReader.serving`."""
        if self._header is None:
            return Serving.SERVED
        end = _u64(self._header[_LEASE])
        if _u64(self._header[_EPOCH]) != self.epoch:
            return Serving.OTHER_EPOCH
        return Serving.SERVED if end == FOREVER or time.monotonic_ns() < end else Serving.LEASE_OVER

    def follow(self) -> None:
        """See `SlotReader.follow`."""
        if self._header is not None:
            self.epoch = self._index.epoch = _u64(self._header[_EPOCH])

    def _prove(self) -> None:
        serving = self.serving
        if serving:
            raise not_served(self.epoch, serving)

    def map_region(self, region: int, address: int, size_bytes: int) -> None:
        """See `SlotReader.map_region`."""
        if not 0 <= region < self.max_regions:
            raise ValueError(f"region {region} is not below {self.max_regions}")
        self._regions[region] = (address, size_bytes)

    def unmap_region(self, region: int) -> None:
        """See `SlotReader.unmap_region`."""
        self._regions.pop(region, None)

    def lookup(self, keys: Buffer) -> tuple[Records, U8]:
        """See `SlotReader.lookup`."""
        hits = [self._index.search(key) for key in _split(keys)]
        records = np.frombuffer(b"".join(raw for _, raw in hits), SLOT_DTYPE)
        self._prove()
        return records, np.array([slot >= 0 for slot, _ in hits], np.uint8)

    def match(self, keys: Buffer) -> int:
        """See `SlotReader.match`."""
        every = _split(keys)
        run = next((i for i, key in enumerate(every) if self._index.search(key)[0] < 0), len(every))
        self._prove()
        return run

    def exists(self, keys: Buffer) -> U8:
        """See `SlotReader.exists`."""
        out = np.array([self._index.search(key)[0] >= 0 for key in _split(keys)], np.uint8)
        self._prove()
        return out

    def contains(self, key: bytes) -> bool:
        """See `SlotReader.contains`."""
        slot = self._index.search(key)[0]
        self._prove()
        return slot >= 0

    def scan(self, cursor: int, limit: int) -> tuple[int, Records]:
        """See `SlotReader.scan`."""
        page: list[bytes] = []
        at = cursor
        while at < self.capacity and at < cursor + 64 * limit + 1024 and len(page) < limit:
            raw = self._index.copy(at)
            if self._index.is_whole(raw) and not raw[_FLAGS] & PART_FLAG:
                page.append(raw)
            at += 1
        self._prove()
        return min(at, self.capacity), np.frombuffer(b"".join(page), SLOT_DTYPE)

    def read(self, keys: Buffer, first: U32, iov: U64, cancel: CancelFlag | None = None) -> ReadResult:
        """See `SlotReader.read`; the cancel flag is looked at between keys only."""
        every = _split(keys)
        if len(first) != len(every) + 1 or 16 * int(first[len(every)]) > iov.nbytes:
            raise ValueError(f"first: {len(first)} entries for {len(every)} keys and {iov.nbytes // 16} pieces")
        pieces = iov.reshape(-1, 2).tolist()
        status, length = np.zeros(len(every), np.uint8), np.zeros(len(every), np.uint64)
        generation = np.zeros(len(every), np.uint64)
        for i, key in enumerate(every):
            if cancel is not None and cancel.is_set():
                status[i] = ReadStatus.CANCELLED
                continue
            found = self._copy(key, pieces[first[i] : first[i + 1]])
            status[i], length[i], generation[i] = found.status, found.length, found.generation
        if self.serving:
            status[status != ReadStatus.CANCELLED] = ReadStatus.UNAVAILABLE
            length[:] = generation[:] = 0
        return ReadResult(status, length, generation, int((status == ReadStatus.HIT).sum()))

    def read_one(self, key: Buffer, address: int, length: int) -> Found:
        """See `SlotReader.read_one`."""
        found = self._copy(_one(key), [[address, length]])._replace(address=0)
        return _UNSERVED if self.serving else found

    def view(self, key: Buffer) -> Found:
        """See `SlotReader.view`."""
        found = self._locate(_one(key))
        return _UNSERVED if self.serving else found

    def _locate(self, key: bytes) -> Found:
        slot, raw = self._index.search(key)
        if slot < 0:
            return Found(ReadStatus.MISS, 0, 0, 0, 0, NONE, 0, 0)
        region, offset, length = _u64(raw[30:32]), _u64(raw[32:40]), _u64(raw[40:44])
        base, size = self._regions.get(region, (0, 0))
        mapped = base and offset <= size and length <= size - offset
        status, address = (ReadStatus.HIT, base + offset) if mapped else (ReadStatus.UNMAPPED, 0)
        return Found(status, address, length, _u64(raw[48:56]), _u64(raw[_GENERATION]), slot, region, raw[44])

    def recheck(self, slot: int, generation: int) -> bool:
        """See `SlotReader.recheck`."""
        if not 0 <= slot < self.capacity:
            return False
        raw = self._index.copy(slot)
        return self._index.is_whole(raw) and _u64(raw[_GENERATION]) == generation and not self.serving

    def _copy(self, key: bytes, pieces: list[list[int]]) -> Found:
        found = self._locate(key)
        if found.status != ReadStatus.HIT:
            return found
        if sum(length for _, length in pieces) != found.length:
            return found._replace(status=ReadStatus.SIZE)
        digest, source = xxhash.xxh3_64(), found.address
        for address, length in pieces:
            ctypes.memmove(address, source, length)
            digest.update(ctypes.string_at(address, length))
            source += length
        return found if digest.intdigest() == found.sum else found._replace(status=ReadStatus.CORRUPT)


_UNSERVED = Found(ReadStatus.UNAVAILABLE, 0, 0, 0, 0, NONE, 0, 0)


def _one(key: Buffer) -> bytes:
    raw = bytes(key)
    if len(raw) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes, got {len(raw)}")
    return raw
