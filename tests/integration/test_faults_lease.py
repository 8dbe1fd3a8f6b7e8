"""A node that may not answer: stopped past its lease, woken before it has it again, deposed under a call.

Nobody is told HIT or MISS by it, over any path, until it has its lease again; then the same clients work on. The nodes
renew a short lease by themselves, as one in a cluster does by its control plane's word.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import ROOT, NodeProcess, wait_until
from ucxkv import DeleteStatus, PutStatus, ReadStatus
from ucxkv.buffers import as_destinations
from ucxkv.client.mapped import MappedPath
from ucxkv.client.path import OTHERWISE
from ucxkv.directory import FOREVER
from ucxkv.node import Node, NodeConfig
from ucxkv.protocol import messages as m

pytestmark = pytest.mark.faults

PATHS = ["mapped", "message", "network", "rma"]
LEASE_S = 0.8
HOUR_NS = 3600 * 10**9

# A node that renews its lease from within, as long as a file is not there.
_LEASED = """
import asyncio, os, sys, time
import ucxkv.node
from ucxkv.cli import main

class LeasedNode(ucxkv.node.Node):
    async def start(self):
        self.lease_until(0)
        await super().start()
        self.spawn(self.renew())
        return self

    async def renew(self):
        while True:
            if not os.path.exists(%(hold)r):
                self.lease_until(time.monotonic_ns() + %(lease_ns)d)
            await asyncio.sleep(0.03)

