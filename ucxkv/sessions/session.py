"""A conversation as the client sees it: what its turns used, and what to bring to memory at its next one.

    session = kv.session("chat-42")
    await session.prefetch()            # its user is back: what it used last time comes to memory
    ...                                 # match, load or split, decode, save
    await session.turn(seq)             # what this turn used, for the next one

A session is an index and a hint. It is in no key, so conversations share blocks as ever, and nothing is wrong when it
is forgotten: by its time to live, by the bounds of the book, or with the process, unless it is `stored`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ucxkv.client.results import DeleteStatus
from ucxkv.errors import UsageError
from ucxkv.keys import Keys, as_key_array
from ucxkv.loading import ended
from ucxkv.sequence import Sequence, group_keys
from ucxkv.sessions.book import Chain, SessionBook
from ucxkv.sessions.prefetch import FLIGHT_BYTES, PrefetchOrder, PrefetchResult
from ucxkv.sessions.records import Turn, session_key
from ucxkv.sessions.stored import StoredLog

if TYPE_CHECKING:
    from ucxkv.client.client import Client

__all__ = ["Session", "Sessions", "chain_of"]


def chain_of(what: Sequence | Keys) -> Chain:
    """The chain of a sequence, or of keys in order, root first; the keys are copied where they could change."""
    if isinstance(what, Sequence):
        return Chain(what.keys, what.layout.layer_groups)
    return Chain(as_key_array(what).copy())


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Sessions:
    """The sessions of one client: one book, and one `Session` a name for as long as anybody holds it."""

    def __init__(self, kv: Client) -> None:
        self._kv = kv
        self._sessions: WeakValueDictionary[bytes, Session] = WeakValueDictionary()
        self.book = SessionBook()

    def session(self, name: str, ttl_s: float, stored: bool, salt: str) -> Session:
        """See Client.session."""
        if not isinstance(name, str) or not 0 < len(name) <= 1024:
            raise UsageError(f"session id is {str(name)[:40]!r}; pass text of 1 to 1024 characters")
        if not 0 < ttl_s < float("inf"):
            raise UsageError(f"ttl_s={ttl_s}; pass seconds above 0")
        if not isinstance(salt, str) or not _is_utf8(salt):
            raise UsageError(f"salt is {salt!r}; pass text that UTF-8 can encode")
        key = session_key(name, salt)
        known = self._sessions.get(key)
        if known is None:
            known = self._sessions[key] = Session(self._kv, self.book, name, key)
        known.ttl_s = ttl_s
        if stored and known.log is None:
            known.log = StoredLog(self._kv, key)
        return known


class Session:
    """See the module; made by `kv.session(id)`. ttl_s: what its next turn prolongs it by. One event loop."""

    def __init__(self, kv: Client, book: SessionBook, name: str, key: bytes) -> None:
        self._kv, self._book, self._key = kv, book, key
        self._running: asyncio.Task[PrefetchResult] | None = None
        self._waiting = 0
        self._turns = asyncio.Lock()
        self.id = name
        self.ttl_s = 0.0
        self.log: StoredLog | None = None
        """Where the index is in the store; None: it is this process's alone."""

    @property
    def chains(self) -> list[Chain]:
        """What is remembered, the chain used last first; none when its time to live is over."""
        return self._book.chains(self._key, time.monotonic())

    async def turn(self, used: Sequence | Keys, *, deadline_s: float | None = None) -> None:
        """Remember what this turn used, and prolong the session.

        used: a sequence, or the keys of a chain in order, root first. A longer chain takes the place of those that it
        goes on from. With `stored` this puts one small block, within the deadline; what fails there is not raised.
        Raises UsageError.
        """
        chain = chain_of(used)
        self._book.turn(self._key, chain, time.monotonic(), self.ttl_s)
        if self.log is not None and len(chain):
            async with self._turns:
                now_unix_s = time.time()
                turn = Turn(chain, now_unix_s, self.ttl_s)
                news = await self.log.append(turn, self.chains, deadline_s=deadline_s)
                if news:  # of other processes; what was used just now stays in front
                    self._take(news)
                    self._book.turn(self._key, chain, time.monotonic(), self.ttl_s)

    async def prefetch(
        self, *, order: PrefetchOrder = "block", flight_bytes: int = FLIGHT_BYTES, deadline_s: float | None = None
    ) -> PrefetchResult:
        """Bring what the session used to memory, the chain used last first; see Client.prefetch for order and bounds.

        One runs at a time: who asks meanwhile waits for it. It ends when all who wait for it are cancelled. With
        `stored`, turns of other processes are read first. The result's blocks are those of the chain used last, what
        was brought is of all.
        """
        self._kv.deadline()  # raises when the client may not be used here
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._prefetch(order, flight_bytes, deadline_s))
        running = self._running
        self._waiting += 1
        try:
            await asyncio.wait([running])
        finally:
            self._waiting -= 1
            if not self._waiting and not running.done():
                await ended([running])
        return PrefetchResult() if running.cancelled() else running.result()

    async def end(self, *, delete: bool = False, deadline_s: float | None = None) -> int:
        """Forget the session, here and in the store; how many of its values were removed.

        A prefetch of it ends. delete: remove its blocks too, but for those that others go on from; a head that another
        conversation shares and nobody goes on from goes as well, and is computed again there.
        """
        if self._running is not None and not self._running.done():
            await ended([self._running])
        chains = self.chains
        self._book.end(self._key)
        removed = 0
        async with self._turns:
            if self.log is not None:
                chains = chains or await self._stored_chains(deadline_s)
                self._book.end(self._key)
                await self.log.delete(deadline_s=deadline_s)
        for chain in chains if delete else ():
            for keys in group_keys(chain.keys, chain.layer_groups):
                removed += int((await self._kv.delete(keys, deadline_s=deadline_s) == DeleteStatus.DELETED).sum())
        return removed

    async def _stored_chains(self, deadline_s: float | None) -> list[Chain]:
        assert self.log is not None
        self._take(await self.log.news(deadline_s=deadline_s))
        return self.chains

    async def _prefetch(self, order: PrefetchOrder, flight_bytes: int, deadline_s: float | None) -> PrefetchResult:
        if self.log is not None:
            async with self._turns:
                self._take(await self.log.news(deadline_s=deadline_s))
        first: PrefetchResult | None = None
        brought = nbytes = 0
        for chain in self.chains:
            result = await self._kv.prefetch_chain(chain.keys, chain.layer_groups, order, flight_bytes, deadline_s)
            first = first or result
            brought, nbytes = brought + result.brought, nbytes + result.nbytes
            if result.in_memory < result.blocks:
                break  # there is no room for more
        return dataclasses.replace(first or PrefetchResult(), brought=brought, nbytes=nbytes)

    def _take(self, turns: list[Turn]) -> None:
        now_s, now_unix_s = time.monotonic(), time.time()
        for turn in turns:
            if (left_s := turn.left_s(now_unix_s)) > 0:
                self._book.turn(self._key, turn.chain, now_s, left_s)
