"""Which way leads from a reader to a copy of a block, and which copy to read.

    same process < same GPU < NVLink < same host < same-rail RDMA < cross-rail RDMA < TCP

Invariants: pure; `way_between` is symmetric; an order of sources is the same for the same arguments, holds every source
once, and differs between readers where sources are equal, so that readers spread over replicas.

A `Location` is what a process tells others of where it is: they cannot read its machine.
"""

from __future__ import annotations

import enum
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Location", "Rail", "Source", "TierKind", "Way", "network_way", "rank_sources", "way_between"]


class Way(enum.IntEnum):
    """Ways between two processes, best first."""

    SAME_PROCESS = 0
    SAME_GPU = 1
    NVLINK = 2
    SAME_HOST = 3
    SAME_RAIL = 4
    CROSS_RAIL = 5
    TCP = 6

    @property
    def words(self) -> str:
        """For people: "same host"."""
        return "TCP" if self is Way.TCP else self.name.lower().replace("_", " ")

    @property
    def is_network(self) -> bool:
        """Whether it leads out of the host."""
        return self >= Way.SAME_RAIL


class TierKind(enum.IntEnum):
    """Where a copy rests; the numbers are those of the slot table."""

    GPU = 0
    HOST = 1
    NVME = 2


# Nominal GB/s: they order ways against tiers (a copy on this host's NVMe is behind another host's memory over RDMA, but
# before it over TCP) and predict nothing.
_WAY_GBPS = {
    Way.SAME_PROCESS: 2000.0,
    Way.SAME_GPU: 1500.0,
    Way.NVLINK: 400.0,
    Way.SAME_HOST: 60.0,
    Way.SAME_RAIL: 40.0,
    Way.CROSS_RAIL: 30.0,
    Way.TCP: 2.0,
}
_TIER_GBPS = {TierKind.GPU: 2000.0, TierKind.HOST: 2000.0, TierKind.NVME: 6.0}


class Rail(NamedTuple):
    """One port as other machines know it.

    Rail k of one machine and rail k of another meet at one leaf switch in a rail-optimised cluster. fabric: "ib:<subnet
    prefix>" or "roce"; ports of different fabrics do not reach each other. gid: the port's address, "" unknown.
    """

    fabric: str
    number: int
    gid: str = ""

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The address in a RoCE port's GID, where it is one of IPv4."""
        try:
            return ipaddress.IPv6Address(self.gid).ipv4_mapped
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process is. host, process: opaque, unique; gpu: PCI address of its memory's GPU, empty for host memory.

    numa: the NUMA node of its memory, -1 unknown. nvlinked: PCI addresses of this host's GPUs that its GPU has NVLinks
    to. rails: the ports that it uses.
    """

    host: str
    process: str
    gpu: str = ""
    numa: int = -1
    nvlinked: frozenset[str] = frozenset()
    rails: frozenset[Rail] = frozenset()


@dataclass(frozen=True, slots=True)
class Source:
    """One copy of a block: at which node, which way that is from the reader, in which tier. load: outstanding bytes at
    its node, or any number that grows with its queue.
    """

    name: str
    way: Way
    tier: TierKind = TierKind.HOST
    load: float = field(default=0.0)


def way_between(a: Location, b: Location) -> Way:
    """The best way between two processes."""
    if a.host != b.host:
        return network_way(a, b)
    if a.process == b.process:
        return Way.SAME_PROCESS
    if a.gpu and a.gpu == b.gpu:
        return Way.SAME_GPU
    if b.gpu in a.nvlinked and a.gpu in b.nvlinked:
        return Way.NVLINK
    return Way.SAME_HOST


def network_way(a: Location, b: Location) -> Way:
    """The best way over the network, also where both are on one host (containers that share nothing else)."""
    ours, theirs = ({(rail.fabric, rail.number) for rail in location.rails} for location in (a, b))
    if ours & theirs:
        return Way.SAME_RAIL
    if {fabric for fabric, _ in ours} & {fabric for fabric, _ in theirs}:
        return Way.CROSS_RAIL
    return Way.TCP


def rank_sources(sources: Sequence[Source], reader: str) -> tuple[Source, ...]:
    """The copies in the order in which to try them: by way and tier, then the less loaded, then spread by reader (any
    text that is unique to the reading process).
    """

    def rank(source: Source) -> tuple[float, Way, float, bytes, str]:
        rate = min(_WAY_GBPS[source.way], _TIER_GBPS[source.tier])
        spread = hashlib.blake2b(f"{reader}\0{source.name}".encode(), digest_size=8).digest()
        return -rate, source.way, source.load, spread, source.name

    return tuple(sorted(sources, key=rank))
