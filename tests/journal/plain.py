"""A journal without its threads: the same recovery, log and snapshots, one call after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.journal.faulty import FaultyFiles
from ucxkv.journal.recovery import Recovery, recover
from ucxkv.journal.snapshots import Generations, SnapshotWriter

FILE_BYTES = 16 << 10
IDENTITY = b"node-1"
_runs = itertools.count(1000)


class PlainJournal:
    """One opening of a folder. Frames are synced unless is_synced is False."""

    def __init__(
        self, files: FaultyFiles, *, identity: bytes = IDENTITY, file_bytes: int = FILE_BYTES, is_synced: bool = True
    ) -> None:
        self.files, self.identity = files, identity
        self.recovery: Recovery = recover(
            files, identity=identity, file_bytes=file_bytes, now_run=next(_runs), is_synced=is_synced
        )
        self.recovered = self.recovery.recovered
        self.lsn = self.recovered.last_lsn
        self.generations = Generations(files, self.recovery.snapshots, self.recovered.damaged)

    def write(self, *records: bytes, epoch: int = 1) -> int:
        """One frame; returns the last lsn."""
        self.recovery.log.write(epoch, self.lsn + 1, records)
        self.lsn += len(records)
        return self.lsn

    def snapshot(self, chunks: Sequence[bytes], *, epoch: int = 1, lsn: int | None = None) -> None:
        """A snapshot at `lsn`, the last one's by default."""
        at = self.lsn if lsn is None else lsn
        writer = SnapshotWriter(self.files, epoch=epoch, lsn=at, run=self.recovery.run, identity=self.identity)
        for chunk in chunks:
            writer.add([chunk])
        self.recovery.log.trim(self.generations.finish(writer))

    def close(self) -> None:
        self.recovery.log.close()


def read(files: FaultyFiles, **options: object) -> tuple[list[bytes], list[tuple[int, int, bytes]], PlainJournal]:
    """(chunks of the snapshot, records after it, the opened journal)."""
    journal = PlainJournal(files, **options)  # type: ignore[arg-type]
    return list(journal.recovered.snapshot), list(journal.recovered.records), journal
