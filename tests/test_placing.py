"""Where a node puts its memory and its data thread: from configuration and recorded machines to the real one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

import ucxkv
from tests.transport.topology import recorded
from ucxkv.config import node_config
from ucxkv.errors import SetupError
from ucxkv.node import Node
from ucxkv.node.config import NodeConfig
from ucxkv.node.placing import Placing
from ucxkv.tiers.numa import thread_policy

CONFIG = NodeConfig(name="placed", listen="127.0.0.1:0", host_bytes=32 << 20)
OPEN = replace(CONFIG, listen="0.0.0.0:0")


def test_a_node_goes_beside_the_card_and_says_so() -> None:
    """Goal: auto on a dual-socket machine. Method: its recording; the policy that `make` runs under is the kernel's."""
    placing = Placing(OPEN, recorded.tree("dual_socket"))
    assert placing.facts() == {
        "numa": "node 1 (beside mlx5_0)",
        "devices": "mlx5_0:1 (NODE from numa1, 100 Gb/s RoCE v2)",
    }
    policy = placing.near(thread_policy)
    nodes = os.listdir("/sys/devices/system/node") if os.path.isdir("/sys/devices/system/node") else []
    if "node1" in nodes and policy is not None:
        assert policy[1] == 2
    else:  # this machine has no node 1: refused, named, and the node would start all the same
        assert policy is None or policy[1] == 0
        assert "memory refused" in placing.facts()["numa"]


def test_a_node_serves_rdma_clients_over_rails_and_the_others_over_the_interfaces() -> None:
    """Goal: the devices of its UCX context. Method: the dual-socket machine, with and without verbs, and a laptop."""
    placing = Placing(OPEN, recorded.tree("dual_socket"))
    assert placing.rails("") == ("mlx5_0:1",)
    assert placing.rails("UCX has no verbs") == ()
    assert placing.devices(placing.rails("")) == ("mlx5_0:1", "lo", "eno8303", "ens3f0np0")
    assert [(rail.fabric, rail.number) for rail in placing.announced(("mlx5_0:1", "lo"))] == [("roce", 0)]
    laptop = Placing(OPEN, recorded.tree("laptop"))
    assert laptop.rails("") == ()
    assert laptop.devices(()) == ("lo", "wlp0s20f3")


def test_nodes_of_one_host_start_on_different_rails() -> None:
    """Goal: two ports are not shared while six idle. Method: 32 nodes near socket 1 of the DGX, by their names."""
    taken = {
        Placing(replace(OPEN, name=f"n{number}", numa=1), recorded.tree("dgx_h100")).rails("") for number in range(32)
    }
    assert taken == {("mlx5_6:1", "mlx5_9:1"), ("mlx5_10:1", "mlx5_11:1")}


@pytest.mark.parametrize(
    ("listen", "devices"),
    [
        ("127.0.0.1:0", ("lo",)),
        ("[::1]:0", ("lo",)),
        ("localhost:0", ("lo",)),
        ("203.0.113.7:0", ()),  # none of this host's: binding says so, no device is guessed
    ],
)
def test_a_node_on_the_loopback_uses_no_card(listen: str, devices: tuple[str, ...]) -> None:
    """Goal: the address decides. Method: the dual-socket machine's cards, this machine's addresses."""
    placing = Placing(replace(CONFIG, listen=listen), recorded.tree("dual_socket"))
    assert placing.devices(()) == devices
    if devices:
        assert placing.rails("") == ()


def test_one_numa_node_is_a_no_op() -> None:
    """Goal: nothing changes on small machines. Method: a recorded laptop; affinity and policy inside are as outside."""
    placing = Placing(CONFIG, recorded.tree("laptop"))
    assert placing.placement.numa is None
    assert placing.near(thread_policy) == thread_policy()
    before = os.sched_getaffinity(0)
    with placing.thread() as changed:
        assert not changed
        assert os.sched_getaffinity(0) == before


def test_the_setting_is_read_from_file_and_flag(tmp_path: os.PathLike[str]) -> None:
    """Goal: auto, off or a number, everywhere. Method: a TOML file, flags as text, and what is refused by name."""
    path = os.path.join(tmp_path, "node.toml")
    for text, value in (("0", 0), ("'off'", "off"), ("'auto'", "auto"), ("'1'", 1)):
        with open(path, "w") as file:
            file.write(f"[node]\nnuma = {text}\n")
        assert node_config(path).numa == value
    assert node_config(None, {"numa": "1"}).numa == 1
    for wrong in ("near", "-1", "1.5", ""):
        with pytest.raises(SetupError, match="numa"):
            node_config(None, {"numa": wrong})
    with pytest.raises(SetupError, match="numa"):
        node_config(None, {"numa": -1})


def test_a_numa_node_that_does_not_exist_stops_the_start_by_name() -> None:
    """Goal: a wrong number is the operator's to mend. Method: node 9 on the recorded and on the real machine."""
    wrong = replace(CONFIG, numa=9)
    with pytest.raises(SetupError, match="no NUMA node 9"):
        Placing(wrong, recorded.tree("dual_socket"))


async def test_a_running_node_reports_its_placement_and_keeps_every_cpu() -> None:
    """Goal: `ucxkv status` shows it; this process's own threads stay free. Method: a real node, with numa off."""
    before = os.sched_getaffinity(0)
    async with Node(replace(CONFIG, numa="off")) as node, ucxkv.connect(node.address) as kv:
        facts = (await kv.status())[0].facts
        assert facts["numa"] == "any node (switched off)"
        assert facts["devices"]
        assert os.sched_getaffinity(0) == before


async def test_a_node_with_a_wrong_number_leaves_nothing_behind() -> None:
    """Goal: the start fails whole. Method: a real node with node number 999; it can be closed again."""
    node = Node(replace(CONFIG, numa=999))
    with pytest.raises(SetupError, match="999"):
        await node.start()
    await node.aclose()
