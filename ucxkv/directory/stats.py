"""The numbers of a directory: its bounds, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what is kept in Python objects: blocks being written, durable ones that are staged, leases, keys and
    time of one lease."""

    writing: int = 65_536
    staged: int = 65_536
    leases: int = 65_536
    lease_keys: int = 65_536
    lease_ttl_ns: int = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts at this moment, and totals since the start (`*_total`)."""

    blocks: int
    bytes: int
    slots_used: int
    slots_capacity: int
    leaves: int
    writing: int
    leases: int
    leased_blocks: int
    leaving_extents: int
    index: int
    stored_total: int
    evicted_total: int
    deleted_total: int
    lost_total: int
    withdrawn_total: int
    durable_blocks: int
    durable_bytes: int
    staged: int
