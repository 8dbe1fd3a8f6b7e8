"""Calls for engines that have no event loop: submit from any thread, complete by `poll()` or by an event descriptor.

Invariants: when `close` returns (called from another thread than the loop's) nothing touches the call's buffers any
more; the descriptor is written once, when the call has ended, and never after it was closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["Ticket"]

T = TypeVar("T")
_LOOP_CHECK_S = 0.1


class Ticket(Generic[T]):
    """One call on its way. Buffers given to it are borrowed until it is done.

    eventfd: becomes readable once, when the call is done; for epoll, select or a blocking read. Close the ticket (or
    use `with`) when it is no longer needed; an unfinished call is cancelled then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Coroutine[object, object, T]) -> None:
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop = loop
        self._lock = threading.Lock()
        self._is_open = True
        self._ended = threading.Event()
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._task: asyncio.Task[T] | None = None
        try:
            loop.call_soon_threadsafe(self._start, call)
        except RuntimeError:  # the loop is closed
            call.close()
            os.close(self.eventfd)
            raise

    def _start(self, call: Coroutine[object, object, T]) -> None:
        self._task = self._loop.create_task(call)
        self._task.add_done_callback(self._done)
        if not self._is_open:
            self._task.cancel()

    def _done(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._future.cancel()
            self._future.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())
        with self._lock:
            self._ended.set()
            if self._is_open:
                os.eventfd_write(self.eventfd, 1)

    def poll(self) -> bool:
        """Whether the call is done; never waits."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """What the call answered, or the error it raised. Waits at most `timeout_s` (TimeoutError); 0: never."""
        return self._future.result(timeout_s)

    def close(self) -> None:
        """Cancel the call if it is not done, wait until it let go of its buffers, close the descriptor. Idempotent.

        In the loop's own thread it cannot wait: the call is cancelled, and lets go in one of the loop's next turns.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            os.close(self.eventfd)
        if self._ended.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            return  # the loop is closed, and all its calls have ended
        if not self._is_in_loop():
            while not self._ended.wait(_LOOP_CHECK_S) and self._loop.is_running():
                continue

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _is_in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def __enter__(self) -> Ticket[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
