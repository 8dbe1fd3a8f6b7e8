"""Writing the log: frames into preallocated files, one file after the other, each recycled when it is trimmed.

    A frame is written behind the last good one and proves it, so that what is on the disk is always a prefix of what
    was written, plus at most one frame that nobody was told about. A file is complete (zeros everywhere, on the disk)
    before it is used, and its head is on the disk before it has a log's name. The first OSError of `write` is the last:
    what the disk holds is unknown then, so the caller writes no more (committer.py).

Files are zero-filled once and then reused: a sync of what was written before is much cheaper than one of
fresh space, and a full disk shows when the next file is made, ahead of need. Threads: `write` in one thread;
`make_ahead` and `trim` in any one other."""

from __future__ import annotations

import contextlib
import mmap
import secrets
import threading
from collections.abc import Callable, Sequence

from ucxkv.journal.files import Files
from ucxkv.journal.pieces import BLOCK_BYTES, FILE, FRAME, HEAD_BYTES, encode_records, padded, read_head, seal
from ucxkv.journal.walk import LogFile, log_name

__all__ = ["SPARE", "Log", "Spares", "frame_bytes", "retire"]

SPARE = "spare-"
_SPARES_MAX = 2
_ZEROS = mmap.mmap(-1, 1 << 20)


def frame_bytes(records: int, nbytes: int) -> int:
    """Bytes on the disk of a frame with so many records of so many bytes together."""
    return padded(HEAD_BYTES + 4 * records + nbytes)


def _head_payload(file_bytes: int, identity: bytes) -> bytes:
    """The payload of a file's head."""
    return file_bytes.to_bytes(8, "little") + identity


class Spares:
    """Zero-filled or used-up files that wait to become log files."""

    def __init__(self, files: Files, file_bytes: int) -> None:
        self._files = files
        self._file_bytes = file_bytes
        self._names: list[str] = []
        self._lock = threading.Lock()

    def adopt(self, names: Sequence[str]) -> None:
        """Take what an earlier process left; what has another size or was never finished is removed."""
        for name in names:
            if name.startswith(SPARE):
                self.give(name)

    def give(self, name: str) -> None:
        """A file that is no longer needed, under a spare's name; removed when there are enough."""
        handle = self._files.open(name)
        try:
            is_usable = self._files.size(handle) == self._file_bytes and not name.endswith(".tmp")
        finally:
            self._files.close(handle)
        with self._lock:
            if is_usable and len(self._names) < _SPARES_MAX:
                self._names.append(name)
                return
        self._files.remove(name)

    def make_ahead(self) -> None:
        """See to it that one is there; OSError when the disk is full."""
        with self._lock:
            if not self._names:
                self._names.append(self._make())

    def take(self) -> str:
        """One of them; made now when there is none."""
        with self._lock:
            return self._names.pop() if self._names else self._make()

    def _make(self) -> str:
        name = f"{SPARE}{secrets.token_hex(8)}"
        temporary = name + ".tmp"
        try:
            handle = self._files.open(temporary, create=True, direct=True)
            try:
                view = memoryview(_ZEROS)
                for at in range(0, self._file_bytes, len(view)):
                    self._files.write(handle, at, view[: min(len(view), self._file_bytes - at)])
                self._files.sync(handle)
            finally:
                self._files.close(handle)
            self._files.rename(temporary, name)
            self._files.sync_folder()
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(temporary)
            raise
        return name


