"""A control plane in memory, for simulations: one store, any number of handles (one a process), faults on command.

It keeps every promise of `ucxkv.control.base` (the contract suite runs over it) with nothing but asyncio and the clocks
it is given: the store's own, by which leases end, and each handle's, by which its holder counts. Every change happens
at one instant between two awaits, so any history of it is linearizable.

    store = Store(clock)                            # the "server"
    a = MemoryControl(store, clock_of_a)            # a process of the cluster
    a.outage = Outage.HANG                          # a alone is cut off; store.outage cuts off everybody
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ucxkv import errors
from ucxkv.control import Change, ChangeKind, Clock, Conflict, ControlClosed, Entry, Lease, LeaseLost, OutcomeUnknown
from ucxkv.control.base import check_change, check_key, check_prefix, check_ttl

_T = TypeVar("_T")


class Outage(enum.Enum):
    """How calls fail. While any of these is on, nothing comes out of watches."""

    NONE = "none"
    REFUSE = "refuse"  # Unavailable at once; nothing happens
    HANG = "hang"  # Unavailable after the deadline; nothing happens (a compare_and_set: OutcomeUnknown)
    LOSE_REPLY = "lose reply"  # it happens, then as HANG


@dataclass
class _Held:
    entry: Entry
    lease: int


@dataclass
class _Granted:
    ttl_s: float
    until_ns: int
    keys: set[str] = field(default_factory=set)


class Store:
    """What the handles share. clock: the granter's; leases end by it, whoever looks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.revision = 0
        self._outage = Outage.NONE
        self.entries: dict[str, _Held] = {}
        self.leases: dict[int, _Granted] = {}
        self.changes: list[Change] = []
        self.compacted = 0
        self._lease_ids = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.Task[None] | None = None

    @property
    def outage(self) -> Outage:
        """Faults that every handle sees."""
        return self._outage

    @outage.setter
    def outage(self, outage: Outage) -> None:
        self._outage = outage
        self.wake()

    # ---- what handles ask, each in one instant

    def get(self, key: str) -> Entry | None:
        self.expire()
        held = self.entries.get(key)
        return held.entry if held else None

    def list(self, prefix: str) -> tuple[list[Entry], int]:
        self.expire()
        return [self.entries[key].entry for key in sorted(self.entries) if key.startswith(prefix)], self.revision

    def compare_and_set(self, key: str, expected_revision: int, value: bytes | None, lease_id: int) -> Entry | None:
        self.expire()
        held = self.entries.get(key)
        if (held.entry.revision if held else 0) != expected_revision:
            current = held.entry if held else None
            raise Conflict(f"{key} is not at revision {expected_revision}", current=current)
        if lease_id and lease_id not in self.leases:
            raise LeaseLost(f"lease {lease_id:#x} is over")
        return self._put(key, value, lease_id)

    def grant(self, ttl_s: float) -> int:
        self._lease_ids += 1
        self.leases[self._lease_ids] = _Granted(ttl_s, self.clock.now_ns() + int(ttl_s * 1e9))
        self._arm()
        return self._lease_ids

    def renew(self, lease_id: int) -> float | None:
        self.expire()
        granted = self.leases.get(lease_id)
        if granted is None:
            return None
        granted.until_ns = self.clock.now_ns() + int(granted.ttl_s * 1e9)
        return granted.ttl_s

    def end_lease(self, lease_id: int) -> None:
        granted = self.leases.pop(lease_id, None)
        for key in sorted(granted.keys) if granted else ():
            self._put(key, None, 0)

    # ---- time, history, waiting

    def expire(self) -> None:
        """End every lease whose time is over by the store's clock."""
        now_ns = self.clock.now_ns()
        for lease_id in [name for name, granted in self.leases.items() if granted.until_ns <= now_ns]:
            self.end_lease(lease_id)

    def compact(self, revision: int | None = None) -> None:
        """Forget the history up to `revision` (default: all): watches that have not seen it get a RESYNC."""
        self.compacted = self.revision if revision is None else min(revision, self.revision)
        self.changes = [change for change in self.changes if change.entry.revision > self.compacted]
        self.wake()

    def changes_after(self, revision: int) -> Sequence[Change] | None:
        """The changes after `revision`; None when that history is gone or was never here."""
        if revision < self.compacted or revision > self.revision:
            return None
        return self.changes[bisect_right(self.changes, revision, key=lambda change: change.entry.revision) :]

    def wake(self) -> None:
        """Let watches look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def aclose(self) -> None:
        """Stop the timer of leases."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)

    def _put(self, key: str, value: bytes | None, lease_id: int) -> Entry | None:
        self.revision += 1
        before = self.entries.pop(key, None)
        if before is not None and before.lease in self.leases:
            self.leases[before.lease].keys.discard(key)
        entry = Entry(key, b"" if value is None else value, self.revision)
        if value is not None:
            self.entries[key] = _Held(entry, lease_id)
            if lease_id:
                self.leases[lease_id].keys.add(key)
        self.changes.append(Change(ChangeKind.DELETE if value is None else ChangeKind.PUT, entry))
        self.wake()
        return None if value is None else entry

    def _arm(self) -> None:
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._end_leases(), name="memory-control-leases")

    async def _end_leases(self) -> None:
        while self.leases:
            first_ns = min(granted.until_ns for granted in self.leases.values())
            await self.clock.sleep(max(0, first_ns - self.clock.now_ns()) / 1e9)
            self.expire()


