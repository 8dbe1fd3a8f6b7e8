"""Links between simulated processes: delay, loss, duplication, reordering, partitions, all from one seed.

A message is encoded to bytes when it is sent and decoded when it arrives: two processes never share an object. An
ordered link (a connection) delivers in order and at most once; an unordered one (datagrams) may reorder and duplicate.
A link that is cut, at the moment of sending or of delivery, swallows the message; cuts are one-way. A lost message on
an ordered link with `breaks` breaks the connection: what was in flight both ways is gone, and both ends are told.
Messages to a process that died are gone, also when another one came up in its place, except that an unordered link may
deliver them to the newcomer."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.sim.loop import SimLoop
from tests.sim.process import Process

__all__ = ["Link", "Network"]

MICROSECOND = 1_000


def pickled(message: Any) -> bytes:
    """The plain way to bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Link:
    """What a link does to its messages. Chances are between 0 and 1."""

    delay_min_ns: int = 20 * MICROSECOND
    delay_max_ns: int = 200 * MICROSECOND
    drop: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    late_max_ns: int = 0
    is_ordered: bool = True
    breaks: bool = True


@dataclass(slots=True)
class Port:
    """Where a process receives. broken: told with the peer's name when a connection to it broke."""

    process: Process
    receive: Callable[[str, Any], None]
    broken: Callable[[str], None] | None


class Network:
    """All links. `send` never fails and never waits: the sender learns nothing."""

    def __init__(
        self, loop: SimLoop, seed: int = 0, *, link: Link | None = None,
        encode: Callable[[Any], bytes] = pickled, decode: Callable[[bytes], Any] = pickle.loads,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.default = link or Link()
        self.links: dict[tuple[str, str], Link] = {}
        self.counts: Counter[str] = Counter()
        self._random = random.Random(f"network {seed}")
        self._encode = encode
        self._decode = decode
        self._ports: dict[str, Port] = {}
        self._cut: set[tuple[str, str]] = set()
        self._last_ns: dict[tuple[str, str], int] = {}
        self._connection: dict[tuple[str, str], int] = {}

    # ---- wiring

    def attach(
        self, name: str, process: Process, receive: Callable[[str, Any], None],
        broken: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """`process` receives what is sent to `name`; connections of an earlier process there are over."""
        self._ports[name] = Port(process, receive, broken)

    def link(self, source: str, destination: str) -> Link:
        """What the link does now."""
        return self.links.get((source, destination), self.default)

    def shape(self, source: str, destination: str, **changes: Any) -> None:
        """Change one direction of a link."""
        self.links[source, destination] = replace(self.link(source, destination), **changes)

    # ---- partitions

    def cut(self, source: str, destination: str) -> None:
        """Messages of this direction are swallowed until `heal`."""
        self._cut.add((source, destination))
        self.counts["cuts"] += 1

    def cut_both(self, one: str, other: str) -> None:
        """Cut both directions."""
        self.cut(one, other)
        self.cut(other, one)

    def isolate(self, name: str, others: Iterable[str]) -> None:
        """Cut `name` from all others, both ways."""
        for other in others:
            if other != name:
                self.cut_both(name, other)

    def heal(self, source: str, destination: str) -> None:
        """This direction works again."""
        self._cut.discard((source, destination))

    def heal_all(self) -> None:
        """No cut is left."""
        self._cut.clear()

    def is_cut(self, source: str, destination: str) -> bool:
        """Whether this direction is cut."""
        return (source, destination) in self._cut

    def flap(self, source: str, destination: str, period_ns: int, times: int) -> None:
        """Cut and heal this direction `times` times, each for half of `period_ns`, from now on."""
        for turn in range(times):
            start_ns = self.loop.now_ns + turn * period_ns
            self.loop.at(start_ns, self.cut, (source, destination))
            self.loop.at(start_ns + period_ns // 2, self.heal, (source, destination))

    # ---- messages

    def send(self, source: str, destination: str, message: Any) -> None:
        """Send it on its way, or not."""
        way = (source, destination)
        self.counts["sent"] += 1
        if way in self._cut:
            self.counts["swallowed"] += 1
            return
        port = self._ports.get(destination)
        if port is None:
            self.counts["nobody"] += 1
            return
        data = self._encode(message)
        link = self.links.get(way, self.default)
        chance = self._random.random
        if link.drop and chance() < link.drop:
            self.counts["dropped"] += 1
            if link.is_ordered and link.breaks:
                self.break_connection(source, destination)
            return
        copies = 1
        if link.duplicate and not link.is_ordered and chance() < link.duplicate:
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            due_ns = self.loop.now_ns + link.delay_min_ns + int(chance() * (link.delay_max_ns - link.delay_min_ns))
            if link.late and chance() < link.late:
                self.counts["late"] += 1
                due_ns += int(chance() * link.late_max_ns)
            if link.is_ordered:
                due_ns = max(due_ns, self._last_ns.get(way, -1) + 1)
                self._last_ns[way] = due_ns
                target = port.process
                connection = self._connection.get(_pair(source, destination), 0)
            else:
                target, connection = None, 0
            self.loop.at(due_ns, self._arrive, (way, data, target, connection))

    def _arrive(self, way: tuple[str, str], data: bytes, target: Process | None, connection: int) -> None:
        port = self._ports[way[1]]
        if way in self._cut:
            self.counts["swallowed"] += 1
            return
        if target is not None and (target is not port.process or connection != self._connection.get(_pair(*way), 0)):
            self.counts["disconnected"] += 1
            return
        if port.process.dead:
            self.counts["dead"] += 1
            return
        self.counts["delivered"] += 1
        self._hand(port.process, port.receive, way[0], self._decode(data))

    def break_connection(self, one: str, other: str) -> None:
        """What is in flight between the two is gone; each end is told if it can be reached."""
        pair = _pair(one, other)
        self._connection[pair] = self._connection.get(pair, 0) + 1
        self.counts["broken"] += 1
        for name, peer in ((one, other), (other, one)):
            port = self._ports.get(name)
            if port is not None and port.broken is not None and not port.process.dead:
                self._hand(port.process, port.broken, peer)

    def _hand(self, process: Process, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback` as the process: now, or when it wakes."""
        self.loop.soon(callback, args, process.context, process)


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)
