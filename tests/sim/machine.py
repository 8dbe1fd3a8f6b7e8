"""The state that a node's log comes to: chains of blocks, applied blindly, with their past.

A record says what the leader decided: this block is there, or is no longer there. `apply` does not judge: it returns a
complaint where a record breaks prefix closure (invariant I1), which a sound log never does. The state of any earlier
index can be asked for, since readers are answered as of the watermark."""

from __future__ import annotations

import marshal
from typing import Any

from ucxkv.replication import Entry, Kind

__all__ = ["Chains", "Contents", "commit_record", "leave_record"]

Contents = tuple[str, ...]
"""A chain's visible blocks, from the root on: what each holds."""


def commit_record(chain: str, position: int, content: str) -> bytes:
    """Block `position` of `chain` is there, with this content."""
    return marshal.dumps(("commit", chain, position, content))


def leave_record(chain: str, position: int) -> bytes:
    """Block `position` of `chain` is no longer there."""
    return marshal.dumps(("leave", chain, position, ""))


class Chains:
    """index: of the last entry applied. epoch: of that entry."""

    def __init__(self) -> None:
        self.index = 0
        self.epoch = 0
        self._versions: dict[str, list[tuple[int, Contents]]] = {}

    def now(self, chain: str) -> Contents:
        """The chain as of the last entry applied."""
        versions = self._versions.get(chain)
        return versions[-1][1] if versions else ()

    def at(self, chain: str, index: int) -> Contents:
        """The chain as of an earlier entry (since the last restore)."""
        for since, contents in reversed(self._versions.get(chain, ())):
            if since <= index:
                return contents
        return ()

    def apply(self, entry: Entry) -> str | None:
        """Take the next entry; what is wrong with it, if anything."""
        complaint = None
        if entry.index != self.index + 1:
            complaint = f"entry {entry.index} applied after {self.index}"
        self.index, self.epoch = entry.index, entry.epoch
        if entry.kind is not Kind.RECORD:
            return complaint
        what, chain, position, content = marshal.loads(entry.record)
        contents = self.now(chain)
        if what == "commit":
            if position != len(contents):
                complaint = f"I1: block {position} of {chain} came when {len(contents)} were there"
            contents = (*contents[:position], content)
        else:
            if position != len(contents) - 1:
                complaint = f"I1: block {position} of {chain} left when {len(contents)} were there"
            contents = contents[:position]
        self._versions.setdefault(chain, []).append((entry.index, contents))
        return complaint

    def state(self) -> dict[str, Contents]:
        """All chains that have a block."""
        return {chain: self.now(chain) for chain in sorted(self._versions) if self.now(chain)}

    def snapshot(self, chunk_bytes: int = 64) -> tuple[bytes, ...]:
        """The state as of the last entry, in chunks."""
        raw = marshal.dumps(tuple(self.state().items()))
        return tuple(raw[at : at + chunk_bytes] for at in range(0, len(raw), chunk_bytes))

    def restore(self, index: int, epoch: int, chunks: tuple[bytes, ...]) -> None:
        """Be what `snapshot` was of."""
        items: Any = marshal.loads(b"".join(chunks))
        self.index, self.epoch = index, epoch
        self._versions = {chain: [(index, tuple(contents))] for chain, contents in items}
