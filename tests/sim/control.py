"""The control plane across the simulated network: a server process, and the handle that each node has on it.

The server holds a `Store` (tests/control/memory.py) and answers one question a message; a question that is late takes
effect late, whatever became of its asker. A handle keeps every promise of `ucxkv.control.base`, with the product's own
`Lease` on the node's clock. Watches are told that something changed, and ask for what; a lost telling costs a poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from tests.control.memory import Store
from tests.sim.network import Network
from tests.sim.process import Process
from ucxkv import errors
from ucxkv.control import Change, ChangeKind, Conflict, Entry, Lease, LeaseLost, OutcomeUnknown

__all__ = ["ProcessClock", "RemoteControl", "Server"]

SERVER = "control"
POLL_S = 0.5


class ProcessClock:
    """A process's clock, as leases want it."""

    def __init__(self, process: Process) -> None:
        self.now_ns = process.now_ns

    async def sleep(self, seconds: float) -> None:
        """Of the process's own time."""
        await asyncio.sleep(seconds)


class Server:
    """The control plane's process. The store outlives it, as a disk would."""

    def __init__(self, process: Process, network: Network, store: Store) -> None:
        self._network = network
        self._store = store
        self._watchers: set[str] = set()
        self._told = store.revision
        self._taken: set[tuple[str, int]] = set()
        network.attach(SERVER, process, self._receive)

    def _receive(self, source: str, message: Any) -> None:
        number, call, arguments = message
        self._watchers.add(source)
        if (source, number) in self._taken:  # a copy: no engine repeats a change
            return
        self._taken.add((source, number))
        try:
            answer: Any = (number, "ok", getattr(self, f"_{call}")(*arguments))
        except Conflict as exc:
            answer = (number, "conflict", exc.current)
        except LeaseLost:
            answer = (number, "lease lost", None)
        self._network.send(SERVER, source, answer)
        self.tell()

    def tell(self) -> None:
        """Let all watchers know of a change."""
        if self._store.revision != self._told:
            self._told = self._store.revision
            for watcher in sorted(self._watchers):
                self._network.send(SERVER, watcher, (0, "changed", self._told))

    def _get(self, key: str) -> Entry | None:
        return self._store.get(key)

    def _list(self, prefix: str) -> tuple[list[Entry], int]:
        return self._store.list(prefix)

    def _compare_and_set(self, key: str, expected: int, value: bytes | None, lease_id: int) -> Entry | None:
        return self._store.compare_and_set(key, expected, value, lease_id)

    def _grant(self, ttl_s: float) -> int:
        return self._store.grant(ttl_s)

    def _renew(self, lease_id: int) -> float | None:
        return self._store.renew(lease_id)

    def _end_lease(self, lease_id: int) -> None:
        self._store.end_lease(lease_id)

    def _changes(self, after: int) -> tuple[list[Change] | None, int]:
        self._store.expire()
        found = self._store.changes_after(after)
        return (None if found is None else list(found)), self._store.revision


class RemoteControl:
    """One process's handle. address: where it receives; its links to `SERVER` can be cut apart from the node's."""

    lease_class: type[Lease] = Lease

    def __init__(self, process: Process, network: Network, *, timeout_s: float = 0.4) -> None:
        self._network = network
        self._clock = ProcessClock(process)
        self._timeout_s = timeout_s
        self.address = f"{process.host_name}.control"
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = process.incarnation << 32
        self._changed = asyncio.Event()
        self._leases: list[Lease] = []
        network.attach(self.address, process, self._receive)

    # ---- the protocol's calls

    async def get(self, key: str) -> Entry | None:
        """See ControlPlane."""
        entry: Entry | None = await self._ask("get", key)
        return entry

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        """See ControlPlane."""
        found: tuple[list[Entry], int] = await self._ask("list", prefix)
        return found

    async def compare_and_set(
        self, key: str, expected_revision: int, value: bytes | None, *, lease: Lease | None = None
    ) -> Entry | None:
        """See ControlPlane."""
        if lease is not None and lease.lost.done():
            raise LeaseLost(f"the lease for {key} is over: {lease.lost.result()}")
        lease_id = lease.id if lease is not None else 0
        entry: Entry | None = await self._ask("compare_and_set", key, expected_revision, value, lease_id)
        return entry

    async def lease(self, ttl_s: float) -> Lease:
        """See ControlPlane."""
        asked_ns = self._clock.now_ns()
        lease = self.lease_class(self, self._clock, await self._ask("grant", ttl_s), ttl_s)
        lease.start(asked_ns, ttl_s)
        self._leases = [held for held in self._leases if not held.lost.done()] + [lease]
        return lease

    async def renew_lease(self, lease_id: int) -> float | None:
        """See LeaseEngine."""
        granted: float | None = await self._ask("renew", lease_id)
        return granted

    async def end_lease(self, lease_id: int) -> None:
        """See LeaseEngine."""
        await self._ask("end_lease", lease_id)

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[Change, None]:
        """See ControlPlane."""
        after = after_revision
        while True:
            self._changed.clear()
            try:
                found, revision = await self._ask("changes", after)
            except errors.Unavailable:
                continue
            if found is None:
                after = revision
                yield Change(ChangeKind.RESYNC, Entry(prefix, b"", revision))
                continue
            for change in found:
                after = change.entry.revision
                if change.entry.key.startswith(prefix):
                    yield change
            after = max(after, revision)
            if after >= revision:
                timer = asyncio.get_running_loop().call_later(POLL_S, self._changed.set)
                await self._changed.wait()
                timer.cancel()

    async def aclose(self) -> None:
        """See ControlPlane."""
        for lease in self._leases:
            lease.abandon("closed")

    # ---- questions and answers

    async def _ask(self, call: str, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        self._number += 1
        number = self._number
        answer = self._waiting[number] = loop.create_future()
        self._network.send(self.address, SERVER, (number, call, arguments))
        timer = loop.call_later(self._timeout_s, self._expired, number)
        try:
            outcome, value = await answer
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        if outcome == "ok":
            return value
        if outcome == "conflict":
            raise Conflict(f"{arguments[0]} is not at the expected revision", current=value)
        if outcome == "lease lost":
            raise LeaseLost("that lease is over")
        raise (OutcomeUnknown if call == "compare_and_set" else errors.Unavailable)(f"no answer to {call}")

    def _expired(self, number: int) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(("expired", None))

    def _receive(self, source: str, message: Any) -> None:
        number, outcome, value = message
        if outcome == "changed":
            self._changed.set()
            return
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result((outcome, value))
