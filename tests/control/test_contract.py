"""What every engine of the control plane promises, over each of them (and over the in-memory one of simulations)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from tests.control.conftest import Engine
from tests.harness import wait_until
from ucxkv import errors
from ucxkv.control import Change, ChangeKind, Conflict, ControlPlane, Entry, LeaseLost


async def put(plane: ControlPlane, key: str, value: bytes) -> Entry:
    """Set a key whatever it is at."""
    before = await plane.get(key)
    entry = await plane.compare_and_set(key, before.revision if before else 0, value)
    assert entry is not None
    return entry


async def take(changes: AsyncGenerator[Change, None], n: int) -> list[Change]:
    async with asyncio.timeout(20):
        return [await anext(changes) for _ in range(n)]


async def absent(plane: ControlPlane, key: str, seconds: float = 15) -> None:
    async def gone() -> bool:
        return await plane.get(key) is None

    await wait_until(gone, f"{key} gone", seconds)


async def test_a_key_is_set_read_changed_and_deleted(plane: ControlPlane) -> None:
    """Goal: the plain life of a key. Method: each step's answer and what a read says after it."""
    assert await plane.get("a") is None
    first = await plane.compare_and_set("a", 0, b"one")
    assert first is not None and (first.key, first.value) == ("a", b"one") and first.revision > 0
    assert await plane.get("a") == first
    second = await plane.compare_and_set("a", first.revision, b"")
    assert second is not None and second.revision > first.revision and second.value == b""
    assert await plane.get("a") == second
    assert await plane.compare_and_set("a", second.revision, None) is None
    assert await plane.get("a") is None
    again = await plane.compare_and_set("a", 0, b"one")
    assert again is not None and again.revision > second.revision


async def test_a_change_at_another_revision_is_a_conflict_and_changes_nothing(plane: ControlPlane) -> None:
    """Goal: compare-and-set compares. Method: every wrong expectation, then the key and its revision are as before."""
    entry = await plane.compare_and_set("a", 0, b"one")
    assert entry is not None
    for expected in (0, entry.revision + 1, entry.revision + 1000):
        for value in (b"two", None):
            if expected or value is not None:
                with pytest.raises(Conflict) as caught:
                    await plane.compare_and_set("a", expected, value)
                assert caught.value.current == entry
    with pytest.raises(Conflict) as caught:
        await plane.compare_and_set("b", entry.revision, b"x")
    assert caught.value.current is None
    with pytest.raises(Conflict):
        await plane.compare_and_set("b", entry.revision, None)
    assert await plane.list("") == ([entry], entry.revision)


async def test_list_has_the_prefix_in_order_and_the_revision_of_the_picture(plane: ControlPlane) -> None:
    """Goal: a list can be followed by a watch. Method: keys around the prefix's bounds; other keys' changes count."""
    for key in ("m/b", "m/a", "m", "m/", "m0", "m/\U0001f600", "n/a"):
        await put(plane, key, key.encode())
    entries, revision = await plane.list("m/")
    assert [entry.key for entry in entries] == ["m/", "m/a", "m/b", "m/\U0001f600"]
    assert all(entry.value == entry.key.encode() for entry in entries)
    assert revision >= max(entry.revision for entry in entries)
    assert (await put(plane, "other", b"")).revision > revision
    assert len((await plane.list(""))[0]) == 8
    assert (await plane.list("nothing"))[0] == []


async def test_a_hundred_tasks_on_one_counter_lose_no_update(engine: Engine) -> None:
    """Goal: linearizable changes. Method: 100 tasks on three handles add one each by compare-and-set until it holds;
    the sum is 100, each value was somebody's, and revisions grow with it."""
    planes = [await engine.open() for _ in range(3)]
    done: list[tuple[int, int]] = []

    async def add(plane: ControlPlane) -> None:
        while True:
            current = await plane.get("counter")
            value = int(current.value) if current else 0
            try:
                entry = await plane.compare_and_set(
                    "counter", current.revision if current else 0, str(value + 1).encode()
                )
            except Conflict:
                continue
            assert entry is not None
            done.append((value + 1, entry.revision))
            return

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for i in range(100):
            group.create_task(add(planes[i % 3]))
    done.sort()
    assert [value for value, _ in done] == list(range(1, 101))
    assert [revision for _, revision in done] == sorted({revision for _, revision in done})


