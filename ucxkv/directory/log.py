"""The records of a directory's log, and the state that a sequence of them comes to. Sans-IO; framing, order and what
survives a torn end are the journal's.

Promises
- A record's bytes are the same on every machine; what is no record raises LogError, never anything else.
- `Replay` holds, after records 1..n, exactly the durable blocks that were so after the n-th, each behind the parent
  that it was put below: whoever takes them in by this order and leaves out what has no visible parent then, has no
  hole. (Below a block whose loss was logged, a Commit that was on its way may stand without its Leave; its parent is
  not before it.)
- A prefix of a log gives a state that was true at some moment.

Record: a header of 8 bytes, then `count` rows. Little endian.

| off | size | field |
|---|---|---|
| 0 | 1 | kind: 1 Commit, 2 Leave, 3 Epoch |
| 1 | 1 | format, 1 |
| 2 | 2 | zero |
| 4 | 4 | count |

Commit row, 80 bytes (`COMMIT_DTYPE`): a block that is durable from here on; one that was visible as cache class too.

| off | field | off | field | off | field |
|---|---|---|---|---|---|
| 0 | key[16] | 48 | sum u64 | 68 | units u32 |
| 16 | parent[16], zero: root | 56 | length u32 | 72 | region u16 |
| 32 | generation u64 | 60 | slot_lines u32 | 74 | tier u8, 75 flag u8 |
| 40 | offset u64 | 64 | base_unit u32 | 76 | zero u32 |

slot_lines, base_unit and units are the allocator's (`tiers.slabs.PLACE_DTYPE`): where the place lies, so that it can be
taken again. Leave row, 16 bytes: the key of a block that is no longer there, a child before its parent. Epoch row, 8
bytes: the epoch (u64) under which everything after it was written. Free is implied: a block that left is not named
again, and its memory is reused only by records after its Leave.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ucxkv.directory.slots import KEY_BYTES, Buffer, Records, as_memory

__all__ = [
    "COMMIT_DTYPE",
    "NOTHING",
    "RECORD_ROWS_MAX",
    "CommitRow",
    "LogError",
    "Replay",
    "commits",
    "epoch_record",
    "leaves",
    "named",
    "packed",
    "read_record",
]

FORMAT = 1
RECORD_ROWS_MAX = 768
"""Rows of one record: 60 KiB of Commits, so that a journal's frame never has to be large."""

