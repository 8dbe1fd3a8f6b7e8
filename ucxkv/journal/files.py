"""The few file operations that a journal is made of: the seam where tests put a disk that fails.

    Every operation does all that it was asked for or raises OSError. Names are of one folder; nothing else is touched.
    What `sync` has not covered may be lost by a power cut, sector by sector; names until `sync_folder`.

Log files are written past the page cache (O_DIRECT) where that is asked for and possible: a sync then has
less to do, and what a later reader finds is what the disk holds (docs/decisions.md)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Protocol

from ucxkv.errors import SetupError

__all__ = ["Files", "FolderFiles", "setup_error"]

LOCK_NAME = "lock"
_RESERVE_STEP_BYTES = 16 << 20


class Files(Protocol):
    """One folder's files. Handles are small integers, valid until `close`."""

    @property
    def folder(self) -> str:
        """Where it is, for messages."""

    def lock(self) -> None:
        """Make the folder this process's, until `release`; SetupError when it is another's."""

    def release(self) -> None:
        """Undo `lock`."""

    def names(self) -> list[str]:
        """Names of what is there."""

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        """A handle for reading and writing. create: the file must not exist. direct: without the page cache if that
        can be; then writes come from page-aligned memory, in whole blocks."""

    def close(self, handle: int) -> None:
        """Give the handle back."""

    def size(self, handle: int) -> int:
        """The file's bytes."""

    def read(self, handle: int, offset: int, length: int) -> bytes:
        """`length` bytes; fewer only at the end of the file."""

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        """Write all of it there."""

    def reserve(self, handle: int, nbytes: int) -> None:
        """Fill a new file with so many zeros, on the disk: a later sync has no allocation to write down."""

    def sync(self, handle: int) -> None:
        """Return when the file's bytes are on the disk."""

    def forget_cached(self, handle: int) -> None:
        """Later reads ask the disk: a page that a failed sync left in the cache is no proof."""

    def rename(self, old: str, new: str) -> None:
        """Rename, over what is there."""

    def remove(self, name: str) -> None:
        """Remove."""

    def sync_folder(self) -> None:
        """Return when the names are on the disk."""


class FolderFiles:
    """A real folder, made if it is missing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._folder_fd = -1
        self._lock_fd = -1

    @property
    def folder(self) -> str:
        """Where it is."""
        return str(self._path)

    def lock(self) -> None:
        """See Files.lock. The lock is the kernel's: it ends with the process, so none is ever stale."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._folder_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fd = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=self._folder_fd)
        except OSError as exc:
            self.release()
            raise setup_error(self.folder, exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            self.release()
            raise SetupError(
                f"the journal in {self._path} is in use by another process",
                found=f"process {holder} holds {self._path / LOCK_NAME}",
                needed="one process a folder",
                fix=f"stop that process, or give this node a journal folder of its own (ps -p {holder})",
            ) from exc
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """See Files.release."""
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._folder_fd = -1

    def names(self) -> list[str]:
        """See Files.names."""
        return sorted(os.listdir(self._folder_fd))

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        """See Files.open."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        if direct:
            with contextlib.suppress(OSError):
                return os.open(name, flags | os.O_DIRECT, 0o644, dir_fd=self._folder_fd)
            if create:  # the refused open may have made it
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._folder_fd)
        return os.open(name, flags, 0o644, dir_fd=self._folder_fd)

    def close(self, handle: int) -> None:
        """See Files.close."""
        os.close(handle)

    def size(self, handle: int) -> int:
        """See Files.size."""
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, length: int) -> bytes:
        """See Files.read."""
        found = os.pread(handle, length, offset)
        while len(found) < length:
            more = os.pread(handle, length - len(found), offset + len(found))
            if not more:
                break
            found += more
        return found

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        """See Files.write. A short write is carried on; what stopped it is then the error."""
        try:
            done = os.pwrite(handle, data, offset)
        except OSError as exc:
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            if exc.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # opened, yet not for such blocks
            done = os.pwrite(handle, data, offset)
        if done < len(data):
            rest = memoryview(data)
            while done < len(data):
                more = os.pwrite(handle, rest[done:], offset + done)
                if not more:
                    raise OSError(errno.EIO, "the disk takes no more bytes, without an error")
                done += more

    def reserve(self, handle: int, nbytes: int) -> None:
        """See Files.reserve."""
        os.posix_fallocate(handle, 0, nbytes)  # a full disk is said at once
        zeros = bytes(_RESERVE_STEP_BYTES)
        for offset in range(0, nbytes, len(zeros)):
            self.write(handle, offset, zeros[: nbytes - offset])
            os.fdatasync(handle)
            self.forget_cached(handle)

    def sync(self, handle: int) -> None:
        """See Files.sync."""
        os.fdatasync(handle)

    def forget_cached(self, handle: int) -> None:
        """See Files.forget_cached."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def rename(self, old: str, new: str) -> None:
        """See Files.rename."""
        os.rename(old, new, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)

    def remove(self, name: str) -> None:
        """See Files.remove."""
        os.unlink(name, dir_fd=self._folder_fd)

    def sync_folder(self) -> None:
        """See Files.sync_folder."""
        os.fsync(self._folder_fd)


_FIXES = {
    errno.ENOSPC: "free space on that file system, or move the journal to a larger one; then start the node again",
    errno.EDQUOT: "raise the quota of the node's user; then start the node again",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f unlimited); then start the node again",
    errno.EROFS: "mount that file system read-write (dmesg says why it is not); then start the node again",
    errno.EACCES: "give the node's user read and write access to the folder and all files in it",
    errno.EPERM: "give the node's user read and write access to the folder and all files in it",
    errno.EIO: "check the disk (dmesg, smartctl -a), replace it if it fails; then start the node again",
    errno.ENOTDIR: "name a folder: something else is there",
    errno.EEXIST: "name a folder: something else is there",
}


def how_to_fix(exc: OSError) -> str:
    """What an operator does about this error."""
    return _FIXES.get(exc.errno or 0, "check the file system (dmesg), then start the node again")


def setup_error(folder: str, exc: OSError) -> SetupError:
    """A folder that cannot be used, and what to do."""
    return SetupError(
        f"the journal in {folder} cannot be opened",
        found=str(exc),
        needed="a folder that this process may read and write",
        fix=how_to_fix(exc),
    )
