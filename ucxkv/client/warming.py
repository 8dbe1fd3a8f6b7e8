"""Bringing blocks from nodes' disks into their memory ahead of reads: nothing is held, nothing is promised."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.cold import keys_of, warm
from ucxkv.client.reading import plan

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.client.link import NodeLink
    from ucxkv.client.router import Router

__all__ = ["warm_blocks"]

_STEP_KEYS = 1024
_WARM, _LATER = 0, 2


async def warm_blocks(router: Router, keys: npt.NDArray[np.uint8], root: bytes | None, deadline_ns: int) -> int:
    """Bring into memory those of these blocks that are on disk, in this order, as many as there is room for; how many
    of all are in memory then. A node that does not answer has none.
    """
    missing = np.ones(len(keys), np.bool_)
    for link, indices in plan(router, keys, root):
        todo = indices[missing[indices]]
        for begin in range(0, len(todo), _STEP_KEYS):
            some = todo[begin : begin + _STEP_KEYS]
            with contextlib.suppress(errors.Unavailable):
                missing[some] = await _warm_at(link, keys[some].tobytes(), deadline_ns)
    return int(np.count_nonzero(~missing))


async def _warm_at(link: NodeLink, keys: bytes, deadline_ns: int) -> npt.NDArray[np.bool_]:
    """Which of these blocks are not in this node's memory, once it has brought back what it has room for."""
    todo, missing = np.arange(len(keys) // 16), np.ones(len(keys) // 16, np.bool_)
    while len(todo):
        states = np.frombuffer((await warm(link, keys_of(keys, todo), 0, deadline_ns)).status, np.uint8)
        missing[todo[states == _WARM]] = False
        if not (states == _WARM).any():
            break
        todo = todo[states == _LATER]
    return missing
