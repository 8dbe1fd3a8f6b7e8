"""The path table: what a client at each place of each recorded machine takes to a node at each place.

On one machine the way decides, on two of a kind the rails: the node's are chosen at its start, the client's for that
node. One letter a pair; the rows are clients, the columns nodes, in the order of the places.
"""

from __future__ import annotations

import ipaddress

import pytest

from tests.transport.topology import recorded
from ucxkv.client.networks import choose_network
from ucxkv.client.opening import path_for
from ucxkv.client.results import PathKind
from ucxkv.transport.netlink import Network
from ucxkv.transport.rails import RailChoice, choose_rails, locate, rail_numbers
from ucxkv.transport.ranking import Location, Way, network_way, way_between
from ucxkv.transport.topology import Topology

LETTERS = {
    Way.SAME_GPU: "G",
    Way.NVLINK: "N",
    Way.SAME_HOST: "h",
    Way.SAME_RAIL: "R",
    Way.CROSS_RAIL: "x",
    Way.TCP: "t",
}

# Two processes on one machine: same GPU, NVLink, or same host; all of them map the node's memory.
ONE_MACHINE = {
    "dgx_h100": [
        "GNNNNNNNhh",
        "NGNNNNNNhh",
        "NNGNNNNNhh",
        "NNNGNNNNhh",
        "NNNNGNNNhh",
        "NNNNNGNNhh",
        "NNNNNNGNhh",
        "NNNNNNNGhh",
        "hhhhhhhhhh",
        "hhhhhhhhhh",
    ],
    "dual_socket": ["hh", "hh"],
    "laptop": ["Gh", "hh"],
    "container": ["Gh", "hh"],
    "virtual_machine": ["h"],
    "soft_roce": ["hh", "hh"],
}

# Two machines of a kind. A GPU has its rail alone, and a node near a socket the socket's first two: a client on a GPU
# meets it there when that is one of them. A client near a socket takes what it has in common with the node, up to two.
TWO_MACHINES = {
    "dgx_h100": [
        "RxxxxxxxRx",
        "xRxxxxxxRx",
        "xxRxxxxxxx",
        "xxxRxxxxxx",
        "xxxxRxxxxR",
        "xxxxxRxxxR",
        "xxxxxxRxxx",
        "xxxxxxxRxx",
        "RRRRxxxxRx",
        "xxxxRRRRxR",
    ],
    "dual_socket": ["RR", "RR"],  # the one port of both sockets
    "laptop": ["tt", "tt"],
    "container": ["tt", "tt"],
    "virtual_machine": ["t"],
    "soft_roce": ["RR", "RR"],
}

# The interface that the control connection comes over, and the devices from the last NUMA node to the same one there.
OVER = {
    "dgx_h100": ("eno3", ("mlx5_6:1", "mlx5_9:1")),
    "dual_socket": ("eno8303", ("mlx5_0:1",)),
    "laptop": ("wlp0s20f3", ("wlp0s20f3",)),
    "container": ("eth0", ("eth0",)),
    "virtual_machine": ("eth0", ("eth0",)),
    "soft_roce": ("", ("rxe0:1",)),
}


def _places(machine: Topology) -> list[str]:
    return [f"gpu{gpu.index}" for gpu in machine.gpus] + [f"numa{node.index}" for node in machine.numa]


def _to_another(name: str, client: str, node: str) -> tuple[RailChoice, Way]:
    """What a client takes to a node on another machine of the kind."""
    machine = recorded.machine(name)
    there = locate(machine, "there", "1", near=node)
    choice = choose_rails(machine, client, via=OVER[name][0], peer=there.rails)
    numbers = rail_numbers(machine)
    here = Location("here", "1", rails=frozenset(numbers[device] for device in choice.devices if choice.is_rdma))
    return choice, network_way(here, there)


def test_every_recorded_machine_has_its_tables() -> None:
    """Goal: a machine that is added says what is chosen on it. Method: the names."""
    assert set(ONE_MACHINE) == set(TWO_MACHINES) == set(OVER) == set(recorded.NAMES)


@pytest.mark.parametrize("name", recorded.NAMES)
def test_one_machine(name: str) -> None:
    """Goal: what shares memory maps it. Method: every pair of places, two processes, then one."""
    machine = recorded.machine(name)
    places = _places(machine)
    clients = {place: locate(machine, "here", "client", near=place) for place in places}
    nodes = {place: locate(machine, "here", "node", near=place) for place in places}
    rows = ["".join(LETTERS[way_between(clients[a], nodes[b])] for b in places) for a in places]
    assert rows == ONE_MACHINE[name]
    assert {path_for(way_between(clients[a], nodes[b])) for a in places for b in places} == {PathKind.MAPPED}
    assert {way_between(clients[a], clients[b]) for a in places for b in places} == {Way.SAME_PROCESS}


@pytest.mark.parametrize("name", recorded.NAMES)
def test_two_machines_of_a_kind(name: str) -> None:
    """Goal: RDMA where rails meet, messages elsewhere. Method: every pair of places: way, path, and devices of one."""
    places = _places(recorded.machine(name))
    rows = []
    for client in places:
        chosen = [_to_another(name, client, node) for node in places]
        rows.append("".join(LETTERS[way] for _, way in chosen))
        for choice, way in chosen:
            assert path_for(way) is (PathKind.RMA if choice.is_rdma else PathKind.MESSAGE)
            assert choice.is_rdma or choice.devices == (OVER[name][0],)
    assert rows == TWO_MACHINES[name]
    assert _to_another(name, places[-1], places[-1])[0].devices == OVER[name][1]


@pytest.mark.parametrize("name", recorded.NAMES)
@pytest.mark.parametrize("why_no_verbs", ["", "UCX has no verbs"])
def test_without_verbs_or_a_device_at_the_node_it_is_tcp_over_the_interface_that_leads_there(
    name: str, why_no_verbs: str
) -> None:
    """Goal: a device that UCX or the node cannot use is not chosen. Method: every machine as the client's, a node with
    rails and UCX without verbs, then a node without rails.
    """
    machine = recorded.machine(name)
    networks: dict[str, tuple[Network, ...]] = {"eth9": (ipaddress.IPv4Interface("10.0.0.5/24"),)}
    rails = frozenset(rail_numbers(machine).values()) if why_no_verbs else frozenset()
    node = Location("there", "1", rails=rails)
    choice, way = choose_network(machine, networks, Location("here", "1"), node, "10.0.0.5", why_no_verbs)
    assert (choice.devices, choice.is_rdma, way) == (("eth9",), False, Way.TCP)
    assert why_no_verbs == "" or not rails or choice.why.startswith(why_no_verbs)
