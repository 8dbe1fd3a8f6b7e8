"""Opening a link: handshake, choice of the path, mapping of the node's memory. Every failure leaves nothing behind.

The path is chosen by what works, in this order: the node's memory mapped (same host, same network namespace,
permitted), then
UCX active messages to the node's data thread. `path="mapped"` or `"message"` demands one of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog

from ucxkv import errors
from ucxkv.client.link import NodeLink
from ucxkv.client.mapped import MappedPath
from ucxkv.dial import Caller, Dialed, dial, host_identity
from ucxkv.directory import SlotTableError
from ucxkv.tiers.base import TierError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.client.message import MessageEngine
    from ucxkv.client.path import Path
    from ucxkv.transport.control import Handler

__all__ = ["PATHS", "LinkOptions", "open_link"]

PATHS = ("auto", "mapped", "message")
_INLINE_WAIT_US = 60

log = structlog.get_logger("ucxkv.client")


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
    log.info("link.up", node=dialed.welcome.name, address=dialed.welcome.address, path=path.kind.value, why=why)
    return NodeLink(dialed.welcome, dialed.connection, path, options.on_lost)


async def _choose(
    dialed: Dialed, address: str, caller: Caller, options: LinkOptions, deadline_ns: int
) -> tuple[Path, Dialed, str]:
    why_not = "the caller asked for the message path"
    if options.path != "message":
        try:
            mapped, local = await _map(dialed, caller, options, deadline_ns)
        except (errors.UcxKvError, TierError, SlotTableError, OSError) as exc:
            why_not = str(exc)
            if options.path == "mapped":
                raise errors.SetupError(
                    f"the memory of the node at {address} cannot be mapped: {why_not}",
                    fix='run client and node on one host as one user, or use path="auto"',
                ) from exc
        else:
            return mapped, local, mapped.why
    message = await _message(dialed, options, deadline_ns, why_not)
    return message, dialed, f"active messages: {why_not}"


async def _map(dialed: Dialed, caller: Caller, options: LinkOptions, deadline_ns: int) -> tuple[MappedPath, Dialed]:
    welcome = dialed.welcome
    if welcome.host != host_identity():
        raise errors.Unavailable("the node runs on another host")
    if not welcome.local_name:
        raise errors.Unavailable("the node offers no local socket")
    local = await dial(
        f"unix:@{welcome.local_name}",
        caller,
        deadline_ns,
        handler=options.handler,
        want_memory=True,
        inline_wait_us=_INLINE_WAIT_US,
    )
    try:
        if local.welcome.node_id != welcome.node_id:
            raise errors.Unavailable("another node answers on the local socket")
        fds, local.fds = local.fds, ()
        path = MappedPath(local.welcome, fds)
    except BaseException:
        for fd in local.fds:
            os.close(fd)
        local.connection.abort()
        raise
    dialed.connection.abort()
    return path, local


async def _message(dialed: Dialed, options: LinkOptions, deadline_ns: int, why_not: str) -> Path:
    welcome = dialed.welcome
    if not welcome.data_address:
        raise errors.SetupError(
            f"node {welcome.name} cannot be read from here",
            found=f"not mapped ({why_not}); its message path is off ({welcome.data_why_off or 'by its configuration'})",
            needed="one of the two",
            fix="run the client on the node's host, or start the node with a UCX library (see `ucxkv doctor`)",
        )
    return await options.engine().open_path(welcome, deadline_ns)
