"""One control connection as the node sees it, from its first byte to the release of the last extent it was granted.

    GREETING --Hello--> OPEN                       no token set
    GREETING --Hello--> PROVING --Proof--> OPEN    token set
    OPEN --Bye--> LEAVING                          in good order: nothing of its process writes any more
    any --end of stream--> CLOSED

Only an OPEN session is answered anything but the handshake.

**A slot that a peer may still write is never given to another.** A session writes alone (`writes_alone`) when its
process can reach granted memory without any code of this node: it mapped the segments, or it has a remote key and a
lane on this host, which UCX cannot close by force. When such a session ends without Bye its extents stay quarantined
until its process has ended, by the kernel's word (pidfd): a stopped process may wake and write at any time. With Bye
the process says that nothing of it writes any more. Every other session writes by messages only, which the data
service checks against its grants; its extents are free once that session is closed there.
"""

from __future__ import annotations

import enum
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from ucxkv.transport.control import ControlConnection

__all__ = ["CONTROL_ONLY", "NO_PATH", "PATH_KINDS", "Session", "SessionState", "printable"]

NO_PATH = "none"
"""It has not said yet."""
CONTROL_ONLY = "control"
"""A node's link that moves no bytes."""
PATH_KINDS = ("mapped", "rma", "message", NO_PATH, CONTROL_ONLY)
_WORDS_MAX = 512


def printable(text: str) -> str:
    """A peer's words, cut to what an operator's terminal is shown of them."""
    return "".join(letter for letter in text[:_WORDS_MAX] if letter.isprintable())


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
        "greeting_timer",
        "hello_wants_memory",
        "host",
        "id",
        "name",
        "node_id",
        "nonce",
        "path",
        "pid",
        "pidfd",
        "puts_waiting",
        "role",
        "state",
        "way",
        "why",
        "writes_alone",
    )

    def __init__(self, connection: ControlConnection) -> None:
        self.connection = connection
        self.greeting_timer: asyncio.TimerHandle | None = None
        """Ends it when the handshake takes too long."""
        self.id = secrets.randbits(63) | 1
        self.state = SessionState.GREETING
        self.role = ""
        self.name = ""
        self.node_id = 0
        """Of a node, as it says; 0: a client."""
        self.host = ""
        self.pid = 0
        self.pidfd = -1
        self.writes_alone = False
        self.hello_wants_memory = False
        self.nonce = b""
        self.caller_nonce = b""
        self.path = NO_PATH
        """How it moves this node's bytes, as it says: one of PATH_KINDS."""
        self.way = ""
        self.why = ""
        self.puts_waiting: asyncio.Future[None] | None = None
        """Done when the last of its puts that wait is decided; None: none waits."""

    def end_greeting(self) -> None:
        """The handshake is done or over. Idempotent."""
        if self.greeting_timer is not None:
            self.greeting_timer.cancel()
            self.greeting_timer = None

    @property
    def is_open(self) -> bool:
        """True while requests are answered."""
        return self.state is SessionState.OPEN

    @property
    def path_kind(self) -> str:
        """Its path, for counting: one of PATH_KINDS."""
        return CONTROL_ONLY if self.role == "node" and self.path == NO_PATH else self.path

    def chose(self, path: str, way: str, why: str) -> None:
        """Keep what the client says of its path; a path of no known kind counts as none."""
        self.path = path if path in PATH_KINDS else NO_PATH
        self.way, self.why = printable(way), printable(why)

    def watch_process(self) -> bool:
        """Let the session write alone: open a pidfd of the peer's process, known by the kernel's word.

        False when the process cannot be watched; then it must be given no memory and no remote key. Idempotent.
        """
        if self.writes_alone:
            return True
        who = self.connection.peer_credentials
        if who is None or who.pid <= 0:
            return False
        try:
            self.pidfd = os.pidfd_open(who.pid)
        except OSError:
            return False
        self.pid = who.pid
        self.writes_alone = True
        return True

    def close_pidfd(self) -> None:
        """Stop watching the process. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