class Log:
    """The open end of the log.

    logs: the files that stay, oldest first. `resume`, `begin` or `prepare_later` once before the first `write`.
    """

    def __init__(
        self,
        files: Files,
        spares: Spares,
        *,
        identity: bytes,
        file_bytes: int,
        run: int,
        is_synced: bool,
        logs: Sequence[LogFile],
        next_sequence: int,
    ) -> None:
        self._files = files
        self._spares = spares
        self._identity = identity
        self._file_bytes = file_bytes
        self._run = run
        self._is_synced = is_synced
        self._logs = list(logs)
        self._sequence = next_sequence
        self._handle = -1
        self._end = self._offset = 0
        self.files_begun = 0
        self._sum = self._last_frame_sum = 0
        self._buffer = memoryview(mmap.mmap(-1, 1 << 20))
        self._before_first: Callable[[], None] | None = None

    def prepare_later(self, call: Callable[[], None]) -> None:
        """Do this, which resumes or begins, before the first frame is written, and not before."""
        self._before_first = call

    def resume(self, offset: int, last_sum: int, last_frame_sum: int) -> None:
        """Go on in the last file, behind its last good frame. What is no good frame there loses its head: else the next
        write, cut short by a second crash, might complete a torn frame of the crash before."""
        last = self._logs[-1]
        handle = self._files.open(last.name)
        try:
            self._end = min(last.file_bytes, self._files.size(handle))
            if offset + BLOCK_BYTES <= self._end and any(self._files.read(handle, offset, BLOCK_BYTES)):
                self._files.write(handle, offset, memoryview(_ZEROS)[:BLOCK_BYTES])
                self._files.sync(handle)
        finally:
            self._files.close(handle)
        self._handle = self._files.open(last.name, direct=self._is_synced)
        self._offset, self._sum, self._last_frame_sum = offset, last_sum, last_frame_sum

    def begin(self, lsn: int) -> None:
        """Start a file whose first record will be `lsn`; it proves no file before it unless frames were written."""
        name = self._spares.take()
        handle = self._files.open(name, direct=self._is_synced)
        try:
            payload = _head_payload(self._file_bytes, self._identity)
            previous = self._last_frame_sum
            head, total = seal(FILE, payload, sequence=self._sequence, lsn=lsn, run=self._run, previous=previous)
            self._buffer[:BLOCK_BYTES] = (head + payload).ljust(BLOCK_BYTES, b"\0")
            self._files.write(handle, 0, self._buffer[:BLOCK_BYTES])
            self._files.sync(handle)
            self._files.rename(name, log_name(self._sequence))
            self._files.sync_folder()
        except BaseException:
            self._files.close(handle)
            raise
        self._close_handle()
        self._handle = handle
        written = read_head(head)
        assert written is not None
        self._logs.append(LogFile(log_name(self._sequence), written, self._file_bytes))
        self._sequence += 1
        self.files_begun += 1
        self._end, self._offset, self._sum = self._file_bytes, BLOCK_BYTES, total

    def fits(self, nbytes: int) -> bool:
        """Whether a frame of so many bytes goes into the present file."""
        return self._offset + nbytes <= self._end

    def write(self, epoch: int, lsn: int, records: Sequence[bytes]) -> int:
        """Write one frame whose first record is `lsn`, durable as the class promises; returns its bytes on the disk."""
        if self._before_first is not None:
            self._before_first()
            self._before_first = None
        payload = encode_records(records)
        nbytes = HEAD_BYTES + len(payload)
        total_bytes = padded(nbytes)
        if not self.fits(total_bytes):
            self.begin(lsn)
            assert self.fits(total_bytes), "a frame is larger than a file"
        if total_bytes > len(self._buffer):
            self._buffer = memoryview(mmap.mmap(-1, total_bytes))
        head, total = seal(
            FRAME,
            payload,
            count=len(records),
            sequence=self._logs[-1].sequence,
            epoch=epoch,
            lsn=lsn,
            run=self._run,
            previous=self._sum,
        )
        buffer = self._buffer
        buffer[:HEAD_BYTES] = head
        buffer[HEAD_BYTES:nbytes] = payload
        buffer[nbytes:total_bytes] = bytes(total_bytes - nbytes)
        self._files.write(self._handle, self._offset, buffer[:total_bytes])
        if self._is_synced:
            self._files.sync(self._handle)
        self._offset += total_bytes
        self._sum = self._last_frame_sum = total
        return total_bytes

    def trim(self, lsn: int) -> None:
        """Recycle the files all of whose records are at or before `lsn`."""
        retired = []
        while len(self._logs) > 1 and self._logs[1].lsn <= lsn + 1:
            retired.append(self._logs.pop(0))
        retire(self._files, self._spares, [each.name for each in retired])

    def close(self) -> None:
        """Give the handle back."""
        self._close_handle()

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            self._files.close(handle)


def retire(files: Files, spares: Spares, names: Sequence[str]) -> None:
    """Make log files, oldest first, into spares; their names are gone from the disk before one is written again."""
    renamed = []
    for name in names:
        spare = f"{SPARE}{secrets.token_hex(8)}"
        files.rename(name, spare)
        renamed.append(spare)
    if renamed:
        files.sync_folder()
    for name in renamed:
        spares.give(name)
