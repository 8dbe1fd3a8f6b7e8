"""A node with a disk tier: what leaves memory stays visible, comes back as it was put, and is there after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import works
from tests.harness import NodeProcess, wait_until
from tests.integration.durable_nodes import reboot
from ucxkv import DeleteStatus, PutStatus
from ucxkv.directory import ReadStatus
from ucxkv.errors import SetupError
from ucxkv.node import Node, NodeConfig
from ucxkv.node.keeping import file_system
from ucxkv.node.state import forget

MIB = 1 << 20
BLOCK = 256 << 10
DISK_BYTES = 96 * MIB


def config(folder: Path, **changes: object) -> NodeConfig:
    values: dict[str, object] = {
        "name": "d1", "listen": "127.0.0.1:0", "host_bytes": 8 * MIB, "disk": (str(folder / "disk"),),
        "disk_bytes": DISK_BYTES, **changes,
    }  # fmt: skip
    return NodeConfig(**values)  # type: ignore[arg-type]


def process(folder: Path, **flags: str) -> NodeProcess:
    return NodeProcess("d1", **{"host_bytes": "8MiB", "disk": str(folder / "disk"), "disk_bytes": "96MiB", **flags})


@contextlib.asynccontextmanager
async def life(folder: Path, **changes: object) -> AsyncIterator[tuple[Node, ucxkv.Client]]:
    """One life in this process, checked at its end."""
    async with Node(config(folder, **changes)) as node, ucxkv.connect(node.address) as kv:
        yield node, kv
        node.store.check()


async def put_all(kv: ucxkv.Client, chain: list[bytes], values: np.ndarray, step: int = 8) -> None:
    """In calls of a few, as engines do; back-pressure is waited for."""
    for at in range(0, len(chain), step):
        some = chain[at : at + step]
        parents = [chain[at - 1] if at else bytes(16), *some[:-1]]
        (await kv.put_many(some, values[at : at + step], parents)).raise_for_status()


async def numbers(kv: ucxkv.Client) -> dict[str, float]:
    return (await kv.status())[0].numbers


async def on_disk(kv: ucxkv.Client) -> bool:
    return (await numbers(kv))["disk_pending"] == 0


@pytest.mark.parametrize("path", ["mapped", "message", "network"])
async def test_a_working_set_larger_than_memory_is_served_and_survives_kill_9(tmp_path: Path, path: str) -> None:
    """User voices: disk tiers that are lost at a restart. Method: a chain of four times the memory; all of it matches,
    and comes back in one call, block by block and as bytes; kill -9; again."""
    chain, values = keys(128), blocks(128, BLOCK, seed=5)
    with process(tmp_path) as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            await put_all(kv, chain, values)
            match = await kv.match(chain)
            assert match.blocks == 128 and set(match.tiers.tolist()) == {1, 2}
            into = np.zeros_like(values)
            assert (await kv.get_many(chain, into)).hits == 128 and (into == values).all()
            assert await kv.get(chain[3]) == values[3].tobytes()
            one = np.zeros(BLOCK, np.uint8)
            for i in range(0, 128, 9):
                assert await kv.get(chain[i], one) == BLOCK and (one == values[i]).all()
            found = await numbers(kv)
            assert found["evicted"] == 0 and found["disk_demoted"] > 96 and found["disk_promoted"] > 96
            await wait_until(lambda: on_disk(kv), "all copies to be written")
        node.kill()
    with process(tmp_path) as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            assert (await kv.match(chain)).tiers.tolist() == [2] * 128
            into = np.zeros_like(values)
            assert (await kv.get_many(chain, into)).hits == 128 and (into == values).all()
            assert await works(kv)
        assert node.stop() == 0


async def test_what_is_written_late_is_written_at_the_end(tmp_path: Path) -> None:
    """Goal: a rolling restart keeps all. Method: put and leave at once, so that most has no copy yet; the next life has
    all of it, cold."""
    chain, values = keys(24), blocks(24, BLOCK, seed=6)
    async with life(tmp_path) as (_, kv):
        await put_all(kv, chain, values, step=24)
    async with life(tmp_path) as (node, kv):
        assert (await kv.match(chain)).tiers.tolist() == [2] * 24
        assert node.disk is not None and (node.disk.recovered, node.disk.unreachable) == (24, 0)
        assert (await kv.get_many(chain)).values == [value.tobytes() for value in values]


async def test_a_deleted_block_does_not_come_back(tmp_path: Path) -> None:
    """Method: delete the tail of a chain, in memory, on disk and on the way there; put one of them anew with other
    bytes; kill -9: the deleted are gone, the new one has its new bytes."""
    chain, values = keys(60), blocks(60, BLOCK, seed=7)
    with process(tmp_path) as node:
        async with ucxkv.connect(node.address) as kv:
            await put_all(kv, chain, values)
            assert (await kv.delete(chain[20:])).tolist() == [DeleteStatus.DELETED] * 40
            assert await kv.put(chain[20], values[0], chain[19]) is PutStatus.STORED
            await wait_until(lambda: on_disk(kv), "all copies to be written")
        node.kill()
    with process(tmp_path) as node:
        async with ucxkv.connect(node.address) as kv:
            assert (await kv.match(chain)).blocks == 21 and not (await kv.exists_many(chain[21:])).any()
            assert await kv.get(chain[20]) == values[0].tobytes()


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_durable_put_below_blocks_on_disk_makes_them_durable(
    tmp_path: Path, request: pytest.FixtureRequest, durability: str
) -> None:
    """Goal: class durable does not care where its ancestors lie. Method: a cold chain; a durable put below it, and of a
    cold block itself; both kinds come back after kill -9 (power: and without what was in memory), durable ones into
    memory."""
    if durability == "power" and file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory: set TMPDIR to a folder on a disk")
    chain, values = keys(60), blocks(60, BLOCK, seed=8)
    flags = {"durability": durability, "state_dir": str(tmp_path / "state")}
    request.addfinalizer(lambda: forget(tmp_path / "state"))
    with process(tmp_path, **flags) as node:
        async with ucxkv.connect(node.address) as kv:
            await put_all(kv, chain, values)
            assert (await kv.match(chain)).tiers[:10].tolist().count(2) >= 5, "which ones is the policy's to choose"
            (below,) = keys(1)
            assert await kv.put(below, values[0], chain[9], durable=True) is PutStatus.STORED
            assert await kv.put(chain[11], values[11], chain[10], durable=True) is PutStatus.ALREADY
            assert (await kv.match(chain)).tiers[:12].tolist() == [1] * 12
            assert (await numbers(kv))["durable_blocks"] == 13
            await wait_until(lambda: on_disk(kv), "all copies to be written")
        node.kill()
    if durability == "power":
        reboot(tmp_path / "state")
    with process(tmp_path, **flags) as node:
        async with ucxkv.connect(node.address) as kv:
            match = await kv.match(chain)
            assert match.blocks == 60 and match.tiers.tolist() == [1] * 12 + [2] * 48
            into = np.zeros_like(values)
            assert (await kv.get_many(chain, into)).hits == 60 and (into == values).all()
            assert await kv.get(below) == values[0].tobytes()
        node.stop()


async def test_leases_and_views_bring_blocks_into_memory_and_keep_them_there(tmp_path: Path) -> None:
    """Method: a view and a lease of cold blocks; then so much is read that all else leaves memory; both still stand."""
    chain, values = keys(60), blocks(60, BLOCK, seed=9)
    async with life(tmp_path) as (_, kv):
        await put_all(kv, chain, values)
        view = await kv.view(chain[2])
        assert view is not None
        async with view, kv.lease(chain[4:8]) as lease:
            assert lease.granted.all() and (await kv.match(chain)).tiers[4:8].tolist() == [1] * 4
            assert (await kv.get_many(chain)).hits == 60
            assert bytes(view.data) == values[2].tobytes() and view.valid
            assert (await kv.match(chain)).tiers[4:8].tolist() == [1] * 4


async def test_many_readers_of_the_same_blocks_read_the_disk_once_each_and_all_are_served(tmp_path: Path) -> None:
    """Goal: no thundering herd, no starvation. Method: 8 clients read the same cold chain, larger than memory, at once,
    each from another place on; a cancelled one among them."""
    chain, values = keys(64), blocks(64, BLOCK, seed=10)
    async with life(tmp_path) as (node, kv):
        await put_all(kv, chain, values)

        async def read(at: int) -> None:
            async with ucxkv.connect(node.address) as own:
                order = [(at + i) % 64 for i in range(64)]
                into = np.zeros_like(values)
                result = await own.get_many([chain[i] for i in order], into, deadline_s=60)
                assert result.hits == 64 and (into == values[order]).all()

        async def cancelled() -> None:
            task = asyncio.create_task(read(0))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(read(8 * i) for i in range(8)), cancelled())
        assert node.disk is not None and not node.disk.promoter.in_hand
        await wait_until(lambda: _no_leases(kv), "the last lease to end")


async def _no_leases(kv: ucxkv.Client) -> bool:
    return (await numbers(kv))["leases"] == 0


async def test_warm_is_a_hint_that_brings_back_what_has_room(tmp_path: Path) -> None:
    """Method: warm the head of a cold chain, then keys that are nowhere, then more than memory has."""
    chain, values = keys(60), blocks(60, BLOCK, seed=11)
    async with life(tmp_path) as (_, kv):
        await put_all(kv, chain, values)
        await asyncio.sleep(0.05)  # policies count in ticks of 10 ms: what was put last is older by some
        assert await kv.warm(chain[:6]) == 6
        assert (await kv.match(chain)).tiers[:6].tolist() == [1] * 6
        assert await kv.warm(keys(4)) == 0
        assert 0 < await kv.warm(chain) <= 60
        assert (await kv.match(chain)).blocks == 60


async def test_a_long_block_comes_back_although_what_is_free_lies_in_small_pieces(tmp_path: Path) -> None:
    """Method: memory full of small blocks, of which every other one is deleted: enough is free, and nowhere enough for
    a block of 1 MiB that is on disk; it is read all the same, again and again."""
    (long,) = keys(1)
    (value,) = blocks(1, MIB, seed=16)
    async with life(tmp_path) as (_, kv):
        assert await kv.put(long, value) is PutStatus.STORED
        for n in range(6):
            small = keys(600)
            values = blocks(600, 12 << 10, seed=n)
            assert (await kv.put_many(small, values)).ok
            await kv.delete(small[::2])
            got = np.zeros(MIB, np.uint8)
            assert await kv.get(long, got, deadline_s=5) == MIB and (got == value).all()


async def test_a_small_disk_is_used_again_and_no_prefix_has_a_hole(tmp_path: Path) -> None:
    """Method: five times of what the disk has, in chains; every chain is a prefix of what was put, with its bytes, and
    the youngest is whole."""
    chains = [keys(20) for _ in range(96)]
    async with life(tmp_path, disk_bytes=DISK_BYTES) as (node, kv):
        for n, chain in enumerate(chains):
            await put_all(kv, chain, blocks(20, BLOCK, seed=n), step=20)
        found = await numbers(kv)
        assert found["disk_files_reclaimed"] > 2 and found["disk_reclaimed"] > 0
        there = [(await kv.match(chain)).blocks for chain in chains]
        assert there[-1] == 20 and sum(there) * BLOCK > DISK_BYTES / 2 and 0 in there
        for n, (chain, blocks_there) in enumerate(zip(chains, there, strict=True)):
            assert not (await kv.exists_many(chain[blocks_there:])).any()
            got = await kv.get_many(chain[:blocks_there])
            assert got.values is not None
            for value, was in zip(got.values, blocks(20, BLOCK, seed=n), strict=False):
                assert value == was.tobytes()
        assert node.disk is not None and not node.disk.demoter.failure


async def test_a_table_that_is_full_of_blocks_on_disk_takes_new_ones(tmp_path: Path) -> None:
    """Method: far more small blocks than slots; puts go on, and the latest are there."""
    async with life(tmp_path, slots_count=512) as (_, kv):
        for n in range(8):
            chain = keys(200)
            await put_all(kv, chain, blocks(200, 16 << 10, seed=n), step=50)
            assert (await kv.match(chain)).blocks == 200


@pytest.mark.parametrize("when", ["stopped", "running"])
async def test_bytes_that_changed_on_disk_are_a_miss_and_what_is_below_goes_too(tmp_path: Path, when: str) -> None:
    """User voice: wrong bytes from a disk tier. Method: flip one byte of one block in the datafiles of a stopped node
    and of a running one; that block and those below are a miss, the ones above are served, and puts below go on."""
    chain, values = keys(16), blocks(16, BLOCK, seed=12)
    async with life(tmp_path) as (_, kv):
        await put_all(kv, chain, values)
    if when == "stopped":
        flip(tmp_path / "disk", values[8])
    async with life(tmp_path) as (node, kv):
        if when == "running":
            flip(tmp_path / "disk", values[8])
        got = await kv.get_many(chain)
        assert got.values is not None and got.values[:8] == [value.tobytes() for value in values[:8]]
        assert got.values[8] is None and got.status[8] == ReadStatus.MISS
        assert (await kv.match(chain)).blocks == 8 and node.disk is not None
        assert node.disk.unreachable == 7 if when == "stopped" else (await numbers(kv))["disk_damaged"] >= 1
        await put_all(kv, chain, values)
        assert (await kv.get_many(chain)).hits == 16


def flip(folder: Path, value: np.ndarray) -> None:
    """One byte of the one copy of this value."""
    flipped = 0
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        at = data.find(value.tobytes()[:4096])
        if at >= 0:
            with file.open("r+b") as out:
                out.seek(at + 77)
                out.write(bytes([data[at + 77] ^ 1]))
            flipped += 1
    assert flipped == 1


async def test_a_disk_that_fails_takes_nothing_of_memory_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the memory tier goes on. Method: every write of the engine fails with EIO from some moment on; puts go on
    and evict, what is in memory is read, the status names the failure."""
    from ucxkv.node.disk import tier as tier_module
    from ucxkv.tiers.engines.native import NativeEngine
    from ucxkv.tiers.io import OpKind

    assert tier_module is not None
    broken = False
    submit = NativeEngine.submit

    def failing(self: NativeEngine, ops: np.ndarray) -> asyncio.Future[np.ndarray]:
        if broken and (ops["kind"] == OpKind.WRITE).any():
            done = asyncio.get_running_loop().create_future()
            done.set_result(np.full(len(ops), -5, np.int64))
            return done
        return submit(self, ops)

    monkeypatch.setattr(NativeEngine, "submit", failing)
    async with life(tmp_path, disk_wait_ms=200) as (_, kv):
        chain, values = keys(60), blocks(60, BLOCK, seed=13)
        await put_all(kv, chain[:30], values[:30])
        await wait_until(lambda: on_disk(kv), "all copies to be written")
        broken = True
        for n in range(6):
            await put_all(kv, keys(20), blocks(20, BLOCK, seed=50 + n))
        report = (await kv.status())[0]
        assert report.numbers["disk_failed"] == 1 and "failed" in report.facts["disk"]
        assert report.numbers["evicted"] > 0
        there = (await kv.match(chain[:30])).blocks  # what was on disk before is still read
        got = await kv.get_many(chain[:there])
        assert there > 0 and got.values == [value.tobytes() for value in values[:there]]


