"""Blocks put with durable=True: there again after kill -9 of the node, in token order, with their bytes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.faults import works
from tests.harness import NodeProcess, wait_until
from tests.integration.durable_nodes import Lives, life
from tests.wire import RawPeer, hello
from tests.writer import Writer
from ucxkv import DeleteStatus, PutStatus
from ucxkv.layout import Layout
from ucxkv.node import Node
from ucxkv.protocol import messages as m

MIB = 1 << 20


@pytest.mark.parametrize("path", ["mapped", "message", "network"])
async def test_what_was_acknowledged_is_there_after_kill_9(again: Lives, path: str) -> None:
    """User voices 30 and 39. Method: chains in batches and block by block, an empty value, a durable block below a
    chain of class cache, and cache blocks; kill -9; all durable ones are there, whole chains of them, the others are
    not; deletes last over another kill."""
    chain, single, mixed, cache = keys(40), keys(5), keys(6), keys(8)
    values = blocks(40, 20_000, seed=3)
    with again.process() as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            assert (await kv.put_many(chain, values, "chain", durable=True)).ok
            for i, key in enumerate(single):
                parent = single[i - 1] if i else None
                assert await kv.put(key, bytes(100 * i), parent, durable=True) is PutStatus.STORED
            assert (await kv.put_many(mixed[:-1], values[:5], "chain")).ok
            assert await kv.put(mixed[-1], values[5], mixed[-2], durable=True) is PutStatus.STORED
            assert await kv.put(mixed[2], values[2], mixed[1], durable=True) is PutStatus.ALREADY
            assert (await kv.put_many(cache, values[:8], "chain")).ok
            assert (await kv.status())[0].numbers["durable_blocks"] == 51
        node.kill()
    with again.process() as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            into = np.zeros_like(values)
            assert (await kv.get_many(chain, into)).hits == 40 and (into == values).all()
            got = await kv.get_many([*single, *mixed])
            assert got.values == [*(bytes(100 * i) for i in range(5)), *(v.tobytes() for v in values[:6])]
            assert (await kv.match(mixed)).blocks == 6 and not (await kv.exists_many(cache)).any()
            assert (await kv.delete(chain[20:])).tolist() == [DeleteStatus.DELETED] * 20
            assert await works(kv)
        node.kill()
    with again.process() as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            assert (await kv.match(chain)).blocks == 20 and not (await kv.exists_many(chain[20:])).any()
            numbers = (await kv.status())[0].numbers
            assert (numbers["durable_blocks"], numbers["durable_lost"]) == (31, 0)
        assert node.stop() == 0


# ---- kill -9 at every step

_DIE = """
import os
from ucxkv.journal.files import FolderFiles
from ucxkv.journal.journal import Journal
from ucxkv.node.requests import Requests
from ucxkv.node.room import Room
from ucxkv.node.space import Space
from ucxkv.node.store import HostStore
from ucxkv.protocol import messages as m
from ucxkv.transport.control import ControlConnection
steps = [0, False]
def step():
    if steps[1]:
        steps[0] += 1
        if steps[0] == DIE_AT:
            os.kill(os.getpid(), 9)
def around(owner, name):
    inner = getattr(owner, name)
    def call(*arguments, **options):
        if name == "_carry_out":
            steps[1] |= isinstance(arguments[2], WATCHED)
        step()
        result = inner(*arguments, **options)
        step()
        return result
    setattr(owner, name, call)
for owner, name in ((Requests, "_carry_out"), (Space, "take"), (HostStore, "handle"), (Journal, "append"),
                    (FolderFiles, "write"), (Space, "refill"), (ControlConnection, "reply")):
    around(owner, name)
