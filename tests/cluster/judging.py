"""What is wrong with a history of a fault run, and how long shards stood still.

Every chain must be linearizable (the search and the model of the simulation, `tests.sim.linear`); beside that, in
plainer words and counted, what the last reading of everything may not find:

    lost   a durable block whose put was acknowledged (stored or already), not deleted since, and absent
    back   a durable block whose delete was acknowledged, not put since, and there
    hole   a durable block without the one before it (of a cache chain the search finds it: the auditor reads block
           after block)
    wrong  bytes that nobody put there, at any time
    unread what could not be read in the end at all"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.cluster.chains import Chain
from tests.cluster.record import ABSENT, WRONG
from tests.sim.history import Operation
from tests.sim.linear import ChainModel, TooHard, check

__all__ = ["AUDITOR", "UNSEEN", "Findings", "ServedChain", "failovers", "judge"]

AUDITOR = "auditor"
"""Whose gets are the last reading."""

UNSEEN = "*"
"""In the place of contents that nobody read."""

_CONFIGURATIONS = 100_000
_STANDSTILL_NS = 120 * 10**9


class ServedChain(ChainModel):
    """The model with what a client can ask at one moment: more than `look`, which needs two calls.

    match(n)  how many of the first n blocks are the longest visible prefix.
    get(i)    the content of block i, ABSENT when it is not visible.
    """

    def step(self, state: tuple[Any, ...], operation: Operation) -> Sequence[tuple[Any, ...]]:
        """See Model."""
        if operation.name == "match":
            return self._at_most(state, operation, min(len(state), operation.argument), operation.result)
        if operation.name == "get":
            index = operation.argument
            if operation.is_known and operation.result != ABSENT:
                return [state] if state[index : index + 1] == (operation.result,) else []
            return self._at_most(state, operation, len(state), min(index, len(state)))
        return super().step(state, operation)

    def _at_most(
        self, state: tuple[Any, ...], operation: Operation, length: int, found: int
    ) -> Sequence[tuple[Any, ...]]:
        """`found` blocks where `length` were to be found: of class cache the others may have left."""
        if not operation.is_known or found == length:
            return [state]
        return [state[:found]] if found < length and not self.is_durable else []


@dataclass(slots=True)
class Findings:
    """counts: by kind, see the module; `order` are histories that are not linearizable, `undecided` those over the
    search's bound. texts: one a violation."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    acknowledged: int = 0
    operations: int = 0
    unknown: int = 0

    @property
    def violations(self) -> int:
        """Of all kinds."""
        return sum(self.counts.values())

    def add(self, kind: str, text: str) -> None:
        """One violation."""
        self.counts[kind] += 1
        self.texts.append(f"{kind}: {text}")


def judge(chains: Mapping[str, Sequence[Operation]], *, is_read: bool = True) -> Findings:
    """Everything that is wrong with these chains. is_read: the auditor has read all of them in the end."""
    found = Findings()
    for name, operations in chains.items():
        chain = Chain(name)
        found.operations += len(operations)
        found.unknown += sum(not one.is_known for one in operations)
        for one in operations:
            if one.name == "get" and isinstance(one.result, str) and one.result.startswith(WRONG):
                found.add("wrong", str(one))
        if chain.is_durable:
            acknowledged = _Acknowledged(operations)
            found.acknowledged += acknowledged.count
            if is_read:
                acknowledged.compare(name, operations, found)
                _find_holes(name, operations, found)
        try:
            verdict = check(
                _plainer(operations, is_durable=chain.is_durable),
                ServedChain(is_durable=chain.is_durable),
                configurations_limit=_CONFIGURATIONS,
            )
        except TooHard as error:
            found.add("undecided", f"chain {name}: {error}")
            continue
        if not verdict.is_linearizable:
            found.add("order", f"chain {name} of {len(operations)} operations is {verdict}")
    return found


