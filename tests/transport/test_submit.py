"""Tickets: operations for threads that have no loop."""

from __future__ import annotations

import asyncio
import os
import select
import threading

import pytest

from ucxkv.transport.base import Closed, DeadlineExceeded, UsageError
from ucxkv.transport.submit import LoopThread


@pytest.fixture
def loop_thread():
    made = LoopThread()
    yield made
    made.stop()


async def add(a, b, gate=None):
    if gate is not None:
        await gate.wait()
    return a + b


def test_an_operation_completes_by_poll_eventfd_and_result(loop_thread):
    """Goal: three ways to complete. Method: a gated coroutine; the descriptor is readable only once it is done."""
    gate = loop_thread.run(_event)
    with loop_thread.submit(lambda: add(1, 2, gate)) as ticket:
        poller = select.poll()
        poller.register(ticket.eventfd, select.POLLIN)
        assert not ticket.poll() and not poller.poll(20)
        with pytest.raises(DeadlineExceeded):
            ticket.result(0.01)
        loop_thread.loop.call_soon_threadsafe(gate.set)
        assert poller.poll(5000)
        assert ticket.poll() and ticket.result(0) == 3
    with loop_thread.submit(lambda: add(3, 4)) as done:
        assert done.result(5) == 7
        assert select.select([done.eventfd], [], [], 5)[0]  # asked for after the end


async def _event():
    return asyncio.Event()


def test_cancelled_and_failed_operations_say_so(loop_thread):
    """Goal: a cancel reaches the coroutine and ends the ticket; errors pass through. Method: one of each."""
    started, cancelled = threading.Event(), threading.Event()

    async def wait():
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fail():
        raise ValueError("as it was")

    ticket = loop_thread.submit(wait)
    assert started.wait(5) and not ticket.poll()
    ticket.cancel()
    with pytest.raises(Closed):
        ticket.result(5)
    assert cancelled.is_set()
    with pytest.raises(ValueError, match="as it was"):
        loop_thread.run(fail, 5)


def test_a_hundred_threads_submit_at_once(loop_thread):
    """Goal: submit is thread-safe. Method: 100 threads, 20 operations each."""
    results = []

    def work(number):
        results.append(sum(loop_thread.run(lambda i=i: add(number, i), 20) for i in range(20)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [20 * n + 190 for n in range(100)]


def test_a_stopped_loop_refuses_and_ends_what_ran():
    """Goal: no ticket hangs after stop. Method: stop under a waiting ticket, then submit again; count descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    made = LoopThread()
    ticket = made.submit(lambda: asyncio.sleep(60))
    made.stop()
    made.stop()
    with pytest.raises(Closed):
        ticket.result(5)
    with pytest.raises(Closed):
        made.submit(lambda: asyncio.sleep(0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_inside_the_loop_is_refused(loop_thread):
    """Goal: a deadlock is an error. Method: run() from within the loop's own thread."""

    async def inside():
        coroutine = add(1, 1)
        try:
            loop_thread.run(lambda: coroutine)
        finally:
            coroutine.close()

    with pytest.raises(UsageError, match="await"):
        loop_thread.run(inside, 5)
