"""Session tokens: how far in each shard's log a session has seen.

A durable put or delete in a cluster is answered with the entry of its shard's log that made it so, and a read at a
replica with the entry up to which that replica had applied the log. Entries that were committed have one order, whoever
leads, as long as no operator gives the shard a leader that may lack some (`ucxkv elect`): what a session has seen is
told by the greatest index of each shard. A read that names a token is answered by a replica that is at least as far.

A token's bytes, little endian:

| off | size | field |
|---|---|---|
| 0 | 1 | format, 1 |
| 1 | 2 | how many points |
| 3 | 18 each | shard u16, epoch of the entry u64, index u64; shards grow |
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ucxkv.errors import UsageError

__all__ = ["NOTHING_SEEN", "Point", "Seen", "Token"]

_HEAD = struct.Struct("<BH")
_POINT = struct.Struct("<HQQ")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Point:
    """An entry of one shard's log: everything up to it was seen. epoch: of the entry."""

    shard: int
    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Token:
    """What a session has seen. points: one a shard, by shard; a shard that is not named: nothing of it.

    `a <= b`: who has seen b has seen a; tokens of which each is ahead in some shard are neither. `a | b`: both.
    Good in one cluster, for its whole life; another process may use it (`to_bytes`, `from_bytes`).
    """

    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, points: Iterable[Point]) -> Token:
        """The newest of these points of each shard."""
        newest: dict[int, Point] = {}
        for point in points:
            known = newest.get(point.shard)
            if known is None or point.index > known.index:
                newest[point.shard] = point
        return cls(tuple(newest[shard] for shard in sorted(newest)))

    def at(self, shard: int) -> Point:
        """How far in that shard's log: index 0 is before its first entry."""
        return next((point for point in self.points if point.shard == shard), Point(shard, 0, 0))

    def __bool__(self) -> bool:
        return bool(self.points)

    def __or__(self, other: Token) -> Token:
        return Token.of((*self.points, *other.points))

    def __le__(self, other: Token) -> bool:
        theirs = {point.shard: point.index for point in other.points}
        return all(point.index <= theirs.get(point.shard, 0) for point in self.points)

    def __lt__(self, other: Token) -> bool:
        return self <= other and not other <= self

    def __ge__(self, other: Token) -> bool:
        return other <= self

    def __gt__(self, other: Token) -> bool:
        return other < self

    def to_bytes(self) -> bytes:
        """For another process, or to be stored."""
        return _HEAD.pack(_FORMAT, len(self.points)) + b"".join(
            _POINT.pack(point.shard, point.epoch, point.index) for point in self.points
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Token:
        """What `to_bytes` gave. Raises UsageError for anything else."""
        if len(raw) < _HEAD.size:
            raise UsageError(f"a token of {len(raw)} bytes; pass what Token.to_bytes gave")
        version, count = _HEAD.unpack_from(raw)
        if version != _FORMAT or len(raw) != _HEAD.size + count * _POINT.size:
            raise UsageError(f"a token of format {version} in {len(raw)} bytes; pass what Token.to_bytes gave")
        points = tuple(Point(*_POINT.unpack_from(raw, at)) for at in range(_HEAD.size, len(raw), _POINT.size))
        if any(one.shard >= two.shard for one, two in itertools.pairwise(points)):
            raise UsageError("a token whose shards are not in order; pass what Token.to_bytes gave")
        return cls(points)


NOTHING_SEEN = Token()


class Seen:
    """What one session has seen so far: at most one point a shard."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}
        self._token: Token | None = NOTHING_SEEN

    def take(self, points: Iterable[Point]) -> None:
        """The session has seen these, too."""
        for point in points:
            known = self._points.get(point.shard)
            if known is None or point.index > known.index:
                self._points[point.shard] = point
                self._token = None

    @property
    def token(self) -> Token:
        """All of it."""
        if self._token is None:
            self._token = Token.of(self._points.values())
        return self._token
