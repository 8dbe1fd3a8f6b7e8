"""How fast does a node serve a working set many times its memory from disk, and again after a restart?

    python scripts/bench_tier.py [--folder DIR] [--host-bytes 256MiB] [--set-bytes 4GiB] [--json] [--quick]
        [--codec none|lossless|int8]

Bound: each block is read from the disk once into the node's memory and copied from there, so the disk is the limit: fio
(`apt-get install fio`) with the same block and depth on its own file in the same folder, in the same run; without fio
there is none. `put` writes the whole set (the disk's writes are the limit, since memory holds a part of it only);
`get_many, cold` reads it in batches in an order that no memory of this size helps; `get, cold` one block at a time,
beside one read of fio; `get, hot` the same block again. Then the node is killed (-9) and started again, and the same is
read once more; `ready again` is the time from its start to its first answer. Every block read is compared.

With a codec the blocks are normal values in bfloat16, as 16 tokens of 128 channels, and what int8 brings back is
compared with what the codec makes of the block.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import Bench, client, main, parser
from fio import FioJob, FioResult, is_there, run_fio

import ucxkv
from ucxkv.cli.launch import NodeProcess, start_node, stop_nodes
from ucxkv.cli.measure import Row, Series, row
from ucxkv.sizes import parse_size
from ucxkv.tiers.codecs import CODECS, codec_of

BATCH = 64
TOKENS, CHANNELS = 16, 128


class Set:
    """The working set: chains of 64 blocks; block i is a pattern that i alone gives."""

    def __init__(self, nbytes: int, block: int, codec: str) -> None:
        self.block, self.count, self._codec = block, nbytes // block // BATCH * BATCH, codec
        self.keys = np.frombuffer(os.urandom(16 * self.count), np.uint8).reshape(-1, 16)
        self._base = np.arange(block // 8, dtype=np.uint64)
        if codec != "none":
            values = np.random.default_rng(1).standard_normal(block // 2, np.float32)
            self._base = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64)
        self.into = np.empty((BATCH, block // 8), np.uint64)

    def value(self, i: int) -> np.ndarray:
        """What block i is."""
        return self._base * np.uint64(2 * i + 1) if self._codec == "none" else np.roll(self._base, i)

    def check(self, which: list[int], got: np.ndarray) -> None:
        """AssertionError when one of these blocks is neither what was put nor what the codec makes of it."""
        for i, one in zip(which, got, strict=True):
            if not np.array_equal(one, self.value(i)) and not np.array_equal(one, self._back(i)):
                raise AssertionError(f"block {i} came back with other bytes")

    def _back(self, i: int) -> np.ndarray:
        """What comes back of block i from a codec with loss."""
        value = self.value(i)
        codec = codec_of(self._codec)
        stored = codec.encode(
            value.data, dtype="bfloat16", shape=(self.block // 2 // TOKENS // CHANNELS, TOKENS, CHANNELS)
        )
        into = np.empty_like(value)
        if codec.is_lossless or stored is None:
            return value
        codec.decode(stored, into.data)
        return into


async def put(kv: ucxkv.Client, work: Set) -> Series:
    """The whole set, chain by chain."""
    series: list[int] = []
    for at in range(0, work.count, BATCH):
        values = [work.value(i) for i in range(at, at + BATCH)]
        begin = time.perf_counter_ns()
        (await kv.put_many(work.keys[at : at + BATCH], values, "chain")).raise_for_status()
        series.append(time.perf_counter_ns() - begin)
    return _series(series)


async def settled(kv: ucxkv.Client) -> None:
    """Return when every block has its copy."""
    for _ in range(6000):
        if not (await kv.status())[0].numbers["disk_pending"]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("blocks were not written within two minutes")


async def get_batches(kv: ucxkv.Client, work: Set, rounds: int) -> Series:
    """Whole chains, each as far from the last as can be."""
    chains, times = work.count // BATCH, []
    for n in range(rounds):
        at = (n * _stride(chains)) % chains * BATCH
        begin = time.perf_counter_ns()
        result = await kv.get_many(work.keys[at : at + BATCH], work.into)
        times.append(time.perf_counter_ns() - begin)
        if result.hits != BATCH:
            raise AssertionError(f"{result.hits} of {BATCH} blocks were there: {result.status}")
        work.check(list(range(at, at + BATCH)), work.into)
    return _series(times)


async def get_single(kv: ucxkv.Client, work: Set, rounds: int) -> tuple[Series, Series]:
    """One block at a time: cold, then the same again."""
    cold: list[int] = []
    hot: list[int] = []
    for n in range(rounds):
        i = (n * _stride(work.count)) % work.count
        for times in (cold, hot):
            begin = time.perf_counter_ns()
            got = await kv.get(work.keys[i].tobytes(), work.into[0])
            times.append(time.perf_counter_ns() - begin)
            if got != work.block:
                raise AssertionError(f"block {i} is not there")
            work.check([i], work.into[:1])
    return _series(cold), _series(hot)


def _stride(n: int) -> int:
    """A step that visits all of n places, far apart."""
    step = n * 5 // 8 | 1
    while np.gcd(step, n) != 1:
        step += 2
    return step


def _series(times: list[int]) -> Series:
    series = Series()
    share = max(1, len(times) // 5)
    series.rounds = [times[at : at + share] for at in range(0, len(times), share)]
    return series


async def limits(folder: Path, block: int, seconds: float) -> dict[str, FioResult]:
    """What the disk gives: reads and writes at the depth of the node's, and one read at a time."""
    if not is_there():
        return {}
    job: dict[str, Any] = {"file": folder / "fio", "nbytes": 1 << 30, "block_bytes": block}
    deep = max(1, (8 << 20) // block)
    found = {
        "write": await run_fio(FioJob(way="randwrite", depth=deep, **job), seconds),
        "read": await run_fio(FioJob(way="randread", depth=deep, **job), seconds),
        "single": await run_fio(FioJob(way="randread", depth=1, **job), seconds),
    }
    (folder / "fio").unlink(missing_ok=True)
    return found


def with_limit(found: Row, limit: FioResult | None, *, by_latency: bool = False) -> Row:
    """ratio: our GB/s over fio's, or for single reads our time over fio's."""
    found["limit_name"] = "fio" if limit is not None else ""
    if limit is not None:
        found["limit_us"], found["limit_gbps"] = limit.p50_us, limit.gbps
        found["ratio"] = round(found["p50_us"] / limit.p50_us if by_latency else found["gbps"] / limit.gbps, 3)
    return found


def run() -> int:
    options = parser(__doc__, sizes="")
    options.set_defaults(host_bytes=256 << 20)
    options.add_argument("--set-bytes", type=parse_size, default=4 << 30, help="bytes of all blocks (default 4GiB)")
    options.add_argument("--codec", choices=[codec.name for codec in CODECS], default="none", help="on the disk")
    options.add_argument("--block", type=parse_size, default=1 << 20, help="bytes of a block (default 1MiB)")
    options.add_argument(
        "--folder", type=Path, default=Path(), help="on the disk to measure (default: the current one)"
    )
    arguments = options.parse_args()
    if arguments.quick:
        arguments.set_bytes = min(arguments.set_bytes, 1 << 30)
    with tempfile.TemporaryDirectory(prefix="bench-tier-", dir=arguments.folder) as folder:
        measure(arguments, Path(folder))
    return 0


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    work = Set(arguments.set_bytes, arguments.block, arguments.codec)
    bench = Bench("tier", "a working set larger than memory, from disk", arguments)
    flags = ["--disk", str(folder / "disk"), "--disk-bytes", str(2 * arguments.set_bytes + (1 << 30))]
    if arguments.codec != "none":
        flags += ["--disk-codec", arguments.codec, "--disk-dtype", "bfloat16", "--disk-channels", str(CHANNELS)]

    def start() -> NodeProcess:
        node = start_node("bench-tier", host_bytes=str(arguments.host_bytes), arguments=flags)
        node.wait_ready(time.monotonic() + 120)
        return node

    state: dict[str, Any] = {"node": start()}
    shape: Row = {"bytes": work.block, "concurrency": 1, "verified": True}
    batches, singles = work.count // BATCH, min(work.count // 4, 64 if arguments.quick else 400)

    async def first() -> Row:
        state["limits"] = await limits(folder, work.block, 0.5 if arguments.quick else 3)
        async with client([state["node"]]) as kv:
            found = row("tier", "put_many", await put(kv, work), nbytes=BATCH * work.block, batch=BATCH, **shape)
            await settled(kv)
            return with_limit(found, state["limits"].get("write"))

    async def serve(name: str) -> list[Row]:
        async with client([state["node"]]) as kv:
            if (await kv.exists_many(work.keys)).sum() != work.count:
                raise AssertionError("some of the set is not there")
            many = await get_batches(kv, work, batches)
            cold, hot = await get_single(kv, work, singles)
            rows = [
                row("tier", f"get_many, cold{name}", many, nbytes=BATCH * work.block, batch=BATCH, **shape),
                row("tier", f"get, cold{name}", cold, nbytes=work.block, batch=1, **shape),
                row("tier", f"get, hot{name}", hot, nbytes=work.block, batch=1, **shape),
            ]
            with_limit(rows[0], state["limits"].get("read"))
            with_limit(rows[1], state["limits"].get("single"), by_latency=True)
            if not name:
                state["numbers"] = (await kv.status())[0].numbers
            return rows

    async def again() -> list[Row]:
        state["node"].process.send_signal(signal.SIGKILL)
        state["node"].process.wait()
        begin = time.perf_counter_ns()
        state["node"] = await asyncio.to_thread(start)
        async with client([state["node"]]) as kv:
            if not await kv.exists(work.keys[0].tobytes()):
                raise AssertionError("the set is not there after the restart")
        ready = _series([time.perf_counter_ns() - begin])
        rows = [row("tier", "ready again after kill -9", ready, batch=1, concurrency=1, verified=True)]
        return rows + await serve(", after kill -9")

    try:
        bench.run(
            [("put", first), ("get", lambda: serve("")), ("restart", again)],
            codec=arguments.codec, blocks=work.count, set_bytes=work.count * work.block,
            host_bytes=arguments.host_bytes,
        )  # fmt: skip
    finally:
        stop_nodes([state["node"]])
    numbers = state["numbers"]
    written = numbers["disk_written_bytes"] / max(1.0, numbers["disk_payload_bytes"])
    if not arguments.json:
        if arguments.codec != "none":
            saves = numbers["disk_codec_in_bytes"] / max(1.0, numbers["disk_codec_out_bytes"])
            print(
                f"{arguments.codec} saves {saves:.2f}x; blocks stored as they are: {numbers['disk_codec_declined']:.0f}"
            )
        print(f"bytes written for a byte of value: {written:.4f}; evicted without a copy: {numbers['evicted']:.0f}")


if __name__ == "__main__":
    main(run)
