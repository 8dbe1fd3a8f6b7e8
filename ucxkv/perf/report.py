"""What a run found: rows, notices and facts; as one JSON object or as tables.

The JSON object's keys: `ucxkv` (version), `command`, `machine` and `server` (facts of this machine and of the one that
was asked; server is null when it is the same), `conditions` (load of others during the run), `backends` (versions by
name), `notices` (backends that are missing, unable or failed: backend, state, text) and `rows`. A row's keys:

backend, op          who, and what: get, put, am, tag (one at a time), get_many, put_many (`batch` blocks a call),
                     am_stream, tag_stream (`concurrency` messages on their way), look_up, look_up_many
path, wire, over     of ucxkv's client (mapped, rma, message, network), or as `wire`; what is below it: shm (this host's
                     shared memory), net, copy; the transports by name
bytes, batch, concurrency   size of a block, blocks of a call, calls on their way
set_bytes            the working set: what lies in the cache is faster
p50_us, p99_us       of one call; for am and tag half of a round trip; for a stream, and for ucx_perftest with several
                     on their way, the time of all divided by their number
spread, samples      (largest - smallest) / median of the rounds' medians; calls measured
gbps, keys_s         10^9 bytes a second; keys a second
cpu_client_s_per_gb, cpu_server_s_per_gb, cpu_s_per_gb     CPU seconds of each side, and of both, for 10^9 bytes
limit_name, limit_us, limit_gbps, ratio     the copy of the same blocks, in turns with the row; measured / limit
verified             whether every byte was compared with what was sent
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ucxkv.perf.backends import BACKENDS
from ucxkv.sizes import short_size

__all__ = ["Notice", "Recorder", "fit_columns", "markdown", "print_tables", "remarks", "report", "tables"]

Row = dict[str, Any]

MISSING, UNABLE, FAILED = "missing", "unable", "failed"
_SINGLE = ("get", "put", "am", "tag")


@dataclass(frozen=True, slots=True)
class Notice:
    """Why rows are absent. state: "missing" (not installed), "unable" (cannot do it), "failed"."""

    backend: str
    state: str
    text: str


@dataclass
class Recorder:
    """Rows and notices as they come. on_step is told what is measured now, and how many steps of the plan are over."""

    on_step: Callable[[str, int], None]
    rows: list[Row] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    versions: dict[str, Row] = field(default_factory=dict)
    """What each backend says of itself: its version, that of its UCX, the tool's path."""
    steps_count: int = 0

    def step(self, what: str) -> None:
        """The next step of the plan begins."""
        self.on_step(what, self.steps_count)
        self.steps_count += 1

    def note(self, backend: str, state: str, text: str) -> None:
        """Say why rows are absent, once."""
        notice = Notice(backend, state, text)
        if notice not in self.notices:
            self.notices.append(notice)

    @property
    def has_failed(self) -> bool:
        """Whether something ended that should not."""
        return any(notice.state == FAILED for notice in self.notices)


def report(recorder: Recorder, **facts: Any) -> Row:
    """The JSON object; see the module for its keys."""
    notices = [{"backend": each.backend, "state": each.state, "text": each.text} for each in recorder.notices]
    return {**facts, "backends": recorder.versions, "notices": notices, "rows": recorder.rows}


# ---- tables


@dataclass(frozen=True)
class _Table:
    title: str
    op: str
    at_once: bool
    cell: Callable[[Row], str]
    last: bool = False


def _latency(row: Row) -> str:
    p50, p99 = row["p50_us"], row.get("p99_us")
    return f"{_short(p50)}" if p99 is None else f"{_short(p50)} / {_short(p99)}"


def _rate(row: Row) -> str:
    return _short(row["gbps"]) if "gbps" in row else ""


def _cpu(row: Row) -> str:
    client, server = row.get("cpu_client_s_per_gb"), row.get("cpu_server_s_per_gb")
    if client is None or row["bytes"] < _CPU_FROM_BYTES:
        return ""
    return f"{_short(client)} + {'?' if server is None else _short(server)}"


