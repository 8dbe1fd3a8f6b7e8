"""What a control connection hands over: messages with their descriptors, and who the peer is."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from .frames import Payload

__all__ = ["Message", "PeerCredentials"]


class PeerCredentials(NamedTuple):
    """Who opened the other end of a Unix socket, as the kernel recorded it at connect time."""

    pid: int
    uid: int
    gid: int


class Message:
    """One received frame. payload: owned by the receiver; descriptors: owned by this message until `take_fds()`."""

    __slots__ = ("_fds", "flags", "payload", "request_id", "type")

    def __init__(self, kind: int, flags: int, request_id: int, payload: Payload, fds: tuple[int, ...]) -> None:
        self.type = kind
        self.flags = flags
        self.request_id = request_id
        self.payload = payload
        self._fds = fds

    @property
    def fds_count(self) -> int:
        """How many descriptors the message still owns."""
        return len(self._fds)

    def take_fds(self) -> tuple[int, ...]:
        """Hand over the descriptors (close-on-exec set); the caller closes them from now on."""
        fds, self._fds = self._fds, ()
        return fds

    def close_fds(self) -> None:
        """Close the descriptors nobody took. Idempotent."""
        close_all(self.take_fds())


def close_all(fds: Sequence[int]) -> None:
    """Close these descriptors."""
    for fd in fds:
        os.close(fd)


def credentials_of(sock: socket.socket) -> PeerCredentials:
    """The peer process of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return PeerCredentials(*struct.unpack("3i", raw))


def describe_peer(sock: socket.socket) -> str:
    """The peer of a stream socket, for messages and logs; works on a closed one too."""
    is_unix = sock.family == socket.AF_UNIX
    try:
        if is_unix:
            return f"unix:pid={credentials_of(sock).pid}"
        host, port, *_ = sock.getpeername()
    except OSError:
        return "unix:closed" if is_unix else "tcp:closed"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_host(sock: socket.socket) -> str:
    """This side's address of a connected TCP socket: it names the interface that leads to the peer. "" for others."""
    try:
        return "" if sock.family == socket.AF_UNIX else str(sock.getsockname()[0])
    except OSError:
        return ""
