"""A store of datafiles whose engine is full of reads: nothing of it fails, and nothing is dropped, for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiers.datafile_lives import block, data_of, fill, key_of, opened, read_bytes
from tests.tiers.faulty_engine import FaultyDisk, FaultyEngine
from ucxkv.tiers.datafile_format import BLOCK_BYTES
from ucxkv.tiers.datafiles import Hooks, Place
from ucxkv.tiers.io import EngineBusy, OpKind


class FullEngine(FaultyEngine):
    """Refuses a batch that `is_refused` names, as an engine does that has all operations it can, `times` times."""

    def __init__(self, disk: FaultyDisk, is_refused: Callable[[NDArray[np.void]], bool], times: int) -> None:
        super().__init__(disk)
        self.is_refused, self.times = is_refused, times
        self.refused: dict[bytes, int] = {}

    def submit(self, ops: NDArray[np.void]) -> asyncio.Future[NDArray[np.int64]]:
        name = ops[["offset", "length", "file", "kind"]].tobytes()
        if self.is_refused(ops) and self.refused.get(name, 0) < self.times:
            self.refused[name] = self.refused.get(name, 0) + 1
            raise EngineBusy("4096 operations are not done")
        self.refused.pop(name, None)
        return super().submit(ops)


def is_write(ops: NDArray[np.void]) -> bool:
    return bool((ops["kind"] == OpKind.WRITE).all())


def is_read(ops: NDArray[np.void]) -> bool:
    return bool((ops["kind"] == OpKind.READ).all())


@pytest.mark.parametrize("is_refused", [is_write, is_read], ids=["writes", "reads"])
async def test_a_full_engine_ends_no_writing_and_drops_no_hot_block(
    is_refused: Callable[[NDArray[np.void]], bool],
) -> None:
    """Goal: heads, indexes and re-admissions wait for the engine as batches do. Method: a block that stays hot through
    many lives of the files; each batch, or each read, is refused a few times; nothing failed, the block is there."""
    disk = FaultyDisk()
    engine = FullEngine(disk, lambda ops: False, times=3)
    index: dict[bytes, Place] = {}

    def moved(key: bytes, old: Place, new: Place) -> None:
        if index.get(key) == old:
            index[key] = new

    hooks = Hooks(lambda key, place: key == key_of(4) and index.get(key) == place, moved)
    async with opened(disk, engine, hooks=hooks, readmit_share=0.25) as (store, _, _):
        engine.is_refused = is_refused
        for number in range(100):
            (index[key_of(number)],) = await store.write([block(number)])
        engine.is_refused = lambda ops: False
        assert store.failure is None and store.stats.files_reclaimed > 3
        assert store.stats.blocks_readmitted >= store.stats.files_reclaimed // 4
        assert await read_bytes(store, index[key_of(4)]) == data_of(4)
    async with opened(disk, FaultyEngine(disk)) as (_, found, _):
        assert key_of(4) in {each.key for each in found}


async def test_a_store_is_closed_while_its_engine_is_full() -> None:
    """Goal: no hang. Method: an index waits for the engine when the store is closed; the engine takes it, and the
    store is closed."""
    disk = FaultyDisk()
    engine = FullEngine(disk, lambda ops: bool((ops["offset"] > 30 * BLOCK_BYTES).any()), times=50)
    async with opened(disk, engine) as (store, _, _):
        await fill(store, range(14))
        assert store.failure is None
        closing = asyncio.ensure_future(store.aclose())
        await asyncio.wait_for(closing, 30)
    async with opened(disk, FaultyEngine(disk)) as (_, found, _):
        assert len(found) == 14
