"""What is near what in one machine: NUMA nodes, GPUs, RDMA ports, network interfaces, and the distance between any two.

Invariants: pure over a `SysTree` (no global state, nothing cached); a `Topology` is a frozen value, equal for equal
trees; an unknown fact makes things farther, never nearer. Two devices whose NUMA nodes are unknown count as on one
node when the machine has one, else as apart.

Devices are named as people name them: gpu0, mlx5_0 (RDMA), eth0 (interface), numa0.

Distances and their names are those of `nvidia-smi topo -m`: X, NV#, PIX, PXB, PHB, NODE, SYS. As there, a device pair
behind one switch is PIX although Linux shows the switch as several bridges: at most one bridge on either side below
the deepest common one. Source: its legend; the kernel's Documentation/PCI/sysfs-pci.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .base import UsageError
from .devices import (
    Interface,
    NumaNode,
    PciPlace,
    RdmaDevice,
    RdmaPort,
    pci_place,
    read_interfaces,
    read_numa,
    read_rdma,
)
from .sysfs import HostTree, SysTree

__all__ = ["Distance", "Gpu", "Topology", "distance", "near_of", "nvlinks", "read_topology"]

PCI = "sys/bus/pci/devices"
_NVIDIA, _AMD = "0x10de", "0x1002"
_DISPLAY, _ACCELERATOR = "0x03", "0x12"


class Distance(enum.IntEnum):
    """How far apart two devices of one machine are, nearest first."""

    SELF = 0
    PIX = 1
    """At most one PCIe bridge between them (one switch)."""
    PXB = 2
    """Several PCIe bridges, no host bridge."""
    PHB = 3
    """Through one host bridge, which is where a CPU's own PCIe lanes end."""
    NODE = 4
    """Two host bridges of one NUMA node. A device and the NUMA node that it is on are NODE apart too."""
    SYS = 5
    """Through the link between NUMA nodes, or unknown."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. index: NVML's, else by PCI address; links: active NVLinks by their other end, "switch" or PCI address."""

    index: int
    name: str
    place: PciPlace
    memory_bytes: int
    links: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """One machine. driver: NVIDIA's version as NVML says; empty when NVML did not answer."""

    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    rdma: tuple[RdmaDevice, ...]
    interfaces: tuple[Interface, ...]
    driver: str

    @property
    def numa_with_memory(self) -> tuple[NumaNode, ...]:
        """The nodes where memory can lie; one or none means that placement decides nothing."""
        return tuple(node for node in self.numa if node.memory_bytes)

    def numa_node(self, index: int) -> NumaNode:
        """The NUMA node of that number. Raises UsageError that names those there are."""
        for node in self.numa:
            if node.index == index:
                return node
        raise UsageError(f"no NUMA node {index} here; there are {', '.join(str(node.index) for node in self.numa)}")

    def place(self, name: str) -> PciPlace:
        """Where the device of that name is. Raises UsageError."""
        places: dict[str, PciPlace] = {f"numa{node.index}": PciPlace(numa=node.index) for node in self.numa}
        places |= {interface.name: interface.place for interface in self.interfaces}
        places |= {device.name: device.place for device in self.rdma}
        places |= {f"gpu{gpu.index}": gpu.place for gpu in self.gpus}
        try:
            return places[name]
        except KeyError:
            raise UsageError(f"no device {name!r} here; there are {', '.join(places) or 'none'}") from None

    def usable_ports(self) -> tuple[tuple[RdmaDevice, RdmaPort], ...]:
        """RDMA ports that can carry bytes now."""
        return tuple((device, port) for device in self.rdma for port in device.ports if port.is_usable)

    def names(self) -> tuple[str, ...]:
        """The devices of the matrix: GPUs, RDMA devices, and interfaces that belong to no RDMA device."""
        owned = {interface for device in self.rdma for interface in device.interfaces}
        return (
            *(f"gpu{gpu.index}" for gpu in self.gpus),
            *(device.name for device in self.rdma),
            *(interface.name for interface in self.interfaces if interface.name not in owned),
        )


