"""Nodes of one cluster in this process: their real shards, stores, feeders and durable puts, in a world that is moved
by hand. Scripted are the control plane, the journals (lists of frames), the network and the clock.

A mirror copies bytes from one node's segment into another one's through the grants and `Arrived`, as a real one does.
After every step `check` asserts what must hold; `heal` lets everything that waits come true.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.shards.life import CHAINS, LEASE_NS, MS, RULE, SHARDS, TIMING, Clock, Life, value_of
from ucxkv import errors
from ucxkv.control.cluster import ClusterView
from ucxkv.control.records import ClusterRecord, MemberRecord
from ucxkv.directory import DeleteStatus, PutStatus
from ucxkv.directory.invariants import held_extents
from ucxkv.directory.log import read_record
from ucxkv.ids import ROOT_KEY
from ucxkv.node import staging as staging_module
from ucxkv.node.shards import feeding as feeding_module
from ucxkv.node.shards import shard as shard_module
from ucxkv.node.shards import shards as shards_module
from ucxkv.node.shards.records import ABSENT_REGION
from ucxkv.node.shards.shard import Shard
from ucxkv.protocol import messages as m
from ucxkv.replication import Kind, Member, Role, ShardConfig
from ucxkv.replication import events as ev
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.copy import sum_bytes


@dataclass
class Asked:
    """A durable put or delete on its way. told: its statuses, None: it is not known; is_damaged: it hangs on what went
    bad since, so what becomes of it is nobody's promise."""

    life: Life
    key: bytes
    future: asyncio.Future[bytes]
    told: Callable[[bytes | None], None]
    is_damaged: bool = False