from ucxkv.cli import main
main()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("op", ["put", "delete"])
async def test_kill_9_at_every_step(again: Lives, op: str) -> None:
    """Goal: whenever the node dies, what it had answered holds, and no chain has a hole. Method: a node that kills
    itself before and after each call that a put (a delete) of a chain makes: 1, 2, ... until one is answered; each next
    life is read, then dies one step later."""
    watched = "m.Put" if op == "put" else "m.Delete"
    values = blocks(3, 5000)
    expected: dict[bytes, bool] = {}
    chains: list[list[bytes]] = []
    ways = {"there": 0, "not there": 0}
    for at in range(1, 60):
        program = _DIE.replace("DIE_AT", str(at)).replace("WATCHED", watched)
        with again.process(program=program) as node:
            async with ucxkv.connect(node.address) as kv:
                for chain in chains:
                    there = (await kv.exists_many(chain)).tolist()
                    assert there == sorted(there, reverse=True), "a hole"
                    right = [
                        value.tobytes() if is_there else None for value, is_there in zip(values, there, strict=True)
                    ]
                    assert (await kv.get_many(chain)).values == right
                    found = dict(zip(chain, there, strict=True))
                    assert {key: expected.get(key, is_there) for key, is_there in found.items()} == found, at
                    expected.update(found)
                if chains:
                    ways["there" if expected[chains[-1][0]] else "not there"] += 1
                chain = keys(3)
                chains.append(chain)
                if op == "put":
                    status = (await kv.put_many(chain, values, "chain", durable=True, deadline_s=20)).status.tolist()
                    is_done = status == [PutStatus.STORED] * 3
                    if is_done:
                        expected.update(dict.fromkeys(chain, True))
                else:
                    assert (await kv.put_many(chain, values, "chain", durable=True)).ok
                    status = (await kv.delete(chain[1:], deadline_s=20)).tolist()
                    is_done = status == [DeleteStatus.DELETED] * 2
                    expected.update({chain[0]: True} | (dict.fromkeys(chain[1:], False) if is_done else {}))
                if not is_done:
                    await wait_until(lambda: node.process.poll() is not None, "the node killed itself", 30)
            if is_done:
                break
    else:
        raise AssertionError("the node never got through")
    assert at > 10 and (op == "delete" or min(ways.values()) > 0), (at, ways)


@pytest.mark.timeout(400)
async def test_kill_9_at_every_step_of_an_eviction(again: Lives) -> None:
    """Study, fault test 1, of evict. Goal: durable blocks are there after whatever eviction was cut short, and cache
    blocks whole, in order, or not at all. Method: a full node kills itself 1 to 22 steps into the eviction that the
    next puts cause: before and after each call of store, memory and reply, until it gets through; the next life is
    read."""
    k, values = keys(6), blocks(6, 5000)
    with again.process(host_bytes="16MiB") as node:
        async with ucxkv.connect(node.address) as kv:
            assert (await kv.put_many(k, values, "chain", durable=True)).ok
    died = 0
    for at in (1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22):
        program = _DIE.replace("DIE_AT", str(at)).replace(
            'steps[1] |= isinstance(arguments[2], WATCHED)', "pass"
        ).replace('(Space, "refill"),', '(Space, "refill"), (Room, "go_on"),').replace(
            "        step()\n        result", '        steps[1] |= name == "go_on" and arguments[0].owed > 0\n'
            "        step()\n        result",
        )  # fmt: skip
        with again.process(host_bytes="16MiB", program=program) as node:
            async with ucxkv.connect(node.address) as kv:
                assert (await kv.get_many(k)).values == [value.tobytes() for value in values]
                cache = keys(100)
                with contextlib.suppress(ucxkv.errors.Unavailable):
                    for i in range(100):
                        parent = cache[i - 1] if i % 10 else None
                        status = await kv.put(cache[i], bytes((i,)) * 400_000, parent, deadline_s=10)
                        if status is PutStatus.UNAVAILABLE:
                            break
                        if i % 10 == 9:
                            found = (await kv.get_many(cache[i - 9 : i + 1])).values
                            there = [value is not None for value in found]
                            if node.process.poll() is None:
                                assert there == sorted(there, reverse=True), "a hole"
                            assert all(v in (None, bytes((i - 9 + j,)) * 400_000) for j, v in enumerate(found))
                if node.process.poll() is None and status is not PutStatus.UNAVAILABLE:
                    break
                died += 1
    assert died >= 5, died


