"""Room in a node's memory comes in portions: so much as was asked for, no more, and to whoever waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import ucxkv
from ucxkv.directory import events
from ucxkv.node import Node, NodeConfig
from ucxkv.node.room import BLOCKS
from ucxkv.node.store import HostStore
from ucxkv.protocol import messages as m

MIB = 1 << 20
VALUE, SESSION = 4096, 7


class Full:
    """A store full of single blocks, a clock of its own, and what its directory was asked to evict."""

    def __init__(self, policy: str = "lru", grace_ms: int = 5) -> None:
        config = NodeConfig(
            name="room", host_bytes=8 * MIB, huge_pages="never", grace_ms=grace_ms, policy=policy, grant_share_max=1.0  # type: ignore[arg-type]
        )  # fmt: skip
        self.due: list[int] = []
        self.store = HostStore(config, 1, 1, self.due.append)
        self.now = time.monotonic_ns()
        self.asked: list[events.Evict] = []
        self.replies: list[events.RemovedReply] = []
        inner = self.store.directory.handle

        def watched(event: events.Event[events.RemovedReply], now_ns: int) -> events.Outcome[events.RemovedReply]:
            outcome = inner(event, now_ns)
            if isinstance(event, events.Evict):
                self.asked.append(event)
                self.replies.append(outcome.reply)
            return outcome

        self.store.directory.handle = watched  # type: ignore[method-assign, assignment]
        self.keys: list[bytes] = []
        for _ in range(8 * MIB // VALUE // 64 + 1):
            self.put(64)
        self.drain()

    def put(self, count: int) -> int:
        """So many blocks are put, as far as there is memory; how many were."""
        granted, _ = self.store.grant(SESSION, VALUE, count, self.now)
        n = len(granted.offsets) // 8
        keys = [(len(self.keys) + at + 1).to_bytes(16, "big") for at in range(n)]
        self.keys += keys
        put = m.Put(
            keys=b"".join(keys), parents=bytes(16 * n), regions=bytes(2 * n), offsets=granted.offsets,
            lengths=np.full(n, VALUE, np.uint32).tobytes(), sums=bytes(8 * n), epoch=1,
        )  # fmt: skip
        assert not any(self.store.put(SESSION, put, self.now).status)
        return n

    def drain(self) -> int:
        """Let the loop turn until nothing is owed; how many turns."""
        turns = 0
        while self.store.room.owed:
            assert self.store.next_ns() == 0, "owed, and nobody is told"
            self.store.tick(self.now)
            turns += 1
            assert turns < 1000
        return turns

    @property
    def coming(self) -> int:
        return self.store.slabs.free_bytes + self.store.room.leaving_bytes()


@pytest.fixture(params=["lru", "s3fifo", "tuc"])
def full(request: pytest.FixtureRequest) -> Iterator[Full]:
    full = Full(request.param)
    yield full
    full.store.check()
    full.store.close()


def test_much_room_comes_a_portion_a_turn_and_no_more_than_was_asked_for(full: Full) -> None:
    """Goal: no turn evicts more than BLOCKS, all together evict what was asked, once. Method: half of a full memory is
    asked for twice; each event and reply is looked at."""
    full.replies.clear()
    before = full.coming
    wanted = 4 * MIB
    first = full.store.room.evict(wanted, full.now)
    assert 0 < first <= BLOCKS * VALUE and full.store.room.owed
    full.store.room.evict_soon(wanted)
    turns = full.drain()
    assert turns >= (wanted - before) // (BLOCKS * VALUE) - 1
    assert all(reply.blocks <= BLOCKS for reply in full.replies)
    assert wanted <= full.coming < wanted + VALUE, "more or less went than was asked for"
    assert sum(reply.blocks for reply in full.replies) == -(-(wanted - before) // VALUE)
    asked = len(full.asked)
    full.store.tick(full.now)
    assert len(full.asked) == asked, "it went on"


def test_what_becomes_free_meanwhile_is_not_evicted_besides(full: Full) -> None:
    """Method: a quarter of memory is asked for, and as much is deleted before the second portion."""
    wanted = 2 * MIB
    full.store.room.evict(wanted, full.now)
    here = [key for key in full.keys if full.store.directory.table.find(key)[0] >= 0]
    full.store.handle(events.Delete(b"".join(here[: wanted // VALUE])), full.now)
    full.replies.clear()
    full.drain()
    assert not full.replies, "a block went that nobody needed"


def test_what_cannot_be_had_is_owed_to_nobody(full: Full) -> None:
    """Goal: a node whose blocks are all in use does not turn for ever. Method: everything is leased, then room is asked
    for; when the leases are over it can be had."""
    here = b"".join(key for key in full.keys if full.store.directory.table.find(key)[0] >= 0)
    lease = full.store.handle(events.Lease(here, 10**9, 1), full.now).lease
    assert full.store.room.evict(6 * MIB, full.now) == 0 and not full.store.room.owed
    full.store.handle(events.Release(lease), full.now)
    assert full.store.room.evict(6 * MIB, full.now) > 0 and full.store.room.owed
    full.drain()
    assert full.coming >= 6 * MIB


def test_who_found_memory_does_not_wait_for_the_eviction_that_it_caused(full: Full) -> None:
    """Method: a grant that leaves little free evicts nothing itself, and says that something is due at once."""
    full.store.room.evict(full.store.space.free_target, full.now)
    full.drain()
    full.now += 10**9
    full.store.tick(full.now)
    low = int(full.store.space.free_target * 0.4)
    full.asked.clear()
    full.due.clear()
    while full.store.slabs.free_bytes > low:
        assert full.put(16) == 16
    assert not full.asked and full.store.room.owed and 0 in full.due
    full.drain()
    assert full.coming >= full.store.space.free_target


def test_without_a_grace_the_first_portion_serves_who_asked_for_it() -> None:
    """Goal: where memory is back at once, a put finds it in its own turn. Method: a full store, and grants of no more
    than a portion; nothing ticks."""
    full = Full(grace_ms=0)
    try:
        for _ in range(200):
            assert full.put(BLOCKS // 4) == BLOCKS // 4
    finally:
        full.store.close()


@pytest.mark.timeout(60)
async def test_puts_that_wait_for_room_get_it_portion_by_portion() -> None:
    """Goal: no put fails because room comes in portions. Method: a small node takes ten times its memory in calls of
    many more blocks than a portion, two of them at once; each block is stored."""
    values = np.zeros((2000, VALUE), np.uint8)
    config = NodeConfig(name="room", listen="127.0.0.1:0", host_bytes=16 * MIB, huge_pages="never")
    async with Node(config) as node, ucxkv.connect(node.address) as kv:
        for at in range(0, 40_000, 2000):
            keys = [(at + i + 1).to_bytes(16, "big") for i in range(2000)]
            assert (await kv.put_many(keys, list(values))).ok
        assert node.store.counts["evicted"] > 30_000
        node.store.check()
