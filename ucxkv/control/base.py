"""The control plane's face: where members, the shard map, epochs, in-sync sets and leases live. Four calls, any engine.

Promises, of every engine (`tests/control/` holds each to them)
  - get, list and compare_and_set of one control plane are linearizable; revisions grow over all keys, each change has
    one, and a key's revision never comes back with other content.
  - Nothing hangs: each call has the engine's deadline and ends in Unavailable. A compare_and_set of which nobody can
    say whether it happened raises OutcomeUnknown; no engine repeats one that may have happened.
  - A lease's `until_ns` is never later than the moment at which the engine lets its keys go (see `lease.py`).
  - A watch shows every change of its prefix after the given revision, in order; what it can't show whole (the engine
    dropped that history) it names by one RESYNC, upon which the watcher lists again.

Source: etcd's KV, Lease and Watch services, cut down to what a shard's configuration needs."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ucxkv import errors

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ucxkv.control.lease import Lease

__all__ = [
    "DRIFT",
    "Change",
    "ChangeKind",
    "Clock",
    "Conflict",
    "ControlClosed",
    "ControlPlane",
    "Entry",
    "LeaseLost",
    "OutcomeUnknown",
    "SystemClock",
    "check_change",
    "check_key",
    "check_prefix",
    "check_ttl",
    "prefix_end",
]

DRIFT: Final = 0.02
"""How much two clocks' rates may differ, each being off by 1 % at most: the holder of a lease takes this share off its
time."""

KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 1 << 20
"""etcd refuses requests above 1.5 MiB; configuration is small."""

TTL_S_MAX: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's state. revision: of its last change; grows over all keys, never 0."""

    key: str
    value: bytes
    revision: int


class ChangeKind(enum.Enum):
    """What a watch reports."""

    PUT = "put"
    DELETE = "delete"
    RESYNC = "resync"
    """Changes were lost to the watcher: list again. Later changes of the same watch follow as ever."""


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a watch. entry: the new state; for DELETE the key, no value and the revision at which it went; for
    RESYNC the watch's prefix and the revision after which the watch goes on."""

    kind: ChangeKind
    entry: Entry


class Conflict(errors.StaleError):
    """The key is not at the expected revision: nothing was changed. current: what is there, None when nothing is."""

    def __init__(self, message: str, *, current: Entry | None = None) -> None:
        super().__init__(message)
        self.current = current


class LeaseLost(errors.StaleError):
    """The lease is over: nothing was changed. Get a new one, and look again at all that the old one protected."""


class ControlClosed(errors.Unavailable):
    """This handle was closed: no retry helps. Open another."""

    def __init__(self, message: str = "this control plane was closed") -> None:
        super().__init__(message)


class OutcomeUnknown(errors.Unavailable):
    """The change may have happened, or may still happen. Read the key again before any conclusion."""


class Clock(Protocol):
    """Time as the holder of leases sees it. A simulation brings its own."""

    def now_ns(self) -> int:
        """Monotonic; comparable with nothing but itself."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock."""


class SystemClock:
    """CLOCK_MONOTONIC and asyncio's sleep."""

    def now_ns(self) -> int:
        """`time.monotonic_ns()`."""
        return time.monotonic_ns()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


class ControlPlane(Protocol):
    """One open control plane. All calls raise Unavailable when the engine can't be reached within the deadline, and
    UsageError for keys, values and times that no engine takes (see the checks below)."""

    async def get(self, key: str) -> Entry | None:
        """The key's state now (linearizable), None when it is absent."""

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        """All entries whose key starts with `prefix`, by key, and the revision that this picture is of."""

    async def compare_and_set(
        self, key: str, expected_revision: int, value: bytes | None, *, lease: Lease | None = None
    ) -> Entry | None:
        """Change a key that is at `expected_revision`; 0: that is absent. Answers the new entry, None after a delete.

        value: None deletes. lease: the entry goes when the lease ends; without one the entry stays, also when it was
        under a lease before. Raises Conflict, LeaseLost and Unavailable (nothing was changed), and OutcomeUnknown.
        """

    async def lease(self, ttl_s: float) -> Lease:
        """A lease of `ttl_s` seconds that a task keeps alive until it is revoked, lost or this control plane closed."""

    def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[Change, None]:
        """All changes of `prefix` after `after_revision`, in order, for ever; it outlives outages of the engine.

        Changes that the engine made in one step may share a revision: go on from a revision only when all of its
        changes were taken. Close it (`aclose`) or cancel its task to end it.
        """

    async def aclose(self) -> None:
        """Stop all tasks and watches. Leases count as lost now; the engine ends them in time. Idempotent."""


def check_key(key: str) -> None:
    """Refuse (UsageError) a key that some engine could not hold."""
    if not key or not key.isprintable() or len(key.encode("utf-8", "replace")) > KEY_BYTES_MAX:
        raise errors.UsageError(f"a control-plane key has 1 to {KEY_BYTES_MAX} printable bytes, not {key[:200]!r}")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no key has; the empty one is every key's."""
    if prefix:
        check_key(prefix)


def check_change(key: str, expected_revision: int, value: bytes | None) -> None:
    """Refuse a compare_and_set that means nothing or that some engine could not hold."""
    check_key(key)
    if expected_revision < 0:
        raise errors.UsageError(f"expected_revision={expected_revision}; pass an entry's revision, or 0 for absent")
    if value is None and expected_revision == 0:
        raise errors.UsageError(f"nothing to delete at {key!r}: expected_revision 0 means that the key is absent")
    if value is not None and len(value) > VALUE_BYTES_MAX:
        raise errors.UsageError(f"a control-plane value has at most {VALUE_BYTES_MAX} bytes, not {len(value)}")


def check_ttl(ttl_s: float) -> None:
    """Refuse a lease time that no engine keeps."""
    if not 0 < ttl_s <= TTL_S_MAX:
        raise errors.UsageError(f"ttl_s={ttl_s}; pass seconds above 0, at most {TTL_S_MAX:.0f}")


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys that start with `prefix`; None when there is none."""
    rest = prefix.rstrip(b"\xff")
    return rest[:-1] + bytes([rest[-1] + 1]) if rest else None
