"""Sessions on a real node: turns, prefetch, an index that other processes read, the end of a session."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

import ucxkv
from tests.conftest import blocks, keys
from tests.harness import NodeProcess
from tests.test_sequence import LAYOUT, whole_cache
from ucxkv.errors import ClientClosed, UsageError
from ucxkv.sessions import PrefetchResult
from ucxkv.sessions.records import RECORDS_MAX, record_keys, session_key


@pytest.fixture
async def kv(shared_node: NodeProcess) -> AsyncIterator[ucxkv.Client]:
    """A client of the shared node."""
    async with ucxkv.connect(shared_node.address) as client:
        yield client


@pytest.fixture
async def other(shared_node: NodeProcess) -> AsyncIterator[ucxkv.Client]:
    """Another client of it, as another process has."""
    async with ucxkv.connect(shared_node.address) as client:
        yield client


def name() -> str:
    """A conversation nobody else has."""
    return f"chat-{os.urandom(6).hex()}"


async def chain(kv: ucxkv.Client, n: int = 6) -> list[bytes]:
    """A chain of n blocks in the store."""
    k = keys(n)
    assert (await kv.put_many(k, blocks(n, 4096), "chain")).ok
    return k


def words(session: ucxkv.Session) -> list[list[bytes]]:
    """A session's chains as lists of keys."""
    return [[row.tobytes() for row in one.keys] for one in session.chains]


async def test_a_turn_is_remembered_and_its_blocks_are_prefetched(kv: ucxkv.Client) -> None:
    """Goal: the user's next turn finds its blocks in memory. Method: turns of keys, of a longer chain, of a sequence in
    two layer groups; the prefetch tells what the store has of the one used last."""
    session = kv.session(name())
    assert await session.prefetch() == PrefetchResult()
    k = await chain(kv)
    await session.turn(k[:4])
    await session.turn(k)
    assert words(session) == [k]
    assert await session.prefetch() == PrefetchResult(6, 6, 0, 0)
    layout = dataclasses.replace(LAYOUT, layer_groups=2, salt=os.urandom(8).hex())
    seq = kv.sequence(layout, range(26))
    await seq.save(whole_cache(layout, 6, seed=1))
    await session.turn(seq)
    assert await session.prefetch(order="layer") == PrefetchResult(6, 6, 0, 0)
    assert [one.layer_groups for one in session.chains] == [2, 1]
    assert await kv.prefetch(seq, order="layer") == await kv.prefetch(k) == PrefetchResult(6, 6, 0, 0)
    assert await kv.prefetch(k + keys(2)) == PrefetchResult(6, 6, 0, 0)


async def test_the_same_id_is_the_same_session_and_a_salt_makes_it_another(kv: ucxkv.Client) -> None:
    """Goal: any part of a server reaches the session by its id, and tenants do not meet. Method: ask twice, with
    another salt, and again when nobody held it."""
    own = name()
    session = kv.session(own)
    await session.turn(keys(3))
    assert kv.session(own) is session and not kv.session(own, salt="b").chains
    before = words(session)
    del session
    assert words(kv.session(own)) == before


async def test_a_session_is_over_after_its_time_to_live(kv: ucxkv.Client) -> None:
    """Goal: idle conversations are forgotten, in the process and in the store. Method: a time to live of a second;
    after it neither this session nor a reader of its log knows the chains, though the record is still there."""
    own = name()
    session = kv.session(own, ttl_s=1.0, stored=True)
    await session.turn(await chain(kv))
    assert session.chains
    await asyncio.sleep(1.05)
    assert not session.chains
    async with ucxkv.connect(kv.peers()[0].address) as third:
        again = third.session(own, stored=True)
        assert await again.prefetch() == PrefetchResult() and not again.chains
    assert await kv.exists(record_keys(session_key(own), 1)[0].tobytes())


