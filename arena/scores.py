"""Metrics of the results by table row and column, with confidence intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from arena.comparison import Comparison
from arena.contestants import BOUNDED, CONTESTANTS, PARAMETERS
from arena.sizes import Size
from arena.tasks import COPY, MQAR, NEEDLE, TEXT
from tokenmix_core.data.synthetic import COPYING
from tokenmix_core.evaluation.recall import COPY_TOKENS, COPY_VOCABULARY, MQAR_PAIRS, copying_chance

# Student's t for intervals of 95 %, by degrees of freedom
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# a table row: a contestant and a mode, "" for a model without modes
Variant = tuple[str, str]
MEAN = "mean"
# prefix of the metrics of a switch between modes
EXCESS = "excess"
_EVICTION_LABELS = {"tova": "by TOVA", "uniform": "by Unif.+SWA"}
# number of steps in the table of metrics that layers log
_LOGGED_STEPS = 5


@dataclass(frozen=True)
class Estimate:
    """The mean over seeds and the half-width of its 95 % interval; None from one seed."""

    mean: float
    half_width: float | None
    seeds: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value per seed.

        Raises:
            ValueError: no value.
        """
        if not values:
            raise ValueError("an estimate needs at least one value, got none")
        if len(values) == 1:
            return cls(values[0], None)
        t = _STUDENT_T[len(values) - 2] if len(values) <= len(_STUDENT_T) + 1 else 1.96
        return cls(fmean(values), t * stdev(values) / math.sqrt(len(values)), len(values))

    def p_value(self, null: float) -> float:
        """Return the two-sided probability of a mean as far from `null`, by Student's t; 1 from one seed."""
        if self.half_width is None:
            return 1.0
        freedom = self.seeds - 1
        distance = abs(self.mean - null)
        if not distance or not self.half_width:
            return float(not distance)
        quantile = _STUDENT_T[freedom - 1] if freedom <= len(_STUDENT_T) else 1.96
        angle = math.atan(quantile * distance / self.half_width / math.sqrt(freedom))
        # the distribution's closed form for whole degrees of freedom
        term = math.cos(angle) if freedom % 2 else 1.0
        total = term if freedom > 1 else 0.0
        for k in range(2 + freedom % 2, freedom - 1, 2):
            term *= math.cos(angle) ** 2 * (k - 1) / k
            total += term
        inside = math.sin(angle) * total
        return 1 - (2 / math.pi * (angle + inside) if freedom % 2 else inside)

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half_width is None else f" ± {self.half_width:.3f}")


def label(variant: Variant) -> str:
    """Return a variant's name in tables and plots."""
    contestant, mode = variant
    return CONTESTANTS[contestant].title + (f", {_EVICTION_LABELS.get(mode, mode)}" if mode else "")


def belongs(division: str, variant: Variant) -> bool:
    """True if the variant is part of the division: equal state admits the bounded mode only."""
    contestant, mode = variant
    return division == PARAMETERS or not CONTESTANTS[contestant].droppable or mode == BOUNDED


def metrics_by_mode(result: Mapping[str, Any], size: Size) -> dict[str, dict[str, float]]:
    """Return the metrics of a result by mode and column."""
    found: dict[str, dict[str, float]] = {}
    for suite, rows in result["rows"].items():
        for row in rows:
            mode = _mode(row.get("modes", ""))
            for metric, value in _metrics(result["task"], suite, row, size):
                found.setdefault(mode, {})[metric] = value
    if result["task"] != TEXT:
        for metrics in found.values():
            metrics[MEAN] = fmean(metrics.values())
    return found


def _mode(modes: str) -> str:
    """Shorten "a → a" to "a"."""
    first, arrow, second = modes.partition(" → ")
    return first if arrow and first == second else modes


def _metrics(task: str, suite: str, row: Mapping[str, Any], size: Size) -> Iterable[tuple[str, float]]:
    if task == MQAR:
        yield f"{row['pairs']} pairs", row["accuracy"]
    elif task == COPY:
        yield f"{row['task']}, {row['tokens']}", row["accuracy"]
    elif task == NEEDLE:
        yield row["task"], row["accuracy"]
    elif suite.endswith("perplexity-by-position"):
        if row["predictor"] == "model" and row["position"] != "all":
            # the second half of each length; the last token has no target
            length = int(row["position"].rpartition("-")[2]) + 1
            times = length // size.seq_len
            if times and times & (times - 1) == 0:
                yield f"loss at {times}x", row["loss"]
    elif suite.endswith("copy"):
        yield f"saved at {row['distance']}", row["saved"]
    elif suite == "switch-perplexity" and " at " in row["modes"]:
        yield from ((key, value) for key, value in row.items() if key.startswith(EXCESS) and value is not None)


