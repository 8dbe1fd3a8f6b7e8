"""The slab allocator: sizes and waste, stranding, refusals, and a state machine against a plain dict of intervals."""

from __future__ import annotations

import random
import sys
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from ucxkv.tiers.base import ForeignExtent, ValueTooLarge
from ucxkv.tiers.slabs import UNIT_BYTES, SlabAllocator

MIB = 1 << 20


def test_classes_waste_little_and_are_aligned() -> None:
    """Goal: the bounds in the module's invariants. Method: every size to 70,000 and random ones to 1 GiB."""
    slabs = SlabAllocator(2 << 30)
    rnd = random.Random(5)
    sizes = [*range(1, 70_001), *(rnd.randrange(1, 1 << 30) for _ in range(20_000)), 1 << 30]
    for nbytes in sizes:
        size = slabs.class_bytes(nbytes)
        waste = size - nbytes
        assert waste >= 0 and size % 64 == 0 and slabs.class_bytes(size) == size
        if nbytes <= 512:
            assert waste < 64
        elif nbytes <= 4096:
            assert waste <= size / 8
        else:
            assert waste < 4096 or waste <= size / 8
            assert size % 4096 == 0


def test_class_bytes_grow_with_the_value() -> None:
    """Goal: a longer value never gets a shorter class. Method: all sizes around the steps, in order."""
    slabs = SlabAllocator(1 << 30)
    sizes = [slabs.class_bytes(n) for n in range(1, 20_000)]
    assert sizes == sorted(sizes)
    sizes = [slabs.class_bytes(n) for n in range(20_000, 4 * MIB, 509)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("nbytes", [1, 64, 1000, 4096, 16 * 1024, 64 * 1024, 100_000, 400_000, MIB, 3 * MIB + 5])
def test_a_segment_fills_with_one_class_and_empties_again(nbytes: int) -> None:
    """Goal: little is lost to slab tails, and all of it comes back. Method: fill 64 MiB, check places, free, refill."""
    slabs = SlabAllocator(64 * MIB)
    size = slabs.class_bytes(nbytes)
    offsets = slabs.allocate(nbytes, 64 * MIB)
    assert len(offsets) * size >= 0.9 * slabs.capacity_bytes and slabs.used_bytes == len(offsets) * size
    assert slabs.allocate(nbytes) == []
    assert all(offset % (4096 if size % 4096 == 0 else 64) == 0 for offset in offsets[:2000])
    places = sorted(offsets)
    assert all(a + size <= b for a, b in pairwise(places)) and places[-1] + size <= 64 * MIB
    slabs.check()
    random.Random(1).shuffle(offsets)
    slabs.free(offsets)
    slabs.check()
    assert slabs.used_bytes == 0 and slabs.free_bytes == slabs.largest_free_bytes == slabs.capacity_bytes == 64 * MIB


def test_a_change_of_class_strands_nothing() -> None:
    """Goal: memory of one class serves any other after it is freed. Method: fill and free in turn, small to huge."""
    slabs = SlabAllocator(32 * MIB)
    for nbytes in (64, 5 * MIB, 16 * 1024, 32 * MIB, 4096, 700_000, 100):
        offsets = slabs.allocate(nbytes, 32 * MIB)
        assert len(offsets) * slabs.class_bytes(nbytes) >= 0.85 * 32 * MIB
        slabs.free(offsets)
        slabs.check()
        assert slabs.largest_free_bytes == 32 * MIB


def test_the_last_free_place_is_found_in_fragments_too_short_for_a_whole_slab() -> None:
    """Goal: one value is refused only when no free extent holds it. Method: leave single free units, ask for slots."""
    slabs = SlabAllocator(16 * MIB)
    runs = slabs.allocate(9 * UNIT_BYTES, 1000)
    tail = slabs.allocate(UNIT_BYTES, 1000)
    assert slabs.free_bytes == 0 and len(runs) == 28
    slabs.free(tail[1:2])
    slabs.free(runs[3:4])
    assert slabs.allocate(64 * 1024, 2)
    slabs.check()
    while slabs.allocate(UNIT_BYTES):
        pass
    assert slabs.largest_free_bytes == 0 and slabs.free_bytes == 0
    slabs.check()


def test_an_extent_that_is_a_little_too_short_is_never_taken() -> None:
    """Goal: free extents of about the right length are told apart. Method: 50 of 33 units and one of 35, ask for 34."""
    unit = 4096
    slabs = SlabAllocator((50 * (33 + 9) + 35 + 9) * unit, unit_bytes=unit)
    short = []
    for _ in range(50):
        short += slabs.allocate(33 * unit)
        slabs.allocate(9 * unit)
    long = slabs.allocate(35 * unit)
    slabs.allocate(9 * unit)
    assert slabs.free_bytes == 0
    slabs.free(short)
    assert slabs.allocate(34 * unit) == []
    slabs.free(long)
    assert slabs.allocate(34 * unit, 2) == long
    slabs.check()
    assert sorted(slabs.allocate(33 * unit, 99)) == short
    slabs.check()


def test_too_large_empty_and_negative_sizes_are_refused() -> None:
    """Goal: each bad size is a typed error and takes nothing. Method: a table, and bad constructor arguments."""
    slabs = SlabAllocator(MIB + 5000)
    assert slabs.capacity_bytes == MIB
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least 1 byte"):
            slabs.allocate(nbytes)
    for nbytes in (MIB + 1, 1 << 40):
        with pytest.raises(ValueTooLarge, match="split the value"):
            slabs.allocate(nbytes)
    tiny = SlabAllocator(UNIT_BYTES)
    with pytest.raises(ValueTooLarge):
        tiny.allocate(UNIT_BYTES + 1)
    assert slabs.allocate(5, 0) == [] and slabs.allocate(5, -3) == [] and slabs.used_bytes == 0
    for size, unit in ((1000, UNIT_BYTES), (MIB, 5000), (MIB, 2048)):
        with pytest.raises(ValueError):
            SlabAllocator(size, unit_bytes=unit)


def test_a_bad_free_changes_nothing() -> None:
    """Goal: double and foreign frees are refused whole. Method: each mixed behind good offsets, state compared."""
    slabs = SlabAllocator(16 * MIB)
    small, large = slabs.allocate(1000, 300), slabs.allocate(MIB, 3)
    gone = slabs.allocate(1000, 1) + slabs.allocate(MIB, 1)
    slabs.free(gone)
    used = slabs.used_bytes
    bad: list[object] = [small[0], large[0], *gone, 1, small[1] + 64, large[1] + 64, large[1] + UNIT_BYTES, -1024]
    bad += [16 * MIB, 1 << 60, -(16 * MIB), slabs.capacity_bytes - 4096, None, "x"]
    for offset in bad:
        with pytest.raises((ForeignExtent, TypeError)):
            slabs.free([*small[:200], *large, offset])  # type: ignore[list-item]
        assert slabs.used_bytes == used
        slabs.check()
    with pytest.raises(ForeignExtent):
        slabs.free(small + small[-1:])
    slabs.check()
    assert all(slabs.bytes_at(offset) == 1024 for offset in small) and slabs.bytes_at(large[2]) == MIB
    for offset in (small[0] + 64, large[0] + UNIT_BYTES, large[0] + 4096, *gone, -1, 1 << 60):
        with pytest.raises(ForeignExtent):
            slabs.bytes_at(offset)
    slabs.free(small + large)
    assert slabs.used_bytes == 0
    slabs.check()


def test_a_slab_of_one_slot_survives_a_failed_free() -> None:
    """Goal: the rarest slab shape rolls back too. Method: a segment so small that a slab holds one slot."""
    slabs = SlabAllocator(8 * UNIT_BYTES)
    places = slabs.allocate(5 * UNIT_BYTES)
    with pytest.raises(ForeignExtent):
        slabs.free([*places, 3])
    slabs.check()
    slabs.free(places)
    slabs.check()


def test_metadata_is_a_few_bytes_a_slot() -> None:
    """Goal: 10^7 slots fit in memory. Method: size of all containers after a million slots of 16 KiB."""
    slabs = SlabAllocator(17 << 30)
    assert len(slabs.allocate(16 * 1024, 1_000_000)) == 1_000_000
    seen = {id(o): o for o in slabs._owner if o is not None and not isinstance(o, int)}
    total = sum(sys.getsizeof(s) + sys.getsizeof(s.used) + sys.getsizeof(s.free) for s in seen.values())
    assert (total + sys.getsizeof(slabs._owner)) / 1e6 < 8


class SlabMachine(RuleBasedStateMachine):
    """Any sequence of allocate and free against a dict of offset -> class."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.slabs = SlabAllocator(1 * MIB, unit_bytes=4096)
        self.model: dict[int, int] = {}

    @rule(
        target=live,
        nbytes=st.sampled_from(
            [1, 64, 100, 1000, 4096, 4097, 12_000, 32_768, 32_769, 50_000, 131_072, 135_168, 143_360, 200_000]
        )
        | st.integers(1, MIB),
        count=st.integers(1, 40),
    )
    def allocate(self, nbytes: int, count: int) -> object:
        before, largest = self.slabs.used_bytes, self.slabs.largest_free_bytes
        offsets = self.slabs.allocate(nbytes, count)
        size = self.slabs.class_bytes(nbytes)
        assert len(offsets) <= count and (offsets or largest < size)
        assert self.slabs.used_bytes == before + size * len(offsets)
        for offset in offsets:
            assert offset >= 0 and offset + size <= self.slabs.capacity_bytes and offset not in self.model
            self.model[offset] = size
        return multiple(*offsets)

    @rule(offsets=st.lists(consumes(live), max_size=30))
    def free(self, offsets: list[int]) -> None:
        self.slabs.free(offsets)
        for offset in offsets:
            del self.model[offset]

    @rule(offsets=st.lists(live, max_size=8), bad=st.integers(-5000, MIB + 5000))
    def free_with_a_foreign_one(self, offsets: list[int], bad: int) -> None:
        if bad in self.model and bad not in offsets:
            bad += 1  # inside an allocation: as foreign as anything
        before = self.slabs.used_bytes
        with pytest.raises(ForeignExtent):
            self.slabs.free([*dict.fromkeys(offsets), bad])
        assert self.slabs.used_bytes == before

    @rule(again=live)
    def free_twice_in_one_call(self, again: int) -> None:
        with pytest.raises(ForeignExtent):
            self.slabs.free([again, again])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.slabs.check()
        assert self.slabs.used_bytes == sum(self.model.values())
        end = 0
        for offset, size in sorted(self.model.items()):
            assert offset >= end and self.slabs.bytes_at(offset) == size
            end = offset + size

    def teardown(self) -> None:
        self.slabs.free(list(self.model))
        self.slabs.check()
        assert self.slabs.largest_free_bytes == self.slabs.capacity_bytes


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
