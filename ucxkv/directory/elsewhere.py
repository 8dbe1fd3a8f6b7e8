"""Parents and children in other shards: what a shard's directory remembers of them, and who is held for whom.

Invariants
- A child whose parent lives elsewhere is put only while the parent's shard holds a pin for it. Its pin is given back
  after it was hidden. So at every instant, unless the parent's shard crashed or lost memory since, the parent of a
  visible block is visible: a pin too many may stand, never one too few.
- A pin is a hold, like a visible child. There is one for a child, whatever was doubled on the way. It goes by an Unpin
  with its token or a later one: tokens of one child only grow, so an old Unpin never takes a newer pin away.
- A pin that nobody needs (a lost Unpin, a late Pin, a crash of the child's shard) goes by asking the child's shard
  (`Reclaim`). A child whose parent was lost goes, with all below it, by an Orphaned or by pinning again (`Repin`).
- A block delegates from its first child elsewhere (a cut is none: its key says where it is) until it goes; no child
  becomes local meanwhile but those whose own shard this is.

Only blocks at such a crossing cost anything, as Python objects: 1 to 2 in 1,000 blocks of 16 tokens in public traces.
Bounded. A directory without a shard number (`role` None) has none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ucxkv.directory import crossing as cx
from ucxkv.directory.events import Done, PutPart, PutReply, StagePut, StageReply
from ucxkv.directory.slots import KEY_BYTES, NONE, U8, Buffer, PutStatus, as_memory, count_keys
from ucxkv.sharding import ShardRule
from ucxkv.walk import Answer, Life

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

P = TypeVar("P", PutPart, StagePut)


@dataclass(frozen=True, slots=True)
class ShardRole:
    """Which shard a directory is, by which rule. crossings: how many pins, and how many children of parents elsewhere,
    it takes."""

    number: int
    rule: ShardRule
    crossings: int = 1 << 20


@dataclass(slots=True)
class Crossing:
    """A child here whose parent lives in `shard`. token: of its newest Pin. life: the parent's, of the last Pinned.

    slot: -1 until the child is visible. deadline_ns: until when it may come.
    """

    parent: bytes
    shard: int
    token: int
    deadline_ns: int
    life: Life | None = None
    slot: int = -1


class Elsewhere:
    """See the module. Only a Directory makes and calls it."""

    def __init__(self, directory: Directory, role: ShardRole | None) -> None:
        self._directory = directory
        self.role = role
        self.pins: dict[bytes, tuple[int, int]] = {}
        """Child elsewhere -> (its parent's slot here, token)."""
        self.pinned: dict[int, dict[bytes, None]] = {}
        """Slot -> its children elsewhere."""
        self.delegating: set[int] = set()
        self.crossings: dict[bytes, Crossing] = {}
        """Child here, visible or to come -> where its parent is."""
        self.coming: dict[bytes, None] = {}
        """Those of them that are not visible yet."""
        self.slots: dict[int, bytes] = {}
        """Slot of a visible child here with a parent elsewhere -> its key."""
        self.vouchers: dict[bytes, dict[bytes, None]] = {}
        """Parent elsewhere -> its visible children here."""
        self.sends: list[cx.Send] = []
        self.losses = 0
        self._tokens = 0

    # ---- for readers

    @property
    def fence(self) -> int:
        """Grows whenever blocks went against their order: a new incarnation, memory lost, damaged values."""
        return self._directory.table.epoch << 32 | self.losses & 0xFFFFFFFF

    def answer(self, keys: Buffer, above: bytes | None = None) -> Answer:
        """What a walk is told that asks for these keys, the first of them below `above`."""
        visible = self._directory.match(keys) if count_keys(keys) else 0
        delegates = False
        if visible and self.delegating:
            last = as_memory(keys)[KEY_BYTES * (visible - 1) : KEY_BYTES * visible]
            delegates = int(self._directory.table.find(bytes(last))[0]) in self.delegating
        children = self.vouchers.get(above) if above is not None else None
        vouched = self.crossings[next(iter(children))].life if children else None
        return Answer(visible, self.fence, delegates, vouched)

    def local(self, event: cx.Local, now_ns: int) -> cx.LocalReply:
        """Carry out a Local. Looks through all slots once."""
        directory = self._directory
        slot = self._visible(event.key)
        if slot < 0:
            return cx.LocalReply(None, False, [])
        records = directory.table.records[: directory.table.fresh]
        parents = directory.arrays["parent"][: directory.table.fresh]
        below = np.flatnonzero((parents == slot) & (records["state"] == 1))
        words = directory.words
        local = [words.key(child) for child in below.tolist() if not words.is_derived(child)]
        local += [block.key for block in directory.parts.writing if block.parent_slot == slot]
        local += [block.key for block in directory.durable.staged.values() if block.parent_slot == slot]
        return cx.LocalReply(self._life(slot), slot in self.delegating, local)

    # ---- the parent's side

    def pin(self, event: cx.Pin, now_ns: int) -> cx.PinReply:
        """Carry out a Pin."""
        slot = self._visible(event.parent)
        if slot < 0 or slot in self._directory.durable.leaving:
            return cx.PinReply(cx.PinStatus.ORDER, None)
        known = self.pins.get(event.child)
        if known is None:
            if self.role is None or len(self.pins) >= self.role.crossings:
                return cx.PinReply(cx.PinStatus.LIMIT, None)
            self._directory.hold(slot)
            self.pinned.setdefault(slot, {})[event.child] = None
            if not self.role.rule.is_cut(event.child):
                self.delegating.add(slot)
        self.pins[event.child] = (slot, max(event.token, known[1] if known else 0))
        return cx.PinReply(cx.PinStatus.PINNED, self._life(slot))

    def unpin(self, event: cx.Unpin, now_ns: int) -> Done:
        """Carry out an Unpin."""
        known = self.pins.get(event.child)
        if known is None or known[1] > event.token:
            return Done(False)
        del self.pins[event.child]
        slot = known[0]
        children = self.pinned[slot]
        del children[event.child]
        if not children:
            del self.pinned[slot]
        self._directory.unhold(slot)
        return Done()

    def reclaim(self, event: cx.Reclaim, now_ns: int) -> cx.SendsReply:
        """Carry out a Reclaim."""
        assert self.role is not None or not self.pins
        sends = []
        for child in list(self.pins)[: event.limit]:
            slot, token = self.pins[child] = self.pins.pop(child)  # to the end of the queue
            question = cx.AskPin(self._directory.words.key(slot), child, token)
            sends.append(cx.Send(self._own(child), question))
        return cx.SendsReply(sends)

    # ---- the child's side

    def expect(self, event: cx.Expect, now_ns: int) -> cx.ExpectReply:
        """Carry out an Expect."""
        known = self.crossings.get(event.child)
        if known is None:
            if self.role is None or len(self.crossings) >= self.role.crossings:
                return cx.ExpectReply(cx.PinStatus.LIMIT, None)
            known = Crossing(event.parent, event.shard, 0, event.deadline_ns)
            self.crossings[event.child] = known
            self.coming[event.child] = None
        elif known.life is not None:
            known.deadline_ns = max(known.deadline_ns, event.deadline_ns)
            return cx.ExpectReply(cx.PinStatus.PINNED, None)
        known.shard, known.deadline_ns = event.shard, max(known.deadline_ns, event.deadline_ns)
        return cx.ExpectReply(cx.PinStatus.ORDER, self._new_pin(event.child, known))

    def answered(self, event: cx.Pinned, now_ns: int) -> Done:
        """Carry out a Pinned."""
        known = self.crossings.get(event.child)
        if known is None or known.token != event.token:
            return Done(False)  # a late answer: whatever it pinned is asked about, or known by a newer token
        if event.reply.status is cx.PinStatus.PINNED:
            known.life = event.reply.life
            return Done()
        self._orphan(event.child, known, now_ns)
        return Done(False)

    def orphaned(self, event: cx.Orphaned, now_ns: int) -> Done:
        """Carry out an Orphaned."""
        known = self.crossings.get(event.child)
        if known is None or known.token > event.token:
            return Done(False)
        self._orphan(event.child, known, now_ns)
        return Done()

    def asked(self, event: cx.AskPin, now_ns: int) -> Done:
        """Carry out an AskPin."""
        return Done(event.child in self.crossings)

    def repin(self, event: cx.Repin, now_ns: int) -> cx.SendsReply:
        """Carry out a Repin."""
        mine = [(child, known) for child, known in self.crossings.items() if known.shard == event.shard]
        return cx.SendsReply([self._new_pin(child, known) for child, known in mine])

    def expire(self, now_ns: int) -> None:
        """Forget children that were expected and did not come; a block that is being written still comes."""
        for child in list(self.coming):
            known = self.crossings[child]
            if known.deadline_ns <= now_ns and not self._is_writing(child):
                self._forget(child, known)

    # ---- puts

    def prepare(self, keys: Buffer, parents: Buffer, marks: U8 | None) -> tuple[U8 | None, Buffer]:
        """Before a put: ELSEWHERE marked where a block does not belong here, and the parents as the table is to see
        them: a child whose parent is pinned elsewhere is a root to it."""
        assert self.role is not None
        rule, number, table = self.role.rule, self.role.number, self._directory.table
        n = count_keys(keys)
        columns = np.frombuffer(as_memory(keys), np.uint8).reshape(n, KEY_BYTES)
        is_foreign = rule.own_many(columns) != number
        above = np.frombuffer(as_memory(parents), np.uint8).reshape(-1, KEY_BYTES)
        if len(above) != n:
            raise ValueError(f"{len(above)} parents of {n} keys")
        moved = is_foreign & (rule.cuts(columns) | ~above.any(axis=1))
        up: list[int] = table.find(parents).tolist()
        for at, slot in enumerate(up):
            if slot >= 0 and is_foreign[at] and self._is_full(slot, rule):
                moved[at] = int(table.find(columns[at].tobytes())[0]) < 0 and not self._is_writing(
                    columns[at].tobytes()
                )
        if moved.any():
            marks = np.zeros(n, np.uint8) if marks is None else marks
            marks[moved & (marks == 0)] = PutStatus.ELSEWHERE
        if self.coming:
            patched = above.copy()
            for at, key in enumerate(columns):
                if key.tobytes() in self.coming:
                    known = self.crossings[key.tobytes()]
                    if known.life is not None and known.parent == above[at].tobytes():
                        patched[at] = 0
            parents = patched
        return marks, parents

    def put_part(self, event: PutPart, now_ns: int) -> PutReply:
        """Carry out a PutPart."""
        parts = self._directory.parts
        if self.role is None:
            return parts.put(event, now_ns)
        marks, parents = self.prepare(event.keys, event.parents, None)
        if marks is None:
            return parts.put(replace(event, parents=parents), now_ns)
        reply = parts.put(_rows(replace(event, parents=parents), marks == 0), now_ns)
        marks[marks == 0] = reply.status
        return PutReply(marks, reply.index, reply.retry_after_ns)

    def stage_put(self, event: StagePut, now_ns: int) -> StageReply:
        """Carry out a StagePut. A block whose parent is elsewhere can't be made durable yet: ORDER."""
        durable = self._directory.durable
        marks = self.prepare(event.keys, event.parents, None)[0] if self.role is not None else None
        if marks is None:
            return durable.put(event, now_ns)
        reply = durable.put(_rows(event, marks == 0), now_ns)
        marks[marks == 0] = reply.status
        return StageReply(marks, reply.batch, reply.rows)

    def arrived(self, slots: Iterable[int]) -> None:
        """These blocks have become visible."""
        words = self._directory.words
        for slot in slots if self.coming else ():
            key = words.key(slot)
            if key in self.coming and self._directory.parent[slot] == NONE:
                del self.coming[key]
                known = self.crossings[key]
                known.slot = slot
                self.slots[slot] = key
                self.vouchers.setdefault(known.parent, {})[key] = None

    def left(self, slot: int) -> None:
        """This block is going; what it means elsewhere."""
        child = self.slots.pop(slot, None)
        if child is not None:
            known = self.crossings[child]
            children = self.vouchers[known.parent]
            del children[child]
            if not children:
                del self.vouchers[known.parent]
            self._forget(child, known)
        for child in self.pinned.pop(slot, ()):
            _, token = self.pins.pop(child)
            self.sends.append(cx.Send(self._own(child), cx.Orphaned(self._directory.words.key(slot), child, token)))
        self.delegating.discard(slot)

    def gone(self, slots: npt.NDArray[np.int64]) -> None:
        """These blocks are going, all at once and whatever holds them."""
        self.losses += bool(len(slots))
        for slot in slots.tolist() if self.slots or self.pinned or self.delegating else ():
            self.left(slot)

    def take_sends(self) -> list[cx.Send]:
        """What is to be sent, once."""
        sends, self.sends = self.sends, []
        return sends

    def check(self) -> None:
        """Assert the invariants that one shard can see."""
        directory = self._directory
        assert {child: slot for slot, children in self.pinned.items() for child in children} == {
            child: slot for child, (slot, _) in self.pins.items()
        }
        for slot in (*self.pinned, *self.delegating, *self.slots):
            assert directory.table.records["state"][slot] == 1, "a crossing of a block that isn't visible"
        for slot, child in self.slots.items():
            known = self.crossings[child]
            assert known.slot == slot and known.life is not None, "a child of an unpinned parent is visible"
            assert directory.words.key(slot) == child and directory.parent[slot] == NONE
            assert child in self.vouchers[known.parent]
        assert sum(map(len, self.vouchers.values())) == len(self.slots)
        assert {child for child, known in self.crossings.items() if known.slot < 0} == set(self.coming)
        assert len(self.crossings) == len(self.coming) + len(self.slots)

    # ---- below

    def _own(self, key: bytes) -> int:
        assert self.role is not None
        return self.role.rule.own(key)

    def _life(self, slot: int) -> Life:
        return self._directory.table.epoch, self._directory.words.generation(slot)

    def _visible(self, key: bytes) -> int:
        slot = int(self._directory.table.find(key)[0])
        return -1 if slot >= 0 and self._directory.words.is_derived(slot) else slot

    def _is_full(self, slot: int, rule: ShardRule) -> bool:
        """Whether a new child of this block belongs in its own key's shard."""
        directory = self._directory
        if slot in self.delegating:
            return True
        if directory.holds[slot] < rule.fanout and not directory.cold.is_on:
            return False  # the usual case, without a look at what holds it
        return rule.delegates(directory.children(slot) - len(self.pinned.get(slot, ())), False)

    def _is_writing(self, key: bytes) -> bool:
        directory = self._directory
        return directory.parts.writing.get(key) is not None or key in directory.durable.staged

    def _new_pin(self, child: bytes, known: Crossing) -> cx.Send:
        self._tokens += 1
        known.token = self._directory.table.epoch << 64 | self._tokens
        return cx.Send(known.shard, cx.Pin(known.parent, child, known.token))

    def _forget(self, child: bytes, known: Crossing) -> None:
        del self.crossings[child]
        self.coming.pop(child, None)
        self.sends.append(cx.Send(known.shard, cx.Unpin(known.parent, child, known.token)))

    def _orphan(self, child: bytes, known: Crossing, now_ns: int) -> None:
        """The parent isn't there: the child goes, and all below it, as if it was damaged."""
        directory = self._directory
        directory.parts.drop(child, now_ns)
        if known.slot >= 0:
            directory.drop_slots([known.slot], now_ns, "its parent in another shard is gone")
        else:
            self._forget(child, known)


def _rows(event: P, keep: npt.NDArray[np.bool_]) -> P:
    """The same put with only these of its blocks."""

    def kept(column: Buffer) -> bytes:
        return np.frombuffer(as_memory(column), np.uint8).reshape(len(keep), -1)[keep].tobytes()

    return replace(
        event,
        keys=kept(event.keys),
        parents=kept(event.parents),
        regions=kept(event.regions),
        offsets=kept(event.offsets),
        lengths=kept(event.lengths),
        sums=kept(event.sums),
    )
