"""Durable puts and deletes on shards that this node leads: staged in the directory, proposed to the shard's log,
settled when the log has them.

Promises
  - A durable put or delete is answered when every in-sync member of its shard has it, and seen by readers from then on.
  - Then it is so, and answered so, whatever has become of this node's lease: whoever leads next has it in its log.
  - One that this node can't know the outcome of, since it leads no more, is answered UNAVAILABLE: it may have happened.
  - A call over several shards is one batch a shard; each has its own answer, and the call's is all of them.
  - What is answered comes with the entries of the logs that made it so; what was so before, with how far they are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.directory import DeleteStatus, PutStatus, events
from ucxkv.directory.log import NOTHING, RECORD_ROWS_MAX, commits, leaves
from ucxkv.node.shards.records import placeless
from ucxkv.node.staging import Outcome, Staging, Waiting
from ucxkv.protocol import messages as m
from ucxkv.replication.events import Refusal
from ucxkv.tokens import NOTHING_SEEN, Point, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucxkv.directory.slots import Records
    from ucxkv.node.session import Session
    from ucxkv.node.shards.shard import Shard
    from ucxkv.node.store import HostStore
    from ucxkv.replication import events as ev

__all__ = ["ShardWrites"]

_KEY = 16
_NO_LOG = -1
"""Of a put of nothing that is here: what is staged under these keys, below a block that is gone, is of no such log."""


class ShardWrites(Staging):
    """See the module. shards_of: the shard of each key that is asked about, given its parent; raises NotLeader.
    led_token: how far the logs of all shards are that are shown here.
    """

    def __init__(
        self,
        store: HostStore,
        shards_of: Callable[[bytes, bytes | None], list[Shard | None]],
        led_token: Callable[[], Token],
    ) -> None:
        super().__init__(store)
        self._shards_of = shards_of
        self._led_token = led_token
        self._left_behind: dict[int, Waiting] = {}
        """Batches that were abandoned in the directory and are in the log all the same: told when that knows."""
        self._refusals: dict[int, ev.Refused] = {}
        self._shard_of: dict[int, int] = {}

    # ---- puts

    def put(self, session: Session, request: m.Put, now_ns: int) -> asyncio.Future[Outcome]:
        """See Staging."""
        offsets = self.take(session, request)
        try:
            shards = self._shards_of(request.keys, request.parents)
        except errors.NotLeader:
            self._store.slabs.free(offsets)
            raise
        first = shards[0] if shards else None
        if all(shard is first for shard in shards):
            return self._put(first, request, offsets, now_ns)
        return self._put_split(shards, request, offsets, now_ns)

    def _put(self, shard: Shard | None, request: m.Put, offsets: list[int], now_ns: int) -> asyncio.Future[Outcome]:
        try:
            staged = self.stage(request, offsets, _NO_LOG if shard is None else shard.number, now_ns)
        except ValueError as exc:  # what is staged has this key in another chain, or in none; nothing has changed
            self._store.slabs.free(offsets)
            raise errors.Overloaded(f"what is on its way must settle first: {exc}", retry_after_s=0.05) from exc
        if isinstance(staged, bytes):
            return self.known(staged, NOTHING_SEEN if shard is None else Token((shard.applied,)))
        assert shard is not None, "what is staged is of a chain that is here"
        rows, at = staged.rows, 0
        parts: list[tuple[bytes, Records | None]] = []
        for record in commits(placeless(rows)):
            count = min(RECORD_ROWS_MAX, len(rows) - at)
            parts.append((record, rows[at : at + count]))
            at += count
        return self._propose(shard, staged, parts)

    def _put_split(
        self, shards: list[Shard | None], request: m.Put, offsets: list[int], now_ns: int
    ) -> asyncio.Future[Outcome]:
        """A put whose chains are in several shards: one batch for each."""
        groups: dict[Shard | None, list[int]] = {}
        for at, shard in enumerate(shards):
            groups.setdefault(shard, []).append(at)
        futures: list[tuple[list[int], asyncio.Future[Outcome]]] = []
        for shard, rows in groups.items():
            part = _picked(request, rows)
            try:
                futures.append((rows, self._put(shard, part, [offsets[at] for at in rows], now_ns)))
            except errors.UcxKvError:
                futures.append((rows, self.known(bytes((PutStatus.UNAVAILABLE,)) * len(rows))))
        return asyncio.ensure_future(_gathered(len(shards), futures, PutStatus.UNAVAILABLE))

    # ---- deletes

    def delete(self, request: m.Delete, now_ns: int) -> asyncio.Future[Outcome]:
        """See Staging."""
        groups: dict[Shard | None, list[int]] = {}
        for at, shard in enumerate(self._shards_of(request.keys, None)):
            groups.setdefault(shard, []).append(at)
        if len(groups) == 1:
            return self._delete(next(iter(groups)), request.keys, now_ns)
        futures: list[tuple[list[int], asyncio.Future[Outcome]]] = []
        for shard, rows in groups.items():
            keys = b"".join(request.keys[_KEY * at : _KEY * at + _KEY] for at in rows)
            futures.append((rows, self._delete(shard, keys, now_ns)))
        return asyncio.ensure_future(_gathered(len(request.keys) // _KEY, futures, DeleteStatus.UNAVAILABLE))

    def _delete(self, shard: Shard | None, keys: bytes, now_ns: int) -> asyncio.Future[Outcome]:
        number = 0 if shard is None else shard.number
        reply = self._store.handle(events.Delete(keys, log=number), now_ns)
        status = reply.status.tobytes()
        if not reply.batch:  # what is not here may be of any shard that is
            return self.known(status, self._led_token() if shard is None else Token((shard.applied,)))
        assert shard is not None
        staged = self.wait_for(reply.batch, [], status)
        return self._propose(shard, staged, [(record, None) for record in leaves(reply.left)])

    # ---- what becomes of proposals

    def _propose(
        self, shard: Shard, staged: Waiting, parts: list[tuple[bytes, Records | None]]
    ) -> asyncio.Future[Outcome]:
        if not parts:  # what it waits for was staged before: it is so when that is
            parts = [(NOTHING, None)]
        self._shard_of[staged.batch] = shard.number
        shard.propose(staged.batch, parts)
        refusal = self._refusals.pop(staged.batch, None)
        if refusal is None:
            return staged.done
        self.abandon(staged)
        del self._shard_of[staged.batch]
        self._store.slabs.free(staged.offsets)
        raise _error_of(refusal)

    def committed(self, shard: Shard, tag: int, index: int) -> None:
        """See Writes."""
        self._shard_of.pop(tag, None)
        behind = self._left_behind.pop(tag, None)
        token = Token((Point(shard.number, shard.replica.epoch, index),))  # of the epoch that proposed it
        if behind is not None:
            behind.answer(behind.status, token)
            return
        rows = self._waiting[tag].rows
        reply = self.settle(tag, token, is_freeing=False)
        if reply.left:
            keys = rows["key"].tobytes()
            at = {keys[_KEY * i : _KEY * i + _KEY]: i for i in range(len(rows))}
            left = [at[reply.left[i : i + _KEY]] for i in range(0, len(reply.left), _KEY)]
            shard.owe_leaves(rows[np.array(left)])

    def refused(self, effect: ev.Refused) -> None:
        """See Writes."""
        if effect.tag:
            self._refusals[effect.tag] = effect

    def is_busy(self, shard: Shard) -> bool:
        """See Writes."""
        return shard.number in self._shard_of.values()

    def unknown(self, tags: Sequence[int]) -> None:
        """See Writes."""
        for tag in tags:
            self._shard_of.pop(tag, None)
            behind = self._left_behind.pop(tag, None)
            if behind is not None:
                behind.refuse(
                    errors.Unavailable("this node leads the shard no more: whether it happened is not known here")
                )

    def leave_behind(self, shard: Shard) -> None:
        """The shard is led here no more: nothing of it stays staged. Its proposals may come true all the same."""
        for one in list(self.newest_first()):
            if self._shard_of.get(one.batch) == shard.number:
                self.abandon(one)
                self._left_behind[one.batch] = one

    def numbers(self) -> dict[str, float]:
        """See Staging."""
        return {}


def _picked(request: m.Put, rows: list[int]) -> m.Put:
    """The put of some of its blocks."""

    def some(raw: bytes, width: int) -> bytes:
        return b"".join(raw[width * at : width * at + width] for at in rows)

    return m.Put(
        keys=some(request.keys, _KEY),
        parents=some(request.parents, _KEY),
        regions=some(request.regions, 2),
        offsets=some(request.offsets, 8),
        lengths=some(request.lengths, 4),
        sums=some(request.sums, 8),
        durable=request.durable,
        exact=request.exact,
    )


async def _gathered(n: int, parts: list[tuple[list[int], asyncio.Future[Outcome]]], otherwise: int) -> Outcome:
    """The outcomes of all parts; `otherwise` where one ended in an error."""
    out, seen, are_logged = bytearray((otherwise,)) * n, NOTHING_SEEN, True
    for rows, future in parts:
        try:
            status, token, is_logged = await future
        except errors.UcxKvError:
            continue
        seen |= token
        are_logged &= is_logged
        for at, state in zip(rows, status, strict=True):
            out[at] = state
    return Outcome(bytes(out), seen, are_logged)


def _error_of(refusal: ev.Refused) -> errors.UcxKvError:
    match refusal.why:
        case Refusal.NOT_LEADER | Refusal.NO_LEASE:
            return errors.NotLeader("this node does not lead the shard at the moment")
        case Refusal.OVERLOADED:
            return errors.Overloaded("too many durable puts wait for the shard's log", retry_after_s=0.05)
        case Refusal.TOO_FEW:
            return errors.Unavailable("too few nodes are in sync to take a durable put; start the missing ones")
