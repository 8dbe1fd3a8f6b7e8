"""Sequences: match, load in three orders, save, over paged caches of every form; what is refused; cancellation."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest

from ucxkv.buffers import Pieces, RegisteredBuffer, as_destinations, as_sources
from ucxkv.client.results import GetResult, Match, PutResult, PutStatus, ReadStatus
from ucxkv.errors import ClientClosed, UsageError
from ucxkv.keys import Keys, as_key_array
from ucxkv.layout import Layout
from ucxkv.sequence import Loaded, Sequence

LAYOUT = Layout(model="m", dtype="float32", layers=4, kv_heads=2, head_dim=3, block_tokens=4)
TOKENS = list(range(26))  # 6 whole blocks and a partial one
BLOCKS = 6


class DictStore:
    """A store in a dict that keeps the client's rules: parents first, first writer wins, each key its own status."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.gets = 0
        self.puts = 0
        self.durable = 0
        self.gate: asyncio.Event | None = None
        self.writing = 0
        self.broken: Exception | None = None

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        rows = [row.tobytes() for row in as_key_array(keys)]
        blocks = next((i for i, key in enumerate(rows) if key not in self.values), len(rows))
        return Match(blocks, np.ones(blocks, np.uint8), np.zeros(blocks))

    async def get_many(
        self, keys: Keys, into: object, *, root: bytes | None = None, deadline_s: float | None = None
    ) -> GetResult:
        rows = [row.tobytes() for row in as_key_array(keys)]
        pieces = as_destinations(into, len(rows))
        status = np.zeros(len(rows), np.uint8)
        self.gets += 1
        self.writing += 1
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
            if self.broken:
                raise self.broken
            for index, key in enumerate(rows):
                value = self.values.get(key)
                if value is None:
                    status[index] = ReadStatus.MISS
                    continue
                assert len(value) == pieces.nbytes[index]
                scatter(pieces, index, value)
        finally:
            self.writing -= 1
        return GetResult(status, np.where(status == 0, pieces.nbytes, 0))

    async def put_many(
        self, keys: Keys, blocks: object, parents: Keys, *, durable: bool = False, deadline_s: float | None = None
    ) -> PutResult:
        rows = [row.tobytes() for row in as_key_array(keys)]
        above = [row.tobytes() for row in as_key_array(parents, allow_root=True)]
        pieces = as_sources(blocks, len(rows))
        status = np.full(len(rows), PutStatus.STORED, np.uint8)
        self.puts += len(rows)
        self.durable += len(rows) * durable
        for index, (key, parent) in enumerate(zip(rows, above, strict=True)):
            if parent != bytes(16) and parent not in self.values:
                status[index] = PutStatus.ORDER
            elif key in self.values:
                status[index] = PutStatus.ALREADY
            else:
                self.values[key] = gather(pieces, index)
        return PutResult(status)


def gather(pieces: Pieces, index: int) -> bytes:
    """One value's bytes."""
    span = range(int(pieces.first[index]), int(pieces.first[index + 1]))
    return b"".join(ctypes.string_at(int(pieces.addr[p]), int(pieces.length[p])) for p in span)


def scatter(pieces: Pieces, index: int, value: bytes) -> None:
    """Write one value into its pieces."""
    at = 0
    for p in range(int(pieces.first[index]), int(pieces.first[index + 1])):
        size = int(pieces.length[p])
        ctypes.memmove(int(pieces.addr[p]), value[at : at + size], size)
        at += size


