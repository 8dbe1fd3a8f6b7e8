"""Reading recorded machines: NUMA, GPUs, ports, GIDs, interfaces, and the distance between any two devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.topology import recorded
from ucxkv.transport.base import UsageError
from ucxkv.transport.devices import Gid, best_gid, number_order, parse_list
from ucxkv.transport.sysfs import RecordedTree
from ucxkv.transport.topology import Distance, distance, matrix, near_of, nvlinks, read_topology

# The cells between GPUs and RDMA devices of a DGX H100, as its `nvidia-smi topo -m` is published: one row a GPU.
DGX_ROWS = {
    0: "PXB NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS SYS",
    1: "NODE NODE NODE PXB NODE NODE SYS SYS SYS SYS SYS SYS",
    2: "NODE NODE NODE NODE PXB NODE SYS SYS SYS SYS SYS SYS",
    3: "NODE NODE NODE NODE NODE PXB SYS SYS SYS SYS SYS SYS",
    4: "SYS SYS SYS SYS SYS SYS PXB NODE NODE NODE NODE NODE",
    5: "SYS SYS SYS SYS SYS SYS NODE NODE NODE PXB NODE NODE",
    6: "SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE PXB NODE",
    7: "SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE NODE PXB",
}


def test_the_matrix_of_a_dgx_is_that_of_nvidia_smi() -> None:
    """Goal: the same names for the same distances. Method: every GPU's row against the published output."""
    names, cells = matrix(recorded.machine("dgx_h100"))
    assert names == (*(f"gpu{i}" for i in range(8)), *(f"mlx5_{i}" for i in range(12)), "eno3")
    for gpu, row in DGX_ROWS.items():
        assert " ".join(cells[gpu][8:20]) == row
        assert cells[gpu][:8] == tuple("X" if other == gpu else "NV18" for other in range(8))
    assert cells[9][10] == "PIX"  # the two ports of one card


