"""The callers' memory as address arrays: right addresses, no copies, lifetimes, and what is refused by name."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.buffers import Pieces, RegisteredBuffer, as_destination, as_destinations, as_source, as_sources
from ucxkv.errors import UsageError


def read(pieces: Pieces) -> list[bytes]:
    """The bytes of every value, read from the addresses as C would."""
    values = []
    for index in range(len(pieces)):
        span = range(int(pieces.first[index]), int(pieces.first[index + 1]))
        value = b"".join(ctypes.string_at(int(pieces.addr[p]), int(pieces.length[p])) for p in span)
        assert len(value) == pieces.nbytes[index]
        values.append(value)
    return values


def write(pieces: Pieces, byte: int) -> None:
    """Fill every piece with one byte, through the addresses."""
    for addr, length in zip(pieces.addr.tolist(), pieces.length.tolist(), strict=True):
        ctypes.memset(addr, byte, length)


def sample(size: int) -> bytes:
    """Bytes that differ from place to place."""
    return bytes((i * 37 + 11) % 256 for i in range(size))


class DLPackOnly:
    """An object that has nothing but the DLPack protocol."""

    def __init__(self, source: np.ndarray[Any, Any], device: int = 1) -> None:
        self.source = source
        self.device = device
        self.shape = source.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class OnGpu:
    """What a cupy array shows of itself."""

    shape = (2, 4)
    __cuda_array_interface__: dict[str, Any] = {}

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("a GPU array is never asked for its memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def writable_kinds(data: bytes) -> list[Any]:
    """Every kind of writable object that holds `data`."""
    mapped = mmap.mmap(-1, max(1, len(data)))
    mapped.write(data)
    kinds: list[Any] = [
        np.frombuffer(data, np.uint8).copy(),
        np.frombuffer(data, ">u2").copy().reshape(-1, 2),
        bytearray(data),
        memoryview(bytearray(data)),
        memoryview(bytearray(b"__" + data + b"__"))[2:-2],
        array.array("B", data),
        array.array("d", data),
        (ctypes.c_uint8 * len(data)).from_buffer_copy(data),
        DLPackOnly(np.frombuffer(data, np.uint8).copy()),
    ]
    if len(data):
        kinds.append(mapped)
    return kinds


@pytest.mark.parametrize("size", [0, 8, 4096])
def test_every_kind_of_buffer_is_read_where_it_lies(size: int) -> None:
    """Goal: the bytes behind the address are the object's. Method: read each kind back through its address, as
    single, in a list of one kind and in a mixed list; write through the addresses and see the objects change."""
    data = sample(size)
    for kind in writable_kinds(data):
        assert read(as_source(kind)) == [data], type(kind)
        assert read(as_sources([kind], 1)) == [data]
        write(as_destination(kind), 0xAB)
        assert read(as_source(kind)) == [b"\xab" * size], type(kind)
        assert bytes(kind.source if isinstance(kind, DLPackOnly) else kind) == b"\xab" * size
    mixed = [*writable_kinds(data), data, memoryview(data), np.frombuffer(data, np.uint8)]
    assert read(as_sources(mixed, len(mixed))) == [data] * len(mixed)
    alike = [np.frombuffer(data, np.uint8).copy() for _ in range(5)]
    assert read(as_sources(alike, 5)) == [data] * 5
    assert read(as_destinations(alike, 5)) == [data] * 5
    assert read(as_sources([data] * 5, 5)) == [data] * 5
    assert read(as_destinations([bytearray(data) for _ in range(5)], 5)) == [data] * 5


def test_one_array_whose_first_axis_counts_the_values_is_cut_into_rows() -> None:
    """Goal: the fast path names the same memory as a list of its rows. Method: 2-D, 4-D, big-endian, read-only as
    source, stepping, reversed and one-row arrays, and a memoryview of two axes, against the rows."""
    base = np.arange(6 * 2 * 3 * 4, dtype=np.int32).reshape(6, 2, 3, 4)
    frozen = base.copy()
    frozen.setflags(write=False)
    wide = np.zeros((6, 5), np.uint8)
    wide[:] = np.arange(6)[:, None]
    for blocks in (
        base,
        base.reshape(6, -1),
        base.astype(">i4"),
        frozen,
        base[::2],
        base[::-1],
        base[:1],
        wide[:, 1:4],
    ):
        got = as_sources(blocks, len(blocks))
        assert read(got) == [row.tobytes() for row in blocks]
        assert got.is_flat
    view = memoryview(bytearray(sample(24))).cast("B", (4, 6))
    assert read(as_sources(view, 4)) == [sample(24)[i : i + 6] for i in range(0, 24, 6)]
    assert read(as_sources(np.zeros((0, 4)), 0)) == []
    assert read(as_sources(np.zeros((3, 0)), 3)) == [b""] * 3
    write(as_destinations(base[::2], 3), 0)
    assert not base[::2].any()
    assert base[1::2].all()


def test_vectored_values_keep_the_order_of_their_pieces() -> None:
    """Goal: a value of many pieces is one value. Method: values of 0, 1, 2 and 3 pieces, one empty, mixed with plain
    ones; the value is the pieces joined."""
    a, b, c = (np.frombuffer(sample(size), np.uint8).copy() for size in (5, 0, 300))
    values: list[Any] = [[a, b, c], c, (), (c, a), bytearray(b"plain"), [b]]
    got = as_sources(values, 6)
    want = [b"".join(bytes(p) for p in v) if isinstance(v, list | tuple) else bytes(v) for v in values]
    assert read(got) == want
    assert got.first.tolist() == [0, 3, 4, 4, 6, 7, 8]
    assert not got.is_flat
    assert got.total_bytes == sum(map(len, want))
    assert read(as_source([a, c])) == [bytes(a) + bytes(c)]
    for bad in ([[a, c], (c, "text", a)], [(), [c, c.reshape(2, -1).T, "x"]], [a, ["text"]]):
        with pytest.raises(UsageError, match="block 1 "):
            as_sources(bad, 2)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8), st.data())
@settings(deadline=None)
def test_taking_some_values_takes_their_pieces(shape: list[list[int]], data: st.DataObject) -> None:
    """Goal: batches split over nodes keep their bytes. Method: random vectored values, random indices with repeats."""
    values = [[bytearray(sample(size)) for size in sizes] for sizes in shape]
    whole = as_sources(values, len(values))
    index = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=12)) if values else []
    some = whole.take(index)
    assert read(some) == [read(whole)[i] for i in index]
    flat = as_sources([b"".join(value) for value in values], len(values)).take(index)
    assert read(flat) == read(some)


def test_memory_stays_and_stays_in_place_while_pieces_live() -> None:
    """Goal: an address never dangles. Method: drop every other reference and read; try to resize or close a locked
    buffer; after the pieces are gone both the object is freed and the lock released."""
    block = np.frombuffer(sample(1000), np.uint8).copy()
    gone = weakref.ref(block)
    single, many, rows = as_source(block), as_sources([block], 1), as_sources(block.reshape(10, 100), 10)
    del block
    gc.collect()
    assert read(single) == read(many) == [sample(1000)]
    assert b"".join(read(rows)) == sample(1000)
    del single, many, rows
    gc.collect()
    assert gone() is None

    buffer, mapped = bytearray(100), mmap.mmap(-1, 100)
    held = [as_sources([buffer], 1), as_destination(mapped)]
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    with pytest.raises(BufferError):
        mapped.close()
    held.clear()
    gc.collect()
    buffer.extend(b"more")
    mapped.close()


def frozen_array() -> np.ndarray[Any, Any]:
    """A read-only array."""
    out = np.zeros(4, np.uint8)
    out.setflags(write=False)
    return out


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"bytes", "is bytes, which is read-only"),
        (frozen_array(), "is read-only"),
        (memoryview(b"view"), "read-only memoryview"),
        (np.zeros((4, 4))[:, 1], r"not contiguous .*ascontiguousarray"),
        (np.zeros((4, 4)).T, "not contiguous"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        (np.array([object()]), "Python objects"),
        (np.ma.masked_array([1, 2]), "masked array"),
        ("text", "is str"),
        (5, "is int"),
        (None, "is NoneType"),
        ({"a": 1}, "is dict"),
        (OnGpu(), "the device path is not in this build"),
        (DLPackOnly(np.zeros(4), device=2), "the device path is not in this build"),
        (DLPackOnly(np.zeros(4), device=7), "DLPack device 7"),
        ([[bytearray(4)]], "too deep"),
    ],
)
def test_destinations_that_cannot_be_written_are_refused_by_name(bad: Any, says: str) -> None:
    """Goal: what is wrong is said before a byte moves. Method: each bad object single, and third in a list."""
    with pytest.raises(UsageError, match=says):
        as_destination(bad)
    with pytest.raises(UsageError, match=f"destination 2 .*{says}"):
        as_destinations([bytearray(4), bytearray(4), bad], 3)
    good = [np.zeros(4), np.zeros(4)]
    with pytest.raises(UsageError, match=f"destination 2 .*{says}"):
        as_destinations([*good, bad], 3)


def test_sources_that_are_not_contiguous_are_refused_or_gathered_when_asked() -> None:
    """Goal: user voice 36: never silently reordered. Method: transposed, stepped and reversed arrays and a stepped
    memoryview: refused with the fix in the message, or copied in logical order with gather=True."""
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    for odd in (base.T, base[:, ::2], base[::-1, ::-1], base[:, 3]):
        with pytest.raises(UsageError, match=r"block 0 is not contiguous .*gather=True"):
            as_sources([odd], 1)
        assert read(as_sources([odd], 1, gather=True)) == [odd.tobytes()]
        assert read(as_source(odd, gather=True)) == [odd.tobytes()]
    assert read(as_sources(base.T, 6, gather=True)) == [row.tobytes() for row in base.T]
    with pytest.raises(UsageError, match="not contiguous"):
        as_sources(base.T, 6)
    view = memoryview(sample(9))[::3]
    assert read(as_source(view, gather=True)) == [sample(9)[::3]]


@pytest.mark.parametrize(
    ("blocks", "n", "says"),
    [
        ([b"a"], 2, "1 blocks for 2 keys"),
        ([], 1, "0 blocks for 1 keys"),
        (np.zeros((3, 4)), 2, "3 rows for 2 keys"),
        (np.zeros(8), 8, "two or more axes"),
        (np.zeros(()), 1, "two or more axes"),
        (b"one", 1, "pass a list with one block"),
        (bytearray(8), 2, "pass a list with one block"),
        ("text", 1, "pass a list with one block"),
        (None, 1, "blocks is one NoneType"),
        (iter([b"a"]), 1, "pass a list"),
        (np.array([[object()]]), 1, "Python objects"),
        (OnGpu(), 2, "the device path is not in this build"),
    ],
)
def test_batches_of_the_wrong_count_or_kind_are_refused_by_name(blocks: Any, n: int, says: str) -> None:
    """Goal: one block for each key, said clearly. Method: one case for each way to be wrong."""
    with pytest.raises(UsageError, match=says):
        as_sources(blocks, n)


def test_destinations_that_overlap_are_refused_and_neighbours_are_not() -> None:
    """Goal: no two keys are read into one place. Method: same object twice, a view of another, pieces inside a vectored
    value, rows of stride 0 or less than a row; neighbours, in any order and with empty ones between, are fine."""
    base = np.zeros(100, np.uint8)
    for bad in ([base, base], [base[50:], base[:51]], [[base[:10], base[5:20]]], [base[:10], [base[90:], base[9:12]]]):
        with pytest.raises(UsageError, match="overlap"):
            as_destinations(bad, len(bad))
        assert len(as_sources(bad, len(bad))) == len(bad)
    with pytest.raises(UsageError, match="destinations 0 and 2 overlap"):
        as_destinations([base[50:60], base[:10], base[55:70]], 3)
    squeezed = np.lib.stride_tricks.as_strided(base, (4, 20), (10, 1))
    for rows in (squeezed, np.lib.stride_tricks.as_strided(base, (4, 20), (0, 1))):
        with pytest.raises(UsageError, match="overlap"):
            as_destinations(rows, 4)
    fine = [base[50:], base[:25], base[30:30], base[25:50], base[10:10]]
    assert len(as_destinations(fine, 5)) == 5
    with pytest.raises(UsageError, match="read-only"):
        as_destinations(np.broadcast_to(np.zeros(20, np.uint8), (4, 20)), 4)


def test_rows_of_a_registered_buffer_are_found_by_index_slice_and_mask() -> None:
    """Goal: a paged pool is addressed without work per row. Method: ints, slices, index arrays, negative ones and masks
    against numpy's own answer."""
    pages = np.arange(40, dtype=np.uint16).reshape(8, 5)
    pool = RegisteredBuffer(pages)
    assert (len(pool), pool.row_bytes, pool.nbytes, pool.address) == (8, 10, 80, pages.ctypes.data)
    indices: list[Any] = [3, -1, slice(None), slice(6, 1, -2), [5, 0, 5], np.array([-8, 7], np.int8), pages[:, 0] > 11]
    indices += [np.array([1, 2], np.uint64), [], np.zeros(8, bool)]
    for index in indices:
        got = pool[index]
        rows = pages[np.asarray(index, np.intp)] if isinstance(index, list) else pages[index]
        assert read(got) == [row.tobytes() for row in np.atleast_2d(rows)] if len(got) else not rows.size
        assert got.registration is pool
    assert read(pool.rows(20)[[1]]) == [pages[2:4].tobytes()]
    assert read(as_sources(pool, 8)) == [row.tobytes() for row in pages]
    write(as_destinations(pool[[6, 1]], 2), 0)
    assert np.flatnonzero(~pages[1:].any(axis=1)).tolist() == [0, 5]


