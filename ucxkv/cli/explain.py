"""`ucxkv explain`: whether a block is stored, in which tier and why, and what befell it last."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from ucxkv.cli.options import (
    AddressOption,
    JsonOption,
    PathOption,
    TimeoutOption,
    TokenFileOption,
    connected,
    parse_key,
)
from ucxkv.sizes import short_size

if TYPE_CHECKING:
    from ucxkv.client.explaining import Explanation

__all__ = ["explain"]


def explain(
    key: Annotated[str, typer.Argument(help="32 hexadecimal digits, or name:TEXT.")],
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Say where a block is and why, and what befell it last. Exit code 1 when no node knows of it."""
    own = parse_key(key)

    async def ask() -> list[Explanation]:
        async with connected(address, token_file, timeout, path) as kv:
            found: list[Explanation] = await kv.explain(own)
            return found

    found = asyncio.run(ask())
    known = [one for one in found if one.is_known]
    for one in found if as_json else known or found:
        if as_json:
            print(json.dumps({"key": own.hex(), **dataclasses.asdict(one), "why": one.why}))
        else:
            _print(one)
    if not known:
        raise typer.Exit(1)


def _print(one: Explanation) -> None:
    print(f"{one.node}: {one.why}")
    if one.tier:
        facts = [short_size(one.nbytes), f"policy {one.policy}"]
        facts += [f"{one.parts} parts"] if one.parts > 1 else []
        facts += [f"depth {one.depth}", f"uses {one.uses}"] if one.policy != "lru" else []
        facts += [f"hazard {one.hazard:.3g}/s", f"a hit saves {one.gain_s:.3g} s"] if one.hazard else []
        print(f"  {', '.join(facts)}")
    for past in one.decisions:
        print(f"  {past}")
