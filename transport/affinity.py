"""Where a node's memory and its data thread belong: beside the network device that reads and writes them.

Invariants: nothing is placed on a machine with one NUMA node, nor where the device's node is unknown: a wrong placement
costs more than none. A placement is a wish (memory goes elsewhere when the node is full), never a limit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .rails import choose_rails
from .topology import Topology, near_of

__all__ = ["NumaPolicy", "Placement", "near_this_process", "place", "placement_for_node", "running_on"]

NumaPolicy = Literal["auto", "off"] | int


@dataclass(frozen=True, slots=True)
class Placement:
    """numa: the node for memory, None = wherever the kernel likes; cpus: for the data thread, empty = any."""

    numa: int | None
    cpus: tuple[int, ...]
    why: str


def place(topology: Topology, device: str) -> Placement:
    """Beside a device, by name ("mlx5_0", "eth0", "gpu0"). Raises UsageError for an unknown one."""
    numa = near_of(topology, device)
    if len(topology.numa_with_memory) < 2:
        return Placement(None, (), "one NUMA node: nothing to choose")
    if numa < 0:
        return Placement(None, (), f"the NUMA node of {device} is unknown")
    return _on(topology, numa, f"beside {device}")


def placement_for_node(topology: Topology, policy: NumaPolicy = "auto") -> Placement:
    """The placement of a ucxkv node. policy: a NUMA node's number, "off", or "auto".

    auto: beside the network device, when the best ones are all on one NUMA node. Where both sockets have such devices,
    no one is right for all of the memory: run one ucxkv node a socket, with numbers. Raises UsageError (no such node).
    """
    if policy == "off":
        return Placement(None, (), "switched off")
    if isinstance(policy, int):
        topology.numa_node(policy)
        if len(topology.numa_with_memory) < 2:
            return Placement(None, (), "one NUMA node: nothing to choose")
        return _on(topology, policy, "as configured")
    if len(topology.numa_with_memory) < 2:
        return Placement(None, (), "one NUMA node: nothing to choose")
    choice = choose_rails(topology, max_rails=1 << 10)
    if not choice.devices:
        return Placement(None, (), choice.why)
    nodes = {near_of(topology, device.partition(":")[0]) for device in choice.devices}
    if len(nodes) > 1:
        return Placement(None, (), f"{len(choice.devices)} equal devices on {len(nodes)} NUMA nodes: choose by number")
    return place(topology, choice.devices[0].partition(":")[0])


def _on(topology: Topology, numa: int, why: str) -> Placement:
    """On a node; a node without CPUs or memory gives its part to the nearest that has."""
    here = topology.numa_node(numa)
    far = dict(here.distances)
    by_distance = sorted(topology.numa, key=lambda node: (far.get(node.index, 255), node.index))
    memory = next((node.index for node in by_distance if node.memory_bytes), None)
    cpus = next((node.cpus for node in by_distance if node.cpus), ())
    return Placement(memory, cpus, why)


def near_this_process(topology: Topology) -> str:
    """ "numaN" when this process may run on one NUMA node's CPUs only, so that its memory lies there; else ""."""
    mine = os.sched_getaffinity(0)
    nodes = [node.index for node in topology.numa if mine & set(node.cpus)]
    return f"numa{nodes[0]}" if len(nodes) == 1 and len(topology.numa) > 1 else ""


@contextlib.contextmanager
def running_on(cpus: tuple[int, ...]) -> Iterator[bool]:
    """Run the calling thread on these CPUs meanwhile; threads that it starts stay there. Says whether it was done.

    CPUs that this process may not use are left out; without any of them, or an empty tuple, nothing changes.
    """
    before = os.sched_getaffinity(0)
    wanted = before & set(cpus)
    if not wanted or wanted == before:
        yield False
        return
    os.sched_setaffinity(0, wanted)
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)
