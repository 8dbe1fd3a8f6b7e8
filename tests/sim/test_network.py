"""The simulated network: order, loss, copies, cuts, and what befalls messages to the dead and the sleeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.loop import SECOND, SimLoop
from tests.sim.network import Link, Network
from tests.sim.process import Host, Process

MS = 1_000_000


class Rig:
    """Two hosts, a and b; what each received, and who was told of a broken connection."""

    def __init__(self, link: Link, seed: int = 0) -> None:
        self.loop = SimLoop(seed)
        self.network = Network(self.loop, seed, link=link)
        self.got: dict[str, list[Any]] = {"a": [], "b": []}
        self.broken: list[tuple[str, str]] = []
        self.hosts = {name: Host(self.loop, name, self.boot) for name in "ab"}
        for host in self.hosts.values():
            host.start()

    def boot(self, process: Process) -> None:
        name = process.host_name
        self.network.attach(
            name,
            process,
            lambda source, message: self.got[name].append((process.incarnation, message)),
            lambda peer: self.broken.append((name, peer)),
        )

    def send(self, messages: int, first: int = 0) -> None:
        for number in range(first, first + messages):
            self.network.send("a", "b", number)

    def run(self, span_ns: int = SECOND) -> list[Any]:
        self.loop.run_for_ns(span_ns)
        return [message for _, message in self.got["b"]]


@pytest.fixture
def rigs() -> Iterator[Any]:
    made: list[Rig] = []

    def make(seed: int = 0, **changes: Any) -> Rig:
        made.append(Rig(Link(**changes), seed))
        return made[-1]

    yield make
    for rig in made:
        rig.loop.close()


def test_an_ordered_link_keeps_order_and_an_unordered_one_does_not(rigs: Any) -> None:
    """Goal: connections and datagrams. Method: fifty messages on each; all arrive once, within the delay's bounds."""
    ordered, loose = rigs(is_ordered=True), rigs(is_ordered=False)
    for rig in (ordered, loose):
        rig.send(50)
    assert ordered.run() == list(range(50))
    assert loose.run() != list(range(50))
    assert sorted(loose.run()) == list(range(50))


def test_what_arrives_shares_nothing_with_what_was_sent(rigs: Any) -> None:
    """Goal: two processes share no object. Method: a list that its sender changes after sending."""
    rig = rigs()
    message: list[Any] = [1, [2]]
    rig.network.send("a", "b", message)
    message[1].append(3)
    assert rig.run() == [[1, [2]]]


def test_datagrams_are_dropped_and_doubled_about_as_often_as_asked(rigs: Any) -> None:
    """Goal: the chances mean what they say. Method: a thousand messages at 20 % and 10 %; wide bounds, fixed seed."""
    rig = rigs(is_ordered=False, drop=0.2, duplicate=0.1)
    rig.send(1000)
    copies = Counter(rig.run())
    assert 150 < 1000 - len(copies) < 250
    assert 50 < sum(1 for count in copies.values() if count == 2) < 130
    assert max(copies.values()) == 2


def test_late_messages_overtake_nothing_on_an_ordered_link(rigs: Any) -> None:
    """Goal: head-of-line blocking. Method: some messages late by up to 50 ms on both kinds of link."""
    ordered = rigs(2, late=0.05, late_max_ns=50 * MS)
    loose = rigs(2, late=0.05, late_max_ns=50 * MS, is_ordered=False)
    for rig in (ordered, loose):
        rig.send(100)
        rig.loop.run_for_ns(MS)
    assert [message for _, message in ordered.got["b"]] == list(range(len(ordered.got["b"])))
    assert 0 < len(ordered.got["b"]) < 60 < len(loose.got["b"]) < 100
    assert ordered.run() == list(range(100))


def test_a_drop_breaks_a_connection_and_both_ends_learn_it(rigs: Any) -> None:
    """Goal: loss on a connection is loss of the connection. Method: certain drop of one message with others in flight;
    the same without `breaks` loses that message alone."""
    rig = rigs()
    rig.send(5)
    rig.network.shape("a", "b", drop=1.0)
    rig.send(1, first=5)
    rig.network.shape("a", "b", drop=0.0)
    rig.send(1, first=6)
    assert rig.run() == [6]
    assert sorted(rig.broken) == [("a", "b"), ("b", "a")]
    quiet = rigs(breaks=False)
    quiet.send(5)
    quiet.network.shape("a", "b", drop=1.0)
    quiet.send(1, first=5)
    assert quiet.run() == list(range(5))
    assert quiet.broken == []


def test_cuts_are_one_way_and_swallow_what_is_in_flight(rigs: Any) -> None:
    """Goal: partitions. Method: cut a to b with a message on the way; b still reaches a; heal; isolate; flap."""
    rig = rigs()
    rig.send(1)
    rig.network.cut("a", "b")
    rig.send(1, first=1)
    rig.network.send("b", "a", "back")
    assert rig.run() == []
    assert [message for _, message in rig.got["a"]] == ["back"]
    rig.network.heal("a", "b")
    rig.send(1, first=2)
    assert rig.run() == [2]
    rig.network.isolate("a", ["a", "b"])
    assert rig.network.is_cut("a", "b") and rig.network.is_cut("b", "a")
    rig.network.heal_all()
    rig.network.flap("a", "b", 10 * MS, 3)
    for number in range(60):
        rig.loop.at(rig.loop.now_ns + number * MS, rig.send, (1, 100 + number))
    got = [number - 100 for number in rig.run() if number >= 100]
    assert got[-30:] == list(range(30, 60))
    assert {number // 5 % 2 for number in got[:-30]} == {1}


def test_messages_to_the_dead_are_gone_and_to_the_sleeping_wait(rigs: Any) -> None:
    """Goal: crash and freeze. Method: a frozen receiver gets all on waking; a killed and restarted one gets nothing
    that was in flight over a connection, and may get it as a datagram."""
    rig = rigs()
    rig.hosts["b"].freeze()
    rig.send(3)
    assert rig.run() == []
    rig.hosts["b"].wake()
    assert rig.run() == [0, 1, 2]
    for is_ordered, expected in ((True, []), (False, [(2, 7)])):
        rig = rigs(is_ordered=is_ordered)
        rig.send(1, first=7)
        rig.hosts["b"].kill()
        rig.hosts["b"].start()
        rig.run()
        assert rig.got["b"] == expected
    rig.hosts["b"].kill()
    rig.send(1)
    rig.run()
    assert rig.got["b"] == [(2, 7)]
    assert rig.network.counts["dead"] == 1


def test_the_same_seed_gives_the_same_deliveries(rigs: Any) -> None:
    """Goal: replay. Method: a noisy link, twice from each of five seeds."""

    def trace(seed: int) -> list[Any]:
        rig = rigs(seed, is_ordered=False, drop=0.2, duplicate=0.2, late=0.2, late_max_ns=MS)
        rig.send(40)
        return list(rig.run())

    traces = [trace(seed) for seed in range(5)]
    assert traces == [trace(seed) for seed in range(5)]
    assert len({tuple(one) for one in traces}) == 5