async def test_a_stored_session_is_known_to_any_process(kv: ucxkv.Client, other: ucxkv.Client) -> None:
    """Goal: a conversation may go on at another engine. Method: turns by two clients in turn; each prefetches what the
    other used last; a client without `stored` knows nothing of it."""
    own = name()
    first, second = kv.session(own, stored=True), other.session(own, stored=True)
    k = await chain(kv, 9)
    await first.turn(k[:3])
    assert (await second.prefetch()).blocks == 3
    await second.turn(k[:6])
    assert (await first.prefetch()).blocks == 6
    await first.turn(k)
    assert (await second.prefetch()).blocks == 9 and words(second) == [k]
    assert not other.session(own, salt="x", stored=True).chains
    assert first.log is not None and second.log is not None
    assert first.log.failures == second.log.failures == 0
    values = (await kv.get_many(record_keys(session_key(own), 3))).values
    assert [len(value or b"") for value in values or []] == [40 + 48] * 3  # a record holds what its turn added


async def test_turns_of_two_processes_at_once_are_both_written(kv: ucxkv.Client, other: ucxkv.Client) -> None:
    """Goal: no turn is lost to a race. Method: five turns at once by each of two clients; a third reads ten records and
    knows the chains."""
    own = name()
    used = [await chain(kv, 2) for _ in range(4)]
    sessions = [kv.session(own, stored=True), other.session(own, stored=True)]
    await asyncio.gather(*(session.turn(k) for i, k in enumerate(used) for session in [sessions[i % 2]]))
    assert (await kv.match(record_keys(session_key(own)))).blocks == 4
    async with ucxkv.connect(kv.peers()[0].address) as third:
        reader = third.session(own, stored=True)
        await reader.prefetch()
        assert sorted(words(reader)) == sorted(used)
    assert all(session.log is not None and not session.log.failures for session in sessions)


async def test_a_full_log_is_written_anew(kv: ucxkv.Client, other: ucxkv.Client) -> None:
    """Goal: a conversation of a thousand turns has a short log. Method: more turns than a log has records, of two
    chains; the log is short afterwards, and a reader of before and one of now know both chains."""
    own = name()
    session, reader = kv.session(own, stored=True), other.session(own, stored=True)
    a, b = await chain(kv, 3), await chain(kv, 4)
    for i in range(RECORDS_MAX):
        await session.turn(a if i % 2 else b)
    assert (await kv.match(record_keys(session_key(own)))).blocks == RECORDS_MAX
    assert (await reader.prefetch()).blocks == 3
    await session.turn(b)
    assert (await kv.match(record_keys(session_key(own)))).blocks == 2
    assert (await reader.prefetch()).blocks == 4
    assert words(reader) == words(session) == [b, a]


async def test_a_log_that_was_evicted_or_overwritten_is_a_lost_hint_no_more(kv: ucxkv.Client) -> None:
    """Goal: the index is never needed. Method: delete the log under a session, then put something else in its place;
    turns and prefetches go on from what the process knows, and a reader of the log reads nothing."""
    own = name()
    session = kv.session(own, stored=True)
    k = await chain(kv)
    records = record_keys(session_key(own))
    await session.turn(k[:2])
    await session.turn(k[:4])
    await kv.delete(records)
    await session.turn(k)
    assert (await session.prefetch()).blocks == 6
    assert (await kv.match(records)).blocks == 1
    await kv.delete(records)
    await kv.put(records[0].tobytes(), b"something else")
    await session.turn(k)
    assert (await session.prefetch()).blocks == 6
    async with ucxkv.connect(kv.peers()[0].address) as third:
        reader = third.session(own, stored=True)
        assert await reader.prefetch() == PrefetchResult()
        assert reader.log is not None and reader.log.failures == 1


async def test_the_end_of_a_session_forgets_it_and_deletes_when_asked(kv: ucxkv.Client) -> None:
    """Goal: a user who leaves can be forgotten. Method: end without deletion leaves the blocks; with it they go, but
    for a head that another conversation went on from; the stored log goes in both cases."""
    own = name()
    head = await chain(kv, 2)
    tails = [keys(2) for _ in range(2)]
    for tail in tails:
        assert (await kv.put_many(tail, blocks(2, 4096), [head[-1], tail[0]])).ok
    session = kv.session(own, stored=True)
    for delete, removed, there in ((False, 0, [True] * 4), (True, 2, [True, True, False, False])):
        await session.turn(head + tails[0])
        assert await session.end(delete=delete) == removed
        assert (await kv.exists_many(head + tails[0])).tolist() == there
        assert not session.chains and (await kv.match(record_keys(session_key(own)))).blocks == 0
    assert (await kv.exists_many(head + tails[1])).all()


