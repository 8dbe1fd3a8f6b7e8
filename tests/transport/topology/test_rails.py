"""Which devices a worker uses on each recorded machine, and how a batch is spread over equal rails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.topology import recorded
from ucxkv.transport.base import UsageError
from ucxkv.transport.devices import PciPlace
from ucxkv.transport.rails import CUT_BYTES, Piece, choose_rails, rail_numbers, stripe
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


def test_the_recorded_soft_roce_machine_uses_both_devices_unless_a_card_is_there() -> None:
    """Goal: verbs where there is nothing better; hardware first. Method: the recording, then with a slow real card."""
    machine = recorded.machine("soft_roce")
    choice = choose_rails(machine, "numa1")
    assert (choice.net_devices, choice.gid_indices, choice.apart) == ("rxe0:1,rxe1:1", (1, 1), Distance.SYS)
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
    """Goal: fix your call. Method: an unknown place, no rails, negative sizes."""
    with pytest.raises(UsageError, match="gpu9"):
        choose_rails(recorded.machine("dgx_h100"), "gpu9")
    with pytest.raises(UsageError, match="max_rails"):
        choose_rails(recorded.machine("dgx_h100"), max_rails=0)
    with pytest.raises(UsageError, match="-1"):
        stripe([5, -1], 2)


def test_rail_numbers_follow_the_pci_order_of_the_fastest_ports() -> None:
    """Goal: rail k meets rail k of a machine of the same kind. Method: the DGX: eight InfiniBand rails, two of RoCE."""
    numbers = rail_numbers(recorded.machine("dgx_h100"))
    infiniband = "ib:fe80:0000:0000:0000"
    assert [numbers[f"{device}:1"] for device in COMPUTE] == [(infiniband, k) for k in range(8)]
    assert (numbers["mlx5_1:1"], numbers["mlx5_7:1"]) == (("roce", 0), ("roce", 1))


def test_equal_values_are_striped_in_runs() -> None:
    """Goal: contiguous and balanced. Method: eight values of 1 MiB over two and four rails, by hand."""
    mib = 1 << 20
    assert stripe([mib] * 8, 2) == tuple(Piece(i, 0, mib, i // 4) for i in range(8))
    assert [piece.rail for piece in stripe([mib] * 8, 4)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert stripe([4 * mib], 2) == (Piece(0, 0, 2 * mib, 0), Piece(0, 2 * mib, 2 * mib, 1))


def test_small_batches_stay_on_one_rail() -> None:
    """Goal: no set-up that costs more than it saves. Method: 16 values of 16 KiB, then a floor of 64 KiB."""
    sizes = [16 << 10] * 16
    assert {piece.rail for piece in stripe(sizes, 4)} == {0}
    assert {piece.rail for piece in stripe(sizes, 4, rail_bytes_min=64 << 10)} == {0, 1, 2, 3}
    assert stripe([], 3) == ()


@given(st.lists(st.integers(0, 1 << 20), max_size=40), st.integers(1, 8))
def test_striping_gives_every_byte_to_one_rail_in_order(sizes: list[int], rails: int) -> None:
    """Goal: no byte lost or doubled, runs in order, rails within CUT_BYTES of their share. Method: any sizes."""
    pieces = stripe(sizes, rails, rail_bytes_min=8 * CUT_BYTES)
    assert all(piece.nbytes > 0 for piece in pieces)
    assert [piece.rail for piece in pieces] == sorted(piece.rail for piece in pieces)
    at = dict.fromkeys(range(len(sizes)), 0)
    for piece in pieces:
        assert piece.offset == at[piece.item]
        assert piece.offset % CUT_BYTES == 0
        at[piece.item] += piece.nbytes
    assert list(at.values()) == sizes
    used = max(1, min(rails, sum(sizes) // (8 * CUT_BYTES)))
    share = sum(sizes) / used
    for rail in range(used):
        nbytes = sum(piece.nbytes for piece in pieces if piece.rail == rail)
        assert abs(nbytes - share) <= CUT_BYTES + 1
