"""A node that encodes its blocks on disk: what comes back, from whichever codec, and what is never taken for it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import structlog
import xxhash

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import works
from tests.harness import wait_until
from tests.integration.test_disk import BLOCK, MIB, config, flip, life, numbers, on_disk, process, put_all
from tests.tiers.coded import as_words, kv_values
from ucxkv import PutStatus
from ucxkv.directory import ReadStatus
from ucxkv.errors import SetupError
from ucxkv.node import Node
from ucxkv.node.disk.tier import datafile_bytes
from ucxkv.tiers.codecs import codec_of
from ucxkv.tiers.datafiles import Block, Datafiles
from ucxkv.tiers.engines import open_engine

TOKENS, CHANNELS = 16, 128
INT8 = {"disk_codec": "int8", "disk_dtype": "bfloat16", "disk_channels": CHANNELS}
LOSSLESS = {"disk_codec": "lossless", "disk_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def _needs_the_extra() -> None:
    pytest.importorskip("zstandard", reason="needs the extra codec")


def kv_blocks(n: int, dtype: str = "bfloat16", seed: int = 1) -> np.ndarray:
    """n blocks of BLOCK bytes, u8[n, BLOCK], with values as models have them."""
    width = 4 if dtype == "float32" else 2
    groups = BLOCK // width // TOKENS // CHANNELS
    return as_words(kv_values((n, groups, TOKENS, CHANNELS), seed), dtype).view(np.uint8).reshape(n, BLOCK)


def stored_as(value: np.ndarray, name: str, dtype: str = "bfloat16") -> bytes:
    """What the codec makes of a block."""
    data = codec_of(name).encode(value, dtype=dtype, shape=shape_of(value, dtype))
    assert data is not None
    return bytes(data)


def shape_of(value: np.ndarray, dtype: str) -> tuple[int, int, int]:
    width = 4 if dtype == "float32" else 2
    return value.nbytes // width // TOKENS // CHANNELS, TOKENS, CHANNELS


def back(values: np.ndarray, name: str, dtype: str = "bfloat16") -> np.ndarray:
    """What comes back of each block."""
    into = np.empty_like(values)
    for value, out in zip(values, into, strict=True):
        codec_of(name).decode(stored_as(value, name, dtype), out)
    return into


def each_is(got: list[bytes | None] | None, *allowed: np.ndarray) -> bool:
    """Whether every value is that of one of these arrays at its place."""
    assert got is not None
    return all(value in [one[at].tobytes() for one in allowed] for at, value in enumerate(got))


@pytest.mark.parametrize(
    ("name", "dtype", "path"),
    [
        ("lossless", "bfloat16", "mapped"),
        ("lossless", "float32", "message"),
        ("int8", "bfloat16", "mapped"),
        ("int8", "float16", "message"),
        ("int8", "float32", "network"),
    ],
)
async def test_encoded_blocks_are_served_and_survive_kill_9(tmp_path: Path, name: str, dtype: str, path: str) -> None:
    """Goal: a codec costs space and time, not bytes. Method: a chain of three times the memory; each value that is read
    is that which was put, or, with loss, exactly what the codec makes of it; less is on the disk than was put; kill -9;
    all come back, with loss all as the codec makes them, twice."""
    chain, values = keys(96), kv_blocks(96, dtype)
    lossy = back(values, name, dtype)
    assert (lossy == values).all() == (name == "lossless")
    flags = {"disk_codec": name, "disk_dtype": dtype, "disk_channels": str(CHANNELS)}
    with process(tmp_path, **flags) as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            await put_all(kv, chain, values)
            for _ in range(2):
                assert each_is((await kv.get_many(chain)).values, values, lossy)
            found = await numbers(kv)
            assert found["evicted"] == 0 and found["disk_demoted"] > 60 and found["disk_promoted"] > 60
            assert found["disk_decoded_bytes"] == BLOCK * found["disk_promoted"]
            await wait_until(lambda: on_disk(kv), "all copies to be written")
            found = await numbers(kv)
            assert found["disk_codec_declined"] == found["disk_damaged"] == found["disk_read_failed"] == 0
            assert found["disk_codec_in_bytes"] == 96 * BLOCK
            assert found["disk_codec_out_bytes"] == found["disk_payload_bytes"] < 96 * BLOCK * 15 / 16
            assert name in (await kv.status())[0].facts["disk"]
        node.kill()
    with process(tmp_path, **flags) as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            assert (await kv.match(chain)).tiers.tolist() == [2] * 96
            for _ in range(2):
                assert each_is((await kv.get_many(chain)).values, lossy)
            into = np.zeros_like(values)
            assert (await kv.get_many(chain, into)).hits == 96 and (into == lossy).all()
            assert await works(kv)
        assert node.stop() == 0


async def test_blocks_of_other_settings_stay_readable(tmp_path: Path) -> None:
    """Goal: the setting may change at any start. Method: a life with each codec, the folder full of all of them at the
    end; every chain comes back in each later life as its own codec made it."""
    chains, values = [keys(12) for _ in range(4)], [kv_blocks(12, seed=n) for n in range(4)]
    settings = [{}, LOSSLESS, INT8, {}]
    made = [values[0], values[1], back(values[2], "int8"), values[3]]
    for n, changes in enumerate(settings):
        async with life(tmp_path, **changes) as (node, kv):
            for before in range(n):
                assert each_is((await kv.get_many(chains[before])).values, made[before])
            await put_all(kv, chains[n], values[n])
            assert node.disk is not None and node.disk.unreachable == 0
    async with life(tmp_path) as (_, kv):
        for chain, was in zip(chains, made, strict=True):
            assert each_is((await kv.get_many(chain)).values, was)


@pytest.mark.parametrize("changes", [LOSSLESS, INT8])
async def test_what_a_codec_declines_is_stored_as_it_is(tmp_path: Path, changes: dict[str, object]) -> None:
    """Goal: any bytes are welcome. Method: random ones, values of 1 byte to a few KiB, NaN everywhere (which int8
    refuses and lossless takes); all come back as they were put, before and after a restart."""
    sizes = [1, 2, 3, 31, 4095, 4096, 4097, 10_001]
    nan = np.full((4, BLOCK // 2), 0x7FC1, np.uint16).view(np.uint8).reshape(4, BLOCK)
    noise, tiny = blocks(20, BLOCK, seed=3), [blocks(1, size, seed=size)[0] for size in sizes]
    pairs = [(keys(20), noise), (keys(4), nan)]
    names = keys(len(tiny))

    async def check(kv: ucxkv.Client) -> None:
        for chain, values in pairs:
            assert each_is((await kv.get_many(chain)).values, values)
        for key, value in zip(names, tiny, strict=True):
            assert await kv.get(key) == value.tobytes()

    async with life(tmp_path, **changes) as (_, kv):
        for chain, values in pairs:
            await put_all(kv, chain, values)
        for key, value in zip(names, tiny, strict=True):
            assert await kv.put(key, value) is PutStatus.STORED
        await check(kv)
        await wait_until(lambda: on_disk(kv), "all copies to be written")
        found = await numbers(kv)
        assert found["disk_codec_declined"] == 20 + len(tiny)
        assert 20 * BLOCK < found["disk_codec_out_bytes"] < 22 * BLOCK
    async with life(tmp_path, **changes) as (_, kv):
        assert (await kv.match(pairs[0][0])).tiers.tolist() == [2] * 20
        await check(kv)


@pytest.mark.parametrize(("name", "changes"), [("lossless", LOSSLESS), ("int8", INT8)])
@pytest.mark.parametrize("when", ["stopped", "running"])
async def test_encoded_bytes_that_changed_on_disk_are_a_miss(
    tmp_path: Path, name: str, changes: dict[str, object], when: str
) -> None:
    """Method: flip one byte of one encoded block, of a stopped node and of a running one; that block and those below
    are a miss, the ones above are served, and puts below go on."""
    chain, values = keys(16), kv_blocks(16)
    made = back(values, name)
    async with life(tmp_path, **changes) as (_, kv):
        await put_all(kv, chain, values)
    if when == "stopped":
        flip(tmp_path / "disk", np.frombuffer(stored_as(values[8], name), np.uint8))
    async with life(tmp_path, **changes) as (node, kv):
        if when == "running":
            flip(tmp_path / "disk", np.frombuffer(stored_as(values[8], name), np.uint8))
        got = await kv.get_many(chain)
        assert got.values is not None and each_is(got.values[:8], made)
        assert got.values[8] is None and got.status[8] == ReadStatus.MISS
        assert (await kv.match(chain)).blocks == 8 and node.disk is not None
        assert node.disk.unreachable == 7 if when == "stopped" else (await numbers(kv))["disk_damaged"] >= 1
        await put_all(kv, chain, values)
        assert each_is((await kv.get_many(chain)).values, made, values)


async def write_by_hand(folder: Path, blocks_: list[Block]) -> None:
    """Put blocks into a node's folder as no node would."""
    engine = open_engine("threads", directory=folder)
    store, _, _ = await Datafiles.open(folder, engine, file_bytes=datafile_bytes(96 * MIB), files_max=8)
    await store.write(blocks_)
    await store.aclose()
    await engine.aclose()


