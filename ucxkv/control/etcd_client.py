"""etcd's version 3 API as this project uses it: unary calls with a deadline, one stream for a watch. All gRPC is here.

Promises
  - `ask` repeats only what may be repeated, over all endpoints, with back-off, until its deadline; then Unavailable.
  - `ask_once` sends at most once. NotSent: it never left. Ambiguous: etcd may have done it, or may still do it.
  - What an operator must act on (authentication, a full database, no etcd at all) is a SetupError.

Only etcd3aio's generated messages are used, over channels of our own: its calls repeat a transaction whose answer was
lost, its watch goes on after the revision at which it was created, whatever it had delivered until then, and its
channel takes no host names. Source: etcd's api_grpc_gateway and `etcdserverpb/rpc.proto`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from etcd3aio import _protobuf as pb

from ucxkv import errors
from ucxkv.control.base import ControlClosed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

__all__ = ["Ambiguous", "Compacted", "EtcdClient", "NoLease", "NotSent"]

_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
_SILENCE_S: Final = 4.0
_HAS_LEADER: Final = (("hasleader", "true"),)
"""etcd then answers Unavailable, also in the middle of a watch, while the member has no leader."""
_OPTIONS: Final = [
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses more than one ping in 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
_OPERATOR = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)

log = logging.getLogger("ucxkv.control")


class NotSent(errors.Unavailable):
    """No connection within the deadline: nothing was sent."""


class Ambiguous(errors.Unavailable):
    """It was sent and no answer came."""


class NoLease(Exception):
    """etcd knows no such lease (any more)."""


class Compacted(Exception):
    """The history that a watch asked for is gone, or etcd's data were replaced."""


