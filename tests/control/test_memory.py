"""The in-memory control plane's own faults and clocks, which simulations rely on."""

from __future__ import annotations

import asyncio

import pytest

from tests.control.memory import MemoryControl, Outage, Store
from ucxkv import errors
from ucxkv.control import ChangeKind, OutcomeUnknown


class HandClock:
    """A clock that moves only when told; sleepers wake in order of their time. rate: of this clock to the hand's."""

    def __init__(self) -> None:
        self.now = 10**9
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._n = 0

    def now_ns(self) -> int:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._n += 1
        self._sleepers.append((self.now + int(seconds * 1e9), self._n, future))
        await future

    async def move(self, seconds: float) -> None:
        """Let time pass, waking who is due, one after the other."""
        end = self.now + int(seconds * 1e9)
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            due = sorted(item for item in self._sleepers if item[0] <= end)
            if not due:
                break
            self.now = max(self.now, due[0][0])
            self._sleepers.remove(due[0])
            if not due[0][2].done():
                due[0][2].set_result(None)
        self.now = end


async def test_a_cut_off_holder_loses_its_lease_by_its_own_clock_first() -> None:
    """Goal: lease order under virtual time. Method: a 10 s lease, its holder cut off at 5 s: lost for the holder 9.8 s
    after the last renewal that came through, gone for the others 10 s after it, not before."""
    clock = HandClock()
    store = Store(clock)
    a, b = MemoryControl(store), MemoryControl(store)
    lease = await a.lease(10)
    await a.compare_and_set("a", 0, b"", lease=lease)
    await clock.move(5)
    renewed_ns = lease.until_ns - int(9.8e9)
    a.outage = Outage.HANG
    await clock.move((renewed_ns - clock.now) / 1e9 + 9.79)
    assert lease.is_held
    await clock.move(0.02)
    assert lease.lost.done() and not lease.is_held
    assert await b.get("a") is not None
    await clock.move(0.2)
    assert await b.get("a") is None
    a.outage = Outage.NONE
    assert await a.get("a") is None
    for closing in (a, b, store):
        await closing.aclose()


@pytest.mark.parametrize("outage", [Outage.REFUSE, Outage.HANG, Outage.LOSE_REPLY])
async def test_outages_are_typed_and_bounded_and_pause_watches(outage: Outage) -> None:
    """Goal: simulations meet what real engines do. Method: each fault, on one handle; what happened is seen after."""
    clock = HandClock()
    store = Store(clock)
    a, b = MemoryControl(store), MemoryControl(store)
    first = await b.compare_and_set("k", 0, b"1")
    assert first is not None
    changes = a.watch("", 0)
    assert (await anext(changes)).entry == first
    a.outage = outage
    waiting = asyncio.ensure_future(anext(changes))
    reading, changing = asyncio.ensure_future(a.get("k")), asyncio.ensure_future(a.compare_and_set("k", 1, b"2"))
    await clock.move(5.1)
    with pytest.raises(errors.Unavailable):
        await reading
    with pytest.raises(errors.Unavailable if outage is Outage.REFUSE else OutcomeUnknown):
        await changing
    now = await b.get("k")
    assert now is not None and (now.value == b"2") is (outage is Outage.LOSE_REPLY)
    await b.compare_and_set("k", now.revision, b"3")
    await clock.move(1)
    assert not waiting.done()
    a.outage = Outage.NONE
    seen = [await waiting]
    while seen[-1].entry.value != b"3":
        seen.append(await anext(changes))
    assert [c.entry.value for c in seen] == ([b"2", b"3"] if outage is Outage.LOSE_REPLY else [b"3"])
    store.compact()
    late = a.watch("", 1)
    assert (await anext(late)).kind is ChangeKind.RESYNC
    for stream in (changes, late):
        await stream.aclose()
    for closing in (a, b, store):
        await closing.aclose()
