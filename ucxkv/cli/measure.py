"""Measuring: rows, quantiles, the machine's conditions, and the copy that every figure is held against.

The limit of moving a block is `memcpy` of the same bytes, from a shared mapping into the same destination, by the same
C, in the same process, alternating with what is measured; both are timed over the same rounds, so that a busy machine
hits both. GB is 10^9 bytes, times are wall clock, medians are over rounds.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ucxkv.perf.peers.blocks import Blocks, anonymous_blocks
from ucxkv.sizes import short_size

__all__ = [
    "Blocks",
    "Conditions",
    "Copier",
    "Series",
    "anonymous_blocks",
    "chosen_word",
    "cpu_fields",
    "cpu_model",
    "last_level_cache_bytes",
    "print_rows",
    "row",
    "run_ns",
]

Row = dict[str, Any]


@dataclass(slots=True)
class Series:
    """Wall times of one operation, in rounds. Each round is a list of nanoseconds.

    wall_ns: of all rounds together, where operations overlapped; 0 = they came one after the other. cpu_client_ns,
    cpu_server_ns: CPU time of the measured operations in all rounds, this process's and the node's; -1 = not taken.
    """

    rounds: list[list[int]] = field(default_factory=list)
    wall_ns: int = 0
    cpu_client_ns: int = -1
    cpu_server_ns: int = -1

    def start_round(self) -> list[int]:
        """The list to append this round's nanoseconds to."""
        self.rounds.append([])
        return self.rounds[-1]

    def clear(self) -> None:
        """Forget everything: the end of the warm-up."""
        self.rounds.clear()
        self.wall_ns, self.cpu_client_ns, self.cpu_server_ns = 0, -1, -1

    def add_cpu(self, client_ns: int, server_ns: int | None) -> None:
        """Count CPU time of this process, and of the other side where that is known."""
        self.cpu_client_ns = max(0, self.cpu_client_ns) + client_ns
        if server_ns is not None:
            self.cpu_server_ns = max(0, self.cpu_server_ns) + server_ns

    @property
    def p50_us(self) -> float:
        """Median over the rounds' medians."""
        return float(np.median([np.median(times) for times in self.rounds])) / 1e3

    @property
    def p99_us(self) -> float:
        """99th percentile over all."""
        return float(np.percentile(np.concatenate([np.asarray(times) for times in self.rounds]), 99)) / 1e3

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the rounds' medians: how far to trust p50."""
        medians = [float(np.median(times)) for times in self.rounds]
        return (max(medians) - min(medians)) / max(float(np.median(medians)), 1.0)


def row(
    bench: str, op: str, measured: Series, limit: Series | None = None, *, nbytes: int = 0, **fields: object
) -> Row:
    """One result: quantiles, rate, the limit's own figures and the ratio measured / limit.

    nbytes: bytes that one measured operation moves (of all its blocks together); 0 when it moves none.
    """
    found: Row = {"bench": bench, "op": op, **fields, "p50_us": round(measured.p50_us, 2)}
    found["p99_us"] = round(measured.p99_us, 2)
    found["spread"] = round(measured.spread, 3)
    samples = found["samples"] = sum(len(times) for times in measured.rounds)
    if nbytes:
        rate = nbytes * samples / measured.wall_ns if measured.wall_ns else nbytes / measured.p50_us / 1e3
        found["gbps"] = round(rate, 3 if rate > 0.1 else 6)
        found.update(cpu_fields(measured, nbytes * samples))
    if limit is not None:
        found["limit_us"] = round(limit.p50_us, 2)
        if nbytes:
            found["limit_gbps"] = round(nbytes / limit.p50_us / 1e3, 3)
        found["ratio"] = round(measured.p50_us / limit.p50_us, 3)
    return found


def cpu_fields(measured: Series, nbytes: int) -> Row:
    """CPU seconds a GB of each side that was counted, and of both where both were; nbytes: moved in all rounds."""
    found: Row = {}
    client_ns, server_ns = measured.cpu_client_ns, measured.cpu_server_ns
    if client_ns >= 0:
        found["cpu_client_s_per_gb"] = round(client_ns / nbytes, 4)
    if server_ns >= 0:
        found["cpu_server_s_per_gb"] = round(server_ns / nbytes, 4)
    if client_ns >= 0 and server_ns >= 0:
        found["cpu_s_per_gb"] = round((client_ns + server_ns) / nbytes, 4)
    return found


class Copier:
    """The limit: memcpy of blocks between `into` and shared memory with a node's kind of pages, timed in C."""

    def __init__(self, into: Blocks) -> None:
        """into: u8[count, nbytes], the destination that is measured too."""
        from ucxkv.tiers.copy import copy_ns
        from ucxkv.tiers.segments import HostSegment

        self._copy = copy_ns
        self._source = HostSegment.create(max(into.nbytes, mmap.PAGESIZE), "ucxkv-limit")
        np.frombuffer(self._source.view, np.uint8).fill(1)
        self.into = into
        self._from, self._to = self._source.address, into.ctypes.data
        self._nbytes, self._all = into.shape[1], into.nbytes

    def close(self) -> None:
        """Give the memory back."""
        self._source.close()

    def copy_ns(self, source: int, target: int) -> int:
        """Nanoseconds of one memcpy of shared block `source` over block `target`."""
        n = self._nbytes
        return self._copy(self._to + target * n, self._from + source * n, n)

    def back_ns(self, source: int, target: int) -> int:
        """Nanoseconds of one memcpy of block `source` over shared block `target`."""
        n = self._nbytes
        return self._copy(self._from + target * n, self._to + source * n, n)

    def copies_ns(self, sources: Iterable[int], targets: Iterable[int]) -> int:
        """The sum of `copy_ns` over several blocks."""
        return sum(map(self.copy_ns, sources, targets))

    def backs_ns(self, sources: Iterable[int], targets: Iterable[int]) -> int:
        """The sum of `back_ns` over several blocks."""
        return sum(map(self.back_ns, sources, targets))

    @property
    def shared(self) -> Blocks:
        """The shared blocks, u8[n, nbytes], one for each of `into`."""
        return np.frombuffer(self._source.view, np.uint8)[: self._all].reshape(-1, self._nbytes)


