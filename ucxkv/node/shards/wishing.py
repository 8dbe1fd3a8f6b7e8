"""Which nodes are to hold which shard, as every node works it out from the cluster's records alone.

A node that is away for less than `_AWAY_S` keeps its place: a restart moves nothing. A draining node has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucxkv.ids import NodeId
from ucxkv.placement import Members
from ucxkv.replication import Member
from ucxkv.sharding import holders

if TYPE_CHECKING:
    from ucxkv.control.cluster import ClusterView
    from ucxkv.control.records import ClusterRecord
    from ucxkv.replication import Replica

__all__ = ["Wishes", "waiting_for"]

_AWAY_NS = 15_000_000_000
_SETTLED_NS = 3_000_000_000


class Wishes:
    """See the module; one node's picture of it."""

    def __init__(self, record: ClusterRecord) -> None:
        self._shards = record.shards
        self._replicas = record.replicas
        self._seen: dict[str, tuple[int, float]] = {}
        self._names: tuple[tuple[str, float], ...] = ()
        self._wishes: list[tuple[str, ...]] = [()] * record.shards
        self._changed_ns = 0

    def of(self, view: ClusterView, now_ns: int) -> list[tuple[str, ...]]:
        """By shard: the names of the nodes that are to hold it, best leader first."""
        for record in view.members:
            self._seen[record.name] = (now_ns, record.weight)
        here = {
            name: weight
            for name, (seen_ns, weight) in sorted(self._seen.items())
            if name not in view.draining and now_ns - seen_ns < _AWAY_NS
        }
        names = tuple(here.items())
        if names != self._names:
            self._names, self._changed_ns = names, now_ns
            found = holders(self._shards, Members({NodeId(n): w for n, w in names}), self._replicas) if names else []
            self._wishes = [tuple(some) for some in found] or [()] * self._shards
        return self._wishes

    def is_heir_due(self, replica: Replica, view: ClusterView, now_ns: int) -> bool:
        """Whether a leader is to hand over: another is wished for, in sync, there, and nothing is on its way."""
        leading, config = replica.leading, replica.config.value
        if leading is None or config is None or leading.is_leaving or not leading.is_ready or not replica.wish:
            return False
        if replica.wish[0] == replica.me.name or now_ns - self._changed_ns < _SETTLED_NS:
            return False
        if replica.log.last_index != replica.watermark:
            return False
        alive = {Member(record.name, record.incarnation) for record in view.members}
        return any(member.name == replica.wish[0] and member in alive for member in config.insync)


def waiting_for(view: ClusterView) -> str:
    """Which shards wait for a holder, and for whom; "ok" when none does. For the report."""
    alive = {(record.name, record.incarnation) for record in view.members}
    lost = {
        number: sorted({member.name for member in config.insync})
        for number, (config, _) in sorted(view.shards.items())
        if alive.isdisjoint(config.insync)
    }
    if not lost:
        return "ok"
    some = "; ".join(f"shard {number}: {' or '.join(names)}" for number, names in list(lost.items())[:4])
    return f"{len(lost)} wait for a node that has all of them ({some}); start it, or see `ucxkv elect`"
