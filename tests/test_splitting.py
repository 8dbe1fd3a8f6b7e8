"""Split loads on a store in a dict: who brings which block, what is missing, late or broken, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.test_sequence import LAYOUT, DictStore, whole_cache
from ucxkv.client.results import GetResult, Match, ReadStatus
from ucxkv.errors import ClientClosed, Unavailable, UsageError
from ucxkv.keys import Keys, as_key_array
from ucxkv.policy.cost import PrefillCost
from ucxkv.sequence import Sequence
from ucxkv.splitting import Split

N = 24
TOKENS = list(range(1000, 1000 + 4 * N + 1))
NEVER_S = 1e5


class TellingStore(DictStore):
    """Says how long its blocks take to load, and may lose some after it was asked."""

    def __init__(self, load_s: float = 1e-4) -> None:
        super().__init__()
        self.load_s = load_s
        self.lost_after_match: list[bytes] = []
        self.is_gone = False

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        if self.is_gone:
            raise Unavailable("gone")
        match = await super().match(keys)
        for key in self.lost_after_match:
            self.values.pop(key, None)
        return Match(match.blocks, match.tiers, np.full(match.blocks, self.load_s))


class Engine:
    """Computes blocks into a cache: each becomes its number and a half, which no stored block is."""

    def __init__(self, cache: np.ndarray[Any, Any]) -> None:
        self.cache = cache
        self.spans: list[range] = []

    async def run(self, split: Split) -> None:
        async for blocks in split:
            await asyncio.sleep(0)
            self.spans.append(blocks)
            for block in blocks:
                self.cache[block] = block + 0.5

    @property
    def computed(self) -> list[int]:
        return [block for span in self.spans for block in span]

    def check(self, split: Split, source: np.ndarray[Any, Any]) -> None:
        """Every block is there, by just one side."""
        assert split.is_over
        assert split.computed_blocks == len(self.computed) == len(set(self.computed))
        assert split.computed_blocks + split.loaded_blocks == split.blocks
        for block in range(split.blocks):
            wanted = block + 0.5 if block in self.computed else source[block]
            assert (self.cache[block] == wanted).all(), f"block {block}"


async def stored(store: DictStore) -> tuple[Sequence, np.ndarray[Any, Any], Engine]:
    """A sequence of N blocks in the store, their bytes, and an engine with an empty cache."""
    source = whole_cache(LAYOUT, N, seed=1)
    seq = Sequence(store, LAYOUT, TOKENS)
    assert (await seq.save(source)).blocks == N
    return seq, source, Engine(whole_cache(LAYOUT, N))


@pytest.mark.parametrize(("load_s", "prefill", "computed"), [(1e-4, 4e-4, 0), (NEVER_S, 4e6, N)])
async def test_the_faster_side_brings_everything_when_the_other_is_hopeless(
    load_s: float, prefill: float, computed: int
) -> None:
    """Goal: a split is never worse than one side alone. Method: computing of 10,000 s a block beside loads of 0.1 ms,
    and loads of a day beside computing of 1 us: nothing is computed, and nothing is read."""
    store = TellingStore(load_s)
    seq, source, engine = await stored(store)
    async with seq.split(engine.cache, prefill) as split:
        await engine.run(split)
    engine.check(split, source)
    assert split.computed_blocks == computed
    assert (store.gets == 0) == (computed == N)


@pytest.mark.parametrize("steps", [(1, 1), (4, 2), (16, 16)])
@pytest.mark.parametrize("blocks", [None, 7, 0])
async def test_both_sides_meet_and_every_block_is_brought_by_one(steps: tuple[int, int], blocks: int | None) -> None:
    """Goal: the cache is whole, wherever they meet. Method: sides of about the same speed, steps of several sizes, all
    blocks, some and none; computed blocks hold what the engine wrote, loaded ones what was stored."""
    seq, source, engine = await stored(TellingStore())
    async with seq.split(engine.cache, 4e4, blocks=blocks, compute_blocks=steps[0], load_blocks=steps[1]) as split:
        await engine.run(split)
        with pytest.raises(StopAsyncIteration):
            await anext(split)
    assert split.blocks == (N if blocks is None else blocks)
    engine.check(split, source)
    assert all(len(span) <= steps[0] for span in engine.spans)
    assert not engine.cache[split.blocks :].any()


@pytest.mark.parametrize("lost", [[N - 1], [3, 11, 12, 20], list(range(5, N)), list(range(N))])
async def test_blocks_that_do_not_come_are_handed_out_to_compute(lost: list[int]) -> None:
    """Goal: eviction between match and load costs time, not blocks. Method: keys vanish after the match, with computing
    so slow that all would be loaded; the vanished are computed at the end, in order, and only those and what was never
    tried."""
    store = TellingStore()
    seq, source, engine = await stored(store)
    store.lost_after_match = [seq.keys[block].tobytes() for block in lost]
    async with seq.split(engine.cache, 4e-4, load_blocks=2) as split:
        await engine.run(split)
    engine.check(split, source)
    assert set(lost) <= set(engine.computed)
    if len(lost) < 5:
        assert engine.computed == lost


async def test_loads_that_hang_are_ended_and_their_blocks_computed() -> None:
    """Goal: a store that stalls does not stall the engine. Method: no read ever ends; all blocks are computed, and
    before the first of them is handed out that a read was for, that read is over."""
    store = TellingStore()
    seq, source, engine = await stored(store)
    store.gate = asyncio.Event()
    async with seq.split(engine.cache, 4e4, load_blocks=3) as split:
        async for blocks in split:
            if blocks.stop > N - 6:
                assert store.writing < 2
            engine.spans.append(blocks)
            for block in blocks:
                engine.cache[block] = block + 0.5
    assert store.writing == 0
    engine.check(split, source)
    assert engine.computed == list(range(N))


async def test_a_deadline_ends_the_loads_and_the_rest_is_computed() -> None:
    """Goal: the loads have one deadline, the loop has none. Method: computing so slow that all is to be loaded, and
    reads that answer at their deadline, as a client's do; then all is computed, and no further read was begun."""

    class Mute(TellingStore):
        async def get_many(self, keys: Keys, into: object, **options: Any) -> GetResult:
            self.gets += 1
            assert 0 < options["deadline_s"] <= 0.05
            await asyncio.sleep(options["deadline_s"])
            n = len(as_key_array(keys))
            return GetResult(np.full(n, ReadStatus.UNAVAILABLE, np.uint8), np.zeros(n, np.uint64))

    store = Mute()
    seq, source, engine = await stored(store)
    async with seq.split(engine.cache, 4e-4, deadline_s=0.05, load_blocks=2) as split:
        await engine.run(split)
    engine.check(split, source)
    assert sorted(engine.computed) == list(range(N))
    assert store.gets == 2


