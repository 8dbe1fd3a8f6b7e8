"""Which network devices a worker uses. UCX stripes large transfers over the rails of a choice by itself.

Invariants: every rail of a choice can carry bytes now and ranks equal to the others (same link layer, same rate, same
distance); a choice is the same for the same topology and arguments; a choice for a peer names no rail of a fabric that
the peer is not on, and over TCP the interface that leads to it.

How ports are ranked: by what its PCIe link and the way to it leave of a port's rate, then by distance. The caps below
order devices and predict nothing: a port on the other socket is worth no more than the socket link gives one flow, and
a GPU's bytes through a host bridge no more than a host bridge forwards peer to peer.
Devices in software (Soft-RoCE) come after all others, and are used one at a time: their rails share one processor.
Source: NVIDIA's GPUDirect RDMA notes; UCX's own distances (UCX_DISTANCE_BW), which know no replicas and no workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .base import UsageError
from .devices import Interface, RdmaDevice, RdmaPort
from .netlink import Network
from .ranking import Location, Rail
from .topology import Distance, Topology, distance, near_of, nvlinks

__all__ = [
    "LOOPBACK",
    "MAX_RAILS",
    "RailChoice",
    "choose_rails",
    "listening_interfaces",
    "locate",
    "rail_numbers",
]

LOOPBACK = "lo"
MAX_RAILS = 2
"""Rails of one worker; UCX takes up to 4. Two 400 Gb/s ports carry more than one process copies."""

_ACROSS_SOCKETS_GBPS = 100.0
_GPU_THROUGH_HOST_GBPS = 200.0
_UNKNOWN_TCP_GBPS = 1.0


@dataclass(frozen=True, slots=True)
class RailChoice:
    """What a worker uses. devices: as UCX names them, "mlx5_0:1" or "eth0"; empty = leave the choice to UCX."""

    near: str
    devices: tuple[str, ...]
    transport: str
    """"InfiniBand", "RoCE v2", "RoCE v1", "TCP", or empty."""
    apart: Distance | None
    """None where nothing was named to be near to."""
    rate_gbps: float
    """Of one device; 0 unknown."""
    gid_indices: tuple[int, ...]
    """One a device; empty for TCP."""
    why: str

    @property
    def is_rdma(self) -> bool:
        """Whether the devices are RDMA ports."""
        return bool(self.gid_indices)

    @property
    def net_devices(self) -> str:
        """The value for UCX_NET_DEVICES; "all" where nothing was chosen."""
        return ",".join(self.devices) or "all"


@dataclass(frozen=True, slots=True)
class _Candidate:
    device: str
    transport: str
    rate_gbps: float
    left_gbps: float
    apart: Distance
    gid_index: int | None
    is_soft: bool

    @property
    def rank(self) -> tuple[bool, float, Distance, float, str]:
        return (self.is_soft, -self.left_gbps, self.apart, -self.rate_gbps, self.transport)


def choose_rails(
    topology: Topology,
    near: str = "",
    max_rails: int = MAX_RAILS,
    worker: int = 0,
    *,
    via: str = "",
    peer: Collection[Rail] | None = None,
    networks: Mapping[str, tuple[Network, ...]] | None = None,
) -> RailChoice:
    """The devices for a worker whose memory is at `near`: "gpu0", "numa1", or "" for anywhere.

    max_rails: at most so many rails of equal rank; worker: this worker's number among those with the same `near`, so
    that they start on different rails. via: the interface that leads to the peer; the loopback leads to no rail. peer:
    the peer's rails, empty when it has none (None: not known); of equal ones those that it has too are taken. networks:
    this machine's interfaces with their addresses, to leave out rails that share no subnet with the peer while others
    do. RDMA ports come before TCP. Raises UsageError (unknown device, max_rails < 1).
    """
    if max_rails < 1:
        raise UsageError(f"max_rails must be 1 or more, not {max_rails}")
    if near:
        topology.place(near)
    if via == LOOPBACK:
        return RailChoice(near, (via,), "TCP", None, 0.0, (), "the loopback leads to this host only")
    numbers = rail_numbers(topology)
    ports = [(d, p) for d, p in topology.usable_ports() if not (d.is_soft and via and via not in d.interfaces)]
    if peer is not None:
        fabrics = {rail.fabric for rail in peer}
        ports = [(d, p) for d, p in ports if numbers[_name(d, p)].fabric in fabrics]
        ports = _in_the_peers_networks(ports, peer, networks or {})
    found = [_port_candidate(topology, near, device, port) for device, port in ports]
    if not found:
        return _over_tcp(topology, near, worker, via, _why_no_rail(topology, peer))
    best = min(candidate.rank for candidate in found)
    equal = [candidate for candidate in found if candidate.rank == best]
    theirs = {(rail.fabric, rail.number) for rail in peer or ()}
    pool = [candidate for candidate in equal if numbers[candidate.device][:2] in theirs] or equal
    count = 1 if equal[0].is_soft else min(max_rails, len(pool))
    taken = [pool[(worker * max_rails + i) % len(pool)] for i in range(count)]
    first = taken[0]
    why = f"{_words(first.apart, near)}, {first.rate_gbps:g} Gb/s {first.transport}"
    if len(equal) > 1:
        why += f"; {len(equal)} such, {len(taken)} used"
    if first.left_gbps < first.rate_gbps:
        why += f"; at most about {first.left_gbps:g} Gb/s reach it"
    if len(found) > len(equal):
        why += f"; {len(found) - len(equal)} farther or slower"
    gids = tuple(candidate.gid_index or 0 for candidate in taken)
    devices = tuple(candidate.device for candidate in taken)
    apart = first.apart if near else None
    return RailChoice(near, devices, first.transport, apart, first.rate_gbps, gids, why)


def _why_no_rail(topology: Topology, peer: Collection[Rail] | None) -> str:
    if not topology.usable_ports():
        return "no RDMA port is usable" if topology.rdma else "no RDMA device"
    if peer is not None:
        return "no RDMA port leads to the peer's fabric" if peer else "the peer uses no RDMA device"
    return "no RDMA port belongs to the interface"


def _name(device: RdmaDevice, port: RdmaPort) -> str:
    return f"{device.name}:{port.number}"


def _in_the_peers_networks(
    ports: list[tuple[RdmaDevice, RdmaPort]], peer: Collection[Rail], networks: Mapping[str, tuple[Network, ...]]
) -> list[tuple[RdmaDevice, RdmaPort]]:
    """The ports whose interface is in a subnet with a rail of the peer; all where none is: routers lead on there."""
    addresses = [rail.ipv4 for rail in peer if rail.ipv4 is not None]
    same = [
        (device, port)
        for device, port in ports
        if any(
            address in own.network
            for name in device.interfaces
            for own in networks.get(name, ())
            for address in addresses
        )
    ]
    return same or ports


def _port_candidate(topology: Topology, near: str, device: RdmaDevice, port: RdmaPort) -> _Candidate:
    gid = port.gid
    transport = "InfiniBand" if port.link_layer == "InfiniBand" else gid.kind if gid else "RoCE"
    apart, left = _reach(topology, near, device.name, min(port.rate_gbps, device.place.link_gbps or port.rate_gbps))
    return _Candidate(_name(device, port), transport, port.rate_gbps, left, apart, port.gid_index, device.is_soft)


def _reach(topology: Topology, near: str, device: str, rate_gbps: float) -> tuple[Distance, float]:
    """How far, and what is left of the rate on the way."""
    if not near:
        return Distance.NODE, rate_gbps
    apart = distance(topology, near, device)
    if apart is Distance.SYS:
        return apart, min(rate_gbps, _ACROSS_SOCKETS_GBPS)
    if near.startswith("gpu") and apart >= Distance.PHB:
        return apart, min(rate_gbps, _GPU_THROUGH_HOST_GBPS)
    return apart, rate_gbps


def _over_tcp(topology: Topology, near: str, worker: int, via: str, why: str) -> RailChoice:
    """The interface that leads to the peer; else the fastest, nearest real one that is up, virtual ones last."""
    if via:
        return RailChoice(near, (via,), "TCP", None, 0.0, (), f"{why}; {via}, as the control connection")
    up = [interface for interface in topology.interfaces if interface.is_up]
    if not up:
        return RailChoice(near, (), "", None, 0.0, (), f"{why} and no interface is up: this host only")

    def rank(interface: Interface) -> tuple[bool, float, Distance]:
        apart, left = _reach(topology, near, interface.name, interface.speed_gbps or _UNKNOWN_TCP_GBPS)
        return interface.is_virtual and not _is_bond(topology, interface), -left, apart

    best = min(map(rank, up))
    equal = [interface for interface in up if rank(interface) == best]
    chosen = equal[worker % len(equal)]
    speed = f"{chosen.speed_gbps:g} Gb/s" if chosen.speed_gbps else "of unknown speed"
    apart = best[2] if near else None
    why += f"; interface {speed}, {len(up)} up"
    return RailChoice(near, (chosen.name,), "TCP", apart, chosen.speed_gbps, (), why)


def _is_bond(topology: Topology, interface: Interface) -> bool:
    """Whether a virtual interface stands on a real one: it then carries the addresses, the real one does not."""
    return interface.is_virtual and bool(interface.place.path)


def _words(apart: Distance, near: str) -> str:
    return f"{apart.name} from {near}" if near else "anywhere on this host"


def listening_interfaces(topology: Topology, via: str, addressed: Collection[str] | None = None) -> tuple[str, ...]:
    """Where a node serves over TCP: `via`, or for "" (any address) the loopback and all interfaces that are up.

    addressed: the interfaces that have an address (None: not known). Empty where none is left: the choice is UCX's.
    """
    if via:
        return (via,)
    up = [interface.name for interface in topology.interfaces if interface.is_up]
    up = [name for name in up if addressed is None or name in addressed]
    return (LOOPBACK, *up) if up else ()


def rail_numbers(topology: Topology) -> dict[str, Rail]:
    """The rail of each usable port, by the port's UCX name.

    Ports of one fabric, fastest first, then in the order of their PCI places (in which such machines are cabled).
    """
    fabrics: dict[str, list[tuple[float, tuple[str, ...], int, str, str]]] = {}
    for device, port in topology.usable_ports():
        gid = port.gid.value if port.gid else ""
        fabric = "roce" if port.link_layer != "InfiniBand" else "ib:" + gid[:19]
        entry = (-port.rate_gbps, device.place.path, port.number, _name(device, port), gid)
        fabrics.setdefault(fabric, []).append(entry)
    return {
        entry[3]: Rail(fabric, number, entry[4])
        for fabric, entries in fabrics.items()
        for number, entry in enumerate(sorted(entries))
    }


def locate(
    topology: Topology, host: str, process: str, *, near: str = "", max_rails: int = MAX_RAILS, worker: int = 0
) -> Location:
    """The location of a process of this machine whose memory is at `near`, as for `choose_rails`. Raises UsageError."""
    numbers = rail_numbers(topology)
    choice = choose_rails(topology, near, max_rails, worker)
    rails = frozenset(numbers[device] for device in choice.devices if device in numbers)
    numa = near_of(topology, near) if near else -1
    own = next((gpu for gpu in topology.gpus if f"gpu{gpu.index}" == near), None)
    if own is None:
        return Location(host, process, numa=numa, rails=rails)
    linked = frozenset(gpu.place.address for gpu in topology.gpus if nvlinks(own, gpu))
    return Location(host, process, own.place.address, numa, linked, rails)
