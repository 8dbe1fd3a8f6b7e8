"""What a user does: put, get, match, lease, view and delete against a real node in another process."""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess
from tests.stepping import never_inline
from ucxkv import DeleteStatus, PathKind, PutStatus, ReadStatus
from ucxkv.client.path import THREAD_BYTES
from ucxkv.tiers import copy as tier_copy


async def test_a_chain_that_was_put_is_read_back_whole(kv: ucxkv.Client) -> None:
    """Goal: the main job. Method: put a chain of 64 blocks, read it into fresh memory, compare every byte."""
    k, b = keys(64), blocks(64, 65_536)
    into = np.zeros_like(b)
    put = await kv.put_many(k, b, "chain")
    assert put.ok and put.stored == 64
    got = await kv.get_many(k, into)
    assert got.hits == 64 and got.nbytes == b.nbytes and got.leading == 64
    assert (into == b).all()


@pytest.mark.parametrize(
    "nbytes", [0, 1, 63, 64, 65, 240, 241, 4095, 4096, 4097, 16_384, 1 << 20, (1 << 20) + 1, 9 << 20]
)
async def test_values_of_every_size_round_trip(kv: ucxkv.Client, nbytes: int) -> None:
    """Goal: sizes around every boundary, the empty value and one moved by a thread included (user voices 39, 40)."""
    key, value = os.urandom(16), os.urandom(nbytes)
    assert await kv.put(key, value) is PutStatus.STORED
    assert await kv.get(key) == value
    into = bytearray(nbytes)
    assert await kv.get(key, into) == nbytes
    assert into == value


async def test_an_empty_value_and_a_miss_are_different_answers(kv: ucxkv.Client) -> None:
    """User voice 39. Method: single, batch with non-empty ones, into and without."""
    empty, full, absent = keys(3)
    await kv.put_many([empty, full], [b"", b"x"])
    assert await kv.get(empty) == b"" and await kv.get(absent) is None
    got = await kv.get_many([empty, absent, full])
    assert got.status.tolist() == [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT]
    assert got.values == [b"", None, b"x"]
    assert await kv.get(empty, bytearray()) == 0 and await kv.get(absent, bytearray()) is None


async def test_a_child_before_its_parent_is_refused(kv: ucxkv.Client) -> None:
    """Goal: token order. Method: put the child first, then the parent, then the child again."""
    parent, child = keys(2)
    assert await kv.put(child, b"c", parent=parent) is PutStatus.ORDER
    assert not await kv.exists(child)
    assert await kv.put(parent, b"p") is PutStatus.STORED
    assert await kv.put(child, b"c", parent=parent) is PutStatus.STORED
    result = await kv.put_many(keys(2), [b"1", b"2"], parents=[os.urandom(16), ucxkv.ROOT_KEY])
    assert result.status.tolist() == [PutStatus.ORDER, PutStatus.STORED] and not result.ok
    with pytest.raises(ucxkv.UsageError, match="parent"):
        result.raise_for_status()


async def test_a_child_put_while_its_parent_is_still_being_put_waits_for_it(kv: ucxkv.Client) -> None:
    """Goal: a chain may be put by several calls at once, when they begin in order. Method: a slow parent and a fast
    child, a chain of twenty calls, a batch that continues a batch; a parent whose put is cancelled: ORDER.
    """
    parent, child = keys(2)
    statuses = await asyncio.gather(kv.put(parent, bytes(9 << 20)), kv.put(child, b"c", parent=parent))
    assert statuses == [PutStatus.STORED] * 2
    k = keys(20)
    above = [None, *k[:-1]]
    sizes = [100_000 if i % 3 else 2 << 20 for i in range(20)]
    puts = [kv.put(k[i], bytes(sizes[i]), parent=above[i]) for i in range(20)]
    assert await asyncio.gather(*puts) == [PutStatus.STORED] * 20 and (await kv.match(k)).blocks == 20
    for nbytes in (190_000, 100):  # so that extents are at hand for both
        assert await kv.put(keys(1)[0], bytes(nbytes)) is PutStatus.STORED
    never_inline(kv)
    fast = keys(20)
    puts = [kv.put(fast[i], bytes(100 if i % 2 else 190_000), parent=fast[i - 1] if i else None) for i in range(20)]
    assert await asyncio.gather(*puts) == [PutStatus.STORED] * 20
    first, second = keys(4), keys(4)
    both = await asyncio.gather(
        kv.put_many(first, blocks(4, 5 << 20), "chain"),
        kv.put_many(second, blocks(4, 1000), parents=[first[-1], *second[:-1]]),
    )
    assert both[0].ok and both[1].ok and (await kv.match(first + second)).blocks == 8
    gone, orphan = keys(2)
    doomed = asyncio.create_task(kv.put(gone, bytes(12 << 20)))
    waiting = asyncio.create_task(kv.put(orphan, b"o", parent=gone))
    await asyncio.sleep(0)
    doomed.cancel()
    assert await waiting is PutStatus.ORDER
    await kv.delete([child, parent, *k, *first, *second])


