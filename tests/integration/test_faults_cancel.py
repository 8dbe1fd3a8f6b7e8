"""Calls that are cancelled or given up: the next call is right, buffers are left alone, nothing is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess, open_files, wait_until
from tests.stepping import Ended, cancel_at, cancel_at_every_await, never_inline, threads_running
from ucxkv import PutStatus, ReadStatus

MIB = 1 << 20
POISON = 0xAB
PATHS = ["mapped", "message", "network", "rma"]
NUMBERS = ("granted_bytes", "leases", "leaving_extents", "writing", "quarantined_bytes", "message_grants")

pytestmark = pytest.mark.faults


async def at_rest(kv: ucxkv.Client) -> bool:
    """Whether the node holds nothing on this client's behalf but its blocks."""
    kv._router.sole.putter.return_grants()
    numbers = (await kv.status())[0].numbers
    return not any(numbers.get(name) for name in NUMBERS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
async def test_a_call_cancelled_at_every_await_leaves_the_next_one_right(path: str, again: bool) -> None:
    """User voice 38. Method: each call cancelled at its 1st, 2nd, ... await, once or at every further one too, until
    one ends by itself; at once another key is asked for; buffers of cancelled calls are poisoned and watched; in the
    end everything is back to zero.
    """
    with NodeProcess(host_bytes="128MiB") as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            never_inline(kv)
            k, small, large = keys(6), blocks(4, 3000), blocks(2, 9 * MIB)
            assert (await kv.put_many(k[:4], small, "chain")).ok and (await kv.put_many(k[4:], large)).ok
            scratch, into, next_into = np.zeros((2, 9 * MIB), np.uint8), np.zeros_like(small), np.zeros(3000, np.uint8)
            files, rounds = open_files(), 0

            async def after_each(ended: Ended) -> None:
                nonlocal rounds
                rounds += 1
                assert not threads_running()
                into[:], scratch[:] = POISON, POISON
                assert await kv.get(k[rounds % 4], next_into) == 3000
                assert (next_into == small[rounds % 4]).all(), "the answer of another call"
                assert await kv.put(k[0], b"other") is PutStatus.ALREADY
                assert (into == POISON).all() and (scratch == POISON).all(), "written after the end of its call"
                if isinstance(ended.value, ucxkv.Lease | ucxkv.View):
                    await (ended.value.release() if isinstance(ended.value, ucxkv.Lease) else ended.value.aclose())

            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "get": lambda: kv.get(k[0]),
                "get_many": lambda: kv.get_many(k[:4], into),
                "get_many large": lambda: kv.get_many(k[4:], scratch),
                "put": lambda: kv.put(keys(1)[0], small[0]),
                "put_many": lambda: kv.put_many(keys(4), small, "chain"),
                "put_many large": lambda: kv.put_many(keys(2), large),
                "exists_many": lambda: kv.exists_many(k),
                "match": lambda: kv.match(k[:4]),
                "status": lambda: kv.status(),
                "list_keys": lambda: kv.list_keys(),
                "delete": lambda: kv.delete(keys(3)),
                "lease": lambda: kv.lease(k).__aenter__(),
            }
            if path == "mapped":
                calls["view"] = lambda: kv.view(k[0])
            cancelled = {
                name: await cancel_at_every_await(call, after_each, again=again) for name, call in calls.items()
            }
            asking = {"put_many large", "status", "delete", "lease", "list_keys"}  # the others may be one C call
            assert all(cancelled[name] for name in (asking if path == "mapped" else calls)), cancelled
            assert (await kv.put_many(keys(20), blocks(20, MIB))).ok
            await wait_until(lambda: at_rest(kv), "the node holds nothing for calls that ended")
            assert open_files() <= files + 1 and len(asyncio.all_tasks()) == 1 + len(kv._router._dialing)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
async def test_connecting_and_leaving_cancelled_at_every_await_leave_nothing(path: str, again: bool) -> None:
    """Goal: no half-open client. Method: `connect`, then `aclose`, cancelled at await 1, 2, ...; descriptors and tasks
    of this process, connections and data sessions of the node return each time.
    """
    with NodeProcess() as node:
        async with ucxkv.connect(node.address) as watcher:
            for _ in range(2):  # what libraries keep for ever
                await (await ucxkv.connect(node.address, path=path)).aclose()
            files, node_files = open_files(), open_files(node.pid)

            async def nothing_left() -> bool:
                numbers = (await watcher.status())[0].numbers
                return numbers["connections"] == 1 and numbers["message_sessions"] == 0

            async def after_connect(ended: Ended) -> None:
                if ended.value is not None:
                    assert await ended.value.put(keys(1)[0], b"v") is PutStatus.STORED
                    await ended.value.aclose()
                assert len(asyncio.all_tasks()) == 1
                # a thread may still be reading the topology for the call that was cancelled
                await wait_until(lambda: open_files() == files, "descriptors are as before")

            cancelled = await cancel_at_every_await(
                lambda: ucxkv.connect(node.address, path=path), after_connect, again=again
            )
            assert cancelled >= 2
            await wait_until(nothing_left, "the node has forgotten them")
            for at in range(1, 50):
                kv = await ucxkv.connect(node.address, path=path)
                assert await kv.put(keys(1)[0], b"v") is PutStatus.STORED
                ended = await cancel_at(at, kv.aclose(), again=again)
                await kv.aclose()
                assert open_files() == files and len(asyncio.all_tasks()) == 1
                if not ended.was_cancelled:
                    break
            await wait_until(nothing_left, "the node has forgotten them")
            await wait_until(lambda: open_files(node.pid) <= node_files, "the node's descriptors")


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
        path = PATHS[index % 4] if index < 8 else "mapped"
        async with ucxkv.connect(shared_node.address, path=path, timeout_s=20) as kv:
            hits = 0
            for _ in range(20):
                k = keys(2)
                assert (await kv.put_many(k, [b"a" * 100, b"b" * 200])).ok
                hits += (await kv.get_many(k)).hits
                assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.DELETED] * 2
            return hits

    assert await asyncio.gather(*(work(index) for index in range(60))) == [40] * 60
