"""One node's blocks: host memory, grants and the directory core, wired together. Synchronous; no socket, no await.

Every extent of the node's segment is at any moment in exactly one hand:

    free (slabs) -> granted (a session may write it) -> stored (the directory's block names it) -> free
                          |                                   `-> leaving (hidden; leases and grace run) -> free
                          |-> quarantined (its writer vanished and may still write) -> free
                          |-> arrived (copied here by another node, `ucxkv.node.arrived`) -> its claimer's, or free
                          |-> adopted (another node's shard has a block in it) -> free
                          `-> in hand (a copy is read into it from disk, `ucxkv.node.disk`) -> stored, or free

and what a process of before this start may still write is held over, until there is none (`ucxkv.node.state`).

A Put uses its extents up: they are stored or free afterwards, never granted again without a new grant. `check()`
asserts it.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ucxkv import errors
from ucxkv.directory import PutStatus, SlotReader, SlotTable, events
from ucxkv.directory.cold import DISK_REGION, EXACT
from ucxkv.directory.invariants import held_extents
from ucxkv.node.adoption import Adoption
from ucxkv.node.disk.numbers import NO_DISK
from ucxkv.node.policy import NodePolicy
from ucxkv.node.regions import RegionTable
from ucxkv.node.room import Room
from ucxkv.node.serving import ServingLease
from ucxkv.node.space import OWN_SEGMENT, Place, Space, slots_segment, u64, u64s
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.segments import HostSegment
from ucxkv.tokens import NOTHING_SEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucxkv.node.config import NodeConfig
    from ucxkv.node.disk.tier import DiskTier
    from ucxkv.node.state import NodeMemory
    from ucxkv.tokens import Token

__all__ = ["HostStore"]

R = TypeVar("R")


class HostStore:
    """Memory, grants and directory of one node. node_id, epoch: this incarnation's.

    memory: when it outlives the process; closed with the store.
    """

    def __init__(
        self,
        config: NodeConfig,
        node_id: int,
        epoch: int,
        on_due: Callable[[int], None] = lambda _: None,
        memory: NodeMemory | None = None,
    ) -> None:
        self._on_due = on_due
        self._config = config
        self.epoch = epoch
        self._memory = memory
        self._held_over: list[int] = []
        self._held_over_bytes = 0
        self.on_left: Callable[[bytes, int], None] = lambda *_: None
        """Told the keys of durable blocks that are hidden because their bytes are bad, children first, and the log."""
        self.log_of: Callable[[bytes], int] = lambda _: 0
        """The log of a visible block's key."""
        if memory is None:
            self.segment = HostSegment.create(config.host_bytes, config.name, huge_pages=config.huge_pages)
        else:
            self.segment = memory.segment
        try:
            capacity = config.slots()
            self.table_segment = slots_segment(capacity, config.name)
        except BaseException:
            self.segment.close()
            raise
        self.table_bytes = self.table_segment.size_bytes
        self.table = SlotTable(self.table_segment.view, capacity, epoch=epoch, seed=secrets.randbits(64))
        self.room = Room(self, on_due)
        self.space = Space(config, self.segment.size_bytes, self.room, None if memory is None else memory.ledger)
        self.slabs, self.grants = self.space.slabs, self.space.grants
        self.policy = NodePolicy(config)
        self.directory = self.policy.directory(self.table, config)
        self.disk: DiskTier | None = None
        """The tier behind memory, while it is open."""
        self.serving = ServingLease(self.table, self.directory.reader)
        self._regions = RegionTable(node_id, epoch, self.segment.size_bytes)
        self.adoption = Adoption(self.space, self._regions)
        self._readonly_table_fd = self.table_segment.readonly_fd()
        self.value_bytes_max = self.space.value_bytes_max
        self.directory.reader.map_region(OWN_SEGMENT, self.segment.address, self.segment.size_bytes)
        self.held_elsewhere: Callable[[], Iterable[int]] = tuple
        """Offsets of own extents that are in other hands than those of this module: the shards'. For `check`."""
        self.has_shards = False
        """Its durable blocks are in the logs of shards, and answers say where; the cache class is in none."""
        self.counts = {
            "puts": 0,
            "evicted": 0,
            "evicted_bytes": 0,
            "disk_reclaimed": 0,
            "damaged": 0,
            "grants": 0,
            "refused_without_lease": 0,
        }

    # ---- making room, and grants

    def room_for(self, nbytes: int, now_ns: int) -> int:
        """An extent for a value that comes back from disk, the caller's; -1: none now, but soon."""
        offsets = self.slabs.allocate(max(1, nbytes), 1)
        if not offsets:
            needed = self.slabs.class_bytes(max(1, nbytes))
            if not self.room.leaving_bytes() and self.slabs.free_bytes >= needed:
                needed += self.slabs.free_bytes  # what is free lies in pieces too small for this class
            self.room.evict(max(needed, self.space.free_target), now_ns)
            offsets = self.slabs.allocate(max(1, nbytes), 1)
        return offsets[0] if offsets else -1

    @property
    def has_regions(self) -> bool:
        """Whether blocks may lie in other nodes' memory."""
        return bool(self._regions.others)

    def grant(self, session: int, length: int, count: int, now_ns: int) -> tuple[m.Granted, int]:
        """See Space."""
        answer, short = self.space.grant(session, length, count, now_ns)
        self.counts["grants"] += len(answer.offsets) // 8
        return answer, short

    def close_session(self, session: int, *, may_still_write: bool, now_ns: int) -> int:
        """A session ended; see Space. Its leases end by their time."""
        quarantined = self.space.close_session(session, may_still_write=may_still_write)
        self.handle(events.OwnerLost(session), now_ns)
        return quarantined

    # ---- puts

    def put(self, session: int, request: m.Put, now_ns: int) -> m.PutDone:
        """Commit a batch; see messages.Put."""
        offsets = u64s(request.offsets)
        self.space.take(session, request.regions, offsets, request.lengths)
        if self.disk is not None:
            self.room.make_slots(len(offsets), now_ns, request.parents)
            self.disk.poke()
        columns = (request.keys, request.parents, request.regions, request.offsets, request.lengths, request.sums)
        reply = self.handle(events.Put(*columns, flag=EXACT if request.exact else 0), now_ns)
        status = reply.status.tobytes()
        self.counts["puts"] += len(status)
        if any(status):  # STORED is 0
            self.slabs.free([offset for offset, st in zip(offsets, status, strict=True) if st])
        return self.put_done(session, request, status, reply.index, reply.retry_after_ns, now_ns)

    def put_done(
        self,
        session: int,
        request: m.Put,
        status: bytes,
        index: int,
        retry_after_ns: int,
        now_ns: int,
        token: Token = NOTHING_SEEN,
    ) -> m.PutDone:
        """The answer to a put, with the new extents that it asked for. index: without shards; token: with them."""
        capacity, offsets = 0, list[int]()
        if request.refill_length:
            count = request.refill_count or len(request.offsets) // 8
            capacity, offsets = self.space.refill(session, request.refill_length, count, now_ns)
        shard, epoch, index = self._entry(index, token)
        return m.PutDone(
            status=status,
            shard=shard,
            epoch=epoch,
            index=index,
            refill_capacity=capacity,
            refill_regions=bytes(2 * len(offsets)),
            refill_offsets=u64(offsets),
            retry_after_ms=-(-retry_after_ns // 1_000_000),
            token=token.to_bytes() if token else b"",
        )

    def _entry(self, index: int, token: Token = NOTHING_SEEN) -> tuple[int, int, int]:
        """What made a put so, as PutDone says it."""
        if not self.has_shards:
            return 0, self.epoch, index
        if len(token.points) != 1:
            return 0, 0, 0
        (point,) = token.points
        return point.shard, point.epoch, point.index

    def put_part(self, session: int, request: m.PutPart, owner: m.MemberInfo | None, now_ns: int) -> m.PutDone:
        """Seal parts. owner: the node that lent and has handed over the extents; None: this one, they are still
        granted.
        """
        offsets = u64s(request.offsets)
        if owner is None:
            self.space.take(session, request.segments, offsets, request.lengths)
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
        if self.disk is not None:
            self.room.make_slots(len(offsets) * request.parts, now_ns, request.parents)
        try:
            reply = self.handle(event, now_ns)
        except ValueError as exc:
            self.adoption.free(zip(np.frombuffer(regions, np.uint16).tolist(), offsets, strict=True))
            raise errors.UsageError(str(exc)) from exc
        status = reply.status.tobytes()
        self.counts["puts"] += len(status)
        in_use = (PutStatus.STORED, PutStatus.SEALED)
        places = zip(np.frombuffer(regions, np.uint16).tolist(), offsets, status, strict=True)
        self.adoption.free((region, offset) for region, offset, st in places if st not in in_use)
        return m.PutDone(status, *self._entry(reply.index), retry_after_ms=-(-reply.retry_after_ns // 1_000_000))

    # ---- what else clients ask

    def touch(self, keys: bytes, now_ns: int) -> None:
        """Blocks that were read, in reading order: their tails count first."""
        rows = np.frombuffer(keys, np.uint8).reshape(-1, 16)[::-1]
        self.handle(events.Touch(rows.tobytes()), now_ns)

    def lease(self, session: int, request: m.LeaseKeys, now_ns: int) -> m.Leased:
        """Hold blocks in place."""
        ttl_ms = min(request.ttl_ms, self._config.lease_ms_max)
        reply = self.handle(events.Lease(request.keys, ttl_ms * 1_000_000, session), now_ns)
        return m.Leased(lease=reply.lease, ttl_ms=ttl_ms, status=reply.status.tobytes())

    def renew(self, session: int, request: m.Renew, now_ns: int) -> m.Done:
        """Start a lease's time anew; only its holder can."""
        if self.directory.leases.owner_of(request.lease) != session:
            return m.Done(ok=False)
        ttl_ns = min(request.ttl_ms, self._config.lease_ms_max) * 1_000_000
        return m.Done(ok=self.handle(events.Renew(request.lease, ttl_ns), now_ns).ok)

    def release(self, session: int, lease: int, now_ns: int) -> None:
        """End a lease; only its holder can."""
        if self.directory.leases.owner_of(lease) == session:
            self.handle(events.Release(lease), now_ns)

    def delete(self, keys: bytes, now_ns: int) -> m.Statuses:
        """Remove blocks, never a parent before its children."""
        return m.Statuses(status=self.handle(events.Delete(keys), now_ns).status.tobytes())

    def damaged(self, keys: bytes, now_ns: int) -> None:
        """A reader found bytes that do not match their sums: what is really bad goes, with everything below it."""
        bad = []
        for i in range(0, len(keys), 16):
            found = self.directory.reader.view(keys[i : i + 16])
            if found.address and tier_copy.engine.sum_at(found.address, found.length) != found.sum:
                bad.append(keys[i : i + 16])
        logs: dict[int, list[bytes]] = {}
        for key in bad:
            logs.setdefault(self.log_of(key), []).append(key)
        for log, some in logs.items():
            gone = self.handle(events.Drop(b"".join(some)), now_ns)
            self.counts["damaged"] += gone.blocks
            if gone.left:
                self.on_left(bytes(gone.left), log)

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

    def reclaim(self, node_id: int, nbytes: int, now_ns: int) -> int:
        """Evict some blocks with parts in another node's memory; bytes on their way to be free there, 0: no more."""
        regions = self._regions.of_node(node_id)
        return self.room.reclaim(set(regions), nbytes, now_ns) if regions else 0

    def node_lost(self, member: m.MemberInfo, now_ns: int) -> None:
        """A neighbour is gone: blocks with parts there are lost, and what its shard had here is free."""
        regions = self._regions.of_node(member.node_id)
        if regions:
            self.handle(events.Lost(set(regions)), now_ns)
        self.adoption.home_lost(member.name)

    # ---- what outlives the process

    def hold_over(self, memory: NodeMemory) -> int:
        """Keep off what a process of before this start may still write; returns those bytes."""
        self._held_over = self.slabs.hold(memory.held_units)
        self._held_over_bytes = sum(map(self.slabs.bytes_at, self._held_over))
        return self._held_over_bytes

    def _release_held(self) -> None:
        """What was held over is free when no process of before is left."""
        memory = self._memory
        if memory is not None and self._held_over and not memory.is_mapped_by_older():
            memory.release_held()
            self.slabs.free(self._held_over)
            self._held_over, self._held_over_bytes = [], 0

    # ---- time, effects, reports

    def next_ns(self) -> int | None:
        """When `tick` has something to do next (0: now); None: nothing waits."""
        return 0 if self.adoption.has_news or self.room.owed else self.directory.next_ns()

    def tick(self, now_ns: int) -> dict[int, m.Surrender]:
        """Let time pass: leases end, late writers are dropped, memory comes back. Returns what other nodes are to
        be told.
        """
        due = self.directory.next_ns()
        if due is not None and due <= now_ns:
            self.handle(events.Tick(), now_ns)
        self._release_held()
        self.space.arrived.expire(now_ns)
        if self.space.is_low:
            self.room.evict(self.space.free_target, now_ns)
        else:
            self.room.go_on(now_ns)
        return self.adoption.take_surrendered()

    def handle(self, event: events.Event[R], now_ns: int) -> R:
        """Let the directory carry out one event, and its effects."""
        outcome = self.directory.handle(event, now_ns)
        for effect in outcome.effects:
            extents = effect.extents
            if self.directory.cold.is_on:
                copies = [offset for region, offset, _ in extents if region == DISK_REGION]
                extents = [extent for extent in extents if extent[0] != DISK_REGION] if copies else extents
                if self.disk is not None:
                    for handle in copies:
                        self.disk.freed(handle)
            self.adoption.free((region, offset) for region, offset, _ in extents)
        due_ns = self.next_ns()
        if due_ns is not None:
            self._on_due(due_ns)
        return outcome.reply

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
        return (self._readonly_table_fd, self.segment.lent_fd)

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
            **self.space.numbers(),
            "adopted_bytes": self.adoption.bytes_count,
            "held_over_bytes": self._held_over_bytes,
            "durable_blocks": stats.durable_blocks,
            "durable_bytes": stats.durable_bytes,
            "staged": stats.staged,
            "index_bytes": self.table_bytes + self.directory.side_bytes,
            **self.policy.numbers(self.directory),
            **(self.disk.numbers() if self.disk is not None else NO_DISK),
        }

    def facts(self) -> dict[str, str]:
        """What kind of memory this is."""
        pages = {"pages": self.segment.page_kind, "table_pages": self.table_segment.page_kind}
        return pages | self.policy.facts() | (self.disk.facts() if self.disk is not None else {})

    def place_of(self, key: bytes) -> Place | None:
        """Where the value of a block lies, when it is in this node's memory; asked of the table itself, so whether the
        node may answer readers at this moment plays no part.
        """
        directory = self.directory
        slot = int(directory.table.find(key)[0])
        single = directory.words.single(slot) if slot >= 0 else None
        if single is None or single[0] != OWN_SEGMENT:
            return None
        return Place(single[1], single[2], directory.words.tail(slot)[2])

    def check(self) -> None:
        """Assert that every extent is in exactly one hand; slow, for tests."""
        self.slabs.check()
        self.grants.check()
        self.directory.check()
        self.space.arrived.check()
        held = sum(
            self.slabs.bytes_at(offset) for region, offset, _ in held_extents(self.directory) if region == OWN_SEGMENT
        )
        lent = self.grants.lent_bytes + self.grants.quarantined_bytes
        held += self._held_over_bytes + self.adoption.bytes_count + self.space.arrived.bytes_count
        held += sum(self.slabs.bytes_at(offset) for offset in self.held_elsewhere())
        if self.disk is not None:
            held += sum(self.slabs.bytes_at(offset) for offset in self.disk.promoter.in_hand)
        assert self.slabs.used_bytes == held + lent

    def keep_books(self) -> None:
        """The node ends: who may write may go on doing so when this process is gone, so the ledger stays as it is."""
        if self._memory is not None:
            self._memory.ledger.close()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._readonly_table_fd >= 0:
            os.close(self._readonly_table_fd)
            self._readonly_table_fd = -1
        self.table_segment.close()
        if self._memory is not None:
            self._memory.close()
        self.segment.close()