async def test_the_first_writer_of_a_key_wins(kv: ucxkv.Client, shared_node: NodeProcess) -> None:
    """User voice 13. Method: two clients put one key with different bytes; also one key twice in one call."""
    (key,) = keys(1)
    async with ucxkv.connect(shared_node.address) as other:
        first, second = await asyncio.gather(kv.put(key, b"a" * 5000), other.put(key, b"b" * 5000))
        assert {first, second} == {PutStatus.STORED, PutStatus.ALREADY}
        value = await kv.get(key)
        assert value == (b"a" if first is PutStatus.STORED else b"b") * 5000 == await other.get(key)
    (twice,) = keys(1)
    result = await kv.put_many([twice, twice], [b"x", b"y"])
    assert result.status.tolist() == [PutStatus.STORED, PutStatus.ALREADY] and await kv.get(twice) == b"x"


async def test_keys_that_share_half_their_bits_are_never_taken_for_each_other(kv: ucxkv.Client) -> None:
    """Study, fault test 8. Goal: no aliasing. Method: 60 keys with one first half, 60 with one last half, a value each;
    as many that nobody put."""
    half = os.urandom(8)
    names = [half + os.urandom(8) for _ in range(60)] + [os.urandom(8) + half for _ in range(60)]
    absent = [half + os.urandom(8) for _ in range(60)] + [os.urandom(8) + half for _ in range(60)]
    assert (await kv.put_many(names, [name * 20 for name in names])).ok
    assert (await kv.get_many(names)).values == [name * 20 for name in names]
    assert not (await kv.exists_many(absent)).any() and (await kv.get_many(absent)).values == [None] * 120
    assert [await kv.get(name) for name in (names[7], names[77], absent[7], absent[77])] == [
        names[7] * 20, names[77] * 20, None, None,
    ]  # fmt: skip


async def test_match_ends_at_the_first_gap(kv: ucxkv.Client) -> None:
    """Goal: the longest visible prefix, never more. Method: a chain of 10, asked for with 5 foreign keys behind."""
    k = keys(10)
    await kv.put_many(k, blocks(10, 1000), "chain")
    match = await kv.match(k + keys(5))
    assert match.blocks == 10 and (match.tiers == 1).all() and (match.load_s > 0).all()
    assert (await kv.match(keys(3) + k)).blocks == 0
    assert (await kv.exists_many(k[:2] + keys(1))).tolist() == [True, True, False]


async def test_delete_takes_leaves_and_whole_subtrees_only(kv: ucxkv.Client) -> None:
    """Goal: a visible block's parent is visible, also after deletes. Method: delete the head, the tail, the rest."""
    k = keys(5)
    await kv.put_many(k, blocks(5, 100), "chain")
    assert (await kv.delete(k[:2])).tolist() == [DeleteStatus.ORDER] * 2
    assert (await kv.match(k)).blocks == 5
    assert (await kv.delete(k[3:])).tolist() == [DeleteStatus.DELETED] * 2
    assert (await kv.delete([*k[:3], k[4]])).tolist() == [DeleteStatus.DELETED] * 3 + [DeleteStatus.MISS]
    assert not (await kv.exists_many(k)).any()


async def test_a_view_is_the_nodes_own_memory_under_a_lease(kv: ucxkv.Client) -> None:
    """Goal: zero copies, read-only, and the block stays while it is viewed. Method: view, delete it, read the view."""
    (key,), value = keys(1), os.urandom(100_000)
    await kv.put(key, value)
    if kv.peers()[0].path is not PathKind.MAPPED:
        with pytest.raises(ucxkv.UsageError, match="mapped"):
            await kv.view(key)
        return
    view = await kv.view(key)
    assert view is not None and view.valid and view.data.readonly
    assert (await kv.delete([key])).tolist() == [DeleteStatus.DELETED]
    await kv.put_many(keys(50), blocks(50, 100_000, 1))
    await asyncio.sleep(0.05)
    assert view.data == value, "the memory was reused under a lease"
    await view.aclose()
    assert not view.valid
    assert await kv.view(key) is None


async def test_a_lease_says_what_it_holds_and_ends(kv: ucxkv.Client) -> None:
    """Goal: leases count. Method: lease visible and absent keys, watch the node's report."""
    k = keys(4)
    await kv.put_many(k[:3], blocks(3, 10))
    async with kv.lease(k, ttl_s=5) as lease:
        assert lease.granted.tolist() == [True, True, True, False] and lease.valid
        assert (await kv.status())[0].numbers["leases"] >= 1
    assert not lease.valid
    with pytest.raises(ucxkv.UsageError, match="ttl_s"):
        kv.lease(k, ttl_s=0)


async def test_vectored_values_are_one_value(kv: ucxkv.Client) -> None:
    """Goal: gather on put, scatter on get. Method: K and V apart on put, other cuts on get."""
    k = keys(2)
    key_half, value_half = os.urandom(3000), os.urandom(5000)
    assert (await kv.put_many(k, [[key_half, value_half], [b"", b"ab", b"c"]])).ok
    assert await kv.get(k[0]) == key_half + value_half and await kv.get(k[1]) == b"abc"
    a, b, c = bytearray(1), bytearray(7998), bytearray(1)
    got = await kv.get_many(k, [[a, b, c], bytearray(3)])
    assert got.hits == 2 and bytes(a + b + c) == key_half + value_half


