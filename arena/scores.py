"""Metrics of results by variant (row of a table), metric (column) and seed, and whether a run has learned its task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any

from arena import rules
from arena.comparison import Comparison, final_seeds
from arena.contestants import BOUNDED, CONTESTANTS, PARAMETERS
from arena.intervals import Estimate, difference, estimate
from arena.sizes import Size
from arena.tasks import COPY, MQAR, TASKS, TEXT

# a row of tables: the name of a contestant, and of a mode, eviction method or cap ("" if there is none)
Variant = tuple[str, str]
MEAN, NEEDLES, BEYOND, NAMES, EXCESS = "mean", "needles", "needles beyond", "names", "excess"
# the key under which a row has the values of its single examples
EACH = "each"
# names of the suites that measure zero-shot retrieval
RETRIEVAL = ("niah", "names")
# maps each metric to groups of examples, and each group to values
Samples = dict[str, dict[Any, list[float]]]
_EVICTION_LABELS = {"tova": "by TOVA", "uniform": "by Unif.+SWA"}
# number of steps in the table of logged metrics
_LOGGED_STEPS = 5


def label(variant: Variant) -> str:
    """Return the name in tables and plots of a variant (contestant and mode, eviction method or cap)."""
    contestant, mode = variant
    return CONTESTANTS[contestant].title + (f", {_EVICTION_LABELS.get(mode, mode)}" if mode else "")


def belongs(division: str, variant: Variant) -> bool:
    """True if a variant belongs to a division.

    `STATE` excludes modes in which a contestant needs the parts of its state that it may drop in the mode `BOUNDED`.
    """
    contestant, mode = variant
    return division == PARAMETERS or not CONTESTANTS[contestant].droppable or mode == BOUNDED


def samples_by_mode(result: Mapping[str, Any], size: Size) -> dict[str, Samples]:
    """Return the values of the test examples in a result, by mode, then metric, then group."""
    found: dict[str, Samples] = {}
    for suite, row in _rows(result):
        if values := row.get(EACH):
            for metric, group in _metrics(result["task"], suite, row, size):
                mode = row["modes"].partition(" at ")[0] if metric == EXCESS else _mode(row)
                found.setdefault(mode, {}).setdefault(metric, {})[group] = values
    return found


def _rows(result: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return ((suite, row) for suite, rows in result["rows"].items() for row in rows)


def _mode(row: Mapping[str, Any]) -> str:
    """Return the mode of a row; for a switch from a mode to itself, "a → a", return "a"."""
    modes = row.get("modes", "")
    first, arrow, second = modes.partition(" → ")
    return first if arrow and first == second else modes


def _metrics(task: str, suite: str, row: Mapping[str, Any], size: Size) -> Iterable[tuple[str, Any]]:
    """Yield each metric to which a row contributes, and the row's group in this metric."""
    if task == MQAR:
        yield from ((f"{row['pairs']} pairs", ""), (MEAN, row["pairs"]))
    elif task == COPY:
        yield from ((f"{row['task']}, {row['tokens']}", ""), (MEAN, (row["task"], row["tokens"])))
    elif suite.endswith("niah"):
        group = row["task"], row["length"]
        yield f"{NEEDLES} at {row['length']:,}", group
        if task != TEXT or row["length"] <= size.seq_len:
            yield NEEDLES, group
        elif row["length"] in (2 * size.seq_len, 4 * size.seq_len):
            yield BEYOND, group
    elif suite.endswith("names"):
        yield NAMES, row.get("distance", "")
    elif suite.endswith("perplexity-by-position"):
        if row["predictor"] == "model" and row["position"] != "all":
            # a row covers the second half of a text of this length; the last row ends at the last token with a target
            length = int(row["position"].rpartition("-")[2]) + 1
            times = length // size.seq_len
            if times and times & (times - 1) == 0:
                yield f"loss at {times}x", ""
    elif suite == "switch-perplexity" and " at " in row["modes"]:
        yield EXCESS, row["modes"]


def has_learned(result: Mapping[str, Any], mode: str, metric: str, size: Size) -> bool:
    """True if a run has learned the task of a metric, by the definition in item 9 of RULES.md."""
    loss, task = result["last loss"], result["task"]
    if loss is None or (task == TEXT and loss > rules.TEXT_LEARNED * math.log(TASKS[task].vocabulary(size))):
        return False
    rows = [(suite, row) for suite, row in _rows(result) if _mode(row) == mode and EACH in row]
    share = rules.LEARNED
    if task in (MQAR, COPY):
        key = "pairs" if task == MQAR else "tokens"
        easiest = [row for _, row in rows if row[key] == min(row[key] for _, row in rows)]
    elif metric.startswith(NEEDLES):
        first = [row for suite, row in rows if suite.endswith("niah") and row["task"] == "s-niah-1"]
        easiest = [row for row in first if row["length"] == min(row["length"] for row in first)]
    elif metric == NAMES:
        easiest, share = [row for suite, row in rows if suite.endswith("names")], rules.NAMES_LEARNED
    else:
        return True
    if not easiest:
        return False
    chance = fmean(row.get("chance", 0.0) for row in easiest)
    return fmean(fmean(row[EACH]) for row in easiest) >= chance + share * (1 - chance)


