"""The folder of a store: its lock, its names, and files that are made whole or not at all.

    What `create` made is on the disk, name included, when it returns; what it was making when the process or the power
    went has another name and is removed at the next `lock`. Only the datafiles' bytes go through the engine.

The seam where tests put a disk in memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import Protocol

from ..base import SetupFailed
from .waiting import to_the_end

__all__ = ["Folder", "RealFolder", "how_to_fix", "setup_failed"]

LOCK_NAME = "lock"
TEMPORARY = ".new"


class Folder(Protocol):
    """One folder. Raises OSError, except where it says otherwise."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""
        ...

    def lock(self) -> None:
        """Make the folder this process's until `release`, and remove what was never finished; SetupFailed."""
        ...

    def release(self) -> None:
        """Undo `lock`."""
        ...

    def names(self) -> list[str]:
        """Names of what is there, sorted."""
        ...

    def read_small(self, name: str) -> bytes:
        """All bytes of a small file."""
        ...

    def open(self, name: str, *, direct: bool) -> tuple[int, bool]:
        """(descriptor for reading and writing, whether it goes past the page cache). direct: asked for."""
        ...

    async def settle(self, fd: int) -> None:
        """Return when no write to the file that an earlier owner began is under way any more.

        A process that is killed leaves those that the disk has: the kernel gives its locks back before they land, and
        one that landed late would stand where the next owner had written since.
        """
        ...

    def size(self, fd: int) -> int:
        """The file's bytes."""
        ...

    def close(self, fd: int) -> None:
        """Close it."""
        ...

    async def create(self, name: str, *, nbytes: int, head: bytes) -> None:
        """Make a file of so many bytes, all of them given space now, that begins with `head`."""
        ...

    async def remove(self, name: str) -> None:
        """Remove it."""
        ...


class RealFolder:
    """See Folder. Made if it is missing; calls that may wait for the disk run in another thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder_fd = self._lock_fd = -1

    @property
    def path(self) -> str:
        """See Folder.path."""
        return str(self._path)

    def lock(self) -> None:
        """See Folder.lock. The lock is the kernel's: it ends with the process, so none is ever stale."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._folder_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fd = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=self._folder_fd)
        except OSError as exc:
            self.release()
            raise setup_failed(self.path, exc) from exc
        self._lock_fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise setup_failed(self.path, exc) from exc
            raise SetupFailed(
                f"the datafiles in {self._path} are in use by another process",
                found=f"process {holder} holds {self._path / LOCK_NAME}",
                needed="one process a folder",
                fix=f"stop that process, or give this node a folder of its own (ps -p {holder})",
            ) from exc
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            for name in self.names():
                if name.endswith(TEMPORARY):
                    os.unlink(name, dir_fd=self._folder_fd)
        except OSError as exc:
            self.release()
            raise setup_failed(self.path, exc) from exc

    def release(self) -> None:
        """See Folder.release."""
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._folder_fd = -1

    def names(self) -> list[str]:
        """See Folder.names."""
        return sorted(os.listdir(self._folder_fd))

    def read_small(self, name: str) -> bytes:
        """See Folder.read_small."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder_fd)
        try:
            return os.pread(fd, 1 << 16, 0)
        finally:
            os.close(fd)

    def open(self, name: str, *, direct: bool) -> tuple[int, bool]:
        """See Folder.open. A page that a failed sync left in the cache is no proof: it is not read again."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct:
            try:
                return os.open(name, flags | os.O_DIRECT, dir_fd=self._folder_fd), True
            except OSError as exc:
                if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        fd = os.open(name, flags, dir_fd=self._folder_fd)
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd, False

    async def settle(self, fd: int) -> None:
        """See Folder.settle. File systems wait for direct transfers before they give space to a file, which this has.

        Source: Linux `inode_dio_wait` in the fallocate of ext4 and XFS; ordered extents in that of Btrfs.
        """
        with contextlib.suppress(OSError):  # where there is no such call nothing better is known
            await to_the_end(asyncio.get_running_loop().run_in_executor(None, _fallocate, fd, 4096))

    def size(self, fd: int) -> int:
        """See Folder.size."""
        return os.fstat(fd).st_size

    def close(self, fd: int) -> None:
        """See Folder.close."""
        os.close(fd)

    async def create(self, name: str, *, nbytes: int, head: bytes) -> None:
        """See Folder.create."""
        await asyncio.to_thread(self._create, name, nbytes, head)

    def _create(self, name: str, nbytes: int, head: bytes) -> None:
        temporary = name + TEMPORARY
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o644, dir_fd=self._folder_fd)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as exc:
                if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                os.ftruncate(fd, nbytes)  # space comes with the first write: a full disk then ends the writes
            view = memoryview(head)
            while view:
                view = view[os.pwrite(fd, view, len(head) - len(view)) :]
            os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
            os.fsync(self._folder_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._folder_fd)
            raise
        finally:
            os.close(fd)

    async def remove(self, name: str) -> None:
        """See Folder.remove."""
        await asyncio.to_thread(os.unlink, name, dir_fd=self._folder_fd)


def _fallocate(fd: int, nbytes: int) -> None:
    """fallocate(2) of a file's first bytes; its size stays. Without the C library's emulation, which writes."""
    keep_size = 1
    if _LIBC.fallocate(fd, keep_size, ctypes.c_long(0), ctypes.c_long(nbytes)):
        raise OSError(ctypes.get_errno(), "fallocate")


_LIBC = ctypes.CDLL(None, use_errno=True)

_FIXES = {
    errno.ENOSPC: "free space on that file system, allow fewer datafiles, or name a folder on a larger one",
    errno.EDQUOT: "raise the quota of the node's user, or allow fewer datafiles",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f unlimited)",
    errno.EROFS: "mount that file system read-write (dmesg says why it is not)",
    errno.EACCES: "give the node's user read and write access to the folder and all files in it",
    errno.EPERM: "give the node's user read and write access to the folder and all files in it",
    errno.EIO: "check the disk (dmesg, smartctl -a), replace it if it fails",
    errno.ENOTDIR: "name a folder: something else is there",
    errno.EEXIST: "name a folder: something else is there",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use larger datafiles",
}


def how_to_fix(number: int | None) -> str:
    """What an operator does about this errno; the node is then started again."""
    fix = _FIXES.get(number or 0, "check the file system (dmesg)")
    return f"{fix}; then start the node again"


def setup_failed(path: str, exc: OSError) -> SetupFailed:
    """A folder that cannot be used, and what to do."""
    return SetupFailed(
        f"the datafiles in {path} cannot be opened",
        found=str(exc),
        needed="a folder that this process may read and write",
        fix=how_to_fix(exc.errno),
    )
