"""`ucxkv node`: one node as a process.

Promises: logs go to stderr only; when the node is ready, exactly one line of JSON goes to stdout (READY); SIGTERM and
SIGINT stop it gracefully with exit code 0, or 1 where a drive does not answer any more, which is not waited for; with
--stop-with-stdin it also ends when whoever holds its standard input's other end is gone, even killed, and even when its
own event loop hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from ucxkv.node.config import NodeConfig

__all__ = ["READY", "forget", "node"]

READY = "node.ready"
_STOP_S = 10.0


def node(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with a table \\[node]; flags win.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Unique in the cluster; default: the host's name.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", help="host:port; port 0 takes a free one.")] = None,
    host_bytes: Annotated[str | None, typer.Option("--host-bytes", help="Memory for blocks: 1GiB, 512MiB.")] = None,
    huge_pages: Annotated[str | None, typer.Option("--huge-pages", help="auto, never or require.")] = None,
    numa: Annotated[str | None, typer.Option("--numa", help="auto, off or a NUMA node's number.")] = None,
    slots_count: Annotated[int | None, typer.Option("--slots-count", help="Most blocks held; 0 = by size.")] = None,
    durability: Annotated[
        str | None,
        typer.Option("--durability", help="What durable blocks survive: memory | process | power."),
    ] = None,
    state_dir: Annotated[
        str | None,
        typer.Option("--state-dir", help="Folder for the journal; needed unless durability is memory."),
    ] = None,
    disk: Annotated[
        list[str] | None, typer.Option("--disk", help="Folder for blocks that leave memory; repeatable, one a drive.")
    ] = None,
    disk_bytes: Annotated[str | None, typer.Option("--disk-bytes", help="Bytes in each of them: 64GiB.")] = None,
    disk_codec: Annotated[
        str | None, typer.Option("--disk-codec", help="How blocks are made smaller there: none, lossless or int8.")
    ] = None,
    disk_dtype: Annotated[
        str | None, typer.Option("--disk-dtype", help="Type of their elements, as bfloat16; codecs need it.")
    ] = None,
    disk_tokens: Annotated[
        int | None, typer.Option("--disk-tokens", help="Tokens that share a scale in int8; default 16.")
    ] = None,
    disk_channels: Annotated[
        int | None, typer.Option("--disk-channels", help="Length of blocks' last axis; int8 needs it.")
    ] = None,
    io_engine: Annotated[str | None, typer.Option("--io-engine", help="auto, io_uring or threads.")] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="What leaves memory first: tuc, s3fifo or lru.")
    ] = None,
    join: Annotated[list[str] | None, typer.Option("--join", help="Address of a node to join; repeatable.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Control plane: sqlite:///PATH or etcd://HOST:2379/NAME.")
    ] = None,
    cluster_lease_ms: Annotated[
        int | None, typer.Option("--cluster-lease-ms", help="Lease of the registration there.")
    ] = None,
    cluster_shards: Annotated[
        int | None, typer.Option("--cluster-shards", help="Shards of a cluster that this node makes.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Nodes that hold each shard of a cluster that this node makes.")
    ] = None,
    advertise: Annotated[str | None, typer.Option("--advertise", help="Address that others are told.")] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the shared token.")] = None,
    metrics_listen: Annotated[str | None, typer.Option("--metrics-listen", help="host:port for Prometheus.")] = None,
    data_port: Annotated[
        str | None, typer.Option("--data-port", help="Port or range first-last of the data service; 0 takes free ones.")
    ] = None,
    ucx_library: Annotated[str | None, typer.Option("--ucx-library", help="Path of the libucp.so.0 to use.")] = None,
    message_path: Annotated[
        bool | None, typer.Option("--message-path/--no-message-path", help="Serve over UCX messages too.")
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Logs as JSON lines; default when not a terminal.")
    ] = False,
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="End when standard input closes: dies with its parent.")
    ] = False,
) -> None:
    """Run one node until SIGTERM or Ctrl-C."""
    from ucxkv.cli.logs import log_to_stderr
    from ucxkv.config import node_config
    from ucxkv.errors import UsageError

    if log_level not in ("debug", "info", "warning", "error"):
        raise UsageError(f"--log-level {log_level!r}: use debug, info, warning or error")
    flags: dict[str, object] = {
        "name": name,
        "listen": listen,
        "host_bytes": host_bytes,
        "huge_pages": huge_pages,
        "numa": numa,
        "slots_count": slots_count,
        "durability": durability,
        "state_dir": state_dir,
        "disk": tuple(disk) if disk else None,
        "disk_bytes": disk_bytes,
        "disk_codec": disk_codec,
        "disk_dtype": disk_dtype,
        "disk_tokens": disk_tokens,
        "disk_channels": disk_channels,
        "io_engine": io_engine,
        "policy": policy,
        "join": tuple(join) if join else None,
        "cluster": cluster,
        "cluster_lease_ms": cluster_lease_ms,
        "cluster_shards": cluster_shards,
        "replicas": replicas,
        "advertise": advertise,
        "token_file": token_file,
        "data_port": data_port,
        "metrics_listen": metrics_listen,
        "ucx_library": ucx_library,
        "message_path": message_path,
    }
    settings = node_config(config, flags)
    log_to_stderr(log_level, log_json or not sys.stderr.isatty())
    if stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, name="stdin", daemon=True).start()
    with os.fdopen(os.dup(1), "w") as out, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        os.dup2(2, 1)  # libucp writes its warnings to standard output, which carries the READY line and nothing else
        runner.run(_serve(settings, out))


def forget(
    state_dir: Annotated[Path, typer.Argument(help="The folder that the node was given as --state-dir.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Delete what a stopped node keeps: its journal and its durable blocks' memory."""
    from ucxkv.node.state import forget as forget_state

    gone = forget_state(state_dir)
    print(json.dumps({"deleted": gone}) if as_json else "\n".join(f"deleted {path}" for path in gone))


async def _serve(config: NodeConfig, out: TextIO) -> None:
    """Run the node until it ends or a signal comes."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(_run(config, out))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _run(config: NodeConfig, out: TextIO) -> None:
    """The node from its start to its end. Cancelled it ends in good order, also while it waits for its name."""
    import ucxkv
    from ucxkv.node import Node

    node = Node(config)
    try:
        async with node as running:
            ready = {"event": READY, "name": config.name, "address": running.address, "pid": os.getpid()}
            print(json.dumps({**ready, "version": ucxkv.__version__}), file=out, flush=True)
            await running.serve_forever()
    finally:
        if node.disk is not None and node.disk.is_stuck:  # the loop would wait for it for ever, and said so
            if not isinstance(sys.exc_info()[1], asyncio.CancelledError | None):
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop when it is installed, else None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _stop_with_stdin() -> None:
    """Wait for the end of standard input, ask this process to stop, and end it when it has not within _STOP_S."""
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:
            break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os._exit(1)
