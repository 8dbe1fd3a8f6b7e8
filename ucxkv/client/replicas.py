"""Reads by a session's token (`after=`): at any replica of the shard that is as far as the token says, nearest first.

Promises
  - What is shown is of a state that holds all that the token names; how far that state was is added to what this client
    has seen, so that with `kv.token` no read goes back behind an earlier one.
  - A replica has the durable blocks alone, so it never makes a miss: what no nearer replica has, the shard's leader is
    asked for, and where there is none, the rest of the replicas; what nobody has then is UNAVAILABLE.
  - Bytes are fetched from a place that stays put for a short while, and are a HIT only with the sum of the log's entry.
  - A node that does not answer in time costs one call `_TRY_S`, and is passed over for `_SLOW_S`.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ucxkv import errors
from ucxkv.buffers import as_destinations
from ucxkv.client.results import GetResult, Match, ReadStatus
from ucxkv.ids import KEY_BYTES
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.tokens import Point, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy.typing as npt

    from ucxkv.buffers import Pieces
    from ucxkv.client.link import NodeLink
    from ucxkv.client.path import U8, U64
    from ucxkv.client.router import Router

    KeyRows = npt.NDArray[np.uint8]
    Indices = npt.NDArray[np.intp]

__all__ = ["AtLeaders", "match_after", "read_after"]

AtLeaders: TypeAlias = "Callable[[KeyRows, Pieces | None], Awaitable[GetResult]]"
"""(keys, destinations, None for values) -> what the leaders have."""

_TRY_S = 0.5
_SLOW_S = 5.0
_KEYS_AT_ONCE = 512
_INLINE_BYTES = 1 << 20
_HOST_TIER = 1
_ANY = -1
_HIT, _MISS, _SIZE = int(ReadStatus.HIT), int(ReadStatus.MISS), int(ReadStatus.SIZE)
_UNAVAILABLE = int(ReadStatus.UNAVAILABLE)


async def read_after(
    router: Router,
    keys: KeyRows,
    root: bytes | None,
    after: Token,
    into: Pieces | None,
    deadline_ns: int,
    at_leaders: AtLeaders,
) -> GetResult:
    """Read n blocks in a state that is not before `after`. root: see `get_many`. Raises UsageError without shards."""
    _check(router, after)
    reads = _Reads(router, keys, root, after, into, deadline_ns)
    near, far = _replicas(router, root)
    for link in near:
        await reads.ask(link)
    left = reads.open
    if len(left):
        found = await at_leaders(keys[left], None if into is None else into.take(left))
        if (found.status == _MISS).any() and not await _note_leaders(router, root, deadline_ns):
            found.status[found.status == _MISS] = _UNAVAILABLE
        reads.take(left, found)
        lost = left[found.status == _UNAVAILABLE]
        if len(lost) and far:
            reads.status[lost] = _MISS
            for link in far:
                await reads.ask(link)
            reads.status[lost[reads.status[lost] == _MISS]] = _UNAVAILABLE
    return GetResult(reads.status, reads.lengths, None if into is not None else reads.values, reads.sources)


async def match_after(
    router: Router, keys: KeyRows, after: Token, deadline_ns: int, at_leader: Callable[[], Awaitable[Match]]
) -> Match:
    """The longest prefix of a chain in a state that is not before `after`. Raises UsageError without shards."""
    _check(router, after)
    root = keys[0].tobytes()
    near, far = _replicas(router, root)
    best = await _longest(router, near, keys, after, deadline_ns)
    if best.blocks == len(keys):
        return best
    match = await at_leader()
    if match.is_certain and (match.blocks == len(keys) or await _note_leaders(router, root, deadline_ns)):
        return match
    other = await _longest(router, far, keys, after, deadline_ns)
    most = max(other, best, match, key=lambda one: one.blocks)
    return dataclasses.replace(most, is_certain=most.blocks == len(keys))


def _check(router: Router, after: Token) -> None:
    if not isinstance(after, Token):
        raise errors.UsageError(f"after={after!r}; pass a ucxkv.Token, such as kv.token")
    if not router.links and not router.shards.count:
        return  # nobody is in reach, whatever they have
    if not router.shards.count:
        raise errors.UsageError(
            "after=, and these nodes are no cluster with a control plane: a block is on one node alone, and every read "
            "shows what was put there; leave after= out"
        )
    if after.points and after.points[-1].shard >= router.shards.count:
        raise errors.UsageError(
            f"a token of shard {after.points[-1].shard}, and this cluster has {router.shards.count}: pass tokens of "
            "this cluster alone"
        )


def _replicas(router: Router, root: bytes | None) -> tuple[list[NodeLink], list[NodeLink]]:
    """Nodes that may follow the chain's shard: those that are nearer than its leader, and the rest."""
    links = [link for link in router.nearest if link is not router.sole]
    if root is None:
        return links, []
    leader = router.home_link(root)
    if leader is None:
        return links, []
    at = links.index(leader) if leader in links else 0
    return links[:at], [link for link in links[at:] if link is not leader]


