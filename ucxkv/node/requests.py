"""What a node does with each message of an open session: one method a request, the answer or its coroutine back.

No state of its own: it reads and changes the node's store, data service, sessions and links to the neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ucxkv import errors
from ucxkv.dial import failure_of
from ucxkv.directory import FOREVER
from ucxkv.node.disk.serving import DiskRequests
from ucxkv.node.peers import check_member
from ucxkv.node.room import ROUND_BYTES
from ucxkv.node.serving import LED
from ucxkv.node.session import Session, SessionState
from ucxkv.node.space import u64s
from ucxkv.protocol import Message, encode
from ucxkv.protocol import messages as m
from ucxkv.tiers.base import TierError
from ucxkv.transport.base import ProtocolError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ucxkv.node.node import Node
    from ucxkv.node.shards import Shards
    from ucxkv.node.staging import Outcome, Staging
    from ucxkv.transport.control import Message as ControlMessage

__all__ = ["Requests"]

_TASKS_MAX = 64
_BUSY_S = 0.05

log = structlog.get_logger("ucxkv.node")


class Requests:
    """The requests of one node's sessions."""

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._loop = loop
        self._store = node.store
        self._serving = node.store.serving
        self._service = node.service
        self._disk = DiskRequests(node)

    @property
    def _durable(self) -> Staging | None:
        return self._node.durable

    @property
    def _shards(self) -> Shards | None:
        return self._node.cluster.shards if self._node.cluster is not None else None

    def answer(self, session: Session, request: Message, message: ControlMessage) -> Message | None:
        """The answer to one message, or None when there is none or it comes later."""
        if self._serving.end_ns == FOREVER or type(request) not in LED:
            return self._carry_out(session, request, message)
        if not self._serving.is_running:
            self._store.counts["refused_without_lease"] += 1
            if isinstance(request, m.Put) or (isinstance(request, m.PutPart) and self._is_own(request)):
                self._take_back(session, request.offsets)
            if self._node.cluster is not None and isinstance(request, m.Put | m.PutPart | m.Delete):
                raise errors.NotLeader("this node's lease is over, or it is just changing what it leads")
            raise self._serving.refusal()
        if isinstance(request, m.Put | m.PutPart | m.Delete) and self._shards is not None:
            self._check_shards(session, request)
        answer = self._carry_out(session, request, message)
        if isinstance(answer, m.Leased) and not self._serving.is_running:
            self._store.release(session.id, answer.lease, time.monotonic_ns())
        return None if answer is None else self._acknowledged(answer)

    def _check_shards(self, session: Session, request: m.Put | m.PutPart | m.Delete) -> None:
        """Refuse (NotLeader) what was asked in another belief of what this node leads, or is another node's."""
        assert self._shards is not None
        try:
            if request.epoch and request.epoch != self._node.epoch:
                raise errors.NotLeader("this node leads other shards than when it was asked last; connect again")
            if not isinstance(request, m.Delete):
                self._shards.check(request.keys, request.parents)
        except errors.NotLeader:
            if isinstance(request, m.Put) or (isinstance(request, m.PutPart) and self._is_own(request)):
                self._take_back(session, request.offsets)
            raise

    def _still_led(self, session: Session, request: m.Put | m.PutPart | m.Delete) -> None:
        """Before a request that waited is carried out: this node may have lost its lease or the shard meanwhile."""
        if self._shards is None:
            return
        if not self._serving.is_running:
            if not isinstance(request, m.Delete):
                self._take_back(session, request.offsets)
            raise errors.NotLeader("this node's lease ended while the request waited")
        self._check_shards(session, request)

    def _acknowledged(self, answer: Message) -> Message:
        if not self._serving.is_running:
            self._store.counts["refused_without_lease"] += 1
        return self._serving.acknowledged(answer)

    def _is_own(self, request: m.PutPart) -> bool:
        return not request.owner or request.owner == self._node.node_id

    def _carry_out(self, session: Session, request: Message, message: ControlMessage) -> Message | None:
        now_ns = time.monotonic_ns()
        match request:
            case m.Put():
                return self._put(session, request, message)
            case m.Touch():
                self._store.touch(request.keys, now_ns)
                return None
            case m.Grant():
                return self._granted(session, request, now_ns)
            case m.PutPart() if not self._is_own(request):
                self._later(message, session, self._put_foreign(session, request))
                return None
            case m.PutPart():
                if self._durable is not None and self._durable.waits(session, request):
                    self._later(message, session, self._in_turn(session, request))
                    return None
                return self._put_part(session, request)
            case m.OpenData():
                self._later(message, session, self._open_data(session, request))
                return None
            case m.LeaseKeys() if self._disk.has_cold(request.keys):
                self._later(message, session, self._disk.lease(session, request))
                return None
            case m.LeaseKeys():
                return self._store.lease(session.id, request, now_ns)
            case m.Warm():
                if not self._disk.begin_warm(session, request, partial(self._answer_now, message, session)):
                    self._later(message, session, self._disk.warm(session, request))
                return None
            case m.Renew():
                return self._store.renew(session.id, request, now_ns)
            case m.Release():
                self._store.release(session.id, request.lease, now_ns)
                return None
            case m.Delete():
                return self._delete(session, request, message)
            case m.Damaged():
                self._store.damaged(request.keys, now_ns)
                return None
            case m.Return():
                self._take_back(session, request.offsets)
                return None
            case m.Bye():
                session.state = SessionState.LEAVING
                return None
            case m.ChosenPath():
                session.chose(request.path, request.way, request.why)
                return None
            case m.GetConnections():
                return m.Connections(connections=self._node.connections())
            case m.Explain():
                return self._store.policy.explain(self._store.directory, request, now_ns)
            case m.ListKeys():
                return self._store.list_keys(request)
            case m.GetStatus():
                return self._node.report()
            case m.ReadAt():
                return self._read_at(request)
            case m.GetRegions():
                return m.Regions(regions=self._store.regions())
            case m.GetMembers():
                return m.Members(members=self._node.peers.members())
            case _:
                return self._answer_node(session, request, message)

    def _answer_node(self, session: Session, request: Message, message: ControlMessage) -> Message | None:
        """What other nodes ask."""
        if session.role != "node":
            raise errors.UsageError(f"a {type(request).__name__} is not for clients to send")
        match request:
            case m.Join():
                self._later(message, session, self._join(session, request))
                return None
            case m.Adopt():
                if not any(member.name == session.name for member in self._node.peers.members()):
                    raise errors.Unavailable("this node has no link back, so it would not see the asker's end")
                if request.session not in self._node.sessions:  # it ended, or is about to: its extents wait for that
                    return m.Statuses(status=b"\1" * (len(request.offsets) // 8))
                self._revoke(request.session, request.offsets)
                return self._store.adoption.adopt(session.name, request)
            case m.Values():
                self._revoke(session.id, request.offsets)
                return self._store.space.arrived.take(session.id, request, time.monotonic_ns())
            case m.HaveValues():
                return self._store.space.arrived.lacking(request, time.monotonic_ns())
            case m.Surrender():
                self._store.adoption.surrendered(session.name, request)
                return None
            case m.Replicate() if self._shards is not None:
                self._shards.received(session.name, request)
                return None
            case m.Lacks() if self._shards is not None:
                self._shards.lacks(session.name, request)
                return None
            case m.Replicate() | m.Lacks():
                return None  # not for a node that has just begun
            case m.Reclaim():
                member = next((p for p in self._node.peers.members() if p.name == session.name), None)
                if member is None:
                    return m.Done(ok=False, value=0)
                self._later(message, session, self._reclaimed(member.node_id, request.nbytes))
                return None
            case _:
                raise errors.UsageError(f"a {type(request).__name__} was not expected here")

    def _later(self, message: ControlMessage, session: Session, answer: Coroutine[object, object, Message]) -> None:
        """Answer when the coroutine is done."""
        self._node.spawn(self._answer_later(message, session, answer))

    async def _answer_later(
        self, message: ControlMessage, session: Session, coroutine: Coroutine[object, object, Message]
    ) -> None:
        try:
            answer = await coroutine
        except Exception as exc:
            self._failed(message, session, exc)
        else:
            self._reply(message, session, answer)

    def _answer_now(self, message: ControlMessage, session: Session, make: Callable[[], Message]) -> None:
        """Answer with what `make` gives or raises."""
        try:
            answer = make()
        except Exception as exc:
            self._failed(message, session, exc)
        else:
            self._reply(message, session, answer)

    def _failed(self, message: ControlMessage, session: Session, exc: Exception) -> None:
        if isinstance(exc, errors.UcxKvError):
            self._reply(message, session, failure_of(exc))
        elif isinstance(exc, TransportError | TierError | ValueError):
            log.warning("request.failed", name=session.name, type=message.type, why=repr(exc))
            failure = errors.Unavailable(f"the node could not carry it out: {exc}")
            self._reply(message, session, failure_of(failure))
        else:  # a fault of ours: this connection ends, so that nobody waits for the answer
            log.error("request.broken", name=session.name, type=message.type, exc_info=exc)
            session.connection.abort(ProtocolError(f"the node's handler failed: {exc!r}"))

    def _reply(self, message: ControlMessage, session: Session, answer: Message) -> None:
        if session.connection.is_open and message.request_id:
            with contextlib.suppress(TransportError):
                session.connection.reply(message, answer.CODE, encode(answer))

    def _granted(self, session: Session, request: m.Grant, now_ns: int) -> m.Granted:
        answer, short = self._store.grant(session.id, request.length, request.count, now_ns)
        self._lend(session, answer.capacity, answer.offsets)
        if short:
            for member in self._node.peers.members():
                if member.node_id != self._node.node_id and self._store.adoption.bytes_of(member.name):
                    self._spawn_reclaim(member.node_id, short)
        return answer

    def _put(self, session: Session, request: m.Put, message: ControlMessage) -> Message | None:
        if self._durable is not None and (self._durable.waits(session, request) or self._disk.cold_above(request)):
            self._later(message, session, self._in_turn(session, request))
        elif request.durable:
            self._later(message, session, self._put_durably(session, self._staged(session, request), request))
        else:
            return self._put_now(session, request)
        return None

    def _put_now(self, session: Session, request: m.Put) -> m.PutDone:
        self._revoke(session.id, request.offsets)
        answer = self._store.put(session.id, request, time.monotonic_ns())
        self._lend(session, answer.refill_capacity, answer.refill_offsets)
        return answer

    def _put_part(self, session: Session, request: m.PutPart) -> m.PutDone:
        self._revoke(session.id, request.offsets)
        return self._store.put_part(session.id, request, None, time.monotonic_ns())

    def _staged(self, session: Session, request: m.Put) -> asyncio.Future[Outcome]:
        """A durable put's place in the log is that of its message: it is staged before the next one is looked at."""
        if self._durable is None:
            self._take_back(session, request.offsets)
            raise errors.UsageError(
                "a durable put, and this node keeps nothing durable; start it with --durability process --state-dir DIR"
            )
        self._revoke(session.id, request.offsets)
        return self._durable.put(session, request, time.monotonic_ns())

    async def _put_durably(self, session: Session, staged: asyncio.Future[Outcome], request: m.Put) -> Message:
        status, token, is_logged = await staged
        if session.id not in self._node.sessions:
            raise _ended()
        index = self._store.directory.generation
        answer = self._store.put_done(session.id, request, status, index, 0, time.monotonic_ns(), token)
        self._lend(session, answer.refill_capacity, answer.refill_offsets)
        return answer if is_logged else self._acknowledged(answer)

    def _in_turn(self, session: Session, request: m.Put | m.PutPart) -> Coroutine[object, object, Message]:
        """A put that waits for what is staged, or behind those of its session that do."""
        before, done = session.puts_waiting, self._loop.create_future()
        session.puts_waiting = done
        return self._put_in_turn(session, request, before, done)

    async def _put_in_turn(
        self,
        session: Session,
        request: m.Put | m.PutPart,
        before: asyncio.Future[None] | None,
        done: asyncio.Future[None],
    ) -> Message:
        assert self._durable is not None
        lease = 0
        try:
            if before is not None:
                await before
            await self._durable.until_free(request)
            if self._disk.cold_above(request):
                lease = await self._disk.ready_for(session, request)
                await self._durable.until_free(request)
            if session.id not in self._node.sessions:  # its end has dealt with its extents
                raise _ended()
            self._still_led(session, request)
            if isinstance(request, m.PutPart):
                return self._acknowledged(self._put_part(session, request))
            if not request.durable:
                return self._acknowledged(self._put_now(session, request))
            staged = self._staged(session, request)
        finally:
            self._disk.let_go(lease)
            done.set_result(None)
            if session.puts_waiting is done:
                session.puts_waiting = None
        return await self._put_durably(session, staged, request)

    async def _delete_on_disk(self, session: Session, request: m.Delete, besides: set[bytes]) -> Message:
        """A delete of blocks that may have copies: these must not come back at a later start."""
        answer: Message
        if self._durable is None:
            self._still_led(session, request)
            answer = self._store.delete(request.keys, time.monotonic_ns())
        else:
            answer = await self._deleted(session, request, None)
        assert isinstance(answer, m.Statuses)
        await self._disk.forgotten(request, answer, besides)
        return self._acknowledged(answer)

    def _delete(self, session: Session, request: m.Delete, message: ControlMessage) -> Message | None:
        besides = self._disk.in_memory_only(request)
        if besides is not None:
            self._later(message, session, self._delete_on_disk(session, request, besides))
            return None
        durable = self._durable
        if durable is None:
            return self._store.delete(request.keys, time.monotonic_ns())
        staged = None if durable.waits_delete(request) else durable.delete(request, time.monotonic_ns())
        if staged is not None and staged.done():
            return _statuses(staged.result())
        self._later(message, session, self._deleted(session, request, staged))
        return None

    async def _deleted(self, session: Session, request: m.Delete, staged: asyncio.Future[Outcome] | None) -> Message:
        assert self._durable is not None
        if staged is None:
            await self._durable.until_free(request)
            self._still_led(session, request)
            staged = self._durable.delete(request, time.monotonic_ns())
        outcome = await staged
        return _statuses(outcome) if outcome.is_logged else self._acknowledged(_statuses(outcome))

    def _read_at(self, request: m.ReadAt) -> m.FoundAt:
        if self._node.cluster is None:
            raise errors.UsageError(
                "this node has no shards, and no blocks but those that it shows; read without a token"
            )
        if self._shards is None:
            raise errors.Unavailable("this node has just begun")
        return self._shards.read_at(request)

    def _lend(self, session: Session, capacity: int, offsets: bytes) -> None:
        if self._service.serves(session.id):
            self._service.grant(session.id, np.frombuffer(offsets, np.uint64).tolist(), capacity)

    def _revoke(self, session: int, offsets: bytes) -> None:
        """Before extents of a message session get a new meaning: it writes them no more."""
        if self._service.revoke(session, offsets):
            raise errors.UsageError("these extents are still being written; commit after the writes were answered")

    def _take_back(self, session: Session, offsets: bytes) -> None:
        """Free extents that a session does not use; those a cancelled write still runs into when it is over."""
        if session.id not in self._node.sessions:
            return  # its end has dealt with all of them
        busy = self._service.revoke(session.id, offsets)
        kept = set(memoryview(busy).cast("Q")) if busy else ()
        self._store.space.take_back(session.id, [o for o in memoryview(offsets).cast("Q") if o not in kept])
        if busy:
            self._loop.call_later(_BUSY_S, self._take_back, session, busy)

    async def _open_data(self, session: Session, request: m.OpenData) -> Message:
        if not session.is_open:  # it ended before its turn came: nobody would close what is opened now
            raise _ended()
        if not request.is_peer_mode and not session.watch_process():
            raise errors.Unavailable(
                "the caller's process cannot be watched from here (another host or pid namespace?), and its end is the "
                'only end of a data path without error handling; use path="network"'
            )
        return await self._service.open_session(session.id, request, time.monotonic_ns() + 5_000_000_000)

    async def _reclaimed(self, node_id: int, nbytes: int) -> Message:
        """Give blocks in another node's memory up, a portion a turn."""
        freed, wanted = 0, min(nbytes, ROUND_BYTES)
        while freed < wanted and (some := self._store.reclaim(node_id, wanted - freed, time.monotonic_ns())):
            freed += some
            await asyncio.sleep(0)
        return m.Done(ok=freed > 0, value=freed)

    def _spawn_reclaim(self, node_id: int, nbytes: int) -> None:
        async def reclaim() -> None:
            with contextlib.suppress(errors.UcxKvError):
                await self._node.peers.ask(node_id, m.Reclaim(nbytes=nbytes), time.monotonic_ns() + 1_000_000_000)

        if len(self._node.tasks) < _TASKS_MAX:
            self._node.spawn(reclaim())

    async def _join(self, session: Session, request: m.Join) -> Message:
        check_member(request.member)
        self._node.peers.announced(session.id, request.member)
        await self._node.peers.add(request.member)
        return m.Members(members=self._node.peers.members())

    async def _put_foreign(self, session: Session, request: m.PutPart) -> Message:
        """A part whose extents another node lent: that node hands them over first."""
        owner = self._node.peers.find(request.owner)
        if owner is None:
            raise errors.Unavailable(f"node {self._node.config.name} has no link to the node that holds this part")
        if any(request.segments):
            raise errors.StaleError("a put named a segment that its node does not have")
        if not 0 <= request.part < request.parts <= 255:
            raise errors.UsageError(f"part {request.part} of {request.parts}: parts go from 0, at most 255 of them")
        self._store.region_of(owner)
        deadline_ns = time.monotonic_ns() + min(request.deadline_ms, self._node.config.put_deadline_ms) * 1_000_000
        adopt = m.Adopt(session=request.owner_session, segments=request.segments, offsets=request.offsets)
        answer = await self._node.peers.ask(request.owner, adopt, deadline_ns)
        assert isinstance(answer, m.Statuses)
        if any(answer.status):
            raise errors.StaleError(
                f"node {owner.name} no longer holds these extents for the writer; put the part again"
            )
        if self._shards is not None and (not self._serving.is_running or request.epoch != self._node.epoch):
            region = self._store.region_of(owner)
            self._store.adoption.free((region, offset) for offset in u64s(request.offsets))
            self._node.tell_surrendered(self._store.adoption.take_surrendered())
            raise errors.NotLeader("this node leads other shards than when the part was sent")
        done = self._store.put_part(session.id, request, owner, time.monotonic_ns())
        self._node.tell_surrendered(self._store.adoption.take_surrendered())
        return self._acknowledged(done)


def _statuses(outcome: Outcome) -> m.Statuses:
    return m.Statuses(outcome.status, outcome.token.to_bytes() if outcome.token else b"")


def _ended() -> errors.Unavailable:
    return errors.Unavailable("the connection has ended")