def test_a_dgx_is_read_whole() -> None:
    """Goal: rates, link layers, NUMA and NVML's facts. Method: counts and samples of the recording."""
    dgx = recorded.machine("dgx_h100")
    assert dgx.driver == "550.54.15"
    assert [len(node.cpus) for node in dgx.numa] == [112, 112]
    assert dgx.numa[0].distances == ((0, 10), (1, 21))
    assert {gpu.name for gpu in dgx.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert dgx.gpus[0].place.address == "0000:1b:00.0"
    assert dgx.gpus[0].place.link_gtps == 32.0
    assert dgx.gpus[0].place.link_lanes == 16
    usable = {f"{device.name}:{port.number}": port for device, port in dgx.usable_ports()}
    assert len(usable) == 10  # eight InfiniBand, and the two storage ports that are up
    assert usable["mlx5_11:1"].rate_gbps == 400.0
    assert usable["mlx5_11:1"].link_layer == "InfiniBand"
    assert usable["mlx5_11:1"].gid_index == 0
    assert usable["mlx5_1:1"].gid is not None
    assert usable["mlx5_1:1"].gid.kind == "RoCE v2"
    assert near_of(dgx, "mlx5_11") == 1


def test_a_roce_port_takes_its_ipv4_v2_gid_and_a_port_that_is_down_is_not_usable() -> None:
    """Goal: GID choice and port state. Method: the two ports of the dual-socket machine's card."""
    box = recorded.machine("dual_socket")
    up, down = (device.ports[0] for device in box.rdma)
    assert [gid.kind for gid in up.gids] == ["RoCE v1", "RoCE v2", "RoCE v1", "RoCE v2"]
    assert (up.is_usable, up.gid_index, up.rate_text) == (True, 3, "100 Gb/sec (4X EDR)")
    assert up.gid is not None and up.gid.is_ipv4 and up.gid.interface == "ens3f0np0"
    assert (down.is_usable, down.state) == (False, "DOWN")
    assert box.rdma[0].interfaces == ("ens3f0np0",)
    assert distance(box, "mlx5_0", "mlx5_1") is Distance.PIX
    assert distance(box, "mlx5_0", "eno8303") is Distance.SYS
    assert distance(box, "numa0", "mlx5_0") is Distance.SYS
    assert distance(box, "numa1", "mlx5_0") is Distance.NODE
    assert distance(box, "mlx5_0", "mlx5_0") is Distance.SELF
    assert box.names() == ("mlx5_0", "mlx5_1", "eno8303", "eno8313")  # interfaces of the card are the card's


def test_a_laptop_has_a_gpu_without_driver_and_no_virtual_interfaces() -> None:
    """Goal: integrated graphics and Docker's interfaces do not count. Method: the recorded laptop."""
    laptop = recorded.machine("laptop")
    assert [gpu.place.address for gpu in laptop.gpus] == ["0000:01:00.0"]
    assert (laptop.gpus[0].place.link_lanes, laptop.gpus[0].place.link_lanes_max) == (8, 16)
    assert [(i.name, i.is_up, i.speed_gbps) for i in laptop.interfaces] == [
        ("enp58s0", False, 0.0),
        ("wlp0s20f3", True, 0.0),
    ]
    assert distance(laptop, "gpu0", "wlp0s20f3") is Distance.PHB
    assert near_of(laptop, "gpu0") == 0  # the kernel says -1, but there is one node
    assert laptop.rdma == ()


def test_a_container_without_pci_and_infiniband_still_has_numa_interface_and_gpu() -> None:
    """Goal: masked folders are no error. Method: the recorded container; its GPU is known from NVML alone."""
    container = recorded.machine("container")
    assert [node.index for node in container.numa] == [0]
    assert len(container.numa[0].cpus) == 64
    assert container.numa_with_memory == ()
    assert [(i.name, i.is_virtual) for i in container.interfaces] == [("eth0", True)]
    assert (container.gpus[0].place.address, container.gpus[0].place.numa) == ("0000:b1:00.0", 1)
    assert distance(container, "gpu0", "eth0") is Distance.NODE


def test_soft_roce_is_where_its_interface_is() -> None:
    """Goal: the Soft-RoCE machine's device is seen. Method: its GIDs and place; the IPv4 GID is not at index 0."""
    machine = read_topology(recorded.soft_roce())
    device = machine.rdma[0]
    assert device.is_soft
    assert device.interfaces == ("eth0",)
    assert device.place.address == "0000:00:03.0"
    assert device.ports[0].gid_index == 1
    assert machine.names() == ("rxe0",)


def test_a_long_gid_table_is_read_up_to_its_last_used_entry() -> None:
    """Goal: 1,024 entries of which six are used cost a few reads. Method: count them; entries behind a hole count."""
    machine = recorded.soft_roce()
    port = "sys/devices/virtual/infiniband/rxe0/ports/1"
    for index in range(2, 1024):
        machine.files[f"{port}/gids/{index}"] = "0000:0000:0000:0000:0000:0000:0000:0000"
    machine.files[f"{port}/gids/12"] = "0000:0000:0000:0000:0000:ffff:0a00:0002"
    asked: list[str] = []

    class Counted(RecordedTree):
        def read(self, path: str) -> str:
            asked.append(path)
            return super().read(path)

    found = read_topology(Counted(machine.files, machine.links)).rdma[0].ports[0]
    assert [gid.index for gid in found.gids] == [0, 1, 12]
    assert sum("/gids/" in path for path in asked) == 29


def test_bonds_stand_on_real_interfaces_and_bridges_of_pods_do_not() -> None:
    """Goal: a bond counts, a pod's end does not. Method: one card, a bond over it, a veth."""
    card, virtual = "sys/devices/pci0000:00/0000:00:01.0", "sys/devices/virtual/net"
    files = {f"{card}/numa_node": "0", "sys/devices/system/node/online": "0"}
    for folder, speed in ((f"{card}/net/eth0", "25000"), (f"{virtual}/bond0", "50000"), (f"{virtual}/veth1", "10000")):
        files |= {f"{folder}/type": "1", f"{folder}/operstate": "up", f"{folder}/speed": speed}
    links = {
        "sys/class/net/eth0": f"{card}/net/eth0",
        "sys/class/net/bond0": f"{virtual}/bond0",
        "sys/class/net/veth1": f"{virtual}/veth1",
        f"{card}/net/eth0/device": card,
        f"{virtual}/bond0/lower_eth0": f"{card}/net/eth0",
    }
    found = read_topology(RecordedTree(files, links)).interfaces
    assert [(i.name, i.is_virtual, i.place.address) for i in found] == [
        ("bond0", True, "0000:00:01.0"),
        ("eth0", False, "0000:00:01.0"),
    ]


def test_direct_nvlinks_are_counted_per_pair() -> None:
    """Goal: machines without a switch. Method: three GPUs, two of them joined by four links."""
    pci = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]
    links = [{pci[1]: 4}, {pci[0]: 4}, {}]
    gpus = [{"index": i, "name": "A", "pci": p, "links": to} for i, (p, to) in enumerate(zip(pci, links, strict=True))]
    a, b, c = read_topology(RecordedTree({}, {}, {"driver": "1", "gpus": gpus})).gpus
    assert (nvlinks(a, b), nvlinks(b, a), nvlinks(a, c), nvlinks(a, a)) == (4, 4, 0, 0)


