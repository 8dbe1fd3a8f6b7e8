"""What the client's calls answer: plain values, one status a key."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucxkv.directory import DeleteStatus, PutStatus, ReadStatus
from ucxkv.errors import Overloaded, Unavailable, UsageError
from ucxkv.tokens import NOTHING_SEEN, Token

if TYPE_CHECKING:
    from collections.abc import Iterable

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

__all__ = [
    "ConnectionInfo",
    "DeleteStatus",
    "GetResult",
    "KeyInfo",
    "Match",
    "NodeStatus",
    "Part",
    "PeerInfo",
    "PutResult",
    "PutStatus",
    "ReadStatus",
]

_STORED_OR_ALREADY = (PutStatus.STORED, PutStatus.ALREADY, PutStatus.SEALED)


_IS_IN = frozenset(int(status) for status in _STORED_OR_ALREADY)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a block a call moves: `index` of `count`, as a tensor-parallel rank does.

    put_id: the same number for all parts of one put (a request id); parts of different puts never mix in one block.
    """

    index: int
    count: int
    put_id: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 255 or not 0 <= self.index < self.count:
            raise UsageError(
                f"Part(index={self.index}, count={self.count}): index must be in 0..count-1 and count in 1..255"
            )


@dataclass(frozen=True, slots=True)
class PutResult:
    """One PutStatus a key, in the order of the call.

    token: all that the client has seen in the cluster's logs by then, its durable blocks of this call among it: a read
    `after` it shows them. Blocks of the cache class are in no log.

    With `part`, SEALED: this part is in. The block becomes visible when all its parts and those of the blocks before
    it in the chain are in, at the latest at the deadline of the put that began it; else it is dropped, as a whole.
    """

    status: U8
    token: Token = NOTHING_SEEN

    @property
    def stored(self) -> int:
        """Blocks that this call made visible, without SEALED ones that only waited for one of them."""
        return int(np.count_nonzero(self.status == PutStatus.STORED))

    @property
    def ok(self) -> bool:
        """True when every block is in the store now (or its part is), whoever wrote it."""
        if not self.status.any():  # STORED is 0
            return True
        return set(self.status.tolist()) <= _IS_IN

    def raise_for_status(self) -> PutResult:
        """Return self when `ok`; else raise UsageError (ORDER), Overloaded (BUSY, NO_SPACE) or Unavailable for the
        first failure.
        """
        for i, value in enumerate(self.status.tolist()):
            status = PutStatus(value)
            if status in _STORED_OR_ALREADY:
                continue
            where = f"block {i} of {len(self.status)}"
            if status is PutStatus.ORDER:
                raise UsageError(f"{where}: its parent is not visible; put the parent first")
            if status is PutStatus.UNAVAILABLE:
                raise Unavailable(f"{where}: its node is gone or did not answer in time; recompute, or put again later")
            raise Overloaded(f"{where}: {status.name}; retry after a short wait")
        return self


@dataclass(frozen=True, slots=True)
class GetResult:
    """One ReadStatus a key; only a HIT's bytes are defined.

    lengths: u64[n], bytes of the stored value where known. values: bytes (None unless HIT) when the call had no `into`.
    sources: hits by node name.
    """

    status: U8
    lengths: U64
    values: list[bytes | None] | None = None
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """Number of keys answered with verified bytes."""
        return len(self.status) - int(np.count_nonzero(self.status))  # HIT is 0

    @property
    def nbytes(self) -> int:
        """Verified bytes delivered."""
        hits = self.status == 0  # HIT
        return int(self.lengths[hits].sum())

    @property
    def leading(self) -> int:
        """Length of the leading run of hits: what an engine may use of a prefix."""
        misses = np.flatnonzero(self.status != ReadStatus.HIT)
        return int(misses[0]) if len(misses) else len(self.status)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest visible prefix of a chain.

    blocks: its length. tiers: u8[blocks] (0 = gpu, 1 = host, 2 = nvme: brought to memory first). load_s: f64[blocks],
    seconds to load each as one of many, as this client's reads of that node and tier went so far (`client.loadcosts`).
    is_certain: False when a node that may hold more of it did not answer; what is named was there all the same.
    nbytes: u64[blocks], the stored sizes; empty where they were not asked for. node: who holds it; "" for nobody.
    """

    blocks: int
    tiers: U8
    load_s: npt.NDArray[np.float64]
    is_certain: bool = True
    nbytes: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    node: str = ""


class PathKind(enum.StrEnum):
    """How this client reads a node's memory."""

    MAPPED = "mapped"
    RMA = "rma"
    MESSAGE = "message"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One node as this client sees it; `why` says why the path was chosen, or why the node is not reachable.

    way: where it is, seen from here: "same process", "same host", "same rail", "cross rail" or "TCP"; "" unreachable.
    leads: shards of the directory that it leads, by its own word or, unreachable, that of others; 0 without shards.
    """

    name: str
    address: str
    path: PathKind
    why: str
    alive: bool
    way: str = ""
    leads: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """One connection of a node, as that node knows it.

    node: the node's name; name: the peer's (a client's host:pid); role: "client" or "node"; is_local: whether it is on
    the node's host; path: a PathKind, or "control" for a node's link, which moves no bytes; way and why as in PeerInfo.
    """

    node: str
    name: str
    role: str
    is_local: bool
    path: str
    way: str
    why: str


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One visible block."""

    key: bytes
    nbytes: int
    tier: int
    parts: int
    node: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's report. numbers: levels and totals by name (see docs/metrics.md); facts: texts such as the page kind."""

    name: str
    address: str
    version: str
    epoch: int
    uptime_s: float
    numbers: dict[str, float]
    facts: dict[str, str]

    def __getattr__(self, name: str) -> float:
        try:
            return self.numbers[name]
        except KeyError:
            raise AttributeError(f"a node reports no {name!r}; known: {', '.join(sorted(self.numbers))}") from None


def merged_sources(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Hits by node over several answers."""
    total: dict[str, int] = {}
    for part in parts:
        for name, hits in part.items():
            total[name] = total.get(name, 0) + hits
    return total