# ---- who may still write


@pytest.mark.timeout(300)
async def test_a_stopped_writer_of_before_meets_nobody_elses_bytes(again: Lives) -> None:
    """Goal: a slot that a process may still write is never given to another, over a restart either. Method: a writer
    holds extents and is stopped; kill -9; the next life fills its memory twice over and ends in good order; in the one
    after that the writer wakes and writes into all it ever held; every block is right; when the writer ends its places
    are free."""
    k = keys(20)
    values = blocks(20, 30_000)
    writer = None
    try:
        with again.process() as node:
            writer = Writer(node.address, "mapped")
            assert writer.tell("grant 30000 100") != "0"
            async with ucxkv.connect(node.address) as kv:
                assert (await kv.put_many(k, values, "chain", durable=True)).ok
            writer.signal(signal.SIGSTOP)
            node.kill()
        for number in range(2):
            with again.process() as node:
                async with ucxkv.connect(node.address) as kv:
                    held = (await kv.status())[0].numbers["held_over_bytes"]
                    assert held >= 100 * 30_000, (number, held)
                    more = keys(3000)
                    filled = blocks(3000, 30_000, seed=number)
                    await kv.put_many(more, filled)
                    if number:
                        writer.signal(signal.SIGCONT)
                        assert int(writer.tell("scribble-all")) >= 100
                    into = np.zeros_like(values)
                    assert (await kv.get_many(k, into)).hits == 20 and (into == values).all()
                    kept = np.zeros_like(filled)
                    status = (await kv.get_many(more, kept)).status
                    assert set(status.tolist()) <= {ucxkv.ReadStatus.HIT, ucxkv.ReadStatus.MISS}, "damaged"
                    there = status == ucxkv.ReadStatus.HIT
                    assert there.sum() > 500 and (kept[there] == filled[there]).all()
                    assert (await kv.status())[0].numbers["damaged"] == 0
                    if number:
                        writer.end()

                        async def is_free() -> bool:
                            return (await kv.status())[0].numbers["held_over_bytes"] == 0

                        await wait_until(is_free, "its places are free", 30)
                        assert await works(kv)
                assert node.stop() == 0
    finally:
        if writer is not None:
            writer.end()


async def test_many_lives_leave_nothing_behind(again: Lives) -> None:
    """User voice 37. Method: eight lives ended by kill -9, one block each; memory and state are one node's, and a
    second node on the same folder is refused while one runs, also a stopped one."""
    k = keys(8)
    for number in range(8):
        with again.process() as node:
            async with ucxkv.connect(node.address) as kv:
                assert (await kv.exists_many(k)).tolist() == [True] * number + [False] * (8 - number)
                assert await kv.put(k[number], b"v" * 5000, k[number - 1] if number else None, durable=True) == 0
            if number == 3:
                node.freeze()
                with pytest.raises(RuntimeError, match=r"in use.*process \d+") as told:
                    again.process()
                assert str(node.pid) in str(told.value)
            node.kill()
        assert sorted(path.name for path in again.folder.iterdir()) == ["journal", "lock", "node.json"]
        assert again.segment().stat().st_size == 64 * MIB


# ---- what waits for the journal, and what happens when it fails


class _Gate:
    """Holds the journal's writes back, or makes them fail."""

    def __init__(self, node: Node) -> None:
        assert node._keeping is not None
        journal = node._keeping._journal
        assert journal is not None
        files = journal._files
        self.open = threading.Event()
        self.open.set()
        self.error: OSError | None = None
        inner = files.write

        def write(handle: int, at: int, data: memoryview) -> None:
            assert self.open.wait(60)
            if self.error is not None:
                raise self.error
            inner(handle, at, data)

        files.write = write  # type: ignore[method-assign]


