"""`ucxkv perf`: ucxkv's calls beside ucx_perftest, ucxx, NIXL, a socket and memcpy, on one machine or between two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucxkv.cli.options import TokenFileOption

if TYPE_CHECKING:
    from ucxkv.perf.plan import Plan
    from ucxkv.perf.sides import Side
    from ucxkv.transport.address import TcpAddress

__all__ = ["READY", "perf"]

READY = "perf.ready"
_SIZES = "8,512,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_QUICK_SIZES = "8,16KiB,64KiB,1MiB,4MiB,64MiB"
_PATHS = "auto,rma,message,network"
_FAR_PATHS = "auto"
_PLOTS = (".png", ".html")


def perf(
    listen: Annotated[
        str | None, typer.Argument(metavar="[HOST:PORT]", help="With --server: where to listen.", show_default=False)
    ] = None,
    op: Annotated[str, typer.Option("--op", help="Of get, put, am, tag, look-up; or all.")] = "all",
    sizes: Annotated[
        str,
        typer.Option("--sizes", help=f"Block sizes, or ranges as 8:64MiB:x8. Default {_SIZES}.", show_default=False),
    ] = "",
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=1024, help="Blocks of a batched call; 1 = no such rows.")
    ] = 64,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, max=256, help="Calls or messages on their way; 1 = no such rows.")
    ] = 8,
    path: Annotated[
        str,
        typer.Option("--path", help=f"Of auto, mapped, rma, message, network. Default {_PATHS}.", show_default=False),
    ] = "",
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="Of ucxkv, ucx_perftest, ucxx, ucx-py, nixl, socket, memcpy. Default all; for a --server all but "
            "ucx_perftest, which listens on every interface.",
            show_default=False,
        ),
    ] = "",
    python: Annotated[
        list[str] | None, typer.Option("--python", metavar="NAME=PATH", help="Interpreter that has a backend.")
    ] = None,
    cache: Annotated[str, typer.Option("--cache", help="cold: more blocks than the cache holds; hot: few.")] = "cold",
    memory: Annotated[str, typer.Option("--memory", help="host, or cuda: GPU buffers where a backend can.")] = "host",
    quick: Annotated[bool, typer.Option("--quick", help="The whole matrix in under 3 minutes.")] = False,
    address: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            "-a",
            help="Measure this node (host:port), or a cluster (URL); may be repeated. Default: one "
            "that is started for the run.",
        ),
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="Be the other machine; see --connect.")] = False,
    connect: Annotated[
        str | None, typer.Option("--connect", metavar="HOST[:PORT]", help="Measure against that machine's --server.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw latency and bandwidth: FILE.png or FILE.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The tables as Markdown.")] = False,
    token_file: TokenFileOption = None,
) -> None:
    """Measure ucxkv beside UCX's own test and others. Without --address a node is started for the run and stopped.

    Two machines: `ucxkv perf --server HOST:PORT --token-file F` on one, `ucxkv perf --connect HOST:PORT --token-file F`
    on the other.
    """
    from ucxkv.cli.logs import log_to_stderr
    from ucxkv.client.opening import PATHS
    from ucxkv.config import token_from
    from ucxkv.errors import UsageError
    from ucxkv.perf.backends import BACKENDS, parse_interpreters
    from ucxkv.perf.link import parse_host
    from ucxkv.perf.plan import CACHES, MEMORIES, OPERATIONS, Plan, parse_names, parse_sizes

    log_to_stderr("warning", as_json=not sys.stderr.isatty())
    interpreters = parse_interpreters(python or [])
    token = token_from(token_file)
    if server:
        if connect is not None or plot is not None:
            raise UsageError("--server measures nothing itself: no --connect and no --plot with it")
        bound = ",".join(name for name in BACKENDS if name != "ucx_perftest")  # to one address; the rest on request
        served = parse_names("--backend", backend or bound, tuple(BACKENDS))
        where = parse_host("--server", listen or "127.0.0.1")
        asyncio.run(_serve(where, token, token_file, interpreters, served, address or []))
        return
    if listen is not None:
        raise UsageError(f"{listen!r}: a bare address is where a --server listens; see --connect and --address")
    if connect is not None and address:
        raise UsageError("--connect and --address: give the node's address to the --server instead")
    if as_json and as_markdown:
        raise UsageError("--json or --markdown, not both")
    for option, value, known in (("--cache", cache, CACHES), ("--memory", memory, MEMORIES)):
        if value not in known:
            raise UsageError(f"{option} {value!r}: use {' or '.join(known)}")
    far = parse_host("--connect", connect) if connect is not None else None
    plan = Plan(
        operations=parse_names("--op", op, OPERATIONS),
        sizes=parse_sizes(sizes or (_QUICK_SIZES if quick else _SIZES)),
        backends=parse_names("--backend", backend or "all", tuple(BACKENDS)),
        paths=parse_names("--path", path or (_FAR_PATHS if far and not far.is_loopback else _PATHS), PATHS),
        batch=batch,
        at_once=at_once,
        cache=cache,
        memory=memory,
        is_quick=quick,
    )
    _check_plot(plot)
    found, has_failed = asyncio.run(_measure(plan, far, address or [], token, token_file, interpreters))
    _show(found, as_json=as_json, as_markdown=as_markdown, plot=plot)
    if has_failed or not found["rows"]:
        raise typer.Exit(1)


def _check_plot(plot: Path | None) -> None:
    from ucxkv.errors import UsageError

    if plot is None:
        return
    if plot.suffix not in _PLOTS:
        raise UsageError(f"--plot {plot}: the name ends in {' or '.join(_PLOTS)}")
    from ucxkv.perf.plot import check_plot

    check_plot(plot)


def _show(found: dict[str, Any], *, as_json: bool, as_markdown: bool, plot: Path | None) -> None:
    from ucxkv.perf.report import markdown, print_tables

    if as_json:
        print(json.dumps(found))
    elif as_markdown:
        print(markdown(found), end="")
    else:
        print_tables(found)
    if plot is not None and found["rows"]:
        from ucxkv.perf.plot import draw

        draw(found, plot)


async def _measure(
    plan: Plan,
    far: TcpAddress | None,
    addresses: Sequence[str],
    token: str,
    token_file: Path | None,
    interpreters: Mapping[str, str],
) -> tuple[dict[str, Any], bool]:
    from ucxkv.perf.run import run_plan

    command = shlex.join(["ucxkv", *sys.argv[1:]])
    async with _side(far, addresses, token, token_file, interpreters) as side:
        return await run_plan(plan, side, token=token or None, interpreters=interpreters, command=command)


@contextlib.asynccontextmanager
async def _side(
    far: TcpAddress | None,
    addresses: Sequence[str],
    token: str,
    token_file: Path | None,
    interpreters: Mapping[str, str],
) -> AsyncIterator[Side]:
    from ucxkv.perf.link import RemoteSide
    from ucxkv.perf.sides import LocalSide

    if far is None:
        yield LocalSide("127.0.0.1", interpreters, token_file, addresses)
        return
    remote = await RemoteSide.connect(far, token)
    try:
        yield remote
    finally:
        await remote.aclose()


async def _serve(
    listen: TcpAddress,
    token: str,
    token_file: Path | None,
    interpreters: Mapping[str, str],
    backends: Sequence[str],
    nodes: Sequence[str],
) -> None:
    from ucxkv.perf.server import PerfServer

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await PerfServer.start(
        listen, token=token, token_file=token_file, interpreters=interpreters, backends=backends, nodes=nodes
    )
    try:
        print(json.dumps({"event": READY, "address": str(server.address), "backends": list(backends)}), flush=True)
        await stop.wait()
    finally:
        await server.aclose()
