"""What every part of the transport shares: its error tree, deadlines and the fork guard.

An error's class says what the caller does next; its text says what was found.

    TransportError
      UsageError        the call was wrong: fix it
      SetupFailed       the host lacks something: an operator must act (found / needed / how)
      DeadlineExceeded  nobody answered in time; the operation may still have happened
      Closed            this side was closed already (or the process was forked)
      PeerLost          the other side is gone: retry elsewhere, or recompute
      ProtocolError     the other side sent bytes that no version of this protocol sends
      UcxError          anything else libucp reports, with its status

Deadlines are absolute `time.monotonic_ns()` values; `None` means no deadline.
"""

from __future__ import annotations

import os
import time

__all__ = [
    "MAX_CONNECTIONS",
    "Closed",
    "DeadlineExceeded",
    "ForkGuard",
    "PeerLost",
    "ProtocolError",
    "SetupFailed",
    "TransportError",
    "UcxError",
    "UsageError",
    "deadline_after",
    "remaining_s",
]

MAX_CONNECTIONS = 8
"""That blocks go over between one client and one node; KV_MAX_CONNECTIONS of ucx.h."""


class TransportError(Exception):
    """Anything the transport raises."""


class UsageError(TransportError):
    """The call itself was wrong; nothing was sent."""


class SetupFailed(TransportError):
    """The host or the configuration lacks something; the text says what was found, what is needed, how to get it."""


class DeadlineExceeded(TransportError):
    """The deadline passed before the answer came."""


class Closed(TransportError):
    """This object was closed on this side, or belongs to the process before a fork."""


class PeerLost(TransportError):
    """The other side closed, died or became unreachable."""


class ProtocolError(TransportError):
    """The other side sent something malformed, truncated or out of bounds."""


class UcxError(TransportError):
    """libucp reported `status` (a negative ucs_status_t)."""

    def __init__(self, message: str, status: int = -255) -> None:
        super().__init__(message)
        self.status = status


class ForkGuard:
    """Remembers the process that made an object; `check()` raises Closed in any other.

    A forked child shares the parent's sockets, shared memory and UCX state: one stray call corrupts the parent's
    streams, so the first use after a fork is refused.
    """

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._pid = os.getpid()
        self._what = what

    @property
    def is_forked(self) -> bool:
        """True in a process other than the one that made this guard."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise Closed when this process is not the one that made the object."""
        if os.getpid() != self._pid:
            raise Closed(
                f"{self._what} belongs to process {self._pid} and was used in {os.getpid()} after a fork; "
                "connect again in the child (or start it with the 'spawn' method)"
            )


def deadline_after(seconds: float) -> int:
    """The deadline `seconds` from now, in time.monotonic_ns() units."""
    return time.monotonic_ns() + int(seconds * 1e9)


def remaining_s(deadline_ns: int | None) -> float | None:
    """Seconds left before a deadline (0.0 when past), or None for none."""
    if deadline_ns is None:
        return None
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
