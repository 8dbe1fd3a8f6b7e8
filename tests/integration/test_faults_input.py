"""Bad input at the client's edge: each is a typed error that names the fix, raised before anything is changed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess
from ucxkv import PutStatus, ReadStatus

ZERO = bytes(16)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"short", "key 0 has 5 bytes"),
        (b"x" * 17, "key 0 has 17 bytes"),
        (b"", "key 0 has 0 bytes"),
        (ZERO, "all zeros"),
        ("x" * 16, "str"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
async def test_a_bad_key_is_refused_by_every_call(kv: ucxkv.Client, bad: Any, says: str) -> None:
    """Goal: keys are 16 bytes and not zero. Method: each bad key through every call that takes one."""
    calls = (
        lambda: kv.put(bad, b"v"),
        lambda: kv.put_many([bad], [b"v"]),
        lambda: kv.get(bad),
        lambda: kv.get(bad, bytearray(1)),
        lambda: kv.get_many([bad]),
        lambda: kv.exists(bad),
        lambda: kv.match([bad]),
        lambda: kv.view(bad),
        lambda: kv.delete([bad]),
    )
    for call in calls:
        with pytest.raises(ucxkv.UsageError, match=says):
            await call()
    with pytest.raises(ucxkv.UsageError, match=says):
        kv.lease([bad])


async def test_keys_of_the_wrong_container_are_refused(kv: ucxkv.Client) -> None:
    """Goal: one key is no list of keys. Method: bytes, text, arrays of other dtype and shape."""
    for bad in (b"x" * 16, "x" * 16, np.zeros((2, 16), np.int8), np.ones(16, np.uint8), np.ones((2, 8), np.uint8), 5):
        with pytest.raises(ucxkv.UsageError):
            await kv.exists_many(bad)


async def test_unknown_keys_are_misses_everywhere(kv: ucxkv.Client) -> None:
    """Goal: absence is an answer, no error. Method: every call with keys nobody put."""
    k = keys(3)
    assert await kv.get(k[0]) is None and await kv.get(k[0], bytearray(4)) is None and await kv.view(k[0]) is None
    assert (await kv.get_many(k)).status.tolist() == [ReadStatus.MISS] * 3
    assert not (await kv.exists_many(k)).any() and (await kv.match(k)).blocks == 0
    assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.MISS] * 3
    async with kv.lease(k) as lease:
        assert not lease.granted.any() and not lease.valid


async def test_empty_calls_are_answered(kv: ucxkv.Client) -> None:
    """Goal: nothing asked, nothing done. Method: every batch call with no key."""
    assert (await kv.put_many([], [])).ok and (await kv.put_many([], np.empty((0, 8), np.uint8), "chain")).stored == 0
    got = await kv.get_many([])
    assert got.hits == 0 and got.values == [] and (await kv.get_many([], [])).nbytes == 0
    assert len(await kv.exists_many([])) == 0 and (await kv.match([])).blocks == 0 and len(await kv.delete([])) == 0
    async with kv.lease([]) as lease:
        assert len(lease.granted) == 0


async def test_memory_that_cannot_be_used_is_refused_by_name(kv: ucxkv.Client) -> None:
    """Goal: nothing is reordered, written through a read-only view, or guessed. Method: sources and destinations."""
    key, array = keys(1)[0], blocks(8, 64)
    assert await kv.put(key, array[0]) is PutStatus.STORED
    for source in (array.T, array[:, ::2], np.array([object()]), "text", 5, None, [[[b"deep"]]]):
        with pytest.raises(ucxkv.UsageError):
            await kv.put(keys(1)[0], source)
    frozen = np.zeros(64, np.uint8)
    frozen.setflags(write=False)
    before = bytes(frozen)
    for into in (frozen, b"x" * 64, memoryview(b"x" * 64), np.zeros((64, 2), np.uint8)[:, 0], "text", 5):
        for call in (lambda into=into: kv.get(key, into), lambda into=into: kv.get_many([key], [into])):
            with pytest.raises(ucxkv.UsageError):
                await call()
    assert bytes(frozen) == before
    shared = bytearray(128)
    with pytest.raises(ucxkv.UsageError, match="overlap"):
        await kv.get_many([key, key], [memoryview(shared)[:64], memoryview(shared)[32:96]])
    assert await kv.get(key) == array[0].tobytes()


async def test_counts_that_do_not_agree_are_refused(kv: ucxkv.Client) -> None:
    """Goal: one block, one destination, one parent a key. Method: one too few and one too many of each."""
    k = keys(3)
    for call in (
        lambda: kv.put_many(k, [b"1", b"2"]),
        lambda: kv.put_many(k, blocks(4, 8)),
        lambda: kv.put_many(k, [b"1"] * 3, parents=[ZERO] * 2),
        lambda: kv.put_many(k, [b"1"] * 3, parents=[ZERO, b"short", ZERO]),
        lambda: kv.put_many(k, [b"1"] * 3, parents="chains"),
        lambda: kv.get_many(k, [bytearray(1)]),
        lambda: kv.get_many(k, np.zeros((4, 8), np.uint8)),
        lambda: kv.get_many(k, np.zeros(3, np.uint8)),
    ):
        with pytest.raises(ucxkv.UsageError):
            await call()
    for index, count in ((2, 2), (-1, 2), (0, 0), (0, 256)):
        with pytest.raises(ucxkv.UsageError, match="Part"):
            ucxkv.Part(index, count)
    assert not (await kv.exists_many(k)).any()


async def test_a_destination_of_another_size_is_told_the_right_one(kv: ucxkv.Client) -> None:
    """Goal: never a cut or padded value. Method: one byte short and one long, single and in a batch with a hit."""
    k = keys(2)
    assert (await kv.put_many(k, [b"a" * 100, b"b" * 100])).ok
    for size in (0, 99, 101):
        with pytest.raises(ucxkv.UsageError, match="100 bytes"):
            await kv.get(k[0], bytearray(size))
    short, right = bytearray(b"\xab" * 99), bytearray(100)
    got = await kv.get_many(k, [short, right])
    assert got.status.tolist() == [ReadStatus.SIZE, ReadStatus.HIT] and got.lengths.tolist() == [100, 100]
    assert short == b"\xab" * 99 and right == b"b" * 100


async def test_duplicate_keys_in_one_call_are_each_answered(kv: ucxkv.Client) -> None:
    """Goal: as if called one after the other. Method: one key many times in put, get, exists, lease and delete."""
    (key,) = keys(1)
    put = await kv.put_many([key] * 5, [bytes([i]) * 10 for i in range(5)])
    assert put.status.tolist() == [PutStatus.STORED] + [PutStatus.ALREADY] * 4
    into = np.zeros((5, 10), np.uint8)
    assert (await kv.get_many([key] * 5, into)).hits == 5 and not into.any()
    assert (await kv.exists_many([key] * 3)).all()
    async with kv.lease([key, key]) as lease:
        assert lease.granted.all()
    assert (await kv.delete([key, key])).tolist()[0] == ucxkv.DeleteStatus.DELETED
    assert await kv.get(key) is None


async def test_deadlines_that_are_no_time_are_refused(kv: ucxkv.Client) -> None:
    """Goal: a deadline is seconds from now. Method: zero, negative, not a number; and leases of no time."""
    (key,) = keys(1)
    for bad in (0, -1.0, float("nan"), float("-inf")):
        for call in (
            lambda bad=bad: kv.put(key, b"v", deadline_s=bad),
            lambda bad=bad: kv.get_many([key], deadline_s=bad),
            lambda bad=bad: kv.get(key, bytearray(1), deadline_s=bad),
            lambda bad=bad: kv.match([key], deadline_s=bad),
            lambda bad=bad: kv.delete([key], deadline_s=bad),
        ):
            with pytest.raises(ucxkv.UsageError, match="deadline_s"):
                await call()
        with pytest.raises(ucxkv.UsageError, match="ttl_s"):
            kv.lease([key], ttl_s=bad)
    assert not await kv.exists(key)
    assert await kv.put(key, b"v", deadline_s=float("inf")) is PutStatus.STORED
    assert await kv.put(keys(1)[0], b"v", deadline_s=1e-6) in (PutStatus.STORED, PutStatus.UNAVAILABLE)


async def test_values_as_large_as_the_tier_fit_and_larger_ones_are_refused_at_put() -> None:
    """User voice 40. Method: the size of the tier less one, the tier, one more; what fits round-trips."""
    with NodeProcess(host_bytes="16MiB") as node:
        async with ucxkv.connect(node.address) as kv:
            limit = kv._router.sole.welcome.value_bytes_max
            assert (16 << 20) * 0.9 < limit <= 16 << 20
            assert (await kv.put_many(keys(64), blocks(64, 100_000))).ok
            for nbytes in (limit // 2, limit - 1, limit):
                (key,), value = keys(1), np.random.default_rng(nbytes).bytes(nbytes)
                assert await kv.put(key, value, deadline_s=5) is PutStatus.STORED
                assert await kv.get(key) == value
            with pytest.raises(ucxkv.ValueTooLarge) as caught:
                await kv.put(keys(1)[0], bytes(limit + 1))
            assert (caught.value.size_bytes, caught.value.limit_bytes) == (limit + 1, limit)
            assert "--host-bytes" in str(caught.value)
            with pytest.raises(ucxkv.ValueTooLarge):
                await kv.put_many(keys(2), [b"small", bytes(limit + 1)])
            assert await kv.put(keys(1)[0], b"small") is PutStatus.STORED


async def test_a_closed_client_says_so(shared_node: NodeProcess) -> None:
    """Goal: no call hangs or half-works after aclose. Method: every call on a closed client; aclose twice."""
    kv = await ucxkv.connect(shared_node.address)
    await kv.aclose()
    await kv.aclose()
    (key,) = keys(1)
    for call in (
        lambda: kv.put(key, b"v"),
        lambda: kv.get(key),
        lambda: kv.get(key, bytearray(1)),
        lambda: kv.get_many([key]),
        lambda: kv.exists(key),
        lambda: kv.match([key]),
        lambda: kv.delete([key]),
        lambda: kv.view(key),
        lambda: kv.status(),
        lambda: kv.list_keys(),
    ):
        with pytest.raises(ucxkv.ClientClosed, match="connect again"):
            await call()
    with pytest.raises(ucxkv.ClientClosed):
        kv.register(bytearray(10))


async def test_a_client_in_another_event_loop_is_refused(kv: ucxkv.Client) -> None:
    """Goal: one client, one loop. Method: a thread with a loop of its own calls it; the client still works here."""
    errors: list[BaseException] = []

    def elsewhere() -> None:
        for call in (lambda: kv.exists(keys(1)[0]), lambda: kv.put(keys(1)[0], b"v")):
            try:
                asyncio.run(call())
            except BaseException as exc:
                errors.append(exc)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, ucxkv.UsageError) and "event loop" in str(error)
    assert await kv.put(keys(1)[0], b"v") is PutStatus.STORED


async def test_unknown_paths_and_limits_are_refused(kv: ucxkv.Client, shared_node: NodeProcess) -> None:
    """Goal: a misspelt option never means its default. Method: connect, list_keys, register with bad arguments."""
    with pytest.raises(ucxkv.UsageError, match="path='mmap'"):
        ucxkv.connect(shared_node.address, path="mmap")
    with pytest.raises(ucxkv.UsageError, match="timeout_s"):
        ucxkv.connect(shared_node.address, timeout_s=0)
    with pytest.raises(ucxkv.UsageError, match="address"):
        ucxkv.connect()
    with pytest.raises(ucxkv.UsageError, match="limit"):
        await kv.list_keys(-1)
    pool = kv.register(np.zeros((4, 8), np.uint8))
    for bad in (9, -9, [0, 9], 1.5):
        with pytest.raises(ucxkv.UsageError):
            pool[bad]
    with pytest.raises(ucxkv.UsageError, match="evenly"):
        kv.register(bytearray(10), row_bytes=3)