async def test_a_store_that_cannot_be_asked_splits_nothing() -> None:
    """Goal: a dead node is no error of a split. Method: match raises Unavailable; there is nothing to hand out."""
    store = TellingStore()
    seq, _, engine = await stored(store)
    store.is_gone = True
    async with seq.split(engine.cache, 8000.0) as split:
        await engine.run(split)
    assert (split.blocks, engine.spans, split.is_over) == (0, [], True)


@pytest.mark.parametrize("at", ["first", "later"])
async def test_an_error_of_the_client_comes_out_as_it_is(at: str) -> None:
    """Goal: callers catch typed errors. Method: a store that raises in its reads, seen before any span or after one."""
    store = TellingStore()
    seq, _, engine = await stored(store)
    store.broken = ClientClosed("closed")
    async with seq.split(engine.cache, 4e-4 if at == "first" else 4e4) as split:
        with pytest.raises(ClientClosed):
            await engine.run(split)
    assert store.writing == 0


@pytest.mark.parametrize("how", ["break", "cancel", "error"])
async def test_leaving_a_split_early_leaves_no_read_behind(how: str) -> None:
    """Goal: after `async with` nobody writes into the cache. Method: reads hang; the loop is left by break, by a
    cancelled task and by the engine's own error; no read is running then, and the cache is not touched."""
    store = TellingStore()
    seq, _, engine = await stored(store)
    store.gate = asyncio.Event()

    async def work() -> None:
        async with seq.split(engine.cache, 40.0, compute_blocks=1, load_blocks=2) as split:
            async for _ in split:
                assert store.writing == 2
                if how == "break":
                    break
                if how == "error":
                    raise ZeroDivisionError
                await asyncio.sleep(NEVER_S)

    task = asyncio.create_task(work())
    for _ in range(20):
        await asyncio.sleep(0)
    if how == "cancel":
        task.cancel()
    done = (await asyncio.gather(task, return_exceptions=True))[0]
    assert type(done) is {"break": type(None), "cancel": asyncio.CancelledError, "error": ZeroDivisionError}[how]
    assert store.writing == 0
    store.gate.set()
    await asyncio.sleep(0)
    assert not engine.cache.any()


async def test_the_measured_prefill_rate_is_there_for_the_next_split() -> None:
    """Goal: an engine need not know its rate. Method: told as a thousand times too fast with an attention term; spans
    that take at least 2 ms each make a pass and its tokens cost more afterwards, both terms of these by one factor."""
    store = TellingStore(NEVER_S)
    seq, _, engine = await stored(store)
    told = PrefillCost(1e-7, 1e-10)
    async with seq.split(engine.cache, told, pass_s=1e-6, compute_blocks=4) as split:
        async for _ in split:
            await asyncio.sleep(0.002)
    found = split.prefill
    assert found.per_token_s > 10 * told.per_token_s and split.pass_s > 1.2e-6
    assert found.per_token_position_s / found.per_token_s == pytest.approx(1e-3)
    async with seq.split(engine.cache, found, pass_s=split.pass_s, compute_blocks=4) as split:
        await engine.run(split)
    assert split.computed_blocks == N


async def test_wrong_use_of_a_split_is_refused_by_name() -> None:
    """Goal: nothing is computed into a page that does not exist, and nothing runs unseen. Method: one case each."""
    seq, _, engine = await stored(TellingStore())
    with pytest.raises(UsageError, match="async with"):
        await anext(seq.split(engine.cache, 8000.0))
    for options, says in (
        ({"prefill": 0}, "tokens a second"),
        ({"prefill": float("nan")}, "tokens a second"),
        ({"prefill": 1.0, "blocks": N + 1}, "24 whole blocks"),
        ({"prefill": 1.0, "pass_s": -1.0}, "pass_s is -1"),
        ({"prefill": 1.0, "compute_blocks": 0}, "at least 1"),
        ({"prefill": 1.0, "deadline_s": 0}, "deadline_s=0"),
        ({"prefill": 1.0, "block_ids": [0, 1]}, "page of each of the 24"),
    ):
        with pytest.raises(UsageError, match=says):
            async with seq.split(engine.cache, **options):  # type: ignore[arg-type]
                raise AssertionError("it was entered")
