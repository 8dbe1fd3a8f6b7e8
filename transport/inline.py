"""Waiting inline: polling a descriptor for an answer that comes in microseconds, instead of a turn of the event loop.

It pays only while answers are fast: after a miss the next 1, 2, 4 .. 64 chances are skipped, a hit makes them all count
again. Bounded by `wait_us` each.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

__all__ = ["InlineWait"]

_SKIP_DOUBLINGS = 6


class InlineWait:
    """Polls one descriptor. wait_us: the longest wait; 0 = never."""

    __slots__ = ("_misses", "_poll", "_skip", "_wait_ns")

    def __init__(self, fd: int, wait_us: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        self._poll = poller.poll
        self._wait_ns = wait_us * 1000
        self._skip = 0
        self._misses = 0

    def run(self, is_done: Callable[[], bool], on_readable: Callable[[], None], deadline_ns: int | None) -> None:
        """Call `on_readable` whenever there is something to read, until `is_done()` or the time is over."""
        if not self._wait_ns:
            return
        if self._skip:
            self._skip -= 1
            return
        clock, poll = time.monotonic_ns, self._poll
        until = clock() + self._wait_ns
        if deadline_ns is not None and deadline_ns < until:
            until = deadline_ns
        while True:
            if poll(0):
                on_readable()
                if is_done():
                    self._misses = 0
                    return
            if clock() >= until:
                self._skip = 1 << min(self._misses, _SKIP_DOUBLINGS)
                self._misses += 1
                return
