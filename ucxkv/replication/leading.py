"""What only a leader does: confirmations, the in-sync set, sending (rules R1 to R3 of `replica`)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ucxkv.replication import events as ev
from ucxkv.replication.config import ShardConfig
from ucxkv.replication.feeding import Feed

if TYPE_CHECKING:
    from ucxkv.replication.config import Member
    from ucxkv.replication.messages import Appended, Join, Rejected, SnapshotGot
    from ucxkv.replication.replica import Replica

__all__ = ["Leading"]

_FEEDS_MAX = 64


class Leading:
    """One epoch of leadership. tags: of proposals, with the index of their last entry, in order."""

    def __init__(self, replica: Replica, config: ShardConfig, now_ns: int) -> None:
        self._replica = replica
        others = sorted(config.insync - {replica.me})
        self._feeds = {member: Feed(member, replica.timing, now_ns) for member in others}
        self._replaced: set[Member] = set()
        self._snapshots: set[Member] = set()
        self.tags: deque[tuple[int, int]] = deque()
        self.epoch_index = replica.log.last_index + 1
        self.is_leaving = False

    @property
    def is_ready(self) -> bool:
        """Whether all of earlier leaders is committed and applied here."""
        return self._replica.watermark >= self.epoch_index

    def required(self) -> set[Member]:
        """Whose confirmation a record needs: the in-sync set, and what it may become any moment (R2)."""
        cell = self._replica.config
        assert cell.value is not None
        return {*cell.value.insync, *cell.doubtful}

    # ---- messages

    def joined(self, join: Join, now_ns: int) -> None:
        """A member wants to be in sync."""
        config = self._replica.config.value
        assert config is not None
        earlier = {m for m in config.insync if m.name == join.sender.name and m != join.sender}
        if earlier:  # first out with its earlier life: its log may be cut only when it proves nothing any more
            self._replaced |= earlier
            return
        feed = self._feeds.get(join.sender)
        if feed is None:
            if len(self._feeds) >= _FEEDS_MAX:
                return
            feed = self._feeds[join.sender] = Feed(join.sender, self._replica.timing, now_ns)
        feed.joined(join, self._replica.log, now_ns)

    def appended(self, answer: Appended, now_ns: int) -> None:
        """A member confirmed."""
        feed = self._feeds.get(answer.sender)
        if feed is not None:
            feed.appended(min(answer.match_index, self._replica.log.last_index), now_ns)

    def rejected(self, answer: Rejected, now_ns: int) -> None:
        """A member lacks what was to be followed."""
        feed = self._feeds.get(answer.sender)
        if feed is not None:
            feed.joined(answer, self._replica.log, now_ns)

    def got(self, answer: SnapshotGot, now_ns: int) -> None:
        """A part of a snapshot came."""
        feed = self._feeds.get(answer.sender)
        if feed is not None:
            feed.got(answer, now_ns)

    def snapshot(self, ready: ev.SnapshotReady) -> None:
        """A snapshot was taken for a member."""
        self._snapshots.discard(ready.to)
        feed = self._feeds.get(ready.to)
        if feed is not None and feed.wants_snapshot:
            feed.snapshot(ready)

    def unfit(self, member: Member) -> None:
        """It can't keep up: out with it, where it is in sync."""
        config = self._replica.config.value
        if config is not None and member in config.insync:
            self._replaced.add(member)

    # ---- after each event

    def settle(self, now_ns: int) -> None:
        """Commit what is confirmed, change the set where that is due, send what is due."""
        replica = self._replica
        replica.commit(self._confirmed())
        if replica.config.is_settled and now_ns < replica.lease_until_ns:
            change = self._change(now_ns)
            if change is not None:
                replica.config.write(change, now_ns)
        required = self.required()
        for member, feed in list(self._feeds.items()):
            if member not in required and now_ns - feed.heard_ns > 2 * replica.timing.silence_ns:
                del self._feeds[member]
                self._snapshots.discard(member)
                continue
            replica.effects += feed.messages(replica.me, replica.epoch, replica.log, replica.watermark, now_ns)
            if feed.wants_snapshot and member not in self._snapshots:
                self._snapshots.add(member)
                replica.effects.append(ev.NeedSnapshot(member))

    def _confirmed(self) -> int:
        held = self._replica.persisted
        for member in self.required():
            if member != self._replica.me:
                feed = self._feeds.get(member)
                held = min(held, feed.match if feed is not None else -1)
        return held

    def _change(self, now_ns: int) -> ShardConfig | None:
        """The next step of the configuration, where one is due."""
        replica, config = self._replica, self._replica.config.value
        assert config is not None
        others = config.insync - {replica.me}
        if self.is_leaving and self.is_ready:
            heirs = [m for m in others if not self._is_lost(m, now_ns)]
            if heirs:
                first = replica.wish[:1]  # or two that are wished for less could hand it to each other for ever
                heir = max(heirs, key=lambda m: ((m.name,) == first, self._feeds[m].match, m))
                return replace(config, epoch=config.epoch + 1, leader=heir)
            self.is_leaving = False
        for member in sorted(others):
            if self._is_lost(member, now_ns) or (not self._is_wished(member) and self._has_all_wished(config)):
                self._replaced.discard(member)
                return replace(config, insync=config.insync - {member})
        if replica.keeps and not config.keeps:
            return replace(config, keeps=True)
        if not self.is_ready:  # not before all that was acknowledged is known to be here
            return None
        names = {member.name for member in config.insync}
        for member, feed in self._feeds.items():
            if member.name in names or feed.match < replica.watermark or not self._is_wished(member):
                continue
            if member in replica.alive and now_ns - feed.heard_ns <= replica.timing.silence_ns:
                return replace(config, insync=config.insync | {member})
        return None

    def _is_lost(self, member: Member, now_ns: int) -> bool:
        replica, feed = self._replica, self._feeds.get(member)
        if feed is None or member in self._replaced or now_ns - feed.heard_ns > replica.timing.silence_ns:
            return True
        return replica.alive_revision >= replica.config.revision and member not in replica.alive

    def _is_wished(self, member: Member) -> bool:
        return not self._replica.wish or member.name in self._replica.wish

    def _has_all_wished(self, config: ShardConfig) -> bool:
        """Whether all live nodes that are to hold the shard are in sync: before that nobody makes room for them."""
        names = {member.name for member in config.insync}
        return all(m.name in names for m in self._replica.alive if m.name in self._replica.wish)

    def check(self) -> None:
        """Assert what must hold between two events."""
        replica = self._replica
        assert replica.config.value is not None and replica.config.value.leader == replica.me
        assert all(a[0] < b[0] for a, b in zip(self.tags, list(self.tags)[1:], strict=False))
        assert all(feed.match <= replica.log.last_index for feed in self._feeds.values())