COMMIT_DTYPE = np.dtype(
    [
        ("key", "V16"),
        ("parent", "V16"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("sum", "<u8"),
        ("length", "<u4"),
        ("slot_lines", "<u4"),
        ("base_unit", "<u4"),
        ("units", "<u4"),
        ("region", "<u2"),
        ("tier", "u1"),
        ("flag", "u1"),
        ("zero", "<u4"),
    ]
)
assert COMMIT_DTYPE.itemsize == 80

CommitRow: TypeAlias = tuple[bytes, bytes, int, tuple[int, int, int], int, int, int]
"""(key, parent, generation, (region, offset, length), sum, tier, flag): a row before its place is filled in."""

_HEADER = struct.Struct("<BBHI")
_ROW = struct.Struct("<16s16sQQQIIIIHBBI")
assert _ROW.size == COMMIT_DTYPE.itemsize
_COMMIT, _LEAVE, _EPOCH = 1, 2, 3
_COMMIT_BYTE = bytes((_COMMIT,))
NOTHING = _HEADER.pack(_LEAVE, FORMAT, 0, 0)
"""A record that says nothing."""

_ROW_BYTES = {_COMMIT: COMMIT_DTYPE.itemsize, _LEAVE: KEY_BYTES, _EPOCH: 8}


class LogError(ValueError):
    """Bytes that are no record of this version: written by a newer one, or by something else."""


def packed(rows: Sequence[CommitRow]) -> Records:
    """These rows as COMMIT_DTYPE[n], their places zero."""
    raw = [
        _ROW.pack(key, parent, generation, offset, total, length, 0, 0, 0, region, tier, flag, 0)
        for key, parent, generation, (region, offset, length), total, tier, flag in rows
    ]
    return np.frombuffer(bytearray().join(raw), COMMIT_DTYPE)


def commits(rows: Records) -> Iterator[bytes]:
    """The records that commit these rows (COMMIT_DTYPE[n]), in their order."""
    for at in range(0, len(rows), RECORD_ROWS_MAX):
        some = rows[at : at + RECORD_ROWS_MAX]
        yield _HEADER.pack(_COMMIT, FORMAT, 0, len(some)) + some.tobytes()


def leaves(keys: bytes) -> Iterator[bytes]:
    """The records that take these keys out, in their order."""
    step = RECORD_ROWS_MAX * KEY_BYTES
    for at in range(0, len(keys), step):
        some = keys[at : at + step]
        yield _HEADER.pack(_LEAVE, FORMAT, 0, len(some) // KEY_BYTES) + some


def epoch_record(epoch: int) -> bytes:
    """The record that begins an epoch."""
    return _HEADER.pack(_EPOCH, FORMAT, 0, 1) + epoch.to_bytes(8, "little")


def read_record(record: Buffer) -> Records | bytes | int:
    """What a record says: COMMIT_DTYPE[n] of a Commit, the keys of a Leave, the newest epoch of an Epoch.

    The rows are the caller's own. Raises LogError.
    """
    raw = as_memory(record)
    if len(raw) < _HEADER.size:
        raise LogError(f"a record of {len(raw)} bytes")
    kind, version, zero, count = _HEADER.unpack_from(raw)
    body = raw[_HEADER.size :]
    if version != FORMAT or zero or kind not in _ROW_BYTES or len(body) != count * _ROW_BYTES[kind]:
        raise LogError(f"a record of kind {kind}, format {version}, {count} rows in {len(body)} bytes")
    if kind == _COMMIT:
        return np.frombuffer(body, COMMIT_DTYPE).copy()
    if kind == _LEAVE:
        return bytes(body)
    return int.from_bytes(body[-8:], "little") if count else 0


def named(records: Sequence[bytes]) -> Records:
    """The rows of the Commits among these records, COMMIT_DTYPE[n], in their order. Raises LogError."""
    said = [read_record(record) for record in records if record[:1] == _COMMIT_BYTE]
    rows = [each for each in said if isinstance(each, np.ndarray)]
    return np.concatenate(rows) if rows else np.empty(0, COMMIT_DTYPE)


class Replay:
    """The state after the records fed so far. epoch: the newest named, 0 for none."""

    def __init__(self) -> None:
        self.epoch = 0
        self._rows: list[Records] = []
        self._count = 0
        self._at: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._at)

    def feed(self, record: Buffer) -> None:
        """The next record. Raises LogError, and then nothing has changed."""
        said = read_record(record)
        if isinstance(said, bytes):
            for at in range(0, len(said), KEY_BYTES):
                self._at.pop(said[at : at + KEY_BYTES], None)
        elif isinstance(said, int):
            self.epoch = max(self.epoch, said)
        else:
            self._commit(said)

    def _commit(self, rows: Records) -> None:
        at, number, keys = self._at, self._count, rows["key"].tobytes()
        for begin in range(0, len(keys), KEY_BYTES):
            key = keys[begin : begin + KEY_BYTES]
            at.pop(key, None)  # its place in the order is that of its last Commit
            at[key] = number
            number += 1
        self._rows.append(rows)
        self._count = number

    def rows(self) -> Records:
        """The blocks that are there, COMMIT_DTYPE[n], in the order of their last Commits."""
        if not self._rows:
            return np.empty(0, COMMIT_DTYPE)
        self._rows = [np.concatenate(self._rows)]
        return self._rows[0][np.fromiter(self._at.values(), np.int64, len(self._at))]
