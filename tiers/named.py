"""Segments with a name: files in /dev/shm that outlive the process; a node that was killed finds its bytes again.

Invariants
- The file belongs to one user (mode 0600) and is never truncated: it is unlinked, or stays. So no mapping of it can
  fault past the end, as with the sealed memfds of `segments`, whose other promises hold here too, but one: the pages go
  when the file is unlinked and nobody maps it any more, or with the machine.
- **Who may still write is the kernel's to know.** What clients are handed is `lent_fd`, an open file description of its
  own that carries a read lock on byte `incarnation` of the file (an open-file-description lock). A mapping keeps the
  description it was made from alive, and with it the lock, until the process unmaps or ends, by kill -9 too; closing
  the descriptor, stopping the process and being in another pid namespace change nothing. So `is_mapped_by_older()`,
  which asks for a lock on the bytes of all older incarnations, is false exactly when no process is left that got the
  memory from an incarnation before this one.

Source: fcntl(2) "Open file description locks"; the lock goes in __fput, which a mapping's reference holds off.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct

from .base import SetupFailed
from .host_memory import HUGE_PAGE_BYTES, HostMemory
from .segments import PAGE_BYTES, HostSegment, HugePages, Mapping, PageKind

__all__ = ["SHARED_FOLDER", "NamedSegment"]

SHARED_FOLDER = "/dev/shm"
_RESERVE_BYTES = 1 << 20
_FLOCK = struct.Struct("hhqqi4x")


class NamedSegment(HostSegment):
    """A segment in a file of a tmpfs; made by `create_file` or `open_file`. incarnation: see the module; it grows."""

    def __init__(self, fd: int, mapping: Mapping, path: str, page_kind: PageKind, incarnation: int) -> None:
        super().__init__(fd, mapping, path, page_kind)
        self.path = path
        self.incarnation = incarnation
        self._lent = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _lock(self._lent, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, incarnation, 1)
        except OSError as exc:
            os.close(self._lent)
            raise SetupFailed(
                f"segment file {path}",
                found=f"no locks of open file descriptions ({exc})",
                needed="Linux 3.15 or newer, itself and not a sandbox's imitation of it",
                fix="run the node without durability, or outside of that sandbox",
            ) from exc

    @classmethod
    def create_file(
        cls,
        path: str,
        size_bytes: int,
        huge_pages: HugePages = "auto",
        *,
        incarnation: int,
        memory: HostMemory | None = None,
    ) -> NamedSegment:
        """Make the file, size_bytes rounded up to whole pages as `HostSegment.create` does, and populate it.

        Raises SetupFailed, and then there is no file.
        """
        page = PAGE_BYTES if huge_pages == "never" or size_bytes < HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
        size_bytes = -(-size_bytes // page) * page
        (HostMemory.read() if memory is None else memory).check(size_bytes)
        folder = os.path.dirname(path)
        where = os.statvfs(folder)
        free = where.f_bavail * where.f_frsize
        if where.f_blocks and free < size_bytes + _RESERVE_BYTES:
            raise _too_small(path, size_bytes, f"{free >> 20} MiB free in {folder}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise SetupFailed(
                f"segment file {path}",
                found=str(exc),
                needed=f"a tmpfs at {folder} that this user may write",
                fix=f"mount -t tmpfs tmpfs {folder}, or run the node without durability",
            ) from exc
        try:
            os.ftruncate(fd, size_bytes)
            segment = cls._mapped(fd, path, size_bytes, huge_pages, incarnation)
            if huge_pages == "require" and segment.page_kind == "small":
                segment.close()
                raise SetupFailed(
                    f"segment file of {size_bytes} bytes in huge pages",
                    found="the kernel gave 4 KiB pages",
                    needed="Linux 6.1 (MADV_COLLAPSE) or transparent_hugepage/shmem_enabled = advise",
                    fix="`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, or huge_pages auto",
                )
        except OSError as exc:
            os.unlink(path)
            raise _too_small(path, size_bytes, f"the kernel refused it ({exc})") from exc
        except BaseException:
            os.unlink(path)
            raise
        return segment

    @classmethod
    def open_file(cls, path: str, huge_pages: HugePages = "auto", *, incarnation: int) -> NamedSegment | None:
        """The file as an older incarnation left it, bytes untouched; None when it is not there. Raises SetupFailed
        for one that is another user's, or no plain file.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise SetupFailed(
                f"segment file {path}", found=str(exc), needed="a file of this user", fix="run the node as its owner"
            ) from exc
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
            os.close(fd)
            raise SetupFailed(
                f"segment file {path}",
                found=f"mode {facts.st_mode & 0o7777:o}, user {facts.st_uid}",
                needed=f"a plain file of mode 600 of user {os.geteuid()}",
                fix="run the node as the user that made it, or remove the file",
            )
        if not facts.st_size:  # its maker was killed before it had a size
            os.close(fd)
            os.unlink(path)
            return None
        try:
            return cls._mapped(fd, path, facts.st_size, huge_pages, incarnation)
        except OSError as exc:
            raise _too_small(path, facts.st_size, f"the kernel refused it ({exc})") from exc

    @classmethod
    def _mapped(cls, fd: int, path: str, size_bytes: int, huge_pages: HugePages, incarnation: int) -> NamedSegment:
        """Map and populate; owns fd. Raises OSError."""
        is_huge = huge_pages != "never" and size_bytes >= HUGE_PAGE_BYTES
        try:
            mapping = Mapping(fd, size_bytes, writable=True)
            if is_huge:
                mapping.advise_huge()
            mapping.fault_in(huge=is_huge)
            is_huge = is_huge and mapping.huge_bytes() >= size_bytes // 2
            return cls(fd, mapping, path, "huge-transparent" if is_huge else "small", incarnation)
        except BaseException:
            os.close(fd)
            raise

    @property
    def lent_fd(self) -> int:
        """What clients are handed; see the module. Stays this object's. Raises ValueError after close."""
        self._open()
        return self._lent

    def is_mapped_by_older(self) -> bool:
        """Whether a process still has memory from an older incarnation of this file's node."""
        asked = _lock(self.fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, 0, self.incarnation)
        return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give up mapping and descriptors; the file stays. Idempotent."""
        if self._mapping is not None:
            super().close()
            os.close(self._lent)


def _lock(fd: int, command: int, kind: int, start: int, length: int) -> bytes:
    result = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    assert isinstance(result, bytes)
    return result


def _too_small(path: str, size_bytes: int, found: str) -> SetupFailed:
    folder = os.path.dirname(path)
    return SetupFailed(
        f"segment file {path} of {size_bytes >> 20} MiB",
        found=found,
        needed=f"{(size_bytes + _RESERVE_BYTES) >> 20} MiB free there",
        fix=f"`mount -o remount,size=...` on {folder} (containers: --shm-size), or less host_bytes",
    )
