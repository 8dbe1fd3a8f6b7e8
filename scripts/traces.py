"""Folding a trace (`ucxkv.simulation.traces`) into pieces.

A *piece* is a run of blocks that came together and that no chain leaves or ends inside, so a trace of 10^8 block
references is replayed as 10^6 references to pieces, with exactly the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucxkv.simulation.traces import Ids, Trace


@dataclass(frozen=True, slots=True)
class Pieces:
    """A folded trace. Piece p: `blocks[p]` blocks below the last block of `parents[p]` (-1: a root), the first of
    them the id `firsts[p]`. paths: each request's chain in pieces, and how many of them were there before it."""

    firsts: Ids
    blocks: list[int]
    parents: list[int]
    paths: list[tuple[list[int], int, int]]
    """(pieces, of which known before, session)."""


def fold(trace: Trace, is_cut: Callable[[Ids], npt.NDArray[np.bool_]]) -> Pieces:
    """Fold a trace into pieces; a block of which `is_cut` says so begins one."""
    starts, parents = _starts(trace)
    starts |= is_cut(np.arange(trace.count, dtype=np.int64)) & (parents >= -1)
    firsts = np.flatnonzero(starts)
    number = np.full(trace.count, -1, np.int64)
    number[firsts] = np.arange(len(firsts))
    blocks, above = [0] * len(firsts), [-1] * len(firsts)
    paths = []
    for request in trace.requests:
        at = np.flatnonzero(starts[request.ids])
        pieces: list[int] = number[request.ids[at]].tolist()
        lengths = np.diff(np.append(at, len(request.ids))).tolist()
        known = next((i for i, piece in enumerate(pieces) if not blocks[piece]), len(pieces))
        for i in range(known, len(pieces)):
            blocks[pieces[i]] = lengths[i]
            above[pieces[i]] = pieces[i - 1] if i else -1
        paths.append((pieces, known, request.session))
    return Pieces(firsts, blocks, above, paths)


def _starts(trace: Trace) -> tuple[npt.NDArray[np.bool_], Ids]:
    """Which ids begin a piece, and each id's parent: -1 a root, -2 never seen."""
    seen, starts = np.zeros(trace.count, np.bool_), np.zeros(trace.count, np.bool_)
    parents, children = np.full(trace.count, -2, np.int64), np.zeros(trace.count, np.int32)
    for request in trace.requests:
        ids = request.ids
        old = seen[ids]
        if old.all():
            continue
        at = int(np.argmin(old))
        fresh = ids[at:]
        seen[fresh] = True
        starts[fresh[0]] = True
        parents[fresh[1:]] = fresh[:-1]
        parents[fresh[0]] = ids[at - 1] if at else -1
        children[fresh[:-1]] += 1
        if at:
            children[ids[at - 1]] += 1
    has_parent = parents >= 0
    starts[has_parent] |= children[parents[has_parent]] > 1
    return starts, parents
