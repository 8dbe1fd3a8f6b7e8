"""Prefetch on a node whose tiers are a table: order, bytes on their way, full memory, cancellation, dead nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ucxkv.client.results import Match
from ucxkv.errors import ClientClosed, Unavailable, UsageError
from ucxkv.keys import Keys, as_key_array, derived_keys
from ucxkv.sessions.prefetch import PrefetchResult, prefetch

SIZE = 1000
CHAIN = np.random.default_rng(1).integers(1, 256, (40, 16), np.uint8)


class TierTable:
    """Blocks of SIZE bytes with their tier; what is warmed arrives after a turn of the loop, while there is room."""

    def __init__(self, tiers: dict[bytes, int], room: int = 1000) -> None:
        self.tiers = tiers
        self.room = room
        self.order: list[bytes] = []
        self.in_flight = self.most_in_flight = self.calls = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        if isinstance(self.error, Unavailable):
            raise self.error
        rows = [row.tobytes() for row in as_key_array(keys)]
        n = next((i for i, key in enumerate(rows) if key not in self.tiers), len(rows))
        tiers = np.array([self.tiers[key] for key in rows[:n]], np.uint8)
        return Match(n, tiers, np.zeros(n), True, np.full(n, SIZE, np.uint64), "n1")

    async def warm(self, keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None) -> int:
        rows = [row.tobytes() for row in as_key_array(keys)]
        self.calls += 1
        self.in_flight += len(rows) * SIZE
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
            if self.error:
                raise self.error
            for key in rows:
                if self.tiers.get(key) == 2 and self.room:
                    self.tiers[key], self.room = 1, self.room - 1
                    self.order.append(key)
        finally:
            self.in_flight -= len(rows) * SIZE
        return sum(self.tiers.get(key, 2) < 2 for key in rows)


def table(chains: list[Any], *, slow: Any = slice(None), room: int = 1000) -> TierTable:
    """All of these blocks, those in `slow` of each chain on disk."""
    tiers = {}
    for chain in chains:
        for i, row in enumerate(chain):
            tiers[row.tobytes()] = 2 if i in range(len(chain))[slow] else 1
    return TierTable(tiers, room)


@pytest.mark.parametrize("flight_blocks", [1, 5, 16, 1000])
async def test_blocks_come_in_token_order_within_the_bytes_allowed(flight_blocks: int) -> None:
    """Goal: what is needed first comes first, and a node is not flooded. Method: 40 blocks of which 10 are in memory;
    the order in which the rest arrives, and the most bytes that were on their way."""
    node = table([CHAIN], slow=slice(10, None))
    told = []
    result = await prefetch(
        node, [CHAIN], flight_bytes=flight_blocks * SIZE, on_brought=lambda *window: told.append(window)
    )
    assert result == PrefetchResult(40, 40, 30, 30 * SIZE)
    assert node.order == [row.tobytes() for row in CHAIN[10:]]
    assert node.most_in_flight <= flight_blocks * SIZE
    assert {window[0] for window in told} == {"n1"} and sum(window[1] for window in told) == 30
    assert await prefetch(node, [CHAIN]) == PrefetchResult(40, 40, 0, 0)


@pytest.mark.parametrize(("order", "flight"), [("layer", 8), ("block", 8), ("block", 1000)])
async def test_layers_come_group_by_group_or_block_by_block(order: Any, flight: int) -> None:
    """Goal: an engine that loads layer by layer has its first layers first. Method: three layer groups; in order
    "layer" all of a group before the next, in order "block" all groups of a window before the next window."""
    chains = [derived_keys(CHAIN, bytes([group])) for group in range(3)]
    node = table(chains)
    assert await prefetch(node, chains, order=order, flight_bytes=flight * SIZE) == PrefetchResult(
        40, 40, 120, 120 * SIZE
    )
    place = {row.tobytes(): (group, i) for group, chain in enumerate(chains) for i, row in enumerate(chain)}
    came = [place[key] for key in node.order]
    if order == "layer":
        assert came == [(group, i) for group in range(3) for i in range(40)]
    else:
        assert [i for group, i in came if group == 2] == list(range(40))
        window = 1 if flight == 8 else 40
        for at, (_, i) in enumerate(came):
            assert i // window == at // (3 * window)
    assert node.most_in_flight <= flight * SIZE


async def test_it_stops_where_memory_is_full() -> None:
    """Goal: a prefetch does not push out what it brought. Method: room for 12 of 40 blocks, two at a time; few calls
    follow the first that came short, and what is told to be in memory is."""
    node = table([CHAIN], room=12)
    result = await prefetch(node, [CHAIN], flight_bytes=4 * SIZE)
    assert (result.blocks, result.in_memory, result.brought) == (40, 12, 12)
    assert node.calls <= 12 + 4


async def test_only_what_the_store_has_is_asked_for() -> None:
    """Goal: a missing tail is no error. Method: the second half of the chain is not there, nothing at all, no keys."""
    node = table([CHAIN[:20]])
    assert await prefetch(node, [CHAIN]) == PrefetchResult(20, 20, 20, 20 * SIZE)
    assert await prefetch(node, [CHAIN[20:]]) == await prefetch(node, [CHAIN[:0]]) == PrefetchResult()
    assert node.order == [row.tobytes() for row in CHAIN[:20]]


@pytest.mark.parametrize("when", ["match", "warm", "deadline"])
async def test_a_node_that_does_not_answer_ends_it(when: str) -> None:
    """Goal: a dead node is no error of a hint. Method: Unavailable from match and from warm; a deadline that is over
    before the second window begins."""
    node = table([CHAIN])
    if when == "match":
        node.error = Unavailable("gone")
        assert await prefetch(node, [CHAIN]) == PrefetchResult()
        return
    if when == "warm":

        async def warm(keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None) -> int:
            node.calls += 1
            raise Unavailable("gone")

        node.warm = warm  # type: ignore[method-assign]
        assert await prefetch(node, [CHAIN], flight_bytes=4 * SIZE) == PrefetchResult(40, 0, 0, 0)
        assert node.calls <= 5
        return
    node.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, node.gate.set)
    result = await prefetch(node, [CHAIN], flight_bytes=4 * SIZE, deadline_s=0.02)
    assert (result.blocks, result.in_memory) == (40, 4)


async def test_cancelled_it_ends_with_its_calls() -> None:
    """Goal: a user who leaves costs nothing further. Method: calls that hang; cancel; none is left."""
    node = table([CHAIN])
    node.gate = asyncio.Event()
    task = asyncio.create_task(prefetch(node, [CHAIN], flight_bytes=8 * SIZE))
    for _ in range(5):
        await asyncio.sleep(0)
    assert node.in_flight == 8 * SIZE
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert node.in_flight == 0 and not node.order


async def test_other_errors_come_out_alone_and_wrong_arguments_are_refused() -> None:
    """Goal: callers catch typed errors. Method: a client that was closed; an order and a bound that are none."""
    node = table([CHAIN])
    node.error = ClientClosed("closed")
    with pytest.raises(ClientClosed):
        await prefetch(node, [CHAIN])
    with pytest.raises(UsageError, match="order is 'tail'"):
        await prefetch(node, [CHAIN], order="tail")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="flight_bytes is 0"):
        await prefetch(node, [CHAIN], flight_bytes=0)
