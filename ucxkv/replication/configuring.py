"""The shard's configuration as one replica sees and changes it: one write at a time, and none left in doubt (R2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucxkv.replication import events as ev

if TYPE_CHECKING:
    from ucxkv.replication.config import Member, ShardConfig
    from ucxkv.replication.replica import Replica

__all__ = ["ConfigCell"]


class ConfigCell:
    """value, revision: the newest that was seen."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.value: ShardConfig | None = None
        self.revision = 0
        self.is_known = False
        """Whether the control plane has been heard at all."""
        self._asked: ShardConfig | None = None
        """The write that is not answered yet."""
        self._open: list[tuple[int, ShardConfig]] = []
        """Writes that may still come true, with the revision they are on: until a later revision is seen."""
        self._wants_read = True
        self._read_ns: int | None = None
        self._written_ns = 0

    @property
    def is_settled(self) -> bool:
        """Whether it is known, and no write of this replica is under way or in doubt."""
        return self.is_known and self._asked is None and not self._open and not self._wants_read

    @property
    def doubtful(self) -> set[Member]:
        """Members that are in sync if a write comes true that is not answered or not settled."""
        return {member for _, config in self._open for member in config.insync if config.epoch == self._replica.epoch}

    def want_read(self, now_ns: int) -> None:
        """Have it read anew, soon."""
        self._wants_read = True

    def seen(self, value: ShardConfig | None, revision: int, now_ns: int) -> None:
        """It was read, or a watch told of it."""
        self._wants_read = False
        if self.is_known and revision <= self.revision and (value == self.value or revision < self.revision):
            return
        is_back = value is None or (self.value is not None and value.epoch < self.value.epoch)
        if self.is_known and self.value is not None and is_back:
            self._replica.fail("the control plane lost or turned back this shard's configuration")
            return
        known, said = self._replica.log.last_epoch, 0 if value is None else value.epoch
        if said < known:
            self._replica.fail(
                f"the journal has epoch {known}, the control plane {said}: another cluster's, or set back"
            )
            return
        self._take(value, revision, now_ns)

    def _take(self, value: ShardConfig | None, revision: int, now_ns: int) -> None:
        """A newer revision: what was to be written on an older one has come true in it, or never will."""
        self.is_known, self.value, self.revision = True, value, revision
        self._open = [(on, config) for on, config in self._open if on >= revision]
        self._replica.config_changed(now_ns)

    def write(self, value: ShardConfig, now_ns: int) -> None:
        """Ask for `value` to follow what was seen last. The caller has looked at `is_settled`."""
        assert self._asked is None
        self._asked, self._written_ns = value, now_ns
        self._open.append((self.revision, value))
        self._replica.effects.append(ev.WriteConfig(self.revision if self.value is not None else 0, value))

    def written(self, outcome: ev.Outcome, revision: int, now_ns: int) -> None:
        """The answer to `write`."""
        asked, self._asked = self._asked, None
        assert asked is not None
        if outcome is ev.Outcome.WRITTEN:
            if revision > self.revision:
                self._take(asked, revision, now_ns)
            return
        if outcome is ev.Outcome.CONFLICT:
            self._open = [one for one in self._open if one[1] is not asked]
        self._wants_read = True
        self._read_ns = now_ns if outcome is ev.Outcome.UNKNOWN else now_ns - self._replica.timing.retry_ns

    def settle(self, now_ns: int) -> None:
        """Read where that is due; when a write is in doubt, write what is held now once more, so that it fails."""
        retry_ns = self._replica.timing.retry_ns
        if self._asked is not None:
            return
        if self._wants_read:
            if self._read_ns is None or now_ns - self._read_ns >= retry_ns:
                self._read_ns = now_ns
                self._replica.effects.append(ev.ReadConfig())
        elif self._open and now_ns - self._written_ns >= retry_ns:
            if self._replica.leading is None or self.value is None:
                self._open.clear()  # only a leader's commits go by it
            else:
                self.write(self.value, now_ns)