def _plainer(operations: Sequence[Operation], *, is_durable: bool) -> list[Operation]:
    """The same question to the search, with fewer orders to try: contents that nobody ever read are one and the same,
    and of a cache chain, whose blocks may leave at any moment anyway, a delete of unknown outcome says nothing."""
    seen = {one.result for one in operations if one.name == "get" and one.is_known}
    found = []
    for one in operations:
        if one.name == "put" and one.argument[1] not in seen:
            one = replace(one, argument=(one.argument[0], UNSEEN))
        if is_durable or one.is_known or one.name != "delete":
            found.append(one)
    return found


def _last_reading(operations: Iterable[Operation]) -> dict[int, str]:
    """Position -> what the auditor was told last."""
    return {
        one.argument: one.result for one in operations if one.client == AUDITOR and one.name == "get" and one.is_known
    }


class _Acknowledged:
    """What a durable chain's writers were told. count: blocks that a put was told to be stored."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.count = 0
        self._there: dict[int, list[Operation]] = {}
        self._gone: dict[int, list[Operation]] = {}
        self._puts: dict[int, list[Operation]] = {}
        self._deletes: dict[int, list[Operation]] = {}
        for one in operations:
            if one.name == "put":
                at = one.argument[0]
                if one.result in ("stored", "already"):
                    self.count += one.result == "stored"
                    for above in range(at + 1):  # a block's acknowledgement is one of all that it stands on
                        self._there.setdefault(above, []).append(one)
                if one.result == "stored" or not one.is_known:
                    self._puts.setdefault(at, []).append(one)
            elif one.name == "delete":
                if one.result in ("deleted", "absent"):
                    self._gone.setdefault(one.argument, []).append(one)
                if one.result == "deleted" or not one.is_known:
                    self._deletes.setdefault(one.argument, []).append(one)

    def compare(self, name: str, operations: Sequence[Operation], found: Findings) -> None:
        """Against the last reading."""
        read = _last_reading(operations)
        for at in sorted({*self._there, *self._gone} - read.keys()):
            found.add("unread", f"chain {name}, block {at}")
        for at, result in read.items():
            told, undone, kind = self._there, self._deletes, "lost"
            if result != ABSENT:
                told, undone, kind = self._gone, self._puts, "back"
            word = _not_undone(told.get(at, ()), undone.get(at, ()))
            if word is not None:
                found.add(kind, f"chain {name}, block {at}: {word}; the last reading: {result!r}")


def _not_undone(told: Iterable[Operation], undone: Iterable[Operation]) -> Operation | None:
    """A word that nothing can have undone: all that might have was over before it was asked for."""
    ends = [one.returned for one in undone]
    if None in ends:
        return None
    last = max((end for end in ends if end is not None), default=0)
    return next((word for word in told if word.called >= last), None)


def _find_holes(name: str, operations: Sequence[Operation], found: Findings) -> None:
    read = _last_reading(operations)
    for at in sorted(read):
        if at and read[at] != ABSENT and read.get(at - 1) == ABSENT:
            found.add("hole", f"chain {name}, block {at} is there and block {at - 1} is not")


def failovers(chains: Mapping[str, Sequence[Operation]], deaths: Sequence[tuple[int, Iterable[int]]]) -> list[float]:
    """Seconds from each death (ns, the shards that the dead led) to the first durable put that was asked of such a
    shard since and stored, a value a shard; those that nobody put to in two minutes are left out."""
    stored: dict[int, list[tuple[int, int]]] = {}
    for name, operations in chains.items():
        chain = Chain(name)
        if chain.is_durable:
            stored.setdefault(chain.shard, []).extend(
                (one.called, one.returned)
                for one in operations
                if one.name == "put" and one.result == "stored" and one.returned is not None
            )
    found = []
    for died_ns, shards in deaths:
        for shard in shards:
            since = [returned for called, returned in stored.get(shard, ()) if called >= died_ns]
            if since and min(since) - died_ns < _STANDSTILL_NS:
                found.append((min(since) - died_ns) / 1e9)
    return found
