"""Opening control connections: `connect` on one side, `ControlServer` on the other.

Promises: a listening address is bound or refused with a text that names the fix; a connect ends within its deadline;
the number of accepted connections is bounded; running out of descriptors pauses accepting and kills nothing; a Unix
path is unlinked only by the server that made it, and a dead server's left-over path is taken over.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .address import Address, TcpAddress, UnixAddress
from .base import DeadlineExceeded, PeerLost, SetupFailed, TransportError, remaining_s
from .control import ControlConnection, Handler
from .frames import MAX_FRAME_BYTES
from .poller import connect_socket

__all__ = ["ControlServer", "connect"]

_BACKLOG = 512
_ACCEPTS_A_TURN = 64
_PAUSE_S = 0.1


def _tune_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


async def _resolve(address: TcpAddress, *, passive: bool) -> list[tuple[int, tuple[Any, ...]]]:
    loop = asyncio.get_running_loop()
    flags = socket.AI_PASSIVE if passive else 0
    try:
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror as exc:
        raise SetupFailed(f"host name {address.host!r} does not resolve: {exc.strerror}") from exc
    return [(int(family), sockaddr) for family, _, _, _, sockaddr in infos]


async def connect(
    address: Address,
    *,
    deadline_ns: int | None = None,
    handler: Handler | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    inline_wait_us: int = 80,
) -> ControlConnection:
    """Open a control connection; every address of a host name is tried in turn.

    Raises PeerLost (nobody listens), DeadlineExceeded, SetupFailed (the name does not resolve).
    """
    try:
        async with asyncio.timeout(remaining_s(deadline_ns)):
            sock = await _connect_socket(address)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"no connection to {address} within the deadline") from exc
    return ControlConnection(sock, handler, max_frame_bytes=max_frame_bytes, inline_wait_us=inline_wait_us)


async def _connect_socket(address: Address) -> socket.socket:
    if isinstance(address, UnixAddress):
        targets: list[tuple[int, str | tuple[Any, ...]]] = [(socket.AF_UNIX, address.sockaddr)]
    else:
        targets = list(await _resolve(address, passive=False))
    failures: list[str] = []
    for family, sockaddr in targets:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await connect_socket(sock, sockaddr)
            if family != socket.AF_UNIX:
                _tune_tcp(sock)
            return sock
        except OSError as exc:
            sock.close()
            failures.append(exc.strerror or str(exc))
        except BaseException:
            sock.close()
            raise
    raise PeerLost(f"nobody answers at {address} ({'; '.join(dict.fromkeys(failures))}): is the node running there?")


class ControlServer:
    """Listens on one or more addresses and makes a ControlConnection of every accepted socket.

    handler: for every connection (see control.Handler). on_connect: called with each new connection before it reads
    anything. Use `await ControlServer.start(...)`; `addresses` has the bound ones (port 0 resolved).
    """

    def __init__(
        self,
        handler: Handler,
        on_connect: Callable[[ControlConnection], None] | None,
        max_connections: int,
        max_frame_bytes: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._on_connect = on_connect
        self._max_connections = max_connections
        self._max_frame_bytes = max_frame_bytes
        self._listeners: list[socket.socket] = []
        self._paths: list[tuple[str, int]] = []
        self._resume: asyncio.TimerHandle | None = None
        self._is_open = True
        self.addresses: list[Address] = []
        self.connections: set[ControlConnection] = set()
        self.refused_count = 0
        """Connections closed at once because `max_connections` were open."""
        self.paused_count = 0
        """Times accepting paused because the process was out of descriptors or memory."""

    @classmethod
    async def start(
        cls,
        addresses: Sequence[Address],
        handler: Handler,
        *,
        on_connect: Callable[[ControlConnection], None] | None = None,
        max_connections: int = 4096,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> ControlServer:
        """Bind every address and accept from now on. Raises SetupFailed; then nothing stays bound."""
        server = cls(handler, on_connect, max_connections, max_frame_bytes)
        try:
            for address in addresses:
                if isinstance(address, UnixAddress):
                    server._listen_unix(address)
                else:
                    await server._listen_tcp(address)
        except BaseException:
            server.close()
            raise
        server._watch()
        return server

    async def _listen_tcp(self, address: TcpAddress) -> None:
        port = address.port
        for family, sockaddr in dict.fromkeys(await _resolve(address, passive=True)):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((sockaddr[0], port, *sockaddr[2:]))
                sock.listen(_BACKLOG)
            except OSError as exc:
                sock.close()
                raise _bind_failed(address, exc) from exc
            sock.setblocking(False)
            self._listeners.append(sock)
            if not address.port and not port:  # the names after the first share its free port
                port = sock.getsockname()[1]
        self.addresses.append(TcpAddress(address.host, port))

    def _listen_unix(self, address: UnixAddress) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if not address.is_abstract:
                _remove_dead_path(address)
            sock.bind(address.sockaddr)
            if not address.is_abstract:
                self._paths.append((address.name, os.stat(address.name).st_ino))
            sock.listen(_BACKLOG)
        except OSError as exc:
            sock.close()
            raise _bind_failed(address, exc) from exc
        sock.setblocking(False)
        self._listeners.append(sock)
        self.addresses.append(address)

    def _watch(self) -> None:
        self._resume = None
        for sock in self._listeners:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                    return
                continue  # an error of that one connection (RFC-listed network errors); the listener is fine
            if len(self.connections) >= self._max_connections:
                self.refused_count += 1
                sock.close()
                continue
            try:
                if sock.family != socket.AF_UNIX:
                    _tune_tcp(sock)
                connection = ControlConnection(
                    sock, self._handler, is_serving=True, max_frame_bytes=self._max_frame_bytes
                )
            except OSError:
                sock.close()  # gone between accept and here
                continue
            self.connections.add(connection)
            connection.on_closed(self.connections.discard)
            if self._on_connect is not None:
                self._on_connect(connection)

    def _pause(self) -> None:
        self.paused_count += 1
        for sock in self._listeners:
            self._loop.remove_reader(sock.fileno())
        if self._resume is None:
            self._resume = self._loop.call_later(_PAUSE_S, self._watch)

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections stay. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        for sock in self._listeners:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._listeners.clear()
        for path, inode in self._paths:
            try:
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
            except FileNotFoundError:
                pass

    def close(self, reason: TransportError | None = None) -> None:
        """Stop accepting and abort every connection. Idempotent."""
        self.stop_accepting()
        for connection in list(self.connections):
            connection.abort(reason)


def _remove_dead_path(address: UnixAddress) -> None:
    """Unlink a socket file that no process listens on; anything else in its place is left alone (bind then fails)."""
    path = Path(address.name)
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.name)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return


def _bind_failed(address: Address, exc: OSError) -> TransportError:
    reason = exc.strerror or str(exc)
    if exc.errno == errno.EADDRINUSE:
        fix = "another process listens there; stop it or choose another address (port 0 picks a free one)"
    elif exc.errno == errno.EACCES:
        fix = "this user may not bind there; choose a port from 1024 up or a directory it may write"
    elif exc.errno == errno.EADDRNOTAVAIL:
        fix = "the address is not one of this host's; see `ip address`"
    else:
        fix = "choose another address"
    return SetupFailed(f"cannot listen on {address}: {reason}; {fix}")
