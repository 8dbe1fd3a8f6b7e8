"""Main programs of nodes that have one thing wrong with them, for `NodeProcess(program=...)`; SIGUSR1 sets it off."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness import NodeProcess

__all__ = ["DYING", "FULL_DISK", "HUNG_DISK", "JUMPING_CLOCK", "SNAPSHOTS", "doom"]

JUMPING_CLOCK = """
import signal, sys, time
real, real_ns, shift = time.time, time.time_ns, [SHIFT_S]
time.time = lambda: real() + shift[0]
time.time_ns = lambda: real_ns() + shift[0] * 1_000_000_000
def jump(*_):
    shift[0] = -shift[0]
signal.signal(signal.SIGUSR1, jump)
from ucxkv.cli import main
sys.argv[0] = "ucxkv"
main()
"""
"""A node whose wall clock is SHIFT_S off, and on SIGUSR1 as much the other way."""

FULL_DISK = """
import errno, signal, sys
from ucxkv.journal.files import FolderFiles
is_full = [False]
def around(name):
    inner = getattr(FolderFiles, name)
    def call(*arguments, **options):
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(*arguments, **options)
    setattr(FolderFiles, name, call)
around("FAILING")
def fill(*_):
    is_full[0] = True
signal.signal(signal.SIGUSR1, fill)
from ucxkv.cli import main
sys.argv[0] = "ucxkv"
main()
"""
"""A node whose journal finds its disk full from SIGUSR1 on; FAILING: write or sync."""

HUNG_DISK = """
import asyncio, signal, sys
from ucxkv.node.disk import tier
from ucxkv.tiers.engines.native import NativeEngine
tier._CLOSE_S = tier._FLUSH_S = 1.0
hangs, submit, waiting = [False], NativeEngine.submit, []
def hung(engine, ops):
    if not hangs[0]:
        return submit(engine, ops)
    waiting.append(asyncio.get_running_loop().create_future())
    return waiting[-1]
async def never(engine, future):
    await asyncio.get_running_loop().create_future()
NativeEngine.submit = hung
def hang(*_):
    hangs[0] = True
    NativeEngine.settle = never
signal.signal(signal.SIGUSR1, hang)
from ucxkv.cli import main
sys.argv[0] = "ucxkv"
main()
"""
"""A node whose drives answer nothing from SIGUSR1 on."""

SNAPSHOTS = """
import sys
from ucxkv.node.shards import journaling
journaling._SNAPSHOT_BYTES_MIN = 2048
journaling._SNAPSHOT_GROWTH = 1
from ucxkv.cli import main
sys.argv[0] = "ucxkv"
main()
"""
"""A node that writes snapshots of its journal often."""

DYING = """
import sys
from tests.cluster.dying_node import main
sys.argv.insert(1, "STEPS_FILE")
main()
"""
"""A node that dies so many steps of its work after SIGUSR1 as a file says; see tests/cluster/dying_node.py."""


def doom(node: NodeProcess, steps_file: Path, steps: int) -> None:
    """Have a node with the program DYING die so many steps on."""
    steps_file.write_text(str(steps))
    node.process.send_signal(signal.SIGUSR1)
