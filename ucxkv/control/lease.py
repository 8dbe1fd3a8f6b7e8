"""A lease as its holder sees it, kept alive by a task of its own.

Invariants
  - `until_ns` is on the holder's clock: the moment before the (re)newal was asked, plus the time granted, less the
    drift bound. The engine counts from after it was asked, so the holder always stops first, however long the answer
    took.
  - `until_ns` only grows, and never after `lost` is done. Lost is final: a new lease is a new lease.
  - `lost` is done at the latest when the time is over by the holder's clock, also while a renewal hangs.

The clock is CLOCK_MONOTONIC, which stands still while a whole machine sleeps: after such a sleep a holder may believe
in its lease until its next renewal. Machines that serve do not sleep."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from ucxkv import errors
from ucxkv.control.base import DRIFT

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.control.base import Clock

__all__ = ["Lease", "LeaseEngine"]

_RENEWALS_PER_TTL = 3
_RETRIES_PER_TTL = 12

log = logging.getLogger("ucxkv.control")


class LeaseEngine(Protocol):
    """What a lease needs of its engine. Both calls have the engine's deadline and raise Unavailable."""

    async def renew_lease(self, lease_id: int) -> float | None:
        """Start the lease's time anew: the seconds granted, None when it is over."""

    async def end_lease(self, lease_id: int) -> None:
        """End it and delete its keys; no error when it is over already."""


class Lease:
    """A time-bound promise of the engine: what was set under it stays until it ends.

    id: the engine's name for it. ttl_s: what was asked for. lost: done with the reason once the lease is over for
    whatever cause, `revoke()` included. It is never an exception, so nobody has to await it.
    """

    def __init__(self, engine: LeaseEngine, clock: Clock, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.until_ns = 0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._clock = clock
        self._listeners: list[Callable[[Lease], None]] = []
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = f"lost: {self.lost.result()}" if self.lost.done() else f"until_ns={self.until_ns}"
        return f"<Lease {self.id:#x} of {self.ttl_s} s, {state}>"

    @property
    def is_held(self) -> bool:
        """Whether the promise holds now. Ask after, not before, what depends on it."""
        return not self.lost.done() and self._clock.now_ns() < self.until_ns

    def on_change(self, listener: Callable[[Lease], None]) -> None:
        """Call `listener(self)` after each renewal and once when the lease is lost; at once when it is lost already."""
        self._listeners.append(listener)
        if self.lost.done():
            listener(self)

    def start(self, asked_ns: int, granted_s: float) -> None:
        """The engine granted it to a question of `asked_ns`; keep it alive from now on. For engines."""
        self._extend(asked_ns, granted_s)
        self._task = asyncio.create_task(self._keep(), name=f"lease-{self.id:x}")

    async def revoke(self) -> None:
        """End it now, with its keys. Raises Unavailable when the engine can't be told: then it ends there in time."""
        self.abandon("revoked")
        await self._engine.end_lease(self.id)

    def abandon(self, why: str) -> None:
        """Let it run out: no more renewals, and for the holder it is over now. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._lose(why)

    async def stopped(self) -> None:
        """Return once no task of it runs any more. For engines, after `abandon`."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _extend(self, asked_ns: int, granted_s: float) -> None:
        granted_s = min(granted_s, self.ttl_s)  # an engine that grants more is not relied on for more
        self.until_ns = max(self.until_ns, asked_ns + int(granted_s * (1 - DRIFT) * 1e9))

    def _lose(self, why: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(why)
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener(self)

    async def _keep(self) -> None:
        pause_s = self.ttl_s / _RENEWALS_PER_TTL
        why = ""
        while not why:
            left_s = (self.until_ns - self._clock.now_ns()) / 1e9
            await self._clock.sleep(max(0.0, min(pause_s, left_s)))
            asked_ns = self._clock.now_ns()
            if asked_ns >= self.until_ns:
                why = "its time was over before a renewal came through"
                break
            try:
                granted_s = await self._within(self._engine.renew_lease(self.id))
            except errors.Unavailable as exc:
                log.debug("lease.renewal lease=%x why=%s", self.id, exc)
                pause_s = self.ttl_s / _RETRIES_PER_TTL
                continue
            except errors.UcxKvError as exc:
                why = str(exc)
                break
            if granted_s is None:
                why = "the control plane ended it"
                break
            self._extend(asked_ns, granted_s)
            pause_s = self.ttl_s / _RENEWALS_PER_TTL
            self._tell()
        self._lose(why)
        try:  # what the engine still keeps of it would only stand in the way of its successor
            await self._engine.end_lease(self.id)
        except errors.UcxKvError:
            pass

    async def _within(self, call: object) -> float | None:
        """Await a renewal, but not past the lease's own end. Raises Unavailable then."""
        assert asyncio.iscoroutine(call)
        renewal: asyncio.Task[float | None] = asyncio.ensure_future(call)
        end = asyncio.ensure_future(self._clock.sleep(max(0, self.until_ns - self._clock.now_ns()) / 1e9))
        try:
            await asyncio.wait({renewal, end}, return_when=asyncio.FIRST_COMPLETED)
            if renewal.done():
                return renewal.result()
            raise errors.Unavailable("the renewal took longer than the lease had left")
        finally:
            for task in (renewal, end):
                task.cancel()
            await asyncio.gather(renewal, end, return_exceptions=True)
