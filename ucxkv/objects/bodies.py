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
from ucxkv.client.results import DeleteStatus, PutStatus, ReadStatus
from ucxkv.ids import KEY_BYTES
from ucxkv.transport.base import remaining_s

if TYPE_CHECKING:
    import numpy.typing as npt

    from ucxkv.buffers import Pieces
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
        done = 0
        for _ in range(_RESUMES_MAX):
            if await self._put_from(done, keys, pieces, deadline_ns) and await self._seal(seal, keys, deadline_ns):
                return
            done = (await self._client.match(keys[: len(pieces)], deadline_s=left_s(deadline_ns))).blocks
        raise errors.Overloaded(f"{seal.name!r}: its first blocks were evicted again and again before its last were in")

    async def _put_from(self, done: int, keys: KeyArray, pieces: Pieces, deadline_ns: int) -> bool:
        """Put the blocks from `done` on; False: one that was there was evicted meanwhile."""
        for begin in range(done, len(pieces), _BATCH_BLOCKS):
            end = min(begin + _BATCH_BLOCKS, len(pieces))
            above = np.zeros((end - begin, KEY_BYTES), np.uint8)
            above[1:] = keys[begin : end - 1]
            if begin:
                above[0] = keys[begin - 1]
            run = pieces.run(begin, end)
            result = await self._client.put_many(keys[begin:end], run, above, deadline_s=left_s(deadline_ns))
            if not _is_in(result.status):
                return False
        return True

    async def _seal(self, seal: Seal, keys: KeyArray, deadline_ns: int) -> bool:
        above = keys[-2].tobytes() if len(keys) > 1 else None
        status = await self._client.put(
            seal.body.seal_key, seal.to_bytes(), above, durable=seal.is_durable, deadline_s=left_s(deadline_ns)
        )
        return _is_in(np.array([status], np.uint8))

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
