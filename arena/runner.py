"""Running pieces: one after another or side by side, on one GPU or several, until all are done or time is up."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from arena.pieces import Comparison, CostPiece, Piece, run_costs, run_piece


def run(
    comparison: Comparison,
    work: Path,
    *,
    commit: str,
    deadline: float,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> bool:
    """Run what is left of a comparison; return whether all of it is done.

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
    if jobs == 1 and not gpus:
        while time.time() < deadline and (ready := comparison.ready()):
            _tell(ready[0], run_piece(ready[0], comparison, work, **options), say)
        return not comparison.ready()
    context = multiprocessing.get_context("spawn")
    slots = context.SimpleQueue()
    for i in range(jobs):
        slots.put(gpus[i % len(gpus)] if gpus else "")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_take_gpu, initargs=(slots,)) as pool:
        running: dict[Future[bool], Piece] = {}
        while True:
            # a seed is ready only when its rate is chosen
            waiting = [p for p in comparison.ready() if p not in running.values()] if time.time() < deadline else []
            for piece in waiting[: jobs - len(running)]:
                running[pool.submit(run_piece, piece, comparison, work, **options)] = piece
            if not running:
                return not comparison.ready()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                _tell(running.pop(future), future.result(), say)


def measure(comparison: Comparison, *, commit: str, deadline: float, say: Callable[[str], None] = print) -> bool:
    """Measure what is left of the costs, one after another; return whether all of it is done."""
    pieces = comparison.costs()
    for piece in pieces:
        if time.time() >= deadline:
            break
        if comparison.read(piece) is None:
            run_costs(piece, comparison, commit=commit)
            _tell(piece, True, say)
    return all(comparison.read(piece) is not None for piece in pieces)


def _take_gpu(slots: Any) -> None:
    if name := slots.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = name


def _tell(piece: Piece | CostPiece, done: bool, say: Callable[[str], None]) -> None:
    say(f"{' '.join(map(str, piece))}: {'done' if done else 'stopped, and goes on from its checkpoint'}")
