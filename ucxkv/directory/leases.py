"""Leases: time-bound promises that the values of some blocks stay where they are.

Invariants: `pins[generation]` is the number of live leases on that generation, and is never 0. A lease ends by Release
or by its time, never before because its owner vanished: the owner's process may still be reading through its mapping.
Bounded: leases, and keys a lease; the node's own (owner 0) have some places that no session can take. The table knows
no slot's fate; whoever ends a lease gives its pins back to the directory.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

_OWN_MAX = 1024
"""Leases of the node's own beyond `max_leases`: it writes blocks to disk under them, which no client may stop."""

Pinned: TypeAlias = list[tuple[int, int]]
"""(slot, generation) of each block that a lease holds."""


@dataclass(slots=True)
class _Lease:
    pinned: Pinned
    end_ns: int
    owner: int
    lost: bool = False


@dataclass(slots=True)
class LeaseTable:
    """See the module. max_leases and max_keys bound it; max_ttl_ns cuts every time asked for."""

    max_leases: int
    max_keys: int
    max_ttl_ns: int
    pins: dict[int, int] = field(default_factory=dict)
    _leases: dict[int, _Lease] = field(default_factory=dict)
    _owners: dict[int, set[int]] = field(default_factory=dict)
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _last: int = 0

    def __len__(self) -> int:
        return len(self._leases)

    def is_full(self, owner: int) -> bool:
        """Whether this owner can be granted no lease now."""
        return len(self._leases) >= self.max_leases + (0 if owner else _OWN_MAX)

    def grant(self, pinned: Pinned, ttl_ns: int, owner: int, now_ns: int) -> tuple[int, int]:
        """Open a lease on these blocks, each named once; (lease id, its end)."""
        assert pinned and not self.is_full(owner)
        self._last += 1
        lease = _Lease(pinned, now_ns + min(ttl_ns, self.max_ttl_ns), owner)
        self._leases[self._last] = lease
        self._owners.setdefault(owner, set()).add(self._last)
        heapq.heappush(self._ends, (lease.end_ns, self._last))
        for _, generation in pinned:
            self.pins[generation] = self.pins.get(generation, 0) + 1
        return self._last, lease.end_ns

    def owner_of(self, lease_id: int) -> int | None:
        """Who holds this lease; None when there is none."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.owner

    def renew(self, lease_id: int, ttl_ns: int, now_ns: int) -> bool:
        """Start the time anew, never shortening it; False when it is over or its owner lost."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.lost or lease.end_ns <= now_ns:
            return False
        lease.end_ns = max(lease.end_ns, now_ns + min(ttl_ns, self.max_ttl_ns))
        return True

    def release(self, lease_id: int) -> Pinned:
        """End a lease; what it pinned, nothing when there is no such lease. `pins` is already lower."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        owned = self._owners[lease.owner]
        owned.discard(lease_id)
        if not owned:
            del self._owners[lease.owner]
        for _, generation in lease.pinned:
            left = self.pins[generation] - 1
            if left:
                self.pins[generation] = left
            else:
                del self.pins[generation]
        if len(self._ends) > 2 * len(self._leases) + 64:  # released long before their ends
            self._ends = [(one.end_ns, other) for other, one in self._leases.items()]
            heapq.heapify(self._ends)
        return lease.pinned

    def owner_lost(self, owner: int) -> bool:
        """Let this owner's leases run out; False when it has none."""
        owned = self._owners.get(owner, ())
        for lease_id in owned:
            self._leases[lease_id].lost = True
        return bool(owned)

    def let_run_out(self, generations: Collection[int]) -> int:
        """No lease on one of these can be renewed any more: when the last of them ends, 0 when there is none."""
        end_ns = 0
        for lease in self._leases.values():
            if any(generation in generations for _, generation in lease.pinned):
                lease.lost = True
                end_ns = max(end_ns, lease.end_ns)
        return end_ns

    def expire(self, now_ns: int) -> Pinned:
        """End every lease whose time is over; what they pinned."""
        pinned: Pinned = []
        while self._ends and self._ends[0][0] <= now_ns:
            _, lease_id = heapq.heappop(self._ends)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue  # released
            if lease.end_ns > now_ns:  # renewed meanwhile
                heapq.heappush(self._ends, (lease.end_ns, lease_id))
            else:
                pinned += self.release(lease_id)
        return pinned

    def next_ns(self) -> int | None:
        """When the next lease may end."""
        return self._ends[0][0] if self._ends else None

    def check(self) -> None:
        """Assert the invariants."""
        counted: dict[int, int] = {}
        for lease in self._leases.values():
            for _, generation in lease.pinned:
                counted[generation] = counted.get(generation, 0) + 1
        assert counted == self.pins, "pins differ from the leases"
        assert {i for owned in self._owners.values() for i in owned} == set(self._leases), (
            "owners differ from the leases"
        )
        assert len(self._leases) <= self.max_leases + _OWN_MAX
        assert set(self._leases) <= {lease_id for _, lease_id in self._ends}, "a lease without an end"
