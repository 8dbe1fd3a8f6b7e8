"""What bytes travel over, the same for every backend of a row: UCX's transports and settings, as environment variables.

Shared memory is what ucxkv's client uses to a node of its own host: `posix,cma,self`. The network to this same host is
TCP over the loopback; to another host it is UCX's own choice but shared memory. Settings of ucxkv's contexts are given
to the others too, so that code is compared, not settings. What the user set in the environment wins.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

from ucxkv.transport.ucx import DEFAULT_SETTINGS, SAME_HOST_TRANSPORTS

__all__ = ["environment", "is_loopback", "transports_of", "wire_of"]

_LOOPBACK_TRANSPORTS = "tcp,self"
_NETWORK_TRANSPORTS = "^shm"  # two containers of one kernel could share memory


def is_loopback(host: str) -> bool:
    """Whether a host is this one's loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def wire_of(path: str, *, is_same_host: bool) -> str:
    """ "shm" or "net": what UCX uses beside a path of ucxkv's client."""
    return "shm" if is_same_host and path != "network" else "net"


def transports_of(wire: str, host: str) -> str:
    """UCX_TLS for a wire."""
    if wire == "shm":
        return SAME_HOST_TRANSPORTS
    return _LOOPBACK_TRANSPORTS if is_loopback(host) else _NETWORK_TRANSPORTS


def environment(backend: str, wire: str, host: str) -> dict[str, str]:
    """UCX_ variables for a backend's process; the user's own are left as they are.

    NIXL's endpoints want error handling, which shared memory alone has not: it gets UCX's own choice, which on one host
    is shared memory too.
    """
    wanted: Mapping[str, str] = {f"UCX_{name}": value for name, value in DEFAULT_SETTINGS.items()}
    found = {**wanted, "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if (backend, wire) != ("nixl", "shm"):
        found["UCX_TLS"] = transports_of(wire, host)
    if wire == "net" and is_loopback(host):
        found["UCX_NET_DEVICES"] = "lo"
    return {name: value for name, value in found.items() if name not in os.environ}
