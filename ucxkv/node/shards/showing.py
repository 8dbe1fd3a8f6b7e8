"""Which shards this node shows to readers, and how that changes.

Invariants
  - Every block in this node's directory is of a shard that is `active`; nobody is served while that changes, nor while
    a shard is dormant: active, and led by who knows whom.
  - With the set of shown shards the epoch of the slot table changes.
  - A shard whose durable blocks do not all fit is not shown: its blocks wait in its standby, and it is tried again.
    What has no value here, and what hangs below it, is shown to nobody, and the log is told that it left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from ucxkv.directory import PutStatus, events
from ucxkv.ids import KEY_BYTES
from ucxkv.node.shards.records import ABSENT_REGION

if TYPE_CHECKING:
    from ucxkv.directory.slots import Records
    from ucxkv.keys import KeyArray
    from ucxkv.node.node import Node
    from ucxkv.node.shards.shard import Shard
    from ucxkv.node.shards.writes import ShardWrites
    from ucxkv.sharding import ShardRule

__all__ = ["Showing"]

_GAIN_S = 0.01
_DORMANT_NS = 5_000_000_000
_NOT_NOW = (PutStatus.NO_SPACE, PutStatus.ALREADY, PutStatus.BUSY)

log = structlog.get_logger("ucxkv.node")


class Showing:
    """See the module; what `Shards` builds on."""

    writes: ShardWrites

    def __init__(self, node: Node, rule: ShardRule) -> None:
        self.store = node.store
        self.rule = rule
        self.shards: list[Shard] = []
        self.why_resigned = ""
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._gaining: set[Shard] = set()
        self._gain_timer: asyncio.TimerHandle | None = None
        self._lease_ns = self._leased_ns = 0

    # ---- the lease

    def leased(self, until_ns: int) -> None:
        """The node's lease runs until then; 0: it does not."""
        self._lease_ns = until_ns
        if until_ns and not self._leased_ns:
            self._leased_ns = time.monotonic_ns()
        elif not until_ns:
            self._leased_ns = 0

    def serving_ns(self) -> int:
        """Until when anything may be shown: not while blocks are in the directory that are led by who knows whom, and
        no more when the node is closing, or gives up.
        """
        is_over = not self._node.is_open or self.why_resigned or any(shard.dormant_epoch for shard in self.shards)
        return 0 if is_over else self._lease_ns

    def resign(self, why: str) -> None:
        """This node can't go on with what it holds: it serves nothing more, and others take over. Idempotent."""
        if not self.why_resigned:
            self.why_resigned = why
            self._node.lease_until(0)
            self._node.resign(why)
            log.error("shards.resigned", why=why)  # last: what it is written to may be the disk that is full

    def broken(self, shard: Shard, why: str) -> None:
        """See ShardHost."""
        self.resign(f"shard {shard.number} met a fault of the program: {why}")

    def try_again(self) -> None:
        """What could not be done before, perhaps now; called now and then."""
        is_late = bool(self._leased_ns) and time.monotonic_ns() - self._leased_ns > _DORMANT_NS
        for shard in self.shards:
            if shard.dormant_epoch and is_late:  # nobody leads it: serve the rest
                self.lose(shard)
            elif shard.is_showable:
                self.gain_soon(shard)
            shard.owe_again()

    # ---- what readers see

    def gain_soon(self, shard: Shard) -> None:
        """See ShardHost: several at once, since each time all clients that map the table connect anew."""
        self._gaining.add(shard)
        if self._gain_timer is None:
            self._gain_timer = self._loop.call_later(_GAIN_S, self._gain)

    def _gain(self) -> None:
        self._gain_timer = None
        shards = [shard for shard in self._gaining if shard.is_showable]
        self._gaining.clear()
        if not shards:
            return
        self._node.lease_until(0)
        lost = [self._show(shard) for shard in shards]
        self._serve_again()
        for shard, rows in zip(shards, lost, strict=True):
            if rows is None:
                log.error("shard.no_room", shard=shard.number, blocks=len(shard.standby), why="the slot table is full")
            elif len(rows):
                log.error("shard.lost", shard=shard.number, blocks=len(rows))
                shard.owe_leaves(rows)

    def _show(self, shard: Shard) -> Records | None:
        """Put a shard's durable blocks into the directory: rows of those whose value is not here, and of what hangs
        below them, children first. None: there is no room for all of them, and none is shown.
        """
        rows, now_ns = shard.standby.take(), time.monotonic_ns()
        self._make_room(rows)
        is_absent = rows["region"] == ABSENT_REGION
        status = np.where(is_absent, np.uint8(PutStatus.REFUSED), np.uint8(0))
        out = self.store.handle(events.Restore(rows, status), now_ns).status
        if np.isin(out, _NOT_NOW).any():
            shard.busy_until_ns = max(shard.busy_until_ns, self._withdraw(shard, frozenset()).busy_until_ns)
            shard.standby.commit(rows)
            return None
        shard.is_active = True
        lost: Records = rows[out != PutStatus.STORED][::-1]
        return lost

    def _make_room(self, rows: Records) -> None:
        """Blocks of class cache go where durable ones are to be: of the same keys, and for the places in the table."""
        table, durable, now_ns = self.store.table, self.store.directory.durable, time.monotonic_ns()
        slots = table.find(rows["key"].tobytes()) if len(rows) else np.empty(0, np.int32)
        same = [at for at in np.flatnonzero(slots >= 0).tolist() if not durable.is_durable(int(slots[at]))]
        if same:
            self.store.handle(events.Drop(rows["key"][same].tobytes()), now_ns)
        self.store.room.make_slots(len(rows), now_ns)

    def _withdraw(self, shard: Shard, keep: Collection[bytes]) -> events.WithdrawReply:
        def is_mine(roots: KeyArray) -> npt.NDArray[np.bool_]:
            mine: npt.NDArray[np.bool_] = self.rule.own_many(roots) == shard.number
            return mine

        return self.store.handle(events.Withdraw(is_mine, keep), time.monotonic_ns())

    def lose(self, shard: Shard) -> None:
        """See ShardHost."""
        self._node.lease_until(0)
        self.writes.leave_behind(shard)
        keep = {
            keys[at : at + KEY_BYTES]
            for logged in shard.pending.values()
            if logged.rows is not None
            for keys in (logged.rows["key"][logged.rows["region"] != ABSENT_REGION].tobytes(),)
            for at in range(0, len(keys), KEY_BYTES)
        }

        reply = self._withdraw(shard, keep)
        shard.is_active, shard.dormant_epoch = False, 0
        rows = self.writes.placed(reply.rows)
        shard.standby.commit(rows)
        for row in shard.limbo.values():
            shard.standby.commit(row)
        shard.limbo.clear()
        grace_ns = self.store.directory.leaving.grace_ns
        shard.busy_until_ns = max(shard.busy_until_ns, reply.busy_until_ns + grace_ns)
        self._serve_again()
        log.info("shard.hidden", shard=shard.number, blocks=reply.blocks, durable=len(rows))

    def pause(self, shard: Shard) -> None:
        """See ShardHost."""
        self._node.lease_until(0)
        shard.dormant_epoch = shard.replica.epoch

    def resume(self, shard: Shard) -> None:
        """See ShardHost."""
        shard.dormant_epoch = 0
        if self.serving_ns():
            self._serve_again()

    def _serve_again(self) -> None:
        self._node.begin_epoch(self._node.epoch + 1)
        self._node.lease_until(self.serving_ns())
        self._node.members_changed()  # a client that waits for a leader which is silent looks here then

    @property
    def led(self) -> bytes:
        """Bit s (little-endian) is set: shard s is shown here."""
        flags = np.array([shard.is_active and not shard.dormant_epoch for shard in self.shards], np.bool_)
        return np.packbits(flags, bitorder="little").tobytes()
