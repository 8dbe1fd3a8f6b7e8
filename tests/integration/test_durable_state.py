"""What a node finds when it starts again: folders and files that are not what they should be, and bytes gone bad."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import works
from tests.harness import wait_until
from tests.integration.durable_nodes import MIB, Lives, life
from ucxkv import PutStatus
from ucxkv.node import Node
from ucxkv.node.state import NodeState


async def test_state_of_another_node_or_size_is_refused_and_kept(again: Lives) -> None:
    """Goal: nothing is lost by a slip of the operator. Method: another name, another host_bytes, a state of a newer
    version, a journal of another node; each refused with its fix; then the right ones find all blocks."""
    (key,) = keys(1)
    async with life(again) as (_, kv):
        assert await kv.put(key, b"kept", durable=True) is PutStatus.STORED
    state = again.folder / "node.json"
    good = state.read_bytes()
    for changes, match in (({"name": "other"}, "another node's"), ({"host_bytes": 32 * MIB}, "host_bytes .* changed")):
        with pytest.raises(ucxkv.SetupError, match=match):
            await Node(again.config(**changes)).start()
    for bad in (b"{", good.replace(b'"format": 1', b'"format": 2'), b"[]", good.replace(b"epoch", b"epic")):
        state.write_bytes(bad)
        with pytest.raises(ucxkv.SetupError, match="no state of this version"):
            await Node(again.config()).start()
    identity = good[good.index(b'"identity": "') + 13 :][:16]
    state.write_bytes(good.replace(identity, b"0" * 16))
    with pytest.raises(ucxkv.SetupError):
        await Node(again.config()).start()
    state.write_bytes(good)
    async with life(again) as (_, kv):
        assert await kv.get(key) == b"kept"


@pytest.mark.parametrize("loss", ["segment", "size", "journal", "folder", "torn"])
async def test_what_is_gone_is_said_and_the_rest_goes_on(again: Lives, loss: str) -> None:
    """Goal: a missing or torn piece is a loud loss of what stood on it and of nothing else. Method: delete the segment
    (as a reboot does), give it another size, empty the journal's folder, all of the state; or tear the end of the log;
    what is found is a prefix, and the node serves."""
    k = keys(10)
    async with life(again) as (_, kv):
        for i in range(10):
            assert await kv.put(k[i], b"v" * 3000, k[i - 1] if i else None, durable=True) is PutStatus.STORED
    segment = again.segment()
    if loss == "segment":
        segment.unlink()
    elif loss == "size":
        os.truncate(segment, 32 * MIB)
    elif loss == "torn":
        log = max((again.folder / "journal").glob("log-*"), key=lambda path: path.stat().st_size)
        raw = log.read_bytes()
        end = len(raw.rstrip(b"\0"))
        log.write_bytes(raw[: end - 50] + bytes(len(raw) - end + 50))
    else:
        for path in sorted((again.folder / "journal").iterdir()):
            path.unlink()
        if loss == "folder":
            (again.folder / "node.json").unlink()
    async with life(again) as (node, kv):
        there = (await kv.match(k)).blocks
        lost = (await kv.status())[0].numbers["durable_lost"]
        if loss in ("segment", "size"):
            assert (there, lost) == (0, 10)
        elif loss == "torn":
            assert (there, lost) == (9, 0)
        else:
            assert (there, lost) == (0, 0)
        assert not (await kv.exists_many(k[there:])).any()
        assert (await kv.put_many(k[there:], [b"v" * 3000] * (10 - there), parents=_below(k, there), durable=True)).ok
        assert await works(kv)
    if loss == "folder":
        segment.unlink()
        segment.with_name(segment.name + "-grants").unlink()
    async with life(again) as (node, kv):
        assert (await kv.match(k)).blocks == 10 and (await kv.status())[0].numbers["durable_lost"] == 0
        assert node.store.directory.match(b"".join(k)) == 10


def _below(k: list[bytes], at: int) -> list[bytes]:
    return [k[i - 1] if i else ucxkv.ROOT_KEY for i in range(at, len(k))]


async def test_a_damaged_block_is_dropped_for_good(again: Lives) -> None:
    """User voice 29, over a restart. Method: flip a bit of a durable block in the middle of a chain while the node
    runs: a miss, it and all below go, with a Leave; the same while it is down: it comes back without them."""
    k, values = keys(6), blocks(6, 10_000)
    async with life(again) as (node, kv):
        assert (await kv.put_many(k, values, "chain", durable=True)).ok
        _flip(node, k[4])
        assert await kv.get(k[4]) is None
        await wait_until(lambda: node.store.directory.blocks == 4, "it is dropped with what is below")
        assert (await kv.status())[0].numbers["damaged"] == 2
    async with life(again) as (node, kv):
        numbers = (await kv.status())[0].numbers
        assert (await kv.match(k)).blocks == 4 and numbers["durable_lost"] == 0
        _flip(node, k[2])
    async with life(again) as (node, kv):
        numbers = (await kv.status())[0].numbers
        assert (await kv.match(k)).blocks == 2 and numbers["durable_lost"] == 2
        assert (await kv.put_many(k[2:], values[2:], parents=_below(k, 2), durable=True)).ok
    async with life(again) as (node, kv):
        assert (await kv.match(k)).blocks == 6


def _flip(node: Node, key: bytes) -> None:
    records, found = node.store.directory.lookup(key)
    assert found[0]
    node.store.segment.view[int(records["offset"][0]) + 777] ^= 4


async def test_the_log_is_kept_short_by_snapshots(again: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a journal grown past what is alive is replaced by a snapshot beside serving, and a start from it is
    the same. Method: the bound lowered to 64 KiB; three lives of puts and deletes; each finds what the last had."""
    monkeypatch.setattr("ucxkv.node.durable._SNAPSHOT_BYTES_MIN", 64 << 10)
    kept: dict[bytes, bytes] = {}
    for number in range(3):
        async with life(again) as (node, kv):
            got = await kv.get_many(list(kept))
            assert got.values == list(kept.values())
            for turn in range(30):
                k = keys(60)
                values = [bytes([number, turn, i]) * 40 for i in range(60)]
                assert (await kv.put_many(k, values, "chain", durable=True)).ok
                assert (await kv.delete(k[5:])).tolist() == [ucxkv.DeleteStatus.DELETED] * 55
                kept.update(zip(k[:5], values, strict=False))

            async def has_one() -> bool:
                return (await kv.status())[0].numbers["journal_snapshots"] > 0

            await wait_until(has_one, "a snapshot", 30)
            assert node.store.directory.stats().durable_blocks == len(kept)
    assert list((again.folder / "journal").glob("snapshot-*"))


