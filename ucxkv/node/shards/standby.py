"""The durable blocks of one shard on a node that does not lead it: rows of the log, values in this node's memory.

Invariants
  - It is the state that the shard's log came to: each row is that of the last Commit of its key, and no Leave followed;
    rows stand in the order of these Commits, so a parent comes before its children.
  - A value's memory is this table's as long as its row is here; what is replaced, left or dropped is handed back.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.directory.slots import KEY_BYTES, Records
from ucxkv.node.shards.records import ABSENT_REGION
from ucxkv.node.space import Place

__all__ = ["Standby", "places_of"]

_ROW = COMMIT_DTYPE.itemsize
_OFFSET, _SUM, _LENGTH, _REGION = (COMMIT_DTYPE.fields[name][1] for name in ("offset", "sum", "length", "region"))  # type: ignore[index]


def places_of(rows: Records) -> list[int]:
    """The offsets of those rows' values that are here."""
    offsets: list[int] = rows["offset"][rows["region"] != ABSENT_REGION].tolist()
    return offsets


class Standby:
    """See the module."""

    def __init__(self, rows: Records | None = None) -> None:
        self._rows: dict[bytes, bytes] = {}
        if rows is not None:
            self.commit(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def commit(self, rows: Records) -> list[int]:
        """These blocks are durable from here on. Returns offsets of values that others took the place of."""
        mine, freed, raw = self._rows, list[int](), rows.tobytes()
        for at in range(0, len(raw), _ROW):
            row = raw[at : at + _ROW]
            key = row[:KEY_BYTES]
            before = mine.pop(key, None)  # its place in the order is that of its last Commit
            if before is not None:
                freed += _other_place(before, row)
            mine[key] = row
        return freed

    def leave(self, keys: bytes) -> list[int]:
        """These blocks are gone: the offsets of their values."""
        freed = list[int]()
        for at in range(0, len(keys), KEY_BYTES):
            row = self._rows.pop(keys[at : at + KEY_BYTES], None)
            if row is not None:
                freed += _place(row)
        return freed

    def find(self, key: bytes, total: int, length: int) -> bytes | None:
        """The row of this key, if its value is here and has this sum and length."""
        row = self._rows.get(key)
        if row is None or not _place(row):
            return None
        is_it = _u(row, _SUM, 8) == total and _u(row, _LENGTH, 4) == length
        return row if is_it else None

    def place(self, key: bytes) -> Place | None:
        """Where the value of this key lies."""
        row = self._rows.get(key)
        if row is None or not _place(row):
            return None
        return Place(_u(row, _OFFSET, 8), _u(row, _LENGTH, 4), _u(row, _SUM, 8))

    def rows(self) -> Records:
        """All rows, COMMIT_DTYPE[n], in their order; read-only."""
        return np.frombuffer(b"".join(self._rows.values()), COMMIT_DTYPE)

    def replace(self, rows: Records) -> list[int]:
        """Be these rows instead. Returns the offsets of values that none of them has."""
        before = set(self.offsets())
        self._rows = {}
        self.commit(rows)
        return sorted(before.difference(self.offsets()))

    def take(self) -> Records:
        """All rows, and with them their values' memory: the table is empty then."""
        rows = self.rows()
        self._rows = {}
        return rows

    def offsets(self) -> Iterable[int]:
        """Where its values lie."""
        return places_of(self.rows())


def _u(row: bytes, at: int, width: int) -> int:
    return int.from_bytes(row[at : at + width], "little")


def _place(row: bytes) -> list[int]:
    return [] if _u(row, _REGION, 2) == ABSENT_REGION else [_u(row, _OFFSET, 8)]


def _other_place(before: bytes, after: bytes) -> list[int]:
    place = _place(before)
    return [] if place == _place(after) else place
