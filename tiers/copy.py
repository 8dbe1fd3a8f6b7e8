"""Copies that prove themselves: bytes move and are summed (XXH3_64bits, seed 0) in one pass, without the GIL.

Invariants:
- The native engine and its Python twin give the same answers for the same calls; one contract suite runs on both.
- The sum an engine returns is over the bytes it wrote. A cancelled gather returns how many blocks it finished and
  leaves the sums of the others untouched; it never touches memory it was not given.
- Addresses are plain ints into memory the caller keeps alive until the call returns.

`engine` is the native one, or the twin where the extension cannot be loaded (then `engine.is_native` is False and
copies hold the GIL). Buffers are anything C-contiguous with the buffer protocol.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

try:
    from ._host import ffi as _ffi
    from ._host import lib as _lib
except ImportError:
    _ffi = _lib = None

__all__ = [
    "IOV_DTYPE",
    "CancelFlag",
    "CopyEngine",
    "CopySpeed",
    "NativeEngine",
    "TwinEngine",
    "address_of",
    "copy_ns",
    "copy_speed",
    "copy_sum",
    "engine",
    "gather",
    "sum_bytes",
]

IOV_DTYPE = np.dtype([("addr", "<u8"), ("len", "<u8")])
"""A piece of the caller's memory, as `kv_iov` in C: 16 bytes."""

CHUNK_BYTES = 256 * 1024
"""A gather looks at its cancel flag at least this often."""


class CancelFlag:
    """One int32 that C reads between chunks; set from any thread, never cleared. Keep it until the call returns."""

    __slots__ = ("_word",)

    def __init__(self) -> None:
        self._word = ctypes.c_int32(0)

    @property
    def address(self) -> int:
        """Where the int32 lies."""
        return ctypes.addressof(self._word)

    @property
    def is_set(self) -> bool:
        """Whether someone asked to stop."""
        return self._word.value != 0

    def set(self) -> None:
        """Ask the running call to stop."""
        self._word.value = 1


class CopyEngine(Protocol):
    """The seam between the native code and its twin. All arguments are addresses and byte counts."""

    is_native: bool

    def sum_at(self, address: int, nbytes: int) -> int:
        """XXH3_64bits of nbytes at address."""
        ...

    def copy_sum_at(self, dst: int, src: int, nbytes: int) -> int:
        """Copy nbytes (no overlap) and return the sum of what was written."""
        ...

    def gather_at(self, blocks: int, first: int, iov: int, dst: int, sums: int, cancel: int) -> int:
        """Gather `blocks` blocks and return how many were done; the arrays are those of `gather`, cancel may be 0."""
        ...


class NativeEngine:
    """The C of host.c; releases the GIL."""

    is_native = True

    def __init__(self) -> None:
        if _lib is None:
            raise ImportError("ucxkv.tiers._host is not built")

    def sum_at(self, address: int, nbytes: int) -> int:
        """See CopyEngine."""
        return int(_lib.kv_sum(address, nbytes))

    def copy_sum_at(self, dst: int, src: int, nbytes: int) -> int:
        """See CopyEngine."""
        return int(_lib.kv_copy_sum(dst, src, nbytes))

    def gather_at(self, blocks: int, first: int, iov: int, dst: int, sums: int, cancel: int) -> int:
        """See CopyEngine."""
        return int(_lib.kv_gather(blocks, first, iov, dst, sums, cancel))


class TwinEngine:
    """The same in Python: xxhash, ctypes and numpy. Correct, slower, holds the GIL for parts of the work."""

    is_native = False

    def sum_at(self, address: int, nbytes: int) -> int:
        """See CopyEngine."""
        return xxhash.xxh3_64_intdigest(_memory(address, nbytes))

    def copy_sum_at(self, dst: int, src: int, nbytes: int) -> int:
        """See CopyEngine."""
        if nbytes:
            ctypes.memmove(dst, src, nbytes)
        return self.sum_at(dst, nbytes)

    def gather_at(self, blocks: int, first: int, iov: int, dst: int, sums: int, cancel: int) -> int:
        """See CopyEngine."""
        bounds = (ctypes.c_uint32 * (blocks + 1)).from_address(first)
        pieces = (ctypes.c_uint64 * (2 * bounds[blocks])).from_address(iov) if bounds[blocks] else ()
        targets = (ctypes.c_uint64 * blocks).from_address(dst)
        out = (ctypes.c_uint64 * blocks).from_address(sums)
        flag = ctypes.c_int32.from_address(cancel) if cancel else ctypes.c_int32(0)
        for block in range(blocks):
            digest, to = xxhash.xxh3_64(), targets[block]
            if flag.value:
                return block
            for piece in range(bounds[block], bounds[block + 1]):
                address, length = pieces[2 * piece], pieces[2 * piece + 1]
                for at in range(0, length, CHUNK_BYTES):
                    if flag.value:
                        return block
                    size = min(CHUNK_BYTES, length - at)
                    if to:
                        ctypes.memmove(to, address + at, size)
                    digest.update(_memory(to or address + at, size))
                    to += size if to else 0
            out[block] = digest.intdigest()
        return blocks


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)) if nbytes else memoryview(b"")


engine: CopyEngine = NativeEngine() if _lib is not None else TwinEngine()
"""What this process uses."""