async def test_a_journal_that_is_damaged_in_its_middle_is_refused_and_kept(again: Lives) -> None:
    """Goal: what was acknowledged is not given up behind the operator's back. Method: flip a bit in the middle of the
    log: refused twice, with the place; flip it back: all is there."""
    k = keys(10)
    async with life(again) as (_, kv):
        for key in k:
            assert await kv.put(key, b"v" * 3000, durable=True) is PutStatus.STORED
    log = max((again.folder / "journal").glob("log-*"), key=lambda path: path.stat().st_size)
    raw = log.read_bytes()
    at = raw.index(k[5])
    log.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    for _ in range(2):
        with pytest.raises(ucxkv.SetupError, match=r"journal in .* is damaged"):
            await Node(again.config()).start()
    log.write_bytes(raw)
    async with life(again) as (_, kv):
        assert (await kv.exists_many(k)).all()


async def test_many_short_lives_do_not_let_the_log_grow(again: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what a life did not snapshot the next one counts. Method: the bound lowered to 64 KiB; lives that log 20
    KiB each; within six a snapshot is written."""
    monkeypatch.setattr("ucxkv.node.durable._SNAPSHOT_BYTES_MIN", 64 << 10)
    for _ in range(6):
        async with life(again) as (_, kv):
            k = keys(250)
            assert (await kv.put_many(k, blocks(250, 64), "chain", durable=True)).ok
            assert (await kv.delete(k)).tolist() == [ucxkv.DeleteStatus.DELETED] * 250
            await asyncio.sleep(0.2)
    assert list((again.folder / "journal").glob("snapshot-*"))


async def test_a_reboot_is_named_as_the_cause(again: Lives) -> None:
    """Goal: the operator reads why blocks are gone. Method: another boot id in the state, and no segment."""
    async with life(again) as (_, kv):
        assert await kv.put(keys(1)[0], b"v", durable=True) is PutStatus.STORED
    state = again.folder / "node.json"
    said = json.loads(state.read_bytes())
    state.write_text(json.dumps({**said, "boot": "another"}))
    again.segment().unlink()
    opened = NodeState.open(again.config(), 1)
    try:
        memory = opened.take_memory("auto")
        assert "started anew" in memory.why_empty and memory.held_units == []
        memory.close()
    finally:
        opened.close()
