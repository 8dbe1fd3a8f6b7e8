"""Who holds a shard: the one value that the control plane keeps of it, and the times that its replicas go by."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Member", "Role", "ShardConfig", "Timing"]

_MS = 1_000_000


class Member(NamedTuple):
    """One life of a node: a process that restarts, or whose lease was lost, comes back as another incarnation."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """A shard's place in the world. Changed by compare-and-set alone, by its leader or by who becomes it.

    epoch: grows with each new leader. insync: the members that hold every acknowledged record, the leader among them.
    keeps: whether records are taken. Where they are not there is nothing to lose, and a shard whose holders have ended
    is begun anew by whoever is wished to lead it.
    """

    epoch: int
    leader: Member
    insync: frozenset[Member]
    keeps: bool = True

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.leader not in self.insync:
            raise ValueError(f"not a shard's configuration: {self}")


class Role(enum.StrEnum):
    """What a replica is, as it knows."""

    OUT = "out"
    """Not in sync: it may be copied to, and neither serves nor takes over."""
    FOLLOWER = "follower"
    """In sync: it holds all that was acknowledged, and may take over."""
    LEADER = "leader"
    """It decides, while its lease runs."""
    FAILED = "failed"
    """Its journal failed, or the control plane went back in time: nothing more is acknowledged until a restart."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Bounds of one replica. Times in nanoseconds of its own monotonic clock."""

    heartbeat_ns: int = 50 * _MS
    """A leader says where it is at least so often."""
    resend_ns: int = 150 * _MS
    """What was not confirmed by then is sent again."""
    silence_ns: int = 500 * _MS
    """A member that confirmed nothing for so long leaves the in-sync set."""
    retry_ns: int = 200 * _MS
    """Between two questions to the control plane, or two requests to be let in."""
    batch_bytes: int = 1 << 20
    """Records in one message, or one part of a snapshot."""
    inflight_records: int = 4096
    """Sent to one member and not confirmed."""
    pending_records: int = 65_536
    """Proposed and not committed; more are refused."""
    window_records: int = 65_536
    """Committed records kept for members that lag; further back they are sent a snapshot."""
    insync_min: int = 1
    """Records are refused while fewer members are in sync: those that stay would be too few to lose one."""
