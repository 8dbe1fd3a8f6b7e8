"""A directory with what a node's shell adds: a clock, an allocator, and a list of what was freed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.directory.arena import aligned
from ucxkv.directory import ROOT_KEY, Directory, Limits, SlotTable, events, table_bytes
from ucxkv.directory.events import Extent

SECOND = 10**9


class Shell:
    """A directory with a clock and an allocator that never reuses an extent."""

    def __init__(self, capacity: int = 256, *, grace_ns: int = 0, limits: Limits | None = None, lines: int = 0) -> None:
        table = SlotTable(aligned(table_bytes(capacity, lines)), capacity, epoch=1, seed=11, lines=lines)
        self.core = Directory(table, grace_ns=grace_ns, limits=limits)
        self.now = 5 * SECOND
        self.offset = 0
        self.freed: list[Extent] = []

    def __call__(self, event: Any, *, after: int = 0) -> Any:
        self.now += after
        outcome = self.core.handle(event, self.now)
        for effect in outcome.effects:
            self.freed += effect.extents
        self.core.check()
        return outcome.reply

    def columns(self, n: int, region: int = 0) -> tuple[Any, ...]:
        offsets = self.offset + 100 * np.arange(n, dtype=np.uint64)
        self.offset += 100 * n
        return np.full(n, region, np.uint16), offsets, np.full(n, 100, np.uint32), np.zeros(n, np.uint64)

    def put(self, keys: list[bytes], parent: bytes = ROOT_KEY, *, after: int = 0, region: int = 0) -> list[int]:
        """A chain below `parent`."""
        parents = b"".join([parent, *keys[:-1]])
        reply = self(events.Put(b"".join(keys), parents, *self.columns(len(keys), region)), after=after)
        out: list[int] = reply.status.tolist()
        return out

    def part(
        self, keys: list[bytes], part: int, parts: int, *, put_id: int = 1, parents: list[bytes] | None = None,
        last: int = SECOND, region: int = 0,
    ) -> list[int]:  # fmt: skip
        above = b"".join(parents or [ROOT_KEY] * len(keys))
        columns = self.columns(len(keys), region)
        event = events.PutPart(b"".join(keys), above, part, parts, put_id, *columns, deadline_ns=self.now + last)
        out: list[int] = self(event).status.tolist()
        return out

    def visible(self, keys: list[bytes]) -> list[int]:
        out: list[int] = self.core.reader.exists(b"".join(keys)).tolist()
        return out

    def evict_one(self) -> None:
        assert self(events.Evict(1)).blocks == 1