ucxkv.node.Node = LeasedNode
sys.argv[0] = "ucxkv"
main()
"""


class Leased(NodeProcess):
    """A node with a lease of LEASE_S that it renews unless it is kept from it."""

    def __init__(self, folder: Path) -> None:
        self._hold = folder / "hold"
        super().__init__(program=_LEASED % {"hold": str(self._hold), "lease_ns": int(LEASE_S * 1e9)})

    def hold_lease_back(self) -> None:
        """It renews its lease no more; deterministic while it is stopped."""
        self._hold.touch()

    def let_renew(self) -> None:
        """It renews its lease again."""
        self._hold.unlink()

    async def freeze_past_lease(self) -> None:
        """Stop it, and wait until the lease that it may have taken just before is over."""
        self.freeze()
        end = time.monotonic_ns() + int(LEASE_S * 1e9)
        await wait_until(lambda: time.monotonic_ns() >= end, "the lease is over", 30)


def _path(kv: ucxkv.Client) -> object:
    return next(iter(kv._router.links.values())).path


async def _hits(kv: ucxkv.Client, k: list[bytes], b: np.ndarray) -> bool:
    into = np.zeros_like(b)
    got = await kv.get_many(k, into, deadline_s=2)
    assert (into[got.status == ReadStatus.HIT] == b[got.status == ReadStatus.HIT]).all()
    assert ReadStatus.MISS not in got.status.tolist()
    return got.hits == len(k)


async def _nothing_is_answered(kv: ucxkv.Client, k: list[bytes], b: np.ndarray, deadline_s: float) -> None:
    """Every way to read, for keys that are there and one that is not: neither HIT nor MISS."""
    wanted, into = [*k, *keys(1)], np.full((len(k) + 1, b.shape[1]), 0xAB, np.uint8)
    before = kv.stats()
    got = await kv.get_many(wanted, into, deadline_s=deadline_s)
    assert (got.status == ReadStatus.UNAVAILABLE).all(), got.status
    assert await kv.get(k[0], into[0], deadline_s=deadline_s) is None
    assert await kv.get(k[0], deadline_s=deadline_s) is None
    after = kv.stats()
    assert (after["hits"], after["misses"]) == (before["hits"], before["misses"])
    assert after["errors"] == before["errors"] + len(wanted) + 2
    match = await kv.match(k, deadline_s=deadline_s)
    assert match.blocks == 0 and not match.is_certain
    assert not await kv.exists(k[0], deadline_s=deadline_s)
    path = _path(kv)
    for call in (path.exists, path.match, path.lookup):  # type: ignore[attr-defined]
        with pytest.raises(ucxkv.Unavailable):
            await call(k[0], time.monotonic_ns() + int(deadline_s * 1e9))


@pytest.mark.parametrize("path", PATHS)
async def test_a_node_stopped_past_its_lease_answers_nothing_until_it_has_it_again(path: str, tmp_path: Path) -> None:
    """Issue 4: a frozen leader's memory yields no stale answer. Method: SIGSTOP past the lease; reads of every kind;
    SIGCONT while it may not renew: reads, puts and the rest, those among them that were on their way; then it renews.
    """
    with Leased(tmp_path) as node:
        async with ucxkv.connect(node.address, path=path, timeout_s=30) as kv:
            k, b = keys(8), blocks(8, 10_000)

            async def stored() -> bool:
                return (await kv.put_many(k, b, "chain", deadline_s=2)).ok

            await wait_until(stored, "a put under the lease", 30)
            await wait_until(lambda: _hits(kv, k, b), "reads under the lease", 30)
            view = None
            while path == "mapped" and view is None:
                try:
                    view = await kv.view(k[0], ttl_s=60)
                    assert view is not None
                except ucxkv.Unavailable:  # a busy machine: the lease has ended meanwhile
                    await asyncio.sleep(0.1)

            await node.freeze_past_lease()
            await _nothing_is_answered(kv, k, b, 0.3)
            if view is not None:
                assert not view.valid
                with pytest.raises(ucxkv.StaleError, match="another view"):
                    _ = view.data

            new = keys(2)
            waiting = [
                asyncio.create_task(call)
                for call in (
                    kv.get_many(k, np.zeros_like(b)),
                    kv.match(k),
                    kv.put(new[0], b[0]),
                    kv.put_many([new[1]], b[:1]),
                    kv.delete(k[7:]),
                )
            ]
            await asyncio.sleep(0.1)
            node.hold_lease_back()
            node.thaw()
            got, match, one, many, deleted = await asyncio.gather(*waiting)
            assert (got.status == ReadStatus.UNAVAILABLE).all() and (match.blocks, match.is_certain) == (0, False)
            assert one is PutStatus.UNAVAILABLE and many.status.tolist() == [PutStatus.UNAVAILABLE]
            assert deleted.tolist() == [DeleteStatus.UNAVAILABLE]

            for _ in range(10):
                await _nothing_is_answered(kv, k, b, 30)
                assert await kv.put(new[0], b[0]) is PutStatus.UNAVAILABLE
                assert (await kv.delete(k)).tolist() == [DeleteStatus.UNAVAILABLE] * 8
            async with kv.lease(k) as lease:
                assert not lease.granted.any() and isinstance(lease.unanswered, ucxkv.Unavailable)
            with pytest.raises(ucxkv.Unavailable, match="lease is over"):
                await kv.view(k[0])
            with pytest.raises(ucxkv.Unavailable, match="lease is over"):
                await kv.list_keys()
            numbers = (await kv.status())[0].numbers
            assert numbers["refused_without_lease"] >= 25, "the node has answered, not our deadlines"
            assert numbers["granted_bytes"] <= 4 << 20, "what refused puts had taken is free again"

            node.let_renew()
            await wait_until(lambda: _hits(kv, k, b), "reads under the new lease", 30)
            await wait_until(lambda: _certain(kv, k), "a match under the new lease", 30)
            assert not (await kv.exists_many(new)).any(), "a put that was refused has not happened"
            fresh = keys(8)

            async def stored_again() -> bool:
                return (await kv.put_many(fresh, b, deadline_s=2)).ok

            await wait_until(stored_again, "puts under the new lease", 30)
            if view is not None:
                await wait_until(lambda: view.valid, "the view's node has its lease again", 30)
                await view.aclose()


async def _certain(kv: ucxkv.Client, k: list[bytes]) -> bool:
    match = await kv.match(k)
    assert not match.is_certain or match.blocks == len(k)
    return match.is_certain


def _config() -> NodeConfig:
    return NodeConfig(name="n", listen="127.0.0.1:0", host_bytes=64 << 20)


@pytest.mark.parametrize("path", PATHS)
async def test_after_a_new_epoch_clients_find_everything_again(path: str) -> None:
    """Goal: an epoch fences readers, and they come back by themselves. Method: begin_epoch twice under a client, with a
    lease only later; nothing is quarantined, though the client left and came again.
    """
    async with Node(_config()) as node:
        async with ucxkv.connect(node.address, path=path) as kv:
            k, b = keys(8), blocks(8, 10_000)
            assert (await kv.put_many(k, b, "chain")).ok
            first = _path(kv)
            for epoch in (node.epoch + 1, node.epoch + 5):
                node.begin_epoch(epoch)
                got = await kv.get_many(k, np.zeros_like(b))
                assert (got.status == ReadStatus.UNAVAILABLE).all()
                assert await kv.put(keys(1)[0], b[0]) is PutStatus.UNAVAILABLE
                node.lease_until(time.monotonic_ns() + HOUR_NS)
                await wait_until(lambda: _hits(kv, k, b), "reads in the new epoch", 30)
                assert (await kv.match(k)).blocks == 8
                assert (await kv.status())[0].epoch == epoch
                more = keys(1)[0]
                assert await kv.put(more, b[0], k[7]) is PutStatus.STORED
            assert _path(kv) is not first, "the client has connected again"
            assert node.store.numbers()["quarantined_bytes"] == 0
            node.store.check()


@pytest.mark.parametrize(
    ("path", "way"),
    [(path, way) for path in PATHS for way in ("get", "exists", "exists_many", "match")] + [("mapped", "view")],
)
async def test_each_call_notices_another_epoch(path: str, way: str) -> None:
    """Goal: whichever call a client makes, it comes back. Method: that call alone after begin_epoch; by message `get`
    asks for a block that is not there, since bytes with their sum are a hit in any epoch.
    """
    is_proved = way == "get" and path in ("message", "network")
    async with Node(_config()) as node, ucxkv.connect(node.address, path=path) as kv:
        (key,) = keys(1)
        value = bytes(range(256))
        assert await kv.put(key, value) is PutStatus.STORED
        before = _path(kv)
        node.begin_epoch(node.epoch + 1)
        node.lease_until(FOREVER)
        absent = keys(1)[0]

        async def there() -> bool:
            into = bytearray(256)
            match way:
                case "get" if is_proved:
                    assert await kv.get(absent, into) is None
                    return bool((await kv.get_many([absent])).status[0] == ReadStatus.MISS)
                case "get":
                    return await kv.get(key, into) == 256
                case "exists":
                    return await kv.exists(key)
                case "exists_many":
                    return bool((await kv.exists_many([key]))[0])
                case "match":
                    return (await kv.match([key])).blocks == 1
            try:
                view = await kv.view(key)
            except ucxkv.Unavailable:
                return False
            if view is None:
                return False
            await view.aclose()
            return True

        assert not await there(), "not served in the epoch that the client does not know"
        await wait_until(there, "the client has connected again", 30)
        assert _path(kv) is not before and next(iter(kv._router.links.values())).welcome.epoch == node.epoch


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_is_of_the_epoch_that_the_client_was_welcomed_in(path: str) -> None:
    """Goal: who knows what a node was responsible for in one epoch may believe its misses. Method: on the way to each
    new epoch the node lets go of one block more, under readers that never pause; every answer over a link says exactly
    what was there in the epoch of that link's welcome, or is none.
    """
    epochs, size = 8, 5000
    async with Node(_config()) as node, ucxkv.connect(node.address, path=path) as kv:
        k, b = keys(epochs), blocks(epochs, size)
        assert (await kv.put_many(k, b)).ok
        first, joined = node.epoch, b"".join(k)
        served: set[int] = set()
        is_over = False

        async def read() -> None:
            into = np.zeros_like(b)
            pieces = as_destinations(into, len(k))
            while not is_over:
                await asyncio.sleep(0)
                link = next(iter(kv._router.links.values()), None)
                if link is None:
                    await asyncio.sleep(0.001)
                    continue
                gone = link.welcome.epoch - first
                soon = time.monotonic_ns() + 5 * 10**9
                into[:] = 0
                status, _ = await link.path.read(joined, pieces, soon)
                for i, one in enumerate(status.tolist()):
                    assert one in (ReadStatus.HIT, ReadStatus.MISS, ReadStatus.UNAVAILABLE)
                    assert one != ReadStatus.MISS or i < gone, "a miss of another epoch"
                    assert one != ReadStatus.HIT or (i >= gone and (into[i] == b[i]).all())
                if gone < epochs and link.is_alive and link.path.read_into is not None:
                    done = link.path.read_into(k[gone], into[gone], soon)
                    assert (done if isinstance(done, int) else await done) in (size, OTHERWISE), "never NOT_THERE"
                if not link.is_alive:
                    continue
                try:
                    visible, _, _ = await link.path.lookup(joined, soon)
                except ucxkv.Unavailable:
                    continue
                assert visible.tolist() == [i >= gone for i in range(epochs)]
                served.add(link.welcome.epoch)

        readers = [asyncio.create_task(read()) for _ in range(3)]
        for i in range(epochs):
            await wait_until(
                lambda: node.epoch in served or any(r.done() for r in readers), "answers in this epoch", 30
            )
            node.lease_until(0)
            assert node.store.delete(k[i], time.monotonic_ns()).status == bytes((DeleteStatus.DELETED,))
            node.begin_epoch(node.epoch + 1)
            node.lease_until(FOREVER)
        is_over = True
        await asyncio.gather(*readers)
        assert len(served) >= epochs


async def test_a_link_lost_in_the_turn_in_which_redialling_ends_is_dialled_again() -> None:
    """Goal: a node that is left twice is not forgotten. Method: leave it, then again in the turn of the loop in which
    the task that brought it back has ended, and before anyone is told that it has.
    """
    async with Node(_config()) as node, ucxkv.connect(node.address, path="message") as kv:
        links, dialing = kv._router.links, kv._router._dialing
        for _ in range(3):
            links["n"].leave_epoch()
            task = dialing["n"]
            while not task.done():  # noqa: ASYNC110 (an event would be set a turn too late)
                await asyncio.sleep(0)
            assert "n" in links
        links["n"].leave_epoch()
        await wait_until(lambda: "n" in links, "it is dialled again", 30)


async def test_a_put_whose_lease_ends_under_it_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no STORED after the end. Method: the lease ends right after the store took the put; then it is held again:
    the put has happened, as one whose answer was lost, and no extent is missing.
    """
    async with Node(_config()) as node, ucxkv.connect(node.address) as kv:
        one, two = keys(2)
        assert await kv.put(keys(1)[0], b"warm up") is PutStatus.STORED
        put = node.store.put

        def put_and_end(session: int, request: m.Put, now_ns: int) -> m.PutDone:
            done = put(session, request, now_ns)
            node.lease_until(0)
            return done

        monkeypatch.setattr(node.store, "put", put_and_end)
        for key, call in ((one, kv.put(one, b"v")), (two, kv.put_many([two], [b"v"]))):
            node.lease_until(time.monotonic_ns() + HOUR_NS)
            done = await call
            status = done if isinstance(done, PutStatus) else PutStatus(int(done.status[0]))
            assert status is PutStatus.UNAVAILABLE
            assert (await kv.get_many([key])).status.tolist() == [ReadStatus.UNAVAILABLE]
        monkeypatch.undo()
        node.lease_until(FOREVER)
        assert await kv.get(one) == b"v" == await kv.get(two)
        assert await kv.put(one, b"v") is PutStatus.ALREADY
        node.store.check()
        assert node.store.counts["refused_without_lease"] == 2