async def test_rows_of_a_registered_pool_are_sources_and_destinations(kv: ucxkv.Client) -> None:
    """Goal: register once, then name rows. Method: put rows in one order, get them back in another."""
    array = blocks(8, 4096)
    pool = kv.register(array.copy())
    k = keys(8)
    assert (await kv.put_many(k, pool[[7, 6, 5, 4, 3, 2, 1, 0]])).ok
    got = await kv.get_many(k, pool[0:8])
    assert got.hits == 8 and (await kv.get(k[0])) == array[7].tobytes()


async def test_a_batch_larger_than_one_turn_of_the_loop_lets_others_run(
    kv: ucxkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User voice 25. Method: count the turns another coroutine gets while 64 MiB are put and fetched, and the bytes
    that the loop's own thread copies between two of them when it puts."""
    turns = 0
    copied = collections.Counter[int]()
    gather, loop_thread = tier_copy.gather, threading.get_ident()

    def seen(first: Any, iov: Any, *rest: Any) -> Any:
        if threading.get_ident() == loop_thread:
            copied[turns] += int(iov["len"].sum())
        return gather(first, iov, *rest)

    async def heartbeat() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(tier_copy, "gather", seen)
    k, b = keys(16), blocks(16, 4 << 20)
    beat = asyncio.create_task(heartbeat())
    for _ in range(2):  # it beats before anything is copied
        await asyncio.sleep(0)
    assert turns
    assert (await kv.put_many(k, b)).ok
    assert max(copied.values(), default=0) <= THREAD_BYTES
    turns = 0
    assert (await kv.get_many(k, np.empty_like(b))).hits == 16
    assert turns >= 15
    beat.cancel()
    await kv.delete(k)


async def test_ten_thousand_keys_in_one_call(kv: ucxkv.Client) -> None:
    """User voice 33. Method: 10,000 small blocks in one put, one exists, one match, one get."""
    n = 10_000
    k = np.frombuffer(os.urandom(16 * n), np.uint8).reshape(n, 16)
    b = blocks(n, 64)
    assert (await kv.put_many(k, b, "chain")).stored == n
    assert (await kv.match(k)).blocks == n and (await kv.exists_many(k)).all()
    into = np.zeros_like(b)
    assert (await kv.get_many(k, into)).hits == n and (into == b).all()


async def test_the_clients_counters_add_up(kv: ucxkv.Client) -> None:
    """User voice 34. Method: 30 hits, 70 misses, 2 of the wrong size; gets equals the sum."""
    k = keys(30)
    await kv.put_many(k, blocks(30, 100))
    before = kv.stats()
    await kv.get_many(k[:20] + keys(70), [bytearray(100) for _ in range(90)])
    for key in k[20:]:
        await kv.get(key, bytearray(100))
    got = await kv.get_many(k[:2], [bytearray(5), bytearray(200)])
    assert got.status.tolist() == [ReadStatus.SIZE] * 2 and got.lengths.tolist() == [100, 100]
    after = kv.stats()
    delta = {name: after[name] - before[name] for name in after}
    assert (delta["hits"], delta["misses"], delta["errors"], delta["gets"]) == (30, 70, 2, 102)
    assert delta["gets"] == sum(delta[name] for name in ("hits", "misses", "stale", "corrupt", "errors"))


async def test_an_exists_alone_keeps_nothing_alive(node: NodeProcess) -> None:
    """User voices 15, 16. Method: fill the node, probe every key, put as much again: puts go on, old blocks leave."""
    async with ucxkv.connect(node.address) as kv:
        k = keys(100)
        assert (await kv.put_many(k, blocks(100, 500_000))).ok
        for _ in range(10):
            await kv.exists_many(k)
        fresh = keys(100)
        assert (await kv.put_many(fresh, blocks(100, 500_000, 1))).ok
        assert (await kv.exists_many(fresh)).all()
        assert (await kv.status())[0].numbers["evicted"] > 0


async def test_a_full_node_evicts_the_least_recently_used_chain_tail_first(node: NodeProcess) -> None:
    """Goal: LRU, leaves first, prefixes stay whole. Method: three chains, the first one read again, then overfill."""
    async with ucxkv.connect(node.address) as kv:
        chains = [keys(20) for _ in range(3)]
        for chain in chains:
            assert (await kv.put_many(chain, blocks(20, 900_000), "chain")).ok
            await asyncio.sleep(0.03)
        assert (await kv.get_many(chains[0], np.empty((20, 900_000), np.uint8))).hits == 20
        await asyncio.sleep(0.1)  # touches are reported in batches
        assert (await kv.put_many(keys(10), blocks(10, 900_000))).ok
        for chain in chains:
            seen = await kv.exists_many(chain)
            assert seen.sum() == (await kv.match(chain)).blocks, "a hole in a prefix"
        assert (await kv.match(chains[0])).blocks == 20, "the chain that was just read went first"
        assert (await kv.match(chains[1])).blocks < 20
