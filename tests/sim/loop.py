"""An asyncio event loop in virtual time: one thread, no waiting, the same run from the same seed.

Promises. Time stands still while anything is ready and then jumps to the next timer; nothing ever sleeps. `call_soon`
keeps asyncio's order; timers due at the same nanosecond run in an order drawn from the seed. Every callback belongs to
the owner (a simulated process) whose code scheduled it, through a context variable, so that an owner can be frozen (its
callbacks are kept until it wakes) or killed (they are dropped, and none of its code runs again). `time()` and `call_at`
are in the owner's own clock. When nothing is left to run and the awaited future is not done, `Deadlock` names the tasks
that wait. An exception that nobody takes ends the run.

Sockets, threads, executors, signals and sleeping are refused while the loop runs: a simulation that touched them would
not replay; `time.monotonic` and its kin answer the owner's clock, `secrets.token_hex` counts. Standard library only
(Python 3.11)."""

from __future__ import annotations

import asyncio
import heapq
import random
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

SECOND = 1_000_000_000


class SimulationError(RuntimeError):
    """The simulated program did something that no simulation can replay, or did not end."""


class Deadlock(SimulationError):
    """Nothing is left to run, and somebody waits. waiting: the names of the unfinished tasks."""

    def __init__(self, waiting: list[str]) -> None:
        super().__init__(f"nothing is left to run; waiting: {', '.join(waiting) or 'a future without a task'}")
        self.waiting = waiting


class Runaway(SimulationError):
    """The run passed its bound of callbacks: a loop without an end."""


class OutsideWorld(SimulationError):
    """Code under simulation asked for a socket, a thread, a signal, or to sleep."""


class Owner:
    """Who a callback belongs to: running, frozen or dead, with a clock of its own (here: virtual time itself)."""

    is_held = False
    """Frozen or dead: its callbacks do not run now."""
    frozen = False
    dead = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.parked: list[Timer] = []
        self.context = copy_context()
        self.context.run(OWNER.set, self)

    def hold(self, *, frozen: bool = False, dead: bool = False) -> None:
        """Freeze, wake or kill it, for the loop."""
        self.frozen, self.dead = frozen, dead
        self.is_held = frozen or dead

    def local_ns(self, virtual_ns: int) -> int:
        """Its own clock's reading at a moment of virtual time."""
        return virtual_ns

    def virtual_ns(self, local_ns: int) -> int:
        """The first moment of virtual time at which its own clock shows `local_ns`."""
        return local_ns


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)


