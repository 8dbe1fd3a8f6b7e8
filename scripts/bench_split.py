"""How soon is a stored prefix in an engine's cache: all loaded, all computed, or split?

    python scripts/bench_split.py --disk /path/on/a/drive [--blocks 96] [--value 1MiB] [--json] [--quick]

Bound: with both sides at full speed from the first moment to the last, 1 / (1 / load + 1 / compute). The loads are
real, from the node's memory and, with --disk, from a drive, to which the prefix is pushed before each. The engine is a
sleep: it takes, a block, a quarter to sixteen times as long as loading one did, and keeps no core busy, as an
accelerator does not. It is told its rate, the loads are estimated from what this client has read so far. Each loaded
block is compared with what was stored.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import Bench, client, main, parser, started

import ucxkv
from ucxkv.cli.launch import NodeProcess
from ucxkv.cli.measure import Row, Series, row
from ucxkv.sizes import parse_size

ENGINES = (0.25, 1.0, 4.0, 16.0)
BLOCK_TOKENS = 16
CACHE = np.ndarray[Any, np.dtype[np.float32]]


def run() -> int:
    """See the module."""
    options = parser(__doc__, sizes="")
    options.add_argument("--blocks", type=int, default=0, help="blocks of the prefix (default 96; 48 with --quick)")
    options.add_argument("--value", type=parse_size, default=1 << 20, help="bytes of each (default 1MiB)")
    options.add_argument("--disk", type=Path, help="a folder on the drive; without it only memory is measured")
    arguments = options.parse_args()
    count = arguments.blocks or (48 if arguments.quick else 96)
    rounds = 3 if arguments.quick else 7
    host_bytes = 2 * count * arguments.value + (64 << 20)
    layout = layout_of(arguments.value)
    with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="bench-split-") as folder:
        pushed = (rounds + 1) * (1 + len(ENGINES)) * 2 * host_bytes  # the oldest file is never used again meanwhile
        disk = ("--disk", folder, "--disk-bytes", str(pushed)) if arguments.disk else ()
        with started(host_bytes=host_bytes, arguments=disk) as nodes:
            bench = Bench("split", "a stored prefix, loaded, computed or split", arguments, nodes)
            tiers = ("host", "nvme") if disk else ("host",)
            steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]] = []
            for tier in tiers:
                steps.append((tier, lambda tier=tier: measure(nodes, layout, count, tier, rounds)))  # type: ignore[misc]
            bench.run(steps, blocks=count, value_bytes=arguments.value)
    return 0


def layout_of(value: int) -> ucxkv.Layout:
    """A layout whose blocks have about `value` bytes."""
    head_dim = max(1, value // (4 * 2 * 8 * BLOCK_TOKENS * 4))
    return ucxkv.Layout(
        model="bench", dtype="float32", layers=8, kv_heads=4, head_dim=head_dim, block_tokens=BLOCK_TOKENS
    )


async def measure(nodes: list[NodeProcess], layout: ucxkv.Layout, count: int, tier: str, rounds: int) -> list[Row]:
    """The rows of one tier: all loaded, then a split for each engine, in turns."""
    source: CACHE = np.random.default_rng(1).random((count, *layout.shape), np.float32) + 1
    cache = np.empty_like(source)
    loads, splits = Series(), {engine: Series() for engine in ENGINES}
    bounds, computed = {engine: Series() for engine in ENGINES}, {engine: [] for engine in ENGINES}  # type: ignore[var-annotated]
    async with client(nodes) as kv:
        seq = kv.sequence(layout, np.random.default_rng(2).integers(0, 1 << 20, count * BLOCK_TOKENS))
        assert (await seq.save(source)).blocks == count
        for done in range(rounds + 1):
            if done == 1:  # the first round was the warm-up
                for series in (loads, *splits.values(), *bounds.values()):
                    series.clear()
            load_ns = await loaded(kv, seq, cache, source, tier)
            loads.start_round().append(load_ns)
            for engine in ENGINES:
                block_s = engine * load_ns / count / 1e9
                took_ns, blocks = await split(kv, seq, cache, source, tier, block_s)
                splits[engine].start_round().append(took_ns)
                bounds[engine].start_round().append(int(1 / (1 / load_ns + 1 / (block_s * count * 1e9))))
                computed[engine].append(blocks)
    nbytes = layout.block_bytes * count
    common: dict[str, Any] = {"path": tier, "batch": count, "verified": True}
    found = [row("split", "all loaded", loads, nbytes=nbytes, **common)]
    for engine, series in splits.items():
        made = row("split", f"split, compute {engine:g} x load", series, bounds[engine], **common)
        made["limit_name"] = "both sides busy from first to last"
        made["blocks_computed"] = round(float(np.median(computed[engine][1:])), 1)
        made["x_sooner_than_loading"] = round(loads.p50_us / series.p50_us, 2)
        made["x_sooner_than_computing"] = round(engine * loads.p50_us / series.p50_us, 2)
        found.append(made)
    return found


async def loaded(kv: ucxkv.Client, seq: Any, cache: CACHE, source: CACHE, tier: str) -> int:
    """Nanoseconds to load all of it, in steps from the tail as a split has."""
    await placed(kv, seq, tier)
    cache[:] = 0
    began = time.perf_counter_ns()
    async with seq.load(cache, order="tail", step_blocks=max(1, (4 << 20) // seq.layout.block_bytes), ahead=1) as load:
        async for _ in load:
            pass
    took_ns = time.perf_counter_ns() - began
    assert np.array_equal(cache, source)
    return took_ns


async def split(kv: ucxkv.Client, seq: Any, cache: CACHE, source: CACHE, tier: str, block_s: float) -> tuple[int, int]:
    """Nanoseconds of a split whose engine needs `block_s` a block, and how many blocks it computed."""
    await placed(kv, seq, tier)
    cache[:] = 0
    spans: list[range] = []
    began = time.perf_counter_ns()
    async with seq.split(cache, BLOCK_TOKENS / block_s, pass_s=0.0, compute_blocks=8) as running:
        async for blocks in running:
            await asyncio.sleep(block_s * len(blocks))
            spans.append(blocks)
    took_ns = time.perf_counter_ns() - began
    for blocks in spans:
        cache[blocks.start : blocks.stop] = source[blocks.start : blocks.stop]
    assert np.array_equal(cache, source) and running.computed_blocks + running.loaded_blocks == len(source)
    return took_ns, running.computed_blocks


async def placed(kv: ucxkv.Client, seq: Any, tier: str) -> None:
    """See that all of it is in the tier: by a prefetch, or by other values that push it out of memory."""
    wanted, other = (1, None) if tier == "host" else (2, os.urandom(1 << 20))
    until = time.monotonic() + 60
    while ((match := await seq.look_up()).tiers != wanted).any():
        assert match.blocks == seq.blocks_count, "blocks left the disk; it is too small"
        assert time.monotonic() < until, f"the prefix did not get to {tier}"
        if other is None:
            await kv.prefetch(seq)
        else:
            await kv.put_many([os.urandom(16) for _ in range(16)], [other] * 16)


if __name__ == "__main__":
    main(run)
