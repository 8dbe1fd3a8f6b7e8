"""What the benchmarks share: their options, a node to measure against, and how results are printed.

The contract of every `scripts/bench_*.py`: `--json` prints one object a line with its conditions; `--quick` ends
within a minute; the limit is measured in the same run, alternating with the measured thing; a warm-up and at least
five rounds; median, 99th percentile and spread; bytes are verified before they count; the working set is larger than
the last-level cache unless the row says otherwise. GB is 10^9 bytes; times are wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import ucxkv
from ucxkv.cli.launch import NodeProcess, start_node, stop_nodes
from ucxkv.cli.logs import log_to_stderr
from ucxkv.cli.measure import Conditions, Row, print_rows
from ucxkv.errors import UcxKvError
from ucxkv.sizes import parse_size

ROUND_BYTES = 48 << 20


def parser(description: str | None, *, sizes: str = "16KiB,64KiB,256KiB,1MiB,4MiB") -> argparse.ArgumentParser:
    """The options that all benchmarks have; `sizes` is the default of --sizes, empty = no such option."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    found.add_argument("--quick", action="store_true", help="fewer repetitions; within a minute")
    found.add_argument("--host-bytes", type=parse_size, default=1 << 30, help="the node's memory (default 1GiB)")
    if sizes:
        found.add_argument("--sizes", default=sizes, help=f"block sizes (default {sizes})")
        paths = ("auto", "mapped", "rma", "message", "network")
        found.add_argument("--path", choices=paths, default="auto", help="way to the node")
    return found


def block_sizes(arguments: argparse.Namespace) -> list[int]:
    """The sizes of --sizes; exits with a message when one is unusable."""
    try:
        found = [parse_size(text) for text in arguments.sizes.split(",")]
    except UcxKvError as exc:
        sys.exit(f"--sizes: {exc}")
    if any(size < 8 or size % 8 for size in found):
        sys.exit("--sizes: multiples of 8 bytes")
    return found


def operations(nbytes: int, quick: bool, *, most: int = 400) -> int:
    """How many single operations on nbytes make a round."""
    return max(6, min(most, ROUND_BYTES // nbytes) // (4 if quick else 1))


@contextlib.contextmanager
def started(count: int = 1, *, host_bytes: int, arguments: tuple[str, ...] = ()) -> Iterator[list[NodeProcess]]:
    """`count` nodes on free ports, the first alone and the others joining it, for the length of a `with` block."""
    nodes: list[NodeProcess] = []
    try:
        for index in range(count):
            join = [nodes[0].address] if nodes else []
            nodes.append(start_node(f"bench-{index + 1}", host_bytes=str(host_bytes), join=join, arguments=arguments))
            nodes[-1].wait_ready(time.monotonic() + 60)
        yield nodes
    finally:
        stop_nodes(nodes)


@dataclass
class Bench:
    """One run: rows as they come, with a progress bar on a terminal."""

    name: str
    title: str
    arguments: argparse.Namespace
    nodes: list[NodeProcess] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def run(self, steps: list[tuple[str, Callable[[], Awaitable[Row | list[Row]]]]], **facts: object) -> list[Row]:
        """Await each step (its name is shown), then print the rows with the run's conditions. facts: more
        conditions."""
        conditions = Conditions([node.pid for node in self.nodes])
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

        async def all_steps() -> None:
            with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
                bar = progress.add_task(self.title, total=len(steps))
                for name, step in steps:
                    progress.update(bar, description=f"{self.title}: {name}")
                    gc.collect()
                    found = await step()
                    self.rows += found if isinstance(found, list) else [found]
                    progress.advance(bar)

        asyncio.run(all_steps())
        self.print(conditions.report(**facts))
        return self.rows

    def print(self, conditions: Row) -> None:
        """Print what `rows` holds."""
        for found in self.rows:
            found["bench"] = self.name
        print_rows(self.title, self.rows, conditions, as_json=self.arguments.json, version=ucxkv.__version__)


@contextlib.asynccontextmanager
async def client(nodes: list[NodeProcess], path: str = "auto") -> Any:
    """A connected client of the nodes, with a deadline that no healthy call meets."""
    async with ucxkv.connect(*[node.address for node in nodes], path=path, timeout_s=60.0) as kv:
        yield kv


def main(run: Callable[[], int | None]) -> None:
    """Run a benchmark's main function; an expected error is one line on stderr and exit code 2."""
    log_to_stderr("warning", as_json=not sys.stderr.isatty())
    try:
        code = run()
    except UcxKvError as exc:
        print(f"{sys.argv[0]}: {exc}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code or 0)