async def test_entries_that_decode_to_something_else_are_never_data(tmp_path: Path) -> None:
    """Goal: the sum of a stored block alone proves nothing about what it becomes. Method: entries whose own sum is
    good, but which decode to another block's bytes, to another length, are no encoded block, another codec's, of a
    codec that nobody has, or contradict themselves; each is a miss, a good one beside them is served."""
    (tmp_path / "disk").mkdir()
    values = kv_blocks(2)
    good, other = (stored_as(value, "lossless") for value in values)
    total = xxhash.xxh3_64_intdigest
    names = keys(8)
    shown = total(values[0])
    said = [
        (good, shown, 1, BLOCK),
        (other, shown, 1, BLOCK),
        (good, shown, 1, BLOCK - 1),
        (b"no encoded block at all", shown, 1, BLOCK),
        (good, shown, 2, BLOCK),
        (good, shown, 77, BLOCK),
        (good, shown, 0, BLOCK),
        (good, shown, 1, 0),
    ]
    await write_by_hand(
        tmp_path / "disk",
        [
            Block(key, total(data), version, (np.frombuffer(data, np.uint8),), flags, original=original)
            for key, (data, version, flags, original) in zip(names, said, strict=True)
        ],
    )
    async with life(tmp_path, **LOSSLESS) as (node, kv):
        assert node.disk is not None and node.disk.recovered == 5
        assert (await kv.exists_many(names)).tolist() == [True] * 5 + [False] * 3
        got = await kv.get_many(names)
        assert got.values == [values[0].tobytes(), *[None] * 7]
        assert set(got.status[1:].tolist()) == {ReadStatus.MISS} and (await numbers(kv))["disk_read_failed"] == 4
        assert not (await kv.exists_many(names[1:])).any() and await works(kv)


