"""Token-unit cost: evict the leaf that earns the least, prefill seconds saved per second that its bytes are kept.

    worth(block) = hazard(class, age) * gain(position)

hazard: uses per second, learned on line (`ucxkv.policy.hazard`), by class: used 0, 1, 2 or more times so far, and
whether a child was put below it twice (a branch point, or one whose continuation came back: counting only different
children saved 2 % less in the Mooncake conversation trace). Evicted blocks are remembered for a while, so that one
which comes back too late counts as used, and returns to its class. gain: seconds saved when the block is loaded instead
of computed, by its position, from the cost model; 0 when loading it does not pay. All blocks of a tier have one size.

How it stays cheap: leaves wait in queues by (class, gain rounded to 1/8 octave). Within a queue the oldest is worth
least, as the hazard never rises with age, so only the heads of the queues are compared; their worths are kept in a heap
and taken anew every second or `REFRESH` evictions. After a victim its parent, now a leaf, is nearly always worth no
more than the victim was: it is then the next victim without any search. So a chain goes from its tail at O(1) a block.

Invariants: `prev` holds queue + 1 for a leaf and 0 for others; each leaf has its entry (`_entry` says in which queue)
or is `_hot`; an entry's use is never later than the leaf's, so a use moves nothing: the entry is put right, or thrown
away, when it comes to the head of its queue. Entries that are not their slot's any more are never more than those that
are, plus a constant; ghosts are in a ring of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import cast

import numpy as np
import numpy.typing as npt

from ucxkv.policy.base import TICKS_PER_S, LeafLinks, Names, Rating, Slots, view_of
from ucxkv.policy.ghosts import Ghosts
from ucxkv.policy.hazard import HazardTable, bucket_of

__all__ = ["TucPolicy"]

REFRESH = 64
_CLASSES, _BRANCH, _OFTEN = 6, 3, 2
_STEPS, _OCTAVE, _LEAST_S = 256, 8, 1e-6  # gains from 1 us to over an hour
_LESSON_FIRST, _LESSON_MIN, _SAMPLE_MAX = 512, 2048, 65_536
_SLACK = 1024

Positions = npt.NDArray[np.int64]
Gain = Callable[[Positions], npt.NDArray[np.float64]]
"""Seconds saved by a hit on a block, by the position of its first token."""


class TucPolicy:
    """See the module. ghosts_max: evicted blocks remembered; default two for each slot. sample_max: a lesson looks at
    so many blocks that wait, evenly taken, and takes that much longer: some 10 ms at the default. young_ticks: blocks
    used so lately go after all others, oldest first: whoever writes a chain piece by piece finds its end in place.
    """

    rule = "saves least prefill time"

    def __init__(
        self,
        links: LeafLinks,
        gain: Gain,
        ghosts_max: int | None = None,
        *,
        sample_max: int = _SAMPLE_MAX,
        young_ticks: int = 0,
    ) -> None:
        slots = len(links.prev)
        self.now = 0
        self.water = 0.0
        """Worth of what was picked last, seconds saved per second."""
        self.price = 0.0
        """Worth of what has left last and was not young: what a place in this tier costs just now."""
        self._picked = inf
        self.hazard = HazardTable(_CLASSES)
        self._gain = gain
        self._sample_max, self._young_ticks = sample_max, young_ticks
        self._leaf, self._last_use = links.prev, links.last_use
        self._last: npt.NDArray[np.uint32] = np.frombuffer(links.last_use, np.uint32)
        self._hits: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._kids: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._classes: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._steps: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._gains: npt.NDArray[np.float32] = np.zeros(slots, np.float32)
        self._positions: npt.NDArray[np.uint32] = np.zeros(slots, np.uint32)
        self._names: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self._alive: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._class, self._step = view_of(self._classes), view_of(self._steps)
        self._position, self._name = view_of(self._positions), view_of(self._names)
        self._hit, self._kid = view_of(self._hits), view_of(self._kids)
        self._is_alive = view_of(self._alive)
        self._gain_of = cast("memoryview[float]", view_of(self._gains))
        self._entry = view_of(np.zeros(slots, np.uint16))
        self._forgotten: list[tuple[int, int]] = []
        self._ghosts = Ghosts(2 * slots if ghosts_max is None else ghosts_max)
        self._queues: dict[int, list[tuple[int, int, int]]] = {}
        self._entries = self._own = self._count = 0
        self._hot, self._hot_worth = -1, 0.0
        self._order: list[tuple[float, int, int, int]] = []
        self._order_time, self._order_pops, self._water_time = 0, 0, -1
        self._blocks, self._events, self._lesson_at = 0, 0, _LESSON_FIRST

    @property
    def side_bytes(self) -> int:
        """Of its arrays, those of what it remembers included."""
        small = (self._hits, self._kids, self._classes, self._steps, self._alive)
        wide = (self._gains, self._positions, self._names, self._entry)
        return self._ghosts.nbytes + sum(array.nbytes for array in (*small, *wide))

    # ---- what it learns

    def tick(self, now: int) -> None:
        """The time of all that follows."""
        if now != self.now:
            self._cool()
            self._tell_forgotten()
            self.now = now

    def enter(self, slots: Slots, names: Names, positions: Positions, parents: Slots) -> None:
        """New blocks; those remembered go back to their class."""
        self._names[slots] = names
        self._alive[slots] = True
        hits, kids, waits, classes = self._ghosts.take(names, self.now)
        self._hits[slots], self._kids[slots] = hits, kids
        kid = self._kid
        above = parents[parents >= 0]
        for parent in above.tolist():
            if kid[parent] < _OFTEN:
                kid[parent] += 1
        self._classify(above)
        self._classify(slots)
        is_back = waits >= 0
        if is_back.any():
            self.hazard.waited(waits[is_back], classes[is_back], self.now)
        self._positions[slots] = positions
        self._appraise(slots)
        self._blocks += len(slots)
        self._learned(len(slots))

    def reuse(self, slots: Slots) -> None:
        """A use ends each block's wait, and may change its class."""
        if len(slots) == 1:  # what a read from disk brings, at a sixth of the cost
            slot = int(slots[0])
            self.hazard.used(self.now - self._last_use[slot], self._class[slot], self.now)
            self._hit[slot] = min(self._hit[slot] + 1, _OFTEN)
            self._class[slot] = self._hit[slot] + _BRANCH * (self._kid[slot] >= _OFTEN)
            self._learned(1)
            return
        self.hazard.waited(self.now - self._last[slots].astype(np.int64), self._classes[slots], self.now)
        self._hits[slots] = np.minimum(self._hits[slots] + 1, _OFTEN)
        self._classify(slots)
        self._learned(len(slots))

    def leave(self, slot: int, *, is_evicted: bool) -> None:
        """Remember a block that was evicted, forget another."""
        self._is_alive[slot] = False
        self._blocks -= 1
        if is_evicted:
            self._went()
            used, name = self._last_use[slot], self._name[slot]
            forgotten = self._ghosts.put(name, used, self._hit[slot], self._kid[slot], self._class[slot])
            if forgotten is not None:
                self._forgotten.append(forgotten)
                if len(self._forgotten) >= _SLACK:
                    self._tell_forgotten()

    def cool(self, slots: Iterable[int]) -> None:
        """No more than that they went: a block's chance to be used is the same wherever it is."""
        self._went()

    def warm(self, slots: Iterable[int]) -> None:
        """Nothing, see `cool`."""

    def reprice(self, gain: Gain) -> None:
        """Take a new cost model: every gain is computed anew. A leaf changes queues when it is looked at next."""
        self._gain = gain
        self._appraise(np.flatnonzero(self._alive))
        self._order.clear()
        self._water_time = -1

    def worth(self, slot: int) -> float:
        """What keeping this block earns now, prefill seconds saved per second; as much as can be while it is young."""
        age = max(0, self.now - self._last_use[slot])
        if age < self._young_ticks:
            return inf
        return self.hazard.rates[self._class[slot]][bucket_of(age)] * self._gain_of[slot]

    def rate(self, slot: int) -> Rating:
        """All that `worth` is made of."""
        age = max(0, self.now - self._last_use[slot])
        hazard, gain = self.hazard.rates[self._class[slot]][bucket_of(age)], self._gain_of[slot]
        return Rating(hazard * gain, self.price, hazard, gain, self._hit[slot])

    def _tell_forgotten(self) -> None:
        """Their waits have ended without a use, as far as anybody will know."""
        if self._forgotten:
            used, kinds = np.array(self._forgotten, np.int64).T
            self._forgotten.clear()
            self.hazard.waited(np.maximum(self.now - used, 0), kinds.astype(np.uint8), self.now, is_use=False)

    def _classify(self, slots: Slots) -> None:
        self._classes[slots] = self._hits[slots] + _BRANCH * (self._kids[slots] >= _OFTEN)

    def _appraise(self, slots: Slots) -> None:
        gains = np.maximum(self._gain(self._positions[slots].astype(np.int64)), 0.0)
        self._gains[slots] = gains
        self._steps[slots] = np.minimum(_OCTAVE * np.log2(np.maximum(gains, _LEAST_S) / _LEAST_S), _STEPS - 1)

    def _learned(self, events: int) -> None:
        self._events += events
        if self._events < self._lesson_at:
            return
        self._events = 0
        there = np.flatnonzero(self._alive)
        stride = 1 + len(there) // self._sample_max
        there = there[::stride]
        used, kinds = self._ghosts.waiting(stride)
        ages = np.concatenate([self.now - self._last[there].astype(np.int64), self.now - used])
        classes = np.concatenate([self._classes[there], kinds])
        self.hazard.learn(np.maximum(ages, 0), classes, self.now, weight=float(stride))
        self._lesson_at = max(2 * _LESSON_FIRST if self.hazard.lessons < 2 else _LESSON_MIN, self._blocks // 2)
        self._order.clear()
        self._water_time = -1

    # ---- its leaves

    def add(self, slot: int) -> None:
        """Queue a new leaf."""
        assert not self._leaf[slot], f"slot {slot} is a leaf already"
        self._count += 1
        self._push(slot)

    def readmit(self, slot: int) -> None:
        """Queue a block that is a leaf again; when it is worth no more than the last victim it is the next one."""
        assert not self._leaf[slot], f"slot {slot} is a leaf already"
        self._count += 1
        if self._hot < 0 and self._water_time == self.now and (worth := self.worth(slot)) <= self.water:
            self._leaf[slot] = self._queue(slot) + 1
            self._hot, self._hot_worth = slot, worth
        else:
            self._push(slot)

    def put_back(self, slots: Sequence[int]) -> None:
        """Queue them again; none is the next victim for having been one."""
        for slot in slots:
            self.add(slot)

    def remove(self, slot: int) -> None:
        """Take a leaf out; nothing happens when it isn't one."""
        if self._leaf[slot]:
            self._leaf[slot] = 0
            self._count -= 1
            if slot == self._hot:
                self._hot = -1

    def touch(self, slots: Iterable[int]) -> None:
        """Queue these leaves anew, by their class and use as they are now."""
        for slot in slots:
            if self._leaf[slot]:
                if slot == self._hot:
                    self._hot = -1
                self._push(slot)

    def pop(self) -> int:
        """Take out the leaf that is worth least; -1 when there is none."""
        slot = self._hot
        if slot >= 0:
            self._hot, self.water = -1, self._hot_worth
        else:
            slot = self._least()
            if slot < 0:
                return -1
            self.water, self._water_time = self.worth(slot), self.now
        self._leaf[slot] = 0
        self._count -= 1
        self._order_pops += 1
        self._picked = self.water
        return slot

    def _went(self) -> None:
        """What was picked has left."""
        if self._picked < inf:
            self.price, self._picked = self._picked, inf

    def leaves(self) -> list[int]:
        """All leaves, the one that is worth least first."""
        found = np.flatnonzero(np.frombuffer(self._leaf, np.uint32)).tolist()
        return sorted(found, key=lambda slot: (self.worth(slot), self._last_use[slot], -self._position[slot]))

    def __len__(self) -> int:
        return self._count

    def _queue(self, slot: int) -> int:
        return self._class[slot] * _STEPS + self._step[slot]

    def _push(self, slot: int) -> None:
        self._enqueue(slot)
        if self._entries > 2 * self._own + _SLACK:
            self._requeue()

    def _enqueue(self, slot: int) -> None:
        number = self._queue(slot)
        self._leaf[slot] = number + 1
        if self._entry[slot] == number + 1:
            return
        self._own += not self._entry[slot]
        self._entry[slot] = number + 1
        queue = self._queues.setdefault(number, [])
        used = self._last_use[slot]
        heappush(queue, (used, -self._position[slot], slot))
        self._entries += 1
        if self._order and queue[0][2] == slot:
            heappush(self._order, (self.worth(slot), used, slot, number))

    def _cool(self) -> None:
        """Queue the block that was to be the next victim: time has passed, or others come before it."""
        slot, self._hot = self._hot, -1
        if slot >= 0:
            self._push(slot)

    def _head(self, number: int) -> tuple[int, int, int] | None:
        """The oldest entry of a queue, put right."""
        queue = self._queues.get(number)
        while queue:
            slot = queue[0][2]
            if self._entry[slot] != number + 1:  # its slot has another entry elsewhere
                heappop(queue)
                self._entries -= 1
            elif not self._leaf[slot] or slot == self._hot:
                self._drop_head(queue)
            elif self._queue(slot) != number:  # it was appraised anew
                self._drop_head(queue)
                self._enqueue(slot)
            else:
                true = (self._last_use[slot], -self._position[slot], slot)
                if queue[0] == true:
                    return true
                heapreplace(queue, true)
        return None

    def _drop_head(self, queue: list[tuple[int, int, int]]) -> None:
        """Take out the head of a queue, which is its slot's entry."""
        self._entry[heappop(queue)[2]] = 0
        self._entries -= 1
        self._own -= 1

    def _least(self) -> int:
        """Take the entry of the leaf that is worth least out of its queue."""
        order = self._order
        is_old = self._order_pops >= REFRESH or self.now - self._order_time >= TICKS_PER_S
        if not order or is_old:
            self._refresh()
        while order:
            _, used, slot, number = heappop(order)
            head = self._head(number)
            if head is None:
                continue
            is_true = head[2] == slot and head[0] == used
            if is_true:
                self._drop_head(self._queues[number])
                head = self._head(number)
            if head is not None:
                heappush(order, (self.worth(head[2]), head[0], head[2], number))
            if is_true:
                return slot
        return -1

    def _refresh(self) -> None:
        """The heads of all queues, by what they are worth now."""
        self._order.clear()
        for number in sorted(self._queues):
            self._head(number)  # may put leaves into other queues, rightly
        heads = [(head, number) for number in sorted(self._queues) if (head := self._head(number)) is not None]
        self._queues = {number: self._queues[number] for _, number in heads}
        self._order[:] = [(self.worth(head[2]), head[0], head[2], number) for head, number in heads]
        heapify(self._order)
        self._order_time, self._order_pops = self.now, 0

    def _requeue(self) -> None:
        """Build all queues from the leaves alone."""
        self._queues.clear()
        self._order.clear()
        self._hot = -1
        leaves = np.flatnonzero(np.frombuffer(self._leaf, np.uint32)).tolist()
        self._entries = self._own = len(leaves)
        self._entry = view_of(np.zeros(len(self._leaf), np.uint16))
        for slot in leaves:
            number = self._queue(slot)
            self._leaf[slot] = self._entry[slot] = number + 1
            self._queues.setdefault(number, []).append((self._last_use[slot], -self._position[slot], slot))
        for queue in self._queues.values():
            heapify(queue)
