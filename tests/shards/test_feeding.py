"""A leader's messages to one member: each behind its values, none of them kept back without need."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.shards.rows import KEYS, commits_of, leaves_of, rows_of
from ucxkv import errors
from ucxkv.node.shards import feeding
from ucxkv.node.shards.feeding import Feeder
from ucxkv.node.shards.records import LoggedEntry
from ucxkv.node.shards.values import gone_name
from ucxkv.node.space import Place
from ucxkv.protocol import messages as m
from ucxkv.replication import Kind, Member
from ucxkv.replication import events as ev
from ucxkv.replication.log import LogWindow, encode_entry
from ucxkv.replication.messages import Append, ReplicaMessage, SnapshotPart, decode

ME, TO = Member("a", 1), Member("b", 7)


class Leader:
    """What a Feeder asks of its shard, and of its replica."""

    number = 3

    def __init__(self) -> None:
        self.replica = self
        self.epoch, self.watermark = 1, 0
        self.leading: Any = object()
        self.log = LogWindow()
        self.places: dict[tuple[int, bytes], Place] = {}
        self.handled: list[ev.Event] = []

    def handle(self, event: ev.Event) -> None:
        self.handled.append(event)

    def place(self, index: int, key: bytes, total: int, length: int) -> Place | None:
        return self.places.get((max(index, 0), key))


class Link:
    """A mirror: what it was asked to copy, in order; it waits for `gate`, and fails as often as told."""

    def __init__(self) -> None:
        self.copied: list[list[bytes]] = []
        self.asked: list[list[bytes]] = []
        self.there: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[errors.UcxKvError] = []

    async def lacking(self, shard: int, rows: Any, deadline_ns: int) -> Any:
        self.asked.append([key.tobytes() for key in rows["key"]])
        return np.array([key.tobytes() not in self.there for key in rows["key"]], np.bool_)

    async def copy(self, shard: int, rows: Any, address: int, deadline_ns: int) -> Any:
        assert shard == 3 and address == 99
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        keys = [key.tobytes() for key in rows["key"]]
        self.copied.append(keys)
        return np.array([key in self.gone for key in keys], np.uint8)


class Story:
    """A feeder, its ends, and messages of a log of entries 1, 2, and so on."""

    def __init__(self) -> None:
        self.leader, self.link = Leader(), Link()
        self.told: list[m.Replicate] = []
        self.feeder = Feeder(self.leader, TO, self.link, self.told.append, 99)  # type: ignore[arg-type]

    def entries(self, *logged: LoggedEntry) -> None:
        """More of the log; the values of Commits are here."""
        self.leader.log.append([one.entry for one in logged])
        for one in logged:
            for row in one.rows if one.rows is not None else ():
                place = Place(int(row["offset"]), int(row["length"]), int(row["sum"]))
                self.leader.places[one.index, row["key"].tobytes()] = place

    def append(self, first: int, last: int, epoch: int = 1) -> Append:
        log = self.leader.log
        raw = [encode_entry(entry) for entry in log.slice(first, last)] if last >= first else []
        return Append(ME, epoch, first - 1, log.epoch_at(first - 1) or 0, raw, self.leader.watermark, 5)

    def said(self) -> list[ReplicaMessage]:
        assert all((one.shard, one.incarnation) == (3, 7) for one in self.told)
        return [decode(one.payload) for one in self.told]

    async def rest(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.fixture
async def story(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(feeding, "_RETRY_S", 0)
    made = Story()
    yield made
    await made.feeder.aclose()


async def test_messages_follow_their_values_in_order(story: Story) -> None:
    """Goal: nothing overtakes. Method: one message with values that are slow to copy, one without any behind it."""
    story.entries(commits_of(1, 1, (0, 5, 1)), leaves_of(2, 1, 0))
    story.link.gate.clear()
    first, second = story.append(1, 1), story.append(2, 2)
    story.feeder.send(first)
    story.feeder.send(second)
    await story.rest()
    assert story.told == []
    story.link.gate.set()
    await story.rest()
    assert story.said() == [first, second] and story.link.copied == [[KEYS[0]]]


async def test_a_heartbeat_waits_for_no_value_and_says_what_is_sure(story: Story) -> None:
    """Goal: a member that waits for values hears of its leader. Method: a heartbeat behind a message that is stuck
    speaks of the watermark, which the member has; one with nothing before it goes as it is."""
    story.entries(leaves_of(1, 1, 4), commits_of(2, 1, (0, 5, 1)))
    alone = story.append(3, 2)
    story.feeder.send(alone)
    assert story.said() == [alone]
    story.leader.watermark = 1
    story.link.gate.clear()
    story.feeder.send(story.append(2, 2))
    await story.rest()
    story.feeder.send(story.append(3, 2))
    beat = story.said()[1]
    assert isinstance(beat, Append)
    assert (beat.prev_index, beat.prev_epoch, beat.entries, beat.watermark) == (1, 1, [], 1)


async def test_what_was_given_is_not_given_twice_until_it_was_lost(story: Story) -> None:
    """Goal: resent records cost no bytes; `Lacks` brings the bytes again. Method: send, send, forget, send."""
    story.entries(commits_of(1, 1, (0, 5, 1), (1, 6, 2)))
    for count in (1, 1):
        story.feeder.send(story.append(1, 1))
        await story.rest()
        assert len(story.link.copied) == count
    story.feeder.forget()
    story.feeder.send(story.append(1, 1))
    await story.rest()
    assert len(story.link.copied) == 2 and len(story.told) == 3


async def test_a_message_that_waits_already_is_not_queued_again(story: Story) -> None:
    """Goal: the queue holds each once, and no more than 64. Method: the same message often, then a hundred others."""
    story.entries(*(commits_of(1 + n, 1, (n % 6, n, 1)) for n in range(100)))
    story.link.gate.clear()
    for _ in range(5):
        story.feeder.send(story.append(1, 1))
    for index in range(2, 101):
        story.feeder.send(story.append(index, index))
    story.link.gate.set()
    for _ in range(10):
        await story.rest()
    assert story.said() == [story.append(index, index) for index in range(1, 65)]


async def test_values_that_are_gone_are_said_to_be(story: Story) -> None:
    """Goal: a member waits for no value that nobody has. Method: one has no place any more, one changed in the copy."""
    story.entries(commits_of(1, 1, (0, 5, 1), (1, 6, 2), (2, 7, 3)))
    del story.leader.places[1, KEYS[0]]
    story.link.gone = {KEYS[2]}
    story.feeder.send(story.append(1, 1))
    await story.rest()
    (told,) = story.told
    assert told.gone == gone_name(KEYS[0], 1) + gone_name(KEYS[2], 3)
    assert story.link.copied == [[KEYS[1], KEYS[2]]]


async def test_no_message_names_one_value_twice(story: Story) -> None:
    """Goal: what is gone of one entry is not said to be gone of another, that has the same bytes. Method: a block that
    was put, deleted and put again, the first value is gone: sent behind its values, and once more when they are there.
    """
    story.entries(commits_of(1, 1, (0, 5, 1)), leaves_of(2, 1, 0), commits_of(3, 1, (0, 5, 1)))
    del story.leader.places[1, KEYS[0]]
    for _ in range(2):
        story.feeder.send(story.append(1, 3))
        await story.rest()
    assert story.said() == [story.append(1, 2), story.append(3, 3)] * 2
    assert [told.gone for told in story.told] == [gone_name(KEYS[0], 1), b""] * 2
    assert story.link.copied == [[KEYS[0]]]


async def test_a_snapshot_asks_first_what_is_there(story: Story) -> None:
    """Goal: what a member kept is not copied. Method: it has one of two values."""
    story.link.there = {KEYS[1]}
    for key, total in ((0, 1), (1, 2)):
        story.leader.places[0, KEYS[key]] = Place(5, 10 + total, total)
    part = SnapshotPart(ME, 1, 9, 1, 0, 1, rows_of((0, 5, 1), (1, 6, 2)).tobytes())
    story.feeder.send(part)
    await story.rest()
    assert story.said() == [part] and story.told[0].gone == b""
    assert (story.link.asked, story.link.copied) == ([[KEYS[0], KEYS[1]]], [[KEYS[0]]])


async def test_what_was_gone_for_one_snapshot_may_be_there_for_the_next(story: Story) -> None:
    """Goal: a block that was deleted during a snapshot and put again is in the next one. Method: the same value at two
    indices, and then for the same index in a later epoch."""

    def part(index: int, epoch: int) -> SnapshotPart:
        return SnapshotPart(ME, epoch, index, 1, 0, 1, rows_of((0, 5, 1)).tobytes())

    story.feeder.send(part(9, 1))
    await story.rest()
    assert story.told[0].gone == gone_name(KEYS[0], 1)
    story.leader.places[0, KEYS[0]] = Place(5, 11, 1)
    story.feeder.send(part(20, 1))
    await story.rest()
    assert story.told[1].gone == b""
    story.leader.epoch = 2
    story.feeder.send(part(9, 2))
    await story.rest()
    assert story.told[2].gone == b"" and story.link.copied == [[KEYS[0]], [KEYS[0]]]


async def test_a_member_without_memory_is_unfit_and_the_queue_is_dropped(story: Story) -> None:
    """Goal: it leaves the in-sync set, and the rest of the log is not behind it. Method: Overloaded from the copy."""
    story.entries(commits_of(1, 1, (0, 5, 1)), leaves_of(2, 1, 3))
    story.link.failures = [errors.Overloaded("full")]
    story.feeder.send(story.append(1, 1))
    story.feeder.send(story.append(2, 2))
    await story.rest()
    assert story.leader.handled == [ev.Unfit(TO)] and story.told == []
    story.feeder.send(story.append(1, 1))
    await story.rest()
    assert story.said() == [story.append(1, 1)]


async def test_a_lost_link_is_tried_again_before_anybody_is_unfit(story: Story) -> None:
    """Goal: a node that changes what it leads is not put out, one that cannot be reached is. Method: three failures;
    then one that lasts, which ends with the queue dropped and the member unfit."""
    story.entries(commits_of(1, 1, (0, 5, 1)))
    story.link.failures = [errors.Unavailable("dialling")] * 3
    story.feeder.send(story.append(1, 1))
    await story.rest()
    assert story.said() == [story.append(1, 1)] and not story.leader.handled
    story.feeder.forget()
    story.link.failures = [errors.Unavailable("dialling")] * 1000
    story.feeder.send(story.append(1, 1))
    for _ in range(6):
        await story.rest()
    assert len(story.told) == 1 and set(story.leader.handled) == {ev.Unfit(TO)}
    assert len(story.link.failures) == 1000 - feeding._ATTEMPTS


async def test_a_leader_that_leads_no_more_sends_nothing_of_its_epoch(story: Story) -> None:
    """Goal: it may not know any more what is gone. Method: deposed, and then elected anew, during a copy."""
    story.entries(LoggedEntry(1, 1, Kind.EPOCH), commits_of(2, 1, (0, 5, 1)), commits_of(3, 1, (1, 5, 1)))
    for change in ("leading", "epoch"):
        story.link.gate.clear()
        story.feeder.forget()
        story.feeder.send(story.append(2, 2))
        story.feeder.send(story.append(3, 3))
        await story.rest()
        setattr(story.leader, change, None if change == "leading" else 4)
        story.link.gate.set()
        await story.rest()
        assert story.append(3, 3) not in story.said()
        story.leader.leading, story.leader.epoch = object(), 1
    assert story.link.copied == [[KEYS[0]], [KEYS[0]]], "the second message's value was copied"
