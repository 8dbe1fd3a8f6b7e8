"""Blocks that are on a node's disk only: asked into its memory, held there, read as any other, let go.

Promises
- A read ends within its deadline: what the node cannot bring back by then is UNAVAILABLE, and no wait is longer.
- At most `_AT_ONCE` requests of one call are under way, of about `_STEP_BYTES` each, so that a batch of any size needs
  little of the node's memory at a time, and its disk works while bytes are moved.
- Of a single block nothing is held: the node has brought it back just now, and where it is gone again all the same by
  the time it is read, it is read the general way.
- When the call ends, nothing of it writes into its buffers, and what it held is let go, at the latest by its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ucxkv import errors
from ucxkv.client.path import OTHERWISE, chunk_bounds
from ucxkv.client.results import ReadStatus
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.buffers import Pieces
    from ucxkv.client.link import NodeLink
    from ucxkv.client.loadcosts import LoadCosts
    from ucxkv.client.path import U8, U64

__all__ = ["keys_of", "read_cold", "read_one_cold", "warm"]

_STEP_BYTES = 8 << 20
_STEP_KEYS = 4096
_AT_ONCE = 2
_HOLD_MS = 5_000
"""So long a node holds what it brought back, at most; it is let go as soon as it is read."""
_PAUSE_S = 0.005
_WARM, _LATER = 0, 2
_MISS, _UNMAPPED, _UNAVAILABLE = int(ReadStatus.MISS), int(ReadStatus.UNMAPPED), int(ReadStatus.UNAVAILABLE)


async def warm(link: NodeLink, keys: bytes, ttl_ms: int, deadline_ns: int) -> m.Warmed:
    """Ask a node to bring these blocks into memory. Raises Unavailable, DeadlineExceeded."""
    answer = await link.ask(m.Warm(keys=keys, ttl_ms=ttl_ms), deadline_ns)
    if not isinstance(answer, m.Warmed) or len(answer.status) != len(keys) // 16:
        raise errors.Unavailable("the node's answer about blocks on disk does not fit it", node=link.name)
    return answer


async def read_one_cold(link: NodeLink, key: bytes, into: Any, loads: LoadCosts, deadline_ns: int) -> int:
    """Read one block that is on disk only, by the path's short way: as `ReadInto`, which the path has.

    OTHERWISE also where the node could not bring it back at once, or did not answer.
    """
    start_s = time.perf_counter() if loads.is_due(1) else 0.0
    try:
        answer = await warm(link, key, 0, deadline_ns)
    except (errors.Unavailable, errors.StaleError):
        return OTHERWISE
    if answer.status[0] != _WARM or not link.is_alive or link.path.read_into is None:
        return OTHERWISE
    found = link.path.read_into(key, into, deadline_ns)
    nbytes = found if type(found) is int else await found  # type: ignore[misc]
    if start_s and nbytes > 0:
        loads.came_cold(link.name, link.path.kind, 1, nbytes, start_s, time.perf_counter())
    return nbytes


async def read_cold(link: NodeLink, keys: bytes, pieces: Pieces, status: U8, lengths: U64, deadline_ns: int) -> None:
    """Read those of these blocks whose `status` is UNMAPPED since they are on disk; in place: status and lengths.

    What is still UNMAPPED then is in memory that this client has not mapped. Raises Unavailable.
    """
    todo = np.flatnonzero(status == _UNMAPPED)
    sizes = np.maximum(pieces.nbytes[todo], np.uint64(_STEP_BYTES // _STEP_KEYS))
    steps = [todo[begin:end] for begin, end in itertools.pairwise(chunk_bounds(sizes, _STEP_BYTES))]
    if len(steps) == 1:
        await _read_some(link, keys, pieces, todo, status, lengths, deadline_ns)
        return
    ahead = iter(steps)

    async def work() -> None:
        for some in ahead:
            await _read_some(link, keys, pieces, some, status, lengths, deadline_ns)

    tasks = [asyncio.ensure_future(work()) for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        while not all(task.done() for task in tasks):  # the buffers are the caller's again when this ends
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks)


async def _read_some(
    link: NodeLink, keys: bytes, pieces: Pieces, some: npt.NDArray[np.intp], status: U8, lengths: U64, deadline_ns: int
) -> None:
    """Read these blocks, again and again those for which there was no room."""
    while len(some):
        try:
            answer = await warm(link, keys_of(keys, some), _HOLD_MS, deadline_ns)
        except errors.DeadlineExceeded:
            status[some] = _UNAVAILABLE
            return
        states = np.frombuffer(answer.status, np.uint8)
        ready, later = some[states == _WARM], some[states == _LATER]
        status[some[(states != _WARM) & (states != _LATER)]] = _MISS
        try:
            if len(ready):
                found = await link.path.read(keys_of(keys, ready), pieces.take(ready), deadline_ns)
                status[ready], lengths[ready] = found
        finally:
            if answer.lease and link.is_alive:
                with contextlib.suppress(errors.UcxKvError):
                    link.tell(m.Release(lease=answer.lease))
        some = later
        if len(later) and not len(ready):
            if time.monotonic_ns() + int(_PAUSE_S * 1e9) >= deadline_ns:
                status[later] = _UNAVAILABLE
                return
            await asyncio.sleep(_PAUSE_S)


def keys_of(keys: bytes, some: npt.NDArray[np.intp]) -> bytes:
    """The keys at these indices, one after the other."""
    return b"".join(keys[16 * at : 16 * at + 16] for at in some.tolist())
