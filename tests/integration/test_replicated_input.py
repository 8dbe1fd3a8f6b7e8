"""Bad input and faults on a cluster with replicas (issue 4): a typed error, healing by itself, nothing lost of class
durable, no hole ever visible. A full disk of everything else is in test_durable, the control plane alone in
tests/control.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
from etcd3aio._protobuf import CompactionRequest

import ucxkv
from tests.control.etcd_server import WHY_NOT, EtcdServer
from tests.harness import wait_until
from tests.integration.programs import FULL_DISK, JUMPING_CLOCK, SNAPSHOTS
from tests.integration.replicas import SHARDS, Trio, Writer, connected, trio_of
from ucxkv import errors
from ucxkv.control import open_control
from ucxkv.control.etcd import EtcdControl

pytestmark = [pytest.mark.faults, pytest.mark.replicas, pytest.mark.timeout(300)]


async def test_two_nodes_with_one_name(trio: Trio) -> None:
    """Study, fault test 12. Goal: a name is one node's. Method: a second "a" is refused while the first lives; the
    first is stopped past its lease and the second, on an empty disk, takes the name; the first wakes, serves nothing
    and says why; the second gets all shards' blocks, and has them when the other node dies."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer = Writer(21)
    async with connected(trio) as kv:
        assert await writer.put(kv, 30) == 30
    with pytest.raises(RuntimeError, match=r"named 'a' already.*--name"):
        await asyncio.to_thread(trio.process, "a", folder="other")
    first = trio.nodes["first"] = trio.nodes["a"]
    first.freeze()
    await asyncio.to_thread(trio.start, "a", folder="other")
    first.thaw()

    async def says_so() -> bool:
        async with ucxkv.connect(first.address) as kv:
            found = [status for status in await kv.status() if status.address == first.address]
        if not found:
            return False  # it went over to another epoch just now, and is dialled again
        (status,) = found
        lease = status.facts["cluster_lease"]
        return lease.startswith("lost") and "already" in lease and status.numbers["shards_led"] == 0

    with contextlib.suppress(errors.UsageError):  # two nodes of one name, if it has heard of the second by now
        await wait_until(says_so, "the first one knows that its name is another's", 60)
    await trio.settled(followed=SHARDS)
    async with connected(trio) as kv:
        await writer.check(kv)
        assert await writer.put(kv, 10) >= 9
    await trio.settled(followed=SHARDS)
    trio.kill("b")
    async with connected(trio) as kv:
        await writer.check(kv)


async def test_wall_clocks_that_jump_by_hours_change_nothing(trio: Trio) -> None:
    """Study, fault test 5. Goal: leases and epochs do not follow the wall clock. Method: two nodes ten hours apart,
    whose clocks jump by twenty, one ahead and one back, while puts go on: no lease is lost; one dies and returns under
    a clock that is behind its own former life's."""
    hours = 36_000
    lives = {"a": JUMPING_CLOCK.replace("SHIFT_S", str(hours)), "b": JUMPING_CLOCK.replace("SHIFT_S", str(-hours))}
    for name, program in lives.items():
        trio.start(name, program=program, cluster_lease_ms="6000")
    await trio.settled(followed=SHARDS)
    writer = Writer(22)
    async with connected(trio) as kv:
        assert await writer.put(kv, 15) == 15
        for name in lives:
            os.kill(trio.nodes[name].pid, signal.SIGUSR1)
        assert await writer.put(kv, 15) == 15
        reports = await kv.status()
        assert [report.numbers["cluster_lease_losses"] for report in reports] == [0, 0]
        assert sum(report.numbers["shards_led"] for report in reports) == SHARDS
        trio.kill("a")
        await writer.put(kv, 5)
    trio.start("a", program=lives["b"], cluster_lease_ms="6000")
    await trio.settled(followed=SHARDS)
    trio.kill("b")
    async with connected(trio) as kv:
        await writer.check(kv)


