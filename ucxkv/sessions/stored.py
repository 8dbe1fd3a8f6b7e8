"""A session's log in the store: read what others appended, append a turn. See `records` for what is written.

All of it is a hint: what cannot be read or written is left out, and counted, never raised, but for wrong use.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ucxkv.client.results import GetResult, Match, PutStatus, ReadStatus
from ucxkv.errors import Unavailable
from ucxkv.ids import ROOT_KEY
from ucxkv.keys import KeyArray, Keys
from ucxkv.loading import Until
from ucxkv.sessions.book import Chain
from ucxkv.sessions.records import RECORDS_MAX, SessionLog, Turn, record_keys

__all__ = ["LogClient", "StoredLog"]

_TRIES: Final = 4


class LogClient(Protocol):
    """What the log needs of a client; `ucxkv.Client` is one."""

    async def match(self, keys: Keys, *, deadline_s: float | None = None) -> Match:
        """See Client.match."""

    async def get_many(self, keys: Keys, *, root: bytes | None = None, deadline_s: float | None = None) -> GetResult:
        """See Client.get_many."""

    async def put(
        self,
        key: bytes,
        block: object,
        parent: bytes | None = None,
        *,
        exact: bool = False,
        deadline_s: float | None = None,
    ) -> PutStatus:
        """See Client.put."""

    async def delete(self, keys: Keys, *, deadline_s: float | None = None) -> npt.NDArray[np.uint8]:
        """See Client.delete."""


class StoredLog:
    """One session's log. `failures` counts what could not be read or written; calls may not overlap."""

    def __init__(self, kv: LogClient, session: bytes) -> None:
        self._kv = kv
        self._keys: KeyArray = record_keys(session)
        self._log = SessionLog()
        self.failures = 0

    async def news(self, *, deadline_s: float | None = None) -> list[Turn]:
        """Turns that were appended since the last call, by this process's `append` not, oldest first.

        Where the log was cut (evicted, or written anew) it is read from its start.
        """
        until = Until(deadline_s)
        turns: list[Turn] = []
        try:
            count = (await self._kv.match(self._keys, deadline_s=until.left_s())).blocks
            if count < self._log.count:
                self._log = SessionLog()
            first = self._log.count
            if count > first:
                root = self._keys[0].tobytes()
                result = await self._kv.get_many(self._keys[first:count], root=root, deadline_s=until.left_s())
                for status, value in zip(result.status.tolist(), result.values or [], strict=True):
                    turn = self._log.decode(value or b"") if status == ReadStatus.HIT else None
                    if turn is None:
                        self.failures += 1
                        break
                    self._log.add(turn.chain)
                    turns.append(turn)
        except Unavailable:
            self.failures += 1
        return turns

    async def append(self, turn: Turn, chains: list[Chain], *, deadline_s: float | None = None) -> list[Turn]:
        """Write the turn down; what others had written meanwhile, oldest first.

        chains: all that are known of the session, the last used first: what a log that is full is written anew from.
        """
        until = Until(deadline_s)
        news: list[Turn] = []
        for _ in range(_TRIES):
            try:
                if self._log.count >= RECORDS_MAX:
                    await self._begin_anew(turn, chains, until)
                status = await self._put(turn, until)
            except Unavailable:
                break
            if status == PutStatus.STORED:
                self._log.add(turn.chain)
                return news
            if status not in (PutStatus.ALREADY, PutStatus.ORDER):
                break
            known = self._log.count
            news += await self.news(deadline_s=until.left_s())
            if status == PutStatus.ALREADY and self._log.count == known:
                break  # there is something, and it cannot be read
        self.failures += 1
        return news

    async def delete(self, *, deadline_s: float | None = None) -> None:
        """Remove the whole log from the store."""
        await self._kv.delete(self._keys, deadline_s=deadline_s)
        self._log = SessionLog()

    async def _begin_anew(self, turn: Turn, chains: list[Chain], until: Until) -> None:
        await self.delete(deadline_s=until.left_s())
        for chain in reversed(chains[1:]):
            older = Turn(chain, turn.used_unix_s, turn.ttl_s)
            if await self._put(older, until) == PutStatus.STORED:
                self._log.add(chain)

    async def _put(self, turn: Turn, until: Until) -> PutStatus:
        i = self._log.count
        parent = self._keys[i - 1].tobytes() if i else ROOT_KEY
        value = self._log.encode(turn)
        key, above = self._keys[i].tobytes(), parent if i else None
        return await self._kv.put(key, value, above, exact=True, deadline_s=until.left_s())