def _flat(data: Buffer, *, writable: bool = False) -> NDArray[np.uint8]:
    """The bytes of a C-contiguous buffer; a view, nothing is copied. Raises ValueError when that cannot be."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("buffer is not C-contiguous")
    if writable and view.readonly:
        raise ValueError("destination is read-only")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def address_of(data: Buffer | NDArray[np.uint8]) -> int:
    """Where the bytes of a C-contiguous buffer begin; a tenth of the time of numpy's `ctypes.data`."""
    if _ffi is not None:
        return int(_ffi.cast("uintptr_t", _ffi.from_buffer(data)))
    return int(np.frombuffer(memoryview(cast("Buffer", data)), np.uint8).ctypes.data)


def sum_bytes(data: Buffer) -> int:
    """XXH3_64bits (seed 0) of a buffer's bytes."""
    flat = _flat(data)
    return engine.sum_at(address_of(flat) if flat.nbytes else 0, flat.nbytes)


def copy_sum(dst: Buffer, src: Buffer) -> int:
    """Copy src over the equally long, writable dst and return the sum of what was written. Raises ValueError."""
    to, data = _flat(dst, writable=True), _flat(src)
    if to.nbytes != data.nbytes:
        raise ValueError(f"destination has {to.nbytes} bytes, source {data.nbytes}")
    return engine.copy_sum_at(to.ctypes.data, data.ctypes.data, data.nbytes)


def gather(
    first: NDArray[np.uint32],
    iov: NDArray[np.void],
    dst: NDArray[np.uint64],
    sums: NDArray[np.uint64],
    cancel: CancelFlag | None = None,
) -> int:
    """Put blocks of several pieces together, summing them; returns how many were done (fewer only when cancelled).

    first: u32 [n + 1], block i's pieces are iov[first[i]:first[i + 1]]; iov: IOV_DTYPE; dst: u64 [n] addresses with
    room for the pieces of each block, 0 = sum only; sums: u64 [n], written for each block done. All C-contiguous; the
    memory they point at stays alive and unshared until the call returns. Raises ValueError for arrays that do not fit
    together.
    """
    blocks = len(dst)
    for name, array, dtype, length in (
        ("first", first, np.dtype(np.uint32), blocks + 1),
        ("dst", dst, np.dtype(np.uint64), blocks),
        ("sums", sums, np.dtype(np.uint64), blocks),
        ("iov", iov, IOV_DTYPE, len(iov)),
    ):
        if array.dtype != dtype or array.shape != (length,) or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous {dtype} array of {length}, not {array.dtype} {array.shape}")
    if first[0] != 0 or first[-1] > len(iov) or (blocks and bool((first[1:] < first[:-1]).any())):
        raise ValueError(f"first must grow from 0 to at most the {len(iov)} pieces of iov")
    return engine.gather_at(
        blocks, first.ctypes.data, iov.ctypes.data, dst.ctypes.data, sums.ctypes.data, cancel.address if cancel else 0
    )


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """What one copy of `nbytes` costs on this machine: median and 99th percentile in us, GB/s (10^9) at the median."""

    nbytes: int
    gbps: float
    us: float
    us_p99: float


def copy_speed(
    nbytes: int, working_set_bytes: int, *, copies: int = 0, kind: str = "memcpy", huge_pages: bool = True
) -> CopySpeed:
    """Measure this machine's copies of nbytes between random places of two buffers of working_set_bytes each.

    kind: `memcpy` (the limit benchmarks print), `copy_sum` or `sum`. copies: 0 picks enough for a stable median within
    about a second. The buffers are private memory, touched first; with huge_pages transparent huge pages are asked for.
    Needs the native module (RuntimeError without it); ValueError for sizes that do not fit.
    """
    kinds = {"memcpy": 0, "copy_sum": 1, "sum": 2}
    if _lib is None:
        raise RuntimeError("copy_speed needs the native module ucxkv.tiers._host")
    if nbytes < 1 or working_set_bytes < nbytes or kind not in kinds:
        raise ValueError(f"nbytes {nbytes}, working_set_bytes {working_set_bytes}, kind {kind!r}")
    count = copies or max(9, min(20_000, (2 << 30) // nbytes))
    times = np.zeros(count, np.uint64)
    with mmap.mmap(-1, 2 * working_set_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: measure it as it is
        flat = np.frombuffer(memory, np.uint8)
        flat.fill(1)
        address = flat.ctypes.data
        del flat
        for warm_up in (min(count, 8), count):
            _lib.kv_copy_times(
                address, address + working_set_bytes, working_set_bytes, nbytes, warm_up, times.ctypes.data, kinds[kind]
            )
    ns, p99 = float(np.median(times)), float(np.percentile(times, 99))
    return CopySpeed(nbytes=nbytes, gbps=nbytes / max(ns, 1.0), us=ns / 1e3, us_p99=p99 / 1e3)


def copy_ns(dst: int, src: int, nbytes: int) -> int:
    """Nanoseconds of one memcpy of nbytes from address src to dst, timed in C: the limit beside a benchmark.

    Needs the native module (RuntimeError without it). The memory must be the caller's and must not overlap.
    """
    if _lib is None:
        raise RuntimeError("copy_ns needs the native module ucxkv.tiers._host")
    _lib.kv_copy_times(dst, src, nbytes, nbytes, 1, _one_time.ctypes.data, 0)
    return int(_one_time[0])


_one_time = np.zeros(1, np.uint64)
