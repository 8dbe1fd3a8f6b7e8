"""A real etcd that is killed, stopped, restarted, compacted and wiped, and answers that get lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
from etcd3aio._protobuf import CompactionRequest, MaintenanceStub, StatusRequest

from tests.control.etcd_server import WHY_NOT, EtcdServer, free_port, three_members
from tests.control.processes import holder
from tests.control.test_contract import absent, put, take
from tests.harness import open_files, wait_until
from ucxkv import errors
from ucxkv.control import Change, ChangeKind, Conflict, ControlPlane, Entry, OutcomeUnknown, etcd_client, open_control
from ucxkv.control.etcd import EtcdControl

pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here"),
    pytest.mark.faults,
    pytest.mark.control,
]


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """An etcd of the test's own."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def plane(etcd: EtcdServer) -> AsyncIterator[ControlPlane]:
    """A handle whose calls give up after 2 s."""
    opened = await patiently(etcd)
    yield opened
    await opened.aclose()


async def patiently(etcd: EtcdServer, timeout_s: float = 2.0) -> ControlPlane:
    """Open a handle on an etcd that is just starting."""
    for _ in range(20):
        with contextlib.suppress(errors.Unavailable):
            return await open_control(etcd.url("c"), timeout_s=timeout_s)
    raise AssertionError("etcd does not answer")


async def reachable(plane: ControlPlane) -> None:
    async def answers() -> bool:
        with contextlib.suppress(errors.Unavailable):
            await plane.get("any")
            return True
        return False

    await wait_until(answers, "etcd answers again", 40)


async def compact(plane: ControlPlane) -> None:
    assert isinstance(plane, EtcdControl)
    revision = (await plane.list(""))[1]
    await plane._client.ask("KV", "Compact", CompactionRequest(revision=revision))


async def test_killed_and_restarted_etcd_keeps_entries_and_a_watch_misses_nothing(
    etcd: EtcdServer, plane: ControlPlane
) -> None:
    """Goal: an outage is Unavailable, then all is as before. Method: kill -9 with a watch open and a key under a long
    lease; calls while it is gone; restart; changes after it reach the old watch, the lease still holds."""
    lease = await plane.lease(60)
    held = await plane.compare_and_set("held", 0, b"", lease=lease)
    assert held is not None
    changes = plane.watch("", held.revision - 1)
    assert await take(changes, 1) == [Change(ChangeKind.PUT, held)]
    etcd.kill()
    with pytest.raises(errors.Unavailable):
        await plane.get("held")
    with pytest.raises(errors.Unavailable):
        await plane.list("")
    with pytest.raises(errors.Unavailable):
        await plane.lease(5)
    with pytest.raises(errors.Unavailable):
        await plane.compare_and_set("k", 0, b"")
    with pytest.raises(errors.Unavailable):
        await open_control(etcd.url("c"), timeout_s=0.5)
    etcd.start()
    await reachable(plane)
    assert await plane.get("held") == held and lease.is_held
    entries = [await put(plane, f"k/{i}", b"") for i in range(3)]
    assert await take(changes, 3) == [Change(ChangeKind.PUT, entry) for entry in entries]
    await changes.aclose()


async def test_a_stopped_etcd_hangs_no_call_and_the_holder_ends_by_its_own_clock(
    etcd: EtcdServer, plane: ControlPlane
) -> None:
    """Goal: nothing hangs on a process that neither answers nor closes. Method: SIGSTOP; each call ends; the lease is
    lost at until_ns; continued, everything works, the lost lease's key is gone and the watch says so."""
    lease = await plane.lease(2)
    held = await plane.compare_and_set("held", 0, b"", lease=lease)
    assert held is not None
    changes = plane.watch("", held.revision)
    etcd.stop()
    async with asyncio.timeout(60):
        for call in (plane.get("held"), plane.list(""), plane.lease(5), plane.compare_and_set("k", 0, b"1")):
            with pytest.raises(errors.Unavailable):
                await call
        await lease.lost
    assert time.monotonic_ns() >= lease.until_ns and not lease.is_held
    etcd.go_on()
    await reachable(plane)
    await absent(plane, "held")
    async with asyncio.timeout(60):
        while (await anext(changes)).entry.key != "held":
            pass
    await changes.aclose()


