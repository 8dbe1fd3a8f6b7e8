"""The callers' memory as arrays of addresses, without copying a byte.

Promises of this module:

- A `Pieces` describes n values, each a run of zero or more pieces of memory, in the caller's order; the bytes of a
  value are its pieces one after the other. Nothing is ever reordered: what is not C-contiguous is refused by name, or
  copied when asked (`gather`).
- While a `Pieces` lives, the memory it names stays allocated and keeps its address: the objects that own it are held,
  and where Python can lock a buffer against resizing or closing (bytearray, mmap, array.array, memoryview), it is
  locked.
- Destinations are writable and do not overlap each other. Sources may repeat.
- Everything is checked here, once. Whoever holds a `Pieces` may hand its addresses to C.

Accepted: numpy arrays, bytes (source only), bytearray, memoryview, array.array, mmap, anything else with the buffer
protocol, torch CPU tensors of every dtype, objects with `__dlpack__` on the CPU, a list or tuple of these as one
vectored value, one array or tensor whose first axis counts the values, and `RegisteredBuffer` rows. torch is never
imported here: a tensor can only come from a program that did."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError
from ucxkv.memory import locate, locate_alike, locate_either, locate_rows, type_name

__all__ = ["Pieces", "RegisteredBuffer", "as_destination", "as_destinations", "as_source", "as_sources"]

U64Array: TypeAlias = npt.NDArray[np.uint64]
U32Array: TypeAlias = npt.NDArray[np.uint32]

_COUNTING: Final = np.arange(4097, dtype=np.uint32)
_COUNTING.setflags(write=False)
_FIRST_OF_ONE: Final = _COUNTING[:2]


class Pieces:
    """n values in memory, as address arrays that C can walk. Immutable; the arrays are read-only by agreement.

    first: uint32 (n + 1,), value i has the pieces first[i] to first[i + 1]. addr, length: uint64 (m,), bytes.
    nbytes: uint64 (n,), the value's size. keepalive: owners of the memory. writable: may be a destination.
    registration: the RegisteredBuffer all of it lies in, or None.
    """

    __slots__ = ("addr", "first", "keepalive", "length", "nbytes", "registration", "writable")

    def __init__(
        self,
        first: U32Array,
        addr: U64Array,
        length: U64Array,
        nbytes: U64Array,
        keepalive: Sequence[object],
        *,
        writable: bool,
        registration: RegisteredBuffer | None = None,
    ) -> None:
        self.first = first
        self.addr = addr
        self.length = length
        self.nbytes = nbytes
        self.keepalive = keepalive
        self.writable = writable
        self.registration = registration

    def __len__(self) -> int:
        return len(self.nbytes)

    def __repr__(self) -> str:
        return f"Pieces({len(self.nbytes)} values, {len(self.addr)} pieces, {self.total_bytes} bytes)"

    @property
    def total_bytes(self) -> int:
        """Bytes of all values together."""
        return int(self.nbytes.sum())

    @property
    def is_flat(self) -> bool:
        """Whether every value is exactly one piece, so that `first` counts 0, 1, 2 ..."""
        return self.length is self.nbytes

    def run(self, start: int, stop: int) -> Pieces:
        """The values start, ..., stop - 1, sharing memory owners and arrays with this one."""
        if start == 0 and stop >= len(self.nbytes):
            return self
        if self.is_flat:
            length = self.length[start:stop]
            return self._like(_one_each(len(length)), self.addr[start:stop], length, length)
        begin, end = int(self.first[start]), int(self.first[stop])
        first = self.first[start : stop + 1] - np.uint32(begin)
        return self._like(first, self.addr[begin:end], self.length[begin:end], self.nbytes[start:stop])

    def take(self, indices: npt.ArrayLike) -> Pieces:
        """The values at `indices` (in range, any order, repeats allowed); memory owners are shared with this one."""
        index = np.asarray(indices, dtype=np.intp)
        if self.is_flat:
            length = self.length[index]
            return self._like(_one_each(len(index)), self.addr[index], length, length)
        counts = np.diff(self.first)[index]
        first = np.zeros(len(index) + 1, np.uint32)
        np.cumsum(counts, out=first[1:])
        within = np.arange(int(first[-1]), dtype=np.int64) - np.repeat(first[:-1].astype(np.int64), counts)
        rows = np.repeat(self.first[:-1][index].astype(np.int64), counts) + within
        return self._like(first, self.addr[rows], self.length[rows], self.nbytes[index])

    def _like(self, first: U32Array, addr: U64Array, length: U64Array, nbytes: U64Array) -> Pieces:
        return Pieces(
            first, addr, length, nbytes, self.keepalive, writable=self.writable, registration=self.registration
        )


class RegisteredBuffer:
    """One contiguous region of the caller's memory, checked once, cut into equal rows that are addressed without
    per-row Python work.

    `pool[3]`, `pool[4:8]`, `pool[indices]` and `pool[mask]` give the `Pieces` of those rows (indices: integers,
    negative ones count from the end).
    address, nbytes: of the region. row_bytes: size of a row; `len(pool)` rows. keepalive: holds the memory. handle:
    what a transport attached.
    Raises UsageError for memory that is not contiguous, and for rows that do not exist.
    """

    __slots__ = ("__weakref__", "address", "handle", "keepalive", "nbytes", "row_bytes", "rows_count", "writable")

    def __init__(self, array: object, *, row_bytes: int | None = None) -> None:
        """array: anything this module accepts as one piece.

        row_bytes: row size; default is the first axis's, else all of it.
        """
        try:
            self.address, self.nbytes, owner, self.writable = locate_either(array)
        except UsageError as exc:
            raise UsageError(f"register: the buffer {exc.message}") from exc
        self.keepalive: list[object] = [owner, array]
        self.handle: object | None = None
        self.row_bytes = 0
        self.rows_count = 0
        shape = getattr(array, "shape", None)
        if row_bytes is None:
            row_bytes = self.nbytes // shape[0] if shape and shape[0] and len(shape) > 1 else self.nbytes
        self._cut(row_bytes)

    def _cut(self, row_bytes: int) -> None:
        if row_bytes < 0 or (row_bytes == 0 and self.nbytes) or (row_bytes and self.nbytes % row_bytes):
            raise UsageError(f"rows of {row_bytes} bytes do not cut a buffer of {self.nbytes} bytes evenly")
        self.row_bytes = row_bytes
        self.rows_count = self.nbytes // row_bytes if row_bytes else 0

    def rows(self, block_bytes: int) -> RegisteredBuffer:
        """The same region cut into rows of `block_bytes`, which must divide its size."""
        view = object.__new__(RegisteredBuffer)
        view.address, view.nbytes, view.writable = self.address, self.nbytes, self.writable
        view.keepalive, view.handle = self.keepalive, self.handle
        view._cut(block_bytes)
        return view

    def __len__(self) -> int:
        return self.rows_count

    __iter__ = None  # rows are memory, not objects: iterating would build n objects by accident

    def __repr__(self) -> str:
        return f"RegisteredBuffer(0x{self.address:x}, {self.rows_count} rows of {self.row_bytes} bytes)"

    def __getitem__(self, index: int | slice | npt.ArrayLike) -> Pieces:
        if isinstance(index, slice):
            addr = np.arange(*index.indices(self.rows_count), dtype=np.int64).view(np.uint64)
        else:
            addr = self._row_numbers(index)
        addr *= np.uint64(self.row_bytes)
        addr += np.uint64(self.address)
        n = len(addr)
        length = _equal_lengths(n, self.row_bytes)
        return Pieces(_one_each(n), addr, length, length, self.keepalive, writable=self.writable, registration=self)

    def _row_numbers(self, index: npt.ArrayLike) -> U64Array:
        """A fresh array of existing row numbers, from integers (negative: from the end) or a mask."""
        n = self.rows_count
        rows = np.asarray(index)
        if rows.ndim == 0:
            rows = rows.reshape(1)
        if rows.dtype == np.bool_:
            if rows.shape != (n,):
                raise UsageError(f"row mask has shape {rows.shape}; this buffer has {n} rows")
            return np.flatnonzero(rows).astype(np.uint64)
        if rows.size == 0:
            return np.empty(0, np.uint64)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise UsageError(
                f"row indices have dtype {rows.dtype} and shape {rows.shape}; pass a 1-D array of integers"
            )
        numbers = rows.astype(np.uint64)  # negative ones wrap round to huge ones
        if int(numbers.max()) >= n:
            signed = rows.astype(np.int64)
            signed[signed < 0] += n
            numbers = signed.view(np.uint64)
            if int(numbers.max()) >= n:
                raise UsageError(f"row index out of range: this buffer has {n} rows")
        return numbers


# Tuples of types, not unions: a union is built anew at each call and costs as much as the rest of a check.
_LISTS: Final = (list, tuple)
_MANY_PIECES: Final = (list, tuple, Pieces, RegisteredBuffer)


def as_source(value: object, *, gather: bool = False) -> Pieces:
    """One value (a buffer, or a list or tuple of buffers) as Pieces of n = 1.

    Borrowed until the call that uses it ends.
    """
    return _single(value, False, gather)


def as_destination(into: object) -> Pieces:
    """One writable destination (a buffer, or a list or tuple of buffers) as Pieces of n = 1.

    Raises UsageError as `as_destinations`.
    """
    return _single(into, True, False)


def as_sources(blocks: object, n: int, *, gather: bool = False) -> Pieces:
    """The memory of n values to store, in order.

    blocks: a list or tuple of n values (each a buffer or a list or tuple of buffers), or one array or tensor of at
    least two axes whose first axis has n entries, or Pieces of n values, or a RegisteredBuffer of n rows. gather:
    copy non-contiguous ones instead of refusing them.
    Raises UsageError naming the first value that is refused: wrong type or count, not contiguous, on a GPU.
    """
    return _many(blocks, n, False, gather)


def as_destinations(into: object, n: int) -> Pieces:
    """The memory to read n values into, in order; takes what `as_sources` takes, writable and not overlapping.

    Raises UsageError as `as_sources`, and for read-only memory and for destinations that overlap.
    """
    return _many(into, n, True, False)


def _single(value: object, writable: bool, gather: bool) -> Pieces:
    if isinstance(value, _MANY_PIECES):
        return _many([value] if isinstance(value, _LISTS) else value, 1, writable, gather)
    try:
        addr, nbytes, owner = locate(value, writable, gather)
    except UsageError as exc:
        raise UsageError(f"{'the destination' if writable else 'the value'} {exc.message}") from exc
    both = np.array((addr, nbytes), np.uint64)
    length = both[1:]
    return Pieces(_FIRST_OF_ONE, both[:1], length, length, (owner,), writable=writable)


def _many(blocks: object, n: int, writable: bool, gather: bool) -> Pieces:
    noun = "destination" if writable else "block"
    if isinstance(blocks, _LISTS):
        if len(blocks) != n:
            raise UsageError(f"{len(blocks)} {noun}s for {n} keys; pass one {noun} for each key")
        pieces = _from_list(blocks, writable, gather, noun)
        if writable:
            _refuse_overlap(pieces)
        return pieces
    if isinstance(blocks, RegisteredBuffer):
        blocks = blocks[:]
    if isinstance(blocks, Pieces):
        if len(blocks) != n:
            raise UsageError(f"{len(blocks)} {noun}s for {n} keys; pass one {noun} for each key")
        if writable:
            if not blocks.writable:
                raise UsageError("the destination is read-only; pass writable memory")
            _refuse_overlap(blocks)
        return blocks
    return _from_array(blocks, n, writable, gather, noun)


def _from_list(blocks: Sequence[Any], writable: bool, gather: bool, noun: str) -> Pieces:
    located = locate_alike(blocks, writable)
    counts: list[int] | None = None  # pieces of each value, where some are vectored
    if located is None:
        flat = blocks
        if any(isinstance(block, _LISTS) for block in blocks):
            counts = [len(block) if isinstance(block, _LISTS) else 1 for block in blocks]
            flat = list(chain.from_iterable(block if isinstance(block, _LISTS) else (block,) for block in blocks))
            located = locate_alike(flat, writable)
        if located is None:
            located = _locate_each(flat, counts, writable, gather, noun)
    addr, length, owners = located
    if counts is None:
        return Pieces(_one_each(len(blocks)), addr, length, length, owners, writable=writable)
    first = np.zeros(len(blocks) + 1, np.uint32)
    np.cumsum(counts, out=first[1:])
    ends = np.zeros(len(length) + 1, np.uint64)
    np.cumsum(length, out=ends[1:])
    return Pieces(first, addr, length, np.diff(ends[first]), owners, writable=writable)


def _locate_each(
    flat: Sequence[Any], counts: list[int] | None, writable: bool, gather: bool, noun: str
) -> tuple[U64Array, U64Array, list[object]]:
    """Addresses, sizes and owners of pieces of any kind; a refusal names the value that the piece belongs to."""
    addrs, lengths, owners = [], [], []
    for index, piece in enumerate(flat):
        try:
            addr, nbytes, owner = locate(piece, writable, gather)
        except UsageError as exc:
            if counts is not None:
                index = int(np.searchsorted(np.cumsum(counts), index, side="right"))
            raise UsageError(f"{noun} {index} {exc.message}") from exc
        addrs.append(addr)
        lengths.append(nbytes)
        owners.append(owner)
    return np.array(addrs, np.uint64), np.array(lengths, np.uint64), owners


def _from_array(blocks: object, n: int, writable: bool, gather: bool, noun: str) -> Pieces:
    """Pieces of one array or tensor whose first axis counts the values: no work per value."""
    shape = getattr(blocks, "shape", None)
    if shape is None or len(shape) < 2:
        raise UsageError(
            f"{noun}s is one {type_name(blocks)}{'' if shape is None else f' of shape {tuple(shape)}'}; pass a list"
            f" with one {noun} for each key, or an array of two or more axes whose first axis counts the keys, e.g."
            f" x.reshape({n}, -1)"
        )
    if shape[0] != n:
        raise UsageError(f"the {noun}s array has {shape[0]} rows for {n} keys; its first axis counts the keys")
    try:
        addr, nbytes, owner, stride = locate_rows(blocks, writable, gather)
    except UsageError as exc:
        raise UsageError(f"the {noun}s array {exc.message}") from exc
    row = nbytes // n if n else 0
    if writable and row and abs(stride) < row and n > 1:
        raise UsageError(
            f"the rows of the destinations array overlap (stride {stride}, row {row} bytes); pass separate memory"
        )
    if n and stride > 0:
        addrs = np.arange(addr, addr + n * stride, stride, dtype=np.uint64)
    else:  # rows that go backwards, or all the same one
        addrs = (np.arange(n, dtype=np.int64) * stride + addr).view(np.uint64)
    length = _equal_lengths(n, row)
    return Pieces(_one_each(n), addrs, length, length, (owner, blocks), writable=writable)


def _one_each(n: int) -> U32Array:
    """0, 1 ... n: every value is one piece."""
    return _COUNTING[: n + 1] if n <= 4096 else np.arange(n + 1, dtype=np.uint32)


@lru_cache(maxsize=64)
def _short_equal_lengths(n: int, size: int) -> U64Array:
    length = np.full(n, size, np.uint64)
    length.setflags(write=False)
    return length


def _equal_lengths(n: int, size: int) -> U64Array:
    """n times the same size; cached where it is short, as engines ask for the same batches again and again."""
    return _short_equal_lengths(n, size) if n <= 4096 else np.full(n, size, np.uint64)


def _refuse_overlap(pieces: Pieces) -> None:
    if len(pieces.addr) < 2:
        return
    addr, length = pieces.addr, pieces.length
    end = addr + length
    if (addr[1:] >= end[:-1]).all():
        return
    used = np.flatnonzero(length)
    order = used[np.argsort(addr[used], kind="stable")]
    clash = np.flatnonzero(addr[order][1:] < end[order][:-1])
    if clash.size:
        pair = order[clash[0] : clash[0] + 2]
        one, two = sorted(int(v) for v in np.searchsorted(pieces.first, pair, side="right") - 1)
        raise UsageError(f"destinations {one} and {two} overlap in memory; give each key memory of its own")
