"""`ucxkv doctor` judges recorded hosts: each finding's state, and a fix wherever something is wanting."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucxkv.cli.checks import CHECKS, Finding, Host, State, check_host
from ucxkv.cli.probes import PROBES

WHEEL = {"version": "1.22.0", "path": "/p", "source": "wheel", "transports": ("tcp", "posix"), "has_verbs": False}
SYSTEM = {**WHEEL, "source": "system", "transports": ("tcp", "ib"), "has_verbs": True}
LAPTOP = {
    "native": lambda: "",
    "ucx": lambda: WHEEL,
    "other_ucx": list,
    "memlock": lambda: 8 << 20,
    "dev_shm_free": lambda: 8 << 30,
    "huge_segment": lambda: "huge-transparent",
    "io_uring": lambda: "",
    "process_vm_readv": lambda: "",
    "cpus": lambda: 8,
}


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _findings(host: Host) -> dict[str, Finding]:
    return {item.name: item for item in check_host(host)}


PLAIN = {
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
}


def test_a_laptop_without_devices_has_nothing_to_mend(tmp_path: Path) -> None:
    """Goal: neither GPU nor RDMA is needed. Method: a recorded laptop; no finding warns or fails."""
    found = _findings(Host(LAPTOP, _tree(tmp_path, PLAIN)))
    assert {item.state for item in found.values()} <= {State.OK, State.INFO}
    assert len(found) == len(CHECKS)


def test_an_rdma_host_with_the_wheel_is_told_to_install_a_system_ucx(tmp_path: Path) -> None:
    """Goal: idle RDMA devices are noticed. Method: a recorded device, with the wheel, then a system UCX."""
    port = "sys/class/infiniband/mlx5_0/ports/1"
    root = _tree(tmp_path, {**PLAIN, f"{port}/state": "4: ACTIVE\n", f"{port}/rate": "100 Gb/sec (4X EDR)\n"})
    found = _findings(Host(LAPTOP, root))
    assert found["UCX"].state is State.WARN
    assert "libucx0" in found["UCX"].fix
    assert found["memlock"].state is State.WARN
    assert found["RDMA"].state is State.OK
    assert "mlx5_0:1 ACTIVE 100 Gb/sec" in found["RDMA"].found
    better = _findings(Host({**LAPTOP, "ucx": lambda: SYSTEM, "memlock": lambda: -1}, root))
    assert better["UCX"].state is State.OK
    assert better["memlock"].state is State.OK


def test_the_chosen_device_and_a_port_with_too_few_lanes_are_shown(tmp_path: Path) -> None:
    """Goal: the choice is visible, a badly seated card too. Method: a 100 Gb/s port on 16, then on 4 lanes."""
    card, port = "sys/devices/pci0000:00/0000:00:01.0", "infiniband/mlx5_0/ports/1"
    tree = {
        f"{card}/current_link_speed": "8.0 GT/s PCIe\n",
        f"{card}/current_link_width": "16\n",
        f"{card}/{port}/state": "4: ACTIVE\n",
        f"{card}/{port}/rate": "100 Gb/sec (4X EDR)\n",
        f"{card}/{port}/link_layer": "InfiniBand\n",
    }
    root = _tree(tmp_path, {**PLAIN, **tree})
    (root / "sys/class/infiniband").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").symlink_to(Path("../../..") / card / "infiniband/mlx5_0")
    found = _findings(Host(LAPTOP, root))["network device"]
    assert found.state is State.OK
    assert "mlx5_0:1: anywhere on this host, 100 Gb/s InfiniBand" in found.found
    (root / card / "current_link_width").write_text("4\n")
    found = _findings(Host(LAPTOP, root))["network device"]
    assert found.state is State.WARN
    assert "mlx5_0 32 of 100 Gb/s (x4 at 8 GT/s)" in found.cost
    assert found.fix


def test_a_tight_container_gets_a_fix_for_each_want(tmp_path: Path) -> None:
    """Goal: whatever warns names its cost and its fix. Method: a container that refuses everything it can."""
    files = {
        "proc/meminfo": "MemAvailable: 12000000 kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
        "sys/fs/cgroup/memory.max": f"{1 << 30}\n",
        "sys/fs/cgroup/memory.current": f"{1 << 29}\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
    }
    refusing = {
        **LAPTOP,
        "huge_segment": lambda: "small",
        "dev_shm_free": lambda: 32 << 20,
        "io_uring": lambda: "Operation not permitted",
        "process_vm_readv": lambda: "Operation not permitted",
        "other_ucx": lambda: ["/other/libucp.so.0"],
    }
    found = _findings(Host(refusing, _tree(tmp_path, files)))
    warned = {name for name, item in found.items() if item.state is State.WARN}
    assert warned == {"CPU", "memory", "huge pages", "/dev/shm", "process_vm_readv", "other UCX in process"}
    assert all(found[name].cost and found[name].fix for name in warned)
    assert found["io_uring"].state is State.INFO


def test_a_missing_ucx_or_native_module_fails(tmp_path: Path) -> None:
    """Goal: what cannot run says so. Method: a probe that raises and one that names a module."""

    def absent() -> object:
        raise RuntimeError("no UCX found")

    found = _findings(Host({**LAPTOP, "ucx": absent, "native": lambda: "x"}, _tree(tmp_path, PLAIN)))
    assert found["UCX"].state is State.FAIL
    assert "no UCX found" in found["UCX"].found
    assert found["native modules"].state is State.FAIL


def test_a_host_that_shows_nothing_is_judged_without_an_exception(tmp_path: Path) -> None:
    """Goal: doctor never falls over. Method: an empty tree."""
    assert len(check_host(Host(LAPTOP, tmp_path))) == len(CHECKS)


@pytest.mark.parametrize("name", sorted(PROBES))
def test_each_probe_answers_on_this_host(name: str) -> None:
    """Goal: the probes really work. Method: each runs here; its answer has the type that the checks expect."""
    answer = PROBES[name]()
    assert isinstance(answer, str | int | list | dict)


def test_memory_that_nodes_keep_is_listed_with_what_to_do(tmp_path: Path) -> None:
    """Goal: shared memory of nodes that are down is no riddle. Method: one node's segment and state; then the state is
    gone; a file of somebody else's beside it."""
    head = '{"node": "n7", "state_dir": "/var/lib/n7"}'
    shared = {"dev/shm/ucxkv-n7-0123456789abcdef-grants": head.ljust(5000, "\0"), "dev/shm/other-grants": "no json"}
    files = {**PLAIN, **shared, "dev/shm/ucxkv-n7-0123456789abcdef": "x" * 4096, "var/lib/n7/node.json": "{}"}
    root = _tree(tmp_path, files)
    found = _findings(Host(LAPTOP, root))["kept memory"]
    assert found.state is State.INFO and "n7" in found.found and "/var/lib/n7" in found.found
    assert "ucxkv forget" in found.fix
    (root / "var/lib/n7/node.json").unlink()
    found = _findings(Host(LAPTOP, root))["kept memory"]
    assert found.state is State.WARN and found.cost
    assert "rm /dev/shm/ucxkv-n7-0123456789abcdef /dev/shm/ucxkv-n7-0123456789abcdef-grants" in found.fix
