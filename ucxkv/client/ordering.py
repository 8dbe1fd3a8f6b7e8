"""Order between the calls of one client: a put that continues a chain waits for the call that still puts its parent.

A call waits only for calls that began before it, so no two wait for each other. A call whose message is out in its
first step (`Putter.put_one` into mapped memory) needs no entry here: the node takes messages up in the order they were
sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ucxkv.ids import KEY_BYTES, ROOT_KEY
from ucxkv.transport.base import remaining_s

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["PutCall", "PutOrder"]


class PutCall:
    """One running call. keys: what it puts, u8[n, 16], or one key."""

    __slots__ = ("_end", "_keys", "_rows")

    def __init__(self, keys: npt.NDArray[np.uint8] | bytes) -> None:
        self._rows = keys
        self._keys: frozenset[bytes] | None = None
        self._end: asyncio.Future[None] | None = None

    @property
    def keys(self) -> frozenset[bytes]:
        """What it puts; made when somebody asks, since most calls run alone."""
        if self._keys is None:
            self._keys = frozenset((self._rows,) if isinstance(self._rows, bytes) else _split(self._rows))
        return self._keys

    @property
    def end(self) -> asyncio.Future[None]:
        """Done when the call is over."""
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        return self._end

    def is_over(self) -> None:
        """Let those go on that wait for it."""
        if self._end is not None:
            self._end.set_result(None)


class PutOrder:
    """The running put calls of one client, oldest first."""

    def __init__(self) -> None:
        self._calls: dict[PutCall, None] = {}

    def puts(self, key: bytes) -> bool:
        """Whether a running call puts this key."""
        return any(key in call.keys for call in self._calls)

    def begin(self, keys: npt.NDArray[np.uint8] | bytes) -> PutCall:
        """Begin a call that has no parent to wait for. `leave` ends it."""
        call = PutCall(keys)
        self._calls[call] = None
        return call

    async def enter(
        self, keys: npt.NDArray[np.uint8], parents: npt.NDArray[np.uint8], deadline_ns: int | None
    ) -> PutCall:
        """Begin a call: wait, at most until the deadline, for older ones that put a parent of it. `leave` ends it."""
        older = list(self._calls)
        call = self.begin(keys)
        try:
            if older:
                outside = set(_split(parents)) - {ROOT_KEY} - call.keys
                ends = [other.end for other in older if outside and not outside.isdisjoint(other.keys)]
                if ends:
                    await asyncio.wait(ends, timeout=remaining_s(deadline_ns))
        except BaseException:
            self.leave(call)
            raise
        return call

    def leave(self, call: PutCall) -> None:
        """The call is over, whatever became of it."""
        del self._calls[call]
        call.is_over()


def _split(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    raw = rows.tobytes()
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
