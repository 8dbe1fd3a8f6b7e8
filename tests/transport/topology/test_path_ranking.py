"""Ways between processes and the order in which a reader tries the copies of a block."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.transport.topology import recorded
from ucxkv.transport.rails import locate
from ucxkv.transport.ranking import (
    Location,
    Rail,
    Source,
    TierKind,
    Way,
    network_way,
    rank_sources,
    way_between,
)
from ucxkv.transport.topology import read_topology

DGX = recorded.machine("dgx_h100")
READER = locate(DGX, "a", "1", near="gpu0")

# One row a way: what the other side is, in order of preference.
WAYS = [
    (Way.SAME_PROCESS, READER),
    (Way.SAME_GPU, locate(DGX, "a", "2", near="gpu0")),
    (Way.NVLINK, locate(DGX, "a", "3", near="gpu7")),
    (Way.SAME_HOST, locate(DGX, "a", "4", near="numa1")),
    (Way.SAME_RAIL, locate(DGX, "b", "1", near="gpu0")),
    (Way.CROSS_RAIL, locate(DGX, "b", "1", near="gpu1")),
    (Way.TCP, locate(recorded.machine("virtual_machine"), "c", "1")),
]


@pytest.mark.parametrize(("kind", "other"), WAYS, ids=[kind.name for kind, _ in WAYS])
def test_each_way_is_recognised_from_both_sides(kind: Way, other: Location) -> None:
    """Goal: the table of ways. Method: one peer a row, asked in both directions."""
    assert way_between(READER, other) is kind
    assert way_between(other, READER) is kind


def test_a_machine_over_roce_is_reached_by_tcp_from_infiniband() -> None:
    """Goal: different fabrics do not meet. Method: the dual-socket machine (RoCE) and the DGX's GPU (InfiniBand)."""
    box = locate(recorded.machine("dual_socket"), "d", "1", near="numa1")
    assert way_between(READER, box) is Way.TCP
    other = locate(recorded.machine("dual_socket"), "e", "1", near="numa0")
    assert way_between(box, other) is Way.SAME_RAIL
    soft = locate(read_topology(recorded.soft_roce()), "f", "1")
    assert way_between(box, soft) is Way.SAME_RAIL


def test_infiniband_subnets_do_not_meet() -> None:
    """Goal: a router between subnets is not assumed. Method: equal rail numbers, another subnet prefix."""
    moved = frozenset(rail._replace(fabric=rail.fabric.replace("fe80", "fec0")) for rail in READER.rails)
    assert way_between(READER, replace(READER, host="b", rails=moved)) is Way.TCP


def test_gpus_of_a_machine_without_nvlink_are_on_one_host_only() -> None:
    """Goal: no NVLink is guessed. Method: the laptop's GPU and host memory."""
    laptop = recorded.machine("laptop")
    gpu, host = locate(laptop, "l", "1", near="gpu0"), locate(laptop, "l", "2")
    assert way_between(gpu, host) is Way.SAME_HOST
    assert way_between(host, replace(host, process="3")) is Way.SAME_HOST


def test_a_rail_is_known_by_its_place_in_the_fabric_not_by_its_address() -> None:
    """Goal: rail 0 meets rail 0 of another machine. Method: equal rails with other GIDs; then none in common."""
    here = Location("a", "1", rails=frozenset({Rail("roce", 0, "::ffff:10.0.0.1")}))
    there = Location("b", "1", rails=frozenset({Rail("roce", 0, "::ffff:10.0.0.2"), Rail("roce", 1)}))
    assert way_between(here, there) is Way.SAME_RAIL
    assert way_between(here, replace(there, rails=frozenset({Rail("roce", 1)}))) is Way.CROSS_RAIL


def test_the_way_over_the_network_is_asked_for_on_one_host_too() -> None:
    """Goal: containers of one host that share nothing but the network. Method: two places of the DGX."""
    (_, other) = WAYS[3]
    assert way_between(READER, other) is Way.SAME_HOST
    assert network_way(READER, other) is Way.CROSS_RAIL
    assert network_way(READER, replace(other, rails=frozenset())) is Way.TCP


def test_sources_are_ranked_by_way_whatever_their_order() -> None:
    """Goal: the order of the design. Method: one source a way, shuffled."""
    sources = [Source(kind.name, kind) for kind, _ in WAYS]
    for seed in range(20):
        shuffled = random.Random(seed).sample(sources, len(sources))
        assert [source.name for source in rank_sources(shuffled, "r")] == [kind.name for kind, _ in WAYS]


def test_nvme_on_this_host_is_behind_rdma_memory_and_before_tcp() -> None:
    """Goal: tiers count. Method: a copy on local NVMe among memory copies elsewhere."""
    sources = [
        Source("tcp", Way.TCP),
        Source("nvme", Way.SAME_HOST, TierKind.NVME),
        Source("rdma", Way.CROSS_RAIL),
        Source("far nvme", Way.SAME_RAIL, TierKind.NVME),
    ]
    assert [source.name for source in rank_sources(sources, "r")] == ["rdma", "nvme", "far nvme", "tcp"]


def test_equal_sources_go_by_load_then_spread_over_readers() -> None:
    """Goal: readers do not all ask one replica. Method: load decides first; without it many readers' first choices."""
    replicas = [Source(name, Way.SAME_RAIL) for name in "xyz"]
    busy = [replace(replicas[0], load=5.0), replicas[1], replace(replicas[2], load=1.0)]
    assert [source.name for source in rank_sources(busy, "r")] == ["y", "z", "x"]
    firsts = [rank_sources(replicas, str(reader))[0].name for reader in range(64)]
    assert min(firsts.count(name) for name in "xyz") >= 8
    for order in itertools.permutations(replicas):
        assert rank_sources(order, "r") == rank_sources(replicas, "r")
