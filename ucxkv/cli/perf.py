"""`ucxkv perf`: gets and puts by size against a node, beside memcpy of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ucxkv.cli.options import AddressOption, JsonOption, TokenFileOption, connected
from ucxkv.sizes import parse_size, short_size

if TYPE_CHECKING:
    from ucxkv.cli.measure import Row
    from ucxkv.client.opening import PATHS

__all__ = ["perf"]

_BUDGET_BYTES = 24 << 20  # bytes moved in a round of one row: a row takes well under a second


def perf(
    sizes: Annotated[
        str, typer.Option("--sizes", help="Block sizes, comma separated.")
    ] = "16KiB,64KiB,256KiB,1MiB,4MiB",
    batch: Annotated[int, typer.Option("--batch", min=2, max=1024, help="Keys of a batched call.")] = 64,
    path: Annotated[str, typer.Option("--path", help="auto, mapped, rma, message or network.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions; ends within a minute.")] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
) -> None:
    """Measure get and put. Without --address a node of its own is started and stopped."""
    import ucxkv
    from ucxkv.cli.measure import Conditions, print_rows
    from ucxkv.errors import UsageError

    chosen = [parse_size(size) for size in sizes.split(",")]
    if path not in PATHS:
        raise UsageError(f"--path {path!r}: use one of {', '.join(PATHS)}")
    if any(size < 8 or size % 8 for size in chosen):
        raise UsageError("--sizes: multiples of 8 bytes")
    with _nodes(address, max(chosen)) as (addresses, pids):
        conditions = Conditions(pids)
        rows = asyncio.run(_measure(addresses, pids, token_file, chosen, batch, path, quick))
        facts = conditions.report(node="given" if address else "started for this run, same host")
    print_rows("get and put", rows, facts, as_json=as_json, version=ucxkv.__version__)


@contextlib.contextmanager
def _nodes(address: list[str] | None, largest: int) -> Iterator[tuple[list[str], list[int]]]:
    if address:
        yield address, []
        return
    from ucxkv.cli.launch import running_node

    with running_node("perf", host_bytes=str(max(1 << 30, 256 * largest))) as node:
        yield [node.address], [node.pid]


async def _measure(
    addresses: list[str], pids: list[int], token_file: Path | None, sizes: list[int], batch: int, path: str, quick: bool
) -> list[Row]:
    from rich.console import Console

    from ucxkv.cli.workload import Workload, working_set

    rows: list[Row] = []
    console = Console(stderr=True)
    async with connected(addresses, token_file, 30.0, path) as kv:
        with console.status("connected") if sys.stderr.isatty() else contextlib.nullcontext() as status:
            for size in sizes:
                if status is not None:
                    status.update(f"blocks of {short_size(size)}")
                work = Workload(kv, size, count=working_set(size, 128 << 20), pids=pids)
                moves = max(8, min(400, _BUDGET_BYTES // size)) // (4 if quick else 1)
                batches = max(1, moves // batch)
                used = kv.peers()[0].path
                rows.append(await work.put_batch(1, max(2, moves // 4), path=str(used)))
                rows.append(await work.put_batch(batch, batches, path=str(used)))
                await work.load()
                rows.append(await work.get_single(moves, path=str(used)))
                rows.append(await work.get_batch(batch, batches, path=str(used)))
                await work.unload()
    return rows
