"""See ucxkv work: two nodes, one client process that writes and one that reads, on a slice of a real trace.

    bash scripts/quickstart.sh          makes its own environment, then runs this
    python scripts/quickstart.py        in an environment where ucxkv is installed

The writer plays the prefill side: for each request of the Mooncake conversation trace it asks for the longest stored
prefix, reads that, and puts the blocks that are missing. The reader, another process, then gets the request's blocks
and compares every byte with its own regeneration from the key. Exit code 0 only when all bytes were right, nothing
was missed that had been put, and nothing was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from replay_trace import SMOLLM2, Content, Request, read_requests
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from start_nodes import start_all

from ucxkv.cli.launch import NodeProcess, stop_nodes
from ucxkv.cli.logs import log_to_stderr
from ucxkv.cli.measure import anonymous_blocks
from ucxkv.cli.residue import residue
from ucxkv.errors import UcxKvError
from ucxkv.sizes import short_size

BATCH = 64
Facts = dict[str, Any]


def main() -> int:
    arguments = parse()
    console = Console(stderr=arguments.json)
    requests = read_requests(arguments.requests)
    distinct = len({key.tobytes() for request in requests for key in request.keys})
    needed = distinct * SMOLLM2.block_bytes
    host_bytes = int(needed * 1.15) + (192 << 20)  # room for rounding and for extents granted ahead; nothing is evicted
    before = residue()
    nodes: list[NodeProcess] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    try:
        with console.status(f"starting 2 nodes with {short_size(host_bytes)} of host memory each"):
            start_all(nodes, 2, host_bytes=str(host_bytes), prefix="quickstart-")
        for node in nodes:
            console.print(f"node {node.name} at {node.address}, pid {node.pid}")
        written, read = replay(console, [node.address for node in nodes], len(requests))
    except UcxKvError as exc:
        console.print(str(exc), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("stopped", style="red")
        return 130
    finally:
        killed = stop_nodes(nodes)
    left = wait_for_none_left(before, [node.pid for node in nodes])
    facts = {"seconds": round(time.monotonic() - started, 1), "nodes_killed": killed, "left_behind": left}
    facts |= {"requests": len(requests), "distinct_blocks": distinct, "block_bytes": SMOLLM2.block_bytes}
    return report(console, facts, written, read, arguments.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="requests of the trace to replay, at most 150")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    if not 1 <= arguments.requests <= 150:
        parser.error("--requests must be 1 to 150")
    return arguments


def replay(console: Console, addresses: list[str], requests: int) -> tuple[Facts, Facts]:
    """Run writer and reader to their ends and return what each saw; raises RuntimeError when one of them fails."""
    context = multiprocessing.get_context("spawn")
    to_reader, from_writer = context.Pipe(duplex=False)[::-1]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        roles: dict[Connection, str] = {}
        children = {}
        for role, pipe in (("writer", to_reader), ("reader", from_writer)):
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=run_role, args=(role, addresses, requests, pipe, theirs), daemon=True)
            child.start()
            theirs.close()
            pipe.close()
            roles[ours] = role
            children[role] = child
        bars = {role: progress.add_task(f"{role}: requests", total=requests) for role in children}
        facts: dict[str, Facts] = {}
        while roles:
            for ready in multiprocessing.connection.wait(list(roles)):
                assert isinstance(ready, Connection)
                role = roles[ready]
                try:
                    said = ready.recv()
                except EOFError:
                    del roles[ready]
                    continue
                if isinstance(said, dict):
                    facts[role] = said
                progress.update(bars[role], completed=said if isinstance(said, int) else requests)
        for child in children.values():
            child.join(10)
    for role in children:
        if "failed" in facts.get(role, {"failed": "it ended without a word"}):
            raise UcxKvError(f"the {role} failed: {facts.get(role, {}).get('failed', 'it ended without a word')}")
    return facts["writer"], facts["reader"]


def run_role(role: str, addresses: list[str], requests: int, pipe: Connection, parent: Connection) -> None:
    """A client process: the writer tells the reader through `pipe` which request is stored; both tell the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us, in order
    log_to_stderr("warning", as_json=False)
    work = write if role == "writer" else read
    try:
        facts = asyncio.run(work(addresses, read_requests(requests), pipe, parent))
    except (UcxKvError, AssertionError, OSError, EOFError) as exc:
        facts = {"failed": f"{type(exc).__name__}: {exc}"}
    with contextlib.suppress(OSError):  # the parent is gone: nobody is left to tell
        parent.send(facts)


