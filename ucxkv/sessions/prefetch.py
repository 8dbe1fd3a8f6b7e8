"""Bring a chain's blocks from disk to their node's memory before they are asked for.

Promises
  - Blocks come in token order (order "block"), or one layer group after the other (order "layer"), in windows; no more
    than `flight_bytes` are on their way at a time, but for a window of one value that is larger.
  - Only what the store has and what is on disk is asked for. Where a window does not come whole, memory is full or the
    blocks are gone: nothing further is asked for, so that a prefetch does not push out what it has just brought.
  - Cancelled, it ends with its calls; what is in memory then stays there as anything does.

A prefetch moves no bytes to the client, and holds nothing in place: it is a hint that came in time, or did not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from ucxkv.client.loadcosts import HOST_TIER
from ucxkv.client.results import Match
from ucxkv.errors import DeadlineExceeded, Unavailable, UsageError
from ucxkv.keys import KeyArray, Keys
from ucxkv.loading import Until

__all__ = ["FLIGHT_BYTES", "Brought", "PrefetchOrder", "PrefetchResult", "Warmer", "prefetch"]

FLIGHT_BYTES: Final = 64 << 20
"""Enough for a drive of 7 GB/s to be busy for 9 ms, little beside a node's memory."""

_WINDOWS_AT_ONCE: Final = 4

PrefetchOrder: TypeAlias = Literal["block", "layer"]
"""block: in token order, all layers of each; layer: one layer group after the other, all blocks each."""

Brought: TypeAlias = Callable[[str, int, int, float, float], None]
"""(node, blocks, bytes, start and end in seconds): told of each whole window, for the cost of loads."""


class Warmer(Protocol):
    """What a prefetch needs of a client; `ucxkv.Client` is one."""

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        """See Client.match."""

    async def warm(self, keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None) -> int:
        """See Client.warm."""


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """What a prefetch did.

    blocks: leading blocks of the chain that the store has. in_memory: leading blocks that are in memory now, all layers
    of them. brought: values (one a block and layer group) that came from disk. nbytes: their bytes.
    """

    blocks: int = 0
    in_memory: int = 0
    brought: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Window:
    group: int
    blocks: np.ndarray[tuple[int], np.dtype[np.intp]]
    nbytes: int


async def prefetch(
    kv: Warmer,
    chains: list[KeyArray],
    *,
    order: PrefetchOrder = "block",
    flight_bytes: int = FLIGHT_BYTES,
    deadline_s: float | None = None,
    on_brought: Brought | None = None,
) -> PrefetchResult:
    """Bring the leading stored blocks of a chain to memory. chains: the keys of each layer group's values, root first.

    Raises UsageError. A node that does not answer ends the prefetch, as a deadline does: what came by then is told.
    """
    if order not in ("block", "layer"):
        raise UsageError(f"order is {order!r}; use 'block' or 'layer'")
    if flight_bytes < 1:
        raise UsageError(f"flight_bytes is {flight_bytes}; at least 1")
    until = Until(deadline_s)
    if not chains or not len(chains[0]):
        return PrefetchResult()
    try:
        matches = [await kv.match(chain, deadline_s=until.left_s()) for chain in chains]
    except Unavailable:
        return PrefetchResult()
    blocks = min(match.blocks for match in matches)
    run = _Run(kv, chains, matches, until, flight_bytes, on_brought)
    await run.all(_windows([match.tiers[:blocks] for match in matches], run.sizes, order, flight_bytes))
    slow = np.zeros(blocks, np.bool_)
    for group, match in enumerate(matches):
        slow |= (match.tiers[:blocks] > HOST_TIER) & ~run.is_brought[group][:blocks]
    still = np.flatnonzero(slow)
    return PrefetchResult(blocks, int(still[0]) if len(still) else blocks, run.brought, run.nbytes)


