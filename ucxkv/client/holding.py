"""Leases and views: blocks that stay where they are while somebody works with them.

A lease is counted by this client from before it asked, by the node from after it had decided, and here two hundredths
shorter, since two machines' clocks may drift apart by that much: it never seems alive here when it is over there. It is
renewed in the background until it is released.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

import numpy as np

from ucxkv import errors
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from ucxkv.client.client import Client
    from ucxkv.client.link import NodeLink
    from ucxkv.client.mapped import MappedPath

__all__ = ["Lease", "View"]

_RENEW_SHARE = 1 / 3
_KEPT_SHARE = 0.98
"""Of a lease's time by the node's clock: what is left of it by ours, if that is the slower one (each is off by 1 %)."""


def _until_ns(asked_ns: int, ttl_ms: int) -> int:
    return asked_ns + int(ttl_ms * 1e6 * _KEPT_SHARE)


class _Held:
    """One lease at one node."""

    __slots__ = ("lease", "link", "ttl_ms", "until_ns")

    def __init__(self, link: NodeLink, lease: int, asked_ns: int, ttl_ms: int) -> None:
        self.link = link
        self.lease = lease
        self.ttl_ms = ttl_ms  # what the node granted, which may be less than was asked for
        self.until_ns = _until_ns(asked_ns, ttl_ms)


class Lease:
    """`async with kv.lease(keys) as lease:` these blocks stay put until the end of the block, or until `valid` is
    False.

    granted: bool[n], which of the keys were there. A lease is lost when its node dies or cannot be reached for `ttl_s`.
    """

    def __init__(self, client: Client, keys: npt.NDArray[np.uint8], ttl_s: float) -> None:
        if not 0.05 <= ttl_s <= 600:
            raise errors.UsageError(
                f"ttl_s={ttl_s}: a lease runs between 0.05 and 600 seconds and is renewed meanwhile"
            )
        self._client = client
        self._keys = keys
        self._ttl_ns = int(ttl_s * 1e9)
        self._held: list[_Held] = []
        self._renewal: asyncio.Task[None] | None = None
        self.granted: npt.NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        self.unanswered: errors.Unavailable | None = None
        """Why a node that was asked did not answer; keys that are not granted may be there."""

    @property
    def valid(self) -> bool:
        """True while every granted block is certain to stay in place."""
        now = time.monotonic_ns()
        return bool(self._held) and all(h.link.is_alive and now < h.until_ns for h in self._held)

    async def __aenter__(self) -> Self:
        try:
            await self._acquire()
        except BaseException:
            await self.release()
            raise
        if self._held:
            self._renewal = asyncio.create_task(self._renew(), name="lease-renewal")
        return self

    async def _acquire(self) -> None:
        ttl_ms = self._ttl_ns // 1_000_000
        deadline_ns = min(time.monotonic_ns() + self._ttl_ns, self._client.deadline())
        missing = np.arange(len(self._keys))
        answered = []
        for link in self._client.links_for(self._keys):
            if not len(missing):
                break
            asked_ns = time.monotonic_ns()
            try:
                answer = await link.ask(m.LeaseKeys(keys=self._keys[missing].tobytes(), ttl_ms=ttl_ms), deadline_ns)
            except errors.Unavailable as exc:
                self.unanswered = exc
                continue  # its blocks are not granted
            if not isinstance(answer, m.Leased) or len(answer.status) != len(missing):
                raise errors.Unavailable("the node's answer to a lease does not fit it", node=link.name)
            if answer.lease:
                self._held.append(_Held(link, answer.lease, asked_ns, answer.ttl_ms))
            got = np.frombuffer(answer.status, np.uint8) == 0
            self.granted[missing[got]] = True
            missing = missing[~got]
            answered.append(link)
        if not len(missing) or self.unanswered is not None:
            return
        if not await self._client.is_nowhere(answered, self._keys[missing[0]].tobytes(), deadline_ns):
            self.unanswered = errors.Unavailable("a shard that may hold it has no leader in reach; retry, or recompute")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(min(held.ttl_ms for held in self._held) * _RENEW_SHARE / 1e3)
            for held in self._held:
                asked_ns = time.monotonic_ns()
                try:
                    answer = await held.link.ask(m.Renew(lease=held.lease, ttl_ms=held.ttl_ms), held.until_ns)
                except errors.UcxKvError:
                    continue  # `valid` turns False when its time is over
                if isinstance(answer, m.Done) and answer.ok:
                    held.until_ns = _until_ns(asked_ns, held.ttl_ms)
                else:
                    held.until_ns = 0

    async def release(self) -> None:
        """End the lease now. Idempotent."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
            self._renewal = None
        held, self._held = self._held, []
        for one in held:
            if one.link.is_alive:
                try:
                    one.link.tell(m.Release(lease=one.lease))
                except errors.UcxKvError:
                    continue  # the node is gone and the lease with it

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class View:
    """Read-only bytes of one block in the node's own memory: no copy. Same host only; made by `await kv.view(key)`.

    What holds: the node leaves the block where it is, untouched, until the view's lease is over. That ends here, by
    this machine's clock and counted from before it was asked for, before it ends there; it is renewed meanwhile. The
    node answers for the block while its own lease runs: one that was deposed, or stopped past its lease, still has the
    bytes that were proved when the view was made, but the block may have been removed meanwhile, so the view is no
    longer `valid`. `data` is checked on each access; a memoryview (or an array over it) that the caller has kept is
    not: look at `valid` after reading through it.
    """

    def __init__(self, lease: Lease, data: memoryview, path: MappedPath) -> None:
        self._lease = lease
        self._data = data
        self._path = path

    @property
    def data(self) -> memoryview:
        """The bytes, good while `valid` is True; close the view when done. Raises StaleError when it is not valid."""
        if not self.valid:
            raise errors.StaleError("the view's lease or its node's is over; take another view, or get the block")
        return self._data

    @property
    def valid(self) -> bool:
        """True while the bytes are certain to stay and to be the block's; look at it after reading, then rely on it."""
        return self._lease.valid and self._path.is_served

    async def aclose(self) -> None:
        """Let the block go. Idempotent."""
        self._data.release()
        await self._lease.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
