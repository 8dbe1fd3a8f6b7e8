"""Two shards, a network between them that loses, doubles and reorders, and crashes of either: no hole is ever visible.

The cores are real and so is the walk; the machine plays their shells, the network and the clients. Checked after each
step: both cores' own invariants; that each child of a parent elsewhere is pinned there (unless that shard lost memory
or crashed since); and for every walk that ends, that its answer was exactly what was reachable at one moment within it.
Study, fault test 10.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.directory.arena import aligned
from ucxkv.directory import ROOT_KEY, Directory, PutStatus, events, table_bytes
from ucxkv.directory import crossing as cx
from ucxkv.directory.elsewhere import ShardRole
from ucxkv.directory.slots_twin import TwinTable
from ucxkv.heads import Heads
from ucxkv.keys import KeyArray
from ucxkv.sharding import ShardRule
from ucxkv.walk import Walk

RULE = ShardRule(shards=2, fanout=1, cut_blocks=4)
CAPACITY, GRACE, LONG = 24, 10, 10**9
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5)
shards = st.integers(0, 1)


def chain(path: list[int]) -> list[bytes]:
    """Keys of a chain, so that chains with a common head share its keys."""
    return [xxhash.xxh3_128_digest(b"machine" + bytes(path[: depth + 1])) for depth in range(len(path))]


def columns(keys: list[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


class Running:
    """A walk on its way, with what was reachable at each moment since it began. None: it began a new count."""

    def __init__(self, keys: list[bytes], walk: Walk, client: int) -> None:
        self.keys, self.walk, self.client = keys, walk, client
        self.moments: set[int] = set()
        self.is_disturbed = False


class TwoShards(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = [1, 1]
        self.now = 10**9
        self.offset = 0
        self.cores = [self.fresh(0), self.fresh(1)]
        self.wire: list[tuple[int, int, Any]] = []  # (from, to, what)
        self.excused: set[tuple[int, bytes]] = set()  # (shard of the child, child): its parent's shard lost it
        self.heads = [Heads(), Heads(limit=1)]
        self.walks: list[Running] = []
        self.losses = 0
        self.paths: list[list[int]] = [[0]]

    def fresh(self, shard: int) -> Directory:
        table = TwinTable(aligned(table_bytes(CAPACITY)), CAPACITY, epoch=self.epoch[shard], seed=shard)
        return Directory(table, grace_ns=GRACE, role=ShardRole(shard, RULE))

    # ---- shells and wire

    def apply(self, shard: int, what: Any) -> Any:
        outcome = self.cores[shard].handle(what, self.now)
        self.wire += [(shard, send.shard, send.event) for send in outcome.sends]
        self.note()
        return outcome.reply

    def note(self) -> None:
        """One moment: what is reachable for every walk on its way."""
        for running in self.walks:
            running.moments.add(self.reachable(running.keys))

    def deliver(self, sender: int, to: int, what: Any) -> None:
        if isinstance(what, cx.Pin):
            reply = self.apply(to, what)
            self.wire.append((to, sender, cx.Pinned(what.child, what.token, reply)))
        elif isinstance(what, cx.AskPin):
            if not self.apply(to, what).ok:
                self.wire.append((to, sender, cx.Unpin(what.parent, what.child, what.token)))
        elif isinstance(what, cx.Orphaned | cx.Pinned) and (to, what.child) in self.excused:
            self.apply_losing(to, what)  # what is lost there goes on to what is below it here
        else:
            self.apply(to, what)

    # ---- what is there, seen from above

    def reachable(self, keys: list[bytes]) -> int:
        """The longest prefix at this moment: from the root on, each next block where the one before is, or in its own
        shard with the one before pinned for it."""
        at = RULE.own(keys[0])
        for depth, key in enumerate(keys):
            if self.slot(at, key) >= 0 and (depth == 0 or self.is_child(at, key, keys[depth - 1])):
                continue
            own = RULE.own(key)
            if depth and own != at and self.slot(own, key) >= 0 and key in self.cores[at].elsewhere.pins:
                at = own
            else:
                return depth
        return len(keys)

    def slot(self, shard: int, key: bytes) -> int:
        return int(self.cores[shard].table.find(key)[0])

    def is_child(self, shard: int, key: bytes, parent: bytes) -> bool:
        core = self.cores[shard]
        return bool(core.parent[self.slot(shard, key)] == self.slot(shard, parent))

    def put_one(self, shard: int, key: bytes, parent: bytes, parts: int) -> PutStatus:
        status = PutStatus.REFUSED
        for part in range(parts):
            self.offset += 100
            numbers = (np.zeros(1, np.uint16), np.full(1, self.offset, np.uint64), np.full(1, 100, np.uint32))
            row = (*numbers, np.zeros(1, np.uint64))
            if parts == 1:
                put: Any = events.Put(key, parent, *row)
            else:
                put = events.PutPart(key, parent, part, parts, 7, *row, deadline_ns=self.now + LONG)
            status = PutStatus(self.apply(shard, put).status[0])
        return status

    # ---- rules

    @initialize(some=st.lists(paths, min_size=3, max_size=6))
    def begin(self, some: list[list[int]]) -> None:
        for path in some:
            self.put(path=path, parts=1, is_hasty=True)

    @rule(path=paths, parts=st.sampled_from([1, 1, 1, 2]), is_hasty=st.booleans())
    def put(self, path: list[int], parts: int, is_hasty: bool) -> None:
        """As a client does: each block where its parent is, else in its own shard, which pins the parent first. Hasty:
        the network does well meanwhile."""
        self.paths = [path, *self.paths[:7]]
        parent, at = ROOT_KEY, RULE.own(chain(path)[0])
        for key in chain(path):
            status = self.put_one(at, key, parent, parts)
            if status == PutStatus.ELSEWHERE:
                own = RULE.own(key)
                assert own != at
                reply = self.apply(own, cx.Expect(key, parent, at, self.now + 200))
                if reply.pin is not None:
                    self.wire.append((own, at, reply.pin.event))
                    if is_hasty:
                        self.deliver(*self.wire.pop())
                        self.deliver(*self.wire.pop())
                status = self.put_one(own, key, parent, parts)
                at = own
                event(f"put elsewhere: {status.name}")
            if status not in (PutStatus.STORED, PutStatus.ALREADY):
                return
            parent = key

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "drop", "double"]))
    def network(self, data: st.DataObject, fate: str) -> None:
        at = data.draw(st.integers(0, min(len(self.wire), 6) - 1))
        message = self.wire[at] if fate == "double" else self.wire.pop(at)
        if fate != "drop":
            self.deliver(*message)

    @rule(shard=shards, limit=st.integers(1, 4))
    def evict(self, shard: int, limit: int) -> None:
        self.apply(shard, events.Evict(1000, None, limit))

    @rule(path=paths)
    def delete(self, path: list[int]) -> None:
        for shard in (0, 1):
            self.apply(shard, events.Delete(b"".join(chain(path)[-2:])))

    @precondition(lambda self: self.losses < 2)
    @rule(shard=shards, path=paths)
    def drop(self, shard: int, path: list[int]) -> None:
        """Damaged values take all below along, whoever is held for them."""
        self.apply_loss(shard, events.Drop(chain(path)[-1]))

    def apply_loss(self, shard: int, what: Any) -> None:
        self.losses += 1
        self.apply_losing(shard, what)

    def apply_losing(self, shard: int, what: Any) -> None:
        """What may take pins away: the children that they were for stay visible until they hear of it."""
        self.disturb()
        before = set(self.cores[shard].elsewhere.pins)
        self.apply(shard, what)
        self.excused |= {(1 - shard, child) for child in before - set(self.cores[shard].elsewhere.pins)}

    def disturb(self) -> None:
        for running in self.walks:
            running.is_disturbed = True

    @precondition(lambda self: self.losses < 2)
    @rule(shard=shards)
    def crash(self, shard: int) -> None:
        """All is lost, with what was on its way from there; the next leader begins with nothing."""
        self.losses += 1
        self.disturb()
        self.excused |= {(1 - shard, child) for child in self.cores[1 - shard].elsewhere.crossings}
        self.excused = {(where, child) for where, child in self.excused if where != shard}
        self.epoch[shard] += 1
        self.cores[shard] = self.fresh(shard)
        self.wire = [message for message in self.wire if message[0] != shard]
        self.note()

    @rule(shard=shards, step=st.sampled_from([1, 10, 201]))
    def tick(self, shard: int, step: int) -> None:
        self.now += step
        self.apply(shard, events.Tick())

    @rule(shard=shards, limit=st.integers(1, 3))
    def audit(self, shard: int, limit: int) -> None:
        for send in self.apply(shard, cx.Reclaim(limit)).sends:
            self.wire.append((shard, send.shard, send.event))

    @rule(shard=shards)
    def repin(self, shard: int) -> None:
        for send in self.apply(shard, cx.Repin(1 - shard)).sends:
            self.wire.append((shard, send.shard, send.event))

    # ---- walks

    @precondition(lambda self: len(self.walks) < 3)
    @rule(path=paths, client=shards, strict=st.booleans())
    def start_walk(self, path: list[int], client: int, strict: bool) -> None:
        keys = chain(path)
        walk = Walk(columns(keys), RULE, head=self.heads[client].find(columns(keys)), strict=strict)
        self.walks.append(Running(keys, walk, client))
        self.note()

    @rule(which=st.integers(0, 7), client=shards)
    def whole_walk(self, which: int, client: int) -> None:
        """A walk along what was put that nothing comes between, and what the client learns from it."""
        self.start_walk(path=self.paths[which % len(self.paths)], client=client, strict=False)
        running = self.walks[-1]
        while running in self.walks:
            self.step(running)

    @precondition(lambda self: self.walks)
    @rule(which=st.integers(0, 2))
    def step_walk(self, which: int) -> None:
        self.step(self.walks[which % len(self.walks)])

    def step(self, running: Running) -> None:
        ask = running.walk.ask()
        if ask is not None:
            above = running.keys[ask.first - 1] if ask.first else None
            answer = self.cores[ask.shard].elsewhere.answer(b"".join(running.keys[ask.first : ask.last]), above)
            running.walk.answer(answer)
        if running.walk.ask() is None:
            self.walks.remove(running)
            self.end_walk(running)

    def end_walk(self, running: Running) -> None:
        walk = running.walk
        if not running.is_disturbed and not self.stale(running.keys):
            assert walk.visible in running.moments, (walk.visible, running.moments)
            event(f"walk: {'a head known, ' if walk.heads else ''}{walk.messages} messages")
        if walk.is_settled:
            for key, shard in self.heads[running.client].learn(columns(running.keys), walk):
                self.complete(running.client, key, shard)

    def stale(self, keys: list[bytes]) -> bool:
        """Whether a child of a lost parent, or a pin that vouches for one, is still about on this chain."""
        named = set(keys)
        return any(
            key in named or crossing.parent in named
            for where, key in self.excused
            if (crossing := self.cores[where].elsewhere.crossings.get(key)) is not None
        )

    def complete(self, client: int, key: bytes, shard: int) -> None:
        reply = self.apply(shard, cx.Local(key))
        if reply.life is not None and reply.is_delegating:
            self.heads[client].complete(key, reply.life, reply.local)
        else:
            self.heads[client].forget(key)

    # ---- what must hold

    @invariant()
    def never_a_pin_too_few(self) -> None:
        for shard, core in enumerate(self.cores):
            core.check()
            links, other = core.elsewhere, self.cores[1 - shard]
            self.excused = {(s, child) for s, child in self.excused if s != shard or child in links.crossings}
            for child in links.slots.values():
                parent = links.crossings[child].parent
                if (shard, child) in self.excused:
                    if child in other.elsewhere.pins:
                        self.excused.discard((shard, child))  # pinned again
                    continue
                assert child in other.elsewhere.pins, "a visible child whose parent isn't pinned"
                assert self.slot(1 - shard, parent) >= 0, "a hole: the parent isn't visible"

    def teardown(self) -> None:
        """Left alone, with a network that does well, the two agree: no pin too many, no child too many."""
        for _ in range(3):
            while self.wire:
                self.deliver(*self.wire.pop(0))
            self.now += 10**10
            for shard in (0, 1):
                self.apply(shard, events.Tick())
                for what in (cx.Repin(1 - shard), cx.Reclaim(100)):
                    self.wire += [(shard, send.shard, send.event) for send in self.apply(shard, what).sends]
        while self.wire:
            self.deliver(*self.wire.pop(0))
        for shard, core in enumerate(self.cores):
            links, other = core.elsewhere, self.cores[1 - shard].elsewhere
            assert set(links.pins) == set(other.slots.values())
            assert not links.coming
            for key in links.slots.values():
                assert self.slot(1 - shard, links.crossings[key].parent) >= 0
                event("crossings at the end")


TwoShards.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoShards = TwoShards.TestCase
