"""The recorded machines of this folder, by the name of their file."""

from __future__ import annotations

from pathlib import Path

from ucxkv.transport.sysfs import RecordedTree
from ucxkv.transport.topology import Topology, read_topology

MACHINES = Path(__file__).resolve().parent / "machines"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))


def tree(name: str) -> RecordedTree:
    return RecordedTree.load(MACHINES / f"{name}.json")


def machine(name: str) -> Topology:
    return read_topology(tree(name))


def soft_roce() -> RecordedTree:
    """A virtual machine with Soft-RoCE on its virtio interface: GID 0 is link-local, 1 the IPv4 address, both v2."""
    device, port = "sys/devices/virtual/infiniband/rxe0", "sys/devices/virtual/infiniband/rxe0/ports/1"
    net = "sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0"
    files = {
        f"{device}/parent": "eth0",
        f"{port}/state": "4: ACTIVE",
        f"{port}/link_layer": "Ethernet",
        f"{port}/rate": "2.5 Gb/sec (1X SDR)",
        f"{port}/gids/0": "fe80:0000:0000:0000:0200:00ff:fe00:0001",
        f"{port}/gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        f"{port}/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
        f"{port}/gid_attrs/types/0": "RoCE v2",
        f"{port}/gid_attrs/types/1": "RoCE v2",
        f"{port}/gid_attrs/ndevs/1": "eth0",
        f"{net}/type": "1",
        f"{net}/operstate": "up",
        f"{net}/speed": "-1",
        f"{net}/mtu": "1500",
        "sys/devices/system/cpu/online": "0-1",
    }
    links = {
        "sys/class/infiniband/rxe0": device,
        "sys/class/net/eth0": net,
        f"{net}/device": "sys/devices/pci0000:00/0000:00:03.0/virtio0",
    }
    return RecordedTree(files, links)
