"""The part of a shard's log that is in memory: what is not committed, and a window of what is.

Entries have consecutive indices from 1 on. Two logs that have an entry of one index and one epoch in common are the
same up to there (one leader an epoch, and each entry is taken only behind the one before it).

An entry on disk and on the wire, little endian:

    offset 0   8   index
           8   8   epoch of the leader that wrote it
          16   1   kind: 0 record, 1 a leader's first entry (no record)
          17   n   record
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Entry", "Kind", "LogWindow", "decode_entry", "encode_entry"]

_HEAD = struct.Struct("<QQB")


class Kind(enum.IntEnum):
    """What an entry is."""

    RECORD = 0
    EPOCH = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log."""

    index: int
    epoch: int
    kind: Kind
    record: bytes


def encode_entry(entry: Entry) -> bytes:
    """See the module's table."""
    return _HEAD.pack(entry.index, entry.epoch, entry.kind) + entry.record


def decode_entry(raw: bytes) -> Entry:
    """The inverse of `encode_entry`. Raises ValueError."""
    if len(raw) < _HEAD.size:
        raise ValueError(f"an entry of {len(raw)} bytes; its head alone is {_HEAD.size}")
    index, epoch, kind = _HEAD.unpack_from(raw)
    return Entry(index, epoch, Kind(kind), raw[_HEAD.size :])


class LogWindow:
    """Entries behind (`base_index`, `base_epoch`), which is the last one that is no longer here."""

    def __init__(self, base_index: int = 0, base_epoch: int = 0) -> None:
        self.base_index, self.base_epoch = base_index, base_epoch
        self._entries: list[Entry] = []

    @property
    def last_index(self) -> int:
        """Of the newest entry."""
        return self.base_index + len(self._entries)

    @property
    def last_epoch(self) -> int:
        """Of the newest entry."""
        return self._entries[-1].epoch if self._entries else self.base_epoch

    def epoch_at(self, index: int) -> int | None:
        """The epoch of an entry; None where it is not known (any more)."""
        at = index - self.base_index
        if at == 0:
            return self.base_epoch
        return self._entries[at - 1].epoch if 0 < at <= len(self._entries) else None

    def slice(self, first: int, last: int) -> list[Entry]:
        """The entries `first` .. `last`, both in the window."""
        assert first > self.base_index and last <= self.last_index
        return self._entries[first - self.base_index - 1 : last - self.base_index]

    def batch(self, first: int, count_max: int, bytes_max: int) -> list[Entry]:
        """Entries from `first` on, at least one where there is one."""
        out: list[Entry] = []
        size = 0
        for entry in self._entries[first - self.base_index - 1 : first - self.base_index - 1 + count_max]:
            size += len(entry.record)
            if out and size > bytes_max:
                break
            out.append(entry)
        return out

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries that follow the last."""
        for entry in entries:
            assert entry.index == self.last_index + 1 and entry.epoch >= self.last_epoch
            self._entries.append(entry)

    def truncate(self, last_index: int) -> None:
        """Drop what is behind `last_index`."""
        assert self.base_index <= last_index <= self.last_index
        del self._entries[last_index - self.base_index :]

    def trim(self, watermark: int, keep: int) -> None:
        """Forget the oldest committed entries when twice as many as `keep` are here."""
        committed = watermark - self.base_index
        if committed < 2 * keep:
            return
        drop = committed - keep
        self.base_index, self.base_epoch = self.base_index + drop, self._entries[drop - 1].epoch
        del self._entries[:drop]

    @staticmethod
    def replay(base_index: int, base_epoch: int, entries: Sequence[Entry]) -> tuple[LogWindow, bool]:
        """The log that a journal tells of: an entry at or before the last one replaces it and all behind it. Second:
        whether it made sense to the end; the log is what came before.
        """
        log = LogWindow(base_index, base_epoch)
        for entry in entries:
            if entry.index <= base_index and entry.epoch <= base_epoch:
                continue  # the snapshot has it
            if entry.index <= log.last_index and entry.index > base_index:
                log.truncate(entry.index - 1)
            if entry.index != log.last_index + 1 or entry.epoch < log.last_epoch:
                return log, False
            log.append([entry])
        return log, True
