"""The connection between `ucxkv perf --connect` and a `ucxkv perf --server`: ucxkv's control connection and handshake.

After the handshake (with the shared token, where there is one) every request is one frame of kind REQUEST with a JSON
object, answered by one of kind ANSWER, or by ucxkv's Failure.

{"do": "open", "host"}                                   -> {"host"}: first of all, where servers will listen
{"do": "facts"}                                          -> facts of the machine
{"do": "start", "backend", "wire", "memory"}             -> {"id", "ready"}
{"do": "ask", "id", "request"} | {"do": "cpu", "id"}     -> the server's answer | {"ns"}; id 0 is the node
{"do": "node", "host_bytes"}                             -> {"addresses"}
{"do": "stop", "id"}                                     -> {}
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

from ucxkv.dial import Caller, Dialed, dial, mapped_error, raise_failure
from ucxkv.errors import Overloaded, Unavailable, UsageError
from ucxkv.perf.process import Missing
from ucxkv.perf.sides import ASK_S, StartedNode, StartedServer
from ucxkv.protocol import MessageError, decode
from ucxkv.protocol import messages as m
from ucxkv.transport.address import AddressError, TcpAddress, parse_address
from ucxkv.transport.base import TransportError

__all__ = ["ANSWER", "DEFAULT_PORT", "NODE", "REQUEST", "SERVER_NAME", "RemoteSide", "parse_host", "resolve"]

REQUEST, ANSWER = 200, 201
DEFAULT_PORT = 13336
SERVER_NAME = "ucxkv perf server"
NODE = 0
_CONNECT_S = 5.0
_START_S = 150.0  # a node of many gigabytes, or a slow import


def parse_host(option: str, text: str) -> TcpAddress:
    """HOST or HOST:PORT, with DEFAULT_PORT where there is no port. Raises UsageError."""
    try:
        address = parse_address(text, default_port=DEFAULT_PORT)
    except AddressError as exc:
        raise UsageError(f"{option}: {exc}") from exc
    if not isinstance(address, TcpAddress):
        raise UsageError(f"{option}: {text!r} is no HOST or HOST:PORT")
    return address


async def resolve(address: TcpAddress) -> TcpAddress:
    """The same with its first numeric address, so that both sides mean the same one. Raises Unavailable."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise Unavailable(f"host name {address.host!r} does not resolve: {exc.strerror}") from exc
    return TcpAddress(str(found[0][4][0]), address.port)


class _RemoteServer:
    def __init__(self, side: RemoteSide, number: int, ready: dict[str, Any]) -> None:
        self._side, self._number, self.ready = side, number, ready

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._side.request("ask", id=self._number, request=request)
        return answer

    async def cpu_ns(self) -> int:
        return int((await self._side.request("cpu", id=self._number))["ns"])

    async def aclose(self) -> None:
        await self._side.stop(self._number)


class _RemoteNode:
    def __init__(self, side: RemoteSide, addresses: list[str]) -> None:
        self._side, self.addresses = side, addresses

    async def cpu_ns(self) -> int | None:
        found: int | None = (await self._side.request("cpu", id=NODE))["ns"]
        return found

    async def aclose(self) -> None:
        await self._side.stop(NODE)


class RemoteSide:
    """Another machine, asked through its perf server. Make it with `connect`; it ends with `aclose`."""

    is_remote = True

    def __init__(self, host: str, dialed: Dialed) -> None:
        self.host = host
        self._connection = dialed.connection

    @classmethod
    async def connect(cls, address: TcpAddress, token: str) -> RemoteSide:
        """Raises Unavailable (nobody there, or busy), SetupError (another token), UsageError (no perf server)."""
        target = await resolve(address)
        deadline_ns = time.monotonic_ns() + int(_CONNECT_S * 1e9)
        try:
            dialed = await dial(str(target), Caller(role="client", name="ucxkv perf", token=token), deadline_ns)
        except Overloaded:
            raise
        except Unavailable as exc:
            raise Unavailable(f"{exc.message} On the other machine: ucxkv perf --server HOST:{target.port}") from exc
        if dialed.welcome.name != SERVER_NAME:
            dialed.connection.abort()
            raise UsageError(
                f"{target} is the node {dialed.welcome.name!r}, no perf server; give it as --address, or start "
                "`ucxkv perf --server HOST:PORT` there"
            )
        side = cls(target.host, dialed)
        try:
            side.host = str((await side.request("open", host=target.host))["host"])
        except BaseException:
            dialed.connection.abort()
            raise
        return side

    async def request(self, do: str, *, seconds: float = ASK_S, **fields: Any) -> Any:
        """One request. Raises the server's error, or Unavailable when it is gone."""
        deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
        payload = json.dumps({"do": do, **fields}).encode()
        try:
            kind, answer = await self._connection.request(REQUEST, payload, deadline_ns)
            if kind == ANSWER:
                return json.loads(bytes(answer))
            failure = decode(kind, answer)
        except (TransportError, MessageError, ValueError) as exc:
            raise mapped_error(exc, self.host) from exc
        if isinstance(failure, m.Failure):
            if failure.kind == Missing.__name__:
                raise Missing(failure.text)
            raise_failure(failure, self.host)
        raise Unavailable(f"the perf server answered with a {type(failure).__name__}")

    async def start(self, name: str, wire: str, memory: str) -> StartedServer:
        """See Side."""
        said = await self.request("start", seconds=_START_S, backend=name, wire=wire, memory=memory)
        return _RemoteServer(self, said["id"], said["ready"])

    async def node(self, host_bytes: int) -> StartedNode:
        """See Side."""
        said = await self.request("node", seconds=_START_S, host_bytes=host_bytes)
        return _RemoteNode(self, said["addresses"])

    async def facts(self) -> dict[str, Any]:
        """See Side."""
        found: dict[str, Any] = await self.request("facts")
        return found

    async def stop(self, number: int) -> None:
        """End what was started; the server does so too when this connection ends."""
        if self._connection.is_open:
            await self.request("stop", id=number)

    async def aclose(self) -> None:
        """End the connection, and with it everything started through it. Idempotent."""
        await self._connection.aclose()
