"""Pieces in processes: each on its GPU; one that fails, dies or does not end in time leaves the others alone."""

import os
import time
from functools import partial

import pytest

from arena import processes
from arena.processes import Process, work_off, workers


def worked_off(calls, *, count=1, seconds=60.0):
    """Work off calls by name in processes, of which "a", say, stands for every GPU; returns how it ended and all said.

    A call is done once it was told so.
    """
    said = {}

    def ready():
        return [(name,) for name in calls if said.get(name) != "done"]

    def say(text):
        name, _, outcome = text.partition(": ")
        said[name] = outcome

    crew = workers(count, ["a"])
    ended = work_off(ready, lambda piece: calls[piece[0]], crew, time.time() + seconds, say)
    assert all(worker._process is None for worker in crew)
    return ended, said


def test_a_piece_that_fails_or_dies_is_told_and_the_others_go_on():
    calls = {"wrong": partial(int, "one"), "dead": partial(os._exit, 3), "right": partial(bool, 1)}
    ended, said = worked_off(calls)
    assert ended == (False, (("wrong",), ("dead",)))
    assert said == {
        "wrong": "failed, ValueError: invalid literal for int() with base 10: 'one'",
        "dead": "failed, its process ended with the exit code 3",
        "right": "done",
    }


def test_what_does_not_end_in_time_is_killed_and_what_ended_is_kept(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 1.0)
    calls = {"slow": partial(time.sleep, 600), "right": partial(bool, 1), "late": partial(bool, 1)}
    start = time.time()
    ended, said = worked_off({"slow": calls["slow"]}, seconds=0.1)
    assert (ended.done, ended.failed, said) == (False, (), {"slow": "killed, as time was up"})
    assert time.time() - start < 60
    ended, said = worked_off(calls, seconds=-1.0)
    assert (ended.done, said) == (False, {})


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])
def test_each_process_sees_its_gpu_and_has_one_thread(name, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    crew = workers(3, ()) if name == "CUDA_VISIBLE_DEVICES" else workers(1, ["4"]) + workers(2, ["4"])
    for worker in crew:
        worker.begin(partial(os.getenv, name))
    try:
        seen = [worker.outcome().value for worker in crew]
    finally:
        for worker in crew:
            worker.kill()
    assert seen == (["4", "5", "4"] if name == "CUDA_VISIBLE_DEVICES" else [None, "1", "1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_a_process_stays_for_the_next_call_and_is_replaced_when_it_was_killed():
    worker = Process({})
    seen = []
    try:
        for kill in (False, False, True):
            if kill:
                worker.kill()
            worker.begin(os.getpid)
            seen.append(worker.outcome().value)
    finally:
        worker.kill()
    assert seen[0] == seen[1] != seen[2]
    assert os.getpid() not in seen
