"""One node's blocks: host memory, grants and the directory core, wired together. Synchronous; no socket, no await.

Every extent of the node's segment is at any moment in exactly one hand:

    free (slabs) -> granted (a session may write it) -> stored (the directory's block names it) -> free
                          |                                   `-> leaving (hidden; leases and grace run) -> free
                          |-> quarantined (its writer vanished and may still write) -> free
                          `-> adopted (another node's shard has a block in it) -> free

A Put uses its extents up: they are stored or free afterwards, never granted again without a new grant. `check()`
asserts it.
"""

from __future__ import annotations

import os
import secrets
from array import array
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ucxkv import errors
from ucxkv.directory import Directory, PutStatus, SlotReader, SlotTable, events, table_bytes
from ucxkv.directory.invariants import held_extents
from ucxkv.node.regions import RegionTable
from ucxkv.node.serving import ServingLease
from ucxkv.policy import LruPolicy
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.base import Extent, ForeignExtent
from ucxkv.tiers.grants import GrantTable
from ucxkv.tiers.segments import HostSegment
from ucxkv.tiers.slabs import UNIT_BYTES, SlabAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucxkv.node.config import NodeConfig

__all__ = ["HostStore"]

OWN_SEGMENT = 0
R = TypeVar("R")
_GRANT_KEYS_MAX = 65_536
_EVICT_ROUND_BYTES = 256 << 20


