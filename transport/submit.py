"""Running the transport's coroutines for threads that have no loop.

`submit` may be called from any thread and returns a Ticket: complete it by `poll()`, by waiting on its `eventfd` with
epoll, or by `result()`. `LoopThread` owns a loop in a thread of its own (uvloop where it is installed).

A ticket's operation goes on when its ticket is dropped; `cancel()` cancels it as a task is cancelled, so that
buffers are
free once the ticket is done.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, TypeVar

from .base import Closed, DeadlineExceeded, ForkGuard, UsageError

__all__ = ["LoopThread", "Ticket", "submit"]

T = TypeVar("T")


class Ticket(Generic[T]):
    """One submitted operation. Thread-safe. Close it (or use `with`) when its eventfd was asked for."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        self._future = future
        self._lock = threading.Lock()
        self._eventfd = -1
        future.add_done_callback(self._signal)

    @property
    def eventfd(self) -> int:
        """A descriptor that is readable once the operation is done; owned by the ticket."""
        with self._lock:
            if self._eventfd < 0:
                is_done = self._future.done()
                self._eventfd = os.eventfd(1 if is_done else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                if not is_done and self._future.done():  # it finished between the two: its signal saw no descriptor
                    os.eventfd_write(self._eventfd, 1)
            return self._eventfd

    def _signal(self, _: object) -> None:
        with self._lock:
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def poll(self) -> bool:
        """True once the operation is done (well, badly or cancelled). Never waits."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result; raises what the operation raised, DeadlineExceeded (it goes on), Closed (cancelled)."""
        try:
            return self._future.result(timeout_s)
        except concurrent.futures.CancelledError as exc:
            raise Closed("the submitted operation was cancelled") from exc
        except TimeoutError as exc:
            if self._future.done():
                raise
            raise DeadlineExceeded(f"not done within {timeout_s} s") from exc

    def cancel(self) -> None:
        """Ask for cancellation; the ticket is done when the operation has let go of its buffers."""
        self._future.cancel()

    def close(self) -> None:
        """Close the eventfd. The operation goes on. Idempotent."""
        with self._lock:
            if self._eventfd >= 0:
                os.close(self._eventfd)
                self._eventfd = -1

    def __enter__(self) -> Ticket[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def submit(loop: asyncio.AbstractEventLoop, operation: Callable[[], Coroutine[Any, Any, T]]) -> Ticket[T]:
    """Run `operation()` in the loop of another thread. Raises Closed when that loop is closed."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        task = loop.create_task(operation())
        tasks.append(task)
        task.add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            concurrent.futures.Future.cancel(done)
            done.set_running_or_notify_cancel()
        elif (exc := task.exception()) is not None:
            done.set_exception(exc)
        else:
            done.set_result(task.result())

    def cancel() -> bool:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        return not done.done()

    done.cancel = cancel  # type: ignore[method-assign]
    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError as exc:
        raise Closed("the loop that runs the transport is closed") from exc
    return Ticket(done)


class LoopThread:
    """A running asyncio loop in its own daemon thread. `stop` ends its tasks and joins it."""

    def __init__(self, name: str = "ucxkv-loop") -> None:
        self._guard = ForkGuard("this loop thread")
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=5))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def submit(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> Ticket[T]:
        """Run `operation()` in this loop; from any other thread."""
        self._guard.check()
        return submit(self.loop, operation)

    def run(self, operation: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """Run `operation()` and wait for its result."""
        if threading.current_thread() is self._thread:
            raise UsageError("waiting for this loop from within it would never end; await the coroutine instead")
        return self.submit(operation).result(timeout_s)

    def stop(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self._guard.is_forked or not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
