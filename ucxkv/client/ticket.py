"""Calls for engines that have no event loop: submit from any thread, complete by `poll()` or by an event descriptor."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Coroutine

__all__ = ["Ticket"]

T = TypeVar("T")


class Ticket(Generic[T]):
    """One call on its way. Buffers given to it are borrowed until it is done.

    eventfd: becomes readable once, when the call is done; for epoll, select or a blocking read. Close the ticket
    (or use
    `with`) when it is no longer needed; an unfinished call is cancelled then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Coroutine[object, object, T]) -> None:
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True
        self._future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(_finish(call, self.eventfd), loop)

    def poll(self) -> bool:
        """Whether the call is done; never waits."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """What the call answered, or the error it raised. Waits at most `timeout_s` (TimeoutError); 0: never."""
        return self._future.result(timeout_s)

    def close(self) -> None:
        """Cancel the call if it is not done, wait until it let go of its buffers, close the descriptor. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._future.done():
            self._future.cancel()
        os.close(self.eventfd)

    def __enter__(self) -> Ticket[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _finish(call: Coroutine[object, object, T], eventfd: int) -> T:
    fd = os.dup(eventfd)  # the ticket may be closed before this ends
    try:
        return await call
    finally:
        os.eventfd_write(fd, 1)
        os.close(fd)
