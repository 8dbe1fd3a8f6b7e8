"""Opening a link: handshake, choice of the path, mapping of the node's memory. Every failure leaves nothing behind.

A mapped table is read under the node's lease, whose end is a time of CLOCK_MONOTONIC: a node in another time namespace
has another such clock, so its memory is not mapped.

The path is chosen by the way to the node (`transport.ranking`), then by what works: the node's memory mapped (same
host, same network namespace, permitted); else UCX to the node's data thread, with one-sided reads where RDMA ports of
both sides meet, and active messages elsewhere (over TCP UCX's own one-sided read is several times slower).

What a path other than "auto" demands is in `ucxkv.settings`; what cannot be had is a SetupError that names who asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.client.link import NodeLink
from ucxkv.client.mapped import MappedPath
from ucxkv.client.results import PathKind
from ucxkv.dial import Dialed, dial, host_identity
from ucxkv.directory import SlotTableError
from ucxkv.protocol import messages as m
from ucxkv.settings import PATHS
from ucxkv.tiers.base import TierError
from ucxkv.transport.base import PeerLost
from ucxkv.transport.ranking import Location, Way, way_between
from ucxkv.whereabouts import clock_identity, location_of, process_identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.client.message import MessageEngine, MessagePath
    from ucxkv.client.networks import Networks
    from ucxkv.client.path import Path
    from ucxkv.dial import Caller
    from ucxkv.settings import AskedPath
    from ucxkv.transport.control import Handler
    from ucxkv.transport.rails import RailChoice

__all__ = ["PATHS", "LinkOptions", "open_link", "path_for"]

_INLINE_WAIT_US = 60
_MAPPING = ("auto", "mapped")
_NETWORK = ("network", "rdma")

log = logging.getLogger("ucxkv.client")


def path_for(way: Way) -> PathKind:
    """The path to try first."""
    if way.is_network:
        return PathKind.MESSAGE if way is Way.TCP else PathKind.RMA
    return PathKind.MAPPED


class LinkOptions:
    """What every link of one client shares, or of one node that is a client of others."""

    __slots__ = ("asked", "caller", "engine", "handler", "inline_wait_us", "networks", "on_lost")

    def __init__(
        self,
        *,
        caller: Caller,
        asked: AskedPath,
        networks: Callable[[], Networks],
        handler: Handler | None,
        on_lost: Callable[[NodeLink], None],
        engine: Callable[[], MessageEngine],
        inline_wait_us: int = _INLINE_WAIT_US,
    ) -> None:
        self.caller = caller
        self.asked = asked
        self.networks = networks
        """Makes or returns what knows the client's devices; only called for a node that is reached over the network."""
        self.handler = handler
        """For what nodes send unasked; None where they send nothing."""
        self.inline_wait_us = inline_wait_us
        """How long the event loop may be held for an answer that is about to come."""
        self.on_lost = on_lost
        self.engine = engine
        """Makes or returns the client's UCX workers; only called when a link needs the message path."""


async def open_link(address: str, options: LinkOptions, deadline_ns: int) -> NodeLink:
    """Connect to the node at `address`, over the best path there is.

    Raises Unavailable, DeadlineExceeded, SetupError (token, demanded path not possible), VersionMismatch.
    """
    opening = _Opening(address, options, deadline_ns)
    try:
        await opening.dial()
        path, way = await opening.choose()
        link = NodeLink(opening.dialed.welcome, opening.dialed.connection, path, options.on_lost, way)
        path.on_other_epoch = link.leave_epoch
    except BaseException:
        opening.abort()
        raise
    with contextlib.suppress(errors.UcxKvError):  # the connection ended just now: whoever gets the link sees that
        link.tell(m.ChosenPath(path.kind.value, way.words, path.why))
    log.info("link.up node=%s address=%s path=%s why=%s", link.name, link.address, path.kind.value, path.why)
    return link


