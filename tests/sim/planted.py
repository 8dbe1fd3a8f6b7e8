"""Planted bugs: each changes one rule of the core, or of its shell, and must be found by the simulation.

The first seven are those that the model checker found in half-way designs (docs/correctness.md); R1 to R7 are the rules
in `ucxkv.replication.replica`. None of this is product code, and nothing here runs unless it is asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.sim.control import RemoteControl
from ucxkv.control import Lease
from ucxkv.replication import Replica, ShardConfig
from ucxkv.replication import events as ev
from ucxkv.replication.messages import Append

__all__ = ["PLANTED"]


class AckBeforeReplication(Replica):
    """R1: a record is committed when the leader alone has it."""

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        super()._lead(config, now_ns)
        leading: Any = self.leading
        leading._confirmed = lambda: self.persisted


class AnyTakeover(Replica):
    """R3: whoever knows the configuration may take over."""

    @property
    def is_insync(self) -> bool:
        return self.config.value is not None


class NoLease(Replica):
    """R5: a leader serves as long as it takes itself for one."""

    @property
    def serve_until_ns(self) -> int:
        return 1 << 62 if self.leading is not None and self.leading.is_ready else 0


class ForgetEpoch(Replica):
    """R6: a restarted node has the name that it had and no epoch: it follows whoever speaks first, and counts for it.

    It does not lead by its old configuration, nor claim its old log: that would be `resume-after-restart`.
    """

    is_forgetful = False

    def restarted(self) -> None:
        self.is_forgetful = True
        self.epoch = self.log.last_epoch
        self.claims.clear()

    def config_changed(self, now_ns: int) -> None:
        if self.leading is None and self.is_forgetful:
            return
        super().config_changed(now_ns)

    def _received(self, event: ev.Received, now_ns: int) -> None:
        if isinstance(event.message, Append):
            self.is_forgetful = False
            self.claims.add(self.me)
        super()._received(event, now_ns)


class WatermarkGoesBack(Replica):
    """R1: the watermark is what is confirmed now, less than before if need be."""

    def commit(self, watermark: int) -> None:
        if self.log.base_index <= watermark < self.watermark:
            self.watermark = watermark
        super().commit(watermark)


class AckBeforeJournal(Replica):
    """R1: what was given to the journal counts as being there."""

    def take_in(self, entries: Any) -> None:
        super().take_in(entries)
        self.persisted = self.log.last_index


class ShrinkAlone(Replica):
    """R2: a leader goes on without a member that is silent, and tells nobody."""

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        super()._lead(config, now_ns)
        leading: Any = self.leading
        required = leading.required
        clock = [now_ns]
        settle = leading.settle

        def settle_at(now: int) -> None:
            clock[0] = now
            settle(now)

        def lively() -> Any:
            silence_ns = self.timing.silence_ns // 2
            feeds = leading._feeds
            return {m for m in required() if m in feeds and clock[0] - feeds[m].heard_ns < silence_ns}

        leading.settle, leading.required = settle_at, lively


class LeaseFromAnswer(Lease):
    """The holder counts from when the answer came."""

    def _extend(self, asked_ns: int, granted_s: float) -> None:
        super()._extend(self._clock.now_ns(), granted_s)


class ControlWithLateLeases(RemoteControl):
    """Whose leases are counted from the answer."""

    lease_class = LeaseFromAnswer


class TakeoverFromTheLiving(Replica):
    """R4: a leader that was not heard of is taken for dead, whatever its lease."""

    now_ns = 0

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Effect]:
        self.now_ns = now_ns
        return super().handle(event, now_ns)

    def is_leader_gone(self, config: ShardConfig) -> bool:
        heard_ns = self.following._heard_ns
        return config.leader != self.me and heard_ns is not None and self.now_ns - heard_ns > self.timing.silence_ns


class ServeAtOnce(Replica):
    """R3: a new leader serves before its own first entry, and so all before it, is committed."""

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        super()._lead(config, now_ns)
        assert self.leading is not None
        self.leading.epoch_index = 0


class ForgottenDoubt(Replica):
    """R2: the smaller set is believed as soon as it is asked for."""

    def _lead(self, config: ShardConfig, now_ns: int) -> None:
        super()._lead(config, now_ns)
        leading: Any = self.leading

        def required() -> Any:
            assert self.config.value is not None
            return set((self.config._asked or self.config.value).insync)

        leading.required = required


PLANTED: Mapping[str, Mapping[str, Any]] = {
    "ack-before-replication": {"replica_class": AckBeforeReplication},
    "clock-reads": {"reads_everywhere": True},
    "any-takeover": {"replica_class": AnyTakeover},
    "no-lease-for-reads": {"replica_class": NoLease},
    "resume-after-restart": {"resumes": True},
    "forget-epoch": {"replica_class": ForgetEpoch, "resumes": True, "on_restart": ForgetEpoch.restarted},
    "watermark-goes-back": {"replica_class": WatermarkGoesBack},
    "ack-before-journal": {"replica_class": AckBeforeJournal},
    "shrink-alone": {"replica_class": ShrinkAlone},
    "lease-from-answer": {"control_class": ControlWithLateLeases},
    "takeover-from-the-living": {"replica_class": TakeoverFromTheLiving},
    "serve-at-once": {"replica_class": ServeAtOnce},
    "forgotten-doubt": {"replica_class": ForgottenDoubt},
}
"""Name -> what it changes in the nodes' `Settings`."""
