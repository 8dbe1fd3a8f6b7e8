"""This node's place in the cluster's control plane: registered under a lease, and told who else is.

Promises
  - The node is told of its lease before it holds it, after each renewal and when it is lost: `until_ns` on this
    machine's CLOCK_MONOTONIC, 0 when it is not held. It never learns of an end later than the control plane's.
  - A lost lease is registered anew, as another incarnation, as soon as the control plane lets it; nobody has to act.
    While another process has the name, or the plane has records of a newer version, it says so and keeps trying.
  - Whoever is registered is told to the node again and again, so that a link that was given up comes back.
  - The control plane's outage changes nothing but the lease: links and members stay as they were."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from ucxkv import errors
from ucxkv.control import open_control
from ucxkv.control.cluster import Cluster

if TYPE_CHECKING:
    from ucxkv.control import ControlPlane, Lease
    from ucxkv.control.cluster import ClusterView, Registration
    from ucxkv.control.records import MemberRecord
    from ucxkv.protocol import messages as m
    from ucxkv.sharding import ShardRule

__all__ = ["NO_CLUSTER", "Membership", "MembershipListener"]

NO_CLUSTER: Final[dict[str, float]] = dict.fromkeys(
    ("incarnation", "cluster_lease_s", "cluster_lease_losses", "cluster_members"), 0
)
"""The numbers of a node without a cluster."""

_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0)
_TELL_AGAIN_S: Final = 5.0
_STOP_S: Final = 3.0

log = structlog.get_logger("ucxkv.node")


class MembershipListener(Protocol):
    """What the node does about it."""

    def on_lease(self, until_ns: int) -> None:
        """The lease holds until this `time.monotonic_ns()`; 0: it does not hold."""

    def on_incarnation(self, record: MemberRecord, others_between: bool) -> None:
        """The node is registered; its lease is told next. others_between: since this process was registered before,
        another one may have had the name."""

    def on_view(self, view: ClusterView) -> None:
        """The cluster's records as they are now; the same may be told again."""


class Membership:
    """One node's registration. url: the control plane's; info: the node as the others are to know it."""

    def __init__(
        self, url: str, info: m.MemberInfo, lease_s: float, listener: MembershipListener,
        *, rule: ShardRule | None = None, replicas: int = 1,
    ) -> None:  # fmt: skip
        """rule, replicas: of the cluster that is made when there is none yet."""
        self._url = url
        self._rule = rule
        self._replicas = replicas
        self._info = info
        self._lease_s = lease_s
        self._listener = listener
        self._plane: ControlPlane | None = None
        self._registration: Registration | None = None
        self._view: ClusterView | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses = 0
        self._trouble = ""
        self._resigned = ""
        self._is_open = True

    async def start(self) -> None:
        """Register. Raises SetupError (URL, name taken, newer records), Unavailable; then nothing is left behind."""
        try:
            self._plane = await open_control(self._url)
            self.cluster = await Cluster.open(self._plane, rule=self._rule, replicas=self._replicas)
            await self._register(None)
        except BaseException:
            await self.aclose()
            raise
        for work in (self._hold(), self._follow(), self._tell()):
            self._tasks.add(asyncio.create_task(work, name="membership"))

    async def aclose(self) -> None:
        """Leave: the record goes at once when the control plane answers, else when the lease is over. Idempotent."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._registration is not None:
            with contextlib.suppress(errors.UcxKvError, TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._registration.lease.revoke()
        if self._plane is not None:
            await self._plane.aclose()

    async def resign(self, why: str) -> None:
        """Give the lease up, and take no other one: others take over what this node led. Idempotent."""
        if not self._resigned:
            self._resigned = self._trouble = why
            if self._registration is not None:
                with contextlib.suppress(errors.UcxKvError, TimeoutError):
                    async with asyncio.timeout(_STOP_S):
                        await self._registration.lease.revoke()

    def numbers(self) -> dict[str, float]:
        """For the node's report."""
        return {
            "incarnation": self.incarnation,
            "cluster_lease_s": round(self.lease_left_s, 3),
            "cluster_lease_losses": self._losses,
            "cluster_members": len(self._view.members) if self._view is not None else 0,
        }

    @property
    def incarnation(self) -> int:
        """The newest one, also after its lease was lost; 0 before the first."""
        return self._registration.record.incarnation if self._registration is not None else 0

    @property
    def lease_left_s(self) -> float:
        """Seconds for which the lease surely holds."""
        if self._registration is None or not self._registration.lease.is_held:
            return 0.0
        return max(0.0, (self._registration.lease.until_ns - time.monotonic_ns()) / 1e9)

    def facts(self) -> dict[str, str]:
        """For the node's report."""
        lease = self._registration.lease if self._registration is not None else None
        state = "held" if self.lease_left_s else "lost"
        if lease is not None and lease.lost.done() and self._is_open:
            state = f"lost: {lease.lost.result()}"
        return {"cluster": self._url, "cluster_lease": f"{state}; {self._trouble}" if self._trouble else state}

    # ---- the lease

    async def _register(self, wait_s: float | None) -> None:
        before = self.incarnation
        if self._resigned:
            return
        registration = await self.cluster.register(self._info, self._lease_s, wait_s=wait_s)
        self._registration, self._trouble = registration, ""
        record = registration.record
        log.info("membership.up", name=record.name, incarnation=record.incarnation, cluster=self._url)
        self._listener.on_incarnation(record, bool(before) and record.incarnation != before + 1)
        self._on_lease(registration.lease)
        registration.lease.on_change(self._on_lease)

    def _on_lease(self, lease: Lease) -> None:
        self._listener.on_lease(0 if lease.lost.done() else lease.until_ns)

    async def _hold(self) -> None:
        """Wait for the lease's end, and register anew, for ever."""
        while self._registration is not None:
            why = await self._registration.lease.lost
            if self._resigned:
                return
            self._losses += 1
            log.error("membership.lost", incarnation=self.incarnation, why=why)
            attempt = 0
            while True:
                try:
                    await self._register(0.0)
                    break
                except errors.UcxKvError as exc:
                    if str(exc) != self._trouble:
                        log.warning("membership.waiting", why=str(exc))
                    self._trouble = str(exc)
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                attempt += 1

    # ---- the others

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self.cluster.follow()) as views:
                    async for view in views:
                        for number in view.unreadable.keys() - (self._view.unreadable if self._view else {}):
                            log.error("membership.view", why=str(view.unreadable[number]))
                        self._view = view
                        self._listener.on_view(view)
            except errors.UcxKvError as exc:
                log.error("membership.view", why=str(exc))
            await asyncio.sleep(_TELL_AGAIN_S)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_AGAIN_S)
            if self._view is not None:
                self._listener.on_view(self._view)