def steps_to_learn(result: Mapping[str, Any]) -> int | None:
    """Return the first logged step from which on the loss stays below half of ln(largest number of pairs).

    Returns None if it never does, or if the task has no pairs.
    """
    pairs = [row["pairs"] for _, row in _rows(result) if "pairs" in row]
    found = None
    for step, loss in reversed(result.get("loss", []) if pairs else []):
        if loss >= math.log(max(pairs)) / 2:
            break
        found = step
    return found


class Scores:
    """The results on a task in a division (`PARAMETERS` or `STATE`).

    Attributes:
        variants: groups of test examples by variant, metric and seed; a seed's entry is left out if one of its values
            is not finite.
        results: results of the reported runs by contestant and seed.
        rates: the selected learning rate of each contestant.
    """

    def __init__(self, comparison: Comparison, division: str, task: str) -> None:
        self.size, self.seeds = comparison.size, final_seeds(task, comparison.size)
        self.variants: dict[Variant, dict[str, dict[int, dict[Any, list[float]]]]] = {}
        self.results: dict[str, dict[int, Mapping[str, Any]]] = {}
        self.rates: dict[str, float] = {}
        for name in comparison.contestants_in(division):
            for run in comparison.scored_runs(division, task, name):
                self.rates[name] = run.rate
                if (result := comparison.result(run)) is None:
                    continue
                self.results.setdefault(name, {})[run.seed] = result
                for mode, metrics in samples_by_mode(result, comparison.size).items():
                    if belongs(division, (name, mode)):
                        by_metric = self.variants.setdefault((name, mode), {})
                        for metric, groups in metrics.items():
                            if all(math.isfinite(x) for values in groups.values() for x in values):
                                by_metric.setdefault(metric, {})[run.seed] = groups

    def estimate(self, variant: Variant, metric: str) -> Estimate | None:
        """Return the mean of a metric over seeds and examples; None if the variant has no values."""
        by_seed = self.variants.get(variant, {}).get(metric)
        return estimate(list(by_seed.values())) if by_seed else None

    def difference(self, subject: Variant, baseline: Variant, metric: str) -> Estimate | None:
        """Return the difference of the means of two variants; None if a seed of either is missing."""
        sides = [self.variants.get(which, {}).get(metric, {}) for which in (subject, baseline)]
        if any(set(side) != set(self.seeds) for side in sides):
            return None
        ours, theirs = ([side[seed] for seed in self.seeds] for side in sides)
        return difference(ours, theirs)

    def learned(self, variant: Variant, metric: str) -> tuple[int, int]:
        """Return how many reported runs have learned the task of the metric, and how many have a result."""
        results = self.results.get(variant[0], {}).values()
        return sum(has_learned(result, variant[1], metric, self.size) for result in results), len(results)

    def steps(self, name: str) -> list[int]:
        """Return the steps that a contestant's reported runs needed to learn, for those that have learned."""
        return [step for result in self.results.get(name, {}).values() if (step := steps_to_learn(result)) is not None]

    def training_seconds(self, name: str) -> float | None:
        """Return the seconds for which a reported run trains, at the median training speed of the contestant's runs.

        Return None if no speed is known.
        """
        speeds = [x for r in self.results.get(name, {}).values() if (x := r.get("tokens per second"))]
        return self.size.steps * self.size.batch_tokens / median(speeds) if speeds else None


def logged_means(comparison: Comparison, division: str, task: str, contestant: str) -> dict[str, dict[int, float]]:
    """Return the metrics that a contestant's layers have logged, by name and step: means over layers and seeds.

    The steps are about a fifth of the training apart; the last step is included.
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
    """Return the cost measurements in a division, by variant (contestant and mode) and context length."""
    found: dict[Variant, dict[int, dict[str, Any]]] = {}
    for run in comparison.cost_runs(division):
        if (result := comparison.result(run)) is not None:
            for row in result["rows"]:
                if belongs(division, (run.contestant, row["mode"])):
                    found.setdefault((run.contestant, row["mode"]), {})[run.length] = row
    return found


def pareto_front(points: Mapping[Variant, tuple[float, float]], *, higher: bool = True) -> list[Variant]:
    """Return the variants, sorted by cost, that have a better quality than all variants of equal or lower cost.

    Args:
        points: cost and quality of each variant; lower cost is better.
        higher: whether a higher quality is better.
    """
    best, front = -math.inf, []
    sign = 1 if higher else -1
    for variant, (_, quality) in sorted(points.items(), key=lambda item: (item[1][0], -sign * item[1][1])):
        if sign * quality > best:
            best = sign * quality
            front.append(variant)
    return front