async def test_a_block_lease_is_counted_from_before_it_was_asked_for_and_by_what_was_granted() -> None:
    """Goal: a lease ends here before it ends there, drift included. Method: a node that grants less than was asked for;
    the end of the first term and of a renewed one, against the clock.
    """
    granted_ms = 400
    config = NodeConfig(name="n", listen="127.0.0.1:0", host_bytes=8 << 20, lease_ms_max=granted_ms)
    async with Node(config) as node, ucxkv.connect(node.address) as kv:
        (key,) = keys(1)
        assert await kv.put(key, b"v") is PutStatus.STORED
        async with kv.lease([key], ttl_s=60) as lease:
            held = lease._held[0]
            first = held.until_ns
            assert first <= time.monotonic_ns() + granted_ms * 980_000
            await wait_until(lambda: held.until_ns != first, "it is renewed in time", 30)
            assert held.until_ns <= time.monotonic_ns() + granted_ms * 980_000


async def test_a_node_that_has_no_lease_yet_can_be_connected_to() -> None:
    """Goal: start-up before the first lease. Method: lease_until(0) before start; calls are refused; then a lease."""
    node = Node(_config())
    node.lease_until(0)
    async with node, ucxkv.connect(node.address) as kv:
        (key,) = keys(1)
        assert isinstance(_path(kv), MappedPath)
        assert await kv.put(key, b"v") is PutStatus.UNAVAILABLE
        assert (await kv.get_many([key])).status.tolist() == [ReadStatus.UNAVAILABLE]
        node.lease_until(FOREVER)
        assert await kv.put(key, b"v") is PutStatus.STORED and await kv.get(key) == b"v"
    node.lease_until(FOREVER)  # after the end: nothing to serve, nothing touched