@pytest.mark.parametrize("name", recorded.NAMES)
def test_distances_are_symmetric(name: str) -> None:
    """Goal: near is mutual, on every machine. Method: the matrix equals its transpose, with X on the diagonal only."""
    names, cells = matrix(recorded.machine(name))
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            assert cells[i][j] == cells[j][i], (a, b)
            assert (cells[i][j] == "X") == (i == j)


def test_unknown_numa_nodes_are_far_on_a_machine_with_several() -> None:
    """Goal: an unknown fact never makes things near. Method: two nodes, two devices on different bridges, node -1."""
    files = {"sys/devices/system/node/online": "0-1"}
    links: dict[str, str] = {}
    for name, path in (("eth0", "pci0000:00/0000:00:01.0"), ("eth1", "pci0000:80/0000:80:01.0")):
        folder = f"sys/devices/{path}"
        files |= {f"{folder}/numa_node": "-1", f"{folder}/net/{name}/type": "1"}
        links |= {f"sys/class/net/{name}": f"{folder}/net/{name}", f"{folder}/net/{name}/device": folder}
    assert distance(read_topology(RecordedTree(files, links)), "eth0", "eth1") is Distance.SYS


def test_an_unknown_device_is_refused_by_name() -> None:
    """Goal: a misspelt device is no guess. Method: the message holds the name and those that exist."""
    with pytest.raises(UsageError, match=r"mlx5_9.*mlx5_0"):
        distance(recorded.machine("dual_socket"), "mlx5_9", "mlx5_0")
    with pytest.raises(UsageError, match="no NUMA node 7"):
        recorded.machine("laptop").numa_node(7)


def test_gids_rank_v2_before_v1_and_ipv4_before_ipv6() -> None:
    """Goal: UCX's order. Method: tables with fewer and fewer good entries."""
    v4, v6 = "0000:0000:0000:0000:0000:ffff:0a00:0001", "fe80:0000:0000:0000:0000:0000:0000:0001"
    table = (Gid(0, "RoCE v1", v6, ""), Gid(1, "RoCE v1", v4, ""), Gid(2, "RoCE v2", v6, ""), Gid(5, "RoCE v2", v4, ""))
    assert [best_gid("Ethernet", table[:n]) for n in (4, 3, 2, 1, 0)] == [5, 2, 1, 0, None]
    assert best_gid("InfiniBand", ()) == 0


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_are_read_back(numbers: set[int]) -> None:
    """Goal: any list the kernel prints. Method: print a set with its runs joined, read it."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)
    assert parse_list(text) == tuple(sorted(numbers))


def test_names_are_ordered_by_their_numbers() -> None:
    """Goal: mlx5_2 before mlx5_10. Method: sort, with names that begin with digits or have none."""
    assert sorted(["mlx5_10", "mlx5_2", "lo", "9p"], key=number_order) == ["9p", "lo", "mlx5_2", "mlx5_10"]
