"""`ucxkv drain`: move what a node holds of a cluster to the others, so that it can be stopped and nothing is lost."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ucxkv.cli.options import JsonOption
from ucxkv.errors import DeadlineExceeded, UsageError

if TYPE_CHECKING:
    from ucxkv.control.cluster import ClusterView

__all__ = ["drain"]

_POLL_S = 0.2


def drain(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    cluster: Annotated[str, typer.Option("--cluster", help="Control plane: sqlite:///PATH or etcd://HOST:2379/NAME.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it hold shards again.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait until it holds nothing.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Move all shards and durable blocks of NODE to other nodes, and wait until it holds none.

    It serves meanwhile, and may be stopped then. Blocks of class cache are not moved: they are put anew elsewhere.
    """
    left = asyncio.run(_drain(cluster, node, is_draining=not undo, timeout_s=timeout))
    if as_json:
        print(json.dumps({"node": node, "draining": not undo, "shards_left": left}))
    else:
        print(f"{node} may hold shards again" if undo else f"{node} holds no shard")


async def _drain(url: str, node: str, *, is_draining: bool, timeout_s: float) -> int:
    from ucxkv.control import open_control
    from ucxkv.control.cluster import Cluster

    until = time.monotonic() + timeout_s
    plane = await open_control(url, may_make=False)
    try:
        cluster = await Cluster.open(plane)
        view = await cluster.view()
        names = {record.name for record in view.members}
        if is_draining and node not in names and not _held(view, node):
            raise UsageError(f"there is no node {node} in this cluster; members: {_listed(names)}")
        if is_draining and not names - view.draining - {node}:
            raise UsageError(f"no node is left to take what {node} holds; members: {_listed(names)}")
        await cluster.set_draining(node, f"{getpass.getuser()}@{socket.gethostname()}", is_draining=is_draining)
        if not is_draining:
            return _held(view, node)
        while (left := _held(view := await cluster.view(), node)) and node in {r.name for r in view.members}:
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"{node} still holds {left} shards; moving goes on: ask again, or look at the nodes' logs"
                )
            await asyncio.sleep(_POLL_S)
        return left
    finally:
        await plane.aclose()


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _held(view: ClusterView, node: str) -> int:
    return sum(any(member.name == node for member in config.insync) for config, _ in view.shards.values())
