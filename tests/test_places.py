"""Handles of copies on disk, against a plain model."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ucxkv.node.disk.places import Places
from ucxkv.tiers.datafiles import Place

LIVES = [(drive, file, generation) for drive in (0, 1) for file in (1, 2) for generation in (1, 2)]
lives = st.sampled_from(LIVES)


class PlacesMachine(RuleBasedStateMachine):
    """Copies come, move and are freed, and files end; handles are used again all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(4)
        self.there: dict[int, Place] = {}
        self.gone: set[int] = set()
        self.offset = 0

    def place(self, life: tuple[int, int, int]) -> Place:
        self.offset += 4096
        return Place(file=life[1], generation=life[2], offset=self.offset, length=5, sum=9, flags=0, drive=life[0])

    @rule(life=lives, count=st.integers(1, 5))
    def written(self, life: tuple[int, int, int], count: int) -> None:
        places = [self.place(life) for _ in range(count)]
        keys = [each.offset.to_bytes(16, "little") for each in places]
        handles = self.places.add(keys, places, [each.sum for each in places]).tolist()
        assert 0 not in handles and not self.gone & set(handles) and not self.there.keys() & set(handles)
        self.there.update(zip(handles, places, strict=True))

    @rule(data=st.data(), life=lives)
    def moved(self, data: st.DataObject, life: tuple[int, int, int]) -> None:
        if self.there:
            handle = data.draw(st.sampled_from(sorted(self.there)))
            self.there[handle] = self.place(life)
            self.places.move(handle, self.there[handle])

    @rule(data=st.data())
    def freed(self, data: st.DataObject) -> None:
        if self.there or self.gone:
            handle = data.draw(st.sampled_from(sorted({*self.there, *self.gone})))
            assert self.places.free(handle) == (handle in self.there)
            self.there.pop(handle, None)
            self.gone.discard(handle)

    @rule(life=lives)
    def file_ended(self, life: tuple[int, int, int]) -> None:
        """All copies in it are named once, in the order in which they were written."""
        ended = [h for h, each in self.there.items() if (each.drive, each.file, each.generation) == life]
        handles = self.places.of_file(*life)
        assert handles.dtype == np.uint32 and sorted(handles.tolist()) == sorted(ended)
        for handle in ended:
            self.gone.add(handle)
            del self.there[handle]

    @invariant()
    def each_handle_names_its_copy(self) -> None:
        assert len(self.places) == len(self.there) + len(self.gone)
        for handle, place in self.there.items():
            assert self.places.place(handle) == place
        assert not any(self.places.place(handle) for handle in self.gone)


PlacesMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPlacesAgainstModel = PlacesMachine.TestCase


def test_the_copies_of_a_file_come_in_the_order_of_its_log() -> None:
    """Goal: what is named to be written again comes parents first. Method: handles that are used again out of order."""
    places = Places(100)

    def write(offset: int) -> int:
        place = Place(file=1, generation=1, offset=offset, length=5, sum=9, flags=0, drive=0)
        return int(places.add([offset.to_bytes(16, "little")], [place], [9])[0])

    before = [write(offset) for offset in (4096, 8192, 12288)]
    for handle in (before[0], before[2]):
        places.free(handle)
    after = [write(offset) for offset in (16384, 20480)]
    assert {*after} == {before[0], before[2]}
    assert places.of_file(0, 1, 1).tolist() == [before[1], *after]
    assert len(places.of_file(0, 1, 1)) == 0
