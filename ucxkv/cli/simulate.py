"""`ucxkv simulate`: what a cluster of a given size would save on a trace, by policy and capacity, before buying it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucxkv.cli.options import JsonOption
from ucxkv.sizes import short_size

if TYPE_CHECKING:
    from ucxkv.simulation.cluster import Cluster
    from ucxkv.simulation.workload import Workload

__all__ = ["simulate"]

_PLOTS = (".png", ".html")
_AGENTIC_TOKENS = 512
Row = dict[str, Any]


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            "--trace", help="Mooncake, Bailian (vLLM), vLLM prompts, agentic or LMCache JSON lines; plain or .xz."
        ),
    ],
    policy: Annotated[str, typer.Option("--policy", help="Of lru, s3fifo, tuc, belady.")] = "lru,s3fifo,tuc,belady",
    capacity: Annotated[
        str,
        typer.Option(
            "--capacity",
            help="First tier, all nodes together: shares of the trace's different blocks, or sizes as 64GiB; several "
            "for a sweep. Default 0.05, or what --cluster says.",
            show_default=False,
        ),
    ] = "",
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="TOML file: model, nodes, placement, tiers, link.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="8b (one GPU) or 70b (eight). Default 8b.", show_default=False)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, max=100_000, help="Nodes. Default 1.", show_default=False)
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            "--placement",
            help="chain: a chain on its root's home; shards: by a sharded directory. Default chain.",
            show_default=False,
        ),
    ] = "",
    load: Annotated[
        str, typer.Option("--load", help="What a hit does: always, cheaper (load or compute) or split.")
    ] = "cheaper",
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, help="Draw so many of the trace's sessions.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="For that draw, and the starts of agentic sessions.")] = 1,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens",
            min=1,
            help="A multiple of the trace's. Default the trace's; agentic 512.",
            show_default=False,
        ),
    ] = None,
    hash_tokens: Annotated[
        int | None, typer.Option("--hash-tokens", min=1, help="Tokens of a hash id, where the format does not say.")
    ] = None,
    drop_partial: Annotated[
        bool, typer.Option("--drop-partial", help="Do not store the last block of a request when it is not full.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw hits and saved prefill: FILE.png or FILE.html.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the product's policies and placement over a trace: hits, saved prefill, bytes by tier, time to first token.

    belady knows the future: it is the bound.
    """
    from ucxkv.cli.described import parse_capacity
    from ucxkv.errors import UsageError
    from ucxkv.simulation.replay import POLICIES, WAYS, replay

    policies = list(dict.fromkeys(name.strip() for name in policy.split(",")))
    for option, values, known in (
        ("--policy", policies, POLICIES),
        ("--load", [load], WAYS),
        ("--placement", [placement or "chain"], ("chain", "shards")),
    ):
        for value in values:
            if value not in known:
                raise UsageError(f"{option} {value!r}: use {', '.join(known)}")
    capacities = [(text.strip(), parse_capacity(text.strip())) for text in capacity.split(",")] if capacity else []
    base = _described(cluster, model, nodes, placement)
    _check_plot(plot)
    steps: list[tuple[Cluster, Any]] = [
        (dataclasses.replace(base, tiers=(dataclasses.replace(base.tiers[0], capacity=value), *base.tiers[1:])),
         value if value <= 1 else text)
        for text, value in capacities
    ] or [(base, base.tiers[0].capacity)]  # fmt: skip
    rows: list[Row] = []
    with _progress() as (start, advance):
        start(f"reading {trace.name}", 1)
        workload = _workload(trace, sessions, seed, block_tokens, hash_tokens, drop_partial)
        from ucxkv.simulation.cluster import node_of_blocks

        next_uses = workload.next_uses() if "belady" in policies else None
        node_of = node_of_blocks(workload, base)
        for described, said in steps:
            for name in policies:
                start(f"{name} at {said}", workload.requests)
                found = replay(
                    workload,
                    described,
                    name,
                    node_of,
                    way=load,  # type: ignore[arg-type]  # one of WAYS, as checked above
                    next_uses=next_uses,
                    on_progress=advance,
                )
                rows.append(_row(found.row([tier.name for tier in described.tiers]), said, workload, described, load))
                if as_json:
                    print(json.dumps(rows[-1]), flush=True)
    if not as_json:
        _show(rows, workload)
    if plot is not None:
        from ucxkv.simulation.plot import draw

        draw(rows, plot)


