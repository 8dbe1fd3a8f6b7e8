"""One suite for both slot tables: the C code and its Python twin, each also reading what the other wrote."""

from __future__ import annotations

import gc
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.directory.arena import Arena, aligned, chain, key_of
from ucxkv.directory.slots import (
    NONE,
    ROOT_KEY,
    SLOT_DTYPE,
    CancelFlag,
    PutStatus,
    ReadStatus,
    SlotReader,
    SlotTable,
    SlotTableError,
    is_native,
    table_bytes,
)
from ucxkv.directory.slots_twin import TwinReader, TwinTable


@dataclass
class Side:
    table: type[Any]
    reader: type[Any]


SIDES = {
    "twin": Side(TwinTable, TwinReader),
    "c": Side(SlotTable, SlotReader),
    "c-writes": Side(SlotTable, TwinReader),
    "twin-writes": Side(TwinTable, SlotReader),
}


@pytest.fixture(params=list(SIDES))
def side(request: pytest.FixtureRequest) -> Side:
    assert is_native(), "build it: python ucxkv/directory/build_slots.py"
    return SIDES[request.param]


def make(side: Side, capacity: int = 64, **options: Any) -> tuple[Any, Any]:
    memory = aligned(table_bytes(capacity, options.get("lines", 0)))
    table = side.table(memory, capacity, epoch=5, seed=99, **options)
    return table, side.reader(memory)


def put(table: Any, keys: list[bytes], parents: list[bytes] | None = None, *, arena: Arena | None = None) -> Any:
    values = [b"value of " + key for key in keys]
    offsets = [arena.write(value) for value in values] if arena else [64 * i for i in range(len(keys))]
    return table.put(
        b"".join(keys),
        b"".join(parents or [ROOT_KEY] * len(keys)),
        np.zeros(len(keys), np.uint16),
        np.array(offsets, np.uint64),
        np.array([len(value) for value in values], np.uint32),
        np.array([xxhash.xxh3_64_intdigest(value) for value in values], np.uint64),
        generation=100,
    )


def test_what_is_put_is_found_whole_and_nothing_else_is(side: Side) -> None:
    """Goal: every field of a slot comes back. Method: put four roots, look up six keys, compare fields and order."""
    table, reader = make(side)
    keys = chain(4)
    status, slots, parents, _ = put(table, keys)
    assert status.tolist() == [PutStatus.STORED] * 4 and parents.tolist() == [-1] * 4
    records, found = reader.lookup(b"".join([*keys, *chain(2, b"absent")]))
    assert found.tolist() == [1, 1, 1, 1, 0, 0]
    assert records["generation"][:4].tolist() == [100, 101, 102, 103]
    assert records["offset"].tolist() == [0, 64, 128, 192, 0, 0]
    assert set(records["epoch"][:4].tolist()) == {5} and set(records["tier"][:4].tolist()) == {1}
    assert [r.tobytes() for r in records["key"][:4]] == keys
    assert table.find(b"".join(keys)).tolist() == slots.tolist()
    assert table.used == 4 and [r.tobytes() for r in table.records["key"][slots]] == keys


def test_a_child_needs_its_parent_which_may_come_earlier_in_the_same_call(side: Side) -> None:
    """Goal: token order. Method: a chain in order, one whose parent is absent, one whose parent comes later."""
    table, _ = make(side)
    a, b, c, d, e = chain(5)
    status, slots, parents, _ = put(table, [a, b, d, c, e], [ROOT_KEY, a, c, b, b])
    assert status.tolist() == [0, 0, PutStatus.ORDER, 0, 0]
    assert parents.tolist() == [-1, slots[0], -1, slots[1], slots[1]] and slots[2] == -1


def test_the_first_writer_wins_also_within_one_call(side: Side) -> None:
    """Goal: one content a key. Method: the same key twice in a call, and again in another; the first extent stays."""
    table, reader = make(side)
    a, b = chain(2)
    status, slots, _, _ = put(table, [a, a, b], [ROOT_KEY, ROOT_KEY, a])
    assert status.tolist() == [PutStatus.STORED, PutStatus.ALREADY, PutStatus.STORED] and slots[0] == slots[1]
    again, same, _, _ = put(table, [b, a], [a, ROOT_KEY])
    assert again.tolist() == [PutStatus.ALREADY] * 2 and same.tolist() == [slots[2], slots[0]]
    assert reader.lookup(a)[0]["offset"][0] == 0


def test_one_key_is_found_as_many_are(side: Side) -> None:
    """Method: keys that are there and one that is not, alone and together; what is no key."""
    table, _ = make(side)
    names = chain(4)
    put(table, names[:3], [ROOT_KEY, *names[:2]])
    found = table.find(b"".join(names)).tolist()
    assert [table.find_one(name) for name in names] == found and found[3] == -1 and len(set(found)) == 4
    with pytest.raises(ValueError, match="bytes"):
        table.find_one(names[0][:15])


