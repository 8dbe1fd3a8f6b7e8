"""Which node to ask: the links to all nodes, the homes of chains, reconnection.

A chain lives at the home of its root (rendezvous hashing over the members' names; where the directory has shards, the
leader of the root's shard, see `leading`), and a child lives where its parent lives. For a key whose root is not known
the nodes are asked in order, best guess first; what was found is remembered in a bounded cache that is never trusted,
only tried first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.client.leading import ShardMap
from ucxkv.client.loadcosts import LoadCosts
from ucxkv.client.mapped import MappedPath
from ucxkv.client.opening import open_link
from ucxkv.client.results import PathKind, PeerInfo
from ucxkv.ids import NodeId
from ucxkv.placement import Members, home, home_indices
from ucxkv.protocol import MessageError, decode
from ucxkv.protocol import messages as m
from ucxkv.tokens import Seen
from ucxkv.transport.ranking import Source, rank_sources
from ucxkv.whereabouts import process_identity

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from ucxkv.client.link import NodeLink
    from ucxkv.client.opening import LinkOptions
    from ucxkv.client.path import ReadInto
    from ucxkv.transport.control import ControlConnection
    from ucxkv.transport.control import Message as ControlMessage

__all__ = ["Router"]

_CACHE_MAX = 65_536
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_DIAL_S = 5.0
_LEAVE_S = 5.0
_LOOK_S = 0.5
_ANY_KEY = b"\1" * 16

log = logging.getLogger("ucxkv.client")


class Router:
    """All nodes one client knows. `options.handler` and `options.on_lost` are to be this router's methods."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._seeds = addresses
        self._options: LinkOptions | None = None
        self.links: dict[str, NodeLink] = {}
        self._known: dict[str, m.MemberInfo] = {}
        self._reported: dict[str, list[m.MemberInfo]] = {}
        self._last_error: dict[str, str] = {}
        self._dialing: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[NodeLink, asyncio.Task[None]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self.shards = ShardMap()
        """Who leads which shard; empty where the directory has none."""
        self.seen = Seen()
        """How far in the logs of shards the answers to this client were."""
        self.loads = LoadCosts()
        """What loads took so far."""
        self._members: Members | None = None
        self._homes: dict[bytes, str] = {}
        self._nearest: list[NodeLink] = []
        self.is_open = True
        """Until `aclose`."""
        self._is_opening = False
        self.sole: NodeLink | None = None
        """The only node there is, when there is one and it answers for everything: spares all routing."""
        self.fast: tuple[NodeLink, MappedPath] | None = None
        """The sole node and its path when that is mapped: a look-up or a small put is then one C call away."""
        self.fast_read: tuple[NodeLink, ReadInto] | None = None
        """The sole node and the short way to read one value from it, where its path has one."""

    # ---- opening and losing nodes

    async def open(self, options: LinkOptions, deadline_ns: int) -> None:
        """Connect to all nodes that can be reached. Raises the first error when there is none."""
        self._options = options
        self._is_opening = True
        outcomes = await asyncio.gather(*(self._dial(a, deadline_ns) for a in self._seeds), return_exceptions=True)
        failures = [o for o in outcomes if isinstance(o, BaseException)]
        for failure in failures:
            if not isinstance(failure, errors.Unavailable) or not self.links:
                raise failure
            log.warning("node.unreachable why=%s", failure)
        others = [member for name, member in self._known.items() if name not in self.links]
        await asyncio.gather(*(self._dial(member.address, deadline_ns) for member in others), return_exceptions=True)
        self._is_opening = False
        self._changed()
        for name in self._known:
            if name not in self.links:
                self._redial(name)

    async def _dial(self, address: str, deadline_ns: int) -> None:
        assert self._options is not None
        link = await open_link(address, self._options, deadline_ns)
        known = self.links.get(link.name)
        if known is not None or not self.is_open:
            link.close()
            if known is not None and known.node_id != link.node_id:
                raise errors.SetupError(
                    f"two live nodes are named {link.name!r}",
                    found=f"one at {known.address}, one at {link.address}",
                    needed="one name a node",
                    fix="start one of them with another --name",
                )
            return
        if not link.is_alive:
            link.close()
            raise errors.Unavailable("the connection closed at once", node=link.name)
        try:
            self.shards.welcomed(link.name, link.welcome)
        except errors.Unavailable:
            link.close()
            raise
        self.links[link.name] = link
        link.on_seen = self.seen.take
        self._reported[link.name] = link.welcome.members
        self.look_for_leaders(self.shards.behind())
        self._changed()

    def on_message(self, connection: ControlConnection, message: ControlMessage) -> None:
        """What nodes say without being asked: their membership."""
        with contextlib.suppress(MessageError):
            known = decode(message.type, message.payload)
            if isinstance(known, m.Members):
                for link in self.links.values():
                    if link.connection is connection:
                        self._reported[link.name] = known.members
                        if self.shards.count:
                            self.shards.heard(known.leaders)
                            self.look_for_leaders(self.shards.behind())
                        self._changed()
                        break

    def on_lost(self, link: NodeLink) -> None:
        """A node's connection ended: none of its blocks is a hit any more."""
        if self.links.get(link.name) is not link:
            return
        del self.links[link.name]
        self.shards.lost(link.name)
        reason = link.connection.close_reason
        why = "it went over to another epoch" if link.is_leaving else "the connection closed"
        self._last_error[link.name] = str(reason) if reason else why
        log.warning("link.lost node=%s why=%s", link.name, self._last_error[link.name])
        if link.is_leaving:
            self._leaving[link] = asyncio.create_task(self._see_off(link), name=f"leave-{link.name}")
        else:
            self._unmap(link)
            link.path.close()
        self._changed()
        self._redial(link.name)

    def _unmap(self, link: NodeLink) -> None:
        """The memory behind this link is about to go."""
        if isinstance(link.path, MappedPath):
            for other in self.links.values():
                if isinstance(other.path, MappedPath):
                    other.path.unmap_regions_of(link.path)

    async def _see_off(self, link: NodeLink) -> None:
        """Close a link that was left, when the puts that run on it have their answers."""
        try:
            await link.wait_quiet(_LEAVE_S)
        finally:
            self._unmap(link)
            link.close()
            del self._leaving[link]

    def _changed(self) -> None:
        known: dict[str, m.MemberInfo] = {}
        for name in [*self._reported]:
            if name not in self.links and len(self.links):
                del self._reported[name]  # the dead do not vouch for members
        for members in self._reported.values():
            known.update((member.name, member) for member in members)
        for name, link in self.links.items():
            known.setdefault(name, m.MemberInfo(link.node_id, name, link.address, link.welcome.epoch))
        fresh = [name for name in known if name not in self._known and name not in self.links]
        self._known = known
        self._members = Members({NodeId(name): member.weight for name, member in known.items()}) if known else None
        sole = next(iter(self.links.values())) if len(self.links) == 1 and len(known) == 1 else None
        if sole is not None and not self.covers((sole,)):
            sole = None
        self.sole = sole
        self.fast = (sole, sole.path) if sole is not None and isinstance(sole.path, MappedPath) else None
        read_into = sole.path.read_into if sole is not None else None
        self.fast_read = (sole, read_into) if sole is not None and read_into is not None else None
        ranked = rank_sources([Source(name, link.way) for name, link in self.links.items()], process_identity())
        self._nearest = [self.links[source.name] for source in ranked]
        for name in () if self._is_opening else fresh:  # `open` dials those itself
            self._redial(name)

    def _redial(self, name: str) -> None:
        if self.is_open and name not in self._dialing:
            self._dialing[name] = asyncio.create_task(self._keep_dialing(name), name=f"redial-{name}")

    async def _keep_dialing(self, name: str) -> None:
        attempt = 0
        try:
            while self.is_open and name not in self.links and name in self._known:
                try:
                    await self._dial(self._known[name].address, time.monotonic_ns() + int(_DIAL_S * 1e9))
                except errors.UcxKvError as exc:
                    self._last_error[name] = str(exc)
                if name in self.links:
                    break
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                attempt += 1
        finally:  # not when the task is seen to be done: a link that is lost before that would be nobody's to dial
            self._dialing.pop(name, None)

    async def aclose(self) -> None:
        """Leave every node in good order. Idempotent."""
        self.is_open = False
        tasks = [*self._dialing.values(), *self._looking.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._dialing.clear()  # of those that were cancelled before their first step
        for link in list(self._leaving):  # whose task was cancelled before it began
            link.close()
        self._leaving.clear()
        for link in list(self.links.values()):
            link.close()
        self.links.clear()
        self._nearest = []
        self.sole = self.fast = self.fast_read = None

    # ---- homes

    def home_link(self, root: bytes) -> NodeLink | None:
        """The node where a chain that starts with `root` belongs; None while it is not reachable.

        With shards: the one that leads the root's shard by its own word, so that what it does not have is nowhere.
        """
        if self._members is None:
            return None
        if self.shards.count:
            return self.links.get(self.shards.leader(root))
        return self.links.get(home(root, self._members))

    def home_names(self, roots: npt.NDArray[np.uint8]) -> list[str]:
        """The home of each of n roots, by name; "" for none."""
        if self.shards.count:
            return self.shards.leaders(roots)
        assert self._members is not None
        nodes = self._members.nodes
        return [nodes[i] for i in home_indices(roots, self._members)]

    def covers(self, links: Iterable[NodeLink], root: bytes | None = None) -> bool:
        """Whether a key that none of these links has, each asked in its epoch, is nowhere; with root: a key of its
        chain. Without shards: always.
        """
        return self.shards.covers((link.led for link in links), root)

    async def is_current(self, link: NodeLink, key: bytes, deadline_ns: int) -> bool:
        """Whether the node still answers in the epoch it welcomed this link in: what it said until now it said in that
        epoch, by messages too. Looks up `key`, whether it is there or not.
        """
        try:
            await link.path.exists(key, deadline_ns)
        except errors.Unavailable:
            return False
        return link.is_alive

    async def is_nowhere(self, links: Iterable[NodeLink], key: bytes, deadline_ns: int) -> bool:
        """Whether `key` is nowhere if these nodes said on their control connections that they do not have it: those of
        them that are still in their epochs lead all shards. Without shards: always.
        """
        if not self.shards.count:
            return True
        return self.covers([link for link in links if await self.is_current(link, key, deadline_ns)])

    def look_for_leaders(self, names: Iterable[str] | None = None) -> None:
        """Have those of these nodes (default: all) that went over to another epoch dialled again, since they may lead
        other shards by now. Returns at once.
        """
        for name in list(self.links) if names is None else names:
            if name not in self._looking and self.is_open:
                self._looking[name] = asyncio.create_task(self._look_at(self.links[name]), name=f"look-{name}")

    async def _look_at(self, link: NodeLink) -> None:
        try:
            await self.is_current(link, _ANY_KEY, time.monotonic_ns() + int(_LOOK_S * 1e9))  # the path notices
        finally:
            del self._looking[link.name]

    @property
    def members(self) -> Members | None:
        """The placement's members; None before any node was reached."""
        return self._members

    def remember(self, key: bytes, link: NodeLink) -> None:
        """`key` was seen at this node."""
        homes = self._homes
        if len(homes) >= _CACHE_MAX and key not in homes:
            del homes[next(iter(homes))]
        homes[key] = link.name

    def order(self, key: bytes) -> list[NodeLink]:
        """All reachable nodes: the likeliest holder of `key`, then by nearness."""
        if self.sole is not None:
            return [self.sole]
        first = self.links.get(self._homes.get(key, "")) or self.home_link(key)
        return self._nearest if first is None else [first, *(link for link in self._nearest if link is not first)]

    @property
    def nearest(self) -> list[NodeLink]:
        """All reachable nodes, by nearness."""
        return self._nearest

    def links_of(self, root: bytes) -> list[NodeLink]:
        """The nodes to ask for a chain that starts with `root`, in order. With shards: its shard's leader alone, so
        that what it does not have is nowhere, and no node while there is none.
        """
        if not self.shards.count:
            return self.order(root)
        leader = self.sole or self.home_link(root)
        if leader is None:
            self.look_for_leaders()
        return [] if leader is None else [leader]

    def remembered(self, key: bytes) -> NodeLink | None:
        """The node where `key` was seen last, while it is reachable."""
        return self.links.get(self._homes.get(key, ""))

    def peers(self) -> list[PeerInfo]:
        """Every known node, reachable or not."""
        out = []
        for name, member in sorted(self._known.items()):
            link = self.links.get(name)
            if link is not None:
                path, leads = link.path, self.shards.leads(name)
                out.append(PeerInfo(name, member.address, path.kind, path.why, True, link.way.words, leads))
            else:
                why_not, leads = self._last_error.get(name, "not reached yet"), self.shards.leads(name)
                out.append(PeerInfo(name, member.address, PathKind.NONE, why_not, False, "", leads))
        return out

    # ---- regions of other nodes

    async def learn_regions(self, link: NodeLink, deadline_ns: int | None) -> None:
        """Map the segments of other nodes that this node's blocks have parts in."""
        path = link.path
        if not isinstance(path, MappedPath):
            return
        answer = await link.ask(m.GetRegions(), deadline_ns)
        assert isinstance(answer, m.Regions)
        by_id = {other.node_id: other for other in self.links.values()}
        for info in answer.regions:
            other = by_id.get(info.node_id)
            if other is None:
                path.unmap_region(info.region)
            elif other is not link and isinstance(other.path, MappedPath):
                path.map_region(info.region, other.path.segments[info.segment])
