"""The program of `ucxkv` with one thing more: on SIGUSR1 it dies, as by kill -9, so many steps later as a file says.

    python -m tests.cluster.dying_node FILE node --name ...

A step is the moment before or after one of the calls that puts, deletes, evictions, the replicated log and the journal
are made of. Nothing of the product is changed: its methods are wrapped from outside."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["STEPS"]

STEPS = (
    "ucxkv.node.requests:Requests._carry_out",
    "ucxkv.node.space:Space.take",
    "ucxkv.node.space:Space.refill",
    "ucxkv.node.store:HostStore.handle",
    "ucxkv.journal.journal:Journal.append",
    "ucxkv.journal.files:FolderFiles.write",
    "ucxkv.journal.files:FolderFiles.sync",
    "ucxkv.replication.replica:Replica.handle",
    "ucxkv.transport.control:ControlConnection.reply",
)
"""Where it may die; a name that does not exist is an error."""


class Countdown:
    """left: steps to go; 0 while it is not to die."""

    def __init__(self, path: Path) -> None:
        self.left = 0
        self._path = path

    def start(self, *_: object) -> None:
        """From now on."""
        self.left = int(self._path.read_text())

    def step(self) -> None:
        """One more."""
        if self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, name: str) -> None:
        """Make a step before and after each call of `module:Class.method`."""
        module, _, path = name.partition(":")
        owner_name, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        inner = getattr(owner, method)

        def call(*arguments: Any, **options: Any) -> Any:
            self.step()
            result = inner(*arguments, **options)
            self.step()
            return result

        setattr(owner, method, call)


def main() -> None:
    """See the module."""
    countdown = Countdown(Path(sys.argv[1]))
    for name in STEPS:
        countdown.wrap(name)
    signal.signal(signal.SIGUSR1, countdown.start)
    sys.argv[:2] = ["ucxkv"]
    from ucxkv.cli import main as run

    run()


if __name__ == "__main__":
    main()
