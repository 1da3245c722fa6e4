"""Worker processes: one GPU each; a job that fails, dies or exceeds the deadline does not affect the others."""

import math
import os
import signal
import threading
import time
from functools import partial

import pytest

from arena import workers
from arena.__main__ import _sigterm_raises
from arena.workers import InlineWorker, ProcessWorker, Terminated, make_workers, run_jobs


def run_calls(calls, *, count=1, seconds=60.0):
    """Run named calls in processes on the GPU "a"; return the summary and the logged outcome of each call."""
    logged = {}

    def ready():
        return [(name,) for name in calls if logged.get(name) != "done"]

    def log(text):
        name, _, outcome = text.partition(": ")
        logged[name] = outcome

    deadline = time.time() + seconds
    crew = make_workers(count, ["a"], deadline)
    summary = run_jobs(ready, lambda job: calls[job[0]], crew, deadline, log)
    assert all(worker._process is None for worker in crew)
    return summary, logged


def test_a_job_that_fails_or_dies_is_logged_and_the_others_continue():
    calls = {"wrong": partial(int, "one"), "dead": partial(os._exit, 3), "right": partial(bool, 1)}
    summary, logged = run_calls(calls)
    assert summary == (False, (("wrong",), ("dead",)))
    assert logged == {
        "wrong": "failed, ValueError: invalid literal for int() with base 10: 'one'",
        "dead": "failed, its process ended with the exit code 3",
        "right": "done",
    }


def test_a_job_beyond_the_deadline_is_killed(monkeypatch):
    monkeypatch.setattr(workers, "GRACE", 1.0)
    calls = {"slow": partial(time.sleep, 600), "right": partial(bool, 1), "late": partial(bool, 1)}
    start = time.time()
    summary, logged = run_calls({"slow": calls["slow"]}, seconds=0.1)
    assert (summary.done, summary.failed, logged) == (False, (), {"slow": "killed at the time limit"})
    assert time.time() - start < 60
    summary, logged = run_calls(calls, seconds=-1.0)
    assert (summary.done, logged) == (False, {})


def test_sigterm_ends_all_jobs_at_once():
    ended = []
    calls = {"one": partial(time.sleep, 600), "two": partial(time.sleep, 600), "three": partial(bool, 1)}
    crew = make_workers(2, ["a"], math.inf)
    # as soon as both processes run
    timer = threading.Thread(target=lambda: (time.sleep(5), os.kill(os.getpid(), signal.SIGTERM)))
    start = time.time()
    timer.start()
    with pytest.raises(Terminated), _sigterm_raises():
        run_jobs(lambda: [(name,) for name in calls], lambda job: calls[job[0]], crew, math.inf, ended.append)
    timer.join()
    assert ended == []
    assert all(worker._process is None for worker in crew)
    assert time.time() - start < 60
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_call_with_a_deadline_runs_in_a_process_that_can_be_killed():
    assert isinstance(make_workers(1, (), math.inf)[0], InlineWorker)
    assert isinstance(make_workers(1, (), time.time() + 60)[0], ProcessWorker)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])
def test_each_process_sees_its_gpu_and_has_one_thread(name, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    crew = make_workers(3, (), math.inf)
    if name != "CUDA_VISIBLE_DEVICES":
        crew = make_workers(1, ["4"], math.inf) + make_workers(2, ["4"], math.inf)
    for worker in crew:
        worker.start(partial(os.getenv, name))
    try:
        seen = [worker.outcome().value for worker in crew]
    finally:
        for worker in crew:
            worker.kill()
    assert seen == (["4", "5", "4"] if name == "CUDA_VISIBLE_DEVICES" else [None, "1", "1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_a_process_is_reused_and_replaced_after_a_kill():
    worker = ProcessWorker({})
    seen = []
    try:
        for kill in (False, False, True):
            if kill:
                worker.kill()
            worker.start(os.getpid)
            seen.append(worker.outcome().value)
    finally:
        worker.kill()
    assert seen[0] == seen[1] != seen[2]
    assert os.getpid() not in seen
