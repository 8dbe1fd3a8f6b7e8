"""A node's journal: the product's own frames, files, snapshots and recovery, on the simulated disk.

What the product's committer does with a thread is done here step by step: `write` puts one frame on the disk, `sync`
begins and ends later, and the caller writes the next frame only then. A snapshot replaces all that came before it. What
a journal tells after a restart is what the product's `recover` makes of the disk."""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.sim.disk import Disk, File, Sync
from ucxkv.errors import SetupError
from ucxkv.journal.recovery import recover
from ucxkv.journal.snapshots import Generations, SnapshotWriter
from ucxkv.journal.walk import StopKind
from ucxkv.replication import Entry, Member
from ucxkv.replication.log import decode_entry, encode_entry

__all__ = ["DiskFiles", "Journal", "Remembered"]

FILE_BYTES = 16 << 10


class DiskFiles:
    """`ucxkv.journal.Files` over a simulated disk. is_deferring: a sync of a log file is left to the caller."""

    folder = "(simulated)"

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._handles: dict[int, tuple[str, File]] = {}
        self._next = 0
        self.is_deferring = False

    def lock(self) -> None:
        """See Files."""

    def release(self) -> None:
        """See Files."""

    def names(self) -> list[str]:
        """See Files."""
        return sorted(self._disk.files)

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        """See Files."""
        if create == (name in self._disk.files):
            raise (FileExistsError if create else FileNotFoundError)(name)
        self._next += 1
        self._handles[self._next] = (name, self._disk.open(name))
        return self._next

    def close(self, handle: int) -> None:
        """See Files."""
        del self._handles[handle]

    def size(self, handle: int) -> int:
        """See Files."""
        return self._handles[handle][1].size_bytes

    def read(self, handle: int, offset: int, length: int) -> bytes:
        """See Files."""
        return self._handles[handle][1].read(offset, length)

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        """See Files."""
        file = self._handles[handle][1]
        file.write(offset, bytes(data))
        if self.is_deferring:  # the last write of a frame's is the frame
            self._disk.last_frame = (file, offset, offset + len(data))

    def reserve(self, handle: int, nbytes: int) -> None:
        """See Files."""
        file = self._handles[handle][1]
        if file.size_bytes < nbytes:
            file.truncate(nbytes)

    def sync(self, handle: int) -> None:
        """See Files."""
        name, file = self._handles[handle]
        if not self.is_deferring or name.startswith("spare-"):  # a new file's head is never left for later
            file.sync()

    def forget_cached(self, handle: int) -> None:
        """See Files."""
        self._handles[handle][1].forget_cached()

    def rename(self, old: str, new: str) -> None:
        """See Files."""
        self._disk.rename(old, new)
        for handle, (name, file) in self._handles.items():
            if name == old:
                self._handles[handle] = (new, file)

    def remove(self, name: str) -> None:
        """See Files."""
        if name not in self._disk.files:
            raise FileNotFoundError(name)
        self._disk.remove(name)

    def sync_folder(self) -> None:
        """See Files: names are durable at once here."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a journal tells. claims: whose logs it holds. is_damaged: more than a torn end is missing."""

    claims: frozenset[Member] = frozenset()
    base_index: int = 0
    base_epoch: int = 0
    chunks: tuple[bytes, ...] = ()
    entries: tuple[Entry, ...] = ()
    is_damaged: bool = False


class Journal:
    """Open (and cut) the journal of this disk. remembered: what was in it. run: larger than at earlier openings."""

    def __init__(self, disk: Disk, run: int) -> None:
        self._disk = disk
        self._files = DiskFiles(disk)
        is_lost = False
        try:
            recovery = self._recover(run)
        except SetupError:  # it says what is missing; an operator lets the node begin with an empty folder
            disk.wipe()
            is_lost = True
            recovery = self._recover(run)
        self._log = recovery.log
        self._run = recovery.run
        self._generations = Generations(self._files, recovery.snapshots, recovery.recovered.damaged)
        self._lsn = recovery.recovered.last_lsn
        self.entries_count = 0
        claims: frozenset[Member] = frozenset()
        base: tuple[int, int, tuple[bytes, ...]] = (0, 0, ())
        entries: list[Entry] = []
        found = recovery.recovered
        for raw in (*found.snapshot, *(record for _, _, record in found.records)):
            what: Any = marshal.loads(raw)
            if what[0] == "entry":
                entries.append(decode_entry(what[1]))
            elif what[0] == "claims":
                claims = frozenset(Member(name, incarnation) for name, incarnation in what[1])
            else:
                base = (what[1], what[2], tuple(what[3]))
        if found.stopped.kind is not StopKind.END:
            disk.last_frame = None
        is_damaged = is_lost or found.stopped.kind is StopKind.DAMAGED or bool(found.damaged)
        self.remembered = Remembered(claims, *base, tuple(entries), is_damaged)
        self.entries_count = len(entries)

    def _recover(self, run: int) -> Any:
        return recover(self._files, identity=b"simulated", file_bytes=FILE_BYTES, now_run=run, is_synced=True)

    def write(self, claims: Iterable[Member] | None, entries: Sequence[Entry]) -> None:
        """Write one frame: whose log this is from here on, where that changed, and entries."""
        records = [_entry(entry) for entry in entries]
        if claims is not None:
            records.insert(0, _claims(claims))
        self.entries_count += len(entries)
        self._files.is_deferring = True
        self._log.write(1, self._lsn + 1, records)
        self._files.is_deferring = False
        self._lsn += len(records)

    def replace(
        self, claims: Iterable[Member], index: int, epoch: int, chunks: Sequence[bytes], entries: Sequence[Entry]
    ) -> None:
        """Begin anew with a snapshot and what follows it; all of it is durable on return."""
        self.sync_end(self.sync_begin())
        writer = SnapshotWriter(self._files, epoch=1, lsn=self._lsn, run=self._run, identity=b"simulated")
        state = marshal.dumps(("state", index, epoch, list(chunks)))
        writer.add([_claims(claims), state, *(_entry(entry) for entry in entries)])
        self._log.trim(self._generations.finish(writer))
        self.entries_count = len(entries)

    def sync_begin(self) -> list[tuple[File, Sync]]:
        """A sync of all that was written starts."""
        return [(file, file.sync_begin()) for file in self._disk.files.values() if file.pending]

    def sync_end(self, syncs: list[tuple[File, Sync]], *, fails: bool = False) -> None:
        """The sync ends. Raises OSError when it fails."""
        for file, sync in syncs:
            file.sync_end(sync, fails=fails)


def _entry(entry: Entry) -> bytes:
    return marshal.dumps(("entry", encode_entry(entry)))


def _claims(claims: Iterable[Member]) -> bytes:
    return marshal.dumps(("claims", [tuple(member) for member in sorted(claims)]))
