"""One control connection as the node sees it, from its first byte to the release of the last extent it was granted.

    GREETING --Hello--> OPEN                       no token set
    GREETING --Hello--> PROVING --Proof--> OPEN    token set
    OPEN --Bye--> LEAVING                          in good order: nothing of its process writes any more
    any --end of stream--> CLOSED

Only an OPEN session is answered anything but the handshake. A session that ends without Bye and whose process had the
segments mapped may still write into its extents: they stay quarantined until that process has ended (pidfd), since
a slot
that a peer may still write is never given to another.
"""

from __future__ import annotations

import enum
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucxkv.transport.control import ControlConnection

__all__ = ["Session", "SessionState"]


class SessionState(enum.Enum):
    """Where a session is in its life."""

    GREETING = enum.auto()
    PROVING = enum.auto()
    OPEN = enum.auto()
    LEAVING = enum.auto()
    CLOSED = enum.auto()


class Session:
    """State of one connection. `id` is a random u64 that proves this connection on the data path."""

    __slots__ = (
        "caller_nonce",
        "connection",
        "has_memory",
        "hello_wants_memory",
        "host",
        "id",
        "name",
        "nonce",
        "pid",
        "pidfd",
        "role",
        "state",
    )

    def __init__(self, connection: ControlConnection) -> None:
        self.connection = connection
        self.id = secrets.randbits(63) | 1
        self.state = SessionState.GREETING
        self.role = ""
        self.name = ""
        self.host = ""
        self.pid = 0
        self.pidfd = -1
        self.has_memory = False
        self.hello_wants_memory = False
        self.nonce = b""
        self.caller_nonce = b""

    @property
    def is_open(self) -> bool:
        """True while requests are answered."""
        return self.state is SessionState.OPEN

    def watch_process(self) -> bool:
        """Open a pidfd of the peer's process, known by the kernel's word; False when it cannot be watched."""
        who = self.connection.peer_credentials
        if who is None or who.pid <= 0:
            return False
        try:
            self.pidfd = os.pidfd_open(who.pid)
        except OSError:
            return False
        self.pid = who.pid
        return True

    def close_pidfd(self) -> None:
        """Stop watching the process. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
