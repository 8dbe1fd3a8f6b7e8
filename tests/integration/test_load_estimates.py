"""A match's load seconds, from a client's own reads of a real node, over each path."""

from __future__ import annotations

import numpy as np

import ucxkv
from tests.conftest import blocks, keys


async def test_batches_are_measured_and_single_reads_on_the_short_way_are_not(kv: ucxkv.Client) -> None:
    """Goal: a match says what this client measured, and one read pays nothing for it. Method: single reads into memory
    leave the first guess where the path has a short way; reads of 32 blocks change it; sizes and the holder are told.
    """
    k, source = keys(32), blocks(32, 8192)
    assert (await kv.put_many(k, source, "chain")).ok
    costs, path = kv._router.loads, kv.peers()[0].path
    guess = costs.cost("shared", path)
    into = np.zeros_like(source)
    if kv._router.fast_read is not None:
        for i in range(32):
            assert await kv.get(k[i], into[i]) == 8192
        assert costs.cost("shared", path) == guess
    before = await kv.match(k)
    assert before.node == "shared" and before.nbytes.tolist() == [8192] * 32
    assert np.allclose(before.load_s, guess.seconds(8192))
    for _ in range(3):
        assert (await kv.get_many(k, into)).hits == 32
    assert costs.cost("shared", path) != guess
    after = await kv.match(k)
    assert (after.load_s > 0).all() and np.allclose(after.load_s, costs.cost("shared", path).seconds(8192))
    assert (await kv.match(keys(3))).node == ""
