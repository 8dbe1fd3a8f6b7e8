"""Copies of this node's values in another node's memory: the sending side, see `ucxkv.node.arrived` for the other.

A node is the client of another one as any client is: it is lent extents, writes them over the best path there is, and
names them, with `Values` instead of a put.

Invariants
  - What is named has the bytes that its row says: the sum is taken of the bytes that were written, or, where the path
    reads the source twice, before and after. A value that is no longer what its row says is not named, and its extent
    goes back.
  - An extent is named only after its write has ended; one whose write was stopped goes back unnamed.
  - A link is made when it is needed, and again after it was lost, not before a pause that doubles while that fails.
  - What moves at a time is bounded: a few runs of some megabytes each, however many calls there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from ucxkv import errors
from ucxkv.buffers import Pieces
from ucxkv.client.chunking import runs
from ucxkv.client.grants import Taken
from ucxkv.client.opening import LinkOptions, open_link
from ucxkv.client.path import sums_of
from ucxkv.client.results import PathKind
from ucxkv.dial import Caller, answer_to, start_asking
from ucxkv.protocol import messages as m
from ucxkv.settings import AskedPath

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ucxkv.client.link import NodeLink
    from ucxkv.client.message import MessageEngine
    from ucxkv.client.networks import Networks
    from ucxkv.directory.slots import Records

__all__ = ["GONE", "THERE", "Mirror", "Mirrors"]

THERE, GONE = 0, 1
"""A value's status: the other node has it; this node's memory no longer holds what its row says."""

_DIAL_S = 5.0
_BACKOFF_S = (0.05, 2.0)
_RUNS_IN_FLIGHT = 4
_OFFER_KEYS_MAX = 4096
_CONNECTIONS = 4
_INLINE_WAIT_US = 0
"""A node has others to serve while it waits for an answer."""
_BEST = AskedPath("auto", "")

log = structlog.get_logger("ucxkv.node")


class Mirrors:
    """One node's links to the memory of others, and what they share. own: that node; token: the cluster's secret;
    asked: the path to take; ucx_library: libucp for paths by UCX. Made on the running loop; closed with the node.
    """

    def __init__(self, own: m.MemberInfo, token: str, *, asked: AskedPath = _BEST, ucx_library: str = "") -> None:
        self.caller = Caller(role="node", name=own.name, token=token, node_id=own.node_id)
        self.asked = asked
        self._ucx_library = ucx_library
        self._mirrors: dict[int, Mirror] = {}
        self._is_closed = False
        self._engine: MessageEngine | None = None
        self._networks: Networks | None = None

    def to(self, member: m.MemberInfo) -> Mirror:
        """The mirror at that node, the same one at each call; nothing is dialled yet. Forget it when the node is gone:
        a node that starts anew has another id.
        """
        mirror = self._mirrors.get(member.node_id)
        if mirror is None:
            mirror = self._mirrors[member.node_id] = Mirror(member, self)
            if self._is_closed:
                self.forget(member.node_id)
        return mirror

    def forget(self, node_id: int) -> None:
        """That node is gone, or follows nothing of this one any more: leave it. Idempotent."""
        mirror = self._mirrors.pop(node_id, None)
        if mirror is not None:
            mirror.close()

    def engine(self) -> MessageEngine:
        """The UCX workers, made when a path first needs them."""
        if self._engine is None:
            from ucxkv.client.message import MessageEngine  # loads libucp

            self._engine = MessageEngine(self._ucx_library, _CONNECTIONS)
        return self._engine

    def networks(self) -> Networks:
        """The network devices, read when a node is first reached over them."""
        if self._networks is None:
            from ucxkv.client.networks import Networks

            self._networks = Networks()
        return self._networks

    async def aclose(self) -> None:
        """Leave every node in good order; the caller has ended its copies. Idempotent."""
        self._is_closed = True
        for node_id in list(self._mirrors):
            self.forget(node_id)
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()


class Mirror:
    """A link to one other node that takes copies of values. Made by `Mirrors.to`; calls may run side by side."""

    def __init__(self, member: m.MemberInfo, shared: Mirrors) -> None:
        self.member = member
        self._options = LinkOptions(
            caller=shared.caller,
            asked=shared.asked,
            networks=shared.networks,
            handler=None,
            on_lost=self._lost,
            engine=shared.engine,
            inline_wait_us=_INLINE_WAIT_US,
        )
        self._link: NodeLink | None = None
        self._opening = asyncio.Lock()
        self._running = asyncio.Semaphore(_RUNS_IN_FLIGHT)
        self._is_closed = False
        self._pause_s = _BACKOFF_S[0]
        self._retry_ns = 0
        self._why = ""
        self.copied_bytes = 0
        """Bytes that the other node has taken, in all."""

    @property
    def path(self) -> PathKind | None:
        """How bytes go there now; None while there is no link."""
        return self._link.path.kind if self._link is not None and self._link.is_alive else None

    # ---- copying

    async def copy(self, shard: int, rows: Records, address: int, deadline_ns: int) -> npt.NDArray[np.uint8]:
        """Copy values into the other node's memory and name them there as values of `shard`: THERE or GONE, u8[n].

        rows: COMMIT_DTYPE[n] (`ucxkv.directory.log`), places in this node's own segment, which is mapped at `address`
        and stays so until this returns. The values need not stay: a place that was used anew meanwhile is GONE.
        When it raises, some of them may be there all the same; `lacking` tells which.
        Raises Unavailable (no link, or it ended), DeadlineExceeded, Overloaded (no memory there by the deadline),
        ValueTooLarge (for that node's memory).
        """
        status = np.full(len(rows), GONE, np.uint8)
        if not len(rows):
            return status
        link = await self._opened(deadline_ns)
        order = np.argsort(rows["length"], kind="stable")  # extents are lent for one length at a time
        sorted_rows = rows[order]
        for begin, end in runs(_pieces(sorted_rows, address), uniform=False):
            while begin < end:
                async with self._turn(deadline_ns):
                    good = await self._copy_run(link, shard, sorted_rows[begin:end], address, deadline_ns)
                status[order[begin : begin + len(good)]] = np.where(good, THERE, GONE)
                begin += len(good)
        return status

    async def _copy_run(
        self, link: NodeLink, shard: int, rows: Records, address: int, deadline_ns: int
    ) -> npt.NDArray[np.bool_]:
        """Copy and name the first of these values, all of one length, as many as there is memory for at once; which
        of them are there, bool[1 <= k <= n].
        """
        lent = await link.putter.lend(_pieces(rows, address), deadline_ns)
        if lent is None:
            raise errors.Overloaded(
                f"no memory for values of {int(rows['length'][0])} bytes came free there in time; give the node more "
                "--host-bytes",
                node=link.name,
            )
        taken, sums = lent
        rows = rows[: len(taken)]
        try:
            good: npt.NDArray[np.bool_] = sums == rows["sum"]
            if link.path.kind is not PathKind.MAPPED:  # it summed the bytes first and sent them then
                good &= await sums_of(_pieces(rows, address)) == rows["sum"]
        except BaseException:
            link.putter.abandon(taken)
            raise
        if not good.all():
            link.putter.abandon(_picked(taken, ~good))
        if good.any():
            await self._name(link, shard, rows[good], _picked(taken, good), deadline_ns)
        return good

    async def _name(self, link: NodeLink, shard: int, rows: Records, taken: Taken, deadline_ns: int) -> None:
        """Hand the extents over: used up when the message is sent. All are taken, or the books differ, and the link
        ends.
        """
        message = m.Values(
            shard=shard,
            keys=rows["key"].tobytes(),
            sums=rows["sum"].tobytes(),
            lengths=rows["length"].tobytes(),
            offsets=taken.offsets.tobytes(),
        )
        try:
            future = start_asking(link.connection, message, deadline_ns, link.name)
        except BaseException:
            link.putter.abandon(taken)
            raise
        answer = await answer_to(link.connection, future, link.name)
        if not isinstance(answer, m.Statuses) or len(answer.status) != len(rows) or any(answer.status):
            link.connection.abort()
            raise errors.Unavailable(
                "the node did not take values in extents that it had lent for them", node=link.name
            )
        self.copied_bytes += int(rows["length"].sum(dtype=np.uint64))

    async def lacking(self, shard: int, rows: Records, deadline_ns: int) -> npt.NDArray[np.bool_]:
        """Which of these values (COMMIT_DTYPE[n]) the other node has not: to be copied, bool[n]. It compares key, sum
        and length.

        Raises Unavailable, DeadlineExceeded.
        """
        lacks = np.ones(len(rows), np.bool_)
        if not len(rows):
            return lacks
        link = await self._opened(deadline_ns)
        for begin in range(0, len(rows), _OFFER_KEYS_MAX):
            some = rows[begin : begin + _OFFER_KEYS_MAX]
            message = m.HaveValues(
                shard=shard,
                keys=some["key"].tobytes(),
                sums=some["sum"].tobytes(),
                lengths=some["length"].tobytes(),
            )
            answer = await link.ask(message, deadline_ns)
            if not isinstance(answer, m.Statuses) or len(answer.status) != len(some):
                raise errors.Unavailable("the node's answer to HaveValues does not fit it", node=link.name)
            lacks[begin : begin + len(some)] = np.frombuffer(answer.status, np.uint8) != 0
        return lacks

    @contextlib.asynccontextmanager
    async def _turn(self, deadline_ns: int) -> AsyncIterator[None]:
        """One of the few runs that move at a time."""
        await self._acquire(self._running, deadline_ns)
        try:
            yield
        finally:
            self._running.release()

    async def _acquire(self, turn: asyncio.Lock | asyncio.Semaphore, deadline_ns: int) -> None:
        try:
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                await turn.acquire()
        except TimeoutError as exc:
            raise errors.DeadlineExceeded(
                f"earlier copies to node {self.member.name} took all the time", node=self.member.name
            ) from exc

    # ---- the link

    async def _opened(self, deadline_ns: int) -> NodeLink:
        """The link, made now when there is none. Raises Unavailable at once while the pause after a failure lasts."""
        if self._link is not None and self._link.is_alive:
            return self._link
        await self._acquire(self._opening, deadline_ns)
        try:
            if self._link is None or not self._link.is_alive:
                self._link = await self._open(deadline_ns)
            return self._link
        finally:
            self._opening.release()

    async def _open(self, deadline_ns: int) -> NodeLink:
        now_ns = time.monotonic_ns()
        if self._is_closed:
            raise errors.Unavailable("this node has left that one", node=self.member.name)
        if now_ns < self._retry_ns:
            raise errors.Unavailable(
                f"no link to that node, it is dialled again soon: {self._why}", node=self.member.name
            )
        try:
            link = await open_link(self.member.address, self._options, min(deadline_ns, now_ns + int(_DIAL_S * 1e9)))
        except errors.UcxKvError as exc:
            self._failed(str(exc))
            raise errors.Unavailable(f"values cannot be copied to that node: {exc}", node=self.member.name) from exc
        if self._is_closed or not link.is_alive or link.node_id != self.member.node_id:
            why = "the link ended at once" if link.node_id == self.member.node_id else "another node answers there"
            link.close()
            self._failed(why)
            raise errors.Unavailable(f"values cannot be copied to that node: {why}", node=self.member.name)
        self._pause_s = _BACKOFF_S[0]
        log.info("mirror.up", node=self.member.name, path=link.path.kind.value, why=link.path.why)
        return link

    def _failed(self, why: str) -> None:
        self._why = why
        self._retry_ns = time.monotonic_ns() + int(self._pause_s * 1e9)
        self._pause_s = min(2 * self._pause_s, _BACKOFF_S[1])
        log.warning("mirror.down", node=self.member.name, address=self.member.address, why=why)

    def _lost(self, link: NodeLink) -> None:
        link.close()
        if self._link is link:
            self._link = None
            reason = link.connection.close_reason
            self._failed(str(reason) if reason else "the connection closed")

    def close(self) -> None:
        """Leave in good order; a copy that still runs raises Unavailable. Idempotent."""
        self._is_closed = True
        link, self._link = self._link, None
        if link is not None:
            link.putter.return_grants()
            link.close()


def _pieces(rows: Records, address: int) -> Pieces:
    """The values of these rows in the segment at `address`, one piece each."""
    length = rows["length"].astype(np.uint64)
    first = np.arange(len(rows) + 1, dtype=np.uint32)
    return Pieces(first, rows["offset"] + np.uint64(address), length, length, (), writable=False)


def _picked(taken: Taken, which: npt.NDArray[np.bool_]) -> Taken:
    return Taken(taken.capacity, [taken.places[i] for i in np.flatnonzero(which).tolist()])
