"""Tokens in, KV out: one token sequence's blocks, matched, loaded and saved through a client.

Promises of this module:

- A block counts as matched only when all of its layer groups are visible, and so are those of every block before it.
- With one layer group (the default) a block is one value under its own key. With more, each group is a value under a
  key derived from the block's (keys.derived_keys with the group's number and their count), and the groups form
  separate chains. So layers can be loaded one group at a time, each value carries its own sum, and a half-saved block
  is never taken for whole.
- A load ends at the first block that is not there. Every block it reports holds the stored bytes; the rest of `into`
  is undefined.
- After a load step returned, or `aclose` did, nothing writes into `into`. Only `ahead` > 0 reads before it is asked
  to, and that needs `async with`, which ends with `aclose`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ucxkv.client.results import GetResult, Match, PutResult, PutStatus, ReadStatus
from ucxkv.errors import DeadlineExceeded, Unavailable, UsageError
from ucxkv.keys import KeyArray, Keys, block_keys, derived_keys
from ucxkv.layout import Layout
from ucxkv.paged import PagedMemory

__all__ = ["KvClient", "Load", "Loaded", "Order", "SaveResult", "Sequence"]

_T = TypeVar("_T")

Order: TypeAlias = Literal["layer", "block", "tail"]
"""layer: one layer group after the other, all blocks each; block: from the first block on; tail: from the last back."""

_STEP_BYTES: Final = 4 << 20
"""Bytes a step of order "block" asks for: about what one peer should have in flight (more falls out of the cache)."""


class KvClient(Protocol):
    """What a sequence needs of a client; `ucxkv.Client` is one."""

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        """See Client.match."""

    async def get_many(
        self, keys: Keys, into: object, *, root: bytes | None = None, deadline_s: float | None = None
    ) -> GetResult:
        """See Client.get_many."""

    async def put_many(
        self, keys: Keys, blocks: object, parents: Keys, *, durable: bool = False, deadline_s: float | None = None
    ) -> PutResult:
        """See Client.put_many."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One step of a load: these layers of these blocks now hold the stored bytes."""

    layers: range
    blocks: range


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save did.

    blocks: leading blocks of the sequence that are in the store now, whoever stored them. stored: values this call
    made visible.
    status: PutStatus u8 (layer groups, blocks tried), for the blocks from `start` on.
    """

    blocks: int
    stored: int
    start: int
    status: npt.NDArray[np.uint8]


class Sequence:
    """The whole blocks of one token sequence in one layout; made by `kv.sequence(layout, token_ids)`.

    keys: (blocks, 16) uint8. layout: with the salt given, if one was. blocks_count: whole blocks; a partial tail is
    not stored."""

    def __init__(self, kv: KvClient, layout: Layout, token_ids: npt.ArrayLike, *, salt: str | None = None) -> None:
        """token_ids: see `block_keys`. salt: the tenant's, in place of the layout's. Raises UsageError."""
        self._kv = kv
        self.layout = layout if salt is None else dataclasses.replace(layout, salt=salt)
        self.keys = block_keys(token_ids, self.layout)
        self._chains = _chains(self.keys, self.layout.layer_groups)

    @property
    def blocks_count(self) -> int:
        """Whole blocks in the sequence."""
        return len(self.keys)

    async def match(self, *, deadline_s: float | None = None) -> int:
        """Leading blocks that are in the store, all layers of them. deadline_s: seconds from now."""
        if not len(self.keys):
            return 0
        matches = await _together([self._kv.match(chain, deadline_s=deadline_s) for chain in self._chains])
        return min(match.blocks for match in matches)

    def load(
        self,
        into: object,
        *,
        order: Order = "layer",
        blocks: int | None = None,
        block_ids: npt.ArrayLike | None = None,
        step_blocks: int | None = None,
        ahead: int = 0,
        deadline_s: float | None = None,
    ) -> Load:
        """Load the sequence's leading blocks step by step: `async for loaded in seq.load(into=cache): ...`.

        into: a paged cache, see PagedMemory; borrowed until the last step returned or `aclose` did. order: see Order.
        blocks: how many to load; None asks `match`. block_ids: the page of each block; None means 0, 1, 2 ...
        step_blocks: blocks a step, for order "block" (default about 4 MiB) and "tail" (default 1).
        ahead: steps to read in advance while the caller works; above 0 it needs `async with`. deadline_s: for all
        steps.
        Raises UsageError here for what is wrong with `into`; Unavailable is never raised: what cannot be read ends
        the load."""
        if order not in ("layer", "block", "tail"):
            raise UsageError(f"order is {order!r}; use 'layer', 'block' or 'tail'")
        if blocks is not None and not 0 <= blocks <= self.blocks_count:
            raise UsageError(f"blocks is {blocks}; the sequence has {self.blocks_count} whole blocks")
        if ahead < 0 or (step_blocks is not None and step_blocks < 1):
            raise UsageError(f"ahead is {ahead} and step_blocks {step_blocks}; at least 0 and 1")
        if step_blocks is None:
            step_blocks = 1 if order == "tail" else max(1, _STEP_BYTES // self.layout.block_bytes)
        memory = PagedMemory(into, self.layout, writable=True)
        return Load(self, memory, order, blocks, block_ids, step_blocks, ahead, deadline_s)

    async def save(
        self,
        cache: object,
        *,
        block_ids: npt.ArrayLike | None = None,
        start: int | None = None,
        blocks: int | None = None,
        durable: bool = False,
        deadline_s: float | None = None,
    ) -> SaveResult:
        """Store the sequence's blocks from a paged cache; blocks that are there already are not sent again.

        cache: see PagedMemory; borrowed until this returns. block_ids: the page of each block, from block 0 on; None
        means 0, 1, 2 ... start: first block to store; None asks `match` what is there. blocks: end of what to store,
        default all. durable: see Client.put; blocks that are there already become durable with the last of them, which
        is sent again.
        Raises UsageError. A full or dead node shows in the result's status.
        """
        memory = PagedMemory(cache, self.layout, writable=False)
        end = self.blocks_count if blocks is None else blocks
        if not 0 <= (start or 0) <= end <= self.blocks_count:
            raise UsageError(f"start is {start} and blocks {blocks}; the sequence has {self.blocks_count} whole blocks")
        pages = memory.page_numbers(block_ids, end)
        until = _Until(deadline_s)
        first = min(await self.match(deadline_s=until.left_s()), end) if start is None else start
        if durable and start is None:
            first = max(0, first - 1)  # what is there may be of class cache: its last block takes all above it along
        result = await self._put(memory, pages, first, end, until, durable)
        if first and start is None and (result.status == PutStatus.ORDER).any():
            # Blocks that matched were evicted before their children came: store the whole chain.
            result = await self._put(memory, pages, 0, end, until, durable)
        return result

    async def _put(
        self, memory: PagedMemory, pages: npt.NDArray[np.int64], start: int, end: int, until: _Until, durable: bool
    ) -> SaveResult:
        status = np.zeros((len(self._chains), end - start), np.uint8)
        stored, whole = 0, end
        for group, chain in enumerate(self._chains):
            if start == end:
                break
            parents = np.zeros((end - start, 16), np.uint8)
            parents[1 if start == 0 else 0 :] = chain[max(start - 1, 0) : end - 1]
            result = await self._kv.put_many(
                chain[start:end],
                memory.pieces(pages[start:end], group),
                parents,
                durable=durable,
                deadline_s=until.left_s(),
            )
            status[group] = result.status
            stored += result.stored
            there = (result.status == PutStatus.STORED) | (result.status == PutStatus.ALREADY)
            missing = np.flatnonzero(~there)
            whole = min(whole, start + int(missing[0]) if len(missing) else end)
        return SaveResult(whole, stored, start, status)

    async def _read(
        self, memory: PagedMemory, pages: npt.NDArray[np.int64], step: _Step, until: _Until
    ) -> npt.NDArray[np.bool_]:
        """Read the step's groups of its blocks; which blocks are whole, bool (blocks of the step,)."""
        a, b = step.blocks.start, step.blocks.stop
        try:
            deadline_s = until.left_s()
        except DeadlineExceeded:
            return np.zeros(b - a, np.bool_)

        async def read(group: int) -> GetResult:
            chain = self._chains[group]
            return await self._kv.get_many(
                chain[a:b], memory.pieces(pages[a:b], group), root=chain[0].tobytes(), deadline_s=deadline_s
            )

        whole = np.ones(b - a, np.bool_)
        for result in await _together([read(group) for group in step.groups]):
            whole &= result.status == ReadStatus.HIT
        return whole


