"""What this host offers and what it lacks, one finding a subject, each with its price and the command that mends it.

Pure over `Host`: every fact comes from a file below `Host.root` or from a probe in `Host.probes`, so that a recorded
tree of another machine can be judged. `fail` means ucxkv cannot run here; `warn` means it runs slower or lacks a path;
`ok` and `info` ask for nothing.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ucxkv.sizes import short_size

__all__ = ["CHECKS", "Finding", "Host", "State", "check_host"]

MIB = 1 << 20


class State(enum.StrEnum):
    """How a finding stands."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One subject. found: what is there; cost: what that costs; fix: the command or setting that changes it."""

    name: str
    state: State
    found: str
    cost: str = ""
    fix: str = ""


Probes = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Host:
    """Where the facts come from. probes: see `ucxkv.cli.probes.PROBES`."""

    probes: Probes
    root: Path = field(default=Path("/"))

    def read(self, path: str) -> str:
        """The stripped text of a file below the root; empty when it is not there or not readable."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """The entries of a folder below the root, sorted; empty when there is none."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def meminfo(self) -> dict[str, int]:
        """/proc/meminfo: kB figures in bytes, counts as they are."""
        found = {}
        for line in self.read("proc/meminfo").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        return found


def check_native(host: Host) -> Finding:
    """Are the C modules built and loadable?"""
    missing = host.probes["native"]()
    if not missing:
        return Finding("native modules", State.OK, "transport, tiers and slot table are compiled")
    return Finding(
        "native modules",
        State.FAIL,
        f"not loadable: {missing}",
        "no node and no mapped reads; Python twins serve tests only",
        "pip install --force-reinstall --no-deps ucxkv   (needs gcc and the Python headers)",
    )


def check_ucx(host: Host) -> Finding:
    """Which libucp would be used, and has it verbs?"""
    try:
        ucx = host.probes["ucx"]()
    except Exception as exc:
        return Finding(
            "UCX", State.FAIL, str(exc), "no messages and no reads from other hosts", "pip install libucx-cu12"
        )
    assert isinstance(ucx, dict)
    found = f"{ucx['version']} from {ucx['source']}: {ucx['path']}; transports {', '.join(ucx['transports'])}"
    if ucx["has_verbs"] or not host.names("sys/class/infiniband"):
        return Finding("UCX", State.OK, found + ("" if ucx["has_verbs"] else "; without verbs"))
    return Finding(
        "UCX",
        State.WARN,
        found + "; without verbs",
        "the RDMA devices here stay unused: other hosts are reached over TCP",
        "apt-get install libucx0 ibverbs-providers   (or DOCA, HPC-X), then start again",
    )


def check_other_ucx(host: Host) -> Finding:
    """Does the process have a second libucp mapped?"""
    others = host.probes["other_ucx"]()
    assert isinstance(others, list)
    if not others:
        return Finding("other UCX in process", State.OK, "none")
    return Finding(
        "other UCX in process",
        State.WARN,
        ", ".join(others),
        "two different libucp in one process may disturb each other's memory hooks",
        "use one of them for all: ucx_library in the configuration",
    )


def check_memlock(host: Host) -> Finding:
    """How much memory may be pinned?"""
    limit = host.probes["memlock"]()
    assert isinstance(limit, int)
    if limit < 0:
        return Finding("memlock", State.OK, "unlimited")
    needed = bool(host.names("sys/class/infiniband"))
    return Finding(
        "memlock",
        State.WARN if needed else State.INFO,
        short_size(limit),
        "RDMA cannot register segments larger than this"
        if needed
        else "nothing here: no RDMA device; it would limit RDMA",
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1",
    )


def check_memory(host: Host) -> Finding:
    """How much memory may a node take?"""
    free = host.meminfo().get("MemAvailable", 0)
    limit = host.read("sys/fs/cgroup/memory.max") or host.read("sys/fs/cgroup/memory/memory.limit_in_bytes")
    found = f"{short_size(free)} available"
    if limit.isdigit() and int(limit) < 1 << 60:
        used = host.read("sys/fs/cgroup/memory.current") or host.read("sys/fs/cgroup/memory/memory.usage_in_bytes")
        left = int(limit) - (int(used) if used.isdigit() else 0)
        found += f", cgroup leaves {short_size(left)}"
        free = min(free, left)
    if free >= 1280 * MIB:
        return Finding("memory", State.OK, found)
    return Finding(
        "memory", State.WARN, found, "a node with the default host_bytes = 1GiB does not start", "lower host_bytes"
    )


