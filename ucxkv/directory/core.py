"""The directory core: which blocks are visible, and what has to be freed when they no longer are.

Synchronous and sans-IO: `handle(event, now_ns)` is the only way to change it; the reply and the effects come back.
Time is an argument, the slot table is memory handed in by the shell. Between two calls, always (`check()` asserts it):

  I1 prefix closed   a visible block is a root or its parent is visible. Blocks go deepest first, a parent comes first
                     (a whole block waits for a parent that is still being written), and each single store into the
                     slot table keeps it so for readers that look on meanwhile.
  I2 whole           a visible block has all its parts in the table, sealed with their sums, under one generation.
  I5 no torn read    an extent is named for freeing once only, after its block was hidden, every lease on it ended and
                     the grace passed. No extent belongs to two of: visible, being written, leaving.
  I6 one content     at most one generation of a key is visible; the first that was committed whole stays until it is
                     hidden.

Beside the table there are five u32 per slot: parent (slot number, NONE for a root), holds, prev, next, last_use (10
ms). `holds` counts what keeps a block from being evicted: visible children, children being written or staged, leases;
its top bit says that the block is durable, which does so too (see `durable`), the next that its value is on disk only
(see `cold`). The policy's leaves are exactly the
visible blocks whose `holds` is 0. Derived slots (parts >= 1) are neither parents, children nor leaves; their `parent`
is the slot of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ucxkv.directory import crossing as cx
from ucxkv.directory import events as ev
from ucxkv.directory import tiering as tr
from ucxkv.directory.cold import COLD, ColdBlocks
from ucxkv.directory.durable import DURABLE, DurableWriter
from ucxkv.directory.elsewhere import Elsewhere, ShardRole
from ucxkv.directory.evicting import evict
from ucxkv.directory.invariants import check
from ucxkv.directory.leases import LeaseTable
from ucxkv.directory.leaving import LeavingList
from ucxkv.directory.loss import drop, lose
from ucxkv.directory.offspring import Offspring
from ucxkv.directory.parts import PartWriter
from ucxkv.directory.ranking import DAMAGED, Ranking
from ucxkv.directory.records import SlotWords, derived_keys
from ucxkv.directory.recovery import durable_rows, restore
from ucxkv.directory.roots import RootFinder
from ucxkv.directory.slots import NONE, U8, U32, Buffer, Records, SlotTable, as_memory, count_keys
from ucxkv.directory.slots_twin import TwinTable
from ucxkv.directory.stats import Limits, Stats
from ucxkv.directory.withdrawing import withdraw
from ucxkv.policy.base import EvictionPolicy, LeafLinks
from ucxkv.policy.cost import Verdict
from ucxkv.policy.decisions import DecisionLog
from ucxkv.policy.lru import LruPolicy

R = TypeVar("R")
_TIME_UNIT_NS = 10_000_000
HOLDS = ~(DURABLE | COLD)
"""The bits of `holds` that count."""


class Directory:
    """See the module.

    table: a freshly made SlotTable (or its twin); the directory becomes its only writer and owns `table.links`.
    grace_ns: how long a hidden block's memory stays untouched for readers that found it before. has_disk: blocks may
    leave memory for a disk and stay visible (`cold`). decisions: where to write down what becomes of blocks.
    """

    def __init__(
        self,
        table: SlotTable | TwinTable,
        *,
        grace_ns: int,
        limits: Limits | None = None,
        policy: Callable[[LeafLinks], EvictionPolicy] = LruPolicy,
        role: ShardRole | None = None,
        has_disk: bool = False,
        decisions: DecisionLog | None = None,
    ) -> None:
        limits = limits or Limits()
        self.table = table
        self.reader = table.reader()
        self.words = SlotWords(table.words)
        n = table.capacity
        self.arrays: dict[str, U32] = {name: np.zeros(n, np.uint32) for name in ("parent", "holds", "prev", "last_use")}
        self.arrays["next"] = table.links
        views = {name: as_memory(array).cast("I") for name, array in self.arrays.items()}
        self.parent, self.holds, self.last_use = views["parent"], views["holds"], views["last_use"]
        links = LeafLinks(views["prev"], views["next"], views["last_use"])
        self.ranking = Ranking(self, policy(links), decisions)
        self.leases = LeaseTable(limits.leases, limits.lease_keys, limits.lease_ttl_ns)
        self.leaving = LeavingList(grace_ns)
        self.parts = PartWriter(self, limits.writing)
        self.durable = DurableWriter(self, limits.staged)
        self.elsewhere = Elsewhere(self, role)
        self.cold = ColdBlocks(self, is_on=has_disk)
        self.offspring = Offspring(self, is_on=has_disk)
        self.roots = RootFinder(self)
        self.generation = 0
        self.blocks = self.bytes = 0
        self._origin_ns: int | None = None
        self.totals = dict.fromkeys(("stored", "evicted", "deleted", "lost", "withdrawn"), 0)
        self._handlers: dict[type[Any], Callable[[Any, int], Any]] = {
            ev.Put: self._put,
            ev.PutPart: self.elsewhere.put_part,
            ev.StagePut: self.elsewhere.stage_put,
            ev.Settle: self._settle,
            ev.Abandon: self.durable.abandon,
            ev.Restore: self._restore,
            ev.Withdraw: partial(withdraw, self),
            ev.Touch: self._touch,
            ev.Lease: self._lease,
            ev.Renew: self._renew,
            ev.Release: self._release,
            ev.OwnerLost: self._owner_lost,
            ev.Delete: self._delete,
            ev.Evict: partial(evict, self),
            ev.Lost: self._lost,
            ev.Drop: self._drop,
            ev.Tick: self._tick,
            cx.Pin: self.elsewhere.pin,
            cx.Unpin: self.elsewhere.unpin,
            cx.AskPin: self.elsewhere.asked,
            cx.Orphaned: self.elsewhere.orphaned,
            cx.Expect: self.elsewhere.expect,
            cx.Pinned: self.elsewhere.answered,
            cx.Repin: self.elsewhere.repin,
            cx.Reclaim: self.elsewhere.reclaim,
            cx.Local: self.elsewhere.local,
            tr.Fresh: self.cold.take_fresh,
            tr.Copied: self.cold.copied,
            tr.Warm: self.cold.warm,
            tr.CopiesLost: self.cold.lost,
            tr.AdoptCold: self.cold.adopt,
            tr.Trim: self.cold.trim,
        }

    def handle(self, event: ev.Event[R], now_ns: int) -> ev.Outcome[R]:
        """Carry out one event at `now_ns` (monotonic, never going back). ValueError: an event that makes no sense."""
        if self._origin_ns is None:
            self._origin_ns = now_ns
        reply: R = self._handlers[type(event)](event, now_ns)
        due = self.leaving.next_ns()
        effects = [ev.FreeExtents(self.leaving.due(now_ns))] if due is not None and due <= now_ns else []
        if self.elsewhere.sends:
            return ev.Outcome(reply, effects, self.elsewhere.take_sends())
        return ev.Outcome(reply, effects)

    def lookup(self, keys: Buffer) -> tuple[Records, U8]:
        """Copies of the keys' slots and which were found; SLOT_DTYPE[n], u8[n]."""
        return self.reader.lookup(keys)

    def match(self, keys: Buffer) -> int:
        """How many keys from the first on are visible without a gap."""
        return self.reader.match(keys)

    def scan(self, cursor: int, limit: int) -> tuple[int, Records]:
        """A page of visible blocks: (next cursor, SLOT_DTYPE[m]); the end is `table.capacity`."""
        return self.reader.scan(cursor, limit)

    def next_ns(self) -> int | None:
        """When a Tick has something to do next; None: nothing waits."""
        times = (self.leases.next_ns(), self.leaving.next_ns(), self.parts.writing.next_ns(), self.ranking.next_ns())
        return min((at for at in times if at is not None), default=None)

    def stats(self) -> Stats:
        """Counts for operators."""
        return Stats(
            blocks=self.blocks,
            bytes=self.bytes,
            slots_used=self.table.used,
            slots_capacity=self.table.capacity,
            leaves=len(self.ranking),
            writing=len(self.parts.writing),
            leases=len(self.leases),
            leased_blocks=len(self.leases.pins),
            leaving_extents=self.leaving.extents_count,
            index=self.generation,
            durable_blocks=self.durable.blocks,
            durable_bytes=self.durable.bytes,
            staged=len(self.durable.staged),
            **{f"{name}_total": count for name, count in self.totals.items()},
        )

    @property
    def side_bytes(self) -> int:
        """Bytes of the arrays beside the table, those of a learning policy included."""
        arrays = (*self.arrays.values(), *self.cold.arrays.values(), *self.offspring.arrays.values())
        return self.ranking.side_bytes + sum(array.nbytes for array in arrays)

    def index_bytes_per_block(self) -> float:
        """Bytes of index memory for each block the table can hold, the header page and a learner's own left out."""
        side_bytes = self.side_bytes - self.ranking.side_bytes
        return (64 * (self.table.lines + self.table.capacity) + side_bytes) / self.table.capacity

    def check(self) -> None:
        """Assert every invariant; slow, for tests and debug runs."""
        check(self)

    # ---- how single blocks come, are held, and go (also used by PartWriter) ----

    def clock(self, now_ns: int) -> int:
        """`now_ns` in the unit of last_use."""
        return (now_ns - (self._origin_ns or 0)) // _TIME_UNIT_NS & NONE

    def hold(self, slot: int) -> None:
        """One more thing keeps this block from being evicted."""
        if not self.holds[slot]:
            self.ranking.remove(slot)
        self.holds[slot] += 1

    def unhold(self, slot: int) -> None:
        """One thing less keeps this block from being evicted."""
        left = self.holds[slot] - 1
        self.holds[slot] = left
        if not left:
            self.ranking.readmit(slot)

    def leave_parent(self, slot: int) -> None:
        """A visible block goes whose parent stays: that is held by one less."""
        if self.offspring.is_on:
            self.offspring.left_parent(slot)
        if self.holds[slot] & COLD:
            self.cold.below[self.parent[slot]] -= 1
        else:
            self.unhold(self.parent[slot])

    def arrived(self, slot: int, parent_slot: int, length: int, now_ns: int) -> None:
        """A block has become visible. Its hold on its parent is the caller's to make."""
        self.parent[slot] = parent_slot & NONE
        self.holds[slot] = 0
        self.ranking.came([slot], now_ns)
        self.elsewhere.arrived((slot,))
        if self.offspring.is_on:
            self.offspring.came((slot,))
        self.blocks += 1
        self.bytes += length
        self.totals["stored"] += 1

    def arrived_all(self, slots: list[int], nbytes: int, now_ns: int) -> None:
        """Blocks have become visible that something holds; the caller has set what and their parents."""
        self.ranking.came(slots, now_ns)
        if self.offspring.is_on:
            self.offspring.came(slots)
        self.blocks += len(slots)
        self.bytes += nbytes
        self.totals["stored"] += len(slots)

    def whole(self, slot: int) -> tuple[list[ev.Extent], list[int]]:
        """All extents of a block, and the slots to hide: itself, then its derived ones."""
        words = self.words
        derived = self.table.find(b"".join(derived_keys(words.key(slot), words.parts(slot)))).tolist()
        return [words.extent(one) for one in (slot, *derived)], [slot, *derived]

    # ---- events ----

    def _put(self, event: ev.Put, now_ns: int) -> ev.PutReply:
        marks, retry_ns = None, 0
        if self.parts.writing:
            marks, retry_ns = self.parts.busy_marks(event.keys, now_ns)
        if self.durable.is_busy:
            marks = self.durable.marks(event.keys, event.parents, marks)
        above = event.parents
        if self.elsewhere.role is not None:
            marks, above = self.elsewhere.prepare(event.keys, above, marks)
        status, slots, parents, nbytes = self.table.put(
            event.keys,
            above,
            event.regions,
            event.offsets,
            event.lengths,
            event.sums,
            generation=self.generation + 1,
            tier=event.tier,
            flag=event.flag,
            status=marks,
        )
        self.generation += len(status)
        parent, holds = self.parent, self.holds
        stored: list[int] = []
        before = -1
        for state, slot, above in zip(status.tolist(), slots.tolist(), parents.tolist(), strict=True):
            if state:
                continue
            parent[slot] = above & NONE
            holds[slot] = 0
            stored.append(slot)
            if above >= 0:
                if above != before and not holds[above]:
                    self.ranking.remove(above)
                holds[above] += 1
            before = slot
        self.elsewhere.arrived(stored)
        if stored:
            self.ranking.came(stored, now_ns)
        if self.cold.is_on:
            self.offspring.came(stored)
            self.cold.arrived(stored)
        self.blocks += len(stored)
        self.bytes += nbytes
        self.totals["stored"] += len(stored)
        return ev.PutReply(status, self.generation, retry_ns)

    def _visible(self, keys: Buffer) -> list[int]:
        """Slot numbers of blocks, -1 where not visible; a derived slot is no block."""
        slots: list[int] = self.table.find(keys).tolist()
        is_derived = self.words.is_derived
        return [-1 if slot >= 0 and is_derived(slot) else slot for slot in slots]

    def _touch(self, event: ev.Touch, now_ns: int) -> ev.Done:
        slots = [slot for slot in self._visible(event.keys) if slot >= 0]
        if slots:
            self.ranking.used(slots, now_ns)
        return ev.Done(bool(slots))

    def _lease(self, event: ev.Lease, now_ns: int) -> ev.LeaseReply:
        n = count_keys(event.keys)
        if self.leases.is_full(event.owner) or n > self.leases.max_keys:
            return ev.LeaseReply(0, np.full(n, ev.LeaseStatus.LIMIT, np.uint8), now_ns)
        slots = self._visible(event.keys)
        status = np.array([ev.LeaseStatus.MISS if slot < 0 else ev.LeaseStatus.GRANTED for slot in slots], np.uint8)
        held = sorted({slot for slot in slots if slot >= 0})
        if not held or event.ttl_ns <= 0:
            return ev.LeaseReply(0, np.full(n, ev.LeaseStatus.MISS, np.uint8), now_ns)
        pinned = [(slot, self.words.generation(slot)) for slot in held]
        lease, end_ns = self.leases.grant(pinned, event.ttl_ns, event.owner, now_ns)
        for slot in held:
            self.hold(slot)
        return ev.LeaseReply(lease, status, end_ns)

    def _renew(self, event: ev.Renew, now_ns: int) -> ev.Done:
        return ev.Done(self.leases.renew(event.lease, event.ttl_ns, now_ns))

    def _release(self, event: ev.Release, now_ns: int) -> ev.Done:
        pinned = self.leases.release(event.lease)
        self._unpin(pinned)
        return ev.Done(bool(pinned))

    def _owner_lost(self, event: ev.OwnerLost, now_ns: int) -> ev.Done:
        return ev.Done(self.leases.owner_lost(event.owner))

    def _unpin(self, pinned: list[tuple[int, int]]) -> None:
        for slot, generation in pinned:
            if self.leaving.is_held(generation):
                self.leaving.lease_ended(generation)
            else:
                self.unhold(slot)

    def _delete(self, event: ev.Delete, now_ns: int) -> ev.DeleteReply:
        slots = self._visible(event.keys)
        wanted = {slot for slot in slots if slot >= 0}
        left = {slot: self.children(slot) for slot in wanted}
        ready = [slot for slot, children in left.items() if not children]
        gone: list[int] = []
        while ready:
            slot = ready.pop()
            gone.append(slot)
            above = self.parent[slot]
            if above in left:
                left[above] -= 1
                if not left[above]:
                    ready.append(above)
        done = set(gone)
        codes = np.array([_deleted(slot, done) for slot in slots], np.uint8)
        if any(self.durable.is_durable(slot) for slot in gone):
            return ev.DeleteReply(codes, *self.durable.delete(gone, event.log))
        self.leave(gone, now_ns, "deleted")
        self.totals["deleted"] += len(gone)
        return ev.DeleteReply(codes)

    def _settle(self, event: ev.Settle, now_ns: int) -> ev.SettleReply:
        reply = self.durable.settle(event, now_ns)
        self.leave(reply.going, now_ns, "deleted")
        self.totals["deleted"] += len(reply.going)
        return reply

    def _restore(self, event: ev.Restore, now_ns: int) -> ev.RestoreReply:
        return ev.RestoreReply(restore(self, event.rows, event.status, now_ns))

    def durable_rows(self, roots: ev.Roots | None = None) -> Records:
        """All durable blocks, or those whose chains begin with these roots, as rows of the log, COMMIT_DTYPE[n],
        parents first; the places of their values are the shell's to fill in."""
        return durable_rows(self, roots)

    def root_of(self, key: bytes) -> bytes | None:
        """The key of the root above this block (itself, for a root), which is visible, staged or being written; None
        when it is none of these, or staged below what is gone. To ask for each next block of a chain costs O(1)."""
        return self.roots.root_of(key)

    def children(self, slot: int) -> int:
        """Children of a block, visible or being written: what holds it besides leases and its class."""
        pins = self.leases.pins
        below = self.cold.below[slot] if self.cold.is_on else 0
        held = int(self.holds[slot] & HOLDS) + below
        return held - (pins.get(self.words.generation(slot), 0) if pins else 0)

    def depart(
        self,
        slot: int,
        extents: list[ev.Extent],
        hide: list[int],
        now_ns: int,
        doomed: Collection[int] = (),
        *,
        is_evicted: bool = True,
    ) -> int:
        """Everything about one block's going but hiding its slots, which come to `hide`, and counting; its bytes.

        doomed: blocks that go in the same call, so that it doesn't matter what holds them.
        """
        self.ranking.left(slot, is_evicted=is_evicted)
        single = self.words.single(slot)
        found, numbers = ([single], [slot]) if single is not None else self.whole(slot)
        hide += numbers
        above = self.parent[slot]
        if above != NONE and above not in doomed:
            self.leave_parent(slot)
        if self.cold.is_on:
            self.cold.left(slot, extents)
            self.offspring.left(slot)
        self.durable.left(slot)
        self.elsewhere.left(slot)
        pins = self.leases.pins
        leases = pins.get(self.words.generation(slot), 0) if pins else 0
        if leases:
            self.leaving.add_held(self.words.generation(slot), leases, found, now_ns)
        else:
            extents += found
        return single[2] if single is not None else sum(length for _, _, length in found)

    def leave(self, gone: list[int], now_ns: int, reason: str, *, is_evicted: bool = False) -> None:
        """Hide these blocks, in an order where children come before parents."""
        self.ranking.settle(now_ns)
        extents: list[ev.Extent] = []
        hide: list[int] = []
        doomed = set(gone)
        for slot in gone:
            self.ranking.remove(slot)
            self.ranking.decided(slot, Verdict.DROP, reason, now_ns)
            self.bytes -= self.depart(slot, extents, hide, now_ns, doomed, is_evicted=is_evicted)
        self.blocks -= len(gone)
        self.hide(hide, extents, now_ns)

    def hide(self, hide: list[int], extents: list[ev.Extent], now_ns: int) -> None:
        """Take these slots out of sight, in this order, and send the extents on their way."""
        if hide:
            self.table.hide(np.array(hide, np.int32))
        if extents:
            self.leaving.add(extents, now_ns)

    def _lost(self, event: ev.Lost, now_ns: int) -> ev.RemovedReply:
        reply = lose(self, set(event.regions), now_ns, "a node with a part of it is gone")
        self.blocks -= reply.blocks
        self.bytes -= reply.bytes
        self.totals["lost"] += reply.blocks
        return reply

    def _drop(self, event: ev.Drop, now_ns: int) -> ev.RemovedReply:
        slots = [slot for slot in self.table.find(event.keys).tolist() if slot >= 0]
        return self.drop_slots(slots, now_ns, DAMAGED) if slots else ev.RemovedReply(0, 0)

    def drop_slots(self, slots: list[int], now_ns: int, reason: str, *, is_evicted: bool = False) -> ev.RemovedReply:
        """Hide these slots' blocks and all descendants, whatever holds them."""
        reply = drop(self, slots, now_ns, reason, is_evicted=is_evicted)
        self.blocks -= reply.blocks
        self.bytes -= reply.bytes
        self.totals["lost"] += reply.blocks
        return reply

    def _tick(self, event: ev.Tick, now_ns: int) -> ev.Done:
        self.ranking.settle(now_ns)
        self._unpin(self.leases.expire(now_ns))
        self.parts.reap(now_ns)
        self.elsewhere.expire(now_ns)
        return ev.Done()


def _deleted(slot: int, done: set[int]) -> ev.DeleteStatus:
    if slot < 0:
        return ev.DeleteStatus.MISS
    return ev.DeleteStatus.DELETED if slot in done else ev.DeleteStatus.ORDER
