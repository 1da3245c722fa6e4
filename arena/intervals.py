"""Confidence intervals: bootstrap over seeds and test examples, Student's t, Wilson's interval, Holm's procedure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from arena import rules

# values of test examples by group (such as a number of pairs, a length or a task); all groups have equal weights
Groups = Mapping[Any, Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """The estimate of a mean, or of a difference of means, over seeds and test examples.

    Attributes:
        mean: the estimate.
        error: standard deviation of the estimate's replicates in the bootstrap.
        freedom: degrees of freedom for Student's t; 0 if there are too few seeds for an interval.
    """

    mean: float
    error: float
    freedom: int

    def interval(self, level: float = 0.05) -> tuple[float, float]:
        """Return the confidence interval that misses the true value with probability `level`."""
        if not self.freedom:
            return -math.inf, math.inf
        half = student_quantile(level, self.freedom) * self.error
        return self.mean - half, self.mean + half

    def p_value(self, null: float) -> float:
        """Return the two-sided p-value of the hypothesis that the true value is `null`; 1 if there is no interval."""
        distance = abs(self.mean - null)
        if not self.freedom or distance < 1e-12:
            return 1.0
        return student_p(distance / self.error, self.freedom) if self.error else 0.0


def estimate(seeds: Sequence[Groups]) -> Estimate:
    """Return the mean of one model's values; `seeds` has, for each seed, the values by group."""
    values, variance, freedom = _replicates(seeds, 0)
    mean = float(np.mean([_mean(groups) for groups in seeds]))
    return Estimate(mean, _deviation(values), 0 if variance is None else freedom)


def difference(subject: Sequence[Groups], baseline: Sequence[Groups]) -> Estimate:
    """Return the difference of two models' means; their seeds are independent, but their test examples are the same.

    Raises:
        ValueError: two seeds differ in their groups or in a group's number of examples.
    """
    shapes = [{key: len(values) for key, values in groups.items()} for groups in (*subject, *baseline)]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"both sides must have the same test examples, got {shapes[0]} and others")
    (ours, one, n), (theirs, other, m) = _replicates(subject, 0), _replicates(baseline, 1)
    mean = float(np.mean([_mean(g) for g in subject]) - np.mean([_mean(g) for g in baseline]))
    if one is None or other is None:
        return Estimate(mean, 0.0, 0)
    # Welch's degrees of freedom, rounded down to an integer
    denominator = one**2 / n + other**2 / m
    freedom = int((one + other) ** 2 / denominator + 1e-9) if denominator else n + m
    return Estimate(mean, _deviation(ours - theirs), freedom)


def _mean(groups: Groups) -> float:
    return float(np.mean([np.mean(values) for values in groups.values()]))


def _deviation(values: np.ndarray) -> float:
    # values that should be equal may differ by rounding errors
    deviation = float(values.std())
    return deviation if deviation > 1e-9 else 0.0


def _replicates(seeds: Sequence[Groups], side: int) -> tuple[np.ndarray, float | None, int]:
    """Return replicates of a model's mean, the mean's variance, and the degrees of freedom.

    The variance is estimated from the seeds; it is None for a single seed.
    """
    n = len(seeds)
    means = [_mean(groups) for groups in seeds]
    # each model (`side`) draws its own seeds, but both draw the same examples
    chosen = _draws(n, -1 - side)
    total = np.zeros(rules.REPLICATES)
    for index, key in enumerate(seeds[0]):
        values = np.array([groups[key] for groups in seeds], dtype=np.float64)
        total += np.einsum("rn,rn->r", chosen @ values, _draws(values.shape[1], index))
    variance = float(np.var(means, ddof=1)) / n if n > 1 else None
    return total / len(seeds[0]), variance, max(1, n - 1)


@lru_cache(maxsize=64)
def _draws(n: int, stream: int) -> np.ndarray:
    """Return each item's weight in each replicate: the fraction of n − 1 draws with replacement that select it."""
    if n == 1:
        return np.ones((rules.REPLICATES, 1))
    generator = np.random.default_rng([rules.GENERATOR_SEED, stream + 2])
    return generator.multinomial(n - 1, np.full(n, 1 / n), size=rules.REPLICATES) / (n - 1)


def student_p(t: float, freedom: int) -> float:
    """Return the probability that |Student's t| exceeds `t`, by the closed form for integer degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    term = math.cos(angle) if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + freedom % 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if freedom % 2 else inside))


def student_quantile(level: float, freedom: int) -> float:
    """Return the t that |Student's t| exceeds with probability `level`."""
    low, high = 0.0, 1.0
    while student_p(high, freedom) > level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > level else (low, middle)
    return high


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for the fraction successes / trials."""
    z = 1.959964
    centre = (successes + z * z / 2) / (trials + z * z)
    half = z / (trials + z * z) * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return, for each hypothesis, the level at which Holm's procedure tests it.

    The level is 0 for all hypotheses after the first that is not rejected, in the order of their p-values.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    levels, rejecting = [0.0] * len(p_values), True
    for rank, i in enumerate(order):
        level = rules.LEVEL / (len(p_values) - rank)
        levels[i] = level if rejecting else 0.0
        rejecting = rejecting and p_values[i] <= level
    return levels
