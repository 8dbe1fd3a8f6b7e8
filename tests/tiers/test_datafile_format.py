"""The bytes of datafiles: what is encoded is decoded, and nothing else is taken for it."""

from __future__ import annotations

import struct
from dataclasses import asdict

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucxkv.tiers.datafile_format import (
    BLOCK_BYTES,
    DESCRIPTOR_DTYPE,
    DESCRIPTORS_MAX,
    FREE,
    IN_USE,
    NO_PARENT,
    TOMBSTONE,
    Index,
    decode_batch,
    decode_file,
    decode_index,
    decode_index_head,
    decode_store,
    encode_batch,
    encode_file,
    encode_index,
    encode_store,
    index_bytes,
    padded,
    read_head,
)

STORE = bytes(range(16))
FILE_BYTES = 1 << 30
NUMBER = st.integers(0, (1 << 63) - 1)
WORD = st.integers(0, (1 << 64) - 1)


@st.composite
def descriptors(draw: st.DrawFn, *, start: int, most: int = DESCRIPTORS_MAX) -> NDArray[np.void]:
    """Rows whose payloads stand one behind the other from `start` on."""
    rows = np.zeros(draw(st.integers(1, most)), DESCRIPTOR_DTYPE)
    seed = draw(st.integers(0, 1 << 32))
    rng = np.random.default_rng(seed)
    at = start
    for index in range(len(rows)):
        key, total, version = rng.bytes(16), int(rng.integers(1 << 63)), int(rng.integers(1 << 63))
        if rng.random() < 0.2:
            rows[index] = (key, NO_PARENT, 0, version, 0, 0, TOMBSTONE, 0)
        else:
            length = int(rng.integers(1, 20_000))
            parent, flags, original = rng.bytes(16), int(rng.integers(1 << 31)), int(rng.integers(1 << 32))
            rows[index] = (key, parent, total, version, at // BLOCK_BYTES, length, flags, original)
            at += padded(length)
    return rows


def _length(rows: NDArray[np.void]) -> int:
    return BLOCK_BYTES + sum(padded(int(length)) for length in rows["length"])


def _batch(rows: NDArray[np.void], *, run: int = 7, previous: int = 11) -> bytes:
    raw, total = encode_batch(rows, file=3, generation=5, sequence=9, length=_length(rows), run=run, previous=previous)
    assert len(raw) == BLOCK_BYTES and struct.unpack_from("<Q", raw, 56)[0] == total
    return raw


def _decode(raw: bytes, *, file: int = 3, generation: int = 5, previous: int = 11, end: int = FILE_BYTES) -> object:
    return decode_batch(raw, file=file, generation=generation, previous=previous, offset=BLOCK_BYTES, end=end)


def _index(rows: NDArray[np.void]) -> tuple[bytes, bytes]:
    offset = BLOCK_BYTES + _length(rows)
    return encode_index(rows, file=3, generation=5, sequence=9, offset=offset, previous=13)


def _decode_index(body: bytes, raw: bytes, *, file: int = 3, generation: int = 5, previous: int = 13) -> Index | None:
    head = decode_index_head(raw, file=file, generation=generation, previous=previous, file_bytes=FILE_BYTES)
    return None if head is None else decode_index(head, raw, body)


@given(state=st.sampled_from([FREE, IN_USE]), file=st.integers(0, 2**32 - 1), numbers=st.tuples(NUMBER, NUMBER, NUMBER))
@settings(max_examples=60, deadline=None)
def test_a_files_head_comes_back(state: int, file: int, numbers: tuple[int, int, int]) -> None:
    """Goal: every field survives. Method: hypothesis; the sum is compared with xxhash's over the table's bytes."""
    generation, sequence, floor = numbers
    raw, total = encode_file(
        store=STORE, file=file, state=state, generation=generation, sequence=sequence, file_bytes=4096, floor=floor
    )
    assert len(raw) == BLOCK_BYTES and not any(raw[80:]) and total == xxhash.xxh3_64_intdigest(raw[:56] + STORE)
    decoded = decode_file(raw)
    assert decoded is not None and decoded[1] == STORE
    assert asdict(decoded[0]) == {
        "magic": int.from_bytes(b"UKVD", "little"),
        "version": 1,
        "state": state,
        "file": file,
        "count": 0,
        "generation": generation,
        "sequence": sequence,
        "length": 4096,
        "mark": floor,
        "previous": 0,
        "sum": total,
    }


def test_the_files_of_a_store_and_of_data_are_not_mixed_up() -> None:
    """Goal: a piece is what its magic says. Method: each decoder gets the other's bytes, and its own of a newer
    version, which is told from damage."""
    raw, _ = encode_file(store=STORE, file=1, state=FREE, generation=2, sequence=3, file_bytes=8192, floor=4)
    store = encode_store(STORE)
    assert decode_store(raw) is None and decode_file(store) is None
    held = decode_store(store)
    assert held is not None and held[1] == STORE
    newer = bytearray(raw)
    newer[4] = 2
    struct.pack_into("<Q", newer, 56, xxhash.xxh3_64_intdigest(bytes(newer[:56]) + STORE))
    decoded = decode_file(bytes(newer))
    assert decoded is not None and decoded[0].version == 2


@given(rows=descriptors(start=2 * BLOCK_BYTES), run=NUMBER, previous=WORD)
@settings(max_examples=60, deadline=None)
def test_a_batch_comes_back(rows: NDArray[np.void], run: int, previous: int) -> None:
    """Goal: every descriptor survives. Method: hypothesis."""
    raw = _batch(rows, run=run, previous=previous)
    decoded = decode_batch(raw, file=3, generation=5, previous=previous, offset=BLOCK_BYTES, end=FILE_BYTES)
    assert decoded is not None
    head, found = decoded
    assert (head.count, head.sequence, head.mark, head.length) == (len(rows), 9, run, _length(rows))
    assert found.tobytes() == rows.tobytes()


@given(rows=descriptors(start=2 * BLOCK_BYTES, most=400))
@settings(max_examples=40, deadline=None)
def test_an_index_comes_back(rows: NDArray[np.void]) -> None:
    """Goal: every descriptor survives, padding aside. Method: hypothesis."""
    body, raw = _index(rows)
    assert len(body) + len(raw) == index_bytes(len(rows)) and len(raw) == BLOCK_BYTES
    found = _decode_index(body, raw)
    assert found is not None and (found.sequence, found.offset) == (9, BLOCK_BYTES + _length(rows))
    assert found.descriptors.tobytes() == rows.tobytes()


def test_an_index_of_nothing_comes_back() -> None:
    """Goal: the smallest case. Method: no rows."""
    body, raw = encode_index(
        np.empty(0, DESCRIPTOR_DTYPE), file=3, generation=5, sequence=0, offset=BLOCK_BYTES, previous=13
    )
    found = _decode_index(body, raw)
    assert body == b"" and found is not None and len(found.descriptors) == 0


def _rows(count: int = DESCRIPTORS_MAX) -> NDArray[np.void]:
    rows = np.zeros(count, DESCRIPTOR_DTYPE)
    for at in range(count):
        rows[at] = (bytes([at % 251 + 1] * 16), bytes([at % 13] * 16), at + 1, at, 2 + at, 4000, at, 0)
    return rows


def _flips(raw: bytes, bits: range) -> list[bytes]:
    found = []
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        found.append(bytes(damaged))
    return found


def test_every_flipped_bit_of_a_batch_is_seen() -> None:
    """Goal: no damaged header is taken. Method: each of its 32,768 bits is flipped."""
    raw = _batch(_rows())
    assert _decode(raw) is not None
    assert all(_decode(each) is None for each in _flips(raw, range(8 * BLOCK_BYTES)))


def test_every_flipped_bit_of_a_head_is_seen() -> None:
    """Goal: no damaged head is taken. Method: each bit of the part that says something, and of the store's file."""
    raw, _ = encode_file(store=STORE, file=1, state=IN_USE, generation=2, sequence=3, file_bytes=8192, floor=4)
    assert all(decode_file(each) is None for each in _flips(raw, range(8 * 80)))
    assert all(decode_store(each) is None for each in _flips(encode_store(STORE), range(8 * 80)))


def test_every_flipped_bit_of_an_index_is_seen() -> None:
    """Goal: no damaged index is taken. Method: each bit of its head and of its descriptors."""
    rows = _rows(30)
    body, raw = _index(rows)
    assert all(_decode_index(body, each) is None for each in _flips(raw, range(8 * 64)))
    assert all(_decode_index(each, raw) is None for each in _flips(body, range(8 * 64 * 30)))


def test_every_cut_is_seen() -> None:
    """Goal: a torn piece is none. Method: pieces that end after each byte, followed by ones or by nothing."""
    raw, (body, head) = _batch(_rows()), _index(_rows(20))
    file, _ = encode_file(store=STORE, file=1, state=IN_USE, generation=2, sequence=3, file_bytes=8192, floor=4)
    for end in range(BLOCK_BYTES):
        assert _decode(raw[:end]) is None and _decode(raw[:end].ljust(BLOCK_BYTES, b"\xff")) is None
    for end in range(80):
        assert decode_file(file[:end]) is None and decode_file(file[:end].ljust(BLOCK_BYTES, b"\xff")) is None
    for end in range(64):
        assert _decode_index(body, head[:end]) is None
    for end in range(20 * 64):
        assert _decode_index(body[:end], head) is None and _decode_index(body[:end].ljust(1280, b"\xff"), head) is None


@pytest.mark.parametrize("other", [{"file": 4}, {"generation": 6}, {"previous": 12}, {"end": BLOCK_BYTES * 8}])
def test_what_belongs_elsewhere_is_not_taken(other: dict[str, int]) -> None:
    """Goal: an old life's or another file's piece continues nothing. Method: a good batch is asked for by another
    file, generation, predecessor, and in a shorter file; likewise an index."""
    assert _decode(_batch(_rows()), **other) is None
    body, raw = _index(_rows(20))
    if "end" not in other:
        assert _decode_index(body, raw, **other) is None
    else:
        head = decode_index_head(raw, file=3, generation=5, previous=13, file_bytes=other["end"])
        assert head is None


@pytest.mark.parametrize(
    "row",
    [
        (b"k" * 16, NO_PARENT, 1, 0, 1, 4096, 0, 0),  # in the header
        (b"k" * 16, NO_PARENT, 1, 0, 3, 4097, 0, 0),  # past the batch's end
        (b"k" * 16, NO_PARENT, 1, 0, 2, 4097, 0, 0),  # over the next one
        (b"k" * 16, NO_PARENT, 1, 0, 2, 0, 0, 0),  # empty
        (b"k" * 16, NO_PARENT, 0, 0, 0, 9, TOMBSTONE, 0),  # a tombstone with bytes
        (b"k" * 16, NO_PARENT, 0, 0, 0, 0, TOMBSTONE, 9),  # a tombstone of an encoded block
    ],
)
def test_descriptors_that_cannot_be_are_refused_though_their_sum_holds(row: tuple[object, ...]) -> None:
    """Goal: a place always lies within its batch. Method: batches with a good sum and one impossible row."""
    rows = np.zeros(2, DESCRIPTOR_DTYPE)
    rows[0], rows[1] = row, (b"n" * 16, NO_PARENT, 1, 0, 3, 4096, 0, 0)
    raw, _ = encode_batch(rows, file=3, generation=5, sequence=9, length=3 * BLOCK_BYTES, run=7, previous=11)
    assert _decode(raw) is None


@given(st.binary(max_size=BLOCK_BYTES))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_no_piece(raw: bytes) -> None:
    """Goal: decoders answer, never raise. Method: random bytes behind each magic."""
    for magic in (b"", b"UKVD", b"UKVB", b"UKVI", b"UKVS"):
        each = (magic + raw)[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
        head = read_head(each)
        assert head is None or head.magic in {int.from_bytes(b"UKV" + x, "little") for x in (b"D", b"B", b"I", b"S")}
        assert decode_file(each) is None and decode_store(each) is None and _decode(each) is None
        assert _decode_index(each, each) is None