async def test_a_compaction_while_the_watch_is_down_is_a_resync(etcd: EtcdServer, plane: ControlPlane) -> None:
    """Goal: no silent gap (issue 4). Method: the watch's stream breaks with etcd; before the watcher looks again,
    another handle changes, deletes and compacts; the watcher is told, lists, and sees what comes after."""
    first = await put(plane, "w/a", b"1")
    await put(plane, "w/gone", b"")
    changes = plane.watch("w/", first.revision - 1)
    assert (await take(changes, 2))[0].entry == first
    etcd.kill()
    etcd.start()
    other = await patiently(etcd)
    gone = await other.get("w/gone")
    assert gone is not None
    await other.compare_and_set("w/gone", gone.revision, None)
    second = await put(other, "w/a", b"2")
    await compact(other)
    (change,) = await take(changes, 1)
    assert change.kind is ChangeKind.RESYNC and change.entry.revision >= second.revision
    await reachable(plane)
    assert (await plane.list("w/"))[0] == [second]
    third = await put(other, "w/b", b"3")
    assert await take(changes, 1) == [Change(ChangeKind.PUT, third)]
    await changes.aclose()
    await other.aclose()


async def test_a_watch_from_a_compacted_deletion_is_a_resync(etcd: EtcdServer, plane: ControlPlane) -> None:
    """Goal: etcd forgets a deletion at the very revision that it compacts at, and would not say so to a watch that
    starts there; ours notices. Method: delete, compact at the deletion, watch from just before it."""
    entry = await put(plane, "w/a", b"1")
    await plane.compare_and_set("w/a", entry.revision, None)
    await compact(plane)
    changes = plane.watch("w/", entry.revision)
    assert (await take(changes, 1))[0].kind is ChangeKind.RESYNC
    await changes.aclose()


async def test_etcd_gone_for_longer_than_the_lease_then_back(etcd: EtcdServer, plane: ControlPlane) -> None:
    """Goal: the holder is told in time and can start again by itself. Method: kill, wait for `lost`, restart; the old
    lease's key goes, a new lease takes it."""
    lease = await plane.lease(1.5)
    await plane.compare_and_set("held", 0, b"old", lease=lease)
    etcd.kill()
    async with asyncio.timeout(30):
        await lease.lost
    assert time.monotonic_ns() >= lease.until_ns
    etcd.start()
    await reachable(plane)
    await absent(plane, "held")
    again = await plane.lease(5)
    entry = await plane.compare_and_set("held", 0, b"new", lease=again)
    assert entry is not None and again.is_held and await plane.get("held") == entry


async def test_an_etcd_that_lost_its_data_is_a_resync(etcd: EtcdServer, plane: ControlPlane) -> None:
    """Goal: a watcher notices that its world is gone. Method: kill, wipe, start: revisions begin anew."""
    for i in range(20):
        entry = await put(plane, "w", str(i).encode())
    changes = plane.watch("", entry.revision - 1)
    await take(changes, 1)
    etcd.kill()
    etcd.wipe()
    etcd.start()
    async with asyncio.timeout(60):
        assert (await anext(changes)).kind is ChangeKind.RESYNC
    await reachable(plane)
    fresh = await put(plane, "w", b"fresh")
    assert fresh.revision < entry.revision
    assert await take(changes, 1) == [Change(ChangeKind.PUT, fresh)]
    await changes.aclose()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_key_of_a_killed_or_stopped_process_goes(
    etcd: EtcdServer, plane: ControlPlane, end: signal.Signals
) -> None:
    """Goal: lease life cycle across processes. Method: as over SQLite, with a lease of 2 s."""
    with holder(etcd.url("c"), "held", ttl_s=2) as process:
        entry = await plane.get("held")
        assert entry is not None
        await asyncio.sleep(4)
        assert await plane.get("held") == entry
        with pytest.raises(Conflict):
            await plane.compare_and_set("held", 0, b"mine")
        process.send_signal(end)
        await absent(plane, "held", 30)
        mine = await plane.compare_and_set("held", 0, b"mine")
        if end is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert (await asyncio.to_thread(process.stdout.readline)).startswith("lost")
        assert await plane.get("held") == mine


async def test_dead_endpoints_before_the_living_one_do_no_harm(etcd: EtcdServer) -> None:
    """Goal: any member is enough. Method: two addresses where nobody listens come first."""
    dead = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    plane = await open_control(f"etcd://{dead},{etcd.endpoint}/c", timeout_s=10)
    entry = await put(plane, "k", b"v")
    changes = plane.watch("", entry.revision - 1)
    assert (await take(changes, 1))[0].entry == entry
    assert (await plane.lease(5)).is_held
    await changes.aclose()
    await plane.aclose()