async def test_nothing_is_seen_before_the_journal_has_it(again: Lives) -> None:
    """Goal: no read shows what a crash could take back, and what needs it waits. Method: the disk stands still; a
    durable parent, a cache child of it, a grandchild of that, a second put of the parent: all wait, none is seen,
    others go on; then all are STORED in order. A delete: still seen, and a new child waits, then is ORDER."""
    async with life(again) as (node, kv), ucxkv.connect(node.address, path="message") as other:
        gate, k = _Gate(node), keys(6)
        gate.open.clear()
        puts = [
            asyncio.create_task(kv.put(k[0], b"a", durable=True)),
            asyncio.create_task(other.put(k[0], b"b", durable=True)),
        ]
        await wait_until(lambda: node.store.directory.stats().staged == 1, "staged")
        puts.append(asyncio.create_task(kv.put(k[1], b"c", k[0])))
        puts.append(asyncio.create_task(kv.put(k[2], b"d", k[1])))
        puts.append(asyncio.create_task(other.put(k[0], b"e")))
        await asyncio.sleep(0.2)
        assert not any(put.done() for put in puts) and not (await kv.exists_many(k)).any()
        async with ucxkv.connect(node.address) as third:
            assert await works(third)
        gate.open.set()
        first, second, *rest = await asyncio.gather(*puts)
        assert sorted([first, second]) == [PutStatus.STORED, PutStatus.ALREADY]
        assert rest == [PutStatus.STORED, PutStatus.STORED, PutStatus.ALREADY]
        assert await kv.get(k[0]) == (b"a" if first is PutStatus.STORED else b"b")

        assert await kv.put(k[4], b"x", durable=True) is PutStatus.STORED
        gate.open.clear()
        delete = asyncio.create_task(kv.delete([k[4]]))
        await wait_until(lambda: node.store.directory.durable.leaving, "staged")
        child = asyncio.create_task(other.put(k[5], b"y", k[4]))
        again_gone = asyncio.create_task(other.delete([k[4]]))
        await asyncio.sleep(0.2)
        assert not delete.done() and not child.done() and await kv.get(k[4]) == b"x"
        gate.open.set()
        assert (await delete).tolist() == [DeleteStatus.DELETED] and await child is PutStatus.ORDER
        assert (await again_gone).tolist() == [DeleteStatus.MISS] and await kv.get(k[4]) is None


async def test_a_full_disk_refuses_durable_puts_and_nothing_else(again: Lives) -> None:
    """Goal: nothing acknowledged is lost and the node serves on. Method: ENOSPC under a put and a delete on their way:
    JournalFailed for these and every later one, for what is staged too; reads, cache puts and their deletes work; the
    state says so; a new start has what was acknowledged, and no more of the rest than a prefix."""
    k, values = keys(8), blocks(8, 4000)
    async with life(again) as (node, kv):
        assert (await kv.put_many(k[:4], values[:4], "chain", durable=True)).ok
        gate = _Gate(node)
        gate.open.clear()
        gate.error = OSError(errno.ENOSPC, "No space left on device")
        waiting = [
            asyncio.create_task(kv.put(k[4], values[4], k[3], durable=True)),
            asyncio.create_task(kv.delete([k[3]])),
        ]
        await asyncio.sleep(0.1)
        gate.open.set()
        with pytest.raises(ucxkv.errors.JournalFailed, match="durable puts and deletes are refused"):
            await waiting[0]
        with pytest.raises(ucxkv.errors.JournalFailed):
            await waiting[1]  # it had waited for the put below it
        with pytest.raises(ucxkv.errors.JournalFailed, match="start the node again"):
            await kv.put(k[5], values[5], durable=True)
        with pytest.raises(ucxkv.errors.JournalFailed):
            await kv.delete([k[3]])
        assert (await kv.match(k)).blocks == 4 and await works(kv)
        assert await kv.put(k[6], values[6], k[3]) is PutStatus.STORED
        assert (await kv.delete([k[6]])).tolist() == [DeleteStatus.DELETED]
        status = (await kv.status())[0]
        assert status.numbers["journal_failed"] == 1 and "journal failed" in status.facts["durability"]
        assert status.numbers["staged"] == 0
    async with life(again) as (node, kv):
        assert (await kv.match(k)).blocks == 4
        assert await kv.put(k[4], values[4], k[3], durable=True) is PutStatus.STORED


