"""The node's own memory in its hands: free, lent to sessions ahead of their puts, waiting for a writer's end, or
copied here by another node and not yet claimed.

Extents leave for the directory with `take` and come back with `free`. What is short is evicted for, by the directory;
see `ucxkv.node.store` for the hands that an extent can be in.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ucxkv import errors
from ucxkv.directory import table_bytes
from ucxkv.node.arrived import Arrived
from ucxkv.protocol import messages as m
from ucxkv.tiers.base import ForeignExtent, SetupFailed
from ucxkv.tiers.grants import GrantTable
from ucxkv.tiers.segments import HostSegment
from ucxkv.tiers.slabs import UNIT_BYTES, SlabAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.node.config import NodeConfig
    from ucxkv.tiers.ledger import GrantLedger

__all__ = ["OWN_SEGMENT", "Evictor", "Place", "Space", "slots_segment", "u64", "u64s"]

OWN_SEGMENT = 0
_GRANT_KEYS_MAX = 65_536
_ARRIVED_SHARE_MAX = 0.25


def slots_segment(capacity: int, name: str) -> HostSegment:
    """Memory for a slot table of so many slots, populated. Raises SetupFailed that names what sets their number."""
    nbytes = -(-table_bytes(capacity) // 4096) * 4096
    try:
        return HostSegment.create(nbytes, f"{name}-slots", huge_pages="auto")
    except SetupFailed as exc:
        raise SetupFailed(
            f"slot table of {capacity:,} slots, beside the blocks' memory (host_bytes)",
            found=exc.found,
            needed=exc.needed,
            fix="lower disk_bytes (a slot for each 64 KiB of it) or host_bytes, or set slots_count to the most blocks "
            "that this node is to hold",
        ) from exc


class Place(NamedTuple):
    """Where a value lies in this node's memory, and what proves it."""

    offset: int
    length: int
    sum: int


class Evictor(Protocol):
    """Who makes room."""

    def evict(self, nbytes: int, now_ns: int) -> int:
        """Hide blocks until `nbytes` are free or on their way, in portions, the first now; bytes hidden now."""
        ...

    def evict_soon(self, nbytes: int) -> None:
        """The same, but nothing now."""
        ...

    def leaving_bytes(self) -> int:
        """Bytes on their way to be free, and soon."""
        ...


