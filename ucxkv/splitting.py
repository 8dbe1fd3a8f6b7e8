"""A split load in progress: an engine computes a stored prefix from its head while its tail is loaded.

    async with seq.split(into=cache, prefill=8000.0) as split:
        async for blocks in split:                  # a range of blocks, in token order
            await engine.prefill(blocks)            # writes their keys and values into `cache`
    # blocks 0 .. split.blocks - 1 are in `cache` now

Promises
  - After the loop each of the first `blocks` blocks is in the cache, whole: computed by the caller, or loaded and
    proved by its sum. None is written by both at once: a load is over, or ended for good, before its blocks are handed
    out; a page may hold part of them then.
  - When a span is handed out, all blocks before it are in the cache.
  - What does not come (evicted meanwhile, damaged, its node dead, the deadline past) is handed out to compute. A load
    that is so late that computing its blocks is faster is ended, and its blocks are handed out.
  - Loads run while the caller computes, provided that it leaves the event loop its turns: compute in a thread, in
    another process or on a device, not in the loop.
  - After `async with`, nothing writes into the cache any more. Errors of the client end the loop as they are.

What is decided is `loadsplit.LoadSplit`'s; here is what runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import numpy.typing as npt

from ucxkv.client.results import ReadStatus
from ucxkv.errors import Unavailable, UsageError
from ucxkv.loading import Step, Until, ended
from ucxkv.loadsplit import LoadSplit
from ucxkv.policy.cost import PrefillCost

if TYPE_CHECKING:
    from ucxkv.paged import PagedMemory
    from ucxkv.sequence import Sequence

__all__ = ["Split"]

_LOADS_AT_ONCE: Final = 2
"""One that arrives and one that its node brings to memory meanwhile."""


class Split:
    """See the module; made by `Sequence.split`. `blocks`: how many are split, known inside of `async with`."""

    def __init__(
        self,
        sequence: Sequence,
        memory: PagedMemory,
        prefill: PrefillCost,
        pass_s: float,
        blocks: int | None,
        block_ids: npt.ArrayLike | None,
        steps: tuple[int, int],
        deadline_s: float | None,
    ) -> None:
        """steps: most blocks of a span to compute, and of a load."""
        self._sequence = sequence
        self._memory = memory
        self._prefill, self._pass_s = prefill, pass_s
        self._most = blocks
        self._block_ids = block_ids
        self._steps = steps
        self._deadline_s = deadline_s
        self._until: Until | None = None
        self._plan = LoadSplit(np.empty(0), np.empty(0))
        self._pages = np.empty(0, np.int64)
        self._reads: deque[tuple[range, asyncio.Task[tuple[npt.NDArray[np.uint8], float]]]] = deque()
        self._changed = asyncio.Event()
        self._is_handed_out = False
        self._is_closed = True
        self._error: BaseException | None = None
        self.blocks = 0

    # ---- what came of it

    @property
    def is_over(self) -> bool:
        """Whether every block is there."""
        return self._plan.is_over

    @property
    def computed_blocks(self) -> int:
        """Blocks that the caller has computed so far."""
        return self._plan.computed_blocks

    @property
    def loaded_blocks(self) -> int:
        """Blocks that were loaded so far."""
        return self._plan.loaded_blocks

    @property
    def prefill(self) -> PrefillCost:
        """What tokens cost, as known now: what was told, corrected by the spans of this split. For the next one."""
        scale = self._plan.compute_scales[1]
        return PrefillCost(self._prefill.per_token_s * scale, self._prefill.per_token_position_s * scale)

    @property
    def pass_s(self) -> float:
        """What a pass costs besides, as known now. For the next split."""
        return self._pass_s * self._plan.compute_scales[0]

    # ---- what runs

    async def __aenter__(self) -> Self:
        until = self._until = Until(self._deadline_s)
        try:
            match = await self._sequence.look_up(deadline_s=until.left_s())
            found, load_s, tiers = match.blocks, match.load_s, match.tiers
        except Unavailable:  # nobody to load from: what is stored is not known, and computing is all there is
            found, load_s, tiers = 0, np.empty(0), np.empty(0, np.uint8)
        n = self.blocks = found if self._most is None else min(found, self._most)
        self._pages = self._memory.page_numbers(self._block_ids, n)
        tokens = self._sequence.layout.block_tokens
        self._plan = LoadSplit(
            self._prefill.seconds(tokens * np.arange(n), tokens),
            load_s[:n],
            tiers[:n],
            pass_s=self._pass_s,
            compute_blocks=self._steps[0],
            load_blocks=self._steps[1],
            loads_at_once=_LOADS_AT_ONCE,
        )
        self._is_closed = False
        self._begin_reads()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> range:
        """The next blocks to compute; asking for them says that those before are computed."""
        if self._until is None:
            raise UsageError("a split loads in the background; use `async with seq.split(...) as split:`")
        if self._is_handed_out:
            self._is_handed_out = False
            self._plan.computed(time.monotonic())
        while not self._is_closed and not self._plan.is_over:
            self._begin_reads()
            for _ in range(2):  # what is begun goes on its way, or ends, before the caller keeps the loop busy
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            blocks = self._plan.next_compute(time.monotonic())
            if blocks is not None:
                self._is_handed_out = True
                return blocks
            await self._wait()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def _wait(self) -> None:
        """Until a read has ended, or the time has come to look whether it is late. Ends one that is too late."""
        now_s = time.monotonic()
        if self._plan.recall(now_s) is not None:
            _, task = self._reads[-1]
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)  # for `_read_ended`
            return
        self._changed.clear()
        try:
            async with asyncio.timeout(self._plan.wait_s(now_s)):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _begin_reads(self) -> None:
        assert self._until is not None
        while not self._is_closed and (blocks := self._plan.next_load(time.monotonic())) is not None:
            task = asyncio.create_task(self._read(blocks, self._until))
            self._reads.append((blocks, task))
            task.add_done_callback(self._read_ended)

    async def _read(self, blocks: range, until: Until) -> tuple[npt.NDArray[np.uint8], float]:
        """What became of the blocks, and when: `_read_ended` may have to wait for its turn."""
        step = Step(range(self._sequence.layout.layer_groups), blocks)
        status = await self._sequence.read(self._memory, self._pages, step, until)
        return status, time.monotonic()

    def _read_ended(self, _: asyncio.Task[tuple[npt.NDArray[np.uint8], float]]) -> None:
        if self._is_closed:
            return
        while self._reads and self._reads[-1][1].done() and self._reads[-1][1].cancelled():
            self._reads.pop()
            self._plan.returned(time.monotonic())
        while self._reads and self._reads[0][1].done() and not self._reads[0][1].cancelled():
            blocks, task = self._reads.popleft()
            if (error := task.exception()) is not None:
                self._error = self._error or error
                self._plan.loaded(time.monotonic(), blocks)
            else:
                status, end_s = task.result()
                self._plan.loaded(end_s, (blocks.start + np.flatnonzero(status)).tolist())
                if (status == ReadStatus.UNAVAILABLE).any():  # the node is gone, or the time for loads is over
                    self._plan.stop_loading()
        self._begin_reads()
        self._changed.set()

    async def aclose(self) -> None:
        """End what loads; when this returns, nothing writes into the cache any more. Idempotent."""
        self._is_closed = True
        tasks = [task for _, task in self._reads]
        self._reads.clear()
        await ended(tasks)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
