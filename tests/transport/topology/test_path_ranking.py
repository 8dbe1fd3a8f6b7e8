"""Ways between processes and the order in which a reader tries the copies of a block."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.transport.topology import recorded
from ucxkv.transport.ranking import Location, PathKind, Source, TierKind, locate, path_kind, rank_sources
from ucxkv.transport.topology import read_topology

DGX = recorded.machine("dgx_h100")
READER = locate(DGX, "a", "1", near="gpu0")

# One row a way: what the other side is, in order of preference.
WAYS = [
    (PathKind.SAME_PROCESS, READER),
    (PathKind.SAME_GPU, locate(DGX, "a", "2", near="gpu0")),
    (PathKind.NVLINK, locate(DGX, "a", "3", near="gpu7")),
    (PathKind.SAME_HOST, locate(DGX, "a", "4", near="numa1")),
    (PathKind.SAME_RAIL, locate(DGX, "b", "1", near="gpu0")),
    (PathKind.CROSS_RAIL, locate(DGX, "b", "1", near="gpu1")),
    (PathKind.TCP, locate(recorded.machine("virtual_machine"), "c", "1")),
]


@pytest.mark.parametrize(("kind", "other"), WAYS, ids=[kind.name for kind, _ in WAYS])
def test_each_way_is_recognised_from_both_sides(kind: PathKind, other: Location) -> None:
    """Goal: the table of ways. Method: one peer a row, asked in both directions."""
    assert path_kind(READER, other) is kind
    assert path_kind(other, READER) is kind


def test_a_machine_over_roce_is_reached_by_tcp_from_infiniband() -> None:
    """Goal: different fabrics do not meet. Method: the dual-socket machine (RoCE) and the DGX's GPU (InfiniBand)."""
    box = locate(recorded.machine("dual_socket"), "d", "1", near="numa1")
    assert path_kind(READER, box) is PathKind.TCP
    other = locate(recorded.machine("dual_socket"), "e", "1", near="numa0")
    assert path_kind(box, other) is PathKind.SAME_RAIL
    soft = locate(read_topology(recorded.soft_roce()), "f", "1")
    assert path_kind(box, soft) is PathKind.SAME_RAIL


def test_infiniband_subnets_do_not_meet() -> None:
    """Goal: a router between subnets is not assumed. Method: equal rail numbers, another subnet prefix."""
    moved = frozenset((fabric.replace("fe80", "fec0"), rail) for fabric, rail in READER.rails)
    assert path_kind(READER, replace(READER, host="b", rails=moved)) is PathKind.TCP


def test_gpus_of_a_machine_without_nvlink_are_on_one_host_only() -> None:
    """Goal: no NVLink is guessed. Method: the laptop's GPU and host memory."""
    laptop = recorded.machine("laptop")
    gpu, host = locate(laptop, "l", "1", near="gpu0"), locate(laptop, "l", "2")
    assert path_kind(gpu, host) is PathKind.SAME_HOST
    assert path_kind(host, replace(host, process="3")) is PathKind.SAME_HOST


def test_sources_are_ranked_by_way_whatever_their_order() -> None:
    """Goal: the order of the design. Method: one source a way, shuffled."""
    sources = [Source(kind.name, location) for kind, location in WAYS]
    for seed in range(20):
        shuffled = random.Random(seed).sample(sources, len(sources))
        assert [source.name for source in rank_sources(READER, shuffled)] == [kind.name for kind, _ in WAYS]


def test_nvme_on_this_host_is_behind_rdma_memory_and_before_tcp() -> None:
    """Goal: tiers count. Method: a copy on local NVMe among memory copies elsewhere."""
    way = dict(WAYS)
    sources = [
        Source("tcp", way[PathKind.TCP]),
        Source("nvme", way[PathKind.SAME_HOST], TierKind.NVME),
        Source("rdma", way[PathKind.CROSS_RAIL]),
        Source("far nvme", way[PathKind.SAME_RAIL], TierKind.NVME),
    ]
    assert [source.name for source in rank_sources(READER, sources)] == ["rdma", "nvme", "far nvme", "tcp"]


def test_equal_sources_go_by_load_then_spread_over_readers() -> None:
    """Goal: readers do not all ask one replica. Method: load decides first; without it many readers' first choices."""
    replicas = [Source(name, Location(name, "1", rails=READER.rails)) for name in "xyz"]
    busy = [replace(replicas[0], load=5.0), replicas[1], replace(replicas[2], load=1.0)]
    assert [source.name for source in rank_sources(READER, busy)] == ["y", "z", "x"]
    readers = [replace(READER, process=str(number)) for number in range(64)]
    firsts = [rank_sources(reader, replicas)[0].name for reader in readers]
    assert min(firsts.count(name) for name in "xyz") >= 8
    for order in itertools.permutations(replicas):
        assert rank_sources(READER, order) == rank_sources(READER, replicas)
