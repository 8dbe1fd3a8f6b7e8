"""How fast do the io engines move blocks between a file and memory, beside fio on the same disk?

    python scripts/bench_io.py [--folder DIR] [--sizes 64KiB,1MiB,4MiB] [--depths 1,8,32] [--json] [--quick]

`random read`: --depths single reads at a time, each begun when one ends. `batch write`: as many writes in one batch,
the next batch when it is done. Both at random places of a file of --file-bytes that was written before, past the page
cache where the folder's file system allows it. Every block read is checked (each page names its place), the last batch
written is read back; the time that this takes is left out of the CPU's and, for reads, is part of the wall's.

Bound: fio (`apt-get install fio`) with the same engine, block, depth and kind of batch on its own file in the same
folder, alternating with the measured rounds. Without fio the limit is os.preadv and os.pwritev in so many Python
threads. `ratio` is our GB/s over the limit's; `cpu_us` is this process's CPU time an operation, the kernel's included.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchlib import Bench, block_sizes, main, parser
from fio import FioJob, is_there, run_fio
from numpy.typing import NDArray

from ucxkv.cli.measure import Row, Series, anonymous_blocks, row
from ucxkv.sizes import parse_size
from ucxkv.tiers.base import TierError
from ucxkv.tiers.engines import open_engine
from ucxkv.tiers.io import OP_DTYPE, IoEngine, OpKind

PAGE = 4096
ENGINES = ("io_uring", "threads")
IN_FLIGHT = 256 << 20
"""The engines' cap on bytes is out of the way here: depth is what is compared."""


@dataclass
class Disk:
    """The file to measure: page i holds the number i in its first word and a pattern after it."""

    folder: Path
    nbytes: int
    direct: bool = True
    fd: int = -1

    def __post_init__(self) -> None:
        path, flags = self.folder / "blocks", os.O_RDWR | os.O_CREAT
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.direct, self.fd = False, os.open(path, flags, 0o600)
        chunk = anonymous_blocks(1, 4 << 20)[0]
        for at in range(0, self.nbytes, len(chunk)):
            stamp(chunk, at)
            os.pwrite(self.fd, chunk.data, at)
        os.fsync(self.fd)

    @property
    def cache(self) -> str:
        """What stands between the reads and the disk."""
        return "O_DIRECT" if self.direct else "page cache"


