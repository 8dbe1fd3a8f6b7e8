"""In which shard of the directory a block lives, and on which nodes a shard does: the rule all sides share, as code.

A root lives in the shard of its own key. A child lives where its parent lives, so that one log orders a chain and one
message answers it, with two exceptions, after which it lives in the shard of its *own* key:

  delegation   its parent has `fanout` children in its shard already, or a child elsewhere: the end of a common head. A
               block that has had a child elsewhere *delegates* until it goes, so the set of its local children only
               shrinks from then on.
  cut          its own key says so, one key in `cut_blocks`: no long chain stays in one shard, and nobody has to count
               depth. A cut block is never in another shard than its key's.

So a block is in one of two places, its parent's shard or its own key's, and whoever has seen the parent knows which to
ask: the shard that holds the parent, then, if the parent delegates or the block is a cut, the shard of the block's key.

Promises: everything here is a function of keys, names, weights and the rule, the same in every process. The number of
shards is fixed for a cluster and a power of two: with twice as many, shard s splits into s and s + shards. A node that
joins takes shards from others and moves none between them; one that leaves gives up its own and no other moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ucxkv.errors import UsageError
from ucxkv.ids import NodeId
from ucxkv.keys import KeyArray
from ucxkv.placement import Members, ranking

__all__ = ["ShardRule", "holders", "leaders", "levelled"]

_MASK: Final = (1 << 64) - 1
_SEED: Final = 0x9E6C63D0876A3F35  # apart from the draws of placement.py and from the slot table's hash
_MUL_1: Final = 0xFF51AFD7ED558CCD
_MUL_2: Final = 0xC4CEB9FE1A85EC53
_SHARDS_MAX: Final = 1 << 16
_CUT_MAX: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class ShardRule:
    """The rule's numbers; see the module. One for a cluster, for ever: blocks are found by it.

    shards: how many there are. fanout: children that stay with their parent before it delegates; 4 keeps second and
    third answers local and cuts at a real head. cut_blocks: mean length of an unbroken chain. All measured in
    docs/sharding.md. Raises UsageError for numbers that are no rule.
    """

    shards: int = 64
    fanout: int = 4
    cut_blocks: int = 4096

    def __post_init__(self) -> None:
        for name, most in (("shards", _SHARDS_MAX), ("cut_blocks", _CUT_MAX)):
            value = getattr(self, name)
            if not 1 <= value <= most or value & (value - 1):
                raise UsageError(f"{name} is {value}; it is a power of two from 1 to {most}")
        if self.fanout < 1:
            raise UsageError(f"fanout is {self.fanout}; at least one child stays with its parent")

    def own(self, key: bytes) -> int:
        """The shard of this key (16 bytes): where a block lives that is a root, delegated or a cut."""
        return _draw(key) & (self.shards - 1)

    def is_cut(self, key: bytes) -> bool:
        """Whether a block of this key always lives in its own shard."""
        return self.cut_blocks > 1 and self.shards > 1 and not (_draw(key) >> 32) & (self.cut_blocks - 1)

    def own_many(self, keys: KeyArray) -> npt.NDArray[np.intp]:
        """`own` of n keys, (n, 16) uint8."""
        return (_draws(keys) & np.uint64(self.shards - 1)).astype(np.intp)

    def cuts(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """`is_cut` of n keys."""
        if self.cut_blocks == 1 or self.shards == 1:
            return np.zeros(len(keys), np.bool_)
        found: npt.NDArray[np.bool_] = (_draws(keys) >> np.uint64(32)) & np.uint64(self.cut_blocks - 1) == 0
        return found

    def delegates(self, children: int, has_elsewhere: bool) -> bool:
        """Whether a block's next child goes to the shard of its own key.

        children: of those that live with the block, how many there are, visible or being written. has_elsewhere:
        whether it has had a child in another shard.
        """
        return has_elsewhere or children >= self.fanout

    def child(self, key: bytes, parent_shard: int, is_delegating: bool) -> int:
        """Where a new child lives whose parent is in `parent_shard`."""
        return self.own(key) if is_delegating or self.is_cut(key) else parent_shard


def leaders(shards: int, members: Members) -> list[NodeId]:
    """The node where each shard's leader belongs, by weighted rendezvous: index = shard."""
    order = ranking(_shard_keys(shards), members)
    return [members.nodes[index] for index in order[:, 0]]


