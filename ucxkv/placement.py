"""Which node is the home of a chain, and which nodes hold a block's parts: weighted rendezvous hashing.

Promises of this module: the answer depends on the key, the nodes' names and their weights alone, never on the order
in which the members are listed, nor on the process or the day. When a member joins, only keys that move to it change
their home; when one leaves, only its own keys do. Each node is home of a share of the keys in proportion to its
weight. Parts of one block stand on distinct nodes while there are enough; what one attention reader needs of a block
lies together, on a node that is near it.

Each (key, node) pair has a 64-bit draw: the node's name goes through xxh3-64 once, then two rounds of a 64-bit
finaliser (the one of splitmix64) mix in both halves of the key. The highest draw wins where weights are equal; else
the highest ln(draw) / weight, with the draw as a fraction, as in "Weighted distributed hash tables" (Schindelhauer,
Schomaker, SPAA 2005). `home` in Python integers and `home_indices` in numpy give the same answers. Two machines whose
logarithms differ in the last bit could disagree about one key in 2**50; the cost is a miss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from ucxkv.errors import UsageError
from ucxkv.ids import NodeId
from ucxkv.keys import KeyArray

__all__ = ["Members", "PartGrid", "attention_indices", "home", "home_indices", "part_indices", "part_nodes", "ranking"]

_MASK: Final = (1 << 64) - 1
_MUL_1: Final = 0xBF58476D1CE4E5B9
_MUL_2: Final = 0x94D049BB133111EB


class Members:
    """The nodes among which keys are placed, sorted by name. Immutable.

    nodes: names in order; index arrays of this module point into it. weights: relative shares, e.g. bytes lent.
    Raises UsageError for an empty list, a name that occurs twice, or a weight that is not a positive finite number.
    """

    __slots__ = ("_inverse", "_seed_array", "_seeds", "nodes", "weights")

    def __init__(self, weights: Mapping[NodeId, float] | Iterable[NodeId]) -> None:
        """weights: node name -> weight, or just the names, which then weigh the same."""
        pairs = sorted(weights.items()) if isinstance(weights, Mapping) else sorted((name, 1.0) for name in weights)
        self.nodes: tuple[NodeId, ...] = tuple(name for name, _ in pairs)
        self.weights: tuple[float, ...] = tuple(float(weight) for _, weight in pairs)
        if not pairs:
            raise UsageError("there are no members to place keys on; add a node")
        if len(set(self.nodes)) != len(self.nodes):
            raise UsageError(f"a node name occurs twice among {', '.join(self.nodes)}; names are unique")
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise UsageError(f"member weights are {self.weights}; each is a positive finite number")
        self._seeds = tuple(xxhash.xxh3_64_intdigest(name.encode()) for name in self.nodes)
        self._seed_array = np.array(self._seeds, np.uint64)
        even = len(set(self.weights)) == 1
        self._inverse = None if even else tuple(1.0 / weight for weight in self.weights)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"Members({dict(zip(self.nodes, self.weights, strict=True))})"


def home(root_key: bytes, members: Members) -> NodeId:
    """The node where the chain that starts with `root_key` (16 bytes) lives."""
    if len(members) == 1:
        return members.nodes[0]
    low = int.from_bytes(root_key[:8], "little")
    high = int.from_bytes(root_key[8:], "little")
    draws = [_mix((_mix(low ^ seed) + high) & _MASK) for seed in members._seeds]
    if members._inverse is None:
        return members.nodes[draws.index(max(draws))]
    scores = [math.log(((d >> 11) + 0.5) * 2.0**-53) * inv for d, inv in zip(draws, members._inverse, strict=True)]
    return members.nodes[scores.index(max(scores))]


def home_indices(root_keys: KeyArray, members: Members) -> npt.NDArray[np.intp]:
    """The homes of n root keys, (n, 16) uint8, as indices (n,) into `members.nodes`."""
    if len(members) == 1:
        return np.zeros(len(root_keys), np.intp)
    best: npt.NDArray[np.intp] = np.argmax(_scores(root_keys, members, 0), axis=1)
    return best


def ranking(keys: KeyArray, members: Members) -> npt.NDArray[np.intp]:
    """All members for each of n keys, the best first, as indices (n, members) into `members.nodes`.

    The first is the key's home. A member that joins or leaves changes nothing in the order of the others.
    """
    order: npt.NDArray[np.intp] = np.argsort(_scores(keys, members, 0), axis=1, kind="stable")[:, ::-1]
    return order


def part_indices(keys: KeyArray, parts: int, members: Members) -> npt.NDArray[np.intp]:
    """The nodes that hold the parts of n blocks, as indices (n, parts) into `members.nodes`.

    Parts of one block differ while parts <= members; beyond that every node gets one before any gets its next. Part
    after part takes the best node not yet taken, each with draws of its own, so few parts move when members change.
    """
    if parts < 1:
        raise UsageError(f"parts is {parts}; a block has at least one part")
    n, m = len(keys), len(members)
    out = np.zeros((n, parts), np.intp)
    if m == 1:
        return out
    rows = np.arange(n)
    taken = np.zeros((n, m), np.bool_)
    for part in range(parts):
        if part % m == 0:
            taken[:] = False
        scores = _scores(keys, members, part + 1)
        scores[taken] = -np.inf if scores.dtype == np.float64 else 0
        out[:, part] = np.argmax(scores, axis=1)
        taken[rows, out[:, part]] = True
    return out


@dataclass(frozen=True, slots=True)
class PartGrid:
    """How a block is split: part = layer_group * head_groups + head_group.

    A tensor-parallel rank reads one head group of every layer group: one column of this grid.
    """

    layer_groups: int
    head_groups: int

    def __post_init__(self) -> None:
        if self.layer_groups < 1 or self.head_groups < 1:
            raise UsageError(f"{self.layer_groups} layer groups x {self.head_groups} head groups: at least one of each")

    @property
    def parts(self) -> int:
        """Parts of a block."""
        return self.layer_groups * self.head_groups


def attention_indices(
    keys: KeyArray, grid: PartGrid, members: Members, ways: Sequence[Sequence[int] | None] | None = None
) -> npt.NDArray[np.intp]:
    """The nodes that hold the parts of n blocks, as indices (n, grid.parts) into `members.nodes`, by who reads them.

    All that one rank reads of a block lies on one node, so that it gets it in one batch. ways: for each head group how
    far its reader is from each member, smaller is nearer (the ranks of ways of `transport.ranking`); None where the
    reader isn't known. A known reader's column lies on one of its nearest nodes, chosen by the key among equals, a free
    one first; other columns lie on nodes that hold nothing of the block yet, while there are some. Without ways and
    with one layer group it is `part_indices`.
    """
    n, m, columns = len(keys), len(members), grid.head_groups
    far = list(ways) if ways is not None else [None] * columns
    if len(far) != columns or any(way is not None and len(way) != m for way in far):
        raise UsageError(f"ways: one for each of {columns} head groups, each None or {m} numbers, one for each member")
    out = np.zeros((n, columns), np.intp)
    rows, taken = np.arange(n), np.zeros((n, m), np.bool_)
    for column in sorted(range(columns), key=lambda at: far[at] is None):  # the known first: they can't go elsewhere
        way = far[column]
        near = np.ones(m, np.bool_) if way is None else np.asarray(way) == min(way)
        taken[(taken | ~near).all(axis=1)] = False  # all near are taken: each gets its next
        scores = _scores(keys, members, column + 1)
        scores[taken | ~near] = -np.inf if scores.dtype == np.float64 else 0
        out[:, column] = np.argmax(scores, axis=1)
        taken[rows, out[:, column]] = True
    return np.tile(out, (1, grid.layer_groups))


def part_nodes(key: bytes, parts: int, members: Members) -> list[NodeId]:
    """The nodes that hold the parts of one block, part 0 first; see `part_indices`."""
    row = part_indices(np.frombuffer(key, np.uint8).reshape(1, 16), parts, members)[0]
    return [members.nodes[index] for index in row]


def _scores(keys: KeyArray, members: Members, salt: int) -> npt.NDArray[np.uint64] | npt.NDArray[np.float64]:
    """(n, members) scores, the highest wins: the draws themselves where weights are equal, else logarithms."""
    halves = np.ascontiguousarray(keys).view("<u8")
    seeds = members._seed_array
    if salt:
        seeds = np.array([_mix((seed + salt * _MUL_1) & _MASK) for seed in members._seeds], np.uint64)
    draws = halves[:, :1] ^ seeds
    _mix_array(draws)
    draws += halves[:, 1:]
    _mix_array(draws)
    if members._inverse is None:
        return draws
    fractions = ((draws >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    scores: npt.NDArray[np.float64] = np.log(fractions) * np.array(members._inverse)
    return scores


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL_2) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: npt.NDArray[np.uint64]) -> None:
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MUL_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MUL_2)
    x ^= x >> np.uint64(31)
