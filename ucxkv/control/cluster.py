"""A cluster's records over any control plane: the cluster itself, its members under their leases, its shards.

Promises
  - Incarnations of one name grow with every registration, whatever becomes of the processes.
  - At most one live registration a name: a second one is refused while the first's lease lives, and takes over then.
  - A shard's configuration follows the one that was read, or is not written. No record of a newer version is written
    over."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ucxkv import errors
from ucxkv.control.base import Conflict, OutcomeUnknown, SystemClock
from ucxkv.control.mirror import mirror
from ucxkv.control.opening import open_control
from ucxkv.control.records import (
    ClusterRecord,
    Draining,
    Incarnation,
    MemberRecord,
    ShardRecord,
    decode_record,
    encode_record,
)
from ucxkv.sharding import ShardRule

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from ucxkv.control.base import Clock, ControlPlane, Entry
    from ucxkv.control.lease import Lease
    from ucxkv.control.mirror import Picture
    from ucxkv.protocol.messages import MemberInfo
    from ucxkv.replication import ShardConfig

__all__ = ["Cluster", "ClusterView", "NameTaken", "Registration", "registered_addresses"]

CLUSTER: Final = "cluster"
MEMBERS: Final = "members/"
INCARNATIONS: Final = "incarnations/"
SHARDS: Final = "shards/"
DRAINING: Final = "draining/"

_CONFLICTS_MAX: Final = 32
_NAME_POLL_S: Final = 0.2


class NameTaken(errors.SetupError):
    """A live node is registered under this name. other: that one."""

    other: MemberRecord | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """One life of a node in the cluster: it holds while `lease` does."""

    record: MemberRecord
    lease: Lease


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster as it was at one revision: all changes up to it are in, none after it.

    members: registered nodes, by name. shards: who holds each, with the revision to change it at; one that nobody ever
    held is missing. draining: names of nodes that are to hold nothing. unreadable: shards whose record this release
    can't read, and why; in `shards` they are as they were last read, or missing.
    """

    revision: int
    members: list[MemberRecord]
    shards: dict[int, tuple[ShardConfig, int]]
    draining: frozenset[str]
    unreadable: dict[int, errors.SetupError] = field(default_factory=dict)


