"""`ucxkv perf --server`: starts servers of backends and a node, for one `ucxkv perf --connect` at a time.

Promises: nothing is asked of it without ucxkv's handshake (and its token, where it has one); it listens beyond the
loopback only with a token; what it starts are its own backends, by name, with its own interpreters, on the one address
that its client reached it by; all of it ends with that client's connection, and this process. ucx_perftest, which
listens on every interface, is served only when it was named at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ucxkv.dial import failure_of, host_identity
from ucxkv.errors import Overloaded, SetupError, UcxKvError, Unavailable, UsageError
from ucxkv.node.greeting import Greeter
from ucxkv.node.session import Session, SessionState
from ucxkv.perf.backends import BACKENDS
from ucxkv.perf.link import ANSWER, NODE, REQUEST, SERVER_NAME
from ucxkv.perf.plan import MEMORIES
from ucxkv.perf.process import Missing
from ucxkv.perf.sides import LocalSide, StartedNode, StartedServer
from ucxkv.protocol import WIRE_VERSION, MessageError, decode, encode
from ucxkv.protocol import messages as m
from ucxkv.tiers.host_memory import HostMemory
from ucxkv.transport.address import TcpAddress
from ucxkv.transport.base import ProtocolError, TransportError
from ucxkv.transport.control import ControlConnection, Message
from ucxkv.transport.control_server import ControlServer
from ucxkv.version import VERSION

__all__ = ["PerfServer"]

_HANDSHAKE_S = 5.0
_FRAME_BYTES = 1 << 20
_CONNECTIONS_MAX = 8
_SERVERS_MAX = 16
_WHAT_IT_IS = "this is `ucxkv perf --server`, no node"


class PerfServer:
    """Make it with `start`; `address` is the bound one."""

    def __init__(
        self,
        token: str,
        token_file: Path | None,
        interpreters: Mapping[str, str],
        backends: Sequence[str],
        nodes: Sequence[str],
    ) -> None:
        self._token_file, self._interpreters, self._backends, self._nodes = token_file, interpreters, backends, nodes
        self._greeter = Greeter(token, self._welcome)
        self._client: _Client | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = TcpAddress("127.0.0.1", 0)

    @classmethod
    async def start(
        cls,
        listen: TcpAddress,
        *,
        token: str,
        token_file: Path | None = None,
        interpreters: Mapping[str, str] | None = None,
        backends: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> PerfServer:
        """Listen. backends: those that are served; nodes: addresses of a given node (empty = one is started).

        Raises SetupError: the address cannot be bound, or is not the loopback's and there is no token.
        """
        if not listen.is_loopback and not token:
            raise SetupError(
                f"a perf server on {listen} starts processes for whoever reaches it",
                needed="a token, when it listens beyond the loopback",
                fix="openssl rand -hex 32 > perf.token; chmod 600 perf.token; --token-file perf.token on both sides",
            )
        server = cls(token, token_file, interpreters or {}, backends, nodes)
        try:
            server._server = await ControlServer.start(
                [listen],
                server._on_message,
                on_connect=server._on_connect,
                max_connections=_CONNECTIONS_MAX,
                max_frame_bytes=_FRAME_BYTES,
            )
        except TransportError as exc:
            raise SetupError(str(exc)) from exc
        bound = server._server.addresses[0]
        assert isinstance(bound, TcpAddress)
        server.address = bound
        return server

    _server: ControlServer

    async def aclose(self) -> None:
        """Stop, with everything that was started. Idempotent."""
        self._server.close()
        if self._client is not None:
            await self._client.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- connections

    def _on_connect(self, connection: ControlConnection) -> None:
        session = Session(connection)
        connection.owner = session
        connection.on_closed(self._on_closed)
        asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._greeting_over, session)

    def _greeting_over(self, session: Session) -> None:
        if session.state in (SessionState.GREETING, SessionState.PROVING):
            session.connection.abort(ProtocolError("no handshake in time"))

    def _on_closed(self, connection: ControlConnection) -> None:
        client = self._client
        if client is not None and client.connection is connection:
            self._spawn(self._end(client))

    async def _end(self, client: _Client) -> None:
        await client.aclose()
        if self._client is client:
            self._client = None

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _welcome(self, session: Session) -> m.Welcome:
        if self._client is not None and self._client.connection.is_open:
            raise Overloaded("another `ucxkv perf --connect` is being served; figures would disturb each other")
        self._client = _Client(session.connection, self)
        return m.Welcome(
            wire_version=WIRE_VERSION,
            version=VERSION,
            node_id=0,
            name=SERVER_NAME,
            address=str(self.address),
            epoch=0,
            host=host_identity(),
            local_name="",
            session=session.id,
            table_bytes=0,
            table_capacity=0,
            value_bytes_max=0,
            regions=[],
            members=[],
            data_why_off=_WHAT_IT_IS,
        )

    # ---- messages

    def _on_message(self, connection: ControlConnection, message: Message) -> None:
        session = connection.owner
        assert isinstance(session, Session)
        if session.is_open:
            if message.type != REQUEST or not message.request_id:
                refusal = failure_of(UsageError(_WHAT_IT_IS))
                if message.request_id:
                    connection.reply(message, refusal.CODE, encode(refusal))
                return
            self._spawn(self._answer(connection, message, bytes(message.payload)))
            return
        try:
            answer = self._greeter.handle(session, decode(message.type, message.payload))
        except MessageError as exc:
            raise ProtocolError(str(exc)) from exc
        except UcxKvError as exc:
            answer = failure_of(exc)
            session.state = SessionState.CLOSED
            asyncio.get_running_loop().call_later(0.2, connection.abort)  # let the answer arrive
        if message.request_id:
            connection.reply(message, answer.CODE, encode(answer))

    async def _answer(self, connection: ControlConnection, message: Message, payload: bytes) -> None:
        kind, answer = ANSWER, b"{}"
        try:
            request = json.loads(payload)
            if not isinstance(request, dict) or self._client is None:
                raise UsageError("a request is a JSON object")
            answer = json.dumps(await self._client.carry_out(request)).encode()
        except UcxKvError as exc:
            refusal = failure_of(exc)
            kind, answer = refusal.CODE, encode(refusal)
        except (ValueError, KeyError, TypeError) as exc:
            refusal = failure_of(UsageError(f"malformed request: {exc!r}"))
            kind, answer = refusal.CODE, encode(refusal)
        with contextlib.suppress(TransportError):
            connection.reply(message, kind, answer)

    def side_for(self, host: str) -> LocalSide:
        """Where servers for a client that reached us at `host` listen: our own address, or that one if we have all.

        Raises UsageError for a host that is no address of one interface.
        """
        own = ipaddress.ip_address(self.address.host) if self.address.host != "localhost" else None
        if own is not None and own.is_unspecified:
            try:
                named = ipaddress.ip_address(host)
            except ValueError as exc:
                raise UsageError(f"{host!r} is no numeric address") from exc
            if named.is_unspecified or named.is_multicast:
                raise UsageError(f"{host} is no address of one interface")
        else:
            host = self.address.host
        return LocalSide(host, self._interpreters, self._token_file, self._nodes)

    def serves(self, name: str) -> bool:
        """Whether a backend may be asked for."""
        return name in self._backends


class _Client:
    """The one client, and what was started for it."""

    def __init__(self, connection: ControlConnection, server: PerfServer) -> None:
        self.connection = connection
        self._server = server
        self._side: LocalSide | None = None
        self._servers: dict[int, StartedServer] = {}
        self._node: StartedNode | None = None
        self._last = NODE
        self._is_open = True
        self._starting = asyncio.Lock()

    async def carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request. Raises UcxKvError, and ValueError, KeyError or TypeError for a malformed one."""
        actions: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "open": self._open,
            "facts": self._facts,
            "start": self._start,
            "ask": self._ask,
            "cpu": self._cpu,
            "node": self._start_node,
            "stop": self._stop,
        }
        action = actions.get(str(request["do"]))
        if action is None:
            raise UsageError(f"a perf server does {', '.join(actions)}, not {request['do']!r}")
        return await action(request)

    @property
    def _our_side(self) -> LocalSide:
        if self._side is None:
            raise UsageError("the first request is `open`")
        return self._side

    async def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        self._side = self._server.side_for(str(request["host"]))
        return {"host": self._side.host}

    async def _facts(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._our_side.facts()

    async def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        name, wire, memory = str(request["backend"]), str(request["wire"]), str(request["memory"])
        if name not in BACKENDS or not BACKENDS[name].module or wire not in ("shm", "net") or memory not in MEMORIES:
            raise UsageError(f"no server for backend {name!r}, wire {wire!r}, memory {memory!r}")
        if not self._server.serves(name):
            raise Missing("not served by the other machine: start its --server with --backend all, or a list of names")
        if len(self._servers) >= _SERVERS_MAX:
            raise Overloaded(f"{_SERVERS_MAX} servers run already")
        async with self._starting:
            server = await self._our_side.start(name, wire, memory)
            if not self._is_open:
                await server.aclose()
                raise Unavailable("the client has gone")
            self._last += 1
            self._servers[self._last] = server
            return {"id": self._last, "ready": server.ready}

    def _started(self, request: dict[str, Any]) -> StartedServer:
        server = self._servers.get(int(request["id"]))
        if server is None:
            raise UsageError(f"no server with id {request['id']} runs")
        return server

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._started(request).ask(dict(request["request"]))

    async def _cpu(self, request: dict[str, Any]) -> dict[str, Any]:
        if int(request["id"]) == NODE:
            return {"ns": await self._node.cpu_ns() if self._node is not None else None}
        return {"ns": await self._started(request).cpu_ns()}

    async def _start_node(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted, free = int(request["host_bytes"]), HostMemory.read().available_bytes
        if not 0 < wanted <= free // 2:
            raise UsageError(f"a node of {wanted} bytes, with {free} free: ask for smaller sizes or batches")
        async with self._starting:
            if self._node is None:
                node = await self._our_side.node(wanted)
                if not self._is_open:
                    await node.aclose()
                    raise Unavailable("the client has gone")
                self._node = node
        return {"addresses": self._node.addresses}

    async def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        number = int(request["id"])
        if number == NODE:
            node, self._node = self._node, None
            if node is not None:
                await node.aclose()
        elif number in self._servers:
            await self._servers.pop(number).aclose()
        return {}

    async def aclose(self) -> None:
        """End everything. Idempotent."""
        self._is_open = False
        servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            await server.aclose()
        node, self._node = self._node, None
        if node is not None:
            await node.aclose()
