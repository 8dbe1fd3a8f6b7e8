"""`ucxkv doctor`: what this host offers to ucxkv, what the rest costs, and the command that mends each."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ucxkv.cli.options import JsonOption

__all__ = ["doctor"]

_STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}


def doctor(
    as_json: JsonOption = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 on warnings too.")] = False,
) -> None:
    """Check this host. Exit code 1 when ucxkv cannot run here (with --strict: on any warning)."""
    from ucxkv.cli.checks import Host, State, check_host
    from ucxkv.cli.probes import PROBES

    findings = check_host(Host(PROBES))
    if as_json:
        for item in findings:
            fields = {
                "name": item.name,
                "state": item.state.value,
                "found": item.found,
                "cost": item.cost,
                "fix": item.fix,
            }
            print(json.dumps(fields))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console()
        for item in findings:
            style = _STYLES[item.state.value]
            console.print(
                Text(f"{item.state.value:<5}", style=style) + Text(f"{item.name}: ", style="bold") + Text(item.found)
            )
            if item.cost:
                console.print(Text(f"        costs  {item.cost}", style="dim"))
            if item.fix and item.state is not State.OK:
                console.print(Text(f"        fix    {item.fix}"))
        counts = {state: sum(item.state is state for item in findings) for state in State}
        console.print(f"{counts[State.FAIL]} failed, {counts[State.WARN]} warnings")
    bad = {State.FAIL, State.WARN} if strict else {State.FAIL}
    if any(item.state in bad for item in findings):
        raise typer.Exit(1)
