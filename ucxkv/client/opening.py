"""Opening a link: handshake, choice of the path, mapping of the node's memory. Every failure leaves nothing behind.

The path is chosen by what works, in this order: the node's memory mapped (same host, same network namespace,
permitted);
else UCX to the node's data thread, with one-sided reads where both sides have an RDMA device, and active messages
elsewhere
(over TCP UCX's own one-sided read is several times slower). `path="mapped"`, `"rma"` or `"message"` demands one of
them;
`"network"` is as to another host, also on the same one.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.client.link import NodeLink
from ucxkv.client.mapped import MappedPath
from ucxkv.dial import Caller, Dialed, dial, host_identity
from ucxkv.directory import SlotTableError
from ucxkv.tiers.base import TierError
from ucxkv.transport.base import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.client.message import MessageEngine, MessagePath
    from ucxkv.client.path import Path
    from ucxkv.protocol import messages as m
    from ucxkv.transport.control import Handler

__all__ = ["PATHS", "LinkOptions", "open_link"]

PATHS = ("auto", "mapped", "rma", "message", "network")
_INLINE_WAIT_US = 60
_MAPPING = ("auto", "mapped")

log = logging.getLogger("ucxkv.client")


class LinkOptions:
    """What every link of one client shares."""

    __slots__ = ("engine", "handler", "name", "on_lost", "path", "token")

    def __init__(
        self,
        *,
        name: str,
        token: str,
        path: str,
        handler: Handler,
        on_lost: Callable[[NodeLink], None],
        engine: Callable[[], MessageEngine],
    ) -> None:
        self.name = name
        self.token = token
        self.path = path
        self.handler = handler
        self.on_lost = on_lost
        self.engine = engine
        """Makes or returns the client's UCX worker; only called when a link needs the message path."""


async def open_link(address: str, options: LinkOptions, deadline_ns: int) -> NodeLink:
    """Connect to the node at `address`, over the best path there is.

    Raises Unavailable, DeadlineExceeded, SetupError (token, demanded path not possible), VersionMismatch.
    """
    caller = Caller(role="client", name=options.name, token=options.token)
    dialed = await dial(address, caller, deadline_ns, handler=options.handler, inline_wait_us=_INLINE_WAIT_US)
    try:
        path, dialed, why = await _choose(dialed, address, caller, options, deadline_ns)
    except BaseException:
        dialed.connection.abort()
        raise
    path.why = why
    welcome = dialed.welcome
    log.info("link.up node=%s address=%s path=%s why=%s", welcome.name, welcome.address, path.kind.value, why)
    return NodeLink(dialed.welcome, dialed.connection, path, options.on_lost)


async def _choose(
    dialed: Dialed, address: str, caller: Caller, options: LinkOptions, deadline_ns: int
) -> tuple[Path, Dialed, str]:
    is_local, why_not = False, f'the caller asked for path="{options.path}"'
    try:
        if options.path == "network":
            raise errors.Unavailable(why_not)
        local = await _dial_local(dialed.welcome, caller, options, deadline_ns)
    except errors.UcxKvError as exc:
        if options.path in _MAPPING:
            why_not = str(exc)
    else:
        dialed.connection.abort()
        dialed, is_local = local, True
        if options.path in _MAPPING:
            try:
                fds, dialed.fds = dialed.fds, ()
                return MappedPath(dialed.welcome, fds), dialed, "same host: the node handed out its memory"
            except (TierError, SlotTableError, OSError) as exc:
                why_not = str(exc)
    if options.path == "mapped":
        dialed.connection.abort()
        raise errors.SetupError(
            f"the memory of the node at {address} cannot be mapped: {why_not}",
            fix='run client and node on one host as one user, or use path="auto"',
        )
    try:
        path = await _open_messages(dialed, options, deadline_ns, why_not, is_local=is_local)
    except BaseException:
        dialed.connection.abort()
        raise
    return path, dialed, f"{path.over}: {why_not}"


async def _dial_local(welcome: m.Welcome, caller: Caller, options: LinkOptions, deadline_ns: int) -> Dialed:
    """The same node through its local socket: proof that it is on this host, and where descriptors can travel."""
    if welcome.host != host_identity():
        raise errors.Unavailable("the node runs on another host")
    if not welcome.local_name:
        raise errors.Unavailable("the node offers no local socket")
    try:
        local = await dial(
            f"unix:@{welcome.local_name}",
            caller,
            deadline_ns,
            handler=options.handler,
            want_memory=options.path in _MAPPING,
            inline_wait_us=_INLINE_WAIT_US,
        )
    except errors.Unavailable as exc:
        if isinstance(exc.__cause__, PeerLost):
            raise errors.Unavailable(
                "the node's local socket cannot be reached from here, though its kernel is the same: another network "
                "namespace (a container?)"
            ) from exc
        raise
    if local.welcome.node_id != welcome.node_id:
        for fd in local.fds:
            os.close(fd)
        local.connection.abort()
        raise errors.Unavailable("another node answers on the local socket")
    return local


async def _open_messages(
    dialed: Dialed, options: LinkOptions, deadline_ns: int, why_not: str, *, is_local: bool
) -> MessagePath:
    welcome = dialed.welcome
    if not welcome.data_address:
        raise errors.SetupError(
            f"node {welcome.name} cannot be read from here",
            found=f"not mapped ({why_not}); its message path is off ({welcome.data_why_off or 'by its configuration'})",
            needed="one of the two",
            fix="run the client on the node's host, or start the node with a UCX library (see `ucxkv doctor`)",
        )
    return await options.engine().open_path(
        welcome, dialed.connection, is_local=is_local, wants_rma=options.path == "rma", deadline_ns=deadline_ns
    )
