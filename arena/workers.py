"""Jobs in parallel worker processes, each on its GPU, until all jobs are done or a deadline passes.

This module imports no large library, so that a worker process starts fast and sets CUDA_VISIBLE_DEVICES before any
import can initialise CUDA.
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

# seconds that jobs have after the deadline to finish; then they are killed
GRACE = 20.0
# a job: a NamedTuple whose fields identify the job and are logged
Job = tuple[Any, ...]


class Terminated(BaseException):
    """SIGTERM was received: all jobs stop, and those that train write a checkpoint."""


class Outcome(NamedTuple):
    """The value that a call has returned, or the error that it has raised."""

    value: Any = None
    error: str | None = None


class Summary(NamedTuple):
    """`done` is True if no job is left; `failed` has the jobs that raised an error, which the next call runs again."""

    done: bool
    failed: tuple[Job, ...]


def run_jobs(
    ready: Callable[[], Sequence[Job]],
    call: Callable[[Job], Callable[[], bool]],
    workers: Sequence[InlineWorker | ProcessWorker],
    deadline: float,
    log: Callable[[str], None],
) -> Summary:
    """Run jobs until none is left or the deadline passes; if a job fails, log its error and continue with the others.

    At the deadline, in seconds since the epoch, no further job starts; `GRACE` seconds later, running jobs are killed.
    """
    running: dict[InlineWorker | ProcessWorker, Job] = {}
    failed: dict[Job, None] = {}
    try:
        while True:
            waiting = iter([job for job in ready() if job not in failed and job not in running.values()])
            for worker in workers:
                if worker not in running and time.time() < deadline and (job := next(waiting, None)) is not None:
                    running[worker] = job
                    worker.start(call(job))
            if not running:
                return Summary(not ready(), tuple(failed))
            timeout = None if deadline == math.inf else max(0.0, deadline + GRACE - time.time())
            if finished := wait([worker.connection for worker in running], timeout):
                outcomes = {worker: worker.outcome() for worker in running if worker.connection in finished}
            else:
                outcomes = dict.fromkeys(running)
            for worker, outcome in outcomes.items():
                job = running.pop(worker)
                if outcome is None or outcome.error is not None:
                    worker.kill()
                if outcome is not None and outcome.error is not None:
                    failed[job] = None
                log(f"{' '.join(map(str, job))}: {_describe(outcome)}")
    except (Terminated, KeyboardInterrupt):
        for worker in workers:
            worker.terminate()
        raise
    finally:
        # ask all workers to exit before waiting for any of them
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.join()


def _describe(outcome: Outcome | None) -> str:
    if outcome is None:
        return "killed at the time limit"
    if outcome.error is not None:
        return f"failed, {outcome.error}"
    return "done" if outcome.value else "stopped at the time limit; the next call resumes it"


class InlineWorker:
    """A worker that runs calls in this process."""

    def __init__(self) -> None:
        self.connection, self._sender = multiprocessing.Pipe(duplex=False)

    def start(self, call: Callable[[], Any]) -> None:
        """Run a call and keep its outcome for `outcome`."""
        self._sender.send(_outcome(call))

    def outcome(self) -> Outcome:
        """Return the outcome of the last call."""
        return self.connection.recv()

    def kill(self) -> None:
        """Do nothing, because the call has already ended."""

    close = join = terminate = kill


class ProcessWorker:
    """A worker that runs calls in a process of its own, which is replaced if it dies or is killed.

    Args:
        environment: environment variables that are set in the process before its imports.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: Any = None
        self.connection: Connection

    def start(self, call: Callable[[], Any]) -> None:
        """Start a call, which must be picklable, in the worker's process."""
        if self._process is not None and not self._process.is_alive():
            self.join()
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, remote = context.Pipe()
            self._process = context.Process(target=_serve, args=(remote,))
            with _environment(self._environment):
                self._process.start()
            remote.close()
        self.connection.send(call)

    def outcome(self) -> Outcome:
        """Wait for the outcome of the call, and return it."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            return Outcome(error=f"its process ended with the exit code {self._process.exitcode}")

    def kill(self) -> None:
        """Kill the process, for example after a CUDA error, after which further calls in it cannot succeed."""
        if self._process is not None:
            self._process.kill()
            self.join()

    def terminate(self) -> None:
        """Send SIGTERM to the process: training stops with a checkpoint, other calls end at once."""
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """Let the process exit when its current call has ended."""
        if self._process is not None:
            self.connection.close()

    def join(self) -> None:
        """Wait up to `GRACE` seconds for the process to exit, and then kill it."""
        if self._process is not None:
            self.connection.close()
            self._process.join(GRACE)
            self._process.kill()
            self._process.join()
            self._process = None


def make_workers(count: int, gpus: Sequence[str], deadline: float) -> list[InlineWorker | ProcessWorker]:
    """Return workers, distributed over GPUs; a single worker without given GPUs and deadline is this process.

    Args:
        count: number of workers.
        gpus: GPUs, named as in CUDA_VISIBLE_DEVICES; by default those visible to this process.
        deadline: the same as for `run_jobs`; infinity is no deadline. With a deadline, even a single worker has a
            process of its own, which can be killed.
    """
    if count == 1 and not gpus and deadline == math.inf:
        return [InlineWorker()]
    names = gpus or _visible_gpus()
    # give each of several concurrent workers one CPU core
    shared = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if count > 1 else {}
    assigned = [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} if names else {} for i in range(count)]
    return [ProcessWorker(shared | gpu) for gpu in assigned]


def _visible_gpus() -> list[str]:
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    return [str(i) for i, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)


def _serve(calls: Connection) -> None:
    """Run calls in a worker process until the connection is closed."""
    while True:
        try:
            call = calls.recv()
        except EOFError:
            return
        try:
            outcome = _outcome(call)
        except (Terminated, KeyboardInterrupt):
            return
        # free GPU memory for the next job and for other processes
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
