"""The datafiles: blocks written and read through a store, beside what fio does on the same disk.

`read`: --depths single reads at a time, each begun when one ends. `read_many`: --batch blocks a call, the next call
when it is done. `write`: --batch blocks a call, the next call when all of it is acknowledged, in files that are used
again. All at random places of a store of --store-bytes, past the page cache where the folder's file system allows
it. The store proves every block by its sum; here the first and the last word of each are compared once more. What
that and the making of blocks take is left out of the CPU's time.

`write amplification`: as many blocks as the store holds twice, half of them hot; bytes by the kernel's own count
(write_bytes of /proc/self/io) and by the store's, a byte of payload. `recover`: opening a store of --recover-blocks
blocks whose last file has no index, in seconds per 100,000; its limit is reading as many bytes as that read.

Bound: fio (`apt-get install fio`) with io_uring, the same block, depth and kind of batch, in the same folder,
alternating with the measured rounds. `ratio` is our GB/s over the limit's; `CPU us/op` is this process's, the
kernel's included, an operation of one block, and `limit_cpu_us` fio's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchlib import Bench, block_sizes, main, parser
from filled_store import FilledStore, key_of
from fio import FioJob, FioResult, Way, is_there, run_fio

from ucxkv.cli.measure import Row, Series, anonymous_blocks, row
from ucxkv.sizes import parse_size
from ucxkv.tiers.datafiles import Datafiles
from ucxkv.tiers.engines import open_engine

BYTES_A_CALL_MAX = 64 << 20
FILE_BYTES = 256 << 20
"""The default of Datafiles."""


@dataclass
class Cell:
    """One figure in the making."""

    store: FilledStore
    op: str
    depth: int
    measured: Series = field(default_factory=Series)
    limits: list[FioResult] = field(default_factory=list)
    checked: int = 0

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return int(self.store.buffers.shape[1])

    async def round(self, seconds: float) -> None:
        """Measure so long."""
        until, times = time.perf_counter() + seconds, self.measured.start_round()
        self.store.aside_ns = 0
        cpu, begun = time.process_time_ns(), time.perf_counter_ns()
        if self.op == "read":
            await asyncio.gather(*(self._read(at, until, times) for at in range(self.depth)))
        elif self.op == "read_many":
            await self._read_many(until, times)
        else:
            await self._write(until, times)
        self.measured.wall_ns += time.perf_counter_ns() - begun
        self.measured.add_cpu(time.process_time_ns() - cpu - self.store.aside_ns, None)

    async def _read(self, slot: int, until: float, times: list[int]) -> None:
        rng = np.random.default_rng()
        numbers, buffer = list(self.store.index.places), self.store.buffers[slot]
        while time.perf_counter() < until:
            number = numbers[int(rng.integers(len(numbers)))]
            start = time.perf_counter_ns()
            await self.store.datafiles.read(self.store.index.places[number], buffer.data)
            times.append(time.perf_counter_ns() - start)
            self.store.check([number], buffer[None])
            self.checked += 1

    async def _read_many(self, until: float, times: list[int]) -> None:
        rng, known = np.random.default_rng(), np.array(list(self.store.index.places))
        buffers = self.store.buffers[: self.depth]
        while time.perf_counter() < until:
            before = time.thread_time_ns()
            numbers = rng.choice(known, self.depth, replace=False).tolist()
            places, into = [self.store.index.places[number] for number in numbers], [each.data for each in buffers]
            self.store.aside_ns += time.thread_time_ns() - before
            start = time.perf_counter_ns()
            outcomes = await self.store.datafiles.read_many(places, into)
            times.extend([time.perf_counter_ns() - start] * self.depth)
            if any(outcomes):
                raise SystemExit(f"not read: {next(filter(None, outcomes))}")
            self.store.check(numbers, buffers)
            self.checked += self.depth

    async def _write(self, until: float, times: list[int]) -> None:
        while time.perf_counter() < until:
            times.extend([await self.store.write(self.depth)] * self.depth)
        numbers = list(range(self.store.next_number - self.depth, self.store.next_number))
        back = anonymous_blocks(self.depth, self.size)
        before = time.process_time_ns()
        places = [self.store.index.places[number] for number in numbers]
        outcomes = await self.store.datafiles.read_many(places, [each.data for each in back])
        if any(outcomes):
            raise SystemExit(f"what was written does not read back: {next(filter(None, outcomes))}")
        self.store.aside_ns += time.process_time_ns() - before
        self.store.check(numbers, back)
        self.checked += self.depth

    async def limit(self, seconds: float, *, file: Path, nbytes: int, is_direct: bool) -> None:
        """fio on its own file; nothing without it."""
        if not is_there():
            return
        way: Way = "write" if self.op == "write" else "randread"
        job = FioJob(file, nbytes, way, self.size, self.depth, is_direct=is_direct, is_batch=self.op != "read")
        self.limits.append(await run_fio(job, seconds))

    def found(self) -> Row:
        """The row of all rounds."""
        made = row("datafiles", self.op, self.measured, nbytes=self.size, path=self.store.engine.name, bytes=self.size)
        batches = 1 if self.op == "read" else self.depth
        if batches > 1:  # a batch's blocks overlap: the rate is of all bytes over the batches' own time
            spent = sum(sum(times) for times in self.measured.rounds) / batches
            made["gbps"] = round(self.size * int(made["samples"]) / spent, 3)
        made.update(
            batch=batches,
            concurrency=self.depth,
            cpu_us=round(self.measured.cpu_client_ns / int(made["samples"]) / 1e3, 2),
            verified=self.checked > 0,
            verified_bytes=self.checked * self.size,
        )
        if self.limits:
            rate = float(np.median([each.gbps for each in self.limits]))
            made.update(
                limit_name="fio io_uring",
                limit_us=round(float(np.median([each.p50_us for each in self.limits])), 2),
                limit_gbps=round(rate, 3),
                limit_cpu_us=round(float(np.median([each.cpu_us for each in self.limits])), 2),
                ratio=round(float(made["gbps"]) / rate, 3),
            )
        return made


def kernel_bytes(what: str) -> int:
    """read_bytes or write_bytes of this process, all its threads: what it caused on block devices."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines[what])