async def test_without_zstandard_a_node_says_so_and_what_needs_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a missing extra is named at the start, and costs no block. Method: blocks of lossless on disk; the package
    goes: lossless is refused, with another setting the blocks are left out and named, int8 goes on without its
    fallback; the package is there again: so are the blocks."""
    chain, values = keys(6), kv_blocks(6)
    async with life(tmp_path, **LOSSLESS) as (_, kv):
        await put_all(kv, chain, values)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(SetupError, match=r'pip install "ucxkv\[codec\]"'):
            async with Node(config(tmp_path, **LOSSLESS)):
                pass
        with structlog.testing.capture_logs() as logs:
            async with life(tmp_path, **INT8) as (_, kv):
                assert not (await kv.exists_many(chain)).any()
                own = keys(3)
                await put_all(kv, own, blocks(3, BLOCK))
                await wait_until(lambda: on_disk(kv), "all copies to be written")
                assert (await numbers(kv))["disk_codec_declined"] == 3
        (said,) = [one for one in logs if one["event"] == "disk.undecodable"]
        assert said["blocks"] == 6 and "ucxkv[codec]" in said["fix"]
    async with life(tmp_path) as (_, kv):
        assert each_is((await kv.get_many(chain)).values, values)
        assert each_is((await kv.get_many(own)).values, blocks(3, BLOCK))


async def test_readers_meanwhile_see_one_value_or_the_other_and_never_a_bad_sum(tmp_path: Path) -> None:
    """Goal: place and sum change at once. Method: with int8, clients on each path read a chain of twice the memory
    round and round, so that its blocks leave memory and come back as others; every value is whole, that which was put
    or that which the codec makes of it, once the latter then always; no read finds bytes without their sum."""
    chain, values = keys(64), kv_blocks(64)
    lossy = back(values, "int8")
    async with life(tmp_path, **INT8) as (node, kv):
        await put_all(kv, chain, values)

        async def read(path: str, at: int) -> None:
            async with ucxkv.connect(node.address, path=path) as own:
                came_back: set[int] = set()
                for turn in range(6):
                    order = [(at + i) % 64 for i in range(64)]
                    some = order[: 16 + 8 * turn]
                    got = await own.get_many([chain[i] for i in some], deadline_s=60)
                    assert got.hits == len(some) and each_is(got.values, values[some], lossy[some])
                    assert got.values is not None
                    for i, value in zip(some, got.values, strict=True):
                        assert i not in came_back or value == lossy[i].tobytes(), "an older value came back"
                        came_back |= {i} if value == lossy[i].tobytes() else set()
                stats = own.stats()
                assert stats["corrupt"] == stats["errors"] == 0

        paths = ["mapped", "message", "network", "mapped"]
        await asyncio.gather(*(read(path, 16 * n) for n, path in enumerate(paths)))
        found = await numbers(kv)
        assert found["disk_promoted"] > 64 and found["damaged"] == found["disk_read_failed"] == 0


async def test_durable_puts_are_exact_and_what_they_make_durable_stays_as_it_came_back(tmp_path: Path) -> None:
    """Goal: class durable and a codec with loss. Method: a durable chain, and a durable block below one that int8
    stored and brought back; after kill -9 the first has the bytes that were put, the others those that readers saw."""
    chain, values = keys(60), kv_blocks(60)
    own, exact = keys(8), kv_blocks(8, seed=9)
    lossy = back(values, "int8")
    flags = {
        "disk_codec": "int8", "disk_dtype": "bfloat16", "disk_channels": "128", "durability": "process",
        "state_dir": str(tmp_path / "state"),
    }  # fmt: skip
    (below,) = keys(1)
    with process(tmp_path, **flags) as node:
        async with ucxkv.connect(node.address) as kv:
            (await kv.put_many(own, exact, "chain", durable=True)).raise_for_status()
            await put_all(kv, chain, values)
            assert (await kv.match(chain)).tiers[:4].tolist() == [2] * 4
            assert await kv.put(below, exact[0], chain[3], durable=True) is PutStatus.STORED
            assert (await numbers(kv))["durable_blocks"] == 8 + 4 + 1
            assert each_is((await kv.get_many(chain[:4])).values, lossy)
        node.kill()
    with process(tmp_path, **flags) as node:
        async with ucxkv.connect(node.address) as kv:
            assert each_is((await kv.get_many(own)).values, exact)
            assert each_is((await kv.get_many(chain[:4])).values, lossy)
            assert await kv.get(below) == exact[0].tobytes()
        node.stop()
    from ucxkv.node.state import forget

    forget(tmp_path / "state")


async def test_a_block_is_stored_with_loss_once_however_often_it_is_written(tmp_path: Path) -> None:
    """Goal: losses do not add up. Method: a chain that int8 stored and brought back is held in memory while the disk is
    filled more than once, so that its copies go and it is written anew; it leaves memory and comes back; three times,
    with restarts between, one of them without a codec. Every time it is what it was after the first; a chain that was
    put as exact is what was put."""
    chain, values, true = keys(6), kv_blocks(6), keys(4)
    lossy, fill = back(values, "int8"), kv_blocks(20, seed=8)
    small = {**INT8, "disk_bytes": 24 * MIB}
    assert (back(lossy, "int8") != lossy).any(), "stored with loss again it would be another one"
    async with life(tmp_path, **small) as (_, kv):
        await put_all(kv, chain, values)
        assert (await kv.put_many(true[:3], values[:3], "chain", exact=True)).ok
        assert await kv.put(true[3], values[3], true[2], exact=True) is PutStatus.STORED
    for settings in (small, {"disk_bytes": 24 * MIB}, small):
        async with life(tmp_path, **settings) as (node, kv):
            assert each_is((await kv.get_many(chain)).values, lossy)
            async with kv.lease(chain + true) as lease:
                assert lease.granted.all() and node.disk is not None
                before = {place_of(node, key) for key in chain + true}
                while {place_of(node, key) for key in chain + true} & before:
                    await put_all(kv, keys(20), fill, step=20)
                await wait_until(lambda: on_disk(kv), "all copies to be written")
                assert lease.valid
            await put_all(kv, keys(20), fill)
            await put_all(kv, keys(20), fill)
            assert (await kv.match(chain)).tiers.tolist() == [2] * 6
            assert each_is((await kv.get_many(chain)).values, lossy)
            assert (await kv.match(true)).tiers.tolist() == [2] * 4
            assert each_is((await kv.get_many(true)).values, values)


def place_of(node: Node, key: bytes) -> object:
    """Where a block's copy is."""
    assert node.disk is not None
    directory = node.store.directory
    slot = int(directory.table.find(key)[0])
    assert slot >= 0, "the block is gone"
    return node.disk.places.place(directory.cold.handle(slot) or directory.cold.copy[slot])


@pytest.mark.parametrize("name", ["lossless", "int8"])
async def test_kill_9_while_blocks_are_encoded_leaves_a_prefix_of_right_bytes(tmp_path: Path, name: str) -> None:
    """Goal: no half-written encoded block is ever one. Method: four times, a chain is put and the node killed while it
    encodes and writes; the next life shows a prefix of each earlier chain, each block as the codec makes it."""
    flags = {"disk_codec": name, "disk_dtype": "bfloat16", "disk_channels": str(CHANNELS)}
    put: list[tuple[list[bytes], np.ndarray]] = []
    shown: dict[int, int] = {}
    for turn in range(5):
        with process(tmp_path, **flags) as node:
            async with ucxkv.connect(node.address) as kv:
                for n, (chain, made) in enumerate(put):
                    there = (await kv.match(chain)).blocks
                    assert there >= shown.get(n, 0), "a block that was there after a kill is gone after the next"
                    assert each_is((await kv.get_many(chain[:there])).values, made)
                    shown[n] = there
                chain, values = keys(40), kv_blocks(40, seed=turn)
                put.append((chain, back(values, name)))
                await put_all(kv, chain, values)
            node.kill()
    assert any(shown.values())
