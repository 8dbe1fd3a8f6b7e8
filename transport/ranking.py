"""Which way leads from a reader to a copy of a block, and which copy to read.

    same process < same GPU < NVLink < same host < same-rail RDMA < cross-rail RDMA < TCP

Invariants: pure; `path_kind` is symmetric; an order of sources is the same for the same arguments, holds every source
once, and differs between readers where sources are equal, so that readers spread over replicas.

A `Location` is what a process tells others of where it is: they cannot read its machine.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from .rails import choose_rails, rail_numbers
from .topology import Topology, nvlinks

__all__ = ["Location", "PathKind", "Source", "TierKind", "locate", "path_kind", "rank_sources"]


class PathKind(enum.IntEnum):
    """Ways between two processes, best first."""

    SAME_PROCESS = 0
    SAME_GPU = 1
    NVLINK = 2
    SAME_HOST = 3
    SAME_RAIL = 4
    CROSS_RAIL = 5
    TCP = 6


class TierKind(enum.IntEnum):
    """Where a copy rests; the numbers are those of the slot table."""

    GPU = 0
    HOST = 1
    NVME = 2


# Nominal GB/s: they order ways against tiers (a copy on this host's NVMe is behind another host's memory over RDMA, but
# before it over TCP) and predict nothing.
_WAY_GBPS = {
    PathKind.SAME_PROCESS: 2000.0,
    PathKind.SAME_GPU: 1500.0,
    PathKind.NVLINK: 400.0,
    PathKind.SAME_HOST: 60.0,
    PathKind.SAME_RAIL: 40.0,
    PathKind.CROSS_RAIL: 30.0,
    PathKind.TCP: 2.0,
}
_TIER_GBPS = {TierKind.GPU: 2000.0, TierKind.HOST: 2000.0, TierKind.NVME: 6.0}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process is. host, process: opaque, unique; gpu: PCI address of its memory's GPU, empty for host memory.

    nvlinked: PCI addresses of this host's GPUs that its GPU has NVLinks to. rails: (fabric, rail number) of the ports
    that it uses (see `rails.rail_numbers`).
    """

    host: str
    process: str
    gpu: str = ""
    nvlinked: frozenset[str] = frozenset()
    rails: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Source:
    """One copy of a block. load: outstanding bytes at its node, or any number that grows with its queue."""

    name: str
    location: Location
    tier: TierKind = TierKind.HOST
    load: float = field(default=0.0)


def locate(
    topology: Topology, host: str, process: str, *, near: str = "", max_rails: int = 2, worker: int = 0
) -> Location:
    """The location of a process of this machine whose memory is at `near`, as for `choose_rails`. Raises UsageError."""
    numbers = rail_numbers(topology)
    choice = choose_rails(topology, near, max_rails, worker)
    rails = frozenset(numbers[device] for device in choice.devices if device in numbers)
    own = next((gpu for gpu in topology.gpus if f"gpu{gpu.index}" == near), None)
    if own is None:
        return Location(host, process, rails=rails)
    linked = frozenset(gpu.place.address for gpu in topology.gpus if nvlinks(own, gpu))
    return Location(host, process, own.place.address, linked, rails)


def path_kind(a: Location, b: Location) -> PathKind:
    """The best way between two processes."""
    if a.host == b.host:
        if a.process == b.process:
            return PathKind.SAME_PROCESS
        if a.gpu and a.gpu == b.gpu:
            return PathKind.SAME_GPU
        if b.gpu in a.nvlinked and a.gpu in b.nvlinked:
            return PathKind.NVLINK
        return PathKind.SAME_HOST
    if a.rails & b.rails:
        return PathKind.SAME_RAIL
    if {fabric for fabric, _ in a.rails} & {fabric for fabric, _ in b.rails}:
        return PathKind.CROSS_RAIL
    return PathKind.TCP


def rank_sources(reader: Location, sources: Sequence[Source]) -> tuple[Source, ...]:
    """The copies in the order in which to try them: by way and tier, then the less loaded, then spread by reader."""

    def rank(source: Source) -> tuple[float, PathKind, float, int, str]:
        way = path_kind(reader, source.location)
        rate = min(_WAY_GBPS[way], _TIER_GBPS[source.tier])
        spread = zlib.crc32(f"{reader.host}\0{reader.process}\0{source.name}".encode())
        return -rate, way, source.load, spread, source.name

    return tuple(sorted(sources, key=rank))
