"""Objects against a dict: any order of calls, evictions and late writers, on a real node, in runs of three versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import ucxkv
from tests.harness import NodeProcess
from tests.objects.test_numbering import use_small_numbers
from ucxkv.objects import ABSENT, Version
from ucxkv.objects.chains import Chains, Claim, Position
from ucxkv.objects.records import Body, header_key

T = TypeVar("T")
NAMES = st.sampled_from(["a", "b"])


def deadline() -> int:
    """Half a minute from now."""
    return time.monotonic_ns() + 30_000_000_000


class ObjectMachine(RuleBasedStateMachine):
    """Two clients and two names. Of each name the model has what was put last, and whether some of it was evicted: then
    the object is that value or none."""

    node: NodeProcess

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clients = [self.run(self.connected()) for _ in range(2)]
        self.model: dict[str, tuple[bytes, Version]] = {}
        self.holed: set[str] = set()
        self.positions: list[Position] = []
        self.gone: list[tuple[str, Version]] = []
        self.count = 0
        self.is_cut = False

    async def connected(self) -> ucxkv.Client:
        """One more client."""
        return await ucxkv.connect(self.node.address)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """To its end."""
        return self.loop.run_until_complete(call)

    def value(self) -> bytes:
        """Bytes that nobody put before."""
        self.count += 1
        return b"%d" % self.count

    def put(self, client: int, name: str, **options: Any) -> None:
        """Put a new value, in the store and in the model."""
        value = self.value()
        version = self.run(self.clients[client].objects.put(name, value, **options))
        if name in self.model:
            self.gone.append((name, self.model[name][1]))
        self.model[name] = value, version
        self.holed.discard(name)

    @rule(client=st.integers(0, 1), name=NAMES, times=st.integers(1, 12))
    def put_anyhow(self, client: int, name: str, times: int) -> None:
        """Without an expectation."""
        for _ in range(times):
            self.put(client, name)

    @rule(client=st.integers(0, 1), name=NAMES)
    def put_as_expected(self, client: int, name: str) -> None:
        """Expecting what is there."""
        info = self.run(self.clients[client].objects.stat(name))
        self.put(client, name, if_version=ABSENT if info is None else info.version)

    @precondition(lambda self: self.gone)
    @rule(client=st.integers(0, 1), data=st.data())
    def put_on_what_is_gone(self, client: int, data: st.DataObject) -> None:
        """Expecting a version that was overwritten or deleted."""
        name, version = data.draw(st.sampled_from(self.gone))
        with pytest.raises(ucxkv.VersionConflict):
            self.run(self.clients[client].objects.put(name, b"late", if_version=version))

    @rule(client=st.integers(0, 1), name=NAMES)
    def delete(self, client: int, name: str) -> None:
        """All of it."""
        was_there = self.run(self.clients[client].objects.delete(name))
        assert was_there == (name in self.model) or name in self.holed
        if name in self.model:
            self.gone.append((name, self.model.pop(name)[1]))
        self.holed.discard(name)

    @rule(name=NAMES)
    def look(self, name: str) -> None:
        """A writer sees the object, and falls asleep."""
        self.positions.append(self.run(Chains(self.clients[0]).locate(name, deadline())))

    @precondition(lambda self: self.positions)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        """It wakes, and claims the next version. It wins only where nothing has happened since."""
        at = data.draw(st.sampled_from(self.positions))
        chains = Chains(self.clients[1])
        now = self.run(chains.locate(at.name, deadline()))
        body = Body(self.value().rjust(16), 1)
        claim, header = self.run(chains.claim(at, body, durable=False, deadline_ns=deadline()))
        is_same = (now.life, now.header) == (at.life, at.header)
        assert (claim is Claim.OURS) == is_same or self.is_cut
        if claim is Claim.OURS:  # it has a header and no body: none
            if at.name in self.model:
                self.gone.append((at.name, self.model.pop(at.name)[1]))
            self.run(self.clients[1].objects._remove_before(at, header.version, deadline()))

    @rule(name=NAMES, blocks=st.integers(1, 3))
    def evict_headers(self, name: str, blocks: int) -> None:
        """The newest headers go, as leaves do."""
        for _ in range(blocks):
            at = self.run(Chains(self.clients[0]).locate(name, deadline()))
            if at.header is None or at.life is None:
                return
            self.run(self.clients[0].delete([header_key(at.life, at.number)]))
            self.holed.add(name)
            self.is_cut = True

    @rule(name=NAMES)
    def evict_seal(self, name: str) -> None:
        """The value goes."""
        at = self.run(Chains(self.clients[0]).locate(name, deadline()))
        if at.header is not None:
            self.run(self.clients[0].delete([at.body.seal_key]))
            self.holed.add(name)

    @invariant()
    def every_client_sees_the_newest_value_or_none(self) -> None:
        """What a get, a stat and a list say."""
        listed = {info.name: info.version for info in self.run(self.clients[0].objects.list())}
        for kv in self.clients:
            for name in ("a", "b"):
                found = self.run(kv.objects.get(name))
                got = None if found is None else (bytes(found.value), found.info.version)  # type: ignore[call-overload]
                assert got == self.model.get(name) or (got is None and name in self.holed)
                assert listed.get(name) == (got[1] if got else None)

    def teardown(self) -> None:
        """Nothing is left of what was deleted, but what an eviction cut off from its name."""
        for name in ("a", "b"):
            self.run(self.clients[0].objects.delete(name))
        left = self.run(self.clients[0].list_keys())
        assert not left or self.is_cut
        self.run(self.clients[0].objects.sweep(older_than_s=0))
        self.run(self.clients[0].delete([info.key for info in self.run(self.clients[0].list_keys())]))
        for kv in self.clients:
            self.run(kv.aclose())
        self.loop.close()


def test_objects_do_as_a_dict_does(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: any order of calls, evictions and sleeping writers. Method: see `ObjectMachine`."""
    use_small_numbers(monkeypatch, levels=6)
    ObjectMachine.node = node
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        ObjectMachine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None)
    )