def read_topology(tree: SysTree | None = None) -> Topology:
    """Read a machine; default: this one, with NVML. Never raises for what is missing; milliseconds without NVML."""
    tree = HostTree() if tree is None else tree
    nvml = tree.nvml()
    return Topology(
        numa=read_numa(tree),
        gpus=_gpus(tree, nvml),
        rdma=read_rdma(tree),
        interfaces=read_interfaces(tree),
        driver=str(nvml.get("driver", "")) if nvml else "",
    )


def _gpus(tree: SysTree, nvml: Mapping[str, Any] | None) -> tuple[Gpu, ...]:
    if nvml:
        return tuple(_gpu_of(tree, entry) for entry in nvml["gpus"])
    found: list[Gpu] = []
    for address in tree.names(PCI):
        folder = f"{PCI}/{address}"
        kind = tree.read(f"{folder}/class")
        if not kind.startswith((_DISPLAY, _ACCELERATOR)):
            continue
        vendor = tree.read(f"{folder}/vendor")
        if vendor == _NVIDIA:
            found.append(Gpu(len(found), "NVIDIA", pci_place(tree, folder, folder), 0, ()))
        elif vendor == _AMD and kind.startswith(_ACCELERATOR):  # its display class is mostly the CPU's own graphics
            found.append(Gpu(len(found), "AMD", pci_place(tree, folder, folder), 0, ()))
    return tuple(found)


def _gpu_of(tree: SysTree, entry: Mapping[str, Any]) -> Gpu:
    """A GPU that NVML knows; one whose PCI device is masked keeps its address and NVML's NUMA node."""
    address = str(entry["pci"])
    folder = f"{PCI}/{address}"
    place = pci_place(tree, folder, folder)
    if not place.path:
        place = PciPlace((address,), int(entry.get("numa", -1)))
    links = tuple(sorted((str(end), int(count)) for end, count in entry.get("links", {}).items()))
    return Gpu(int(entry["index"]), str(entry["name"]), place, int(entry.get("memory_bytes", 0)), links)


def nvlinks(a: Gpu, b: Gpu) -> int:
    """How many NVLinks connect two GPUs: direct ones, or the fewer of their links into the switch; 0 = none."""
    if a.index == b.index:
        return 0
    ours, theirs = dict(a.links), dict(b.links)
    direct = ours.get(b.place.address, 0)
    return direct or min(ours.get("switch", 0), theirs.get("switch", 0))


def distance(topology: Topology, a: str, b: str) -> Distance:
    """How far apart two devices, given by name, are over PCIe and between sockets. Raises UsageError (unknown name)."""
    if a == b:
        return Distance.SELF
    return _between(topology, topology.place(a), topology.place(b))


def _between(topology: Topology, a: PciPlace, b: PciPlace) -> Distance:
    common = 0
    for ours, theirs in zip(a.path, b.path, strict=False):
        if ours != theirs:
            break
        common += 1
    if common == 0:
        return Distance.NODE if _same_numa(topology, a.numa, b.numa) else Distance.SYS
    if a.path == b.path:
        return Distance.PIX
    if common == 1:
        ours, theirs = a.address.rpartition(".")[0], b.address.rpartition(".")[0]
        return Distance.PIX if ours == theirs else Distance.PHB  # two functions of one device
    bridges = max(len(a.path), len(b.path)) - common - 1
    return Distance.PIX if bridges <= 1 else Distance.PXB


def _same_numa(topology: Topology, a: int, b: int) -> bool:
    if len(topology.numa) < 2:
        return True
    return a == b and a >= 0


def near_of(topology: Topology, name: str) -> int:
    """The NUMA node that a device is on; the only one where there is one; -1 unknown. Raises UsageError."""
    numa = topology.place(name).numa
    if numa < 0 and len(topology.numa) == 1:
        return topology.numa[0].index
    return numa


def matrix(topology: Topology) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Names of the devices, and for each pair what `nvidia-smi topo -m` would print: X, NV18, PIX, ... SYS."""
    names = topology.names()
    gpus = {f"gpu{gpu.index}": gpu for gpu in topology.gpus}

    def cell(a: str, b: str) -> str:
        links = nvlinks(gpus[a], gpus[b]) if a in gpus and b in gpus else 0
        if links:
            return f"NV{links}"
        apart = distance(topology, a, b)
        return "X" if apart is Distance.SELF else apart.name

    return names, tuple(tuple(cell(a, b) for b in names) for a in names)
