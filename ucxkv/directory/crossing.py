"""What the directories of two shards tell each other about a chain that goes from one into the other: plain data.

`Expect` (the child's shard) -> `Pin` (sent to the parent's shard) -> its reply, fed back as `Pinned` -> the child may
be put. `Unpin` follows when the child is gone. All of them may be lost, late or doubled: a token, which grows with each
Pin of one shard, says which of two is newer. See `elsewhere`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ucxkv.directory.events import Done, Event
from ucxkv.walk import Life

__all__ = [
    "AskPin",
    "Expect",
    "ExpectReply",
    "Local",
    "LocalReply",
    "Orphaned",
    "Pin",
    "PinReply",
    "PinStatus",
    "Pinned",
    "Reclaim",
    "Repin",
    "Send",
    "SendsReply",
    "Unpin",
]


class PinStatus(enum.IntEnum):
    """What became of a pin, or of what one is wanted for."""

    PINNED = 0
    ORDER = 1  # the parent is not visible there
    LIMIT = 2  # too many pins; not storing the child is what is left


@dataclass(frozen=True, slots=True)
class PinReply:
    """life: the parent's, when it is pinned."""

    status: PinStatus
    life: Life | None


@dataclass(frozen=True, slots=True)
class Pin(Event[PinReply]):
    """To the parent's shard: hold `parent` for its child, until Unpin with this token or a later one."""

    parent: bytes
    child: bytes
    token: int


@dataclass(frozen=True, slots=True)
class Unpin(Event[Done]):
    """To the parent's shard: the child under this token is gone, or never came. Not ok: a newer pin stands, or none."""

    parent: bytes
    child: bytes
    token: int


@dataclass(frozen=True, slots=True)
class AskPin(Event[Done]):
    """To the child's shard: is this pin still needed? Not ok: answer with an Unpin of this token."""

    parent: bytes
    child: bytes
    token: int


@dataclass(frozen=True, slots=True)
class Orphaned(Event[Done]):
    """To the child's shard: the parent was lost; a child under this token or an older one goes, and all below it."""

    parent: bytes
    child: bytes
    token: int


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: take `event` to shard `shard`."""

    shard: int
    event: Pin | Unpin | AskPin | Orphaned


@dataclass(frozen=True, slots=True)
class ExpectReply:
    """pin: to be sent when it isn't pinned yet; its reply comes back as Pinned. None: put it now, or LIMIT."""

    status: PinStatus
    pin: Send | None


@dataclass(frozen=True, slots=True)
class Expect(Event[ExpectReply]):
    """A child of `parent`, which lives in shard `shard`, is to be put here before `deadline_ns`."""

    child: bytes
    parent: bytes
    shard: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Pinned(Event[Done]):
    """The reply to this child's Pin. Not ok: it is no longer wanted, or the parent isn't there and so the child
    went."""

    child: bytes
    token: int
    reply: PinReply


@dataclass(frozen=True, slots=True)
class SendsReply:
    """What to send."""

    sends: list[Send]


@dataclass(frozen=True, slots=True)
class Repin(Event[SendsReply]):
    """Pin again all parents in `shard`: when it has a new leader, and now and then in case an Orphaned was lost."""

    shard: int


@dataclass(frozen=True, slots=True)
class Reclaim(Event[SendsReply]):
    """Ask about up to `limit` pins whether they are still needed, in turns: in case an Unpin was lost."""

    limit: int


@dataclass(frozen=True, slots=True)
class LocalReply:
    """life: None when the block isn't visible. local: those of its children that live here (a few of them may be gone
    meanwhile); no other will, while this life lasts, if `is_delegating`."""

    life: Life | None
    is_delegating: bool
    local: list[bytes]


@dataclass(frozen=True, slots=True)
class Local(Event[LocalReply]):
    """Which children of a block live with it; for clients that remember heads."""

    key: bytes
