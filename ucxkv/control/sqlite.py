"""The control plane of one machine: one SQLite file, no server; any number of processes.

All calls run in one thread of their own, so that the event loop never waits for the disk or for another process. A call
that is late is withdrawn when it had not begun (Unavailable, nothing changed), else its outcome is unknown. Watches
share one poll of the file, every POLL_S, in a second thread that costs one PRAGMA while nothing happens and wakes the
loop only when something did."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ucxkv import errors
from ucxkv.control.base import (
    Change,
    ChangeKind,
    ControlClosed,
    Entry,
    LeaseLost,
    OutcomeUnknown,
    check_change,
    check_key,
    check_prefix,
    check_ttl,
)
from ucxkv.control.lease import Lease
from ucxkv.control.sqlite_file import SqliteFile

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from ucxkv.control.base import Clock

__all__ = ["POLL_S", "SqliteControl"]

POLL_S = 0.05

log = logging.getLogger("ucxkv.control")
_T = TypeVar("_T")


class SqliteControl:
    """A `ControlPlane` over one file. Open it with `await SqliteControl.open(path, clock)`."""

    _file: SqliteFile

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "control-sqlite")
        self._leases: set[Lease] = set()
        self._watchers: set[asyncio.Event] = set()
        self._poller: threading.Thread | None = None
        self._polls_no_more = threading.Event()
        self._is_closed = False

    @classmethod
    async def open(cls, path: Path, clock: Clock, timeout_s: float = 5.0) -> SqliteControl:
        """Open the file, making it when it is absent. Raises SetupError (see `SqliteFile`), Unavailable."""
        self = cls(clock, timeout_s)
        try:
            self._file = await self._run(lambda: SqliteFile(path), "open")
        except BaseException:
            self._is_closed = True
            self._thread.shutdown(wait=False)
            raise
        return self

    async def get(self, key: str) -> Entry | None:
        """See `ControlPlane`."""
        check_key(key)
        return await self._run(lambda: self._file.get(key), "get")

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        """See `ControlPlane`."""
        check_prefix(prefix)
        return await self._run(lambda: self._file.list(prefix), "list")

    async def compare_and_set(
        self, key: str, expected_revision: int, value: bytes | None, *, lease: Lease | None = None
    ) -> Entry | None:
        """See `ControlPlane`."""
        check_change(key, expected_revision, value)
        if lease is not None and lease.lost.done():
            raise LeaseLost(f"the lease for {key} is over: {lease.lost.result()}")
        lease_id = lease.id if lease is not None else 0
        changed = await self._run(
            lambda: self._file.compare_and_set(key, expected_revision, value, lease_id), "compare_and_set"
        )
        self._wake()
        return changed

    async def lease(self, ttl_s: float) -> Lease:
        """See `ControlPlane`."""
        check_ttl(ttl_s)
        asked_ns = self._clock.now_ns()
        lease = Lease(self, self._clock, await self._run(lambda: self._file.grant(ttl_s), "lease"), ttl_s)
        lease.start(asked_ns, ttl_s)
        self._leases = {held for held in self._leases if not held.lost.done()} | {lease}
        return lease

    async def renew_lease(self, lease_id: int) -> float | None:
        """See `LeaseEngine`."""
        return await self._run(lambda: self._file.renew(lease_id), "renew")

    async def end_lease(self, lease_id: int) -> None:
        """See `LeaseEngine`."""
        await self._run(lambda: self._file.end_lease(lease_id), "revoke")
        self._wake()

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[Change, None]:
        """See `ControlPlane`."""
        check_prefix(prefix)
        after = after_revision
        news = asyncio.Event()
        news.set()
        self._watchers.add(news)
        try:
            while not self._is_closed:
                self._poll()
                await news.wait()
                news.clear()
                try:
                    changes, after = await self._run(partial(self._file.changes_after, prefix, after), "watch")
                except errors.Unavailable:
                    if not self._is_closed:
                        await asyncio.sleep(POLL_S)
                        news.set()
                    continue
                if changes is None:
                    yield Change(ChangeKind.RESYNC, Entry(prefix, b"", after))
                    news.set()
                    continue
                if changes:
                    news.set()  # it may have been one batch of several
                for change in changes:
                    yield change
        finally:
            self._watchers.discard(news)
        raise ControlClosed()

    async def aclose(self) -> None:
        """See `ControlPlane`."""
        if self._is_closed:
            return
        self._is_closed = True
        leases, self._leases = self._leases, set()
        for lease in leases:
            lease.abandon("this control plane was closed")
        self._wake()
        self._polls_no_more.set()
        if self._poller is not None:
            await asyncio.to_thread(self._poller.join, self._timeout_s)
        for lease in leases:
            await lease.stopped()
        closing = self._thread.submit(self._file.close)
        self._thread.shutdown(wait=False)
        await asyncio.wait({asyncio.wrap_future(closing)}, timeout=self._timeout_s)

    def _wake(self) -> None:
        for news in self._watchers:
            news.set()

    def _poll(self) -> None:
        if self._poller is None:
            loop = asyncio.get_running_loop()
            self._poller = threading.Thread(target=self._keep_polling, args=(loop,), name="control-poll", daemon=True)
            self._poller.start()

    def _keep_polling(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread and over a connection of its own: wake the watches when the file's revision moved."""
        file: SqliteFile | None = None
        seen = -1
        try:
            while not self._polls_no_more.wait(POLL_S):
                try:
                    if file is None:
                        file = SqliteFile(self._file.path)
                    newest = file.poll()
                except errors.UcxKvError as exc:
                    log.debug("control.poll why=%s", exc)
                    newest = -1  # a watch meets the same trouble by itself, and raises what is not Unavailable
                if newest != seen or newest < 0:
                    seen = newest
                    loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closed
        finally:
            if file is not None:
                file.close()

    async def _run(self, act: Callable[[], _T], call: str) -> _T:
        if self._is_closed:
            raise ControlClosed()
        asked = self._thread.submit(act)
        answer = asyncio.wrap_future(asked)
        try:
            done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
            if done:
                return answer.result()
            late = f"the control file did not answer {call} within {self._timeout_s} s"
            if call == "compare_and_set" and not asked.cancel():
                raise OutcomeUnknown(late)
            raise errors.Unavailable(late)
        finally:
            if not answer.done():
                answer.cancel()
            elif not answer.cancelled():
                with contextlib.suppress(BaseException):
                    answer.exception()