@dataclass(frozen=True, slots=True)
class _Step:
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
        self._until = _Until(deadline_s)
        self._entered = False
        self._is_over = False
        self._steps: Iterator[_Step] | None = None
        self._pages = np.empty(0, np.int64)
        self._running: deque[tuple[_Step, asyncio.Task[npt.NDArray[np.bool_]]]] = deque()
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
            step, whole = await self._next_step()
        except BaseException:
            await self.aclose()
            raise
        if step is None:
            await self.aclose()
            raise StopAsyncIteration
        loaded = self._account(step, whole)
        if len(loaded.blocks) < len(whole):  # a hole: no later step is of use, unless it brings further layers
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
            self._steps = (_Step(range(group, group + 1), range(n)) for group in groups)
        elif self._order == "block":
            self._steps = (_Step(groups, range(a, min(a + k, n))) for a in range(0, n, k))
        else:
            self.loaded = range(n, n)
            self._steps = (_Step(groups, range(max(b - k, 0), b)) for b in range(n, 0, -k))

    async def _next_step(self) -> tuple[_Step | None, npt.NDArray[np.bool_]]:
        assert self._steps is not None
        if not self._ahead:
            step = next(self._steps, None)
            if step is None:
                return None, np.empty(0, np.bool_)
            if self._order == "layer":
                step = _Step(step.groups, self.loaded)
            return step, await self._sequence._read(self._memory, self._pages, step, self._until)
        while len(self._running) <= self._ahead and (step := next(self._steps, None)) is not None:
            read = self._sequence._read(self._memory, self._pages, step, self._until)
            self._running.append((step, asyncio.create_task(read)))
        if not self._running:
            return None, np.empty(0, np.bool_)
        step, task = self._running[0]
        whole = await task
        self._running.popleft()
        return step, whole

    def _account(self, step: _Step, whole: npt.NDArray[np.bool_]) -> Loaded:
        """The usable blocks of a step: up to its first hole (order "tail": from its last hole on)."""
        holes = np.flatnonzero(~whole)
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
        for task in tasks:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while any(not task.done() for task in tasks):  # ends: each read has a deadline
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError as exc:  # of the caller: the reads must be over first
                cancelled = exc
        for task in tasks:
            if not task.cancelled():
                task.exception()  # it was not asked for; do not report it as never retrieved
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Until:
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


async def _together(calls: list[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run the calls side by side; when one raises, end the others first, then raise its error alone."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as many:
        raise many.exceptions[0] from None
    return [task.result() for task in tasks]


def _chains(keys: KeyArray, groups: int) -> list[KeyArray]:
    """The keys of each layer group's values; the block's own where there is one group."""
    if groups == 1:
        return [keys]
    return [derived_keys(keys, f"layer group {group} of {groups}".encode()) for group in range(groups)]