async def _note_leaders(router: Router, root: bytes | None, deadline_ns: int) -> bool:
    """Note how far the leaders are that have just said what they do not have; False: one cannot be asked any more."""
    shards = set(range(router.shards.count)) if root is None else {router.shards.shard(root)}
    shard = _ANY if root is None else router.shards.shard(root)
    for link in list(router.links.values()):
        mine = {one for one in shards if link.led >> one & 1}
        if mine:
            try:
                answer = await _found(link, b"", Token(), shard, deadline_ns)
            except errors.UcxKvError:
                return False
            points = [point for point in _points(answer, link) if point.shard in mine]
            router.seen.take(points)
            shards.difference_update(point.shard for point in points)
    return not shards


async def _found(
    link: NodeLink, keys: bytes, after: Token, shard: int, deadline_ns: int, *, bytes_max: int = 0, skip: int = 0
) -> m.FoundAt:
    """What the node has of these keys. Raises Unavailable and what the node answers."""
    token = after if shard == _ANY else Token(tuple(point for point in after.points if point.shard == shard))
    answer = await link.ask(m.ReadAt(keys, token.to_bytes(), shard, bytes_max, skip), deadline_ns)
    n = len(keys) // KEY_BYTES
    fits = isinstance(answer, m.FoundAt) and (len(answer.status), len(answer.sums), len(answer.shards)) == (
        n,
        8 * n,
        2 * n,
    )
    if not fits:
        raise errors.Unavailable("the node's answer to a read by token does not fit it", node=link.name)
    assert isinstance(answer, m.FoundAt)
    return answer


def _points(answer: m.FoundAt, link: NodeLink) -> Sequence[Point]:
    try:
        return Token.from_bytes(answer.token).points
    except errors.UsageError as exc:
        raise errors.Unavailable(f"the node's answer names no token: {exc.message}", node=link.name) from exc


