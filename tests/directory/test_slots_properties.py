"""The slot table under random use: C and twin against a dict, and byte for byte against each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.directory.arena import aligned, key_of
from ucxkv.directory.slots import HEADER_BYTES, ROOT_KEY, PutStatus, SlotTable, default_lines, slots_offset, table_bytes
from ucxkv.directory.slots_twin import TwinTable

LINES = 20
CAPACITY = LINES * 7 * 95 // 100
KEYS = [key_of(i) for i in range(CAPACITY + 30)]

# A step puts or hides a run of keys; runs are long, so that the table gets full and empty within a few steps.
steps = st.lists(st.tuples(st.booleans(), st.integers(0, len(KEYS) - 1), st.integers(1, 90)), min_size=1, max_size=30)


def put(table: SlotTable | TwinTable, keys: list[bytes], generation: int) -> list[int]:
    n = len(keys)
    offsets = np.arange(n, dtype=np.uint64) * 64 + generation * 10**6
    columns = (np.full(n, 3, np.uint16), offsets, np.full(n, 64, np.uint32), offsets + 1)
    status, _, _, nbytes = table.put(b"".join(keys), ROOT_KEY * n, *columns, generation=generation)
    assert nbytes == 64 * (status == PutStatus.STORED).sum()
    out: list[int] = status.tolist()
    return out


@given(seed=st.integers(0, 2**64 - 1), steps=steps)
@settings(max_examples=60, deadline=None)
def test_c_and_twin_hold_what_a_dict_holds_and_the_same_bytes(seed: int, steps: list[tuple[bool, int, int]]) -> None:
    """Goal: put, hide, find at up to 0.95 of all index entries. Method: random runs against a dict; after each step the
    memories of C and twin are equal from the first line to the last slot; emptied, the index is all zero.
    """
    tables = [
        kind(aligned(table_bytes(CAPACITY, LINES)), CAPACITY, epoch=2, seed=seed, lines=LINES)
        for kind in (SlotTable, TwinTable)
    ]
    model: dict[bytes, int] = {}
    generation = 1
    for is_put, start, length in steps:
        run = [KEYS[(start + i) % len(KEYS)] for i in range(length)]
        if is_put:
            expected = []
            for at, key in enumerate(run):
                full = len(model) == CAPACITY
                expected.append(PutStatus.ALREADY if key in model else PutStatus.NO_SPACE if full else PutStatus.STORED)
                if expected[-1] == PutStatus.STORED:
                    model[key] = generation + at
            assert all(put(table, run, generation) == expected for table in tables)
            generation += length
        else:
            gone = [key for key in dict.fromkeys(run) if key in model]
            for table in tables:
                assert table.hide(table.find(b"".join(run))) == len(gone)
            for key in gone:
                del model[key]
        compare(tables, model)
    for table in tables:
        table.hide(table.find(b"".join(KEYS)))
        assert not any(table.memory[HEADER_BYTES : slots_offset(LINES)]), "the index is not empty"


def compare(tables: list[SlotTable | TwinTable], model: dict[bytes, int]) -> None:
    first, second = (bytes(table.memory[HEADER_BYTES:]) for table in tables)
    assert first == second
    for table in tables:
        assert table.used == len(model)
        records, found = table.reader().lookup(b"".join(KEYS))
        assert {k: int(g) for k, g, hit in zip(KEYS, records["generation"], found, strict=True) if hit} == model


def test_keys_that_share_a_line_still_find_each_other() -> None:
    """Goal: overflow over many lines and around the end. Method: 60 keys of one home line; hide in both orders."""
    lines = 12
    twin = TwinTable(aligned(table_bytes(80, lines)), 80, epoch=1, seed=4, lines=lines)
    keys = [key for key in map(key_of, range(4000)) if twin._index.home(twin._index.hash(key)) == lines - 1][:60]
    assert len(keys) == 60
    for kind in (SlotTable, TwinTable):
        for order in (1, -1):
            table = kind(aligned(table_bytes(80, lines)), 80, epoch=1, seed=4, lines=lines)
            assert put(table, keys, 1) == [PutStatus.STORED] * 60
            for i in range(60):
                left = keys[i:] if order == 1 else keys[: 60 - i]
                gone = keys[:i] if order == 1 else keys[60 - i :]
                assert table.reader().exists(b"".join(left)).all() and not table.reader().exists(b"".join(gone)).any()
                table.hide(table.find(left[0] if order == 1 else left[-1]))
            assert not any(table.memory[HEADER_BYTES : slots_offset(lines)])


def test_an_insertion_that_would_be_out_of_reach_is_refused() -> None:
    """Goal: no entry is put where readers stop looking. Method: more keys of one line than 256 lines take."""
    lines, wanted = 260, 256 * 7 + 5
    twin = TwinTable(aligned(table_bytes(3000, lines)), 3000, epoch=1, lines=lines)
    seen: list[bytes] = []
    number = 0
    while len(seen) < wanted:
        key = number.to_bytes(16, "little")
        number += 1
        if number > 1 and twin._index.home(twin._index.hash(key)) == 5:
            seen.append(key)
    table = SlotTable(aligned(table_bytes(3000, lines)), 3000, epoch=1, lines=lines)
    status = put(table, seen, 1)
    assert status == [PutStatus.STORED] * (256 * 7) + [PutStatus.NO_SPACE] * 5
    assert table.reader().exists(b"".join(seen)).tolist() == [1] * (256 * 7) + [0] * 5


def test_keys_whose_hash_would_have_an_empty_tag_are_found() -> None:
    """Goal: no tag is that of an empty entry. Method: keys made from such hashes by running the hash backwards."""
    seed, mask = 12345, (1 << 64) - 1
    hi = seed ^ 0xD6E8FEB86659FD93  # makes the product 0, so the low half can be solved for
    keys = []
    for number in range(40):
        h = number * 0x9E3779B97F4A7C15 & 0xFFFFFFFF00000000
        h = h ^ h >> 29 ^ h >> 58
        h = h * pow(0xFF51AFD7ED558CCD, -1, 1 << 64) & mask
        h = h ^ h >> 32
        keys.append((h ^ (hi << 32 & mask | hi >> 32)).to_bytes(8, "little") + hi.to_bytes(8, "little"))
    for kind in (SlotTable, TwinTable):
        table = kind(aligned(table_bytes(64, 16)), 64, epoch=1, seed=seed, lines=16)
        if isinstance(table, TwinTable):
            assert {table._index.hash(key) & 0xFFFFFFFF for key in keys} == {1}
        for i, key in enumerate(keys):
            assert put(table, [key], 1) == [PutStatus.STORED]
            assert table.reader().exists(b"".join(keys)).tolist() == [1] * (i + 1) + [0] * (39 - i)
        for i in range(0, 40, 2):  # leaves empty entries before used ones
            table.hide(table.find(keys[i]))
        assert table.reader().exists(b"".join(keys)).tolist() == [0, 1] * 20


def test_the_index_takes_the_bytes_it_promises() -> None:
    """Goal: at most 12 bytes of index a slot. Method: arithmetic over sizes."""
    for capacity in (10**3, 65_536, 10**6, 10**7):
        assert default_lines(capacity) * 7 * 0.8 >= capacity - 6
        assert (table_bytes(capacity) - HEADER_BYTES) / capacity <= 64 + 11.6


FUZZ = """
import random, sys
import numpy as np
from tests.directory.arena import Arena, aligned, key_of
from ucxkv.directory.slots import HEADER_BYTES, ROOT_KEY, SlotReader, SlotTable, SlotTableError, table_bytes

