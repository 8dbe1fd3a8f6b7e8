"""Simulated hosts and the processes that run on them, one after the other.

A host has a name, a clock, a disk, and a function that starts its program in a fresh process. A process is an owner of
the loop's callbacks and tasks, with an incarnation that grows at each start. `kill` is kill -9: from that moment none
of the process's code runs again, no `finally` either. `freeze` is SIGSTOP: timers and messages queue up, and run late
on `wake`. What becomes of the disk is said at the restart: `kept` (the machine stayed up), `torn` (it lost power: what
was not synced is lost, kept or torn), `damaged` (a bit of it is another), `empty` (another disk)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from tests.sim.clock import Clock
from tests.sim.disk import Disk
from tests.sim.loop import OWNER, Owner, SimLoop, SimulationError, Timer

__all__ = ["DiskFate", "Host", "Process"]

DiskFate = Literal["kept", "torn", "damaged", "empty"]


class Process(Owner):
    """One life of a program on a host. `now_ns()` is its clock."""

    def __init__(self, loop: SimLoop, name: str, incarnation: int, clock: Clock) -> None:
        super().__init__(f"{name}#{incarnation}")
        self.loop = loop
        self.host_name = name
        self.incarnation = incarnation
        self.clock = clock
        self.local_ns = clock.local_ns  # type: ignore[method-assign]
        self.virtual_ns = clock.virtual_ns  # type: ignore[method-assign]

    def now_ns(self) -> int:
        """Its own clock."""
        return self.clock.local_ns(self.loop.now_ns)

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str = "task") -> asyncio.Task[Any]:
        """A task of this process."""
        if self.dead:
            coro.close()
            raise SimulationError(f"{self.name} is dead and starts nothing")
        task = self.context.copy().run(lambda: self.loop.create_task(coro, name=f"{self.name} {name}"))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A task that failed ends the run now, not when it is collected."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.call_exception_handler({"exception": error})

    def at(self, local_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        """Run `callback` in this process when its own clock reads `local_ns`."""
        return self.loop.at(self.clock.virtual_ns(local_ns), callback, args, self.context, self)

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs until `wake`."""
        if not self.dead:
            self.hold(frozen=True)

    def wake(self) -> None:
        """SIGCONT: what came due meanwhile runs now."""
        if self.frozen and not self.dead:
            self.hold()
            self.loop.unpark(self)

    def kill(self) -> None:
        """kill -9: none of its code runs again."""
        if self.dead:
            return
        if OWNER.get() is self:
            raise SimulationError(f"{self.name} cannot kill itself in the middle of its own code")
        self.hold(dead=True)
        self.loop.bury(self)


class Host:
    """A machine: `boot(process)` starts its program. random: of torn disks alone."""

    def __init__(
        self, loop: SimLoop, name: str, boot: Callable[[Process], None], *, clock: Clock | None = None,
        disk: Disk | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.name = name
        self.clock = clock or Clock()
        self.disk = disk or Disk()
        self.incarnation = 0
        self.lives = 0
        """Memberships in the cluster so far: counted by the program, as a control plane would."""
        self.last_fate: DiskFate = "kept"
        self._boot = boot
        self._random = random.Random(f"disk of {name} {seed}")
        self.process = Process(loop, name, 0, self.clock)
        self.process.hold(dead=True)

    @property
    def is_up(self) -> bool:
        """Whether a process lives on it, frozen or not."""
        return not self.process.dead

    def start(self, fate: DiskFate = "kept") -> Process:
        """Boot a new process; the disk met `fate` since the last one."""
        if self.is_up:
            raise SimulationError(f"{self.name} is up already")
        self.last_fate = fate
        if fate == "torn":
            self.disk.lose_power(self._random)
        elif fate == "empty":
            self.disk.wipe()
        elif fate == "damaged":
            self.disk.damage(self._random)
        self.incarnation += 1
        self.process = Process(self.loop, self.name, self.incarnation, self.clock)
        self.process.context.copy().run(self._boot, self.process)
        return self.process

    def kill(self) -> None:
        """kill -9 of the process; the disk stays as it is until the next start."""
        self.process.kill()
        self.disk.crash()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.freeze()

    def wake(self) -> None:
        """SIGCONT."""
        self.process.wake()
