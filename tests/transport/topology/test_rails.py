"""Which devices a worker uses on each recorded machine: anywhere, near something, and for a peer."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

import pytest

from tests.transport.topology import recorded
from ucxkv.transport.base import UsageError
from ucxkv.transport.devices import PciPlace
from ucxkv.transport.netlink import Network
from ucxkv.transport.rails import choose_rails, listening_interfaces, rail_numbers
from ucxkv.transport.ranking import Rail
from ucxkv.transport.topology import Distance, read_topology

COMPUTE = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]


@pytest.mark.parametrize("gpu", range(8))
def test_each_gpu_of_a_dgx_gets_the_port_behind_its_switch(gpu: int) -> None:
    """Goal: GPU k uses rail k and no other. Method: the pairs of the DGX H100 manual."""
    choice = choose_rails(recorded.machine("dgx_h100"), f"gpu{gpu}", max_rails=4)
    assert choice.net_devices == f"{COMPUTE[gpu]}:1"
    assert (choice.transport, choice.apart, choice.rate_gbps) == ("InfiniBand", Distance.PXB, 400.0)
    assert "9 farther or slower" in choice.why


def test_workers_of_one_socket_share_its_rails_evenly() -> None:
    """Goal: multi-rail, no slow storage port, workers on different rails. Method: workers near numa1 of the DGX."""
    dgx = recorded.machine("dgx_h100")
    chosen = [choose_rails(dgx, "numa1", max_rails=2, worker=worker).devices for worker in range(4)]
    assert chosen[0] == ("mlx5_6:1", "mlx5_9:1")
    assert chosen[1] == ("mlx5_10:1", "mlx5_11:1")
    assert chosen[2:] == chosen[:2]
    assert len(choose_rails(dgx, "numa1", max_rails=8).devices) == 4
    assert len(choose_rails(dgx, max_rails=8).devices) == 8
    assert choose_rails(dgx).apart is None


def test_one_port_serves_both_sockets_and_says_what_it_costs() -> None:
    """Goal: far RDMA is better than near TCP. Method: the dual-socket machine from either node."""
    box = recorded.machine("dual_socket")
    far, near = choose_rails(box, "numa0"), choose_rails(box, "numa1")
    assert far.net_devices == near.net_devices == "mlx5_0:1"
    assert (far.apart, near.apart) == (Distance.SYS, Distance.NODE)
    assert far.gid_indices == (3,)
    assert far.transport == "RoCE v2"


def test_a_slow_port_nearby_does_not_beat_a_fast_one_on_the_other_socket() -> None:
    """Goal: rate counts before distance. Method: the dual-socket machine with a 25 Gb/s port added on socket 0."""
    box = recorded.machine("dual_socket")
    fast = box.rdma[0]
    place = PciPlace(("pci0000:00", "0000:00:09.0"), numa=0)
    slow = replace(fast, name="bnxt_re0", place=place, ports=(replace(fast.ports[0], rate_gbps=25.0),))
    mixed = replace(box, rdma=(*box.rdma, slow))
    assert choose_rails(mixed, "numa0", max_rails=4).devices == ("mlx5_0:1",)
    equal = replace(slow, ports=(replace(fast.ports[0], rate_gbps=100.0),))
    assert choose_rails(replace(box, rdma=(*box.rdma, equal)), "numa0").devices == ("bnxt_re0:1",)


def test_a_port_on_a_narrow_slot_ranks_by_its_slot() -> None:
    """Goal: a 100 Gb/s port on one lane is no 100 Gb/s port. Method: a twin of the card, on node 0, with one lane."""
    box = recorded.machine("dual_socket")
    place = replace(box.rdma[0].place, path=("pci0000:00", "0000:00:09.0"), numa=0, link_gtps=16.0, link_lanes=1)
    narrow = replace(box.rdma[0], name="mlx5_9", place=place)
    assert round(place.link_gbps, 2) == 15.75
    assert replace(place, link_gtps=5.0, link_lanes=4).link_gbps == 16.0
    assert choose_rails(replace(box, rdma=(narrow, *box.rdma)), "numa0", max_rails=4).devices == ("mlx5_0:1",)


@pytest.mark.parametrize(
    ("name", "device"), [("laptop", "wlp0s20f3"), ("container", "eth0"), ("virtual_machine", "eth0")]
)
def test_machines_without_rdma_use_tcp_over_the_interface_that_is_up(name: str, device: str) -> None:
    """Goal: never an interface that is down or Docker's. Method: three machines without RDMA devices."""
    choice = choose_rails(recorded.machine(name))
    assert (choice.net_devices, choice.transport, choice.gid_indices) == (device, "TCP", ())
    assert "no RDMA device" in choice.why