async def test_a_disk_that_stands_still_delays_puts_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: writes of the engine are never done; puts of many times the memory go through all the same, by eviction;
    then the writes are done after all, and the node ends in good order."""
    from ucxkv.tiers.engines.native import NativeEngine
    from ucxkv.tiers.io import OpKind

    held: list[tuple[NativeEngine, np.ndarray, asyncio.Future[np.ndarray]]] = []
    is_stuck = False
    submit = NativeEngine.submit

    def stuck(self: NativeEngine, ops: np.ndarray) -> asyncio.Future[np.ndarray]:
        if is_stuck and (ops["kind"] == OpKind.WRITE).any():
            done = asyncio.get_running_loop().create_future()
            held.append((self, ops.copy(), done))
            return done
        return submit(self, ops)

    monkeypatch.setattr(NativeEngine, "submit", stuck)
    async with life(tmp_path, disk_wait_ms=100) as (_, kv):
        is_stuck = True
        for n in range(15):
            await put_all(kv, keys(8), blocks(8, BLOCK, seed=n))
        assert held and (await numbers(kv))["evicted"] > 0
        is_stuck = False
        for engine, ops, done in held:
            done.set_result(await submit(engine, ops))
        await wait_until(lambda: on_disk(kv), "all copies to be written")
        assert await works(kv)


async def test_two_nodes_on_one_folder_are_told_so(tmp_path: Path) -> None:
    """Method: a second node with the same folder; it names the folder and what to do, and the first goes on."""
    async with life(tmp_path) as (_, kv):
        with pytest.raises(SetupError, match="disk"):
            async with Node(config(tmp_path, name="d2")):
                pass
        assert await works(kv)


async def test_a_folder_that_cannot_be_used_is_named_at_the_start(tmp_path: Path) -> None:
    """Method: a file where the folder is to be."""
    (tmp_path / "disk").write_text("")
    with pytest.raises(SetupError, match="disk"):
        async with Node(config(tmp_path)):
            pass


async def test_drives_are_striped_and_one_may_come_or_go(tmp_path: Path) -> None:
    """Method: two folders, both written; all is there again with both; with one of them only what is on it as far as
    its parents are, and nothing is wrong."""
    chains = [keys(4) for _ in range(20)]
    values = blocks(4, BLOCK, seed=15)
    both = (str(tmp_path / "a"), str(tmp_path / "b"))
    async with life(tmp_path, disk=both) as (node, kv):
        for chain in chains:
            await put_all(kv, chain, values)
        await wait_until(lambda: on_disk(kv), "all copies to be written")
        assert node.disk is not None and all(one.blocks_written > 10 for one in node.disk.datafiles.stats)
    async with life(tmp_path, disk=both) as (_, kv):
        for chain in chains:
            assert (await kv.get_many(chain)).values == [value.tobytes() for value in values]
    async with life(tmp_path, disk=both[:1]) as (_, kv):
        for chain in chains:
            there = (await kv.match(chain)).blocks
            assert (await kv.get_many(chain[:there])).values == [value.tobytes() for value in values[:there]]


async def test_a_disk_that_needs_more_slots_than_memory_holds_is_refused_by_its_size(tmp_path: Path) -> None:
    """Goal: the message names disk_bytes, not the blocks' memory, which is small. Method: 1 EiB of disk."""
    with pytest.raises(SetupError, match=r"slot table of .*fix: lower disk_bytes"):
        async with Node(config(tmp_path, disk_bytes=1 << 60)):
            pass


