"""Class durable: puts, upgrades and deletes in two steps, staged and then settled when the log holds them; the
directory's half that deals with them.

Invariants
- **Nothing is shown, or hidden, before the log holds it.** A staged block is not in the slot table, a staged delete is
  still there for readers; `settle` shows or hides it. The batches of a log are settled in the order they were staged,
  which is the order of their records in it, so what readers saw is always a state that a prefix of the log gives. (The
  one exception is damage: bytes that do not prove themselves are hidden at once, and a replay finds them damaged too.)
- One table may serve several logs, one a shard; a chain is in one of them. Their batches settle as they come, in no
  order between logs, so nothing that is staged hangs on what another log has staged.
- I8 chain: the parent of a durable block is durable, or the block is a root; otherwise a restart would make a hole. A
  durable put below blocks of class cache makes these durable with it, in the same batch, before it.
- A durable block is held by its class (`DURABLE` in `holds`), so no policy ever sees it; only `Delete` and damage end
  it.
- A key that is staged is nobody else's: put again it is ALREADY in a durable put (which settles later), BUSY in any
  other. A block whose delete is staged gets no children: BUSY.
- The memory of a block that left durably is named for freeing after its Leave is in the log: `settle` hides it, then
  the grace runs. So whatever is written there next is logged after the Leave, and a replay never finds two blocks in
  one place. A damaged block's memory may be reused before its Leave is in the log; a replay then checks its sum against
  other bytes, and drops it: it was acknowledged as gone by being damaged.

The shell's part: know which log a chain is in; append the records that a step names, in the order of the steps; settle
when the log has committed them, or abandon, newest first, when it never will.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucxkv.directory import events as ev
from ucxkv.directory.log import CommitRow, packed
from ucxkv.directory.slots import KEY_BYTES, NONE, ROOT_KEY, U8, Buffer, PutStatus, as_memory, count_keys
from ucxkv.directory.writing import slot_record

if TYPE_CHECKING:
    from ucxkv.directory.core import Directory

DURABLE = 1 << 31
"""In `holds`: the block is durable."""
OWN_REGION = 0


@dataclass(slots=True, eq=False)
class Staged:
    """One block on its way: what it is to be, and what it hangs on. root: of its chain, once somebody asked."""

    key: bytes
    batch: int
    parent_slot: int
    above: Staged | None
    extent: ev.Extent
    record: bytes
    at: int
    children: list[Staged] = field(default_factory=list)
    is_doomed: bool = False
    root: bytes = b""


@dataclass(slots=True)
class _Batch:
    log: int
    status: U8
    blocks: list[Staged] = field(default_factory=list)
    upgrades: list[tuple[int, int]] = field(default_factory=list)
    leaving: list[tuple[int, int]] = field(default_factory=list)


class DurableWriter:
    """See the module. Only a Directory makes and calls it. limit: blocks that may be staged at once."""

    def __init__(self, directory: Directory, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._batches: dict[int, _Batch] = {}
        self._logs: dict[int, dict[int, None]] = {}
        self._last = 0
        self.staged: dict[bytes, Staged] = {}
        self.upgrading: dict[int, tuple[int, int]] = {}
        """Slot -> (generation, the batch that makes it durable)."""
        self.leaving: dict[int, tuple[int, int]] = {}
        """Slot -> (generation, the batch that deletes it)."""
        self.blocks = self.bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether anything is staged."""
        return bool(self._batches)

    def is_durable(self, slot: int) -> bool:
        """Whether a visible block is."""
        return bool(self._directory.holds[slot] & DURABLE)

    # ---- staging

    def put(self, event: ev.StagePut, now_ns: int) -> ev.StageReply:
        """Carry out a StagePut."""
        n, directory = count_keys(event.keys), self._directory
        keys, parents = _split(event.keys), _split(event.parents)
        regions, offsets = as_memory(event.regions).cast("H").tolist(), as_memory(event.offsets).cast("Q").tolist()
        lengths, sums = as_memory(event.lengths).cast("I").tolist(), as_memory(event.sums).cast("Q").tolist()
        if not len(parents) == len(regions) == len(offsets) == len(lengths) == len(sums) == n:
            raise ValueError(f"columns that do not belong to {n} keys")
        directory.parts.reap(now_ns)
        slots, aboves = directory.table.find(event.keys).tolist(), directory.table.find(event.parents).tolist()
        self._refuse_other_logs(event.log, (*keys, *parents), (*slots, *aboves))
        batch = _Batch(event.log, np.zeros(n, np.uint8))
        number = self._last + 1
        rows: list[CommitRow] = []
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            extent = (regions[i], offsets[i], lengths[i])
            status = self._refusal(key, slots[i])
            if status is PutStatus.STORED:
                status = self._chain(parent, aboves[i], batch, rows)
            elif status is PutStatus.ALREADY and slots[i] >= 0 and not self._make_durable(slots[i], batch, rows):
                status = PutStatus.REFUSED
            batch.status[i] = status
            if status is not PutStatus.STORED:
                continue
            directory.generation += 1
            above = self.staged.get(parent)
            block = Staged(key, number, -1 if above or parent == ROOT_KEY else aboves[i], above, extent, b"", i)
            block.record = slot_record(key, directory.generation, extent, event.tier, event.flag, sums[i])
            if above is not None:
                above.children.append(block)
            elif block.parent_slot >= 0:
                directory.hold(block.parent_slot)
            self.staged[key] = block
            batch.blocks.append(block)
            rows.append((key, parent, directory.generation, extent, sums[i], event.tier, event.flag))
        is_waiting = bool(rows) or any(key in self.staged for key in keys)
        is_waiting |= not self.upgrading.keys().isdisjoint(slots)
        return ev.StageReply(batch.status.copy(), self._begin(batch) if is_waiting else 0, packed(rows))

    def _refuse_other_logs(self, log: int, keys: Iterable[bytes], slots: Iterable[int]) -> None:
        """ValueError when one of these is staged under another log; nothing has changed then."""
        if self._logs.keys() <= {log}:
            return
        staged = [block.batch for block in map(self.staged.get, keys) if block is not None]
        pending = [self.upgrading[slot][1] for slot in slots if slot in self.upgrading]
        for number in (*staged, *pending):
            if self._batches[number].log != log:
                raise ValueError(f"a put of log {log} hangs on batch {number} of log {self._batches[number].log}")

    def _refusal(self, key: bytes, slot: int) -> PutStatus:
        """STORED when the key is free; else why not."""
        directory = self._directory
        if key == ROOT_KEY or (slot >= 0 and directory.words.is_derived(slot)):
            return PutStatus.REFUSED
        if slot in self.leaving or directory.parts.writing.get(key) is not None or len(self.staged) >= self._limit:
            return PutStatus.BUSY
        if slot >= 0 or key in self.staged:
            return PutStatus.ALREADY
        room = directory.table.capacity - directory.table.used - len(self.staged)
        return PutStatus.STORED if room > 0 else PutStatus.NO_SPACE

    def _chain(self, parent: bytes, above: int, batch: _Batch, rows: list[CommitRow]) -> PutStatus:
        """See to it that the parent is durable, or will be before the block: STORED, or why it cannot be."""
        staged = self.staged.get(parent)
        if parent == ROOT_KEY or (staged is not None and not staged.is_doomed):
            return PutStatus.STORED
        if above < 0 or self._directory.words.is_derived(above):
            return PutStatus.ORDER
        if above in self.leaving:
            return PutStatus.BUSY
        return PutStatus.STORED if self._make_durable(above, batch, rows) else PutStatus.REFUSED

    def _make_durable(self, slot: int, batch: _Batch, rows: list[CommitRow]) -> bool:
        """Stage the upgrade of a visible block and of all above it that are not durable; False when one cannot be: it
        has parts, or lies in another node's memory.
        """
        directory, words, chain = self._directory, self._directory.words, list[int]()
        while slot != NONE and not self.is_durable(slot) and slot not in self.upgrading:
            single = words.single(slot)
            if single is None or single[0] != OWN_REGION:
                return False
            chain.append(slot)
            slot = directory.parent[slot]
        for slot in reversed(chain):
            generation, above = words.generation(slot), directory.parent[slot]
            self.upgrading[slot] = generation, self._last + 1
            batch.upgrades.append((slot, generation))
            directory.hold(slot)
            parent = ROOT_KEY if above == NONE else words.key(above)
            tier, flag, total = words.tail(slot)
            rows.append((words.key(slot), parent, generation, words.extent(slot), total, tier, flag))
        return True

    def delete(self, slots: list[int], log: int) -> tuple[int, bytes]:
        """Stage the going of these blocks, children before parents, at least one of them durable: the batch, and the
        keys whose Leave is to be logged.
        """
        directory, words, left = self._directory, self._directory.words, []
        batch = _Batch(log, np.zeros(0, np.uint8))
        for slot in slots:
            if self.is_durable(slot):
                left.append(words.key(slot))
            generation = words.generation(slot)
            self.leaving[slot] = generation, self._last + 1
            batch.leaving.append((slot, generation))
            directory.hold(slot)
        return self._begin(batch), b"".join(left)

    def _begin(self, batch: _Batch) -> int:
        self._last += 1
        self._batches[self._last] = batch
        self._logs.setdefault(batch.log, {})[self._last] = None
        return self._last

    def _end(self, number: int, *, newest: bool) -> _Batch:
        """Take out this batch, which must be the newest, or else the oldest, of its log."""
        batch = self._batches.get(number)
        if batch is None:
            raise ValueError(f"batch {number} is not staged")
        line = self._logs[batch.log]
        due = next(reversed(line) if newest else iter(line))
        if due != number:
            raise ValueError(f"batch {number} is {'abandoned' if newest else 'settled'} before {due} of its log")
        del line[number], self._batches[number]
        if not line:
            del self._logs[batch.log]
        return batch

    # ---- settling

    def settle(self, event: ev.Settle, now_ns: int) -> ev.SettleReply:
        """The log holds the oldest of its batches: show and hide what it staged."""
        number, directory = event.batch, self._directory
        batch = self._end(number, newest=False)
        for slot, generation in batch.upgrades:
            if self.upgrading.get(slot) == (generation, number):
                del self.upgrading[slot]
                directory.holds[slot] = directory.holds[slot] - 1 | DURABLE
                self._count(directory.words.extent(slot)[2], 1)
        failed: list[Staged] = []
        for block in batch.blocks:
            del self.staged[block.key]
        for block in [] if self._show_all(batch.blocks, now_ns) else batch.blocks:
            status = PutStatus.ORDER if block.is_doomed else self._show(block, now_ns)
            if status is not PutStatus.STORED:
                batch.status[block.at] = status
                failed.append(block)
                self._doom(block)
        going = [slot for slot, generation in batch.leaving if self.leaving.get(slot) == (generation, number)]
        for slot in going:
            del self.leaving[slot]
            directory.unhold(slot)
        return ev.SettleReply(batch.status, b"".join(block.key for block in failed), going)

    def _show_all(self, blocks: list[Staged], now_ns: int) -> bool:
        """Publish them in their order, parents first; False, and nothing done, when one of them cannot be."""
        if not blocks or any(block.is_doomed for block in blocks):
            return False
        directory = self._directory
        slots = directory.table.publish(b"".join([block.record for block in blocks])).tolist()
        if min(slots) < 0:
            directory.table.hide(np.array([slot for slot in reversed(slots) if slot >= 0], np.int32))
            return False
        nbytes = 0
        for block, slot in zip(blocks, slots, strict=True):
            directory.parent[slot] = block.parent_slot & NONE
            directory.holds[slot] = DURABLE + len(block.children)
            for child in block.children:
                child.above, child.parent_slot = None, slot
            nbytes += block.extent[2]
        directory.arrived_all(slots, nbytes, now_ns)
        self.blocks += len(slots)
        self.bytes += nbytes
        return True

    def _show(self, block: Staged, now_ns: int) -> PutStatus:
        """Publish a block whose parent is visible."""
        directory = self._directory
        slot = int(directory.table.publish(block.record)[0])
        if slot < 0:
            return PutStatus.NO_SPACE
        length = block.extent[2]
        directory.arrived(slot, block.parent_slot, length, now_ns)
        directory.hold(slot)
        directory.holds[slot] = directory.holds[slot] - 1 | DURABLE
        self._count(length, 1)
        for child in block.children:
            child.above, child.parent_slot = None, slot
            directory.hold(slot)
        return PutStatus.STORED

    def _doom(self, block: Staged) -> None:
        """A block will not be visible, nor what is staged below it. Gives its hold on its parent back."""
        if block.parent_slot >= 0:
            self._directory.unhold(block.parent_slot)
            block.parent_slot = -1
        below = list(block.children)
        while below:
            one = below.pop()
            one.is_doomed, one.above = True, None
            below += one.children

    def abandon(self, event: ev.Abandon, now_ns: int) -> ev.Done:
        """The log will never hold the newest of its batches: forget it. Its blocks' extents are the shell's again."""
        number, directory = event.batch, self._directory
        batch = self._end(number, newest=True)
        for block in reversed(batch.blocks):
            del self.staged[block.key]
            if block.above is not None:
                block.above.children.remove(block)
            elif block.parent_slot >= 0:
                directory.unhold(block.parent_slot)
        for slots, pending in ((batch.upgrades, self.upgrading), (batch.leaving, self.leaving)):
            for slot, generation in reversed(slots):
                if pending.get(slot) == (generation, number):
                    del pending[slot]
                    directory.unhold(slot)
        return ev.Done(True)

    # ---- what others ask of it

    def waits(self, keys: Buffer, parents: Buffer, *, is_durable: bool) -> int:
        """A batch that a put of these would better wait for, and then ask again; 0: none."""
        if not self._batches:
            return 0
        found = 0 if is_durable else self._newest_staged((*_split(keys), *_split(parents)))
        if self.leaving:
            slots = {*self._directory.table.find(keys).tolist(), *self._directory.table.find(parents).tolist()}
            found = max([found, *(self.leaving[slot][1] for slot in slots & self.leaving.keys())])
        return found

    def waits_delete(self, keys: Buffer) -> int:
        """The same for a delete: also for what is staged below, since it decides whether a block may go."""
        if not self._batches:
            return 0
        slots = set(self._directory.table.find(keys).tolist())
        slots.discard(-1)
        pending = [each[slot][1] for each in (self.leaving, self.upgrading) for slot in slots & each.keys()]
        below = [block.batch for block in self.staged.values() if block.parent_slot in slots]
        return max([self._newest_staged(_split(keys)), *pending, *below])

    def _newest_staged(self, keys: Iterable[bytes]) -> int:
        return max((block.batch for block in map(self.staged.get, keys) if block is not None), default=0)

    def marks(self, keys: Buffer, parents: Buffer, marks: U8 | None) -> U8 | None:
        """BUSY where a put of class cache must not go on: a staged key, or a parent that is leaving."""
        busy = [key in self.staged for key in _split(keys)]
        if self.leaving:
            above = self._directory.table.find(parents).tolist()
            busy = [one or slot in self.leaving for one, slot in zip(busy, above, strict=True)]
        if not any(busy):
            return marks
        out = np.zeros(len(busy), np.uint8) if marks is None else marks
        out[np.array(busy)] = PutStatus.BUSY
        return out

    def gone(self, slots: Iterable[int]) -> bytes:
        """These visible blocks are being hidden now, deepest first: forget them; the keys whose Leave is to be
        logged.
        """
        words, left, gone = self._directory.words, [], set[int]()
        for slot in slots:
            gone.add(slot)
            if self.is_durable(slot):
                self._count(words.extent(slot)[2], -1)
                left.append(words.key(slot))
            elif self.upgrading.pop(slot, None) is not None:
                left.append(words.key(slot))
            self.leaving.pop(slot, None)
        for block in self.staged.values() if gone else ():
            if block.parent_slot in gone:
                block.parent_slot = -1
                block.is_doomed = True
                self._doom(block)
        return b"".join(left)

    def left(self, slot: int) -> None:
        """A visible block goes by a delete that was settled."""
        if self.is_durable(slot):
            self._count(self._directory.words.extent(slot)[2], -1)

    def _count(self, nbytes: int, sign: int) -> None:
        self.blocks += sign
        self.bytes += sign * nbytes

    def check(self) -> None:
        """Assert the invariants that need no look at the whole table."""
        staged = [block for batch in self._batches.values() for block in batch.blocks]
        assert {block.key: block for block in staged} == self.staged and len(staged) == len(self.staged)
        for block in staged:
            assert self._directory.table.find(block.key)[0] < 0, "a staged block is visible"
            assert block.above is None or (block in block.above.children and block.parent_slot == -1)
            assert all(child.above is block or child.is_doomed for child in block.children)
        assert self.leaving.keys().isdisjoint(self.upgrading), "a block that both goes and stays"
        lines = {number: log for log, line in self._logs.items() for number in line}
        assert lines == {number: batch.log for number, batch in self._batches.items()}
        for line in self._logs.values():
            assert line and list(line) == sorted(line), "a log's batches are out of order"
        for block in staged:
            above = block.above.batch if block.above is not None else self.upgrading.get(block.parent_slot, (0, 0))[1]
            assert not above or lines[above] == lines[block.batch], "a staged block hangs on another log"


def _split(keys: Buffer) -> list[bytes]:
    raw = bytes(as_memory(keys))
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
