"""How long does a put take, commit in the directory included, beside a copy of the same bytes?

    python scripts/bench_put.py [--path mapped|message] [--durable [--durability power]] [--json] [--quick]

Bound: one pass over the bytes (copy and sum) into memory that the node granted ahead, then one message and its answer
on the control connection for the whole batch (two thread wake-ups: tens of us on a quiet machine). So small puts cost
the round trip and large ones the copy. Rows: one `put` at a time and `put_many` of --batch by size, then small puts
from --clients connections at once (p99 is the figure there). What was put is read back and compared, then deleted,
untimed. With --durable the node journals each put before it answers (durability = process; with power it writes and
syncs the value, then the journal: at least two waits for the disk).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from benchlib import Bench, block_sizes, client, main, operations, parser, started

import ucxkv
from ucxkv.cli.measure import Row, Series, row
from ucxkv.cli.workload import ROUNDS, Workload, working_set
from ucxkv.node.state import forget
from ucxkv.sizes import short_size


def run() -> int:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, default=64, help="blocks of a put_many (default 64; 0 = no such rows)")
    options.add_argument("--clients", type=int, default=8, help="connections of the last row (default 8; 0 = none)")
    options.add_argument("--durable", action="store_true", help="puts that survive the node's process")
    options.add_argument("--durability", choices=("process", "power"), default="process", help="of durable puts")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        try:
            flags = ("--durability", arguments.durability, "--state-dir", str(state))
            measure(arguments, flags if arguments.durable else ())
        finally:
            if state.exists():
                forget(state)
    return 0


def measure(arguments: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """All rows, on a node with these flags."""
    sizes = block_sizes(arguments)
    with started(host_bytes=max(arguments.host_bytes, 256 * max(sizes)), arguments=flags) as nodes:
        bench = Bench("put", f"put over the {arguments.path} path", arguments, nodes)
        steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
        for size in sizes:

            async def step(size: int = size) -> list[Row]:
                async with client(nodes, arguments.path) as kv:
                    count = working_set(size, arguments.host_bytes // 4)
                    work = Workload(kv, size, count=count, durable=arguments.durable)
                    path = str(kv.peers()[0].path)
                    rows = [await work.put_batch(1, operations(size, arguments.quick, most=160), path=path)]
                    if arguments.batch:
                        batches = max(2, operations(size, arguments.quick, most=800) // arguments.batch)
                        rows.append(await work.put_batch(arguments.batch, batches, path=path))
                    return rows

            steps.append((short_size(size), step))
        if arguments.clients:
            address = nodes[0].address
            count = 40 if arguments.quick else 200
            puts = (address, arguments.clients, count, arguments.path, arguments.durable)
            steps.append(("clients", lambda: small_puts(*puts)))
        durability = arguments.durability if arguments.durable else "memory"
        bench.run(steps, node="another process on this host", durability=durability)


async def small_puts(address: str, clients: int, per_client: int, path: str, durable: bool) -> Row:
    """Puts of 256 bytes from several connections of this process, each one at a time; verified by a later get."""
    nbytes = 256
    block = np.arange(nbytes, dtype=np.uint8)
    opened = [await ucxkv.connect(address, path=path, timeout_s=30.0) for _ in range(clients)]
    measured = Series()
    try:
        for number in range(ROUNDS + 1):
            keys = np.random.default_rng([7, number]).integers(1, 255, (clients, per_client, 16), np.uint8)
            times = measured.start_round()

            async def puts(index: int, keys: np.ndarray = keys, times: list[int] = times) -> None:
                for key in keys[index]:
                    start = time.perf_counter_ns()
                    status = await opened[index].put(key.tobytes(), block, durable=durable)
                    times.append(time.perf_counter_ns() - start)
                    if status.name != "STORED":
                        raise AssertionError(f"put answered {status.name}")

            async with asyncio.TaskGroup() as group:
                for index in range(clients):
                    group.create_task(puts(index))
            for own in keys:
                found = await opened[0].get_many(own)
                if any(value != block.tobytes() for value in found.values or [None]):
                    raise AssertionError("a small put came back changed")
                await opened[0].delete(own)
            if number == 0:
                measured.rounds.clear()
        used = str(opened[0].peers()[0].path)
    finally:
        for kv in opened:
            await kv.aclose()
    shape: Row = {"path": used, "bytes": nbytes, "batch": 1, "concurrency": clients, "verified": True}
    return row("put", f"put, {clients} connections of one process", measured, nbytes=nbytes, **shape)


if __name__ == "__main__":
    main(run)
