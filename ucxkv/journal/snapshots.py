"""Snapshots: the whole state at one lsn in one file, complete or not there.

A snapshot is written under a name that nobody reads, synced, then renamed: every file with a snapshot's name was
complete once, so one that does not check out has been damaged since. `is_whole` reads all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ucxkv.errors import IntegrityError
from ucxkv.journal.files import Files
from ucxkv.journal.pieces import CHUNK, END, HEAD_BYTES, NUMBER_MAX, SNAPSHOT, VERSION, Head, read_head, seal

__all__ = [
    "CHUNK_BYTES_MAX",
    "TEMPORARY",
    "Generations",
    "Snapshot",
    "SnapshotWriter",
    "is_whole",
    "list_snapshots",
    "read_chunks",
    "read_snapshot_head",
]

CHUNK_BYTES_MAX = 256 << 20
TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot's file and what its head says. chunks: -1 = not counted."""

    name: str
    epoch: int
    lsn: int
    chunks: int = -1


def snapshot_name(epoch: int, lsn: int) -> str:
    """Sorts by lsn."""
    return f"snapshot-{lsn:020d}-{epoch:020d}"


def list_snapshots(names: list[str]) -> list[Snapshot]:
    """What the names say, newest last."""
    found = []
    for name in names:
        parts = name.split("-")
        is_ours = len(parts) == 3 and parts[0] == "snapshot"
        if is_ours and all(x.isdecimal() and len(x) == 20 for x in parts[1:]) and int(parts[1]) <= NUMBER_MAX:
            found.append(Snapshot(name, int(parts[2]), int(parts[1])))
    return sorted(found, key=lambda each: (each.lsn, each.epoch))


def read_snapshot_head(files: Files, snapshot: Snapshot) -> tuple[Head, bytes] | None:
    """(its head, the identity), or None when it is damaged."""
    handle = files.open(snapshot.name)
    try:
        raw = files.read(handle, 0, HEAD_BYTES)
        head = read_head(raw)
        if head is None or head.magic != SNAPSHOT or head.length > files.size(handle):
            return None
        identity = files.read(handle, HEAD_BYTES, head.length)
        return (head, identity) if head.is_sound(raw, identity) else None
    finally:
        files.close(handle)


def read_chunks(files: Files, snapshot: Snapshot) -> Iterator[bytes]:
    """The chunks in order; IntegrityError at the first that is not what was written, or when one is missing."""
    found = read_snapshot_head(files, snapshot)
    if found is None or (found[0].lsn, found[0].epoch) != (snapshot.lsn, snapshot.epoch):
        raise IntegrityError(f"the head of {snapshot.name} is damaged")
    at, previous, count = HEAD_BYTES + len(found[1]), found[0].sum, 0
    handle = files.open(snapshot.name)
    try:
        size = files.size(handle)
        while True:
            raw = files.read(handle, at, HEAD_BYTES)
            head = read_head(raw)
            at += HEAD_BYTES
            is_next = head is not None and head.previous == previous and head.count == count
            if head is None or not is_next or head.magic not in (CHUNK, END) or at + head.length > size:
                raise IntegrityError(f"{snapshot.name} is damaged or cut before byte {at}")
            payload = files.read(handle, at, head.length)
            if not head.is_sound(raw, payload) or head.version != VERSION:
                raise IntegrityError(f"{snapshot.name} is damaged before byte {at + head.length}")
            at, previous, count = at + head.length, head.sum, count + 1
            if head.magic == END:
                if at != size:
                    raise IntegrityError(f"{snapshot.name} goes on after its end at byte {at}")
                return
            yield payload
    finally:
        files.close(handle)


def is_whole(files: Files, snapshot: Snapshot) -> bool:
    """Whether every byte of it is what was written."""
    try:
        for _ in read_chunks(files, snapshot):
            pass
    except IntegrityError:
        return False
    return True


class SnapshotWriter:
    """Writes one snapshot; `finish` makes it real, `abort` leaves nothing."""

    def __init__(self, files: Files, *, epoch: int, lsn: int, run: int, identity: bytes) -> None:
        self._files = files
        self._identity = identity
        self._run = run
        self.snapshot = Snapshot(snapshot_name(epoch, lsn), epoch, lsn)
        self._temporary = self.snapshot.name + TEMPORARY
        self._handle = -1
        self._at = self._count = self._previous = 0

    def _start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(self._temporary)
        self._handle = self._files.open(self._temporary, create=True)
        self._piece(SNAPSHOT, self._identity)

    def _piece(self, magic: int, payload: bytes) -> None:
        count = 0 if magic == SNAPSHOT else self._count
        head, total = seal(
            magic,
            payload,
            count=count,
            epoch=self.snapshot.epoch,
            lsn=self.snapshot.lsn,
            run=self._run,
            previous=self._previous,
        )
        self._files.write(self._handle, self._at, head + payload)
        self._at += len(head) + len(payload)
        self._previous = total

    def add(self, chunks: Iterable[bytes]) -> None:
        """Write more chunks."""
        if self._handle < 0:
            self._start()
        for chunk in chunks:
            self._piece(CHUNK, chunk)
            self._count += 1

    def finish(self) -> Snapshot:
        """End it, sync it, give it its name."""
        self.add(())
        self._piece(END, b"")
        self._files.sync(self._handle)
        self._close()
        self._files.rename(self._temporary, self.snapshot.name)
        self._files.sync_folder()
        return self.snapshot

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            self._files.close(handle)

    def abort(self) -> None:
        """Remove what was written; never raises OSError."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._files.remove(self._temporary)


class Generations:
    """The whole snapshots that are kept, newest last, and the names of those to remove."""

    def __init__(self, files: Files, whole: Sequence[Snapshot], damaged: Sequence[str]) -> None:
        self._files = files
        self._kept, self._obsolete = list(whole), list(damaged)

    @property
    def newest_lsn(self) -> int:
        """Of the newest one; 0 = there is none."""
        return self._kept[-1].lsn if self._kept else 0

    def finish(self, writer: SnapshotWriter) -> int:
        """Make what was written the newest and remove all but the one before it; returns that one's lsn: the log up to
        it is needed no more. What cannot be removed is tried again next time. OSError: there is no new snapshot."""
        try:
            made = writer.finish()
        except BaseException:
            writer.abort()
            raise
        others = [each for each in self._kept if each.name != made.name]
        self._kept = [*others[-1:], made]
        self._obsolete += [each.name for each in others[:-1]]
        self._obsolete = [name for name in self._obsolete if name != made.name and not self._remove(name)]
        return others[-1].lsn if others else 0

    def _remove(self, name: str) -> bool:
        """Whether it is gone."""
        try:
            self._files.remove(name)
        except OSError as exc:
            return isinstance(exc, FileNotFoundError)
        return True
