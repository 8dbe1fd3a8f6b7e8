"""`ucxkv.connect`: addresses in, an open client out."""

from __future__ import annotations

import functools
import os
import socket
import time
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.client.client import Client
from ucxkv.client.opening import LinkOptions
from ucxkv.client.router import Router
from ucxkv.control.opening import is_control_url, parse_control_url
from ucxkv.dial import Caller, mapped_error
from ucxkv.settings import path_setting
from ucxkv.transport.address import parse_address
from ucxkv.transport.base import MAX_CONNECTIONS
from ucxkv.transport.base import UsageError as TransportUsageError

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    from ucxkv.client.message import MessageEngine
    from ucxkv.client.networks import Networks
    from ucxkv.settings import AskedPath

__all__ = ["Connect", "connect"]


class Connect:
    """A client to be: `async with connect(...) as kv:`, or `kv = await connect(...)` and later `await kv.aclose()`."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        token: str,
        asked: AskedPath,
        timeout_s: float,
        ucx_library: str,
        connections: int,
    ) -> None:
        self._addresses = addresses
        self._token = token
        self._asked = asked
        self._timeout_s = timeout_s
        self._ucx_library = ucx_library
        self._connections = connections
        self._client: Client | None = None

    async def _open(self) -> Client:
        deadline_ns = time.monotonic_ns() + int(self._timeout_s * 1e9)
        router = Router(await self._resolved())
        client = Client(router, self._timeout_s)
        engine: MessageEngine | None = None

        def make_engine() -> MessageEngine:
            nonlocal engine
            if engine is None:
                from ucxkv.client.message import MessageEngine

                engine = MessageEngine(self._ucx_library, self._connections)
                client.on_close(engine.aclose)
            return engine

        @functools.cache
        def make_networks() -> Networks:
            from ucxkv.client.networks import Networks

            return Networks()

        options = LinkOptions(
            caller=Caller(role="client", name=f"{socket.gethostname()}:{os.getpid()}", token=self._token),
            asked=self._asked,
            networks=make_networks,
            handler=router.on_message,
            on_lost=router.on_lost,
            engine=make_engine,
        )
        try:
            await router.open(options, deadline_ns)
        except BaseException:
            await client.aclose()
            raise
        return client

    async def _resolved(self) -> tuple[str, ...]:
        """The addresses, with those of the members in the place of a control plane."""
        found: list[str] = []
        for address in self._addresses:
            if not is_control_url(address):
                found.append(address)
                continue
            from ucxkv.control.cluster import registered_addresses  # most clients never need it

            found += await registered_addresses(address, self._timeout_s)
        return tuple(dict.fromkeys(found))

    def __await__(self) -> Generator[object, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()


def connect(
    *addresses: str,
    token: str | None = None,
    path: str | None = None,
    timeout_s: float = 5.0,
    ucx_library: str = "",
    connections: int = 4,
) -> Connect:
    """Connect to the cluster that the nodes at `addresses` belong to ("host:port", "[ipv6]:port", "unix:@name"), or
    to those that are registered in a control plane ("sqlite:///path/file.db", "etcd://host:2379/cluster-name").

    One address that answers is enough; the others of the cluster are learnt from it. token: shared secret, default the
    environment's UCXKV_TOKEN. path: "auto" (the best that works), or what is demanded: "mapped", "rma", "message",
    "network", "rdma" (see `ucxkv.settings.PATHS`); default the environment's UCXKV_PATH, then the file that
    UCXKV_CONFIG names, then "auto".
    timeout_s: deadline of connecting, and of every call that gives none of its own. ucx_library: libucp to use for
    messages. connections: TCP connections that blocks go over to a node on another host, 1 to 8; several get around the
    limits that networks set to one flow.
    """
    if not addresses:
        raise errors.UsageError('no address; pass at least one, as in ucxkv.connect("127.0.0.1:13337")')
    for address in addresses:
        if is_control_url(address):
            parse_control_url(address)
            continue
        try:
            parse_address(address)
        except TransportUsageError as exc:
            raise mapped_error(exc) from exc
    asked = path_setting(path)
    if not timeout_s > 0:
        raise errors.UsageError(f"timeout_s={timeout_s}; pass seconds above 0")
    if not 1 <= connections <= MAX_CONNECTIONS:
        raise errors.UsageError(f"connections={connections}; pass 1 to {MAX_CONNECTIONS}")
    secret = os.environ.get("UCXKV_TOKEN", "") if token is None else token
    return Connect(addresses, secret, asked, timeout_s, ucx_library, connections)
