"""Cancel a call at a chosen one of its awaits, exactly: not after some time, not after some turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
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


class _Stepped:
    """Passes a call's suspensions on and cancels its task at number `at` (and, with `again`, at every later one)."""

    def __init__(self, call: Awaitable[Any], at: int, again: bool) -> None:
        self._call = call
        self._at = at
        self._again = again
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._call.__await__()
        task = asyncio.current_task()
        assert task is not None
        thrown: BaseException | None = None
        while True:
            try:
                waited_for = inner.send(None) if thrown is None else inner.throw(thrown)
            except StopIteration as end:
                return end.value
            self.awaits += 1
            if self.awaits == self._at or (self._again and self.awaits > self._at):
                task.cancel()
            try:
                yield waited_for
                thrown = None
            except BaseException as exc:
                thrown = exc


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
    stepped = _Stepped(call, at, again)

    async def run() -> Any:
        return await stepped

    task = asyncio.create_task(run())
    try:
        return Ended(False, await task, stepped.awaits)
    except asyncio.CancelledError:
        return Ended(True, None, stepped.awaits)


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
