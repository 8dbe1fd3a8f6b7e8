"""Clocks, hosts and their processes: life, death, sleep and rebirth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.clock import Clock
from tests.sim.loop import SECOND, SimLoop, SimulationError
from tests.sim.process import Host, Process


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop(3)
    yield made
    made.close()


@settings(deadline=None)
@given(
    st.integers(-(10**15), 10**15), st.integers(-20_000, 20_000), st.integers(0, 10**13), st.integers(0, 10**13)
)  # fmt: skip
def test_a_clock_is_monotonic_and_its_inverse_is_the_first_moment(offset: int, ppm: int, a: int, b: int) -> None:
    """Goal: timers fire on the nanosecond, never early by their own clock. Method: any offset, rate and moments."""
    clock = Clock(offset, ppm)
    early, late = sorted((a, b))
    assert clock.local_ns(early) <= clock.local_ns(late)
    reading = clock.local_ns(a)
    first = clock.virtual_ns(reading)
    assert first <= a
    assert clock.local_ns(first) >= reading
    assert clock.local_ns(first - 1) < reading


def test_a_second_of_a_fast_clock_is_shorter(loop: SimLoop) -> None:
    """Goal: rates apply to asyncio's timers too. Method: the same sleep on clocks of +1 %, 0 and -1 %."""
    woke: dict[str, int] = {}

    def boot(process: Process) -> None:
        async def nap() -> None:
            before_ns = process.now_ns()
            await asyncio.sleep(1)
            assert process.now_ns() - before_ns >= SECOND
            woke[process.host_name] = loop.now_ns

        process.spawn(nap())

    for name, ppm in (("fast", 10_000), ("right", 0), ("slow", -10_000)):
        Host(loop, name, boot, clock=Clock(7 * SECOND, ppm)).start()
    loop.run_for_ns(2 * SECOND)
    assert woke["fast"] == pytest.approx(SECOND / 1.01, abs=2)
    assert woke["right"] == SECOND
    assert woke["slow"] == pytest.approx(SECOND / 0.99, abs=2)


def test_a_killed_process_runs_no_cleanup_and_a_restart_is_another_incarnation(loop: SimLoop) -> None:
    """Goal: kill -9. Method: a task with `finally` that would write outside is killed in its sleep; the next process
    has a larger incarnation, and the first one's `finally` does not run before the loop is closed."""
    outside: list[str] = []

    def boot(process: Process) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(1)
                outside.append(f"done {process.incarnation}")
            finally:
                outside.append(f"cleanup {process.incarnation}")

        process.spawn(work())

    host = Host(loop, "a", boot)
    host.start()
    loop.run_for_ns(SECOND // 2)
    host.kill()
    assert not host.is_up
    host.start()
    loop.run_for_ns(2 * SECOND)
    assert outside == ["done 2", "cleanup 2"]
    assert host.incarnation == 2
    with pytest.raises(SimulationError, match="up already"):
        host.start()


def test_a_frozen_process_fires_its_timers_late_and_its_clock_runs_on(loop: SimLoop) -> None:
    """Goal: SIGSTOP. Method: a ticking task sleeps through five ticks; on waking it sees the whole time gone."""
    ticks: list[int] = []

    def boot(process: Process) -> None:
        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(process.now_ns())

        process.spawn(tick())

    host = Host(loop, "a", boot)
    host.start()
    loop.run_for_ns(2 * SECOND + SECOND // 2)
    host.freeze()
    loop.run_for_ns(5 * SECOND)
    assert ticks == [SECOND, 2 * SECOND]
    host.wake()
    loop.run_for_ns(SECOND + SECOND // 2)
    assert ticks[2:] == [7 * SECOND + SECOND // 2, 8 * SECOND + SECOND // 2]


def test_a_process_cannot_outlive_its_kill_by_doing_it_itself(loop: SimLoop) -> None:
    """Goal: a kill is at a border of callbacks. Method: a process that kills itself inside one; a dead one spawns."""
    host = Host(loop, "a", lambda process: None)
    process = host.start()
    process.at(5, process.kill)
    with pytest.raises(SimulationError, match="kill itself"):
        loop.run_for_ns(10)
    host.kill()
    with pytest.raises(SimulationError, match="dead"):
        process.spawn(asyncio.sleep(0))


def test_the_disk_of_a_restart_is_kept_torn_or_empty(loop: SimLoop) -> None:
    """Goal: three fates of a disk. Method: one synced and one unsynced write, then each fate over thirty seeds."""
    fates: dict[str, set[bytes]] = {"kept": set(), "torn": set(), "empty": set()}
    for seed in range(30):
        for fate, seen in fates.items():
            host = Host(loop, "a", lambda process: None, seed=seed)
            host.start()
            file = host.disk.open("log")
            file.write(0, b"safe")
            file.sync()
            file.write(4, b"risk")
            host.kill()
            host.start(fate)  # type: ignore[arg-type]
            seen.add(host.disk.open("log").read())
    assert fates["kept"] == {b"saferisk"}
    assert fates["empty"] == {b""}
    assert {b"safe", b"saferisk"} < fates["torn"]
    assert all(b"saferisk".startswith(seen) and len(seen) >= 4 for seen in fates["torn"])