def stamp(block: NDArray[np.uint8], offset: int) -> None:
    """Make block's pages name their place in the file."""
    words = block.view(np.uint64).reshape(-1, PAGE // 8)
    first = np.arange(offset // PAGE, offset // PAGE + len(words), dtype=np.uint64)
    words[:] = first[:, None] * np.uint64(1_000_003) + np.arange(PAGE // 8, dtype=np.uint64)[None, :]


def is_stamped(block: NDArray[np.uint8], offset: int) -> bool:
    """Whether the first and the last word of each page are what `stamp` wrote for that place."""
    words = block.view(np.uint64).reshape(-1, PAGE // 8)
    first = np.arange(offset // PAGE, offset // PAGE + len(words), dtype=np.uint64) * np.uint64(1_000_003)
    return bool((words[:, 0] == first).all() and (words[:, -1] == first + np.uint64(PAGE // 8 - 1)).all())


@dataclass
class Cell:
    """One figure in the making: an engine, an operation, a block's size and a depth."""

    disk: Disk
    engine: str
    op: str
    size: int
    depth: int
    measured: Series = field(default_factory=Series)
    limit_rates: list[float] = field(default_factory=list)
    limit_us: list[float] = field(default_factory=list)
    limit_name: str = ""
    checked: int = 0

    def places(self, count: int) -> NDArray[np.int64]:
        """Random offsets of blocks, no two of them equal."""
        return np.random.default_rng().choice(self.disk.nbytes // self.size, count, replace=False) * self.size

    async def round(self, seconds: float) -> None:
        """Measure so long."""
        engine = open_engine(self.engine, max_inflight_bytes=IN_FLIGHT)  # type: ignore[arg-type]
        blocks = anonymous_blocks(self.depth, self.size)
        file = engine.attach(self.disk.fd, direct=self.disk.direct)
        engine.register(blocks.ctypes.data, blocks.nbytes)
        places = np.random.default_rng().integers(0, self.disk.nbytes // self.size, (self.depth, 4096)) * self.size
        times, until = self.measured.start_round(), time.perf_counter() + seconds
        cpu, begun = time.process_time_ns(), time.perf_counter_ns()
        if self.op == "random read":
            slots = zip(blocks, places.tolist(), strict=True)
            readers = [self._read(engine, file, block, own, until, times) for block, own in slots]
            checks = sum(await asyncio.gather(*readers))
        else:
            checks = await self._write(engine, file, blocks, until, times)
        self.measured.wall_ns += time.perf_counter_ns() - begun
        self.measured.add_cpu(time.process_time_ns() - cpu - checks, None)
        await engine.aclose()

    async def _read(
        self, engine: IoEngine, file: int, block: NDArray[np.uint8], places: list[int], until: float, times: list[int]
    ) -> int:
        """Reads one after the other; nanoseconds of CPU that the checks took."""
        op, checks = np.array([(block.ctypes.data, 0, self.size, file, OpKind.READ)], OP_DTYPE), 0
        start, turn = time.perf_counter_ns(), 0
        while time.perf_counter() < until or not turn:
            offset = places[turn % len(places)]
            op["offset"] = offset
            moved = int((await engine.submit(op))[0])
            end = time.perf_counter_ns()
            times.append(end - start)
            before = time.thread_time_ns()
            if moved != self.size or not is_stamped(block, offset):
                raise SystemExit(f"{self.engine}: wrong bytes at {offset}: moved {moved} of {self.size}")
            self.checked += 1
            checks += time.thread_time_ns() - before
            start, turn = time.perf_counter_ns(), turn + 1
        return checks

    async def _write(
        self, engine: IoEngine, file: int, blocks: NDArray[np.uint8], until: float, times: list[int]
    ) -> int:
        """Batches one after the other; nanoseconds of CPU that making the next batch's bytes took."""
        ops, making = np.zeros(self.depth, OP_DTYPE), 0
        ops["address"] = blocks.ctypes.data + np.arange(self.depth, dtype=np.uint64) * np.uint64(self.size)
        ops["length"], ops["file"], ops["kind"] = self.size, file, OpKind.WRITE
        turn = 0
        while time.perf_counter() < until or not turn:
            before = time.thread_time_ns()
            places = self.places(self.depth)
            for block, offset in zip(blocks, places, strict=True):
                stamp(block, int(offset))
            making += time.thread_time_ns() - before
            ops["offset"] = places
            start = time.perf_counter_ns()
            moved = await engine.submit(ops)
            taken = time.perf_counter_ns() - start
            times.extend([taken] * self.depth)
            if (moved != self.size).any():
                raise SystemExit(f"{self.engine}: a write moved {moved.min()} of {self.size}")
            turn += 1
        back = anonymous_blocks(self.depth, self.size)
        ops["address"] = back.ctypes.data + np.arange(self.depth, dtype=np.uint64) * np.uint64(self.size)
        ops["kind"] = OpKind.READ
        before = time.process_time_ns()
        await engine.submit(ops)
        if not all(is_stamped(block, int(offset)) for block, offset in zip(back, places, strict=True)):
            raise SystemExit(f"{self.engine}: what was written does not read back")
        self.checked += self.depth
        return making + time.process_time_ns() - before

    def found(self) -> Row:
        """The row of all rounds."""
        made = row("io", self.op, self.measured, nbytes=self.size, path=self.engine, bytes=self.size)
        batches = self.depth if self.op == "batch write" else 1
        count = int(made["samples"])
        if batches > 1:  # a batch's operations overlap: the rate is of all bytes over the batches' own time
            spent = sum(sum(times) for times in self.measured.rounds) / batches
            made["gbps"] = round(self.size * count / spent, 3)
        limit = float(np.median(self.limit_rates))
        made.update(
            batch=batches,
            concurrency=self.depth,
            cpu_us=round(self.measured.cpu_client_ns / count / 1e3, 2),
            limit_name=self.limit_name,
            limit_us=round(float(np.median(self.limit_us)), 2),
            limit_gbps=round(limit, 3),
            ratio=round(float(made["gbps"]) / limit, 3),
            verified=self.checked > 0,
            verified_bytes=self.checked * self.size,
        )
        return made


async def fio(cell: Cell, seconds: float) -> None:
    """fio with the same engine, depth and block; its own file of the same size beside ours."""
    engine = "io_uring" if cell.engine == "io_uring" else "psync"
    is_write = cell.op == "batch write"
    job = FioJob(
        cell.disk.folder / "fio",
        cell.disk.nbytes,
        "randwrite" if is_write else "randread",
        cell.size,
        cell.depth,
        engine=engine,
        is_direct=cell.disk.direct,
        is_batch=is_write,
    )
    found = await run_fio(job, seconds)
    cell.limit_rates.append(found.gbps)
    cell.limit_us.append(found.p50_us)
    cell.limit_name = f"fio {engine}"


async def plain_threads(cell: Cell, seconds: float) -> None:
    """os.preadv or os.pwritev in as many Python threads: what there is without fio."""
    blocks = anonymous_blocks(cell.depth, cell.size)
    took: list[list[int]] = [[] for _ in range(cell.depth)]
    call = os.preadv if cell.op == "random read" else os.pwritev
    until = time.perf_counter() + seconds

    def work(index: int) -> None:
        places, turn = cell.places(min(64, cell.disk.nbytes // cell.size)), 0
        while time.perf_counter() < until or not turn:
            offset = int(places[turn % len(places)])
            if call is os.pwritev:
                stamp(blocks[index], offset)
            start = time.perf_counter_ns()
            call(cell.disk.fd, [blocks[index].data], offset)
            took[index].append(time.perf_counter_ns() - start)
            turn += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(cell.depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    cell.limit_rates.append(sum(cell.size * len(each) / max(sum(each), 1) for each in took))
    cell.limit_us.append(float(np.median(np.concatenate(took))) / 1e3)
    cell.limit_name = f"{call.__name__}, {cell.depth} threads"


async def measure(cell: Cell, seconds: float, rounds: int, limit: Callable[[Cell, float], Awaitable[None]]) -> Row:
    """A warm-up, then rounds that alternate with the limit's."""
    await cell.round(seconds / 4)
    cell.measured.clear()
    for _ in range(rounds):
        await cell.round(seconds)
        await limit(cell, seconds)
    return cell.found()


def usable(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """The engines that work here, and why others do not."""
    found, refused = [], {}
    for name in names:
        try:
            open_engine(name, directory=None).abort()  # type: ignore[arg-type, attr-defined]
            found.append(name)
        except TierError as exc:
            refused[name] = str(exc)
    return found, refused


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument("--sizes", default="64KiB,1MiB,4MiB", help="block sizes, multiples of 4 KiB")
    options.add_argument("--depths", default="1,8,32", help="operations at a time (default 1,8,32)")
    options.add_argument("--engines", default=",".join(ENGINES), help="io_uring, threads or both")
    options.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the current one)")
    options.add_argument("--file-bytes", type=parse_size, default=1 << 30, help="of the file (default 1GiB)")
    options.add_argument("--seconds", type=float, default=0.0, help="of a round (default 1; with --quick 0.2)")
    options.add_argument("--no-fio", action="store_true", help="plain threads as the limit although fio is there")
    arguments = options.parse_args()
    sizes, depths = block_sizes(arguments), [int(word) for word in arguments.depths.split(",")]
    largest = max(sizes) * max(depths)
    if any(size % PAGE for size in sizes) or min(depths) < 1 or arguments.file_bytes < 2 * largest:
        options.error(f"sizes are multiples of {PAGE}, depths 1 or more, the file at least {2 * largest} bytes")
    engines, refused = usable(arguments.engines.split(","))
    if not engines:
        options.error("; ".join(refused.values()))
    seconds = arguments.seconds or (0.2 if arguments.quick else 1.0)
    limit = fio if is_there() and not arguments.no_fio else plain_threads
    folder = Path(tempfile.mkdtemp(prefix="ucxkv-io-", dir=arguments.folder or Path.cwd()))
    try:
        disk = Disk(folder, arguments.file_bytes)
        bench = Bench("io", "io engines", arguments)
        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
        for op in ("random read", "batch write"):
            for size in sizes:
                for depth in depths:
                    for engine in engines:

                        async def step(op: str = op, size: int = size, depth: int = depth, engine: str = engine) -> Row:
                            rounds = 1 if arguments.quick else 5
                            return await measure(Cell(disk, engine, op, size, depth), seconds, rounds, limit)

                        steps.append((f"{op}, {engine}, {size} x {depth}", step))
        bench.run(steps, cache=disk.cache, file_bytes=disk.nbytes, seconds=seconds, refused=refused)
        os.close(disk.fd)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    main(run)