class Fleet:
    """See the module. replicas: 1 to 3, of as many nodes."""

    def __init__(self, replicas: int = 2) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self._patches = contextlib.ExitStack()
        for module in (shard_module, shards_module, staging_module):
            self._patches.enter_context(mock.patch.object(module, "time", self.clock))
        self._patches.enter_context(mock.patch.object(feeding_module, "_RETRY_S", 0))
        self._patches.enter_context(mock.patch.object(shards_module, "TIMING", TIMING))
        self._patches.enter_context(mock.patch.object(shard_module, "_CHUNK_ROWS", 2))
        self.record = ClusterRecord(
            cluster_id="c", shards=SHARDS, fanout=RULE.fanout, cut_blocks=RULE.cut_blocks, replicas=replicas
        )
        self.revision, self.incarnations = 1, 0
        self.alive: dict[str, Member] = {}
        self.lease_ends: dict[str, int] = {}
        self.configs: dict[int, tuple[ShardConfig, int]] = {}
        self.doubts = 0
        """So many writes of configurations to come have an unknown outcome; every second of them happens."""
        self.net: deque[tuple[str, str, Any]] = deque()
        self.history: list[dict[int, bytes]] = [{} for _ in range(SHARDS)]
        """By index: the record that was applied (b"" of a leader's first)."""
        self._turns: dict[bytes, int] = {}
        self.sure: dict[bytes, bytes | None] = {}
        """What was acknowledged last, and nothing was begun since: the value, None: deleted."""
        self.damaged: set[bytes] = set()
        """Keys of which a value went bad once. Where its leader is deposed before that is logged, it has the block
        without its value, until it leads again.
        """
        self.waiting: list[Asked] = []
        self.names = ("a", "b", "c")[:replicas]
        self.lives: dict[str, Life] = {}
        self.do(lambda: [self.lives.__setitem__(name, Life(self, name, [], None, b"")) for name in self.names])

    def do(self, what: Callable[[], Any]) -> Any:
        """Carry out one step, and what follows from it at once."""

        async def step() -> Any:
            out = what()
            if asyncio.iscoroutine(out):
                out = await out
            for _ in range(12):
                await asyncio.sleep(0)
            for life in self.lives.values():
                life.timers.fire()
            for _ in range(6):
                await asyncio.sleep(0)
            return out

        return self.loop.run_until_complete(step())

    def close(self) -> None:
        async def close() -> None:
            for life in self.lives.values():
                await life.close()

        self.loop.run_until_complete(close())
        self.loop.close()
        self._patches.close()

    # ---- the control plane

    def register(self, name: str) -> Member:
        self.incarnations += 1
        self.revision += 1
        self.alive[name] = Member(name, self.incarnations)
        return self.alive[name]

    def view(self) -> ClusterView:
        members = [
            MemberRecord(
                name=member.name, incarnation=member.incarnation, node_id=member.incarnation, address="x", epoch=1,
                weight=1.0, lease_s=3.0,
            )
            for member in sorted(self.alive.values())
        ]  # fmt: skip
        return ClusterView(self.revision, members, dict(self.configs), frozenset())

    def expire(self) -> None:
        for name, end in list(self.lease_ends.items()):
            if end <= self.clock.now_ns:
                del self.lease_ends[name]
                if self.alive.pop(name, None) is not None:
                    self.revision += 1

    # ---- time and messages

    def advance(self, ms: int, *, acks: int = 1000, messages: int = 1000) -> None:
        """Let this time pass, in steps of 50 ms; the nodes that are not cut off renew their leases and see the view."""
        for _ in range(ms // 50):
            self.clock.now_ns += 50 * MS
            self.do(self._turn)
            for life in list(self.lives.values()):
                self.do(lambda life=life: life.ack(acks))
            self.deliver(messages)

    def _turn(self) -> None:
        self.expire()
        for life in self.lives.values():
            life.store.tick(self.clock.now_ns)
            if life.lease_end and self.clock.now_ns >= life.lease_end:
                life.lose_lease()
            if not life.is_cut:
                if not life.lease_end:
                    life.come_back()
                elif life.lease_end - self.clock.now_ns < LEASE_NS // 2:
                    life.grant_lease()
                life.shards.on_view(self.view())

    def deliver(self, count: int, at: int = 0) -> None:
        """Deliver so many messages, each the one at this place of the queue; those that they cause are later ones."""
        for _ in range(min(count, len(self.net))):
            index = min(at, len(self.net) - 1)
            sender, to, message = self.net[index]
            del self.net[index]
            life = self.lives.get(to)
            if life is None or life.is_cut or self.lives[sender].is_cut:
                continue

            def give(life: Life = life, sender: str = sender, message: Any = message) -> None:
                if isinstance(message, m.Lacks):
                    life.shards.lacks(sender, message)
                else:
                    life.shards.received(sender, message)

            self.do(give)

    # ---- clients

    def put(self, name: str, shard: int, at: int, version: int, *, durable: bool = True) -> None:
        key, parent = CHAINS[shard][at], CHAINS[shard][at - 1] if at else ROOT_KEY
        self.do(lambda: self._put(self.lives[name], key, parent, value_of(key, version), durable=durable))

    def _put(self, life: Life, key: bytes, parent: bytes, data: bytes, *, durable: bool) -> None:
        session: Any = SimpleNamespace(id=0, puts_waiting=None)
        request = life.request(key, parent, data, durable=durable)
        if request is None:
            return
        session.id = life.session
        offsets = np.frombuffer(request.offsets, np.uint64).tolist()
        try:
            life.shards.check(request.keys, request.parents)
            if life.shards.writes.waits(session, request):
                raise errors.NotLeader("wait")
            if not durable:
                life.store.put(life.session, request, self.clock.now_ns)
                self._turn_of(key)
                if self.sure.get(key) is None:  # deleted or not: a put below it makes it durable
                    self.sure.pop(key, None)
                return
            future = life.shards.writes.put(session, request, self.clock.now_ns)
        except errors.UcxKvError:
            life.store.space.take_back(life.session, offsets)
            return

        was, turn = self.sure.pop(key, None), self._turn_of(key)

        def told(status: bytes | None) -> None:
            if self._turns[key] != turn:
                return  # something was asked after it, and that decides
            if status == bytes((PutStatus.STORED,)):
                self.sure[key] = data
            elif status is not None and was is not None:
                self.sure[key] = was

        self.waiting.append(Asked(life, key, future, told))

    def _turn_of(self, key: bytes) -> int:
        """How often something was asked of this key."""
        self._turns[key] = self._turns.get(key, 0) + 1
        return self._turns[key]

    def delete(self, name: str, shard: int, at: int) -> None:
        key = CHAINS[shard][at]
        self.do(lambda: self._delete(self.lives[name], key))

    def _delete(self, life: Life, key: bytes) -> None:
        request = m.Delete(keys=key)
        if life.shards.writes.waits_delete(request):
            return
        try:
            future = life.shards.writes.delete(request, self.clock.now_ns)
        except errors.UcxKvError:
            return
        was, turn = self.sure.pop(key, None), self._turn_of(key)

        def told(status: bytes | None) -> None:
            if self._turns[key] != turn:
                return
            if status == bytes((DeleteStatus.DELETED,)):
                self.sure[key] = None
            elif status is not None and was is not None:
                self.sure[key] = was

        self.waiting.append(Asked(life, key, future, told))

    def damage(self, name: str, shard: int, at: int) -> None:
        """A visible value goes bad, and a reader finds out."""
        life, key = self.lives[name], CHAINS[shard][at]

        def spoil() -> None:
            place = life.store.place_of(key)
            if place is None or not life.serves(shard):
                return
            life.store.segment.view[place.offset] ^= 0xFF
            life.store.damaged(key, self.clock.now_ns)
            self.damaged.update(CHAINS[shard][at:])
            for below in CHAINS[shard][at:]:
                self.sure.pop(below, None)
            for one in self.waiting:
                one.is_damaged |= one.key in CHAINS[shard][at:]

        self.do(spoil)

    # ---- deaths

    def restart(self, name: str, cut: int = 0, *, is_empty: bool = False, is_rebooted: bool = False) -> None:
        """kill -9, and start again: up to `cut` frames that were not acknowledged are in the journal too. is_rebooted:
        all that was in memory is gone, and read from the disk again, as with durability = power.
        """
        life = self.lives.pop(name)
        self.waiting = [one for one in self.waiting if one.life is not life]  # nobody will know
        count = min(len(life.frames), life.durable_count + cut)
        life.write(count)
        memory = life.reread(count) if is_rebooted else bytes(life.store.segment.view)
        values = bytes(len(memory)) if is_empty else bytes(life.values)
        self.loop.run_until_complete(life.close())
        self.net = deque(one for one in self.net if name not in one[:2])
        frames = [] if is_empty else list(life.frames[:count])
        self.do(lambda: self.lives.__setitem__(name, Life(self, name, frames, None if is_empty else memory, values)))

    # ---- what must hold

    def applied(self, number: int, effect: ev.Apply) -> None:
        for entry in effect.entries:
            said = entry.record if entry.kind is Kind.RECORD else b""
            assert self.history[number].setdefault(entry.index, said) == said, "two histories"

    def leaves_later(self, number: int, key: bytes, index: int) -> bool:
        """Whether a Leave of this block behind that entry was applied by anybody, or is in anybody's log now."""
        logs = [life.shards.shards[number].pending for life in self.lives.values()]
        left = [logged.keys for log in logs for at, logged in log.items() if at > index]
        later = [record for at, record in self.history[number].items() if at > index and record]
        left += [said for said in map(read_record, later) if isinstance(said, bytes)]
        return any(key in _keys(keys) for keys in left)

    def fold(self, number: int, watermark: int) -> dict[bytes, tuple[int, int]]:
        """Key -> (sum, length) after this entry."""
        state: dict[bytes, tuple[int, int]] = {}
        for index in range(1, watermark + 1):
            record = self.history[number][index]
            said = read_record(record) if record else b""
            if isinstance(said, bytes):
                for key in _keys(said):
                    state.pop(key, None)
            else:
                assert not isinstance(said, int)
                for row in said:
                    state[row["key"].tobytes()] = int(row["sum"]), int(row["length"])
        return state

    def check(self) -> None:
        for one in list(self.waiting):
            if one.future.done():
                self.waiting.remove(one)
                is_answered = not one.future.cancelled() and one.future.exception() is None
                if not one.is_damaged:
                    one.told(one.future.result().status if is_answered else None)
        for life in self.lives.values():
            self._check_hands(life)
            if life.store.serving.end_ns:
                assert life.led_at_epoch == life.shards.led, "what is shown has changed under one epoch"
            for shard in life.shards.shards:
                self._check_shard(life, shard)
        for number in range(SHARDS):
            assert sum(life.serves(number) for life in self.lives.values()) <= 1, "two nodes serve a shard"

    def _check_hands(self, life: Life) -> None:
        life.store.check()
        outside = list(life.shards.all_held())
        inside = [offset for _, offset, _ in held_extents(life.store.directory)]
        waiting = [value.offset for value in life.store.space.arrived._values.values()]
        offsets = [*outside, *inside, *waiting]
        assert len(offsets) == len(set(offsets)), "an extent in two hands"

    def _check_shard(self, life: Life, shard: Shard) -> None:
        replica, number = shard.replica, shard.number
        replica.check()
        assert replica.role is not Role.FAILED
        rows = shard.rows()
        keys = [row["key"].tobytes() for row in rows]
        assert len(keys) == len(set(keys)), "a block twice"
        expected = self.fold(number, replica.watermark)
        if set(keys) != set(expected):
            assert life.is_leftover(shard), f"{life.name}/{number} is not what its log came to"
            return
        for key, row in zip(keys, rows, strict=True):
            self._check_row(life, number, replica.watermark, key, row, expected[key])
        for index, logged in shard.pending.items():
            for row in logged.rows if logged.rows is not None else ():
                self._check_row(life, number, index, row["key"].tobytes(), row, (int(row["sum"]), int(row["length"])))
        if not shard.is_active:
            assert life.visible().isdisjoint(CHAINS[number]), "a block is shown of a shard that is not"

    def _check_row(self, life: Life, number: int, index: int, key: bytes, row: Any, expected: tuple[int, int]) -> None:
        total, length = expected
        if row["region"] == ABSENT_REGION:
            is_known = key in self.damaged or life.is_leftover(life.shards.shards[number])
            assert is_known or self.leaves_later(number, key, index), (
                f"{life.name}/{number}: entry {index} has a block without its value, and no Leave is on its way"
            )
            return
        assert (int(row["sum"]), int(row["length"])) == (total, length), "another value than the log's"
        assert tier_copy.engine.sum_at(life.store.segment.address + int(row["offset"]), length) == total, "wrong bytes"

    def heal(self) -> None:
        """No faults any more: everybody is there, all is applied everywhere, and what was acknowledged is there."""
        self.doubts = 0
        for life in self.lives.values():
            life.is_cut = False
        for _ in range(8):
            self.advance(2000)
            self.check()
            if self.is_settled():
                break
        assert self.is_settled(), [
            (life.name, s.number, s.replica.role, s.is_active, s.pending, s.replica.config.value)
            for life in self.lives.values()
            for s in life.shards.shards
        ]
        for number in range(SHARDS):
            (leader,) = [life for life in self.lives.values() if life.serves(number)]
            shard = leader.shards.shards[number]
            there = {row["key"].tobytes(): row for row in shard.rows()}
            for key in CHAINS[number]:
                if key in self.sure:
                    data = self.sure[key]
                    if data is None:
                        assert key not in there, "a deleted block is there"
                        continue
                    assert key in there and key in leader.visible(), "an acknowledged block is lost"
                    assert int(there[key]["sum"]) == sum_bytes(data)

    def is_settled(self) -> bool:
        for number in range(SHARDS):
            if sum(life.serves(number) for life in self.lives.values()) != 1:
                return False
            shards = [life.shards.shards[number] for life in self.lives.values()]
            if len({shard.replica.watermark for shard in shards}) > 1 or any(shard.pending for shard in shards):
                return False
            if any(shard.replica.role not in (Role.LEADER, Role.FOLLOWER) for shard in shards):
                return False
        return not self.waiting


def _keys(raw: bytes) -> list[bytes]:
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]
