"""Rows of ucxkv itself: get, put and look-up through `await` over each path of its client, and of the copy beside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucxkv.cli.measure import Copier, Series, anonymous_blocks, last_level_cache_bytes, row
from ucxkv.cli.workload import ROUNDS, Workload
from ucxkv.client.client import Client
from ucxkv.client.connecting import connect
from ucxkv.errors import IntegrityError, UcxKvError
from ucxkv.perf.peers.blocks import Pattern
from ucxkv.perf.plan import Plan, Shape
from ucxkv.perf.report import FAILED, UNABLE, Recorder
from ucxkv.perf.sides import Side, StartedNode, is_same_host
from ucxkv.perf.wires import wire_of
from ucxkv.sizes import short_size

__all__ = ["measure_copies", "measure_product", "product_steps"]

_ROUND_BYTES = 24 << 20  # moved in a round of one row
_CALLS_MAX = 400  # of a round
_CONNECT_S = 60.0  # also of each call: no healthy one meets it
_LOOK_UP_BYTES, _LOOK_UP_BLOCKS = 64, 8192
_NODE_BYTES_MIN = 1 << 30


def product_steps(plan: Plan) -> int:
    """How many steps `measure_product` tells."""
    moves = bool({"get", "put"} & set(plan.operations))
    sets = sum(len(_by_count(plan, size)) for size in plan.sizes) * moves
    return len(plan.paths) * (sets + ("look-up" in plan.operations))


def _calls(plan: Plan, nbytes: int, shape: Shape) -> int:
    """Calls of a round."""
    moves = max(8, min(_CALLS_MAX, _ROUND_BYTES // nbytes)) // (4 if plan.is_quick else 1)
    return max(shape.at_once if shape.at_once > 1 else 1, moves // shape.batch)


def _node_bytes(plan: Plan) -> int:
    cache = last_level_cache_bytes()
    sets = [
        size * plan.blocks(size, plan.fitted(size, shape), cache)
        for size in plan.sizes
        for operation in ("get", "put")
        for shape in plan.shapes(operation)
    ]
    return max(_NODE_BYTES_MIN, 4 * max(sets))


async def measure_product(plan: Plan, side: Side, token: str | None, recorder: Recorder) -> None:
    """Measure get, put and look-up on a node of `side`. A path that is not possible there becomes a notice."""
    node = await side.node(_node_bytes(plan))
    try:
        async with contextlib.AsyncExitStack() as clients:
            ways = await _open_ways(plan, side, node, token, recorder, clients)
            await _measure_ways(plan, ways, node, recorder)
    finally:
        await node.aclose()


async def _open_ways(
    plan: Plan,
    side: Side,
    node: StartedNode,
    token: str | None,
    recorder: Recorder,
    clients: contextlib.AsyncExitStack,
) -> list[_Way]:
    """A client for each path, those that come to the same once."""
    ways: dict[str, _Way] = {}
    for path in plan.paths:
        connecting = connect(*node.addresses, token=token, path=path, timeout_s=_CONNECT_S)
        try:
            kv = await clients.enter_async_context(connecting)
        except UcxKvError as exc:
            recorder.note("ucxkv", UNABLE, f"path {path}: {exc}")
            continue
        peer = kv.peers()[0]
        label = path if path == "network" else str(peer.path)
        fields = {"path": label, "wire": wire_of(label, is_same_host=is_same_host(side))}
        ways.setdefault(label, _Way(kv, {"backend": "ucxkv", **fields, "over": peer.why.partition(":")[0]}))
    return list(ways.values())


@dataclass(frozen=True, slots=True)
class _Way:
    """A connected client, and what its rows say of it."""

    kv: Client
    fields: dict[str, Any]


async def _measure_ways(plan: Plan, ways: list[_Way], node: StartedNode, recorder: Recorder) -> None:
    """Sizes, and each over every path before the next: what is compared is measured close together."""
    failed: set[str] = set()

    async def over_each(what: str, work: Callable[[_Way], Awaitable[None]]) -> None:
        for way in ways:
            path = way.fields["path"]
            recorder.step(f"ucxkv {path}: {what}")
            if path in failed:
                continue
            try:
                await work(way)
            except IntegrityError:
                raise
            except UcxKvError as exc:
                failed.add(path)
                recorder.note("ucxkv", FAILED, f"path {path}, {what}: {exc}")

    for size in plan.sizes if {"get", "put"} & set(plan.operations) else ():
        for count, shapes in _by_count(plan, size).items():
            copier = Copier(anonymous_blocks(count, size))
            try:

                async def moves(
                    way: _Way, size: int = size, shapes: list[Shape] = shapes, copier: Copier = copier
                ) -> None:
                    budget_s, count = plan.budget_s, len(copier.into)
                    work = Workload(way.kv, size, count=count, server_cpu=node.cpu_ns, budget_s=budget_s, copier=copier)
                    await _measure_shapes(plan, work, shapes, recorder, {**way.fields, "set_bytes": count * size})

                await over_each(f"blocks of {short_size(size)}", moves)
            finally:
                copier.close()
    if "look-up" in plan.operations:

        async def look_ups(way: _Way) -> None:
            blocks, budget_s = _LOOK_UP_BLOCKS, plan.budget_s
            work = Workload(way.kv, _LOOK_UP_BYTES, count=blocks, server_cpu=node.cpu_ns, budget_s=budget_s)
            await work.load()
            for shape in plan.shapes("look-up"):
                recorder.rows.append(
                    await work.look_up(shape.batch, _calls(plan, _LOOK_UP_BYTES, Shape()), **way.fields)
                )
            await work.unload()

        await over_each("look-ups", look_ups)


def _by_count(plan: Plan, size: int) -> dict[int, list[Shape]]:
    """Shapes by the number of blocks in their working set."""
    found: dict[int, list[Shape]] = {}
    for shape in plan.shapes("get"):
        fitted = plan.fitted(size, shape)
        found.setdefault(plan.blocks(size, fitted, last_level_cache_bytes()), []).append(fitted)
    return found


async def _measure_shapes(
    plan: Plan, work: Workload, shapes: list[Shape], recorder: Recorder, fields: dict[str, Any]
) -> None:
    if "put" in plan.operations:
        for shape in shapes:
            calls = max(2, _calls(plan, work.nbytes, shape) // 4)
            recorder.rows.append(await work.put_batch(shape.batch, calls, at_once=shape.at_once, **fields))
    if "get" in plan.operations:
        await work.load()
        for shape in shapes:
            calls = _calls(plan, work.nbytes, shape)
            if shape.batch > 1:
                recorder.rows.append(await work.get_batch(shape.batch, calls, **fields))
            else:
                recorder.rows.append(await work.get_single(calls, at_once=shape.at_once, **fields))
        await work.unload()


async def measure_copies(plan: Plan, recorder: Recorder) -> None:
    """Measure memcpy between a node's kind of memory and a client's: what bounds get and put on one host.

    In the event loop, so that no thread changes the figures; Ctrl-C is heard between two rows.
    """
    cache = last_level_cache_bytes()
    for size in plan.sizes:
        recorder.step(f"memcpy: blocks of {short_size(size)}")
        for operation in ("get", "put"):
            if operation not in plan.operations:
                continue
            for shape in plan.shapes(operation):
                if shape.at_once == 1:
                    fitted = plan.fitted(size, shape)
                    count = plan.blocks(size, fitted, cache)
                    recorder.rows.append(_copy_row(plan, operation, size, fitted, count))
                    await asyncio.sleep(0)


def _copy_row(plan: Plan, operation: str, size: int, shape: Shape, count: int) -> dict[str, Any]:
    into, pattern = anonymous_blocks(count, size), Pattern(size)
    copier = Copier(into)
    try:
        there = copier.shared if operation == "get" else into
        pattern.fill_all(there)
        copies = copier.copies_ns if operation == "get" else copier.backs_ns
        here = into if operation == "get" else copier.shared
        series, generator = Series(), np.random.default_rng(1)
        calls = max(1, min(_calls(plan, size, shape), count // shape.batch))
        for number in range(ROUNDS + 1):
            times = series.start_round()
            sources, targets = generator.permutation(count).tolist(), generator.permutation(count).tolist()
            lows = range(0, calls * shape.batch, shape.batch)
            for low in lows:
                times.append(copies(sources[low : low + shape.batch], targets[low : low + shape.batch]))
            moved = calls * shape.batch
            for source, target in zip(sources[:moved], targets[:moved], strict=True):
                if not pattern.matches(source, here[target]):
                    raise IntegrityError(f"a copied block of {size} bytes differs")
            if number == 0:
                series.clear()
        op = operation if shape.batch == 1 else f"{operation}_many"
        fields: dict[str, Any] = {
            "backend": "memcpy",
            "path": "copy",
            "wire": "copy",
            "over": "memory",
            "bytes": size,
            "set_bytes": count * size,
        }
        return row(
            "perf", op, series, nbytes=size * shape.batch, **fields, batch=shape.batch, concurrency=1, verified=True
        )
    finally:
        del there, here
        copier.close()
