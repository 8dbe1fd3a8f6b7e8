"""What the modules of this leg share: its errors and the extent.

Invariants: every error a tier raises is a TierError that says what the caller does next; an Extent is a value, owning
nothing. Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BlockDamaged",
    "BlockGone",
    "Extent",
    "ForeignExtent",
    "GrantLimit",
    "NoSpace",
    "SetupFailed",
    "TierBusy",
    "TierError",
    "ValueTooLarge",
    "WritesFailed",
]


class TierError(Exception):
    """Root of what a tier raises; the shell maps it at one boundary."""


class NoSpace(TierError):
    """Nothing free now: evict, then try again."""


class ValueTooLarge(TierError):
    """The value fits no segment even when empty: the caller splits it, or the operator enlarges the segment."""


class ForeignExtent(TierError):
    """An extent that is not the caller's (never lent, freed already, of another connection): a bug or a hostile peer.

    Nothing was changed by the call that raises it.
    """


class GrantLimit(TierError):
    """The connection holds as much as one may: it commits or hands back before it asks for more."""


class TierBusy(TierError):
    """As much waits for the disk as may: nothing was taken; keep the block where it is, and offer it again later."""


class BlockGone(TierError):
    """The place was given to other blocks, or is about to be: a miss."""


class BlockDamaged(TierError):
    """The bytes there do not have the block's sum, or the disk cannot read them: a miss, and never data."""


class WritesFailed(TierError):
    """The disk took no more bytes: this store writes no more until it is opened again, reads go on.

    reason: the first error, with what to do about it.
    """

    def __init__(self, what: str, *, reason: str) -> None:
        super().__init__(f"{what} takes no more writes: {reason}")
        self.reason = reason


class SetupFailed(TierError):
    """The machine lacks something: the operator acts, the message says how.

    found, needed, fix: one plain sentence each, also kept as attributes for `ucxkv doctor`.
    """

    def __init__(self, what: str, *, found: str, needed: str, fix: str) -> None:
        super().__init__(f"{what}: found {found}; needed {needed}; fix: {fix}")
        self.what = what
        self.found = found
        self.needed = needed
        self.fix = fix


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """`length` bytes at `offset` of the node's segment number `segment` (all in bytes, as lent or stored)."""

    segment: int
    offset: int
    length: int