def check_huge_pages(host: Host) -> Finding:
    """Does a node's segment get huge pages: explicit ones from the pool, or ordinary shared memory made huge?"""
    info = host.meminfo()
    pool = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0)
    shmem = host.read("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = shmem[shmem.find("[") + 1 : shmem.find("]")] if "[" in shmem else "absent"
    kind = host.probes["huge_segment"]()
    found = f"a segment gets {kind} pages; pool: {short_size(pool)} free; shmem_enabled: {chosen}"
    if kind != "small":
        return Finding("huge pages", State.OK, found)
    return Finding(
        "huge pages",
        State.WARN,
        found,
        "4 KiB pages: large copies cost more TLB misses (CMA reads at half the speed)",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or sysctl -w vm.nr_hugepages=512 for 1 GiB",
    )


def check_shared_memory(host: Host) -> Finding:
    """Is /dev/shm there, and large enough for UCX's queues?"""
    free = host.probes["dev_shm_free"]()
    assert isinstance(free, int)
    if free >= 64 * MIB:
        return Finding("/dev/shm", State.OK, f"{short_size(free)} free (for UCX's queues; blocks live in memfds)")
    return Finding(
        "/dev/shm",
        State.WARN,
        "absent" if free < 0 else f"{short_size(free)} free",
        "UCX's shared-memory transport cannot open its queues; messages on this host go over TCP",
        "mount -o remount,size=1G /dev/shm; docker: --shm-size=1g",
    )


def check_process_vm(host: Host) -> Finding:
    """May one process read another's memory (CMA)?"""
    error = host.probes["process_vm_readv"]()
    if not error:
        return Finding("process_vm_readv", State.OK, "allowed: UCX can use cma")
    scope = host.read("proc/sys/kernel/yama/ptrace_scope")
    return Finding(
        "process_vm_readv",
        State.WARN,
        f"refused: {error}" + (f" (ptrace_scope {scope})" if scope else ""),
        "large messages on this host are copied twice; mapped reads are not concerned",
        "sysctl -w kernel.yama.ptrace_scope=0; docker: --cap-add SYS_PTRACE",
    )


def check_io_uring(host: Host) -> Finding:
    """Is io_uring allowed?"""
    error = host.probes["io_uring"]()
    if not error:
        return Finding("io_uring", State.OK, "allowed")
    return Finding(
        "io_uring",
        State.INFO,
        f"refused: {error}",
        "a node with --disk reads and writes through threads instead: more CPU an operation",
        "sysctl -w kernel.io_uring_disabled=0; docker: a seccomp profile that allows io_uring_*",
    )


def check_rdma(host: Host) -> Finding:
    """Which RDMA devices and ports are there?"""
    ports = []
    for device in host.names("sys/class/infiniband"):
        for port in host.names(f"sys/class/infiniband/{device}/ports"):
            folder = f"sys/class/infiniband/{device}/ports/{port}"
            state = host.read(f"{folder}/state").partition(": ")[2] or "?"
            ports.append(f"{device}:{port} {state} {host.read(f'{folder}/rate')}".strip())
    if not ports:
        return Finding("RDMA", State.INFO, "no device", "other hosts are reached over TCP")
    if any(" ACTIVE" in port for port in ports):
        return Finding("RDMA", State.OK, "; ".join(ports))
    return Finding("RDMA", State.WARN, "; ".join(ports), "no port is active: TCP is used", "ip link set DEV up; ibstat")


def check_devices(host: Host) -> Finding:
    """Which network device does ucxkv take here, where does a node go, and does each RDMA port have its PCIe lanes?"""
    from ucxkv.transport.affinity import placement_for_node
    from ucxkv.transport.rails import choose_rails
    from ucxkv.transport.sysfs import HostTree
    from ucxkv.transport.topology import read_topology

    topology = read_topology(HostTree(host.root, use_nvml=False))
    choice, placed = choose_rails(topology), placement_for_node(topology)
    node = "no NUMA placement" if placed.numa is None else f"node memory on NUMA node {placed.numa}"
    found = f"{choice.net_devices}: {choice.why}; {node} ({placed.why})"
    narrow = [
        f"{device.name} {device.place.link_gbps:.0f} of {port.rate_gbps:g} Gb/s "
        f"(x{device.place.link_lanes} at {device.place.link_gtps:g} GT/s)"
        for device, port in topology.usable_ports()
        if 0 < device.place.link_gbps < port.rate_gbps
    ]
    if not narrow:
        return Finding("network device", State.OK if choice.gid_indices else State.INFO, found)
    return Finding(
        "network device",
        State.WARN,
        found,
        f"a PCIe link is slower than its port: {', '.join(narrow)}",
        "put the card into a slot with more lanes or a newer generation; check the BIOS setting of the slot",
    )


def check_gpu(host: Host) -> Finding:
    """Is there a GPU?"""
    version = host.read("proc/driver/nvidia/version").splitlines()
    cards = [name for name in host.names("dev") if name.startswith("nvidia") and name[6:].isdigit()]
    if not cards:
        return Finding("GPU", State.INFO, "none", "blocks are kept in host memory (this version has no GPU tier)")
    return Finding("GPU", State.INFO, f"{len(cards)}, {version[0] if version else 'driver unknown'}", "no GPU tier yet")


def check_cpus(host: Host) -> Finding:
    """How many cores may be used?"""
    count = host.probes["cpus"]()
    assert isinstance(count, int)
    quota = host.read("sys/fs/cgroup/cpu.max").split()
    found, cores = f"{count} usable", float(count)
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
        found += f", cgroup quota {cores:g}"
    if cores >= 2:
        return Finding("CPU", State.OK, found)
    return Finding(
        "CPU", State.WARN, found, "node and client take turns on one core: latency in scheduler ticks", "give 2"
    )


def check_kept_memory(host: Host) -> Finding:
    """Which nodes keep durable blocks in shared memory, and will they come back for them?"""
    kept, orphans = [], []
    for name in host.names("dev/shm"):
        owner = _owner(host.root / "dev/shm" / name) if name.endswith("-grants") else None
        if owner is None:
            continue
        node, folder = owner
        try:
            size = (host.root / "dev/shm" / name.removesuffix("-grants")).stat().st_size
        except OSError:
            size = 0
        kept.append(f"{node} ({short_size(size)}, state in {folder})")
        if not (host.root / folder.lstrip("/") / "node.json").exists():
            orphans += [name.removesuffix("-grants"), name]
    if not kept:
        return Finding("kept memory", State.OK, "no node keeps durable blocks here")
    if not orphans:
        fix = "a node that will not come back: `ucxkv forget STATE_DIR`"
        return Finding(
            "kept memory", State.INFO, f"of {', '.join(kept)}", "shared memory, also while they are down", fix
        )
    return Finding(
        "kept memory",
        State.WARN,
        f"of {', '.join(kept)}",
        "the state of some is gone from here (or lies in another container): nobody may ever free their memory",
        f"if so: rm {' '.join('/dev/shm/' + name for name in orphans)}",
    )


def _owner(path: Path) -> tuple[str, str] | None:
    """Node and state_dir that a grant ledger's first page names; None for any other file."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.read(4096).rstrip(b"\0"))
        return str(head["node"]), str(head["state_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


CHECKS: tuple[Callable[[Host], Finding], ...] = (
    check_native,
    check_ucx,
    check_other_ucx,
    check_cpus,
    check_memory,
    check_huge_pages,
    check_memlock,
    check_shared_memory,
    check_kept_memory,
    check_process_vm,
    check_io_uring,
    check_rdma,
    check_devices,
    check_gpu,
)


def check_host(host: Host) -> list[Finding]:
    """All findings, in the order in which a reader wants them."""
    return [check(host) for check in CHECKS]
