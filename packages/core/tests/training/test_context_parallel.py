"""Test runs whose rows are split over processes: they have one process's curve, and any process count resumes them."""

import pytest
import torch
from runs import check_sharded, curve, perturb, recipe, run, stop_at_5

from tokenmix_core.training.context_parallel import check_context_parallel
from tokenmix_core.training.recipe import Tokens
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


FIFTY = {"total_tokens": Tokens(50 * 128), "warmup_tokens": Tokens(10 * 128), "save_steps": 1000}
# the spacing of float32 at losses of 4 to 8 nats
SPACING = 2**-21


def deviation(a, b):
    """Return the largest difference between the losses of two curves at the same step."""
    assert len(a) == len(b) == 50
    return max(abs(a[step][0] - b[step][0]) for step in a)


@pytest.fixture(scope="module")
def fifty_steps(corpus, tmp_path_factory):
    """Return the curve of one process, and how far it moves if initial weights are rounded differently."""
    out = tmp_path_factory.mktemp("fifty")
    train(recipe(corpus, **FIFTY), out / "single", progress=False)
    train(recipe(corpus, **FIFTY, callbacks=(perturb,)), out / "perturbed", progress=False)
    single = curve(out / "single")
    return single, max(SPACING, deviation(curve(out / "perturbed"), single))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"context_parallel": 2}),
        pytest.param(4, {"context_parallel": 2, "fsdp": True, "micro_batch_tokens": 64}, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "2 x 2 ranks, FSDP2"],
)
def test_fifty_steps_deviate_from_one_process_as_rounding_does(corpus, tmp_path, fifty_steps, ranks, changes):
    single, rounding = fifty_steps
    split = run(ranks, recipe(corpus, **FIFTY, **changes), tmp_path / "run")
    assert deviation(split, single) <= 8 * rounding, f"rounding moves the curve by {rounding:.1e}"


@pytest.mark.parametrize(("size", "world", "tokens"), [(2, 3, 32), (4, 4, 36)])
def test_sizes_that_do_not_divide_are_refused(size, world, tokens):
    with pytest.raises(ValueError, match=f"context_parallel={size} needs"):
        check_context_parallel(size, world, tokens)
