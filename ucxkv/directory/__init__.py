"""Which blocks are visible and where they lie: the sans-IO core, and the slot table that readers map."""

from __future__ import annotations

from ucxkv.directory import events, tiering
from ucxkv.directory.core import Directory
from ucxkv.directory.events import DeleteStatus, LeaseStatus
from ucxkv.directory.records import MAX_PARTS, part_key
from ucxkv.directory.slots import (
    FOREVER,
    KEY_BYTES,
    ROOT_KEY,
    SLOT_DTYPE,
    CancelFlag,
    Found,
    NotServed,
    PutStatus,
    ReadResult,
    ReadStatus,
    Records,
    Serving,
    SlotReader,
    SlotTable,
    SlotTableError,
    table_bytes,
)
from ucxkv.directory.stats import Limits, Stats

__all__ = [
    "FOREVER",
    "KEY_BYTES",
    "MAX_PARTS",
    "ROOT_KEY",
    "SLOT_DTYPE",
    "CancelFlag",
    "DeleteStatus",
    "Directory",
    "Found",
    "LeaseStatus",
    "Limits",
    "NotServed",
    "PutStatus",
    "ReadResult",
    "ReadStatus",
    "Records",
    "Serving",
    "SlotReader",
    "SlotTable",
    "SlotTableError",
    "Stats",
    "events",
    "part_key",
    "table_bytes",
    "tiering",
]