seed, rounds = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
keys = [key_of(i) for i in range(60)]
joined = b"".join(keys)
arena = Arena(1 << 16)
out = np.zeros(60 * 512, np.uint8)
iov = np.array([[out.ctypes.data + 512 * i, 512] for i in range(60)], np.uint64)
first = np.arange(61, dtype=np.uint32)
attached = 0
for _ in range(rounds):
    memory = aligned(table_bytes(100))
    table = SlotTable(memory, 100, epoch=1, seed=rng.getrandbits(64))
    sums, offsets = np.zeros(60, np.uint64), np.arange(60, dtype=np.uint64) * 512
    table.put(joined, ROOT_KEY * 60, np.zeros(60, np.uint16), offsets, np.full(60, 512, np.uint32), sums, generation=1)
    begin = rng.choice([0, 0, HEADER_BYTES, HEADER_BYTES, HEADER_BYTES + 64 * 18])
    for _ in range(rng.choice([1, 10, 1000])):
        memory[rng.randrange(begin, len(memory) if begin else 64)] = rng.randrange(256)
    if rng.random() < 0.2:
        memory[HEADER_BYTES:] = rng.randbytes(len(memory) - HEADER_BYTES)
    try:
        reader = SlotReader(memory)
    except SlotTableError:
        continue
    attached += 1
    reader.map_region(0, arena.address, arena.size)
    reader.lookup(joined), reader.match(joined), reader.exists(joined), reader.scan(rng.randrange(200), 50)
    reader.read(joined, first, iov), reader.view(keys[0]), reader.recheck(rng.randrange(1000), 1)
    reader.read_one(keys[1], out.ctypes.data, 512)
print(attached)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_damaged_table_crashes_no_reader(seed: int, request: pytest.FixtureRequest) -> None:
    """Goal: readers trust nothing in the mapping. Method: random damage to header, index and slots; every reader call,
    in a process of its own; it must end by itself and have attached to most tables.
    """
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, str(seed), "400"],
        cwd=Path(request.config.rootpath),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 200
