"""Which network devices lead from this process to a node, and which way that is.

Invariants: the machine is read once, when the first node of another host is reached (a client of its own host never
reads it), in a thread; the devices for a node are those that lead to the address its control connection goes to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import TYPE_CHECKING

from ucxkv.dial import host_identity
from ucxkv.transport.affinity import near_this_process
from ucxkv.transport.netlink import interface_addresses, interface_of
from ucxkv.transport.rails import choose_rails, rail_numbers
from ucxkv.transport.ranking import Location, network_way
from ucxkv.transport.sysfs import HostTree
from ucxkv.transport.topology import read_topology
from ucxkv.whereabouts import process_identity

if TYPE_CHECKING:
    from ucxkv.transport.netlink import Network
    from ucxkv.transport.rails import RailChoice
    from ucxkv.transport.ranking import Way
    from ucxkv.transport.sysfs import SysTree
    from ucxkv.transport.topology import Topology

__all__ = ["Networks"]

_CLOSE_S = 1.0


class Networks:
    """The network devices of one client. tree: where the machine is read; default: this one, without asking NVML."""

    def __init__(self, tree: SysTree | None = None) -> None:
        self._tree = HostTree(use_nvml=False) if tree is None else tree
        self._read: asyncio.Task[Topology] | None = None
        self.here = Location(host_identity(), process_identity())
        """This process, without rails: they depend on the node."""

    async def choose(self, node: Location, local_host: str, why_no_verbs: str) -> tuple[RailChoice, Way]:
        """The devices for a node. local_host: this side's address of the control connection; why_no_verbs: why UCX here
        uses no RDMA device, "" when it may.
        """
        if self._read is None:
            self._read = asyncio.ensure_future(asyncio.to_thread(read_topology, self._tree))
        topology = await asyncio.shield(self._read)
        return choose_network(topology, interface_addresses(), self.here, node, local_host, why_no_verbs)

    async def aclose(self) -> None:
        """Wait for the thread that reads the machine, where it still does: some milliseconds, a second at most."""
        if self._read is not None and not self._read.done():
            await asyncio.wait([self._read], timeout=_CLOSE_S)


def choose_network(
    topology: Topology,
    networks: dict[str, tuple[Network, ...]],
    here: Location,
    node: Location,
    local_host: str,
    why_no_verbs: str,
) -> tuple[RailChoice, Way]:
    """`Networks.choose` of a machine that was read. Pure."""
    choice = choose_rails(
        topology,
        near_this_process(topology),
        worker=os.getpid(),
        via=interface_of(local_host, networks),
        peer=node.rails if not why_no_verbs else frozenset(),
        networks=networks,
    )
    if why_no_verbs and node.rails:
        choice = dataclasses.replace(choice, why=f"{why_no_verbs}; {choice.why}")
    numbers = rail_numbers(topology)
    rails = frozenset(numbers[device] for device in choice.devices if choice.is_rdma)
    return choice, network_way(dataclasses.replace(here, rails=rails), node)
