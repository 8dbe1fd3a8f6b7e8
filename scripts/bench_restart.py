"""How long after kill -9 until durable blocks are served again?

    python scripts/bench_restart.py [--blocks 100000] [--value 4KiB] [--json] [--quick]

Bound: the sums, which read every value once; the same bytes are summed in this process beside it. Per round: kill -9 of
a node with that many durable blocks, a new start, and its own report of what it did: the index (journal read, directory
and allocator built), the sums, and from the start of the process to its first answer, most of which is Python's imports
and mapping the memory. Then every block is read and compared. Goal: an index of 100,000 blocks in 0.5 s.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import Bench, client, main, parser

from ucxkv.cli.launch import NodeProcess, start_node, stop_nodes
from ucxkv.cli.measure import Row, Series, row
from ucxkv.node.state import forget
from ucxkv.sizes import parse_size
from ucxkv.tiers import copy as tier_copy

CHAIN = 1000


def run() -> int:
    """See the module."""
    options = parser(__doc__, sizes="")
    options.add_argument("--blocks", type=int, default=0, help="durable blocks (default 100,000; 10,000 with --quick)")
    options.add_argument("--value", type=parse_size, default=4096, help="bytes of each (default 4KiB)")
    arguments = options.parse_args()
    count = arguments.blocks or (10_000 if arguments.quick else 100_000)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        host_bytes = int(count * arguments.value * 1.2) + (128 << 20)

        def start() -> NodeProcess:
            flags = ["--durability", "process", "--state-dir", str(state), "--slots-count", str(count * 5 // 4 + 8192)]
            node = start_node("bench-restart", host_bytes=str(host_bytes), arguments=[*flags, "--log-json"])
            node.wait_ready(time.monotonic() + 120)
            return node

        nodes = [start()]
        try:
            bench = Bench("restart", "restart with durable blocks", arguments, nodes)

            async def measure() -> list[Row]:
                return await _rounds(nodes, start, count, arguments.value, 2 if arguments.quick else 5)

            bench.run([(f"{count:,} blocks", measure)], blocks=count, value_bytes=arguments.value)
        finally:
            stop_nodes(nodes)
            forget(state)
    return 0


async def _rounds(nodes: list[NodeProcess], start: Any, count: int, value: int, rounds: int) -> list[Row]:
    random = np.random.default_rng(1)
    keys, pages = random.integers(1, 255, (count, 16), np.uint8), random.integers(0, 255, (CHAIN, value), np.uint8)
    async with client(nodes) as kv:
        for at in range(0, count, CHAIN):
            some = keys[at : at + CHAIN]
            assert (await kv.put_many(some, pages[: len(some)], "chain", durable=True)).ok
    series = {name: Series() for name in ("index", "index, CPU", "sums", "limit", "start to ready")}
    for _ in range(rounds):
        nodes[0].process.kill()
        nodes[0].process.wait()
        nodes[0].release()
        began = time.perf_counter_ns()
        nodes[0] = start()
        series["start to ready"].start_round().append(time.perf_counter_ns() - began)
        said = _recovered(nodes[0])
        assert (said["blocks"], said["lost"]) == (count, 0), said
        series["index"].start_round().append(int(said["index_s"] * 1e9))
        series["index, CPU"].start_round().append(int(said["index_cpu_s"] * 1e9))
        series["sums"].start_round().append(int(said["sums_s"] * 1e9))
        series["limit"].start_round().append(_sum_ns(count * value))
    async with client(nodes) as kv:
        into = np.empty_like(pages)
        for at in range(0, count, CHAIN):
            some = keys[at : at + CHAIN]
            assert (await kv.get_many(some, into[: len(some)])).hits == len(some)
            assert (into[: len(some)] == pages[: len(some)]).all()
    found = []
    for op in ("index", "index, CPU", "sums", "start to ready"):
        limit, name = (series["limit"], "sum of as many bytes, one thread") if op == "sums" else (None, "")
        found.append(
            row("restart", op, series[op], path="none", batch=count, verified=True, limit=limit, limit_name=name)
        )
    return found


def _recovered(node: NodeProcess) -> dict[str, Any]:
    """The node's own words."""
    for line in node.log_tail(1 << 20).splitlines():
        said: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if said.get("event") == "durable.recovered":
            return said
    raise AssertionError(f"it did not say what it recovered: {node.log_tail()}")


def _sum_ns(nbytes: int) -> int:
    """How long one thread of this process sums so many bytes, in pieces of 64 MiB."""
    piece = np.frombuffer(os.urandom(1 << 20) * 64, np.uint8)
    began = time.perf_counter_ns()
    for _ in range(max(1, nbytes // len(piece))):
        tier_copy.sum_bytes(piece.data)
    return time.perf_counter_ns() - began


if __name__ == "__main__":
    main(run)