def test_reserved_and_derived_keys_are_refused_and_are_nobodys_parent(side: Side) -> None:
    """Goal: the zero key and part keys can't be put over. Method: publish a derived slot, put it, and put below it."""
    table, reader = make(side)
    derived, other, child = chain(3)
    record = np.zeros(1, SLOT_DTYPE)
    record["key"], record["flags"] = np.void(derived), (1, 0, 0)
    assert table.publish(record).tolist() == [0]
    status, slots, _, _ = put(table, [ROOT_KEY, derived, other, child], [ROOT_KEY, ROOT_KEY, ROOT_KEY, derived])
    assert status.tolist() == [PutStatus.REFUSED, PutStatus.REFUSED, PutStatus.STORED, PutStatus.ORDER]
    assert slots[0] == slots[1] == -1
    cursor, page = reader.scan(0, 10)
    assert cursor == table.capacity and [r.tobytes() for r in page["key"]] == [other]


def test_entries_marked_beforehand_are_left_alone(side: Side) -> None:
    """Goal: the caller can take blocks out of a call. Method: mark one BUSY; its child then lacks a parent."""
    table, _ = make(side)
    a, b = chain(2)
    zeros = [np.zeros(2, t) for t in (np.uint16, np.uint64, np.uint32, np.uint64)]
    marks = np.array([PutStatus.BUSY, 0], np.uint8)
    status, slots, _, _ = table.put(a + b, ROOT_KEY + a, *zeros, generation=1, status=marks)
    assert status.tolist() == [PutStatus.BUSY, PutStatus.ORDER] and slots.tolist() == [-1, -1] and table.used == 0


def test_a_full_table_says_so_and_takes_again_after_a_removal(side: Side) -> None:
    """Goal: NO_SPACE is an answer. Method: 10 keys into 8 slots, hide two, put the two that did not fit."""
    table, reader = make(side, 8)
    keys = chain(10)
    status, slots, _, _ = put(table, keys)
    assert status.tolist() == [0] * 8 + [PutStatus.NO_SPACE] * 2
    assert table.hide(slots[:2]) == 2 and table.used == 6
    assert reader.exists(b"".join(keys)).tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert [reader.contains(key) for key in keys] == [False, False, True, True, True, True, True, True, False, False]
    assert put(table, keys[8:])[0].tolist() == [0, 0]
    assert reader.match(b"".join(keys[2:])) == 8


def test_hide_skips_numbers_that_are_no_visible_slots(side: Side) -> None:
    """Goal: hide is safe to repeat. Method: hide twice, and with numbers below, above and never used."""
    table, _ = make(side)
    slots = put(table, chain(3))[1]
    assert table.hide(np.array([slots[1], slots[1], -1, 64, 63, 2**31 - 1], np.int32)) == 1
    assert table.used == 2


def test_match_stops_at_the_first_gap_wherever_it_is(side: Side) -> None:
    """Goal: the leading run, over several batches. Method: 50 keys, remove each position in turn."""
    table, reader = make(side)
    keys = chain(50)
    slots = put(table, keys)[1]
    assert reader.match(b"".join(keys)) == 50 and reader.match(b"") == 0
    for gap in (49, 33, 16, 15, 1, 0):
        table.hide(slots[gap : gap + 1])
        assert reader.match(b"".join(keys)) == gap


def test_scan_pages_through_every_visible_block_once(side: Side) -> None:
    """Goal: listing is complete and bounded. Method: pages of 3 over 20 blocks of which 5 are gone."""
    table, reader = make(side)
    keys = chain(20)
    slots = put(table, keys)[1]
    table.hide(slots[3:8])
    seen: list[bytes] = []
    cursor = 0
    while cursor < reader.capacity:
        cursor, page = reader.scan(cursor, 3)
        assert len(page) <= 3
        seen += [r.tobytes() for r in page["key"]]
    assert sorted(seen) == sorted(keys[:3] + keys[8:])


