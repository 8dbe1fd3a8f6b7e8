"""How a batch of puts is cut into messages, and how many extents a client holds ahead."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ucxkv.buffers import Pieces

__all__ = ["CHUNK_BYTES_MIN", "CHUNK_KEYS_MAX", "ahead_count", "runs"]

CHUNK_BYTES_MIN = 1 << 20
"""A batch of no more bytes than this goes in one message."""
CHUNK_KEYS_MAX = 1024
"""The most blocks that one message commits."""
_CHUNK_BYTES_MAX = 8 << 20
_CHUNKS_A_BATCH = 8
_AHEAD_MAX = 32
_AHEAD_BYTES = 4 << 20


def ahead_count(length: int) -> int:
    """Extents for values of `length` bytes to hold for single puts."""
    return max(1, min(_AHEAD_MAX, _AHEAD_BYTES // max(1, length)))


def _chunk_bytes(total: int) -> int:
    """Bytes that one put message commits, of a batch of `total` bytes: few messages, and still some to overlap."""
    return min(_CHUNK_BYTES_MAX, max(CHUNK_BYTES_MIN, total // _CHUNKS_A_BATCH))


def runs(pieces: Pieces, *, uniform: bool) -> list[tuple[int, int]]:
    """Runs of neighbouring values of one length, (begin, end): each is copied while the one before it is committed, in
    one message. uniform: all are of one length.
    """
    limit = _chunk_bytes(pieces.total_bytes)
    edges = [0, len(pieces)]
    if not uniform:
        edges[1:1] = (np.flatnonzero(np.diff(pieces.nbytes)) + 1).tolist()
    out = []
    for begin, end in itertools.pairwise(edges):
        step = max(1, min(CHUNK_KEYS_MAX, limit // max(1, int(pieces.nbytes[begin]))))
        out += [(at, min(at + step, end)) for at in range(begin, end, step)]
    return out
