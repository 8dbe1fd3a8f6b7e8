"""The durable blocks of a shard that is not led here, against a dict; every value's memory is handed back once."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.shards.rows import KEYS, rows_of
from ucxkv.node.shards.standby import Standby
from ucxkv.node.space import Place

NUMBERS = st.integers(0, 5)
SOME = st.lists(st.tuples(NUMBERS, st.sampled_from([True, True, False]), st.integers(0, 3)), max_size=4)


class StandbyMachine(RuleBasedStateMachine):
    """Model: key -> (offset or None, sum), in the order of the last Commits. Each value gets a new offset."""

    def __init__(self) -> None:
        super().__init__()
        self.standby = Standby()
        self.model: dict[bytes, tuple[int | None, int]] = {}
        self.given = 0
        self.held: set[int] = set()

    def rows(self, some: list[tuple[int, bool, int]]) -> list[tuple[int, int, int]]:
        out = []
        for key, is_here, total in {one[0]: one for one in some}.values():
            self.given += 1
            out.append((key, self.given if is_here else -1, total))
            if is_here:
                self.held.add(self.given)
        return out

    def freed(self, offsets: list[int]) -> None:
        assert len(offsets) == len(set(offsets))
        assert self.held.issuperset(offsets), "memory handed back twice, or never given"
        self.held.difference_update(offsets)

    def enter(self, rows: list[tuple[int, int, int]]) -> None:
        for key, offset, total in rows:
            self.model.pop(KEYS[key], None)
            self.model[KEYS[key]] = (offset if offset >= 0 else None, total)

    @rule(some=SOME)
    def commit(self, some: list[tuple[int, bool, int]]) -> None:
        rows = self.rows(some)
        self.freed(self.standby.commit(rows_of(*rows)))
        self.enter(rows)

    @rule(keys=st.lists(NUMBERS, max_size=3))
    def leave(self, keys: list[int]) -> None:
        self.freed(self.standby.leave(b"".join(KEYS[key] for key in keys)))
        for key in keys:
            self.model.pop(KEYS[key], None)

    @rule(some=SOME, is_kept=st.booleans())
    def replace(self, some: list[tuple[int, bool, int]], is_kept: bool) -> None:
        """A snapshot: some of its values are where they were."""
        rows = self.rows(some)
        if is_kept:
            kept = {KEYS.index(key): place for key, place in self.model.items() if place[0] is not None}
            rows = [(key, kept[key][0], kept[key][1]) if key in kept else (key, at, total) for key, at, total in rows]
        self.freed(self.standby.replace(rows_of(*rows)))
        self.model = {}
        self.enter(rows)
        self.held.intersection_update(offset for offset, _ in self.model.values())

    @rule()
    def take(self) -> None:
        """Its values are the directory's: nothing is handed back, and all is again when it is committed anew."""
        rows = self.standby.take()
        assert len(self.standby) == 0 and not list(self.standby.offsets())
        assert self.standby.commit(rows) == []

    @invariant()
    def agrees(self) -> None:
        rows = self.standby.rows()
        assert [key.tobytes() for key in rows["key"]] == list(self.model), "out of order"
        assert set(self.standby.offsets()) == {at for at, _ in self.model.values() if at is not None} == self.held
        for key in KEYS:
            offset, total = self.model.get(key, (None, 0))
            is_there = offset is not None
            assert self.standby.place(key) == (Place(offset, 10 + total, total) if is_there else None)  # type: ignore[arg-type]
            assert (self.standby.find(key, total, 10 + total) is not None) == is_there
            assert self.standby.find(key, total + 1, 10 + total) is None
            assert self.standby.find(key, total, 9) is None


TestStandby = StandbyMachine.TestCase
