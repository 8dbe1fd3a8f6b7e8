"""Values of other nodes' log entries and snapshots: their names, and those of a snapshot that is still coming."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory.log import COMMIT_DTYPE, read_record
from ucxkv.replication import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.directory.slots import Records
    from ucxkv.node.shards.base import ShardHost
    from ucxkv.replication import Entry

__all__ = ["SnapshotValues", "commit_rows", "gone_name"]

_NO_ROWS = np.empty(0, COMMIT_DTYPE)


def gone_name(key: bytes, total: int) -> bytes:
    """24 bytes that name a value: its key and its sum."""
    return key + total.to_bytes(8, "little")


def commit_rows(entry: Entry) -> Records:
    """The rows of a Commit, COMMIT_DTYPE[n]; none for any other entry. Raises LogError."""
    if entry.kind is not Kind.RECORD:
        return _NO_ROWS
    said = read_record(entry.record)
    return said if isinstance(said, np.ndarray) else _NO_ROWS


class SnapshotValues:
    """The values of one shard's snapshot, taken as its parts come and handed over when it is whole."""

    def __init__(self, number: int, host: ShardHost) -> None:
        self._number = number
        self._host = host
        self._of: tuple[int, int, int] | None = None
        self._offsets: dict[bytes, int] = {}

    def take(
        self, of: tuple[int, int, int], names: Iterable[tuple[bytes, int, int]], missing: frozenset[bytes]
    ) -> bool:
        """Take these values; False: some have not come. of: which snapshot; another than before makes it begin anew."""
        if self._of != of:
            self.forget()
            self._of = of
        is_whole = True
        for key, total, length in names:
            name = gone_name(key, total)
            if name in self._offsets or name in missing:
                continue
            offset = self._host.arrived.claim(self._number, key, total, length)
            if offset is None:
                is_whole = False
            else:
                self._offsets[name] = offset
        return is_whole

    def has(self, key: bytes, total: int) -> bool:
        """Whether this value was taken."""
        return gone_name(key, total) in self._offsets

    def claim(self, key: bytes, total: int, length: int) -> int | None:
        """Where this value lies; it is the caller's from now on."""
        return self._offsets.pop(gone_name(key, total), None)

    def forget(self) -> None:
        """What was not claimed is free."""
        self._host.store.slabs.free(list(self._offsets.values()))
        self._of, self._offsets = None, {}

    def offsets(self) -> Iterable[int]:
        """Where they lie."""
        return self._offsets.values()