def chances(task: str, size: Size) -> dict[str, float]:
    """Return the accuracy of a guess among the values in the context, by metric; metrics without an entry have 0."""
    largest = size.seq_len // 4
    if task == MQAR:
        largest = min(largest, size.recall_vocab_size // 2 - 1)
        found = {f"{pairs} pairs": 1 / pairs for pairs in MQAR_PAIRS if pairs <= largest}
    elif task == COPY:
        sizes = [tokens for tokens in COPY_TOKENS if tokens <= largest]
        found = {f"{kind}, {n}": copying_chance(n, COPY_VOCABULARY) for kind in COPYING for n in sizes}
    else:
        return {}
    return found | {MEAN: fmean(found.values())}


def withdrawn(result: Mapping[str, Any]) -> bool:
    """True for results of text and needles from before results held their corpus.

    Needles were not spread evenly then, and 12 % of the held-out text stood in the training text.
    """
    return result.get("task") in (NEEDLE, TEXT) and "corpus" not in result


class Scores:
    """Metrics of a task in a division, by variant, column and seed, without values that are not finite.

    Attributes:
        withdrawn: number of results that are left out because their evaluation was wrong.
    """

    def __init__(self, comparison: Comparison, division: str, task: str) -> None:
        self.variants: dict[Variant, dict[str, dict[int, float]]] = {}
        self.rates: dict[str, float] = {}
        self.withdrawn = 0
        for name in comparison.contestants_in(division):
            for run in comparison.scored_runs(division, task, name):
                self.rates[name] = run.rate
                if (result := comparison.result(run)) is None:
                    continue
                if withdrawn(result):
                    self.withdrawn += 1
                    continue
                for mode, metrics in metrics_by_mode(result, comparison.size).items():
                    if belongs(division, (name, mode)):
                        by_metric = self.variants.setdefault((name, mode), {})
                        for metric, value in metrics.items():
                            if math.isfinite(value):
                                by_metric.setdefault(metric, {})[run.seed] = value

    def estimate(self, variant: Variant, metric: str) -> Estimate | None:
        """Return the mean over seeds, or None without a value."""
        values = self.variants.get(variant, {}).get(metric)
        return Estimate.of(list(values.values())) if values else None

    def difference(self, variant: Variant, baseline: Variant, metric: str) -> Estimate | None:
        """Return the mean difference of two variants, paired by seed; None without a common seed.

        Pairing is valid because both variants read the same rows at a seed.
        """
        ours, theirs = (self.variants.get(which, {}).get(metric, {}) for which in (variant, baseline))
        common = sorted(ours.keys() & theirs.keys())
        return Estimate.of([ours[seed] - theirs[seed] for seed in common]) if common else None


def logged_means(comparison: Comparison, division: str, task: str, contestant: str) -> dict[str, dict[int, float]]:
    """Return the metrics that a contestant's layers logged, by name and step, averaged over layers and seeds.

    The steps are about a fifth of training apart and include the last one.
    """
    by_seed: dict[str, dict[int, list[float]]] = {}
    for run in comparison.scored_runs(division, task, contestant):
        by_layer: dict[str, dict[int, list[float]]] = {}
        for key, series in ((comparison.result(run) or {}).get("logged") or {}).items():
            for step, value in series[:: -max(1, len(series) // _LOGGED_STEPS)][::-1]:
                by_layer.setdefault(key.partition("/")[0], {}).setdefault(step, []).append(value)
        for metric, steps in by_layer.items():
            for step, values in steps.items():
                by_seed.setdefault(metric, {}).setdefault(step, []).append(fmean(values))
    return {metric: {step: fmean(values) for step, values in steps.items()} for metric, steps in by_seed.items()}


def measured_costs(comparison: Comparison, division: str) -> dict[Variant, dict[int, dict[str, Any]]]:
    """Return the cost measurements by variant and context length."""
    found: dict[Variant, dict[int, dict[str, Any]]] = {}
    for run in comparison.cost_runs(division):
        if (result := comparison.result(run)) is not None:
            for row in result["rows"]:
                if belongs(division, (run.contestant, row["mode"])):
                    found.setdefault((run.contestant, row["mode"]), {})[run.length] = row
    return found


def pareto_front(points: Mapping[Variant, tuple[float, float]], *, higher: bool = True) -> list[Variant]:
    """Return the variants that no other one beats in both cost and quality, cheapest first.

    Args:
        points: cost and quality of each variant; a lower cost is better.
        higher: True if a higher quality value is better.
    """
    best, front = -math.inf, []
    sign = 1 if higher else -1
    for variant, (_, quality) in sorted(points.items(), key=lambda item: (item[1][0], -sign * item[1][1])):
        if sign * quality > best:
            best = sign * quality
            front.append(variant)
    return front
