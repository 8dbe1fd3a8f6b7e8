"""Calls that are cancelled or given up: the next call is right, buffers are left alone, nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, open_files, wait_until
from ucxkv import PutStatus, ReadStatus

MIB = 1 << 20
PATHS = ["mapped", "message", "network"]
NUMBERS = ("granted_bytes", "leases", "leaving_extents", "writing", "quarantined_bytes")


async def at_rest(kv: ucxkv.Client) -> bool:
    """Whether the node holds nothing on this client's behalf but its blocks."""
    kv._router.sole.putter.return_grants()
    numbers = (await kv.status())[0].numbers
    return not any(numbers[name] for name in NUMBERS)


async def cancel_after(turns: int, call: Awaitable[Any]) -> bool:
    """Cancel a call after some turns of the loop; whether it was cancelled."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_cancelled_at_any_await_leaves_the_next_one_right(path: str) -> None:
    """User voice 38. Method: each call cancelled after 0, 1, 2 ... turns of the loop; at once another key is asked."""
    with NodeProcess(host_bytes="128MiB") as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            k, small, large = keys(6), blocks(4, 3000), blocks(2, 9 * MIB)
            assert (await kv.put_many(k[:4], small, "chain")).ok and (await kv.put_many(k[4:], large)).ok
            scratch, into, next_into = np.zeros((2, 9 * MIB), np.uint8), np.zeros_like(small), np.zeros(3000, np.uint8)
            calls: tuple[Callable[[], Awaitable[Any]], ...] = (
                lambda: kv.get(k[0]),
                lambda: kv.get_many(k[:4], into),
                lambda: kv.get_many(k[4:], scratch),
                lambda: kv.put(keys(1)[0], small[0]),
                lambda: kv.put_many(keys(4), small, "chain"),
                lambda: kv.put_many(keys(2), large),
                lambda: kv.exists_many(k),
                lambda: kv.match(k[:4]),
                lambda: kv.status(),
                lambda: kv.delete(keys(3)),
                lambda: kv.lease(k).__aenter__(),
            )
            cancelled = 0
            for call in calls:
                for turns in (*range(8), 12, 20):
                    was_cancelled = await cancel_after(turns, call())
                    cancelled += was_cancelled
                    before = (into.copy(), scratch[:, ::4096].copy())
                    assert await kv.get(k[turns % 4], next_into) == 3000
                    assert (next_into == small[turns % 4]).all(), "the answer of another call"
                    assert await kv.put(k[0], b"other") is PutStatus.ALREADY
                    assert (into == before[0]).all() and (scratch[:, ::4096] == before[1]).all(), (
                        "written after the end"
                    )
                    if not was_cancelled:
                        break
            assert cancelled > len(calls)
            if path == "mapped":  # leases taken by calls that were not cancelled are held by garbage until they end
                gc.collect()
            assert (await kv.put_many(keys(20), blocks(20, MIB))).ok


@pytest.mark.parametrize("path", PATHS)
async def test_large_transfers_cancelled_at_random_leave_their_buffers_alone(path: str) -> None:
    """User voice 3. Method: gets and puts of 48 MiB cancelled at random times, twice over; buffers are watched."""
    rng = random.Random(38)
    with NodeProcess(host_bytes="256MiB") as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            k, b = keys(5), blocks(5, 12 * MIB)
            assert (await kv.put_many(k[:4], b[:4])).ok
            files = open_files()
            for _ in range(12):
                into = np.zeros((4, 12 * MIB), np.uint8)
                getting = asyncio.create_task(kv.get_many(k[:4], into))
                putting = asyncio.create_task(kv.put_many(keys(2), b[:2]))
                await asyncio.sleep(rng.random() * 0.03)
                for task in (getting, putting):
                    task.cancel()
                await asyncio.sleep(0)
                for task in (getting, putting):
                    task.cancel()  # a second one, while it waits for its threads
                await asyncio.gather(getting, putting, return_exceptions=True)
                into[:] = 0xAB
                await asyncio.sleep(0.01)
                assert (into == 0xAB).all(), "written after the call had ended"
                del into
                small = np.zeros(12 * MIB, np.uint8)
                assert await kv.get(k[1], small) == 12 * MIB and (small == b[1]).all()
            await wait_until(lambda: at_rest(kv), "grants are back")
            assert open_files() <= files + 1


async def test_a_client_closed_under_transfers_ends_them_and_frees_nothing_in_use() -> None:
    """User voice 3. Method: aclose while 64 MiB are put and got; each call ends; the node has everything back."""
    with NodeProcess(host_bytes="256MiB") as node:
        b = blocks(4, 16 * MIB)
        async with ucxkv.connect(node.address) as other:
            for _ in range(5):
                kv = await ucxkv.connect(node.address, timeout_s=2)
                k = keys(4)
                putting = asyncio.create_task(kv.put_many(k, b))
                await asyncio.sleep(0.01)
                getting = asyncio.create_task(kv.get_many(k, np.zeros_like(b)))
                await asyncio.sleep(0.005)
                await kv.aclose()
                put, got = await asyncio.gather(putting, getting, return_exceptions=True)
                assert isinstance(put, ucxkv.PutResult | ucxkv.UsageError)
                assert isinstance(got, ucxkv.GetResult | ucxkv.UsageError)
                with pytest.raises(ucxkv.ClientClosed):
                    await kv.exists(k[0])
            await wait_until(lambda: at_rest(other), "the node has everything back")
            assert (await other.status())[0].numbers["connections"] == 1


async def test_a_ticket_closed_early_lets_go_of_its_buffer(shared_node: NodeProcess) -> None:
    """Goal: engines without a loop may give up. Method: tickets closed at once, their buffers watched; then a get."""
    async with ucxkv.connect(shared_node.address) as kv:
        k, b = keys(1), blocks(1, 20 * MIB)
        assert (await kv.put_many(k, b)).ok
        for _ in range(5):
            into = bytearray(20 * MIB)

            def give_up(into: bytearray = into) -> None:
                ticket = kv.submit_get(k, [into])
                ticket.close()
                ticket.close()

            await asyncio.to_thread(give_up)
            into[:] = b"\xab" * len(into)
            await asyncio.sleep(0.01)
            assert into.count(0xAB) == len(into)
        ticket = await asyncio.to_thread(kv.submit_get, k, [bytearray(20 * MIB)])
        assert (await asyncio.to_thread(ticket.result, 10)).status.tolist() == [ReadStatus.HIT]
        ticket.close()
        await kv.delete(k)


async def test_many_clients_with_small_gets_make_progress(shared_node: NodeProcess) -> None:
    """User voice 27, bounded. Method: 60 clients over all paths, 20 rounds of small gets and puts each; no stall."""

    async def work(index: int) -> int:
        path = PATHS[index % 3] if index < 6 else "mapped"
        async with ucxkv.connect(shared_node.address, path=path, timeout_s=20) as kv:
            hits = 0
            for _ in range(20):
                k = keys(2)
                assert (await kv.put_many(k, [b"a" * 100, b"b" * 200])).ok
                hits += (await kv.get_many(k)).hits
                assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.DELETED] * 2
            return hits

    assert await asyncio.gather(*(work(index) for index in range(60))) == [40] * 60