def whole_cache(layout: Layout, pages: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A paged cache of one array, filled with numbers that differ everywhere (all zero for seed 0)."""
    cache = np.zeros((pages, *layout.shape), np.float32)
    if seed:
        cache[:] = np.random.default_rng(seed).random(cache.shape, np.float32)
    return cache


async def steps(load: Any) -> list[Loaded]:
    """All steps of a load."""
    return [step async for step in load]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("order", ["lkhnd", "nlkhd", "klnhd", "hdnkl"])
@pytest.mark.parametrize("load_order", ["layer", "block", "tail"])
async def test_what_was_saved_is_loaded_in_every_order(groups: int, order: str, load_order: Any) -> None:
    """Goal: bytes come back in place, whatever the layout's axis order, the grouping and the order of loading. Method:
    save from shuffled pages, load into other pages, compare blocks; other pages stay untouched."""
    layout = dataclasses.replace(LAYOUT, layer_groups=groups, order=order)
    store = DictStore()
    source, into = whole_cache(layout, 8, seed=1), whole_cache(layout, 8)
    out_of, in_to = [7, 2, 0, 5, 4, 1], [3, 1, 6, 0, 2, 7]
    saved = await Sequence(store, layout, TOKENS).save(source, block_ids=out_of)
    assert (saved.blocks, saved.stored, saved.status.shape) == (BLOCKS, BLOCKS * groups, (groups, BLOCKS))
    seq = Sequence(store, layout, np.array(TOKENS, np.int32))
    assert await seq.match() == BLOCKS
    done = await steps(seq.load(into, order=load_order, block_ids=in_to))
    assert (into[in_to] == source[out_of]).all()
    assert not into[[4, 5]].any()
    if load_order == "layer":
        size = 4 // groups
        assert done == [Loaded(range(a, a + size), range(BLOCKS)) for a in range(0, 4, size)]
    elif load_order == "tail":
        assert done == [Loaded(range(4), range(a, a + 1)) for a in reversed(range(BLOCKS))]
    else:
        assert done == [Loaded(range(4), range(BLOCKS))]


@pytest.mark.parametrize("groups", [1, 2])
async def test_caches_listed_by_layer_or_by_pair_hold_the_same_values_as_one_array(groups: int) -> None:
    """Goal: engines with one tensor a layer share blocks with engines that have one in all. Method: save from each
    form, load into each other form, compare."""
    layout = dataclasses.replace(LAYOUT, layer_groups=groups)
    whole = whole_cache(layout, 7, seed=2)

    def forms(fill: bool) -> list[Any]:
        by_layer = [np.ascontiguousarray(whole[:, n]) if fill else np.zeros_like(whole[:, n]) for n in range(4)]
        pairs = [tuple(np.ascontiguousarray(a[:, k]) for k in range(2)) for a in by_layer]
        strided = list(np.moveaxis(whole.copy() if fill else np.zeros_like(whole), 1, 0))
        one = whole.copy() if fill else np.zeros_like(whole)
        return [one, by_layer, pairs, strided, RegisteredBuffer(whole.copy() if fill else np.zeros_like(whole))]

    wanted: list[bytes] | None = None
    for cache in forms(True):
        store = DictStore()
        await Sequence(store, layout, TOKENS).save(cache)
        values = [store.values[key] for key in sorted(store.values)]
        assert wanted in (None, values)
        wanted = values
    for cache in forms(False):
        assert len(await steps(Sequence(store, layout, TOKENS).load(cache))) == groups
        again = DictStore()
        await Sequence(again, layout, TOKENS).save(cache)
        assert again.values == store.values


async def test_a_block_matches_only_when_all_its_layer_groups_are_there() -> None:
    """Goal: a half-saved block is not taken for whole. Method: drop one group's value of block 3; match stops before
    it, a load that insists on 6 blocks gives 3, and the first group's step, read before the hole was met, is not
    undone."""
    layout = dataclasses.replace(LAYOUT, layer_groups=2)
    store = DictStore()
    source = whole_cache(layout, BLOCKS, seed=3)
    seq = Sequence(store, layout, TOKENS)
    await seq.save(source)
    second = sorted(seq._chains[1].tobytes()[16 * i : 16 * i + 16] for i in range(3, 4))
    del store.values[second[0]]
    assert await seq.match() == 3
    into = whole_cache(layout, BLOCKS)
    load = seq.load(into, blocks=BLOCKS)
    assert await steps(load) == [Loaded(range(2), range(6)), Loaded(range(2, 4), range(3))]
    assert load.loaded == range(3)
    assert (into[:3] == source[:3]).all()
    tail = seq.load(into, blocks=BLOCKS, order="tail", step_blocks=4)
    assert await steps(tail) == [Loaded(range(4), range(4, 6))]
    assert tail.loaded == range(4, 6)
    block = seq.load(into, blocks=BLOCKS, order="block", step_blocks=2)
    assert await steps(block) == [Loaded(range(4), range(2)), Loaded(range(4), range(2, 3))]


async def test_saving_again_sends_only_what_is_missing_and_survives_eviction_between() -> None:
    """Goal: saves are cheap and correct when repeated. Method: count keys put by a second save, by a longer sequence,
    and by one whose matched head is evicted after it matched."""
    store = DictStore()
    source = whole_cache(LAYOUT, 9, seed=4)
    await Sequence(store, LAYOUT, TOKENS[:16]).save(source)
    assert store.puts == 4
    again = await Sequence(store, LAYOUT, TOKENS).save(source)
    assert (store.puts, again.start, again.blocks, again.stored) == (6, 4, 6, 2)
    kept = await Sequence(store, LAYOUT, TOKENS).save(source, durable=True)
    assert (store.durable, kept.start, kept.blocks) == (1, 5, 6)  # the last one again: it takes those above it along
    store.puts -= 1
    nothing = await Sequence(store, LAYOUT, TOKENS).save(source)
    assert (store.puts, nothing.blocks, nothing.stored, nothing.status.shape) == (6, 6, 0, (1, 0))

    class Evicting(DictStore):
        async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
            found = await super().match(keys)
            self.values.clear()
            return found

    evicting = Evicting()
    evicting.values.update(dict.fromkeys(list(store.values)[:4], b""))
    result = await Sequence(evicting, LAYOUT, TOKENS).save(source)
    assert (result.blocks, result.stored, len(evicting.values)) == (6, 6, 6)


async def test_other_layouts_and_tenants_miss_before_any_byte_moves() -> None:
    """Goal: user voices 11, 12 and 35: another dtype, head order, block size or salt never reads these bytes. Method:
    the same tokens under each other layout match nothing and load nothing; the store sees no get."""
    store = DictStore()
    await Sequence(store, LAYOUT, TOKENS).save(whole_cache(LAYOUT, BLOCKS, seed=5))
    others: list[dict[str, Any]] = [
        {"order": "lknhd"},
        {"dtype": "bfloat16", "head_dim": 6},
        {"kv_heads": 3, "head_dim": 2},
        {"block_tokens": 2, "head_dim": 6},
        {"salt": "tenant b"},
    ]
    for change in others:
        layout = dataclasses.replace(LAYOUT, **change)
        seq = Sequence(store, layout, TOKENS)
        assert layout.block_bytes == LAYOUT.block_bytes
        assert await seq.match() == 0
        assert (
            await steps(seq.load(np.zeros((seq.blocks_count, *layout.shape), "u2" if "dtype" in change else "f4")))
            == []
        )
    assert store.gets == 0
    assert await Sequence(store, LAYOUT, TOKENS, salt="tenant b").match() == 0
    assert await Sequence(store, dataclasses.replace(LAYOUT, salt="x"), TOKENS, salt="").match() == BLOCKS


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (np.zeros((6, 4, 2, 4, 2, 3), np.float32), r"shape \(6, 4, 2, 4, 2, 3\).*axes 'lkhnd'"),
        (np.zeros((6, 4, 2, 2, 4, 3), np.float64), "holds float64 and the layout float32"),
        (np.zeros((6, 4, 2, 2, 4, 3), np.int32), "holds int32"),
        (np.zeros((6, 3, 4, 2, 2, 4), np.float32).transpose(0, 2, 3, 4, 5, 1), "not contiguous"),
        ([np.zeros((6, 2, 2, 4, 3), np.float32)] * 3, "lists 3 layers"),
        ([np.zeros((6, 2, 4, 2, 3), np.float32)] * 4, "layer 0 is"),
        ([np.zeros((6 + i, 2, 2, 4, 3), np.float32) for i in range(4)], "different numbers of pages"),
        ([[np.zeros((6, 2, 4, 3), np.float32)]] * 4, "list of 2"),
        (bytearray(100), "is bytearray of shape"),
        (None, "is NoneType"),
        (RegisteredBuffer(bytearray(600), row_bytes=100), "rows of 100 bytes"),
    ],
)
async def test_caches_that_do_not_fit_the_layout_are_refused_by_name(cache: Any, says: str) -> None:
    """Goal: user voices 35 and 36: permuted heads, other dtypes and views are refused, not reinterpreted. Method: one
    case for each, by load and by save."""
    seq = Sequence(DictStore(), LAYOUT, TOKENS)
    with pytest.raises(UsageError, match=says):
        seq.load(cache)
    with pytest.raises(UsageError, match=says):
        await seq.save(cache)


async def test_wrong_arguments_are_refused_by_name() -> None:
    """Goal: nothing is read into a page that does not exist. Method: one case for each argument."""
    store = DictStore()
    cache = whole_cache(LAYOUT, BLOCKS, seed=6)
    seq = Sequence(store, LAYOUT, TOKENS)
    await seq.save(cache)
    for block_ids, says in ([0, 1], "page of each of the 6"), ([0, 1, 2, 3, 4, 6], "block 5 stands in no page"):
        with pytest.raises(UsageError, match=says):
            await steps(seq.load(cache, block_ids=block_ids))
    with pytest.raises(UsageError, match="overlap"):
        await steps(seq.load(cache, block_ids=[0, 1, 2, 3, 4, 4]))
    for options, says in (
        ({"order": "front"}, "order is 'front'"),
        ({"blocks": 7}, "6 whole blocks"),
        ({"ahead": -1}, "ahead"),
        ({"deadline_s": 0}, "deadline_s=0"),
    ):
        with pytest.raises(UsageError, match=says):
            await steps(seq.load(cache, **options))
    with pytest.raises(UsageError, match="start is 5"):
        await seq.save(cache, start=5, blocks=3)
    with pytest.raises(UsageError, match="read-only"):
        cache.setflags(write=False)
        seq.load(cache)
    for mixed in ("klhnd", "nlkhd"):
        layout = dataclasses.replace(LAYOUT, order=mixed)
        by_layer = [np.zeros((6, *layout.layer_shape), np.float32) for _ in range(4)]
        with pytest.raises(UsageError, match="starts with 'l'"):
            Sequence(store, layout, TOKENS).load(by_layer)


async def test_reading_ahead_needs_async_with_and_gives_the_same_blocks() -> None:
    """Goal: a pipeline overlaps reads with the caller's work, and nothing is in flight after it. Method: with ahead=2
    the store has been asked for three groups when the first is handed out; leave after it; no read is left."""
    layout = dataclasses.replace(LAYOUT, layer_groups=4)
    store = DictStore()
    source, into = whole_cache(layout, BLOCKS, seed=7), whole_cache(layout, BLOCKS)
    seq = Sequence(store, layout, TOKENS)
    await seq.save(source)
    with pytest.raises(UsageError, match="async with"):
        await anext(seq.load(into, ahead=1))
    async with seq.load(into, ahead=2) as load:
        assert [step.layers.start async for step in load] == [0, 1, 2, 3]
    assert (into == source).all()
    store.gets = 0
    async with seq.load(into, ahead=2) as load:
        await anext(load)
        assert store.gets == 3
        store.gate = asyncio.Event()
        await anext(load)
        await asyncio.sleep(0)
        assert store.writing == 1
    assert store.writing == 0
    with pytest.raises(StopAsyncIteration):
        await anext(load)


@pytest.mark.parametrize("ahead", [0, 2])
async def test_a_cancelled_load_leaves_no_read_behind(ahead: int) -> None:
    """Goal: after a cancel nobody writes into the cache. Method: block the store, cancel the task that loads, and see
    that no read is running when it has ended, and that the load stays over."""
    layout = dataclasses.replace(LAYOUT, layer_groups=4)
    store = DictStore()
    into = whole_cache(layout, BLOCKS)
    seq = Sequence(store, layout, TOKENS)
    await seq.save(whole_cache(layout, BLOCKS, seed=8))
    store.gate = asyncio.Event()
    async with seq.load(into, ahead=ahead) as load:
        task = asyncio.ensure_future(anext(load))
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.writing
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.writing == 0
        with pytest.raises(StopAsyncIteration):
            await anext(load)
    assert not into.any()


@pytest.mark.parametrize("order", ["layer", "block"])
async def test_an_error_of_the_client_comes_out_alone_and_ends_the_load(order: Any) -> None:
    """Goal: callers catch typed errors, not groups of them. Method: a store that raises in the middle."""
    layout = dataclasses.replace(LAYOUT, layer_groups=2)
    store = DictStore()
    seq = Sequence(store, layout, TOKENS)
    await seq.save(whole_cache(layout, BLOCKS, seed=9))
    store.broken = ClientClosed("closed")
    load = seq.load(whole_cache(layout, BLOCKS), order=order)
    with pytest.raises(ClientClosed):
        await anext(load)
    assert await steps(load) == []
    assert store.writing == 0


async def test_short_prompts_have_no_blocks_and_do_nothing() -> None:
    """Goal: the empty case is plain. Method: fewer tokens than a block."""
    store = DictStore()
    seq = Sequence(store, LAYOUT, [1, 2, 3])
    cache = whole_cache(LAYOUT, 1)
    assert (seq.blocks_count, await seq.match(), await steps(seq.load(cache))) == (0, 0, [])
    saved = await seq.save(cache)
    assert (saved.blocks, saved.stored, store.puts) == (0, 0, 0)