_CPU_FROM_BYTES = 4096  # below, seconds a GB say nothing


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def tables(rows: list[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, lines) for what there are rows of: sizes downwards, backends and paths across."""
    found = []
    for op in _SINGLE:
        single = [row for row in rows if row["op"] == op and row["concurrency"] == 1]
        half = ", half a round trip" if op in ("am", "tag") else ""
        found.append(_pivot(f"{op}, one at a time{half}: p50 / p99, us", single, _latency))
    for op in _SINGLE:
        many = [row for row in rows if row["op"] == f"{op}_many"]
        found.append(_pivot(f"{op} of many blocks a call: GB/s", many, _rate))
        at_once = [row for row in rows if row["op"] in (op, f"{op}_stream") and row["concurrency"] > 1]
        found.append(_pivot(f"{op}, several on their way: GB/s", at_once, _rate))
    for op in ("get", "put"):
        single = [row for row in rows if row["op"] == op and row["concurrency"] == 1]
        found.append(_pivot(f"{op}, one at a time: CPU seconds a GB, client + server", single, _cpu))
    looks = [row for row in rows if row["op"].startswith("look_up")]
    if looks:
        lines = [[row["op"], row["path"], str(row["batch"]), _latency(row), f"{row['keys_s']:,.0f}"] for row in looks]
        found.append(("look-ups", ["operation", "path", "keys a call", "p50 / p99, us", "keys/s"], lines))
    return [table for table in found if table[2]]


def _pivot(title: str, rows: list[Row], cell: Callable[[Row], str]) -> tuple[str, list[str], list[list[str]]]:
    wires, names = ("copy", "shm", "net"), list(BACKENDS)
    rows = sorted(rows, key=lambda row: (wires.index(row["wire"]), names.index(row["backend"])))
    columns = dict.fromkeys((row["backend"], row["path"]) for row in rows if cell(row))
    cells = {(row["bytes"], row["backend"], row["path"]): cell(row) for row in rows}
    sizes = sorted({row["bytes"] for row in rows})
    lines = [[short_size(size), *[cells.get((size, *column), "") for column in columns]] for size in sizes]
    lines = [line for line in lines if any(line[1:])]
    titles = [backend if backend == "memcpy" else f"{backend}\n{path}" for backend, path in columns]
    return title, ["block", *titles], lines


def fit_columns(columns: list[str], lines: list[list[str]], width: int) -> list[list[int]]:
    """The columns of each table that a wide one is cut into, the first in all of them."""

    def width_of(place: int) -> int:
        cells = [*columns[place].split("\n"), *[line[place] for line in lines]]
        return max(map(len, cells)) + 3

    found: list[list[int]] = []
    room = 0
    for place in range(1, len(columns)):
        needed = width_of(place)
        if not found or needed > room:
            found.append([0])
            room = width - width_of(0)
        found[-1].append(place)
        room -= needed
    return found


def markdown(found: Row) -> str:
    """A report's tables, notices and facts as Markdown."""
    parts = []
    for title, columns, lines in tables(found["rows"]):
        head = [column.replace("\n", " ") for column in columns]
        rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
        parts.append(f"**{title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *remarks(found)]) + "\n"


def remarks(found: Row) -> list[str]:
    """What explains the figures, a line each: what is absent, what backends are, facts."""
    lines = [f"{notice['backend']}: {notice['state']}: {notice['text']}" for notice in found["notices"]]
    for name in dict.fromkeys(row["backend"] for row in found["rows"]):
        versions = ", ".join(f"{key} {value}" for key, value in found["backends"].get(name, {}).items())
        lines.append(f"{name}{f' ({versions})' if versions else ''}: {BACKENDS[name].note}")
    for name in ("machine", "server", "conditions"):
        if found[name]:
            facts = [f"{key.replace('_', ' ')} {_fact(value)}" for key, value in found[name].items()]
            lines.append(f"{name}: {', '.join(facts)}")
    return lines


def print_tables(found: Row) -> None:
    """Print a report for people, on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for title, columns, lines in tables(found["rows"]):
        for places in fit_columns(columns, lines, console.width):
            console.print(title, style="bold", markup=False, highlight=False)
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
            for place in places:
                table.add_column(columns[place], justify="right", no_wrap=True)
            for line in lines:
                table.add_row(*[line[place] for place in places])
            console.print(table)
    styles = {FAILED: "bold red", MISSING: "yellow", UNABLE: "yellow"}
    marks = [styles[notice["state"]] for notice in found["notices"]]
    for place, remark in enumerate(remarks(found)):
        console.print(remark, style=marks[place] if place < len(marks) else "dim", markup=False, highlight=False)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={each}" for key, each in value.items()) or "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
