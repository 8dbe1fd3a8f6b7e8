"""fio as the limit of what a disk gives: the same block, depth and kind of batch, on a file of its own.

`apt-get install fio`; `is_there()` says whether it is.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["FioJob", "FioResult", "is_there", "run_fio"]

Way = Literal["randread", "randwrite", "write"]


@dataclass(frozen=True, slots=True)
class FioJob:
    """What fio does. file: laid out when it is missing or shorter. is_batch: the next `depth` operations begin when all
    of the last ones are done; else each begins when one ends. engine: fio's, io_uring or psync (threads)."""

    file: Path
    nbytes: int
    way: Way
    block_bytes: int
    depth: int
    engine: str = "io_uring"
    is_direct: bool = True
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class FioResult:
    """gbps: 10^9 bytes a second; p50_us: of a completion; cpu_us: user and system time an operation."""

    gbps: float
    p50_us: float
    cpu_us: float


def is_there() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


async def run_fio(job: FioJob, seconds: float) -> FioResult:
    """Run it so long. SystemExit with fio's words when it fails."""
    process = await asyncio.create_subprocess_exec("fio", *_words(job, seconds), stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    text = said.decode()
    if process.returncode:
        raise SystemExit(f"fio ended with {process.returncode}: {text[-300:]}")
    found = json.loads(text[text.index("{") :])["jobs"][0]
    done = found["read" if job.way == "randread" else "write"]
    busy_us = (found["usr_cpu"] + found["sys_cpu"]) / 100 * float(done["runtime"]) * 1e3
    if job.engine == "psync":
        busy_us *= job.depth  # its percentages are of all threads' time
    return FioResult(
        gbps=float(done["bw_bytes"]) / 1e9,
        p50_us=float(done["clat_ns"]["percentile"]["50.000000"]) / 1e3,
        cpu_us=busy_us / max(int(done["total_ios"]), 1),
    )


def _words(job: FioJob, seconds: float) -> list[str]:
    words = [
        "--name=limit",
        f"--filename={job.file}",
        f"--size={job.nbytes}",
        f"--bs={job.block_bytes}",
        f"--rw={job.way}",
        f"--ioengine={job.engine}",
        f"--direct={int(job.is_direct)}",
        f"--runtime={round(max(seconds, 0.5) * 1000)}ms",
        "--time_based",
        "--norandommap",
        "--randrepeat=0",
        "--group_reporting",
        "--output-format=json",
    ]
    if job.engine == "psync":
        return [*words, f"--numjobs={job.depth}", "--thread"]
    words += [f"--iodepth={job.depth}"]
    if job.is_batch:
        words += [f"--iodepth_batch={job.depth}", f"--iodepth_batch_complete_min={job.depth}"]
    return words
