"""Deadlines of many futures with one timer: it fires for the soonest, then looks for the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from .base import DeadlineExceeded

__all__ = ["DeadlineSweep"]


class DeadlineSweep:
    """pending: id -> (future, deadline in ns or None); whoever owns it adds and removes. text: of the error raised."""

    def __init__(self, pending: Mapping[int, tuple[asyncio.Future[Any], int | None]], text: Callable[[], str]) -> None:
        self._pending = pending
        self._text = text
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at_ns = 0

    def arm(self, deadline_ns: int) -> None:
        """A future with this deadline was added."""
        if self._timer is not None:
            if self._at_ns <= deadline_ns:
                return
            self._timer.cancel()
        self._at_ns = deadline_ns
        delay = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        self._timer = self._loop.call_later(delay, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = time.monotonic_ns()
        soonest: int | None = None
        for future, deadline_ns in self._pending.values():
            if deadline_ns is None or future.done():
                continue
            if deadline_ns <= now:
                future.set_exception(DeadlineExceeded(self._text()))
            elif soonest is None or deadline_ns < soonest:
                soonest = deadline_ns
        if soonest is not None:
            self.arm(soonest)

    def stop(self) -> None:
        """No future ends by its deadline any more, and nothing of the owner is referenced. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pending, self._text = {}, str
