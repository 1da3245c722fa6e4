"""Pieces side by side: in this process or in others, each on its GPU, until all are done or time is up.

It imports nothing large, so that a process starts at once, with its GPU chosen before anything could look for one.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

# seconds after the deadline in which a piece may still end by itself
GRACE = 20.0
# what is run, and told by its fields
Piece = tuple[Any, ...]


class Outcome(NamedTuple):
    """What a call returned, or the error that it raised."""

    value: Any = None
    error: str | None = None


class Ended(NamedTuple):
    """How a call ended: whether all is done, and the pieces that an error kept from it, which the next call repeats."""

    done: bool
    failed: tuple[Piece, ...]


def work_off(
    ready: Callable[[], Sequence[Piece]],
    call: Callable[[Piece], Callable[[], bool]],
    workers: Sequence[Here | Process],
    deadline: float,
    say: Callable[[str], None],
) -> Ended:
    """Run pieces until none is left; one that fails is told, and the others go on.

    Args:
        ready: the pieces that can be run now and are not done, those first that are to be run first.
        call: from a piece, what runs it and returns whether it is done.
        workers: who runs them, one at a time each.
        deadline: when to begin no more, in seconds since the epoch; what runs `GRACE` seconds later is killed.
        say: told of every piece.
    """
    running: dict[Here | Process, Piece] = {}
    failed: dict[Piece, None] = {}
    try:
        while True:
            left = iter([p for p in ready() if p not in failed and p not in running.values()])
            for worker in workers:
                if worker not in running and time.time() < deadline and (piece := next(left, None)) is not None:
                    running[worker] = piece
                    worker.begin(call(piece))
            if not running:
                return Ended(not ready(), tuple(failed))
            patience = None if deadline == math.inf else max(0.0, deadline + GRACE - time.time())
            if answered := wait([worker.answers for worker in running], patience):
                outcomes = {worker: worker.outcome() for worker in running if worker.answers in answered}
            else:
                outcomes = dict.fromkeys(running)
            for worker, outcome in outcomes.items():
                piece = running.pop(worker)
                if outcome is None or outcome.error is not None:
                    worker.kill()
                if outcome is not None and outcome.error is not None:
                    failed[piece] = None
                say(f"{' '.join(map(str, piece))}: {_told(outcome)}")
    finally:
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.end()


def _told(outcome: Outcome | None) -> str:
    if outcome is None:
        return "killed, as time was up"
    if outcome.error is not None:
        return f"failed, {outcome.error}"
    return "done" if outcome.value else "stopped, and goes on from its checkpoint"


class Here:
    """Makes calls in this process."""

    def __init__(self) -> None:
        self.answers, self._mine = multiprocessing.Pipe(duplex=False)

    def begin(self, call: Callable[[], Any]) -> None:
        """Make a call."""
        self._mine.send(_outcome(call))

    def outcome(self) -> Outcome:
        """What became of it."""
        return self.answers.recv()

    def kill(self) -> None:
        """Do nothing, as nothing is running."""

    dismiss = end = kill


class Process:
    """Makes calls in a process of its own, which stays for the next one.

    One that died, or was killed, is replaced at the next call.

    Args:
        environment: variables that are set there before anything is imported.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: Any = None
        self.answers: Connection

    def begin(self, call: Callable[[], Any]) -> None:
        """Let a call be made; it must be picklable."""
        if self._process is not None and not self._process.is_alive():
            self.end()
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.answers, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,))
            with _changed(self._environment):
                self._process.start()
            theirs.close()
        self.answers.send(call)

    def outcome(self) -> Outcome:
        """Wait for what becomes of it."""
        try:
            return self.answers.recv()
        except (EOFError, OSError):
            self._process.join()
            return Outcome(error=f"its process ended with the exit code {self._process.exitcode}")

    def kill(self) -> None:
        """End the process at once: after an error on a GPU, say, no call there succeeds."""
        if self._process is not None:
            self._process.kill()
            self.end()

    def dismiss(self) -> None:
        """Let the process end once it has nothing to do."""
        if self._process is not None:
            self.answers.close()

    def end(self) -> None:
        """Wait until it has ended, and not for long."""
        if self._process is not None:
            self.answers.close()
            self._process.join(GRACE)
            self._process.kill()
            self._process.join()
            self._process = None


def workers(count: int, gpus: Sequence[str]) -> list[Here | Process]:
    """So many workers, spread over GPUs; a single one works here unless its GPU is named.

    Args:
        count: how many.
        gpus: as CUDA_VISIBLE_DEVICES names them; by default those that this process sees.
    """
    if count == 1 and not gpus:
        return [Here()]
    names = gpus or _visible()
    # side by side, none has more than a core
    shared = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if count > 1 else {}
    chosen = [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} if names else {} for i in range(count)]
    return [Process(shared | gpu) for gpu in chosen]


def _visible() -> list[str]:
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    return [str(i) for i, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


@contextmanager
def _changed(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name)
        os.environ.update(before)


def _serve(calls: Connection) -> None:
    """Make calls until nobody asks for any."""
    while True:
        try:
            call = calls.recv()
        except EOFError:
            return
        outcome = _outcome(call)
        # the next piece, and the processes beside, find the memory free
        gc.collect()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        calls.send(outcome)


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call())
    except Exception as error:
        traceback.print_exc()
        return Outcome(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
