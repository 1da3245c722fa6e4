"""The runs of a comparison: the list of all runs, their results, and the runs that can start now."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from arena import rules, store
from arena.contestants import (
    CONTESTANTS,
    DEFAULT_CONTESTANTS,
    DIVISIONS,
    EVICTION_METHODS,
    eligible,
    training_division,
)
from arena.models import solve
from arena.sizes import Size
from arena.tasks import MQAR, TASKS, TEXT, recipe, suites
from tokenmix_core.training.recipe import Recipe
from tokenmix_lte.training_free import Method


class Experiment(NamedTuple):
    """A contestant on a task in a division (`DIVISIONS`): tuning runs select the learning rate of the reported runs."""

    division: str
    task: str
    contestant: str


class Run(NamedTuple):
    """One training run and its evaluation."""

    division: str
    contestant: str
    task: str
    rate: float
    seed: int

    @property
    def key(self) -> store.Key:
        """The key of the run's result."""
        return store.Key(*self)


class CostRun(NamedTuple):
    """A measurement of one contestant's speed and memory at one context length."""

    division: str
    contestant: str
    length: int

    @property
    def key(self) -> store.Key:
        """The key of the measurement's result."""
        return store.Key(self.division, self.contestant, store.COSTS, self.length, None)


@dataclass(frozen=True)
class Comparison:
    """All runs that a `Size`, the settings of a comparison, defines, or a part of them; and their results.

    Attributes:
        size: the settings of all runs.
        results: folder with the results of all sizes.
        divisions, contestants, tasks: names that select a part of the size; if empty, all that the size names.
    """

    size: Size
    results: Path
    divisions: tuple[str, ...] = ()
    contestants: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        defaults = {"divisions": DIVISIONS, "contestants": DEFAULT_CONTESTANTS, "tasks": tuple(TASKS)}
        for part, names in defaults.items():
            object.__setattr__(self, part, getattr(self, part) or getattr(self.size, part) or names)
        for kind, names, known in (
            ("division", self.divisions, DIVISIONS),
            ("contestant", self.contestants, CONTESTANTS),
            ("task", self.tasks, TASKS),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"there is no {kind} {unknown[0]!r}; choose from {', '.join(known)}")
        if not any(self.contestants_in(division) for division in self.divisions):
            raise ValueError(
                f"none of {', '.join(self.contestants)} takes part in the division {' or '.join(self.divisions)}"
            )

    @property
    def folder(self) -> Path:
        """The folder of the size's results."""
        return self.results / self.size.name

    def contestants_in(self, division: str) -> list[str]:
        """Return the names of the selected contestants in a division (`PARAMETERS` or `STATE`)."""
        return [c.name for c in eligible(division) if c.name in self.contestants]

    def experiments(self) -> list[Experiment]:
        """Return all experiments, each once, by division, task and contestant, as in tables."""
        found = [
            Experiment(training_division(contestant, division, self.size), task, contestant)
            for division in self.divisions
            for task in self.tasks
            for contestant in self.contestants_in(division)
        ]
        return list(dict.fromkeys(found))

    def tuning_runs(self, division: str, task: str, contestant: str) -> list[Run]:
        """Return the runs that select the learning rate: one for each rate of the grid and each tuning seed.

        An ablation has the tuning runs of the contestant that it ablates.
        """
        return self._grid(division, task, contestant)[0]

    def selected_rate(self, division: str, task: str, contestant: str) -> float | None:
        """Return the rate whose tuning runs have the least mean final training loss.

        The loss of a diverged run counts as infinite. Returns None until all tuning runs have results and the best rate
        is inside the grid. If the size supports no claims, the best rate of the original grid is taken, even at an end.
        """
        return self._grid(division, task, contestant)[1]

    def _grid(self, division: str, task: str, contestant: str) -> tuple[list[Run], float | None]:
        """Return the tuning runs and the selected rate; the grid is extended while its best rate is at an end."""
        size = self.size
        contestant = CONTESTANTS[contestant].ablates or contestant
        division = training_division(contestant, division, size)
        runs = {
            rate: [Run(division, contestant, task, rate, seed) for seed in tuning_seeds(size)]
            for rate in sorted(size.rates)
        }
        while True:
            every = [run for rate in sorted(runs) for run in runs[rate]]
            results = [self.result(run) for run in every]
            if any(result is None for result in results):
                return every, None
            losses: dict[float, float] = dict.fromkeys(sorted(runs), 0.0)
            for run, result in zip(every, results, strict=True):
                loss = None if result is None else result["last loss"]
                losses[run.rate] += math.inf if loss is None else loss
            best = min(losses, key=lambda rate: losses[rate])
            if min(losses) < best < max(losses) or not size.supports_claims:
                return every, best
            rate = best / rules.RATE_FACTOR if best == min(losses) else best * rules.RATE_FACTOR
            if not rules.LOWEST_RATE <= rate <= rules.HIGHEST_RATE:
                return every, None
            runs[rate] = [run._replace(rate=rate) for run in runs[best]]

    def scored_runs(self, division: str, task: str, contestant: str) -> list[Run]:
        """Return the runs whose results are reported, one per seed; empty until the learning rate is selected."""
        rate = self.selected_rate(division, task, contestant)
        division = training_division(contestant, division, self.size)
        return (
            []
            if rate is None
            else [Run(division, contestant, task, rate, seed) for seed in final_seeds(task, self.size)]
        )

    def cost_runs(self, *divisions: str) -> list[CostRun]:
        """Return the cost measurements of the given divisions (by default all), by division, then by context length."""
        found = [
            CostRun(training_division(name, division, self.size), name, length)
            for division in divisions or self.divisions
            for length in self.size.cost_lengths
            for name in self.contestants_in(division)
        ]
        return list(dict.fromkeys(found))

    def ready_runs(self) -> list[Run]:
        """Return the runs that can start now.

        All seeds of one contestant come before the rates of the next, so that even an interrupted comparison has
        complete rows of tables.
        """
        found = []
        for experiment in self.experiments():
            runs = (*self.tuning_runs(*experiment), *self.scored_runs(*experiment))
            found += [run for run in runs if self.result(run) is None]
        # drop duplicates: an ablation has the same tuning runs as the contestant that it ablates
        return list(dict.fromkeys(found))

    def ready_cost_runs(self) -> list[CostRun]:
        """Return the cost measurements that have no result."""
        return [run for run in self.cost_runs() if self.result(run) is None]

    def result(self, run: Run | CostRun) -> store.Result | None:
        """Return the result of a run, or None if it has none yet, or one that does not count (`exploratory`).

        Raises:
            ValueError: the result is damaged, or was produced by other settings.
        """
        if (stored := store.load(self.folder).get(run.key)) is None or self._exploratory(stored.result):
            return None
        made, current = stored.result["rule"], fingerprint(run, self.size)
        if made != current:
            raise ValueError(f"{stored.source} was made under another rule ({made}, now {current}); remove it to go on")
        return stored.result

    def _exploratory(self, result: store.Result) -> bool:
        return self.size.supports_claims and result.get("rules") != rules.digest()

    def exploratory(self) -> int:
        """Return the number of results of another or an unknown version of RULES.md; reports do not use them.

        It is 0 if the size supports no claims: its results count under every version.
        """
        return sum(self._exploratory(stored.result) for stored in store.load(self.folder).values())


