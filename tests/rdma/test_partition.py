"""A network that goes away for a while under RDMA: what waits ends in time, and the next call works after it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import wait_until
from tests.rdma.processes import Process, node_main
from ucxkv import PathKind, PutStatus, ReadStatus

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif("UCXKV_ROCE" not in os.environ, reason="the wire of real devices cannot be cut from here"),
]

_DEADLINE_S = 20.0
_SLACK_S = 90.0
"""The machine that emulates the devices is slow: what it may add to a deadline before the test calls it a hang."""
_CUT = "table ip cut {\n chain input {\n type filter hook input priority 0;\n iifname { va, vb } drop\n }\n}\n"
_POISON = 0xAB


@pytest.fixture
def wire() -> Iterator[None]:
    """The wire between the two devices, whole again afterwards."""
    yield
    _nft("delete table ip cut", check=False)


def _nft(rules: str, *, check: bool = True) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=check, capture_output=True)


async def _works(kv: ucxkv.Client) -> bool:
    (key,), block = keys(1), blocks(1, 50_000)
    try:
        return (await kv.put(key, block[0], deadline_s=20)) is PutStatus.STORED and (
            await kv.get(key, deadline_s=20) == block[0].tobytes()
        )
    except ucxkv.UcxKvError:
        return False


@pytest.mark.usefixtures("wire")
async def test_a_partition_ends_pending_gets_in_time_and_the_next_call_works_after_it() -> None:
    """Method: half of 32 gets, then every packet is dropped both ways, then the other half; each is HIT or UNAVAILABLE
    by its deadline, what is a HIT is right; other calls end too; the wire is back: buffers are left alone, puts and
    gets work again, the old blocks are there.
    """
    with Process(node_main, "p1", ()) as node:
        async with ucxkv.connect(node.told, path="network", timeout_s=120.0) as kv:
            assert kv.peers()[0].path is PathKind.RMA, kv.peers()
            k, b = keys(32), blocks(32, 128 << 10)
            assert (await kv.put_many(k, b)).ok
            into = np.full_like(b, _POISON)

            def get(i: int) -> asyncio.Task[ucxkv.GetResult]:
                return asyncio.create_task(kv.get_many([k[i]], into[i : i + 1], deadline_s=_DEADLINE_S))

            gets = [get(i) for i in range(16)]
            await asyncio.sleep(0)
            _nft(_CUT)
            gets += [get(i) for i in range(16, 32)]
            ends = await asyncio.wait_for(asyncio.gather(*gets), _DEADLINE_S + _SLACK_S)
            status = np.array([end.status[0] for end in ends])
            assert set(status.tolist()) <= {ReadStatus.HIT, ReadStatus.UNAVAILABLE}, status
            assert (status[16:] == ReadStatus.UNAVAILABLE).all(), status
            hit = status == ReadStatus.HIT
            assert (into[hit] == b[hit]).all()
            put = await asyncio.wait_for(kv.put_many(keys(2), b[:2], deadline_s=2), 2 + _SLACK_S)
            assert not put.stored
            assert not (await asyncio.wait_for(kv.exists_many(k, deadline_s=2), 2 + _SLACK_S)).any()
            after = into.copy()
            _nft("delete table ip cut")
            await wait_until(lambda: _works(kv), "the next call works", 300)
            assert (into == after).all(), "a buffer was written after its call had ended"
            fresh = np.full_like(b, _POISON)
            assert (await kv.get_many(k, fresh)).hits == 32 and (fresh == b).all()
        numbers = await asyncio.to_thread(node.ask, "numbers")
        assert numbers["message_grants"] == 0 and numbers["message_sessions"] <= 1
