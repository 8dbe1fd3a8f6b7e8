"""Moving and removing bodies: the values themselves, as chains of blocks that are sealed at the end.

Promises
- A seal is put last, so a visible seal means a visible body (a chain has no holes), and whoever has read all blocks of
  a body has one version's bytes: no other body has its keys.
- A body becomes durable with its seal, in one step. Until then its blocks are of class cache: of a writer that dies
  before, nothing is left that the node could not evict.
- At most `_BATCH_BLOCKS` blocks of a call are under way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from ucxkv import errors
from ucxkv.buffers import Pieces, as_source
from ucxkv.client.results import DeleteStatus, PutStatus, ReadStatus
from ucxkv.ids import KEY_BYTES
from ucxkv.transport.base import remaining_s

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.client.client import Client
    from ucxkv.keys import KeyArray
    from ucxkv.objects.records import Body, Seal

__all__ = ["Bodies", "left_s"]

_BATCH_BLOCKS: Final = 64
_RESUMES_MAX: Final = 16


def left_s(deadline_ns: int) -> float:
    """Seconds until the deadline, above 0. Raises DeadlineExceeded."""
    left = remaining_s(deadline_ns)
    if left is None or left <= 0:
        raise errors.DeadlineExceeded("the call's deadline passed; give it a longer deadline_s")
    return left


class Bodies:
    """See the module. Stateless beside its client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def put(self, seal: Seal, pieces: Pieces, deadline_ns: int) -> None:
        """Store a body and seal it. pieces: the value in blocks, borrowed.

        Raises Overloaded where there is no room, Unavailable, UsageError, ValueTooLarge, JournalFailed; blocks may be
        there then (`discard`).
        """
        keys = seal.body.keys()
        sealed = _followed_by(pieces, seal.to_bytes())
        first = sealed if not seal.is_durable else pieces  # of class cache: the seal goes along with the last blocks
        done = 0
        for _ in range(_RESUMES_MAX):
            is_in = await self._put_run(done, keys, first, deadline_ns)
            if is_in and seal.is_durable:
                is_in = await self._put_run(len(pieces), keys, sealed, deadline_ns, durable=True)
            if is_in:
                return
            done = (await self._client.match(keys[: len(pieces)], deadline_s=left_s(deadline_ns))).blocks
        raise errors.Overloaded(f"{seal.name!r}: its first blocks were evicted again and again before its last were in")

    async def _put_run(
        self, done: int, keys: KeyArray, pieces: Pieces, deadline_ns: int, *, durable: bool = False
    ) -> bool:
        """Put the blocks from `done` on, as many as there are pieces; False: one above them was evicted meanwhile."""
        for begin in range(done, len(pieces), _BATCH_BLOCKS):
            end = min(begin + _BATCH_BLOCKS, len(pieces))
            above = np.zeros((end - begin, KEY_BYTES), np.uint8)
            above[1:] = keys[begin : end - 1]
            if begin:
                above[0] = keys[begin - 1]
            run = pieces.run(begin, end)
            result = await self._client.put_many(
                keys[begin:end], run, above, durable=durable, exact=True, deadline_s=left_s(deadline_ns)
            )
            if not _is_in(result.status):
                return False
        return True

    async def read(self, body: Body, pieces: Pieces, deadline_ns: int) -> bool:
        """Read a whole body into `pieces`, borrowed; False: it is not there any more, and what was read is undefined.

        Raises Unavailable where a node that may have it does not answer.
        """
        keys = body.keys()
        root = keys[0].tobytes()
        for begin in range(0, len(pieces), _BATCH_BLOCKS):
            end = min(begin + _BATCH_BLOCKS, len(pieces))
            run = pieces.run(begin, end)
            result = await self._client.get_many(keys[begin:end], run, root=root, deadline_s=left_s(deadline_ns))
            if (result.status == ReadStatus.UNAVAILABLE).any():
                raise errors.Unavailable("a node that may hold the value does not answer; retry")
            if result.status.any():
                return False
        return True

    async def remove(self, body: Body, deadline_ns: int) -> None:
        """Remove a body, its seal first. Raises Unavailable where it may be there still."""
        status = await self._client.delete(body.keys(), deadline_s=left_s(deadline_ns))
        if (status == DeleteStatus.UNAVAILABLE).any():
            raise errors.Unavailable("a node that may hold a value to be removed does not answer")

    async def discard(self, body: Body, within_s: float = 1.0) -> None:
        """Try to remove a body that became no version; what stays is evicted in time, or found by a sweep."""
        try:
            await self.remove(body, time.monotonic_ns() + int(within_s * 1e9))
        except errors.UcxKvError:
            return


def _followed_by(pieces: Pieces, raw: bytes) -> Pieces:
    """The same pieces, and one more."""
    last = as_source(raw)
    addr, length = np.concatenate([pieces.addr, last.addr]), np.concatenate([pieces.length, last.length])
    first = np.arange(len(addr) + 1, dtype=np.uint32)
    return Pieces(first, addr, length, length, (*pieces.keepalive, *last.keepalive), writable=False)


def _is_in(status: npt.NDArray[np.uint8]) -> bool:
    """Whether a run of a chain is stored; False: a block above it is not there. Raises for anything else."""
    failed = status[(status != PutStatus.STORED) & (status != PutStatus.ALREADY)]
    if not len(failed):
        return True
    worst = PutStatus(int(failed[0]))
    if worst is PutStatus.UNAVAILABLE:
        raise errors.Unavailable("a node did not answer a put in time; put again")
    if worst is not PutStatus.ORDER:
        raise errors.Overloaded("no room for the value: the node is full of what may not be evicted; retry later")
    return False
