"""The arena's store: one sorted line per run, concurrent writers, and kills."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from arena.store import COSTS, RUNS, Key, add, load


def result_of(key, **more):
    fields = {"division": key.division, "contestant": key.contestant}
    fields |= {"length": key.value} if key.seed is None else {"task": key.task, "rate": key.value, "seed": key.seed}
    return {**fields, "rule": "r", **more}


def test_lines_are_sorted_by_run_and_one_more_result_adds_one_line(tmp_path):
    keys = [
        Key("parameters", "gdn", COSTS, 1024, None),
        Key("parameters", "gdn", COSTS, 16384, None),
        Key("parameters", "gdn", "mqar", 5e-4, 2),
        Key("parameters", "gdn", "mqar", 2e-3, 1),
        Key("parameters", "gdn", "mqar", 2e-3, 10),
        Key("state", "gdn", "mqar", 5e-4, 1),
    ]
    for key in keys[1:][::-1]:
        add(tmp_path, result_of(key, modes="a → b", number=0.1 + 0.2))
    before = (tmp_path / RUNS).read_text(encoding="utf-8").splitlines()
    add(tmp_path, result_of(keys[0]))
    after = (tmp_path / RUNS).read_text(encoding="utf-8").splitlines()
    assert [Key.of(json.loads(line)) for line in after] == keys
    assert after[1:] == before
    add(tmp_path, result_of(keys[0], again=True))
    assert list(load(tmp_path)) == keys
    assert load(tmp_path)[keys[0]].result["again"]
    assert load(tmp_path)[keys[1]].result == result_of(keys[1], modes="a → b", number=0.1 + 0.2)


def _add_some(folder, contestant):
    for seed in range(8):
        add(folder, result_of(Key("parameters", contestant, "mqar", 1e-3, seed)))


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_some, args=(tmp_path, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(load(tmp_path)) == 32


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_writer_that_is_killed_leaves_the_old_results_and_no_lock(tmp_path, step):
    old, new = (Key("parameters", "gdn", "mqar", 1e-3, seed) for seed in (1, 2))
    add(tmp_path, result_of(old))

    def write_and_die():
        owner = os if step == "fsync" else Path
        setattr(owner, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        add(tmp_path, result_of(new))

    writer = multiprocessing.get_context("fork").Process(target=write_and_die)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert list(load(tmp_path)) == [old]
    add(tmp_path, result_of(new))
    assert list(load(tmp_path)) == [old, new]


def test_two_lines_of_one_run_are_refused_with_both_lines(tmp_path):
    key = Key("parameters", "gdn", "mqar", 1e-3, 1)
    add(tmp_path, result_of(key))
    path = tmp_path / RUNS
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match=r"runs\.jsonl:2 and .*runs\.jsonl:1 hold the same run"):
        load(tmp_path)
