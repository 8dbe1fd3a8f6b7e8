"""How long does a durable append take, group commit included, beside one sync of the same disk?

    python scripts/bench_journal.py [--folder DIR] [--clients 64] [--json] [--quick]

Bound: each of --clients tasks appends a record of --record-bytes and waits until it is committed. With power durability
a record waits for the frame before it and for its own, so two syncs in the worst case and a wake-up of each thread; the
limit is one write of a 4 KiB block over old ones and its fdatasync, in the same folder, the same way (past the page
cache), alternating with the rounds. With process durability the frame goes to the page cache only: the limit is then
that one write. After each class the journal is opened again and every record compared.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from benchlib import Bench, main, parser

from ucxkv.cli.measure import Row, Series, row
from ucxkv.cli.workload import ROUNDS
from ucxkv.journal import Durability, FolderFiles, Journal

_BLOCK = 4096
_LIMIT_BYTES = 8 << 20


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure (default: the current folder)"
    )
    options.add_argument("--clients", type=int, default=64, help="appends at once (default 64)")
    options.add_argument("--record-bytes", type=int, default=96, help="bytes of a record (default 96)")
    arguments = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ucxkv-journal-", dir=arguments.folder or Path.cwd()))
    seconds = 0.5 if arguments.quick else 2.0
    try:
        bench = Bench("journal", f"journal: {arguments.clients} appends at once", arguments)
        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
        for durability in (Durability.PROCESS, Durability.POWER):

            async def step(durability: Durability = durability) -> Row:
                return await appends(
                    folder / durability, durability, arguments.clients, arguments.record_bytes, seconds
                )

            steps.append((durability, step))
        bench.run(steps)
    finally:
        shutil.rmtree(folder)
    return 0


class Limit:
    """One write of a block over old ones, and its sync when `is_synced`."""

    def __init__(self, folder: Path, is_synced: bool) -> None:
        folder.mkdir(parents=True)
        self._files = FolderFiles(folder)
        self._files.lock()
        self._is_synced = is_synced
        self._handle = self._files.open("limit", create=True, direct=is_synced)
        self._block = np.zeros(2 * _BLOCK, np.uint8)
        start = -self._block.ctypes.data % _BLOCK
        self._view = self._block.data[start : start + _BLOCK]
        for at in range(0, _LIMIT_BYTES, _BLOCK):
            self._files.write(self._handle, at, self._view)
        self._files.sync(self._handle)
        self._at = 0

    def one_ns(self) -> int:
        """Nanoseconds of one."""
        start = time.perf_counter_ns()
        self._files.write(self._handle, self._at, self._view)
        if self._is_synced:
            self._files.sync(self._handle)
        taken = time.perf_counter_ns() - start
        self._at = (self._at + _BLOCK) % _LIMIT_BYTES
        return taken

    def close(self) -> None:
        """Give the files back."""
        self._files.close(self._handle)
        self._files.release()


async def appends(folder: Path, durability: Durability, clients: int, nbytes: int, seconds: float) -> Row:
    """Rounds of all clients appending in a closed loop; then a restart, and a look at every record."""
    limit = Limit(folder.with_suffix(".limit"), durability is Durability.POWER)
    journal, _ = await Journal.open(folder, durability=durability)
    measured, alone = Series(), Series()
    first_lsn, frames = 1, 0
    padding = bytes(max(0, nbytes - 8))
    for number in range(ROUNDS + 1):
        if number == 1:
            measured.clear()
            alone.clear()
            first_lsn, frames = journal.last_lsn + 1, journal.stats.frames
        times = measured.start_round()
        until = time.perf_counter_ns() + int(seconds * 1e9)

        async def client(until: int = until, times: list[int] = times) -> None:
            start = time.perf_counter_ns()
            while start < until:
                lsn = journal.append(1, (journal.last_lsn.to_bytes(8, "little") + padding,))
                await journal.committed(lsn)
                end = time.perf_counter_ns()
                times.append(end - start)
                start = end

        begun = time.perf_counter_ns()
        cpu = time.process_time_ns()
        await asyncio.gather(*(client() for _ in range(clients)))
        measured.wall_ns += time.perf_counter_ns() - begun
        measured.add_cpu(time.process_time_ns() - cpu, None)
        singles = alone.start_round()
        until = time.perf_counter_ns() + int(seconds * 0.3e9)
        while time.perf_counter_ns() < until:
            singles.append(limit.one_ns())
    limit.close()
    last = journal.last_lsn
    count = last - first_lsn + 1
    per_frame = count / (journal.stats.frames - frames)
    await journal.aclose()
    await verify(folder, durability, last)
    found = row("journal", "append, committed", measured, alone, path=str(durability), bytes=nbytes, batch=1)
    found.update(
        concurrency=clients,
        keys_s=round(count / measured.wall_ns * 1e9),
        cpu_us_per_put=round(measured.cpu_client_ns / count / 1e3, 2),
        records_per_frame=round(per_frame, 1),
        limit_name="write 4 KiB + fdatasync" if durability is Durability.POWER else "write 4 KiB, page cache",
        limit_p99_us=round(alone.p99_us, 2),
        p99_ratio=round(measured.p99_us / alone.p50_us, 2),
        verified=True,
    )
    return found


async def verify(folder: Path, durability: Durability, last: int) -> None:
    """Open it again: every record is there, in order, as it was appended."""
    journal, recovered = await Journal.open(folder, durability=durability)
    expected = 0
    for _, lsn, record in recovered.records:
        if lsn != expected + 1 or int.from_bytes(record[:8], "little") != expected:
            raise AssertionError(f"record {lsn} came back changed")
        expected = lsn
    if expected != last:
        raise AssertionError(f"{last} records were committed, {expected} came back")
    await journal.aclose()
    for path in (folder, folder.with_suffix(".limit")):
        shutil.rmtree(path)


if __name__ == "__main__":
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    main(run)