async def write(addresses: list[str], requests: list[Request], reader: Connection, parent: Connection) -> Facts:
    import ucxkv

    content, root = Content(SMOLLM2.block_bytes), np.zeros((1, 16), np.uint8)
    blocks = anonymous_blocks(BATCH, SMOLLM2.block_bytes)
    facts: Facts = {"asked": 0, "found": 0, "put": 0, "wrong": 0}
    put_ns: list[int] = []
    match_ns: list[int] = []
    async with ucxkv.connect(*addresses, timeout_s=30.0) as kv:
        pool = kv.register(blocks)
        for request in requests:
            start = time.perf_counter_ns()
            known = (await kv.match(request.keys)).blocks
            match_ns.append(time.perf_counter_ns() - start)
            facts["asked"] += len(request.keys)
            facts["found"] += known
            for begin in range(0, known, BATCH):
                keys = request.keys[begin : min(begin + BATCH, known)]
                hits = (await kv.get_many(keys, into=pool[: len(keys)])).hits
                good = sum(content.is_in(key, block) for key, block in zip(keys, blocks, strict=False))
                facts["wrong"] += len(keys) - min(hits, good)
            parents = np.concatenate([root, request.keys[:-1]])
            for begin in range(known, len(request.keys), BATCH):
                keys = request.keys[begin : begin + BATCH]
                for key, block in zip(keys, blocks, strict=False):
                    content.write(key, block)
                start = time.perf_counter_ns()
                result = await kv.put_many(keys, pool[: len(keys)], parents=parents[begin : begin + len(keys)])
                put_ns.append((time.perf_counter_ns() - start) // len(keys))
                result.raise_for_status()
                facts["put"] += result.stored
            reader.send(request.number)
            parent.send(request.number + 1)
    return {**facts, **quantiles("put", put_ns, facts["put"]), **quantiles("match", match_ns, 0)}


async def read(addresses: list[str], requests: list[Request], writer: Connection, parent: Connection) -> Facts:
    import ucxkv
    from ucxkv.tiers.copy import copy_speed

    content, blocks = Content(SMOLLM2.block_bytes), anonymous_blocks(BATCH, SMOLLM2.block_bytes)
    facts: Facts = {"asked": 0, "hits": 0, "misses": 0, "wrong": 0, "verified_bytes": 0}
    get_ns: list[int] = []
    sources: dict[str, int] = {}
    async with ucxkv.connect(*addresses, timeout_s=30.0) as kv:
        pool = kv.register(blocks)
        for _ in requests:
            request = requests[await asyncio.to_thread(writer.recv)]
            for begin in range(0, len(request.keys), BATCH):
                keys = request.keys[begin : begin + BATCH]
                blocks[: len(keys)] = 0xAB
                start = time.perf_counter_ns()
                result = await kv.get_many(keys, into=pool[: len(keys)])
                get_ns.append((time.perf_counter_ns() - start) // len(keys))
                facts["asked"] += len(keys)
                facts["hits"] += result.hits
                facts["misses"] += len(keys) - result.hits
                for key, block, status in zip(keys, blocks, result.status, strict=False):
                    if status == 0:
                        right = content.is_in(key, block)
                        facts["wrong"] += not right
                        facts["verified_bytes"] += block.nbytes if right else 0
                for name, hits in result.sources.items():
                    sources[name] = sources.get(name, 0) + hits
            parent.send(request.number + 1)
        facts["paths"] = sorted({str(peer.path) for peer in kv.peers()})
    copied = copy_speed(SMOLLM2.block_bytes, 96 << 20, huge_pages=True)
    facts |= {"copy_us": round(copied.us, 1), "copy_gbps": round(copied.gbps, 2), "sources": sources}
    return {**facts, **quantiles("get", get_ns, facts["hits"])}


def quantiles(op: str, per_block_ns: list[int], blocks: int) -> Facts:
    """p50 and p99 in us (per block of a batched call, or per call), and GB/s at the median."""
    times = np.asarray(per_block_ns or [0])
    found: Facts = {f"{op}_p50_us": round(float(np.median(times)) / 1e3, 1)}
    found[f"{op}_p99_us"] = round(float(np.percentile(times, 99)) / 1e3, 1)
    if blocks:
        found[f"{op}_gbps"] = round(SMOLLM2.block_bytes / max(float(np.median(times)), 1.0), 2)
    return found


def wait_for_none_left(before: set[str], pids: list[int]) -> list[str]:
    """What nobody holds now and was not there before, and nodes that still run; waits up to 3 s for it to go."""
    deadline = time.monotonic() + 3
    while True:
        left = sorted(residue() - before) + [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def report(console: Console, facts: Facts, written: Facts, read: Facts, as_json: bool) -> int:
    """Print the result; 0 when everything was right."""
    complete = read["misses"] == 0 and written["put"] == facts["distinct_blocks"] and read["hits"] == read["asked"]
    right = written["wrong"] == 0 and read["wrong"] == 0 and complete and not facts["left_behind"]
    if as_json:
        print(json.dumps({"event": "quickstart", "ok": right, **facts, "writer": written, "reader": read}))
        return 0 if right else 1
    table = Table(title=f"{facts['requests']} requests of the Mooncake conversation trace, 2 nodes, 2 client processes")
    table.add_column("what")
    table.add_column("value", justify="right")
    size = short_size(facts["block_bytes"])
    table.add_row("block: 16 tokens of SmolLM2-135M, bf16", size)
    table.add_row("writer: blocks asked / found / put", f"{written['asked']} / {written['found']} / {written['put']}")
    table.add_row("reader: blocks asked / hits / misses", f"{read['asked']} / {read['hits']} / {read['misses']}")
    table.add_row("put, per block: GB/s, p50, p99", rate(written, "put"))
    table.add_row("get, per block: GB/s, p50, p99", rate(read, "get"))
    table.add_row("match of a whole request: p50, p99", f"{written['match_p50_us']} us, {written['match_p99_us']} us")
    table.add_row(f"memcpy of {size} here: GB/s, p50", f"{read['copy_gbps']} GB/s, {read['copy_us']} us")
    table.add_row("way to the nodes' memory", ", ".join(read["paths"]))
    console.print(table)
    console.print(
        f"verified: {short_size(read['verified_bytes'])} compared byte by byte with an independent regeneration from "
        f"the keys, besides the sum that every get checks; {written['wrong'] + read['wrong']} blocks wrong"
    )
    left = ", ".join(facts["left_behind"]) or "nothing (no process, no file in /dev/shm, no socket)"
    console.print(f"left behind: {left}; {facts['seconds']} s")
    console.print("[green]ok[/]" if right else "[red]FAILED: see the counts above[/]")
    return 0 if right else 1


def rate(facts: Facts, op: str) -> str:
    return f"{facts[f'{op}_gbps']} GB/s, {facts[f'{op}_p50_us']} us, {facts[f'{op}_p99_us']} us"


if __name__ == "__main__":
    sys.exit(main())
