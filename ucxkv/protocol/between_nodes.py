"""Control messages that nodes say to each other alone; the rules are those of `messages`, which has these names too."""

from __future__ import annotations

from typing import ClassVar

from ucxkv.protocol.base import Message, UInt

__all__ = ["Adopt", "HaveValues", "Lacks", "Reclaim", "Replicate", "Surrender", "Values"]


class Adopt(Message, frozen=True):
    """Node to node: your extents, granted to `session`, now belong to my shard's blocks. Answer: Statuses, 0 =
    adopted.
    """

    CODE: ClassVar[int] = 33
    session: UInt
    segments: bytes
    offsets: bytes


class Surrender(Message, frozen=True):
    """Node to node, one way: my shard needs these extents of yours no longer."""

    CODE: ClassVar[int] = 34
    segments: bytes
    offsets: bytes


class Reclaim(Message, frozen=True):
    """Node to node: please evict about `nbytes` of your blocks that lie in my segments."""

    CODE: ClassVar[int] = 35
    nbytes: UInt


class Values(Message, frozen=True):
    """Node to node: values of a shard lie in extents granted to this connection; they are the receiver's from now on,
    and the sender writes them no more. Answer: Statuses, 0 = taken, 1 = that extent was not held.
    """

    CODE: ClassVar[int] = 50
    shard: UInt
    keys: bytes
    sums: bytes
    lengths: bytes
    offsets: bytes


class HaveValues(Message, frozen=True):
    """Node to node: which of these values of a shard have you? Answer: Statuses, 0 = has it, 1 = lacks it."""

    CODE: ClassVar[int] = 51
    shard: UInt
    keys: bytes
    sums: bytes
    lengths: bytes


class Replicate(Message, frozen=True):
    """Node to node, one way: one replica's word to another of `shard` (`ucxkv.replication.messages`), for that
    incarnation of the receiver alone. gone: 24 bytes (key, sum u64) for each value that it names and the sender has no
    longer; all others were given before.
    """

    CODE: ClassVar[int] = 52
    shard: UInt
    incarnation: UInt
    payload: bytes
    gone: bytes = b""


class Lacks(Message, frozen=True):
    """Node to node, one way: values that your last Replicate of `shard` names did not come; give them again."""

    CODE: ClassVar[int] = 53
    shard: UInt