def _try_ns(link: NodeLink, deadline_ns: int) -> int | None:
    """Until when to wait for this node; None: not now."""
    now_ns = time.monotonic_ns()
    if not link.is_alive or now_ns < link.slow_until_ns or now_ns >= deadline_ns:
        return None
    return min(now_ns + int(_TRY_S * 1e9), now_ns + (deadline_ns - now_ns) // 2)


def _passed_over(link: NodeLink, exc: errors.UcxKvError) -> None:
    if isinstance(exc, errors.DeadlineExceeded):
        link.slow_until_ns = time.monotonic_ns() + int(_SLOW_S * 1e9)


async def _longest(router: Router, links: list[NodeLink], keys: KeyRows, after: Token, deadline_ns: int) -> Match:
    """The longest prefix that one of these replicas has."""
    shard = router.shards.shard(keys[0].tobytes())
    best = router.loads.match(None, np.zeros(0, np.uint64), np.zeros(0, np.uint8), is_certain=False)
    for link in links:
        sizes: list[int] = []
        points: list[Point] = []
        until_ns = _try_ns(link, deadline_ns)
        try:
            while until_ns is not None and len(sizes) < len(keys):
                some = keys[len(sizes) : len(sizes) + _KEYS_AT_ONCE]
                answer = await _found(link, some.tobytes(), after, shard, until_ns)
                run = answer.status.find(1)
                run = len(some) if run < 0 else run
                sizes += np.frombuffer(answer.lengths, np.uint32)[:run].tolist()
                points += _points(answer, link)
                if run < len(some):
                    break
        except errors.UcxKvError as exc:
            _passed_over(link, exc)
            continue
        if len(sizes) > best.blocks:
            router.seen.take(point for point in points if point.shard == shard)
            tiers = np.full(len(sizes), _HOST_TIER, np.uint8)
            best = router.loads.match(link, np.array(sizes, np.uint64), tiers, is_certain=len(sizes) == len(keys))
        if best.blocks == len(keys):
            break
    return best


class _Reads:
    """The reads of one call, from one replica after the other. open: keys that none had so far, by index."""

    def __init__(
        self, router: Router, keys: KeyRows, root: bytes | None, after: Token, into: Pieces | None, deadline_ns: int
    ) -> None:
        n = len(keys)
        self.status = np.full(n, _MISS, np.uint8)
        self.lengths = np.zeros(n, np.uint64)
        self.values: list[bytes | None] = [None] * n
        self.sources: dict[str, int] = {}
        self._router = router
        self._keys = keys
        self._shard = _ANY if root is None else router.shards.shard(root)
        self._after = after
        self._into = into
        self._deadline_ns = deadline_ns

    @property
    def open(self) -> Indices:
        return np.flatnonzero(self.status == _MISS)

    def take(self, at: Indices, found: GetResult) -> None:
        """These keys were read elsewhere."""
        self.status[at], self.lengths[at] = found.status, found.lengths
        for i, value in zip(at.tolist(), found.values or (), strict=False):
            self.values[i] = value
        for name, hits in found.sources.items():
            self.sources[name] = self.sources.get(name, 0) + hits

    async def ask(self, link: NodeLink) -> None:
        """Read what this node has of the open keys, if it is as far as the token."""
        left = self.open
        for begin in range(0, len(left), _KEYS_AT_ONCE):
            some = left[begin : begin + _KEYS_AT_ONCE]
            until_ns = _try_ns(link, self._deadline_ns)
            if until_ns is None:
                return
            try:
                answer = await _found(link, self._keys[some].tobytes(), self._after, self._shard, until_ns)
                there = np.frombuffer(answer.status, np.uint8) == 0
                if there.any():
                    await self._bring(link, some[there], answer, there)
            except errors.UcxKvError as exc:
                _passed_over(link, exc)
                return

    async def _bring(self, link: NodeLink, at: Indices, answer: m.FoundAt, there: npt.NDArray[np.bool_]) -> None:
        """Read values whose places were told; what has another sum by then stays open."""
        lengths = np.frombuffer(answer.lengths, np.uint32)[there].astype(np.uint64)
        sums = np.frombuffer(answer.sums, np.uint64)[there]
        offsets = np.frombuffer(answer.offsets, np.uint64)[there]
        shards = np.frombuffer(answer.shards, np.uint16)[there]
        into = self._into
        if into is not None:
            fits = into.nbytes[at] == lengths
            self.status[at[~fits]], self.lengths[at[~fits]] = _SIZE, lengths[~fits]
            at, lengths, sums, offsets, shards = at[fits], lengths[fits], sums[fits], offsets[fits], shards[fits]
        if not len(at):
            return
        buffers: list[bytearray] | None = None
        if into is not None and into.is_flat:
            to = into.take(at)
        else:
            buffers = [bytearray(length) for length in lengths.tolist()]
            to = as_destinations(buffers, len(buffers))
        if link.path.fetch is not None:
            got = await link.path.fetch(to, offsets, sums, self._deadline_ns)
        else:
            got = await self._bring_inline(link, at, to, sums)
        is_hit = got == _HIT
        self.status[at[is_hit]], self.lengths[at[is_hit]] = _HIT, lengths[is_hit]
        for row in np.flatnonzero(is_hit).tolist() if buffers is not None else ():
            assert buffers is not None
            if into is None:
                self.values[at[row]] = bytes(buffers[row])
            else:
                _scatter(int(to.addr[row]), into, int(at[row]))
        hits = int(np.count_nonzero(is_hit))
        if hits:
            self.sources[link.name] = self.sources.get(link.name, 0) + hits
            shown = set(shards[is_hit].tolist())
            self._router.seen.take(point for point in _points(answer, link) if point.shard in shown)

    async def _bring_inline(self, link: NodeLink, at: Indices, to: Pieces, sums: U64) -> U8:
        """The values in the answers themselves, for a node whose memory is not in reach. to: one piece a value."""
        got = np.full(len(at), _MISS, np.uint8)
        keys, addresses, sizes = self._keys[at], to.addr.tolist(), to.nbytes.tolist()
        row = skip = 0
        while row < len(at):
            answer = await _found(
                link, keys[row:].tobytes(), self._after, self._shard, self._deadline_ns,
                bytes_max=_INLINE_BYTES, skip=skip,
            )  # fmt: skip
            data, used, first = np.frombuffer(answer.values, np.uint8), 0, (row, skip)
            totals = np.frombuffer(answer.sums, np.uint64)
            for i in range(len(answer.status)):
                if answer.status[i] or totals[i] != sums[row]:  # it is another one by now, or gone
                    used += 0 if answer.status[i] else _brought(answer, i, skip, len(data) - used)
                    row, skip = row + 1, 0
                    continue
                some = min(sizes[row] - skip, len(data) - used)
                if some:
                    tier_copy.engine.copy_sum_at(addresses[row] + skip, data.ctypes.data + used, some)
                skip, used = skip + some, used + some
                if skip < sizes[row]:
                    break
                if tier_copy.engine.sum_at(addresses[row], sizes[row]) == int(sums[row]):
                    got[row] = _HIT
                row, skip = row + 1, 0
            if (row, skip) == first:
                raise errors.Unavailable("the node's answer to a read by token brings no bytes", node=link.name)
        return got


def _brought(answer: m.FoundAt, i: int, skip: int, rest: int) -> int:
    """How many bytes of the i-th key's value an answer has, at most `rest`."""
    return min(rest, max(0, int(np.frombuffer(answer.lengths, np.uint32)[i]) - (skip if not i else 0)))


def _scatter(address: int, into: Pieces, i: int) -> None:
    """Copy a value into the pieces of its destination."""
    for piece in range(int(into.first[i]), int(into.first[i + 1])):
        length = int(into.length[piece])
        tier_copy.engine.copy_sum_at(int(into.addr[piece]), address, length)
        address += length