def test_soft_roce_is_chosen_with_its_ipv4_gid() -> None:
    """Goal: the Soft-RoCE machine uses verbs. Method: its recording."""
    choice = choose_rails(read_topology(recorded.soft_roce()))
    assert (choice.net_devices, choice.transport, choice.gid_indices) == ("rxe0:1", "RoCE v2", (1,))


def test_the_recorded_soft_roce_machine_uses_one_device_unless_a_card_is_there() -> None:
    """Goal: verbs where there is nothing better, one device in software at a time; hardware first. Method: the
    recording, by the interface that leads to the peer, then with a slow real card.
    """
    machine = recorded.machine("soft_roce")
    choice = choose_rails(machine, "numa1")
    assert (choice.net_devices, choice.gid_indices, choice.apart) == ("rxe0:1", (1,), Distance.SYS)
    for device in machine.rdma:
        assert choose_rails(machine, via=device.interfaces[0]).devices == (f"{device.name}:1",)
    elsewhere = choose_rails(machine, via="eth7")
    assert (elsewhere.devices, elsewhere.is_rdma) == (("eth7",), False)
    assert "belongs to the interface" in elsewhere.why
    card = recorded.machine("dual_socket").rdma[0]
    card = replace(card, ports=(replace(card.ports[0], rate_gbps=1.0),))
    assert choose_rails(replace(machine, rdma=(*machine.rdma, card))).devices == ("mlx5_0:1",)


def test_a_machine_without_any_network_leaves_the_choice_to_ucx() -> None:
    """Goal: no device is no error. Method: the laptop with its interfaces down."""
    laptop = recorded.machine("laptop")
    down = replace(laptop, interfaces=tuple(replace(interface, is_up=False) for interface in laptop.interfaces))
    choice = choose_rails(down)
    assert (choice.devices, choice.net_devices) == ((), "all")
    assert "this host only" in choice.why


def test_wrong_arguments_are_refused() -> None:
    """Goal: fix your call. Method: an unknown place, no rails."""
    with pytest.raises(UsageError, match="gpu9"):
        choose_rails(recorded.machine("dgx_h100"), "gpu9")
    with pytest.raises(UsageError, match="max_rails"):
        choose_rails(recorded.machine("dgx_h100"), max_rails=0)


def test_rail_numbers_follow_the_pci_order_of_the_fastest_ports() -> None:
    """Goal: rail k meets rail k of a machine of the same kind. Method: the DGX: eight InfiniBand rails, two of RoCE."""
    numbers = rail_numbers(recorded.machine("dgx_h100"))
    infiniband = "ib:fe80:0000:0000:0000"
    assert [numbers[f"{device}:1"][:2] for device in COMPUTE] == [(infiniband, k) for k in range(8)]
    assert (numbers["mlx5_1:1"][:2], numbers["mlx5_7:1"][:2]) == (("roce", 0), ("roce", 1))
    assert numbers["mlx5_0:1"].gid.startswith("fe80:")
    assert numbers["mlx5_1:1"].ipv4 is not None and numbers["mlx5_0:1"].ipv4 is None


# ---- for a peer


def test_the_loopback_leads_to_no_rail() -> None:
    """Goal: a node of this host only stays on it. Method: every recorded machine, via lo."""
    for name in recorded.NAMES:
        choice = choose_rails(recorded.machine(name), via="lo")
        assert (choice.devices, choice.is_rdma, choice.transport) == (("lo",), False, "TCP")