_ELSEWHERE = """
import asyncio, json, os, sys, time
import ucxkv

async def run():
    async with ucxkv.connect(sys.argv[1]) as kv:
        key = os.urandom(16)
        status = await kv.put(key, b"v" * 1000)
        value = await kv.get(key)
        peer = kv.peers()[0]
    try:
        await ucxkv.connect(sys.argv[1], path="mapped")
        told = ""
    except ucxkv.SetupError as exc:
        told = str(exc)
    print(json.dumps([status.name, value == b"v" * 1000, peer.path, peer.why, told]))

asyncio.run(run())
"""


def test_a_client_in_another_time_namespace_does_not_map_the_table(shared_node: NodeProcess) -> None:
    """Goal: nobody judges a lease by another clock. Method: a client under `unshare --time`, a day ahead."""
    unshare = shutil.which("unshare")
    aside = [unshare or "", "--time", "--monotonic", "86400", "--fork"]
    if unshare is None or subprocess.run([*aside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs `unshare --time` (util-linux, Linux 5.6, CAP_SYS_ADMIN)")
    done = subprocess.run(
        [*aside, sys.executable, "-c", _ELSEWHERE, shared_node.address],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    status, is_right, path, why, told = json.loads(done.stdout)
    assert status == "STORED" and is_right and path in ("message", "rma")
    assert "another time namespace" in why and "another time namespace" in told
