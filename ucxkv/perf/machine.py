"""What figures depend on: the processor and how it is clocked, the kernel, pages, and UCX with its transports.

Everything is read when asked, from /proc, /sys and UCX's own `ucx_info`; what is not there is said so.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

from ucxkv.cli.measure import chosen_word, cpu_model, last_level_cache_bytes
from ucxkv.sizes import short_size
from ucxkv.transport.base import SetupFailed
from ucxkv.transport.library import load

__all__ = ["Pairs", "machine_facts", "parse_devices", "ucx_facts"]

_TOOL_S = 20.0
_CPUS = Path("/sys/devices/system/cpu")
Pairs = list[tuple[str, str]]


def machine_facts() -> dict[str, Any]:
    """Facts for the report, JSON values only. Loads libucp; takes a second for `ucx_info`."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_governor": _governor(),
        "last_level_cache": short_size(last_level_cache_bytes()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "memory": short_size(_meminfo().get("MemTotal", 0)),
        "thp": chosen_word(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "thp_shmem": chosen_word(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "huge_pages": _huge_pages(),
        **ucx_facts(),
    }


def ucx_facts() -> dict[str, Any]:
    """UCX in use: version, where it lies, transports with their devices, and UCX_ variables that are set."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}
    try:
        library = load()
    except SetupFailed as exc:
        return {"ucx": f"none: {exc}", "ucx_environment": variables}
    pairs = _ask_ucx(library.directory)
    facts: dict[str, Any] = {
        "ucx": library.version_text,
        "ucx_source": library.source,
        "ucx_path": str(library.directory),
        "transports": sorted({transport for transport, _ in pairs}) or ["ucx_info is missing"],
        "devices": sorted({device for _, device in pairs}),
        "ucx_environment": variables,
    }
    return facts


def _ask_ucx(directory: Path) -> Pairs:
    for tool in (directory.parent / "bin/ucx_info", directory.parent.parent / "bin/ucx_info"):
        if not os.access(tool, os.X_OK):
            continue
        paths = [str(directory), os.environ.get("LD_LIBRARY_PATH", "")]
        variables = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}
        try:
            done = subprocess.run(
                [tool, "-d"], check=False, capture_output=True, text=True, timeout=_TOOL_S, env=variables
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        return parse_devices(done.stdout)
    return []


def parse_devices(text: str) -> Pairs:
    """(transport, device) in the order of `ucx_info -d`."""
    found: Pairs = []
    transport = ""
    for line in text.splitlines():
        match = re.match(r"#\s+(Transport|Device):\s+(\S+)", line)
        if match is None:
            continue
        if match[1] == "Transport":
            transport = match[2]
        else:
            found.append((transport, match[2]))
    return found


def _governor() -> str:
    found = set()
    for file in _CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            found.add(file.read_text().strip())
        except OSError:
            continue
    return ", ".join(sorted(found)) or "none (no cpufreq here, as in most virtual machines)"


def _meminfo() -> dict[str, int]:
    found: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        found[name] = int(number) << (10 if unit == ["kB"] else 0)
    return found


def _huge_pages() -> str:
    pages = _meminfo()
    size = short_size(pages.get("Hugepagesize", 0))
    return f"{pages.get('HugePages_Free', 0)} of {pages.get('HugePages_Total', 0)} reserved ones free, {size} each"
