"""Room in a node's memory and in its table: blocks go, or leave memory for the disk, when others are to come.

Room is made in portions of `BLOCKS` blocks, each by a call of its own from the loop, so that it stops for well under a
millisecond however much is asked for. Who found no memory has the first portion made at once, who found some but left
little has not, and the rest follows by `go_on` in the turns right afterwards. An extent comes back after the grace in
any case, so whoever found none asks again, and by then the portions are through.

Invariants
- What is owed counts as on its way: asking twice for the same room makes no more of it, and what is free, leaving and
  owed together never exceeds what somebody asked for, the last portion's last block aside.
- What is owed is given up when there is nothing left to evict, or when the disk is about to let memory go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucxkv.directory import events, tiering
from ucxkv.node.space import OWN_SEGMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.node.store import HostStore

__all__ = ["BLOCKS", "ROUND_BYTES", "Room"]

BLOCKS = 64
"""That leave memory in one turn: 0.4 ms with the policy that costs most."""
_BACKLOG_SHARE = 8
"""One less for so many blocks that the policy has to be told of first, which takes as long, but a quarter of them."""
_LOOKS = 4 * BLOCKS
"""At so many that may not go now a turn looks besides."""
ROUND_BYTES = 256 << 20
"""So much is evicted for one that asks, at most."""
_SLOTS_SHARE = 128
"""Of a table that is full, so large a part is freed at once of blocks that are on disk only."""


class Room:
    """See the module. One a store, which makes it. on_due: told when `go_on` has something to do."""

    def __init__(self, store: HostStore, on_due: Callable[[int], None]) -> None:
        self._store, self._on_due = store, on_due
        self.owed = 0
        """Bytes that are still to be evicted."""
        self._target = 0
        """The most that was asked for since nothing was owed."""

    def evict(self, nbytes: int, now_ns: int) -> int:
        """See to it that `nbytes` are free soon, and begin; bytes that began to leave memory now."""
        self._owe(nbytes)
        return self.go_on(now_ns)

    def evict_soon(self, nbytes: int) -> None:
        """The same, and begin in the next turn."""
        self._owe(nbytes)
        if self.owed:
            self._on_due(0)

    def _owe(self, nbytes: int) -> None:
        self._target = max(self._target, nbytes) if self.owed else nbytes
        self.owed += max(0, min(nbytes - self._coming() - self.owed, ROUND_BYTES))

    def go_on(self, now_ns: int) -> int:
        """Evict the next portion of what is owed."""
        self.owed = max(0, min(self.owed, self._target - self._coming()))
        if not self.owed:
            return 0
        freed, is_cut = self._portion(self.owed, now_ns)
        self.owed = max(0, self.owed - freed) if is_cut else 0
        return freed

    def leaving_bytes(self) -> int:
        """Bytes of hidden blocks that are free soon; those that leases hold may be so for long."""
        return self._store.directory.leaving.soon_bytes

    def _coming(self) -> int:
        return self._store.slabs.free_bytes + self.leaving_bytes()

    def _portion(self, needed: int, now_ns: int) -> tuple[int, bool]:
        """(bytes that began to leave memory, whether there is more to evict)."""
        store, freed = self._store, 0
        if store.disk is not None:
            gone = self._ask(needed, now_ns, is_hiding=False)
            freed = gone.demoted
            if freed >= needed or gone.is_cut or store.disk.is_working(now_ns):
                return freed, gone.is_cut  # what is being written now is free soon, and nothing is lost
        regions = {OWN_SEGMENT} if store.has_regions else None
        gone = self._ask(needed - freed, now_ns, regions=regions)
        if regions is not None and not gone.blocks:  # the old end is full of blocks that lie elsewhere
            gone = self._ask(needed - freed, now_ns)
        self._count(gone)
        return freed + gone.bytes + gone.demoted, gone.is_cut

    def _ask(
        self, needed: int, now_ns: int, *, regions: set[int] | None = None, is_hiding: bool = True
    ) -> events.RemovedReply:
        backlog = self._store.directory.ranking.backlog
        most = max(BLOCKS // 4, BLOCKS - backlog // _BACKLOG_SHARE)
        event = events.Evict(needed, regions=regions, limit=_LOOKS, most=most, is_hiding=is_hiding)
        return self._store.handle(event, now_ns)

    def _count(self, gone: events.RemovedReply) -> None:
        self._store.counts["evicted"] += gone.blocks
        self._store.counts["evicted_bytes"] += gone.bytes

    def reclaim(self, regions: set[int], nbytes: int, now_ns: int) -> int:
        """Evict a portion of blocks with parts in these regions, another node's; bytes on their way to be free there,
        0: no more.
        """
        return self._ask(nbytes, now_ns, regions=regions).bytes

    def make_slots(self, count: int, now_ns: int, keep: bytes = b"") -> None:
        """Hide leaves until so many blocks and what is staged fit the table, as far as there are any not durable.

        In one turn, since they come next; with a disk, more than are needed, as looking for them takes the time.
        """
        store = self._store
        count += len(store.directory.durable.staged)
        short = count - (store.table.capacity - store.table.used)
        if short <= 0:
            return
        most = short if store.disk is None else max(short, store.table.capacity // _SLOTS_SHARE)
        for event in (tiering.Trim(most, keep), events.Evict(1 << 62, limit=short), tiering.Trim(short, keep)):
            if short > 0 and (store.disk is not None or isinstance(event, events.Evict)):
                self._count(store.handle(event, now_ns))
                short = count - (store.table.capacity - store.table.used)
