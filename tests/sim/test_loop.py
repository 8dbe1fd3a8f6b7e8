"""Virtual time, seeded order, owners, and the refusal of all that would not replay."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.loop import SECOND, Deadlock, OutsideWorld, Owner, Runaway, SimLoop, SimulationError


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop(1)
    yield made
    made.close()


def test_an_hour_passes_without_waiting(loop: SimLoop) -> None:
    """Goal: time is virtual. Method: an hour's sleep and a timeout inside it; the loop's and `time`'s clocks agree."""

    async def hour() -> tuple[float, float]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1800):
                await asyncio.sleep(3600)
        await asyncio.sleep(1800)
        return asyncio.get_running_loop().time(), time.monotonic()

    assert loop.run_until_complete(hour()) == (3600.0, 3600.0)
    assert loop.now_ns == 3600 * SECOND


def _trace(seed: int) -> list[str]:
    loop = SimLoop(seed)
    seen: list[str] = []

    async def worker(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(name)

    async def all_of_them() -> None:
        await asyncio.gather(*(worker(name) for name in "abcdef"))

    loop.run_until_complete(all_of_them())
    loop.close()
    return seen


def test_the_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    """Goal: replay. Method: six tasks whose timers tie, run twice from each of ten seeds."""
    traces = [_trace(seed) for seed in range(10)]
    assert traces == [_trace(seed) for seed in range(10)]
    assert len({tuple(trace) for trace in traces}) > 5
    assert all(sorted(trace) == sorted("abcdef" * 3) for trace in traces)


def test_callbacks_without_a_timer_keep_asyncios_order(loop: SimLoop) -> None:
    """Goal: code that relies on call_soon's order may. Method: ten callbacks."""
    seen: list[int] = []

    async def ten() -> None:
        for number in range(10):
            asyncio.get_running_loop().call_soon(seen.append, number)
        await asyncio.sleep(0)

    loop.run_until_complete(ten())
    assert seen == list(range(10))


def test_nothing_left_to_run_is_a_deadlock_that_names_who_waits(loop: SimLoop) -> None:
    """Goal: no hang. Method: two tasks that wait for each other's event."""

    async def stuck() -> None:
        one, two = asyncio.Event(), asyncio.Event()

        async def wait(mine: asyncio.Event, other: asyncio.Event) -> None:
            await other.wait()
            mine.set()

        tasks = [asyncio.create_task(wait(one, two), name="left"), asyncio.create_task(wait(two, one), name="right")]
        await asyncio.wait(tasks)

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(stuck())
    assert [name.split()[0] for name in caught.value.waiting][-2:] == ["left", "right"]


def test_a_loop_without_an_end_is_a_runaway() -> None:
    """Goal: no livelock. Method: a task that yields for ever."""
    loop = SimLoop(steps_limit=1000)

    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Runaway):
        loop.run_until_complete(spin())
    loop.close()


def test_an_exception_that_nobody_takes_ends_the_run(loop: SimLoop) -> None:
    """Goal: no error is lost. Method: a callback that raises; a task that fails and is forgotten."""

    def bad() -> None:
        raise ValueError("in a callback")

    loop.at(5, bad)
    with pytest.raises(ValueError, match="in a callback"):
        loop.run_for_ns(10)

    async def fails() -> None:
        raise ValueError("in a task")

    async def forget() -> None:
        task = asyncio.create_task(fails())
        del task
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="in a task"):
        loop.run_until_complete(forget())


@pytest.mark.parametrize("what", ["socket", "thread", "executor", "sleep", "connection", "reader", "to_thread"])
def test_the_outside_world_is_refused(loop: SimLoop, what: str) -> None:
    """Goal: nothing that would not replay. Method: each way out is tried in the loop, and works again after it."""

    async def leave() -> None:
        running: Any = asyncio.get_running_loop()
        if what == "socket":
            socket.socket()
        elif what == "thread":
            threading.Thread(target=print).start()
        elif what == "executor":
            await running.run_in_executor(None, print)
        elif what == "to_thread":
            await asyncio.to_thread(print)
        elif what == "sleep":
            time.sleep(0.001)  # noqa: ASYNC251
        elif what == "connection":
            await asyncio.open_connection("127.0.0.1", 9)
        else:
            running.add_reader(0, print)

    with pytest.raises(OutsideWorld):
        loop.run_until_complete(leave())
    socket.socket().close()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert time.monotonic() > 0
    time.sleep(0)


def test_a_frozen_owners_callbacks_wait_and_a_dead_ones_never_run(loop: SimLoop) -> None:
    """Goal: freeze and kill. Method: timers of two owners; one sleeps past its timers, the other dies before its."""
    seen: list[tuple[str, int]] = []
    sleeper, victim = Owner("sleeper"), Owner("victim")
    for at in (10, 20, 30):
        loop.at(at, lambda at=at: seen.append((f"sleeper {at}", loop.now_ns)), owner=sleeper)
        loop.at(at, lambda at=at: seen.append((f"victim {at}", loop.now_ns)), owner=victim)
    loop.run_until_ns(15)
    seen.clear()
    sleeper.hold(frozen=True)
    victim.hold(dead=True)
    loop.bury(victim)
    loop.run_until_ns(100)
    assert seen == []
    sleeper.hold()
    loop.unpark(sleeper)
    loop.run_until_ns(101)
    assert seen == [("sleeper 20", 100), ("sleeper 30", 100)]


def test_what_a_task_starts_belongs_to_its_owner(loop: SimLoop) -> None:
    """Goal: nothing escapes its process. Method: a task starts another, which sets a timer; the owner dies before."""
    seen: list[str] = []
    owner = Owner("p")

    async def inner() -> None:
        asyncio.get_running_loop().call_later(1, seen.append, "timer")
        seen.append("inner")
        await asyncio.sleep(1)
        seen.append("late")

    async def outer() -> None:
        task = asyncio.create_task(inner())
        await task

    owner.context.copy().run(lambda: loop.create_task(outer()))
    loop.run_for_ns(SECOND // 2)
    assert seen == ["inner"]
    owner.hold(dead=True)
    loop.bury(owner)
    loop.run_for_ns(5 * SECOND)
    assert seen == ["inner"]
    assert loop.waiting() == []


def test_a_loop_ends_by_its_future_only(loop: SimLoop) -> None:
    """Goal: misuse is told. Method: stop, run_forever, a second loop inside, and a closed loop."""
    with pytest.raises(SimulationError):
        loop.run_forever()
    with pytest.raises(SimulationError):
        loop.stop()

    async def nested() -> None:
        SimLoop().run_for_ns(1)

    with pytest.raises(SimulationError, match="runs already"):
        loop.run_until_complete(nested())
    loop.close()
    with pytest.raises(SimulationError, match="closed"):
        loop.run_for_ns(1)
