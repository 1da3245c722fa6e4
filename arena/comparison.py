"""The runs of a comparison: which exist, which are done, and which can start."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from arena import store
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
from arena.tasks import MQAR, TASKS, recipe, suites
from tokenmix_core.training.recipe import Recipe
from tokenmix_lte.training_free import Method


class Experiment(NamedTuple):
    """A contestant on a task in a division: runs that select the learning rate, then one run per seed."""

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
        """Key of the result."""
        return store.Key(*self)


class CostRun(NamedTuple):
    """A measurement of one contestant's speed and memory at one context length."""

    division: str
    contestant: str
    length: int

    @property
    def key(self) -> store.Key:
        """Key of the result."""
        return store.Key(self.division, self.contestant, store.COSTS, self.length, None)


@dataclass(frozen=True)
class Comparison:
    """A size, or a part of it, and its results.

    Attributes:
        size: settings of all runs.
        results: folder of the results of all sizes.
        divisions, contestants, tasks: names that select a part; empty: those of the size.
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
        """Folder of the size's results."""
        return self.results / self.size.name

    def contestants_in(self, division: str) -> list[str]:
        """Return the selected contestants of a division."""
        return [c.name for c in eligible(division) if c.name in self.contestants]

    def experiments(self) -> list[Experiment]:
        """Return all experiments once, ordered like the rows of the tables."""
        found = [
            Experiment(training_division(contestant, division, self.size), task, contestant)
            for division in self.divisions
            for task in self.tasks
            for contestant in self.contestants_in(division)
        ]
        return list(dict.fromkeys(found))

    def tuning_runs(self, division: str, task: str, contestant: str) -> list[Run]:
        """Return the runs that select the learning rate: one per rate of the grid, at the tuning seed.

        An ablation shares the runs of the contestant that it ablates.
        """
        size = self.size
        contestant = CONTESTANTS[contestant].ablates or contestant
        division = training_division(contestant, division, size)
        return [Run(division, contestant, task, rate, size.tuning_seed) for rate in size.rates]

    def selected_rate(self, division: str, task: str, contestant: str) -> float | None:
        """Return the rate with the smallest final training loss, or None before all rates were tried.

        A diverged run counts as an infinite loss. If all diverged, return the smallest rate.
        """
        tried = {run.rate: self.result(run) for run in self.tuning_runs(division, task, contestant)}
        if any(result is None for result in tried.values()):
            return None
        losses = {rate: result["last loss"] for rate, result in tried.items() if result is not None}
        return min(sorted(losses), key=lambda rate: math.inf if losses[rate] is None else losses[rate])

    def scored_runs(self, division: str, task: str, contestant: str) -> list[Run]:
        """Return the runs whose results are reported, one per seed; empty before the rate is selected."""
        rate = self.selected_rate(division, task, contestant)
        division = training_division(contestant, division, self.size)
        return [] if rate is None else [Run(division, contestant, task, rate, seed) for seed in self.size.seeds]

    def cost_runs(self, *divisions: str) -> list[CostRun]:
        """Return the cost measurements of some divisions (default: all), short contexts first."""
        found = [
            CostRun(training_division(name, division, self.size), name, length)
            for division in divisions or self.divisions
            for length in self.size.cost_lengths
            for name in self.contestants_in(division)
        ]
        return list(dict.fromkeys(found))

    def ready_runs(self) -> list[Run]:
        """Return the runs that can start now.

        The seeds of one contestant precede the rates of the next, so an interrupted comparison has complete rows.
        """
        found = []
        for experiment in self.experiments():
            runs = (*self.tuning_runs(*experiment), *self.scored_runs(*experiment))
            found += [run for run in runs if self.result(run) is None]
        # an ablation and its base contestant share tuning runs
        return list(dict.fromkeys(found))

    def ready_cost_runs(self) -> list[CostRun]:
        """Return the cost measurements that are not done."""
        return [run for run in self.cost_runs() if self.result(run) is None]

    def result(self, run: Run | CostRun) -> store.Result | None:
        """Return the result of a run, or None before it is done.

        Raises:
            ValueError: the result is damaged, or was made with other settings.
        """
        if (stored := store.read(self.folder, run.key)) is None:
            return None
        made, current = stored.result["rule"], fingerprint(run, self.size)
        if made != current:
            raise ValueError(f"{stored.source} was made under another rule ({made}, now {current}); remove it to go on")
        return stored.result


@cache
def fingerprint(run: Run | CostRun, size: Size) -> str:
    """Hash all settings that a result depends on: recipe and suite options, or model and context length."""
    if isinstance(run, CostRun):
        settings: Any = [solve(run.contestant, run.division, size).fields, run.length]
    else:
        options = {name: asdict(value) for name, value in suites(CONTESTANTS[run.contestant], run.task, size).items()}
        settings = [recipe_of(run, size).identity(), options]
        if budgets := eviction_budgets(run, size):
            settings.append(budgets)
    return blake2b(json.dumps(settings, sort_keys=True, default=list).encode(), digest_size=8).hexdigest()


def recipe_of(run: Run, size: Size) -> Recipe:
    """Return the recipe of a run."""
    return recipe(run.contestant, run.division, run.task, size, run.rate, run.seed)


def eviction_budgets(run: Run, size: Size) -> dict[Method, int]:
    """Return the eviction methods under which the trained model is evaluated again, with their KV budget in tokens."""
    budget = CONTESTANTS[run.contestant].kv_budget
    if budget is None or run.task != MQAR or run.seed not in size.seeds:
        return {}
    return dict.fromkeys(EVICTION_METHODS, budget(size))