def test_values_are_copied_over_pieces_and_checked(side: Side) -> None:
    """Goal: read scatters over pieces, each key has its outcome. Method: hit over three pieces, miss, size, corrupt."""
    table, reader = make(side)
    arena = Arena(1 << 16)
    hit, miss, size, corrupt, far = chain(5)
    put(table, [hit, size, corrupt, far], arena=arena)
    reader.map_region(0, arena.address, arena.size)
    value = b"value of " + hit
    view = reader.view(corrupt)
    assert view.status == ReadStatus.HIT and arena.at(view.address, view.length) == b"value of " + corrupt
    arena.memory[view.address - arena.address] ^= 1
    out = np.full(256, 0xEE, np.uint8)
    base = out.ctypes.data
    iov = np.array(
        [[base + 1, 3], [base + 10, 0], [base + 20, len(value) - 3], [base + 60, 25], [base + 90, 9], [base + 120, 25]],
        np.uint64,
    )
    result = reader.read(hit + miss + size + corrupt, np.array([0, 3, 4, 5, 6], np.uint32), iov)
    assert result.status.tolist() == [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.SIZE, ReadStatus.CORRUPT]
    assert result.hits == 1 and result.length.tolist() == [25, 0, 25, 25]
    assert result.generation.tolist() == [100, 0, 101, 102]
    assert out[1:4].tobytes() + out[20:42].tobytes() == value
    assert set(out[[0, 4, 10, 19, 42, 60, 84, 90, 98]].tolist()) == {0xEE}
    assert reader.read_one(far, base + 200, 25)[:3] == (ReadStatus.HIT, 0, 25)
    assert out[200:225].tobytes() == b"value of " + far
    reader.unmap_region(0)
    assert reader.read_one(far, base, 25).status == ReadStatus.UNMAPPED == reader.view(far).status
    reader.map_region(0, arena.address, 60)  # only the first two values lie within
    assert reader.view(hit).status == ReadStatus.HIT and reader.view(far).status == ReadStatus.UNMAPPED


def test_into_reader_reads_whole_values_and_nothing_else() -> None:
    """Goal: the one-key fast path answers as `read_one` does. Method: hit, miss, wrong size, over its limit, bad
    objects.
    """
    table, reader = make(SIDES["c"])
    arena = Arena(4096)
    hit, miss = chain(2)
    put(table, [hit], arena=arena)
    reader.map_region(0, arena.address, arena.size)
    read_into = reader.into_reader(40)
    out = bytearray(25)
    assert read_into(hit, out, 0) == 25 and out == b"value of " + hit
    assert read_into(miss, out, 0) == -2 and read_into(hit, bytearray(24), 0) == read_into(hit, bytearray(41), 0) == -1
    with pytest.raises(BufferError):
        read_into(hit, bytes(25), 0)
    with pytest.raises(TypeError):
        read_into(hit, 25, 0)
    reader.unmap_region(0)
    assert read_into(hit, out, 0) == -3


def test_a_value_that_moves_is_the_same_block_in_another_place(side: Side) -> None:
    """Goal: a block changes its place, and its sum where the value there is another, and nothing else; a region that
    nobody maps is said to be so, never read. Method: a value in two places; move the slot to the second, to no region,
    to a third place with other bytes; a slot that is not there.
    """
    table, reader = make(side)
    arena = Arena(4096)
    key, other = chain(2)
    put(table, [key, other], arena=arena)
    before = reader.lookup(key)[0][0].copy()
    value = b"value of " + key
    reader.map_region(3, arena.address, arena.size)
    total = int(before["sum"])
    table.move(0, 3, arena.write(value), 1, total)
    after = reader.lookup(key)[0][0]
    moved = ("region", "offset", "check", "version")
    assert [name for name in SLOT_DTYPE.names or () if before[name].tobytes() != after[name].tobytes()] == list(moved)
    found = reader.view(key)
    assert (found.status, found.generation, found.region) == (ReadStatus.HIT, int(before["generation"]), 3)
    assert arena.at(found.address, found.length) == value
    table.move(0, 0xFFFF, 77, 2, total)
    found = reader.view(key)
    assert (found.status, found.address, found.tier) == (ReadStatus.UNMAPPED, 0, 2)
    assert reader.match(key + other) == 2 and table.find(key).tolist() == [0]
    lossy = bytes(byte ^ 1 for byte in value)
    table.move(0, 3, arena.write(lossy), 1, xxhash.xxh3_64_intdigest(lossy))
    changed = reader.lookup(key)[0][0]
    names = [name for name in SLOT_DTYPE.names or () if after[name].tobytes() != changed[name].tobytes()]
    assert names == ["offset", "sum", "check", "version"]
    into = np.zeros(len(lossy), np.uint8)
    iov = np.array([[into.ctypes.data, len(lossy)]], np.uint64)
    assert reader.read(key, np.array([0, 1], np.uint32), iov).hits == 1 and into.tobytes() == lossy
    for absent in (2, 10**6):
        with pytest.raises(ValueError, match="not visible"):
            table.move(absent, 0, 0, 1, 0)


