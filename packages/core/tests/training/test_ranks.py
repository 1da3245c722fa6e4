"""Test ranks that differ or fail: every rank ends in time, and each one's last line is the first cause."""

import os
import re
import signal

import pytest
import torch
from runs import Processes, fail_on_rank_1, limit_files, look_at_folders, recipe, slow_steps, train_by_command

from support.corpora import token_file

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


def run(recipes, output_dirs, said, *flags, meanwhile=lambda ranks: None):
    """Return the exit codes and last lines of two ranks."""
    said.mkdir(exist_ok=True)
    ranks = Processes(2, train_by_command, recipes, output_dirs, said, *flags)
    meanwhile(ranks)
    for child in ranks.children:
        child.join(120)
    codes = [child.exitcode for child in ranks.children]
    for child in ranks.children:
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
    texts = [(said / f"rank{rank}").read_text() for rank in (0, 1)]
    assert not any("Traceback" in text for text in texts), texts
    return codes, [text.rstrip().rpartition("\n")[2] for text in texts]


DIFFERENT = {
    "learning_rate": 2e-2,
    "micro_batch_tokens": 32,
    "logging_steps": 2,
    "save_steps": 2,
    "total_tokens": 512,
    "batch_tokens": 256,
}


@pytest.mark.parametrize("field", [*DIFFERENT, "corpora", "the output folder"])
def test_ranks_that_differ_are_refused_on_all_of_them(field, corpus, tmp_path):
    made = recipe(corpus, micro_batch_tokens=64)
    other, folders = made, [tmp_path / "run"]
    if field == "corpora":
        (tmp_path / "other").mkdir()
        other = recipe(token_file(tmp_path / "other", [f"text {i}" * 99 for i in range(40)]), micro_batch_tokens=64)
    elif field == "the output folder":
        folders.append(tmp_path / "another")
    else:
        other = recipe(corpus, **{"micro_batch_tokens": 64, field: DIFFERENT[field]})
    codes, last = run([made, other], folders, tmp_path / "said")
    assert codes == [2, 2]
    for line in last:
        assert line.startswith(f"tokenmix train: error: the ranks do not run the same training: {field} is ")
        assert "on rank 1" in line
    assert not list(tmp_path.glob("*/checkpoint-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_by_the_others(rank, corpus, tmp_path):
    made = recipe(corpus, micro_batch_tokens=64, total_tokens=10**6, callbacks=(slow_steps,), rank_timeout=10)

    def kill(ranks):
        ranks.wait_for((tmp_path / "run" / "checkpoint-3").exists)
        os.kill(ranks.children[rank].pid, signal.SIGKILL)

    codes, last = run([made], [tmp_path / "run"], tmp_path / "said", meanwhile=kill)
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 2
    names = ("which connects the ranks, ended without a message", "rank 1 ended without a message")
    assert names[rank] in last[1 - rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_within_the_time_out(rank, corpus, tmp_path):
    made = recipe(corpus, micro_batch_tokens=64, total_tokens=10**6, callbacks=(slow_steps,), rank_timeout=4)

    def stop(ranks):
        ranks.wait_for((tmp_path / "run" / "checkpoint-3").exists)
        os.kill(ranks.children[rank].pid, signal.SIGSTOP)
        ranks.children[1 - rank].join(12)
        os.kill(ranks.children[rank].pid, signal.SIGKILL)

    codes, last = run([made], [tmp_path / "run"], tmp_path / "said", meanwhile=stop)
    assert codes[1 - rank] == 2
    # rank 0 holds the store, so its silence and its missing beat are noticed at the same time
    told = (
        r"rank 0 (at .*, which connects the ranks, has not answered|sent no sign of life) for 4 s",
        "rank 1 sent no sign",
    )
    assert re.search(told[rank], last[1 - rank])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_at_a_checkpoint_of_rank_0_is_told_by_all(sharded, corpus, tmp_path):
    changes = {"rank_timeout": 20, "sharded_checkpoint": sharded}
    made = recipe(corpus, micro_batch_tokens=64, callbacks=(limit_files,), **changes)
    codes, last = run([made], [tmp_path / "run"], tmp_path / "said")
    assert codes == [2, 2]
    assert "error: the checkpoint of step 3 could not be written into" in last[0]
    # a sharded checkpoint is written by all ranks, which learn of the failure together
    assert (" are free: rank 0: " if sharded else "error: rank 0 on ") in last[1]
    assert "the checkpoint of step 3 could not be written into" in last[1]


def test_an_error_of_one_rank_is_the_last_line_of_all(corpus, tmp_path):
    made = recipe(corpus, micro_batch_tokens=64, callbacks=(fail_on_rank_1,), rank_timeout=20)
    codes, last = run([made], [tmp_path / "run"], tmp_path / "said")
    assert codes == [2, 2]
    assert last[1] == "tokenmix train: error: no luck"
    assert last[0].endswith(": no luck")
    assert "error: rank 1 on " in last[0]


def test_nodes_without_a_shared_folder_are_told_before_training(tmp_path):
    # the folder of rank 1 stands for the same path on a node with a file system of its own
    said = tmp_path / "said"
    said.mkdir()
    assert Processes(2, look_at_folders, [tmp_path / "run", tmp_path / "other"], said).join() == [0, 0]
    for rank in ("0", "1"):
        assert "does not see what rank 0 on " in (said / rank).read_text()
    (said / "0").unlink()
    assert Processes(2, look_at_folders, [tmp_path / "run"] * 2, said).join() == [0, 0]
    assert not (said / "0").exists()
    assert not list((tmp_path / "run").iterdir())


def test_ranks_draw_their_own_noise_whatever_was_drawn_before():
    from types import SimpleNamespace

    from tokenmix_core.training.engine import RecipeTrainer

    def noise(rank, step):
        torch.rand(rank + step)
        trainer = SimpleNamespace(
            _seeded=None,
            state=SimpleNamespace(global_step=step),
            args=SimpleNamespace(seed=0, process_index=rank),
        )
        RecipeTrainer._seed_step(trainer)
        return torch.rand(1).item()

    drawn = [noise(rank, step) for rank in (0, 1, 2) for step in (0, 1, 2)]
    assert len(set(drawn)) == 9
    assert noise(1, 2) == drawn[5]
