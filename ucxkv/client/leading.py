"""Which node leads which shard of the directory, as far as one client has been told. No await.

A cluster with a control plane cuts its directory into shards, each led by one node; a chain lives in the shard of its
root. Elsewhere there are no shards, and none of this is asked.

Promises
  - What a node says of itself, in its Welcome, is exact for everything that it answers in the epoch of that Welcome: a
    key of a shard that it leads then, and that it does not have, is nowhere. Paths refuse answers of another epoch.
  - What nodes say of each other may be old. It chooses between nodes that both say that they lead, and tells of whom to
    ask whether it went over to another epoch; it never makes a node the leader.
  - So a miss is certain when nodes that together lead all shards that the key may be in have answered, in their epochs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ucxkv.errors import Unavailable, UsageError
from ucxkv.sharding import ShardRule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucxkv.keys import KeyArray
    from ucxkv.protocol import messages as m

__all__ = ["ShardMap", "led_shards"]


def led_shards(welcome: m.Welcome) -> int:
    """The shards that the node leads in this epoch, one bit each (bit s: shard s); 0 without shards."""
    return int.from_bytes(welcome.led, "little") & ((1 << min(welcome.shards, 8 * len(welcome.led))) - 1)


class ShardMap:
    """The shards and their leaders, from the words of the nodes. Names are those of nodes with a link."""

    def __init__(self) -> None:
        self.count = 0
        """How many shards the cluster has; 0: none."""
        self._rule = ShardRule(1)
        self._led: dict[str, int] = {}
        self._turn: dict[str, int] = {}
        self._turns = itertools.count(1)
        self._heard: list[str] = []

    def welcomed(self, name: str, welcome: m.Welcome) -> None:
        """A link to this node is open now. Raises Unavailable when its number of shards is not the cluster's.

        A node without shards among others that have them leads none, whatever it holds.
        """
        self.lost(name)
        if welcome.shards != self.count and not self._led:
            self._begin(name, welcome.shards)
        if not welcome.shards:
            return
        if welcome.shards != self.count:
            raise Unavailable(
                f"its cluster has {welcome.shards} shards and that of other nodes {self.count}: connect to the nodes "
                "of one cluster only",
                node=name,
            )
        led = self._led[name] = led_shards(welcome)
        self._turn[name] = next(self._turns)
        self.heard(welcome.leaders)
        self._heard = [name if led >> shard & 1 else heard for shard, heard in enumerate(self._heard)]

    def _begin(self, name: str, shards: int) -> None:
        try:
            self._rule = ShardRule(shards or 1)
        except UsageError as exc:
            raise Unavailable(f"its shards cannot be: {exc}", node=name) from exc
        self.count = shards
        self._heard = [""] * shards

    def heard(self, leaders: Sequence[str]) -> None:
        """A node has said who leads each shard; "" where it does not know. Longer or shorter lists tell as much as
        they have.
        """
        for shard, name in enumerate(leaders[: self.count]):
            if name:
                self._heard[shard] = name

    def lost(self, name: str) -> None:
        """The link to this node ended."""
        self._led.pop(name, None)
        self._turn.pop(name, None)

    def doubt(self, name: str) -> None:
        """This node did not take what a leader takes: prefer another that says it leads, until it is welcomed anew."""
        if name in self._turn:
            self._turn[name] = 0

    def shard(self, root: bytes) -> int:
        """The shard of the chain that starts with `root`; not to be asked without shards."""
        return self._rule.own(root)

    def leader(self, root: bytes) -> str:
        """The node that leads the shard of the chain that starts with `root`, by its own word; "" for none."""
        return self._leader(self._rule.own(root))

    def leaders(self, roots: KeyArray) -> list[str]:
        """`leader` of n roots, u8[n, 16]."""
        shards = self._rule.own_many(roots).tolist()
        known = {shard: self._leader(shard) for shard in set(shards)}
        return [known[shard] for shard in shards]

    def _leader(self, shard: int) -> str:
        say_so = [name for name, led in self._led.items() if led >> shard & 1]
        if len(say_so) < 2:
            return say_so[0] if say_so else ""
        heard = self._heard[shard]
        if heard in say_so and self._turn[heard]:
            return heard
        return max(say_so, key=self._turn.__getitem__)

    def covers(self, led: Iterable[int], root: bytes | None = None) -> bool:
        """Whether nodes that led these shards, together, know where every key is; with root: every key of its chain.
        True without shards.
        """
        if not self.count:
            return True
        union = 0
        for some in led:
            union |= some
        if root is not None:
            return bool(union >> self._rule.own(root) & 1)
        return union == (1 << self.count) - 1

    def behind(self) -> set[str]:
        """Nodes of which the latest word is not what they said themselves when they welcomed this client."""
        found = set()
        for shard, leader in enumerate(self._heard):
            if leader:
                found |= {name for name, led in self._led.items() if (led >> shard & 1) != (name == leader)}
        return found

    def leads(self, name: str) -> int:
        """How many shards this node leads, by its own word; without a link to it, by that of others."""
        led = self._led.get(name)
        return self._heard.count(name) if led is None else led.bit_count()
