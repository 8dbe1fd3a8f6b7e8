"""A node's part in a cluster with a control plane: its registration, and the shards of the directory that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from ucxkv import errors
from ucxkv.node.membership import NO_CLUSTER, Membership
from ucxkv.node.peers import check_member
from ucxkv.node.shards import Shards
from ucxkv.replication import Member
from ucxkv.sharding import ShardRule

if TYPE_CHECKING:
    from ucxkv.control.cluster import ClusterView
    from ucxkv.control.records import MemberRecord
    from ucxkv.node.node import Node
    from ucxkv.node.shards.recovery import ShardRecovery
    from ucxkv.protocol import messages as m

__all__ = ["NO_NUMBERS", "Clustering"]

NO_NUMBERS: Final[dict[str, float]] = {
    **NO_CLUSTER,
    **dict.fromkeys(("shards", "shards_led", "shards_followed", "standby_blocks", "shard_lag_records"), 0.0),
}
"""The numbers of a node without a cluster."""

log = structlog.get_logger("ucxkv.node")


class Clustering:
    """See the module; `membership` listens here. `start` once the node serves its listener, `aclose` before its store
    is closed.
    """

    def __init__(self, node: Node, own: m.MemberInfo, recovery: ShardRecovery | None) -> None:
        config = node.config
        self._node = node
        self._recovery = recovery
        self._member = Member(own.name, 0)
        self._lease_ns = 0
        self.shards: Shards | None = None
        self.membership = Membership(
            config.cluster, own, config.cluster_lease_ms / 1e3, self,
            rule=ShardRule(shards=config.cluster_shards), replicas=config.replicas,
        )  # fmt: skip

    async def start(self) -> None:
        """Register, and take part. Raises SetupError, Unavailable."""
        await self.membership.start()
        cluster = self.membership.cluster
        view = await cluster.view()
        self.shards = Shards(self._node, cluster, self._member, self._recovery, view)
        self.shards.start(self._recovery.log_bytes if self._recovery is not None else 0)
        self.on_lease(self._lease_ns)

    @property
    def keeps_durable(self) -> bool:
        """Whether durable puts are taken: by a journal, or by the memories of several nodes."""
        return self._recovery is not None or self.membership.cluster.record.replicas > 1

    # ---- what membership tells

    def on_lease(self, until_ns: int) -> None:
        """See MembershipListener: the node serves as long as its registration holds."""
        self._lease_ns = until_ns
        if self._node.is_open and self.shards is not None:
            self.shards.on_lease(until_ns)

    def on_incarnation(self, record: MemberRecord, others_between: bool) -> None:
        """See MembershipListener: what another process may have answered under this name was of an epoch before."""
        self._member = Member(record.name, record.incarnation)
        if self.shards is not None:
            self.shards.reincarnated(self._member)
        if others_between:
            self._node.begin_epoch(self._node.epoch + 1)

    def on_view(self, view: ClusterView) -> None:
        """See MembershipListener: links to all the others, and who holds what."""
        for record in view.members:
            if record.name != self._node.config.name:
                self._node.spawn(self._link(record.info))
        if self.shards is not None:
            self.shards.on_view(view)

    async def _link(self, member: m.MemberInfo) -> None:
        try:
            check_member(member)
            await self._node.peers.add(member, has_name=True)
        except errors.UcxKvError as exc:
            log.warning("peer.refused", node=member.name, why=str(exc))

    # ---- reports, the end

    def numbers(self) -> dict[str, float]:
        """For the report."""
        return {**NO_NUMBERS, **self.membership.numbers(), **(self.shards.numbers() if self.shards is not None else {})}

    def facts(self) -> dict[str, str]:
        """For the report."""
        return {**self.membership.facts(), **(self.shards.facts() if self.shards is not None else {})}

    async def leave(self) -> None:
        """Give the registration up: others take over. Idempotent."""
        await self.membership.aclose()

    async def aclose(self) -> None:
        """Let everything go. Idempotent."""
        if self.shards is not None:
            await self.shards.aclose()
