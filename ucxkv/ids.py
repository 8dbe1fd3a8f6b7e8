"""Names for values that share a shape but must not be mixed up.

Invariants: a `BlockKey` has exactly `KEY_BYTES` bytes and is never `ROOT_KEY`; `ROOT_KEY` stands only where a parent is
asked for and means "this block starts a prefix". Epochs and generations only grow. No code lives here.
"""

from __future__ import annotations

from typing import Final, NewType

__all__ = [
    "KEY_BYTES",
    "ROOT_KEY",
    "BlockKey",
    "Epoch",
    "Generation",
    "LayoutFingerprint",
    "LeaseId",
    "NodeId",
    "RegionId",
    "SlotNumber",
]

KEY_BYTES: Final = 16
"""Bytes of a block's key, of a layout fingerprint and of a foreign key's hash."""

ROOT_KEY: Final = bytes(KEY_BYTES)
"""The reserved all-zero key: as a parent it means "root"; no block ever has it."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes, chained over the block's prefix (see keys.py)."""

LayoutFingerprint = NewType("LayoutFingerprint", bytes)
"""16 bytes, digest of everything that decides what a block's bytes mean (see layout.py)."""

NodeId = NewType("NodeId", str)
"""The name a node was started with; unique in its cluster."""

Epoch = NewType("Epoch", int)
"""u32, a node's incarnation: grows each time the node is reborn and fences what the old one promised."""

Generation = NewType("Generation", int)
"""u64, grows with every block made visible on a node: tells two lives of one key apart."""

RegionId = NewType("RegionId", int)
"""u16, index into a shard's region table (node incarnation, segment)."""

SlotNumber = NewType("SlotNumber", int)
"""u32, a place in the slot table; stable while its block is visible."""

LeaseId = NewType("LeaseId", int)
"""u64, names one lease on the node that granted it."""
