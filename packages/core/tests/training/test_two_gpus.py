"""Test several GPUs of one machine with NCCL, DDP and FSDP2; one GPU's curve is the reference."""

import os
from dataclasses import replace

import pytest
import torch
from runs import HYBRID, adaptation, curve, penalised_model, recipe, run
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
MODEL = {
    **HYBRID,
    "hidden_size": 128,
    "mixer_options": {
        "gated_delta_net": {"num_heads": 2, "head_dim": 64, "expand_v": 1.0},
        "attention": {"num_heads": 2},
    },
}


class _Check(TrainerCallback):
    """Writes values of the first step into the run's folder, one file per process."""

    def on_step_end(self, args, state, control, *, model, **_):
        kinds = {type(p).__name__ for p in model.parameters()}
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        assert torch.distributed.get_backend().find("nccl") >= 0
        with open(os.path.join(args.output_dir, f"rank{args.process_index}"), "w") as file:
            file.write(f"{sharded} {sorted(kinds)}")


def _check(recipe):
    return _Check()


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    """Return the curve of one GPU in a process of its own."""
    folder = tmp_path_factory.mktemp("single") / "run"
    return run(1, recipe(corpus, model=MODEL, micro_batch_tokens=64), folder)


def assert_close_curves(a, b):
    assert a.keys() == b.keys()
    for step in a:
        assert a[step] == pytest.approx(b[step], rel=2e-3), f"step {step}"


@pytest.mark.parametrize(("fsdp", "graph"), [(False, "never"), (False, "always"), (True, "never"), (True, "always")])
def test_two_gpus_follow_the_curve_of_one(fsdp, graph, single, corpus, tmp_path):
    made = recipe(corpus, model=MODEL, micro_batch_tokens=32, fsdp=fsdp, training_graph=graph, callbacks=(_check,))
    # a capture that fails is an error with "always"
    assert_close_curves(run(2, made, tmp_path / "run"), single)
    for rank in (0, 1):
        assert (tmp_path / "run" / f"rank{rank}").read_text().startswith(str(fsdp)), "sharding is not as asked for"
    # whole weights, which any process can load
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert all(p.isfinite().all() for p in model.parameters())
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")


def test_a_sharded_run_goes_on_from_its_checkpoint(single, corpus, tmp_path):
    made = recipe(corpus, model=MODEL, micro_batch_tokens=64, fsdp=True, callbacks=(_stop,))
    run(2, made, tmp_path / "run")
    assert max(curve(tmp_path / "run")) == 5
    resumed = run(2, replace(made, callbacks=()), tmp_path / "run", resume=True)
    assert_close_curves(resumed, single)


class _Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            control.should_training_stop = control.should_save = True


def _stop(recipe):
    return _Stop()


@pytest.mark.parametrize("fsdp", [False, True])
def test_head_weights_adapt_alike_on_two_gpus(fsdp, corpus, tmp_path):
    model = {**penalised_model(), "hidden_size": 128}
    made = recipe(corpus, model=model, callbacks=(adaptation,), micro_batch_tokens=64)
    alone = run(1, made, tmp_path / "alone")
    pair = run(2, replace(made, run=replace(made.run, fsdp=fsdp)), tmp_path / "pair")
    assert_close_curves(pair, alone)


def test_bf16_with_a_compiled_model_runs_sharded(corpus, tmp_path):
    made = recipe(corpus, model=MODEL, micro_batch_tokens=64, fsdp=True, precision="bf16", torch_compile=True)
    losses = run(2, made, tmp_path / "run")
    assert losses[8][0] < losses[1][0]
