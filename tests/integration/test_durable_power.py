"""durability = power on real nodes: the memory of the machine is gone, and the durable blocks are there.

A reboot is the end of the processes (kill -9) and of what lies in /dev/shm; what a power cut does to writes that are on
their way to the disk is shown in tests/journal/test_values.py.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import works
from tests.integration.durable_nodes import MIB, Lives, life, reboot
from tests.integration.replicas import Trio, Writer, connected
from ucxkv import DeleteStatus, PutStatus
from ucxkv.node import Node
from ucxkv.node.keeping import file_system


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path) -> None:
    """Temporary folders may be in memory, where a node refuses to promise this."""
    if {file_system(tmp_path), file_system(Path(tempfile.gettempdir()))} & {"tmpfs", "ramfs"}:
        pytest.skip("temporary files are in memory: set TMPDIR to a folder on a disk")


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Put other bytes into a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond that."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("path", ["mapped", "message", "network"])
async def test_what_was_acknowledged_is_there_after_a_reboot(again: Lives, path: str) -> None:
    """Goal: user voices 30 and 39, one step further. Method: chains in batches and block by block, an empty value,
    cache blocks that a durable one below makes durable, deletes, places used again; the process is killed and all
    memory gone, twice; every durable block has its bytes, no deleted one is back, class cache is gone."""
    chain, single, mixed, cache = keys(40), keys(5), keys(6), keys(8)
    values = blocks(40, 20_000, seed=3)
    with again.process(durability="power") as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            assert (await kv.put_many(chain, values, "chain", durable=True)).ok
            assert (await kv.delete(chain[30:])).tolist() == [DeleteStatus.DELETED] * 10
            for i, key in enumerate(single):
                parent = single[i - 1] if i else None
                assert await kv.put(key, bytes(100 * i), parent, durable=True) is PutStatus.STORED
            assert (await kv.put_many(mixed[:-1], values[:5], "chain")).ok
            assert await kv.put(mixed[-1], values[5], mixed[-2], durable=True) is PutStatus.STORED
            assert (await kv.put_many(cache, values[:8], "chain")).ok
        node.kill()
    reboot(again.folder)
    for extra in range(2):
        with again.process(durability="power") as node:
            async with ucxkv.connect(node.address, path=path) as kv:
                into = np.zeros_like(values[:30])
                assert (await kv.get_many(chain[:30], into)).hits == 30 and (into == values[:30]).all()
                got = await kv.get_many([*single, *mixed])
                assert got.values == [*(bytes(100 * i) for i in range(5)), *(v.tobytes() for v in values[:6])]
                assert not (await kv.exists_many([*chain[30:], *cache])).any()
                numbers = (await kv.status())[0].numbers
                assert (numbers["durable_blocks"], numbers["durable_lost"]) == (41 + extra, 0)
                assert await kv.put(keys(1)[0], values[extra], durable=True) is PutStatus.STORED
                assert await works(kv)
            node.kill()
        reboot(again.folder)


async def test_a_process_that_is_killed_needs_no_disk_to_come_back(again: Lives) -> None:
    """Goal: power promises what process does. Method: kill -9, memory stays; then a byte of the file beside the journal
    is another: nobody reads it."""
    (key,) = keys(1)
    with again.process(durability="power") as node:
        async with ucxkv.connect(node.address) as kv:
            assert await kv.put(key, bytes(5000), durable=True) is PutStatus.STORED
        node.kill()
    overwrite(again.folder / "journal" / "values", 0, b"\xff" * MIB)
    async with life(again, durability="power") as (_, kv):
        assert await kv.get(key) == bytes(5000)


async def test_a_value_that_the_disk_has_no_longer_is_a_miss_and_said(again: Lives) -> None:
    """Goal: never wrong bytes. Method: after a reboot one byte of the second of three blocks is another: it and the one
    below it are gone, counted, and stay gone; the first is there."""
    chain, values = keys(3), blocks(3, 100_000, seed=8)
    async with life(again, durability="power") as (_, kv):
        assert (await kv.put_many(chain, values, "chain", durable=True)).ok
    file = again.folder / "journal" / "values"
    overwrite(file, file.read_bytes().index(values[1].tobytes()) + 50_000, bytes([values[1].reshape(-1)[50_000] ^ 1]))
    for lost in (2, 0):
        reboot(again.folder)
        async with life(again, durability="power") as (node, kv):
            assert (await kv.exists_many(chain)).tolist() == [True, False, False]
            assert await kv.get(chain[0]) == values[0].tobytes()
            assert node.report().numbers["durable_lost"] == lost


async def test_a_node_goes_over_to_power_and_back(again: Lives) -> None:
    """Goal: the class is the operator's to change. Method: process, then power: a reboot loses nothing of before; then
    process again: nothing is lost on the way, the file is given up, and the next reboot is a loss, said loudly."""
    one, two = keys(1)[0], keys(1)[0]
    values = again.folder / "journal" / "values"
    async with life(again) as (_, kv):
        assert await kv.put(one, bytes(70_000), durable=True) is PutStatus.STORED
    async with life(again, durability="power") as (_, kv):
        assert await kv.put(two, b"two", durable=True) is PutStatus.STORED
        assert values.stat().st_size >= 64 * MIB
    reboot(again.folder)
    async with life(again) as (_, kv):
        assert (await kv.get(one), await kv.get(two)) == (bytes(70_000), b"two")
        assert not values.exists()
    reboot(again.folder)
    async with life(again) as (node, kv):
        assert await kv.get(one) is None
        assert node.report().numbers["durable_lost"] == 2


async def test_a_state_dir_in_memory_is_refused() -> None:
    """Goal: no class is promised that does not hold. Method: a state_dir on a tmpfs; the message names it and the way
    out, and no node is left."""
    with tempfile.TemporaryDirectory(prefix="ucxkv-test-", dir="/dev/shm") as folder:
        with pytest.raises(ucxkv.SetupError, match=r"is in memory.*tmpfs.*state_dir on a disk"):
            await Node(Lives(Path(folder)).config(durability="power")).start()


async def test_a_disk_without_room_for_the_memory_is_refused_at_the_start(again: Lives) -> None:
    """Goal: no put finds the disk full. Method: files of this process may be 32 MiB at most, the node has 64 MiB."""
    async with life(again):
        pass  # memory and log are there
    with (
        files_of_at_most(32 * MIB),
        pytest.raises(ucxkv.SetupError, match=r"keeps all values in .*67108864 bytes there"),
    ):
        await Node(again.config(durability="power")).start()
    async with life(again, durability="power") as (_, kv):
        assert await works(kv)


@pytest.mark.faults
@pytest.mark.replicas
@pytest.mark.timeout(180)
@pytest.mark.parametrize("trio", [1, 2], indirect=True)
async def test_a_cluster_survives_the_power_cut_of_all_its_machines(trio: Trio, request: pytest.FixtureRequest) -> None:
    """Goal: the last row of the README's table. Method: two nodes with one or two replicas; both are killed and their
    memory is gone; all acknowledged blocks are there, no deleted one is, and puts go on."""
    followed = 4 * (request.node.callspec.params["trio"] - 1)
    trio.start("a", "b", durability="power")
    await trio.settled(followed=followed)
    writer = Writer(11)
    async with connected(trio) as kv:
        assert await writer.put(kv, 60) == 60
        await writer.delete_tails(kv, 4)
        trio.kill("a", "b")
    reboot(trio.state("a"), trio.state("b"))
    trio.start("a", "b", durability="power")
    await trio.settled(followed=followed)
    async with connected(trio) as kv:
        await writer.check(kv)
        assert await writer.put(kv, 20) == 20
        await writer.check(kv)
