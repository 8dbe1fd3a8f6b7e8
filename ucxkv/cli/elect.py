"""`ucxkv elect`: give shards a leader whose last holders will not come back, and with it up what only they had."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from ucxkv.cli.options import JsonOption
from ucxkv.errors import UsageError

if TYPE_CHECKING:
    from ucxkv.control.cluster import ClusterView

__all__ = ["elect"]


def elect(
    cluster: Annotated[str, typer.Option("--cluster", help="Control plane: sqlite:///PATH or etcd://HOST:2379/NAME.")],
    shard: Annotated[list[int] | None, typer.Option("--shard", help="Only this one; repeatable. Default: all.")] = None,
    node: Annotated[str, typer.Option("--node", help="Who is to lead; default: the live nodes, in turn.")] = "",
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Durable blocks that only the missing nodes have are given up.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Let live nodes lead shards that have no live holder of all that was acknowledged.

    Such a shard waits for one of its holders to start again with its state folder: that is what to do first. When none
    of them can, this begins the shard anew with what its new leader has, which may be nothing.
    """
    done = asyncio.run(_elect(cluster, shard, node, accept_loss=accept_loss))
    if as_json:
        print(json.dumps({"elected": done}))
    elif not done:
        print("every shard has a live holder, or none ever had one: nothing to do")
    for number, leader in () if as_json else done.items():
        print(f"shard {number} is led by {leader}")


async def _elect(url: str, wanted: list[int] | None, node: str, *, accept_loss: bool) -> dict[int, str]:
    from ucxkv.control import open_control
    from ucxkv.control.cluster import Cluster
    from ucxkv.replication import Member, ShardConfig

    plane = await open_control(url, may_make=False)
    try:
        cluster = await Cluster.open(plane)
        view = await cluster.view()
        alive = sorted(Member(record.name, record.incarnation) for record in view.members)
        heirs = [member for member in alive if node in ("", member.name) and member.name not in view.draining]
        lost = _without_holder(view)
        if wanted is not None:
            for number in set(wanted) - lost.keys():
                raise UsageError(f"shard {number} has a live holder, or never had one: it needs no election")
            lost = {number: lost[number] for number in wanted}
        if not lost:
            return {}
        if not heirs:
            raise UsageError(f"no live node {node or 'at all'} to lead; members: {', '.join(m.name for m in alive)}")
        if not accept_loss:
            raise UsageError(
                f"{len(lost)} shards have no live holder; start one of those that have all of each: "
                + "; ".join(f"shard {number}: {' or '.join(sorted(names))}" for number, names in list(lost.items())[:8])
                + ". If none of them can come back: --accept-loss"
            )
        done = {}
        for at, number in enumerate(sorted(lost)):
            config, revision = view.shards[number]
            heir = heirs[at % len(heirs)]
            await cluster.set_shard(
                number, revision, ShardConfig(config.epoch + 1, heir, frozenset({heir}), config.keeps)
            )
            done[number] = heir.name
        return done
    finally:
        await plane.aclose()


def _without_holder(view: ClusterView) -> dict[int, set[str]]:
    """Shards of which no in-sync member lives, and these members' names."""
    alive = {(record.name, record.incarnation) for record in view.members}
    return {
        number: {member.name for member in config.insync}
        for number, (config, _) in view.shards.items()
        if alive.isdisjoint(config.insync)
    }
