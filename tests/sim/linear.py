"""Is a recorded history linearizable? The search of Wing and Gong with Lowe's memory of what was tried, and the model
of a chain of blocks.

An operation takes effect at one moment between its call and its return; one of unknown outcome at any moment after its
call, or never. The search places operations one by one: next may come only what was called before the earliest return
among those not yet placed. A pair (known operations placed, state) is tried again only with unknown ones left that were
used up before. A mere read (its answer says that it changed nothing) that is possible now is placed at once and never
tried elsewhere: any order that places it later stays valid when it is moved here.

The chain: its state is the tuple of the visible blocks' contents, from the root on. A `cache` chain's tail may leave
at any moment. Such departures are placed as late as possible: from a longer state one can always reach the shorter
ones, so nothing is lost by waiting until an answer needs them.

Source of the idea: Wing and Gong, "Testing and verifying concurrent objects" (1993); Lowe, "Testing for
linearizability" (2017)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.sim.history import Operation

__all__ = ["ChainModel", "Model", "TooHard", "Verdict", "check"]


class TooHard(AssertionError):
    """The search passed its bound: the test's histories are too long or too concurrent. A fault of the test's setup."""


class Model(Protocol):
    """A sequential object."""

    def initial(self) -> Hashable:
        """The state before any operation."""
        ...

    def step(self, state: Any, operation: Operation) -> Sequence[Any]:
        """The states in which `operation` may leave the object while answering its result; none if it cannot."""
        ...

    def is_read(self, operation: Operation) -> bool:
        """Whether its result says that it changed nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """is_linearizable; else `placed`: the longest order found, `state` where it led, `stuck` what cannot follow."""

    is_linearizable: bool
    configurations: int
    placed: tuple[Operation, ...] = ()
    state: Any = None
    stuck: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        if self.is_linearizable:
            return "linearizable"
        lines = ["not linearizable; the longest order found:", *(f"  {operation}" for operation in self.placed)]
        lines += [f"leads to {self.state}; none of these can follow:", *(f"  {operation}" for operation in self.stuck)]
        return "\n".join(lines)


def check(operations: Sequence[Operation], model: Model, *, configurations_limit: int = 200_000) -> Verdict:
    """Search for an order. Raises TooHard past `configurations_limit` pairs of (placed, state)."""
    ops = sorted(operations, key=lambda operation: operation.called)
    count = len(ops)
    called = [op.called for op in ops]
    known = [op.is_known for op in ops]
    reads = [op.is_known and model.is_read(op) for op in ops]
    alike: dict[Hashable, int] = {}  # an unknown operation's name and argument -> the last one that is alike
    before = [-1] * count
    for at, op in enumerate(ops):
        if not known[at]:
            before[at] = alike.get((op.name, op.argument), -1)
            alike[op.name, op.argument] = at
    need = sum(1 << at for at in range(count) if known[at])
    by_return = sorted((op.returned, at) for at, op in enumerate(ops) if op.returned is not None)
    step = model.step
    # A configuration: placed (bits), state, how many of by_return are surely placed, the order that led here.
    Trail = tuple[int, Any] | None
    stack: list[tuple[int, Any, int, Any]] = [(0, model.initial(), 0, None)]
    seen: dict[tuple[int, Any], list[int]] = {}  # (known placed, state) -> unknown placed, none within another
    tried = 0
    best: tuple[int, int, Any, Any] = (-1, 0, None, None)
    while stack:
        placed, state, returned, trail = stack.pop()
        moved = True
        candidates: list[int] = []
        while moved:  # place the reads that are possible now
            moved = False
            if placed & need == need:
                return Verdict(True, tried)
            while returned < len(by_return) and placed >> by_return[returned][1] & 1:
                returned += 1
            horizon = by_return[returned][0] or 0
            candidates = []
            for at in range(count):
                if called[at] > horizon:
                    break
                if placed >> at & 1:
                    continue
                if reads[at] and state in step(state, ops[at]):
                    placed |= 1 << at
                    trail = (at, trail)
                    moved = True
                elif before[at] < 0 or placed >> before[at] & 1:
                    candidates.append(at)
        used = placed & ~need
        earlier = seen.setdefault((placed & need, state), [])
        if any(other & used == other for other in earlier):
            continue
        earlier.append(used)
        tried += 1
        if tried > configurations_limit:
            raise TooHard(f"{count} operations, over {configurations_limit} configurations: make histories smaller")
        size = (placed & need).bit_count()
        if size > best[0]:
            best = (size, placed, state, trail)
        # The stack's top is tried first: known operations, those that return earliest before the others.
        candidates.sort(key=lambda at: (known[at], -(ops[at].returned or 0)))
        for at in candidates:
            for after in step(state, ops[at]):
                if after != state or known[at]:
                    stack.append((placed | 1 << at, after, returned, (at, trail)))
    order: list[Operation] = []
    at_trail: Trail = best[3]
    while at_trail is not None:
        order.append(ops[at_trail[0]])
        at_trail = at_trail[1]
    left = [(op.returned, op) for at, op in enumerate(ops) if known[at] and not best[1] >> at & 1]
    horizon = min(returned for returned, _ in left if returned is not None)
    stuck = tuple(op for _, op in left if op.called <= horizon)
    return Verdict(False, tried, tuple(reversed(order)), best[2], stuck)


