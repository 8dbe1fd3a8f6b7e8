"""What memory this process may still take: asked before a segment is populated, so that nobody is OOM-killed.

Invariants: reading changes nothing; a limit that cannot be read counts as absent; every figure is in bytes. All limits
that end a populating process count: the machine's MemAvailable, each memory cgroup above the process (v2 and v1), and
the limits on address space and file size. /dev/shm's size does not: memfds are not in it.

Source: Linux man-pages proc(5), cgroups(7), memfd_create(2), getrlimit(2); kernel admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from .base import SetupFailed

__all__ = ["HostMemory"]

RESERVE_BYTES = 64 << 20
"""Left free for the process itself: interpreter, directory arrays, connections."""
HUGE_PAGE_BYTES = 2 << 20
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """One reading of the machine. None = no such limit."""

    available_bytes: int
    cgroup_free_bytes: int | None
    address_space_free_bytes: int | None
    file_size_limit_bytes: int | None
    huge_free_bytes: int
    """Free explicit 2 MiB pages that nobody reserved."""

    @classmethod
    def read(cls, root: Path = Path("/")) -> HostMemory:
        """Read the machine's state below `root` (another root: a recorded machine in tests)."""
        return cls(
            available_bytes=_available(root),
            cgroup_free_bytes=_cgroup_free(root),
            address_space_free_bytes=_address_space_free(root),
            file_size_limit_bytes=_limit(resource.RLIMIT_FSIZE),
            huge_free_bytes=_huge_free(root),
        )

    def check(self, size_bytes: int, *, explicit_huge: bool = False) -> None:
        """Raise SetupFailed unless size_bytes can be populated; explicit_huge: out of the reserved huge pages."""
        tables = size_bytes // 512  # 8 bytes of page table for each 4 KiB page
        needed = (tables if explicit_huge else size_bytes + tables) + RESERVE_BYTES
        where = f"segment of {_human(size_bytes)}"
        if needed > self.available_bytes:
            raise SetupFailed(
                where,
                found=f"{_human(self.available_bytes)} of memory available",
                needed=f"{_human(needed)} (with page tables and a reserve)",
                fix=f"give the node at most {_human(_fits(self.available_bytes))} of host tier, or free memory",
            )
        if self.cgroup_free_bytes is not None and needed > self.cgroup_free_bytes:
            raise SetupFailed(
                where,
                found=f"{_human(self.cgroup_free_bytes)} left in the memory cgroup (container limit)",
                needed=f"{_human(needed)} (with page tables and a reserve)",
                fix="raise the container's memory limit, or give the node at most "
                f"{_human(_fits(self.cgroup_free_bytes))} of host tier",
            )
        if self.address_space_free_bytes is not None and size_bytes + RESERVE_BYTES > self.address_space_free_bytes:
            raise SetupFailed(
                where,
                found=f"{_human(self.address_space_free_bytes)} left under the address space limit (RLIMIT_AS)",
                needed=_human(size_bytes + RESERVE_BYTES),
                fix="`ulimit -v unlimited` before starting the node (systemd: LimitAS=infinity)",
            )
        if self.file_size_limit_bytes is not None and size_bytes > self.file_size_limit_bytes:
            raise SetupFailed(
                where,
                found=f"file size limit (RLIMIT_FSIZE) of {_human(self.file_size_limit_bytes)}",
                needed=_human(size_bytes),
                fix="`ulimit -f unlimited` before starting the node (systemd: LimitFSIZE=infinity)",
            )


def _fits(free_bytes: int) -> int:
    """The largest segment that `free_bytes` hold, in whole MiB."""
    return max(0, (free_bytes - RESERVE_BYTES) * 512 // 513) >> 20 << 20


def _human(nbytes: int) -> str:
    if nbytes >= 10 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(text: str) -> dict[str, int]:
    """`Name: 12 kB` and `name 12` lines, in bytes."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return found


def _available(root: Path) -> int:
    info = _fields(_text(root / "proc/meminfo"))
    return info.get("MemAvailable", info.get("MemFree", _UNLIMITED_BYTES))


def _huge_free(root: Path) -> int:
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free = (_number(pool / "free_hugepages") or 0) - (_number(pool / "resv_hugepages") or 0)
    return max(0, free) * HUGE_PAGE_BYTES


def _address_space_free(root: Path) -> int | None:
    limit = _limit(resource.RLIMIT_AS)
    return None if limit is None else max(0, limit - _fields(_text(root / "proc/self/status")).get("VmSize", 0))


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_free(root: Path) -> int | None:
    """The least that any memory cgroup above this process leaves; pages of plain file cache count as free."""
    free: int | None = None
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, limit_name, used_name, cache_name = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, cache_name = "sys/fs/cgroup/memory", "total_inactive_file"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for level in (group, *group.parents):
            folder = root / mount / level
            limit = _number(folder / limit_name)
            if limit is None or limit >= _UNLIMITED_BYTES:
                continue
            cache = _fields(_text(folder / "memory.stat")).get(cache_name, 0)
            left = max(0, limit - max(0, (_number(folder / used_name) or 0) - cache))
            free = left if free is None else min(free, left)
    return free