class EtcdClient:
    """Channels to the members of one etcd. Make it in the loop that uses it."""

    def __init__(self, endpoints: tuple[str, ...], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._endpoints = endpoints
        self._channels = [grpc.aio.insecure_channel(f"dns:///{endpoint}", options=_OPTIONS) for endpoint in endpoints]
        self._at = 0
        self.data_id = 0
        """etcd's cluster id in the newest answer of a unary call."""
        self.is_closed = False

    async def aclose(self) -> None:
        """Close the channels; what waits on them ends in Unavailable. Idempotent."""
        self.is_closed = True
        for channel in self._channels:
            await channel.close()

    # ---- unary calls

    async def ask(self, service: str, method: str, request: Any) -> Any:
        """Send a request that may be repeated, until it is answered or the deadline passed."""
        until = asyncio.get_running_loop().time() + self.timeout_s
        attempt = 0
        while True:
            left_s = until - asyncio.get_running_loop().time()
            share_s = left_s if len(self._channels) == 1 else min(left_s, self.timeout_s / (len(self._channels) + 1))
            try:
                return await self._send(service, method, request, max(0.001, share_s))
            except Ambiguous as exc:
                pause_s = _BACKOFF_S[min(attempt // len(self._channels), len(_BACKOFF_S) - 1)]
                attempt += 1
                if asyncio.get_running_loop().time() + pause_s >= until:
                    raise errors.Unavailable(
                        f"etcd at {','.join(self._endpoints)} did not answer {method} within {self.timeout_s} s: {exc}"
                    ) from exc
                await asyncio.sleep(pause_s)

    async def ask_once(self, service: str, method: str, request: Any) -> Any:
        """Send a request at most once. Raises NotSent, Ambiguous."""
        until = asyncio.get_running_loop().time() + self.timeout_s
        await self._ready(until)
        # half of the time is kept for the caller, who has to find out what became of it
        left_s = until - asyncio.get_running_loop().time()
        return await self._send(service, method, request, max(0.001, min(left_s, self.timeout_s / 2)))

    async def _ready(self, until: float) -> None:
        """Turn to an endpoint that is connected."""
        self._refuse_closed()
        waits = {asyncio.ensure_future(channel.channel_ready()): i for i, channel in enumerate(self._channels)}
        try:
            order = [self._at, *range(len(self._channels))]
            states = [channel.get_state(try_to_connect=True) for channel in self._channels]
            for i in order:
                if states[i] is grpc.ChannelConnectivity.READY:
                    self._at = i
                    return
            left_s = until - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(waits, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and task.exception() is None:
                    self._at = waits[task]
                    return
            raise NotSent(f"no connection to etcd at {','.join(self._endpoints)} within {self.timeout_s} s")
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _send(self, service: str, method: str, request: Any, timeout_s: float) -> Any:
        self._refuse_closed()
        at = self._at
        stub = getattr(pb, f"{service}Stub")(self._channels[at])
        try:
            with self._errors(method, at):
                call: Any = getattr(stub, method)
                answer: Any
                if method == "LeaseKeepAlive":
                    stream = call(metadata=_HAS_LEADER, timeout=timeout_s)
                    try:
                        await stream.write(request)
                        answer = await stream.read()
                    finally:
                        stream.cancel()
                    if answer is grpc.aio.EOF:
                        raise Ambiguous("etcd closed the stream")
                else:
                    answer = await call(request, metadata=_HAS_LEADER, timeout=timeout_s)
        except Ambiguous:
            self._leave(at)
            raise
        self.data_id = int(answer.header.cluster_id)
        return answer

    def _leave(self, at: int) -> None:
        """Turn to the next endpoint, unless another call did."""
        if self._at == at:
            self._at = (at + 1) % len(self._channels)

    # ---- the watch's stream

    async def events(
        self, key: bytes, end: bytes, after: int, data_id: int
    ) -> AsyncGenerator[tuple[int, list[Any]], None]:
        """One stream: (revision reached, events after `after`), in order. Ends in Unavailable; raises Compacted.

        data_id: the etcd cluster that `after` is of. It asks from `after` itself on, so that etcd refuses when it
        dropped any of what follows: compaction at a revision forgets a deletion at that very revision, and a watch from
        there on would not notice. A member that is silent is asked for a sign of life, as gRPC's own pings were seen
        not to find one that is stopped; what it then says of its progress is not relied on (etcd-io/etcd#15220).
        """
        self._refuse_closed()
        create = pb.WatchCreateRequest(key=key, range_end=end, start_revision=max(1, after))
        at = self._at
        stream = pb.WatchStub(self._channels[at]).Watch(metadata=_HAS_LEADER)
        try:
            with self._errors("Watch", at):
                async with asyncio.timeout(self.timeout_s):
                    await stream.write(pb.WatchRequest(create_request=create))
            while True:
                with self._errors("Watch", at):
                    answer = await self._next_answer(stream)
                if answer is grpc.aio.EOF:
                    raise Ambiguous("etcd closed the watch")
                if answer.compact_revision or answer.header.cluster_id != data_id:
                    raise Compacted
                if answer.created and answer.header.revision < after:
                    raise Compacted  # an etcd that started again from nothing, or from an old snapshot
                if answer.canceled:
                    raise Ambiguous(f"etcd ended the watch: {answer.cancel_reason or 'no reason given'}")
                found = [event for event in answer.events if event.kv.mod_revision > after]
                if found:
                    after = found[-1].kv.mod_revision
                    yield after, found
        except Ambiguous:
            self._leave(at)
            raise
        finally:
            stream.cancel()

    async def _next_answer(self, stream: Any) -> Any:
        """What the watch says next. Raises TimeoutError when it gives no sign of life."""
        reading = asyncio.ensure_future(stream.read())
        try:
            if not (await asyncio.wait({reading}, timeout=_SILENCE_S))[0]:
                async with asyncio.timeout(self.timeout_s):
                    await stream.write(pb.WatchRequest(progress_request={}))
                if not (await asyncio.wait({reading}, timeout=self.timeout_s))[0]:
                    raise TimeoutError
            return reading.result()
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    # ---- errors

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise ControlClosed()

    @contextlib.contextmanager
    def _errors(self, method: str, at: int) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            raise self._mapped(exc, method, at) from exc
        except TimeoutError as exc:
            raise Ambiguous(f"no answer to {method}") from exc
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as exc:
            self._refuse_closed()
            raise Ambiguous(f"{method}: {exc}") from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC cancels its calls when their channel closes; nobody cancelled this task
            self._refuse_closed()
            raise Ambiguous(f"{method} was cut off") from exc

    def _mapped(self, exc: Any, method: str, number: int) -> Exception:
        code, words = exc.code(), exc.details() or ""
        at = self._endpoints[number]
        if self.is_closed:
            return ControlClosed()
        if code is grpc.StatusCode.NOT_FOUND and "lease" in words:
            return NoLease()
        if code in _OPERATOR:
            return errors.SetupError(
                f"etcd at {at} refuses {method}: {words or code.name}",
                needed="an etcd 3.4 or newer that this host may use without a user",
                fix="name etcd's client port (2379 by default); bind it to a network of the cluster's own",
            )
        if "space exceeded" in words:
            return errors.SetupError(
                f"etcd at {at} has no space left: {words}",
                fix="etcdctl compact REVISION; etcdctl defrag; etcdctl alarm disarm; raise --quota-backend-bytes",
            )
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return errors.UsageError(f"etcd at {at} refuses {method}: {words}")
        return Ambiguous(f"{at}: {code.name}: {words}")