class Timer(asyncio.TimerHandle):
    """A scheduled callback. One class for both kinds: `due_ns` is virtual time."""

    __slots__ = ("due_ns", "owner")

    def __init__(
        self, loop: SimLoop, due_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context,
        owner: Owner | None,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._source_traceback = None
        self._repr = None
        self._scheduled = True
        self.due_ns = due_ns
        self.owner = owner

    def cancel(self) -> None:
        """It will not run."""
        self._cancelled = True

    def when(self) -> float:
        """Its owner's time at which it is due, in seconds."""
        owner = self.owner
        return (owner.local_ns(self.due_ns) if owner is not None else self.due_ns) / SECOND

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __lt__(self, other: object) -> bool:
        return NotImplemented

    def __repr__(self) -> str:
        return f"<Timer {self._callback} at {self.due_ns} ns of {self.owner.name if self.owner else 'nobody'}>"


_Base: Any = asyncio.AbstractEventLoop  # its thirty calls of the outside world are refused below, in one go


class SimLoop(_Base):  # type: ignore[misc]
    """See the module. seed: of the order of simultaneous timers. steps_limit: the bound of callbacks of one run."""

    def __init__(self, seed: int = 0, *, steps_limit: int = 2_000_000) -> None:
        self.now_ns = 0
        self.steps = 0
        self._order = random.Random(f"loop {seed}").random
        self._steps_limit = steps_limit
        self._ready: deque[Timer] = deque()
        self._timers: list[tuple[int, float, int, Timer]] = []
        self._count = self._tokens = 0
        self._running = False
        self._closed = False
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], Owner | None] = weakref.WeakKeyDictionary()
        self._graves: list[asyncio.Task[Any]] = []
        self._unhandled: list[BaseException] = []
        self._plain = copy_context()

    # ---- running

    def run_until_complete(self, future: Any) -> Any:
        """Run until `future` (or coroutine) is done; its result. Deadlock when that can never be."""
        self._open()
        awaited = asyncio.ensure_future(future, loop=self)
        with self._sealed():
            self._run(awaited.done, _never)
        if not awaited.done():
            raise Deadlock(self.waiting())
        self._raise_unhandled()
        return awaited.result()

    def run_for_ns(self, span_ns: int) -> None:
        """Run all that is due within `span_ns` of virtual time, and let that time pass."""
        self.run_until_ns(self.now_ns + span_ns)

    def run_until_ns(self, end_ns: int) -> None:
        """Run all that is due up to `end_ns` of virtual time; the time is then `end_ns`."""
        self._open()
        with self._sealed():
            self._run(_no, end_ns)
        self.now_ns = max(self.now_ns, end_ns)
        self._raise_unhandled()

    def _run(self, done: Callable[[], bool], end_ns: int) -> None:
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        steps_left = self._steps_limit - self.steps
        first = steps_left
        try:
            while not done():
                if not ready:
                    while timers and timers[0][3]._cancelled:
                        pop(timers)
                    if not timers or timers[0][0] > end_ns:
                        return
                    due_ns = timers[0][0]
                    if due_ns > self.now_ns:
                        self.now_ns = due_ns
                    while timers and timers[0][0] <= due_ns:
                        ready.append(pop(timers)[3])
                timer = ready.popleft()
                if timer._cancelled:
                    continue
                owner = timer.owner
                if owner is not None and owner.is_held:
                    if not owner.dead:
                        owner.parked.append(timer)
                    continue
                steps_left -= 1
                if steps_left < 0:
                    raise Runaway(f"{self._steps_limit} callbacks and no end at {self.now_ns} ns; {timer!r} is next")
                timer._context.run(timer._callback, *timer._args)
                if self._unhandled:
                    raise self._unhandled.pop(0)
        finally:
            self.steps += first - steps_left

    @contextmanager
    def _sealed(self) -> Iterator[None]:
        """The loop is the running one, and the outside world is out of reach of this thread."""
        if self._running or asyncio._get_running_loop() is not None:
            raise SimulationError("a loop runs already in this thread")
        self._running = True
        asyncio._set_running_loop(self)
        try:
            with outside_refused(self):
                yield
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def _raise_unhandled(self) -> None:
        if self._unhandled:
            raise self._unhandled.pop(0)

    def waiting(self) -> list[str]:
        """The unfinished tasks of living owners and where each stands, by name."""
        found = []
        for task, owner in self._tasks.items():
            if task.done() or (owner is not None and owner.dead):
                continue
            frames = task.get_stack(limit=1)
            where = f" at {frames[0].f_code.co_name}:{frames[0].f_lineno}" if frames else ""
            found.append(task.get_name() + where)
        return sorted(found)

    # ---- scheduling

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """As asyncio's; the callback belongs to the owner of its context."""
        if context is None:
            context = copy_context()
        timer = Timer(self, self.now_ns, callback, args, context, context.get(OWNER))
        self._ready.append(timer)
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`: there are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, in the owner's clock."""
        if context is None:
            context = copy_context()
        owner = context.get(OWNER)
        span_ns = round(delay * SECOND)
        if owner is None:
            return self.at(self.now_ns + span_ns, callback, args, context, None)
        return self.at(owner.virtual_ns(owner.local_ns(self.now_ns) + span_ns), callback, args, context, owner)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, in the owner's clock."""
        if context is None:
            context = copy_context()
        owner = context.get(OWNER)
        local_ns = round(when * SECOND)
        return self.at(local_ns if owner is None else owner.virtual_ns(local_ns), callback, args, context, owner)

    def at(
        self, due_ns: int, callback: Callable[..., object], args: tuple[Any, ...] = (), context: Context | None = None,
        owner: Owner | None = None,
    ) -> Timer:  # fmt: skip
        """Run `callback` at a moment of virtual time, on behalf of `owner`."""
        if context is None:
            context = owner.context if owner is not None else self._plain
        if due_ns < self.now_ns:
            due_ns = self.now_ns
        timer = Timer(self, due_ns, callback, args, context, owner)
        self._count += 1
        heapq.heappush(self._timers, (due_ns, self._order(), self._count, timer))
        return timer

    def soon(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, owner: Owner) -> None:
        """Run `callback` on behalf of `owner`, after what is ready already."""
        self._ready.append(Timer(self, self.now_ns, callback, args, context, owner))

    def unpark(self, owner: Owner) -> None:
        """Let a woken owner's kept callbacks run now, in the order in which they came due."""
        self._ready.extend(owner.parked)
        owner.parked.clear()

    def bury(self, owner: Owner) -> None:
        """Forget a dead owner's callbacks, and keep its tasks from ever running again, `finally` included.

        A coroutine that Python's collector takes would run its `finally`; the loop holds the dead until it closes.
        """
        owner.parked.clear()
        for task, its_owner in self._tasks.items():
            if its_owner is owner and not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                self._graves.append(task)

    def time(self) -> float:
        """The current owner's clock, in seconds."""
        return self.time_ns() / SECOND

    def time_ns(self) -> int:
        """The current owner's clock, in nanoseconds."""
        owner = OWNER.get()
        return self.now_ns if owner is None else owner.local_ns(self.now_ns)

    def token_hex(self, nbytes: int = 8) -> str:
        """In the place of `secrets.token_hex`: another one at each call, the same in each run."""
        self._tokens += 1
        return f"{self._tokens:0{2 * nbytes}x}"

    # ---- futures, tasks

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:  # fmt: skip
        """A task of this loop and of the current owner."""
        self._open()
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self._tasks[task] = OWNER.get() if context is None else context.get(OWNER)
        return task

    # ---- state and errors

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody took ends the run when control returns to its caller."""
        error = context.get("exception")
        if error is None:
            error = SimulationError(str(context.get("message")))
        self._unhandled.append(error)

    def get_debug(self) -> bool:
        """Never: it would read the real clock."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Has no effect."""

    def is_running(self) -> bool:
        """Whether it runs now."""
        return self._running

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _open(self) -> None:
        if self._closed:
            raise SimulationError("the loop is closed")

    def close(self) -> None:
        """Drop all that is scheduled, then let the coroutines of the dead and the unfinished go: the run is over."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        for task in list(self._tasks):
            if task.done():
                continue
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coro = task.get_coro()
            try:
                coro.close()
            except BaseException as error:  # a dead process's cleanup has nobody to tell
                del error
        self._graves.clear()

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators live and die with their tasks."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is none."""

    def stop(self) -> NoReturn:
        """Refused: a run ends by its future or by its time."""
        raise SimulationError("a simulated loop ends by its future or by its time")

    def run_forever(self) -> NoReturn:
        """Refused, as `stop`."""
        raise SimulationError("a simulated loop ends by its future or by its time")


_never = 1 << 200


def _no() -> bool:
    return False


def _refuser(what: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_named: Any) -> NoReturn:
        raise OutsideWorld(f"{what} has no place in a simulation: it would not replay")

    return refuse


for _name in (
    "add_reader", "add_writer", "remove_reader", "remove_writer", "add_signal_handler", "remove_signal_handler",
    "run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo", "create_connection", "create_server",
    "create_unix_connection", "create_unix_server", "create_datagram_endpoint", "connect_accepted_socket",
    "connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell", "sendfile", "start_tls",
    "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto",
    "sock_sendfile", "sock_accept", "sock_connect",
):  # fmt: skip
    setattr(SimLoop, _name, _refuser(f"loop.{_name}"))

_FORBIDDEN: tuple[tuple[Any, str], ...] = ((threading.Thread, "start"), (socket.socket, "__init__"), (time, "sleep"))
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")


def _guarded(real: Callable[..., Any], instead: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """`instead` in the simulation's thread, the real thing in every other one."""

    def call(*args: Any, **named: Any) -> Any:
        return (instead if threading.get_ident() == thread else real)(*args, **named)

    return call


@contextmanager
def outside_refused(loop: SimLoop) -> Iterator[None]:
    """In this thread, until the block ends: no new thread, no socket, no sleep, and clocks in virtual time."""
    thread = threading.get_ident()
    patches: list[tuple[Any, str, Callable[..., Any]]] = []
    for holder, name in _FORBIDDEN:
        patches.append((holder, name, _refuser(f"{holder.__name__}.{name}")))
    patches.append((secrets, "token_hex", loop.token_hex))
    for name in _CLOCKS:
        patches.append((time, name, loop.time_ns if name.endswith("_ns") else loop.time))
    kept = [(holder, name, getattr(holder, name)) for holder, name, _ in patches]
    try:
        for (holder, name, real), (_, _, instead) in zip(kept, patches, strict=True):
            setattr(holder, name, _guarded(real, instead, thread))
        yield
    finally:
        for holder, name, real in kept:
            setattr(holder, name, real)