async def test_a_disk_larger_than_its_drive_is_told_of_at_the_start(tmp_path: Path) -> None:
    """Goal: a size that can never be reached costs slots, so it is said. Method: a byte more than the drive has, then
    a size that fits."""
    drive = os.statvfs(tmp_path)
    for disk_bytes, said in ((drive.f_blocks * drive.f_frsize + 1, [str(tmp_path / "disk")]), (DISK_BYTES, [])):
        with structlog.testing.capture_logs() as logs:
            async with Node(config(tmp_path, disk_bytes=disk_bytes, slots_count=65_536)):
                pass
        assert [line["folder"] for line in logs if line["event"] == "disk.small"] == said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB of its own, mounted."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(50_000_000)
    steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"there is no {step[0]}")
        if done.returncode:
            pytest.skip(f"{step[0]} needs root and loop devices: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_file_system_that_is_full_says_so_and_the_node_goes_on(tmp_path: Path, small_disk: Path) -> None:
    """Method: 50 MB. More datafiles than there is room for: it stays at those it has, and says so. Datafiles of which
    not even three have room: refused at the start, with what to do. A full file system under a running node, which is
    started again there: what it had is served."""
    chains = [keys(16) for _ in range(40)]
    async with life(tmp_path, disk=(str(small_disk / "d"),), disk_bytes=64 * MIB) as (_, kv):
        for n, chain in enumerate(chains):
            await put_all(kv, chain, blocks(16, BLOCK, seed=n), step=16)
        report = (await kv.status())[0]
        assert report.numbers["disk_failed"] == 0 and report.numbers["disk_files_reclaimed"] > 0
        assert "space" in report.facts["disk"] or "room" in report.facts["disk"]
        assert (await kv.get_many(chains[-1])).values == [v.tobytes() for v in blocks(16, BLOCK, seed=39)]
    with pytest.raises(SetupError, match="room for 3"):
        async with Node(config(tmp_path, disk=(str(small_disk / "large"),), disk_bytes=1 << 30)):
            pass
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    async with life(tmp_path, disk=(str(small_disk / "d"),), disk_bytes=64 * MIB) as (_, kv):
        assert (await kv.get_many(chains[-1])).values == [v.tobytes() for v in blocks(16, BLOCK, seed=39)]
        await put_all(kv, keys(16), blocks(16, BLOCK, seed=99), step=16)
        assert await works(kv)
