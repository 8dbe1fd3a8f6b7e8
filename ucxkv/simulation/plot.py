"""A sweep drawn: hit rate and saved prefill over capacity, a line a policy. matplotlib comes with ucxkv[plot]."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucxkv.errors import SetupError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "draw"]

Row = dict[str, Any]
_COLOURS = {"lru": "#56B4E9", "s3fifo": "#D55E00", "tuc": "#0072B2", "belady": "#000000"}
_DPI = 110
_GREY = "#555555"


def check_plot(path: Path) -> None:
    """Raise before the run what drawing would after it: SetupError (no matplotlib), UsageError (no such folder)."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.absolute().parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise SetupError("--plot needs matplotlib", found=str(exc), fix="pip install 'ucxkv[plot]'") from exc


def draw(rows: list[Row], path: Path) -> None:
    """Write a picture (.png), or one page with the picture and the figures (.html). Raises UsageError if it cannot."""
    figure = _figure(rows)
    out = io.BytesIO()
    if path.suffix == ".html":
        figure.savefig(out, format="svg")
        written = _page(rows, out.getvalue().decode()).encode()
    else:
        figure.savefig(out, format="png", dpi=_DPI)
        written = out.getvalue()
    try:
        path.write_bytes(written)
    except OSError as exc:
        raise UsageError(f"--plot {path}: {exc.strerror}") from exc


def _figure(rows: list[Row]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    footprint = rows[0]["unique_blocks"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        across = [100 * next(iter(row["capacity_blocks"].values())) / footprint for row in mine]
        style = {"color": _COLOURS[policy], "marker": "o", "markersize": 4, "label": policy,
                 "linestyle": "--" if policy == "belady" else "-"}  # fmt: skip
        left.plot(across, [100 * row["hit_rate"] for row in mine], **style)
        right.plot(across, [100 * row["saved_prefill_s"] / row["prefill_s"] for row in mine], **style)
    for axes, title in ((left, "blocks hit, %"), (right, "prefill seconds saved, %")):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("capacity, % of the trace's different blocks")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=9)
    figure.suptitle(_title(rows[0]), fontsize=10, x=0.01, ha="left", color=_GREY)
    return figure


def _title(row: Row) -> str:
    return (
        f"{row['trace']}: {row['requests']:,} requests, {row['unique_blocks']:,} different blocks, model {row['model']}"
    )


def _page(rows: list[Row], svg: str) -> str:
    """A page that needs nothing from elsewhere."""
    names = ("capacity", "policy", "hit_rate", "saved_prefill_s", "prefill_s", "ttft_p50_s", "ttft_p95_s")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row[name]))}</td>" for name in names) + "</tr>" for row in rows
    )
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}svg{max-width:100%}"
    body = f"<h1>ucxkv simulate</h1><p>{html.escape(_title(rows[0]))}</p>{svg[svg.index('<svg') :]}"
    table = f"<table><tr>{head}</tr>{lines}</table>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>ucxkv simulate</title>'
        f"<style>{style}</style>{body}{table}</html>\n"
    )
