"""What happens to a directory and what it answers: plain frozen data, one class an event.

Arrays are columns: `keys` and `parents` are n x 16 bytes, `regions` u16[n], `offsets` u64[n], `lengths` u32[n], `sums`
u64[n] (little endian; bytes, memoryviews or numpy arrays alike), so that no object is made a key. A reply's arrays are
new. Each event names its reply: `Directory.handle(event, now_ns)` returns `Outcome[reply]`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ucxkv.directory.slots import U8, Buffer, Records
from ucxkv.keys import KeyArray

if TYPE_CHECKING:
    from ucxkv.directory.crossing import Send

Extent: TypeAlias = tuple[int, int, int]
"""(region, offset, length)."""

Roots: TypeAlias = Callable[[KeyArray], npt.NDArray[np.bool_]]
"""Which of these root keys, (n, 16) uint8, are meant: bool[n]. Pure; n is 1 or more."""

R = TypeVar("R", covariant=True)
S = TypeVar("S")


class LeaseStatus(enum.IntEnum):
    """What became of one key of a lease request."""

    GRANTED = 0
    MISS = 1
    LIMIT = 2  # too many leases, or too many keys in one


class DeleteStatus(enum.IntEnum):
    """What became of one key of a delete."""

    DELETED = 0
    MISS = 1
    ORDER = 2  # it has children, visible or being written, that are not in the same call
    UNAVAILABLE = 3  # the client's word: its node is gone or did not answer in time


@dataclass(frozen=True, slots=True)
class FreeExtents:
    """Effect: nobody reads or names these extents any more; they may be allocated again."""

    extents: list[Extent]


@dataclass(frozen=True, slots=True)
class Outcome(Generic[S]):
    """A reply for the asker and what the shell has to do. sends: what to tell other shards, in this order."""

    reply: S
    effects: list[FreeExtents]
    sends: Sequence[Send] = ()


@dataclass(frozen=True, slots=True)
class PutReply:
    """`status` u8[n] of PutStatus; extents of blocks neither STORED nor SEALED stay the caller's.

    index: the log position the call brought the directory to. retry_after_ns: when BUSY, how long the other put may
    last.
    """

    status: U8
    index: int
    retry_after_ns: int = 0


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """`lease` is 0 when nothing was granted; `status` u8[n] of LeaseStatus; `end_ns` on the directory's clock."""

    lease: int
    status: U8
    end_ns: int


@dataclass(frozen=True, slots=True)
class DeleteReply:
    """`status` u8[n] of DeleteStatus.

    batch: not 0 when durable blocks are among them: nothing is gone before it is settled. left: the keys to log as
    gone.
    """

    status: U8
    batch: int = 0
    left: bytes = b""


@dataclass(frozen=True, slots=True)
class RemovedReply:
    """How many blocks, and how many bytes of values, were taken out of sight; their extents follow when they are
    free. left: the keys of durable ones among them, to log as gone. demoted: bytes of memory that blocks gave up which
    are visible all the same, from disk; the rest is counted without them. is_cut: some went, and more may for
    another such event."""

    blocks: int
    bytes: int
    left: Buffer = b""
    demoted: int = 0
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class StageReply:
    """`status` u8[n] of PutStatus: what the answer will be when the batch is settled; extents of blocks that are not
    STORED stay the caller's.

    batch: to settle when the log holds `rows`, or to abandon; 0 when there is nothing to wait for. rows:
    COMMIT_DTYPE[m], to log in this order, with the places of their values filled in.
    """

    status: U8
    batch: int
    rows: Records


@dataclass(frozen=True, slots=True)
class SettleReply:
    """`status` u8[n] of PutStatus, final: a STORED of before may have become NO_SPACE or ORDER, and its extent is the
    caller's then. left: the keys of these, to log as gone. going: slots that a delete took out now.
    """

    status: U8
    left: bytes
    going: list[int]


@dataclass(frozen=True, slots=True)
class RestoreReply:
    """`status` u8[n] of PutStatus: STORED, or why a block did not come back."""

    status: U8


@dataclass(frozen=True, slots=True)
class WithdrawReply:
    """rows: COMMIT_DTYPE[m], the durable blocks, parents first, the places of their values to be filled in; their
    extents, and those of the blocks that were to be kept, are the caller's. blocks, bytes: how much went, these
    included.

    busy_until_ns: the moment when the last lease on the caller's extents ends, `now_ns` when none runs; the caller
    frees, or writes, none of them before this moment + the grace.
    """

    rows: Records
    blocks: int
    bytes: int
    busy_until_ns: int


@dataclass(frozen=True, slots=True)
class Done:
    """`ok` is False when there was nothing to do it to."""

    ok: bool = True


