"""Bytes over the wire: UCX, control connections, addresses. Imports nothing else of ucxkv.

Importing it loads no libucp, starts no thread and sets no environment variable; the first Context loads libucp.

In reading order: base (errors, deadlines), address, frames, message, control, control_server (control connections);
library, ucx, memory, progress, endpoint (the binding: ucx.c, ops.c); service (node side: service.c, serve.c), data
(client
side: fetch.c), wire.h (the data service's messages); submit (for threads without a loop).
Topology, imported by name only: sysfs, devices, nvml, topology (what is near what), rails, ranking, affinity (what
follows from it), recording.
"""

from .address import Address, AddressError, TcpAddress, UnixAddress, format_address, parse_address
from .base import (
    Closed,
    DeadlineExceeded,
    ForkGuard,
    PeerLost,
    ProtocolError,
    SetupFailed,
    TransportError,
    UcxError,
    UsageError,
    deadline_after,
    remaining_s,
)
from .control import ControlConnection, Handler
from .control_server import ControlServer, connect
from .data import FOUND_DTYPE, TCP_FRAGMENT_BYTES, DataClient, WriteStatus
from .endpoint import SEND_EAGER, SEND_RENDEZVOUS, Endpoint, Listener
from .library import UcxLibrary, load, loaded, mapped_libucp
from .memory import MemoryRegion, RemoteKey
from .message import Message, PeerCredentials
from .progress import RECORD_DTYPE, ReceivedMessage, Worker
from .service import DataCounters, DataService, GrantStatus
from .submit import LoopThread, Ticket, submit
from .ucx import DEFAULT_SETTINGS, SAME_HOST_TRANSPORTS, Context

__all__ = [
    "DEFAULT_SETTINGS",
    "FOUND_DTYPE",
    "RECORD_DTYPE",
    "SAME_HOST_TRANSPORTS",
    "SEND_EAGER",
    "SEND_RENDEZVOUS",
    "TCP_FRAGMENT_BYTES",
    "Address",
    "AddressError",
    "Closed",
    "Context",
    "ControlConnection",
    "ControlServer",
    "DataClient",
    "DataCounters",
    "DataService",
    "DeadlineExceeded",
    "Endpoint",
    "ForkGuard",
    "GrantStatus",
    "Handler",
    "Listener",
    "LoopThread",
    "MemoryRegion",
    "Message",
    "PeerCredentials",
    "PeerLost",
    "ProtocolError",
    "ReceivedMessage",
    "RemoteKey",
    "SetupFailed",
    "TcpAddress",
    "Ticket",
    "TransportError",
    "UcxError",
    "UcxLibrary",
    "UnixAddress",
    "UsageError",
    "Worker",
    "WriteStatus",
    "connect",
    "deadline_after",
    "format_address",
    "load",
    "loaded",
    "mapped_libucp",
    "parse_address",
    "remaining_s",
    "submit",
]
