"""Real nodes whose directory is cut into shards, led as a test says: a cluster with a control plane, scripted.

A node leads a set of shards in an epoch; of a put whose chain's shard it does not lead it takes the extents back and
answers NotLeader. When the set changes it ends its lease, withdraws the blocks of what it leads no more, goes over to
another epoch and serves again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ucxkv import errors
from ucxkv.directory import FOREVER
from ucxkv.ids import ROOT_KEY
from ucxkv.node import Node, NodeConfig
from ucxkv.node.requests import Requests
from ucxkv.node.session import Session
from ucxkv.protocol import Message, encode
from ucxkv.protocol import messages as m
from ucxkv.sharding import ShardRule
from ucxkv.transport.control import Message as ControlMessage

__all__ = ["RULE", "ShardedNode", "bits", "root_in"]

RULE = ShardRule(8)


def bits(shards: Iterable[int], count: int = RULE.shards) -> bytes:
    """As `Welcome.led` has them."""
    return sum(1 << shard for shard in shards).to_bytes((count + 7) // 8, "little")


def root_in(*shards: int) -> bytes:
    """A fresh key of one of these shards."""
    while RULE.own(key := os.urandom(16)) not in shards:
        pass
    return key


class _ShardedRequests(Requests):
    """Refuses puts of chains whose shard is led elsewhere."""

    def __init__(self, node: ShardedNode, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(node, loop)
        self._sharded = node

    def answer(self, session: Session, request: Message, message: ControlMessage) -> Message | None:
        node = self._sharded
        if not isinstance(request, (m.Put, m.PutPart)):
            return super().answer(session, request, message)
        node.puts.append(request)
        if node.at_put is not None:
            hook, node.at_put = node.at_put, None
            hook(session)
        if node.refusals or not all(RULE.own(root) in node.led for root in node.roots_of(request)):
            node.refusals = max(0, node.refusals - 1)
            self._take_back(session, request.offsets)
            raise errors.NotLeader("this node does not lead the chain's shard")
        if node.gate is not None:
            self._later(message, session, self._gated(session, request, message))
            return None
        return super().answer(session, request, message)

    async def _gated(self, session: Session, request: Message, message: ControlMessage) -> Message:
        assert self._sharded.gate is not None
        await self._sharded.gate.wait()
        answer = super().answer(session, request, message)
        assert answer is not None
        return answer


class ShardedNode(Node):
    """puts: what was asked for, in order. at_put: called once, with the session, before the next put is looked at.
    refusals: so many puts are refused, whatever is led. gate: puts wait for it.
    """

    def __init__(self, name: str, led: Iterable[int], join: Sequence[str] = (), shards: int = RULE.shards) -> None:
        super().__init__(NodeConfig(name=name, listen="127.0.0.1:0", host_bytes=64 << 20, join=tuple(join)))
        self.led, self.shards = frozenset(led), shards
        self.leaders = [name if shard in self.led else "" for shard in range(RULE.shards)]
        self.puts: list[m.Put | m.PutPart] = []
        self.at_put: Callable[[Session], None] | None = None
        self.refusals = 0
        self.gate: asyncio.Event | None = None
        self.roots: dict[bytes, bytes] = {}

    async def start(self) -> ShardedNode:
        """Serve, with requests looked at first."""
        await super().start()
        self._requests = _ShardedRequests(self, asyncio.get_running_loop())
        return self

    def roots_of(self, request: m.Put | m.PutPart) -> list[bytes]:
        """The roots of the chains in it, as far as they are known here."""
        found = []
        for at in range(0, len(request.keys), 16):
            key, parent = request.keys[at : at + 16], request.parents[at : at + 16]
            root = key if parent == ROOT_KEY else self.roots.get(parent)
            if root is not None:
                self.roots[key] = root
                found.append(root)
        return found

    def lead(self, led: Iterable[int]) -> None:
        """Lead these shards and no others, in a new epoch."""
        self.lease_until(0)
        self.led = frozenset(led)
        gone = [key for key, root in self.roots.items() if RULE.own(root) not in self.led]
        self.store.delete(b"".join(gone), time.monotonic_ns())
        for key in gone:
            del self.roots[key]
        self.begin_epoch(self.epoch + 1)
        self.lease_until(FOREVER)

    def members_changed(self) -> None:
        """As a node of a cluster does it: with the leaders."""
        message = m.Members(members=self.peers.members(), leaders=self.leaders)
        for session in list(self.sessions.values()):
            if session.is_open and session.role == "client":
                session.connection.send(message.CODE, encode(message))

    def has(self, key: bytes) -> bool:
        """Whether the block is visible here."""
        return bool(self.store.directory.reader.exists(key)[0])

    def _welcome(self, session: Session) -> m.Welcome:
        plain = super()._welcome(session)
        return msgspec.structs.replace(plain, shards=self.shards, led=bits(self.led), leaders=self.leaders)