class _Opening:
    """One attempt; `dialed` is the connection that the link will keep."""

    dialed: Dialed

    def __init__(self, address: str, options: LinkOptions, deadline_ns: int) -> None:
        self._address = address
        self._options = options
        self._deadline_ns = deadline_ns
        self._asked = options.asked.path
        self._here = Location(host_identity(), process_identity())

    async def dial(self) -> None:
        """Connect over the network (which may be the loopback)."""
        self.dialed = await dial(
            self._address,
            self._options.caller,
            self._deadline_ns,
            handler=self._options.handler,
            inline_wait_us=self._options.inline_wait_us,
        )

    def abort(self) -> None:
        """Drop the connection. Idempotent."""
        if hasattr(self, "dialed"):
            self.dialed.connection.abort()

    async def choose(self) -> tuple[Path, Way]:
        """The path, with its reason, and the way that it goes."""
        node = location_of(self.dialed.welcome)
        way = way_between(self._here, node)
        why_not = "the node runs on another host"
        if self._asked in _NETWORK:
            why_not = f"{self._options.asked.by} is as to another host"
        elif path_for(way) is PathKind.MAPPED:
            try:
                local = await self._dial_local()
            except errors.UcxKvError as exc:
                why_not = str(exc)
            else:
                self.abort()
                self.dialed = local
                return await self._over_memory(way), way
        if self._asked == "mapped":
            raise self._cannot_map(why_not)
        return await self._over_network(node, why_not)

    async def _over_memory(self, way: Way) -> Path:
        """The node's local socket answered: map its memory, or let UCX copy through shared memory."""
        why_not = f"{self._options.asked.by} was asked for"
        if self._asked in _MAPPING and not self._shares_clock():
            why_not = "the node is in another time namespace, so when its lease ends cannot be told from here"
        elif self._asked in _MAPPING:
            try:
                fds, self.dialed.fds = self.dialed.fds, ()
                path = MappedPath(self.dialed.welcome, fds)
                path.why = f"{way.words}: the node handed out its memory"
                return path
            except (TierError, SlotTableError, OSError) as exc:
                why_not = str(exc)
        if self._asked == "mapped":
            raise self._cannot_map(why_not)
        return await self._open_messages(None, f"{way.words}; {why_not}", self._deadline_ns)

    def _shares_clock(self) -> bool:
        return self.dialed.welcome.place.clock == clock_identity()

    async def _over_network(self, node: Location, why_not: str) -> tuple[Path, Way]:
        """UCX over the devices that lead to the node; over TCP where RDMA was chosen and does not come through."""
        why_no_verbs = self._options.engine().why_no_verbs() if node.rails else ""
        network, way = await self._choose_devices(node, why_no_verbs)
        if path_for(way) is PathKind.RMA:
            why = f"{way.words}, {network.why}; {why_not}"
            if self._asked == "rdma":
                return await self._open_messages(network, why, self._deadline_ns), way
            now_ns = time.monotonic_ns()
            try:
                return await self._open_messages(network, why, now_ns + (self._deadline_ns - now_ns) // 2), way
            except errors.Unavailable as exc:
                why_not = f"RDMA over {network.net_devices} did not come through ({exc}); {why_not}"
                log.warning("link.no_rdma node=%s why=%s", self.dialed.welcome.name, why_not)
            self.abort()
            await self.dial()
            network, way = await self._choose_devices(replace(node, rails=frozenset()), "")
            return await self._open_messages(network, why_not, self._deadline_ns), way
        if self._asked == "rdma":
            raise self._no_rdma(network.why)
        return await self._open_messages(network, f"{why_not}; {network.why}", self._deadline_ns), way

    async def _choose_devices(self, node: Location, why_no_verbs: str) -> tuple[RailChoice, Way]:
        local_host = self.dialed.connection.local_host
        return await self._options.networks().choose(self._here, node, local_host, why_no_verbs)

    async def _dial_local(self) -> Dialed:
        """The same node through its local socket: proof that it is on this host, and where descriptors can travel."""
        welcome = self.dialed.welcome
        if not welcome.local_name:
            raise errors.Unavailable("the node offers no local socket")
        try:
            local = await dial(
                f"unix:@{welcome.local_name}",
                self._options.caller,
                self._deadline_ns,
                handler=self._options.handler,
                want_memory=self._asked in _MAPPING and self._shares_clock(),
                inline_wait_us=self._options.inline_wait_us,
            )
        except errors.Unavailable as exc:
            if isinstance(exc.__cause__, PeerLost):
                raise errors.Unavailable(
                    "the node's local socket cannot be reached from here, though its kernel is the same: another "
                    "network namespace (a container?)"
                ) from exc
            raise
        if local.welcome.node_id != welcome.node_id:
            for fd in local.fds:
                os.close(fd)
            local.connection.abort()
            raise errors.Unavailable("another node answers on the local socket")
        return local

    async def _open_messages(self, network: RailChoice | None, why: str, deadline_ns: int) -> MessagePath:
        """UCX to the node's data thread, over these devices or (None) shared memory."""
        welcome = self.dialed.welcome
        if not welcome.data_address:
            raise errors.SetupError(
                f"node {welcome.name} cannot be read from here",
                found=f"not mapped ({why}); its message path is off ({welcome.data_why_off or 'by its configuration'})",
                needed="one of the two",
                fix="run the client on the node's host, or start the node with a UCX library (see `ucxkv doctor`)",
            )
        wants = {"rma": PathKind.RMA, "message": PathKind.MESSAGE}.get(self._asked)
        path = await self._options.engine().open_path(
            welcome, self.dialed.connection, network=network, wants=wants, deadline_ns=deadline_ns
        )
        path.why = f"{path.over}: {why}"
        return path

    def _cannot_map(self, why_not: str) -> errors.SetupError:
        return errors.SetupError(
            f"the memory of the node at {self._address} cannot be mapped: {why_not}",
            needed=f"{self._options.asked.by} demands it",
            fix='run client and node on one host as one user, or use path="auto"',
        )

    def _no_rdma(self, why_not: str) -> errors.SetupError:
        return errors.SetupError(
            f"the node at {self._address} cannot be reached by RDMA: {why_not}",
            needed=f"{self._options.asked.by} demands it",
            fix='`ucxkv doctor` and `ucxkv topo` on both hosts show what is missing; or use path="auto"',
        )