class MemoryControl:
    """One process's handle on a `Store`.

    clock: the holder's. timeout_s: deadline of calls. latency_s: asked before and after each call's instant, for the
    seconds that the way takes.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock | None = None,
        *,
        timeout_s: float = 5.0,
        latency_s: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.clock = clock or store.clock
        self.timeout_s = timeout_s
        self._outage = Outage.NONE
        self._latency_s = latency_s
        self._leases: set[Lease] = set()
        self._is_closed = False

    @property
    def outage(self) -> Outage:
        """This handle's faults; the store's come first."""
        return self.store.outage if self.store.outage is not Outage.NONE else self._outage

    @outage.setter
    def outage(self, outage: Outage) -> None:
        self._outage = outage
        self.store.wake()

    async def get(self, key: str) -> Entry | None:
        check_key(key)
        return await self._ask(lambda: self.store.get(key), "get")

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        check_prefix(prefix)
        return await self._ask(lambda: self.store.list(prefix), "list")

    async def compare_and_set(
        self, key: str, expected_revision: int, value: bytes | None, *, lease: Lease | None = None
    ) -> Entry | None:
        check_change(key, expected_revision, value)
        if lease is not None and lease.lost.done():
            raise LeaseLost(f"the lease for {key} is over: {lease.lost.result()}")
        lease_id = lease.id if lease else 0
        return await self._ask(
            lambda: self.store.compare_and_set(key, expected_revision, value, lease_id), "compare_and_set"
        )

    async def lease(self, ttl_s: float) -> Lease:
        check_ttl(ttl_s)
        asked_ns = self.clock.now_ns()
        lease = Lease(self, self.clock, await self._ask(lambda: self.store.grant(ttl_s), "lease"), ttl_s)
        lease.start(asked_ns, ttl_s)
        self._leases = {held for held in self._leases if not held.lost.done()} | {lease}
        return lease

    async def renew_lease(self, lease_id: int) -> float | None:
        return await self._ask(lambda: self.store.renew(lease_id), "renew")

    async def end_lease(self, lease_id: int) -> None:
        await self._ask(lambda: self.store.end_lease(lease_id), "revoke")

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[Change, None]:
        check_prefix(prefix)
        after = after_revision
        while not self._is_closed:
            self.store.expire()
            found = None if self.outage is not Outage.NONE else self.store.changes_after(after)
            if self.outage is Outage.NONE:
                if found is None:
                    after = self.store.revision
                    yield Change(ChangeKind.RESYNC, Entry(prefix, b"", after))
                    continue
                for change in found:
                    after = change.entry.revision
                    if change.entry.key.startswith(prefix):
                        yield change
                if found:
                    continue
            await self.store.changed()
        raise ControlClosed()

    async def aclose(self) -> None:
        self._is_closed = True
        for lease in self._leases:
            lease.abandon("this control plane was closed")
        for lease in self._leases:
            await lease.stopped()
        self._leases.clear()
        self.store.wake()

    async def _ask(self, act: Callable[[], _T], call: str) -> _T:
        """One call: there, its instant, and back, with the faults that are on when each step is taken."""
        if self._is_closed:
            raise ControlClosed()
        await self._travel()
        if self.outage is Outage.REFUSE:
            raise errors.Unavailable(f"the control plane refused {call}")
        if self.outage is not Outage.NONE:
            if self.outage is Outage.LOSE_REPLY:
                with contextlib.suppress(errors.StaleError):
                    act()
            await self.clock.sleep(self.timeout_s)
            kind = OutcomeUnknown if call == "compare_and_set" else errors.Unavailable
            raise kind(f"no answer to {call} within {self.timeout_s} s")
        try:
            return act()
        finally:
            await self._travel()

    async def _travel(self) -> None:
        await self.clock.sleep(self._latency_s() if self._latency_s is not None else 0)