# ---- bounds and refusals


async def test_a_node_that_keeps_nothing_says_so_before_bytes_move(node: NodeProcess) -> None:
    """Goal: a durable put is never a cache put by mistake. Method: a node without durability: the client refuses, no
    grant was asked for; a peer that asks all the same is refused by the node; parts are refused."""
    async with ucxkv.connect(node.address) as kv:
        before = (await kv.status())[0].numbers
        with pytest.raises(ucxkv.UsageError, match="--durability process"):
            await kv.put(keys(1)[0], b"v", durable=True)
        with pytest.raises(ucxkv.UsageError, match="--durability process"):
            await kv.put_many(keys(3), blocks(3, 100), durable=True)
        with pytest.raises(ucxkv.UsageError, match="whole blocks"):
            await kv.put_many(keys(3), blocks(3, 100), part=ucxkv.Part(0, 2), durable=True)
        after = (await kv.status())[0].numbers
        assert after["grants"] == before["grants"] and after["puts"] == before["puts"]
    peer = RawPeer(node.address)
    assert isinstance(peer.ask(hello()), m.Welcome)
    granted = peer.ask(m.Grant(length=100, count=1))
    assert isinstance(granted, m.Granted)
    put = m.Put(
        keys=os.urandom(16), parents=bytes(16), regions=granted.regions, offsets=granted.offsets,
        lengths=(100).to_bytes(4, "little"), sums=bytes(8), durable=True,
    )  # fmt: skip
    answer = peer.ask(put)
    assert isinstance(answer, m.Failure) and answer.kind == "UsageError" and "keeps nothing durable" in answer.text
    peer.socket.close()


async def test_durable_blocks_are_not_evicted_and_a_full_node_says_so(again: Lives) -> None:
    """Goal: cache goes first, then NO_SPACE, then deletes make room. Method: cache blocks, then durable ones until the
    node is full, more than it holds; all durable ones that were STORED are there; delete half; room again; restart."""
    async with life(again) as (_, kv):
        assert (await kv.put_many(keys(40), blocks(40, MIB - 4096))).stored > 30
        k = keys(90)
        first = await kv.put_many(k, blocks(90, MIB - 4096), durable=True, deadline_s=4)
        assert 45 < first.stored <= 64 and PutStatus.NO_SPACE in first.status
        stored = [k[i] for i in np.flatnonzero(first.status == PutStatus.STORED)]
        assert (await kv.exists_many(stored)).all() and (await kv.status())[0].numbers["durable_blocks"] == len(stored)
        assert (await kv.delete(stored[::2])).tolist() == [DeleteStatus.DELETED] * len(stored[::2])
        assert (await kv.put_many(keys(10), blocks(10, MIB - 4096), durable=True)).ok
    async with life(again) as (_, kv):
        assert (await kv.exists_many(stored)).tolist() == [i % 2 == 1 for i in range(len(stored))]


async def test_a_saved_sequence_is_made_durable_whole(again: Lives) -> None:
    """Goal: seq.save(durable=True) keeps the sequence, whoever stored its blocks before. Method: save as cache, save
    durably with nothing new in it, in one layer group and in two; restart; all blocks match."""
    tokens = list(range(16 * 9))
    sequences = []
    async with life(again) as (_, kv):
        for groups in (1, 2):
            layout = Layout(
                model=f"m{groups}",
                dtype="float16",
                layers=4,
                kv_heads=2,
                head_dim=8,
                block_tokens=16,
                layer_groups=groups,
            )
            cache = np.random.default_rng(groups).random((9, *layout.shape)).astype(np.float16)
            seq = kv.sequence(layout, tokens)
            assert (await seq.save(cache)).blocks == 9
            assert (await seq.save(cache, durable=True)).blocks == 9
            sequences.append(layout)
    async with life(again) as (_, kv):
        for layout in sequences:
            assert await kv.sequence(layout, tokens).match() == 9
