"""Which network devices a worker uses, and how a large batch is spread over them.

Invariants: every rail of a choice can carry bytes now and ranks equal to the others (same link layer, same rate, same
distance); a choice is the same for the same topology and arguments; `stripe` gives every byte to exactly one rail.

How ports are ranked: by what its PCIe link and the way to it leave of a port's rate, then by distance. The caps below
order devices and predict nothing: a port on the other socket is worth no more than the socket link gives one flow, and
a GPU's bytes through a host bridge no more than a host bridge forwards peer to peer.
Devices in software (Soft-RoCE) come after all others.
Source: NVIDIA's GPUDirect RDMA notes; UCX's own distances (UCX_DISTANCE_BW), which know no replicas and no workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import UsageError
from .devices import Interface, RdmaDevice, RdmaPort
from .topology import Distance, Topology, distance

__all__ = ["Piece", "RailChoice", "choose_rails", "rail_numbers", "stripe"]

RAIL_BYTES_MIN = 256 << 10
"""A further rail is worth its set-up only for that many bytes."""
CUT_BYTES = 4096
"""Values are cut at multiples of this offset only."""

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
    def net_devices(self) -> str:
        """The value for UCX_NET_DEVICES; "all" where nothing was chosen."""
        return ",".join(self.devices) or "all"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + nbytes) of item `item`, on rail number `rail`."""

    item: int
    offset: int
    nbytes: int
    rail: int


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


def choose_rails(topology: Topology, near: str = "", max_rails: int = 2, worker: int = 0) -> RailChoice:
    """The devices for a worker whose memory is at `near`: "gpu0", "numa1", or "" for anywhere.

    max_rails: at most so many rails of equal rank; worker: this worker's number among those with the same `near`, so
    that they start on different rails. RDMA ports come before TCP. Raises UsageError (unknown device, max_rails < 1).
    """
    if max_rails < 1:
        raise UsageError(f"max_rails must be 1 or more, not {max_rails}")
    if near:
        topology.place(near)
    ports = topology.usable_ports()
    found = [_port_candidate(topology, near, device, port) for device, port in ports]
    if not found:
        return _over_tcp(topology, near, worker)
    best = min(candidate.rank for candidate in found)
    equal = [candidate for candidate in found if candidate.rank == best]
    taken = [equal[(worker * max_rails + i) % len(equal)] for i in range(min(max_rails, len(equal)))]
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


def _port_candidate(topology: Topology, near: str, device: RdmaDevice, port: RdmaPort) -> _Candidate:
    gid = port.gid
    transport = "InfiniBand" if port.link_layer == "InfiniBand" else gid.kind if gid else "RoCE"
    apart, left = _reach(topology, near, device.name, min(port.rate_gbps, device.place.link_gbps or port.rate_gbps))
    return _Candidate(
        f"{device.name}:{port.number}", transport, port.rate_gbps, left, apart, port.gid_index, device.is_soft
    )


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


def _over_tcp(topology: Topology, near: str, worker: int) -> RailChoice:
    """The fastest, nearest real interface that is up; virtual ones only where there is nothing else."""
    why = "no RDMA port is usable" if topology.rdma else "no RDMA device"
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
    return RailChoice(
        near,
        (chosen.name,),
        "TCP",
        best[2] if near else None,
        chosen.speed_gbps,
        (),
        f"{why}; interface {speed}, {len(up)} up",
    )


def _is_bond(topology: Topology, interface: Interface) -> bool:
    """Whether a virtual interface stands on a real one: it then carries the addresses, the real one does not."""
    return interface.is_virtual and bool(interface.place.path)


def _words(apart: Distance, near: str) -> str:
    return f"{apart.name} from {near}" if near else "anywhere on this host"


def rail_numbers(topology: Topology) -> dict[str, tuple[str, int]]:
    """Fabric and rail number of each usable port, by its UCX name.

    Rail k of one machine and rail k of another meet at one leaf switch in a rail-optimised cluster: ports of one link
    layer, fastest first, then in the order of their PCI places (in which such machines are cabled). The fabric is
    "ib:<subnet prefix>" or "roce"; ports of different fabrics do not reach each other.
    """
    fabrics: dict[str, list[tuple[float, tuple[str, ...], int, str]]] = {}
    for device, port in topology.usable_ports():
        gid = port.gid
        fabric = "roce" if port.link_layer != "InfiniBand" else "ib:" + (gid.value if gid else "")[:19]
        entry = (-port.rate_gbps, device.place.path, port.number, f"{device.name}:{port.number}")
        fabrics.setdefault(fabric, []).append(entry)
    return {
        entry[3]: (fabric, number)
        for fabric, entries in fabrics.items()
        for number, entry in enumerate(sorted(entries))
    }


def stripe(sizes: Sequence[int], rails: int, *, rail_bytes_min: int = RAIL_BYTES_MIN) -> tuple[Piece, ...]:
    """Spread a batch of values (sizes in bytes) over `rails` equal rails, in order, each rail one contiguous run.

    A rail's bytes differ from the mean by less than CUT_BYTES per rail: a value is cut where its rail is full, at a
    multiple of CUT_BYTES, so at most rails - 1 values are cut. Small batches use fewer rails: one for each
    rail_bytes_min. Values of 0 bytes get no piece. Raises UsageError.
    """
    if rails < 1 or rail_bytes_min < 1 or any(size < 0 for size in sizes):
        raise UsageError(f"{rails} rails of at least {rail_bytes_min} bytes for sizes {list(sizes)[:8]}")
    total = sum(sizes)
    used = max(1, min(rails, total // rail_bytes_min))
    pieces: list[Piece] = []
    rail = done = 0
    for item, size in enumerate(sizes):
        offset = 0
        while offset < size:
            room = -(-total * (rail + 1) // used) - done
            nbytes = size - offset
            if rail < used - 1 and nbytes > room:
                cut = max(0, (offset + room) // CUT_BYTES * CUT_BYTES - offset)
                rail += 1
                if cut == 0:
                    continue
                pieces.append(Piece(item, offset, cut, rail - 1))
                nbytes = cut
            else:
                pieces.append(Piece(item, offset, nbytes, rail))
            offset += nbytes
            done += nbytes
    return tuple(pieces)
