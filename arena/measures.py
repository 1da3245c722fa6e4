"""Numbers of a result by line and column of a table, and what several seeds say together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from arena.contestants import BOUNDED, CONTESTANTS, PARAMETERS
from arena.pieces import Comparison
from arena.sizes import Size
from arena.tasks import COPY, MQAR, NEEDLE, TEXT

# Student's t for intervals of 95 %, by degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# a line is a contestant in a mode; "" for a model without modes
Line = tuple[str, str]
MEAN = "mean"
# what the columns of a switch between modes begin with
EXCESS = "excess"
# of what holds few tokens of attention
_EVICTING = {"tova": "by TOVA", "uniform": "by Unif.+SWA"}
# columns of what is shown over training
_LOOKS = 5


@dataclass(frozen=True)
class Estimate:
    """The mean over so many seeds, and half the width of its interval of 95 %; None from one seed."""

    mean: float
    half: float | None
    seeds: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one value a seed.

        Raises:
            ValueError: no value.
        """
        if not values:
            raise ValueError("an estimate needs at least one value, got none")
        if len(values) == 1:
            return cls(values[0], None)
        t = _STUDENT[len(values) - 2] if len(values) <= len(_STUDENT) + 1 else 1.96
        return cls(fmean(values), t * stdev(values) / math.sqrt(len(values)), len(values))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def title(line: Line) -> str:
    """The name of a line."""
    contestant, mode = line
    return CONTESTANTS[contestant].title + (f", {_EVICTING.get(mode, mode)}" if mode else "")


def counts(division: str, line: Line) -> bool:
    """Tell whether a line belongs in a division: of equal states, a contestant is measured in its bounded form."""
    contestant, mode = line
    return division == PARAMETERS or not CONTESTANTS[contestant].drops or mode == BOUNDED


def columns(result: Mapping[str, Any], size: Size) -> dict[str, dict[str, float]]:
    """The numbers of a result by mode and column."""
    found: dict[str, dict[str, float]] = {}
    for suite, rows in result["rows"].items():
        for row in rows:
            mode = _mode(row.get("modes", ""))
            for column, value in _cells(result["task"], suite, row, size):
                found.setdefault(mode, {})[column] = value
    if result["task"] != TEXT:
        for numbers in found.values():
            numbers[MEAN] = fmean(numbers.values())
    return found


def _mode(modes: str) -> str:
    """One mode in place of the same before and after."""
    first, arrow, second = modes.partition(" → ")
    return first if arrow and first == second else modes


def _cells(task: str, suite: str, row: Mapping[str, Any], size: Size) -> Iterable[tuple[str, float]]:
    if task == MQAR:
        yield f"{row['pairs']} pairs", row["accuracy"]
    elif task == COPY:
        yield f"{row['task']}, {row['tokens']}", row["accuracy"]
    elif task == NEEDLE:
        yield row["task"], row["accuracy"]
    elif suite.endswith("perplexity-by-position"):
        if row["predictor"] == "model" and row["position"] != "all":
            # the second half of a multiple of the training length; the last token predicts none
            last = int(row["position"].rpartition("-")[2]) + 1
            times = last // size.seq_len
            if times and times & (times - 1) == 0:
                yield f"loss at {times}x", row["loss"]
    elif suite.endswith("copy"):
        yield f"saved at {row['distance']}", row["saved"]
    elif suite == "switch-perplexity" and " at " in row["modes"]:
        yield from ((key, value) for key, value in row.items() if key.startswith(EXCESS) and value is not None)


class Scores:
    """The results of a task in a division: by line, column and seed; numbers that are not finite are no results."""

    def __init__(self, comparison: Comparison, division: str, task: str) -> None:
        self.lines: dict[Line, dict[str, dict[int, float]]] = {}
        self.rates: dict[str, float] = {}
        for name in comparison.entrants(division):
            pieces = comparison.counted(division, task, name)
            for piece in pieces:
                self.rates[name] = piece.rate
                if (result := comparison.read(piece)) is None:
                    continue
                for mode, numbers in columns(result, comparison.size).items():
                    if counts(division, (name, mode)):
                        line = self.lines.setdefault((name, mode), {})
                        for column, value in numbers.items():
                            if math.isfinite(value):
                                line.setdefault(column, {})[piece.seed] = value

    def estimate(self, line: Line, column: str) -> Estimate | None:
        """The mean over seeds; None where nothing was measured."""
        values = self.lines.get(line, {}).get(column)
        return Estimate.of(list(values.values())) if values else None

    def difference(self, line: Line, other: Line, column: str) -> Estimate | None:
        """By how much a line exceeds another, seed by seed, as both read the same rows; None without common seeds."""
        mine, theirs = (self.lines.get(which, {}).get(column, {}) for which in (line, other))
        common = sorted(mine.keys() & theirs.keys())
        return Estimate.of([mine[seed] - theirs[seed] for seed in common]) if common else None


def decisions(comparison: Comparison, division: str, task: str, contestant: str) -> dict[str, dict[int, float]]:
    """What the layers of a contestant decided over training: by name, means over layers and seeds at some steps.

    These are about a fifth of training apart, and the last is its end.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for piece in comparison.counted(division, task, contestant):
        layers: dict[str, dict[int, list[float]]] = {}
        for key, series in ((comparison.read(piece) or {}).get("logged") or {}).items():
            for step, value in series[:: -max(1, len(series) // _LOOKS)][::-1]:
                layers.setdefault(key.partition("/")[0], {}).setdefault(step, []).append(value)
        for what, steps in layers.items():
            for step, values in steps.items():
                found.setdefault(what, {}).setdefault(step, []).append(fmean(values))
    return {what: {step: fmean(values) for step, values in steps.items()} for what, steps in found.items()}


def costs(comparison: Comparison, division: str) -> dict[Line, dict[int, dict[str, Any]]]:
    """The measured costs by line and length."""
    found: dict[Line, dict[int, dict[str, Any]]] = {}
    for piece in comparison.costs(division):
        if (result := comparison.read(piece)) is not None:
            for row in result["rows"]:
                if counts(division, (piece.contestant, row["mode"])):
                    found.setdefault((piece.contestant, row["mode"]), {})[piece.length] = row
    return found


def front(points: Mapping[Line, tuple[float, float]], *, higher: bool = True) -> list[Line]:
    """The lines that no other beats at once in cost (the less the better) and in quality, cheapest first."""
    best, kept = -math.inf, []
    sign = 1 if higher else -1
    for line, (_, quality) in sorted(points.items(), key=lambda item: (item[1][0], -sign * item[1][1])):
        if sign * quality > best:
            best = sign * quality
            kept.append(line)
    return kept
