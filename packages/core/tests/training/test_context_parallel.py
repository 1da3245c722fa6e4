"""Runs whose rows are split over processes: the curve of one process, and any number of processes resumes them."""

import pytest
import torch
from runs import check_sharded, curve, recipe, run, stop_at_5

from tokenmix_core.training.context_parallel import check_context_parallel
from tokenmix_core.training.trainer import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


def test_a_split_run_has_the_curve_of_one_process_and_is_resumed_by_one(corpus, tmp_path):
    train(recipe(corpus, documents="separate"), tmp_path / "single", progress=False)
    out = tmp_path / "run"
    split = {"context_parallel": 2, "fsdp": True, "callbacks": (check_sharded, stop_at_5)}
    run(2, recipe(corpus, documents="separate", **split), out)
    assert max(curve(out)) == 5
    train(recipe(corpus, documents="separate"), out, resume=True, progress=False)
    got = curve(out)
    for step, values in curve(tmp_path / "single").items():
        assert got[step] == pytest.approx(values, rel=2e-5), f"step {step}"


@pytest.mark.slow
def test_groups_of_ranks_take_different_rows(corpus, tmp_path):
    train(recipe(corpus), tmp_path / "single", progress=False)
    run(4, recipe(corpus, context_parallel=2, micro_batch_tokens=64), tmp_path / "run")
    got = curve(tmp_path / "run")
    for step, values in curve(tmp_path / "single").items():
        assert got[step] == pytest.approx(values, rel=2e-5), f"step {step}"


@pytest.mark.parametrize(("size", "world", "tokens"), [(2, 3, 32), (4, 4, 36)])
def test_sizes_that_do_not_divide_are_refused(size, world, tokens):
    with pytest.raises(ValueError, match=f"context_parallel={size} needs"):
        check_context_parallel(size, world, tokens)
