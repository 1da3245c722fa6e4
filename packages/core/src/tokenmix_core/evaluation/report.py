"""Results on disk: for each suite a JSON file and its plots, and a report with the tables of all suites."""

from __future__ import annotations

import json
import math
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core._utils.locks import one_at_a_time
from tokenmix_core._utils.optional import require
from tokenmix_core._utils.versions import software
from tokenmix_core.evaluation.options import Plot, SuiteResult

REPORT = "report.md"
_MARKERS = "osD^v<>ph*"
# replacements of characters that would break a Markdown table
_SHOWN = {"\n": "⏎", "\t": "⇥", "\r": ""}


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, aligned also as plain text.

    Columns are the keys in order of first appearance.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    widths = [max(3, len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]

    def line(values: Sequence[str]) -> str:
        parts = (
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        )
        return "| " + " | ".join(parts) + " |"

    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(columns), line(rule), *(line(values) for values in cells)])


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table or, if a value is too long for a table cell, blocks of verbatim text."""
    if not any(isinstance(value, str) and len(value) > 80 for row in rows for value in row.values()):
        return format_table(rows)
    blocks = (f"{key}:\n\n~~~~text\n{value}\n~~~~" for row in rows for key, value in row.items())
    return "\n\n".join(blocks)


def format_settings(settings: dict[str, Any]) -> str:
    """Return the settings on which the results depend, in one line of text."""
    return "; ".join(f"{name}: {_cell(value)}" for name, value in settings.items())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e7:
            return f"{value:.3e}"
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, str):
        return "".join(c if c.isprintable() else _SHOWN.get(c, "·") for c in value).replace("|", "\\|")
    return (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000 else str(value)
    )


def draw(plot: Plot, path: Path) -> None:
    """Draw the curves or the heatmap of `plot` into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = figure_of(plot)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def figure_of(plot: Plot) -> Any:
    """Return the curves or the heatmap of `plot` as a figure of matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", "plots")
    # this backend opens no window and keeps no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = plot["series"]
    # the legend has an area of its own below the axes, two entries per line, and covers no curve
    figure = Figure(figsize=(7, 4.2 + 0.21 * ((len(series) + 1) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel=plot["x"], ylabel=textwrap.fill(plot["y"], 44))
    axes.set_title(textwrap.fill(plot["title"], 72))
    if "heatmap" in plot:
        image = axes.imshow(plot["heatmap"], origin="lower", aspect="auto", interpolation="nearest", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes)
        axes.set_xticks(*_ticks(plot.get("x_labels"), len(plot["heatmap"][0])))
        axes.set_yticks(*_ticks(plot.get("y_labels"), len(plot["heatmap"])))
    else:
        axes.grid(alpha=0.3)
    for i, (name, (x, y)) in enumerate(series.items()):
        alone = name in plot.get("points", ())
        marker = _MARKERS[i % len(_MARKERS)] if alone or len(x) <= 40 else None
        axes.plot(x, y, marker=marker, markersize=4, linewidth=0 if alone else 1.4, label=name)
    if series:
        _format_axes(axes, plot)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _ticks(labels: list[str] | None, count: int) -> tuple[list[int], list[str]]:
    """Return at most 16 indices of a heatmap's rows or columns to label, and their labels."""
    shown = list(range(0, count, -(-count // 16)))
    return shown, [labels[i] if labels else str(i) for i in shown]


def _format_axes(axes: Any, plot: Plot) -> None:
    """Set the scales of the axes; ticks are integers if all x values are, and no label has a power of ten."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    values = [value for x, _ in plot["series"].values() for value in x]
    if plot.get("log_x"):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    elif max(map(abs, values), default=0) >= 10_000:
        # label ticks as 1.2M, not as 1.2 with a factor of 1e6 in a corner of the plot
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    elif all(float(value).is_integer() for value in values):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(set(values)) == 1:
            axes.set_xticks(values[:1])
    if plot.get("log_y"):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.get("shares"):
        axes.set_ylim(-0.03, 1.03)


def write_result(result: SuiteResult, folder: Path) -> list[Path]:
    """Write `<suite>.json` and the plots of a result, and then the folder's report with the new result.

    Without matplotlib no plots are drawn, and a line on stderr says so.

    Returns:
        The paths of the files that were written.
    """
    folder = Path(folder)
    suite = result["suite"]
    written = [folder / f"{suite}.json"]
    result = {"provenance": software(), **result}
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=True) + "\n"
    # write in one process at a time: several may write evaluations into the same folder
    with one_at_a_time(folder):
        write_atomically(written[0], text)
        paths = _plot_paths(suite, len(result["plots"]), folder)
        for path in paths:
            # remove the plot of an earlier run, which would not match these rows
            path.unlink(missing_ok=True)
        for path, plot in zip(paths, result["plots"], strict=True):
            try:
                draw(plot, path)
            except ImportError as error:
                print(f"{suite}: no plot is drawn, for {error}", file=sys.stderr)
                break
            written.append(path)
        written.append(write_report(folder))
    return written


def _plot_paths(suite: str, count: int, folder: Path) -> list[Path]:
    return [folder / f"{suite}{f'-{i + 1}' if count > 1 else ''}.png" for i in range(count)]


def training_result(metrics: Sequence[dict[str, Any]], tokens_per_step: int) -> SuiteResult:
    """Return a run's log as a result: its first, middle and last line, the training speed, and the loss curve.

    Args:
        metrics: the lines of the log; those without `step` and `loss` are ignored.
        tokens_per_step: number of tokens in an optimizer step.
    """
    lines = [line for line in metrics if "step" in line and "loss" in line]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    tokens, losses = [line["step"] * tokens_per_step for line in lines], [line["loss"] for line in lines]
    rows = [
        {"step": line["step"], "tokens": n, "training loss": line["loss"], "grad norm": line.get("grad_norm")}
        for line, n in zip(lines, tokens, strict=True)
    ]
    plot: Plot = {
        "title": "Training",
        "x": "tokens",
        "y": "loss (nats a token)",
        "series": {"training loss": (tokens, losses)},
    }
    settings = {"tokens per second": statistics.median(speeds)} if speeds else {}
    ends = [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})] if rows else []
    return {"suite": "training", "settings": settings, "rows": ends, "plots": [plot]}


def write_report(folder: Path) -> Path:
    """Write `report.md` with the tables and plots of every result in the folder; return its path."""
    parts = ["# Evaluation"]
    for path in sorted(folder.glob("*.json")):
        result: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or not result.keys() >= {"suite", "settings", "rows", "plots"}:
            continue
        settings = format_settings(result["settings"])
        parts += [f"## {result['suite']}", settings] if settings else [f"## {result['suite']}"]
        if result["rows"]:
            parts.append(format_rows(result["rows"]))
        images = _plot_paths(result["suite"], len(result["plots"]), folder)
        for plot, image in zip(result["plots"], images, strict=True):
            if image.exists():
                parts.append(f"![{plot['title']}]({image.name})")
    path = folder / REPORT
    text = "\n\n".join(parts) + "\n"
    write_atomically(path, text)
    return path
