"""What a leader knows of one other member, and what it sends it next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ucxkv.replication import events as ev
from ucxkv.replication.log import encode_entry
from ucxkv.replication.messages import Append, Join, Rejected, SnapshotGot, SnapshotPart

if TYPE_CHECKING:
    from ucxkv.replication.config import Member, Timing
    from ucxkv.replication.log import LogWindow

__all__ = ["Feed"]


class Feed:
    """One member, as the leader of one epoch sees it.

    match: the member's log is the leader's up to there, and in its journal; it never goes back while the member's
    incarnation lives, since nobody cuts a log within an epoch.
    """

    def __init__(self, to: Member, timing: Timing, now_ns: int) -> None:
        self.to = to
        self._timing = timing
        self.match = -1  # nothing is known of it
        self.next = 0
        self.heard_ns = now_ns
        self._sent_ns = now_ns - timing.heartbeat_ns
        self._serial = 0
        self._parts: tuple[int, int, tuple[bytes, ...]] | None = None
        self._part = 0
        self.wants_snapshot = False

    def joined(self, join: Join | Rejected, log: LogWindow, now_ns: int) -> None:
        """The member says what it has: go on where its log and ours part."""
        self.heard_ns = now_ns
        if self._parts is not None or self.wants_snapshot:
            return
        if log.epoch_at(join.last_index) == join.last_epoch:
            start = join.last_index
        elif log.base_index <= join.watermark <= log.last_index:
            start = join.watermark  # what is committed is the same everywhere
        else:
            self.wants_snapshot = True
            return
        self.next = start + 1
        self._sent_ns = now_ns - self._timing.heartbeat_ns

    def snapshot(self, ready: ev.SnapshotReady) -> None:
        """Send this state, part by part."""
        self.wants_snapshot = False
        self._parts = (ready.index, ready.entry_epoch, ready.chunks or (b"",))
        self._part = 0
        self._sent_ns -= self._timing.resend_ns

    def got(self, answer: SnapshotGot, now_ns: int) -> bool:
        """A part has come; whether the next is due at once."""
        self.heard_ns = now_ns
        if self._parts is None or answer.index != self._parts[0] or answer.number != self._part:
            return False
        if answer.number + 1 < len(self._parts[2]):
            self._part += 1
            self._sent_ns -= self._timing.resend_ns
            return True
        return False  # all is there: `appended` follows when its journal has it

    def appended(self, match_index: int, now_ns: int) -> None:
        """The member holds our log up to there."""
        self.heard_ns = now_ns
        self.match = max(self.match, match_index)
        if self._parts is not None and match_index >= self._parts[0]:
            self._parts = None
            self.next = match_index + 1
        self.next = max(self.next, self.match + 1)

    def messages(self, me: Member, epoch: int, log: LogWindow, watermark: int, now_ns: int) -> Iterator[ev.Effect]:
        """What is due: records, a part of a snapshot, again what was not confirmed, or a heartbeat."""
        timing = self._timing
        is_late = now_ns - self._sent_ns >= timing.resend_ns
        if self._parts is not None:
            if is_late:
                self._sent_ns = now_ns
                index, entry_epoch, chunks = self._parts
                part = SnapshotPart(me, epoch, index, entry_epoch, self._part, len(chunks), chunks[self._part])
                yield ev.Send(self.to, part)
            return
        if self.wants_snapshot or self.next == 0:
            if now_ns - self._sent_ns >= timing.heartbeat_ns:  # it answers with what it has
                self._sent_ns = now_ns
                yield self._append(me, epoch, log.last_index, log.last_epoch, [], watermark)
            return
        if is_late and self.match + 1 < self.next and self.match >= 0:
            self.next = self.match + 1
        if self.next <= log.base_index:
            self.wants_snapshot = True
            return
        is_sent = False
        while self.next <= log.last_index:
            room = timing.inflight_records - (self.next - 1 - max(self.match, 0))
            if self.match < 0 and is_sent:
                room = 0  # until it says that it has what the first batch follows
            if room <= 0:
                break
            entries = log.batch(self.next, room, timing.batch_bytes)
            prev_epoch = log.epoch_at(self.next - 1)
            assert prev_epoch is not None
            raw = [encode_entry(entry) for entry in entries]
            yield self._append(me, epoch, self.next - 1, prev_epoch, raw, watermark)
            self.next += len(entries)
            self._sent_ns = now_ns
            is_sent = True
        if not is_sent and now_ns - self._sent_ns >= timing.heartbeat_ns:
            prev_epoch = log.epoch_at(self.next - 1)
            assert prev_epoch is not None
            self._sent_ns = now_ns
            yield self._append(me, epoch, self.next - 1, prev_epoch, [], watermark)

    def _append(
        self, me: Member, epoch: int, prev_index: int, prev_epoch: int, entries: list[bytes], watermark: int
    ) -> ev.Send:
        self._serial += 1
        return ev.Send(self.to, Append(me, epoch, prev_index, prev_epoch, entries, watermark, self._serial))
