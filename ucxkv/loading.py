"""A load in progress: which blocks of a sequence are read step by step, in which order, and what came of it.

Promises: every block that is reported holds the stored bytes; after a step returned, or `aclose` did, nothing writes
into the caller's cache. Only `ahead` > 0 reads before it is asked to, and that needs `async with`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ucxkv.errors import DeadlineExceeded, Unavailable, UsageError
from ucxkv.paged import PagedMemory

if TYPE_CHECKING:
    from ucxkv.sequence import Sequence

__all__ = ["Load", "Loaded", "Order", "Step", "Until", "ended"]

Order: TypeAlias = Literal["layer", "block", "tail"]
"""layer: one layer group after the other, all blocks each; block: from the first block on; tail: from the last back."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One step of a load: these layers of these blocks now hold the stored bytes."""

    layers: range
    blocks: range


@dataclass(frozen=True, slots=True)
class Step:
    """What one step reads: these layer groups of these blocks."""

    groups: range
    blocks: range


class Load:
    """A load in progress: iterate it with `async for`, each step a `Loaded`; see `Sequence.load`.

    `loaded` is the range of blocks that are whole so far (order "layer": whole in every layer read so far).
    """

    def __init__(
        self,
        sequence: Sequence,
        memory: PagedMemory,
        order: Order,
        blocks: int | None,
        block_ids: npt.ArrayLike | None,
        step_blocks: int,
        ahead: int,
        deadline_s: float | None,
    ) -> None:
        self._sequence = sequence
        self._memory = memory
        self._order = order
        self._blocks = blocks
        self._block_ids = block_ids
        self._step_blocks = step_blocks
        self._ahead = ahead
        self._until = Until(deadline_s)
        self._entered = False
        self._is_over = False
        self._steps: Iterator[Step] | None = None
        self._pages = np.empty(0, np.int64)
        self._running: deque[tuple[Step, asyncio.Task[npt.NDArray[np.uint8]]]] = deque()
        self.loaded = range(0)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Loaded:
        if self._is_over:
            raise StopAsyncIteration
        if self._ahead and not self._entered:
            raise UsageError("a load with ahead > 0 reads in the background; use `async with seq.load(...) as load:`")
        try:
            if self._steps is None:
                await self._begin()
            step, status = await self._next_step()
        except BaseException:
            await self.aclose()
            raise
        if step is None:
            await self.aclose()
            raise StopAsyncIteration
        loaded = self._account(step, status)
        if len(loaded.blocks) < len(status):  # a hole: no later step is of use, unless it brings further layers
            if self._order != "layer" or not loaded.blocks:
                await self.aclose()
            if not loaded.blocks:
                raise StopAsyncIteration
        return loaded

    async def _begin(self) -> None:
        if self._blocks is None:
            try:
                self._blocks = await self._sequence.match(deadline_s=self._until.left_s())
            except Unavailable:
                self._blocks = 0
        n, k, groups = self._blocks, self._step_blocks, range(self._sequence.layout.layer_groups)
        self._pages = self._memory.page_numbers(self._block_ids, n)
        if n == 0:
            self._steps = iter(())
        elif self._order == "layer":
            self.loaded = range(n)
            self._steps = (Step(range(group, group + 1), range(n)) for group in groups)
        elif self._order == "block":
            self._steps = (Step(groups, range(a, min(a + k, n))) for a in range(0, n, k))
        else:
            self.loaded = range(n, n)
            self._steps = (Step(groups, range(max(b - k, 0), b)) for b in range(n, 0, -k))

    async def _next_step(self) -> tuple[Step | None, npt.NDArray[np.uint8]]:
        assert self._steps is not None
        if not self._ahead:
            step = next(self._steps, None)
            if step is None:
                return None, np.empty(0, np.uint8)
            if self._order == "layer":
                step = Step(step.groups, self.loaded)
            return step, await self._sequence.read(self._memory, self._pages, step, self._until)
        while len(self._running) <= self._ahead and (step := next(self._steps, None)) is not None:
            read = self._sequence.read(self._memory, self._pages, step, self._until)
            self._running.append((step, asyncio.create_task(read)))
        if not self._running:
            return None, np.empty(0, np.uint8)
        step, task = self._running[0]
        status = await task
        self._running.popleft()
        return step, status

    def _account(self, step: Step, status: npt.NDArray[np.uint8]) -> Loaded:
        """The usable blocks of a step: up to its first hole (order "tail": from its last hole on)."""
        holes = np.flatnonzero(status)  # HIT is 0
        a, b = step.blocks.start, step.blocks.stop
        if self._order == "tail":
            good = range(a + int(holes[-1]) + 1 if len(holes) else a, b)
            self.loaded = range(good.start, self.loaded.stop)
        else:
            good = range(a, a + int(holes[0]) if len(holes) else b)
            if self._order == "layer":  # blocks that lacked an earlier layer stay out
                good = range(min(good.stop, self.loaded.stop))
                self.loaded = good
            else:
                self.loaded = range(good.stop)
        size = self._sequence.layout.group_layers
        return Loaded(range(step.groups.start * size, step.groups.stop * size), good)

    async def aclose(self) -> None:
        """Stop; when this returns, nothing writes into the cache any more. Idempotent."""
        self._is_over = True
        tasks = [task for _, task in self._running]
        self._running.clear()
        await ended(tasks)

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Until:
    """One absolute deadline for a call that makes several."""

    def __init__(self, deadline_s: float | None) -> None:
        if deadline_s is not None and deadline_s <= 0:
            raise UsageError(f"deadline_s={deadline_s}; pass seconds from now, above 0")
        self._end = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s

    def left_s(self) -> float | None:
        """Seconds left, None for the client's own default. Raises DeadlineExceeded."""
        if self._end is None:
            return None
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed between two steps; what was done stays done")
        return left


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel calls and wait for their end; when this returns or raises, they write nowhere any more."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):  # ends: each call has a deadline
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as exc:  # of the caller: the calls must be over first
            cancelled = exc
    for task in tasks:
        if not task.cancelled():
            task.exception()  # it was not asked for; do not report it as never retrieved
    if cancelled is not None:
        raise cancelled