async def test_a_watch_shows_every_change_of_its_prefix_in_order(engine: Engine) -> None:
    """Goal: none missed, none twice, none of others. Method: changes before and after the watch starts, by another
    handle; then a second watch that starts in the middle."""
    writer, reader = await engine.open(), await engine.open()
    before = await put(writer, "w/0", b"before")
    first = await put(writer, "w/1", b"1")
    changes = reader.watch("w/", before.revision)
    assert await take(changes, 1) == [Change(ChangeKind.PUT, first)]
    expected = []
    for i in range(40):
        entry = await put(writer, f"w/{i % 7}", str(i).encode())
        expected.append(Change(ChangeKind.PUT, entry))
        await put(writer, "x", b"not watched")
        if i % 3 == 0:
            assert await writer.compare_and_set(entry.key, entry.revision, None) is None
            expected.append(Change(ChangeKind.DELETE, Entry(entry.key, b"", -1)))
    found = await take(changes, len(expected))
    assert [(c.kind, c.entry.key, c.entry.value) for c in found] == [
        (c.kind, c.entry.key, c.entry.value) for c in expected
    ]
    revisions = [c.entry.revision for c in found]
    assert revisions == sorted(set(revisions)) and revisions[0] > first.revision
    later = reader.watch("w/", revisions[19])
    assert await take(later, len(found) - 20) == found[20:]
    await changes.aclose()
    await later.aclose()


async def test_a_watch_of_dropped_history_says_resync_and_goes_on(engine: Engine) -> None:
    """Goal: a compaction is never a silent gap. Method: changes, compaction, then a watch from before them."""
    plane = await engine.open()
    start = await put(plane, "w/a", b"0")
    for i in range(5):
        last = await put(plane, "w/a", str(i).encode())
    await engine.compact()
    changes = plane.watch("w/", start.revision)
    (resync,) = await take(changes, 1)
    assert resync.kind is ChangeKind.RESYNC and resync.entry.revision >= last.revision
    entries, revision = await plane.list("w/")
    assert [entry.value for entry in entries] == [b"4"] and revision >= resync.entry.revision
    after = await put(plane, "w/b", b"after")
    assert await take(changes, 1) == [Change(ChangeKind.PUT, after)]
    await changes.aclose()


async def test_a_lease_that_is_kept_alive_outlives_its_time_and_grows(engine: Engine) -> None:
    """Goal: keep-alive. Method: three times the lease's time; the key stands, until_ns moved, listeners were told."""
    plane, other = await engine.open(), await engine.open()
    asked_ns = time.monotonic_ns()
    lease = await plane.lease(engine.ttl_s)
    answered_ns = time.monotonic_ns()
    assert asked_ns < lease.until_ns <= answered_ns + int(engine.ttl_s * 0.98e9)
    told: list[int] = []
    lease.on_change(lambda changed: told.append(changed.until_ns))
    await plane.compare_and_set("l", 0, b"held", lease=lease)
    first = lease.until_ns
    await asyncio.sleep(3 * engine.ttl_s)
    assert lease.is_held and lease.until_ns > first and told and told[-1] == lease.until_ns
    entry = await other.get("l")
    assert entry is not None and entry.value == b"held"
    await lease.revoke()
    assert await other.get("l") is None


async def test_a_lease_ends_for_its_holder_before_its_keys_go(engine: Engine) -> None:
    """Goal: I3, one holder at a time. Method: a holder that stops renewing; when the other sees the key vanish the
    holder's own time is over; the watch shows the deletion; nothing more can be set under the lease."""
    holder, other = await engine.open(), await engine.open()
    lease = await holder.lease(engine.ttl_s)
    entry = await holder.compare_and_set("l", 0, b"held", lease=lease)
    kept = await holder.compare_and_set("freed", 0, b"1", lease=lease)
    assert entry is not None and kept is not None
    freed = await holder.compare_and_set("freed", kept.revision, b"2")  # without the lease: it stays
    assert freed is not None
    changes = other.watch("l", freed.revision)
    lease.abandon("test")
    until_ns = lease.until_ns
    await absent(other, "l")
    assert time.monotonic_ns() >= until_ns
    (change,) = await take(changes, 1)
    assert (change.kind, change.entry.key) == (ChangeKind.DELETE, "l") and change.entry.revision > freed.revision
    assert await other.get("freed") == freed
    with pytest.raises(LeaseLost):
        await holder.compare_and_set("l", 0, b"again", lease=lease)
    assert await other.get("l") is None
    await changes.aclose()