@pytest.mark.parametrize("bad", [8, -9, [0, 8], [0.5], [[0]], np.zeros(7, bool), "x", np.array([2**63], np.uint64)])
def test_rows_that_do_not_exist_are_refused(bad: Any) -> None:
    """Goal: no address outside the region.

    Method: indices past either end, of wrong type, and masks of wrong length.
    """
    with pytest.raises(UsageError, match="row"):
        RegisteredBuffer(np.zeros((8, 5), np.uint16))[bad]


def test_registered_buffers_refuse_what_cannot_be_one_region() -> None:
    """Goal: user voice 36 for registered memory. Method: not contiguous, uneven rows, read-only as destination, wrong
    count, rows repeated as destinations, iteration."""
    with pytest.raises(UsageError, match="register: the buffer is not contiguous"):
        RegisteredBuffer(np.zeros((4, 4)).T)
    for row_bytes in (3, 0, -4):
        with pytest.raises(UsageError, match="do not cut"):
            RegisteredBuffer(bytearray(16), row_bytes=row_bytes)
    frozen = RegisteredBuffer(bytes(16), row_bytes=4)
    assert not frozen.writable
    assert read(as_sources(frozen, 4)) == [bytes(4)] * 4
    with pytest.raises(UsageError, match="read-only"):
        as_destinations(frozen[:], 4)
    pool = RegisteredBuffer(bytearray(16), row_bytes=4)
    with pytest.raises(UsageError, match="4 destinations for 3 keys"):
        as_destinations(pool, 3)
    with pytest.raises(UsageError, match="overlap"):
        as_destinations(pool[[0, 1, 0]], 3)
    with pytest.raises(TypeError):
        iter(pool)
    gone = RegisteredBuffer(bytearray(b"kept"))[:]
    gc.collect()
    assert read(gone) == [b"kept"]
