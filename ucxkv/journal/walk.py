"""Reading log files from one good frame to the next, and saying why it ended.

A walk meets every record from its first file on, in order, without a gap, until the first frame that does not prove
itself. What lies behind that frame is never returned: not by this walk, and, because later frames continue the chain
from the last good one, by no later one either."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ucxkv.journal.files import Files
from ucxkv.journal.pieces import (
    BLOCK_BYTES,
    FILE,
    FRAME,
    HEAD_BYTES,
    NUMBER_MAX,
    VERSION,
    Head,
    decode_records,
    padded,
    read_head,
)

__all__ = ["Frame", "LogFile", "StopKind", "Stopped", "Walk", "log_name", "read_log_head", "sequence_of"]

_WINDOW_BYTES = 1 << 20
_FRAME_MAGIC = FRAME.to_bytes(4, "little")


class StopKind(enum.StrEnum):
    """Why a walk ended. end: nothing more was written. torn: bytes that are no frame, as a crash during a write (or an
    earlier life of the file) leaves them: nothing acknowledged is missing after the death of a process. damaged: good
    frames lie behind a bad one: acknowledged records are lost."""

    END = "end"
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Stopped:
    """Where and why replay stopped. file: empty when there was none."""

    kind: StopKind
    file: str
    offset: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.file} at byte {self.offset})" if self.file else "")


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log file's name and head."""

    name: str
    head: Head
    file_bytes: int

    @property
    def sequence(self) -> int:
        """Its number."""
        return self.head.sequence

    @property
    def lsn(self) -> int:
        """Of its first record, whether that was written or not."""
        return self.head.lsn


@dataclass(frozen=True, slots=True)
class Frame:
    """A good frame: records lsn, lsn + 1, ... of one epoch."""

    epoch: int
    lsn: int
    records: list[bytes]


def log_name(sequence: int) -> str:
    """Sorts by number."""
    return f"log-{sequence:020d}"


def sequence_of(name: str) -> int | None:
    """The number in a log file's name; None when it is none."""
    front, _, number = name.partition("-")
    is_ours = front == "log" and len(number) == 20 and number.isdecimal() and int(number) <= NUMBER_MAX
    return int(number) if is_ours else None


def read_log_head(files: Files, name: str) -> tuple[Head, bytes] | None:
    """(head, its payload) of a log file, or None when it is damaged. The version is not looked at."""
    handle = files.open(name)
    try:
        raw = files.read(handle, 0, BLOCK_BYTES)
    finally:
        files.close(handle)
    head = read_head(raw)
    if head is None or head.magic != FILE or head.length > BLOCK_BYTES - HEAD_BYTES:
        return None
    payload = raw[HEAD_BYTES : HEAD_BYTES + head.length]
    return (head, payload) if head.is_sound(raw, payload) else None


class _Window:
    """Reads of one file, a mebibyte at a time."""

    def __init__(self, files: Files, name: str) -> None:
        self._files = files
        self._handle = files.open(name)
        self.size = files.size(self._handle)
        self._start, self._held = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        """These bytes; fewer at the end."""
        at = offset - self._start
        if at < 0 or at + length > len(self._held):
            self._start, at = offset, 0
            self._held = self._files.read(self._handle, offset, max(length, _WINDOW_BYTES))
        return self._held[at : at + length]

    def close(self) -> None:
        self._files.close(self._handle)


