"""Who may write and who may read which memory, when writers vanish, leases end, bytes rot and the tier is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import ROOT, NodeProcess, wait_until
from ucxkv import PutStatus, ReadStatus
from ucxkv.node import Node, NodeConfig

pytestmark = pytest.mark.faults

MIB = 1 << 20


async def number(kv: ucxkv.Client, name: str) -> float:
    """One number of the only node's report."""
    return (await kv.status())[0].numbers[name]


async def is_number(kv: ucxkv.Client, name: str, value: float) -> bool:
    return await number(kv, name) == value


# ---- leases and reuse


@pytest.mark.parametrize("path", ["mapped", "message"])
async def test_a_reader_slower_than_reuse_never_sees_the_other_pattern(path: str) -> None:
    """Study, fault test 7. User voices 5, 6. Method: small tier, one fills it with ever new patterns, others read old
    keys all the time.
    """
    with NodeProcess(host_bytes="16MiB") as node:
        async with ucxkv.connect(node.address) as writer, ucxkv.connect(node.address, path=path) as reader:
            known: dict[bytes, int] = {}
            stop = asyncio.Event()
            wrong: list[bytes] = []
            hits = 0

            async def read() -> None:
                nonlocal hits
                into = np.empty((8, 200_000), np.uint8)
                while not stop.is_set():
                    some = list(known)[-60:][:: max(1, len(known) // 16)][:8]
                    got = await reader.get_many(some, into[: len(some)])
                    for i in np.flatnonzero(got.status == ReadStatus.HIT).tolist():
                        hits += 1
                        if not (into[i] == known[some[i]]).all():
                            wrong.append(some[i])
                    await asyncio.sleep(0)

            readers = [asyncio.create_task(read()) for _ in range(2)]
            for pattern in range(300):
                (key,) = keys(1)
                known[key] = pattern % 251
                await writer.put(key, np.full(200_000, pattern % 251, np.uint8))
            stop.set()
            await asyncio.gather(*readers)
            assert not wrong and hits > 50
            assert await number(writer, "evicted") > 100


async def test_a_view_outlives_a_short_lease_only_while_it_is_valid(node: NodeProcess) -> None:
    """User voice 5. Method: a view whose renewal is stopped; valid turns False before its memory is reused."""
    async with ucxkv.connect(node.address) as kv:
        (key,), value = keys(1), os.urandom(500_000)
        await kv.put(key, value)
        view = await kv.view(key, ttl_s=0.3)
        assert view is not None
        await asyncio.sleep(0.5)
        assert view.valid and view.data == value, "renewed in the background"
        renewal = view._lease._renewal
        assert renewal is not None
        renewal.cancel()
        await kv.delete([key])
        while view.valid:
            assert view.data == value
            await kv.put_many(keys(40), blocks(40, 500_000))
        assert await number(kv, "leases") <= 1
        await view.aclose()


async def test_a_reader_killed_under_a_lease_holds_memory_for_its_time_only(node: NodeProcess) -> None:
    """User voices 14, 15. Method: a process takes a lease and is killed; the lease ends by its time."""
    code = (
        "import asyncio, sys, ucxkv\n"
        "async def main():\n"
        "    kv = await ucxkv.connect(sys.argv[1])\n"
        "    await kv.lease([bytes.fromhex(sys.argv[2])], ttl_s=1.0).__aenter__()\n"
        "    print('held', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    async with ucxkv.connect(node.address) as kv:
        (key,) = keys(1)
        await kv.put(key, b"v" * 1000)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, node.address, key.hex(),
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None
        while await process.stdout.readline() != b"held\n":
            continue  # log lines
        assert await number(kv, "leases") == 1
        process.kill()
        await process.wait()
        await wait_until(lambda: is_number(kv, "leases", 0), "the lease has run out")


# ---- a full tier


@contextlib.asynccontextmanager
async def full_of_leases(kv: ucxkv.Client) -> AsyncIterator[list[bytes]]:
    """A tier of 64 MiB that has no room for 8 MiB, every block of it leased: what is evicted on the way depends on the
    moment, so small blocks are put and leased until one is refused, or evicted before it could be leased: then less is
    free than the node keeps free (5 MiB). Gives the keys.
    """
    k = keys(61)
    assert (await kv.put_many(k, blocks(61, MIB - 4096))).stored > 40
    async with contextlib.AsyncExitStack() as leases:
        lease = await leases.enter_async_context(kv.lease(k, ttl_s=60))
        held = [k[i] for i in np.flatnonzero(lease.granted).tolist()]
        for key in keys(64):
            if await kv.put(key, bytes(MIB - 4096), deadline_s=0.5) is not PutStatus.STORED:
                break
            lease = await leases.enter_async_context(kv.lease([key], ttl_s=60))
            if not lease.granted[0]:
                break
            held.append(key)
        else:
            pytest.fail("64 MiB more of leased blocks in 64 MiB")
        yield held


async def test_a_tier_whose_blocks_are_all_leased_answers_by_the_deadline(node: NodeProcess) -> None:
    """User voice 18. Method: lease everything, 100 puts with a deadline: NO_SPACE; release: puts work again."""
    async with ucxkv.connect(node.address) as kv:
        async with full_of_leases(kv) as held:
            lines = node.log().count("\n")
            statuses = await asyncio.gather(*(kv.put(key, bytes(8 * MIB), deadline_s=0.5) for key in keys(100)))
            assert set(statuses) <= {PutStatus.NO_SPACE, PutStatus.UNAVAILABLE} and PutStatus.NO_SPACE in statuses
            with pytest.raises(ucxkv.Overloaded, match="NO_SPACE"):
                (await kv.put_many(keys(2), blocks(2, 8 * MIB), deadline_s=0.2)).raise_for_status()
            assert (await kv.exists_many(held)).all(), "a leased block was evicted"
            assert node.log().count("\n") <= lines + 5, "the log was flooded"
        assert (await kv.put_many(keys(30), blocks(30, MIB), deadline_s=5)).ok


async def test_a_put_with_a_short_deadline_does_not_wait_for_one_with_a_long_one(node: NodeProcess) -> None:
    """Goal: each put has its own deadline. Method: full tier, a put of 30 s, then one of 0.2 s; cancel the first."""
    async with ucxkv.connect(node.address) as kv:
        async with full_of_leases(kv):
            long = asyncio.create_task(kv.put(keys(1)[0], bytes(8 * MIB), deadline_s=30))
            await asyncio.sleep(0.05)
            short = await kv.put(keys(1)[0], bytes(8 * MIB), deadline_s=0.2)
            assert short is not PutStatus.STORED and not long.done()
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
        assert await kv.put(keys(1)[0], bytes(8 * MIB), deadline_s=5) is PutStatus.STORED


async def test_sizes_that_alternate_find_space_in_a_full_tier(node: NodeProcess) -> None:
    """Goal: no size class keeps the memory. Method: 12 sizes, each round as much as the tier; every put is stored."""
    async with ucxkv.connect(node.address) as kv:
        for _ in range(2):
            for nbytes in (100, 5 * MIB, 4096, MIB, 16_384, 65_536, 7 * MIB, 300_000, 2 * MIB, 1000, 20 * MIB, 50_000):
                n = max(1, min(2000, 30 * MIB // nbytes))
                k, b = keys(n), blocks(n, nbytes)
                put = await kv.put_many(k, b, deadline_s=10)
                assert put.ok, (nbytes, np.bincount(put.status))
                assert await kv.get(k[-1]) == b[-1].tobytes()


async def test_look_ups_hold_nothing_in_a_full_tier(node: NodeProcess) -> None:
    """User voices 15, 16. Method: 10,000 exists and match hits without a get, probing all the time; fill it twice."""
    async with ucxkv.connect(node.address) as kv, ucxkv.connect(node.address) as prober:
        k = keys(1000)
        assert (await kv.put_many(k, blocks(1000, 50_000))).stored == 1000
        for _ in range(5):
            await prober.exists_many(k)
            await prober.match(k)

        async def probe() -> None:
            while True:
                await prober.exists_many(k)
                await asyncio.sleep(0.001)

        probing = asyncio.create_task(probe())
        fresh = keys(2400)
        assert (await kv.put_many(fresh, blocks(2400, 50_000))).ok
        probing.cancel()
        assert (await kv.exists_many(fresh[-500:])).all()
        assert await number(kv, "leases") == 0 and not (await kv.exists_many(k)).all()


# ---- bytes that rot


@pytest.mark.parametrize("path", ["mapped", "message"])
async def test_a_flipped_byte_is_a_miss_and_the_block_and_what_hangs_on_it_go(path: str) -> None:
    """User voice 29. Method: flip one stored byte in the node's segment; get, get again, descendants, put again."""
    config = NodeConfig(name="rot", listen="127.0.0.1:0", host_bytes=16 * MIB)
    async with Node(config) as node, ucxkv.connect(node.address, path=path) as kv:
        k, b = keys(6), blocks(6, 30_000)
        assert (await kv.put_many(k, b, "chain")).ok
        records, found = node.store.directory.lookup(k[2])
        assert found[0]
        node.store.segment.view[int(records["offset"][0]) + 12_345] ^= 1
        into = np.zeros_like(b)
        got = await kv.get_many(k, into)
        bad = ReadStatus.CORRUPT if path == "mapped" else ReadStatus.STALE
        assert got.status.tolist() == [ReadStatus.HIT] * 2 + [bad] + [ReadStatus.HIT] * 3
        assert (into[[0, 1, 3, 4, 5]] == b[[0, 1, 3, 4, 5]]).all()
        await wait_until(lambda: _gone(kv, k[2:]), "the block and its descendants are dropped")
        assert await kv.get(k[2]) is None and (await kv.match(k)).blocks == 2
        assert (await kv.get_many(k[2:], into[2:])).status.tolist() == [ReadStatus.MISS] * 4
        assert (await kv.put_many(k, b, "chain")).status.tolist() == [PutStatus.ALREADY] * 2 + [PutStatus.STORED] * 4
        assert (await kv.get_many(k, into)).hits == 6 and (into == b).all()
        assert kv.stats()[bad.name.lower()] == 1 and (await number(kv, "damaged")) >= 1
        node.store.check()


async def _gone(kv: ucxkv.Client, k: list[bytes]) -> bool:
    return not (await kv.exists_many(k)).any()
