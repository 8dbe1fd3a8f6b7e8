"""Many batches at a time against a dict of what the file must hold: a state machine over both io engines."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from tests.tiers.transfers import Memory, faults, make_engine, operations, uring_refused
from ucxkv.tiers.io import EngineBusy, OpKind

CELL, CELLS, MAX_OPS = 1000, 40, 64


class _Flight:
    """A batch under way: its future, its memory, the cells that it touches and what they are to hold."""

    def __init__(
        self, future: asyncio.Future[NDArray[np.int64]], memory: Memory, kind: OpKind, cells: list[int]
    ) -> None:
        self.future, self.memory, self.kind, self.cells = future, memory, kind, cells


class EngineMachine(RuleBasedStateMachine):
    """Cells of a file in memory; a write's cells belong to it alone until it is done, as the callers' rule is."""

    which = "threads"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = make_engine(self.which, max_inflight_bytes=9 * CELL, max_ops=MAX_OPS, workers=3)
        self.fd = os.memfd_create("cells")
        os.ftruncate(self.fd, CELL * CELLS)
        self.file = self.engine.attach(self.fd, direct=False)
        self.model: dict[int, bytes] = {}
        self.flights: list[_Flight] = []

    def _run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def _start(self, kind: OpKind, cells: list[int], memory: Memory) -> None:
        ops = operations(
            [(memory.address + at * CELL, cell * CELL, CELL, self.file, kind) for at, cell in enumerate(cells)]
        )

        async def submit() -> asyncio.Future[NDArray[np.int64]] | None:
            try:
                return self.engine.submit(ops)
            except EngineBusy:
                return None

        room = self.engine.pending + len(cells) <= MAX_OPS
        future = self._run(submit())
        assert (future is not None) == room
        if future is not None:
            self.flights.append(_Flight(future, memory, kind, cells))

    def _busy(self, kinds: tuple[OpKind, ...]) -> set[int]:
        return {cell for flight in self.flights if flight.kind in kinds for cell in flight.cells}

    @rule(cells=st.lists(st.integers(0, CELLS - 1), min_size=1, max_size=25, unique=True), seed=st.integers(0, 999))
    def write(self, cells: list[int], seed: int) -> None:
        """Start a write of cells that nobody else uses."""
        free = [cell for cell in cells if cell not in self._busy((OpKind.READ, OpKind.WRITE))]
        if free:
            memory = Memory(len(free) * CELL)
            memory.bytes[:] = np.random.default_rng(seed).integers(0, 256, memory.bytes.nbytes, np.uint8)
            self._start(OpKind.WRITE, free, memory)

    @rule(cells=st.lists(st.integers(0, CELLS - 1), min_size=1, max_size=25))
    def read(self, cells: list[int]) -> None:
        """Start a read of cells that nobody writes, some of them twice."""
        still = [cell for cell in cells if cell not in self._busy((OpKind.WRITE,))]
        if still:
            self._start(OpKind.READ, still, Memory(len(still) * CELL, fill=0x5A))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), cancel=st.booleans())
    def end(self, data: st.DataObject, cancel: bool) -> None:
        """Await one batch, or cancel it and settle it; then what it did is known."""
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        if cancel:
            flight.future.cancel()
            self._run(self.engine.settle(flight.future))
        else:
            self._run(asyncio.wait({flight.future}))
        self._check(flight)

    def _check(self, flight: _Flight) -> None:
        assert flight.memory.is_guarded
        for at, cell in enumerate(flight.cells):
            mine = flight.memory.bytes[at * CELL : (at + 1) * CELL].tobytes()
            if flight.kind is OpKind.WRITE:
                self.model[cell] = mine
            assert mine == self.model.get(cell, bytes(CELL))
        if not flight.future.cancelled():
            assert flight.future.result().tolist() == [CELL] * len(flight.cells)

    @rule(most=st.sampled_from([0, 1, 333, 999]))
    def shorten(self, most: int) -> None:
        """From now on the kernel is asked for so much at a time."""
        faults(self.engine).ask_at_most = most

    @rule()
    def sync(self) -> None:
        """A sync among batches."""
        self._run(self.engine.sync(self.file))

    @invariant()
    def keeps_its_bounds(self) -> None:
        """At no time are there more operations or bytes than allowed."""
        assert self.engine.pending <= MAX_OPS and self.engine.peak_bytes <= 9 * CELL

    def teardown(self) -> None:
        """All ends; the file holds what the model says."""
        self._run(self.engine.aclose())
        for flight in self.flights:
            assert flight.future.done()
            self._check(flight)
        for cell, want in self.model.items():
            assert os.pread(self.fd, CELL, cell * CELL) == want
        os.close(self.fd)
        self.loop.close()


class UringMachine(EngineMachine):
    """The same on io_uring."""

    which = "io_uring"


ENOUGH = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_threads_behave_like_the_model() -> None:
    """Goal: no interleaving of batches loses or misplaces bytes. Method: EngineMachine on threads."""
    EngineMachine.TestCase.settings = ENOUGH
    case = EngineMachine.TestCase()
    case.runTest()


def test_io_uring_behaves_like_the_model() -> None:
    """Goal: the same on io_uring. Method: the same machine."""
    if why := uring_refused():
        pytest.skip(f"no io_uring here: {why}")
    UringMachine.TestCase.settings = ENOUGH
    case = UringMachine.TestCase()
    case.runTest()
