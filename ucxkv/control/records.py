"""What stands in the control plane: typed records, each as JSON that says its version.

    cluster             ClusterRecord   once, when the cluster is made
    incarnations/NAME   Incarnation     the last life given to a node of that name; never deleted
    members/NAME        MemberRecord    under its node's lease: gone when the node is
    shards/N            ShardRecord     who holds shard N
    draining/NAME       Draining        a node that is to hold nothing any more; deleted to take that back

Rules
  - A record that is written names its writer (a node id, an incarnation), so that a change whose answer was lost can
    be recognised.
  - A record of a newer version is a SetupError that names both versions; one that can't be read is one that names its
    key. Neither is ever written over: whoever changes a record has read it.
  - Fields are only ever appended, with defaults, within one version; readers pass over what they do not know."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self, TypeVar

import msgspec

from ucxkv import errors
from ucxkv.control.base import Entry
from ucxkv.protocol.messages import MemberInfo
from ucxkv.replication.config import Member, ShardConfig

__all__ = [
    "ClusterRecord",
    "Draining",
    "Incarnation",
    "MemberRecord",
    "Record",
    "ShardRecord",
    "decode_record",
    "encode_record",
]

UInt = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records. VERSION: what this release writes and the newest that it reads."""

    VERSION: ClassVar[int] = 1
    version: Positive = 1


class ClusterRecord(Record, frozen=True, kw_only=True):
    """What a cluster is, fixed for its life. shards: how many shards its directory has. fanout, cut_blocks: the fields
    of `ucxkv.sharding.ShardRule` that decide where a block lives, so every node and client has to use the same.
    replicas: on how many nodes each shard is, its leader among them."""

    cluster_id: str
    shards: Positive
    fanout: UInt
    cut_blocks: UInt
    replicas: Positive = 1


class Incarnation(Record, frozen=True, kw_only=True):
    """number: grows with each registration under this name. node_id: of the process that got it."""

    number: Positive
    node_id: UInt


class MemberRecord(Record, frozen=True, kw_only=True):
    """A node that is there. incarnation: this life's; a node whose lease was lost comes back with another.
    lease_s: what its lease was asked for."""

    name: str
    incarnation: Positive
    node_id: Positive
    address: str
    epoch: UInt
    weight: float
    lease_s: float

    @property
    def info(self) -> MemberInfo:
        """As nodes and clients tell each other."""
        return MemberInfo(self.node_id, self.name, self.address, self.epoch, self.weight)


class ShardRecord(Record, frozen=True, kw_only=True):
    """Who holds a shard, as `replication.ShardConfig` says it; a member is `["n1", 3]`: name and incarnation."""

    epoch: Positive
    leader: Member
    insync: tuple[Member, ...]
    keeps: bool = True

    def __post_init__(self) -> None:
        if self.leader not in self.insync:
            raise ValueError(f"the leader {self.leader.name} is not in its in-sync set")

    @classmethod
    def of(cls, config: ShardConfig) -> Self:
        """The record of a configuration."""
        insync = tuple(sorted(config.insync))
        return cls(epoch=config.epoch, leader=config.leader, insync=insync, keeps=config.keeps)

    @property
    def config(self) -> ShardConfig:
        """The configuration of a record."""
        return ShardConfig(self.epoch, self.leader, frozenset(self.insync), self.keeps)


class Draining(Record, frozen=True, kw_only=True):
    """That a node of this name is to hold nothing: no shard belongs there, and what it holds moves away."""

    by: str


class _Header(msgspec.Struct):
    version: Positive


_R = TypeVar("_R", bound=Record)


def encode_record(record: Record) -> bytes:
    """The record's value."""
    return msgspec.json.encode(record)


def decode_record(entry: Entry, kind: type[_R]) -> _R:
    """The record in an entry. Raises SetupError for a newer version and for what is no such record."""
    try:
        version = msgspec.json.decode(entry.value, type=_Header).version
        if version <= kind.VERSION:
            return msgspec.json.decode(entry.value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise errors.SetupError(
            f"the control plane's {entry.key} can't be read: {exc}",
            found=repr(entry.value[:200]),
            needed=f"a {kind.__name__} of version {kind.VERSION}",
            fix="if another program wrote it, delete that key; else restore the control plane's data",
        ) from exc
    raise errors.SetupError(
        f"the control plane's {entry.key} was written by a newer ucxkv",
        found=f"version {version}",
        needed=f"version {kind.VERSION} or older",
        fix="upgrade ucxkv on this host to the release that the rest of the cluster runs",
    )
