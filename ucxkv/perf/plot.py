"""A report drawn: latency and bandwidth over the size of a block, a line for each backend and path, on log axes.

One colour a backend; shared memory is solid, the network dashed, the copy black. matplotlib comes with ucxkv[plot]; it
draws into memory, without a display and without global state.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucxkv.errors import SetupError, UsageError
from ucxkv.perf.report import remarks, tables
from ucxkv.sizes import short_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_plot", "draw"]

Row = dict[str, Any]
_OPERATIONS = ("get", "put", "am", "tag")
_COLOURS = {
    "ucxkv": "#0072B2",
    "ucx_perftest": "#D55E00",
    "ucxx": "#009E73",
    "ucx-py": "#56B4E9",
    "nixl": "#AA4499",
    "socket": "#8C6D31",
    "memcpy": "#000000",
}
_MARKERS = {"mapped": "o", "rma": "s", "message": "^", "network": "D", "shm": "o", "net": "D", "copy": ""}
_WIRES = ("copy", "shm", "net")
_DPI = 150
_GREY = "#555555"
_STYLE = """body { font: 14px sans-serif; margin: 2em auto; max-width: 1400px; color: #222 }
svg { width: 100%; height: auto } table { border-collapse: collapse; margin: 0 0 2em }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: pre }
caption { text-align: left; font-weight: bold; padding: .4em 0 }"""


def check_plot(path: Path) -> None:
    """Raise before the run what drawing would after it: SetupError (no matplotlib), UsageError (no such folder)."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.absolute().parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise SetupError("--plot needs matplotlib", found=str(exc), fix="pip install 'ucxkv[plot]'") from exc


def draw(report: Row, path: Path) -> None:
    """Write a report as a picture (.png), or as one page with the picture and the tables (.html).

    Raises UsageError when it has no rows to draw, or the file cannot be written.
    """
    figure = _figure(report)
    out = io.BytesIO()
    if path.suffix == ".html":
        figure.savefig(out, format="svg")
        written = _page(report, out.getvalue().decode()).encode()
    else:
        figure.savefig(out, format="png", dpi=_DPI)
        written = out.getvalue()
    try:
        path.write_bytes(written)
    except OSError as exc:
        raise UsageError(f"--plot {path}: {exc.strerror}") from exc


def _latencies(rows: list[Row], op: str) -> list[Row]:
    return [row for row in rows if row["op"] == op and row["concurrency"] == 1]


def _many(rows: list[Row], op: str) -> list[Row]:
    """Rows of many blocks on their way, however a backend does that: in one call, else in several."""
    found = [row for row in rows if row["op"] in (f"{op}_many", f"{op}_stream")]
    known = {(row["backend"], row["path"]) for row in found}
    more = [row for row in rows if row["op"] == op and row["concurrency"] > 1]
    return found + [row for row in more if (row["backend"], row["path"]) not in known]


def _figure(report: Row) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "bytes" in row]
    shown = [op for op in _OPERATIONS if _latencies(rows, op) or _many(rows, op)]
    if not shown:
        raise UsageError("--plot: only look-ups were measured, which have no sizes to draw over")
    figure = Figure(figsize=(13.5, 1.5 + 3.7 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(shown), 2, squeeze=False)
    for op, (left, right) in zip(shown, places, strict=True):
        half = ", half a round trip" if op in ("am", "tag") else ""
        _panel(left, _latencies(rows, op), lambda row: row["p50_us"], f"{op}, one at a time{half}", "p50, µs")
        flight = _flight(_many(rows, op))
        _panel(right, _many(rows, op), lambda row: row.get("gbps"), f"{op}, {flight} on their way", "GB/s (10⁹ bytes)")
    for axes in places[-1]:
        axes.set_xlabel("size of a block")
    lines = {str(line.get_label()): line for axes in places.flat for line in axes.get_lines()}
    named = sorted(lines, key=lambda label: lines[label].get_gid() or "")
    handles = [lines[label] for label in named]
    figure.legend(handles, named, loc="outside right upper", frameon=False, fontsize=9, handlelength=3)
    figure.suptitle(_title(report), fontsize=11, x=0.01, ha="left", color=_GREY)
    return figure


def _flight(rows: list[Row]) -> str:
    """How many blocks were on their way: the most that any row had."""
    counts = {max(row["batch"], row["concurrency"]) for row in rows}
    return f"up to {max(counts)}" if counts else "several"


def _panel(axes: Axes, rows: list[Row], value: Callable[[Row], float | None], title: str, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        found = value(row)
        if found:
            lines.setdefault((row["backend"], row["path"], row["wire"]), []).append((row["bytes"], found))
    backends = list(_COLOURS)
    for key in sorted(lines, key=lambda key: (_WIRES.index(key[2]), backends.index(key[0]))):
        backend, path, wire = key
        points = sorted(lines[key])
        axes.plot(
            [size for size, _ in points],
            [figure for _, figure in points],
            label="memcpy" if backend == "memcpy" else f"{backend} {path}",
            color=_COLOURS[backend],
            linestyle=":" if wire == "copy" else "-" if wire == "shm" else (0, (5, 2)),
            linewidth=2.2 if path in ("mapped", "network") else 1.3,
            marker=_MARKERS[path],
            markersize=4.5,
            markerfacecolor="white" if wire == "net" else _COLOURS[backend],
            gid=f"{_WIRES.index(wire)}{backends.index(backend)}",  # orders the legend
            zorder=4 if backend == "ucxkv" else 3,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(unit)
    sizes = sorted({row["bytes"] for row in rows})
    axes.set_xticks(_ticks(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: short_size(size)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6f}".rstrip("0").rstrip(".")))
    axes.grid(which="major", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _ticks(sizes: list[int]) -> list[int]:
    """Sizes to write below the axis: those measured that lie far enough from the one before."""
    found: list[int] = []
    for size in sizes:
        if not found or size >= found[-1] * 16:
            found.append(size)
    return found


def _title(report: Row) -> str:
    machine, server, load = report["machine"], report["server"], report["conditions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, UCX {machine['ucx']}"
    other = f" to {server['cpu']}, {server['cores']} cores, UCX {server['ucx']}" if server else ""
    busy = f"others kept {load['other_cpus']} cores busy" if load["other_cpus"] >= 0.1 else "machine otherwise idle"
    return f"ucxkv {report['ucxkv']} on {where}{other}; {busy}"


def _page(report: Row, svg: str) -> str:
    """A page that needs nothing from elsewhere."""
    parts = [
        f"<h1>ucxkv perf</h1><p>{html.escape(_title(report))}</p><p><code>{html.escape(report['command'])}</code></p>"
    ]
    parts.append(svg[svg.index("<svg") :])
    for title, columns, lines in tables(report["rows"]):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
        parts.append(f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>")
    parts += [f"<p><small>{html.escape(line)}</small></p>" for line in remarks(report)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>ucxkv perf</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'
