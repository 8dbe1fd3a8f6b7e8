"""Control messages of reads by a session's token at replicas; the rules are those of `messages`, which has these names
too.
"""

from __future__ import annotations

from typing import ClassVar

from ucxkv.protocol.base import Message, UInt

__all__ = ["FoundAt", "ReadAt"]


class ReadAt(Message, frozen=True):
    """Which of these blocks have you in shards that you do not lead, in a state that is not before `token`
    (`ucxkv.tokens`)? shard: of all the keys; -1: not known, look in all shards. Answer: FoundAt.

    bytes_max: above 0, bring the values along, so many bytes at most, without the first `skip` of the first key's.
    """

    CODE: ClassVar[int] = 54
    keys: bytes
    token: bytes
    shard: int = -1
    bytes_max: UInt = 0
    skip: UInt = 0


class FoundAt(Message, frozen=True):
    """A key each: status 0 = here, 1 = not here, or not in such a state; where in the node's own segment, its length
    and sum; shards: n x u16. The place stays put for a short while only: the sum proves what was read there.

    token: the states that were looked at, and for shards that the node leads how far it has come by now. values: of
    keys that are here, in their order, one after the other, as many bytes as were asked for.
    """

    CODE: ClassVar[int] = 55
    status: bytes
    offsets: bytes
    lengths: bytes
    sums: bytes
    shards: bytes
    token: bytes
    values: bytes = b""
