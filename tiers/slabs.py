"""Places for values in one segment: slabs of one size class, runs of whole units for big values. Pure, no threads.

Invariants (`check()` verifies all of them):
- A byte of the segment belongs to at most one live allocation. Every unit (64 KiB) is free, in one slab or in one run.
- An allocation starts at a multiple of 64 bytes; of 4 KiB when its class is a multiple of that (all above 4 KiB are).
- Waste inside an allocation: under 64 bytes up to 512; at most 12.5 % of the class above, or one started 4 KiB page if
  that is more; a slab's tail wastes less than one unit.
- An empty slab's units return to the common pool at once and merge with free neighbours, so no class strands memory:
  `allocate(n, 1)` is short only when the class has no free slot and no free extent holds even one value.
- `free` refuses what is not a live allocation's offset, duplicates too, and then changes nothing.

Cost: 3 bytes a slot plus about 300 a slab (2 MiB usually), 8 bytes a unit; no Python object per slot. Taking or freeing
a slot is O(1), well under 1 us in a batch; finding a free extent is a bit scan over bins of like-sized ones.

Source: the slab idea, Bonwick (USENIX 1994); bins by size with a bit mask, Masmano et al., "TLSF" (ECRTS 2004).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from .base import ForeignExtent, ValueTooLarge

__all__ = ["PLACE_DTYPE", "UNIT_BYTES", "SlabAllocator"]

UNIT_BYTES = 64 * 1024
SLAB_BYTES = 2 << 20
"""What a slab aims at: a huge page, and some hundred slots of the small blocks."""
PAGE_BYTES = 4096
LINE_BYTES = 64
_SLOTTED_UNITS = 8  # classes up to that many units share slabs; above, rounding to a unit wastes at most 1/9
_EXACT_BINS = 16
_PROBES = 32  # extents of about the wanted length looked at before a longer one is cut
_INSIDE_RUN = -1

PLACE_DTYPE = np.dtype([("offset", "<u8"), ("slot_lines", "<u4"), ("base_unit", "<u4"), ("units", "<u4")])
"""A live allocation, so that another allocator can make the same: its class in lines of 64 bytes, and the slab or run
that it is in: first unit, units.
"""


class _Slab:
    """Consecutive units cut into slots of one class. Slots [0, fresh) were used once; `free` lists those free again."""

    __slots__ = ("base", "end", "free", "fresh", "live", "slot_bytes", "slots", "units", "used")

    def __init__(self, base: int, units: int, unit_bytes: int, slot_bytes: int) -> None:
        self.base = base
        self.units = units
        self.slot_bytes = slot_bytes
        self.slots = units * unit_bytes // slot_bytes
        self.end = base + self.slots * slot_bytes
        self.used = bytearray(self.slots)
        self.free = array("H")
        self.fresh = 0
        self.live = 0

    def take(self, count: int, out: list[int]) -> int:
        """Append the offsets of up to `count` slots; returns how many."""
        base, size, free, used = self.base, self.slot_bytes, self.free, self.used
        again = min(count, len(free))
        if again:
            slots = free[-again:]
            del free[-again:]
            for slot in slots:
                used[slot] = 1
            out.extend([base + slot * size for slot in slots])
        first, last = self.fresh, min(self.fresh + count - again, self.slots)
        if last > first:
            used[first:last] = b"\x01" * (last - first)
            out.extend(range(base + first * size, base + last * size, size))
            self.fresh = last
        self.live += again + last - first
        return again + last - first


class SlabAllocator:
    """Hands out offsets into a segment of size_bytes; see the module's invariants.

    unit_bytes: a power of two from 4 KiB; smaller only for tests and tiny segments. What is left of the segment behind
    the last whole unit is not used. Raises ValueError for a segment without one unit.
    """

    def __init__(self, size_bytes: int, *, unit_bytes: int = UNIT_BYTES) -> None:
        if unit_bytes < PAGE_BYTES or unit_bytes & (unit_bytes - 1):
            raise ValueError(f"unit_bytes must be a power of two from {PAGE_BYTES}, not {unit_bytes}")
        units = size_bytes // unit_bytes
        if units < 1:
            raise ValueError(f"a segment of {size_bytes} bytes has no unit of {unit_bytes}")
        self.capacity_bytes = units * unit_bytes
        self._unit = unit_bytes
        self._shift = unit_bytes.bit_length() - 1
        self._slotted_max = _SLOTTED_UNITS * unit_bytes
        self._slab_target = min(SLAB_BYTES, max(unit_bytes, self.capacity_bytes // 32))
        self._used = 0
        # Of each unit: None free, its slab, at a run's start the run's units, inside one _INSIDE_RUN.
        self._owner: list[_Slab | int | None] = [None] * units
        self._partial: dict[int, dict[_Slab, None]] = {}  # class -> slabs with a free slot, the next to use last
        self._extents: dict[int, int] = {}  # free extents, in units: start -> length
        self._ends: dict[int, int] = {}  # end -> start
        self._bins: list[dict[int, None]] = [{} for _ in range(_bin(units) + 1)]
        self._filled = 0  # bit b: bin b is not empty
        self._put_extent(0, units)

    # ---- what callers use ----

    def class_bytes(self, nbytes: int) -> int:
        """What a value of nbytes occupies. Raises ValueError below 1, ValueTooLarge above the segment."""
        if nbytes < 1:
            raise ValueError(f"a value has at least 1 byte, not {nbytes}")
        if nbytes > self._slotted_max:
            step = self._unit
        else:
            step = max(LINE_BYTES if nbytes <= PAGE_BYTES else PAGE_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 4))
        size = -(-nbytes // step) * step
        if size > self.capacity_bytes:
            raise ValueTooLarge(f"value of {nbytes} bytes, the segment holds {self.capacity_bytes}: split the value")
        return size

    def allocate(self, nbytes: int, count: int = 1) -> list[int]:
        """Offsets of up to `count` places for nbytes each; fewer when short of space. Raises as class_bytes does."""
        size, out = self.class_bytes(nbytes), list[int]()
        if size > self._slotted_max:
            self._take_runs(size // self._unit, count, out)
        else:
            partial = self._partial.get(size)
            if partial is None:
                partial = self._partial[size] = {}
            need = count
            while need > 0:
                slab = next(reversed(partial)) if partial else self._new_slab(size)
                if slab is None:
                    break
                need -= slab.take(need, out)
                if slab.live == slab.slots:
                    partial.pop(slab, None)
                else:
                    partial[slab] = None
        self._used += len(out) * size
        return out

    def free(self, offsets: Sequence[int]) -> None:
        """Take back what allocate gave. Raises ForeignExtent for anything else, and then nothing has changed."""
        done, freed, emptied, runs = 0, 0, list[_Slab](), list[int]()
        owners, shift = self._owner, self._shift
        try:
            for offset in offsets:
                slab = owners[offset >> shift]
                if slab.__class__ is _Slab:
                    size = slab.slot_bytes
                    slot = (offset - slab.base) // size
                    if slot * size + slab.base != offset or not slab.used[slot] or offset < 0:
                        raise ForeignExtent(f"offset {offset} is not a live allocation")
                    slab.used[slot] = 0
                    slab.free.append(slot)
                    slab.live = live = slab.live - 1
                    freed += size
                    if not live:
                        emptied.append(slab)
                    elif live == slab.slots - 1:
                        self._partial[size][slab] = None
                else:
                    self._mark_run(offset)
                    runs.append(offset >> shift)
                done += 1
        except BaseException as exc:
            self._undo_free(offsets[:done])
            if isinstance(exc, IndexError):
                raise ForeignExtent(f"offset {offsets[done]} is outside the segment or its slab") from None
            raise
        self._used -= freed
        for slab in emptied:
            self._partial[slab.slot_bytes].pop(slab, None)
            self._release(slab.base >> shift, slab.units)
        for start in runs:
            self._run_freed(start)

    def bytes_at(self, offset: int) -> int:
        """The class of the live allocation at offset. Raises ForeignExtent when there is none."""
        owner = self._owner[offset // self._unit] if 0 <= offset < self.capacity_bytes else None
        if isinstance(owner, _Slab):
            slot, inside = divmod(offset - owner.base, owner.slot_bytes)
            if not inside and offset < owner.end and owner.used[slot]:
                return owner.slot_bytes
        elif owner is not None and owner > 0 and offset % self._unit == 0:
            return owner * self._unit
        raise ForeignExtent(f"offset {offset} is not a live allocation")

    @property
    def used_bytes(self) -> int:
        """Sum of the classes of all live allocations."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """capacity_bytes - used_bytes: free slots, free extents and the tails of slabs."""
        return self.capacity_bytes - self._used

    @property
    def largest_free_bytes(self) -> int:
        """The longest free extent: the largest value that fits now without a free slot of its class."""
        if not self._filled:
            return 0
        return max(self._extents[start] for start in self._bins[self._filled.bit_length() - 1]) * self._unit

    # ---- the same places again, in another process ----

    def places(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Where these live allocations are, PLACE_DTYPE[n]; `restore` makes them again."""
        out = np.zeros(len(offsets), PLACE_DTYPE)
        out["offset"] = offsets
        units, where = np.unique(offsets >> np.uint64(self._shift), return_inverse=True)
        rows = np.zeros((len(units), 3), np.uint32)
        for i, unit in enumerate(units.tolist()):
            owner = self._owner[unit]
            if isinstance(owner, _Slab):
                rows[i] = owner.slot_bytes // LINE_BYTES, owner.base >> self._shift, owner.units
            else:
                assert owner is not None and owner > 0, "no live allocation"
                rows[i] = owner * self._unit // LINE_BYTES, unit, owner
        for column, name in enumerate(("slot_lines", "base_unit", "units")):
            out[name] = rows[where, column]
        return out

    def restore(self, places: npt.NDArray[np.void]) -> None:
        """Take exactly these places, on an allocator that has none yet. Raises ForeignExtent when they cannot be of one
        allocator of this size; it is of no use then.
        """
        assert not self._used, "places are restored into an empty allocator"
        if not len(places):
            return
        order = places[np.argsort(places["base_unit"], kind="stable")]
        starts, first = np.unique(order["base_unit"], return_index=True)
        ends = np.append(first[1:], len(order))
        at = 0
        for start, begin, end in zip(starts.tolist(), first.tolist(), ends.tolist(), strict=True):
            group = order[begin:end]
            units, size = int(group["units"][0]), int(group["slot_lines"][0]) * LINE_BYTES
            is_one = bool((group["units"] == units).all() and (group["slot_lines"] == group["slot_lines"][0]).all())
            if not is_one or start < at or not 0 < units <= len(self._owner) - start or not size:
                raise ForeignExtent(f"places in unit {start} that contradict each other, or the segment's size")
            self._restore_group(start, units, size, (group["offset"] - start * self._unit).tolist())
            at = start + units
        self._rebuild_extents()

    def _restore_group(self, start: int, units: int, size: int, inside: list[int]) -> None:
        """A slab with these places in use, or a run."""
        if size > self._slotted_max:
            if inside != [0] or size != units * self._unit:
                raise ForeignExtent(f"unit {start} starts no run of {units}")
            self._owner[start : start + units] = [units, *([_INSIDE_RUN] * (units - 1))]
            self._used += size
            return
        slab = _Slab(start * self._unit, units, self._unit, size)
        for offset in inside:
            slot, rest = divmod(offset, size)
            if rest or slot >= slab.slots or slab.used[slot]:
                raise ForeignExtent(f"offset {slab.base + offset} is no slot of its slab, or named twice")
            slab.used[slot] = 1
        slab.live = len(inside)
        slab.fresh = max(inside) // size + 1
        slab.free.extend(slot for slot in range(slab.fresh) if not slab.used[slot])
        self._owner[start : start + units] = [slab] * units
        partial = self._partial.setdefault(size, {})
        if slab.live < slab.slots:
            partial[slab] = None
        self._used += slab.live * size

    def _rebuild_extents(self) -> None:
        for start in list(self._extents):
            self._drop_extent(start)
        at = 0
        while at < len(self._owner):
            owner = self._owner[at]
            if owner is None:
                begin = at
                while at < len(self._owner) and self._owner[at] is None:
                    at += 1
                self._put_extent(begin, at - begin)
            else:
                at += owner.units if isinstance(owner, _Slab) else owner

    def hold(self, units: Sequence[int]) -> list[int]:
        """Take everything free that touches these units (ascending); `free` what this returns to give it back."""
        out: list[int] = []
        starts = sorted(self._extents)
        slabs: dict[_Slab, None] = {}
        for unit in units:
            owner = self._owner[unit]
            if owner is None:
                i = bisect_right(starts, unit) - 1
                start, length = starts[i], self._drop_extent(starts[i])
                if unit > start:
                    self._put_extent(start, unit - start)
                if unit + 1 < start + length:
                    self._put_extent(unit + 1, start + length - unit - 1)
                    starts.insert(i + 1, unit + 1)
                if unit == start:
                    del starts[i]
                whole = _Slab(unit * self._unit, 1, self._unit, self._unit)
                self._used += whole.take(1, out) * self._unit
                self._owner[unit] = whole
                self._partial.setdefault(self._unit, {})
            elif isinstance(owner, _Slab):
                slabs[owner] = None
        wanted = set(units)
        for slab in slabs:
            self._hold_slots(slab, wanted, out)
        return out

    def _hold_slots(self, slab: _Slab, units: set[int], out: list[int]) -> None:
        size, held = slab.slot_bytes, list[int]()
        for slot in range(slab.slots):
            offset = slab.base + slot * size
            touched = range(offset >> self._shift, ((offset + size - 1) >> self._shift) + 1)
            if not slab.used[slot] and any(unit in units for unit in touched):
                held.append(slot)
        if not held:
            return
        slab.fresh = max(slab.fresh, held[-1] + 1)
        for slot in held:
            slab.used[slot] = 1
        slab.live += len(held)
        slab.free = array("H", [slot for slot in range(slab.fresh) if not slab.used[slot]])
        if slab.live == slab.slots:
            self._partial[size].pop(slab, None)
        self._used += len(held) * size
        out.extend(slab.base + slot * size for slot in held)

    # ---- slabs and runs ----

    def _new_slab(self, size: int) -> _Slab | None:
        """A slab for the class, shorter than usual when no extent is long enough; None when not one value fits."""
        slots = max(1, self._slab_target // size)
        units = -(-slots * size // self._unit)
        start = self._find(units)
        if start is None:
            units = self.largest_free_bytes // self._unit
            start = self._find(units) if units * self._unit >= size else None
            if start is None:
                return None
        self._take_extent(start, units)
        slab = _Slab(start * self._unit, units, self._unit, size)
        self._owner[start : start + units] = [slab] * units
        return slab

    def _take_runs(self, units: int, count: int, out: list[int]) -> None:
        while count > 0:
            start = self._find(units)
            if start is None:
                return
            several = min(count, self._extents[start] // units)
            self._take_extent(start, several * units)
            self._owner[start : start + several * units] = [units, *([_INSIDE_RUN] * (units - 1))] * several
            out.extend(range(start * self._unit, (start + several * units) * self._unit, units * self._unit))
            count -= several

    def _mark_run(self, offset: int) -> None:
        """A run's start carries -1 - its units between being named in a free() and being freed."""
        unit, into = divmod(offset, self._unit)
        units = self._owner[unit]
        if into or offset < 0 or not isinstance(units, int) or units <= 0:
            raise ForeignExtent(f"offset {offset} is not a live allocation")
        self._owner[unit] = -1 - units

    def _run_freed(self, start: int) -> None:
        marked = self._owner[start]
        assert isinstance(marked, int) and marked < _INSIDE_RUN
        units = -1 - marked
        self._used -= units * self._unit
        self._release(start, units)

    def _undo_free(self, offsets: Sequence[int]) -> None:
        """As if these had not been named in a free() that failed; the last one first, as a stack."""
        for offset in reversed(offsets):
            owner = self._owner[offset >> self._shift]
            if isinstance(owner, _Slab):
                slot = owner.free.pop()
                owner.used[slot] = 1
                owner.live += 1
                if owner.live == owner.slots:
                    self._partial[owner.slot_bytes].pop(owner, None)
            elif owner is not None:
                self._owner[offset >> self._shift] = -1 - owner

    # ---- free extents ----

    def _find(self, units: int) -> int | None:
        """Start of a free extent of at least `units`; one of about that length if there is one."""
        near = _bin(units)
        alike = self._bins[near] if near < len(self._bins) else {}
        for start in islice(alike, _PROBES):
            if self._extents[start] >= units:
                return start
        longer = self._filled >> (near + 1)
        if longer:
            return next(iter(self._bins[near + (longer & -longer).bit_length()]))
        return next((start for start in alike if self._extents[start] >= units), None)

    def _put_extent(self, start: int, units: int) -> None:
        self._extents[start] = units
        self._ends[start + units] = start
        number = _bin(units)
        self._bins[number][start] = None
        self._filled |= 1 << number

    def _drop_extent(self, start: int) -> int:
        units = self._extents.pop(start)
        del self._ends[start + units]
        number = _bin(units)
        del self._bins[number][start]
        if not self._bins[number]:
            self._filled &= ~(1 << number)
        return units

    def _take_extent(self, start: int, units: int) -> None:
        """The first `units` of the free extent at start leave the pool."""
        length = self._drop_extent(start)
        assert length >= units, "an extent shorter than what is taken from it"
        if length > units:
            self._put_extent(start + units, length - units)

    def _release(self, start: int, units: int) -> None:
        """Units back to the pool, merged with free neighbours."""
        self._owner[start : start + units] = [None] * units
        before = self._ends.get(start)
        if before is not None:
            units += self._drop_extent(before)
            start = before
        if start + units in self._extents:
            units += self._drop_extent(start + units)
        self._put_extent(start, units)

    # ---- the invariants ----

    def check(self) -> None:
        """Assert every invariant; O(units + slots)."""
        used = at = 0
        slabs: set[_Slab] = set()
        while at < len(self._owner):
            owner = self._owner[at]
            if owner is None:
                units = self._extents[at]
                assert all(o is None for o in self._owner[at : at + units]), "free extent over owned units"
                assert at + units not in self._extents, "free neighbours are not merged"
                assert self._ends[at + units] == at and at in self._bins[_bin(units)], "extent is in no bin"
            elif isinstance(owner, _Slab):
                units = owner.units
                assert owner.base == at * self._unit and all(o is owner for o in self._owner[at : at + units])
                self._check_slab(owner)
                slabs.add(owner)
                used += owner.live * owner.slot_bytes
            else:
                units = owner
                assert units > _SLOTTED_UNITS, "unit inside a run without its start"
                assert all(o == _INSIDE_RUN for o in self._owner[at + 1 : at + units])
                used += units * self._unit
            at += units
        assert at == len(self._owner) and used == self._used, "used_bytes does not match"
        free_units = sum(o is None for o in self._owner)
        assert sum(self._extents.values()) == free_units and len(self._ends) == len(self._extents)
        assert sum(map(len, self._bins)) == len(self._extents)
        assert self._filled == sum(1 << b for b, starts in enumerate(self._bins) if starts)
        listed = [slab for partial in self._partial.values() for slab in partial]
        assert set(listed) == {slab for slab in slabs if slab.live < slab.slots} and len(set(listed)) == len(listed)

    def _check_slab(self, slab: _Slab) -> None:
        assert 0 < slab.live <= slab.slots and sum(slab.used) == slab.live, "an empty slab was kept"
        assert slab.end <= slab.base + slab.units * self._unit and slab.live + len(slab.free) == slab.fresh
        assert len(set(slab.free)) == len(slab.free) and not any(slab.used[slot] for slot in slab.free)
        assert all(slot < slab.fresh for slot in slab.free) and not any(slab.used[slab.fresh :])


def _bin(units: int) -> int:
    """Bins hold one length each below 16 units, then eight to a doubling; a longer extent is never in a lower bin."""
    if units < _EXACT_BINS:
        return units
    bits = units.bit_length()
    return _EXACT_BINS + (bits - 5) * 8 + ((units >> (bits - 4)) & 7)
