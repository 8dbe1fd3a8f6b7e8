"""The records of a node's journal that holds the logs of many shards, and what a sequence of them comes to. Sans-IO.

A record is a head of 24 bytes and a body; little endian.

| off | size | field |
|---|---|---|
| 0 | 1 | kind: 0x21 Claims, 0x22 Reset, 0x23 Base, 0x24 Entry |
| 1 | 1 | format, 1 |
| 2 | 2 | shard |
| 4 | 4 | zero |
| 8 | 8 | index |
| 16 | 8 | epoch of the entry |

Claims: whose logs this one is, from here on; body: msgpack, a list of [name, incarnation]. Reset: everything of the
shard before it is void, its state is the one after (index, epoch), of which Base records with Commit rows follow
(`COMMIT_DTYPE`); until the next Claims nothing is claimed. Entry: body: its kind (u8), then its record as
`directory.log` writes it; an entry whose index is not above the last one's replaces that one and all behind it.

The rows are those of the replicated log but for where the values lie, which is each node's own: `ABSENT_REGION` where
this node has no value (it was gone from the leader's memory, too, since a Leave follows).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ucxkv.directory.log import COMMIT_DTYPE, NOTHING, LogError, commits, leaves, read_record
from ucxkv.directory.slots import Records
from ucxkv.replication import Entry, Kind, Member
from ucxkv.replication.messages import decode_members, encode_members

__all__ = [
    "ABSENT_REGION",
    "LoggedEntry",
    "ShardLog",
    "base_records",
    "claims_record",
    "entry_record",
    "feed",
    "named",
    "placeless",
    "reset_record",
]

ABSENT_REGION = 0xFFFF
"""In `region` of a row: the value is not here."""

_HEAD = struct.Struct("<BBHIQQ")
_FORMAT = 1
_CLAIMS, _RESET, _BASE, _ENTRY = 0x21, 0x22, 0x23, 0x24
_BASE_ROWS = 768


@dataclass(frozen=True, slots=True)
class LoggedEntry:
    """An entry as it is on this node. rows: COMMIT_DTYPE[n] with this node's places, of a Commit; keys: of a Leave."""

    index: int
    epoch: int
    kind: Kind
    rows: Records | None = None
    keys: bytes = b""

    @property
    def entry(self) -> Entry:
        """The entry as all nodes have it."""
        return Entry(
            self.index, self.epoch, self.kind, self.record(None if self.rows is None else placeless(self.rows))
        )

    def record(self, rows: Records | None) -> bytes:
        """What it says, with these rows where it is a Commit; empty for a leader's first entry."""
        if self.kind is Kind.EPOCH:
            return b""
        return b"".join(commits(rows) if rows is not None else leaves(self.keys)) or NOTHING


def placeless(rows: Records) -> Records:
    """A copy without the places: what the replicated log says."""
    out = rows.copy()
    for name in ("offset", "slot_lines", "base_unit", "units", "region"):
        out[name] = 0
    return out


def claims_record(shard: int, claims: Iterable[Member]) -> bytes:
    """Whose logs this one is from here on."""
    return _HEAD.pack(_CLAIMS, _FORMAT, shard, 0, 0, 0) + encode_members(claims)


def reset_record(shard: int, index: int, epoch: int) -> bytes:
    """The shard begins anew with the state after this entry."""
    return _HEAD.pack(_RESET, _FORMAT, shard, 0, index, epoch)


def base_records(shard: int, rows: Records) -> Iterator[bytes]:
    """The state's rows, in their order."""
    for at in range(0, len(rows), _BASE_ROWS):
        yield _HEAD.pack(_BASE, _FORMAT, shard, 0, 0, 0) + rows[at : at + _BASE_ROWS].tobytes()


def entry_record(shard: int, logged: LoggedEntry) -> bytes:
    """One entry, with this node's places."""
    head = _HEAD.pack(_ENTRY, _FORMAT, shard, 0, logged.index, logged.epoch)
    return head + bytes((logged.kind,)) + logged.record(logged.rows)


@dataclass(slots=True)
class ShardLog:
    """What a journal says of one shard. base: rows of the state after (base_index, base_epoch), parents first."""

    claims: frozenset[Member] = frozenset()
    base_index: int = 0
    base_epoch: int = 0
    base: list[Records] = field(default_factory=list)
    entries: list[LoggedEntry] = field(default_factory=list)

    def rows(self) -> Records:
        """The state's rows."""
        return np.concatenate(self.base) if self.base else np.empty(0, COMMIT_DTYPE)


def feed(shards: dict[int, ShardLog], record: bytes) -> None:
    """Take in the next record. Raises LogError, and then nothing has changed."""
    if len(record) < _HEAD.size:
        raise LogError(f"a record of {len(record)} bytes")
    kind, version, shard, zero, index, epoch = _HEAD.unpack_from(record)
    body = record[_HEAD.size :]
    if version != _FORMAT or zero or kind not in (_CLAIMS, _RESET, _BASE, _ENTRY):
        raise LogError(f"a record of kind {kind}, format {version}")
    log = shards.get(shard, ShardLog())
    if kind == _CLAIMS:
        try:
            log.claims = decode_members(body)
        except ValueError as exc:
            raise LogError(f"claims of shard {shard}: {exc}") from exc
    elif kind == _RESET:
        log = ShardLog(base_index=index, base_epoch=epoch)
    elif kind == _BASE:
        if not body or len(body) % COMMIT_DTYPE.itemsize:
            raise LogError(f"rows of shard {shard} in {len(body)} bytes")
        log.base.append(np.frombuffer(body, COMMIT_DTYPE).copy())
    else:
        logged = _logged(index, epoch, body)
        if index <= log.base_index and epoch <= log.base_epoch:
            return  # the state has it
        while log.entries and log.entries[-1].index >= index:
            log.entries.pop()
        log.entries.append(logged)
    shards[shard] = log


def named(records: Iterable[bytes]) -> Records:
    """The rows that these records name, with this node's places, COMMIT_DTYPE[n], in their order. Raises LogError."""
    rows = []
    for record in records:
        kind, _, _, _, index, epoch = _HEAD.unpack_from(record)
        if kind == _BASE:
            rows.append(np.frombuffer(record, COMMIT_DTYPE, offset=_HEAD.size))
        elif kind == _ENTRY:
            logged = _logged(index, epoch, record[_HEAD.size :])
            rows += [logged.rows] if logged.rows is not None else []
    return np.concatenate(rows) if rows else np.empty(0, COMMIT_DTYPE)


def _logged(index: int, epoch: int, body: bytes) -> LoggedEntry:
    if not body or body[0] not in (Kind.RECORD, Kind.EPOCH):
        raise LogError(f"entry {index} of no known kind")
    kind = Kind(body[0])
    if kind is Kind.EPOCH:
        return LoggedEntry(index, epoch, kind)
    said = read_record(body[1:])
    if isinstance(said, int):
        raise LogError(f"entry {index} is an epoch of another log")
    return (
        LoggedEntry(index, epoch, kind, keys=said) if isinstance(said, bytes) else LoggedEntry(index, epoch, kind, said)
    )
