"""A disk in memory: files that are written at offsets, synced, torn and lost.

A write is seen by reads at once and is durable only after a sync that began after it. `lose_power` keeps all that was
synced; of each later write it keeps nothing, all, or a torn part (a run of whole sectors, or bytes up to a cut), in any
order, so that a later write may survive where an earlier one does not. A failed sync raises `OSError` (EIO), and what
it covered is no more durable after the next sync that succeeds: the kernel has dropped its dirty mark.
`crash` is the death of the process alone: nothing is lost, a sync in flight is forgotten."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

__all__ = ["Disk", "File", "Sync"]

SECTOR_BYTES = 512


@dataclass(slots=True)
class Write:
    """One write that is not durable yet. offset < 0: a truncation to `-offset - 1` bytes."""

    offset: int
    data: bytes
    is_doomed: bool = False


@dataclass(slots=True)
class Sync:
    """A sync between its start and its end: it covers the first `writes_count` pending writes as of its start."""

    writes: list[Write]


@dataclass(slots=True)
class File:
    """One file: `stable` survives anything but `wipe`; `pending` are the writes since, oldest first."""

    stable: bytearray = field(default_factory=bytearray)
    image: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Its length as a reader sees it."""
        return len(self.image)

    def read(self, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """What a reader sees, synced or not."""
        return bytes(self.image[offset : None if size_bytes is None else offset + size_bytes])

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`; a hole before it reads as zeros."""
        write = Write(offset, bytes(data))
        _apply(self.image, offset, write.data)
        self.pending.append(write)

    def append(self, data: bytes) -> int:
        """Write at the end; the offset it got."""
        offset = len(self.image)
        self.write(offset, data)
        return offset

    def truncate(self, size_bytes: int) -> None:
        """Cut or zero-extend to `size_bytes`."""
        write = Write(-size_bytes - 1, b"")
        _apply(self.image, write.offset, b"")
        self.pending.append(write)

    def sync_begin(self) -> Sync:
        """A sync starts: it covers what is pending now and no later write."""
        return Sync([write for write in self.pending if not write.is_doomed])

    def sync_end(self, sync: Sync, *, fails: bool = False) -> None:
        """The sync ends: what it covers is durable, or (fails) will never be. Raises OSError then."""
        if fails:
            for write in sync.writes:
                write.is_doomed = True
            raise OSError(errno.EIO, "fdatasync failed (simulated)")
        covered = {id(write) for write in sync.writes}
        kept = []
        for write in self.pending:
            if id(write) in covered:
                _apply(self.stable, write.offset, write.data)
            else:
                kept.append(write)
        self.pending = kept

    def sync(self, *, fails: bool = False) -> None:
        """A sync that takes no time."""
        self.sync_end(self.sync_begin(), fails=fails)

    def forget_cached(self) -> None:
        """Reads ask the disk from here on: what a failed sync left in the cache alone is gone."""
        self.pending = [write for write in self.pending if not write.is_doomed]
        self.image = bytearray(self.stable)
        for write in self.pending:
            _apply(self.image, write.offset, write.data)

    def lose_power(self, rng: random.Random) -> None:
        """Only what is stable is sure to remain; each pending write meets its own fate."""
        for write in self.pending:
            fate = rng.random()
            if fate < 0.4:
                continue
            data = write.data
            offset = write.offset
            if fate >= 0.7 and offset >= 0 and data:
                if rng.random() < 0.5:
                    data = data[: rng.randrange(len(data))]
                else:
                    sectors = -(-len(data) // SECTOR_BYTES)
                    first = rng.randrange(sectors)
                    last = rng.randint(first + 1, sectors)
                    data = data[first * SECTOR_BYTES : last * SECTOR_BYTES]
                    offset += first * SECTOR_BYTES
            _apply(self.stable, offset, data)
        self.pending = []
        self.image = bytearray(self.stable)

    def damage(self, rng: random.Random, spared: range) -> None:
        """One bit of a byte that is not zero, and not among the spared, becomes another."""
        written = [at for at, byte in enumerate(self.image) if byte and at not in spared]
        if written:
            at = rng.choice(written)
            _apply(self.image, at, bytes([self.image[at] ^ (1 << rng.randrange(8))]))
            _apply(self.stable, at, bytes(self.image[at : at + 1]))


class Disk:
    """The files of one host, by name."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.last_frame: tuple[File, int, int] | None = None
        """File, first byte and end of the last frame that was written, where its writer told."""

    def open(self, name: str) -> File:
        """The file, made if there is none. (Names are durable at once.)"""
        return self.files.setdefault(name, File())

    def remove(self, name: str) -> None:
        """Unlink it, if it is there."""
        self.files.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        """Put `old` in the place of `new`. (Names are durable at once.)"""
        self.files[new] = self.files.pop(old)

    def crash(self) -> None:
        """The process died, the machine did not: its writes are all there, not yet durable."""

    def lose_power(self, rng: random.Random) -> None:
        """See `File.lose_power`, for each file."""
        for file in self.files.values():
            file.lose_power(rng)

    def damage(self, rng: random.Random) -> None:
        """One bit of one file is another one, outside of the last frame: that would look like one that was torn."""
        files = [file for file in self.files.values() if any(file.image)]
        if files and self.last_frame is not None:
            file = rng.choice(files)
            spared = self.last_frame[1:] if file is self.last_frame[0] else (0, 0)
            file.damage(rng, range(*spared))

    def wipe(self) -> None:
        """Another disk: nothing on it."""
        self.files = {}
        self.last_frame = None


def _apply(image: bytearray, offset: int, data: bytes) -> None:
    """Write or truncate (see `Write`)."""
    if offset < 0:
        size = -offset - 1
        if size <= len(image):
            del image[size:]
        else:
            image.extend(bytes(size - len(image)))
        return
    if offset > len(image):
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data
