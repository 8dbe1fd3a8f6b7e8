"""Links to the other nodes: membership, adoption of extents across nodes, and the news of a node's death.

Every node dials every other one; a link that closes means that the other's memory is not to be trusted any more: its
regions are lost to this shard, and what this node held for the other's shard is free. Both sides do so when either's
link closes: what one of them forgot must not live on at the other. A lost link is dialled again with
back-off for a while; a node that starts anew joins by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Protocol

import structlog

from ucxkv import errors
from ucxkv.dial import Caller, Dialed, ask, dial
from ucxkv.protocol import encode
from ucxkv.protocol import messages as m
from ucxkv.transport.address import parse_address
from ucxkv.transport.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucxkv.protocol import Message

__all__ = ["PeerLinks", "PeerListener", "check_member"]

_DIAL_S = 5.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
_PEERS_MAX = 1024

log = structlog.get_logger("ucxkv.node")


class PeerListener(Protocol):
    """What the node does when its neighbours change."""

    def peer_lost(self, member: m.MemberInfo) -> None:
        """The link to `member` broke: its regions are lost."""

    def members_changed(self) -> None:
        """Somebody joined or left."""


class _Link:
    __slots__ = ("dialed", "member", "task")

    def __init__(self, member: m.MemberInfo) -> None:
        self.member = member
        self.dialed: Dialed | None = None
        self.task: asyncio.Task[None] | None = None


class PeerLinks:
    """The other nodes, by node id. own: this node as the others are to know it."""

    def __init__(self, own: m.MemberInfo, token: str, listener: PeerListener) -> None:
        self.own = own
        self._caller = Caller(role="node", name=own.name, token=token, node_id=own.node_id)
        self._listener = listener
        self._links: dict[int, _Link] = {}
        self._announced: dict[int, tuple[int, m.MemberInfo]] = {}
        """Node id -> the session on which it made itself known."""
        self._is_open = True

    def members(self) -> list[m.MemberInfo]:
        """This node and every node whose link is up, ordered by name."""
        up = [link.member for link in self._links.values() if link.dialed is not None]
        return sorted([self.own, *up], key=lambda member: member.name)

    def find(self, node_id: int) -> m.MemberInfo | None:
        """The member with this id whose link is up."""
        link = self._links.get(node_id)
        return link.member if link is not None and link.dialed is not None else None

    async def join(self, addresses: Iterable[str]) -> None:
        """Make this node known through the first of `addresses` that answers. Raises Unavailable when none does."""
        failures = []
        for address in addresses:
            try:
                dialed = await dial(address, self._caller, time.monotonic_ns() + int(_DIAL_S * 1e9))
            except errors.UcxKvError as exc:
                failures.append(f"{address}: {exc}")
                continue
            try:
                answer = await ask(dialed.connection, m.Join(member=self.own), _deadline(), address)
            finally:
                dialed.connection.abort()
            assert isinstance(answer, m.Members)
            await asyncio.gather(*(self.add(member) for member in answer.members))
            return
        if failures:
            raise errors.Unavailable(f"no node to join answered ({'; '.join(failures)})")

    async def add(self, member: m.MemberInfo, *, has_name: bool = False) -> None:
        """Link to a node that joined, and wait until the link is up (or its first dial failed). Idempotent.

        has_name: the control plane says that the name is this one's: who else has it is over, though its link is up.
        Raises SetupError when another live node has its name, Overloaded when there are too many.
        """
        if member.node_id == self.own.node_id or member.node_id in self._links or not self._is_open:
            return
        for link in list(self._links.values()):
            if link.member.name == member.name:
                if link.dialed is not None and link.dialed.connection.is_open and not has_name:
                    raise _same_name(member)
                self._drop(link)
        if member.name == self.own.name:
            raise _same_name(member)
        if len(self._links) >= _PEERS_MAX:
            raise errors.Overloaded(f"this node knows {_PEERS_MAX} others already")
        link = _Link(member)
        self._links[member.node_id] = link
        up = asyncio.get_running_loop().create_future()
        link.task = asyncio.create_task(self._keep(link, up), name=f"peer-{member.name}")
        with contextlib.suppress(errors.UcxKvError):
            await up

    def announced(self, session: int, member: m.MemberInfo) -> None:
        """A node made itself known on a session of its own; a session that it had before is over."""
        before = self._announced.get(member.node_id)
        self._announced[member.node_id] = (session, member)
        if before is not None and before[0] != session:
            self._listener.peer_lost(member)

    def session_ended(self, session: int) -> None:
        """A node's session ended: that node forgets what it shares with this one, so this one does too."""
        for node_id, (announced, member) in list(self._announced.items()):
            if announced == session:
                del self._announced[node_id]
                if self._is_open:
                    self._listener.peer_lost(member)

    def _drop(self, link: _Link) -> None:
        if link.task is not None:
            link.task.cancel()
        self._links.pop(link.member.node_id, None)

    async def _keep(self, link: _Link, up: asyncio.Future[None]) -> None:
        """Dial, announce, wait for the end; again with back-off, until it stays away."""
        attempt = 0
        try:
            while attempt < len(_BACKOFF_S):
                try:
                    dialed = await self._dial(link.member)
                except errors.UcxKvError as exc:
                    log.warning("peer.unreachable", node=link.member.name, address=link.member.address, why=str(exc))
                    if not up.done():
                        up.set_exception(exc)
                        up.exception()
                    await asyncio.sleep(_BACKOFF_S[attempt])
                    attempt += 1
                    continue
                if dialed.welcome.node_id != link.member.node_id:
                    dialed.connection.abort()
                    break  # another incarnation answers there; it joins by itself
                attempt = 0
                link.dialed = dialed
                log.info("peer.up", node=link.member.name, address=link.member.address)
                if not up.done():
                    up.set_result(None)
                self._listener.members_changed()
                try:
                    await dialed.connection.closed.wait()
                finally:
                    link.dialed = None
                    dialed.connection.abort()
                    if self._is_open:
                        log.warning("peer.lost", node=link.member.name, address=link.member.address)
                        self._listener.peer_lost(link.member)
                        self._listener.members_changed()
        finally:
            if not up.done():
                up.set_result(None)
            if self._links.get(link.member.node_id) is link:
                del self._links[link.member.node_id]

    async def _dial(self, member: m.MemberInfo) -> Dialed:
        dialed = await dial(member.address, self._caller, _deadline())
        try:
            await ask(dialed.connection, m.Join(member=self.own), _deadline(), member.name)
        except BaseException:
            dialed.connection.abort()
            raise
        return dialed

    async def ask(self, node_id: int, message: Message, deadline_ns: int) -> Message:
        """One request to a linked node. Raises Unavailable when the link is down."""
        link = self._links.get(node_id)
        if link is None or link.dialed is None:
            raise errors.Unavailable(f"no link to node {node_id:#x}; it may have left")
        return await ask(link.dialed.connection, message, deadline_ns, link.member.name)

    def tell(self, node_id: int, message: Message) -> bool:
        """One one-way message to a linked node; False when the link is down."""
        link = self._links.get(node_id)
        if link is None or link.dialed is None or not link.dialed.connection.is_open:
            return False
        try:
            link.dialed.connection.send(message.CODE, encode(message))
        except TransportError:
            return False  # it ended just now; the link's task forgets the node
        return True

    def tell_name(self, name: str, message: Message) -> bool:
        """The same to the linked node of this name."""
        for node_id, link in self._links.items():
            if link.member.name == name:
                return self.tell(node_id, message)
        return False

    async def aclose(self) -> None:
        """Close every link. Idempotent."""
        self._is_open = False
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()


def check_member(member: m.MemberInfo) -> None:
    """Refuse (UsageError) a member that the others could not place keys on or dial."""
    if not member.name or len(member.name) > 128 or not member.name.isprintable():
        raise errors.UsageError(f"a node's name has 1 to 128 printable characters, not {member.name[:200]!r}")
    if not (math.isfinite(member.weight) and member.weight > 0):
        raise errors.UsageError(f"node {member.name} has weight {member.weight}; it is a positive finite number")
    try:
        parse_address(member.address)
    except TransportError as exc:
        raise errors.UsageError(f"node {member.name}: {exc}") from exc


def _deadline(seconds: float = _DIAL_S) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def _same_name(member: m.MemberInfo) -> errors.SetupError:
    return errors.SetupError(
        f"a live node is named {member.name!r} already",
        found=f"{member.name} at {member.address}",
        needed="one name a node",
        fix="start it with another --name",
    )
