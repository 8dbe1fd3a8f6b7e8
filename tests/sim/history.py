"""What clients did and saw: a recorded history of operations on chains.

Order is the order of the calls of this module (one thread, so it is exact); nanoseconds are for people. An operation
that was called and never returned is of unknown outcome: it may have taken effect at any moment after its call, or it
may still do so, or never."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNKNOWN", "History", "Operation"]


class Unknown:
    """The result of an operation whose outcome nobody was told."""

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()


@dataclass(slots=True)
class Operation:
    """One call of a client. called and returned are positions in the history; returned is None while unknown."""

    client: str
    chain: str
    name: str
    argument: Any
    called: int
    called_ns: int = 0
    returned: int | None = None
    returned_ns: int | None = None
    result: Any = UNKNOWN

    @property
    def is_known(self) -> bool:
        """Whether the client was told its result."""
        return self.returned is not None

    def __str__(self) -> str:
        until = "..." if self.returned_ns is None else f"{self.returned_ns / 1e6:.3f}"
        return (
            f"{self.called_ns / 1e6:10.3f} to {until:>10} ms  {self.client:<10} {self.chain:<8} "
            f"{self.name}({self.argument}) -> {self.result}"
        )


@dataclass(slots=True)
class History:
    """The operations in the order of their calls."""

    operations: list[Operation] = field(default_factory=list)
    position: int = 0

    def call(self, client: str, chain: str, name: str, argument: Any, now_ns: int = 0) -> Operation:
        """A client calls; give the answer to `returns`."""
        self.position += 1
        operation = Operation(client, chain, name, argument, self.position, now_ns)
        self.operations.append(operation)
        return operation

    def returns(self, operation: Operation, result: Any, now_ns: int = 0) -> None:
        """The client has its answer."""
        assert operation.returned is None, f"two answers: {operation}"
        self.position += 1
        operation.returned = self.position
        operation.returned_ns = now_ns
        operation.result = result

    def withdraw(self, operation: Operation) -> None:
        """It surely had no effect and told nothing (refused): the history is the same without it."""
        self.operations.remove(operation)

    def of_chain(self, chain: str) -> list[Operation]:
        """The operations on one chain."""
        return [operation for operation in self.operations if operation.chain == chain]

    def chains(self) -> list[str]:
        """All chains, in the order of their first operation."""
        return list(dict.fromkeys(operation.chain for operation in self.operations))


def listing(operations: Iterable[Operation]) -> str:
    """For people."""
    return "\n".join(str(operation) for operation in operations)
