"""The path by UCX message: for nodes whose memory is not mapped here. The node's C thread answers, its Python does not.

Same host: shared memory with UCX's error mode NONE (in peer mode UCX would move such traffic to TCP); the control
connection
is the death signal. Elsewhere: peer mode, and over TCP blocks travel in fragments that are copied into place.

What a client knows of a node it knows of the epoch that it was welcomed in. Every answer but a block's bytes says in
which epoch it was true (`slots_resolve`); one of another epoch is UNAVAILABLE, and the node is left and dialled again.
Bytes with their sum are a HIT in any epoch: a key has one content, and the node has answered under its lease.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.path import U8, U16, U64, Fetch, ReadInto, sums_of
from ucxkv.client.results import PathKind, ReadStatus
from ucxkv.dial import ask, mapped_error
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.transport.address import TcpAddress, parse_address
from ucxkv.transport.base import TransportError
from ucxkv.transport.data import TCP_FRAGMENT_BYTES, DataClient, WriteStatus
from ucxkv.transport.endpoint import Endpoint
from ucxkv.transport.lanes import lanes_of, lanes_text
from ucxkv.transport.onesided import RemoteReader
from ucxkv.transport.progress import Worker
from ucxkv.transport.ucx import SAME_HOST_TRANSPORTS, Context, why_no_verbs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucxkv.buffers import Pieces
    from ucxkv.transport.control import ControlConnection
    from ucxkv.transport.rails import RailChoice

__all__ = ["MessageEngine", "MessagePath"]

_CLOSE_S = 2.0


class MessageEngine:
    """The UCX workers of one client: at most one for this host, and one for each choice of network devices.

    connections: over TCP to a node on another host, 1 to 8.
    """

    def __init__(self, library: str, connections: int) -> None:
        self._library = library or None
        self._connections = connections
        self._workers: dict[tuple[str, ...] | None, Worker] = {}
        """By network devices; None: for this host's nodes, over shared memory."""
        self._closing: set[asyncio.Task[None]] = set()
        self._connecting: dict[int, asyncio.Lock] = {}
        """By node: a node tells our connect requests apart by our worker alone, so there is one at a time."""

    def why_no_verbs(self) -> str:
        """See `transport.ucx.why_no_verbs`. Raises SetupError (no usable UCX here)."""
        try:
            return why_no_verbs(self._library)
        except TransportError as exc:
            raise mapped_error(exc) from exc

    def _worker(self, network: RailChoice | None) -> Worker:
        key = None if network is None else network.devices
        worker = self._workers.get(key)
        if worker is None:
            context = Context(
                transports=SAME_HOST_TRANSPORTS if network is None else None,
                devices=key or (),
                rails=len(key or ()) if network is not None and network.is_rdma else 0,
                is_shared=False,
                library_path=self._library,
            )
            try:
                worker = Worker(context)
            except BaseException:
                context.close()
                raise
            self._workers[key] = worker
        return worker

    async def open_path(
        self,
        welcome: m.Welcome,
        connection: ControlConnection,
        *,
        network: RailChoice | None,
        wants: PathKind | None,
        deadline_ns: int,
    ) -> MessagePath:
        """A path to the node behind `connection`. network: the devices to use; None: shared memory, for a process of
        this host that was reached without the network. wants: RMA or MESSAGE in any case; None: one-sided reads where
        the lane is RDMA.

        Raises SetupError (no usable UCX here), Unavailable.
        """
        is_same_host = network is None
        others: list[Endpoint] = []
        try:
            worker = self._worker(network)
            if not is_same_host and welcome.data_port and worker.context.has_rdma:
                async with self._connecting.setdefault(welcome.node_id, asyncio.Lock()):
                    opened = await _open_data(welcome, connection, worker, deadline_ns, by_socket=True)
                    endpoint = await _connect_by_socket(worker, connection, welcome.data_port, deadline_ns)
            else:
                count = 1 if is_same_host or _is_loopback(connection) else self._connections
                opened, (endpoint, *others) = await _connect_by_address(
                    welcome, connection, worker, deadline_ns, count, is_same_host=is_same_host
                )
        except TransportError as exc:
            raise mapped_error(exc, welcome.name) from exc
        client = DataClient(
            worker,
            endpoint,
            welcome.session,
            welcome.epoch,
            others=others,
            fragment_bytes=0 if is_same_host else TCP_FRAGMENT_BYTES,
        )
        try:
            path = self._path(client, endpoint, opened, is_same_host=is_same_host, wants=wants)
        except TransportError as exc:
            self.close_later(client)
            raise mapped_error(exc, welcome.name) from exc
        if others:
            path.over += f", {len(others) + 1} connections"
        connection.on_closed(lambda _: client.lost())
        client.on_lost = connection.abort  # the link ends with its data path, and is made anew
        return path

    def _path(
        self,
        client: DataClient,
        endpoint: Endpoint,
        opened: m.DataOpened,
        *,
        is_same_host: bool,
        wants: PathKind | None,
    ) -> MessagePath:
        lanes = lanes_of(endpoint)
        has_rdma = opened.has_rdma and any(lane.has_rma for lane in lanes)
        over = "shared memory" if is_same_host else "RDMA" if has_rdma else "the network"
        over = f"{over} ({lanes_text(lanes)})"
        if wants is PathKind.MESSAGE or not (wants or has_rdma):
            return MessagePath(self, client, f"messages over {over}")
        if not is_same_host and not has_rdma:
            self.close_later(client)
            raise errors.SetupError(
                "one-sided reads were demanded, and no lane to this node can do them by itself",
                found=over,
                needed="RDMA on both sides: else UCX has the node's process answer, and ends it when a reader goes",
                fix='leave the path to ucxkv (path="auto")',
            )
        from ucxkv.client.rma import RmaPath  # it builds on this module

        reader = RemoteReader(endpoint, opened.key, opened.base, opened.size_bytes)
        return RmaPath(self, client, f"one-sided reads over {over}", reader)

    def close_later(self, client: DataClient) -> None:
        """Close a data client in the background; `aclose` waits for it."""
        task = asyncio.get_running_loop().create_task(self._close_client(client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_client(self, client: DataClient) -> None:
        try:
            await client.aclose()
        except TransportError:
            return  # its worker went first

    async def aclose(self) -> None:
        """Close what is left, in UCX's order: endpoints, workers, contexts. Idempotent."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            await worker.aclose()
            worker.context.close()


async def _open_data(
    welcome: m.Welcome,
    connection: ControlConnection,
    worker: Worker,
    deadline_ns: int,
    *,
    is_same_host: bool = False,
    by_socket: bool = False,
    connections: int = 1,
) -> m.DataOpened:
    """Ask the node to let this connection's session in, by our worker's address or by the id that it connects with."""
    request = m.OpenData(
        address=worker.address,
        is_peer_mode=not is_same_host,
        is_eager_only=not is_same_host,
        client_id=worker.client_id if by_socket else 0,
        connections=connections,
    )
    opened = await ask(connection, request, deadline_ns, welcome.name)
    if not isinstance(opened, m.DataOpened):
        raise errors.Unavailable("the node's answer to OpenData does not fit it", node=welcome.name)
    return opened


async def _connect_by_address(
    welcome: m.Welcome,
    connection: ControlConnection,
    worker: Worker,
    deadline_ns: int,
    count: int,
    *,
    is_same_host: bool,
) -> tuple[m.DataOpened, list[Endpoint]]:
    """`count` endpoints to the node's worker, and the node's to ours.

    Over the network ours stand first: the node's then use the same connections, and connect to nobody, which firewalls
    and address translation on this side would prevent.
    """
    endpoints: list[Endpoint] = []
    try:
        for _ in range(count):
            endpoints.append(Endpoint.connect(worker, welcome.data_address, is_peer_mode=not is_same_host))
            if not is_same_host:
                await endpoints[-1].flush(deadline_ns=deadline_ns)
        opened = await _open_data(
            welcome, connection, worker, deadline_ns, is_same_host=is_same_host, connections=count
        )
        return opened, endpoints
    except BaseException:
        for endpoint in endpoints:
            await endpoint.aclose(force=True)
        raise


def _is_loopback(connection: ControlConnection) -> bool:
    """Whether the control connection stays on this host, where more than one connection only costs."""
    host = parse_address(connection.peer_text)
    return not isinstance(host, TcpAddress) or ipaddress.ip_address(host.host).is_loopback


async def _connect_by_socket(worker: Worker, connection: ControlConnection, port: int, deadline_ns: int) -> Endpoint:
    """An endpoint through the listener at the host that the control connection leads to, once it stands.

    Waited for, since what is sent one-sidedly needs the lanes that are agreed on then.
    """
    host = parse_address(connection.peer_text)
    if not isinstance(host, TcpAddress):
        raise errors.Unavailable(f"{host} is no address that UCX connects to")
    endpoint = Endpoint.connect_socket(worker, host.host, port)
    try:
        await endpoint.flush(deadline_ns=deadline_ns)
    except BaseException:
        await endpoint.aclose(force=True)
        raise
    return endpoint


class MessagePath:
    """One node by messages. See `Path`."""

    kind = PathKind.MESSAGE

    def __init__(self, engine: MessageEngine, client: DataClient, over: str) -> None:
        self._engine = engine
        self._client = client
        self._is_closed = False
        self.over = over
        self.why = ""
        self.on_other_epoch: Callable[[], None] | None = None
        """See Path."""
        client.on_other_epoch = self._leave_epoch
        self.read_into: ReadInto | None = client.into_reader()
        """See Path."""
        self.fetch: Fetch | None = None
        """See Path."""
        self._write_one = client.value_writer()

    def _leave_epoch(self) -> None:
        if not self._is_closed and self.on_other_epoch is not None:
            self.on_other_epoch()

    def _gone(self) -> errors.Unavailable:
        why = self._client.error
        if why is None:
            return errors.Unavailable(
                "the node does not answer, its lease is over, or it went over to another epoch; retry, or recompute"
            )
        return errors.Unavailable(f"the node cannot be reached by messages: {why}")

    async def read(self, keys: bytes, pieces: Pieces, deadline_ns: int | None) -> tuple[U8, U64]:
        """See Path. A block that was replaced under the read is asked for once more."""
        status, lengths = await self._read(keys, pieces, deadline_ns)
        stale = np.flatnonzero(status == ReadStatus.STALE)
        if len(stale):
            again = b"".join(keys[16 * i : 16 * i + 16] for i in stale.tolist())
            status[stale], lengths[stale] = await self._read(again, pieces.take(stale), deadline_ns)
        return status, lengths

    async def _read(self, keys: bytes, pieces: Pieces, deadline_ns: int | None) -> tuple[U8, U64]:
        try:
            status, lengths, _ = await self._client.read(
                keys, pieces.first, pieces.addr, pieces.length, keep=pieces, deadline_ns=deadline_ns
            )
        except TransportError as exc:
            raise mapped_error(exc) from exc
        return status, lengths

    async def lookup(self, keys: bytes, deadline_ns: int | None) -> tuple[U8, U64, U8]:
        """See Path."""
        try:
            found = await self._client.lookup(keys, deadline_ns=deadline_ns)
        except TransportError as exc:
            raise mapped_error(exc) from exc
        if (found["status"] == ReadStatus.UNAVAILABLE).any():
            raise self._gone()
        visible = ((found["status"] == ReadStatus.HIT) | (found["status"] == ReadStatus.UNMAPPED)).astype(np.uint8)
        return visible, found["length"].astype(np.uint64), found["tier"].astype(np.uint8)

    async def exists(self, keys: bytes, deadline_ns: int | None) -> U8:
        """See Path."""
        visible, _, _ = await self.lookup(keys, deadline_ns)
        return visible

    async def match(self, keys: bytes, deadline_ns: int | None) -> int:
        """See Path."""
        visible, _, _ = await self.lookup(keys, deadline_ns)
        gaps = np.flatnonzero(visible == 0)
        return int(gaps[0]) if len(gaps) else len(visible)

    async def write(self, pieces: Pieces, regions: U16, offsets: U64, deadline_ns: int | None) -> U64:
        """See Path."""
        sums = await sums_of(pieces)
        first = np.ascontiguousarray(pieces.first)
        try:
            status = await self._client.write(
                regions, offsets, first, pieces.addr, pieces.length, keep=pieces, deadline_ns=deadline_ns
            )
        except TransportError as exc:
            raise mapped_error(exc) from exc
        if (status != WriteStatus.WRITTEN).any():
            raise errors.Unavailable(f"a write was not taken: {WriteStatus(int(status.max())).name}")
        return sums

    async def write_one(
        self, address: int, nbytes: int, region: int, offset: int, keep: object, deadline_ns: int
    ) -> int:
        """See Path."""
        total = tier_copy.engine.sum_at(address, nbytes)
        try:
            done = self._write_one(region, offset, address, nbytes, keep, deadline_ns)
            if not (done if isinstance(done, bool) else await done):
                raise errors.Unavailable("a write was not taken")
        except TransportError as exc:
            raise mapped_error(exc) from exc
        return total

    @property
    def is_busy(self) -> bool:
        """See Path: the node ends the data session itself before it reuses anything."""
        return False

    def close(self) -> None:
        """See Path."""
        if not self._is_closed:
            self._is_closed = True
            self._client.lost()
            self._engine.close_later(self._client)