class Gate:
    """Holds a client's `match` back, and counts who is in it."""

    def __init__(self, kv: ucxkv.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.inside, self.calls = asyncio.Event(), 0, 0
        match = kv.match

        async def gated(*args: Any, **options: Any) -> Any:
            self.inside += 1
            self.calls += 1
            try:
                await self.open.wait()
                return await match(*args, **options)
            finally:
                self.inside -= 1

        monkeypatch.setattr(kv, "match", gated)


async def test_one_prefetch_runs_at_a_time_and_ends_with_the_last_who_waits(
    kv: ucxkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: impatient callers cost nothing, and a cancelled one leaves the others theirs. Method: three ask at once;
    one is cancelled, two get the result of one run; then all who wait are cancelled, and no call is left."""
    session = kv.session(name())
    await session.turn(await chain(kv))
    gate = Gate(kv, monkeypatch)
    tasks = [asyncio.create_task(session.prefetch()) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    gate.open.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [PrefetchResult(6, 6, 0, 0)] * 2 and gate.calls == 1
    gate.open.clear()
    tasks = [asyncio.create_task(session.prefetch()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert gate.inside == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.inside == 0
    running = asyncio.create_task(session.prefetch())
    await asyncio.sleep(0.01)
    await session.end()
    assert await running == PrefetchResult() and gate.inside == 0


async def test_wrong_use_of_sessions_is_refused_by_name(kv: ucxkv.Client) -> None:
    """Goal: a wrong call is named. Method: ids, times to live, keys and orders that are none; a closed client."""
    for session_id in ("", "x" * 2000, 7, None):
        with pytest.raises(UsageError, match="session id"):
            kv.session(session_id)  # type: ignore[arg-type]
    for ttl_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="ttl_s"):
            kv.session("a", ttl_s=ttl_s)
    for salt in (7, None, "\ud800"):
        with pytest.raises(UsageError, match="salt"):
            kv.session("a", salt=salt)  # type: ignore[arg-type]
    session = kv.session(name())
    with pytest.raises(UsageError, match="key 0"):
        await session.turn([b"short"])
    await session.turn(keys(1))
    with pytest.raises(UsageError, match="order"):
        await session.prefetch(order="tail")  # type: ignore[arg-type]
    await kv.aclose()
    with pytest.raises(ClientClosed):
        await session.prefetch()


async def test_a_turn_while_the_node_is_gone_is_remembered_here() -> None:
    """Goal: a dead node costs the hint in the store, no more. Method: kill the node; turn and prefetch of a stored
    session raise nothing, and the process still knows the chain."""
    with NodeProcess("gone") as node:
        async with ucxkv.connect(node.address, timeout_s=1.0) as kv:
            session = kv.session("a", stored=True)
            k = await chain(kv)
            await session.turn(k[:3])
            node.kill()
            await session.turn(k)
            assert words(session) == [k]
            assert (await session.prefetch()).in_memory == 0
            assert session.log is not None and session.log.failures > 0


async def test_the_blocking_client_has_sessions_and_prefetch(shared_node: NodeProcess, kv: ucxkv.Client) -> None:
    """Goal: engines without a loop have them too. Method: a turn by the blocking client in a thread, prefetches that
    wait and one that does not; another client knows the stored session; the end of it."""
    own, k = name(), await chain(kv)

    def work() -> tuple[Any, ...]:
        with ucxkv.sync.connect(shared_node.address) as blocking:
            session = blocking.session(own, stored=True)
            session.turn(k)
            with session.submit_prefetch() as ticket:
                first = ticket.result(5)
            return first, session.prefetch(), blocking.prefetch(k), blocking.warm(k), session.id

    assert await asyncio.to_thread(work) == (*[PrefetchResult(6, 6, 0, 0)] * 3, 6, own)
    assert (await kv.session(own, stored=True).prefetch()).blocks == 6

    def end() -> int:
        with ucxkv.sync.connect(shared_node.address) as blocking:
            return blocking.session(own, stored=True).end(delete=True)

    assert await asyncio.to_thread(end) == 6
    assert not (await kv.exists_many(k)).any()