def tuning_seeds(size: Size) -> tuple[int, ...]:
    """Return the seeds of those runs that select the learning rate."""
    return rules.TUNING_SEEDS if size.supports_claims else (size.tuning_seed,)


def final_seeds(task: str, size: Size) -> tuple[int, ...]:
    """Return the seeds of those runs of a task whose results are reported."""
    if not size.supports_claims:
        return size.seeds
    return rules.TEXT_SEEDS if task == TEXT else rules.RECALL_SEEDS


@cache
def fingerprint(run: Run | CostRun, size: Size) -> str:
    """Return a hash of the settings of a result: recipe, suite options and KV budgets, or model and context length."""
    if isinstance(run, CostRun):
        settings: Any = [solve(run.contestant, run.division, size).fields, run.length]
    else:
        options = {name: asdict(value) for name, value in suites(CONTESTANTS[run.contestant], run.task, size).items()}
        for values in options.values():
            # leave this option out: it changes no result, and results from before it was added must stay valid
            del values["split_rows"]
        settings = [recipe_of(run, size).identity(), options]
        if budgets := eviction_budgets(run, size):
            settings.append(budgets)
    return blake2b(json.dumps(settings, sort_keys=True, default=list).encode(), digest_size=8).hexdigest()


def recipe_of(run: Run, size: Size) -> Recipe:
    """Return the recipe of a run; if the size supports claims, tuning runs of the task text are shorter."""
    if run.task == TEXT and size.supports_claims and run.seed in tuning_seeds(size):
        size = replace(size, steps=max(1, round(rules.TEXT_TUNING * size.steps)))
    return recipe(run.contestant, run.division, run.task, size, run.rate, run.seed)


def eviction_budgets(run: Run, size: Size) -> dict[Method, int]:
    """Return the eviction methods with which the trained model is evaluated again, with their KV budgets in tokens.

    The result is empty for tuning runs, for contestants without `kv_budget` and for tasks other than recall and text.
    """
    budget = CONTESTANTS[run.contestant].kv_budget
    if budget is None or run.task not in (MQAR, TEXT) or run.seed in tuning_seeds(size):
        return {}
    return dict.fromkeys(EVICTION_METHODS, budget(size))
