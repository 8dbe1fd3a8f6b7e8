"""How an operation is measured: warm-ups that say how long it takes, then rounds within a budget of time.

What is drawn before and what is verified after a round stays outside of the clock and of the CPU count.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod

from .base import Result, ServerCpu, Task

__all__ = ["ROUNDS", "Operation", "draw", "measure"]

ROUNDS = 5
_WARM_UPS = (1, 4)
_CALLS_MAX = 400  # a round
_KEPT_BYTES = 256 << 20  # what a round may hold on to until it is verified


class Operation(ABC):
    """Something to measure: `operate` makes the calls that `prepare` chose, `check` verifies their bytes."""

    is_stream = False
    """True: the times are those of a stream of messages, divided by their number."""

    @abstractmethod
    async def prepare(self, calls: int) -> None:
        """Choose `calls` calls' blocks."""

    @abstractmethod
    async def operate(self) -> list[int]:
        """Make the calls: nanoseconds of each."""

    @abstractmethod
    async def check(self) -> None:
        """Verify what they moved. Raises WrongBytes."""


def draw(random_: random.Random, count: int, n: int) -> list[int]:
    """n blocks of `count` in random order, none twice."""
    return random_.sample(range(count), n)


async def measure(operation: Operation, task: Task, server_cpu: ServerCpu) -> Result:
    """Warm up, then measure ROUNDS rounds."""
    most = max(1, min(_CALLS_MAX, task.count // task.batch, _KEPT_BYTES // (task.nbytes * task.batch)))
    bound_ns = task.budget_s / ROUNDS * 1e9
    result = Result()
    calls = 1
    for warm_up in _WARM_UPS:
        if result.wall_ns < bound_ns:  # else one was enough
            result, calls = Result(), min(most, warm_up)
            await _round(operation, calls, server_cpu, result)
    calls = max(1, min(most, round(bound_ns * calls / max(result.wall_ns, 1))))
    result = Result(cpu_client_ns=0, cpu_server_ns=0, is_stream=operation.is_stream)
    for _ in range(ROUNDS):
        await _round(operation, calls, server_cpu, result)
    result.verified = True
    result.samples = sum(map(len, result.rounds))
    return result


async def _round(operation: Operation, calls: int, server_cpu: ServerCpu, result: Result) -> None:
    await operation.prepare(calls)
    server_ns = await server_cpu()
    own_ns, start = time.process_time_ns(), time.perf_counter_ns()
    result.rounds.append(await operation.operate())
    result.wall_ns += time.perf_counter_ns() - start
    result.cpu_client_ns += time.process_time_ns() - own_ns
    result.cpu_server_ns += await server_cpu() - server_ns
    await operation.check()
