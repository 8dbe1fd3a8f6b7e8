"""Segments: the memory a node lends, and a client's mapping of it.

Invariants:
- A segment is a sealed memfd: its size never changes (F_SEAL_SHRINK | F_SEAL_GROW), so no mapping of it can fault past
  the end. It has no name in any file system: when the last process that holds it is gone, by kill -9 too, so is the
  memory. (`named` has the kind that stays.)
- Every page is there before `create` returns, or SetupFailed was raised; nothing is taken when it is raised.
- `readonly_fd()` cannot be mapped writable; readers get that one.
- A view keeps its mapping alive. `close()` is idempotent and gives up this object's hold; the pages are unmapped when
  the last view is gone. C code that was given `address` must be done before `close()`.

Huge pages: explicit 2 MiB pages where enough are free; else ordinary shared memory collapsed into huge pages with
MADV_COLLAPSE (Linux 6.1), which needs neither privileges nor `shmem_enabled`; else MADV_HUGEPAGE where the machine
allows that; else 4 KiB pages, correct but slower to copy.

Source: memfd_create(2), madvise(2), fcntl(2) "File Sealing".
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Literal, Self

from .base import SetupFailed
from .host_memory import HUGE_PAGE_BYTES, HostMemory

__all__ = ["HostSegment", "HugePages", "MappedSegment", "PageKind", "Progress"]

HugePages = Literal["auto", "never", "require"]
PageKind = Literal["huge-explicit", "huge-transparent", "small"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

PAGE_BYTES = mmap.PAGESIZE
STEP_BYTES = 64 << 20
"""Populated at once, between two calls of the progress callback."""

_MFD_NOEXEC_SEAL, _MFD_HUGE_2MB = 0x8, 21 << 26
_MADV_HUGEPAGE, _MADV_DONTDUMP, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 16, 22, 23, 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """Bytes of a file descriptor in this process, aligned for huge pages; unmapped when their last view is gone."""

    __slots__ = ("_buffer", "address", "size_bytes", "writable")

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Map size_bytes of fd. Raises OSError. The descriptor is not kept."""
        reserved = size_bytes + HUGE_PAGE_BYTES
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _mmap(None, reserved, 0, kind, -1)
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            _mmap(address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(start, reserved)
            raise
        end = -(-(address + size_bytes) // PAGE_BYTES) * PAGE_BYTES
        if address > start:
            _libc.munmap(start, address - start)
        if start + reserved > end:
            _libc.munmap(end, start + reserved - end)
        self.address, self.size_bytes, self.writable = address, size_bytes, writable
        self._buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
        # Not at interpreter exit: views may still be read then, and the kernel unmaps anyway.
        weakref.finalize(self._buffer, _libc.munmap, address, size_bytes).atexit = False
        self.advise(0, size_bytes, _MADV_DONTDUMP)

    def view(self) -> memoryview:
        """All bytes; read-only unless mapped writable."""
        flat = memoryview(self._buffer).cast("B")
        return flat if self.writable else flat.toreadonly()

    def advise_huge(self) -> None:
        """Ask for transparent huge pages; a kernel without them goes on with small ones."""
        self.advise(0, self.size_bytes, _MADV_HUGEPAGE)

    def advise(self, offset: int, nbytes: int, advice: int) -> int:
        """madvise without the GIL; 0 or the errno."""
        failed = _libc.madvise(self.address + offset, nbytes, advice)
        return ctypes.get_errno() if failed else 0

    def fault_in(self, *, progress: Progress | None = None, huge: bool = False) -> None:
        """Have every page present and in the page tables, collapsing into huge pages when `huge`. Raises OSError."""
        populate = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        for start in range(0, self.size_bytes, STEP_BYTES):
            nbytes = min(STEP_BYTES, self.size_bytes - start)
            huge = huge and self._collapse(start, nbytes)
            error = self.advise(start, nbytes, populate)
            if error == errno.EINVAL:
                self._touch(start, nbytes)
            elif error:
                raise OSError(error, f"populating {nbytes} bytes at {start}: {os.strerror(error)}")
            if progress is not None:
                progress(start + nbytes, self.size_bytes)

    def _collapse(self, start: int, nbytes: int) -> bool:
        """Whole huge pages out of [start, start + nbytes): one small page each, then the kernel fills them up.

        False when the kernel cannot do it, or not now (memory too fragmented): small pages then, no more tries.
        """
        whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for at in range(start, start + whole, HUGE_PAGE_BYTES):
            if self.advise(at, PAGE_BYTES, _MADV_POPULATE_WRITE):
                return False
        return whole == 0 or self.advise(start, whole, _MADV_COLLAPSE) == 0

    def _touch(self, start: int, nbytes: int) -> None:
        """Kernels before 5.14: one read per page. A shared page is allocated by it, a write fault is left for later."""
        view = memoryview(self._buffer).cast("B")
        for at in range(start, start + nbytes, PAGE_BYTES):
            view[at]

    def huge_bytes(self) -> int:
        """How much of the mapping is in huge pages now, from /proc/self/smaps; 0 where that cannot be read."""
        prefix, inside = f"{self.address:x}-", False
        try:
            with open("/proc/self/smaps") as lines:
                for line in lines:
                    if inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")) and line.split()[1] != "0":
                        return int(line.split()[1]) * 1024
                    if "-" in line.split(" ", 1)[0]:
                        if inside:
                            break
                        inside = line.startswith(prefix)
        except OSError:
            pass
        return 0


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {nbytes} bytes: {os.strerror(error)}")
    return int(mapped)


class _Held:
    """Something with a mapping: address, view, close, context manager."""

    _mapping: Mapping | None = None
    size_bytes: int

    @property
    def address(self) -> int:
        """Where the bytes lie in this process. Raises ValueError after close."""
        return self._open().address

    @property
    def view(self) -> memoryview:
        """All bytes, no copy; keeps the mapping (not this object) alive. Raises ValueError after close."""
        return self._open().view()

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._mapping is None

    def close(self) -> None:
        """Give the mapping up; idempotent."""
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> Mapping:
        if self._mapping is None:
            raise ValueError("segment is closed")
        return self._mapping


class HostSegment(_Held):
    """Memory of this node that it lends: a sealed, populated memfd, mapped writable. Made by `create`."""

    def __init__(self, fd: int, mapping: Mapping, name: str, page_kind: PageKind) -> None:
        self._mapping = mapping
        self._fd = fd
        self.name = name
        self.size_bytes = mapping.size_bytes
        self.page_kind: PageKind = page_kind

    @classmethod
    def create(
        cls,
        size_bytes: int,
        name: str,
        huge_pages: HugePages = "auto",
        *,
        memory: HostMemory | None = None,
        progress: Progress | None = None,
    ) -> HostSegment:
        """Make a segment of size_bytes, rounded up to whole pages (2 MiB ones unless huge_pages is "never").

        name: for /proc/<pid>/maps only. huge_pages: "require" raises SetupFailed rather than use small pages. memory: a
        reading of the machine, taken now when None. progress(done_bytes, size_bytes) is called while populating, which
        takes about 1 s a GiB (2 s when collapsing) and releases the GIL. Raises SetupFailed, ValueError.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be positive, not {size_bytes}")
        page = PAGE_BYTES if huge_pages == "never" or size_bytes < HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
        size_bytes = -(-size_bytes // page) * page
        machine = HostMemory.read() if memory is None else memory
        if page == HUGE_PAGE_BYTES and machine.huge_free_bytes >= size_bytes:
            machine.check(size_bytes, explicit_huge=True)
            try:
                return cls._populated(size_bytes, name, "huge-explicit", progress)
            except OSError:
                pass  # somebody else took the reserved pages first
        machine.check(size_bytes)
        wanted: PageKind = "small" if page == PAGE_BYTES else "huge-transparent"
        try:
            segment = cls._populated(size_bytes, name, wanted, progress)
        except OSError as exc:
            raise SetupFailed(
                f"segment of {size_bytes} bytes",
                found=f"the kernel refused it ({exc})",
                needed="a memfd of that size, mapped and populated",
                fix="a smaller host tier, or raise the limit that the message names (`ulimit -a`, container limits)",
            ) from exc
        if huge_pages == "require" and segment.page_kind == "small":
            segment.close()
            raise SetupFailed(
                f"segment of {size_bytes} bytes in huge pages",
                found=f"{machine.huge_free_bytes >> 20} MiB of free explicit huge pages, and no transparent ones",
                needed=f"{size_bytes >> 20} MiB",
                fix=f"`sysctl vm.nr_hugepages={size_bytes // HUGE_PAGE_BYTES + 16}`, or "
                "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, or huge_pages auto",
            )
        return segment

    @classmethod
    def _populated(cls, size_bytes: int, name: str, kind: PageKind, progress: Progress | None) -> HostSegment:
        fd = _memfd(name, explicit_huge=kind == "huge-explicit")
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = Mapping(fd, size_bytes, writable=True)
            if kind == "huge-transparent":
                mapping.advise_huge()
            mapping.fault_in(progress=progress, huge=kind == "huge-transparent")
        except BaseException:
            os.close(fd)
            raise
        if kind == "huge-transparent" and mapping.huge_bytes() < size_bytes // 2:
            kind = "small"
        return cls(fd, mapping, name, kind)

    @property
    def fd(self) -> int:
        """The memfd, writable; stays this object's. Raises ValueError after close."""
        self._open()
        return self._fd

    @property
    def lent_fd(self) -> int:
        """The descriptor that clients are handed to map; stays this object's. Raises ValueError after close."""
        return self.fd

    def readonly_fd(self) -> int:
        """A new descriptor, the caller's to close, that cannot be mapped writable.

        Where /proc is not mounted it is a plain duplicate, and readers are only trusted not to write.
        """
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return os.dup(self.fd)

    def close(self) -> None:
        """Give up mapping and descriptor; idempotent. The memory goes when no process holds it any more."""
        if self._mapping is not None:
            super().close()
            os.close(self._fd)


def _memfd(name: str, *, explicit_huge: bool) -> int:
    """A sealable memfd that only its owner may open again, and only for reading. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if explicit_huge:
        flags |= os.MFD_HUGETLB | _MFD_HUGE_2MB
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # Linux before 6.3 knows no MFD_NOEXEC_SEAL
    try:
        os.fchmod(fd, 0o400)
    except OSError:
        pass  # a safety net against slips, nothing depends on it
    return fd


class MappedSegment(_Held):
    """A client's mapping of a node's segment; page tables are filled, so the first read of a page costs no fault."""

    def __init__(self, fd: int, size_bytes: int, writable: bool = False) -> None:
        """Map size_bytes of fd, which stays the caller's (it may be closed right after).

        Raises SetupFailed when the file is shorter than that or could shrink (a read past the end would kill this
        process with SIGBUS), when the descriptor does not allow it, or the machine has no room for the mapping.
        """
        self.size_bytes = size_bytes
        self.writable = writable
        try:
            facts = os.fstat(fd)
            present = facts.st_size
            if size_bytes < 1 or present < size_bytes:
                raise SetupFailed(
                    "mapping a segment",
                    found=f"a file of {present} bytes",
                    needed=f"{size_bytes} bytes, as the node announced",
                    fix="node and client disagree: connect again, and see that both run the same ucxkv version",
                )
            is_named = facts.st_nlink > 0 and not facts.st_mode & 0o077  # only its owner may shrink it, and never does
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK and not is_named:
                raise SetupFailed(
                    "mapping a segment",
                    found="a file that may shrink under the reader",
                    needed="a memfd sealed with F_SEAL_SHRINK, or a tmpfs file that is its owner's alone",
                    fix="the peer is no ucxkv node of this version: check the address",
                )
            mapping = Mapping(fd, size_bytes, writable=writable)
            mapping.fault_in()
        except OSError as exc:
            raise SetupFailed(
                f"mapping a segment of {size_bytes} bytes",
                found=f"the kernel refused it ({exc})",
                needed="a sealed memfd, open for writing when it is to be written, and address space for it",
                fix="`ulimit -v unlimited`, or connect with path='message', which maps nothing",
            ) from exc
        self._mapping = mapping