def levelled(current: Sequence[NodeId | None], members: Members) -> list[NodeId]:
    """The leaders of all shards, as evenly as whole shards allow, with the fewest moves from `current`.

    current: index = shard; None, or a node that is no member: to be given away. Each node gets its share by weight,
    rounded down or up. Where rendezvous alone leaves the busiest of 16 nodes with twice the mean of 64 shards, this
    costs a state, which the control plane keeps anyway: the map itself.
    """
    shards = len(current)
    total = sum(members.weights)
    shares = [shards * weight / total for weight in members.weights]
    least = {node: math.floor(share) for node, share in zip(members.nodes, shares, strict=True)}
    most = {node: math.ceil(share) for node, share in zip(members.nodes, shares, strict=True)}
    order = [[members.nodes[index] for index in row] for row in ranking(_shard_keys(shards), members).tolist()]
    held: dict[NodeId, list[int]] = {node: [] for node in members.nodes}
    loose: list[int] = []
    for shard, node in enumerate(current):
        (held[node] if node is not None and node in held else loose).append(shard)
    for node, mine in held.items():
        mine.sort(key=lambda shard, node=node: order[shard].index(node))  # type: ignore[misc]  # what it wants most stays
        loose += mine[most[node] :]
        del mine[most[node] :]
    short = sum(max(0, least[node] - len(mine)) for node, mine in held.items())
    while short > len(loose):
        loose.append(max(held.items(), key=lambda item: len(item[1]) - least[item[0]])[1].pop())
    for shard in sorted(loose):
        floors = least if short else most
        node = next(node for node in order[shard] if len(held[node]) < floors[node])
        held[node].append(shard)
        short = max(0, short - 1)
    leader = {shard: node for node, mine in held.items() for shard in mine}
    return [leader[shard] for shard in range(shards)]


def holders(
    shards: int, members: Members, copies: int, domains: Mapping[NodeId, tuple[str, ...]] | None = None
) -> list[list[NodeId]]:
    """The nodes that hold each shard, the leader first, then replicas: `copies` in all, fewer where there are not so
    many members. Index = shard.

    domains: where a node stands, the widest name first, e.g. (rack, host) or (host,). Each replica is the best node
    that shares no rack with those chosen; else the best that shares no host; else the best.
    """
    if copies < 1:
        raise UsageError(f"copies is {copies}; a shard is on one node at least")
    places = domains or {}
    order = ranking(_shard_keys(shards), members)
    found = []
    for row in order.tolist():
        left = [members.nodes[index] for index in row]
        chosen = [left.pop(0)]
        while left and len(chosen) < copies:
            shared = [max(_shared(places, one, other) for other in chosen) for one in left]
            chosen.append(left.pop(shared.index(min(shared))))
        found.append(chosen)
    return found


def _shared(domains: Mapping[NodeId, tuple[str, ...]], one: NodeId, other: NodeId) -> int:
    """How many domains two nodes share, from the widest on: 0 = not even the rack."""
    pairs = list(zip(domains.get(one, (one,)), domains.get(other, (other,)), strict=False))
    return next((at for at, (first, second) in enumerate(pairs) if first != second), len(pairs))


def _shard_keys(shards: int) -> KeyArray:
    words = np.zeros((shards, 2), "<u8")
    words[:, 0], words[:, 1] = np.arange(shards), _SEED
    return words.view(np.uint8)


def _draw(key: bytes) -> int:
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    return _mix((_mix(low ^ _SEED) + high) & _MASK)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 33)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 33)) * _MUL_2) & _MASK
    return x ^ (x >> 33)


def _draws(keys: KeyArray) -> npt.NDArray[np.uint64]:
    halves = np.ascontiguousarray(keys).view("<u8")
    draws: npt.NDArray[np.uint64] = halves[:, 0] ^ np.uint64(_SEED)
    _mix_array(draws)
    draws += halves[:, 1]
    _mix_array(draws)
    return draws


def _mix_array(x: npt.NDArray[np.uint64]) -> None:
    x ^= x >> np.uint64(33)
    x *= np.uint64(_MUL_1)
    x ^= x >> np.uint64(33)
    x *= np.uint64(_MUL_2)
    x ^= x >> np.uint64(33)