async def test_a_shards_record_of_a_newer_version_is_left_alone(trio: Trio) -> None:
    """Goal: an old release neither obeys nor overwrites what it cannot read, and goes on with what it has. Method:
    shard 0's record says version 9; both nodes say so and serve on, a third does not start; the record is put back, and
    all is as before, a death too."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer = Writer(23)
    plane = await open_control(trio.url)
    async with connected(trio) as kv:
        assert await writer.put(kv, 20) == 20
        entry = await plane.get("shards/0")
        assert entry is not None
        newer = await plane.compare_and_set("shards/0", entry.revision, b'{"version":9,"owner":"who knows"}')
        for name in ("a", "b"):
            log = trio.nodes[name].log
            await wait_until(lambda log=log: "version 9" in log() and "membership.view" in log(), "it says so", 20)
        with pytest.raises(RuntimeError, match=r"version 9.*version 1 or older.*upgrade"):
            await asyncio.to_thread(trio.process, "c")
        assert await writer.put(kv, 20) == 20  # shards that were being handed over among them
        await writer.delete_tails(kv, 2)
        await writer.check(kv)
        assert await plane.get("shards/0") == newer and newer is not None
        await plane.compare_and_set("shards/0", newer.revision, entry.value)
    await plane.aclose()
    await trio.settled(followed=SHARDS)
    trio.kill("a")
    async with connected(trio) as kv:
        await writer.check(kv)
        assert await writer.put(kv, 10) >= 9


async def test_a_member_whose_snapshots_are_corrupt_is_refused_and_filled_anew(trio: Trio) -> None:
    """Study, fault test 2. Goal: never half a state. Method: a member's snapshots are damaged while it is down: it goes
    on from its log; then its log's head is damaged too: its start says what to do; that is done, the leader gives it
    all of it again, and it leads when the other one dies."""
    for name in ("a", "b"):
        trio.start(name, program=SNAPSHOTS)
    await trio.settled(followed=SHARDS)
    writer = Writer(24)
    async with connected(trio) as kv:
        assert await writer.put(kv, 60) == 60
        journal = trio.state("b") / "journal"
        await wait_until(lambda: list(journal.glob("snapshot-*")), "it wrote a snapshot", 20)
        trio.kill("b")
        _damage(*journal.glob("snapshot-*"))
        trio.start("b")
        await trio.settled(followed=SHARDS)
        await writer.check(kv)
        trio.kill("b")
        _damage(*journal.glob("snapshot-*"), *journal.glob("log-*"))
        with pytest.raises(RuntimeError, match=r"damaged.*fix"):
            await asyncio.to_thread(trio.start, "b")
        assert await writer.put(kv, 10) >= 9
        await writer.delete_tails(kv, 3)
    trio.lose_disk("b")
    trio.start("b")
    await trio.settled(followed=SHARDS)
    trio.kill("a")
    async with connected(trio) as kv:
        await writer.check(kv)


def _damage(*paths: Path) -> None:
    """Turn a bit in the first block of each file."""
    assert paths
    for path in paths:
        with path.open("r+b") as file:
            file.seek(20)
            byte = file.read(1)[0]
            file.seek(20)
            file.write(bytes((byte ^ 1,)))


async def test_a_node_whose_journal_finds_its_disk_full_gives_its_shards_up(trio: Trio) -> None:
    """Study, fault test 2. Goal: what cannot be logged is not acknowledged, and others go on. Method: every write of
    the journal of one node ends in ENOSPC from a moment on, under puts: the other leads all and takes puts; the node
    says why; on a disk with room it comes back, catches up, and leads when the other one dies."""
    trio.start("a", program=FULL_DISK.replace("FAILING", "write"))
    trio.start("b")
    await trio.settled(followed=SHARDS)
    writer = Writer(25)
    async with connected(trio) as kv:
        assert await writer.put(kv, 20) == 20
        os.kill(trio.nodes["a"].pid, signal.SIGUSR1)
        await writer.put(kv, 30)
        await trio.settled(followed=0)
        assert await writer.put(kv, 10) == 10
        await writer.delete_tails(kv, 3)
        await writer.check(kv)
        assert "No space left on device" in trio.nodes["a"].log() and trio.nodes["a"].process.poll() is None
    trio.kill("a")
    trio.start("a")
    await trio.settled(followed=SHARDS)
    trio.kill("b")
    async with connected(trio) as kv:
        await writer.check(kv)
        assert await writer.put(kv, 5) >= 4


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here")
async def test_etcd_compacts_while_the_watch_of_a_node_is_down(tmp_path: Path) -> None:
    """Study, fault test 14. Goal: a gap in what a node was told is noticed. Method: a node is stopped past its lease
    and etcd is killed, so that all watches end; meanwhile the shards change hands and the history is compacted; the
    node wakes, reads everything anew and follows; then it leads all."""
    with EtcdServer() as etcd, trio_of(tmp_path, url=etcd.url("compacted")) as trio:
        trio.start("a", "b")
        await trio.settled(followed=SHARDS)
        writer = Writer(26)
        async with connected(trio) as kv:
            assert await writer.put(kv, 20) == 20
            trio.nodes["b"].freeze()
            etcd.kill()
            etcd.start()
            await writer.put(kv, 12, deadline_s=5)
            plane = await open_control(trio.url, timeout_s=20)
            assert isinstance(plane, EtcdControl)
            revision = (await plane.list(""))[1]
            await plane._client.ask_once("KV", "Compact", CompactionRequest(revision=revision))
            await plane.aclose()
            trio.nodes["b"].thaw()
            await trio.settled(followed=SHARDS)
            await writer.delete_tails(kv, 2)
            await writer.check(kv)
        trio.kill("a")
        async with connected(trio) as kv:
            await writer.check(kv)
            assert await writer.put(kv, 10) >= 9


async def test_a_node_that_returns_after_its_shards_were_given_away(trio: Trio) -> None:
    """Study, fault test 12. Goal: a stale log is never served. Method: of three nodes one is killed and stays away
    until the others hold all; they delete and put; it returns with its old log; then the other two are killed, one
    after the other has given it what it lacks."""
    trio.start("a", "b", "c")
    await trio.settled(followed=SHARDS)
    writer = Writer(27)
    async with connected(trio) as kv:
        assert await writer.put(kv, 30) == 30
        trio.kill("a")
        await writer.put(kv, 10)
        await trio.settled(followed=SHARDS)
        await writer.delete_tails(kv, 6)
        await writer.put(kv, 10)
    trio.start("a")
    await asyncio.sleep(4)
    await trio.settled(followed=SHARDS)
    for victim in ("b", "c"):
        async with connected(trio) as kv:
            await writer.check(kv)
        trio.kill(victim)
        if victim == "b":
            await asyncio.sleep(1)
            await trio.settled(followed=SHARDS)
    async with connected(trio) as kv:
        await writer.check(kv)


async def test_a_client_that_slept_over_a_change_of_leaders(trio: Trio) -> None:
    """Goal: an old map of the shards shows nothing old. Method: the client's loop stands still while one node is
    stopped past its lease, the other one takes over, and another client puts; the node wakes, that client deletes, then
    the first one wakes: it reads what was deleted and what was put, deletes and puts."""
    trio.start("a", "b")
    await trio.settled(followed=SHARDS)
    writer = Writer(28)

    async def change() -> None:
        async with connected(trio) as other:
            trio.nodes["a"].freeze()
            await writer.put(other, 15, deadline_s=3)
            trio.nodes["a"].thaw()
            await writer.delete_tails(other, 5)

    async with connected(trio) as kv:
        assert await writer.put(kv, 40) == 40
        await writer.check(kv)
        thread = threading.Thread(target=lambda: asyncio.run(change()))
        thread.start()
        thread.join(120)  # this loop hears nothing meanwhile
        assert not thread.is_alive() and writer.gone
        for key in writer.gone:
            assert await kv.get(key) is None
        assert await writer.put(kv, 10) >= 9
        await writer.delete_tails(kv, 2)
        await writer.check(kv)
