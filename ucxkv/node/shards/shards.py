"""All shards of the cluster's directory on one node: what they share, and which of them this node shows to readers.

Invariants
  - Every block in this node's directory is of a shard that it leads at this moment (`active`). The set of these shards
    changes only while nobody is served, and with it the epoch of the slot table: what a client was told of it in its
    Welcome is true of every answer that it gets under that epoch.
  - A shard is shown after all of its log is applied (`Replica.serve_until_ns`), and hidden before anybody is told that
    it may be led elsewhere.
  - When this node's journal fails, or the control plane turned back, it gives up its lease: others take over.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ucxkv import errors
from ucxkv.control import Conflict, OutcomeUnknown
from ucxkv.directory.log import COMMIT_DTYPE
from ucxkv.ids import KEY_BYTES, ROOT_KEY
from ucxkv.node.shards.answering import answer
from ucxkv.node.shards.feeding import Feeder
from ucxkv.node.shards.journaling import ShardJournal
from ucxkv.node.shards.records import ABSENT_REGION
from ucxkv.node.shards.shard import Shard
from ucxkv.node.shards.showing import Showing
from ucxkv.node.shards.wishing import Wishes, waiting_for
from ucxkv.node.shards.writes import ShardWrites
from ucxkv.node.space import Place
from ucxkv.protocol import messages as m
from ucxkv.replication import Member, Role, Timing
from ucxkv.replication import events as ev
from ucxkv.replication.messages import ReplicaMessage, decode, encode
from ucxkv.tokens import Token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.control.cluster import Cluster, ClusterView
    from ucxkv.directory.slots import Records
    from ucxkv.node.node import Node
    from ucxkv.node.shards.recovery import ShardRecovery

__all__ = ["Shards"]

_MS = 1_000_000
_TICK_S = 0.05
_QUIET_TICKS = 8
TIMING = Timing(
    heartbeat_ns=200 * _MS,
    resend_ns=600 * _MS,
    silence_ns=2000 * _MS,
    batch_bytes=64 << 10,
    inflight_records=1024,
    pending_records=8192,
    window_records=4096,
)

log = structlog.get_logger("ucxkv.node")


class Shards(Showing):
    """See the module. Made when the node has its lease for the first time; `start`, and `aclose` at the end."""

    def __init__(
        self, node: Node, cluster: Cluster, me: Member, recovery: ShardRecovery | None, view: ClusterView
    ) -> None:
        super().__init__(node, cluster.rule)
        self.me = me
        self.arrived = node.store.space.arrived
        self.arrived.has_value = self.has_value
        node.store.held_elsewhere, node.store.has_shards = self.held, True
        node.store.log_of, node.store.on_left = self._log_of, self._left
        self._cluster = cluster
        self._view = view
        self._wishes = Wishes(cluster.record)
        self._feeders: dict[tuple[int, Member], Feeder] = {}
        self._mirrored: set[int] = set()
        self._tick_timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._leaders: list[str] = []
        self.writes = ShardWrites(node.store, self.shards_of, self._led_token)
        journal = recovery.journal if recovery is not None else None
        self.journal = ShardJournal(journal, node.epoch, self._records)
        told = recovery.logs if recovery is not None else {}
        keeps = recovery is not None or cluster.record.replicas > 1
        for number in range(cluster.record.shards):
            is_whole = recovery is not None and recovery.is_whole(number, view.shards.get(number), me.name)
            self.shards.append(Shard(number, self, me, TIMING, told.get(number), is_whole=is_whole, keeps=keeps))

    def start(self, log_bytes: int) -> None:
        """Begin. log_bytes: of the journal behind its last snapshot."""
        self.journal.start(log_bytes)
        self.on_view(self._view)
        self._tick_timer = self._loop.call_later(_TICK_S, self._tick)

    # ---- what the control plane tells

    def on_lease(self, until_ns: int) -> None:
        """The node's lease runs until then; 0: it does not."""
        self.leased(until_ns)
        for shard in self.shards:
            shard.handle(ev.LeaseSeen(until_ns))
        self._node.lease_until(self.serving_ns())

    def reincarnated(self, me: Member) -> None:
        """The lease was lost, and there is another one."""
        self.me = me
        for shard in self.shards:
            shard.handle(ev.Reincarnated(me))

    def on_view(self, view: ClusterView) -> None:
        """The cluster's records as they are now."""
        self._view = view
        alive = frozenset(Member(record.name, record.incarnation) for record in view.members)
        wishes = self._wishes.of(view, time.monotonic_ns())
        for shard in self.shards:
            found = view.shards.get(shard.number)
            config, revision = found if found is not None else (None, view.revision)
            is_news = found is None or revision > shard.replica.config.revision or not shard.replica.config.is_known
            if is_news and shard.number not in view.unreadable:
                shard.handle(ev.ConfigSeen(config, revision))
            shard.handle(ev.MembersSeen(alive, view.revision))
            if shard.replica.wish != wishes[shard.number]:
                shard.handle(ev.Wish(wishes[shard.number]))
        leaders = [self._leader_of(number, view) for number in range(len(self.shards))]
        if leaders != self._leaders:
            self._leaders = leaders
            self._node.members_changed()
        for key in [key for key in self._feeders if key[1] not in alive]:
            self._node.spawn(self._feeders.pop(key).aclose())
        here = {record.node_id for record in view.members}
        for node_id in self._mirrored - here:
            self._node.mirrors.forget(node_id)
        self._mirrored &= here

    @staticmethod
    def _leader_of(number: int, view: ClusterView) -> str:
        found = view.shards.get(number)
        return found[0].leader.name if found is not None else ""

    def write_config(self, shard: Shard, effect: ev.WriteConfig) -> None:
        """See ShardHost."""
        self._node.spawn(self._write_config(shard, effect))

    async def _write_config(self, shard: Shard, effect: ev.WriteConfig) -> None:
        outcome, revision = ev.Outcome.WRITTEN, 0
        try:
            revision = await self._cluster.set_shard(shard.number, effect.expected_revision, effect.config)
        except Conflict:
            outcome = ev.Outcome.CONFLICT
        except OutcomeUnknown:
            outcome = ev.Outcome.UNKNOWN
        except errors.UcxKvError as exc:  # it was not written
            outcome = ev.Outcome.CONFLICT
            log.warning("shard.config", shard=shard.number, why=str(exc))
        except Exception:  # a fault of ours: who knows
            outcome = ev.Outcome.UNKNOWN
            log.exception("shard.config", shard=shard.number)
        shard.handle(ev.ConfigWritten(outcome, revision))

    def read_config(self, shard: Shard) -> None:
        """See ShardHost."""
        self._node.spawn(self._read_config(shard))

    async def _read_config(self, shard: Shard) -> None:
        try:
            config, revision = await self._cluster.read_shard(shard.number)
        except errors.UcxKvError as exc:
            log.debug("shard.unread", shard=shard.number, why=str(exc))
            return
        shard.handle(ev.ConfigSeen(config, revision))

    @property
    def leaders(self) -> list[str]:
        """By shard: who leads it, as far as is known."""
        return self._leaders

    def _led_token(self) -> Token:
        return Token(tuple(shard.applied for shard in self.shards if shard.is_active and not shard.dormant_epoch))

    def read_at(self, request: m.ReadAt) -> m.FoundAt:
        """Blocks of shards that are not led here, in a state that the request's token may see. Raises UsageError."""
        return answer(self.shards, request, self.store.segment.view, time.monotonic_ns())

    # ---- what blocks belong where

    def check(self, keys: bytes, parents: bytes) -> None:
        """Refuse (NotLeader) a put with a root whose shard is not led here."""
        at = parents.find(ROOT_KEY)
        if at < 0:
            return
        roots = [i for i in range(0, len(keys), KEY_BYTES) if parents[i : i + KEY_BYTES] == ROOT_KEY]
        for i in roots:
            self._active(keys[i : i + KEY_BYTES])

    def _active(self, root: bytes) -> Shard:
        shard = self.shards[self.rule.own(root)]
        if not shard.is_active or shard.dormant_epoch:
            raise errors.NotLeader(f"this node does not lead shard {shard.number}; {self._hint(shard)}")
        return shard

    def _hint(self, shard: Shard) -> str:
        leader = self._leaders[shard.number] if self._leaders else ""
        return f"{leader} does" if leader and leader != self.me.name else "nobody does at the moment"

    def shards_of(self, keys: bytes, parents: bytes | None) -> list[Shard | None]:
        """The shard of each key: that of its chain where it is here already, whatever parent a put names for it; else,
        of a put, that of its parent. None: not known here, and nothing can be staged for it.

        Raises NotLeader for a root of a shard that is not led here.
        """
        root_of, known = self.store.directory.root_of, dict[bytes, Shard | None]()

        def here(key: bytes) -> Shard | None:
            if key not in known:
                root = root_of(key)
                known[key] = None if root is None else self._active(root)
            return known[key]

        out: list[Shard | None] = []
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            found = here(key)
            if found is None and parents is not None:
                above = parents[at : at + KEY_BYTES]
                found = known[key] = self._active(key) if above == ROOT_KEY else here(above)
            out.append(found)
        return out

    def _log_of(self, key: bytes) -> int:
        root = self.store.directory.root_of(key)
        return 0 if root is None else self.rule.own(root)

    def _left(self, keys: bytes, log: int) -> None:
        """Durable blocks were found damaged, and are hidden already: all members are to know."""
        rows = np.zeros(len(keys) // KEY_BYTES, COMMIT_DTYPE)
        rows["key"], rows["region"] = np.frombuffer(keys, "V16"), ABSENT_REGION
        self.shards[log].owe_leaves(rows)

    def durable_rows(self, shard: Shard) -> Records:
        """See ShardHost."""
        number = shard.number
        return self.writes.placed(self.store.directory.durable_rows(lambda roots: self.rule.own_many(roots) == number))

    def visible(self, key: bytes) -> Place | None:
        """See ShardHost."""
        return self.store.place_of(key)

    def fill_places(self, rows: Records) -> None:
        """See ShardHost."""
        here = np.flatnonzero(rows["region"] != ABSENT_REGION)
        places = self.store.slabs.places(rows["offset"][here])
        for name in ("slot_lines", "base_unit", "units"):
            column = np.zeros(len(rows), np.uint32)
            column[here] = places[name]
            rows[name] = column

    def free(self, shard: Shard, offsets: list[int]) -> None:
        """See ShardHost."""
        if not offsets:
            return
        wait_s = (shard.busy_until_ns - time.monotonic_ns()) / 1e9
        if wait_s > 0:
            self._loop.call_later(wait_s + 0.01, self._free_late, offsets)
        else:
            self.store.slabs.free(offsets)

    def _free_late(self, offsets: list[int]) -> None:
        if self._node.is_open:
            self.store.slabs.free(offsets)

    # ---- the journal

    def persist(self, shard: Shard, serial: int, records: list[bytes]) -> None:
        """See ShardHost."""
        self.journal.persist(shard, serial, records)

    def _records(self) -> Iterable[bytes]:
        for shard in self.shards:
            yield from shard.records()

    # ---- other nodes

    def send(self, shard: Shard, to: Member, message: ReplicaMessage) -> None:
        """See ShardHost."""
        if shard.replica.role is not Role.LEADER:
            self._tell(to, m.Replicate(shard.number, to.incarnation, encode(message)))
            return
        feeder = self._feeders.get((shard.number, to))
        if feeder is None:
            record = next((r for r in self._view.members if (r.name, r.incarnation) == to), None)
            if record is None:
                return
            mirror = self._node.mirrors.to(record.info)
            self._mirrored.add(record.node_id)
            feeder = Feeder(shard, to, mirror, lambda said: self._tell(to, said), self.store.segment.address)
            self._feeders[shard.number, to] = feeder
        feeder.send(message)

    def _tell(self, to: Member, message: m.Replicate | m.Lacks) -> None:
        self._node.peers.tell_name(to.name, message)

    def received(self, name: str, request: m.Replicate) -> None:
        """Another node's replica says something. Raises UsageError for what is no such message."""
        if not 0 <= request.shard < len(self.shards) or len(request.gone) % 24:
            raise errors.UsageError(f"a message for shard {request.shard}; there are {len(self.shards)}")
        try:
            message = decode(request.payload)
        except ValueError as exc:
            raise errors.UsageError(f"no message of a replica: {exc}") from exc
        if request.incarnation != self.me.incarnation or message.sender.name != name:
            return
        if not self.shards[request.shard].received(message, request.gone):
            self._tell(message.sender, m.Lacks(request.shard))

    def lacks(self, name: str, request: m.Lacks) -> None:
        """A member of that node's has lost values that it was given."""
        for (number, to), feeder in self._feeders.items():
            if number == request.shard and to.name == name:
                feeder.forget()

    def has_value(self, number: int, key: bytes, total: int, length: int) -> bool:
        """Whether this node has that value in the shard already, for a snapshot of it."""
        if not 0 <= number < len(self.shards):
            return False
        shard = self.shards[number]
        return shard.standby.find(key, total, length) is not None or shard.snapshot_has(key, total)

    # ---- time

    def _tick(self) -> None:
        self._tick_timer = self._loop.call_later(_TICK_S, self._tick)
        self._ticks += 1
        is_slow = self._ticks % _QUIET_TICKS == 0
        for shard in self.shards:
            if is_slow or shard.is_busy:
                shard.handle(ev.Tick())
        if is_slow:
            self._hand_over()
            self.try_again()
            self._look_for_failure()

    def _hand_over(self) -> None:
        """Let those lead that are wished to, where they are in sync: one shard at a time."""
        now_ns = time.monotonic_ns()
        for shard in self.shards:
            if self._wishes.is_heir_due(shard.replica, self._view, now_ns):
                log.info("shard.hand_over", shard=shard.number, to=shard.replica.wish[0])
                shard.handle(ev.HandOver())
                return

    def _look_for_failure(self) -> None:
        failed = next((shard for shard in self.shards if shard.replica.role is Role.FAILED), None)
        if failed is not None:
            self.resign(f"shard {failed.number} failed")

    # ---- reports, the end

    def numbers(self) -> dict[str, float]:
        """For the report and the metrics."""
        return {
            "shards": len(self.shards),
            "shards_led": sum(shard.is_active and not shard.dormant_epoch for shard in self.shards),
            "shards_followed": sum(shard.replica.role is Role.FOLLOWER for shard in self.shards),
            "standby_blocks": sum(len(shard.standby) for shard in self.shards),
            "shard_lag_records": sum(shard.replica.log.last_index - shard.replica.watermark for shard in self.shards),
        }

    def facts(self) -> dict[str, str]:
        """For the report."""
        return {"shards": self.why_resigned or waiting_for(self._view), "replicas": str(self._cluster.record.replicas)}

    def held(self) -> Iterable[int]:
        """Offsets of this node's extents that the shards have outside of the directory; for `HostStore.check`."""
        for shard in self.shards:
            yield from shard.held()

    async def aclose(self) -> None:
        """Stop: no message is sent, nothing written any more. Idempotent."""
        for timer in (self._tick_timer, self._gain_timer):
            if timer is not None:
                timer.cancel()
        for feeder in self._feeders.values():
            await feeder.aclose()
        self._feeders.clear()
        await self.journal.aclose()
