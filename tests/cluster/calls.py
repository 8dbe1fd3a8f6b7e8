"""One client's calls, recorded: what was asked before it is asked, what was told once it was told.

Nothing that can go wrong with a call is more than a result here. A put or delete without a clear answer is of unknown
outcome; a read without one is no part of the history. A call that outlives its deadline by far is told as a hang."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ucxkv
from tests.cluster.chains import BLOCKS_MAX, Chain, content_of, keys_of, value_of
from tests.cluster.record import ABSENT, UNTOLD, WRONG, Log
from ucxkv import DeleteStatus, PutStatus, ReadStatus, errors

__all__ = ["Caller"]

_T = TypeVar("_T")
_CONNECT_S = 3.0
_SETTLE_S = 5.0
_HANG_S = 20.0
"""What a busy machine may add to a deadline."""

_PUT = {PutStatus.STORED: "stored", PutStatus.ALREADY: "already", PutStatus.ORDER: "order"}
_NO_EFFECT = (PutStatus.BUSY, PutStatus.NO_SPACE)
_DELETE = {DeleteStatus.DELETED: "deleted", DeleteStatus.MISS: "absent", DeleteStatus.ORDER: "kept"}


class Caller:
    """Who calls. It connects by the control plane or by any node, and again after some failures."""

    def __init__(
        self,
        who: str,
        log: Log,
        url: str,
        addresses: Sequence[str],
        shards: int,
        *,
        path: str,
        say: Callable[..., None],
    ) -> None:
        self.who = who
        self.counts: Counter[str] = Counter()
        self._log = log
        self._url = url
        self._addresses = tuple(addresses)
        self._shards = shards
        self._path = path
        self._say = say
        self._kv: ucxkv.Client | None = None
        self._connecting = asyncio.Lock()

    async def client(self) -> ucxkv.Client | None:
        """The open client; None while no node can be reached."""
        async with self._connecting:
            if self._kv is None:
                at = (self._url,) if random.random() < 0.5 else self._addresses
                try:
                    self._kv = await ucxkv.connect(*at, path=self._path, timeout_s=_CONNECT_S)
                except errors.UcxKvError:
                    self.counts["not connected"] += 1
            return self._kv

    async def settle(self) -> None:
        """Wait until every node is reached, as after a round of faults, for some seconds; then connect anew."""
        until_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < until_s:
            kv = await self.client()
            if kv is not None and all(peer.alive for peer in kv.peers()):
                return
            await asyncio.sleep(0.05)
        await self.again()

    async def again(self) -> None:
        """Leave, so that the next call connects anew."""
        async with self._connecting:
            kv, self._kv = self._kv, None
            if kv is not None:
                await kv.aclose()

    async def aclose(self) -> None:
        """No more calls."""
        await self.again()

    async def put(self, chain: Chain, at: int, contents: Sequence[str], *, deadline_s: float) -> list[str | None]:
        """Put blocks from `at` on; None for each before any node could be reached."""
        kv = await self.client()
        if kv is None:
            return [None] * len(contents)
        keys = keys_of(chain, self._shards)
        end = at + len(contents)
        parents = [keys[at - 1] if at else ucxkv.ROOT_KEY, *keys[at : end - 1]]
        values = [value_of(chain, at + i, content) for i, content in enumerate(contents)]
        number = self._log.call(
            self.who, chain.name, [("put", (at + i, content)) for i, content in enumerate(contents)]
        )
        call = kv.put_many(keys[at:end], values, parents, durable=chain.is_durable, deadline_s=deadline_s)
        answer = await self._answer(call, deadline_s, f"put {chain.name} from {at}")
        results: list[str | None] = [UNTOLD] * len(contents)
        if answer is not None:
            for i, status in enumerate(map(PutStatus, answer.status.tolist())):
                results[i] = None if status in _NO_EFFECT else _PUT.get(status, UNTOLD)
                self.counts[f"put {status.name}"] += 1
        self._log.told(number, results)
        return results

    async def delete(self, chain: Chain, at: int, end: int, *, deadline_s: float) -> list[str | None]:
        """Delete blocks `at` to `end`."""
        kv = await self.client()
        if kv is None:
            return [None] * (end - at)
        number = self._log.call(self.who, chain.name, [("delete", i) for i in range(at, end)])
        call = kv.delete(keys_of(chain, self._shards)[at:end], deadline_s=deadline_s)
        answer = await self._answer(call, deadline_s, f"delete {chain.name} from {at}")
        results: list[str | None] = [UNTOLD] * (end - at)
        if answer is not None:
            for i, status in enumerate(map(DeleteStatus, answer.tolist())):
                results[i] = _DELETE.get(status, UNTOLD)
                self.counts[f"delete {status.name}"] += 1
        self._log.told(number, results)
        return results

    async def match(self, chain: Chain, *, deadline_s: float) -> int | None:
        """The length of the longest visible prefix; None when that is not certain."""
        kv = await self.client()
        if kv is None:
            return None
        number = self._log.call(self.who, chain.name, [("match", BLOCKS_MAX)])
        call = kv.match(keys_of(chain, self._shards), deadline_s=deadline_s)
        answer = await self._answer(call, deadline_s, f"match {chain.name}")
        found = answer.blocks if answer is not None and answer.is_certain else None
        self.counts["match" if found is not None else "match uncertain"] += 1
        self._log.told(number, [found])
        return found

    async def get(self, chain: Chain, at: int, end: int, *, deadline_s: float) -> list[str | None]:
        """What stands at blocks `at` to `end`: contents, ABSENT, or None where nobody could say."""
        kv = await self.client()
        if kv is None:
            return [None] * (end - at)
        keys = keys_of(chain, self._shards)
        number = self._log.call(self.who, chain.name, [("get", i) for i in range(at, end)])
        call = kv.get_many(keys[at:end], root=keys[0], deadline_s=deadline_s)
        answer = await self._answer(call, deadline_s, f"get {chain.name} from {at}")
        results: list[str | None] = [None] * (end - at)
        if answer is not None:
            assert answer.values is not None
            for i, (status, value) in enumerate(zip(answer.status.tolist(), answer.values, strict=True)):
                self.counts[f"get {ReadStatus(status).name}"] += 1
                if status == ReadStatus.MISS:
                    results[i] = ABSENT
                elif value is not None:
                    results[i] = content_of(chain, at + i, value) or f"{WRONG}{len(value)} bytes, {value[:40].hex()}"
        self._log.told(number, results)
        return results

    async def read_all(self, chain: Chain) -> bool:
        """Match and read all blocks of a chain; whether everything was answered. Of class cache, whose tail may leave
        under a read of several, one after the other from the root on."""
        step = BLOCKS_MAX if chain.is_durable else 1
        for at in range(0, BLOCKS_MAX, step):
            if None in await self.get(chain, at, at + step, deadline_s=4.0):
                return False
        return await self.match(chain, deadline_s=4.0) is not None

    async def evicted(self) -> list[tuple[str, int, int, int]]:
        """Name, epoch, evicted blocks, and those that left memory for the disk, of each node that answers."""
        kv = await self.client()
        reports = await self._answer(kv.status(deadline_s=2.0), 2.0, "status") if kv is not None else None
        return [
            (one.name, one.epoch, int(one.numbers["evicted"]), int(one.numbers["disk_demoted"]))
            for one in reports or ()
        ]

    async def _answer(self, call: Awaitable[_T], deadline_s: float, what: str) -> _T | None:
        """None: there was no clear answer."""
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s + _HANG_S):
                return await call
        except TimeoutError as exc:
            if time.monotonic() - started_s >= deadline_s + _HANG_S:
                self._say(event="hang", what=f"{self.who}: {what} did not end {_HANG_S:.0f} s after its deadline")
            self.counts[type(exc).__name__] += 1
        except (errors.UsageError, errors.VersionMismatch):
            raise
        except errors.UcxKvError as exc:
            self.counts[type(exc).__name__] += 1
        return None


def unknown(results: Sequence[Any]) -> int:
    """How many of a call's results are open."""
    return sum(result == UNTOLD for result in results)