class Cluster:
    """The records of one cluster. Open it with `await Cluster.open(plane)`."""

    def __init__(self, plane: ControlPlane, record: ClusterRecord, clock: Clock) -> None:
        self.plane = plane
        self.record = record
        self._clock = clock

    @classmethod
    async def open(
        cls, plane: ControlPlane, *, rule: ShardRule | None = None, replicas: int = 1, clock: Clock | None = None
    ) -> Cluster:
        """Read the cluster's record, making it (with `rule`, default `ShardRule()`, and `replicas`) when there is none
        yet.
        """
        clock = clock or SystemClock()
        wanted = rule or ShardRule()
        fresh = ClusterRecord(
            cluster_id=secrets.token_hex(8),
            shards=wanted.shards,
            fanout=wanted.fanout,
            cut_blocks=wanted.cut_blocks,
            replicas=replicas,
        )
        for _ in range(_CONFLICTS_MAX):
            entry = await plane.get(CLUSTER)
            if entry is None:
                try:
                    entry = await plane.compare_and_set(CLUSTER, 0, encode_record(fresh))
                except (Conflict, OutcomeUnknown):
                    continue  # somebody made it, perhaps this call: look
            assert entry is not None
            return cls(plane, decode_record(entry, ClusterRecord), clock)
        raise errors.Unavailable("the control plane loses its answers: the cluster's record could not be made")

    @property
    def rule(self) -> ShardRule:
        """Where blocks live in this cluster."""
        return ShardRule(self.record.shards, self.record.fanout, self.record.cut_blocks)

    # ---- members

    async def members(self) -> list[MemberRecord]:
        """Who is registered now, by name."""
        entries, _ = await self.plane.list(MEMBERS)
        return _members(entries)

    async def view(self) -> ClusterView:
        """The cluster now. Raises SetupError for a record that this release can't read."""
        entries, revision = await self.plane.list("")
        view = _view({entry.key: entry for entry in entries}, revision, {})
        for why in view.unreadable.values():
            raise why
        return view

    async def follow(self) -> AsyncGenerator[ClusterView, None]:
        """The cluster now and after every change (see `mirror`). What can't be read of one shard hides no other."""
        pictures: AsyncGenerator[Picture, None] = mirror(self.plane, "", clock=self._clock)
        shards: dict[int, tuple[ShardConfig, int]] = {}
        try:
            async for picture in pictures:
                view = _view(picture.entries, picture.revision, shards)
                shards = view.shards
                yield view
        finally:
            await pictures.aclose()

    async def set_draining(self, name: str, by: str, *, is_draining: bool) -> None:
        """Say that a node of this name is to hold nothing, or take that back. by: who says so. Idempotent."""
        key = DRAINING + name
        for _ in range(_CONFLICTS_MAX):
            entry = await self.plane.get(key)
            if (entry is not None) == is_draining:
                return
            value = encode_record(Draining(by=by)) if is_draining else None
            try:
                await self.plane.compare_and_set(key, entry.revision if entry is not None else 0, value)
            except (Conflict, OutcomeUnknown):
                continue
            return
        raise errors.Unavailable(f"{_CONFLICTS_MAX} others changed {key} first")

    async def register(self, info: MemberInfo, lease_s: float, *, wait_s: float | None = None) -> Registration:
        """Make a node known under a lease of its own, as a new incarnation.

        wait_s: how long a name that is taken may take to become free, default a little over `lease_s`: what is left of
        a process that was killed is gone by then. Raises NameTaken after it, Unavailable.
        """
        until_ns = self._clock.now_ns() + int((lease_s * 1.5 + 1 if wait_s is None else wait_s) * 1e9)
        lease = await self.plane.lease(lease_s)
        try:
            incarnation = await self._next_incarnation(info)
            record = MemberRecord(
                name=info.name,
                incarnation=incarnation,
                node_id=info.node_id,
                address=info.address,
                epoch=info.epoch,
                weight=info.weight,
                lease_s=lease_s,
            )
            await self._take_name(record, lease, until_ns)
        except BaseException:
            lease.abandon("not registered")
            raise
        return Registration(record, lease)

    async def _take_name(self, record: MemberRecord, lease: Lease, until_ns: int) -> None:
        value = encode_record(record)
        while True:
            current: Entry | None
            try:
                await self.plane.compare_and_set(MEMBERS + record.name, 0, value, lease=lease)
                return
            except Conflict as exc:
                current = exc.current
            except OutcomeUnknown:
                current = await self.plane.get(MEMBERS + record.name)
            if current is not None:
                other = decode_record(current, MemberRecord)
                if current.value == value:
                    return  # the incarnation is this registration's alone
                if self._clock.now_ns() >= until_ns:
                    raise _taken(other)
            await self._clock.sleep(_NAME_POLL_S)

    async def _next_incarnation(self, info: MemberInfo) -> int:
        key = INCARNATIONS + info.name
        for _ in range(_CONFLICTS_MAX):
            entry = await self.plane.get(key)
            number = decode_record(entry, Incarnation).number + 1 if entry is not None else 1
            fresh = encode_record(Incarnation(number=number, node_id=info.node_id))
            try:
                await self.plane.compare_and_set(key, entry.revision if entry is not None else 0, fresh)
            except (Conflict, OutcomeUnknown):
                continue  # a number that may have been taken is passed over
            return number
        raise errors.Unavailable(f"{_CONFLICTS_MAX} others took an incarnation of {info.name} first")

    # ---- shards

    async def shard(self, number: int) -> tuple[ShardConfig | None, int]:
        """Who holds a shard, and the revision to change it at: (None, 0) when nobody ever did."""
        entry = await self.plane.get(self._shard_key(number))
        return (None, 0) if entry is None else (decode_record(entry, ShardRecord).config, entry.revision)

    async def read_shard(self, number: int) -> tuple[ShardConfig | None, int]:
        """The same; for a shard that nobody ever held, the revision of the whole control plane when it was asked."""
        key = self._shard_key(number)
        entries, revision = await self.plane.list(key)
        for entry in entries:
            if entry.key == key:
                return decode_record(entry, ShardRecord).config, entry.revision
        return None, revision

    async def set_shard(self, number: int, revision: int, config: ShardConfig) -> int:
        """Let `config` follow what was read at `revision`: the new revision.

        Raises Conflict, OutcomeUnknown: read it again then.
        """
        entry = await self.plane.compare_and_set(
            self._shard_key(number), revision, encode_record(ShardRecord.of(config))
        )
        assert entry is not None
        return entry.revision

    def _shard_key(self, number: int) -> str:
        if not 0 <= number < self.record.shards:
            raise errors.UsageError(f"shard {number}; this cluster has shards 0 to {self.record.shards - 1}")
        return f"{SHARDS}{number}"


async def registered_addresses(url: str, timeout_s: float) -> list[str]:
    """Where the nodes of the cluster at `url` are. Raises Unavailable when there is none, and as `open_control`."""
    plane = await open_control(url, timeout_s=timeout_s, may_make=False)
    try:
        entries, _ = await plane.list(MEMBERS)
    finally:
        await plane.aclose()
    if not entries:
        raise errors.Unavailable(f"no node is registered in {url}; start one with ucxkv node --cluster {url}")
    return [record.address for record in _members(entries)]


def _members(entries: Iterable[Entry]) -> list[MemberRecord]:
    return sorted((decode_record(entry, MemberRecord) for entry in entries), key=lambda record: record.name)


def _view(entries: dict[str, Entry], revision: int, before: dict[int, tuple[ShardConfig, int]]) -> ClusterView:
    shards: dict[int, tuple[ShardConfig, int]] = {}
    unreadable: dict[int, errors.SetupError] = {}
    for key, entry in entries.items():
        if key.startswith(SHARDS):
            number = int(key.removeprefix(SHARDS))
            try:
                shards[number] = decode_record(entry, ShardRecord).config, entry.revision
            except errors.SetupError as exc:
                unreadable[number] = exc
                if number in before:
                    shards[number] = before[number]
    return ClusterView(
        revision=revision,
        members=_members(entry for key, entry in entries.items() if key.startswith(MEMBERS)),
        shards=shards,
        draining=frozenset(key.removeprefix(DRAINING) for key in entries if key.startswith(DRAINING)),
        unreadable=unreadable,
    )


def _taken(other: MemberRecord) -> NameTaken:
    error = NameTaken(
        f"a live node is named {other.name!r} already",
        found=f"{other.name} at {other.address}, incarnation {other.incarnation}",
        needed="one name a node",
        fix="start this one with another --name, or stop that one",
    )
    error.other = other
    return error