async def test_a_quiet_watch_shows_signs_of_life_and_is_not_opened_again(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: silence is not taken for death. Method: a watch on which nothing happens, asked for a sign of life every
    0.1 s; one stream serves it, then brings the next change."""
    monkeypatch.setattr(etcd_client, "_SILENCE_S", 0.1)
    opened = 0
    events = etcd_client.EtcdClient.events

    def counted(self: etcd_client.EtcdClient, *args: Any) -> Any:
        nonlocal opened
        opened += 1
        return events(self, *args)

    monkeypatch.setattr(etcd_client.EtcdClient, "events", counted)
    changes = plane.watch("k", (await plane.list(""))[1])
    waiting = asyncio.create_task(take(changes, 1))
    await asyncio.sleep(1.5)
    assert not waiting.done()
    entry = await put(plane, "k", b"")
    assert await waiting == [Change(ChangeKind.PUT, entry)]
    assert opened == 1
    await changes.aclose()


async def test_clusters_of_one_etcd_do_not_see_each_other(etcd: EtcdServer, plane: ControlPlane) -> None:
    """Goal: the name in the URL separates. Method: the same key in two clusters, one name the other's prefix."""
    other = await open_control(etcd.url("c2"), timeout_s=10)
    await put(plane, "k", b"c")
    await put(other, "k", b"c2")
    assert [entry.value for entry in (await plane.list(""))[0]] == [b"c"]
    assert [entry.value for entry in (await other.list(""))[0]] == [b"c2"]
    await other.aclose()


async def leader_of(members: list[EtcdServer]) -> EtcdServer:
    """The member that leads, asked of each that runs."""
    for member in members:
        if member.process is None:
            continue
        async with grpc.aio.insecure_channel(member.endpoint) as channel:
            status = await MaintenanceStub(channel).Status(StatusRequest(), timeout=20)
            if status.leader and status.leader == status.header.member_id:
                return member
    raise AssertionError("nobody leads")


@pytest.mark.timeout(240)
async def test_an_etcd_of_three_loses_its_leader_and_then_a_member_hangs() -> None:
    """Goal: an election costs no lease and no change (study, test 14); a hung member is passed by. Method: kill the
    leader under a lease, a watch and changes; then, with all three back, stop the member that the handle talks to."""
    with three_members() as members:
        url = f"etcd://{','.join(member.endpoint for member in members)}/c"
        plane = await open_control(url, timeout_s=6)
        lease = await plane.lease(30)
        held = await plane.compare_and_set("held", 0, b"", lease=lease)
        assert held is not None
        changes = plane.watch("k", held.revision)
        assert isinstance(plane, EtcdControl)
        for round_number, end in enumerate(("kill", "stop")):
            if end == "kill":
                victim = await leader_of(members)
                victim.kill()
            else:
                victim = members[plane._client._at]
                victim.stop()
            entry = None
            while entry is None:
                with contextlib.suppress(errors.Unavailable):
                    entry = await put(plane, f"k/{round_number}", b"")
            async with asyncio.timeout(90):
                seen = await anext(changes)
                while seen.entry.key != entry.key:
                    seen = await anext(changes)
            assert await plane.get("held") == held and lease.is_held
            if end == "kill":
                victim.start()
            else:
                victim.go_on()
        await changes.aclose()
        await plane.aclose()


class Proxy:
    """TCP to etcd and back. swallow: answers are dropped, and `cut()` then ends the connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.swallow = False
        self.is_refusing = False
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers += [writer, back]
        for source, sink, is_answer in ((reader, back, False), (there, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not (is_answer and self.swallow):
                    sink.write(data)
        sink.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def aclose(self) -> None:
        self.cut()
        self.server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def proxied(etcd: EtcdServer, plane: ControlPlane) -> AsyncIterator[tuple[ControlPlane, Proxy]]:
    """A handle behind a proxy."""
    proxy = Proxy(etcd.port)
    opened = await open_control(f"etcd://{await proxy.start()}/c", timeout_s=6)
    yield opened, proxy
    await opened.aclose()
    await proxy.aclose()


async def lose_answer(proxy: Proxy, plane: ControlPlane, key: str, before: Entry | None) -> None:
    """Swallow answers until the change of `key` is seen by another handle, then cut and heal."""
    proxy.swallow = True

    async def happened() -> bool:
        return await plane.get(key) != before

    await wait_until(happened, "the change reached etcd", 20)
    proxy.cut()
    proxy.swallow = False


async def test_a_change_whose_answer_got_lost_is_found_and_not_repeated(
    proxied: tuple[ControlPlane, Proxy], plane: ControlPlane
) -> None:
    """Goal: exactly one effect. Method: the proxy swallows the answer of a change that happened, then breaks; the
    caller gets its entry, and the key moved by one revision."""
    behind, proxy = proxied
    await behind.get("k")
    made, _ = await asyncio.gather(behind.compare_and_set("k", 0, b"mine"), lose_answer(proxy, plane, "k", None))
    assert made is not None and made == await plane.get("k")
    moved, _ = await asyncio.gather(
        behind.compare_and_set("k", made.revision, b"more"), lose_answer(proxy, plane, "k", made)
    )
    assert moved is not None and moved == await plane.get("k") and moved.revision == made.revision + 1


async def test_a_lost_answer_that_reading_cannot_settle_is_reported_as_unknown(
    proxied: tuple[ControlPlane, Proxy], plane: ControlPlane
) -> None:
    """Goal: no guess. Method: a deletion's answer is lost (anybody may have deleted it); a change that another writer
    changed again before the look."""
    behind, proxy = proxied
    entry = await put(behind, "k", b"v")
    unknown, _ = await asyncio.gather(
        behind.compare_and_set("k", entry.revision, None),
        lose_answer(proxy, plane, "k", entry),
        return_exceptions=True,
    )
    assert isinstance(unknown, OutcomeUnknown)
    assert await plane.get("k") is None

    entry = await put(behind, "k", b"v")

    async def change_again() -> None:
        await lose_answer(proxy, plane, "k", entry)

    proxy.swallow = True
    changing = asyncio.create_task(behind.compare_and_set("k", entry.revision, b"mine"))

    async def arrived() -> bool:
        found = await plane.get("k")
        return found is not None and found.value == b"mine"

    await wait_until(arrived, "the change reached etcd", 20)
    await put(plane, "k", b"of another")
    proxy.cut()
    proxy.swallow = False
    with pytest.raises(OutcomeUnknown):
        await changing


async def test_a_change_that_never_left_is_plainly_unavailable(
    proxied: tuple[ControlPlane, Proxy], plane: ControlPlane
) -> None:
    """Goal: "unknown" is not cried where nothing was sent. Method: no connection comes about at all."""
    behind, proxy = proxied
    proxy.is_refusing = True
    proxy.cut()
    await asyncio.sleep(0.5)  # gRPC notices the end of its connection
    with pytest.raises(errors.Unavailable) as caught:
        await behind.compare_and_set("k", 0, b"v")
    assert not isinstance(caught.value, OutcomeUnknown)
    assert await plane.get("k") is None


async def test_a_port_that_is_no_etcd_is_an_error_in_time() -> None:
    """Goal: a wrong port does not hang. Method: a server that talks HTTP/1, one that says nothing, and nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(errors.Unavailable):  # the kernel takes the connection, nobody answers
            await open_control(f"etcd://127.0.0.1:{port}/c", timeout_s=1)

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        talking = threading.Thread(target=talk)
        talking.start()
        with pytest.raises(errors.UcxKvError):
            await open_control(f"etcd://127.0.0.1:{port}/c", timeout_s=1)
        listening.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(talking.join, 30)
    with pytest.raises(errors.Unavailable):
        await open_control(f"etcd://127.0.0.1:{free_port()}/c", timeout_s=1)


async def test_opening_and_closing_leaves_no_descriptor(etcd: EtcdServer, plane: ControlPlane) -> None:
    """Goal: no leak. Method: descriptors before and after handles with a watch and a lease each."""

    async def once() -> None:
        opened = await open_control(etcd.url("c"), timeout_s=10)
        entry = await put(opened, "k", b"")
        changes = opened.watch("", entry.revision - 1)
        await take(changes, 1)
        await opened.lease(5)
        await opened.aclose()
        await changes.aclose()

    await once()
    before = open_files()
    for _ in range(4):
        await once()
    await wait_until(lambda: open_files() <= before, "descriptors closed", 20)
