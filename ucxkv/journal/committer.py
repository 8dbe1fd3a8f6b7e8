"""Group commit: one frame on its way to the disk, everything that arrives meanwhile rides the next.

    Appends reach the log in the order of their lsns, each whole in one frame. An lsn is reported only after the write
    (and sync) of its frame and of all before it returned. After the first error nothing is written any more.

The disk belongs to one thread, because a write may wait (a sync always does). The thread takes what is there, writes
it, and tells the loop; while there is more it asks nobody. It is woken once for any number of appends, and the loop is
woken once for any number of records. There is no window: waiting for more only made it slower (docs/decisions.md)."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from ucxkv.journal.log import Log, frame_bytes

__all__ = ["Append", "Beside", "Commit", "Committer", "LoopCommitter", "LoopExecutor"]

P = ParamSpec("P")
T = TypeVar("T")

_FRAME_BYTES = 1 << 20  # a frame takes further appends up to here; encoding it holds the GIL for about 0.2 ms


@dataclass(frozen=True, slots=True)
class Append:
    """Records lsn, lsn + 1, ... that stay together; nbytes: of them all."""

    epoch: int
    lsn: int
    records: tuple[bytes, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A frame that is as durable as it should be. nbytes: of its records; disk_bytes: of the frame."""

    last_lsn: int
    records: int
    nbytes: int
    disk_bytes: int


class Beside(Protocol):
    """What has to be on the disk before the records that name it."""

    def keep(self, records: Sequence[bytes]) -> None:
        """Put there what these records name, from the committer's thread. Raises OSError: they are not written."""

    def close(self) -> None:
        """The journal is closed."""


class Committer:
    """Owns `log` in a thread of its own from `start` until `on_end` was called.

    All callbacks come from that thread. on_end: None after `stop`, else the error that ended it. on_switch: a new file
    was begun.
    """

    def __init__(
        self,
        log: Log,
        *,
        frame_bytes_max: int,
        on_commit: Callable[[Commit], None],
        on_switch: Callable[[], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._log = log
        self._frame_bytes_max = frame_bytes_max
        self._on_commit, self._on_switch, self._on_end = on_commit, on_switch, on_end
        self.beside: Beside | None = None
        self._pending: deque[Append] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_asleep = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="ucxkv-journal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, append: Append) -> None:
        """Hand one over; its lsn follows the last one's."""
        self._pending.append(append)
        if self._is_asleep:
            self._is_asleep = False
            self._bell.put(None)

    def stop(self) -> None:
        """Write what was handed over, then end."""
        self._is_stopping = True
        self._bell.put(None)

    def _run(self) -> None:
        try:
            while True:
                while self._pending:
                    self.commit_next()
                self._is_asleep = True
                if self._pending:  # it came between the two looks
                    self._is_asleep = False
                elif self._is_stopping:
                    break
                else:
                    self._bell.get()
                    self._is_asleep = False
        except BaseException as exc:
            self._on_end(exc)
        else:
            self._on_end(None)

    def commit_next(self) -> None:
        """Write one frame of what is pending, which is not empty."""
        pending = self._pending
        first = pending.popleft()
        records, nbytes = [*first.records], first.nbytes
        while pending:
            following = pending[0]
            both = frame_bytes(len(records) + len(following.records), nbytes + following.nbytes)
            if following.epoch != first.epoch or both > self._frame_bytes_max or both > _FRAME_BYTES:
                break
            pending.popleft()
            records += following.records
            nbytes += following.nbytes
        if self.beside is not None:
            self.beside.keep(records)
        begun = self._log.files_begun
        disk_bytes = self._log.write(first.epoch, first.lsn, records)
        self._on_commit(Commit(first.lsn + len(records) - 1, len(records), nbytes, disk_bytes))
        if self._log.files_begun != begun:
            self._on_switch()


class LoopCommitter(Committer):
    """The same without a thread: frames are written in the loop's next turn, and callbacks come from there.

    For simulations that bring their own disk and clock; a real disk would stop the loop.
    """

    def start(self) -> None:
        """Nothing to start."""
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = self._is_over = False

    def put(self, append: Append) -> None:
        """Hand one over; its lsn follows the last one's."""
        self._pending.append(append)
        self._schedule()

    def stop(self) -> None:
        """Write what was handed over, then end."""
        self._is_stopping = True
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self._is_over:
            return
        error: BaseException | None = None
        try:
            while self._pending:
                self.commit_next()
        except Exception as exc:
            error = exc
        if error is not None or self._is_stopping:
            self._is_over = True
            self._on_end(error)


class LoopExecutor(Executor):
    """Runs what is submitted at once, in the caller."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See concurrent.futures.Executor."""
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as exc:
            done.set_exception(exc)
        return done
