"""Puts that wait for a leader: tried again, within the call's deadline, as long as nothing of them has happened.

What was sent and not answered is not tried again: nobody here knows what became of it, and the caller alone knows
whether that matters. The same goes for the blocks of the call that hang on such a one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ucxkv.client.putter import UNTRIED
from ucxkv.client.results import PutStatus
from ucxkv.ids import KEY_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.buffers import Pieces
    from ucxkv.client.path import U8
    from ucxkv.client.router import Router

    KeyRows = npt.NDArray[np.uint8]

__all__ = ["Attempt", "until_decided"]

Attempt: TypeAlias = "Callable[[KeyRows, KeyRows, Pieces], Awaitable[U8]]"
"""(keys, parents, values) -> PutStatus u8[n], UNTRIED where nothing happened."""

_PAUSE_MIN_S = 0.02
_PAUSE_MAX_S = 0.2
_ORDER, _UNAVAILABLE = int(PutStatus.ORDER), int(PutStatus.UNAVAILABLE)


async def until_decided(
    router: Router, keys: KeyRows, parents: KeyRows, pieces: Pieces, deadline_ns: int, attempt: Attempt
) -> U8:
    """Put n blocks, again and again those that no leader took: PutStatus u8[n], UNAVAILABLE at the deadline or when
    the client is closed.
    """
    status = await attempt(keys, parents, pieces)
    pause_s = _PAUSE_MIN_S
    while len(left := _undecided(keys, parents, status)):
        if not router.is_open or time.monotonic_ns() + int(pause_s * 1e9) >= deadline_ns:
            status[left] = _UNAVAILABLE
            break
        router.look_for_leaders()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        status[left] = await attempt(keys[left], parents[left], pieces.take(left))
    if (status == _UNAVAILABLE).any():
        router.look_for_leaders()  # the one that was asked may say nothing any more: the next call is to find another
    return status


def _undecided(keys: KeyRows, parents: KeyRows, status: U8) -> npt.NDArray[np.intp]:
    """The blocks to put again, by index. Those below one that nobody knows of become UNAVAILABLE, and those that were
    refused for the sake of a parent that is put again are put again with it.
    """
    if not (status == UNTRIED).any():
        return np.empty(0, np.intp)
    raw, above = keys.tobytes(), parents.tobytes()
    again: set[bytes] = set()
    unknown: set[bytes] = set()
    out = []
    for i, state in enumerate(status.tolist()):
        at = KEY_BYTES * i
        key, parent = raw[at : at + KEY_BYTES], above[at : at + KEY_BYTES]
        if state == _UNAVAILABLE or (state == UNTRIED and parent in unknown):
            status[i] = _UNAVAILABLE
            unknown.add(key)
        elif state == UNTRIED or (state == _ORDER and parent in again):
            again.add(key)
            out.append(i)
    return np.array(out, np.intp)
