"""Which network devices lead from this process to a node, and which way that is.

Invariants: the machine is read in a thread when the first node is reached over the network, and kept; the devices for a
node are those that lead to the address its control connection goes to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import TYPE_CHECKING

from ucxkv.transport.affinity import near_this_process
from ucxkv.transport.netlink import interface_addresses, interface_of
from ucxkv.transport.rails import choose_rails, rail_numbers
from ucxkv.transport.ranking import network_way
from ucxkv.transport.sysfs import HostTree
from ucxkv.transport.topology import read_topology

if TYPE_CHECKING:
    from ucxkv.transport.netlink import Network
    from ucxkv.transport.rails import RailChoice
    from ucxkv.transport.ranking import Location, Way
    from ucxkv.transport.sysfs import SysTree
    from ucxkv.transport.topology import Topology

__all__ = ["Networks"]


class Networks:
    """The network devices of one client. tree: where the machine is read; default: this one, without asking NVML."""

    def __init__(self, tree: SysTree | None = None) -> None:
        self._tree = HostTree(use_nvml=False) if tree is None else tree
        self._topology: Topology | None = None

    async def choose(
        self, here: Location, node: Location, local_host: str, why_no_verbs: str
    ) -> tuple[RailChoice, Way]:
        """The devices for a node, and the way there. here: this process, without rails: they depend on the node.
        local_host: this side's address of the control connection; why_no_verbs: why UCX here uses no RDMA device, ""
        when it may.
        """
        if self._topology is None:
            self._topology = await asyncio.to_thread(read_topology, self._tree)
        return choose_network(self._topology, interface_addresses(), here, node, local_host, why_no_verbs)


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
