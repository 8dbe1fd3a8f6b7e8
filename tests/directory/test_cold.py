"""Blocks on disk in the directory, one event at a time."""

from __future__ import annotations

import numpy as np

from tests.directory.test_ranking import Shell
from ucxkv.directory import events, tiering


def copy(shell: Shell, number: int) -> None:
    """A copy of this block is written."""
    slot = shell.slot(number)
    generation = shell.core.words.generation(slot)
    shell.handles += 1
    event = tiering.Copied(
        np.array([slot], np.int32), np.array([generation], np.uint64), np.array([shell.handles], np.uint32)
    )
    assert shell.core.handle(event, shell.now).reply.taken.all()


def test_what_goes_with_a_block_that_memory_was_needed_of_was_evicted_and_not_lost() -> None:
    """Method: a block without a copy has one below it that is on disk only; both go for memory; each is counted once,
    as evicted."""
    shell = Shell("lru", 64)
    shell.put(0, 2)
    copy(shell, 1)
    shell.evict(1)
    assert shell.core.cold.blocks == 1 and shell.slot(1) >= 0
    reply = shell.core.handle(events.Evict(64), shell.now).reply
    assert reply.blocks == 2 and shell.core.blocks == shell.core.cold.blocks == 0
    assert (shell.core.totals["evicted"], shell.core.totals["lost"]) == (2, 0)
    shell.core.check()