class ChainModel:
    """One chain of blocks. is_durable: its blocks leave only by `delete`; else its tail may leave at any moment.

    put((i, content))  "stored": block i was absent and its parent visible, now it is visible with this content.
                       "already": block i is visible, with whatever content. "order": its parent is not visible.
    delete(i)          "deleted": block i was the tail and is gone. "kept": it has a child. "absent": it is not visible.
    look(n)            the contents of the longest visible prefix of the first n blocks, a tuple.
    """

    def __init__(self, *, is_durable: bool) -> None:
        self.is_durable = is_durable

    def initial(self) -> tuple[Any, ...]:
        """Nothing is visible."""
        return ()

    def step(self, state: tuple[Any, ...], operation: Operation) -> Sequence[tuple[Any, ...]]:
        """See Model."""
        if operation.name == "put":
            index, content = operation.argument
            return self._put(state, index, content, operation)
        if operation.name == "delete":
            return self._delete(state, operation.argument, operation)
        assert operation.name == "look", operation
        return self._look(state, operation.argument, operation)

    def is_read(self, operation: Operation) -> bool:
        """See Model. A put that stored is none, also where its content stands already: that block may have left."""
        return operation.result not in ("stored", "deleted")

    def _put(self, state: tuple[Any, ...], index: int, content: Any, operation: Operation) -> list[tuple[Any, ...]]:
        length = len(state)
        shrinks = not self.is_durable and length > index
        stored = [(*state[:index], content)] if length == index or shrinks else []
        if not operation.is_known:
            return [*stored, state]
        if operation.result == "stored":
            return stored
        if operation.result == "already":
            return [state] if length > index else []
        if operation.result == "order":
            if length < index:
                return [state]
            return [] if self.is_durable or index == 0 else [state[: index - 1]]
        return []

    def _delete(self, state: tuple[Any, ...], index: int, operation: Operation) -> list[tuple[Any, ...]]:
        length = len(state)
        cut = [state[:index]] if length == index + 1 or (length > index and not self.is_durable) else []
        if not operation.is_known:
            return [*cut, state]
        if operation.result == "deleted":
            return cut
        if operation.result == "kept":
            return [state] if length > index + 1 else []
        if operation.result == "absent":
            if length <= index:
                return [state]
            return [] if self.is_durable else [state[:index]]
        return []

    def _look(self, state: tuple[Any, ...], limit: int, operation: Operation) -> list[tuple[Any, ...]]:
        if not operation.is_known:
            return [state]
        found = tuple(operation.result)
        if found == state[:limit]:
            return [state]
        if not self.is_durable and len(found) < limit and found == state[: len(found)]:
            return [found]
        return []
