"""Cancel a call at a chosen one of its awaits, exactly: not after some time, not after some turns of the loop.

Awaits of the tasks that the call starts count too, so that a call which waits for two of its own is cancelled at each
step that they make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, NamedTuple

import ucxkv
from ucxkv.transport.inline import InlineWait

__all__ = ["Ended", "cancel_at", "cancel_at_every_await", "never_inline", "threads_running"]

_AWAITS_MAX = 2_000


class Ended(NamedTuple):
    """How a call ended: what it returned (None when it was cancelled), and how often it had suspended by then."""

    was_cancelled: bool
    value: Any
    awaits: int


class _Steps:
    """Counts suspensions and cancels the call's task at number `at` (and, with `again`, at every later one)."""

    def __init__(self, at: int, again: bool) -> None:
        self._at = at
        self._again = again
        self.count = 0
        self.task: asyncio.Task[Any] | None = None

    def step(self) -> None:
        self.count += 1
        if self.task is not None and (self.count == self._at or (self._again and self.count > self._at)):
            self.task.cancel()


_steps: ContextVar[_Steps | None] = ContextVar("steps", default=None)


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine whose suspensions are counted."""

    def __init__(self, inner: Coroutine[Any, Any, Any], steps: _Steps) -> None:
        self._inner = inner
        self._steps = steps

    def send(self, value: Any) -> Any:
        waited_for = self._inner.send(value)
        self._steps.step()
        return waited_for

    def throw(self, *error: Any) -> Any:
        waited_for = self._inner.throw(*error)
        self._steps.step()
        return waited_for

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a task drives it")

    def __repr__(self) -> str:
        return f"stepped {self._inner!r}"


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


def _factory(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    steps = _steps.get()
    if steps is not None:
        coroutine = _Stepped(coroutine, steps)
    return asyncio.Task(coroutine, loop=loop, **options)


def never_inline(kv: ucxkv.Client) -> None:
    """From now on this client suspends for every answer, however fast: all of its awaits can be cancelled."""
    for link in kv._router.links.values():
        link.connection._inline = InlineWait(link.connection._fd, 0)
        client = getattr(link.path, "_client", None)
        if client is not None:
            client._worker.inline_wait_ns = 0


def threads_running() -> int:
    """Calls that this loop has given to a thread and that have not ended."""
    return sum("to_thread" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def cancel_at(at: int, call: Awaitable[Any], *, again: bool = False) -> Ended:
    """Run a call, cancelled at its `at`-th suspension (1 is the first); again: at each one after it too."""
    steps, loop = _Steps(at, again), asyncio.get_running_loop()
    token = _steps.set(steps)
    before = loop.get_task_factory()
    loop.set_task_factory(_factory)  # type: ignore[arg-type]
    try:
        steps.task = loop.create_task(_awaited(call))
    finally:
        _steps.reset(token)
    try:
        return Ended(False, await steps.task, steps.count)
    except asyncio.CancelledError:
        return Ended(True, None, steps.count)
    finally:
        loop.set_task_factory(before)
        steps.task = None


async def cancel_at_every_await(
    make: Callable[[], Awaitable[Any]], after_each: Callable[[Ended], Awaitable[None]], *, again: bool = False
) -> int:
    """Run fresh calls of `make`, cancelled at await 1, 2, ... until one ends by itself; how many were cancelled.

    after_each: awaited after every call with how it ended.
    """
    for at in range(1, _AWAITS_MAX):
        ended = await cancel_at(at, make(), again=again)
        await after_each(ended)
        if not ended.was_cancelled:
            return at - 1
    raise AssertionError(f"the call suspends more than {_AWAITS_MAX} times")
