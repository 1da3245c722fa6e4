"""Plots of quality against cost, one point per variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from arena.comparison import Comparison
from arena.contestants import BOUNDED, CONTESTANTS, EVICTION_METHODS
from arena.models import solve, state_bytes
from arena.scores import MEAN, Scores, Variant, label, measured_costs, pareto_front
from arena.tasks import MQAR, TEXT
from tokenmix_core.extras import require
from tokenmix_core.files import write_atomically

Points = Mapping[Variant, tuple[float, float]]


class Plot(NamedTuple):
    """A scatter plot.

    Attributes:
        name: part of the file name.
        title, x, y: labels.
        higher: True if a higher y is better.
        points: cost and quality of each variant.
    """

    name: str
    title: str
    x: str
    y: str
    higher: bool
    points: Points


def make_plots(comparison: Comparison, division: str) -> list[Plot]:
    """Return the plots of a division; a plot without points was not measured."""
    size, costs = comparison.size, measured_costs(comparison, division)
    recall, text = Scores(comparison, division, MQAR), Scores(comparison, division, TEXT)
    shortest, longest = min(size.cost_lengths), max(size.cost_lengths)
    tokens = size.steps * size.batch_tokens

    def points(scores: Scores, metric: str, cost: Callable[[Variant], float | None]) -> Points:
        found = {variant: (cost(variant), scores.estimate(variant, metric)) for variant in scores.variants}
        return {variant: (x, y.mean) for variant, (x, y) in found.items() if x is not None and y is not None}

    def state(variant: Variant) -> float | None:
        name, mode = variant
        if mode in EVICTION_METHODS:
            # eviction replaces the model's own state
            return None
        least, most = state_bytes(CONTESTANTS[name], size, solve(name, division, size).fields, size.seq_len)
        return least if mode == BOUNDED else most

    def decoding(variant: Variant) -> float | None:
        # after a switch, the last mode decodes
        row = costs.get((variant[0], variant[1].rpartition(" → ")[2]), {}).get(longest)
        return None if row is None else row["decode ms/token"]

    def training(variant: Variant) -> float | None:
        speeds = [
            rows[shortest]["training tokens/s"]
            for (name, _), rows in costs.items()
            if name == variant[0] and shortest in rows
        ]
        return tokens / min(speeds) if speeds else None

    accuracy = f"accuracy, mean over pairs at {size.seq_len} tokens"
    return [
        Plot(
            "recall-state",
            "Recall by state size",
            f"maximum state after {size.seq_len:,} tokens (bytes)",
            accuracy,
            True,
            points(recall, MEAN, state),
        ),
        Plot(
            "recall-decoding",
            "Recall by decoding time",
            f"decoding after {longest:,} tokens (ms/token)",
            accuracy,
            True,
            points(recall, MEAN, decoding),
        ),
        Plot(
            "loss-training",
            "Loss by training time",
            f"forward and backward passes of {tokens / 1e6:,.0f} million tokens (s)",
            "loss at the training length (nats/byte)",
            False,
            points(text, "loss at 1x", training),
        ),
    ]


def scatter(plot: Plot, path: Path) -> None:
    """Draw labelled points and their Pareto front.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", "plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = plot.points
    front = pareto_front(points, higher=plot.higher)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.plot(*zip(*(points[x] for x in front), strict=True), color="0.6", linestyle="--", linewidth=1, zorder=1)
    for variant, point in points.items():
        axes.plot(*point, marker="o", color="C0" if variant in front else "0.5", markersize=5)
    for variant, offset in _label_offsets(points).items():
        axes.annotate(label(variant), points[variant], xytext=(5, offset), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    # leave space for the labels to the right of the points
    least, most = min(x for x, _ in points.values()), max(x for x, _ in points.values())
    span = most / least if most > least else 10.0
    axes.set_xlim(least * span**-0.08, most * span**0.45)
    axes.margins(y=0.15)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def _label_offsets(points: Points) -> dict[Variant, float]:
    """Return the vertical offset of each label, such that labels of neighbouring points do not overlap."""
    heights = [y for _, y in points.values()]
    scale = 300 / ((max(heights) - min(heights)) or 1.0)
    logs = {variant: math.log(x) for variant, (x, _) in points.items()}
    reach = 0.25 * ((max(logs.values()) - min(logs.values())) or 1.0)
    offsets: dict[Variant, float] = {}
    for variant in sorted(points, key=lambda variant: points[variant][1]):
        wanted = points[variant][1] * scale
        for other, offset in offsets.items():
            if abs(logs[other] - logs[variant]) < reach:
                wanted = max(wanted, points[other][1] * scale + offset + 10)
        offsets[variant] = wanted - points[variant][1] * scale
    return offsets