class Walk:
    """One pass over `logs`, which are in order; the first is taken as it is, the others must continue it.

    After `frames` ended: `lsn`, `sum`, `run` of the last good frame (of the first file's head when there is none),
    `file` and `offset` where the next belongs, `stopped`. Raises OSError.
    """

    def __init__(self, files: Files, logs: Sequence[LogFile]) -> None:
        self._files = files
        self._logs = list(logs)
        self.index = 0
        self.offset = BLOCK_BYTES
        self.lsn = logs[0].lsn - 1
        self.sum = logs[0].head.sum
        self.run = logs[0].head.run
        self.last_frame_sum = logs[0].head.previous
        self.stopped = Stopped(StopKind.END, logs[0].name, BLOCK_BYTES, "not read yet")

    @property
    def file(self) -> LogFile:
        """The file that it is in."""
        return self._logs[self.index]

    def frames(self) -> Iterator[Frame]:
        """The good frames; may be called once."""
        while True:
            window = _Window(self._files, self.file.name)
            try:
                ended = ""
                while not ended:
                    frame, ended = self._next(window)
                    if frame is not None:
                        yield frame
                if self._enter_next():
                    continue
                self.stopped = self._why(window, ended)
                return
            finally:
                window.close()

    def _next(self, window: _Window) -> tuple[Frame | None, str]:
        """(the next frame, "") or (None, why there is none)."""
        end = min(window.size, self.file.file_bytes)
        if self.offset + HEAD_BYTES > end:
            return None, "full" if end == self.file.file_bytes else "the file is shorter than it was made"
        raw = window.read(self.offset, HEAD_BYTES)
        head = read_head(raw)
        if head is None or head.magic != FRAME:
            return None, "no frame" if any(raw) else "end"
        if self.offset + HEAD_BYTES + head.length > end:
            return None, "the frame goes past the end of the file"
        payload = window.read(self.offset + HEAD_BYTES, head.length)
        if not head.is_sound(raw, payload):
            return None, "the frame's sum is wrong"
        is_next = head.previous == self.sum and head.lsn == self.lsn + 1 and head.sequence == self.file.sequence
        if not is_next:
            return None, "end"  # an earlier life of the file, or a tail that was cut
        records = decode_records(payload, head.count) if head.version == VERSION else None
        if records is None:
            return None, f"a frame of version {head.version}, which this release cannot read"
        self.offset += padded(HEAD_BYTES + head.length)
        self.lsn += head.count
        self.sum = self.last_frame_sum = head.sum
        self.run = head.run
        return Frame(head.epoch, head.lsn, records), ""

    def _enter_next(self) -> bool:
        """Go to the next file if it continues this one."""
        if self.index + 1 == len(self._logs):
            return False
        head = self._logs[self.index + 1].head
        if head.lsn != self.lsn + 1 or head.previous != self.last_frame_sum:
            return False
        self.index += 1
        self.offset, self.sum, self.run = BLOCK_BYTES, head.sum, head.run
        return True

    def _why(self, window: _Window, ended: str) -> Stopped:
        file, at = self.file.name, self.offset
        behind = [each.name for each in self._logs[self.index + 1 :] if each.head.run >= self.run]
        lost = self._frames_behind(window)
        if behind or lost:
            more = [f"{lost} good frames behind it"] if lost else []
            more += [f"{', '.join(behind)} does not continue it"] if behind else []
            return Stopped(
                StopKind.DAMAGED, file, at, f"{ended}, and {' and '.join(more)}: acknowledged records are lost"
            )
        if ended in ("end", "full"):
            return Stopped(StopKind.END, file, at, "nothing more was written")
        kind = StopKind.DAMAGED if "shorter" in ended else StopKind.TORN
        return Stopped(kind, file, at, ended)

    def _frames_behind(self, window: _Window) -> int:
        """Good frames of this file behind the end that are no older than it: so something is missing."""
        found, at = 0, self.offset + BLOCK_BYTES
        while at < window.size:
            held = window.read(at, min(_WINDOW_BYTES, window.size - at))
            place = held.find(_FRAME_MAGIC)
            while place >= 0:
                if place % BLOCK_BYTES == 0 and self._is_later(window, at + place):
                    found += 1
                place = held.find(_FRAME_MAGIC, place + 1)
            at += _WINDOW_BYTES
        return found

    def _is_later(self, window: _Window, at: int) -> bool:
        raw = window.read(at, HEAD_BYTES)
        head = read_head(raw)
        if head is None or head.sequence != self.file.sequence or head.run < self.run or head.lsn <= self.lsn:
            return False
        if at + HEAD_BYTES + head.length > window.size:
            return False
        return head.is_sound(raw, window.read(at + HEAD_BYTES, head.length))
