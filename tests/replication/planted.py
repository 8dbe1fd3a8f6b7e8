"""Replicas that break one rule each; the worlds must find every one.

Not here: keeping old claims after a cut (end of R6). 150 worlds did not see it: a leader first takes a member's earlier
lives out of the set; the rule bounds the claims and stands behind that.
"""

from __future__ import annotations

from ucxkv.replication import Entry, Replica, ShardConfig
from ucxkv.replication.configuring import ConfigCell
from ucxkv.replication.leading import Leading
from ucxkv.replication.messages import Append, SnapshotPart


class AcknowledgesAlone(Replica):
    """R1: a record counts when the leader has it."""

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        super()._lead(config, now_ns)

        class Alone(Leading):
            def _confirmed(self) -> int:
                return self._replica.persisted

        assert self.leading is not None
        self.leading.__class__ = Alone


class ConfirmsBeforeItsJournal(Replica):
    """R1: a record counts when it is in memory."""

    def take_in(self, entries: list[Entry]) -> None:  # type: ignore[override]
        super().take_in(entries)
        self.persisted = self.log.last_index


class ShrinksByItself(Replica):
    """R2: who is silent needs not confirm any more, whatever the control plane says."""

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        super()._lead(config, now_ns)

        class Hasty(Leading):
            def _confirmed(self) -> int:
                replica = self._replica
                held = replica.persisted
                for member, feed in self._feeds.items():
                    if member in self.required() and feed.match >= replica.watermark:
                        held = min(held, feed.match)
                return held

        assert self.leading is not None
        self.leading.__class__ = Hasty


class SettlesByReading(Replica):
    """R2: what was read after a write of unknown outcome is taken for the outcome."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]

        class Trusting(ConfigCell):
            def seen(self, value: ShardConfig | None, revision: int, now_ns: int) -> None:
                super().seen(value, revision, now_ns)
                if self._asked is None:
                    self._open.clear()

        self.config.__class__ = Trusting


class TakesOverAnyhow(Replica):
    """R3: whoever sees no leader leads."""

    is_insync = property(lambda self: self.config.value is not None)  # type: ignore[assignment]


class TrustsAnOldList(Replica):
    """R4: a leader that is not on the members' list is gone, however old the list."""

    def is_leader_gone(self, config: ShardConfig) -> bool:
        return config.leader != self.me and config.leader not in self.alive


class ServesWithoutALease(Replica):
    """R5: who believes to lead serves."""

    @property
    def serve_until_ns(self) -> int:
        leading = self.leading
        return 1 << 62 if leading is not None and leading.is_ready else 0


class ObeysOldLeaders(Replica):
    """R6: a message counts whatever its epoch."""

    def _received(self, event: object, now_ns: int) -> None:
        message = event.message  # type: ignore[attr-defined]
        if isinstance(message, Append | SnapshotPart) and message.epoch < self.epoch and self.leading is None:
            self.epoch = message.epoch
        super()._received(event, now_ns)  # type: ignore[arg-type]


class ServesAtOnce(Replica):
    """R3: a new leader serves before all that was acknowledged is committed with it."""

    @property
    def serve_until_ns(self) -> int:
        return self.lease_until_ns if self.leading is not None and not self.leading.is_leaving else 0


class ResumesUnderItsName(Replica):
    """R3: a restarted member is what another life of it was, with whatever it has."""

    @property
    def is_insync(self) -> bool:
        config = self.config.value
        return config is not None and self.me.name in {member.name for member in config.insync}


PLANTED: list[type[Replica]] = [
    AcknowledgesAlone,
    ConfirmsBeforeItsJournal,
    ShrinksByItself,
    SettlesByReading,
    TakesOverAnyhow,
    TrustsAnOldList,
    ServesWithoutALease,
    ObeysOldLeaders,
    ServesAtOnce,
    ResumesUnderItsName,
]

__all__ = ["PLANTED", "SettlesByReading"]
