"""What is left of a comparison, run: training pieces side by side, costs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from arena.pieces import Comparison, run_costs, run_piece
from arena.processes import Ended, work_off, workers

Say = Callable[[str], None]
_say: Say = partial(print, flush=True)


def run(
    comparison: Comparison,
    work: Path,
    *,
    commit: str,
    deadline: float,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    say: Say = _say,
) -> Ended:
    """Run what is left of a comparison; see `work_off`.

    Args:
        comparison: the comparison.
        work: a folder for runs that are not finished.
        commit: of the code.
        deadline: when to stop, in seconds since the epoch; runs end there with a checkpoint.
        jobs: pieces that run at a time, each in a process of its own; one runs in this process, unless GPUs are named.
        gpus: the GPUs that they are spread over, as CUDA_VISIBLE_DEVICES names them; those that are visible by default.
        say: told of every piece.

    Raises:
        ValueError: a result that was made under another rule, or no job to run with.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    options = {"deadline": deadline, "commit": commit, "jobs": jobs}

    def call(piece: Any) -> Callable[[], bool]:
        return partial(run_piece, piece, comparison, work, **options)

    return work_off(comparison.ready, call, workers(jobs, gpus), deadline, say)


def measure(
    comparison: Comparison, *, commit: str, deadline: float, gpus: Sequence[str] = (), say: Say = _say
) -> Ended:
    """Measure what is left of the costs, one piece at a time on each GPU that is named; arguments as of `run`."""

    def call(piece: Any) -> Callable[[], bool]:
        return partial(run_costs, piece, comparison, commit=commit)

    return work_off(comparison.unmeasured, call, workers(max(1, len(gpus)), gpus), deadline, say)
