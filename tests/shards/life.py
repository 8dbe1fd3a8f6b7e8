"""One process of a node for `fleet`: its real shards and store, and what stands for the rest of a node."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ucxkv import errors
from ucxkv.control import Conflict, OutcomeUnknown
from ucxkv.journal import StopKind
from ucxkv.node.config import NodeConfig
from ucxkv.node.shards import Shards
from ucxkv.node.shards.records import named
from ucxkv.node.shards.recovery import ShardRecovery, recover_shards
from ucxkv.node.shards.shard import Shard
from ucxkv.node.store import HostStore
from ucxkv.protocol import messages as m
from ucxkv.replication import ShardConfig, Timing
from ucxkv.replication import events as ev
from ucxkv.sharding import ShardRule
from ucxkv.tiers.copy import sum_bytes

if TYPE_CHECKING:
    from tests.shards.fleet import Fleet

MS = 1_000_000
LEASE_NS = 3000 * MS
SHARDS = 2
RULE = ShardRule(shards=SHARDS)
HOST_BYTES = 2 << 20
TIMING = Timing(
    heartbeat_ns=100 * MS,
    resend_ns=200 * MS,
    silence_ns=1000 * MS,
    retry_ns=100 * MS,
    batch_bytes=400,
    inflight_records=16,
    pending_records=64,
    window_records=6,
)


def u64(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def chain_of(shard: int, length: int) -> list[bytes]:
    """Keys of a chain, whose root is in this shard."""
    root = next(key for n in range(1000) if RULE.own(key := bytes([n % 256, n // 256]) + b"r" * 14) == shard)
    return [root, *(bytes([shard, at]) + b"c" * 14 for at in range(1, length))]


CHAINS = [chain_of(shard, 5) for shard in range(SHARDS)]


def value_of(key: bytes, version: int) -> bytes:
    """Versions 0 and 1 differ in bytes, 2 in length too; no value is a part of another key's."""
    return (key[:2] + bytes([version, 255])) * (30 if version < 2 else 1500)


class Clock:
    """Stands for the time module. It begins ahead of the machine's, so that leases by it run by that one, too."""

    def __init__(self) -> None:
        import time

        self.now_ns = time.monotonic_ns() + 10**15

    def monotonic_ns(self) -> int:
        return self.now_ns


class Timers:
    """Stands for the loop's timers; everything else is the running loop's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self.queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> Any:
        self._count += 1
        entry = (self._clock.now_ns + int(delay_s * 1e9), self._count, call, args)
        heapq.heappush(self.queue, entry)

        def cancel() -> None:
            with contextlib.suppress(ValueError):
                self.queue.remove(entry)
                heapq.heapify(self.queue)

        return SimpleNamespace(cancel=cancel)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.call_later(0, call, *args)

    def fire(self) -> None:
        while self.queue and self.queue[0][0] <= self._clock.now_ns:
            _, _, call, args = heapq.heappop(self.queue)
            call(*args)

    def late_offsets(self) -> list[int]:
        """Memory that is to be free when nobody can be reading it any more."""
        return [at for _, _, call, args in self.queue if call.__name__ == "_free_late" for at in args[0]]


class TimedShards(Shards):
    """With timers and a journal of the fleet's."""

    def __init__(self, life: Life, recovery: ShardRecovery | None) -> None:
        self.life = life
        super().__init__(life, Plane(life), life.me, recovery, life.fleet.view())  # type: ignore[arg-type]
        self._loop = life.timers  # type: ignore[assignment]
        self.store.held_elsewhere = self.all_held
        for shard in self.shards:
            self._watch(shard)

    def _watch(self, shard: Shard) -> None:
        apply = shard._apply

        def applied(effect: ev.Apply) -> None:
            self.life.fleet.applied(shard.number, effect)
            apply(effect)

        shard._apply = applied  # type: ignore[method-assign]

    def persist(self, shard: Shard, serial: int, records: list[bytes]) -> None:
        self.life.persist(shard, serial, records)

    def all_held(self) -> Iterable[int]:
        yield from self.held()
        yield from self.life.timers.late_offsets()