def _described(path: Path | None, model: str | None, nodes: int | None, placement: str) -> Cluster:
    from ucxkv.cli.described import HOST, model_named, read_cluster
    from ucxkv.simulation.cluster import Cluster

    if path is None:
        found = Cluster(model_named(model or "8b"), (HOST,), nodes or 1)
    else:
        found = read_cluster(path, model=model, nodes=nodes)
    return dataclasses.replace(found, placement=placement) if placement else found  # type: ignore[arg-type]  # checked


def _workload(
    path: Path, sessions: int | None, seed: int, block_tokens: int | None, hash_tokens: int | None, drop_partial: bool
) -> Workload:
    from ucxkv.simulation.traces import read_trace, schedule
    from ucxkv.simulation.workload import lay_out

    trace = read_trace(
        path,
        partial=not drop_partial,
        hash_tokens=hash_tokens,
        block_tokens=block_tokens,
        session_tokens=_AGENTIC_TOKENS,
    )
    return lay_out(trace.name, trace.block_tokens, schedule(trace, sessions=sessions, seed=seed))


def _row(row: Row, said: Any, workload: Workload, described: Cluster, load: str) -> Row:
    head = {"policy": row.pop("policy"), "capacity": said}
    facts = {
        "trace": workload.name,
        "block_tokens": workload.block_tokens,
        "block_bytes": workload.block_tokens * described.model.kv_bytes,
        "model": described.model.name,
        "nodes": described.nodes,
        "placement": described.placement,
        "load": load,
    }
    return {**head, **row, **facts}


def _check_plot(plot: Path | None) -> None:
    from ucxkv.errors import UsageError

    if plot is None:
        return
    if plot.suffix not in _PLOTS:
        raise UsageError(f"--plot {plot}: the name ends in {' or '.join(_PLOTS)}")
    from ucxkv.simulation.plot import check_plot

    check_plot(plot)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int], None], Callable[[int], None]]]:
    """A bar on a terminal: begin a step of so many parts, tell how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=1)
        yield (
            lambda what, total: bar.reset(task, description=what, total=total),
            lambda done: bar.update(task, completed=done),
        )


def _capacity(said: Any) -> str:
    """As it was written: a share or a size; of a cluster's file, bytes as a size."""
    return short_size(said) if isinstance(said, float) and said > 1 else str(said)


def _show(rows: list[Row], workload: Workload) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    titles = (
        "capacity",
        "policy",
        "hits %",
        "saved s",
        "of prefill %",
        "net s",
        "TTFT p50 ms",
        "p95 ms",
        "read",
        "written",
    )
    for title in titles:
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            _capacity(row["capacity"]), row["policy"], f"{100 * row['hit_rate']:.1f}", f"{row['saved_prefill_s']:,.0f}",
            f"{100 * row['saved_prefill_s'] / row['prefill_s']:.1f}", f"{row['net_saved_s'][row['load']]:,.0f}",
            f"{1e3 * row['ttft_p50_s']:.0f}", f"{1e3 * row['ttft_p95_s']:.0f}",
            " ".join(f"{tier} {short_size(nbytes)}" for tier, nbytes in row["read_bytes"].items()),
            " ".join(f"{tier} {short_size(nbytes)}" for tier, nbytes in row["written_bytes"].items()),
        )  # fmt: skip
    console.print(table)
    first = rows[0]
    footprint = f"{workload.unique:,} different ({short_size(workload.unique * first['block_bytes'])})"
    facts = (
        f"{workload.name}: {workload.requests:,} requests",
        f"{workload.blocks:,} blocks of {workload.block_tokens} tokens, {footprint}",
        f"model {first['model']}: prefill {first['prefill_s']:,.0f} s",
        f"TTFT without a cache p50 {1e3 * first['uncached_ttft_p50_s']:.0f} ms",
        f"{first['nodes']} nodes, placement {first['placement']}, load {first['load']}",
    )
    console.print(", ".join(facts), style="dim", markup=False, highlight=False)
