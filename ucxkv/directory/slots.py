"""The slot table: where each visible block lies, in memory that readers map and search without asking anybody.

Invariants (kept in slots.h / slots.c; this module is their Python face):
  - One writer, the shard's leader: `SlotTable`. Any number of readers, also in other processes: `SlotReader`.
  - Only visible blocks are in the table; a slot that is found was published whole, under the table's epoch.
  - A slot number is stable while its block is visible.
  - Readers answer only while the table is served: the lease that the leader set runs, and the epoch is the one the
    reader knows. Checked after the last load of each call; else the answer is UNAVAILABLE, or NotServed is raised.
  - `SlotReader.read` says HIT only for bytes whose xxh3 sum is the one committed with them.
  - A table of garbage gives misses, never a crash.

`ucxkv.directory.slots_twin` holds the same two classes in plain Python, where the extension can't be built.

Slot, 64 bytes, little endian (`SLOT_DTYPE`):

| off | field | off | field | off | field |
|---|---|---|---|---|---|
| 0 | key[16] | 29 | parts u8 | 45 | flags u8[3] |
| 16 | generation u64 | 30 | region u16 | 48 | sum u64: xxh3 of the value |
| 24 | epoch u32 | 32 | offset u64 | 56 | check u32: low half of xxh3 over bytes 0..55 |
| 28 | state u8: 0 free, 1 visible | 40 | length u32, 44 tier u8 | 60 | version u32: odd = being written |

flags[0] is the directory's own (bit 0: a derived slot, part p >= 1 of a block), flags[1] the writer's
(1: `cold.EXACT`), flags[2] unused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ucxkv.directory.slot_values import (
    FOREVER,
    HEADER_BYTES,
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
    NotServed,
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

try:
    _slots: Any = importlib.import_module("ucxkv.directory._slots")
except ImportError:  # not built: slots_twin serves
    _slots = None

__all__ = [
    "FOREVER",
    "HEADER_BYTES",
    "I32",
    "KEY_BYTES",
    "LINE_ENTRIES",
    "NONE",
    "PART_FLAG",
    "ROOT_KEY",
    "SLOT_BYTES",
    "SLOT_DTYPE",
    "U8",
    "U32",
    "U64",
    "Buffer",
    "CancelFlag",
    "Found",
    "NotServed",
    "PutStatus",
    "ReadResult",
    "ReadStatus",
    "Records",
    "Serving",
    "SlotReader",
    "SlotTable",
    "SlotTableError",
    "as_memory",
    "count_keys",
    "default_lines",
    "is_native",
    "slots_offset",
    "table_bytes",
]


def _hold(memory: Buffer) -> U8:
    """The memory as an array. Held by cffi in place of a memoryview, whose release from a garbage cycle crashes."""
    return np.frombuffer(memory, np.uint8)


def is_native() -> bool:
    """Whether the C extension is there."""
    return _slots is not None


def _address(values: Buffer) -> Any:
    """What cffi takes as the address of these bytes; `bytes` pass as they are."""
    return values if type(values) is bytes else _slots.ffi.from_buffer(values)


def _pointer(values: Buffer, nbytes: int, what: str, *, writable: bool = False) -> Any:
    if type(values) is bytes and len(values) == nbytes and not writable:
        return values  # cffi passes its address as it is
    view = _slots.ffi.from_buffer("char[]", values, require_writable=writable)
    if len(view) != nbytes:
        raise ValueError(f"{what}: {len(view)} bytes, expected {nbytes}")
    return view


class SlotTable:
    """The writer's side of a slot table; exactly one in the world for one table.

    memory: zeroed, writable, 64-byte aligned, at least `table_bytes(capacity, lines)` long; kept referenced.
    seed: mixed into the index hash; take a random one where clients may choose their keys.
    links: u32[capacity], where the free list lives; the entries of slots in use are the caller's. Made here when None.
    Not thread-safe; readers are. Its own methods do not look at the lease: that is for the caller to do.
    """

    def __init__(
        self, memory: Buffer, capacity: int, *, epoch: int, seed: int = 0, lines: int = 0, links: U32 | None = None
    ) -> None:
        self.memory = memory
        self.capacity = capacity
        self.epoch = epoch
        self.lines = lines or default_lines(capacity)
        self.links: U32 = np.zeros(capacity, np.uint32) if links is None else links
        if self.links.nbytes != 4 * capacity:
            raise ValueError(f"links: {self.links.nbytes} bytes, expected {4 * capacity}")
        ffi, self._lib = _slots.ffi, _slots.lib
        mem = ffi.from_buffer("char[]", _hold(memory), require_writable=True)
        if self._lib.slots_format(mem, len(mem), capacity, self.lines, epoch, seed):
            raise SlotTableError(
                f"no table of {capacity} slots fits: {len(mem)} bytes given, "
                f"{table_bytes(capacity, self.lines)} needed, 64-byte aligned, capacity from 1 to 2^31"
            )
        links_pointer = ffi.from_buffer("char[]", self.links, require_writable=True)
        self._writer = ffi.new("kv_writer *")
        self._lib.slots_writer_open(self._writer, mem, len(mem), links_pointer)
        self._table = ffi.addressof(self._writer, "t")
        self._number = ffi.new("int32_t *")
        self._keep = (mem, links_pointer)
        start = slots_offset(self.lines)
        slots = as_memory(memory)[start : start + SLOT_BYTES * capacity]
        self.records: Records = np.frombuffer(slots, SLOT_DTYPE)
        self.words = slots.cast("Q")

    @property
    def used(self) -> int:
        """Slots in use, derived ones included."""
        return int(self._writer.used)

    @property
    def fresh(self) -> int:
        """Slots from this number on were never used."""
        return int(self._writer.fresh)

    def reader(self) -> SlotReader:
        """A reader on the same memory."""
        return SlotReader(self.memory)

    @property
    def lease_end_ns(self) -> int:
        """Until when readers answer, on CLOCK_MONOTONIC (`time.monotonic_ns`); FOREVER: no end, 0: not now."""
        return as_memory(self.memory)[_LEASE : _LEASE + 8].cast("Q")[0]

    def set_lease(self, until_ns: int) -> None:
        """Let readers answer until this moment and not after it.

        Set it again under one epoch only while nobody else may have led in between; else `set_epoch` first.
        """
        self._lib.slots_set_lease(self._writer, lease_word(until_ns))

    def set_epoch(self, epoch: int) -> int:
        """Go over to a new epoch with all that is visible, and end the lease; returns how many slots went over.

        Readers of the old epoch are not served again until they attach anew or follow. Hide before it what the new
        epoch shall not have. Takes a memory access a slot.
        """
        moved = int(self._lib.slots_set_epoch(self._writer, epoch))
        self.epoch = epoch
        return moved

    def find(self, keys: Buffer) -> I32:
        """Slot numbers of the keys, -1 where not visible; int32[n]."""
        n = count_keys(keys)
        out = np.empty(n, np.int32)
        self._lib.slots_find(self._table, n, _address(keys), _slots.ffi.from_buffer(out))
        return out

    def find_one(self, key: bytes) -> int:
        """`find` of one key, a tenth of its cost."""
        self._lib.slots_find(self._table, 1, _one_key(key), self._number)
        return int(self._number[0])

    def publish(self, records: Buffer) -> I32:
        """Publish whole records whose keys are not in the table yet.

        records: SLOT_DTYPE[n] or its bytes; epoch, state, check and version are filled in here. Returns their slot
        numbers, -1 where the table is full; int32[n].
        """
        n = as_memory(records).nbytes // SLOT_BYTES
        out = np.empty(n, np.int32)
        source = _pointer(records, SLOT_BYTES * n, "records")
        self._lib.slots_publish(self._writer, n, source, _slots.ffi.from_buffer(out))
        return out

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
        """Publish single-part blocks in order, each if its key is absent and its parent visible (all zero = root).

        keys, parents: n x 16 bytes; regions u16[n], offsets u64[n], lengths u32[n], sums u64[n].
        generation: block i gets generation + i.
        status: u8[n]; blocks whose entry isn't 0 are left alone. Returns (status u8[n] of PutStatus, slot i32[n]: the
        block's slot, stored now or before, else -1, parent's slot i32[n], -1 for a root, valid where stored; bytes
        stored).
        """
        n = count_keys(keys)
        if status is None:
            status = np.zeros(n, np.uint8)
        slots = np.empty((2, n), np.int32)
        cells = _slots.ffi.from_buffer("int32_t[]", slots)
        nbytes = self._lib.slots_put(
            self._writer,
            n,
            _address(keys),
            _pointer(parents, KEY_BYTES * n, "parents"),
            _pointer(regions, 2 * n, "regions"),
            _pointer(offsets, 8 * n, "offsets"),
            _pointer(lengths, 4 * n, "lengths"),
            _pointer(sums, 8 * n, "sums"),
            tier,
            flag,
            generation,
            _pointer(status, n, "status", writable=True),
            cells,
            cells + n,
        )
        return status, slots[0], slots[1], nbytes

    def move(self, slot: int, region: int, offset: int, tier: int, sum: int) -> None:
        """Say that a visible slot's value lies in another place, whole there already, and has this sum: that of before,
        or another one where the value was stored with loss. No reader sees one place with the other's sum. The old
        place may be written to after the grace. ValueError: no visible slot.
        """
        if self._lib.slots_move(self._writer, slot, region, offset, tier, sum):
            raise ValueError(f"slot {slot} is not visible")

    def hide(self, slots: I32) -> int:
        """Take slots out, in the order given; numbers that are no visible slots are skipped. Returns how many left."""
        return int(self._lib.slots_hide(self._writer, len(slots), _pointer(slots, 4 * len(slots), "slots")))


class SlotReader:
    """A reader's side of a slot table, in any process that maps its memory; safe to use from several threads.

    memory: the whole mapping, readable; kept referenced until `close`. Raises SlotTableError when it isn't a table.
    max_regions: how many regions (segments) can be mapped; region numbers at and above it read as UNMAPPED.
    """

    def __init__(self, memory: Buffer, *, max_regions: int = 1024) -> None:
        ffi, self._lib = _slots.ffi, _slots.lib
        self._memory = ffi.from_buffer("char[]", _hold(memory))
        self._table = ffi.new("kv_table *")
        if self._lib.slots_attach(self._table, ffi.cast("void *", self._memory), len(self._memory)):
            raise SlotTableError(f"{len(self._memory)} bytes that are no slot table of this version, or a piece of one")
        self._regions = ffi.new("kv_region[]", max_regions)
        self.max_regions = max_regions
        self._found_type = ffi.typeof("kv_found *")
        self._resolver = ffi.new("kv_resolver *", [self._table, self._regions, max_regions])

    def close(self) -> None:
        """Let go of the memory; no call may be running in another thread. Later ones, also of `into_reader`, miss."""
        self._lib.slots_detach(self._table)
        self._memory = None

    @property
    def capacity(self) -> int:
        """Slots of the table."""
        return int(self._table.capacity)

    @property
    def epoch(self) -> int:
        """The epoch that is served: the table's when the reader attached or followed last."""
        return int(self._table.epoch)

    @property
    def serving(self) -> Serving:
        """Whether this reader may answer at this moment."""
        return Serving(self._lib.slots_serving(self._table))

    def follow(self) -> None:
        """Trust the table's present epoch from now on: for the node itself, which made it."""
        self._lib.slots_follow(self._table)

    def _refuse(self) -> NotServed:
        return not_served(self.epoch, self.serving)

    def map_region(self, region: int, address: int, size_bytes: int) -> None:
        """Say where a region lies in this process; the caller keeps the mapping alive while reads may use it."""
        if not 0 <= region < self.max_regions:
            raise ValueError(f"region {region} is not below {self.max_regions}")
        self._lib.slots_region_set(self._regions, region, address, size_bytes)

    def unmap_region(self, region: int) -> None:
        """Forget a region; reads that began before may still use its mapping until they return."""
        self.map_region(region, 0, 0)

    def resolver(self) -> tuple[int, int]:
        """(function, context) addresses of a `kv_resolve_fn` over this reader, valid as long as the reader lives."""
        return int(self._lib.slots_resolve_address()), int(_slots.ffi.cast("uintptr_t", self._resolver))

    def lookup(self, keys: Buffer) -> tuple[Records, U8]:
        """Copies of the keys' slots: (SLOT_DTYPE[n], zeroed where not found; found u8[n]). Raises NotServed."""
        n = count_keys(keys)
        records, found = np.empty(n, SLOT_DTYPE), np.empty(n, np.uint8)
        buffer = _slots.ffi.from_buffer
        if self._lib.slots_lookup(self._table, n, _address(keys), buffer(records), buffer(found)) == _UNSERVED:
            raise self._refuse()
        return records, found

    def match(self, keys: Buffer) -> int:
        """How many keys from the first on are visible without a gap. Raises NotServed."""
        run = int(self._lib.slots_match(self._table, count_keys(keys), _address(keys)))
        if run == _UNSERVED:
            raise self._refuse()
        return run

    def exists(self, keys: Buffer) -> U8:
        """1 where a key is visible; u8[n]. Raises NotServed."""
        n = count_keys(keys)
        out = np.empty(n, np.uint8)
        if self._lib.slots_exists(self._table, n, _address(keys), _slots.ffi.from_buffer(out)) == _UNSERVED:
            raise self._refuse()
        return out

    def contains(self, key: bytes) -> bool:
        """Whether one key, exactly 16 bytes (unchecked), is visible: `exists` at a fraction of its cost."""
        run = self._lib.slots_match(self._table, 1, key)
        if run > 1:
            raise self._refuse()
        return bool(run)

    def scan(self, cursor: int, limit: int) -> tuple[int, Records]:
        """Up to `limit` visible blocks from slot number `cursor` on: (next cursor, SLOT_DTYPE[m]).

        The end is reached when the next cursor is `capacity`; a page before it may be empty. No derived slots. Raises
        NotServed.
        """
        out, found = np.empty(limit, SLOT_DTYPE), _slots.ffi.new("uint64_t *")
        at = self._lib.slots_scan(self._table, cursor, limit, _slots.ffi.from_buffer(out), found)
        if at == _UNSERVED:
            raise self._refuse()
        return int(at), out[: found[0]]

    def read(self, keys: Buffer, first: U32, iov: U64, cancel: CancelFlag | None = None) -> ReadResult:
        """Copy n values into the caller's memory, each checked against its sum.

        first: u32[n + 1], ascending; key i's value goes over the pieces iov[first[i]:first[i + 1]], in order.
        iov: u64[m, 2] of (address, length); valid and writable until this returns. The GIL is released meanwhile.
        Only pieces of keys whose status is HIT hold a value; the bytes of the others are undefined. A table that is not
        served in the end makes all of them UNAVAILABLE, whatever was copied.
        """
        n, buffer = count_keys(keys), _slots.ffi.from_buffer
        if first.nbytes != 4 * (n + 1) or 16 * int(first[n]) > iov.nbytes:
            raise ValueError(f"first: {first.nbytes} bytes for {n} keys and {iov.nbytes // 16} pieces")
        status, numbers = np.empty(n, np.uint8), np.empty((2, n), np.uint64)
        cells = buffer("uint64_t[]", numbers)
        flag = _slots.ffi.NULL if cancel is None else buffer("int32_t[]", cancel.cell)
        hits = self._lib.slots_read(
            self._table, self._regions, self.max_regions, n, _address(keys), buffer(first), buffer(iov), buffer(status),
            cells, cells + n, flag,
        )  # fmt: skip
        return ReadResult(status, numbers[0], numbers[1], int(hits))

    def read_one(self, key: Buffer, address: int, length: int) -> Found:
        """`read` of one key into one piece; `Found.address` is 0."""
        out = _slots.ffi.new(self._found_type)
        self._lib.slots_read_one(self._table, self._regions, self.max_regions, _one_key(key), address, length, out)
        return _found(out)

    def into_reader(self, limit: int) -> Callable[[bytes, Any, int], int]:
        """A function (key, into, deadline) -> bytes read, -2 for a miss, -3 for a value that is not mapped here, -1 for
        anything else; half `read_one`'s cost.

        key: exactly 16 bytes, unchecked. into: writable, contiguous plain memory of the value's length, at most
        `limit` bytes; TypeError, ValueError or BufferError for other objects. deadline: ignored, nothing is waited for.
        """
        read, table, regions, n = self._lib.slots_read_into, self._table, self._regions, self.max_regions
        from_buffer, chars = _slots.ffi.from_buffer, _slots.ffi.typeof("char[]")
        failures = {int(ReadStatus.MISS): -2, int(ReadStatus.UNMAPPED): -3}

        def read_into(key: bytes, into: Any, _: int) -> int:
            cells = from_buffer(chars, into, True)
            size = len(cells)
            status = -1 if size > limit else read(table, regions, n, key, cells, size)
            return failures.get(status, -1) if status else size

        return read_into

    def view(self, key: Buffer) -> Found:
        """Where one key's value lies in this process. Its bytes stay put only while the caller holds a lease on it."""
        out = _slots.ffi.new(self._found_type)
        self._lib.slots_view(self._table, self._regions, self.max_regions, _one_key(key), out)
        return _found(out)

    def recheck(self, slot: int, generation: int) -> bool:
        """Whether this slot is visible with this generation right now, in a table that is served."""
        return 0 <= slot <= NONE and bool(self._lib.slots_recheck(self._table, slot, generation))


_READ_STATUS = tuple(ReadStatus)
_UNSERVED = FOREVER  # what C returns in place of a count
_LEASE = 64


def _one_key(key: Buffer) -> Any:
    if type(key) is bytes and len(key) == KEY_BYTES:
        return key
    return _pointer(key, KEY_BYTES, "key")


def _found(out: Any) -> Found:
    return Found(
        _READ_STATUS[out.status], out.addr, out.length, out.sum, out.generation, out.slot, out.region, out.tier
    )