def test_over_tcp_the_interface_that_leads_to_the_peer_is_used_whatever_its_speed() -> None:
    """Goal: what is fast and leads elsewhere moves nothing. Method: machines without RDMA, a virtual interface."""
    for name in ("laptop", "container", "virtual_machine"):
        assert choose_rails(recorded.machine(name), via="docker0").devices == ("docker0",)
    without = choose_rails(recorded.machine("dgx_h100"), via="eno3", peer=())
    assert (without.devices, without.is_rdma) == (("eno3",), False)
    assert "the peer uses no RDMA device" in without.why


def test_rails_that_the_peer_uses_too_are_taken_first() -> None:
    """Goal: same rail before cross rail, among equals. Method: readers of a DGX, a node on rails 2, 3."""
    dgx = recorded.machine("dgx_h100")
    numbers = rail_numbers(dgx)
    node = [numbers["mlx5_4:1"], numbers["mlx5_5:1"]]
    assert choose_rails(dgx, "numa0", peer=node).devices == ("mlx5_4:1", "mlx5_5:1")
    assert choose_rails(dgx, "numa0", peer=node, worker=1).devices == ("mlx5_4:1", "mlx5_5:1")
    assert choose_rails(dgx, "gpu1", peer=node).devices == ("mlx5_3:1",)  # its own, though it crosses
    assert choose_rails(dgx, "numa1", peer=node).devices == ("mlx5_6:1", "mlx5_9:1")


def test_a_peer_on_another_fabric_is_reached_over_tcp() -> None:
    """Goal: InfiniBand does not meet RoCE, nor another subnet. Method: the dual-socket box and the DGX; its storage
    ports, which speak RoCE, meet the box.
    """
    dgx, box = recorded.machine("dgx_h100"), recorded.machine("dual_socket")
    foreign = choose_rails(box, via="ens3f0np0", peer=[Rail("ib:fe80:0000:0000:0000", 0)])
    assert (foreign.devices, foreign.is_rdma) == (("ens3f0np0",), False)
    assert "fabric" in foreign.why
    assert choose_rails(dgx, "numa0", peer=rail_numbers(box).values()).devices == ("mlx5_1:1",)


def test_isolated_subnets_use_the_rail_that_shares_one_with_the_peer() -> None:
    """Goal: rails without a router between them. Method: the dual-socket box with a second equal port, a subnet each;
    a peer in the second's, in both, and in neither (then a router leads there).
    """
    box = recorded.machine("dual_socket")
    twin = replace(box.rdma[0], name="mlx5_2", interfaces=("ens5",), place=PciPlace(("pci0000:80", "x"), numa=1))
    box = replace(box, rdma=(box.rdma[0], twin))
    networks: dict[str, tuple[Network, ...]] = {
        "ens3f0np0": (ipaddress.IPv4Interface("10.1.0.5/24"),),
        "ens5": (ipaddress.IPv4Interface("10.2.0.5/24"),),
    }

    def devices(*gids: str) -> tuple[str, ...]:
        peer = [Rail("roce", number, gid) for number, gid in enumerate(gids)]
        return choose_rails(box, "numa1", peer=peer, networks=networks).devices

    assert devices("::ffff:10.2.0.9") == ("mlx5_2:1",)
    assert devices("::ffff:10.1.0.9", "::ffff:10.2.0.9") == ("mlx5_0:1", "mlx5_2:1")
    assert devices("::ffff:10.9.0.9", "::ffff:10.8.0.9") == ("mlx5_0:1", "mlx5_2:1")


def test_a_node_serves_over_the_interface_of_its_address_or_over_all_that_are_up() -> None:
    """Goal: every client that reaches the address reaches the data. Method: one interface, and any address."""
    assert listening_interfaces(recorded.machine("laptop"), "enp58s0") == ("enp58s0",)
    assert listening_interfaces(recorded.machine("laptop"), "") == ("lo", "wlp0s20f3")
    assert listening_interfaces(recorded.machine("container"), "") == ("lo", "eth0")
    assert listening_interfaces(recorded.machine("dual_socket"), "", ["eno8303"]) == ("lo", "eno8303")
    assert listening_interfaces(recorded.machine("dual_socket"), "", []) == ()
    down = replace(recorded.machine("container"), interfaces=())
    assert listening_interfaces(down, "") == ()
