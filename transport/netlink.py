"""Which network interface has which address, asked of the kernel (rtnetlink) for this network namespace.

Invariants: nothing is cached, since addresses come and go; a kernel that does not answer (a sandbox without netlink) is
an empty answer, never an error: the choice of devices is then left to UCX.

Source: rtnetlink(7), RTM_GETADDR.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping

__all__ = ["Network", "interface_addresses", "interface_of"]

Network = ipaddress.IPv4Interface | ipaddress.IPv6Interface

_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLMSG_ERROR = 20, 22, 3, 2
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_BYTES = 1 << 17
_WAIT_S = 1.0


def interface_addresses() -> dict[str, tuple[Network, ...]]:
    """The addresses of each interface, with the prefix of the network that each is in; {} when the kernel is mute."""
    found: dict[str, list[Network]] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.settimeout(_WAIT_S)
            size = _HEADER.size + _ADDRESS.size
            kernel.send(
                _HEADER.pack(size, _RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + _ADDRESS.pack(0, 0, 0, 0, 0)
            )
            while True:
                for kind, body in _messages(kernel.recv(_ANSWER_BYTES)):
                    if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                        return {name: tuple(addresses) for name, addresses in found.items()}
                    if kind == _RTM_NEWADDR:
                        name, address = _address(body)
                        if address is not None:
                            found.setdefault(name, []).append(address)
    except OSError:
        return {}


def _messages(raw: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(raw):
        size, kind, *_ = _HEADER.unpack_from(raw, at)
        if size < _HEADER.size:
            return
        yield kind, raw[at + _HEADER.size : at + size]
        at += -(-size // 4) * 4


def _address(body: bytes) -> tuple[str, Network | None]:
    """Interface and address of one RTM_NEWADDR."""
    _, prefix, _, _, index = _ADDRESS.unpack_from(body)
    values = {}
    at = _ADDRESS.size
    while at + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, at)
        if size < _ATTRIBUTE.size:
            break
        values[kind] = body[at + _ATTRIBUTE.size : at + size]
        at += -(-size // 4) * 4
    own = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b""))  # on a point-to-point link _IFA_ADDRESS is the peer's
    if len(own) not in (4, 16):
        return "", None
    try:
        return socket.if_indextoname(index), ipaddress.ip_interface((own, prefix))
    except OSError:
        return "", None  # it went away meanwhile


def interface_of(host: str, interfaces: Mapping[str, tuple[Network, ...]]) -> str:
    """The interface that has this address (IPv4 or IPv6, a zone is ignored); "" when none has, or it is no address.

    Any loopback address is the loopback's.
    """
    try:
        wanted = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    holders = [name for name, addresses in interfaces.items() if any(wanted == a.ip for a in addresses)]
    if not holders and wanted.is_loopback:
        holders = [name for name, addresses in interfaces.items() if any(a.ip.is_loopback for a in addresses)]
    zone = host.partition("%")[2]
    return zone if zone in holders else next(iter(holders), "")
