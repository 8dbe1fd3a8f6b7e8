"""Leases and views: blocks that stay where they are while somebody works with them.

A lease is counted by this client from before it asked, by the node from after it answered, so that it never seems alive
here when it is over there. It is renewed in the background until it is released.
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

__all__ = ["Lease", "View"]

_RENEW_SHARE = 1 / 3


class _Held:
    """One lease at one node."""

    __slots__ = ("lease", "link", "until_ns")

    def __init__(self, link: NodeLink, lease: int, until_ns: int) -> None:
        self.link = link
        self.lease = lease
        self.until_ns = until_ns


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
        for link in self._client.links_for(self._keys):
            if not len(missing):
                break
            asked_ns = time.monotonic_ns()
            try:
                answer = await link.ask(m.LeaseKeys(keys=self._keys[missing].tobytes(), ttl_ms=ttl_ms), deadline_ns)
            except errors.Unavailable:
                continue  # its blocks are not granted
            if not isinstance(answer, m.Leased) or len(answer.status) != len(missing):
                raise errors.Unavailable("the node's answer to a lease does not fit it", node=link.name)
            if answer.lease:
                self._held.append(_Held(link, answer.lease, asked_ns + answer.ttl_ms * 1_000_000))
            got = np.frombuffer(answer.status, np.uint8) == 0
            self.granted[missing[got]] = True
            missing = missing[~got]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_ns * _RENEW_SHARE / 1e9)
            for held in self._held:
                asked_ns = time.monotonic_ns()
                try:
                    answer = await held.link.ask(
                        m.Renew(lease=held.lease, ttl_ms=self._ttl_ns // 1_000_000), held.until_ns
                    )
                except errors.UcxKvError:
                    continue  # `valid` turns False when its time is over
                if isinstance(answer, m.Done) and answer.ok:
                    held.until_ns = asked_ns + self._ttl_ns
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

    data: memoryview, good while `valid` is True; release it (`with view:` or `await view.aclose()`) when done.
    """

    def __init__(self, lease: Lease, data: memoryview) -> None:
        self._lease = lease
        self.data = data

    @property
    def valid(self) -> bool:
        """True while the bytes are certain to stay; check it after use, or before relying on what was read."""
        return self._lease.valid

    async def aclose(self) -> None:
        """Let the block go. Idempotent."""
        self.data.release()
        await self._lease.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
