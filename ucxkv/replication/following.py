"""What a replica does that does not lead: take what the leader sends, confirm, ask to be let in (R6 of `replica`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucxkv.replication import events as ev
from ucxkv.replication.config import Role
from ucxkv.replication.log import decode_entry
from ucxkv.replication.messages import Append, Appended, Join, Rejected, SnapshotGot, SnapshotPart

if TYPE_CHECKING:
    from ucxkv.replication.config import Member
    from ucxkv.replication.log import Entry
    from ucxkv.replication.replica import Replica

__all__ = ["Following"]


class Following:
    """match: the log is the present leader's up to there."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._leader: Member | None = None
        self._match = 0
        self._match_epoch = 0
        self._serial = 0
        self._confirmed = -1
        self._heard_ns: int | None = None
        self._asked_ns: int | None = None
        self._parts: list[bytes] = []
        self._parts_of: tuple[int, int, int, int] | None = None

    def received(self, message: Append | SnapshotPart, now_ns: int) -> None:
        """A leader sent records or a part of a snapshot."""
        replica = self._replica
        if message.epoch < replica.epoch:
            self._reject(message.sender)
            return
        if message.epoch > replica.epoch:
            replica.step_down(now_ns, "a newer leader was heard")
            replica.epoch = message.epoch
            replica.become(Role.OUT, f"epoch {message.epoch} was heard of")
            replica.config.want_read(now_ns)
        elif replica.leading is not None:
            replica.fail(f"{message.sender} leads epoch {message.epoch}, too")
            return
        if self._match_epoch != message.epoch:
            self._match, self._match_epoch, self._confirmed = 0, message.epoch, -1
        self._leader, self._heard_ns = message.sender, now_ns
        persisting = replica.persisting
        is_taken = self._append(message) if isinstance(message, Append) else self._snapshot(message)
        if is_taken and replica.persisting == persisting:  # else once the journal has it
            self._confirm()

    def confirm(self, now_ns: int) -> None:
        """The journal has more: tell the leader."""
        if self._leader is not None and self._match_epoch == self._replica.epoch:
            held = min(self._match, self._replica.persisted)
            if held > self._confirmed:
                self._confirm()

    def settle(self, now_ns: int) -> None:
        """Ask the leader to be let in, where that is due."""
        replica, config = self._replica, self._replica.config.value
        if config is None or replica.role is not Role.OUT or config.leader.name == replica.me.name:
            return
        if not replica.is_claimed:
            return
        if replica.wish and replica.me.name not in replica.wish:
            return
        retry_ns = replica.timing.retry_ns
        if any(at is not None and now_ns - at < retry_ns for at in (self._heard_ns, self._asked_ns)):
            return
        if config.epoch == replica.epoch:
            self._asked_ns = now_ns
            log = replica.log
            join = Join(replica.me, replica.epoch, log.last_index, log.last_epoch, replica.watermark)
            replica.effects.append(ev.Send(config.leader, join))

    def _reject(self, to: Member) -> None:
        replica, log = self._replica, self._replica.log
        answer = Rejected(replica.me, replica.epoch, log.last_index, log.last_epoch, replica.watermark)
        replica.effects.append(ev.Send(to, answer))

    def _confirm(self) -> None:
        replica = self._replica
        assert self._leader is not None
        self._confirmed = min(self._match, replica.persisted)
        answer = Appended(replica.me, replica.epoch, self._confirmed, self._serial)
        replica.effects.append(ev.Send(self._leader, answer))

    def _append(self, message: Append) -> bool:
        """Whether it was taken."""
        replica, log = self._replica, self._replica.log
        self._serial = message.serial
        if replica.is_other_history(message.prev_index, message.prev_epoch):
            self._forsake()
            self._reject(message.sender)
            return False
        if message.prev_index > replica.watermark and log.epoch_at(message.prev_index) != message.prev_epoch:
            self._reject(message.sender)
            return False
        fresh: list[Entry] = []
        for raw in message.entries:
            entry = decode_entry(raw)
            if entry.index <= replica.watermark:
                if replica.is_other_history(entry.index, entry.epoch):
                    self._forsake()
                    self._reject(message.sender)
                    return False
                continue
            known = log.epoch_at(entry.index) if not fresh else None
            if known == entry.epoch:
                continue
            if known is not None:
                if known >= message.epoch:
                    replica.fail(f"entry {entry.index} of epoch {known} is another one at its own leader")
                    return False
                replica.cut(entry.index - 1)
            fresh.append(entry)
        if fresh:
            replica.take_in(fresh)
        last = max(message.prev_index + len(message.entries), replica.watermark)
        self._match = max(self._match, min(last, log.last_index))
        replica.commit(min(message.watermark, self._match))
        return True

    def _forsake(self) -> None:
        self._replica.forsake()
        self._match, self._confirmed = 0, -1

    def _snapshot(self, message: SnapshotPart) -> bool:
        """Whether there is something to confirm."""
        replica = self._replica
        if replica.is_other_history(message.index, message.entry_epoch):
            self._forsake()  # with it go values that this part names: it has to come again
            self._reject(message.sender)
            return False
        if message.index <= replica.watermark:
            self._match = max(self._match, replica.watermark)
            return True
        of = (message.epoch, message.index, message.entry_epoch, message.count)
        if self._parts_of != of:
            self._parts_of, self._parts = of, []
        if message.number == len(self._parts):
            self._parts.append(message.chunk)
        if message.number < len(self._parts):
            got = SnapshotGot(replica.me, replica.epoch, message.index, message.number)
            replica.effects.append(ev.Send(message.sender, got))
        if len(self._parts) == message.count:
            chunks, self._parts, self._parts_of = tuple(self._parts), [], None
            replica.replace(message.index, message.entry_epoch, chunks)
            self._match = message.index
        return False