def test_a_cancelled_read_writes_nothing_more(side: Side) -> None:
    """Goal: cancel stops before the next copy. Method: a flag set beforehand; the destination keeps its poison."""
    table, reader = make(side)
    arena = Arena(4096)
    keys = chain(3)
    put(table, keys, arena=arena)
    reader.map_region(0, arena.address, arena.size)
    out = np.full(75, 0xEE, np.uint8)
    iov = np.array([[out.ctypes.data + 25 * i, 25] for i in range(3)], np.uint64)
    flag = CancelFlag()
    first = np.arange(4, dtype=np.uint32)
    assert reader.read(b"".join(keys), first, iov, flag).hits == 3
    out[:] = 0xEE
    flag.set()
    result = reader.read(b"".join(keys), first, iov, flag)
    assert result.status.tolist() == [ReadStatus.CANCELLED] * 3 and set(out.tolist()) == {0xEE}


def test_recheck_and_view_follow_the_generation(side: Side) -> None:
    """Goal: a slot number is only as good as its generation. Method: hide, put another key into the same slot."""
    table, reader = make(side, 1)
    a, b = chain(2)
    put(table, [a])
    view = reader.view(a)
    assert reader.recheck(view.slot, view.generation) and not reader.recheck(view.slot, view.generation + 1)
    table.hide(np.array([view.slot], np.int32))
    assert not reader.recheck(view.slot, view.generation) and reader.view(a).slot == NONE
    put(table, [b])
    assert reader.view(b).slot == view.slot and reader.view(a).status == ReadStatus.MISS
    assert not reader.recheck(64, 1)


def test_a_damaged_slot_or_one_of_another_epoch_is_a_miss(side: Side) -> None:
    """Goal: check and epoch guard every slot. Method: flip each of its first 60 bytes, then restore it."""
    table, reader = make(side)
    (key,) = chain(1)
    slot = int(put(table, [key])[1][0])
    raw = table.records.view(np.uint8).reshape(-1, 64)[slot]
    for at in range(60):
        raw[at] ^= 0x40
        assert not reader.exists(key)[0] and reader.match(key) == 0 and not reader.lookup(key)[1][0]
        raw[at] ^= 0x40
    assert reader.exists(key)[0]
    raw[60] ^= 1  # a writer that died while writing: a miss, not a hang
    assert not reader.exists(key)[0] and reader.read_one(key, raw.ctypes.data, 25).status == ReadStatus.MISS


def test_memory_that_is_no_table_is_refused(side: Side) -> None:
    """Goal: attach trusts nothing. Method: zeros, a cut table, and each header word overwritten."""
    memory = aligned(table_bytes(64))
    with pytest.raises(SlotTableError):
        side.reader(memory)
    side.table(memory, 64, epoch=1)
    side.reader(memory)
    with pytest.raises(SlotTableError):
        side.reader(memory[:-64])
    with pytest.raises(SlotTableError):
        side.reader(memory[:100])
    words = memory.cast("Q")
    for at in (0, 1, 2, 3, 4, 5):
        kept, words[at] = words[at], 2**63 + 12345
        with pytest.raises(SlotTableError):
            side.reader(memory)
        words[at] = kept
    side.reader(memory)


def test_a_closed_reader_lets_go_of_the_memory_and_misses(side: Side) -> None:
    """Goal: the mapping can be closed after the reader. Method: close the reader, then the mmap; every call misses."""
    mapping = mmap.mmap(-1, table_bytes(64))
    (key,) = chain(1)
    table = side.table(mapping, 64, epoch=1)
    put(table, [key])
    reader = side.reader(mapping)
    assert reader.match(key) == 1
    del table
    reader.close()
    gc.collect()
    mapping.close()  # BufferError while anything holds it
    assert reader.match(key) == 0 and not reader.exists(key)[0] and not reader.contains(key)
    assert not reader.lookup(key)[1][0]
    assert reader.view(key).status == ReadStatus.MISS == reader.read_one(key, 0, 0).status
    assert len(reader.scan(0, 10)[1]) == 0 and not reader.recheck(0, 1)


def test_wrong_arguments_are_named(side: Side) -> None:
    """Goal: lengths are checked before C sees an address. Method: short arrays, ragged keys, bad regions."""
    table, reader = make(side)
    with pytest.raises(SlotTableError):
        side.table(aligned(table_bytes(64) - 1), 64, epoch=1)
    with pytest.raises(ValueError, match="multiple of 16"):
        table.find(b"x" * 17)
    with pytest.raises(ValueError):
        table.put(key_of(1), b"", b"", b"", b"", b"", generation=1)
    with pytest.raises(ValueError):
        reader.map_region(1024, 1, 1)
    with pytest.raises(ValueError):
        reader.view(b"short")
    with pytest.raises(ValueError):
        reader.read(key_of(1), np.array([0, 2], np.uint32), np.zeros((1, 2), np.uint64))
    with pytest.raises(ValueError):
        side.table(aligned(table_bytes(64)), 64, epoch=1, links=np.zeros(3, np.uint32))