class Event(Generic[R]):
    """Base of all events; the parameter is the reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Put(Event[PutReply]):
    """Make n single-part blocks visible whose bytes are in place. A parent (all zero: root) may come earlier in the
    call.

    The first writer of a key wins. tier: 0 gpu, 1 host, 2 nvme. flag: the writer's own byte (flags[1] of the slot).
    """

    keys: Buffer
    parents: Buffer
    regions: Buffer
    offsets: Buffer
    lengths: Buffer
    sums: Buffer
    tier: int = 1
    flag: int = 0


@dataclass(frozen=True, slots=True)
class PutPart(Event[PutReply]):
    """Seal part `part` of `parts` of n blocks; a block becomes visible with its last missing part, under one put_id.

    A parent (all zero: root) is visible or, where parts > 1, being written under the same put_id; it may come earlier
    in the call. A block whose last part comes before its parent is visible is SEALED, not STORED: it becomes visible
    in the event in which its parent does, which answers STORED for the parent only. If it finds no room then, it is
    given up.
    deadline_ns: when the writing of a block begun here is given up, and with it all begun below it; sealed extents are
    freed then.
    """

    keys: Buffer
    parents: Buffer
    part: int
    parts: int
    put_id: int
    regions: Buffer
    offsets: Buffer
    lengths: Buffer
    sums: Buffer
    deadline_ns: int
    tier: int = 1
    flag: int = 0


@dataclass(frozen=True, slots=True)
class StagePut(Event[StageReply]):
    """Begin to make n single-part blocks durable whose bytes are in place, and what is above them; see `durable`.

    Columns as in Put; all regions are the node's own. log: the one that all their chains are in. ValueError, and
    nothing has changed: a key or a parent is staged under another log.
    """

    keys: Buffer
    parents: Buffer
    regions: Buffer
    offsets: Buffer
    lengths: Buffer
    sums: Buffer
    tier: int = 1
    flag: int = 0
    log: int = 0


@dataclass(frozen=True, slots=True)
class Settle(Event[SettleReply]):
    """The log holds what this batch, the oldest of its log, named. ValueError: it is not the oldest."""

    batch: int


@dataclass(frozen=True, slots=True)
class Abandon(Event[Done]):
    """The log will never hold what this batch, the newest of its log, named. ValueError: it is not the newest."""

    batch: int


@dataclass(frozen=True, slots=True)
class Restore(Event[RestoreReply]):
    """Take in what a log came to: rows COMMIT_DTYPE[n], in the log's order; blocks of other logs may be there already.

    status: u8[n]; those that are not 0 are left out, and with them what is below. So is a block that is visible already
    (ALREADY), and what hangs on one that is not durable (ORDER). The extents of what is left out stay the caller's.
    """

    rows: Records
    status: U8


@dataclass(frozen=True, slots=True)
class Withdraw(Event[WithdrawReply]):
    """Hide every block whose chain begins with one of `roots`, and give up what is being written below them.

    Durable blocks, and those whose keys are in `keep`, are not freed but handed to the caller. ValueError, and nothing
    has changed: something of these chains is staged; its batches are abandoned first.
    """

    roots: Roots
    keep: Collection[bytes] = ()


@dataclass(frozen=True, slots=True)
class Touch(Event[Done]):
    """These blocks were read, in this order; report a chain's tail first."""

    keys: Buffer


@dataclass(frozen=True, slots=True)
class Lease(Event[LeaseReply]):
    """Keep the values of these blocks in place for `ttl_ns`; keys that miss are left out."""

    keys: Buffer
    ttl_ns: int
    owner: int


@dataclass(frozen=True, slots=True)
class Renew(Event[Done]):
    """Start a lease's time anew; not ok when it is over, or its owner lost."""

    lease: int
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Release(Event[Done]):
    """End a lease now: its owner reads no more."""

    lease: int


@dataclass(frozen=True, slots=True)
class OwnerLost(Event[Done]):
    """This owner is gone. Its process may still be reading, so its leases end by their time and can't be renewed."""

    owner: int


@dataclass(frozen=True, slots=True)
class Delete(Event[DeleteReply]):
    """Hide these blocks; one with children that are not in the same call stays.

    log: the one that the chains of the durable ones are in.
    """

    keys: Buffer
    log: int = 0


@dataclass(frozen=True, slots=True)
class Evict(Event[RemovedReply]):
    """Hide leaves, as the policy picks them, until `bytes_needed` are on their way to be free, `limit` were looked at
    or `most` went.

    regions: only blocks with a part there; None: all. Blocks with a copy on disk stay visible and give up their memory.
    is_hiding: whether the others go, too.
    """

    bytes_needed: int
    regions: Collection[int] | None = None
    limit: int = 1024
    most: int = 1 << 30
    is_hiding: bool = True


@dataclass(frozen=True, slots=True)
class Lost(Event[RemovedReply]):
    """These regions are gone: hide every block with a part there and all its descendants; nothing there is freed."""

    regions: Collection[int]


@dataclass(frozen=True, slots=True)
class Drop(Event[RemovedReply]):
    """The values of these keys (blocks or parts of blocks) are bad: hide their blocks and all descendants, children or
    not."""

    keys: Buffer


@dataclass(frozen=True, slots=True)
class Tick(Event[Done]):
    """Time has passed: end leases, give up late writings, free what left long enough ago."""
