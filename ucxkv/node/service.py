"""The node's data service as the node uses it: look-ups, reads and writes by UCX message, answered in C.

Optional: a host without a usable UCX serves clients that map its memory, says why the message path is off, and goes on.
An extent is writable by a message session exactly while it is granted to it; `revoke` before it gets a new meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import structlog

from ucxkv import errors
from ucxkv.protocol import WIRE_VERSION
from ucxkv.protocol import messages as m
from ucxkv.transport.base import TransportError

if TYPE_CHECKING:
    from ucxkv.node.config import NodeConfig
    from ucxkv.node.placing import Placing
    from ucxkv.node.store import HostStore
    from ucxkv.transport.memory import MemoryRegion
    from ucxkv.transport.ranking import Rail
    from ucxkv.transport.service import DataService
    from ucxkv.transport.ucx import Context

__all__ = ["Service", "port_settings"]

OWN_REGION = 0
_BUSY = 1  # transport.service.GrantStatus.BUSY, without loading libucp

log = structlog.get_logger("ucxkv.node")


class Service:
    """The data service of one node; `address` is empty and `why_off` says why while it is off."""

    def __init__(self, config: NodeConfig, store: HostStore, placing: Placing) -> None:
        self.address = b""
        self.port = 0
        """Of the listener for clients that connect by socket address; 0 = none."""
        self.why_off = ""
        self._context: Context | None = None
        self._region: MemoryRegion | None = None
        self._data: DataService | None = None
        self.rails: list[Rail] = []
        """The RDMA ports that it serves over; empty = TCP and shared memory only."""
        self._sessions: set[int] = set()
        self._has_rdma = False
        self._ports = config.data_ports()
        if not config.message_path:
            self.why_off = "switched off by message_path = false"
            return
        try:
            self._start(config, store, placing)
        except (TransportError, errors.SetupError, ImportError, OSError) as exc:
            self.why_off = str(exc)
            self._stop()
            if self._ports is not None:
                raise exc if isinstance(exc, errors.SetupError) else self._no_port(exc) from exc
            log.warning("service.off", why=self.why_off)

    def _start(self, config: NodeConfig, store: HostStore, placing: Placing) -> None:
        from ucxkv.transport.memory import MemoryRegion
        from ucxkv.transport.service import DataService
        from ucxkv.transport.ucx import Context, why_no_verbs

        library = config.ucx_library or None
        rails = placing.rails(why_no_verbs(library))
        self._context = Context(
            devices=placing.devices(rails),
            rails=len(rails),
            settings=port_settings(self._ports, has_listener=bool(rails)),
            is_shared=True,
            library_path=library,
        )
        self._region = MemoryRegion.at(self._context, store.segment.address, store.segment.size_bytes, store.segment)
        resolve, context = store.resolver()
        with placing.thread():
            self._data = DataService(self._context, resolve, context)
        self._data.lend(OWN_REGION, self._region)
        self.address = self._data.address
        self._has_rdma = self._context.has_rdma
        self.rails = placing.announced(self._context.net_devices) if self._has_rdma else []

    def _no_port(self, exc: Exception) -> errors.SetupError:
        assert self._ports is not None
        return errors.SetupError(
            f"the data service does not start with data_port {self._ports[0]}-{self._ports[1]}: {exc}",
            fix="free those ports or name others; data_port = 0 takes any",
        )

    async def listen(self, host: str, deadline_ns: int) -> None:
        """Offer connecting by socket address where there is RDMA: UCX's wire-up by worker address goes over UD there,
        which does not come through everywhere. Optional: without it clients use the address.
        """
        if self._data is None or not self._has_rdma:
            return
        try:
            self.port = await self._data.listen(
                host, self._ports[0] if self._ports is not None else 0, deadline_ns=deadline_ns
            )
        except TransportError as exc:
            if self._ports is not None:
                raise self._no_port(exc) from exc
            log.warning("service.no_listener", why=str(exc))

    def serves(self, session: int) -> bool:
        """Whether this session uses the service."""
        return session in self._sessions

    async def open_session(self, session: int, request: m.OpenData, deadline_ns: int) -> m.DataOpened:
        """Let a session in; its client's worker is at `request.address`. Raises SetupError, Unavailable, UsageError."""
        if self._data is None:
            raise errors.SetupError(f"the message path of this node is off: {self.why_off}")
        if session in self._sessions:
            raise errors.UsageError("the data path of this connection is open already")
        self._sessions.add(session)
        try:
            if request.client_id:
                opening = self._data.await_session(
                    session,
                    request.client_id,
                    is_peer_mode=request.is_peer_mode,
                    is_eager_only=request.is_eager_only,
                    deadline_ns=deadline_ns,
                )
            else:
                opening = self._data.open_session(
                    session,
                    request.address,
                    is_peer_mode=request.is_peer_mode,
                    is_eager_only=request.is_eager_only,
                    connections=request.connections,
                    deadline_ns=deadline_ns,
                )
            await opening
        except TransportError as exc:
            self._sessions.discard(session)
            raise errors.Unavailable(f"the data service cannot reach the client: {exc}") from exc
        region = self._region
        assert region is not None
        return m.DataOpened(region.address, region.length_bytes, region.pack_key(), self._has_rdma)

    async def close_session(self, session: int) -> bool:
        """End a session; True when nothing of it can write here any more."""
        if session not in self._sessions or self._data is None:
            return True
        self._sessions.discard(session)
        try:
            return await self._data.close_session(session)
        except TransportError:
            return self._data is None  # the service's end ended every transfer

    def grant(self, session: int, offsets: list[int], capacity: int) -> None:
        """Let a session write these extents."""
        if self._data is not None and session in self._sessions and offsets:
            n = len(offsets)
            self._data.grant(session, np.zeros(n, np.uint16), offsets, np.full(n, capacity, np.uint64))

    def revoke(self, session: int, offsets: bytes) -> bytes:
        """Take extents back from a session before they get a new meaning; those that are being written right now.

        No further write into them starts; ask again when the ones in flight are over.
        """
        if self._data is None or session not in self._sessions or not offsets:
            return b""
        where = np.frombuffer(offsets, np.uint64)
        status = self._data.revoke(session, np.zeros(len(where), np.uint16), where)
        busy: bytes = where[status == _BUSY].tobytes()
        return busy

    def numbers(self) -> dict[str, float]:
        """The service's counters, each named `message_...`."""
        if self._data is None:
            return {}
        return {f"message_{name}": value for name, value in self._data.counters()._asdict().items()}

    def facts(self) -> dict[str, str]:
        """Which UCX serves, or why none."""
        if self._context is None:
            return {"ucx": f"off: {self.why_off}"}
        library, lanes = self._context.library, self._context.lanes
        reads = "one-sided reads and messages" if self._has_rdma else "messages"
        return {
            "ucx": f"{library.version_text} ({library.source})",
            "ucx_path": str(library.directory),
            "transports": ", ".join(str(lane) for lane in lanes if lane.is_network) or "shared memory only",
            "protocol": f"wire {WIRE_VERSION}, {reads}",
        }

    def _stop(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            data.close()
        if self._region is not None:
            self._region.close()
            self._region = None
        if self._context is not None:
            self._context.close()
            self._context = None

    def close(self) -> None:
        """Stop the thread and give everything back. Idempotent."""
        self.address = b""
        self._stop()


def port_settings(ports: tuple[int, int] | None, *, has_listener: bool) -> dict[str, str]:
    """UCX's settings that keep its own TCP ports within data_port, beside the RDMA listener's (the first) if any."""
    if ports is None:
        return {}
    first, last = ports
    if has_listener and first == last:
        raise errors.SetupError(
            "data_port: with RDMA one port is too few",
            found=str(first),
            needed="two: one for the listener of RDMA clients, one for those over TCP",
            fix=f'data_port = "{first}-{first + 1}"',
        )
    return {"TCP_PORT_RANGE": f"{first + has_listener}-{last}"}