class Life:
    """One process of a node: what `Shards` asks of its node."""

    def __init__(self, fleet: Fleet, name: str, frames: list[list[bytes]], memory: bytes | None, values: bytes) -> None:
        self.fleet, self.name = fleet, name
        self.values = bytearray(values or bytes(HOST_BYTES))
        """What the disk has of the memory, with durability = power: of each frame what it names, as it was when
        the frame was written, which is here as late as can be."""
        self.timers = Timers(fleet.clock)
        self.frames = frames
        self.durable_count = len(frames)
        self.unacked: deque[tuple[Shard, int, int]] = deque()
        self.me = fleet.register(name)
        self.epoch = 1
        self.is_open, self.is_cut = True, False
        self.resigned = ""
        self.tasks: set[asyncio.Task[Any]] = set()
        self.led_at_epoch = bytes(1)
        self.session = 0
        self.lease_end = 0
        config = NodeConfig(
            name=name, host_bytes=HOST_BYTES, slots_count=256, huge_pages="never", grace_ms=0, grant_share_max=1.0
        )
        self.store = HostStore(config, fleet.incarnations, 1)
        self.store.serving.until(0)
        self.mirrors = SimpleNamespace(to=lambda info: FleetMirror(self, info.name), forget=lambda node_id: None)
        self.peers = SimpleNamespace(tell_name=lambda to, message: fleet.net.append((name, to, message)))
        recovery = None
        if memory is not None:
            self.store.segment.view[: len(memory)] = memory
            recovery = recovered(self.store, frames)
        self.leftover: dict[int, int] = {}
        """Shards that are kept for a leader's snapshot alone: until this entry is applied, they are anything."""
        found = fleet.configs
        for number, log in recovery.logs.items() if recovery is not None else ():
            if not recovery.is_whole(number, found.get(number), name):
                self.leftover[number] = log.base_index
        self.shards = TimedShards(self, recovery)
        self.shards.start(0)
        self.grant_lease()

    # ---- what Shards asks of a node

    def spawn(self, coro: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coro)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def lease_until(self, end_ns: int) -> None:
        self.store.serving.until(end_ns)

    def begin_epoch(self, epoch: int) -> None:
        assert self.store.serving.end_ns == 0, "the epoch changes while somebody is served"
        assert epoch == self.epoch + 1
        self.epoch = epoch
        self.store.epoch = epoch
        self.store.serving.begin_epoch(epoch)
        self.led_at_epoch = self.shards.led

    def members_changed(self) -> None:
        pass

    def resign(self, why: str) -> None:
        self.resigned = why

    # ---- the lease

    def grant_lease(self) -> None:
        self.lease_end = self.fleet.clock.now_ns + LEASE_NS
        self.fleet.lease_ends[self.name] = self.lease_end
        self.shards.on_lease(self.lease_end - LEASE_NS // 100)

    def lose_lease(self) -> None:
        self.lease_end = 0
        self.shards.on_lease(0)

    def come_back(self) -> None:
        self.me = self.fleet.register(self.name)
        self.shards.reincarnated(self.me)
        self.grant_lease()

    # ---- the journal

    def persist(self, shard: Shard, serial: int, records: list[bytes]) -> None:
        if records:
            self.frames.append(records)
        self.unacked.append((shard, serial, len(self.frames)))

    def write(self, count: int) -> None:
        """So many frames are on the disk, and before them the values that they name."""
        for records in self.frames[self.durable_count : count]:
            for row in named(records):
                if row["region"] == 0:
                    at, end = int(row["offset"]), int(row["offset"]) + int(row["length"])
                    self.values[at:end] = self.store.segment.view[at:end]
        self.durable_count = max(self.durable_count, count)

    def reread(self, count: int) -> bytes:
        """The memory after a reboot: of so many frames what the disk has. What a process that was killed would find
        is among it, but for bytes that came back by chance to a place that was written for another block since.
        """
        found, memory, later = bytearray(HOST_BYTES), self.store.segment.view, list[tuple[int, int]]()
        for row in named([record for records in self.frames[:count] for record in records])[::-1]:
            if row["region"] == 0:
                at, end = int(row["offset"]), int(row["offset"]) + int(row["length"])
                found[at:end] = self.values[at:end]
                is_there = sum_bytes(memory[at:end]) == row["sum"]
                is_over = any(at < there_end and there < end for there, there_end in later)
                assert is_over or not is_there or sum_bytes(found[at:end]) == row["sum"], "not on the disk"
                later.append((at, end))
        return bytes(found)

    def ack(self, count: int) -> None:
        for _ in range(min(count, len(self.unacked))):
            shard, serial, frames = self.unacked.popleft()
            self.write(frames)
            if serial:
                shard.handle(ev.Persisted(serial))

    # ---- clients

    def fill(self, data: bytes) -> int | None:
        """A granted extent with these bytes."""
        self.session += 1
        granted, _ = self.store.grant(self.session, len(data), 1, self.fleet.clock.now_ns)
        if not granted.offsets:
            return None
        offset = int(np.frombuffer(granted.offsets, np.uint64)[0])
        self.store.segment.view[offset : offset + len(data)] = data
        return offset

    def request(self, key: bytes, parent: bytes, data: bytes, *, durable: bool) -> m.Put | None:
        offset = self.fill(data)
        if offset is None:
            return None
        return m.Put(
            keys=key, parents=parent, regions=bytes(2), offsets=u64(offset), lengths=u32(len(data)),
            sums=u64(sum_bytes(data)), durable=durable,
        )  # fmt: skip

    def visible(self) -> set[bytes]:
        records = self.store.table.records
        return {key.tobytes() for key in records["key"][records["state"] == 1]}

    def is_leftover(self, shard: Shard) -> bool:
        return shard.replica.watermark < self.leftover.get(shard.number, 0)

    def serves(self, number: int) -> bool:
        shard = self.shards.shards[number]
        is_shown = shard.is_active and not shard.dormant_epoch
        return is_shown and self.store.serving.end_ns > self.fleet.clock.now_ns

    async def close(self) -> None:
        self.is_open = False
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for feeder in self.shards._feeders.values():
            await feeder.aclose()
        self.store.close()


class Plane:
    """One node's way to the control plane."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.record, self.rule = life.fleet.record, RULE

    async def set_shard(self, number: int, expected: int, config: ShardConfig) -> int:
        await asyncio.sleep(0)
        fleet = self._life.fleet
        if self._life.is_cut:
            raise errors.Unavailable("the control plane is not reached")
        is_unknown = fleet.doubts > 0
        fleet.doubts -= is_unknown
        current = fleet.configs[number][1] if number in fleet.configs else 0
        if current == expected and not (is_unknown and fleet.doubts % 2):
            fleet.revision += 1
            fleet.configs[number] = config, fleet.revision
        elif not is_unknown:
            raise Conflict("another was there")
        if is_unknown:
            raise OutcomeUnknown("no answer")
        return fleet.revision

    async def read_shard(self, number: int) -> tuple[ShardConfig | None, int]:
        await asyncio.sleep(0)
        fleet = self._life.fleet
        if self._life.is_cut:
            raise errors.Unavailable("the control plane is not reached")
        return fleet.configs.get(number, (None, fleet.revision))


class FleetMirror:
    """Copies values as `Mirror` does, at once."""

    def __init__(self, life: Life, to: str) -> None:
        self._life, self._to = life, to

    def _target(self) -> Life:
        target = self._life.fleet.lives.get(self._to)
        if target is None or target.is_cut or self._life.is_cut:
            raise errors.Unavailable("no link", node=self._to)
        return target

    async def lacking(self, shard: int, rows: Any, deadline_ns: int) -> npt.NDArray[np.bool_]:
        await asyncio.sleep(0)
        asked = m.HaveValues(shard, rows["key"].tobytes(), rows["sum"].tobytes(), rows["length"].tobytes())
        target = self._target()
        return np.frombuffer(target.store.space.arrived.lacking(asked, self._life.fleet.clock.now_ns).status, np.bool_)

    async def copy(self, shard: int, rows: Any, address: int, deadline_ns: int) -> npt.NDArray[np.uint8]:
        await asyncio.sleep(0)
        target, status = self._target(), []
        for row in rows:
            offset, length, total = int(row["offset"]), int(row["length"]), int(row["sum"])
            data = bytes(self._life.store.segment.view[offset : offset + length])
            if sum_bytes(data) != total:
                status.append(1)
                continue
            place = target.fill(data)
            if place is None:
                raise errors.Overloaded("no memory there", node=self._to)
            values = m.Values(shard, row["key"].tobytes(), u64(total), u32(length), u64(place))
            taken = target.store.space.arrived.take(target.session, values, self._life.fleet.clock.now_ns)
            assert taken.status == b"\0"
            status.append(0)
        return np.array(status, np.uint8)


def recovered(store: HostStore, frames: list[list[bytes]]) -> ShardRecovery:
    """What a journal of these frames comes to, over the bytes in the store."""
    told = SimpleNamespace(
        stopped=SimpleNamespace(kind=StopKind.END),
        snapshot=[],
        records=[(at, 1, record) for at, record in enumerate(record for frame in frames for record in frame)],
    )
    memory = SimpleNamespace(why_empty="", held_units=[])
    state = SimpleNamespace(folder="state", journal_folder="journal")
    return recover_shards(store, state, memory, None, told, None)  # type: ignore[arg-type]
