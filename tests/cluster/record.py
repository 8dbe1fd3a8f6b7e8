"""What clients in several processes asked and were told, each in a log of its own, and the history read from them.

A line before a call and one after it, each written whole by one system call. Times are CLOCK_MONOTONIC, which all
processes of a machine share: taken before the call is written and after its answer came, so that the operation lies
between them. A call of several blocks is one operation a block, all within the same time.

    {"call": 7, "ns": ..., "who": "w1.0", "chain": "go.own3.2.s5d", "ops": [["put", [3, "w1.0-41"]], ...]}
    {"call": 7, "ns": ..., "told": ["stored", ...]}

told: null for what surely had no effect and told nothing (it is no part of the history), "?" for an unknown outcome."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sim.history import Operation

__all__ = ["ABSENT", "UNTOLD", "WRONG", "Log", "Recorded"]

UNTOLD = "?"
ABSENT = ""
"""What a get of a block that is not visible is told."""

WRONG = "!"
"""A get was told bytes that nobody put there; what they are follows."""


class Log:
    """One process's log."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = 0

    def call(self, who: str, chain: str, operations: Sequence[tuple[str, Any]]) -> int:
        """Somebody is about to call; the number is for `told`."""
        self._calls += 1
        ns = time.monotonic_ns()
        self._write({"call": self._calls, "ns": ns, "who": who, "chain": chain, "ops": operations})
        return self._calls

    def told(self, call: int, results: Sequence[Any]) -> None:
        """The answer came, one result an operation."""
        self._write({"call": call, "ns": time.monotonic_ns(), "told": results})

    def _write(self, words: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(words).encode() + b"\n")

    def close(self) -> None:
        """No more calls."""
        os.close(self._file)


class Recorded:
    """The history: chain name -> its operations. `read` takes in what the logs have got since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._open: dict[tuple[Path, int], list[Operation]] = {}
        self.chains: dict[str, list[Operation]] = {}

    @property
    def count(self) -> int:
        """Operations in the history."""
        return sum(len(operations) for operations in self.chains.values())

    @property
    def unknown(self) -> int:
        """Those of unknown outcome."""
        return sum(not one.is_known for operations in self.chains.values() for one in operations)

    def read(self) -> None:
        """Whole lines only; a writer may be at work."""
        for path in sorted(self._folder.glob("*.ops")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if line.endswith(b"\n"):
                        self._read[path] = self._read.get(path, 0) + len(line)
                        self._take(path, json.loads(line))

    def _take(self, path: Path, said: dict[str, Any]) -> None:
        number, ns = said["call"], said["ns"]
        if "ops" in said:
            made = [
                Operation(said["who"], said["chain"], name, tuple(arg) if isinstance(arg, list) else arg, ns, ns)
                for name, arg in said["ops"]
            ]
            self._open[path, number] = made
            self.chains.setdefault(said["chain"], []).extend(made)
            return
        for operation, result in zip(self._open.pop((path, number)), said["told"], strict=True):
            if result is None:
                mine = self.chains[operation.chain]
                del mine[next(at for at in range(len(mine) - 1, -1, -1) if mine[at] is operation)]
            elif result != UNTOLD:
                operation.returned = operation.returned_ns = ns
                operation.result = result
