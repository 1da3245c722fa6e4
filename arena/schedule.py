"""The order and the expected times of runs, by which `--whole` starts only runs that should end in time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from arena import store
from arena.comparison import Comparison, Run, final_seeds, recipe_of, tuning_seeds


class Schedule:
    """The expected minutes of a comparison's runs, computed from speeds in stored results.

    A contestant without results for a task is expected to have the others' median speed in it or, if there is none, the
    size's `speed`.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self._speeds: dict[tuple[str, str], list[float]] = {}
        self._evaluations: dict[str, list[float]] = {}
        for key, stored in store.load(comparison.folder).items():
            if speed := stored.result.get("tokens per second"):
                self._speeds.setdefault((key.contestant, key.task), []).append(speed)
            if stored.result.get("rows") and (seconds := stored.result.get("evaluation seconds")):
                self._evaluations.setdefault(key.task, []).append(seconds)

    def speed(self, run: Run) -> float:
        """Return the expected training speed of a run in tokens/s."""
        measured = self._speeds.get((run.contestant, run.task))
        others = [median(found) for (_, task), found in self._speeds.items() if task == run.task]
        return median(measured) if measured else median(others) if others else self.comparison.size.speed

    def minutes(self, run: Run) -> float:
        """Return a run's expected minutes on one GPU: training and, unless it is a tuning run, its task's median
        evaluation. That is taken as 0 until an evaluation of the task has been timed.
        """
        seconds = recipe_of(run, self.comparison.size).optimizer.total_tokens / self.speed(run)
        if run.seed not in tuning_seeds(self.comparison.size):
            seconds += median(self._evaluations.get(run.task, [0.0]))
        return seconds / 60

    def ordered(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs sorted by task, then by contestant.

        Tasks have the order of the comparison and contestants that of the size; contestants that it does not name come
        last.
        """
        tasks, names = self.comparison.tasks, self.comparison.size.contestants

        def rank(run: Run) -> tuple[int, int]:
            return tasks.index(run.task), names.index(run.contestant) if run.contestant in names else len(names)

        return sorted(runs, key=rank)

    def remaining(self) -> list[Run]:
        """Return the runs without a result; reported runs have the grid's first rate until a rate is selected."""
        found: dict[Run, None] = {}
        for experiment in self.comparison.experiments():
            tuning = self.comparison.tuning_runs(*experiment)
            name = Run(experiment.division, experiment.contestant, experiment.task, tuning[0].rate, 0)
            scored = self.comparison.scored_runs(*experiment)
            scored = scored or [name._replace(seed=seed) for seed in final_seeds(experiment.task, self.comparison.size)]
            found |= dict.fromkeys(run for run in (*tuning, *scored) if self.comparison.result(run) is None)
        return self.ordered(list(found))

    def plan(self, gpus: int = 1) -> str:
        """Return a table of the hours that the remaining runs should take, one row per contestant."""
        by_name: dict[str, list[float]] = {}
        for run in self.remaining():
            by_name.setdefault(run.contestant, []).append(self.minutes(run))
        measured = {name for name, _ in self._speeds}
        lines = [
            f"| {name} | {len(minutes)} | {max(minutes):.1f} | {sum(minutes) / 60:.2f} | "
            f"{'measured' if name in measured else 'assumed'} |"
            for name, minutes in by_name.items()
        ]
        hours = sum(map(sum, by_name.values())) / 60
        head = ["| contestant | remaining runs | longest run, minutes | GPU hours | speed |", "|---|---|---|---|---|"]
        return "\n".join(
            [
                f"{self.comparison.size.name}: {hours:.1f} GPU hours, {hours / gpus:.1f} hours on {gpus} GPUs",
                "",
                *head,
                *lines,
            ]
        )
