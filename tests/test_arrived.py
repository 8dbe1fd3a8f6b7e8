"""Values that wait for their log entries: who gets them, what goes first, and that every extent is in one hand."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ucxkv.node.arrived import LIFE_NS, Arrived
from ucxkv.protocol import messages as m
from ucxkv.tiers.grants import GrantTable
from ucxkv.tiers.slabs import SlabAllocator

SIZE = 4 << 20
LIMIT = 1 << 20
LENGTHS = st.sampled_from([0, 1, 4096, 100_000, 300_000, 2_000_000])
SESSIONS = st.integers(1, 3)
SHARDS = st.integers(0, 2)
Name = tuple[int, bytes, int, int]


def u64(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


class ArrivedMachine(RuleBasedStateMachine):
    """Against a plain dict in order of arrival: name -> (capacity, since)."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs = SlabAllocator(SIZE)
        self.grants = GrantTable(limit_bytes=SIZE)
        self.arrived = Arrived(self.slabs, self.grants, LIMIT)
        self.model: dict[Name, tuple[int, int]] = {}
        self.told: list[int] = []
        self.arrived.on_arrived = self.told.append
        self.kept: set[Name] = set()
        self.arrived.has_value = lambda *name: name in self.kept
        self.lent: list[tuple[int, int, int, int]] = []
        """(session, offset, length, capacity)."""
        self.claimed: dict[int, int] = {}
        self.now_ns = 0

    @rule(session=SESSIONS, length=LENGTHS)
    def grant(self, session: int, length: int) -> None:
        capacity = self.slabs.class_bytes(max(1, length))
        for offset in self.slabs.allocate(max(1, length)):
            self.grants.grant_run(session, 0, [offset], capacity)
            self.lent.append((session, offset, length, capacity))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), session=SESSIONS, shard=SHARDS, count=st.integers(1, 4), key=st.integers(0, 2))
    def take(self, data: st.DataObject, session: int, shard: int, count: int, key: int) -> None:
        """Values in any extents that are lent to anybody; those of another session are not taken."""
        named = [data.draw(st.sampled_from(self.lent)) for _ in range(count)]
        names = [(shard, bytes([key + i % 2]) * 16, 5, length) for i, (_, _, length, _) in enumerate(named)]
        values = m.Values(
            shard=shard,
            keys=b"".join(name[1] for name in names),
            sums=u64(*(name[2] for name in names)),
            lengths=np.array([name[3] for name in names], np.uint32).tobytes(),
            offsets=u64(*(offset for _, offset, _, _ in named)),
        )
        expected = bytearray()
        for name, extent in zip(names, named, strict=True):
            is_held = extent in self.lent and extent[0] == session
            expected.append(not is_held)
            if is_held:
                self.lent.remove(extent)
                capacity, _ = self.model.pop(name, (extent[3], 0))
                self.model[name] = capacity, self.now_ns
                while sum(size for size, _ in self.model.values()) > LIMIT and len(self.model) > 1:
                    del self.model[next(iter(self.model))]
        self.told.clear()
        assert self.arrived.take(session, values, self.now_ns).status == bytes(expected)
        assert self.told == ([shard] if 0 in expected else [])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        assert self.arrived.has(*name)
        offset = self.arrived.claim(*name)
        capacity, _ = self.model.pop(name)
        assert offset is not None and self.slabs.bytes_at(offset) == capacity
        assert offset not in self.claimed
        self.claimed[offset] = capacity

    @rule(shard=SHARDS, key=st.integers(0, 3), total=st.integers(5, 6), length=LENGTHS, is_kept=st.booleans())
    def ask(self, shard: int, key: int, total: int, length: int, is_kept: bool) -> None:
        """One whose sum, length, shard or key differs is another value; what is here waits anew."""
        name = (shard, bytes([key]) * 16, total, length)
        self.kept = {name} if is_kept else set()
        asked = m.HaveValues(shard, name[1], u64(total), np.array([length], np.uint32).tobytes())
        is_here = name in self.model
        assert self.arrived.has(*name) == is_here
        assert self.arrived.lacking(asked, self.now_ns).status == bytes([not (is_here or is_kept)])
        if is_here:
            capacity, _ = self.model.pop(name)
            self.model[name] = capacity, self.now_ns
        else:
            assert self.arrived.claim(*name) is None

    @rule(shard=SHARDS)
    def drop_shard(self, shard: int) -> None:
        self.arrived.drop_shard(shard)
        self.model = {name: value for name, value in self.model.items() if name[0] != shard}

    @rule(step=st.sampled_from([1, LIFE_NS // 3, LIFE_NS - 1, LIFE_NS]))
    def expire(self, step: int) -> None:
        self.now_ns += step
        self.arrived.expire(self.now_ns)
        self.model = {name: value for name, value in self.model.items() if self.now_ns - value[1] < LIFE_NS}

    @rule()
    def free_claimed(self) -> None:
        self.slabs.free(list(self.claimed))
        self.claimed.clear()

    @invariant()
    def every_extent_is_in_one_hand(self) -> None:
        self.arrived.check()
        self.slabs.check()
        self.grants.check()
        assert len(self.arrived) == len(self.model)
        assert all(self.arrived.has(*name) for name in self.model)
        assert self.arrived.bytes_count == sum(size for size, _ in self.model.values())
        used = self.arrived.bytes_count + self.grants.lent_bytes + sum(self.claimed.values())
        assert self.slabs.used_bytes == used


TestArrived = ArrivedMachine.TestCase
TestArrived.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
