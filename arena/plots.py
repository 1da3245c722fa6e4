"""Scatter plots of quality over cost, with one point per variant (contestant and mode)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from arena.comparison import Comparison
from arena.contestants import BOUNDED, CONTESTANTS, EVICTION_METHODS
from arena.models import solve, state_bytes
from arena.scores import MEAN, NAMES, NEEDLES, Scores, Variant, label, measured_costs, pareto_front
from arena.tasks import MQAR, TEXT
from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core._utils.optional import require

Points = Mapping[Variant, tuple[float, float]]


class Plot(NamedTuple):
    """A scatter plot of quality over cost.

    Attributes:
        name: part of the file's name.
        title, x, y: title of the plot, and labels of the axes.
        higher: whether a higher quality (y) is better.
        points: cost and quality of each variant.
    """

    name: str
    title: str
    x: str
    y: str
    higher: bool
    points: Points


def make_plots(comparison: Comparison, division: str) -> list[Plot]:
    """Return the plots of a division (`PARAMETERS` or `STATE`); a plot without measured values has no points."""
    size, costs = comparison.size, measured_costs(comparison, division)
    recall, text = Scores(comparison, division, MQAR), Scores(comparison, division, TEXT)
    longest = max(size.cost_lengths)

    def points(scores: Scores, metric: str, cost: Callable[[Variant], float | None]) -> Points:
        found = {variant: (cost(variant), scores.estimate(variant, metric)) for variant in scores.variants}
        return {variant: (x, y.mean) for variant, (x, y) in found.items() if x is not None and y is not None}

    def state(variant: Variant) -> float | None:
        name, mode = variant
        if mode in EVICTION_METHODS:
            # None: with eviction, the model's own state size does not apply
            return None
        least, most = state_bytes(CONTESTANTS[name], size, solve(name, division, size).fields, size.seq_len)
        return least if mode == BOUNDED else most

    def decoding(variant: Variant) -> float | None:
        # after a switch of modes, tokens are decoded in the mode that is named last
        row = costs.get((variant[0], variant[1].rpartition(" → ")[2]), {}).get(longest)
        return None if row is None else row["decode ms/token"]

    retrieval = (
        ("recall", "Recall", recall, MEAN, "accuracy, mean over pairs"),
        ("needles", "Needles", text, NEEDLES, "accuracy, mean over S-NIAH 1 to 3"),
        ("names", "Names", text, NAMES, "accuracy, names in cloze form"),
    )
    state_axis = f"maximum state after {size.seq_len:,} tokens (bytes)"
    decoding_axis = f"decoding after {longest:,} tokens (ms/token)"
    plots = [
        Plot(f"{name}-{cost}", f"{title} by {by}", x, y, True, points(scores, metric, function))
        for name, title, scores, metric, y in retrieval
        for cost, by, x, function in (
            ("state", "state size", state_axis, state),
            ("decoding", "decoding time", decoding_axis, decoding),
        )
    ]
    tokens = size.steps * size.batch_tokens
    loss = points(text, "loss at 1x", lambda variant: text.training_seconds(variant[0]))
    axis = f"training on {tokens / 1e6:,.0f} million tokens, as trained (s)"
    return [
        *plots,
        Plot("loss-training", "Loss by training time", axis, "loss at the training length (nats/token)", False, loss),
    ]


def scatter(plot: Plot, path: Path) -> None:
    """Draw a plot, with labelled points and their Pareto front, into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = scatter_figure(plot)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def scatter_figure(plot: Plot) -> Any:
    """Return a plot as a figure of matplotlib, with labelled points and their Pareto front."""
    require("matplotlib", "plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    points = plot.points
    front = pareto_front(points, higher=plot.higher)
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.plot(*zip(*(points[x] for x in front), strict=True), color="0.6", linestyle="--", linewidth=1, zorder=1)
    for variant, point in points.items():
        axes.plot(*point, marker="o", color="C0" if variant in front else "0.5", markersize=5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    shorten = EngFormatter(sep="")
    axes.xaxis.set_major_formatter(lambda x, _: shorten(x) if x >= 1000 else f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    # leave space for labels around the outermost points
    least, most = min(x for x, _ in points.values()), max(x for x, _ in points.values())
    span = most / least if most > least else 10.0
    axes.set_xlim(least * span**-0.15, most * span**0.35)
    axes.margins(y=0.2)
    _add_labels(figure, axes, points, [points[variant] for variant in front])
    return figure


def _add_labels(figure: Any, axes: Any, points: Points, front: list[tuple[float, float]]) -> None:
    """Write each label near its point, inside the axes, such that it covers no point, other label or front."""
    from matplotlib.path import Path as Line
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    pixels = {variant: axes.transData.transform(point) for variant, point in points.items()}
    marks = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in pixels.values()]
    line = Line(axes.transData.transform(front))
    placed: list[Any] = []
    # go from top to bottom: labels can then move into the free space below
    for variant in sorted(points, key=lambda variant: -points[variant][1]):
        text = axes.annotate(
            label(variant), points[variant], xytext=(0, 0), textcoords="offset points", fontsize=8, va="bottom"
        )
        text.set_in_layout(False)
        box = text.get_window_extent()
        for dx, dy in _OFFSETS:
            # (dx, dy) is the offset, from the point, of the nearest side of its label
            left = dx - (box.width if dx < 0 else 0) - (box.width / 2 if dx == 0 else 0)
            x, y = pixels[variant] + (left, dy - box.height / 2)
            spot = Bbox.from_extents(x, y, x + box.width, y + box.height)
            inside = axes.bbox.contains(spot.x0, spot.y0) and axes.bbox.contains(spot.x1, spot.y1)
            if inside and not spot.count_overlaps(placed + marks) and not line.intersects_bbox(spot, filled=False):
                break
        else:
            raise ValueError(f"no space is left for the label {label(variant)!r}; enlarge the figure")
        placed.append(spot)
        # convert pixels, the unit of boxes, to points, the unit of offsets
        shift = (spot.x0 - pixels[variant][0], spot.y0 - pixels[variant][1])
        text.set_position(tuple(pixel * 72 / figure.dpi for pixel in shift))
        if math.hypot(dx, dy) > 14:
            across, up = (0.5 if dx == 0 else float(dx < 0)), (0.5 if dx else float(dy < 0))
            end = (spot.x0 + spot.width * across, spot.y0 + spot.height * up)
            axes.add_line(_leader(pixels[variant], end))


def _leader(start: Any, end: Any) -> Any:
    """Return a thin line from a point to its label; both ends are given in pixels."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import IdentityTransform

    return Line2D(*zip(start, end, strict=True), color="0.7", linewidth=0.6, transform=IdentityTransform(), zorder=0)


# possible offsets of a label from its point, in pixels, nearest first
_OFFSETS = sorted(
    ((dx, dy) for dx in (0, 9, -9, 18, -18, 36, -36, 60, -60) for dy in range(-140, 141, 4) if math.hypot(dx, dy) > 8),
    key=lambda offset: (math.hypot(*offset), -offset[0]),
)
