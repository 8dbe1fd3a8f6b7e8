"""What replicas of one shard say to each other. Every message carries its sender's epoch; an older one is refused."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ucxkv.replication.config import Member

__all__ = [
    "Append",
    "Appended",
    "Join",
    "Rejected",
    "ReplicaMessage",
    "SnapshotGot",
    "SnapshotPart",
    "decode",
    "decode_members",
    "encode",
    "encode_members",
]


class _Base(msgspec.Struct, frozen=True, array_like=True, tag=True):
    sender: Member
    epoch: int


class Append(_Base, frozen=True):
    """Leader to member: entries behind (prev_index, prev_epoch); none is a heartbeat. serial: told back."""

    prev_index: int
    prev_epoch: int
    entries: list[bytes]
    watermark: int
    serial: int

    def until(self, count: int) -> Append:
        """The same message with the first `count` of its entries, as if no more had been sent."""
        return msgspec.structs.replace(self, entries=self.entries[:count])


class Appended(_Base, frozen=True):
    """Member to leader: my log is yours up to `match_index`, and my journal has it."""

    match_index: int
    serial: int


class Rejected(_Base, frozen=True):
    """Member to leader: I have not what your entries follow, or `epoch` is a newer one. watermark: what I know to be
    committed.
    """

    last_index: int
    last_epoch: int
    watermark: int


class Join(_Base, frozen=True):
    """A node to the leader: send me what I lack."""

    last_index: int
    last_epoch: int
    watermark: int


class SnapshotPart(_Base, frozen=True):
    """Leader to member: part `number` of `count` of the state at (index, entry_epoch)."""

    index: int
    entry_epoch: int
    number: int
    count: int
    chunk: bytes


class SnapshotGot(_Base, frozen=True):
    """Member to leader: the parts up to `number` came; with the last one `Appended` follows."""

    index: int
    number: int


ReplicaMessage = Append | Appended | Rejected | Join | SnapshotPart | SnapshotGot

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReplicaMessage)
_members = msgspec.msgpack.Decoder(list[Member])


def encode(message: ReplicaMessage) -> bytes:
    """As a msgpack array."""
    return _encoder.encode(message)


def decode(raw: bytes) -> ReplicaMessage:
    """The inverse of `encode`. Raises msgspec.DecodeError or ValidationError (both ValueError)."""
    return _decoder.decode(raw)


def encode_members(members: Iterable[Member]) -> bytes:
    """A set of members, always as the same bytes."""
    return _encoder.encode(sorted(members))


def decode_members(raw: bytes) -> frozenset[Member]:
    """The inverse of `encode_members`. Raises ValueError."""
    return frozenset(_members.decode(raw))
