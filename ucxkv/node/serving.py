"""Until when this node may answer for its shard: the lease that its leader code holds, and the epoch it holds it in.

Invariants
  - The lease's end is in the slot table's header, where every reader of the table looks after it has read: clients that
    map it, the data thread, this process. Requests on control connections are checked here, before and after.
  - Who sets it counts it from before it asked for it, on this machine's CLOCK_MONOTONIC. No timer ends it: a node that
    was stopped past the end is refused by the clock, whoever of it runs first when it wakes.
  - A lease is set again under one epoch only while nobody else can have led in between; else `begin_epoch` comes first.
  - Without a cluster the lease has no end, and nothing here costs more than a comparison.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ucxkv import errors
from ucxkv.directory import FOREVER, PutStatus
from ucxkv.protocol import messages as m

if TYPE_CHECKING:
    from ucxkv.directory import SlotReader, SlotTable
    from ucxkv.directory.slots_twin import TwinReader, TwinTable
    from ucxkv.protocol import Message

__all__ = ["LED", "ServingLease"]

LED = frozenset(
    (m.Put, m.PutPart, m.Grant, m.LeaseKeys, m.Warm, m.Renew, m.Touch, m.Delete, m.Damaged, m.ListKeys)
)  # fmt: skip
"""Requests that only the leader of the shard may answer. What gives memory back, and what is about this node alone, is
answered by any."""


class ServingLease:
    """The serving lease of one node. table, reader: its slot table, and the reader that its own threads use."""

    def __init__(self, table: SlotTable | TwinTable, reader: SlotReader | TwinReader) -> None:
        self._table = table
        self._reader = reader
        self.end_ns = FOREVER
        """`time.monotonic_ns()` of its end; FOREVER: none, 0: not held."""

    def until(self, end_ns: int) -> None:
        """Serve until this moment and not after it. Seen by every reader of the table at once."""
        self._table.set_lease(end_ns)
        self.end_ns = end_ns

    def begin_epoch(self, epoch: int) -> None:
        """Go over to a new epoch with what is visible; the lease is over until it is set again.

        Clients connect again, since what they read here is not answered to them but in the epoch they were welcomed in.
        """
        self.end_ns = 0
        self._table.set_epoch(epoch)
        self._reader.follow()

    @property
    def is_running(self) -> bool:
        """Whether this node may answer at this moment."""
        return self.end_ns == FOREVER or time.monotonic_ns() < self.end_ns

    def refusal(self) -> errors.Unavailable:
        """What is told to those who ask meanwhile."""
        return errors.Unavailable(
            "this node's lease is over: it may not answer until it has it again; retry, or recompute",
            epoch=self._table.epoch,
        )

    def acknowledged(self, answer: Message) -> Message:
        """`answer`, unless the lease ended while it was made: then a put is not acknowledged and the rest refused.

        The put may have happened all the same, as one whose answer is lost. Extents that come with it are not lost.
        """
        if self.is_running:
            return answer
        match answer:
            case m.PutDone():
                return m.PutDone(
                    status=bytes((PutStatus.UNAVAILABLE,)) * len(answer.status),
                    shard=answer.shard,
                    epoch=answer.epoch,
                    index=answer.index,
                    refill_capacity=answer.refill_capacity,
                    refill_regions=answer.refill_regions,
                    refill_offsets=answer.refill_offsets,
                    retry_after_ms=answer.retry_after_ms,
                )
            case m.Granted():
                return answer
        raise self.refusal()