def last_level_cache_bytes() -> int:
    """Size of the largest cache of core 0; 32 MiB when the system does not say."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = index.read_text().strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
        except (OSError, ValueError, KeyError):
            continue
    return max(sizes) or 32 << 20


def run_ns(pids: Sequence[int]) -> int:
    """Nanoseconds that all threads of the processes `pids` have run, by the kernel's count; a dead one counts 0."""
    total = 0
    for pid in pids:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total


class Conditions:
    """What the figures depend on. Made at a run's start; `report()` at its end adds the load of others."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """pids: processes that belong to the run, besides this one."""
        self._pids = [os.getpid(), *pids]
        self._busy, self._stolen = self._cpu()
        self._own, self._start = self._own_s(), time.monotonic()

    def _own_s(self) -> float:
        """CPU seconds of the run's processes, also of children that have ended."""
        ended = os.times()
        return run_ns(self._pids) / 1e9 + ended.children_user + ended.children_system

    @staticmethod
    def _cpu() -> tuple[float, float]:
        """CPU seconds of the whole machine: (busy, stolen)."""
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        ticks = os.sysconf("SC_CLK_TCK")
        return sum(fields[:3] + fields[5:7]) / ticks, fields[7] / ticks

    def report(self, **facts: object) -> Row:
        """cores, cpu, kernel, cache, pages, and how many cores others kept busy or the hypervisor took, on average."""
        wall = max(time.monotonic() - self._start, 1e-3)
        busy, stolen = self._cpu()
        own = self._own_s() - self._own
        pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        return {
            "cores": len(os.sched_getaffinity(0)),
            "cpu": cpu_model(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "last_level_cache": short_size(last_level_cache_bytes()),
            "thp_shmem": chosen_word(pages),
            "other_cpus": round(max(0.0, (busy - self._busy - own) / wall), 2),
            "stolen_cpus": round(max(0.0, (stolen - self._stolen) / wall), 2),
            **facts,
        }


def chosen_word(path: Path) -> str:
    """The word in brackets of a kernel setting that lists its values; "absent" without the file."""
    try:
        text = path.read_text()
    except OSError:
        return "absent"
    return text[text.find("[") + 1 : text.find("]")]


def cpu_model() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


_COLUMNS = {
    "op": "operation",
    "path": "path",
    "bytes": "block",
    "batch": "batch",
    "concurrency": "at once",
    "p50_us": "p50 us",
    "p99_us": "p99 us",
    "gbps": "GB/s",
    "keys_s": "keys/s",
    "limit_name": "limit",
    "limit_us": "limit us",
    "ratio": "ratio",
    "spread": "spread",
    "cpu_s_per_gb": "CPU s/GB",
    "cpu_us": "CPU us/op",
    "cpu_percent": "% of a core",
    "wakeups_s": "wake-ups/s",
    "vs_first": "vs first",
    "wa_kernel": "WA kernel",
    "wa_own": "WA own",
    "s_per_100k": "s per 100k blocks",
    "index_bytes_per_block": "index B/block",
}


def print_rows(title: str, rows: Sequence[Row], conditions: Row, *, as_json: bool, version: str) -> None:
    """Print results: one JSON object a line, each with its conditions, or a table with the conditions below it."""
    if as_json:
        for found in rows:
            print(json.dumps({**found, "version": version, "conditions": conditions}), flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} (ucxkv {version})", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    used, constant = _columns(rows)
    for name in used:
        justify: Literal["left", "right"] = "left" if name in ("op", "path", "limit_name") else "right"
        table.add_column(_COLUMNS[name], justify=justify, no_wrap=True)
    for found in rows:
        table.add_row(*[_cell(name, found.get(name, "")) for name in used])
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)
    facts = [f"{_COLUMNS[name]} {_cell(name, value)}" for name, value in constant.items()]
    facts += [f"{name} {value}" for name, value in conditions.items()]
    console.print(", ".join(facts), style="dim", markup=False, highlight=False)


def _columns(rows: Sequence[Row]) -> tuple[list[str], Row]:
    """The columns worth showing, and those that say the same in every row."""
    used = [name for name in _COLUMNS if any(name in found for found in rows)]
    constant: Row = {}
    for name in ("path", "batch", "concurrency", "limit_name"):
        values = [found[name] for found in rows if name in found]
        if len(values) > 1 and all(value == values[0] for value in values):
            constant[name] = values[0]
            used.remove(name)
    return used, constant


def _cell(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return short_size(value)
    if name == "keys_s" and isinstance(value, int | float):
        return f"{value:,.0f}"
    return str(value)