async def amplification(store: FilledStore, store_bytes: int) -> Row:
    """Write what the store holds twice; bytes written a byte of payload."""
    stats, size = store.datafiles.stats, int(store.buffers.shape[1])
    before = (kernel_bytes("write_bytes"), stats.written_bytes, stats.payload_bytes)
    times = Series()
    taken, begun = times.start_round(), time.perf_counter_ns()
    while stats.payload_bytes - before[2] < 2 * store_bytes:
        taken.append(await store.write(len(store.buffers)))
    times.wall_ns = time.perf_counter_ns() - begun
    payload = stats.payload_bytes - before[2]
    return {
        **row("datafiles", "write amplification", times, nbytes=size * len(store.buffers), path=store.engine.name),
        "bytes": size,
        "batch": len(store.buffers),
        "wa_kernel": round((kernel_bytes("write_bytes") - before[0]) / payload, 4),
        "wa_own": round((stats.written_bytes - before[1]) / payload, 4),
        "readmitted_share": round(stats.readmitted_bytes / max(stats.payload_bytes, 1), 4),
        "verified": True,
    }


async def recover(folder: Path, engine_name: str, size: int, count: int, rounds: int) -> Row:
    """Open a store of `count` blocks again and again."""
    buffers = anonymous_blocks(min(63, BYTES_A_CALL_MAX // size), size)
    file_bytes = FILE_BYTES
    room = (count * size // file_bytes + 3) * file_bytes * 21 // 20
    store = await FilledStore.open(folder, engine_name, buffers, store_bytes=room, file_bytes=file_bytes)
    while store.next_number < count:
        await store.write(min(len(buffers), count - store.next_number))
    await store.close()
    times, limits, nbytes = Series(), [], 0
    for _ in range(rounds):
        engine = open_engine(engine_name, directory=folder)  # type: ignore[arg-type]
        before, start = kernel_bytes("read_bytes"), time.perf_counter_ns()
        datafiles, blocks, _ = await Datafiles.open(folder, engine, file_bytes=file_bytes)
        places = {each.key: each.place for each in blocks}
        times.start_round().append(time.perf_counter_ns() - start)
        nbytes = kernel_bytes("read_bytes") - before
        if len(places) != count or any(places[key_of(number)] != place for number, place in store.index.places.items()):
            raise SystemExit(f"{len(places)} of {count} blocks were found")
        await datafiles.aclose()
        await engine.aclose()
        limits.append(await asyncio.to_thread(plain_read_ns, folder, nbytes))
    found = row("datafiles", "recover", times, path=engine_name, bytes=size)
    found.update(
        blocks=count,
        s_per_100k=round(times.p50_us / 1e6 * 100_000 / count, 4),
        read_bytes=nbytes,
        limit_name="pread, 1 MiB",
        limit_us=round(float(np.median(limits)) / 1e3, 1),
        ratio=round(times.p50_us * 1e3 / float(np.median(limits)), 3),
        verified=True,
    )
    return found


def plain_read_ns(folder: Path, nbytes: int) -> int:
    """Nanoseconds of reading so many bytes of the datafiles, one MiB after the other, past the page cache."""
    buffer = anonymous_blocks(1, 1 << 20)[0]
    left, start = nbytes, time.perf_counter_ns()
    for path in sorted(folder.glob("data-*")):
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            for at in range(0, min(left, path.stat().st_size), len(buffer)):
                left -= os.preadv(fd, [buffer.data], at)
        finally:
            os.close(fd)
    return time.perf_counter_ns() - start


@dataclass
class Plan:
    """What one run measures."""

    folder: Path
    engine: str
    store_bytes: int
    batch: int
    depths: list[int]
    seconds: float
    rounds: int

    async def size(self, size: int) -> list[Row]:
        """All rows of one size of block."""
        folder = self.folder / f"store-{size}"
        batch = max(1, min(self.batch, BYTES_A_CALL_MAX // size))
        buffers = anonymous_blocks(max(batch, *self.depths), size)
        file_bytes = max(16 * size, min(FILE_BYTES, self.store_bytes // 4 // size * size))
        store = await FilledStore.open(
            folder, self.engine, buffers, store_bytes=self.store_bytes, file_bytes=file_bytes
        )
        await store.fill(self.store_bytes * 3 // 2)
        cells = [Cell(store, "read", depth) for depth in self.depths]
        cells += [Cell(store, "read_many", batch), Cell(store, "write", batch)]
        rows = [await self._measure(cell) for cell in cells]
        rows.append(await amplification(store, self.store_bytes))
        await store.close()
        await asyncio.to_thread(shutil.rmtree, folder)
        return rows

    async def _measure(self, cell: Cell) -> Row:
        is_direct = all(file.is_direct for file in cell.store.datafiles.files.values())
        await cell.round(self.seconds / 4)
        cell.measured.clear()
        await cell.store.rest()
        for _ in range(self.rounds):
            await cell.round(self.seconds)
            await cell.limit(self.seconds, file=self.folder / "fio", nbytes=self.store_bytes, is_direct=is_direct)
        return cell.found()

    async def recover(self, size: int, count: int) -> Row:
        """The row of opening a store again."""
        folder = self.folder / f"recover-{size}"
        try:
            return await recover(folder, self.engine, size, count, self.rounds)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)


def run() -> int:
    options = parser(__doc__, sizes="")
    options.add_argument("--sizes", default="64KiB,1MiB,4MiB", help="block sizes, multiples of 4 KiB")
    options.add_argument("--depths", default="1,8,32", help="single reads at a time (default 1,8,32)")
    options.add_argument("--batch", type=int, default=32, help="blocks a call, at most 64 MiB (default 32)")
    options.add_argument("--engine", choices=("auto", "io_uring", "threads"), default="auto")
    options.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the current one)")
    options.add_argument("--store-bytes", type=parse_size, default=1 << 30, help="of the store (default 1GiB)")
    options.add_argument("--recover-blocks", type=int, default=100_000)
    options.add_argument("--recover-sizes", default="4KiB", help="blocks of the store opened again; empty: none")
    options.add_argument("--seconds", type=float, default=0.0, help="of a round (default 1; with --quick 0.2)")
    arguments = options.parse_args()
    sizes, depths = block_sizes(arguments), [int(word) for word in arguments.depths.split(",")]
    if any(size % 4096 for size in sizes) or min(depths) < 1 or arguments.batch < 1:
        options.error("sizes are multiples of 4096, depths and batch 1 or more")
    folder = Path(tempfile.mkdtemp(prefix="ucxkv-datafiles-", dir=arguments.folder or Path.cwd()))
    plan = Plan(
        folder,
        arguments.engine,
        arguments.store_bytes,
        arguments.batch,
        depths,
        arguments.seconds or (0.2 if arguments.quick else 1.0),
        1 if arguments.quick else 5,
    )
    try:
        bench = Bench("datafiles", "datafiles", arguments)
        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
        for size in sizes:
            steps.append((f"blocks of {size}", lambda size=size: plan.size(size)))  # type: ignore[misc]
        for text in filter(None, arguments.recover_sizes.split(",")):
            size = parse_size(text)
            steps.append((f"recover {text}", lambda size=size: plan.recover(size, arguments.recover_blocks)))  # type: ignore[misc]
        bench.run(steps, store_bytes=arguments.store_bytes, seconds=plan.seconds, fio=is_there())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    main(run)
