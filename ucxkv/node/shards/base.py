"""What a shard needs of its node: the seam between one shard and all that shards share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucxkv.directory.slots import Records
    from ucxkv.node.arrived import Arrived
    from ucxkv.node.shards.shard import Shard
    from ucxkv.node.space import Place
    from ucxkv.node.store import HostStore
    from ucxkv.replication import Member
    from ucxkv.replication import events as ev
    from ucxkv.replication.messages import ReplicaMessage

__all__ = ["ShardHost", "Writes"]


class Writes(Protocol):
    """Who waits for proposals."""

    def committed(self, shard: Shard, tag: int, index: int) -> None:
        """The proposal of this tag is so, as of this index."""

    def refused(self, effect: ev.Refused) -> None:
        """It was not taken."""

    def is_busy(self, shard: Shard) -> bool:
        """Whether anything of the shard is staged."""

    def unknown(self, tags: Sequence[int]) -> None:
        """What becomes of these will not be known here."""


class ShardHost(Protocol):
    """See the module."""

    store: HostStore
    arrived: Arrived

    @property
    def writes(self) -> Writes:
        """Who waits for proposals."""

    def persist(self, shard: Shard, serial: int, records: list[bytes]) -> None:
        """Write these to the journal as one unit, then give the shard Persisted(serial)."""

    def send(self, shard: Shard, to: Member, message: ReplicaMessage) -> None:
        """Give that member a message, with the values that it names; it may get lost."""

    def write_config(self, shard: Shard, effect: ev.WriteConfig) -> None:
        """Change the shard's configuration, then give the shard ConfigWritten."""

    def read_config(self, shard: Shard) -> None:
        """Read it, then give the shard ConfigSeen."""

    def gain_soon(self, shard: Shard) -> None:
        """The shard is led here: show it to readers, soon."""

    def lose(self, shard: Shard) -> None:
        """It is led here no more: take it out of readers' sight, before this returns."""

    def broken(self, shard: Shard, why: str) -> None:
        """The program failed in the middle of a step of this shard: the node serves nothing more, and resigns."""

    def pause(self, shard: Shard) -> None:
        """The node's lease is over: its blocks stay, and are shown to nobody until the shard is led here again, by the
        next leader there is (`resume`), or lost.
        """

    def resume(self, shard: Shard) -> None:
        """It is led here again, and was led nowhere else meanwhile."""

    def durable_rows(self, shard: Shard) -> Records:
        """The directory's durable blocks of an active shard, with their places, parents first."""

    def visible(self, key: bytes) -> Place | None:
        """Where the value of a block of an active shard lies, whether or not readers are served at this moment."""

    def fill_places(self, rows: Records) -> None:
        """Fill in the allocator's columns of rows whose offsets stand; rows without a value are left."""

    def free(self, shard: Shard, offsets: list[int]) -> None:
        """These values are no longer needed: free, once nobody can be reading them."""
