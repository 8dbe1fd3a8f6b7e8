"""Waiting until UCX has let go of memory that a call was using, whatever is cancelled meanwhile.

UCX cannot cancel gets or receives: what is in flight is waited for. If it does not end within a second, its endpoints
are closed by force, then the worker is destroyed, which ends everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from .base import PeerLost
from .progress import Worker

__all__ = ["settled"]

_SETTLE_NS = 1_000_000_000


Close: TypeAlias = Callable[[int | None], Awaitable[object]]


async def settled(worker: Worker, is_pending: Callable[[], bool], close: Close) -> None:
    """Return once `is_pending()` is False. close: closes the endpoints by force until a deadline in ns."""
    if not worker.is_open or not is_pending():
        return
    task = asyncio.ensure_future(_end(worker, is_pending, close))
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue  # bounded by _end; the caller's own exception is on its way already
    task.result()


async def _end(
    worker: Worker, is_pending: Callable[[], bool], close: Callable[[int | None], Awaitable[object]]
) -> None:
    until = time.monotonic_ns() + _SETTLE_NS
    while worker.is_open and is_pending():
        if time.monotonic_ns() > until:
            break
        worker.progress()
        await asyncio.sleep(0)
    else:
        return
    await close(time.monotonic_ns() + _SETTLE_NS)
    if worker.is_open:
        worker.progress()
    if worker.is_open and is_pending():
        worker.abort(PeerLost("a transfer could not be ended; the worker was destroyed to protect its memory"))
