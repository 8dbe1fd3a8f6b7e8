"""Where memory and the data thread go on each recorded machine, and pinning a thread for real."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from tests.transport.topology import recorded
from ucxkv.transport.affinity import place, placement_for_node, running_on
from ucxkv.transport.base import UsageError
from ucxkv.transport.topology import read_topology


def test_a_node_goes_beside_the_only_fast_port() -> None:
    """Goal: memory and thread on the port's socket. Method: the dual-socket machine, whose card is on node 1."""
    placed = placement_for_node(recorded.machine("dual_socket"))
    assert placed.numa == 1
    assert placed.cpus == tuple(range(1, 64, 2))
    assert placed.why == "beside mlx5_0"


def test_a_machine_with_equal_ports_on_both_sockets_asks_for_a_number() -> None:
    """Goal: no half of the memory is given up unasked. Method: the DGX with auto, then with each node's number."""
    dgx = recorded.machine("dgx_h100")
    assert placement_for_node(dgx).numa is None
    assert "8 equal devices on 2 NUMA nodes" in placement_for_node(dgx).why
    assert [placement_for_node(dgx, node).numa for node in (0, 1)] == [0, 1]
    assert placement_for_node(dgx, 1).cpus[0] == 56
    assert place(dgx, "gpu5").numa == 1


@pytest.mark.parametrize("name", ["laptop", "container", "virtual_machine"])
def test_one_numa_node_places_nothing(name: str) -> None:
    """Goal: a no-op where there is nothing to choose. Method: auto and node 0 on machines of one node."""
    machine = recorded.machine(name)
    for policy in ("auto", 0):
        placed = placement_for_node(machine, policy)
        assert (placed.numa, placed.cpus) == (None, ())


def test_a_device_without_a_place_places_nothing() -> None:
    """Goal: two NUMA nodes alone are no reason. Method: the recorded Soft-RoCE machine, whose devices are nowhere."""
    placed = placement_for_node(recorded.machine("soft_roce"))
    assert (placed.numa, placed.cpus) == (None, ())
    assert placement_for_node(recorded.machine("soft_roce"), 1).cpus == (1,)


def test_off_and_unknown_nodes() -> None:
    """Goal: off is off, a wrong number is refused. Method: the dual-socket machine."""
    box = recorded.machine("dual_socket")
    assert placement_for_node(box, "off").numa is None
    with pytest.raises(UsageError, match="no NUMA node 2"):
        placement_for_node(box, 2)


def test_a_device_of_unknown_node_places_nothing() -> None:
    """Goal: a wrong placement is worse than none. Method: the dual-socket card with its node masked."""
    box = recorded.machine("dual_socket")
    masked = replace(box, rdma=tuple(replace(d, place=replace(d.place, numa=-1)) for d in box.rdma))
    assert placement_for_node(masked).numa is None
    assert "unknown" in placement_for_node(masked).why


def test_a_node_without_memory_or_cpus_gives_its_part_to_the_nearest() -> None:
    """Goal: sockets without DIMMs. Method: the dual-socket machine plus a third node of memory only, near node 0."""
    box = recorded.machine("dual_socket")
    bare = replace(box.numa[1], memory_bytes=0)
    third = replace(box.numa[0], index=2, cpus=(), distances=((0, 12), (1, 21), (2, 10)))
    machine = replace(box, numa=(box.numa[0], bare, third))
    assert placement_for_node(machine).numa == 0
    assert placement_for_node(machine).cpus == box.numa[1].cpus
    assert placement_for_node(machine, 2).numa == 2
    assert placement_for_node(machine, 2).cpus == box.numa[0].cpus


def test_threads_started_meanwhile_stay_on_the_cpus_and_the_caller_does_not() -> None:
    """Goal: the data thread inherits its CPUs. Method: pin to one CPU, start a thread that outlives the block."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one usable CPU: nothing to pin to")
    one = max(before)
    seen: list[set[int]] = []
    go = threading.Event()

    def look() -> None:
        go.wait(10)
        seen.append(os.sched_getaffinity(0))

    with running_on((one, 100_000)) as done:
        assert done
        thread = threading.Thread(target=look)
        thread.start()
    assert os.sched_getaffinity(0) == before
    go.set()
    thread.join()
    assert seen == [{one}]


def test_cpus_that_this_process_may_not_use_change_nothing() -> None:
    """Goal: containers with a CPU set. Method: foreign CPUs, none, and all of ours."""
    before = os.sched_getaffinity(0)
    for cpus in ((100_000,), (), tuple(before)):
        with running_on(cpus) as done:
            assert not done
            assert os.sched_getaffinity(0) == before


def test_this_machine_is_placed_without_error() -> None:
    """Goal: the real /sys. Method: read it, place; with one NUMA node nothing is placed."""
    machine = read_topology()
    placed = placement_for_node(machine)
    if len(machine.numa_with_memory) < 2:
        assert (placed.numa, placed.cpus) == (None, ())
