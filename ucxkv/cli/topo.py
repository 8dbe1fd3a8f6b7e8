"""`ucxkv topo`: what is near what in this machine, what a worker at each place would use, and recordings of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucxkv.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import Console

    from ucxkv.transport.rails import RailChoice
    from ucxkv.transport.topology import Topology

__all__ = ["report", "topo"]

_LEGEND = (
    ("X", "dim", "the device itself"),
    ("NV#", "bold green", "# NVLinks between two GPUs"),
    ("PIX", "green", "at most one PCIe bridge between them (one switch)"),
    ("PXB", "green", "several PCIe bridges, no host bridge"),
    ("PHB", "yellow", "through a PCIe host bridge (the CPU's own lanes)"),
    ("NODE", "yellow", "through two host bridges of one NUMA node"),
    ("SYS", "red", "through the link between NUMA nodes (or unknown)"),
)
_STYLES = {name: style for name, style, _ in _LEGEND}


def topo(
    as_json: JsonOption = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write what was read to DIR/topology.json, addresses made up.")
    ] = None,
    root: Annotated[
        Path, typer.Option("--root", help="Another machine: a recording, or a folder with its sys/ in it.")
    ] = Path("/"),
    max_rails: Annotated[int, typer.Option("--max-rails", min=1, help="Rails of equal rank for one worker.")] = 2,
) -> None:
    """Show GPUs, RDMA ports and interfaces, how far apart they are, and what a worker near each would use."""
    from ucxkv.errors import SetupError, UsageError
    from ucxkv.transport.base import SetupFailed
    from ucxkv.transport.recording import record_machine
    from ucxkv.transport.sysfs import open_tree
    from ucxkv.transport.topology import read_topology

    try:
        tree = open_tree(root)
    except SetupFailed as exc:
        raise SetupError(str(exc)) from exc
    if record is not None:
        try:
            path = record_machine(tree, record)
        except OSError as exc:
            raise UsageError(f"{record}: {exc.strerror}") from exc
        print(json.dumps({"recorded": str(path)}) if as_json else f"recorded: {path}")
        return
    topology = read_topology(tree)
    if as_json:
        print(json.dumps(report(topology, max_rails)))
        return
    from rich.console import Console

    console = Console()
    _print_matrix(console, topology)
    _print_choices(console, topology, max_rails)


def report(topology: Topology, max_rails: int = 2) -> dict[str, Any]:
    """All of it as values that JSON can hold: the machine, the matrix, the choices, the placement of a node."""
    from ucxkv.transport.affinity import placement_for_node
    from ucxkv.transport.topology import matrix

    names, cells = matrix(topology)
    return {
        **dataclasses.asdict(topology),
        "matrix": {a: dict(zip(names, row, strict=True)) for a, row in zip(names, cells, strict=True)},
        "choices": [
            {
                **dataclasses.asdict(choice),
                "apart": choice.apart.name if choice.apart is not None else None,
                "net_devices": choice.net_devices,
            }
            for choice in _choices(topology, max_rails)
        ],
        "node_placement": dataclasses.asdict(placement_for_node(topology)),
    }


def _choices(topology: Topology, max_rails: int) -> list[RailChoice]:
    """One a GPU and one a NUMA node that has CPUs."""
    from ucxkv.transport.rails import choose_rails

    places = [f"gpu{gpu.index}" for gpu in topology.gpus]
    places += [f"numa{node.index}" for node in topology.numa if node.cpus]
    return [choose_rails(topology, near, max_rails) for near in places]


def _print_matrix(console: Console, topology: Topology) -> None:
    """The matrix as `nvidia-smi topo -m` prints it, a line about each device, and the legend."""
    from rich.text import Text

    from ucxkv.transport.topology import matrix

    names, cells = matrix(topology)
    first = max((len(name) for name in names), default=0)
    widths = [max(len(name), 4) + 1 for name in names]
    rows = [Text(" " * (first + 1)).append("".join(f"{n:<{w}}" for n, w in zip(names, widths, strict=True)) + "NUMA")]
    for name, row in zip(names, cells, strict=True):
        line = Text(f"{name:<{first + 1}}", style="bold")
        for cell, width in zip(row, widths, strict=True):
            line.append(f"{cell:<{width}}", style=f"not bold {_STYLES['NV#' if cell.startswith('NV') else cell]}")
        numa = topology.place(name).numa
        rows.append(line.append(str(numa) if numa >= 0 else "?", style="not bold"))
    for line in rows if names else [Text("no GPU, RDMA device or network interface")]:
        console.print(line, soft_wrap=True)  # a wide machine's lines are left to the terminal, nothing is cut
    console.print()
    for name, words in _descriptions(topology):
        console.print(Text.assemble((f"{name:<10} ", "bold"), words), soft_wrap=True)
    shown = {"NV#" if cell.startswith("NV") else cell for row in cells for cell in row} - {"X"}
    if shown:
        console.print()
        for name, style, words in _LEGEND:
            if name in shown:
                console.print(Text.assemble((f"{name:<10} ", style), (words, "dim")))


def _descriptions(topology: Topology) -> list[tuple[str, str]]:
    """Each device's name and what it is, in the matrix' order, then the NUMA nodes."""
    from ucxkv.sizes import short_size

    found = []
    for gpu in topology.gpus:
        memory = f", {short_size(gpu.memory_bytes)}" if gpu.memory_bytes else ", no driver answered"
        found.append((f"gpu{gpu.index}", f"{gpu.name}{memory}, {gpu.place.address}"))
    for device in topology.rdma:
        for port in device.ports:
            gid = port.gid
            chosen = f", GID {port.gid_index} ({gid.kind})" if gid is not None else ""
            over = f", {', '.join(device.interfaces)}" if device.interfaces else ""
            soft = ", in software" if device.is_soft else ""
            words = f"{port.link_layer}, {port.state}, {port.rate_text}{chosen}{over}{soft}"
            found.append((f"{device.name}:{port.number}", words))
    names = set(topology.names())
    for interface in topology.interfaces:
        if interface.name in names:
            speed = f"{interface.speed_gbps:g} Gb/s" if interface.speed_gbps else "speed unknown"
            kind = "virtual interface" if interface.is_virtual else "interface"
            state = "up" if interface.is_up else "down"
            found.append((interface.name, f"{kind}, {state}, {speed}, MTU {interface.mtu}"))
    for node in topology.numa:
        memory = short_size(node.memory_bytes) if node.memory_bytes else "memory unknown"
        found.append((f"numa{node.index}", f"{len(node.cpus)} CPUs, {memory}"))
    return found


def _print_choices(console: Console, topology: Topology, max_rails: int) -> None:
    """What a worker near each place would use, and where a node would put its memory."""
    from rich.text import Text

    from ucxkv.transport.affinity import placement_for_node

    console.print()
    for choice in _choices(topology, max_rails):
        line = Text.assemble(
            (f"near {choice.near:<6} ", "bold"), (choice.net_devices, "cyan"), (f"  {choice.why}", "dim")
        )
        console.print(line, soft_wrap=True)
    placed = placement_for_node(topology)
    where = f"memory and data thread on NUMA node {placed.numa}" if placed.numa is not None else "no placement"
    console.print(Text.assemble(("a node      ", "bold"), where, (f"  {placed.why}", "dim")), soft_wrap=True)