async def test_a_lease_that_the_engine_ended_is_lost_for_good(engine: Engine) -> None:
    """Goal: the holder learns it. Method: it is ended behind the holder's back, as by an operator."""
    plane = await engine.open()
    lease = await plane.lease(engine.ttl_s)
    await plane.compare_and_set("l", 0, b"held", lease=lease)
    told = asyncio.Event()
    lease.on_change(lambda changed: told.set() if changed.lost.done() else None)
    await lease._engine.end_lease(lease.id)
    async with asyncio.timeout(20):
        assert "ended" in await lease.lost
        await told.wait()
    assert not lease.is_held
    late = asyncio.Event()
    lease.on_change(lambda changed: late.set())
    assert late.is_set(), "whoever asks later is told at once"
    await lease.revoke()  # no error: there is nothing left to end


async def test_two_leases_on_keys_of_their_own(plane: ControlPlane, engine: Engine) -> None:
    """Goal: an ending lease takes its own keys only. Method: two leases with two keys each, one revoked; a key that
    moved from one lease to the other goes with the other."""
    a, b = await plane.lease(engine.ttl_s * 10), await plane.lease(engine.ttl_s * 10)
    assert a.id != b.id
    for key, lease in (("a/1", a), ("a/2", a), ("b/1", b), ("b/2", b)):
        await plane.compare_and_set(key, 0, b"", lease=lease)
    moved = await plane.get("a/2")
    assert moved is not None
    await plane.compare_and_set("a/2", moved.revision, b"", lease=b)
    await a.revoke()
    assert [entry.key for entry in (await plane.list(""))[0]] == ["a/2", "b/1", "b/2"]
    await b.revoke()
    assert (await plane.list(""))[0] == []


async def test_what_no_engine_could_hold_is_refused(plane: ControlPlane) -> None:
    """Goal: bad input is a UsageError and changes nothing. Method: keys, values, revisions and times out of bounds."""
    for key in ("", "a\0b", "a\nb", "x" * 1025):
        with pytest.raises(errors.UsageError):
            await plane.get(key)
        with pytest.raises(errors.UsageError):
            await plane.compare_and_set(key, 0, b"")
    with pytest.raises(errors.UsageError):
        await plane.compare_and_set("a", -1, b"")
    with pytest.raises(errors.UsageError):
        await plane.compare_and_set("a", 0, None)
    with pytest.raises(errors.UsageError):
        await plane.compare_and_set("a", 0, bytes((1 << 20) + 1))
    for ttl_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(errors.UsageError):
            await plane.lease(ttl_s)
    assert (await plane.list(""))[0] == []
    assert (await put(plane, "x" * 1024, bytes(1 << 20))).value == bytes(1 << 20)


async def test_closing_ends_watches_and_leases_and_later_calls(engine: Engine) -> None:
    """Goal: aclose leaves no task and hangs nothing. Method: a waiting watch and a lease while it closes, twice."""
    plane = await engine.open()
    lease = await plane.lease(engine.ttl_s)
    changes = plane.watch("", (await plane.list(""))[1])
    waiting = asyncio.create_task(take(changes, 1))
    await asyncio.sleep(0.1)
    tasks = asyncio.all_tasks()
    await plane.aclose()
    await plane.aclose()
    assert lease.lost.done() and not lease.is_held
    with pytest.raises(errors.Unavailable):
        await waiting
    await wait_until(
        lambda: not any("lease" in task.get_name() for task in asyncio.all_tasks() & tasks), "no task left"
    )
    with pytest.raises(errors.Unavailable):
        await plane.get("a")
    with pytest.raises(errors.Unavailable):
        await plane.compare_and_set("a", 0, b"")
