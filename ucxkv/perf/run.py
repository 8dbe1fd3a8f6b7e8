"""One run: every backend of a plan, one after the other, into a report. What is missing is noted, never fatal."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ucxkv
from ucxkv.cli.measure import Conditions
from ucxkv.errors import SetupError
from ucxkv.perf.backends import BACKENDS
from ucxkv.perf.foreign import foreign_steps, measure_foreign
from ucxkv.perf.machine import machine_facts
from ucxkv.perf.peers.device import why_no_device
from ucxkv.perf.plan import Plan
from ucxkv.perf.product import measure_copies, measure_product, product_steps
from ucxkv.perf.report import UNABLE, Recorder, report
from ucxkv.perf.sides import Side, is_same_host
from ucxkv.perf.wires import wire_of

__all__ = ["run_plan"]


def _wires(plan: Plan, side: Side) -> list[str]:
    """What UCX travels over beside the plan's paths."""
    return list(dict.fromkeys(wire_of(path, is_same_host=is_same_host(side)) for path in plan.paths))


async def run_plan(
    plan: Plan, side: Side, *, token: str | None, interpreters: Mapping[str, str], command: str
) -> tuple[dict[str, Any], bool]:
    """Measure; the report (see report) and whether a backend failed. token: None = the environment's.

    Raises SetupError (no CUDA device for memory "cuda", a node that does not start), Unavailable (the other machine is
    gone), IntegrityError (bytes differ: there is no report then).
    """
    if plan.memory == "cuda" and (why := why_no_device()):
        raise SetupError("--memory cuda", found=why, needed="a CUDA device that torch or cupy can use")
    wires = _wires(plan, side)
    foreign = [name for name in plan.backends if BACKENDS[name].module and foreign_steps(plan, name)]
    steps = sum(foreign_steps(plan, name) for name in foreign) * len(wires)
    measures_product = "ucxkv" in plan.backends and bool(product_steps(plan))
    measures_copies = "memcpy" in plan.backends and bool({"get", "put"} & set(plan.operations))
    steps += product_steps(plan) * measures_product + len(plan.sizes) * measures_copies
    conditions, machine = Conditions(), machine_facts()
    server = await side.facts() if side.is_remote else None
    with _recording(steps) as recorder:
        if measures_copies and not _host_only(plan, "memcpy", recorder):
            await measure_copies(plan, recorder)
        if measures_product and not _host_only(plan, "ucxkv", recorder):
            over = recorder.steps_count + product_steps(plan)
            await measure_product(plan, side, token, recorder)
            recorder.steps_count = over
        for name in foreign:
            gc.collect()
            for wire in wires:
                await measure_foreign(plan, name, wire, side, interpreters, recorder)
    load = {name: value for name, value in conditions.report().items() if name in ("other_cpus", "stolen_cpus")}
    facts = {"ucxkv": ucxkv.__version__, "command": command, "machine": machine, "server": server, "conditions": load}
    return report(recorder, **facts), recorder.has_failed


def _host_only(plan: Plan, name: str, recorder: Recorder) -> bool:
    if plan.memory == "host":
        return False
    recorder.note(name, UNABLE, "host memory only in this version")
    return True


@contextlib.contextmanager
def _recording(steps: int) -> Iterator[Recorder]:
    """A recorder that shows its steps on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not sys.stderr.isatty(), transient=True, refresh_per_second=4
    ) as bar:
        task = bar.add_task("starting", total=steps)

        def on_step(what: str, steps: int) -> None:
            bar.update(task, description=what, completed=steps)

        yield Recorder(on_step)
