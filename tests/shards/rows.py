"""Rows of a shard's log, and strategies for them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ucxkv.directory.log import packed
from ucxkv.node.shards.records import ABSENT_REGION, LoggedEntry
from ucxkv.replication import Kind, Member

KEYS = [bytes([n]) * 16 for n in range(6)]


def rows_of(*blocks: tuple[int, int, int]) -> Any:
    """Of (key's number, offset, sum); an offset below 0: the value is not here."""
    return packed(
        [
            (KEYS[key], bytes(16), 1, (0 if offset >= 0 else ABSENT_REGION, max(offset, 0), 10 + total), total, 1, 0)
            for key, offset, total in blocks
        ]
    )


def commits_of(index: int, epoch: int, *blocks: tuple[int, int, int]) -> LoggedEntry:
    return LoggedEntry(index, epoch, Kind.RECORD, rows_of(*blocks))


def leaves_of(index: int, epoch: int, *keys: int) -> LoggedEntry:
    return LoggedEntry(index, epoch, Kind.RECORD, keys=b"".join(KEYS[key] for key in keys))


members = st.frozensets(st.builds(Member, st.text(max_size=3), st.integers(0, 2**40)), max_size=3)
blocks = st.tuples(st.integers(0, 5), st.integers(-1, 50), st.integers(0, 3))
distinct_blocks = st.lists(blocks, max_size=4, unique_by=lambda block: block[0])
