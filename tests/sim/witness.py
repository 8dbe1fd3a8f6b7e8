"""What is checked while a cluster runs, from outside, with knowledge that no node has.

Invariants, after every event of every node:
  I1  prefix closed: no record of a committed log puts a block below nothing or takes one from under another.
  I3  one leader: whenever a node may serve, no other living process may under another epoch, by its own clock.
  I4  no fork: an index has one entry, whoever applies it, whenever; a snapshot is the state of its index; the
      watermark of a process never goes back.
And for sessions: what a node answers to a token is the state of the index that it says, at or after the token's."""

from __future__ import annotations

from typing import Protocol

from tests.sim.loop import SimLoop
from tests.sim.machine import Chains, Contents
from tests.sim.process import Process
from ucxkv.replication import Entry

__all__ = ["Server", "Witness"]


class Server(Protocol):
    """What the witness sees of a node."""

    process: Process

    @property
    def epoch(self) -> int:
        """Of its replica."""
        ...

    @property
    def serve_until_ns(self) -> int:
        """Of its replica."""
        ...

    @property
    def watermark(self) -> int:
        """Of its replica."""
        ...


class Witness:
    """violations: what was seen that must never be. reference: the one log that all must agree on, as a state."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.violations: list[str] = []
        self.reference = Chains()
        self._entries: list[Entry] = []
        self._serving: dict[str, tuple[Server, int, int]] = {}
        self.restores = 0
        self._watermarks: dict[str, int] = {}

    def complain(self, what: str) -> None:
        """A violation."""
        self.violations.append(f"at {self._loop.now_ns / 1e6:.3f} ms: {what}")

    def applied(self, name: str, entry: Entry) -> None:
        """A node applied an entry."""
        at = entry.index - 1
        if at < len(self._entries):
            if self._entries[at] != entry:
                self.complain(f"I4: {name} applied {entry}, another node {self._entries[at]}")
            return
        if at > len(self._entries):
            self.complain(f"I4: {name} applied entry {entry.index}; nobody applied {len(self._entries) + 1}")
            return
        self._entries.append(entry)
        complaint = self.reference.apply(entry)
        if complaint is not None:
            self.complain(complaint)

    def restored(self, name: str, index: int, epoch: int, state: dict[str, Contents]) -> None:
        """A node took a snapshot, or started from one."""
        self.restores += 1
        if index > len(self._entries):
            self.complain(f"I4: {name} restored index {index}, nobody applied more than {len(self._entries)}")
        elif index and self._entries[index - 1].epoch != epoch:
            self.complain(f"I4: {name} restored ({index}, {epoch}), that entry is {self._entries[index - 1]}")
        else:
            for chain in sorted({*state, *self.reference.state()}):
                if state.get(chain, ()) != self.reference.at(chain, index):
                    self.complain(f"I4: {name} restored {chain} as {state.get(chain)} at {index}")

    def settled(self, node: Server) -> None:
        """A node handled an event: may it serve, and may nobody else?"""
        name = node.process.name
        watermark = node.watermark
        if watermark < self._watermarks.get(name, 0):
            self.complain(f"I4: the watermark of {name} went back from {self._watermarks[name]} to {watermark}")
        self._watermarks[name] = watermark
        until_ns = node.serve_until_ns
        name = node.process.host_name
        if not until_ns:
            self._serving.pop(name, None)
            return
        known = self._serving.get(name)
        if known is not None and known[0] is node and known[1] == until_ns and known[2] == node.epoch:
            return
        self._serving[name] = (node, until_ns, node.epoch)
        now_ns = self._loop.now_ns
        if node.process.now_ns() >= until_ns:
            return
        for other, other_until_ns, epoch in self._serving.values():
            if other is node or other.process.dead or epoch == node.epoch:
                continue
            if other.process.clock.local_ns(now_ns) < other_until_ns:
                self.complain(
                    f"I3: {node.process.name} serves in epoch {node.epoch}, {other.process.name} still may in {epoch}"
                )

    def answered(self, who: str, chain: str, index: int, after: int, contents: Contents, limit: int) -> None:
        """A reader with a token was answered as of `index`."""
        if index < after:
            self.complain(f"session: {who} asked {chain} after {after} and was answered as of {index}")
        if index > len(self._entries):
            self.complain(f"session: {who} was answered as of {index}, nobody applied more than {len(self._entries)}")
        elif contents != self.reference.at(chain, index)[:limit]:
            expected = self.reference.at(chain, index)[:limit]
            self.complain(f"session: {who} read {chain} as {contents} at {index}, where it is {expected}")
