"""The control plane of many machines: one etcd, this cluster's keys under /ucxkv/CLUSTER/.

A change is one transaction that compares the key's mod_revision. When its answer is lost, the key is read again. At the
expected revision still: the change is sent again (two changes that expect one revision can't both happen). The caller's
value under the caller's lease: it happened. Anything else, and a key that was and is absent (it may have been made and
gone since): OutcomeUnknown. So that "the caller's value" means the caller, a value names its writer.

A watch goes on after any interruption from the last revision that it delivered; where etcd compacted that away, or its
data were replaced, it says RESYNC and goes on from then. etcd grants leases in whole seconds and seldom less than two:
the holder counts the time that it asked for, so it always ends first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any, Final

from etcd3aio import _protobuf as pb

from ucxkv import errors
from ucxkv.control.base import (
    Change,
    ChangeKind,
    Conflict,
    ControlClosed,
    Entry,
    LeaseLost,
    OutcomeUnknown,
    check_change,
    check_key,
    check_prefix,
    check_ttl,
    prefix_end,
)
from ucxkv.control.etcd_client import Ambiguous, Compacted, EtcdClient, NoLease, NotSent
from ucxkv.control.lease import Lease

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ucxkv.control.base import Clock

__all__ = ["EtcdControl"]

_WATCH_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_SENDS_MAX: Final = 3

log = logging.getLogger("ucxkv.control")


class EtcdControl:
    """A `ControlPlane` in etcd. Open it with `await EtcdControl.open(endpoints, cluster, clock)`."""

    def __init__(self, endpoints: tuple[str, ...], cluster: str, clock: Clock, timeout_s: float = 5.0) -> None:
        self._clock = clock
        self._client = EtcdClient(endpoints, timeout_s)
        self._root = f"/ucxkv/{cluster}/".encode()
        self._leases: set[Lease] = set()

    @classmethod
    async def open(cls, endpoints: tuple[str, ...], cluster: str, clock: Clock, timeout_s: float = 5.0) -> EtcdControl:
        """Connect and ask once. Raises Unavailable, and SetupError when what answers is no etcd for us."""
        self = cls(endpoints, cluster, clock, timeout_s)
        try:
            await self._revision()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def get(self, key: str) -> Entry | None:
        """See `ControlPlane`."""
        check_key(key)
        found = await self._get(key)
        return None if found is None else self._entry(found)

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        """See `ControlPlane`."""
        check_prefix(prefix)
        first, end = self._range(prefix)
        answer = await self._client.ask("KV", "Range", pb.RangeRequest(key=first, range_end=end))
        return [self._entry(found) for found in answer.kvs], int(answer.header.revision)

    async def compare_and_set(
        self, key: str, expected_revision: int, value: bytes | None, *, lease: Lease | None = None
    ) -> Entry | None:
        """See `ControlPlane`."""
        check_change(key, expected_revision, value)
        if lease is not None and lease.lost.done():
            raise LeaseLost(f"the lease for {key} is over: {lease.lost.result()}")
        lease_id = lease.id if lease is not None else 0
        request = self._transaction(key, expected_revision, value, lease_id)
        lost = 0
        while lost < _SENDS_MAX:
            try:
                answer = await self._client.ask_once("KV", "Txn", request)
            except NotSent:
                if lost:
                    break
                raise
            except NoLease:
                if lost:
                    break
                raise LeaseLost(f"the lease {lease_id:#x} for {key} is over") from None
            except Ambiguous as exc:
                lost += 1
                log.debug("control.answer_lost key=%s why=%s", key, exc)
                try:
                    found = await self._get(key)
                except errors.Unavailable:
                    break
                if expected_revision and found is not None and found.mod_revision == expected_revision:
                    continue
            else:
                if answer.succeeded:
                    return None if value is None else Entry(key, value, int(answer.header.revision))
                kvs = answer.responses[0].response_range.kvs
                found = kvs[0] if kvs else None
                if not lost:
                    current = self._entry(found) if found is not None else None
                    raise Conflict(f"{key} is not at revision {expected_revision}", current=current)
            if value is not None and found is not None and (found.value, found.lease) == (value, lease_id):
                return self._entry(found)
            break
        raise OutcomeUnknown(f"etcd's answer about the change of {key} got lost; it may have happened")

    async def lease(self, ttl_s: float) -> Lease:
        """See `ControlPlane`."""
        check_ttl(ttl_s)
        asked_ns = self._clock.now_ns()
        # repeated when the answer got lost: a lease without keys that nobody knows of ends by itself
        answer = await self._client.ask("Lease", "LeaseGrant", pb.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        lease = Lease(self, self._clock, int(answer.ID), ttl_s)
        lease.start(asked_ns, float(answer.TTL))
        self._leases = {held for held in self._leases if not held.lost.done()} | {lease}
        return lease

    async def renew_lease(self, lease_id: int) -> float | None:
        """See `LeaseEngine`."""
        try:
            answer = await self._client.ask("Lease", "LeaseKeepAlive", pb.LeaseKeepAliveRequest(ID=lease_id))
        except NoLease:
            return None
        return float(answer.TTL) if answer.TTL > 0 else None

    async def end_lease(self, lease_id: int) -> None:
        """See `LeaseEngine`."""
        with contextlib.suppress(NoLease):
            await self._client.ask("Lease", "LeaseRevoke", pb.LeaseRevokeRequest(ID=lease_id))

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[Change, None]:
        """See `ControlPlane`."""
        check_prefix(prefix)
        after, attempt, data_id = after_revision, 0, self._client.data_id
        first, end = self._range(prefix)
        while not self._client.is_closed:
            stream = self._client.events(first, end, after, data_id)
            try:
                async for reached, events in stream:
                    attempt = 0
                    for event in events:
                        yield self._change(event)
                    after = reached
            except Compacted:
                with contextlib.suppress(errors.Unavailable):
                    after = await self._revision()
                    data_id = self._client.data_id
                    yield Change(ChangeKind.RESYNC, Entry(prefix, b"", after))
            except errors.Unavailable:
                if not self._client.is_closed:
                    await asyncio.sleep(_WATCH_BACKOFF_S[min(attempt, len(_WATCH_BACKOFF_S) - 1)])
                attempt += 1
            finally:
                await stream.aclose()
        raise ControlClosed()

    async def aclose(self) -> None:
        """See `ControlPlane`."""
        leases, self._leases = self._leases, set()
        for lease in leases:
            lease.abandon("this control plane was closed")
        for lease in leases:
            await lease.stopped()
        await self._client.aclose()

    # ---- etcd's words

    def _key(self, key: str) -> bytes:
        return self._root + key.encode()

    def _range(self, prefix: str) -> tuple[bytes, bytes]:
        first = self._key(prefix)
        end = prefix_end(first)
        assert end is not None  # the root is printable
        return first, end

    def _entry(self, kv: Any) -> Entry:
        return Entry(kv.key[len(self._root) :].decode(), kv.value, int(kv.mod_revision))

    def _change(self, event: Any) -> Change:
        return Change(ChangeKind.DELETE if event.type else ChangeKind.PUT, self._entry(event.kv))

    async def _get(self, key: str) -> Any:
        answer = await self._client.ask("KV", "Range", pb.RangeRequest(key=self._key(key)))
        return answer.kvs[0] if answer.kvs else None

    async def _revision(self) -> int:
        request = pb.RangeRequest(key=self._root, count_only=True)
        return int((await self._client.ask("KV", "Range", request)).header.revision)

    def _transaction(self, key: str, expected_revision: int, value: bytes | None, lease_id: int) -> Any:
        name = self._key(key)
        compare = pb.Compare(key=name, target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=expected_revision)
        if value is None:
            act = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=name))
        else:
            act = pb.RequestOp(request_put=pb.PutRequest(key=name, value=value, lease=lease_id))
        look = pb.RequestOp(request_range=pb.RangeRequest(key=name))
        return pb.TxnRequest(compare=[compare], success=[act], failure=[look])
