"""Any sequence of calls, on two handles, against a plain model: every engine answers as the model does."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.control.conftest import ENGINES, make_engine
from ucxkv.control import Change, ChangeKind, Conflict, ControlPlane, Entry, Lease

KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "b/\u00e9", "b/\U0001f600", "b/\uffee"])
PREFIXES = st.sampled_from(["", "a", "a/", "b/", "b/\u00e9", "c"])
VALUES = st.one_of(st.none(), st.sampled_from([b"", b"1", b"\x00\xff", b"x" * 5000]))
HANDLES = st.integers(0, 1)
EXAMPLES = {"memory": 60, "sqlite": 25, "etcd": 15}


class Machine(RuleBasedStateMachine):
    """model: the entries; log: every change, from the first one on."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = self.runner.run(make_engine(self.kind, Path(self.folder.name), "machine"))
        self.planes: list[ControlPlane] = [self.runner.run(self.engine.open()) for _ in range(2)]
        self.model: dict[str, Entry] = {}
        self.log: list[Change] = []
        self.leases: list[Lease] = []
        self.held: dict[str, Lease] = {}
        self.dropped = 0
        self.revision = self.runner.run(self.planes[0].list(""))[1]
        self.start = self.revision

    def teardown(self) -> None:
        for lease in self.leases:
            self.runner.run(lease.revoke())
        self.runner.run(self.engine.aclose())
        self.runner.close()
        self.folder.cleanup()

    @rule(handle=HANDLES)
    def grant(self, handle: int) -> None:
        if len(self.leases) < 3:
            self.leases.append(self.runner.run(self.planes[handle].lease(3600)))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 2))
    def revoke(self, which: int) -> None:
        """All keys of the lease go, and no others; the order among them is the engine's."""
        lease = self.leases.pop(which % len(self.leases))
        going = {key for key, holder in self.held.items() if holder is lease}
        before = self.revision

        async def act() -> list[Change]:
            changes = self.planes[0].watch("", before)
            await lease.revoke()
            async with asyncio.timeout(20):
                found = [await anext(changes) for _ in going]
            await changes.aclose()
            return found

        found = self.runner.run(act())
        assert {change.entry.key for change in found} == going
        assert all(change.kind is ChangeKind.DELETE and change.entry.revision > before for change in found)
        self.log += found
        for key in going:
            del self.model[key], self.held[key]
        self.revision = self.runner.run(self.planes[0].list("c"))[1]
        assert self.revision == (found[-1].entry.revision if found else before)

    @rule(
        handle=HANDLES,
        key=KEYS,
        value=VALUES,
        at=st.sampled_from(["right", "right", "right", "zero", "old", "new"]),
        under=st.integers(0, 3),
    )
    def change(self, handle: int, key: str, value: bytes | None, at: str, under: int) -> None:
        lease = self.leases[under] if under < len(self.leases) else None
        current = self.model.get(key)
        right = current.revision if current else 0
        expected = {"right": right, "zero": 0, "old": max(0, right - 1), "new": right + 1}[at]
        if value is None and expected == 0:
            return
        try:
            entry = self.runner.run(self.planes[handle].compare_and_set(key, expected, value, lease=lease))
        except Conflict as exc:
            assert expected != right and exc.current == current
            return
        assert expected == right
        self.held.pop(key, None)
        if lease is not None and value is not None:
            self.held[key] = lease
        if value is None:
            assert entry is None
            del self.model[key]
            newest = self.runner.run(self.planes[handle].list("c"))[1]
            assert newest > self.revision
            self.revision = newest
            self.log.append(Change(ChangeKind.DELETE, Entry(key, b"", newest)))
        else:
            assert entry is not None and entry == Entry(key, value, entry.revision) and entry.revision > self.revision
            self.revision = entry.revision
            self.model[key] = entry
            self.log.append(Change(ChangeKind.PUT, entry))

    @rule(handle=HANDLES, key=KEYS)
    def get(self, handle: int, key: str) -> None:
        assert self.runner.run(self.planes[handle].get(key)) == self.model.get(key)

    @rule(handle=HANDLES, prefix=PREFIXES)
    def list(self, handle: int, prefix: str) -> None:
        expected = [self.model[key] for key in sorted(self.model) if key.startswith(prefix)]
        assert self.runner.run(self.planes[handle].list(prefix)) == (expected, self.revision)

    @rule()
    def compact(self) -> None:
        self.runner.run(self.engine.compact())
        self.dropped = self.revision

    @precondition(lambda self: self.log)
    @rule(handle=HANDLES, prefix=PREFIXES, back=st.integers(0, 30))
    def watch(self, handle: int, prefix: str, back: int) -> None:
        """From any point of the past: what the log has after it, or a RESYNC when that was dropped."""
        past = sorted({self.start, *(change.entry.revision for change in self.log)})
        after = past[-1 - min(back, len(past) - 1)]
        wanted = [c for c in self.log if c.entry.revision > after and c.entry.key.startswith(prefix)]
        if after < self.dropped:
            wanted = [Change(ChangeKind.RESYNC, Entry(prefix, b"", self.revision))]

        async def take() -> None:
            changes = self.planes[handle].watch(prefix, after)
            async with asyncio.timeout(20):
                found = [await anext(changes) for _ in wanted]
            await changes.aclose()
            assert found == wanted

        self.runner.run(take())

    @invariant()
    def the_log_and_the_model_agree(self) -> None:
        assert all(entry.revision <= self.revision for entry in self.model.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ENGINES)
def test_any_sequence_of_calls_answers_as_the_model_does(kind: str) -> None:
    """Goal: one meaning, whatever the engine. Method: a hypothesis state machine over calls on two handles."""
    machine = type("MachineOfOne", (Machine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES[kind], stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
