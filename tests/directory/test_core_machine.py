"""The directory core against a plain model, under random events; `check()` runs after each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.directory.arena import aligned, key_of
from tests.directory.model import Model
from tests.directory.policies import POLICIES, WatchedPolicy
from ucxkv.directory import ROOT_KEY, Directory, PutStatus, SlotTable, events, part_key, table_bytes
from ucxkv.directory.events import Extent, LeaseStatus
from ucxkv.directory.slots_twin import TwinTable
from ucxkv.policy.decisions import DecisionLog

KEYS = [key_of(i) for i in range(28)]
# Four chains of seven; the last two hang on the first and the second, so that there are forks at several depths.
PARENTS = [ROOT_KEY if i in (0, 7) else KEYS[{14: 3, 21: 9}.get(i, i - 1)] for i in range(28)]
CAPACITY, GRACE, REGIONS = 22, 50, 4

indices = st.integers(0, len(KEYS) - 1)
some_keys = st.lists(indices, min_size=1, max_size=8)


class CoreMachine(RuleBasedStateMachine):
    """Random events on the core and on the model; answers, effects and what is visible must agree."""

    table_class: type[Any] = SlotTable
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        table = self.table_class(aligned(table_bytes(CAPACITY)), CAPACITY, epoch=3, seed=17)
        self.core = Directory(table, grace_ns=GRACE, policy=POLICIES[self.policy], decisions=DecisionLog(16))
        self.model = Model(CAPACITY, GRACE)
        self.now = 10**9
        self.offset = 0
        self.lease_ids: list[int] = []

    # ---- helpers ----

    def extents(self, n: int, region: int) -> list[Extent]:
        out = []
        for i in range(n):
            length = 64 * (1 + (self.offset + i) % 3)
            out.append(((region + i) % REGIONS, self.offset, length))
            self.offset += length
        return out

    def apply(self, what: Any) -> Any:
        outcome = self.core.handle(what, self.now)
        freed = sorted(extent for effect in outcome.effects for extent in effect.extents)
        self.freed = freed
        return outcome.reply

    def settle(self) -> None:
        """The model's frees after an event must be the core's."""
        assert self.freed == self.model.due(self.now)

    def columns(self, extents: list[Extent]) -> tuple[bytes, bytes, bytes, bytes]:
        regions, offsets, lengths = zip(*extents, strict=True)
        sums = np.arange(len(extents), dtype=np.uint64)
        return (
            np.array(regions, np.uint16).tobytes(),
            np.array(offsets, np.uint64).tobytes(),
            np.array(lengths, np.uint32).tobytes(),
            sums.tobytes(),
        )

    def put(self, which: list[int], region: int, parents: list[bytes] | None = None) -> None:
        above = parents or [PARENTS[i] for i in which]
        extents = self.extents(len(which), region)
        keys = b"".join(KEYS[i] for i in which)
        reply = self.apply(events.Put(keys, b"".join(above), *self.columns(extents)))
        self.model.drop_late(self.now)  # all of them before the first is put, as one event
        expected = [self.model.put(KEYS[i], a, e, self.now) for i, a, e in zip(which, above, extents, strict=True)]
        assert reply.status.tolist() == expected
        self.settle()

    def put_part(self, which: list[int], part: int, parts: int, put_id: int, region: int, last: int) -> None:
        extents = self.extents(len(which), region)
        above = [PARENTS[i] for i in which]
        deadline = self.now + last
        keys = b"".join(KEYS[i] for i in which)
        columns = self.columns(extents)
        reply = self.apply(events.PutPart(keys, b"".join(above), part, parts, put_id, *columns, deadline_ns=deadline))
        self.model.drop_late(self.now)
        expected = [
            self.model.put_part(KEYS[i], a, part, parts, put_id, e, deadline, self.now)
            for i, a, e in zip(which, above, extents, strict=True)
        ]
        assert reply.status.tolist() == expected
        assert (reply.retry_after_ns > 0) == (PutStatus.BUSY in expected)
        self.settle()

    def some_visible(self, data: st.DataObject, most: int) -> list[int]:
        """Indices, mostly of visible blocks; a miss among them now and then."""
        here = [i for i, key in enumerate(KEYS) if key in self.model.visible] or [0]
        return data.draw(
            st.lists(st.one_of(st.sampled_from(here), st.sampled_from(here), indices), min_size=1, max_size=most)
        )

    def below(self, which: list[int]) -> list[int]:
        """These blocks and all their descendants."""
        out = set(which)
        while more := {
            i for i, key in enumerate(KEYS)
            if key in self.model.visible and any(self.model.visible[key].parent == KEYS[j] for j in out)
        } - out:  # fmt: skip
            out |= more
        return sorted(out)

    # ---- rules ----

    @initialize(lengths=st.tuples(*[st.integers(0, 7)] * 4), region=st.integers(0, REGIONS - 1))
    def begin(self, lengths: tuple[int, ...], region: int) -> None:
        self.freed: list[Extent] = []
        self.losses = 0
        for chain, length in enumerate(lengths):
            if length:
                self.put_chain(chain=chain, length=length, region=region)

    @rule(chain=st.integers(0, 3), length=st.integers(1, 7), region=st.integers(0, REGIONS - 1))
    def put_chain(self, chain: int, length: int, region: int) -> None:
        self.put(list(range(7 * chain, 7 * chain + length)), region)

    @rule(which=some_keys, region=st.integers(0, REGIONS - 1))
    def put_any(self, which: list[int], region: int) -> None:
        self.put(which, region)

    @rule(which=some_keys, data=st.data())
    def put_under_odd_parents(self, which: list[int], data: st.DataObject) -> None:
        self.put(which, 0, [data.draw(st.sampled_from([ROOT_KEY, *KEYS])) for _ in which])

    @rule(
        which=st.lists(indices, min_size=1, max_size=3),
        part=st.integers(0, 2),
        parts=st.sampled_from([1, 2, 2, 3]),
        put_id=st.integers(1, 2),
        region=st.integers(0, REGIONS - 1),
        last=st.sampled_from([1, 60, 1000]),
    )
    def seal(self, which: list[int], part: int, parts: int, put_id: int, region: int, last: int) -> None:
        self.put_part(which, min(part, parts - 1), parts, put_id, region, last)

    @rule(
        chain=st.integers(0, 3),
        length=st.integers(1, 4),
        parts=st.integers(2, 3),
        region=st.integers(0, REGIONS - 1),
        keep=st.integers(0, 1),
    )
    def put_parts_of_a_chain(self, chain: int, length: int, parts: int, region: int, keep: int) -> None:
        """All parts of each block in turn, the last block perhaps one short: it stays in writing."""
        for at in range(7 * chain, 7 * chain + length):
            short = keep and at == 7 * chain + length - 1
            for part in reversed(range(int(short), parts)):
                self.put_part([at], part, parts, 9, region, 1000)

    @rule(
        data=st.data(),
        parts=st.sampled_from([2, 2, 3]),
        put_id=st.integers(3, 4),
        region=st.integers(0, REGIONS - 1),
        last=st.sampled_from([60, 1000, 10**8]),
        then=st.sampled_from(["", "", "late", "lost", "dropped"]),
    )
    def ranks_put_a_chain(
        self, data: st.DataObject, parts: int, put_id: int, region: int, last: int, then: str
    ) -> None:
        """Ranks in any order, each with its part of a run of a chain in one call: in order or not, all of it or not;
        some do not come. What they leave behind is in writing, incomplete or whole below an incomplete parent, and
        perhaps ends at once by its deadline or with what it stands on.
        """
        if data.draw(st.booleans()):
            self.evict(1500, 1000, None)  # room, so that not each of them ends at NO_SPACE
        line = [data.draw(st.sampled_from([i for i, key in enumerate(KEYS) if key not in self.model.visible]))]
        while PARENTS[line[0]] != ROOT_KEY:
            line.insert(0, KEYS.index(PARENTS[line[0]]))
        line = [i for i in line if KEYS[i] not in self.model.visible][: data.draw(st.integers(2, 6))]
        for at, part in enumerate(data.draw(st.permutations(range(parts)))[: data.draw(st.integers(1, parts + 1))]):
            how = data.draw(st.sampled_from(["forward", "backward", "tail", "head"])) if at else "forward"
            cut = data.draw(st.integers(0, len(line) - 1)) if how in ("tail", "head") else 0
            which = {"forward": line, "backward": line[::-1], "tail": line[cut:], "head": line[: cut + 1]}[how]
            self.put_part(which, part, parts, put_id, region, last)
        if then == "late":
            self.tick(1000)
        elif then == "lost" and any(KEYS[i] in self.model.drafts for i in line):
            self.lose_region(region)
        elif then == "dropped" and PARENTS[line[0]] in self.model.visible:
            self.drop_blocks([KEYS.index(PARENTS[line[0]])], 0)

    @rule(part=st.integers(0, 2), data=st.data(), region=st.integers(0, REGIONS - 1))
    def seal_more(self, part: int, data: st.DataObject, region: int) -> None:
        """A part of blocks that are in writing, under their own put_id, in any order: completes some, parents late."""
        if not self.model.drafts:
            return
        one = data.draw(st.sampled_from(list(self.model.drafts.values())))
        ours = [i for i, key in enumerate(KEYS) if (draft := self.model.drafts.get(key)) and draft.put_id == one.put_id]
        which = data.draw(st.lists(st.sampled_from(ours), min_size=1, max_size=6))
        self.put_part(which, min(part, one.parts - 1), one.parts, one.put_id, region, 1000)

    @rule(data=st.data())
    def put_next(self, data: st.DataObject) -> None:
        """Blocks that are not visible but whose parents are: those that a put stores."""
        seen = self.model.visible
        ready = [i for i, key in enumerate(KEYS) if key not in seen and (PARENTS[i] in seen or PARENTS[i] == ROOT_KEY)]
        if ready:
            self.put(data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=6)), data.draw(st.integers(0, 3)))

    @rule(data=st.data(), ttl=st.sampled_from([0, 20, 200, 2000]), owner=st.integers(1, 2))
    def lease(self, data: st.DataObject, ttl: int, owner: int) -> None:
        keys = [KEYS[i] for i in self.some_visible(data, 8)]
        reply = self.apply(events.Lease(b"".join(keys), ttl, owner))
        hits = [key in self.model.visible and ttl > 0 for key in keys]
        assert reply.status.tolist() == [LeaseStatus.GRANTED if hit else LeaseStatus.MISS for hit in hits]
        assert (reply.lease > 0) == any(hits)
        if reply.lease:
            assert reply.end_ns == self.now + ttl
            self.model.lease(reply.lease, keys, reply.end_ns, owner)
            self.lease_ids.append(reply.lease)
        self.settle()

    @rule(data=st.data(), ttl=st.sampled_from([10, 500]))
    def renew(self, data: st.DataObject, ttl: int) -> None:
        lease = data.draw(st.sampled_from(self.lease_ids)) if self.lease_ids else 12345
        held = self.model.leases.get(lease)
        ok = held is not None and held.end > self.now and not held.lost
        assert self.apply(events.Renew(lease, ttl)).ok == ok
        if held is not None and ok:
            held.end = max(held.end, self.now + ttl)
        self.settle()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.lease_ids)) if self.lease_ids else 12345
        assert self.apply(events.Release(lease)).ok == (lease in self.model.leases)
        if lease in self.model.leases:
            self.model.end_lease(lease)
        self.settle()

    @rule(owner=st.integers(1, 2))
    def owner_lost(self, owner: int) -> None:
        self.apply(events.OwnerLost(owner))
        for lease in self.model.leases.values():
            lease.lost |= lease.owner == owner
        self.settle()

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        keys = [KEYS[i] for i in self.some_visible(data, 8)]
        assert self.apply(events.Touch(b"".join(keys))).ok == any(key in self.model.visible for key in keys)
        self.settle()

    @rule(data=st.data())
    def delete_any(self, data: st.DataObject) -> None:
        self.delete(self.some_visible(data, 8))

    @rule(data=st.data(), keep=st.booleans())
    def delete_subtree(self, data: st.DataObject, keep: bool) -> None:
        """A block with all below it, in random order; perhaps all but one."""
        which = data.draw(st.permutations(self.below(self.some_visible(data, 1))))
        self.delete(which[1:] if keep and len(which) > 1 else which)

    def delete(self, which: list[int]) -> None:
        keys = [KEYS[i] for i in which]
        reply = self.apply(events.Delete(b"".join(keys)))
        assert reply.status.tolist() == self.model.delete(keys, self.now)
        self.settle()

    @rule(
        nbytes=st.integers(1, 1500),
        limit=st.sampled_from([1, 3, 1000]),
        regions=st.sampled_from([None, None, (0,), (1, 3)]),
    )
    def evict(self, nbytes: int, limit: int, regions: tuple[int, ...] | None) -> None:
        before = dict(self.model.visible)
        reply = self.apply(events.Evict(nbytes, regions, limit))
        gone = {key for key in before if not self.core.reader.exists(key)[0]}
        for key in sorted(gone, key=KEYS.index, reverse=True):  # deepest first
            assert not before[key].leases, "a leased block was evicted"
            assert regions is None or any(extent[0] in regions for extent in before[key].extents)
            self.model.remove(key, self.now)
        size = sum(extent[2] for key in gone for extent in before[key].extents)
        assert (reply.blocks, reply.bytes) == (len(gone), size)
        free = [key for key, block in self.model.visible.items() if not self.model.children(key) and not block.leases]
        if limit == 1000 and regions is None:
            assert size >= nbytes or not free, "stopped early although leaves are left"
            smallest = [sum(e[2] for e in before[key].extents) for key in gone]
            assert not gone or size - max(smallest) < nbytes, "went on although it was enough"
        assert len(gone) <= limit
        self.settle()

    @precondition(lambda self: self.losses < 2)
    @rule(region=st.integers(0, REGIONS - 1))
    def lose_region(self, region: int) -> None:
        self.losses += 1
        reply = self.apply(events.Lost([region]))
        assert reply.blocks == len(self.model.lose(region, self.now))
        self.settle()

    @precondition(lambda self: self.losses < 2)
    @rule(data=st.data(), part=st.integers(0, 2))
    def drop(self, data: st.DataObject, part: int) -> None:
        """Values found bad, named by the block's key or by one of its parts'."""
        self.losses += 1
        self.drop_blocks(self.some_visible(data, 2), part)

    def drop_blocks(self, which: list[int], part: int) -> None:
        names = []
        for key in (KEYS[i] for i in which):
            parts = len(self.model.visible[key].extents) if key in self.model.visible else 1
            names.append(part_key(key, min(part, parts - 1), parts))
        reply = self.apply(events.Drop(b"".join(names)))
        assert reply.blocks == len(self.model.drop_blocks([KEYS[i] for i in which], self.now))
        self.settle()

    @rule(step=st.sampled_from([1, 49, 50, 51, 100, 1000, 2 * 10**7, 3 * 10**9]))
    def tick(self, step: int) -> None:
        self.now += step
        self.apply(events.Tick())
        self.model.tick(self.now)
        self.settle()

    @rule()
    def time_passes_unseen(self) -> None:
        """Into the next 10 ms, without a Tick: what a learner is to be told waits."""
        self.now += 10**7

    def teardown(self) -> None:
        for what, times in self.model.seen.items():
            if times:
                event(f"of drafts below drafts: {what}")  # see them with --hypothesis-show-statistics

    # ---- what must hold after each ----

    @invariant()
    def everything_agrees(self) -> None:
        self.core.check()
        model = self.model
        records, found = self.core.lookup(b"".join(KEYS))
        assert {key for key, hit in zip(KEYS, found, strict=True) if hit} == set(model.visible)
        for key, record in zip(KEYS, records, strict=True):
            if key not in model.visible:
                continue
            parts = len(model.visible[key].extents)
            every = [record] + [self.core.lookup(part_key(key, p, parts))[0][0] for p in range(1, parts)]
            assert [(r["region"], r["offset"], r["length"]) for r in every] == model.visible[key].extents
        for chain in range(4):
            run = KEYS[7 * chain : 7 * chain + 7]
            expected = next((i for i, key in enumerate(run) if key not in model.visible), 7)
            assert self.core.match(b"".join(run)) == expected
        _, page = self.core.scan(0, CAPACITY)
        assert {r.tobytes() for r in page["key"]} == set(model.visible)
        assert {block.key for block in self.core.parts.writing} == set(model.drafts)
        stats = self.core.stats()
        assert (stats.blocks, stats.slots_used, stats.writing) == (len(model.visible), model.used, len(model.drafts))
        assert stats.leases == len(model.leases)


class S3FifoMachine(CoreMachine):
    """The same with a policy that is told everything."""

    policy = "s3fifo"


class TucMachine(CoreMachine):
    """The same with the policy that learns."""

    policy = "tuc"


class WatchedMachine(CoreMachine):
    """The same with a policy that asserts what it is told, and in which order."""

    policy = "watched"

    @invariant()
    def it_knows_what_is_visible(self) -> None:
        policy, ranking = self.core.ranking.policy, self.core.ranking
        assert isinstance(policy, WatchedPolicy)
        new = {slot for span in ranking._spans for slot in span.came}
        records = self.core.table.records
        blocks = {
            slot: int.from_bytes(records["key"][slot].tobytes()[:8], "little")
            for slot in np.flatnonzero(records["state"] == 1).tolist()
            if not self.core.words.is_derived(slot)
        }
        assert policy.known == {slot: name for slot, name in blocks.items() if slot not in new}
        assert policy.cold == {slot for slot in policy.known if self.core.cold.is_cold(slot)}


class TwinMachine(CoreMachine):
    """The same over the twin of the slot table."""

    table_class = TwinTable


_settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCoreAgainstModel = CoreMachine.TestCase
TestCoreAgainstModel.settings = _settings
TestCoreOverTwinAgainstModel = TwinMachine.TestCase
for each in (S3FifoMachine, TucMachine, WatchedMachine):
    each.TestCase.settings = settings(_settings, max_examples=60)
TestCoreWithS3FifoAgainstModel = S3FifoMachine.TestCase
TestCoreWithTucAgainstModel = TucMachine.TestCase
TestCoreWithWatchedPolicyAgainstModel = WatchedMachine.TestCase
TestCoreOverTwinAgainstModel.settings = settings(_settings, max_examples=20)
