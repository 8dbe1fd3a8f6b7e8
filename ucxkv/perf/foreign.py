"""Rows of the backends that run in processes of their own: a server on `side`, a client here, task by task."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ucxkv.cli.measure import Series, last_level_cache_bytes, row
from ucxkv.errors import IntegrityError, UcxKvError
from ucxkv.perf.backends import BACKENDS, Backend, find_perftest
from ucxkv.perf.peers.base import Result, Task
from ucxkv.perf.plan import Plan, Shape, row_name
from ucxkv.perf.process import Missing, Worker
from ucxkv.perf.report import FAILED, MISSING, Recorder
from ucxkv.perf.sides import Side, StartedServer
from ucxkv.perf.wires import environment
from ucxkv.sizes import short_size

__all__ = ["foreign_steps", "measure_foreign"]

_START_S = 60.0
_TASK_S = 60.0
_BATCH_S = 180.0


def _groups(plan: Plan, backend: Backend) -> list[tuple[str, list[tuple[Shape, Task]]]]:
    """Tasks that are asked for in one request, with what is told of them: all of an operation for a tool, else one."""
    found = []
    for operation in plan.operations:
        if operation not in backend.operations or (backend.name == "ucxkv" and operation != "am"):
            continue  # ucxkv's get, put and look-up are the product's own calls
        tasks = _tasks(plan, backend, operation)
        if backend.is_tool:
            found.append((operation, tasks))
        else:
            found += [(f"{row_name(operation, task[0])} of {short_size(task[1].nbytes)}", [task]) for task in tasks]
    return found


def _tasks(plan: Plan, backend: Backend, operation: str) -> list[tuple[Shape, Task]]:
    cache, found = last_level_cache_bytes(), []
    budget_s = plan.budget_s / (4 if backend.is_tool else 1)  # a tool repeats without our pauses
    for shape in plan.shapes(operation):
        if (shape.batch > 1 and not backend.has_batches) or (shape.at_once > 1 and not backend.has_at_once):
            continue
        for size in plan.sizes:
            fitted = plan.fitted(size, shape)
            count = plan.blocks(size, fitted, cache)
            found.append((fitted, Task(operation, size, fitted.batch, fitted.at_once, count, budget_s)))
    return found


def foreign_steps(plan: Plan, name: str) -> int:
    """How many steps `measure_foreign` tells for one wire."""
    return len(_groups(plan, BACKENDS[name]))


async def measure_foreign(
    plan: Plan, name: str, wire: str, side: Side, interpreters: Mapping[str, str], recorder: Recorder
) -> None:
    """Measure one backend over one wire. A missing or failing backend becomes a notice; wrong bytes are raised."""
    backend = BACKENDS[name]
    groups = _groups(plan, backend)
    over = recorder.steps_count + len(groups)
    if not groups:
        return
    try:
        server = await side.start(name, wire, plan.memory)
        try:
            await _measure(plan, backend, wire, side, server, interpreters, groups, recorder)
        finally:
            await server.aclose()
    except IntegrityError:
        raise
    except Missing as exc:
        why = exc.message.removeprefix(f"{name}: ")
        recorder.note(name, MISSING, f"not installed: {backend.how} ({why})" if exc.is_installable else why)
    except UcxKvError as exc:
        recorder.note(name, FAILED, f"over {wire}: {exc}")
    recorder.steps_count = over


async def _measure(
    plan: Plan,
    backend: Backend,
    wire: str,
    side: Side,
    server: StartedServer,
    interpreters: Mapping[str, str],
    groups: list[tuple[str, list[tuple[Shape, Task]]]],
    recorder: Recorder,
) -> None:
    async def answer(question: dict[str, Any]) -> Any:
        return await (server.cpu_ns() if "cpu" in question else server.ask(question["ask"]))

    config = {"backend": backend.name, "wire": wire, "host": side.host, "memory": plan.memory, "tool": find_perftest()}
    variables = environment(backend.name, wire, side.host)
    own = os.environ.get("UCX_TLS", "UCX's choice")
    client = await Worker.spawn(backend, interpreters, variables)
    try:
        start = {"start": config, "server": server.ready}
        await client.request(start, seconds=_START_S, question=answer)
        for label, tasks in groups:
            recorder.step(f"{backend.name} {wire}: {label}")
            message = {"measure": [dataclasses.asdict(task) for _, task in tasks]}
            seconds = _TASK_S if len(tasks) == 1 else _BATCH_S
            said = await client.request(message, seconds=seconds, question=answer)
            over = said["facts"].pop("transports", "") or variables.get("UCX_TLS", own)
            fields = {"backend": backend.name, "path": wire, "wire": wire, "over": over}
            recorder.versions[backend.name] = said["facts"]
            for (shape, task), plain in zip(tasks, said["results"], strict=True):
                recorder.rows.append(_row(shape, task, Result(**plain), fields))
    finally:
        await client.aclose()


def _row(shape: Shape, task: Task, result: Result, fields: dict[str, Any]) -> dict[str, Any]:
    op = row_name(task.op, shape)
    known: dict[str, Any] = {
        "bytes": task.nbytes,
        "batch": shape.batch,
        "concurrency": shape.at_once,
        "verified": result.verified,
    }
    if not result.rounds:  # a tool's own figures
        figures = {
            "p50_us": round(result.p50_us, 3),
            "gbps": round(result.gbps, 3 if result.gbps > 0.1 else 6),
            "samples": result.samples,
        }
        return {"bench": "perf", "op": op, **fields, **known, "set_bytes": task.nbytes, **figures}
    series = Series(result.rounds, 0, result.cpu_client_ns, result.cpu_server_ns)
    if shape.at_once > 1:
        series.wall_ns = result.wall_ns
    known["set_bytes"] = task.count * task.nbytes
    found = row("perf", op, series, nbytes=task.nbytes * shape.batch, **fields, **known)
    if result.is_stream:
        del found["p99_us"]
    return found