class HostStore:
    """Memory, grants and directory of one node. node_id, epoch: this incarnation's."""

    def __init__(
        self, config: NodeConfig, node_id: int, epoch: int, on_due: Callable[[int], None] = lambda _: None
    ) -> None:
        self._on_due = on_due
        self._config = config
        self._name = config.name
        self.epoch = epoch
        self.segment = HostSegment.create(config.host_bytes, config.name, huge_pages=config.huge_pages)
        try:
            capacity = config.slots()
            self.table_segment = HostSegment.create(
                _page(table_bytes(capacity)), f"{config.name}-slots", huge_pages="auto"
            )
        except BaseException:
            self.segment.close()
            raise
        self.table_bytes = self.table_segment.size_bytes
        self.table = SlotTable(self.table_segment.view, capacity, epoch=epoch, seed=secrets.randbits(64))
        self.slabs = SlabAllocator(self.segment.size_bytes)
        self.grants = GrantTable(limit_bytes=self.slabs.capacity_bytes)
        self._grant_share_bytes = int(config.host_bytes * config.grant_share_max)
        self.directory = Directory(self.table, policy=LruPolicy, grace_ns=config.grace_ms * 1_000_000)
        self.serving = ServingLease(self.table, self.directory.reader)
        self._regions = RegionTable(node_id, epoch, self.segment.size_bytes)
        self._adopted: dict[str, dict[int, int]] = {}
        self._surrendered: dict[int, list[Extent]] = {}
        self._readonly_table_fd = self.table_segment.readonly_fd()
        self.value_bytes_max = min(self._value_bytes_max(), (1 << 32) - 1)
        self.directory.reader.map_region(OWN_SEGMENT, self.segment.address, self.segment.size_bytes)
        self.counts = {
            "puts": 0,
            "evicted": 0,
            "evicted_bytes": 0,
            "damaged": 0,
            "grants": 0,
            "refused_without_lease": 0,
        }

    # ---- grants

    def grant(self, session: int, length: int, count: int, now_ns: int) -> tuple[m.Granted, int]:
        """Lend extents for values of `length` bytes; second: bytes that could not be had (evicting goes on).

        Raises ValueTooLarge; an answer with fewer extents than asked says when to ask again.
        """
        capacity = self._class_bytes(length)
        count = min(count, _GRANT_KEYS_MAX, self._room(session, capacity))
        offsets = self._allocate(length, capacity, count, now_ns)
        self.grants.grant_run(session, OWN_SEGMENT, offsets, capacity)
        self.counts["grants"] += len(offsets)
        short = (count - len(offsets)) * capacity
        retry_ms = max(1, self._config.grace_ms) if len(offsets) < max(1, count) else 0
        return m.Granted(capacity, bytes(2 * len(offsets)), _u64(offsets), retry_after_ms=retry_ms), short

    def _value_bytes_max(self) -> int:
        """The largest value that stays: one that left less free than the watermark would be evicted at once."""
        return max(UNIT_BYTES, (self.slabs.capacity_bytes - self._free_target()) // UNIT_BYTES * UNIT_BYTES)

    def _room(self, session: int, capacity: int) -> int:
        """How many extents of `capacity` bytes a session may be lent now: up to its share, or one that is larger."""
        room = self.grants.room_bytes(session)
        held = self.grants.limit_bytes - room
        allowed = max(0, self._grant_share_bytes - held) // capacity
        return allowed if allowed or held else min(1, room // capacity)

    def _class_bytes(self, length: int) -> int:
        if length > self.value_bytes_max:
            raise errors.ValueTooLarge(
                f"a value of {length} bytes; node {self._name} takes at most {self.value_bytes_max}: split "
                "it, or give the node more --host-bytes",
                size_bytes=length,
                limit_bytes=self.value_bytes_max,
            )
        return self.slabs.class_bytes(max(1, length))

    def _allocate(self, length: int, capacity: int, count: int, now_ns: int) -> list[int]:
        offsets = self.slabs.allocate(max(1, length), count) if count else []
        if len(offsets) < count:
            short = (count - len(offsets)) * capacity
            if not self.directory.leaving.bytes_count and self.slabs.free_bytes >= short:
                short += self.slabs.free_bytes  # what is free lies in pieces too small for this class
            self._evict(max(short, self._free_target()), now_ns)
            if self.slabs.free_bytes:  # without a grace time the memory is back already
                offsets += self.slabs.allocate(max(1, length), count - len(offsets))
        elif self._is_low():
            self._evict(self._free_target(), now_ns)
        return offsets

    def _is_low(self) -> bool:
        return self.slabs.free_bytes < self._config.free_low * self.slabs.capacity_bytes

    def _free_target(self) -> int:
        return int(self._config.free_high * self.slabs.capacity_bytes)

    def _evict(self, nbytes: int, now_ns: int) -> int:
        """Hide leaves until `nbytes` are free or on their way; their memory comes back after the grace. Returns
        bytes hidden.
        """
        on_their_way = self.directory.leaving.bytes_count
        needed = min(nbytes - self.slabs.free_bytes - on_their_way, _EVICT_ROUND_BYTES)
        if needed <= 0:
            return 0
        regions = None if not self._regions.others else {OWN_SEGMENT}
        gone = self._handle(events.Evict(needed, regions=regions), now_ns)
        if regions is not None and not gone.blocks:  # the old end is full of blocks that lie elsewhere
            gone = self._handle(events.Evict(needed), now_ns)
        self.counts["evicted"] += gone.blocks
        self.counts["evicted_bytes"] += gone.bytes
        return gone.bytes

    def take_back(self, session: int, offsets: Iterable[int]) -> None:
        """Extents a client does not use; what it no longer holds is ignored."""
        mine = [offset for offset in dict.fromkeys(offsets) if self.grants.holder_of(OWN_SEGMENT, offset) == session]
        self.grants.take_run(session, OWN_SEGMENT, mine, [0] * len(mine))
        self.slabs.free(mine)

    def close_session(self, session: int, *, may_still_write: bool, now_ns: int) -> int:
        """A session ended. Its grants are free, or quarantined while its process may still write; returns the
        latter's bytes.
        """
        closed = self.grants.close(session, may_still_write=may_still_write)
        self.slabs.free([extent.offset for extent in closed.freed])
        self._handle(events.OwnerLost(session), now_ns)
        return sum(extent.length for extent in closed.quarantined)

    def writer_gone(self, session: int) -> None:
        """The process behind a quarantined session has ended."""
        self.slabs.free([extent.offset for extent in self.grants.writer_gone(session)])

    # ---- puts

    def put(self, session: int, request: m.Put, now_ns: int) -> m.PutDone:
        """Commit a batch; see messages.Put."""
        offsets = _u64s(request.offsets)
        self._take(session, request.regions, offsets, request.lengths)
        reply = self._handle(
            events.Put(request.keys, request.parents, request.regions, request.offsets, request.lengths, request.sums),
            now_ns,
        )
        status = reply.status.tobytes()
        self.counts["puts"] += len(status)
        if any(status):  # STORED is 0
            self.slabs.free([offset for offset, st in zip(offsets, status, strict=True) if st])
        refill: tuple[int, list[int]] = (0, [])
        if request.refill_length:
            count = min(request.refill_count or len(offsets), _GRANT_KEYS_MAX)
            refill = self._refill(session, request.refill_length, count, now_ns)
        return m.PutDone(
            status=status,
            shard=0,
            epoch=self.epoch,
            index=reply.index,
            refill_capacity=refill[0],
            refill_regions=bytes(2 * len(refill[1])),
            refill_offsets=_u64(refill[1]),
            retry_after_ms=-(-reply.retry_after_ns // 1_000_000),
        )

    def _refill(self, session: int, length: int, count: int, now_ns: int) -> tuple[int, list[int]]:
        capacity = self._class_bytes(length)
        count = min(count, self._room(session, capacity)) if capacity <= self._grant_share_bytes else 0
        offsets = self._allocate(length, capacity, count, now_ns)
        self.grants.grant_run(session, OWN_SEGMENT, offsets, capacity)
        return capacity, offsets

    def _take(self, session: int, regions: bytes, offsets: list[int], lengths: bytes) -> None:
        """Take extents out of a session's grants, all or none. Raises StaleError for one it does not hold, or a
        value too long.
        """
        if any(regions):
            raise errors.StaleError("a put named a region that is not this node's")
        try:
            self.grants.take_run(session, OWN_SEGMENT, offsets, memoryview(lengths).cast("I").tolist())
        except ForeignExtent as exc:
            raise errors.StaleError(f"a put named an extent that this connection does not hold: {exc}") from exc

    def put_part(self, session: int, request: m.PutPart, owner: m.MemberInfo | None, now_ns: int) -> m.PutDone:
        """Seal parts. owner: the node that lent and has handed over the extents; None: this one, they are still
        granted.
        """
        offsets = _u64s(request.offsets)
        if owner is None:
            self._take(session, request.segments, offsets, request.lengths)
            regions = request.segments
        else:
            segments = np.frombuffer(request.segments, np.uint16)
            regions = np.array([self._regions.number(owner, s) for s in segments.tolist()], np.uint16).tobytes()
        deadline_ns = now_ns + min(request.deadline_ms, self._config.put_deadline_ms) * 1_000_000
        event = events.PutPart(
            keys=request.keys,
            parents=request.parents,
            part=request.part,
            parts=request.parts,
            put_id=request.put_id,
            regions=regions,
            offsets=request.offsets,
            lengths=request.lengths,
            sums=request.sums,
            deadline_ns=deadline_ns,
        )
        try:
            reply = self._handle(event, now_ns)
        except ValueError as exc:
            self._free(zip(np.frombuffer(regions, np.uint16).tolist(), offsets, strict=True))
            raise errors.UsageError(str(exc)) from exc
        status = reply.status.tobytes()
        self.counts["puts"] += len(status)
        in_use = (PutStatus.STORED, PutStatus.SEALED)
        places = zip(np.frombuffer(regions, np.uint16).tolist(), offsets, status, strict=True)
        self._free((region, offset) for region, offset, st in places if st not in in_use)
        return m.PutDone(status, 0, self.epoch, reply.index, retry_after_ms=-(-reply.retry_after_ns // 1_000_000))

    # ---- what else clients ask

    def touch(self, keys: bytes, now_ns: int) -> None:
        """Blocks that were read, in reading order: their tails count first."""
        rows = np.frombuffer(keys, np.uint8).reshape(-1, 16)[::-1]
        self._handle(events.Touch(rows.tobytes()), now_ns)

    def lease(self, session: int, request: m.LeaseKeys, now_ns: int) -> m.Leased:
        """Hold blocks in place."""
        ttl_ms = min(request.ttl_ms, self._config.lease_ms_max)
        reply = self._handle(events.Lease(request.keys, ttl_ms * 1_000_000, session), now_ns)
        return m.Leased(lease=reply.lease, ttl_ms=ttl_ms, status=reply.status.tobytes())

    def renew(self, session: int, request: m.Renew, now_ns: int) -> m.Done:
        """Start a lease's time anew; only its holder can."""
        if self.directory.leases.owner_of(request.lease) != session:
            return m.Done(ok=False)
        ttl_ns = min(request.ttl_ms, self._config.lease_ms_max) * 1_000_000
        return m.Done(ok=self._handle(events.Renew(request.lease, ttl_ns), now_ns).ok)

    def release(self, session: int, lease: int, now_ns: int) -> None:
        """End a lease; only its holder can."""
        if self.directory.leases.owner_of(lease) == session:
            self._handle(events.Release(lease), now_ns)

    def delete(self, keys: bytes, now_ns: int) -> m.Statuses:
        """Remove blocks, never a parent before its children."""
        return m.Statuses(status=self._handle(events.Delete(keys), now_ns).status.tobytes())

    def damaged(self, keys: bytes, now_ns: int) -> None:
        """A reader found bytes that do not match their sums: what is really bad goes, with everything below it."""
        bad = []
        for i in range(0, len(keys), 16):
            found = self.directory.reader.view(keys[i : i + 16])
            if found.address and tier_copy.engine.sum_at(found.address, found.length) != found.sum:
                bad.append(keys[i : i + 16])
        if bad:
            gone = self._handle(events.Drop(b"".join(bad)), now_ns)
            self.counts["damaged"] += gone.blocks

    def list_keys(self, request: m.ListKeys) -> m.KeyPage:
        """A page of visible blocks."""
        cursor, records = self.directory.scan(request.cursor, min(request.limit, 10_000))
        return m.KeyPage(
            next_cursor=-1 if cursor >= self.table.capacity else cursor,
            keys=records["key"].tobytes(),
            lengths=records["length"].tobytes(),
            tiers=records["tier"].tobytes(),
            parts=records["parts"].tobytes(),
        )

    # ---- other nodes

    def region_of(self, owner: m.MemberInfo) -> int:
        """The region that another node's segment has in this shard. Raises Overloaded when there are no more."""
        return self._regions.number(owner, 0)

    def adopt(self, home: str, request: m.Adopt) -> m.Statuses:
        """Extents granted here now belong to a block of another node's shard: 0 = adopted, 1 = not held, a key each."""
        mine = self._adopted.setdefault(home, {})
        status = bytearray()
        for offset in _u64s(request.offsets):
            try:
                length = self.grants.take(request.session, Extent(OWN_SEGMENT, offset, 0))
            except ForeignExtent:
                status.append(1)
                continue
            mine[offset] = length
            status.append(0)
        if any(status):  # the home refuses the whole put then
            taken = [o for o, st in zip(_u64s(request.offsets), status, strict=True) if not st]
            for offset in taken:
                del mine[offset]
            self.slabs.free(taken)
        return m.Statuses(status=bytes(status))

    def surrendered(self, home: str, request: m.Surrender) -> None:
        """Another node's shard needs these extents no longer."""
        mine = self._adopted.get(home, {})
        self.slabs.free([o for o in _u64s(request.offsets) if mine.pop(o, None) is not None])

    def adopted_bytes(self, home: str) -> int:
        """Bytes of this node's memory that hold parts of another node's blocks."""
        return sum(self._adopted.get(home, {}).values())

    def reclaim(self, node_id: int, nbytes: int, now_ns: int) -> int:
        """Evict blocks with parts in another node's memory; returns bytes on their way to be free there."""
        regions = self._regions.of_node(node_id)
        return (
            self._handle(events.Evict(min(nbytes, _EVICT_ROUND_BYTES), regions=set(regions)), now_ns).bytes
            if regions
            else 0
        )

    def node_lost(self, member: m.MemberInfo, now_ns: int) -> None:
        """A neighbour is gone: blocks with parts there are lost, and what its shard had here is free."""
        regions = self._regions.of_node(member.node_id)
        if regions:
            self._handle(events.Lost(set(regions)), now_ns)
        self.slabs.free(list(self._adopted.pop(member.name, {})))

    def take_surrendered(self) -> dict[int, m.Surrender]:
        """What other nodes are to be told since the last call, by node id."""
        out, self._surrendered = self._surrendered, {}
        return {
            node_id: m.Surrender(
                segments=np.array([e.segment for e in extents], np.uint16).tobytes(),
                offsets=_u64([e.offset for e in extents]),
            )
            for node_id, extents in out.items()
        }

    # ---- time, effects, reports

    def next_ns(self) -> int | None:
        """When `tick` has something to do next (0: now); None: nothing waits."""
        return 0 if self._surrendered else self.directory.next_ns()

    def tick(self, now_ns: int) -> dict[int, m.Surrender]:
        """Let time pass: leases end, late writers are dropped, memory comes back. Returns what other nodes are to
        be told.
        """
        due = self.directory.next_ns()
        if due is not None and due <= now_ns:
            self._handle(events.Tick(), now_ns)
        if self._is_low():
            self._evict(self._free_target(), now_ns)
        return self.take_surrendered()

    def _handle(self, event: events.Event[R], now_ns: int) -> R:
        outcome = self.directory.handle(event, now_ns)
        for effect in outcome.effects:
            self._free((region, offset) for region, offset, _ in effect.extents)
        due_ns = self.next_ns()
        if due_ns is not None:
            self._on_due(due_ns)
        return outcome.reply

    def _free(self, places: Iterable[tuple[int, int]]) -> None:
        own: list[int] = []
        for region, offset in places:
            if region == OWN_SEGMENT:
                own.append(offset)
            else:
                node = self._regions.node_of(region)
                self._surrendered.setdefault(node, []).append(Extent(self._regions.segment_of(region), offset, 0))
        if own:
            self.slabs.free(own)

    def resolver(self) -> tuple[int, int]:
        """(function, context) addresses of a `kv_resolve_fn` over this shard. Raises SetupError without the C table."""
        reader = self.directory.reader
        if not isinstance(reader, SlotReader):
            raise errors.SetupError("the message path needs the native slot table", fix="install with a C compiler")
        return reader.resolver()

    def regions(self) -> list[m.SegmentInfo]:
        """The shard's region table."""
        return self._regions.infos()

    def memory_fds(self) -> tuple[int, ...]:
        """Descriptors for a process of this host: the slot table, read-only, then the segment."""
        return (self._readonly_table_fd, self.segment.fd)

    def numbers(self) -> dict[str, float]:
        """Levels and totals for the report and the metrics."""
        stats = self.directory.stats()
        return {
            **self.counts,
            "stored": stats.stored_total,
            "blocks": stats.blocks,
            "block_bytes": stats.bytes,
            "slots_used": stats.slots_used,
            "slots_capacity": stats.slots_capacity,
            "writing": stats.writing,
            "leases": stats.leases,
            "leased_blocks": stats.leased_blocks,
            "leaving_extents": stats.leaving_extents,
            "deleted": stats.deleted_total,
            "lost": stats.lost_total,
            "host_bytes": self.slabs.capacity_bytes,
            "used_bytes": self.slabs.used_bytes,
            "free_bytes": self.slabs.free_bytes,
            "granted_bytes": self.grants.lent_bytes,
            "quarantined_bytes": self.grants.quarantined_bytes,
            "adopted_bytes": sum(sum(mine.values()) for mine in self._adopted.values()),
            "index_bytes": self.table_bytes + sum(a.nbytes for a in self.directory.arrays.values()),
        }

    def facts(self) -> dict[str, str]:
        """What kind of memory this is."""
        return {"pages": self.segment.page_kind, "table_pages": self.table_segment.page_kind, "policy": "lru"}

    def check(self) -> None:
        """Assert that every extent is in exactly one hand; slow, for tests."""
        self.slabs.check()
        self.grants.check()
        self.directory.check()
        adopted = sum(sum(mine.values()) for mine in self._adopted.values())
        held = sum(
            self.slabs.bytes_at(offset) for region, offset, _ in held_extents(self.directory) if region == OWN_SEGMENT
        )
        assert self.slabs.used_bytes == held + self.grants.lent_bytes + self.grants.quarantined_bytes + adopted

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._readonly_table_fd >= 0:
            os.close(self._readonly_table_fd)
            self._readonly_table_fd = -1
        self.table_segment.close()
        self.segment.close()


def _u64(values: list[int]) -> bytes:
    return array("Q", values).tobytes()


def _u64s(raw: bytes) -> list[int]:
    return memoryview(raw).cast("Q").tolist()


def _page(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
