"""`ucxkv status | put | get | ls | rm`: a client of running nodes, for people and shell scripts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ucxkv.cli.options import (
    AddressOption,
    JsonOption,
    PathOption,
    TimeoutOption,
    TokenFileOption,
    connected,
    opened,
    parse_key,
)
from ucxkv.sizes import short_size

if TYPE_CHECKING:
    from ucxkv.client.results import ConnectionInfo, KeyInfo, NodeStatus

__all__ = ["get", "ls", "put", "rm", "status"]

_TIERS = ("gpu", "host", "nvme")


def status(
    peers: Annotated[
        bool, typer.Option("--peers", help="Instead: who is connected to each node, by which path, and why.")
    ] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Show each node: blocks, bytes, leases, clients, evictions. This command is one of the clients."""
    if peers:
        _peers(address, token_file, timeout, path, as_json)
        return

    async def ask() -> list[NodeStatus]:
        async with connected(address, token_file, timeout, path) as kv:
            found: list[NodeStatus] = await kv.status()
            return found

    nodes = asyncio.run(ask())
    if as_json:
        for node in nodes:
            fields = {"name": node.name, "address": node.address, "version": node.version, "epoch": node.epoch}
            print(json.dumps({**fields, "uptime_s": round(node.uptime_s, 3), **node.numbers, "facts": node.facts}))
        return
    _print_status(nodes)


def _peers(address: list[str] | None, token_file: Path | None, timeout: float, path: str | None, as_json: bool) -> None:
    async def ask() -> list[ConnectionInfo]:
        async with connected(address, token_file, timeout, path) as kv:
            found: list[ConnectionInfo] = await kv.connections()
            return found

    found = asyncio.run(ask())
    if as_json:
        for connection in found:
            print(json.dumps(dataclasses.asdict(connection)))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("node", "peer", "role", "host", "path", "way", "why"):
        table.add_column(heading, overflow="fold")
    for c in found:
        words = (c.node, c.name, c.role, "same" if c.is_local else "other", c.path, c.way, c.why)
        table.add_row(*map(Text, words))
    Console().print(table)


def _print_status(nodes: list[NodeStatus]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("node", "address", "up", "blocks", "used", "free", "leases", "clients", "evicted"):
        is_text = heading in ("node", "address")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=heading != "node")
    for node in nodes:
        number = node.numbers.get
        table.add_row(
            node.name,
            node.address,
            f"{node.uptime_s:.0f} s",
            f"{number('blocks', 0):.0f}",
            short_size(number("used_bytes", 0)),
            short_size(number("free_bytes", 0)),
            f"{number('leases', 0):.0f}",
            f"{number('connections', 0):.0f}",
            f"{number('evicted', 0):.0f}",
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe or a file has no edge to fold addresses at
    console.print(table)
    if any("cluster" in node.facts for node in nodes):
        members = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for heading in ("node", "incarnation", "cluster lease", "members seen"):
            members.add_column(heading, justify="left" if heading == "node" else "right", overflow="fold")
        for node in nodes:
            incarnation, seen = (f"{node.numbers.get(name, 0):.0f}" for name in ("incarnation", "cluster_members"))
            members.add_row(node.name, incarnation, _lease_left(node), seen)
        console.print(members)
    for node in nodes:
        facts = ", ".join(f"{name} {value}" for name, value in node.facts.items())
        console.print(f"{node.name}: ucxkv {node.version}, {facts}", style="dim", markup=False)


def _lease_left(node: NodeStatus) -> str:
    left_s = node.numbers.get("cluster_lease_s", 0)
    return f"{left_s:.1f} s" if left_s else "lost" if "cluster" in node.facts else "no cluster"


def put(
    key: Annotated[str, typer.Argument(help="32 hexadecimal digits, or name:TEXT.")],
    file: Annotated[Path, typer.Argument(help="File whose bytes to store; - reads standard input.")] = Path("-"),
    parent: Annotated[str | None, typer.Option("--parent", help="Key of the block before it; default: a root.")] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Keep it when the node's process ends; not evicted.")
    ] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Store a file's bytes as one block. Exit code 1 when the block was refused."""
    from ucxkv.errors import UsageError

    try:
        value = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror}") from exc

    own, before = parse_key(key), parse_key(parent) if parent else None

    async def store() -> tuple[str, bool]:
        async with connected(address, token_file, timeout, path) as kv:
            status = await kv.put(own, value, parent=before, durable=durable)
            return status.name, status.name in ("STORED", "ALREADY")

    name, stored = asyncio.run(store())
    if as_json:
        print(json.dumps({"key": own.hex(), "bytes": len(value), "status": name}))
    else:
        print(f"{own.hex()} {name} {len(value)} bytes")
    if not stored:
        raise typer.Exit(1)


def get(
    key: Annotated[str, typer.Argument(help="32 hexadecimal digits, or name:TEXT.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; - is standard output.")] = Path("-"),
    address: AddressOption = None,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Write a block's bytes to a file or standard output. Exit code 1 on a miss."""

    own = parse_key(key)

    async def fetch() -> bytes | None:
        async with connected(address, token_file, timeout, path) as kv:
            found: bytes | None = await kv.get(own)
            return found

    value = asyncio.run(fetch())
    if value is None:
        print(f"ucxkv: {own.hex()} is not stored", file=sys.stderr)
        raise typer.Exit(1)
    if str(output) == "-":
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    else:
        with opened(output) as file:
            file.write(value)
        print(f"{own.hex()} {len(value)} bytes, sum verified, written to {output}", file=sys.stderr)


def ls(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many keys.")] = 1000,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """List the visible blocks: key, bytes, tier, parts, node."""

    async def ask() -> list[KeyInfo]:
        async with connected(address, token_file, timeout, path) as kv:
            found: list[KeyInfo] = await kv.list_keys(limit=limit)
            return found

    found = asyncio.run(ask())
    for info in found:
        tier = _TIERS[info.tier]
        if as_json:
            fields = {"key": info.key.hex(), "bytes": info.nbytes, "tier": tier, "parts": info.parts, "node": info.node}
            print(json.dumps(fields))
        else:
            print(f"{info.key.hex()}  {info.nbytes:>12}  {tier:<4}  {info.parts:>2}  {info.node}")
    if len(found) >= limit and not as_json:
        print(f"(the first {limit}; --limit shows more)", file=sys.stderr)


def rm(
    keys: Annotated[list[str], typer.Argument(help="32 hexadecimal digits, or name:TEXT; several.")],
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Delete blocks. A block stays while it has children that are not deleted too. Exit code 1 if any stayed."""

    own = [parse_key(key) for key in keys]

    async def delete() -> list[int]:
        async with connected(address, token_file, timeout, path) as kv:
            return [int(value) for value in await kv.delete(own)]

    from ucxkv.client.results import DeleteStatus

    statuses = [DeleteStatus(value).name for value in asyncio.run(delete())]
    for key, name in zip(keys, statuses, strict=True):
        print(
            json.dumps({"key": parse_key(key).hex(), "status": name}) if as_json else f"{parse_key(key).hex()} {name}"
        )
    if any(name != "DELETED" for name in statuses):
        raise typer.Exit(1)
