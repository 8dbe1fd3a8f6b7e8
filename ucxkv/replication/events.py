"""What happens to a replica, and what it wants done: plain frozen data.

Effects are to be carried out in their order; sending is best effort, all else is answered by an event.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from ucxkv.replication.config import Member, Role, ShardConfig
from ucxkv.replication.log import Entry
from ucxkv.replication.messages import ReplicaMessage

# ---- events


@dataclass(frozen=True, slots=True)
class Propose:
    """Write these records, in this order and together. Answered by Apply with the tag, Refused, or Unknown."""

    tag: int
    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from another replica."""

    message: ReplicaMessage


@dataclass(frozen=True, slots=True)
class ConfigSeen:
    """The shard's configuration. revision: the value's; where there is none, the control plane's when it was asked."""

    config: ShardConfig | None
    revision: int


class Outcome(enum.Enum):
    """Of a WriteConfig."""

    WRITTEN = "written"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"
    """It may have been written, or may still be."""


@dataclass(frozen=True, slots=True)
class ConfigWritten:
    """What became of a WriteConfig. revision: the value's, when it was written."""

    outcome: Outcome
    revision: int = 0


@dataclass(frozen=True, slots=True)
class MembersSeen:
    """The members whose leases run, as the control plane had them at `revision` (counted as configurations' are)."""

    alive: frozenset[Member]
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """This member's lease runs until then by its own clock, counted from before the question and shortened by the
    drift bound. 0: it is lost.
    """

    until_ns: int


@dataclass(frozen=True, slots=True)
class Reincarnated:
    """The lease was lost and a new one taken: the process goes on under another incarnation."""

    me: Member


@dataclass(frozen=True, slots=True)
class Persisted:
    """The journal holds everything up to this Persist or Restore."""

    serial: int


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """The journal takes nothing more."""

    why: str


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """The answer to NeedSnapshot: the state after the entry (index, entry_epoch), which was the last one applied."""

    to: Member
    index: int
    entry_epoch: int
    chunks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """The nodes that are to hold this shard, best leader first."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let another in-sync member lead, this node is about to leave."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """That member answers and can't take what the log names (its memory is full): it is to leave the in-sync set, and
    may come back when it has caught up.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Propose
    | Received
    | ConfigSeen
    | ConfigWritten
    | MembersSeen
    | LeaseSeen
    | Reincarnated
    | Persisted
    | PersistFailed
    | SnapshotReady
    | Wish
    | HandOver
    | Unfit
    | Tick
)

# ---- effects


class Refusal(enum.Enum):
    """Why records were not taken; nothing of them was or will be written."""

    NOT_LEADER = "another member leads"
    NO_LEASE = "the lease is over, or this leader is not ready yet"
    OVERLOADED = "too many records wait"
    TOO_FEW = "too few members are in sync"


@dataclass(frozen=True, slots=True)
class Send:
    """Give this message to that member; it may get lost."""

    to: Member
    message: ReplicaMessage


@dataclass(frozen=True, slots=True)
class Persist:
    """Write to the journal whose logs it now proves, where these are others than before, then the entries; then say
    Persisted(serial). An entry whose index is not above the last one's replaces that one and all behind it.
    """

    serial: int
    claims: frozenset[Member]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """These entries are committed, in order; tags: of the proposals that end here, by index of their last entry."""

    entries: tuple[Entry, ...]
    tags: dict[int, int]


@dataclass(frozen=True, slots=True)
class Refused:
    """A proposal was not taken. leader: who leads, as far as is known."""

    tag: int
    why: Refusal
    leader: Member | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """What becomes of these proposals will not be known here: this replica leads no more."""

    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """Compare-and-set the shard's configuration (expected_revision 0: it must be absent), then say ConfigWritten."""

    expected_revision: int
    config: ShardConfig


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Read the shard's configuration, linearizably, then say ConfigSeen."""


@dataclass(frozen=True, slots=True)
class NeedSnapshot:
    """Take a snapshot of what was applied so far, for this member, then say SnapshotReady."""

    to: Member


@dataclass(frozen=True, slots=True)
class Restore:
    """Replace the state, and all of the journal, by this snapshot and these claims; then say Persisted(serial)."""

    serial: int
    claims: frozenset[Member]
    index: int
    entry_epoch: int
    chunks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """For logs, metrics, and for the shell to stop or start serving."""

    role: Role
    epoch: int
    why: str


Effect: TypeAlias = (
    Send | Persist | Apply | Refused | Unknown | WriteConfig | ReadConfig | NeedSnapshot | Restore | RoleChanged
)
