"""Blocks between memory and disk: which codec takes which, what is said of it, and whose the memory is meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.tiers.coded import as_words, kv_values
from ucxkv.node import NodeConfig
from ucxkv.node.disk import coding
from ucxkv.node.disk.coding import EXACT, Coder, Stored, codec_in, is_exact_next
from ucxkv.tiers.base import BlockDamaged
from ucxkv.tiers.codecs import ERROR_BOUND

pytest.importorskip("zstandard", reason="needs the extra codec")

TOKENS, CHANNELS = 16, 64
total = xxhash.xxh3_64_intdigest


def coder(codec: str, **changes: Any) -> Coder:
    settings = {"disk_dtype": "bfloat16", "disk_tokens": TOKENS, "disk_channels": CHANNELS, **changes}
    return Coder(NodeConfig(disk=("unused",), disk_codec=codec, **settings))  # type: ignore[arg-type]


def value(groups: int = 8, seed: int = 1) -> bytes:
    return as_words(kv_values((groups, TOKENS, CHANNELS), seed), "bfloat16").tobytes()


async def test_a_block_is_offered_to_one_codec_after_the_other() -> None:
    """Goal: the order of the codecs. Method: with int8, values that it takes, that only lossless takes (NaN), that
    nobody takes (noise); with lossless, without int8."""
    nan = np.full(4096, 0x7FC0, np.uint16).tobytes()
    noise = np.random.default_rng(2).bytes(8192)
    values = [value(), nan, noise]
    for name, numbers in (("int8", [2, 1, 0]), ("lossless", [1, 1, 0])):
        own = coder(name)
        coded = await own.encode(values, [total(one) for one in values], [False] * len(values))
        assert [one.codec for one in coded] == numbers
        assert [one.sum for one in coded] == [total(bytes(one.data)) for one in coded]
        assert bytes(coded[2].data) == noise and own.counts["disk_codec_declined"] == 1
        assert own.counts["disk_codec_in_bytes"] == sum(map(len, values))
        assert own.counts["disk_codec_out_bytes"] == sum(len(bytes(one.data)) for one in coded)
        own.close()


@pytest.mark.parametrize(("name", "codec"), [("lossless", 1), ("int8", 2)])
async def test_what_comes_back_has_the_sum_that_was_said(name: str, codec: int) -> None:
    """Goal: a restart knows what a reader gets without reading it. Method: encode, decode, compare; the same bytes for
    lossless, within the stated error for int8; any other claimed sum is a damaged copy."""
    own, values = coder(name), [value(seed=n) for n in range(5)]
    coded = await own.encode(values, [total(one) for one in values], [False] * len(values))
    targets = [np.zeros(len(one), np.uint8) for one in values]
    wanted = [Stored(one.data, one.codec, into, one.shown) for one, into in zip(coded, targets, strict=True)]
    assert await own.decode(wanted) == [None] * 5 and {one.codec for one in coded} == {codec}
    for was, one, into in zip(values, coded, targets, strict=True):
        assert total(into) == one.shown and (into.tobytes() == was) == (name == "lossless")
        before, after = (np.frombuffer(x, np.uint16).astype(np.uint32) << 16 for x in (was, into.tobytes()))
        shape = (-1, TOKENS, CHANNELS)
        exact, found = before.view(np.float32).reshape(shape), after.view(np.float32).reshape(shape)
        bound = ERROR_BOUND["bfloat16"] * np.abs(exact).max(axis=1, keepdims=True)
        assert (np.abs(exact.astype(np.float64) - found) <= bound).all()
    lies = [one._replace(shown=one.shown ^ 1) for one in wanted[:2]] + wanted[2:]
    outcomes = await own.decode(lies)
    assert [type(one) for one in outcomes] == [BlockDamaged] * 2 + [type(None)] * 3
    own.close()


async def test_bytes_that_lost_their_sum_are_stored_as_they_are() -> None:
    """Goal: a codec with loss launders nothing. Method: a value that changed in memory after its sum was taken."""
    own, was = coder("int8"), value()
    (one,) = await own.encode([was], [total(was) ^ 1], [False])
    assert one.codec == 0 and bytes(one.data) == was and one.sum == one.shown == total(was) ^ 1
    own.close()


async def test_an_exact_block_is_stored_without_loss() -> None:
    """Goal: losses never add up. Method: values that int8 takes, every other one exact; a copy's flags."""
    own, values = coder("int8"), [value(seed=n) for n in range(4)]
    coded = await own.encode(values, [total(one) for one in values], [False, True] * 2)
    assert [one.codec for one in coded] == [2, 1, 2, 1]
    assert [one.shown == total(was) for one, was in zip(coded, values, strict=True)] == [False, True] * 2
    assert [flags for flags in (0, 1, 2, EXACT, EXACT | 1) if is_exact_next(flags)] == [2, EXACT, EXACT | 1]
    assert [codec_in(flags) for flags in (0, 2, EXACT, EXACT | 1, 512 | 1)] == [0, 2, 0, 1, 513]
    own.close()


async def test_a_value_of_other_axes_goes_to_lossless() -> None:
    """Goal: int8 never guesses axes. Method: values that are no whole groups of tokens x channels."""
    own, whole = coder("int8"), value()
    for cut in (whole[:-2], whole[:-1], whole[: len(whole) - 2 * CHANNELS]):
        (one,) = await own.encode([cut], [total(cut)], [False])
        into = np.zeros(len(cut), np.uint8)
        assert one.codec == 1 and await own.decode([Stored(one.data, 1, into, total(cut))]) == [None]
        assert into.tobytes() == cut
    own.close()


async def test_a_cancelled_call_ends_when_no_thread_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: memory is given back by those who use it. Method: threads held in the middle of their work, the calls
    cancelled; they end only after the threads went on, and the next calls are served."""
    started, go = threading.Semaphore(0), threading.Event()
    real = coding.sum_bytes

    def held(data: Any) -> int:
        started.release()
        assert go.wait(20)
        return real(data)

    own, was = coder("lossless"), value()
    (one,) = await own.encode([was], [total(was)], [False])
    monkeypatch.setattr(coding, "sum_bytes", held)
    into = np.zeros(len(was), np.uint8)
    calls: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(own.encode([was], [total(was)], [False])),
        asyncio.ensure_future(own.decode([Stored(one.data, 1, into, one.shown)])),
    ]
    await asyncio.to_thread(lambda: [started.acquire(timeout=20) for _ in calls])
    for call in calls:
        call.cancel()
    done, _ = await asyncio.wait(calls, timeout=0.05)
    assert not done
    go.set()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True))
    assert await own.decode([Stored(one.data, 1, into, one.shown)]) == [None] and into.tobytes() == was
    own.close()


async def test_work_is_done_by_few_threads_however_much_there_is() -> None:
    """Goal: a bound. Method: 40 calls of both kinds at once; the threads that they leave, and every result."""
    own, was = coder("lossless"), value(groups=512)
    (one,) = await own.encode([was], [total(was)], [False])
    targets = [np.zeros(len(was), np.uint8) for _ in range(40)]
    calls = [own.decode([Stored(one.data, 1, into, one.shown)]) for into in targets]
    more = [own.encode([was], [total(was)], [False]) for _ in range(40)]
    results = await asyncio.gather(*calls, *more)
    assert results[:40] == [[None]] * 40 and all(into.tobytes() == was for into in targets)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith(("disk-encode", "disk-decode"))]
    assert 2 <= len(names) <= 6
    own.close()
    assert not any(thread.name.startswith("disk-") for thread in threading.enumerate() if thread.name in names)