class Space:
    """See the module. size_bytes: of the segment; ledger: see `GrantTable`."""

    def __init__(
        self, config: NodeConfig, size_bytes: int, evictor: Evictor, ledger: GrantLedger | None = None
    ) -> None:
        self._config = config
        self._evictor = evictor
        self.slabs = SlabAllocator(size_bytes)
        self.grants = GrantTable(limit_bytes=self.slabs.capacity_bytes, ledger=ledger)
        self.arrived = Arrived(self.slabs, self.grants, int(config.host_bytes * _ARRIVED_SHARE_MAX))
        self._share_bytes = int(config.host_bytes * config.grant_share_max)
        largest = (self.slabs.capacity_bytes - self.free_target) // UNIT_BYTES * UNIT_BYTES
        self.value_bytes_max = min(max(UNIT_BYTES, largest), (1 << 32) - 1)
        """The largest value that stays: one that left less free than the watermark would be evicted at once."""

    # ---- lending

    def grant(self, session: int, length: int, count: int, now_ns: int) -> tuple[m.Granted, int]:
        """Lend extents for values of `length` bytes; second: bytes that could not be had (evicting goes on).

        Raises ValueTooLarge; an answer with fewer extents than asked says when to ask again.
        """
        capacity = self._class_bytes(length)
        count = min(count, _GRANT_KEYS_MAX, self._room(session, capacity))
        offsets = self._allocate(length, capacity, count, now_ns)
        self.grants.grant_run(session, OWN_SEGMENT, offsets, capacity)
        short = (count - len(offsets)) * capacity
        retry_ms = max(1, self._config.grace_ms) if len(offsets) < max(1, count) else 0
        return m.Granted(capacity, bytes(2 * len(offsets)), u64(offsets), retry_after_ms=retry_ms), short

    def refill(self, session: int, length: int, count: int, now_ns: int) -> tuple[int, list[int]]:
        """Lend what can be had of `count` extents beside a put's answer: (capacity, offsets)."""
        capacity = self._class_bytes(length)
        count = min(count, _GRANT_KEYS_MAX)
        count = min(count, self._room(session, capacity)) if capacity <= self._share_bytes else 0
        offsets = self._allocate(length, capacity, count, now_ns)
        self.grants.grant_run(session, OWN_SEGMENT, offsets, capacity)
        return capacity, offsets

    def _room(self, session: int, capacity: int) -> int:
        """How many extents of `capacity` bytes a session may be lent now: up to its share, or one that is larger."""
        room = self.grants.room_bytes(session)
        held = self.grants.limit_bytes - room
        allowed = max(0, self._share_bytes - held) // capacity
        return allowed if allowed or held else min(1, room // capacity)

    def _class_bytes(self, length: int) -> int:
        if length > self.value_bytes_max:
            raise errors.ValueTooLarge(
                f"a value of {length} bytes; node {self._config.name} takes at most {self.value_bytes_max}: split "
                "it, or give the node more --host-bytes",
                size_bytes=length,
                limit_bytes=self.value_bytes_max,
            )
        return self.slabs.class_bytes(max(1, length))

    def _allocate(self, length: int, capacity: int, count: int, now_ns: int) -> list[int]:
        offsets = self.slabs.allocate(max(1, length), count) if count else []
        if len(offsets) < count:
            short = (count - len(offsets)) * capacity
            if not self._evictor.leaving_bytes() and self.slabs.free_bytes >= short:
                short += self.slabs.free_bytes  # what is free lies in pieces too small for this class
            self._evictor.evict(max(short, self.free_target), now_ns)
            if self.slabs.free_bytes:  # without a grace time the memory is back already
                offsets += self.slabs.allocate(max(1, length), count - len(offsets))
        elif self.is_low:
            self._evictor.evict_soon(self.free_target)
        return offsets

    @property
    def is_low(self) -> bool:
        """Whether less is free than should be."""
        return self.slabs.free_bytes < self._config.free_low * self.slabs.capacity_bytes

    @property
    def free_target(self) -> int:
        """How much should be free, or on its way, after evicting."""
        return int(self._config.free_high * self.slabs.capacity_bytes)

    # ---- taking and giving back

    def take(self, session: int, regions: bytes, offsets: list[int], lengths: bytes) -> None:
        """Take extents out of a session's grants, all or none. Raises StaleError for one it does not hold, or a
        value too long.
        """
        if any(regions):
            raise errors.StaleError("a put named a region that is not this node's")
        try:
            self.grants.take_run(session, OWN_SEGMENT, offsets, memoryview(lengths).cast("I").tolist())
        except ForeignExtent as exc:
            raise errors.StaleError(f"a put named an extent that this connection does not hold: {exc}") from exc

    def take_back(self, session: int, offsets: Iterable[int]) -> None:
        """Extents a client does not use; what it no longer holds is ignored."""
        mine = [offset for offset in dict.fromkeys(offsets) if self.grants.holder_of(OWN_SEGMENT, offset) == session]
        self.grants.take_run(session, OWN_SEGMENT, mine, [0] * len(mine))
        self.slabs.free(mine)

    def close_session(self, session: int, *, may_still_write: bool) -> int:
        """A session ended. Its grants are free, or quarantined while its process may still write; returns the
        latter's bytes.
        """
        closed = self.grants.close(session, may_still_write=may_still_write)
        self.slabs.free([extent.offset for extent in closed.freed])
        return sum(extent.length for extent in closed.quarantined)

    def writer_gone(self, session: int) -> None:
        """The process behind a quarantined session has ended."""
        self.slabs.free([extent.offset for extent in self.grants.writer_gone(session)])

    def numbers(self) -> dict[str, float]:
        """Levels for the report."""
        return {
            "host_bytes": self.slabs.capacity_bytes,
            "used_bytes": self.slabs.used_bytes,
            "free_bytes": self.slabs.free_bytes,
            "granted_bytes": self.grants.lent_bytes,
            "quarantined_bytes": self.grants.quarantined_bytes,
            "arrived_bytes": self.arrived.bytes_count,
        }


def u64(values: list[int]) -> bytes:
    """As they travel."""
    return array("Q", values).tobytes()


def u64s(raw: bytes) -> list[int]:
    """As they arrived."""
    return memoryview(raw).cast("Q").tolist()
