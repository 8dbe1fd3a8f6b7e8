"""The path by UCX message: for nodes whose memory is not mapped here. The node's C thread answers, its Python does not.

Same host: shared memory with UCX's error mode NONE (in peer mode UCX would move such traffic to TCP); the control
connection
is the death signal. Elsewhere: peer mode, and over TCP blocks travel in fragments that are copied into place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ucxkv import errors
from ucxkv.client.path import U8, U16, U64, ReadInto, pieces_iov
from ucxkv.client.results import PathKind, ReadStatus
from ucxkv.dial import ask, host_identity, mapped_error
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.transport.address import TcpAddress, parse_address
from ucxkv.transport.base import TransportError
from ucxkv.transport.data import TCP_FRAGMENT_BYTES, DataClient, WriteStatus
from ucxkv.transport.endpoint import Endpoint
from ucxkv.transport.onesided import RemoteReader
from ucxkv.transport.progress import Worker
from ucxkv.transport.ucx import SAME_HOST_TRANSPORTS, Context

if TYPE_CHECKING:
    from ucxkv.buffers import Pieces
    from ucxkv.transport.control import ControlConnection

__all__ = ["MessageEngine", "MessagePath"]

_CLOSE_S = 2.0


class MessageEngine:
    """The UCX workers of one client: at most one for this host and one for the network."""

    def __init__(self, library: str) -> None:
        self._library = library or None
        self._workers: dict[bool, Worker] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._connecting: dict[int, asyncio.Lock] = {}
        """By node: a node tells our connect requests apart by our worker alone, so there is one at a time."""

    def _worker(self, is_same_host: bool) -> Worker:
        worker = self._workers.get(is_same_host)
        if worker is None:
            transports = SAME_HOST_TRANSPORTS if is_same_host else None
            context = Context(transports=transports, is_shared=False, library_path=self._library)
            try:
                worker = Worker(context)
            except BaseException:
                context.close()
                raise
            self._workers[is_same_host] = worker
        return worker

    async def open_path(
        self, welcome: m.Welcome, connection: ControlConnection, *, is_local: bool, wants_rma: bool, deadline_ns: int
    ) -> MessagePath:
        """A path to the node behind `connection`. is_local: its process was reached without the network.

        wants_rma: read one-sidedly in any case; else where the lane is RDMA.

        Raises SetupError (no usable UCX here), Unavailable.
        """
        is_same_host = is_local and welcome.host == host_identity()
        try:
            worker = self._worker(is_same_host)
            if not is_same_host and welcome.data_port and worker.context.has_rdma:
                async with self._connecting.setdefault(welcome.node_id, asyncio.Lock()):
                    opened = await _open_data(welcome, connection, worker, deadline_ns, by_socket=True)
                    endpoint = await _connect_by_socket(worker, connection, welcome.data_port, deadline_ns)
            else:
                opened = await _open_data(welcome, connection, worker, deadline_ns, is_same_host=is_same_host)
                endpoint = Endpoint.connect(worker, welcome.data_address, is_peer_mode=not is_same_host)
        except TransportError as exc:
            raise mapped_error(exc, welcome.name) from exc
        client = DataClient(
            worker,
            endpoint,
            welcome.session,
            fragment_bytes=0 if is_same_host else TCP_FRAGMENT_BYTES,
        )
        path = self._path(client, endpoint, opened, is_same_host=is_same_host, wants_rma=wants_rma)
        connection.on_closed(lambda _: client.lost())
        client.on_lost = connection.abort  # the link ends with its data path, and is made anew
        return path

    def _path(
        self, client: DataClient, endpoint: Endpoint, opened: m.DataOpened, *, is_same_host: bool, wants_rma: bool
    ) -> MessagePath:
        over = "shared memory" if is_same_host else "the network"
        has_rdma = not is_same_host and opened.has_rdma and endpoint.worker.context.has_rdma
        if not (wants_rma or has_rdma):
            return MessagePath(self, client, f"messages over {over}")
        from ucxkv.client.rma import RmaPath  # it builds on this module

        reader = RemoteReader(endpoint, opened.key, opened.base, opened.size_bytes)
        return RmaPath(self, client, f"one-sided reads over {'RDMA' if has_rdma else over}", reader)

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
) -> m.DataOpened:
    """Ask the node to let this connection's session in, by our worker's address or by the id that it connects with."""
    request = m.OpenData(
        address=worker.address,
        is_peer_mode=not is_same_host,
        is_eager_only=not is_same_host,
        client_id=worker.client_id if by_socket else 0,
    )
    opened = await ask(connection, request, deadline_ns, welcome.name)
    if not isinstance(opened, m.DataOpened):
        raise errors.Unavailable("the node's answer to OpenData does not fit it", node=welcome.name)
    return opened


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
        self.read_into: ReadInto | None = client.into_reader()
        """See Path."""

    def _gone(self) -> errors.Unavailable:
        return errors.Unavailable(f"the node cannot be reached by messages: {self._client.error}")

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
        n = len(pieces)
        sums = np.empty(n, np.uint64)
        iov = pieces_iov(pieces).view(tier_copy.IOV_DTYPE).reshape(-1)
        first = np.ascontiguousarray(pieces.first)
        tier_copy.gather(first, iov, np.zeros(n, np.uint64), sums)
        try:
            status = await self._client.write(
                regions, offsets, first, pieces.addr, pieces.length, keep=pieces, deadline_ns=deadline_ns
            )
        except TransportError as exc:
            raise mapped_error(exc) from exc
        if (status != WriteStatus.WRITTEN).any():
            raise errors.Unavailable(f"a write was not taken: {WriteStatus(int(status.max())).name}")
        return sums

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
