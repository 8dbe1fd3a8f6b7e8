"""Where this node's memory and data thread go, and which network devices it serves over: decided once at start from the
machine's topology and the address that it listens on.

Placement is a no-op on a machine with one NUMA node. Nothing here fails a start but a node number that does not exist.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog

from ucxkv.errors import SetupError
from ucxkv.tiers.numa import memory_near
from ucxkv.transport.address import TcpAddress, parse_address
from ucxkv.transport.affinity import placement_for_node, running_on
from ucxkv.transport.base import UsageError
from ucxkv.transport.netlink import interface_addresses, interface_of
from ucxkv.transport.rails import choose_rails, listening_interfaces, rail_numbers
from ucxkv.transport.sysfs import HostTree
from ucxkv.transport.topology import read_topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucxkv.node.config import NodeConfig
    from ucxkv.transport.netlink import Network
    from ucxkv.transport.ranking import Rail
    from ucxkv.transport.sysfs import SysTree

__all__ = ["Placing"]

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger("ucxkv.node")


class Placing:
    """One node's placement. tree: where the machine is read; default: this one, without asking NVML."""

    def __init__(self, config: NodeConfig, tree: SysTree | None = None) -> None:
        """Read the machine (milliseconds of file reads). Raises SetupError for a NUMA node that does not exist."""
        self._topology = read_topology(HostTree(use_nvml=False) if tree is None else tree)
        try:
            self.placement = placement_for_node(self._topology, config.numa)
        except UsageError as exc:
            raise SetupError(f"numa = {config.numa!r}: {exc}", fix="`ucxkv topo` shows the nodes") from exc
        near = f"numa{self.placement.numa}" if self.placement.numa is not None else ""
        addresses = interface_addresses()
        self._addressed = addresses if tree is None else None
        self._via, self._is_foreign = _interface(config.listen, addresses)
        self._choice = choose_rails(self._topology, near, worker=zlib.crc32(config.name.encode()), via=self._via)
        self._refused = ""

    def near(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `make` so that the memory which it populates is on the chosen node."""
        with memory_near(self.placement.numa) as self._refused:
            if self._refused:
                log.warning("memory.unplaced", numa=self.placement.numa, why=self._refused)
            return make(*args, **kwargs)

    def thread(self) -> AbstractContextManager[bool]:
        """Threads that are started inside run on the chosen node's CPUs."""
        return running_on(self.placement.cpus)

    def rails(self, why_no_verbs: str) -> tuple[str, ...]:
        """The RDMA ports to use; none where UCX cannot (why_no_verbs says why) or the address leads to none."""
        return self._choice.devices if self._choice.is_rdma and not why_no_verbs else ()

    def devices(self, rails: tuple[str, ...]) -> tuple[str, ...]:
        """Those rails, and the interfaces on which clients without RDMA come in; empty = UCX's own choice."""
        if self._is_foreign:  # which interface clients come over is not known: UCX opens all
            return ()
        return (*rails, *listening_interfaces(self._topology, self._via, self._addressed))

    def announced(self, devices: Iterable[str]) -> list[Rail]:
        """The rails among the devices that UCX opened."""
        numbers = rail_numbers(self._topology)
        return [numbers[device] for device in devices if device in numbers]

    def facts(self) -> dict[str, str]:
        """The placement and the devices that rank best here (or that the user named), with reasons."""
        where = "any node" if self.placement.numa is None else f"node {self.placement.numa}"
        why = f"memory refused: {self._refused}" if self._refused else self.placement.why
        devices = f"{self._choice.net_devices} ({self._choice.why})"
        if "UCX_NET_DEVICES" in os.environ:
            devices = f"{os.environ['UCX_NET_DEVICES']} (the environment's UCX_NET_DEVICES)"
        return {"numa": f"{where} ({why})", "devices": devices}


def _interface(listen: str, addresses: Mapping[str, tuple[Network, ...]]) -> tuple[str, bool]:
    """The one interface that an address to listen on belongs to, "" for any; whether it is none of this host's."""
    address = parse_address(listen)
    if not isinstance(address, TcpAddress) or address.host in ("0.0.0.0", "::"):
        return "", False
    try:
        hosts = {str(info[4][0]) for info in socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return "", True  # binding will say so
    found = {interface_of(host, addresses) for host in hosts}
    return (found.pop(), False) if len(found) == 1 and "" not in found else ("", True)
