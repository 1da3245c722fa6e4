"""Execute the runs of a comparison: training runs in parallel, cost measurements one by one on each GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from arena.comparison import Comparison, Run
from arena.execution import execute, measure_costs
from arena.schedule import Schedule
from arena.workers import Summary, make_workers, run_jobs

Log = Callable[[str], None]
_print: Log = partial(print, flush=True)


def run(
    comparison: Comparison,
    work: Path,
    *,
    commit: str,
    deadline: float,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    whole: bool = False,
    log: Log = _print,
) -> Summary:
    """Execute the remaining training runs of a comparison, in the order of its schedule, by `run_jobs`.

    Args:
        comparison: the comparison whose runs are executed.
        work: folder for the files of unfinished runs.
        commit: commit of the code, stored with results.
        deadline: seconds since the epoch at which runs stop with a checkpoint.
        jobs: number of concurrent runs, each in a process of its own; if `jobs` is 1 and `deadline` infinite, without
            `gpus`, all runs use this process.
        gpus: GPUs on which runs are distributed, named as in CUDA_VISIBLE_DEVICES; by default all visible ones.
        whole: whether to start only runs that should end before the deadline, for machines that lose checkpoints.
        log: called with one line of text per run.

    Raises:
        ValueError: `jobs` is below 1, or a result was produced by other settings.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    options = {"deadline": deadline, "commit": commit, "jobs": jobs}

    def call(run: Any) -> Callable[[], bool]:
        return partial(execute, run, comparison, work, **options)

    def ready() -> Sequence[Run]:
        schedule = Schedule(comparison)
        left = math.inf if not whole else (deadline - time.time()) / 60
        return [run for run in schedule.ordered(comparison.ready_runs()) if schedule.minutes(run) <= left]

    summary = run_jobs(ready, call, make_workers(jobs, gpus, deadline), deadline, log)
    return summary._replace(done=not comparison.ready_runs())


def measure(
    comparison: Comparison, *, commit: str, deadline: float, gpus: Sequence[str] = (), log: Log = _print
) -> Summary:
    """Execute the remaining cost measurements, one by one on each GPU; the arguments are the same as for `run`."""

    def call(run: Any) -> Callable[[], bool]:
        return partial(measure_costs, run, comparison, commit=commit)

    return run_jobs(comparison.ready_cost_runs, call, make_workers(max(1, len(gpus)), gpus, deadline), deadline, log)
