"""Reads by a session's token, at a node that follows the shard: what it has of a state that the session may see.

Promises
  - A block is shown only in a state of the shard's log that was committed and holds all that the token names: what was
    applied here, or, where that is not as far yet, with the entries up to the token's own. That the token names an
    entry by epoch and index, and this log has it, proves that all before it is committed, too.
  - That a block is not here says nothing of it: cache-class blocks are at the leader alone.
  - A place that was told is not used anew for `HOLD_NS`, and the reader proves the sum: it may be later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.ids import KEY_BYTES
from ucxkv.node.shards.records import ABSENT_REGION
from ucxkv.node.space import Place
from ucxkv.protocol import messages as m
from ucxkv.replication import Role
from ucxkv.tokens import Point, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucxkv.node.shards.shard import Shard

__all__ = ["HOLD_NS", "answer"]

HOLD_NS = 1_000_000_000
_KEYS_MAX = 4096
_BYTES_MAX = 4 << 20
_REACH = 256
"""So many entries that are not applied yet are looked through for a token."""


def answer(shards: Sequence[Shard], request: m.ReadAt, segment: memoryview, now_ns: int) -> m.FoundAt:
    """See ReadAt. shards: all there are; segment: this node's own. Raises UsageError."""
    n = len(request.keys) // KEY_BYTES
    if n > _KEYS_MAX or request.bytes_max > _BYTES_MAX:
        raise errors.UsageError(
            f"{n} keys and {request.bytes_max} bytes at once; ask for {_KEYS_MAX} keys and {_BYTES_MAX} bytes at most"
        )
    if not -1 <= request.shard < len(shards):
        raise errors.UsageError(f"shard {request.shard}; there are {len(shards)}")
    token = Token.from_bytes(request.token)
    points: list[Point] = []
    states: list[tuple[Shard, Callable[[bytes], Place | None]]] = []
    for shard in shards if request.shard < 0 else (shards[request.shard],):
        if shard.is_active:
            if not shard.dormant_epoch:
                points.append(shard.applied)
            continue
        state = state_at(shard, token.at(shard.number))
        if state is not None:
            points.append(state[0])
            states.append((shard, state[1]))
    found: list[tuple[Shard, Place] | None] = []
    for at in range(0, len(request.keys), KEY_BYTES):
        found.append(_find(states, request.keys[at : at + KEY_BYTES]))
    for shard in {one[0] for one in found if one is not None}:
        shard.busy_until_ns = max(shard.busy_until_ns, now_ns + HOLD_NS)
    places = [Place(0, 0, 0) if one is None else one[1] for one in found]
    return m.FoundAt(
        status=bytes(one is None for one in found),
        offsets=np.array([place.offset for place in places], np.uint64).tobytes(),
        lengths=np.array([place.length for place in places], np.uint32).tobytes(),
        sums=np.array([place.sum for place in places], np.uint64).tobytes(),
        shards=np.array([0 if one is None else one[0].number for one in found], np.uint16).tobytes(),
        token=Token.of(points).to_bytes(),
        values=b"".join(_values(found, segment, request.bytes_max, request.skip)),
    )


def state_at(shard: Shard, asked: Point) -> tuple[Point, Callable[[bytes], Place | None]] | None:
    """A state of a shard that is not in the directory, at `asked` or later, and where values lie in it; None: there is
    none here.
    """
    replica, standby = shard.replica, shard.standby
    if replica.role is Role.FAILED:
        return None
    if replica.can_answer(asked.index):
        if not asked.index and replica.role not in (Role.FOLLOWER, Role.LEADER):
            return None  # it may never have had anything of it
        return shard.applied, standby.place
    first = replica.watermark + 1
    if asked.index - replica.watermark > _REACH or replica.log.epoch_at(asked.index) != asked.epoch:
        return None
    newer: dict[bytes, Place | None] = {}
    for index in range(first, asked.index + 1):
        logged = shard.pending.get(index)
        if logged is None:
            return None
        for at in range(0, len(logged.keys), KEY_BYTES):
            newer[logged.keys[at : at + KEY_BYTES]] = None
        if logged.rows is not None:
            for row in logged.rows:
                is_here = row["region"] != ABSENT_REGION
                place = Place(int(row["offset"]), int(row["length"]), int(row["sum"])) if is_here else None
                newer[row["key"].tobytes()] = place
    return asked, lambda key: newer[key] if key in newer else standby.place(key)


def _find(states: list[tuple[Shard, Callable[[bytes], Place | None]]], key: bytes) -> tuple[Shard, Place] | None:
    for shard, place_of in states:
        place = place_of(key)
        if place is not None:
            return shard, place
    return None


def _values(
    found: list[tuple[Shard, Place] | None], segment: memoryview, bytes_max: int, skip: int
) -> Iterator[memoryview]:
    for number, one in enumerate(found):
        if not bytes_max:
            return
        if one is not None:
            place = one[1]
            begin = min(skip, place.length) if not number else 0
            some = min(bytes_max, place.length - begin)
            yield segment[place.offset + begin : place.offset + begin + some]
            bytes_max -= some
