"""The devices of one machine that bytes pass through: values, and how each is read from a `SysTree`.

Invariants: a fact that cannot be read is -1 (NUMA node), 0 (rates, sizes) or empty, never a guess; lists are in the
order of the kernel's numbers (NUMA, GPUs) or of names with numbers compared as numbers (mlx5_2 before mlx5_10).

Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net, sysfs-bus-pci,
stable/sysfs-devices-node. GID choice as UCX's for RoCE: v2 before v1, IPv4 before IPv6, then the lowest index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .sysfs import SysTree

__all__ = ["Gid", "Interface", "NumaNode", "PciPlace", "RdmaDevice", "RdmaPort", "parse_list", "pci_place"]

NET, RDMA, NODES = "sys/class/net", "sys/class/infiniband", "sys/devices/system/node"
_PCI_PART = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}\Z|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_GIDS_UNUSED_MAX = 16
"""Tables have up to 1,024 entries, filled from the front: after so many unused ones in a row the rest is not read."""
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_IPV4_GID = "0000:0000:0000:0000:0000:ffff:"
_ETHERNET_TYPE, _INFINIBAND_TYPE = "1", "32"  # ARPHRD_ETHER, ARPHRD_INFINIBAND


@dataclass(frozen=True, slots=True)
class NumaNode:
    """cpus: usable or not; memory_bytes: 0 for none; distances: (node's number, distance) to each, 10 = own."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a device sits. path: host bridge, bridges, then the device itself; empty for a device without PCI.

    link_gtps, link_lanes: the device's own link now (0 unknown); the maximum beside it, to see a link that trained low.
    """

    path: tuple[str, ...] = ()
    numa: int = -1
    link_gtps: float = 0.0
    link_lanes: int = 0
    link_gtps_max: float = 0.0
    link_lanes_max: int = 0

    @property
    def address(self) -> str:
        """The device's own address; empty without PCI."""
        return self.path[-1] if self.path else ""

    @property
    def link_gbps(self) -> float:
        """What the device's link carries after encoding (8b/10b up to 5 GT/s, 128b/130b above); 0 unknown."""
        return self.link_gtps * self.link_lanes * (0.8 if self.link_gtps <= 5 else 128 / 130)


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table that is in use. kind: "IB", "RoCE v1" or "RoCE v2"."""

    index: int
    kind: str
    value: str
    interface: str

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 address in disguise."""
        return self.value.startswith(_IPV4_GID)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port. link_layer: "InfiniBand" or "Ethernet"; gid_index: the entry to use, None when none will do."""

    number: int
    state: str
    link_layer: str
    rate_gbps: float
    rate_text: str
    gids: tuple[Gid, ...]
    gid_index: int | None

    @property
    def is_usable(self) -> bool:
        """Active, with an address to speak from."""
        return self.state == "ACTIVE" and self.gid_index is not None

    @property
    def gid(self) -> Gid | None:
        """The entry at gid_index."""
        return next((gid for gid in self.gids if gid.index == self.gid_index), None)


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device. interfaces: the network interfaces that belong to it; is_soft: no hardware (rxe, siw)."""

    name: str
    place: PciPlace
    ports: tuple[RdmaPort, ...]
    interfaces: tuple[str, ...]
    is_soft: bool


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that TCP may use. speed_gbps: 0 where the kernel does not know (VMs, virtual ones)."""

    name: str
    place: PciPlace
    is_up: bool
    is_virtual: bool
    speed_gbps: float
    mtu: int


def read_numa(tree: SysTree) -> tuple[NumaNode, ...]:
    """The machine's NUMA nodes; one node 0 with all CPUs where the kernel shows none."""
    found = []
    for index in parse_list(tree.read(f"{NODES}/online")):
        folder = f"{NODES}/node{index}"
        memory = re.search(r"MemTotal:\s+(\d+)", tree.read(f"{folder}/meminfo"))
        to = tree.read(f"{folder}/distance").split()
        found.append((index, parse_list(tree.read(f"{folder}/cpulist")), int(memory[1]) * 1024 if memory else 0, to))
    if not found:
        return (NumaNode(0, parse_list(tree.read("sys/devices/system/cpu/online")), 0, ((0, 10),)),)
    numbers = [index for index, *_ in found]
    return tuple(
        NumaNode(index, cpus, memory, tuple((n, int(d)) for n, d in zip(numbers, to, strict=False) if d.isdigit()))
        for index, cpus, memory, to in found
    )


def read_rdma(tree: SysTree) -> tuple[RdmaDevice, ...]:
    """Every RDMA device with its ports."""
    found = []
    for name in sorted(tree.names(RDMA), key=number_order):
        folder = f"{RDMA}/{name}"
        place = pci_place(tree, folder, f"{folder}/device")
        ports = tuple(_port(tree, f"{folder}/ports/{number}", int(number)) for number in tree.names(f"{folder}/ports"))
        interfaces = set(tree.names(f"{folder}/device/net"))
        interfaces |= {gid.interface for port in ports for gid in port.gids if gid.interface}
        parent = tree.read(f"{folder}/parent")
        is_soft = not place.path
        if is_soft and parent:  # Soft-RoCE: it is where the interface under it is
            interfaces.add(parent)
            place = pci_place(tree, f"{NET}/{parent}", f"{NET}/{parent}/device")
        found.append(RdmaDevice(name, place, ports, tuple(sorted(interfaces, key=number_order)), is_soft))
    return tuple(found)


def _port(tree: SysTree, folder: str, number: int) -> RdmaPort:
    layer = tree.read(f"{folder}/link_layer")
    rate = tree.read(f"{folder}/rate")
    gids: list[Gid] = []
    unused = 0
    for index in sorted(int(n) for n in tree.names(f"{folder}/gids") if n.isdigit()):
        value = tree.read(f"{folder}/gids/{index}")
        if not value or value == _EMPTY_GID:
            unused += 1
            if unused == _GIDS_UNUSED_MAX:
                break
            continue
        unused = 0
        kind = tree.read(f"{folder}/gid_attrs/types/{index}")
        kind = "IB" if layer == "InfiniBand" else "RoCE v2" if kind == "RoCE v2" else "RoCE v1"
        interface = tree.read(f"{folder}/gid_attrs/ndevs/{index}") if layer == "Ethernet" else ""
        gids.append(Gid(index, kind, value, interface))
    state = tree.read(f"{folder}/state").partition(":")[2].strip()
    speed = re.match(r"[\d.]+", rate)
    return RdmaPort(
        number, state, layer, float(speed[0]) if speed else 0.0, rate, tuple(gids), best_gid(layer, tuple(gids))
    )


def best_gid(link_layer: str, gids: tuple[Gid, ...]) -> int | None:
    """The index that UCX would take: 0 on InfiniBand; on Ethernet RoCE v2 before v1, IPv4 before IPv6."""
    if link_layer == "InfiniBand":
        return 0
    best = min(gids, key=lambda gid: (gid.kind != "RoCE v2", not gid.is_ipv4, gid.index), default=None)
    return None if best is None else best.index


def read_interfaces(tree: SysTree) -> tuple[Interface, ...]:
    """Interfaces of real devices, and virtual ones that stand on such (bonds, VLANs); all but lo where none is real.

    Containers see only virtual ones; a Kubernetes host has hundreds that lead nowhere but into its pods.
    """
    names = sorted((name for name in tree.names(NET) if name != "lo"), key=number_order)
    real = {name for name in names if tree.resolve(f"{NET}/{name}/device")}
    below = {name: [n[6:] for n in tree.names(f"{NET}/{name}") if n.startswith("lower_")] for name in names}
    stands = {name for name in names if name in real or any(lower in real for lower in below[name])}
    chosen = [name for name in names if name in stands or not real]
    found = (_interface(tree, name, name in real, below[name]) for name in chosen)
    return tuple(interface for interface in found if interface is not None)


def _interface(tree: SysTree, name: str, is_real: bool, below: list[str]) -> Interface | None:
    folder = f"{NET}/{name}"
    for lower in below:
        tree.resolve(f"{folder}/lower_{lower}")  # so that a recording holds the link
    if tree.read(f"{folder}/type") not in (_ETHERNET_TYPE, _INFINIBAND_TYPE):
        return None
    on = name if is_real or not below else below[0]
    speed, mtu = tree.read(f"{folder}/speed"), tree.read(f"{folder}/mtu")
    return Interface(
        name=name,
        place=pci_place(tree, f"{NET}/{on}", f"{NET}/{on}/device"),
        is_up=tree.read(f"{folder}/operstate") == "up",
        is_virtual=not is_real,
        speed_gbps=int(speed) / 1000 if speed.isdigit() else 0.0,  # -1: unknown
        mtu=int(mtu) if mtu.isdigit() else 0,
    )


def pci_place(tree: SysTree, device: str, attributes: str) -> PciPlace:
    """The place of the device whose link in /sys/class (or /sys/bus) is `device`; attributes: its PCI folder.

    What is between a PCI function and its class device (virtio2, net) does not count.
    """
    parts = tree.resolve(device).split("/")
    path = tuple(part for part in parts if _PCI_PART.match(part))
    if not path:
        return PciPlace(numa=_numa(tree.read(f"{attributes}/numa_node")))
    folder = "/".join(parts[: len(parts) - parts[::-1].index(path[-1])])
    return PciPlace(
        path=path,
        numa=_numa(tree.read(f"{folder}/numa_node")),
        link_gtps=_speed(tree.read(f"{folder}/current_link_speed")),
        link_lanes=_lanes(tree.read(f"{folder}/current_link_width")),
        link_gtps_max=_speed(tree.read(f"{folder}/max_link_speed")),
        link_lanes_max=_lanes(tree.read(f"{folder}/max_link_width")),
    )


def _numa(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _speed(text: str) -> float:
    found = re.match(r"([\d.]+) GT/s", text)
    return float(found[1]) if found else 0.0


def _lanes(text: str) -> int:
    return int(text) if text.isdigit() and int(text) < 64 else 0  # 255 (or 63): unknown


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's list of numbers: "0-2,5" -> (0, 1, 2, 5); empty for anything else."""
    found: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def number_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A sort key that compares the numbers in a name as numbers."""
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name))