class _Run:
    """The windows of one prefetch, in order, so many bytes at a time."""

    def __init__(
        self,
        kv: Warmer,
        chains: list[KeyArray],
        matches: list[Match],
        until: Until,
        flight_bytes: int,
        on_brought: Brought | None,
    ) -> None:
        self._kv, self._chains, self._matches, self._until = kv, chains, matches, until
        self._flight_bytes = flight_bytes
        self._on_brought = on_brought
        self._in_flight = 0
        self._is_stopped = False
        self._freed = asyncio.Event()
        self.sizes = [
            match.nbytes.astype(np.int64) if len(match.nbytes) == match.blocks else np.zeros(match.blocks, np.int64)
            for match in matches
        ]
        self.is_brought = [np.zeros(len(chain), np.bool_) for chain in chains]
        self.brought = self.nbytes = 0

    async def all(self, windows: Iterator[_Window]) -> None:
        """Run them until they are over, or one has not come whole."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running: set[asyncio.Task[None]] = set()
                for window in windows:
                    while self._in_flight and (
                        self._in_flight + window.nbytes > self._flight_bytes or len(running) >= _WINDOWS_AT_ONCE
                    ):
                        self._freed.clear()
                        await self._freed.wait()
                        running = {task for task in running if not task.done()}
                    if self._is_stopped:
                        break
                    self._in_flight += max(1, window.nbytes)
                    running.add(tasks.create_task(self._bring(window)))
        except BaseExceptionGroup as many:
            raise many.exceptions[0] from None

    async def _bring(self, window: _Window) -> None:
        start_s = time.perf_counter()
        try:
            chain = self._chains[window.group]
            root, deadline_s = chain[0].tobytes(), self._until.left_s()
            count = await self._kv.warm(chain[window.blocks], root=root, deadline_s=deadline_s)
        except (Unavailable, DeadlineExceeded):
            count = -1
        finally:
            self._in_flight -= max(1, window.nbytes)
            self._freed.set()
        if count < len(window.blocks):
            self._is_stopped = True
            return
        self.is_brought[window.group][window.blocks] = True
        self.brought += len(window.blocks)
        self.nbytes += window.nbytes
        if self._on_brought is not None:
            node = self._matches[window.group].node
            self._on_brought(node, len(window.blocks), window.nbytes, start_s, time.perf_counter())


def _windows(
    tiers: list[np.ndarray[tuple[int], np.dtype[np.uint8]]],
    sizes: list[np.ndarray[tuple[int], np.dtype[np.int64]]],
    order: PrefetchOrder,
    flight_bytes: int,
) -> Iterator[_Window]:
    """What is on disk, cut so that several windows are on their way at a time.

    tiers, sizes: of each layer group's values, by block. In order "block" all groups' windows cover the same blocks.
    """
    slow = [np.flatnonzero(of_group > HOST_TIER) for of_group in tiers]
    if order == "layer":
        for group, blocks in enumerate(slow):
            for part in _parts(sizes[group][blocks], flight_bytes // _WINDOWS_AT_ONCE):
                yield _Window(group, blocks[part], int(sizes[group][blocks[part]].sum()))
        return
    together = np.sum([np.where(t > HOST_TIER, s[: len(t)], 0) for t, s in zip(tiers, sizes, strict=True)], axis=0)
    for part in _parts(together, flight_bytes // _WINDOWS_AT_ONCE):
        for group, blocks in enumerate(slow):
            inside = blocks[(blocks >= part.start) & (blocks < part.stop)]
            if len(inside):
                yield _Window(group, inside, int(sizes[group][inside].sum()))


def _parts(sizes: np.ndarray[tuple[int], np.dtype[np.int64]], limit: int) -> Iterator[slice]:
    """Runs of values of at most `limit` bytes and `_VALUES_MAX` values together, at least one each."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        base = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, base + limit, side="right")))
        yield slice(start, min(stop, start + _VALUES_MAX, len(sizes)))
        start = min(stop, start + _VALUES_MAX)


_VALUES_MAX: Final = 1024
