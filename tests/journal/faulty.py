"""A disk in memory that fails as disks do: errors, syncs that lose what they were asked for, and every state after a
power cut.

Bytes that no sync covered may be on the disk or not, sector by sector; names likewise, in their order. A sync that
fails drops what it covered and keeps it in the cache, as Linux does: a later sync then succeeds without it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator

SECTOR = 512


class _Inode:
    def __init__(self, disk: bytes = b"") -> None:
        self.cache = bytearray(disk)
        self.disk = bytearray(disk)
        self.unsynced: list[tuple[int, bytes]] = []


def _apply(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


class FaultyFiles:
    """See ucxkv.journal.Files. operations: done so far, by kind. before: called ahead of each operation that changes
    anything, with its kind and the file's name; may raise OSError. room: bytes that fit, -1 = any."""

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self._inodes = {name: _Inode(data) for name, data in (content or {}).items()}
        self._names_on_disk = dict(self._inodes)
        self._name_changes: list[Callable[[dict[str, _Inode]], None]] = []
        self._handles: dict[int, _Inode] = {}
        self._next_handle = 1
        self.operations: dict[str, int] = {}
        self.before: Callable[[str, str], None] = lambda kind, name: None
        self.room = -1
        self.is_locked = False

    folder = "(memory)"

    def _step(self, kind: str, name: str) -> None:
        self.before(kind, name)
        self.operations[kind] = self.operations.get(kind, 0) + 1

    def lock(self) -> None:
        assert not self.is_locked
        self.is_locked = True

    def release(self) -> None:
        self.is_locked = False

    @property
    def open_handles(self) -> int:
        return len(self._handles)

    def names(self) -> list[str]:
        return sorted(self._inodes)

    def _change_names(self, change: Callable[[dict[str, _Inode]], None]) -> None:
        change(self._inodes)
        self._name_changes.append(change)

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        if create:
            self._step("create", name)
            if name in self._inodes:
                raise FileExistsError(errno.EEXIST, "exists", name)
            made = _Inode()
            self._change_names(lambda names: names.__setitem__(name, made))
        if name not in self._inodes:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = self._inodes[name]
        return handle

    def _name(self, inode: _Inode) -> str:
        return next((name for name, each in self._inodes.items() if each is inode), "")

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def size(self, handle: int) -> int:
        return len(self._handles[handle].cache)

    def read(self, handle: int, offset: int, length: int) -> bytes:
        return bytes(self._handles[handle].cache[offset : offset + length])

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        inode = self._handles[handle]
        self._step("write", self._name(inode))
        data = bytes(data)
        grown = max(0, offset + len(data) - len(inode.cache))
        if 0 <= self.room < grown:
            data = data[: len(data) - grown + self.room]
            self.room = 0
            self._write(inode, offset, data)
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.room > 0:
            self.room -= grown
        self._write(inode, offset, data)

    def _write(self, inode: _Inode, offset: int, data: bytes) -> None:
        _apply(inode.cache, offset, data)
        inode.unsynced.append((offset, data))

    def reserve(self, handle: int, nbytes: int) -> None:
        size = self.size(handle)
        if size < nbytes:
            self.write(handle, size, bytes(nbytes - size))

    def sync(self, handle: int) -> None:
        inode = self._handles[handle]
        try:
            self._step("sync", self._name(inode))
        except OSError:
            inode.unsynced.clear()  # clean in the cache, and not on the disk
            raise
        for offset, data in inode.unsynced:
            _apply(inode.disk, offset, data)
        inode.unsynced.clear()

    def forget_cached(self, handle: int) -> None:
        inode = self._handles[handle]
        inode.cache = bytearray(inode.disk)
        for offset, data in inode.unsynced:
            _apply(inode.cache, offset, data)

    def rename(self, old: str, new: str) -> None:
        self._step("rename", old)
        if old not in self._inodes:
            raise FileNotFoundError(errno.ENOENT, "missing", old)
        self._change_names(lambda names: names.__setitem__(new, names.pop(old)))

    def remove(self, name: str) -> None:
        self._step("remove", name)
        if name not in self._inodes:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        self._change_names(lambda names: names.__delitem__(name))

    def sync_folder(self) -> None:
        self._step("sync_folder", "")
        self._names_on_disk = dict(self._inodes)
        self._name_changes.clear()

    # ---- after an end

    def after_kill(self) -> FaultyFiles:
        """What the next process finds: all that was written."""
        return FaultyFiles({name: bytes(inode.cache) for name, inode in self._inodes.items()})

    def after_power_cut(self, choose: random.Random | None, names_kept: int = 0) -> FaultyFiles:
        """What may be on the disk. choose: draws which unsynced sectors made it, None = none did. names_kept: how many
        of the unsynced changes of names did."""
        names = dict(self._names_on_disk)
        for change in self._name_changes[:names_kept]:
            change(names)
        return FaultyFiles({name: self._content(inode, choose) for name, inode in names.items()})

    @staticmethod
    def _content(inode: _Inode, choose: random.Random | None) -> bytes:
        content = bytearray(inode.disk)
        for offset, data in inode.unsynced if choose is not None else []:
            assert choose is not None
            for at in range(0, len(data), SECTOR):
                if choose.random() < 0.5:
                    _apply(content, offset + at, data[at : at + SECTOR])
        return bytes(content)

    def power_cuts(self, rng: random.Random, draws: int) -> Iterator[FaultyFiles]:
        """States after a power cut now: with nothing unsynced, all of it, and `draws` with a part."""
        yield self.after_power_cut(None)
        yield self.after_kill()
        for _ in range(draws):
            yield self.after_power_cut(rng, rng.randint(0, len(self._name_changes)))

    def content(self) -> dict[str, bytes]:
        """Name -> bytes, as seen now."""
        return {name: bytes(inode.cache) for name, inode in self._inodes.items()}
